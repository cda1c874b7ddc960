/* The report: structs, text and JSON say the same; what is told of absent parameters, and what is not. */
#include "rig.h"

#include <jansson.h>

static void nap(double seconds)
{
    struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&t, NULL);
}

static json_t *parse(mu_ddp *d)
{
    size_t n = mu_ddp_report_json(d, NULL, 0);
    char *text = malloc(n + 1), small[8];
    CHECK(n > 100 && mu_ddp_report_json(d, text, n + 1) == n && strlen(text) == n, "%zu", n);
    CHECK(mu_ddp_report_json(d, small, sizeof(small)) == n && strlen(small) == 7, "cut off");
    json_error_t e;
    json_t *j = json_loads(text, JSON_REJECT_DUPLICATES, &e);
    CHECK(j != NULL, "%s at %d in %s", e.text, e.position, text);
    free(text);
    return j;
}

static bool says(const json_t *j, const char *key, const char *text)
{
    const json_t *x = json_object_get(j, key);
    return text == NULL ? json_is_null(x) : json_is_string(x) && strcmp(json_string_value(x), text) == 0;
}
static bool counts(const json_t *j, const char *key, uint64_t n)
{
    const json_t *x = json_object_get(j, key);
    return json_is_integer(x) && (uint64_t)json_integer_value(x) == n;
}
static bool near(const json_t *j, const char *key, double want)
{
    const json_t *x = json_object_get(j, key);
    return json_is_real(x) && fabs(json_real_value(x) - (want > 0 ? want : 0)) < 2e-9;
}
static bool lists(const json_t *j, const char *key, uint64_t mask)
{
    const json_t *x = json_object_get(j, key);
    uint64_t found = 0;
    for (size_t i = 0; i < json_array_size(x); i++) {
        found |= (uint64_t)1 << json_integer_value(json_array_get(x, i));
    }
    return json_is_array(x) && found == mask;
}

static void compare_times(const json_t *j, const mu_ddp_times *t)
{
    CHECK(near(j, "forward", t->forward) && near(j, "backward", t->backward) &&
              near(j, "communication", t->communication) && near(j, "overlapped", t->overlapped) &&
              near(j, "exposed", t->exposed),
          "times");
}

