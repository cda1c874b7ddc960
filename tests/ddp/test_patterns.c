/* Training patterns: each a small program on 1 to 4 ranks as threads and on 2 and 3 as processes, with a bucket for
 * each parameter and one bucket for all, against one process that differentiates the mean of the ranks' losses. Prints
 * the table; with --markdown only the table as it is in docs/patterns.md. An argument k/n runs every n-th row from the
 * k-th on, any other argument the rows with that text in their name. Under mpirun: on that many ranks, over MPI; with
 * more than two, each program with one of the two bucket sizes in turn. */
#define _GNU_SOURCE /* RTLD_DEFAULT */
#include "patterns.h"

#include "comm/mpi_ranks.h"

#include "base/os.h"

/* Rows of the table of PyTorch's outcomes, and the patterns in them: one row may name several. */
enum { TABLE_ROWS = 54, TABLE_PATTERNS = 86, MOST_ROWS = 200 };

/* Each process of a sanitized program copies its shadow memory; what processes do in their own way is in tests of comm. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define ONLY_THREADS 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define ONLY_THREADS 1
#endif
#endif
#ifndef ONLY_THREADS
#define ONLY_THREADS 0
#endif

static const row *table[MOST_ROWS];
static char number[MOST_ROWS][16];
static size_t count;
static size_t part, parts = 1;
static const char *only;

/* By row of PyTorch's table, Muster's own last; 7a, 7b where one row names several patterns. */
static void gather(void)
{
    static const rows *const all[] = {&graph_rows, &change_rows, &step_rows, &model_rows, &segment_rows};
    int own = 0;
    for (int line = 1; line <= TABLE_ROWS + 1; line++) {
        size_t first = count;
        for (size_t f = 0; f < sizeof(all) / sizeof(all[0]); f++) {
            for (size_t i = 0; i < all[f]->count; i++) {
                const row *r = &all[f]->row[i];
                if (r->line == line || (line > TABLE_ROWS && r->line == 0)) {
                    table[count++] = r;
                }
            }
        }
        for (size_t i = first; i < count; i++) {
            if (line > TABLE_ROWS) {
                snprintf(number[i], sizeof(number[i]), "+%d", ++own);
            } else {
                snprintf(number[i], sizeof(number[i]), count - first > 1 ? "%d%c" : "%d", line, 'a' + (int)(i - first));
            }
        }
    }
}

/* -- one row ------------------------------------------------------------------------------------------------------ */
typedef struct job {
    const row *row;
    size_t bucket;
    bool net;
} job;

static void open_side(world *w, side *s)
{
    const row *r = w->row;
    /* Ranks start from different values: wrapping has to make them rank 0's. Later modules are alike. */
    s->c->seed = s->oracle ? DEFAULT_SEED : (uint64_t)(DEFAULT_SEED + 100 * w->rank);
    s->rank = w->rank;
    s->size = w->size;
    s->t = mu_tape_new(s->c, &(mu_tape_options){.retain_graph = r->retain});
    void (*build)(side *) = r->build != NULL ? r->build : w->net ? build_heads : build_toy;
    if (!r->unwrapped) {
        build(s);
    }
    for (int i = 0; i < MODELS && s->m[i] != NULL; i++) {
        CHECK(r->frozen == NULL || mu_module_freeze(s->m[i], r->frozen, NULL) == MU_OK, "freeze");
        CHECK(mui_store_of(s->m[i]) != NULL, "%s: build: %s", r->name, mu_context_message(s->c));
        if (!s->oracle) {
            w->d[i] = wrap(w, s->m[i]);
            CHECK(w->d[i] != NULL, "%s: wrap: %s", r->name, mu_context_message(s->c));
        }
        if (s->o[i] == NULL) {
            s->o[i] = mu_sgd(s->m[i], 0.1F, &(mu_sgd_options){.momentum = 0.5F, .weight_decay = r->decay});
        }
    }
    s->c->seed = DEFAULT_SEED;
}

