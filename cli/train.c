/* `muster train`: the training loop and what it prints. */
#include "commands.h"
#include "progress.h"
#include "relaunch.h"
#include "session.h"
#include "stop.h"
#include "train_state.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A run whose loss stays non-finite so many steps in a row cannot recover by skipping them. */
#define SKIPS_MAX 20

typedef struct run {
    session s;
    progress bar;
    FILE *log;
    int64_t saved_step;    /* --checkpoint was written last after this step */
    int64_t scored_step;   /* the last evaluation was after this step */
    score last;
    int stopped;           /* the signal that ends the run early, agreed by all ranks */
} run;

/* What a rank without images does where batch norm is synchronised: the other ranks wait for its part, which is 0. */
static mu_tensor *loss_of_nothing(session *s)
{
    mu_dims d = mu_dataset_dims(s->test);
    mu_tensor *none = mu_tensor_zeros(s->tape, MU_DIMS(0, d.dim[0], d.dim[1], d.dim[2]));
    return mu_sum(s->tape, mu_forward(s->tape, s->whole, none));
}

/* One optimiser step on this rank's batch. Fills loss (NaN when skipped). False on error. */
static bool train_step(run *r, const mu_batch *b, float *loss_out)
{
    session *s = &r->s;
    mu_tensor *loss = NULL;
    *loss_out = NAN;
    if (b->samples > 0) {
        loss = mu_cross_entropy_with(s->tape, mu_forward(s->tape, s->whole, b->x), b->y,
                                     &(mu_cross_entropy_options){.label_smoothing = (float)s->o->label_smoothing});
        if (loss == NULL) {
            return false;
        }
        *loss_out = mu_tensor_item(loss);
    } else if (s->o->sync_bn && (loss = loss_of_nothing(s)) == NULL) {
        return false;
    }
    mu_status status;
    if (b->samples > 0 && !isfinite(*loss_out)) {
        char reason[64];
        snprintf(reason, sizeof(reason), "the loss of step %" PRId64 " is %g", s->state.step + 1, (double)*loss_out);
        status = mu_ddp_abandon(s->ddp, reason);
    } else if (b->total_samples == (int64_t)s->size * s->o->batch) {
        status = mu_ddp_backward(s->ddp, s->tape, loss);
    } else {
        /* Ranks hold different numbers of images: weigh them, so that each image counts the same. */
        status = mu_ddp_backward_weighted(s->ddp, s->tape, loss, b->samples);
    }
    if (status < 0) {
        return false;
    }
    if (status == MU_SKIPPED) {
        s->tally.skips++;
        *loss_out = NAN;
        return true;
    }
    s->tally.skips = 0;
    if (s->o->clip > 0 && mu_clip_grad_norm(s->net, (float)s->o->clip, NULL) < 0) {
        return false;
    }
    return mu_optimizer_step(s->optimizer) >= 0;
}

/* Sums the step's loss over ranks, and lets all ranks stop at the same step when one got a signal. */
static bool agree(run *r, const mu_batch *b, float loss, double *mean)
{
    double sums[2 + STOP_SIGNALS] = {0};
    int number = stop_asked();
    for (int i = 0; i < STOP_SIGNALS; i++) {
        sums[2 + i] = number == stop_signals[i];
    }
    if (b->samples > 0) {
        sums[0] = (double)loss * (double)b->samples;
        sums[1] = (double)b->samples;
    }
    if (mu_all_reduce(r->s.world, sums, 2 + STOP_SIGNALS, MU_F64, MU_SUM) < 0) {
        return false;
    }
    *mean = sums[1] > 0 ? sums[0] / sums[1] : NAN;
    for (int i = STOP_SIGNALS; i-- > 0;) {
        r->stopped = sums[2 + i] > 0 ? stop_signals[i] : r->stopped;
    }
    return true;
}

