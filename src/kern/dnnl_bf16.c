/* bfloat16 by oneDNN, where the CPU has AVX-512: descriptors of images, conversions and matrix products. Convolutions,
 * batch norm and pooling are with their float32 kin. What oneDNN lacks or does slowly is left to the emulation. */
#include "kern/bf16_emulate.h"
#include "kern/dnnl_compat.h"

#include <string.h>

static bool has(dnnl_cpu_isa_t isa)
{
    return ((int)dnnl_get_effective_cpu_isa() & (int)isa) == (int)isa;
}

bool mui_dnnl_has_bf16(void)
{
    return has(dnnl_cpu_isa_avx512_core);
}

bool mui_dnnl_has_bf16_instructions(void)
{
    return has(dnnl_cpu_isa_avx512_core_bf16);
}

/* -- images ------------------------------------------------------------------------------------------------------- */
/* Layouts are float32 descriptors, and oneDNN 3 cannot give a descriptor another type: the forms that images have are few
 * enough to try. Blocks first, as their primitives are the faster ones where both say the same. */
static const struct {
    dnnl_format_tag_t tag;
    int64_t block;
} forms[] = {{dnnl_aBcd16b, 16}, {dnnl_aBcd8b, 8}, {dnnl_aBcd4b, 4}, {dnnl_acdb, MUI_CHANNELS_LAST}, {dnnl_abcd, 1}};
enum { FORMS = sizeof(forms) / sizeof(forms[0]) };

bool mui_dnnl_bf16_layout(mui_engine *e, mui_md md, const mui_layout **out)
{
    mui_md_info info = mui_md_query(md);
    *out = NULL;
    for (int i = 0; i < FORMS && info.ndims == 4; i++) {
        mui_md form = mui_md_typed(e, 4, info.dims, forms[i].tag, dnnl_bf16);
        if (form != NULL && mui_dnnl_same_place(form, md)) {
            const int64_t *d = info.dims;
            return mui_image_layout(e, MU_DIMS(d[0], d[1], d[2], d[3]), forms[i].block, out);
        }
    }
    return false;
}

mui_md mui_dnnl_bf16_md(mui_engine *e, mu_dims dims, const mui_layout *layout)
{
    for (int i = 0; i < FORMS && dims.ndim == 4; i++) {
        const mui_layout *l = NULL;
        bool last = forms[i].block == 1;
        if (layout == NULL ? last : !last && mui_image_layout(e, dims, forms[i].block, &l) && l == layout) {
            return mui_md_typed(e, 4, dims.dim, forms[i].tag, dnnl_bf16);
        }
    }
    return NULL;
}

/* -- conversions -------------------------------------------------------------------------------------------------- */
typedef struct bf16_reorder {
    mui_exec *exec; /* NULL: emulated */
} bf16_reorder;

static bf16_reorder *find_reorder(mui_engine *e, mu_dims dims, const mui_layout *from, const mui_layout *to)
{
    mui_key key = {{MUI_KEY_BF16_REORDER, (uint64_t)(uintptr_t)from, (uint64_t)(uintptr_t)to}};
    bf16_reorder *r = mui_cache_find(&e->cache, &key);
    if (r != NULL) {
        return r;
    }
    r = mui_engine_keep(e, sizeof(*r));
    if (r == NULL) {
        return NULL;
    }
    mui_md a = mui_dnnl_bf16_md(e, dims, from), b = mui_dnnl_bf16_md(e, dims, to);
    dnnl_primitive_desc_t pd = NULL;
    if (a != NULL && b != NULL && mui_pd_reorder(e, a, b, &pd) != MU_OK) {
        return NULL;
    }
    if (pd != NULL) {
        r->exec = mui_dnnl_reorder_exec(e, a, b);
        if (r->exec == NULL) {
            return NULL;
        }
    }
    return mui_cache_put(e, &e->cache, &key, r) ? r : NULL;
}

mu_status mui_dnnl_bf16_reorder(mui_engine *e, mu_dims dims, const mui_layout *from, const void *src,
                                const mui_layout *to, void *dst)
{
    bf16_reorder *r = find_reorder(e, dims, from, to);
    if (r == NULL) {
        return MU_ERR_DEVICE;
    }
    return r->exec != NULL ? mui_exec_run(e, r->exec, 2, (const void *const[]){src, dst})
                           : mui_bf16_emulated_reorder(e, dims, from, src, to, dst);
}

