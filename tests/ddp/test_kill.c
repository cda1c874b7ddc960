/* A rank is killed, stopped, put to sleep, leaves or fails at a random moment of training, wrapping or changing the
 * model: the others end, soon, with an error that names it and what it was doing, nothing is left behind, and where
 * they say which gradients it had not delivered, that agrees with what it wrote down itself.
 *
 * `test_kill N` makes N rounds instead of the few that fit into the test run. */
#define _GNU_SOURCE
#include "stuck.h"

#include <dirent.h>
#include <sys/mman.h>

enum { MOST_RANKS = 4, USUAL_ROUNDS = 60 };
static int rounds = USUAL_ROUNDS;
static const double patience = 1.0; /* the timeout, of rounds in which the victim does not die */

typedef enum kind { KILLED, STOPPED, ASLEEP, RETURNED, EXITED, FAILED, KINDS } kind;
static const char *const kind_names[KINDS] = {"killed", "stopped", "asleep", "returned early", "exited", "failed"};

typedef enum work { PLAIN, MIXED, WRAPPING, CHANGING, WORKS } work;
static const char *const work_names[WORKS] = {"plain steps", "mixed steps", "wrapping", "changing the model"};

/* One page that all processes of a round share. */
typedef struct board {
    int training; /* ranks that are at it; atomic */
    journal journals[MOST_RANKS];
    double ended[MOST_RANKS]; /* when it got its error; 0: it got none */
    mu_status status[MOST_RANKS];
    char text[MOST_RANKS][2048];
} board;

typedef struct round_plan {
    int number, size, victim;
    kind kind;
    work work;
    bool own_buckets;
    int odd_step; /* in which the victim sleeps, leaves or fails */
    stop_place place;
    int layer;
    board *board;
} round_plan;

/* -- what ranks do ------------------------------------------------------------------------------------------------- */
typedef struct trainer {
    const round_plan *p;
    mu_context *c;
    mu_group *g;
    int rank;
    mu_module *net;
    mu_ddp *d;
    mu_optimizer *o;
    mu_tape *t;
    walker w;
} trainer;

static mu_status plain_step(trainer *r)
{
    mu_status s = mu_ddp_backward(r->d, r->t, net_loss(r->t, r->net, &r->w, r->rank));
    return s == MU_OK ? mu_optimizer_step(r->o) : s;
}

/* All that a step may be, drawn from its number: the same on all ranks. */
static mu_status mixed_step(trainer *r)
{
    uint64_t draw = mix((uint64_t)(r->w.step + 1000 * r->p->number));
    mu_tensor *loss = net_loss(r->t, r->net, &r->w, r->rank);
    mu_status s;
    switch (draw % 7) {
    case 0: s = mu_ddp_backward_weighted(r->d, r->t, loss, 1 + r->rank); break;
    case 1:
        s = (int)(draw / 7 % (uint64_t)r->p->size) == r->rank ? mu_ddp_abandon(r->d, "a bad batch")
                                                              : mu_ddp_backward(r->d, r->t, loss);
        break;
    case 2: s = mu_backward(r->t, loss); break; /* goes into the next reduction */
    case 3: s = mu_ddp_backward(r->d, r->t, r->rank == 0 ? NULL : loss); break;
    case 4:
        s = mu_ddp_check(r->d);
        s = s == MU_OK ? mu_ddp_backward(r->d, r->t, loss) : s;
        break;
    default: s = mu_ddp_backward(r->d, r->t, loss);
    }
    if (s == MU_SKIPPED) {
        return mu_module_zero_grad(r->net);
    }
    return s == MU_OK && draw % 7 != 2 ? mu_optimizer_step(r->o) : s;
}

static mu_status wrap_anew(trainer *r)
{
    size_t bytes = r->p->own_buckets ? 1 : 1 << 20;
    mu_ddp_free(r->d);
    r->d = mu_ddp_wrap(r->net, r->g, &(mu_ddp_options){.bucket_bytes = bytes, .first_bucket_bytes = bytes});
    return r->d != NULL ? MU_OK : mu_context_status(r->c);
}

static mu_status changing_step(trainer *r)
{
    mu_status s = plain_step(r);
    mu_tape_reset(r->t);
    return s == MU_OK ? mu_module_replace(r->net, "layer5", layer_new(r->c, &r->w, 5)) : s;
}

static void oversleep(void *arg)
{
    (void)arg;
    sleep_for(2.5 * patience);
}

