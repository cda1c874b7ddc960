/* What a data set is inside: a table of functions, and the scratch memory a thread brings along.
 *
 * Reading a sample never touches the context's error: it may run in a loader thread far ahead of the batch its user
 * is at, so what went wrong is written into a mui_trouble and raised when that batch is asked for. Only running out of
 * memory is raised at once. */
#ifndef MUI_DATASET_H
#define MUI_DATASET_H

#include "base/context.h"
#include "data/image.h"
#include "data/trouble.h"
#include <muster/data.h>

/* Reads samples; every function may run in several threads at once, each with its own scratch. */
typedef struct mui_dataset_kind {
    /* Sample i as bytes, (C, H, W). *pixels belongs to the data set or the scratch, until the scratch is used again. */
    mu_status (*bytes)(mu_dataset *d, mui_scratch *s, int64_t i, const uint8_t **pixels, int64_t *label,
                       mui_trouble *trouble);
    /* Instead of bytes: sample i as floats. */
    mu_status (*floats)(mu_dataset *d, int64_t i, float *x, int64_t *label, mui_trouble *trouble);
    /* What sample i is called in messages: its file. NULL: "sample 17". */
    void (*name)(const mu_dataset *d, int64_t i, char *out, size_t out_bytes);
    /* Frees `state`; may be NULL. */
    void (*destroy)(mu_dataset *d);
} mui_dataset_kind;

struct mu_dataset {
    mu_context *context;
    const mui_dataset_kind *kind;
    int64_t count, elements; /* samples; numbers in one sample */
    mu_dims dims;
    int classes;
    char **class_names; /* classes of them, or NULL */

    uint8_t *pixels; /* (count, elements), of sets that are kept in memory */
    uint8_t *labels; /* (count), of the same */
    void *state;     /* of the kind */

    bool skip_bad;
    int64_t bad;     /* distinct samples left out so far */
    uint8_t *is_bad; /* (count) of 0 or 1, with skip_bad */

    mui_scratch scratch; /* of mu_dataset_get: the caller's thread only */
};

/* Kept in memory: idx.c and cifar.c fill pixels and labels. */
extern const mui_dataset_kind mui_bytes_kind;

/* A data set without samples yet, not owned by the context. NULL on failure. */
mu_dataset *mui_dataset_make(mu_context *c, const mui_dataset_kind *kind);
void mui_dataset_destroy(mu_dataset *d);
/* Checks the shape, sets elements, and gives d to the context. On failure d is destroyed and NULL returned. */
mu_dataset *mui_dataset_finish(mu_dataset *d);
/* Drops samples of a set kept in memory with label >= first (0: none). MU_ERR_FORMAT if nothing is left. */
mu_status mui_dataset_filter(mu_dataset *d, int first, const char *where) MU_MUST_USE;
/* True when the options are in range; raises MU_ERR_ARG otherwise. *o gets them, zeros for NULL. */
bool mui_dataset_options(mu_context *c, const mu_dataset_options *options, mu_dataset_options *o);
/* "DIR/name.jpg" or "sample 17". */
void mui_dataset_sample_name(const mu_dataset *d, int64_t i, char *out, size_t out_bytes);
/* Notes that sample i was left out; true the first time. */
bool mui_dataset_note_bad(mu_dataset *d, int64_t i);

#endif