static void run_rank(mu_group *g, int rank, int size, void *arg)
{
    const job *j = arg;
    world w = {.row = j->row, .net = j->net, .g = g, .rank = rank, .size = size, .bucket = j->bucket};
    w.began = mui_now();
    w.me.c = g->context;
    w.one = (side){.c = quiet_context(), .oracle = true};
    open_side(&w, &w.me);
    open_side(&w, &w.one);
    if (mu_context_status(g->context) == MU_OK) {
        begin_step(&w, 0);
        (j->row->run != NULL ? j->row->run : run_losses)(&w);
    }
    CHECK(mu_context_close(w.one.c) == MU_OK, "%s: oracle's context", j->row->name);
}

/* Runs that went wrong. */
static int run_row(const row *r, int *runs)
{
    static int pairs;
    static const mu_group_options patient = {.timeout_seconds = 60, .arena_bytes = 1 << 22};
    int bad = 0, least = r->error != NULL ? 2 : r->least_ranks;
    for (int net = r->loss == NULL && r->net != NULL; net < (r->net != NULL ? 2 : 1); net++) {
        for (int large = 0; large < 2; large++) {
            job j = {r, large ? (size_t)1 << 20 : 1, net};
            if (mpi_world() > 2 && large != pairs++ % 2) {
                continue; /* with more ranks than CI has cores each row is run once: one of the two is enough */
            }
            if (mpi_world() > 0) {
                bad += mpi_world() >= least && run_mpi(mpi_world(), run_rank, &j, &patient, true) > 0;
                ++*runs;
                continue;
            }
            for (int size = least > 1 ? least : 1; size <= 4; size++, ++*runs) {
                bad += run_threads(size, run_rank, &j, &patient, true) > 0;
            }
            for (int size = 2; size <= 3 && !ONLY_THREADS; size++, ++*runs) {
                bad += size >= least && run_processes(size, run_rank, &j, &patient, true) > 0;
            }
        }
    }
    return bad;
}

/* -- the table ---------------------------------------------------------------------------------------------------- */
static const char *cell(const char *s)
{
    return s != NULL ? s : "-";
}

static void muster_of(const row *r, char *out, size_t size)
{
    if (r->none != NULL) {
        snprintf(out, size, "n/a: %s", r->none);
    } else if (r->error != NULL) {
        snprintf(out, size, "error on all ranks: %s%s%s", r->error, r->note != NULL ? "; " : "", cell(r->note));
        out[strlen(out) - (r->note == NULL)] = '\0';
    } else {
        snprintf(out, size, "right%s%s", r->note != NULL ? "; " : "", r->note != NULL ? r->note : "");
    }
}

/* How docs/patterns.md is made. */
static void print_markdown(void)
{
    printf(
        "# Training patterns\n\n"
        "Training programs in which not every parameter gets a gradient on every rank in every step, or in which ranks "
        "do not\ndo the same: what becomes of them in PyTorch, and in Muster.\n\n"
        "PyTorch's outcomes were measured with the DistributedDataParallel of PyTorch 1.13 (two processes, gloo): by "
        "default, with\n`find_unused_parameters`, with `static_graph`. SILENT: no error, no warning, wrong numbers. "
        "Rows with a + were not measured by\nthemselves: what is said there follows from the others.\n\n"
        "Muster has no such options. Its outcome is what `tests/ddp/test_patterns.c` holds it to, on 1 to 4 ranks, as "
        "threads and as\nprocesses, with a bucket for each parameter and with one for all. Right: gradients and values "
        "of one process that has all\nranks' data, bit for bit the same on all ranks. Error on all ranks: within "
        "seconds, with that text, and both sides named.\n\n"
        "Printed by `test_patterns --markdown`, not written by hand.\n\n"
        "| no. | pattern | default | find_unused | static_graph | Muster |\n|---|---|---|---|---|---|\n");
    for (size_t i = 0; i < count; i++) {
        char muster[300];
        muster_of(table[i], muster, sizeof(muster));
        printf("| %s | %s | %s | %s | %s | %s |\n", number[i], table[i]->name, cell(table[i]->plain),
               cell(table[i]->unused), cell(table[i]->fixed), muster);
    }
}

