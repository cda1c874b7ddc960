/* Sums over all output positions of one value of the input times a block of channels of the output's gradient, one sum
 * for each tap, in registers. The input is copied with its padding around it, so that each tap meets each position. */
#include "kern/few_channels.h"
#include "kern/fast_math.h"
#include "kern/taps.h"

#include <string.h>

enum { AT_ONCE = 9 }; /* taps whose sums fit into 16 registers: a kernel of 3x3 */
typedef float block __attribute__((vector_size(MUI_FEW_BLOCK * sizeof(float))));

/* One image's planes with their padding, as far as outputs reach. */
typedef struct frame {
    int64_t h, w;
    float *at;
} frame;

static frame frame_of(const mui_conv2d_shape *s)
{
    return (frame){.h = (s->oh - 1) * s->stride[0] + (s->kh - 1) * s->dilation[0] + 1,
                   .w = (s->ow - 1) * s->stride[1] + (s->kw - 1) * s->dilation[1] + 1};
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* The image inside; the padding around it stays as it is. */
static void fill_frame(const mui_conv2d_shape *s, const frame *f, const float *image)
{
    int64_t rows = least(s->ih, f->h - s->pad[0]), columns = least(s->iw, f->w - s->pad[1]);
    for (int64_t c = 0; c < s->ic && columns > 0; c++) {
        for (int64_t i = 0; i < rows; i++) {
            memcpy(f->at + (c * f->h + s->pad[0] + i) * f->w + s->pad[1], image + (c * s->ih + i) * s->iw,
                   (size_t)columns * sizeof(float));
        }
    }
}

/* Adds to sum[0..count) over these rows of the output. Called with a constant count: the sums are registers. */
static inline __attribute__((always_inline)) void add_taps(const mui_conv2d_shape *s, const frame *f, mui_range rows,
                                                           const float *dy, const int64_t *tap, int count, block *sum)
{
    block part[AT_ONCE] = {{0}};
    dy += rows.first * s->ow * MUI_FEW_BLOCK;
    for (int64_t i = rows.first; i < rows.last; i++) {
        const float *row = f->at + i * s->stride[0] * f->w;
        for (int64_t j = 0; j < s->ow; j++, row += s->stride[1], dy += MUI_FEW_BLOCK) {
            block d;
            memcpy(&d, dy, sizeof(d));
            for (int k = 0; k < count; k++) {
                part[k] += row[tap[k]] * d;
            }
        }
    }
    for (int k = 0; k < count; k++) {
        sum[k] += part[k];
    }
}

MUI_CLONES static void add_rows(const mui_conv2d_shape *s, const frame *f, mui_range rows, const float *dy,
                                const int64_t *tap, int64_t taps, block *sum)
{
    int64_t k = 0;
    for (; k + AT_ONCE <= taps; k += AT_ONCE) {
        add_taps(s, f, rows, dy, tap + k, AT_ONCE, sum + k);
    }
    for (; k + 4 <= taps; k += 4) {
        add_taps(s, f, rows, dy, tap + k, 4, sum + k);
    }
    for (; k < taps; k++) {
        add_taps(s, f, rows, dy, tap + k, 1, sum + k);
    }
}

/* By rows that stay in the first cache while all taps read them. */
static void add_image(const mui_conv2d_shape *s, const frame *f, const float *dy, const int64_t *tap, int64_t taps,
                      block *sum)
{
    int64_t fit = (16 << 10) / (s->ow * (int64_t)sizeof(block)), step = fit > 0 ? fit : 1;
    for (int64_t i = 0; i < s->oh; i += step) {
        add_rows(s, f, (mui_range){i, least(i + step, s->oh)}, dy, tap, taps, sum);
    }
}

/* Where each tap (channel, row, column) of the kernel begins in a frame. */
static void place_taps(const mui_conv2d_shape *s, const frame *f, int64_t *tap)
{
    for (int64_t c = 0; c < s->ic; c++) {
        for (int64_t r = 0; r < s->kh; r++) {
            for (int64_t q = 0; q < s->kw; q++) {
                *tap++ = (c * f->h + r * s->dilation[0]) * f->w + q * s->dilation[1];
            }
        }
    }
}

/* One block of one image's dy. */
MUI_CLONES static void add_bias(int64_t positions, const float *dy, block *sum)
{
    block part = {0};
    for (int64_t i = 0; i < positions; i++) {
        block d;
        memcpy(&d, dy + i * MUI_FEW_BLOCK, sizeof(d));
        part += d;
    }
    *sum += part;
}

mu_status mui_few_backward_weights(mui_engine *e, const mui_conv2d_shape *s, const float *x, const float *dy, float *dw,
                                   float *db)
{
    int64_t taps = s->ic * s->kh * s->kw, positions = s->oh * s->ow, blocks = (s->oc + MUI_FEW_BLOCK - 1) / MUI_FEW_BLOCK;
    frame f = frame_of(s);
    /* Of each block: the taps' sums, and behind them the bias's. */
    size_t sum_bytes = (size_t)(blocks * (taps + 1)) * sizeof(block);
    size_t frame_bytes = (size_t)(s->ic * f.h * f.w) * sizeof(float);
    /* oneDNN's scratchpad is free here: no primitive runs before this is done. */
    block *sums = mui_engine_scratch(e, MUI_SCRATCH_BACKEND, sum_bytes + frame_bytes + (size_t)taps * sizeof(int64_t));
    if (sums == NULL) {
        return MU_ERR_NOMEM;
    }
    int64_t *tap = (int64_t *)(sums + blocks * (taps + 1));
    f.at = (float *)(tap + taps);
    place_taps(s, &f, tap);
    memset(f.at, 0, frame_bytes);
    memset(sums, 0, sum_bytes);
    for (int64_t n = 0; n < s->n; n++) {
        fill_frame(s, &f, x + n * s->ic * s->ih * s->iw);
        for (int64_t b = 0; b < blocks; b++, dy += positions * MUI_FEW_BLOCK) {
            block *sum = sums + b * (taps + 1);
            add_image(s, &f, dy, tap, taps, sum);
            if (db != NULL) {
                add_bias(positions, dy, sum + taps);
            }
        }
    }
    for (int64_t o = 0; o < s->oc; o++) {
        const block *sum = sums + o / MUI_FEW_BLOCK * (taps + 1);
        for (int64_t k = 0; k < taps; k++) {
            dw[o * taps + k] = sum[k][o % MUI_FEW_BLOCK];
        }
        if (db != NULL) {
            db[o] = sum[taps][o % MUI_FEW_BLOCK];
        }
    }
    return MU_OK;
}