static mu_status step(trainer *r)
{
    switch (r->p->work) {
    case MIXED: return mixed_step(r);
    case CHANGING: return changing_step(r);
    case WRAPPING: {
        mu_status s = r->w.step % 3 == 0 ? wrap_anew(r) : MU_OK;
        return s == MU_OK ? plain_step(r) : s;
    }
    default: return plain_step(r);
    }
}

/* Trains until it fails, or until it is its turn to go. */
static void train(mu_group *g, int rank, int size, void *arg)
{
    const round_plan *p = arg;
    board *b = p->board;
    trainer r = {.p = p, .c = g->context, .g = g, .rank = rank};
    (void)size;
    r.w.journal = &b->journals[rank];
    if (rank == p->victim && p->kind == ASLEEP) {
        r.w = (walker){.journal = r.w.journal,
                       .place = p->place,
                       .stop_step = p->odd_step,
                       .stop_layer = p->layer,
                       .stop = oversleep};
    }
    r.net = net_new(r.c, &r.w);
    mu_module_buffer(r.net, "stat", MU_DIMS(3), MU_F32, 0);
    r.t = mu_tape_new(r.c, NULL);
    mu_status s = wrap_anew(&r);
    r.o = mu_sgd(r.net, 0.01F, NULL);
    __atomic_fetch_add(&b->training, 1, __ATOMIC_SEQ_CST);
    while (s == MU_OK) {
        if (rank == p->victim && r.w.step == p->odd_step) {
            if (p->kind == RETURNED) {
                return;
            }
            if (p->kind == EXITED) {
                exit(0);
            }
            if (p->kind == FAILED) {
                mui_fail(r.c, MU_ERR_IO, "the disk is gone");
                return;
            }
        }
        s = step(&r);
    }
    b->status[rank] = s;
    snprintf(b->text[rank], sizeof(b->text[rank]), "%s", mu_context_message(r.c));
    b->ended[rank] = mui_now();
}

/* -- what is left behind ------------------------------------------------------------------------------------------- */
/* Files whose name has one of the two in it: other programs may come and go. */
static int count_files(const char *folder, const char *part, const char *other)
{
    int n = 0;
    DIR *d = opendir(folder);
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;) {
        n += strstr(e->d_name, part) != NULL || strstr(e->d_name, other) != NULL;
    }
    if (d != NULL) {
        closedir(d);
    }
    return n;
}

/* Sockets of these tests' groups, and shared memory mapped here. */
static int count_lines(const char *file, const char *what)
{
    char line[1024];
    int n = 0;
    FILE *f = fopen(file, "r");
    while (f != NULL && fgets(line, sizeof(line), f) != NULL) {
        n += strstr(line, what) != NULL;
    }
    if (f != NULL) {
        fclose(f);
    }
    return n;
}

/* -- a round ------------------------------------------------------------------------------------------------------- */
typedef struct figures {
    int rounds, with_lacks, checked;
    double took[4096]; /* seconds of each survivor */
    int count;
} figures;

static round_plan plan_round(int number, board *b)
{
    uint64_t draw = mix((uint64_t)number + 77);
    round_plan p = {.number = number, .board = b, .size = 2 + number % 3};
    /* Those that end by a timeout take its second each: fewer of them. */
    static const kind kinds[12] = {KILLED, EXITED, KILLED, RETURNED, KILLED, STOPPED,
                                   KILLED, FAILED, KILLED, ASLEEP,   KILLED, RETURNED};
    p.kind = kinds[number % 12];
    p.victim = (int)(draw % (uint64_t)p.size);
    p.work = draw / 1048576 % 3 == 0 ? PLAIN : (work)(draw / 16 % WORKS);
    p.own_buckets = draw / 64 % 3 > 0;
    p.odd_step = 2 + (int)(draw / 128 % 30);
    static const stop_place places[3] = {IN_FORWARD, IN_BACKWARD, BEFORE_FORWARD};
    p.place = places[draw / 4096 % 3];
    p.layer = p.place == BEFORE_FORWARD ? 0 : (int)(draw / 16384 % LAYERS);
    return p;
}

