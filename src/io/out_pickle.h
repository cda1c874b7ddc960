/* State dicts and their tensors as pickle, for PyTorch's zip and legacy files. */
#ifndef MUI_OUT_PICKLE_H
#define MUI_OUT_PICKLE_H

#include "io/out_list.h"
#include "io/pickle_writer.h"

/* A contiguous tensor over the whole of storage `key`. */
void mui_pk_tensor(mui_pickle_writer *w, int64_t key, mu_dtype dtype, mu_dims dims);
void mui_pk_out_tensor(mui_pickle_writer *w, int64_t key, const mui_out_tensor *t);
/* The state dict at this place of the pickle. Storages get numbers from first on, in list order, one for tensors that are
 * tied; returns the next free one. */
int64_t mui_pk_state_dict(mui_pickle_writer *w, const mui_out_list *l, int64_t first);

#endif
