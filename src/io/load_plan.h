/* A load in steps. Plan: find, compare, judge. Verify: whatever of the file can turn out bad does so here. Prepare: all
 * memory that writing needs. Until then nothing of the model is touched.
 *
 * Then the elements go from the mapped file into the model, without a copy between. First what can still fail: tensors
 * that a kernel keeps in a layout of its own are reordered, and the caller keeps a snapshot of these to go back to. The
 * rest is plain memory, and copying to it cannot fail; a group can, and then what has arrived has arrived.
 *
 * Over a group rank 0 plans, verifies and sends; all write alike. */
#ifndef MUI_LOAD_PLAN_H
#define MUI_LOAD_PLAN_H

#include "base/text.h"
#include "io/load_match.h"
#include "io/snapshot.h"
#include <muster/checkpoint.h>

typedef struct mui_plan_item {
    size_t entry;     /* of the file; SIZE_MAX: none, zeros are taken */
    bool take;        /* the state will be overwritten */
    bool laid_out;    /* by a kernel, on some rank: writing it can fail */
    char *staged;     /* the reader: elements in the model's type, of what cannot stay in the file (a deflated member
                         is unpacked once); NULL: they are read from the file */
    bool filled;      /* for the first state of a value: the value will be, under this or another name */
} mui_plan_item;

typedef struct mui_load_counts { /* as in mu_load_report */
    int64_t loaded, missing, unexpected, mismatched, converted, renamed, elements, elements_loaded;
} mui_load_counts;

typedef struct mui_plan {
    mu_context *context;
    mui_states states;
    mui_plan_item *items; /* one for each state */
    mui_load_counts counts;
    char removed[MUI_PREFIX_BYTES], added[MUI_PREFIX_BYTES];
    mui_text text;
    mu_checkpoint_file *file; /* the reader's, open until all is written; the plan closes it */
    bool *fragile;            /* for the snapshot: states whose memory is at risk, see mui_snapshot_take */
    char *stored;             /* a stretch of elements in the file's type */
    char *piece;              /* a group: what is being sent */
    char *whole;              /* one laid out tensor, row-major */
} mui_plan;

/* All ranks. */
mu_status mui_plan_open(mu_context *c, mu_module *root, mui_plan *out) MU_MUST_USE;
void mui_plan_close(mui_plan *p);
/* The reader: decides what goes where. key as in mu_load_options. */
mu_status mui_plan_make(mui_plan *p, mu_checkpoint_file *k, const mu_load_options *o) MU_MUST_USE;
/* The reader: checks all data that is taken. The plan keeps k from here on, whatever comes of it. */
mu_status mui_plan_verify(mui_plan *p, mu_checkpoint_file *k) MU_MUST_USE;
/* All ranks: the reader's decisions and report reach the others. Ends with equal outcomes. */
mu_status mui_plan_share(mui_plan *p, mu_group *g) MU_MUST_USE;
/* All ranks: makes the rest fit to be done. Ends with equal outcomes. */
mu_status mui_plan_prepare(mui_plan *p, mu_group *g) MU_MUST_USE;
/* All ranks: writes what may fail. On an error, the same on all, the caller restores its snapshot. */
mu_status mui_plan_write_laid_out(mui_plan *p, mu_group *g) MU_MUST_USE;
/* All ranks: writes the rest. Only the group can fail. */
mu_status mui_plan_write_plain(mui_plan *p, mu_group *g) MU_MUST_USE;
/* The report for the user, its texts with the context. */
mu_status mui_plan_report(const mui_plan *p, mu_load_report *out) MU_MUST_USE;
/* Frees what verifying and preparing took, and the file. */
void mui_plan_drop_data(mui_plan *p);

#endif