static void wait_until_all_train(const round_plan *p)
{
    for (double begin = mui_now(); __atomic_load_n(&p->board->training, __ATOMIC_SEQ_CST) < p->size;) {
        assert_true(mui_now() - begin < 30);
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
}

/* "it had delivered 3 of 6 buckets" of reduction 17, against what the victim wrote down. False: nothing to check. */
static bool check_lacks(const round_plan *p, const char *text)
{
    int had = -1, of = 0, running = 0, missing = 0, all = 0;
    const char *said = strstr(text, "it had delivered ");
    if (said == NULL) {
        return false;
    }
    if (strncmp(said, "it had delivered all ", 21) == 0) {
        const journal *j = &p->board->journals[p->victim];
        int count = 0, delivered = 0;
        CHECK(sscanf(said, "it had delivered all %d parameters of reduction %d", &count, &delivered) == 2 &&
                  count == LAYERS,
              "`%s`", text);
        CHECK(p->work != PLAIN || (j->reduction == delivered && j->layers == LAYERS),
              "round %d: in reduction %d, %d "
              "layers, `%s`",
              p->number, j->reduction, j->layers, text);
        return p->work == PLAIN;
    }
    CHECK(sscanf(said, "it had delivered %d of %d buckets of reduction %d; %d of %d parameters are missing:", &had, &of,
                 &running, &missing, &all) == 5,
          "`%s`", text);
    CHECK(all == LAYERS && (p->own_buckets ? of == LAYERS && missing == LAYERS - had : of == 1 && missing == LAYERS),
          "round %d: `%s`", p->number, text);
    for (int i = LAYERS - missing; i < LAYERS && i < LAYERS - missing + 5; i++) { /* by name; in order of backward */
        char name[32];
        snprintf(name, sizeof(name), " layer%d.w", LAYERS - 1 - i);
        CHECK(strstr(said, name) != NULL, "round %d: no%s in `%s`", p->number, name, text);
    }
    if (p->work != PLAIN || !p->own_buckets) {
        return false; /* numbers of reductions and steps differ; or all or nothing */
    }
    const journal *j = &p->board->journals[p->victim];
    if (running != j->reduction) { /* it was still in the one before, or on its way to this one */
        CHECK(had == 0 && running == j->reduction + 1, "round %d: in reduction %d, `%s`", p->number, j->reduction,
              text);
        return true;
    }
    /* Having entered the backward of n layers, it has delivered those before, and perhaps this one. */
    CHECK(j->layers == 0 ? had == 0 : had == j->layers || had == j->layers - 1, "round %d: %d layers, `%s`", p->number,
          j->layers, text);
    return true;
}

static void check_survivor(const round_plan *p, int r, const char *first)
{
    const board *b = p->board;
    bool late = p->kind == STOPPED || p->kind == ASLEEP;
    const char *text = b->text[r];
    char who[32];
    snprintf(who, sizeof(who), "%srank %d ", late ? "missing " : "", p->victim);
    CHECK(b->ended[r] > 0 && b->status[r] == (late ? MU_ERR_TIMEOUT : MU_ERR_PEER),
          "round %d (%s, %s), rank %d: %d `%s`", p->number, kind_names[p->kind], work_names[p->work], r, b->status[r],
          text);
    CHECK(strstr(text, who) != NULL, "round %d (%s, %s): `%s` does not name %s", p->number, kind_names[p->kind],
          work_names[p->work], text, who);
    CHECK(p->kind == FAILED ? strstr(text, "failed: the disk is gone") != NULL : strstr(text, "last seen: ") != NULL,
          "round %d (%s): no phase in `%s`", p->number, kind_names[p->kind], text);
    CHECK(p->kind != RETURNED || strstr(text, " closed the group while rank ") != NULL, "`%s`", text);
    CHECK(strcmp(text, first) == 0, "round %d: survivors say `%s` and `%s`", p->number, first, text);
}

/* Reaps all ranks; what is still there after a while hangs. */
static double reap(const round_plan *p, pid_t *pid, double begin)
{
    int left = p->size;
    bool stopped = p->kind == STOPPED;
    while (left > 0 && mui_now() - begin < 20) {
        for (int r = 0; r < p->size; r++) {
            int status = 0;
            if (pid[r] == 0 || waitpid(pid[r], &status, WNOHANG) != pid[r]) {
                continue;
            }
            pid[r] = 0;
            left--;
            bool as_meant = r == p->victim && (p->kind == KILLED || p->kind == STOPPED)
                                ? WIFSIGNALED(status)
                                : WIFEXITED(status) && WEXITSTATUS(status) == 0;
            CHECK(as_meant, "round %d, rank %d: status %x", p->number, r, (unsigned)status);
        }
        if (stopped && left == 1) {
            stopped = false;
            kill(pid[p->victim], SIGKILL);
        }
        nanosleep(&(struct timespec){.tv_nsec = 500000}, NULL);
    }
    for (int r = 0; r < p->size; r++) {
        if (pid[r] != 0) {
            CHECK(false, "round %d (%s, %s): rank %d hangs", p->number, kind_names[p->kind], work_names[p->work], r);
            kill(pid[r], SIGKILL);
            waitpid(pid[r], NULL, 0);
        }
    }
    return mui_now();
}

static void run_round(int number, figures *all)
{
    board *b = mmap(NULL, sizeof(*b), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(b != MAP_FAILED);
    round_plan p = plan_round(number, b);
    bool waits = p.kind == STOPPED || p.kind == ASLEEP;
    mu_group_options o = {.timeout_seconds = waits ? patience : 60, .arena_bytes = 1 << 20};
    char name[64];
    fresh_name(name);
    pid_t pid[MOST_RANKS];
    for (int r = 0; r < p.size; r++) {
        pid[r] = fork_rank(name, r, p.size, train, &p, &o, false);
    }
    double begin = mui_now();
    if (p.kind == KILLED || p.kind == STOPPED) {
        wait_until_all_train(&p);
        nanosleep(&(struct timespec){.tv_nsec = (long)(mix((uint64_t)number) % 8000) * 1000}, NULL);
        begin = mui_now();
        kill(pid[p.victim], p.kind == KILLED ? SIGKILL : SIGSTOP);
    } else {
        wait_until_all_train(&p);
        begin = mui_now();
    }
    (void)reap(&p, pid, begin);
    figures *f = &all[p.kind];
    bool lacks = false, checked = false;
    int first = p.victim == 0 ? 1 : 0;
    for (int r = 0; r < p.size; r++) {
        if (r == p.victim) {
            continue;
        }
        check_survivor(&p, r, b->text[first]);
        lacks = lacks || strstr(b->text[r], "it had delivered ") != NULL;
        checked = check_lacks(&p, b->text[r]) || checked;
        if (f->count < (int)(sizeof(f->took) / sizeof(*f->took))) {
            f->took[f->count++] = b->ended[r] - begin;
        }
    }
    f->rounds++;
    f->with_lacks += lacks;
    f->checked += checked;
    if (getenv("MUSTER_TEST_VERBOSE") != NULL) {
        printf("round %d (%s, %s, %d ranks): %s\n", number, kind_names[p.kind], work_names[p.work], p.size,
               b->text[first]);
    }
    if (p.kind == ASLEEP) { /* awake again, it learns that it was given up */
        CHECK(b->status[p.victim] == MU_ERR_TIMEOUT && strcmp(b->text[p.victim], b->text[first]) == 0,
              "round %d: %d `%s`", number, b->status[p.victim], b->text[p.victim]);
    }
    munmap(b, sizeof(*b));
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void the_others_end_and_say_why(void **state)
{
    (void)state;
    static figures all[KINDS];
    char mine[64];
    snprintf(mine, sizeof(mine), "test-%d-", (int)getpid());
    int open_files = count_files("/proc/self/fd", "", "");
    for (int i = 0; i < rounds; i++) {
        run_round(i, all);
    }
    int with_lacks = 0, checked = 0, deaths = 0;
    for (int k = 0; k < KINDS; k++) {
        figures *f = &all[k];
        if (f->count == 0) {
            continue;
        }
        qsort(f->took, (size_t)f->count, sizeof(double), by_size);
        printf("%4d rounds, %-14s: the others ended after %.3f s (median), %.3f s (worst); %d said what was delivered, "
               "%d of them "
               "checked against what it wrote down\n",
               f->rounds, kind_names[k], f->took[f->count / 2], f->took[f->count - 1], f->with_lacks, f->checked);
        CHECK(f->took[f->count - 1] < 10, "%s: too long", kind_names[k]);
        with_lacks += f->with_lacks;
        checked += f->checked;
        deaths += k == KILLED || k == EXITED || k == STOPPED || k == ASLEEP ? f->rounds : 0;
    }
    assert_int_equal(failures, 0);
    assert_true(with_lacks * 4 >= deaths);
    assert_true(checked > 0);
    assert_int_equal(count_files("/dev/shm", "muster", mine), 0);
    assert_int_equal(count_files("/proc/self/fd", "", ""), open_files);
    assert_int_equal(count_lines("/proc/self/maps", "memfd:muster"), 0);
    assert_int_equal(count_lines("/proc/net/unix", mine), 0);
    assert_true(waitpid(-1, NULL, WNOHANG) < 0 && errno == ECHILD); /* no orphan */
}

int main(int argc, char **argv)
{
    rounds = argc > 1 ? atoi(argv[1]) : USUAL_ROUNDS;
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_others_end_and_say_why)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