/* Everything that JSON says is what the structs say. */
static void compare(mu_ddp *d)
{
    mu_ddp_report r = mu_ddp_get_report(d);
    json_t *j = parse(d);
    CHECK(says(j, "ddp", r.name) && says(j, "group", r.group) && says(j, "skip_reason", r.skip_reason), "texts");
    CHECK(counts(j, "rank", (uint64_t)r.rank) && counts(j, "ranks", (uint64_t)r.ranks) &&
              counts(j, "reductions", r.reductions) && counts(j, "skipped", r.skipped) &&
              counts(j, "trainable", (uint64_t)r.parameters) && counts(j, "frozen", (uint64_t)r.frozen) &&
              counts(j, "bytes", (uint64_t)r.bytes) && counts(j, "buckets_early", (uint64_t)r.buckets_early) &&
              counts(j, "last_rank", (uint64_t)r.last_rank) && near(j, "overlap", r.overlap) &&
              near(j, "last_rank_seconds", r.last_rank_seconds) &&
              json_is_true(json_object_get(j, "rebuilt")) == r.rebuilt,
          "numbers");
    compare_times(json_object_get(j, "last"), &r.last);
    compare_times(json_object_get(j, "average"), &r.average);
    int64_t n = 0, bytes = 0, parameters = 0;
    const mu_ddp_bucket *b = mu_ddp_report_buckets(d, &n);
    const json_t *list = json_object_get(j, "buckets");
    CHECK(n == r.buckets && json_array_size(list) == (size_t)n, "%lld buckets", (long long)n);
    for (int64_t i = 0; i < n; i++) {
        const json_t *x = json_array_get(list, (size_t)i);
        CHECK(counts(x, "bytes", (uint64_t)b[i].bytes) && counts(x, "parameters", (uint64_t)b[i].parameters) &&
                  near(x, "ready", b[i].ready) && near(x, "launched", b[i].launched) && near(x, "reduced", b[i].reduced),
              "bucket %lld", (long long)i);
        bytes += b[i].bytes;
        parameters += b[i].parameters;
        CHECK(b[i].ready <= b[i].launched && b[i].launched <= b[i].reduced, "bucket %lld: order", (long long)i);
    }
    CHECK(bytes == r.bytes && parameters == r.parameters, "sums");
    const mu_ddp_parameter *p = mu_ddp_report_parameters(d, &n);
    list = json_object_get(j, "parameters");
    CHECK(n == r.parameters + r.frozen && json_array_size(list) == (size_t)n, "%lld parameters", (long long)n);
    for (int64_t i = 0; i < n; i++) {
        const json_t *x = json_array_get(list, (size_t)i);
        CHECK(says(x, "name", p[i].name) && json_integer_value(json_object_get(x, "index")) == p[i].index &&
                  json_integer_value(json_object_get(x, "ready")) == p[i].ready &&
                  json_integer_value(json_object_get(x, "bucket")) == p[i].bucket &&
                  counts(x, "bytes", (uint64_t)p[i].bytes) && counts(x, "reductions", p[i].reductions) &&
                  counts(x, "here", p[i].here) && counts(x, "anywhere", p[i].anywhere) &&
                  lists(x, "ranks", p[i].ranks) && lists(x, "ranks_ever", p[i].ranks_ever) &&
                  json_is_true(json_object_get(x, "frozen")) == (p[i].index < 0),
              "parameter %s", p[i].name);
    }
    list = json_object_get(j, "absent");
    CHECK(json_array_size(list) == (size_t)r.absent_count, "absent");
    static const char *const names[] = {"present", "not read", "not reached", "detached", "frozen", "no loss"};
    for (int64_t i = 0; i < r.absent_count; i++) {
        const mu_absent *a = &r.absent[i];
        const json_t *x = json_array_get(list, (size_t)i);
        CHECK(says(x, "name", a->name) && says(x, "here", names[a->here]) && says(x, "op", a->op) &&
                  says(x, "module", a->module) && says(x, "end_op", a->end_op) && says(x, "end_module", a->end_module) &&
                  says(x, "region", a->region) && lists(x, "ranks", a->ranks) &&
                  counts(x, "ranks_present", (uint64_t)a->ranks_present) && counts(x, "index", (uint64_t)a->index),
              "absent %s", a->name);
    }
    json_decref(j);
}

static const mu_ddp_parameter *find(mu_ddp *d, const char *name)
{
    int64_t n = 0;
    const mu_ddp_parameter *p = mu_ddp_report_parameters(d, &n);
    static const mu_ddp_parameter none = {.index = -2};
    for (int64_t i = 0; i < n; i++) {
        if (strcmp(p[i].name, name) == 0) {
            return &p[i];
        }
    }
    return &none;
}

typedef struct gap {
    int without;
} gap;
static bool count_without(void *user, const char *name, mu_parameter *p)
{
    (void)name;
    ((gap *)user)->without += mu_parameter_grad(p) == NULL;
    return true;
}