static void log_step(run *r, double loss, int64_t images, float lr)
{
    if (r->log == NULL) {
        return;
    }
    char text[32];
    snprintf(text, sizeof(text), isfinite(loss) ? "%.9g" : "null", loss);
    fprintf(r->log, "{\"step\":%" PRId64 ",\"epoch\":%" PRId64 ",\"loss\":%s,\"lr\":%.9g,\"images\":%" PRId64
                    ",\"seconds\":%.6f,\"cpu_seconds\":%.6f}\n",
            r->s.state.step, r->s.state.epoch + 1, text, (double)lr, images, progress_seconds(&r->bar), cpu_seconds());
}

static bool evaluate(run *r)
{
    session *s = &r->s;
    double before = seconds_now();
    mu_trace_begin(s->c, "evaluate");
    if (!session_evaluate(s, &r->last)) {
        return false;
    }
    mu_trace_end(s->c);
    r->scored_step = s->state.step;
    progress_pause(&r->bar, seconds_now() - before);
    return true;
}

static bool save(run *r)
{
    r->saved_step = r->s.state.step;
    if (r->log != NULL) {
        fflush(r->log); /* so that what goes on from here finds the steps before it there */
    }
    return train_state_save(&r->s);
}

/* In the middle of an epoch; its end writes anyway, and so does the end of the run. */
static bool checkpoint_is_due(const run *r)
{
    const session *s = &r->s;
    return s->o->checkpoint_every > 0 && s->state.step % s->o->checkpoint_every == 0 && r->stopped == 0 &&
           mu_loader_steps_left(s->loader) > 0 && !train_state_done(s);
}

/* images, seconds: of this process; a resumed epoch's loss is that of the whole epoch. */
static bool end_epoch(run *r, int64_t images, double seconds)
{
    session *s = &r->s;
    const train_options *o = s->o;
    char scored[96] = "";
    int64_t epoch = s->state.epoch; /* already the next one */
    progress_clear(&r->bar);
    if (o->eval_every > 0 && (epoch % o->eval_every == 0 || s->state.step == s->last_step)) {
        if (!evaluate(r)) {
            return false;
        }
        snprintf(scored, sizeof(scored), "  test loss %.4f  test accuracy %.2f %%", r->last.loss,
                 100.0 * (double)r->last.correct / (double)r->last.count);
    }
    char of[32] = "";
    if (o->epochs > 0) {
        snprintf(of, sizeof(of), "/%" PRId64, o->epochs);
    }
    session_say(s, "epoch %" PRId64 "%s  loss %.4f%s  %.0f images/s  %.1f s\n", epoch, of,
                s->tally.images > 0 ? s->tally.loss / (double)s->tally.images : NAN, scored,
                seconds > 0 ? (double)images / seconds : 0, seconds);
    s->tally.loss = 0;
    s->tally.images = 0;
    return save(r);
}

/* Steps of one epoch, from where the state says; false on error. */
static bool train_epoch(run *r)
{
    session *s = &r->s;
    mu_batch b;
    char phase[64];
    double started = progress_seconds(&r->bar);
    int64_t before = s->tally.images;
    if (mu_loader_seek(s->loader, s->state.epoch, s->state.samples_in_epoch) < 0) {
        return false;
    }
    while (!train_state_done(s) && r->stopped == 0) {
        float loss, lr = mu_schedule_lr(&s->schedule, train_state_schedule_step(s));
        double mean;
        if (mu_loader_steps_left(s->loader) > 0) {
            mu_trace_step(s->c, s->state.step + 1);
        }
        mu_tape_reset(s->tape);
        mu_tape_set_step(s->tape, (uint64_t)s->state.step); /* dropout of a resumed run draws the same */
        if (!mu_loader_next(s->loader, s->tape, &b)) {
            break;
        }
        snprintf(phase, sizeof(phase), "step %" PRId64, s->state.step + 1);
        mu_group_set_phase(s->world, phase);
        mu_optimizer_set_lr(s->optimizer, lr);
        if (!train_step(r, &b, &loss) || !agree(r, &b, loss, &mean)) {
            return false;
        }
        s->state.step++;
        s->state.step_in_epoch++;
        s->state.samples_in_epoch = mu_loader_position(s->loader);
        if (isfinite(mean)) {
            s->tally.loss += mean * (double)b.total_samples;
            s->tally.images += b.total_samples;
        }
        log_step(r, mean, b.total_samples, lr);
        progress_step(&r->bar, s->state.step, mean, b.total_samples, (double)lr);
        if (s->tally.skips >= SKIPS_MAX) {
            mu_group_abort(s->world, "the loss is not finite");
            return false;
        }
        if (checkpoint_is_due(r) && !save(r)) {
            return false;
        }
    }
    mu_trace_step(s->c, -1);
    if (mu_context_status(s->c) < 0) {
        return false;
    }
    if (mu_loader_steps_left(s->loader) > 0) {
        return true; /* stopped within the epoch */
    }
    s->state.epoch++;
    s->state.step_in_epoch = 0;
    s->state.samples_in_epoch = 0;
    return end_epoch(r, s->tally.images - before, progress_seconds(&r->bar) - started);
}

