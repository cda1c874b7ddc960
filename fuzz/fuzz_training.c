/* Training files: whatever is in one, loading it leaves an error or a model and an optimiser that go on. Checksums are
 * not verified: a search would hardly get past them. */
#include "base/context.h"
#include "fuzz_target.h"

#include <muster/muster.h>
#include <unistd.h>

/* As make_checkpoint_seeds.py's training files have it. */
static mu_module *network(mu_context *c)
{
    mu_module *m = mu_sequential(c);
    mu_status s = mu_sequential_append(m, mu_linear(c, 3, 4, NULL));
    s = s == MU_OK ? mu_sequential_append(m, mu_batch_norm_layer(c, 4, NULL)) : s;
    s = s == MU_OK ? mu_sequential_append(m, mu_linear(c, 4, 2, NULL)) : s;
    if (s != MU_OK) {
        fuzz_broken("no model");
    }
    return m;
}

static void load(const char *path, bool adam, bool settings)
{
    static const mu_checkpoint_options file = {.no_checksum = true};
    mu_context *c = fuzz_context();
    mu_training t = {.model = network(c)};
    t.optimizer = adam ? mu_adam(t.model, 0.1f, NULL) : mu_sgd(t.model, 0.1f, NULL);
    mu_status s = mu_optimizer_add_group(t.optimizer, &(mu_param_group){.pattern = "2.*"});
    if (s == MU_OK) {
        s = mu_training_load_with(&t, path, &(mu_training_options){.model = {.not_strict = true, .file = &file},
                                                            .file_settings = settings},
                                  NULL);
    }
    if (s != MU_OK && mu_context_status(c) == MU_OK) {
        fuzz_broken("a failure without an error");
    }
    mu_context_clear(c);
    s = mu_optimizer_load(t.optimizer, path, &(mu_optimizer_load_options){.file_settings = settings, .file = &file});
    if (s != MU_OK && mu_context_status(c) == MU_OK) {
        fuzz_broken("a failure without an error");
    }
    mu_context_clear(c);
    if (mu_module_zero_grad(t.model) != MU_OK || mu_optimizer_step(t.optimizer) != MU_OK) {
        fuzz_broken("the optimiser does not go on");
    }
    mu_context_close(c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    char path[64];
    int fd = fuzz_file(data, bytes, path);
    load(path, false, bytes % 2 == 0);
    load(path, true, bytes % 2 == 0);
    close(fd);
    return 0;
}