/* -- matrix products ---------------------------------------------------------------------------------------------- */
typedef struct bf16_product {
    mui_exec *exec; /* NULL: emulated */
} bf16_product;

static mui_md matrix(mui_engine *e, int64_t rows, int64_t columns, bool transposed, dnnl_data_type_t type)
{
    return mui_md_typed(e, 2, (const int64_t[]){rows, columns}, transposed ? dnnl_ba : dnnl_ab, type);
}

static bool make_product(mui_engine *e, const mui_bf16_product *p, bf16_product *out)
{
    mui_md a = matrix(e, p->m, p->k, p->trans_a, dnnl_bf16), b = matrix(e, p->k, p->n, p->trans_b, dnnl_bf16);
    mui_md c = matrix(e, p->m, p->n, false, p->wide_c ? dnnl_f32 : dnnl_bf16), bias = NULL;
    if (p->bias) {
        bias = matrix(e, 1, p->n, false, dnnl_f32);
    }
    dnnl_primitive_desc_t pd = NULL;
    if (a == NULL || b == NULL || c == NULL || (p->bias && bias == NULL) || mui_pd_matmul(e, a, b, bias, c, &pd) != MU_OK) {
        return false;
    }
    if (pd == NULL || strstr(mui_pd_name(pd), "ref") != NULL) {
        return true;
    }
    out->exec = mui_exec_new(e, pd, p->bias ? 4 : 3,
                             (const int[]){DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST, DNNL_ARG_BIAS},
                             (const mui_md[]){a, b, c, bias}, "matrix product of bfloat16");
    return out->exec != NULL;
}

static bf16_product *find_product(mui_engine *e, const mui_bf16_product *p)
{
    uint64_t kind = (uint64_t)p->trans_a | (uint64_t)p->trans_b << 1 | (uint64_t)p->wide_c << 2 | (uint64_t)p->bias << 3;
    mui_key key = {{MUI_KEY_BF16_PRODUCT, (uint64_t)p->m, (uint64_t)p->n, (uint64_t)p->k, kind}};
    bf16_product *found = mui_cache_find(&e->cache, &key);
    if (found == NULL) {
        found = mui_engine_keep(e, sizeof(*found));
        if (found == NULL || !make_product(e, p, found) || !mui_cache_put(e, &e->cache, &key, found)) {
            return NULL;
        }
    }
    return found;
}

mu_status mui_dnnl_bf16_product(mui_engine *e, const mui_bf16_product *p, const void *a, const void *b,
                                const float *bias, void *c)
{
    bf16_product *found = p->k > 0 ? find_product(e, p) : NULL;
    if (p->k == 0 || (found != NULL && found->exec == NULL)) {
        return mui_bf16_emulated_product(e, p, a, b, bias, c);
    }
    size_t c_bytes = (size_t)(p->m * p->n) * sizeof(float), b_bytes = (size_t)(p->k * p->n) * sizeof(uint16_t);
    void *out = p->accumulate ? mui_engine_scratch(e, MUI_SCRATCH_DW, c_bytes) : c;
    uint16_t *narrow = p->wide_b ? mui_engine_scratch(e, MUI_SCRATCH_NARROW_X, b_bytes) : NULL;
    float *shift = p->bias ? mui_engine_scratch(e, MUI_SCRATCH_BF16_B, (size_t)p->n * sizeof(*shift)) : NULL;
    if (found == NULL || out == NULL || (p->wide_b && narrow == NULL) || (p->bias && shift == NULL)) {
        return MU_ERR_DEVICE;
    }
    if (p->wide_b) {
        mui_bf16_round(p->k * p->n, b, narrow);
        b = narrow;
    }
    if (p->bias) {
        mui_bf16_coarsen(p->n, bias, shift);
    }
    mu_status s = mui_exec_run(e, found->exec, p->bias ? 4 : 3, (const void *const[]){a, b, out, shift});
    if (s == MU_OK && p->accumulate) {
        mui_axpy(e, p->m * p->n, 1.0f, out, c);
    }
    return s;
}