static bool count_trainable(void *user, const char *name, mu_parameter *p)
{
    (void)name;
    if (mu_parameter_trainable(p)) {
        *(int64_t *)user += mu_tensor_elements(mu_parameter_tensor(p));
    }
    return true;
}

static bool say_what(session *s)
{
    const train_options *o = s->o;
    char all[32], some[32], images[32], tests[32], steps[32];
    int64_t trainable = 0;
    mu_dims d = mu_dataset_dims(s->train);
    if (mu_module_each_parameter(s->net, count_trainable, &trainable) < 0) {
        return false;
    }
    session_say(s, "%s: %s parameters, %s trained, %d outputs\n", o->model,
                with_commas(mu_module_parameter_elements(s->net), all), with_commas(trainable, some), s->outputs);
    session_say(s, "%s: %s images of %d x %d x %d in %d classes, %s for testing%s\n", o->data,
                with_commas(mu_dataset_count(s->train), images), (int)d.dim[0], (int)d.dim[1], (int)d.dim[2],
                s->classes, with_commas(mu_dataset_count(s->test), tests),
                s->no_test ? " (the same: there is no test part)" : "");
    session_say(s, "%d rank%s (%s) x batch %d, %s, lr %g, %s over %s steps\n", s->size, s->size == 1 ? "" : "s",
                mu_group_kind(s->world), (int)o->batch, o->optimizer, o->lr, o->schedule,
                with_commas(s->schedule.total_steps, steps));
    return true;
}

static bool finish(run *r)
{
    session *s = &r->s;
    const train_options *o = s->o;
    char correct[32], count[32];
    progress_clear(&r->bar);
    if (r->stopped != 0) {
        /* Within the seconds a batch system leaves: state only. */
        if (r->saved_step != s->state.step && !save(r)) {
            return false;
        }
        if (s->rank == 0) {
            cli_fail(o->command, 0, "stopped by signal %d after step %" PRId64 "%s%s", r->stopped, s->state.step,
                     o->checkpoint != NULL ? "; go on with --resume " : "",
                     o->checkpoint != NULL ? o->checkpoint : "");
        }
        return true;
    }
    if ((r->saved_step != s->state.step && !save(r)) || (r->scored_step != s->state.step && !evaluate(r))) {
        return false;
    }
    double rate = progress_rate(&r->bar), seconds = progress_seconds(&r->bar);
    if (o->save != NULL && ((s->rank == 0 && mu_save(s->net, o->save, NULL) < 0) || mu_barrier(s->world) < 0)) {
        return false;
    }
    session_say(s, "trained to step %" PRId64 " in %.1f s, %.0f images/s\n", s->state.step, seconds, rate);
    if (s->rank == 0) {
        printf("test accuracy %.2f %% (%s of %s), loss %.4f\n",
               100.0 * (double)r->last.correct / (double)r->last.count, with_commas(r->last.correct, correct),
               with_commas(r->last.count, count), r->last.loss);
        if (o->save != NULL) {
            printf("saved %s (weights, a PyTorch state dict)\n", o->save);
        }
        if (o->checkpoint != NULL) {
            printf("saved %s (training state, for --resume)\n", o->checkpoint);
        }
    }
    return true;
}