/* d is frozen; head.v never comes; head.w from rank 0 only, in every other step; the last rank skips one. */
static void participation(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    mu_context *c = g->context;
    log_lines l = {0};
    listen_to(c, &l);
    mu_module *m = toy(c);
    int64_t frozen = 0;
    CHECK(mu_module_freeze(m, "d", &frozen) == MU_OK && frozen == 1, "freeze");
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.bucket_bytes = 1, .first_bucket_bytes = 1});
    CHECK(d != NULL, "%s", mu_context_message(c));
    compare(d);
    mu_tape *t = mu_tape_new(c, NULL);
    for (int step = 0; step < 4; step++) {
        mu_tape_reset(t);
        mu_tensor *loss = terms(t, m, rank == 0 && step % 2 == 0 ? "a b c head.w" : "a b c", 3);
        CHECK(mu_ddp_backward(d, t, loss) == MU_OK, "%s", mu_context_message(c));
        compare(d);
        CHECK(mu_module_zero_grad(m) == MU_OK, "zero");
    }
    mu_tape_reset(t);
    mu_status s = rank == size - 1 ? mu_ddp_abandon(d, "a bad \"batch\"") : mu_ddp_backward(d, t, terms(t, m, "a", 3));
    CHECK(s == MU_SKIPPED, "%d", (int)s);
    compare(d);
    mu_ddp_report r = mu_ddp_get_report(d);
    char who[32];
    snprintf(who, sizeof(who), "rank %d: ", size - 1);
    CHECK(r.skipped == 1 && r.reductions == 4 && strncmp(r.skip_reason, who, strlen(who)) == 0 &&
              strstr(r.skip_reason, "a bad \"batch\"") != NULL && r.frozen == 1 && r.parameters == 5,
          "%s", r.skip_reason);
    const mu_ddp_parameter *p = find(d, "head.v");
    CHECK(p->index == 4 && p->reductions == 4 && p->here == 0 && p->anywhere == 0 && p->ranks_ever == 0, "head.v");
    p = find(d, "head.w");
    CHECK(p->index == 3 && p->here == (rank == 0 ? 2u : 0u) && p->anywhere == 2 && p->ranks_ever == 1, "head.w");
    p = find(d, "b");
    CHECK(p->index == 1 && p->here == 4 && p->anywhere == 4 && p->ranks_ever == (1u << size) - 1, "b");
    CHECK(find(d, "d")->index == -1 && find(d, "d")->bytes == 33 * 4, "d is frozen");
    /* The loop people write sees three parameters without gradient, and not why. */
    mu_tape_reset(t);
    CHECK(mu_ddp_backward(d, t, terms(t, m, "a b c", 3)) == MU_OK, "%s", mu_context_message(c));
    gap without = {0};
    CHECK(mu_module_each_parameter(m, count_without, &without) == MU_OK && without.without == 3, "%d", without.without);
    char text[4096];
    mu_ddp_print_report(d, text, sizeof(text));
    CHECK(strstr(text, "head.{w, v}: on no rank; not read by any operation") != NULL &&
              strstr(text, "head.v (index 4): never received a gradient: 0 of 5 reductions") != NULL &&
              strstr(text, "head.w (index 3): a gradient in 2 of 5 reductions") != NULL &&
              strstr(text, "frozen: d\n") != NULL && strstr(text, "1 reductions were skipped, the last one by rank ") != NULL,
          "%s", text);
    CHECK(l.warnings == (rank == 0 ? 3 : 0), "%d warnings, the last: %s", l.warnings, l.last); /* v, skip, w */
    CHECK(strstr(l.last, "head") == NULL || strstr(l.last, " d") == NULL, "a frozen one is told: %s", l.last);
    mu_ddp_free(d);
}

/* The last rank is slow in its forward, then in nothing. */
static void stragglers(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    mu_context *c = g->context;
    mu_module *m = toy(c);
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.name = "net"});
    mu_tape *t = mu_tape_new(c, NULL);
    for (int step = 0; step < 3; step++) {
        mu_tape_reset(t);
        mu_tensor *loss = terms(t, m, "a b c d head.w head.v", 3);
        nap(rank == size - 1 ? 0.15 : 0);
        CHECK(mu_ddp_backward(d, t, loss) == MU_OK, "%s", mu_context_message(c));
        mu_ddp_report r = mu_ddp_get_report(d);
        CHECK(r.last_rank == size - 1 && r.last_rank_seconds > 0.05 && r.last_rank_seconds < 5, "rank %d, %g s",
              r.last_rank, r.last_rank_seconds);
        CHECK(rank == size - 1 ? r.last.forward > 0.14 && r.last.exposed < 0.1
                               : r.last.forward < 0.1 && r.last.exposed > 0.05 && r.last.communication > 0.05,
              "rank %d: forward %g, exposed %g", rank, r.last.forward, r.last.exposed);
        CHECK(r.overlap >= 0 && r.overlap <= 1 && r.last.overlapped <= r.last.communication, "overlap");
        CHECK(mu_module_zero_grad(m) == MU_OK, "zero");
        compare(d);
    }
}

