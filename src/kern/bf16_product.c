/* Matrix products and conversions of bfloat16: what they count, and who computes them. */
#include "kern/bf16_emulate.h"

mu_status mui_bf16_reorder(mui_engine *e, mu_dims dims, const mui_layout *from, const uint16_t *src,
                           const mui_layout *to, uint16_t *dst)
{
    if (mui_elements(dims) == 0) {
        return MU_OK;
    }
    size_t bytes = mui_bytes_in_layout(dims, to) / 2;
    mui_timer t;
    mui_conversion_start(&t, e, MUI_CONVERT_LAYOUT, bytes);
    mu_status s = (e->k.bf16 ? e->k.bf16_reorder : mui_bf16_emulated_reorder)(e, dims, from, src, to, dst);
    mui_timer_stop(&t, 0, (double)(mui_bytes_in_layout(dims, from) / 2 + bytes));
    return s;
}

/* Of the three matrices. */
static double product_bytes(int64_t m, int64_t n, int64_t k, size_t w_bytes, size_t c_bytes)
{
    return (double)m * (double)k * (double)sizeof(uint16_t) + (double)k * (double)n * (double)w_bytes +
           (double)m * (double)n * (double)c_bytes;
}

static mu_status product(mui_engine *e, const mui_bf16_product *p, const void *a, const void *b, const float *bias, void *c)
{
    if (p->m == 0 || p->n == 0) {
        return MU_OK;
    }
    mui_timer t;
    mui_timer_start(&t, e->context, MUI_KIND_GEMM);
    mu_status s = (e->k.bf16 ? e->k.bf16_product : mui_bf16_emulated_product)(e, p, a, b, bias, c);
    mui_count_flops(e, &t, 2.0 * (double)p->m * (double)p->n * (double)p->k,
                    product_bytes(p->m, p->n, p->k, p->wide_b ? sizeof(float) : sizeof(uint16_t),
                                  p->wide_c ? sizeof(float) : sizeof(uint16_t)));
    return s;
}

mu_status mui_bf16_gemm(mui_engine *e, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, const uint16_t *a,
                        const uint16_t *b, uint16_t *c)
{
    const mui_bf16_product p = {.m = m, .n = n, .k = k, .trans_a = trans_a, .trans_b = trans_b};
    return product(e, &p, a, b, NULL, c);
}

mu_status mui_bf16_gemm_f32(mui_engine *e, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k,
                            const uint16_t *a, const uint16_t *b, float *c, bool accumulate)
{
    const mui_bf16_product p = {.m = m, .n = n, .k = k, .trans_a = trans_a, .trans_b = trans_b, .wide_c = true,
                                .accumulate = accumulate};
    return product(e, &p, a, b, NULL, c);
}

mu_status mui_bf16_linear(mui_engine *e, bool trans_w, int64_t m, int64_t n, int64_t k, const uint16_t *a, const float *w,
                          const float *bias, uint16_t *c)
{
    const mui_bf16_product p = {.m = m, .n = n, .k = k, .trans_b = trans_w, .wide_b = true, .bias = bias != NULL};
    return product(e, &p, a, w, bias, c);
}