/* What docs/report.md describes, of rank 0; also of a run that was stopped. */
static bool write_report(session *s)
{
    const char *path = s->o->report;
    if (path == NULL || s->rank != 0) {
        return true;
    }
    size_t n = mu_ddp_report_json(s->ddp, NULL, 0);
    char *text = malloc(n + 1);
    bool print = strcmp(path, "-") == 0;
    FILE *f = text == NULL ? NULL : print ? stdout : fopen(path, "w");
    bool ok = f != NULL && n > 0;
    if (ok) {
        n = mu_ddp_report_json(s->ddp, text, n + 1);
        ok = fwrite(text, 1, n, f) == n;
    }
    if (f != NULL) {
        ok = (print ? fflush(f) : fclose(f)) == 0 && ok;
    }
    free(text);
    if (!ok) {
        cli_fail(s->o->command, CLI_FAILED, "--report %s: not all of it could be written", path);
    }
    return ok;
}

static int train(run *r)
{
    session *s = &r->s;
    if (s->rank == 0 && s->o->log != NULL) {
        r->log = fopen(s->o->log, s->o->resume != NULL ? "a" : "w");
        if (r->log == NULL) {
            mu_group_abort(s->world, "cannot write the log");
            session_close(s, CLI_FAILED, false);
            return cli_usage_error(s->o->command, "--log %s: cannot write", s->o->log);
        }
    }
    bool ok = say_what(s);
    progress_start(&r->bar, s->rank == 0 && !s->o->quiet, s->o->epochs, s->steps_per_epoch, s->state.step,
                   s->last_step);
    r->bar.offset = train_state_schedule_step(s) - s->state.step;
    r->scored_step = r->saved_step = -1;
    while (ok && !train_state_done(s) && r->stopped == 0) {
        ok = train_epoch(r);
    }
    ok = ok && finish(r);
    ok = ok && write_report(s);
    if (r->log != NULL && fclose(r->log) != 0 && ok) {
        cli_fail(s->o->command, CLI_FAILED, "--log %s: not all of it could be written", s->o->log);
        ok = false;
    }
    int code = session_close(s, ok ? CLI_OK : CLI_FAILED, false);
    if (code == CLI_FAILED && r->s.tally.skips >= SKIPS_MAX) {
        return cli_fail(s->o->command, CLI_FAILED, "no finite loss in %d steps: try a lower --lr or --clip", SKIPS_MAX);
    }
    /* As if the signal had ended it, so that a script does not take the run for finished. */
    return code == CLI_OK && r->stopped != 0 ? 128 + r->stopped : code;
}

int cmd_train(int argc, char **argv)
{
    static train_options o;
    static run r;
    int code = train_options_parse(&o, argc, argv);
    if (code >= 0) {
        return code;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    if ((o.ranks > 1 || o.max_restarts > 0) && !in_launcher()) {
        /* Set it up once here: what is wrong with the input is said in one line, and no rank is started. */
        int64_t ranks = o.ranks > 0 ? o.ranks : 1;
        code = session_open(&r.s, &o, true);
        if (code < 0) {
            code = session_setup_train(&r.s);
        }
        if (code >= 0 || (code = session_close(&r.s, CLI_OK, true)) != CLI_OK) {
            return code;
        }
        return relaunch((int)ranks, (int)o.max_restarts, argc, argv);
    }
    if ((code = session_open(&r.s, &o, false)) >= 0) {
        return code;
    }
    if (o.checkpoint != NULL || r.s.size > 1) {
        stop_listen(r.s.c, o.checkpoint != NULL); /* before the last exchange of the set-up: once a rank trains, all listen */
    }
    if ((code = session_setup_train(&r.s)) >= 0) {
        return code;
    }
    return train(&r);
}