/* Two tasks, a reduction for each, then the optimiser: nothing is left out. */
static void tasks(mu_group *g, int rank, int size, void *arg)
{
    (void)size;
    (void)arg;
    mu_context *c = g->context;
    log_lines l = {0};
    listen_to(c, &l);
    mu_module *m = toy(c);
    mu_ddp *d = mu_ddp_wrap(m, g, NULL);
    mu_tape *t = mu_tape_new(c, NULL);
    for (int step = 0; step < 3; step++) {
        static const char *const used[] = {"a b c d head.w", "a b c d head.v"};
        for (int k = 0; k < 2; k++) {
            mu_tape_reset(t);
            CHECK(mu_ddp_backward(d, t, terms(t, m, used[k], 3)) == MU_OK, "%s", mu_context_message(c));
        }
        CHECK(mu_module_zero_grad(m) == MU_OK, "zero");
    }
    mu_tape_reset(t);
    CHECK(mu_ddp_backward(d, t, terms(t, m, "a b c d head.w head.v", 3)) == MU_OK, "%s", mu_context_message(c));
    CHECK(mu_module_zero_grad(m) == MU_OK && l.warnings == 0, "%s", l.last);
    /* In two reductions of one step, and in none of them: told once. */
    for (int step = 0; step < 2; step++) {
        for (int k = 0; k < 2; k++) {
            mu_tape_reset(t);
            CHECK(mu_ddp_backward(d, t, terms(t, m, "a b c d head.w", 3)) == MU_OK, "%s", mu_context_message(c));
            CHECK(l.warnings == (step == 1 && rank == 0), "step %d: %s", step, l.last);
        }
        CHECK(mu_module_zero_grad(m) == MU_OK, "zero");
    }
    mu_ddp_free(d);
    CHECK(l.warnings == (rank == 0) && (rank > 0 || strstr(l.last, ": 1 of 6 parameters") != NULL), "%s", l.last);
}

/* 60 parameters of a subtree become one entry; half of one becomes a list that is cut. */
static void grouped(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    (void)size;
    mu_context *c = g->context;
    log_lines l = {0};
    listen_to(c, &l);
    const mu_init zeros = {MU_INIT_ZEROS, 0};
    mu_module *m = mu_module_new(c, "Net", NULL), *big = mu_module_new(c, "Big", NULL), *flat = mu_module_new(c, "F", NULL);
    mu_module_parameter(m, "a", MU_DIMS(4), zeros);
    for (int i = 0; i < 20; i++) {
        char name[16];
        snprintf(name, sizeof(name), "%d", i);
        mu_module *child = mu_module_new(c, "Child", NULL);
        mu_module_parameter(child, "weight", MU_DIMS(2), zeros);
        mu_module_parameter(child, "bias", MU_DIMS(2), zeros);
        mu_module_parameter(child, "scale", MU_DIMS(2), zeros);
        CHECK(mu_module_add(big, name, child) == MU_OK, "add");
        snprintf(name, sizeof(name), "p%d", i);
        mu_module_parameter(flat, name, MU_DIMS(2), zeros);
    }
    CHECK(mu_module_add(m, "big", big) == MU_OK && mu_module_add(m, "flat", flat) == MU_OK, "add");
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.name = "net", .absent = *(mu_absent_policy *)arg});
    mu_tape *t = mu_tape_new(c, NULL);
    for (int step = 0; step < 2; step++) {
        mu_tape_reset(t);
        mu_status s = mu_ddp_backward(d, t, terms(t, m, "a flat.p0", 3));
        if (*(mu_absent_policy *)arg == MU_ABSENT_ERROR) {
            const char *text = mu_context_message(c);
            CHECK(s == MU_ERR_STATE && strstr(text, "here, 79 of 81 parameters") != NULL &&
                      strstr(text, "(parameter indices 1 2 3 4 5 6 7 8 9 10 11 12 ...)") != NULL &&
                      strstr(text, "big (60 parameters): not read") != NULL,
                  "%s", text);
            mu_context_clear(c);
        } else {
            CHECK(s == MU_OK, "%s", mu_context_message(c));
        }
        CHECK(mu_module_zero_grad(m) == MU_OK, "zero");
    }
    mu_ddp_free(d);
    if (*(mu_absent_policy *)arg == MU_ABSENT_DEFAULT && rank == 0) {
        CHECK(l.warnings == 1 &&
                  strcmp(l.last, "ddp `net`: 79 of 81 parameters did not receive a gradient on any rank, and are left "
                                 "as they are: big (60 parameters): not read by any operation of this step (its layer "
                                 "was not called); flat.{p1, p2, p3, p4, p5, p6 and 13 more}: not read by any operation "
                                 "of this step (its layer was not called)") == 0,
              "%d: %s", l.warnings, l.last);
    }
}

