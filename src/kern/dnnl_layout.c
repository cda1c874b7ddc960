/* Layouts as oneDNN's blocked descriptors, interned by where they put the elements, and reorders between them. */
#include "kern/dnnl_compat.h"
#include "base/alloc.h"

#include <stdio.h>
#include <string.h>

/* A dimension split into its blocks: element i of it lies at sum over parts of (i / below % size) * stride. */
typedef struct part {
    int dim;
    int64_t size, stride;
} part;
typedef struct canonical {
    int count;
    part part[3 * DNNL_MAX_NDIMS];
} canonical;

/* Outermost first for each dimension; parts of size 1 say nothing and are left out. */
static canonical canonical_of(const mui_md_info *md)
{
    canonical r = {0};
    for (int d = 0; d < md->ndims; d++) {
        int64_t inner = 1, stride = 1;
        for (int i = 0; i < md->blocks; i++) {
            inner *= md->block_dim[i] == d ? md->block[i] : 1;
            stride *= md->block[i];
        }
        if (md->padded[d] / inner > 1) {
            r.part[r.count++] = (part){d, md->padded[d] / inner, md->strides[d]};
        }
        for (int i = 0; i < md->blocks; i++) {
            stride /= md->block[i];
            if (md->block_dim[i] == d && md->block[i] > 1) {
                r.part[r.count++] = (part){d, md->block[i], stride};
            }
        }
    }
    return r;
}

static bool is_plain(const mui_md_info *md, const canonical *c)
{
    int at = 0;
    int64_t stride[DNNL_MAX_NDIMS], n = 1;
    for (int d = md->ndims - 1; d >= 0; d--) {
        stride[d] = n;
        n *= md->dims[d];
    }
    for (int d = 0; d < md->ndims; d++) {
        if (md->padded[d] != md->dims[d]) {
            return false;
        }
        if (md->dims[d] > 1) {
            const part *p = &c->part[at++];
            if (p->dim != d || p->size != md->dims[d] || p->stride != stride[d]) {
                return false;
            }
        }
    }
    return at == c->count;
}

static bool same_place(const mui_md_info *a, const mui_md_info *b)
{
    if (a->ndims != b->ndims || a->bytes != b->bytes ||
        memcmp(a->dims, b->dims, (size_t)a->ndims * sizeof(int64_t)) != 0) {
        return false;
    }
    canonical x = canonical_of(a), y = canonical_of(b);
    if (x.count != y.count) {
        return false;
    }
    for (int i = 0; i < x.count; i++) {
        if (x.part[i].dim != y.part[i].dim || x.part[i].size != y.part[i].size ||
            x.part[i].stride != y.part[i].stride) {
            return false;
        }
    }
    return true;
}

bool mui_dnnl_same_place(mui_md a, mui_md b)
{
    mui_md_info x = mui_md_query(a), y = mui_md_query(b);
    return x.blocked && y.blocked && same_place(&x, &y);
}

/* oneDNN's way of writing it: dimensions from the largest stride on, capital when split, then blocks with their sizes.
 * Made from the canonical form, so that it does not depend on which descriptor came first. */
static void write_name(const mui_md_info *md, char *name, size_t bytes)
{
    canonical c = canonical_of(md);
    size_t at = 0;
    name[0] = '\0';
    bool seen[DNNL_MAX_NDIMS] = {false}, used[3 * DNNL_MAX_NDIMS] = {false};
    for (int n = 0; n < c.count && at + 8 < bytes; n++) {
        int best = -1;
        for (int i = 0; i < c.count; i++) {
            if (!used[i] && (best < 0 || c.part[i].stride > c.part[best].stride)) {
                best = i;
            }
        }
        used[best] = true;
        int d = c.part[best].dim, parts = 0;
        for (int i = 0; i < c.count; i++) {
            parts += c.part[i].dim == d;
        }
        if (!seen[d]) {
            at += (size_t)snprintf(name + at, bytes - at, "%c", (parts > 1 ? 'A' : 'a') + d);
        } else {
            at += (size_t)snprintf(name + at, bytes - at, "%lld%c", (long long)c.part[best].size, 'a' + d);
        }
        seen[d] = true;
    }
    for (int d = 0; d < md->ndims && at + 24 < bytes; d++) {
        if (md->padded[d] != md->dims[d]) {
            at += (size_t)snprintf(name + at, bytes - at, "+%lld%c", (long long)(md->padded[d] - md->dims[d]), 'a' + d);
        }
    }
}

/* Of two descriptors for one placement, the blocked one has the faster primitives: with 16 channels, channels-last says
 * the same as blocks of 16. NULL on failure. */
static mui_md blocked_form(mui_engine *e, mui_md md, const mui_md_info *info)
{
    static const dnnl_format_tag_t tags[] = {dnnl_aBcd16b, dnnl_aBcd8b};
    for (int i = 0; i < 2 && info->ndims == 4; i++) {
        mui_md other = mui_md_tagged(e, 4, info->dims, tags[i]);
        if (other == NULL) {
            return NULL;
        }
        mui_md_info o = mui_md_query(other);
        if (same_place(info, &o)) {
            return other;
        }
    }
    return md;
}

