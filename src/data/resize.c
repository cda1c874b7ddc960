/* Bilinear resizing with antialiasing: each output pixel is a weighted mean over the triangle of input pixels around
 * its centre, as wide as the image shrinks. Two passes, along rows and then along columns, each rounded to bytes, in
 * 22-bit fixed point: the arithmetic Pillow documents, so that results agree with it (the tests compare).
 *
 * Only the pixels of the centre crop are computed. */
#include "base/alloc.h"
#include "data/image.h"

#include <math.h>

#define WEIGHT_BITS 22 /* 8 bits of pixel, 22 of weight, 2 spare in an int32 */

/* The input pixels that an output pixel reads, and their weights: count of them from first on. */
typedef struct window {
    int first, count;
} window;

/* For `count` outputs of one axis: windows, then `taps` weights for each. */
typedef struct axis {
    window *windows;
    int32_t *weights; /* (count, taps) */
    int taps;
} axis;

/* Weights for outputs start .. start+count-1 of `out` pixels made from `in` pixels. */
static bool make_axis(mui_scratch *s, mui_buffer *memory, int in, int64_t out, int64_t start, int count, axis *a)
{
    double scale = (double)in / (double)out, stretch = scale > 1 ? scale : 1; /* half the triangle's base */
    int taps = 2 * (int)ceil(stretch) + 1;
    size_t weights = 0, bytes = 0;
    if (!mui_size_mul((size_t)count, (size_t)taps, &weights) ||
        !mui_size_mul(weights, sizeof(double) + sizeof(int32_t), &bytes) ||
        !mui_size_add(bytes, (size_t)count * sizeof(window), &bytes)) {
        return false;
    }
    char *p = mui_buffer_need(s->context, memory, bytes);
    if (p == NULL) {
        return false;
    }
    double *exact = (double *)p; /* first, for its alignment; one row is used at a time */
    a->weights = (int32_t *)(p + weights * sizeof(double));
    a->windows = (window *)(p + weights * (sizeof(double) + sizeof(int32_t)));
    a->taps = taps;
    for (int i = 0; i < count; i++) {
        double centre = ((double)(start + i) + 0.5) * scale, sum = 0;
        int first = (int)(centre - stretch + 0.5), end = (int)(centre + stretch + 0.5);
        first = first < 0 ? 0 : first;
        end = end > in ? in : end;
        for (int k = 0; k < end - first; k++) {
            double distance = fabs((first + k - centre + 0.5) * (1.0 / stretch));
            exact[k] = distance < 1 ? 1 - distance : 0;
            sum += exact[k];
        }
        for (int k = 0; k < end - first; k++) {
            double w = sum != 0 ? exact[k] / sum : exact[k];
            a->weights[(int64_t)i * taps + k] = (int32_t)(0.5 + w * (1 << WEIGHT_BITS));
        }
        a->windows[i] = (window){first, end - first};
    }
    return true;
}

static uint8_t rounded(int32_t sum)
{
    int32_t v = sum >> WEIGHT_BITS;
    return (uint8_t)(v > 255 ? 255 : v < 0 ? 0 : v);
}

/* Rows first .. first+rows-1 of the image, (rows, side, channels) into narrow. */
static void resize_rows(const mui_image *image, const axis *a, int side, int first, int rows, uint8_t *narrow)
{
    int channels = image->channels;
    for (int y = 0; y < rows; y++) {
        const uint8_t *row = image->data + ((int64_t)first + y) * image->width * channels;
        uint8_t *to = narrow + (int64_t)y * side * channels;
        for (int x = 0; x < side; x++) {
            window w = a->windows[x];
            const int32_t *k = a->weights + (int64_t)x * a->taps;
            const uint8_t *from = row + (int64_t)w.first * channels;
            int32_t sum[3] = {1 << (WEIGHT_BITS - 1), 1 << (WEIGHT_BITS - 1), 1 << (WEIGHT_BITS - 1)};
            if (channels == 3) {
                for (int i = 0; i < w.count; i++) {
                    sum[0] += from[3 * i] * k[i];
                    sum[1] += from[3 * i + 1] * k[i];
                    sum[2] += from[3 * i + 2] * k[i];
                }
            } else {
                for (int i = 0; i < w.count; i++) {
                    sum[0] += from[i] * k[i];
                }
            }
            for (int ch = 0; ch < channels; ch++) {
                to[x * channels + ch] = rounded(sum[ch]);
            }
        }
    }
}

/* (rows, side, channels) to (channels, side, side); row 0 of narrow is row `first` of the image. `sums` has room for
 * side * channels numbers. */
static void resize_columns(const uint8_t *narrow, const axis *a, int side, int channels, int first, int32_t *sums,
                           uint8_t *out)
{
    int length = side * channels;
    for (int y = 0; y < side; y++) {
        window w = a->windows[y];
        const int32_t *k = a->weights + (int64_t)y * a->taps;
        for (int j = 0; j < length; j++) {
            sums[j] = 1 << (WEIGHT_BITS - 1);
        }
        for (int i = 0; i < w.count; i++) {
            const uint8_t *row = narrow + ((int64_t)w.first - first + i) * length;
            int32_t weight = k[i];
            for (int j = 0; j < length; j++) {
                sums[j] += row[j] * weight;
            }
        }
        for (int ch = 0; ch < channels; ch++) {
            uint8_t *to = out + ((int64_t)ch * side + y) * side;
            for (int x = 0; x < side; x++) {
                to[x] = rounded(sums[x * channels + ch]);
            }
        }
    }
}

/* Half of an excess, rounded to the nearest and ties to even. */
static int64_t half(int64_t excess)
{
    int64_t down = excess / 2;
    return excess % 2 == 0 ? down : down + (down & 1);
}

mu_status mui_image_fit(mui_scratch *s, const mui_image *image, int side, const uint8_t **out, mui_trouble *t)
{
    int w = image->width, h = image->height, channels = image->channels;
    /* The longer side is rounded down; at most 65500 times the largest side option, so int64. */
    int64_t wide = w <= h ? side : (int64_t)side * w / h, tall = w <= h ? (int64_t)side * h / w : side;
    axis across, down;
    if (!make_axis(s, &s->weights[0], w, wide, half(wide - side), side, &across) ||
        !make_axis(s, &s->weights[1], h, tall, half(tall - side), side, &down)) {
        return mui_trouble_set(t, MU_ERR_NOMEM, "no memory to resize %d x %d pixels", w, h);
    }
    int first = down.windows[0].first;
    int rows = down.windows[side - 1].first + down.windows[side - 1].count - first;
    size_t line = (size_t)side * (size_t)channels, narrow_bytes = (line * (size_t)rows + 63) / 64 * 64;
    uint8_t *narrow = mui_buffer_need(s->context, &s->narrow, narrow_bytes + line * sizeof(int32_t));
    uint8_t *fitted = mui_buffer_need(s->context, &s->out, line * (size_t)side);
    if (narrow == NULL || fitted == NULL) {
        return mui_trouble_set(t, MU_ERR_NOMEM, "no memory to resize %d x %d pixels", w, h);
    }
    resize_rows(image, &across, side, first, rows, narrow);
    resize_columns(narrow, &down, side, channels, first, (int32_t *)(narrow + narrow_bytes), fitted);
    *out = fitted;
    return MU_OK;
}