/* One rank lacks a parameter: an error only for who asks for it, and the same on all ranks. */
static void any(mu_group *g, int rank, int size, void *arg)
{
    (void)arg;
    mu_context *c = g->context;
    mu_module *m = toy(c);
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.name = "net", .absent = MU_ABSENT_ERROR_ANY});
    mu_tape *t = mu_tape_new(c, NULL);
    CHECK(mu_ddp_backward(d, t, terms(t, m, "a b c d head.w head.v", 3)) == MU_OK, "%s", mu_context_message(c));
    CHECK(mu_module_zero_grad(m) == MU_OK, "zero");
    mu_tape_reset(t);
    mu_status s = mu_ddp_backward(d, t, terms(t, m, rank == 1 ? "a b d head.w head.v" : "a b c d head.w head.v", 3));
    const char *text = mu_context_message(c), *reason = rank == 1 ? "; not read by" : "; present here";
    CHECK(s == MU_ERR_STATE && strncmp(text, "Expected to have finished reduction in the prior iteration", 58) == 0 &&
              strstr(text, "here, 1 of 6 parameters did not receive a gradient on every rank in reduction 2") != NULL &&
              strstr(text, "(parameter indices 2): c: on rank 0") != NULL && strstr(text, reason) != NULL,
          "%s", text);
    (void)size;
    mu_context_clear(c);
    compare(d);
}

/* Names that would break a careless writer. */
static void hostile(mu_group *g, int rank, int size, void *arg)
{
    (void)rank;
    (void)size;
    (void)arg;
    mu_context *c = g->context;
    static const char *const names[] = {"q\"uo\\te", "tab\tline\nbell\a", "\xc3\xa4\xe4\xb8\xad\xf0\x9f\x98\x80", "%s%n",
                                        "</script>"};
    mu_module *m = mu_module_new(c, "Odd", NULL);
    int made = 0;
    for (int i = 0; i < 5; i++) {
        mu_module_parameter(m, names[i], MU_DIMS(3), (mu_init){MU_INIT_ZEROS, 0});
        made += mu_context_status(c) == MU_OK;
        mu_context_clear(c);
    }
    mu_module_parameter(m, "a", MU_DIMS(3), (mu_init){MU_INIT_ZEROS, 0});
    CHECK(made >= 3, "%d of the names were taken", made);
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.name = "na\"me\n\\ \xc3\xa4"});
    mu_tape *t = mu_tape_new(c, NULL);
    CHECK(mu_ddp_backward(d, t, terms(t, m, "a", 3)) == MU_OK, "%s", mu_context_message(c));
    compare(d);
    mu_ddp *bad = mu_ddp_wrap(m, g, &(mu_ddp_options){.name = "bad \xff\xc3"});
    json_t *j = parse(bad);
    CHECK(says(j, "ddp", "bad \xef\xbf\xbd\xef\xbf\xbd"), "not UTF-8");
    json_decref(j);
    /* Out of memory at each allocation of a report: shorter or empty, never wrong memory. */
    for (int64_t k = 0; k < 40; k++) {
        char text[64];
        c->fail_after = k;
        (void)mu_ddp_report_json(d, text, sizeof(text));
        (void)mu_ddp_print_report(d, text, sizeof(text));
        c->fail_after = -1;
        mu_context_clear(c);
    }
    compare(d);
}

/* Part of a tree is wrapped: the report is of that part, and outlives a change of the tree. */
static void part(mu_group *g, int rank, int size, void *arg)
{
    (void)rank;
    (void)size;
    (void)arg;
    mu_context *c = g->context;
    mu_module *m = toy(c), *head = mu_module_get(m, "head");
    int64_t frozen = 0;
    CHECK(mu_module_freeze(m, "b", &frozen) == MU_OK && frozen == 1, "freeze");
    mu_ddp *d = mu_ddp_wrap(head, g, NULL);
    mu_tape *t = mu_tape_new(c, NULL);
    CHECK(mu_ddp_backward(d, t, terms(t, m, "head.w", 3)) == MU_OK, "%s", mu_context_message(c));
    mu_ddp_report r = mu_ddp_get_report(d);
    CHECK(r.parameters == 2 && r.frozen == 0 && r.absent_count == 1 && r.absent[0].index == 1, "%lld frozen",
          (long long)r.frozen);
    compare(d);
    mu_module_parameter(m, "more", MU_DIMS(50), (mu_init){MU_INIT_ZEROS, 0});
    CHECK(mu_module_zero_grad(m) == MU_OK, "%s", mu_context_message(c));
    compare(d);
    CHECK(find(d, "head.v")->index == 1 && find(d, "more")->index == -2, "indices");
}