/* The one of e for that placement. Its descriptor is e's, too: md may be another engine's. */
static bool intern(mui_engine *e, mui_md md, const mui_md_info *place, const mui_layout **out)
{
    mui_md_info info = *place;
    struct mui_dnnl *d = e->dnnl;
    for (size_t i = 0; i < d->layout_count; i++) {
        mui_md_info known = mui_md_query((mui_md)d->layouts[i]->backend);
        if (same_place(&info, &known)) {
            *out = d->layouts[i];
            return true;
        }
    }
    mui_layout *l = mui_engine_keep(e, sizeof(*l));
    md = mui_md_copy(e, md);
    md = md != NULL ? blocked_form(e, md, &info) : NULL;
    if (l == NULL || md == NULL || !MUI_GROW(e->context, d->layouts, d->layout_count, d->layout_capacity)) {
        return false;
    }
    l->bytes = info.bytes;
    l->backend = md;
    l->elements = 1;
    for (int i = 0; i < info.ndims; i++) {
        l->elements *= info.dims[i];
        l->padded = l->padded || info.padded[i] != info.dims[i];
    }
    write_name(&info, l->name, sizeof(l->name));
    d->layouts[d->layout_count++] = l;
    *out = l;
    return true;
}

bool mui_dnnl_layout(mui_engine *e, mui_md md, const mui_layout **out)
{
    mui_md_info info = mui_md_query(md);
    if (!info.blocked) {
        mui_fail(e->context, MU_ERR_INTERNAL, "oneDNN wants an opaque layout where Muster keeps data");
        return false;
    }
    canonical c = canonical_of(&info);
    *out = NULL;
    if (is_plain(&info, &c)) {
        return true;
    }
    pthread_mutex_lock(&e->home->layouts);
    bool found = intern(e->home, md, &info, out);
    pthread_mutex_unlock(&e->home->layouts);
    return found;
}

mui_md mui_dnnl_md(mui_engine *e, int ndims, const int64_t *dims, const mui_layout *layout)
{
    if (layout == NULL) {
        return mui_md_plain(e, ndims, dims);
    }
    mui_md_info info = mui_md_query((mui_md)layout->backend);
    if (info.ndims != ndims || memcmp(info.dims, dims, (size_t)ndims * sizeof(int64_t)) != 0) {
        mui_fail(e->context, MU_ERR_INTERNAL, "layout %s belongs to another shape", layout->name);
        return NULL;
    }
    return layout->backend;
}

bool mui_dnnl_image_layout(mui_engine *e, mu_dims dims, int64_t block, const mui_layout **out)
{
    dnnl_format_tag_t tag = block == 16                 ? dnnl_aBcd16b
                            : block == 8                ? dnnl_aBcd8b
                            : block == 4                ? dnnl_aBcd4b
                            : block == MUI_CHANNELS_LAST ? dnnl_acdb
                                                         : dnnl_format_tag_undef;
    mui_md md = tag != dnnl_format_tag_undef && dims.ndim == 4 ? mui_md_tagged(e, 4, dims.dim, tag) : NULL;
    return md != NULL && mui_dnnl_layout(e, md, out);
}

/* -- reorders --------------------------------------------------------------------------------------------------- */
mui_exec *mui_dnnl_reorder_exec(mui_engine *e, mui_md from, mui_md to)
{
    dnnl_primitive_desc_t pd = NULL;
    if (mui_pd_reorder(e, from, to, &pd) != MU_OK) {
        return NULL;
    }
    if (pd == NULL) {
        mui_dnnl_fail(e, dnnl_unimplemented, "reorder");
        return NULL;
    }
    mui_exec *x =
        mui_exec_new(e, pd, 2, (const int[]){DNNL_ARG_FROM, DNNL_ARG_TO}, (const mui_md[]){from, to}, "reorder");
    if (x != NULL) {
        x->out_bytes = mui_md_bytes(to);
    }
    return x;
}

/* At least one layout is not NULL, so the dims are that one's (a grouped weight has five). */
static mui_exec *cached(mui_engine *e, const mui_layout *from, const mui_layout *to)
{
    mui_key key = {{MUI_KEY_REORDER, (uint64_t)(uintptr_t)from, (uint64_t)(uintptr_t)to}};
    mui_exec *x = mui_cache_find(&e->cache, &key);
    if (x != NULL) {
        return x;
    }
    mui_md_info info = mui_md_query((mui_md)(from != NULL ? from : to)->backend);
    mui_md a = mui_dnnl_md(e, info.ndims, info.dims, from), b = mui_dnnl_md(e, info.ndims, info.dims, to);
    x = a == NULL || b == NULL ? NULL : mui_dnnl_reorder_exec(e, a, b);
    return x != NULL && mui_cache_put(e, &e->cache, &key, x) ? x : NULL;
}

static bool same_dims(const mui_layout *a, const mui_layout *b)
{
    mui_md_info x = mui_md_query((mui_md)a->backend), y = mui_md_query((mui_md)b->backend);
    return x.ndims == y.ndims && memcmp(x.dims, y.dims, (size_t)x.ndims * sizeof(int64_t)) == 0;
}

mu_status mui_dnnl_reorder(mui_engine *e, mu_dims dims, const mui_layout *from, const float *src, const mui_layout *to,
                           float *dst)
{
    if (from != NULL && to != NULL && !same_dims(from, to)) {
        /* The same elements seen as different dims: only their row-major order is common ground. */
        float *plain = mui_engine_scratch(e, MUI_SCRATCH_REORDER, mui_bytes_in_layout(dims, NULL));
        mu_status s = plain == NULL ? MU_ERR_NOMEM : mui_dnnl_reorder(e, dims, from, src, NULL, plain);
        return s != MU_OK ? s : mui_dnnl_reorder(e, dims, NULL, plain, to, dst);
    }
    mui_exec *x = cached(e, from, to);
    return x == NULL ? MU_ERR_DEVICE : mui_exec_run(e, x, 2, (const void *const[]){src, dst});
}
