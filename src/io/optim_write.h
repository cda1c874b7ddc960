/* An optimiser's state in the form of torch.optim's state_dict: a pickle of numbers and of tensors whose storages follow
 * in the same order. What file it goes into is the caller's. */
#ifndef MUI_OPTIM_WRITE_H
#define MUI_OPTIM_WRITE_H

#include "io/archive.h"
#include "io/pickle_writer.h"
#include "optim/optimizer.h"
#include <muster/checkpoint.h>

typedef struct mui_optim_writer {
    mu_context *context;
    mu_optimizer *optimizer; /* NULL: nothing is written */
    int64_t parameters;
    float *room;             /* for the largest state tensor */
    int64_t *numbers;        /* of parameter i: PyTorch counts them group by group; -1: left out */
} mui_optim_writer;

/* The outcome of options, which may be NULL. Close it also after an error. */
mu_status mui_optim_writer_open(mu_context *c, mu_optimizer *o, const mu_optimizer_save_options *options,
                                mui_optim_writer *out) MU_MUST_USE;
void mui_optim_writer_close(mui_optim_writer *w);
/* The state_dict at this place of the pickle; its storages are numbered from first_storage on. */
void mui_optim_put(const mui_optim_writer *w, mui_pickle_writer *p, int64_t first_storage);
/* The storages, in the order in which mui_optim_put numbered them. Of state that ranks share all of them call it, those
 * that do not write with NULL. */
mu_status mui_optim_write(const mui_optim_writer *w, mui_archive *a, int64_t first_storage) MU_MUST_USE;

#endif
