/* What a mu_reducer is made of: the reducer for other front ends. reducer_alone.c: its calls; reducer_alone_layout.c: its
 * slab. */
#ifndef MUI_REDUCER_ALONE_H
#define MUI_REDUCER_ALONE_H

#include "ddp/reducer.h"
#include <muster/reducer.h>

/* One parameter, by the front end's number. */
typedef struct mui_entry {
    char *name;
    int64_t count;
    mu_dtype dtype;
    void *memory;   /* the front end's; NULL: the slab */
    int64_t slice;  /* of the core */
    size_t offset;  /* of its slice in the slab, in bytes */
    size_t bytes;   /* without padding */
} mui_entry;

struct mu_reducer {
    mu_context *context;
    mu_group *group;
    mu_reducer_options options;
    char *name;
    int ordinal; /* tells those of one context apart */
    mui_reducer *core;
    mui_entry *entries;
    int64_t count;
    int64_t *entry_of; /* of each slice */
    char *slab;        /* the group's memory */
    size_t slab_bytes;
    int64_t bucket_count;
    bool planned;

    bool running;
    mu_status local; /* this rank's own failure in the running reduction */
    uint8_t *states; /* by slice, for mui_reducer_begin */
    bool weighted;
    int64_t samples;
    double began;

    mu_status broken;
    char broken_text[1400];

    /* Of the last reduction that went through. */
    int words;
    uint32_t *masks;      /* of each entry, words each */
    int64_t *ready_order; /* entries */
    int64_t ready_count;
    int64_t total_samples;
    mu_reducer_report report;
};

/* Reverse order of the front end's, or, where given, this one (all entries). Collective: a new slab from the group, with
 * the content of the old one. Below 0: this rank alone could not, or the group is broken. */
mu_status mui_alone_lay_out(mu_reducer *r, const int64_t *order) MU_MUST_USE;
/* After the first reduction: in the order in which rank 0's became ready. Collective. */
mu_status mui_alone_plan(mu_reducer *r) MU_MUST_USE;

#endif
