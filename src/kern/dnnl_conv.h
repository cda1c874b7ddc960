/* Convolutions by oneDNN, for dnnl_conv.c (plans, forward) and dnnl_conv_backward.c alone. */
#ifndef MUI_DNNL_CONV_H
#define MUI_DNNL_CONV_H

#include "kern/dnnl_compat.h"

typedef enum mui_conv_by { MUI_NOT_MADE, MUI_BY_PRIMITIVE, MUI_BY_TAPS, MUI_BY_FEW_CHANNELS, MUI_BY_REFERENCE } mui_conv_by;
/* One direction: what does it, and what that wants instead of the stored weight, the plan's x, or the plan's y. */
typedef struct mui_dnnl_pass {
    mui_conv_by by;
    mui_exec *exec; /* the primitive. With taps, x_reorder and y_reorder of a result go back to the plan's layout */
    mui_exec *weight_reorder, *x_reorder, *y_reorder; /* NULL: works on the plan's layout */
    size_t weight_bytes, x_bytes, y_bytes;
} mui_dnnl_pass;

typedef struct mui_dnnl_conv {
    mui_conv2d_impl base;
    dnnl_primitive_desc_t forward_pd; /* hint for the backward ones */
    dnnl_alg_kind_t algorithm;
    mui_md x, y, stored; /* as forward has them; a layout of 1x1 maps is plain too, but plain would choose slow code */
    mui_dnnl_pass pass[3];            /* by mui_conv_pass */
    const mui_conv2d_impl *reference; /* or emulation, serves a direction that oneDNN lacks; NULL until needed */
    size_t stored_bytes;              /* of the weight */
    char what[160];
} mui_dnnl_conv;

typedef struct mui_conv_dims {
    int64_t x[4], y[4], w[5], b[1];
    int w_ndims;
} mui_conv_dims;
mui_conv_dims mui_conv_dims_of(const mui_conv2d_shape *s);
mui_dnnl_conv_args mui_conv_args_of(const mui_conv2d_shape *s, dnnl_alg_kind_t algorithm);
dnnl_data_type_t mui_conv_type_of(const mui_conv2d_shape *s); /* of its images */
mui_md mui_conv_any(mui_engine *e, int ndims, const int64_t *dims, dnnl_data_type_t type);
/* Implementations on plain layouts or without vector code: taken only when there is nothing else. */
bool mui_conv_is_slow(dnnl_primitive_desc_t pd);
/* A reorder between the stored form and what a primitive wants; *out NULL when they are one. */
bool mui_conv_reorder(mui_engine *e, mui_md from, mui_md to, mui_exec **out);
/* The pass by matrix products: what it reads and writes is in tap_conv.h's layouts, the rest is converted. */
mu_status mui_conv_make_taps(mui_engine *e, mui_dnnl_conv *c, mui_conv_pass which);
mu_status mui_conv_convert(mui_engine *e, mui_conversion what, mui_exec *reorder, const void *from, void *to);
/* Input of a pass converted to what it wants, in that scratch slot (a weight in MUI_SCRATCH_W). NULL on failure. */
const void *mui_conv_wanted(mui_engine *e, mui_exec *reorder, size_t bytes, const void *from, mui_scratch slot);
const void *mui_conv_wanted_weight(mui_engine *e, const mui_dnnl_pass *p, const void *w);

mu_status mui_dnnl_conv_backward_data(mui_engine *e, const mui_conv2d_plan *plan, const void *dy, const float *w, void *dx);
mu_status mui_dnnl_conv_backward_weights(mui_engine *e, const mui_conv2d_plan *plan, const void *x, const void *dy,
                                         float *dw, float *db, bool accumulate_w, bool accumulate_b);

#endif
