/* Opening checkpoints for the commands that look into them. */
#include "look.h"
#include "checkpoint_flags.h"
#include "commands.h"

#include <stdlib.h>
#include <string.h>

/* Errors are printed once at the end; warnings at once, and kept for JSON. */
static void on_log(void *user, mu_log_level level, const char *message)
{
    look *l = user;
    if (level != MU_LOG_WARN) {
        return;
    }
    fprintf(stderr, "muster %s: warning: %s\n", l->command, message);
    if (l->warning_count < LOOK_WARNINGS) {
        l->warnings[l->warning_count] = strdup(message);
        l->warning_count += l->warnings[l->warning_count] != NULL;
    }
}

int look_begin(look *l, const char *command, look_reading *reading)
{
    *l = (look){.command = command};
    for (int i = 0; i < reading->limits.count; i++) {
        const char *problem = checkpoint_limit_set(&reading->options, reading->limits.item[i]);
        if (problem != NULL) {
            return cli_usage_error(command, "--limit %s: %s", reading->limits.item[i], problem);
        }
    }
    l->context = mu_context_open(&(mu_context_options){.log = on_log, .log_user = l});
    return l->context != NULL ? -1 : cli_fail(command, CLI_FAILED, "out of memory");
}

mu_checkpoint_file *look_open(look *l, const char *path, const look_reading *reading)
{
    mu_checkpoint_file *k = mu_checkpoint_open_with(l->context, path, &reading->options);
    l->no_file |= k == NULL && mu_context_status(l->context) == MU_ERR_IO;
    return k;
}

int look_end(look *l, int code)
{
    mu_status s = mu_context_status(l->context);
    fflush(stdout);
    if (s != MU_OK) {
        code = l->no_file || s == MU_ERR_ARG ? CLI_USAGE : CLI_FAILED;
        cli_fail(l->command, code, "%s", mu_context_message(l->context));
    } else if (ferror(stdout)) {
        code = cli_fail(l->command, CLI_FAILED, "cannot write the output");
    }
    mu_context_close(l->context);
    for (int i = 0; i < l->warning_count; i++) {
        free((char *)l->warnings[i]);
    }
    return code;
}

uint64_t look_elements(const mu_checkpoint_entry *e)
{
    uint64_t n = 1;
    for (int i = 0; i < e->dims.ndim; i++) {
        if (__builtin_mul_overflow(n, (uint64_t)e->dims.dim[i], &n)) {
            n = UINT64_MAX;
        }
    }
    return n;
}

uint64_t look_bytes(const mu_checkpoint_entry *e)
{
    uint64_t n = look_elements(e);
    return __builtin_mul_overflow(n, (uint64_t)mu_dtype_bytes(e->dtype), &n) ? UINT64_MAX : n;
}

bool look_readable(const look *l, mu_checkpoint_file *k, int64_t i, bool *readable)
{
    mu_checkpoint_entry e = mu_checkpoint_get(k, i);
    *readable = mu_checkpoint_read(k, i, NULL, (size_t)look_bytes(&e)) == MU_OK;
    if (!*readable && e.note != NULL) {
        mu_context_clear(l->context);
        return true;
    }
    return *readable;
}

void *look_room(const look *l, const mu_checkpoint_entry *e, uint64_t bytes)
{
    void *room = bytes < SIZE_MAX ? malloc(bytes > 0 ? (size_t)bytes : 1) : NULL;
    if (room == NULL) {
        cli_fail(l->command, CLI_FAILED, "out of memory: '%s' has %llu bytes", e->name, (unsigned long long)bytes);
    }
    return room;
}

size_t look_prefix(const char *name)
{
    static const char *const tokens[] = {"module.", "_orig_mod.", "model.", "net."};
    size_t n = 0;
    for (bool more = true; more;) {
        more = false;
        for (size_t i = 0; i < sizeof(tokens) / sizeof(tokens[0]) && !more; i++) {
            more = strncmp(name + n, tokens[i], strlen(tokens[i])) == 0;
            n += more ? strlen(tokens[i]) : 0;
        }
    }
    return n;
}

size_t look_common_prefix(const mu_checkpoint_file *k, const mu_state_dict *d)
{
    const char *first = d->count > 0 ? mu_checkpoint_name_in(k, d, d->first) : "";
    size_t n = look_prefix(first);
    for (int64_t i = d->first + 1; i < d->first + d->count && n > 0; i++) {
        const char *name = mu_checkpoint_name_in(k, d, i);
        while (n > 0 && strncmp(name, first, n) != 0) {
            for (n--; n > 0 && first[n - 1] != '.'; n--) {
            }
        }
    }
    return n;
}