/* One bit of one element of one rank. */
static void one_bit(mu_group *g, int rank, int size, void *arg)
{
    mu_context *c = g->context;
    const char *what = arg;
    mu_module *m = toy(c);
    mu_tensor *buffer = mu_module_buffer(m, "seen", MU_DIMS(4, 4), MU_F32, 2.0F),
              *batches = mu_module_buffer(m, "batches", MU_DIMS(1), MU_I64, 0.0F);
    CHECK(buffer != NULL && batches != NULL, "%s", mu_context_message(c));
    mu_ddp *d = mu_ddp_wrap(m, g, &(mu_ddp_options){.name = "net"});
    CHECK(mu_ddp_check(d) == MU_OK, "%s", mu_context_message(c));
    if (rank == size - 1 && strcmp(what, "batches") == 0) {
        *(int64_t *)batches->data ^= 4;
    } else if (rank == size - 1) {
        float x[RIG_MOST];
        mu_tensor *v = strcmp(what, "seen") == 0 ? buffer : mu_parameter_tensor(mu_module_get_parameter(m, what));
        int64_t n = mu_tensor_elements(v);
        CHECK(mu_tensor_read(v, x, n) == MU_OK, "read");
        uint32_t bits;
        memcpy(&bits, &x[n - 2], sizeof(bits));
        bits ^= 1;
        memcpy(&x[n - 2], &bits, sizeof(bits));
        CHECK(mu_tensor_write(v, x, n) == MU_OK, "write");
    }
    CHECK(mu_ddp_check(d) == MU_ERR_COMM, "%s", mu_context_message(c));
    char want[200];
    const char *text = mu_context_message(c);
    snprintf(want, sizeof(want), "`%s` is not the same on rank %d as on rank 0: element ", what, size - 1);
    CHECK(strstr(text, want) != NULL && strstr(text, " on rank 0 (1 of ") != NULL, "%s", text);
    snprintf(want, sizeof(want),
             strcmp(what, "batches") == 0 ? "element 0 is 4 on rank %d and 0 on rank 0"
             : strcmp(what, "seen") == 0  ? "element 14 is 2.00000024 (0x40000001) on rank %d and 2 (0x40000000) on rank 0"
                                          : "element 31 is ",
             size - 1);
    CHECK(strstr(text, want) != NULL, "%s", text);
    mu_context_clear(c);
}

static void everywhere(rank_fn fn, void *arg)
{
    for (int size = 2; size <= 3; size++) {
        assert_int_equal(run_threads(size, fn, arg, NULL, true), 0);
        assert_int_equal(run_processes(size, fn, arg, NULL, true), 0);
    }
}

static void structs_text_and_json_agree(void **state)
{
    (void)state;
    everywhere(participation, NULL);
    everywhere(hostile, NULL);
    everywhere(part, NULL);
}

static void who_came_last(void **state)
{
    (void)state;
    everywhere(stragglers, NULL);
}

static void what_is_told(void **state)
{
    (void)state;
    everywhere(tasks, NULL);
    everywhere(any, NULL);
    for (int p = MU_ABSENT_DEFAULT; p <= MU_ABSENT_ERROR; p++) {
        mu_absent_policy policy = (mu_absent_policy)p;
        everywhere(grouped, &policy);
    }
}

static void the_check_names_the_element(void **state)
{
    (void)state;
    static char parameter[] = "d", buffer[] = "seen", counter[] = "batches";
    everywhere(one_bit, parameter);
    everywhere(one_bit, buffer);
    everywhere(one_bit, counter);
}

static void without_a_ddp(void **state)
{
    (void)state;
    int64_t n = 7;
    char text[8] = "x";
    assert_int_equal(mu_ddp_report_json(NULL, text, sizeof(text)), 0);
    assert_string_equal(text, "");
    assert_int_equal(mu_ddp_report_json(NULL, NULL, 5), 0);
    assert_null(mu_ddp_report_parameters(NULL, &n));
    assert_int_equal(n, 0);
    assert_null(mu_ddp_report_buckets(NULL, &n));
    assert_string_equal(mu_ddp_get_report(NULL).name, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(structs_text_and_json_agree),
        cmocka_unit_test(who_came_last),
        cmocka_unit_test(what_is_told),
        cmocka_unit_test(the_check_names_the_element),
        cmocka_unit_test(without_a_ddp),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
