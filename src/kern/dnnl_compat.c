/* See dnnl_compat.h. Written for oneDNN 2.6 and the 3.x interface. */
#include "kern/dnnl_compat.h"
#include "base/alloc.h"

#include <oneapi/dnnl/dnnl_debug.h>
#include <string.h>

mu_status mui_dnnl_fail(mui_engine *e, dnnl_status_t s, const char *what)
{
    return mui_fail(e->context, MU_ERR_DEVICE, "oneDNN %d.%d, %s: %s", DNNL_VERSION_MAJOR, DNNL_VERSION_MINOR, what,
                    dnnl_status2str(s));
}

/* The engine will destroy it; on failure it is destroyed at once. */
static void destroy(mui_dnnl_object o)
{
    switch (o.kind) {
    case MUI_OBJECT_PD: dnnl_primitive_desc_destroy(o.handle); break;
    case MUI_OBJECT_PRIMITIVE: dnnl_primitive_destroy(o.handle); break;
    case MUI_OBJECT_MEMORY: dnnl_memory_destroy(o.handle); break;
#if DNNL_VERSION_MAJOR >= 3
    case MUI_OBJECT_MD: dnnl_memory_desc_destroy(o.handle); break;
#endif
    default: break;
    }
}

static bool own(mui_engine *e, void *handle, int kind)
{
    struct mui_dnnl *d = e->dnnl;
    mui_dnnl_object o = {handle, kind};
    if (!MUI_GROW(e->context, d->objects, d->object_count, d->object_capacity)) {
        destroy(o);
        return false;
    }
    d->objects[d->object_count++] = o;
    return true;
}

static void close_all(mui_engine *e)
{
    struct mui_dnnl *d = e->dnnl;
    while (d->object_count > 0) {
        destroy(d->objects[--d->object_count]);
    }
    mui_free(e->context, d->objects);
    mui_free(e->context, d->layouts);
    if (d->attr != NULL) {
        dnnl_primitive_attr_destroy(d->attr);
    }
    if (d->stream != NULL) {
        dnnl_stream_destroy(d->stream);
    }
    if (d->engine != NULL) {
        dnnl_engine_destroy(d->engine);
    }
}

void mui_dnnl_close(mui_engine *e)
{
    if (e->dnnl != NULL) {
        close_all(e);
        e->dnnl = NULL; /* its memory is the engine's arena */
    }
}

static dnnl_status_t open_all(struct mui_dnnl *d)
{
    dnnl_status_t s = dnnl_engine_create(&d->engine, dnnl_cpu, 0);
    if (s == dnnl_success) {
        s = dnnl_stream_create(&d->stream, d->engine, dnnl_stream_default_flags);
    }
    if (s == dnnl_success) {
        s = dnnl_primitive_attr_create(&d->attr);
    }
    if (s == dnnl_success) {
        s = dnnl_primitive_attr_set_scratchpad_mode(d->attr, dnnl_scratchpad_mode_user);
    }
    return s;
}