static void every_pattern_is_right_or_a_named_error(void **state)
{
    (void)state;
    size_t right = 0, named = 0, none = 0, wrong = 0, tried = 0;
    printf("%-5s %-62s %-26s %-26s %-18s %s\n", "no.", "pattern", "PyTorch's DDP: default", "find_unused",
           "static_graph", "Muster");
    for (size_t i = 0; i < count; i++) {
        const row *r = table[i];
        if (only != NULL ? strstr(r->name, only) == NULL : i % parts != part) {
            continue;
        }
        int runs = 0, bad = r->none == NULL ? run_row(r, &runs) : 0;
        char muster[300];
        muster_of(r, muster, sizeof(muster));
        if (bad > 0) {
            snprintf(muster, sizeof(muster), "WRONG in %d of %d runs", bad, runs);
        }
        printf("%-5s %-62s %-26s %-26s %-18s %s\n", number[i], r->name, cell(r->plain), cell(r->unused), cell(r->fixed),
               muster);
        fflush(stdout);
        tried++;
        wrong += bad > 0;
        none += bad == 0 && r->none != NULL;
        named += bad == 0 && r->none == NULL && r->error != NULL;
        right += bad == 0 && r->none == NULL && r->error == NULL;
    }
    printf("%zu rows: %zu right, %zu named errors, %zu without a meaning in Muster, %zu WRONG\n", tried, right, named,
           none, wrong);
    assert_int_equal(wrong, 0);
    assert_true(tried > 0);
}

/* No row of PyTorch's table is left out. */
static void every_row_of_the_table_is_there(void **state)
{
    (void)state;
    int patterns = 0;
    for (int line = 1; line <= TABLE_ROWS; line++) {
        int found = 0;
        for (size_t i = 0; i < count; i++) {
            found += table[i]->line == line;
            assert_true(table[i]->line <= TABLE_ROWS);
        }
        if (found == 0) {
            fail_msg("row %d of PyTorch's table is missing", line);
        }
        patterns += found;
    }
    assert_int_equal(patterns, TABLE_PATTERNS);
}

/* TABLE_ROWS is what the measured table has, where that is at hand. */
static void the_table_has_as_many_rows(void **state)
{
    (void)state;
    const char *shared = getenv("MUSTER_SHARED");
    char path[512], text[4096];
    snprintf(path, sizeof(path), "%s/ddp-patterns.md", shared != NULL ? shared : ".");
    FILE *f = fopen(path, "r");
    if (f == NULL) {
        print_message("%s is not there\n", path);
        skip();
    }
    int lines = 0;
    for (bool here = false; fgets(text, sizeof(text), f) != NULL;) {
        here = strncmp(text, "## ", 3) == 0 ? strncmp(text, "## 16.", 6) == 0 : here;
        lines += here && text[0] == '|';
    }
    fclose(f);
    assert_int_equal(lines, TABLE_ROWS + 2);
}

int main(int argc, char **argv)
{
    gather();
    if (argc > 1 && strcmp(argv[1], "--markdown") == 0) {
        print_markdown();
        return 0;
    }
    if (argc > 1 && sscanf(argv[1], "%zu/%zu", &part, &parts) != 2) {
        only = argv[1];
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_pattern_is_right_or_a_named_error),
        cmocka_unit_test(every_row_of_the_table_is_there),
        cmocka_unit_test(the_table_has_as_many_rows),
    };
    int bad = cmocka_run_group_tests(tests, NULL, NULL);
    mpi_end();
    return bad;
}
