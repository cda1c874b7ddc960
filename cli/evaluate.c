/* Accuracy and loss over all ranks: each test image once, counts summed, never a mean of means. */
#include "session.h"

#include <stdlib.h>

/* Makes room for a batch's logits and labels; they only grow. */
static bool scratch(session *s, int64_t samples)
{
    size_t logits = (size_t)samples * (size_t)s->outputs, labels = (size_t)samples;
    if (logits > s->logits_count) {
        float *p = realloc(s->logits, logits * sizeof(*p));
        if (p == NULL) {
            return false;
        }
        s->logits = p;
        s->logits_count = logits;
    }
    if (labels > s->labels_count) {
        int64_t *p = realloc(s->labels, labels * sizeof(*p));
        if (p == NULL) {
            return false;
        }
        s->labels = p;
        s->labels_count = labels;
    }
    return true;
}

static int64_t count_correct(const session *s, int64_t samples)
{
    int64_t correct = 0;
    for (int64_t i = 0; i < samples; i++) {
        const float *row = s->logits + i * s->outputs;
        int best = 0;
        bool ordered = row[0] == row[0];
        for (int k = 1; k < s->outputs; k++) {
            ordered = ordered && row[k] == row[k]; /* a NaN is nobody's answer */
            if (row[k] > row[best]) {
                best = k;
            }
        }
        correct += ordered && best == s->labels[i];
    }
    return correct;
}

bool session_evaluate(session *s, score *out)
{
    mu_batch b;
    /* correct, count, sum of losses */
    double sums[3] = {0, 0, 0};
    bool was_training = mu_module_is_training(s->whole);
    mu_module_train(s->whole, false);
    mu_group_set_phase(s->world, "evaluation");
    if (mu_loader_rewind(s->test_loader, 0, 0) < 0) {
        return false;
    }
    while (mu_tape_reset(s->test_tape), mu_loader_next(s->test_loader, s->test_tape, &b)) {
        if (b.samples == 0) {
            continue;
        }
        mu_tensor *logits = mu_forward(s->test_tape, s->whole, b.x);
        mu_tensor *loss = mu_cross_entropy(s->test_tape, logits, b.y);
        if (loss == NULL || !scratch(s, b.samples) ||
            mu_tensor_read(logits, s->logits, b.samples * s->outputs) < 0 ||
            mu_tensor_read_i64(b.y, s->labels, b.samples) < 0) {
            return false;
        }
        sums[0] += (double)count_correct(s, b.samples);
        sums[1] += (double)b.samples;
        sums[2] += (double)mu_tensor_item(loss) * (double)b.samples;
    }
    if (mu_context_status(s->c) < 0 || mu_all_reduce(s->world, sums, 3, MU_F64, MU_SUM) < 0) {
        return false;
    }
    mu_module_train(s->whole, was_training);
    *out = (score){.correct = (int64_t)sums[0], .count = (int64_t)sums[1],
                   .loss = sums[1] > 0 ? sums[2] / sums[1] : 0};
    return true;
}