static mu_status gemm(mui_engine *e, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                      const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c, int64_t ldc)
{
    dnnl_status_t s = dnnl_sgemm(trans_a ? 'T' : 'N', trans_b ? 'T' : 'N', m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    if (s != dnnl_success) {
        return mui_fail(e->context, MU_ERR_DEVICE, "oneDNN, matrix product (%lld, %lld) by (%lld, %lld): %s",
                        (long long)m, (long long)k, (long long)k, (long long)n, dnnl_status2str(s));
    }
    return MU_OK;
}

bool mui_dnnl_open(mui_engine *e)
{
    e->dnnl = mui_engine_keep(e, sizeof(*e->dnnl));
    if (e->dnnl == NULL) {
        return false;
    }
    mui_dnnl_set_threads(e->threads);
    e->together = e->threads > 1 ? mui_dnnl_together() : NULL;
    dnnl_status_t s = open_all(e->dnnl);
    if (s != dnnl_success) {
        mui_dnnl_fail(e, s, "opening the CPU engine");
        return false;
    }
    e->k.conv2d_plan = mui_dnnl_conv2d_plan;
    e->k.conv2d_weight_layout = mui_dnnl_conv2d_weight_layout;
    e->k.reorder = mui_dnnl_reorder;
    e->k.image_layout = mui_dnnl_image_layout;
    e->k.gemm = gemm;
    mui_dnnl_norm_fill(&e->k);
    mui_dnnl_pool_fill(&e->k);
    e->k.bf16 = mui_dnnl_has_bf16();
    e->k.bf16_instructions = mui_dnnl_has_bf16_instructions();
    e->k.bf16_reorder = mui_dnnl_bf16_reorder;
    e->k.bf16_product = mui_dnnl_bf16_product;
    return true;
}

/* -- memory descriptors ----------------------------------------------------------------------------------------- */
#if DNNL_VERSION_MAJOR >= 3
static mui_md keep_md(mui_engine *e, dnnl_memory_desc_t md)
{
    return own(e, md, MUI_OBJECT_MD) ? md : NULL;
}

mui_md mui_md_typed(mui_engine *e, int ndims, const int64_t *dims, dnnl_format_tag_t tag, dnnl_data_type_t type)
{
    dnnl_memory_desc_t md = NULL;
    dnnl_status_t s = dnnl_memory_desc_create_with_tag(&md, ndims, dims, type, tag);
    if (s != dnnl_success) {
        mui_dnnl_fail(e, s, "memory descriptor");
        return NULL;
    }
    return keep_md(e, md);
}

mui_md mui_md_copy(mui_engine *e, mui_md md)
{
    dnnl_memory_desc_t copy = NULL;
    dnnl_status_t s = dnnl_memory_desc_clone(&copy, md);
    if (s != dnnl_success) {
        mui_dnnl_fail(e, s, "memory descriptor");
        return NULL;
    }
    return keep_md(e, copy);
}

mui_md_info mui_md_query(mui_md md)
{
    mui_md_info r = {.bytes = dnnl_memory_desc_get_size(md)};
    dnnl_format_kind_t kind = dnnl_format_kind_undef;
    dnnl_dims_t *list = NULL;
    dnnl_memory_desc_query(md, dnnl_query_format_kind, &kind);
    r.blocked = kind == dnnl_blocked;
    dnnl_memory_desc_query(md, dnnl_query_ndims_s32, &r.ndims);
    dnnl_memory_desc_query(md, dnnl_query_dims, &list);
    memcpy(r.dims, *list, (size_t)r.ndims * sizeof(int64_t));
    dnnl_memory_desc_query(md, dnnl_query_padded_dims, &list);
    memcpy(r.padded, *list, (size_t)r.ndims * sizeof(int64_t));
    if (r.blocked) {
        dnnl_memory_desc_query(md, dnnl_query_strides, &list);
        memcpy(r.strides, *list, (size_t)r.ndims * sizeof(int64_t));
        dnnl_memory_desc_query(md, dnnl_query_inner_nblks_s32, &r.blocks);
        dnnl_memory_desc_query(md, dnnl_query_inner_blks, &list);
        memcpy(r.block, *list, (size_t)r.blocks * sizeof(int64_t));
        dnnl_memory_desc_query(md, dnnl_query_inner_idxs, &list);
        for (int i = 0; i < r.blocks; i++) {
            r.block_dim[i] = (int)(*list)[i];
        }
    }
    return r;
}
#else
mui_md mui_md_copy(mui_engine *e, mui_md md)
{
    dnnl_memory_desc_t *copy = mui_engine_keep(e, sizeof(*copy));
    if (copy != NULL) {
        *copy = *md;
    }
    return copy;
}

mui_md mui_md_typed(mui_engine *e, int ndims, const int64_t *dims, dnnl_format_tag_t tag, dnnl_data_type_t type)
{
    dnnl_memory_desc_t md;
    dnnl_status_t s = dnnl_memory_desc_init_by_tag(&md, ndims, dims, type, tag);
    if (s != dnnl_success) {
        mui_dnnl_fail(e, s, "memory descriptor");
        return NULL;
    }
    return mui_md_copy(e, &md);
}

mui_md_info mui_md_query(mui_md md)
{
    mui_md_info r = {.ndims = md->ndims,
                     .bytes = dnnl_memory_desc_get_size(md),
                     .blocked = md->format_kind == dnnl_blocked && md->extra.flags == 0};
    size_t bytes = (size_t)r.ndims * sizeof(int64_t);
    memcpy(r.dims, md->dims, bytes);
    memcpy(r.padded, md->padded_dims, bytes);
    if (r.blocked) {
        const dnnl_blocking_desc_t *b = &md->format_desc.blocking;
        memcpy(r.strides, b->strides, bytes);
        r.blocks = b->inner_nblks;
        memcpy(r.block, b->inner_blks, (size_t)r.blocks * sizeof(int64_t));
        for (int i = 0; i < r.blocks; i++) {
            r.block_dim[i] = (int)b->inner_idxs[i];
        }
    }
    return r;
}
#endif

mui_md mui_md_tagged(mui_engine *e, int ndims, const int64_t *dims, dnnl_format_tag_t tag)
{
    return mui_md_typed(e, ndims, dims, tag, dnnl_f32);
}

mui_md mui_md_any(mui_engine *e, int ndims, const int64_t *dims)
{
    return mui_md_tagged(e, ndims, dims, dnnl_format_tag_any);
}

mui_md mui_md_plain(mui_engine *e, int ndims, const int64_t *dims)
{
    static const dnnl_format_tag_t tags[] = {dnnl_format_tag_undef, dnnl_a,    dnnl_ab,    dnnl_abc,
                                             dnnl_abcd,             dnnl_abcde, dnnl_abcdef};
    return mui_md_tagged(e, ndims, dims, tags[ndims]);
}

size_t mui_md_bytes(mui_md md)
{
    return dnnl_memory_desc_get_size(md);
}

/* -- primitive descriptors -------------------------------------------------------------------------------------- */
static mu_status created(mui_engine *e, dnnl_status_t s, const char *what, dnnl_primitive_desc_t *pd)
{
    if (s == dnnl_unimplemented) {
        *pd = NULL;
        return MU_OK;
    }
    if (s != dnnl_success) {
        *pd = NULL;
        return mui_dnnl_fail(e, s, what);
    }
    return own(e, *pd, MUI_OBJECT_PD) ? MU_OK : MU_ERR_NOMEM;
}

mu_status mui_pd_conv(mui_engine *e, mui_conv_pass pass, const mui_dnnl_conv_args *a, dnnl_primitive_desc_t hint,
                      dnnl_primitive_desc_t *pd)
{
    dnnl_status_t s;
#if DNNL_VERSION_MAJOR >= 3
    dnnl_engine_t engine = e->dnnl->engine;
    if (pass == MUI_CONV_FORWARD) {
        s = dnnl_convolution_forward_primitive_desc_create(pd, engine, dnnl_forward_training, a->algorithm, a->x, a->w,
                                                           a->b, a->y, a->stride, a->gaps, a->pad, a->pad,
                                                           e->dnnl->attr);
    } else if (pass == MUI_CONV_BACKWARD_DATA) {
        s = dnnl_convolution_backward_data_primitive_desc_create(pd, engine, a->algorithm, a->x, a->w, a->y, a->stride,
                                                                 a->gaps, a->pad, a->pad, hint, e->dnnl->attr);
    } else {
        s = dnnl_convolution_backward_weights_primitive_desc_create(pd, engine, a->algorithm, a->x, a->w, a->b, a->y,
                                                                    a->stride, a->gaps, a->pad, a->pad, hint,
                                                                    e->dnnl->attr);
    }
#else
    dnnl_convolution_desc_t desc;
    if (pass == MUI_CONV_FORWARD) {
        s = dnnl_dilated_convolution_forward_desc_init(&desc, dnnl_forward_training, a->algorithm, a->x, a->w, a->b,
                                                       a->y, a->stride, a->gaps, a->pad, a->pad);
    } else if (pass == MUI_CONV_BACKWARD_DATA) {
        s = dnnl_dilated_convolution_backward_data_desc_init(&desc, a->algorithm, a->x, a->w, a->y, a->stride, a->gaps,
                                                             a->pad, a->pad);
    } else {
        s = dnnl_dilated_convolution_backward_weights_desc_init(&desc, a->algorithm, a->x, a->w, a->b, a->y, a->stride,
                                                                a->gaps, a->pad, a->pad);
    }
    if (s == dnnl_success) {
        s = dnnl_primitive_desc_create(pd, &desc, e->dnnl->attr, e->dnnl->engine, hint);
    }
#endif
    return created(e, s, "convolution", pd);
}

mu_status mui_pd_norm_forward(mui_engine *e, bool training, mui_md x, float eps, unsigned flags,
                              dnnl_primitive_desc_t *pd)
{
    dnnl_prop_kind_t prop = training ? dnnl_forward_training : dnnl_forward_inference;
    dnnl_status_t s;
#if DNNL_VERSION_MAJOR >= 3
    s = dnnl_batch_normalization_forward_primitive_desc_create(pd, e->dnnl->engine, prop, x, x, eps, flags,
                                                               e->dnnl->attr);
#else
    dnnl_batch_normalization_desc_t desc;
    s = dnnl_batch_normalization_forward_desc_init(&desc, prop, x, eps, flags);
    if (s == dnnl_success) {
        s = dnnl_primitive_desc_create(pd, &desc, e->dnnl->attr, e->dnnl->engine, NULL);
    }
#endif
    return created(e, s, "batch norm", pd);
}

mu_status mui_pd_norm_backward(mui_engine *e, mui_md x, float eps, unsigned flags, dnnl_primitive_desc_t hint,
                               dnnl_primitive_desc_t *pd)
{
    dnnl_status_t s;
#if DNNL_VERSION_MAJOR >= 3
    s = dnnl_batch_normalization_backward_primitive_desc_create(pd, e->dnnl->engine, dnnl_backward, x, x, x, eps, flags,
                                                                hint, e->dnnl->attr);
#else
    dnnl_batch_normalization_desc_t desc;
    s = dnnl_batch_normalization_backward_desc_init(&desc, dnnl_backward, x, x, eps, flags);
    if (s == dnnl_success) {
        s = dnnl_primitive_desc_create(pd, &desc, e->dnnl->attr, e->dnnl->engine, hint);
    }
#endif
    return created(e, s, "batch norm backward", pd);
}

mu_status mui_pd_pool(mui_engine *e, const mui_dnnl_pool_args *a, dnnl_primitive_desc_t hint,
                      dnnl_primitive_desc_t *pd)
{
    dnnl_status_t s;
#if DNNL_VERSION_MAJOR >= 3
    const dnnl_dims_t dense = {0};
    if (hint == NULL) {
        s = dnnl_pooling_forward_primitive_desc_create(pd, e->dnnl->engine, dnnl_forward_training, a->algorithm, a->x,
                                                       a->y, a->stride, a->kernel, dense, a->pad, a->pad,
                                                       e->dnnl->attr);
    } else {
        s = dnnl_pooling_backward_primitive_desc_create(pd, e->dnnl->engine, a->algorithm, a->x, a->y, a->stride,
                                                        a->kernel, dense, a->pad, a->pad, hint, e->dnnl->attr);
    }
#else
    dnnl_pooling_desc_t desc;
    if (hint == NULL) {
        s = dnnl_pooling_forward_desc_init(&desc, dnnl_forward_training, a->algorithm, a->x, a->y, a->stride, a->kernel,
                                           a->pad, a->pad);
    } else {
        s = dnnl_pooling_backward_desc_init(&desc, a->algorithm, a->x, a->y, a->stride, a->kernel, a->pad, a->pad);
    }
    if (s == dnnl_success) {
        s = dnnl_primitive_desc_create(pd, &desc, e->dnnl->attr, e->dnnl->engine, hint);
    }
#endif
    return created(e, s, "pooling", pd);
}

mu_status mui_pd_matmul(mui_engine *e, mui_md x, mui_md w, mui_md bias, mui_md y, dnnl_primitive_desc_t *pd)
{
    dnnl_status_t s;
#if DNNL_VERSION_MAJOR >= 3
    s = dnnl_matmul_primitive_desc_create(pd, e->dnnl->engine, x, w, bias, y, e->dnnl->attr);
#else
    dnnl_matmul_desc_t desc;
    s = dnnl_matmul_desc_init(&desc, x, w, bias, y);
    if (s == dnnl_success) {
        s = dnnl_primitive_desc_create(pd, &desc, e->dnnl->attr, e->dnnl->engine, NULL);
    }
#endif
    return created(e, s, "matrix product", pd);
}

mu_status mui_pd_reorder(mui_engine *e, mui_md from, mui_md to, dnnl_primitive_desc_t *pd)
{
    dnnl_status_t s =
        dnnl_reorder_primitive_desc_create(pd, from, e->dnnl->engine, to, e->dnnl->engine, e->dnnl->attr);
    return created(e, s, "reorder", pd);
}

const char *mui_pd_name(dnnl_primitive_desc_t pd)
{
    const char *name = NULL;
    dnnl_status_t s = dnnl_primitive_desc_query(pd, dnnl_query_impl_info_str, 0, &name);
    return s == dnnl_success && name != NULL ? name : "";
}

mui_md mui_pd_md(mui_engine *e, dnnl_primitive_desc_t pd, dnnl_query_t what)
{
    mui_md md = dnnl_primitive_desc_query_md(pd, what, 0);
    if (md == NULL) {
        mui_dnnl_fail(e, dnnl_invalid_arguments, "query of a memory descriptor");
        return NULL;
    }
    return mui_md_copy(e, md);
}

static size_t queried_bytes(dnnl_primitive_desc_t pd, dnnl_query_t what)
{
    mui_md md = dnnl_primitive_desc_query_md(pd, what, 0);
    return md == NULL ? 0 : dnnl_memory_desc_get_size(md);
}

size_t mui_pd_workspace_bytes(dnnl_primitive_desc_t pd)
{
    return queried_bytes(pd, dnnl_query_workspace_md);
}

/* -- running ---------------------------------------------------------------------------------------------------- */
static bool add_memory(mui_engine *e, mui_exec *x, int arg, mui_md md)
{
    dnnl_memory_t memory = NULL;
    dnnl_status_t s = dnnl_memory_create(&memory, md, e->dnnl->engine, DNNL_MEMORY_NONE);
    if (s != dnnl_success) {
        mui_dnnl_fail(e, s, x->what);
        return false;
    }
    if (!own(e, memory, MUI_OBJECT_MEMORY)) {
        return false;
    }
    x->arg[x->count++] = (dnnl_exec_arg_t){arg, memory};
    return true;
}

mui_exec *mui_exec_new(mui_engine *e, dnnl_primitive_desc_t pd, int count, const int *args, const mui_md *mds,
                       const char *what)
{
    mui_exec *x = mui_engine_keep(e, sizeof(*x));
    if (x == NULL) {
        return NULL;
    }
    x->what = what;
    dnnl_status_t s = dnnl_primitive_create(&x->primitive, pd);
    if (s != dnnl_success) {
        mui_dnnl_fail(e, s, what);
        return NULL;
    }
    mui_count(&e->context->primitives, 1);
    mui_md scratchpad = dnnl_primitive_desc_query_md(pd, dnnl_query_scratchpad_md, 0);
    x->scratch_bytes = queried_bytes(pd, dnnl_query_scratchpad_md);
    if (!own(e, x->primitive, MUI_OBJECT_PRIMITIVE) || !add_memory(e, x, DNNL_ARG_SCRATCHPAD, scratchpad)) {
        return NULL;
    }
    for (int i = 0; i < count; i++) {
        if (!add_memory(e, x, args[i], mds[i])) {
            return NULL;
        }
    }
    return x;
}

static mu_status set_data(mui_engine *e, mui_exec *x, int i, const void *data)
{
    if (x->data[i] == data) {
        return MU_OK;
    }
    dnnl_status_t s = dnnl_memory_set_data_handle((dnnl_memory_t)x->arg[i].memory, (void *)data);
    x->data[i] = s == dnnl_success ? data : NULL;
    return s == dnnl_success ? MU_OK : mui_dnnl_fail(e, s, x->what);
}

mu_status mui_exec_run(mui_engine *e, mui_exec *x, int count, const void *const *data)
{
    if (x->scratch_bytes > 0) {
        void *scratch = mui_engine_scratch(e, MUI_SCRATCH_BACKEND, x->scratch_bytes);
        if (scratch == NULL) {
            return MU_ERR_NOMEM;
        }
        mu_status s = set_data(e, x, 0, scratch);
        if (s != MU_OK) {
            return s;
        }
    }
    for (int i = 0; i < count; i++) {
        mu_status s = set_data(e, x, i + 1, data[i]);
        if (s != MU_OK) {
            return s;
        }
    }
    dnnl_status_t s = dnnl_primitive_execute(x->primitive, e->dnnl->stream, x->count, x->arg);
    if (s == dnnl_success) {
        s = dnnl_stream_wait(e->dnnl->stream);
    }
    return s == dnnl_success ? MU_OK : mui_dnnl_fail(e, s, x->what);
}
