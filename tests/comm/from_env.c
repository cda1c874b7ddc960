/* For test_run.py: joins the group of the environment, says what it got, and does what its argument says. */
#include <muster/muster.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "once";
    mu_context *c = mu_context_open(&(mu_context_options){.log_level = MU_LOG_QUIET});
    mu_group *g = mu_group_from_env_with(c, &(mu_group_options){.arena_bytes = 4 << 20});
    if (g == NULL) {
        fprintf(stderr, "%s: %s\n", mu_status_name(mu_context_status(c)), mu_context_message(c));
        mu_context_close(c);
        return 3;
    }
    float x = (float)(mu_group_rank(g) + 1);
    MU_OR_DIE(c, mu_all_reduce(g, &x, 1, MU_F32, MU_SUM));
    printf("%s %d of %d sum %g context %d of %d\n", mu_group_kind(g), mu_group_rank(g), mu_group_size(g), (double)x,
           mu_context_rank(c), mu_context_size(c));
    fflush(stdout);
    if (strcmp(what, "twice") == 0) {
        mu_group *h = mu_group_from_env(c);
        MU_OR_DIE(c, mu_barrier(h));
    }
    if (strcmp(what, "die") == 0 && mu_group_rank(g) == 1) {
        abort();
    }
    if (strcmp(what, "leave") == 0 && mu_group_rank(g) == 1) {
        return mu_context_close(c) == MU_OK ? 0 : 1;
    }
    if (strcmp(what, "for-ever") == 0) {
        while (mu_barrier(g) == MU_OK) {
        }
    }
    MU_OR_DIE(c, mu_barrier(g));
    return mu_context_close(c) == MU_OK ? 0 : 1;
}
