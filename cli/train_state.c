/* Training state to and from its file. See train_state.h. */
#include "train_state.h"
#include "commands.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int train_state_choose(session *s)
{
    train_options *o = s->o;
    int32_t there = 0;
    if (!o->resume_auto) {
        return -1;
    }
    if (s->rank == 0) {
        there = access(o->checkpoint, F_OK) == 0;
    }
    if (mu_broadcast(s->world, &there, sizeof(there), 0) < 0) {
        return session_close(s, CLI_FAILED, true);
    }
    if (there != 0) {
        o->resume = o->checkpoint;
    }
    return -1;
}

/* -- the note ----------------------------------------------------------------------------------------------------- */
/* The options, and what the epoch has come to so far. Nothing of a whole epoch: the next begins with nothing. */
static char *write_note(const session *s)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    if (out == NULL) {
        return NULL;
    }
    fputs(s->note, out);
    if (s->state.samples_in_epoch > 0) {
        fprintf(out, "epoch-loss=%.17g\nepoch-images=%" PRId64 "\n", s->tally.loss, s->tally.images);
    }
    if (s->tally.skips > 0) {
        fprintf(out, "skips=%" PRId64 "\n", s->tally.skips);
    }
    if (fclose(out) != 0) {
        free(text);
        return NULL;
    }
    return text;
}

static double noted(const char *note, const char *name)
{
    char text[64];
    return flags_noted(note, name, text, sizeof(text)) ? strtod(text, NULL) : 0;
}

/* -- from a file -------------------------------------------------------------------------------------------------- */
/* What --ranks and --batch were. Another number of ranks with the same batch, or with as many images a step, is the same
 * run on other machines; anything else is another run. -1, or the exit code. */
static int compare_ranks(session *s, const mu_training *read)
{
    const train_options *o = s->o;
    int64_t ranks = (int64_t)noted(read->note, "ranks"), batch = (int64_t)noted(read->note, "batch");
    if (ranks == 0 || batch == 0 || (ranks == o->ranks && batch == o->batch)) {
        return -1;
    }
    if (batch != o->batch && ranks * batch != o->ranks * o->batch) {
        session_close(s, CLI_USAGE, true);
        return cli_usage_error(o->command,
                               "%s was trained with --batch %" PRId64 " on %" PRId64 " rank%s, this run has --batch %" PRId64
                               " on %" PRId64 ": the same --batch, or the same %" PRId64 " images a step, was expected",
                               o->resume, batch, ranks, ranks == 1 ? "" : "s", o->batch, o->ranks, ranks * batch);
    }
    if (read->samples_in_epoch < 0 && read->step_in_epoch > 0) {
        session_close(s, CLI_USAGE, true);
        return cli_usage_error(o->command,
                               "%s was written within an epoch by a version that did not count images: it goes on only "
                               "with --ranks %" PRId64 " --batch %" PRId64, o->resume, ranks, batch);
    }
    session_say(s, "going on with --ranks %" PRId64 " --batch %" PRId64 " (was --ranks %" PRId64 " --batch %" PRId64 ")\n",
                o->ranks, o->batch, ranks, batch);
    return -1;
}

static int compare_flags(session *s, const mu_training *read)
{
    char old[4096] = "", now[4096];
    const char *resume = s->o->resume;
    if (read->note == NULL) {
        return -1;
    }
    FILE *out = s->rank == 0 && !s->rehearsal && !s->o->quiet ? stdout : fopen("/dev/null", "w");
    const flag *f = flags_differ(train_flags, s->o, read->note, out != NULL ? out : stderr, old, sizeof(old));
    if (out != NULL && out != stdout) {
        fclose(out);
    }
    if (f != NULL) {
        flags_value(f, s->o, now, sizeof(now));
        session_close(s, CLI_USAGE, true);
        return cli_usage_error(s->o->command, "%s was trained with --%s '%s', this run has '%s'", resume, f->name, old,
                               now);
    }
    return compare_ranks(s, read);
}

/* Steps of this run, in its own number of ranks: what is left of the epoch, and whole epochs after it. */
static void count_steps(session *s)
{
    const train_options *o = s->o;
    mu_training *t = &s->state;
    int64_t global = o->batch * s->size, count = mu_dataset_count(s->train);
    if (t->samples_in_epoch < 0) {
        t->samples_in_epoch = t->step_in_epoch * global < count ? t->step_in_epoch * global : count;
    }
    t->step_in_epoch = t->samples_in_epoch / global; /* where it does not divide, the rest takes no more steps than this leaves */
    s->last_step = o->steps;
    if (o->epochs > 0) {
        int64_t rest = t->epoch < o->epochs ? (count - t->samples_in_epoch + global - 1) / global : 0;
        int64_t whole = t->epoch < o->epochs ? o->epochs - t->epoch - 1 : 0;
        int64_t last = t->step + rest + whole * s->steps_per_epoch;
        s->last_step = o->steps > 0 && o->steps < last ? o->steps : last;
    }
}

int train_state_resume(session *s)
{
    s->state = (mu_training){.model = s->net, .optimizer = s->optimizer, .seed = (uint64_t)s->o->seed,
                             .note = s->note};
    if (s->o->resume != NULL) {
        int code;
        mu_training read = s->state;
        if (mu_training_load(&read, s->o->resume, s->size > 1 ? s->world : NULL) < 0) {
            return session_close(s, CLI_FAILED, true);
        }
        if ((code = compare_flags(s, &read)) >= 0) {
            return code;
        }
        if (read.note == NULL && read.step == 0) { /* of another program, which counts epochs only */
            read.step = read.epoch * s->steps_per_epoch;
        }
        s->tally = (tally){noted(read.note, "epoch-loss"), (int64_t)noted(read.note, "epoch-images"),
                           (int64_t)noted(read.note, "skips")};
        read.note = s->note;
        s->state = read;
    }
    count_steps(s);
    if (s->o->resume != NULL) {
        session_say(s, "resumed %s at epoch %" PRId64 ", step %" PRId64 "\n", s->o->resume, s->state.epoch + 1,
                    s->state.step);
    }
    return -1;
}

/* -- to a file ---------------------------------------------------------------------------------------------------- */
static mu_status write_file(session *s)
{
    char *note = write_note(s);
    mu_training t = s->state;
    t.note = note != NULL ? note : s->note; /* without memory the sums of an epoch are no reason to lose the run */
    mu_status status = mu_training_save(&t, s->o->checkpoint);
    free(note);
    return status;
}

bool train_state_save(session *s)
{
    if (s->o->checkpoint == NULL) {
        return true;
    }
    /* Rank 0 writes, with the others' parts of the optimiser's state where they share it. */
    if ((s->rank == 0 || s->o->shard_optimizer) && write_file(s) < 0) {
        return false;
    }
    /* Keeps the others from ending, and so from ending the launch, before it is done. */
    return mu_barrier(s->world) >= 0;
}

/* -- where it is -------------------------------------------------------------------------------------------------- */
int64_t train_state_schedule_step(const session *s)
{
    return s->o->epochs > 0 ? s->state.epoch * s->steps_per_epoch + s->state.step_in_epoch : s->state.step;
}

bool train_state_done(const session *s)
{
    return s->state.step >= s->last_step;
}
