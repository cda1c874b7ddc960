/* Random crop with padding, mirroring, normalising. */
#include "data/augment.h"
#include "base/rng.h"

#include <math.h>
#include <string.h>

#define MAX_PADDING 4096

static mu_status read_normalise(mui_augment *a, mu_context *c, const mu_loader_options *o)
{
    for (int i = 0; i < MUI_AUGMENT_CHANNELS; i++) {
        if (!isfinite(o->mean[i]) || !isfinite(o->std[i]) || o->std[i] < 0) {
            return mui_fail(c, MU_ERR_ARG, "loader options mean and std of channel %d are %g and %g: expected finite "
                            "numbers, std not negative", i, (double)o->mean[i], (double)o->std[i]);
        }
        a->mean[i] = o->mean[i];
        a->std[i] = o->std[i] != 0 ? o->std[i] : 1;
        a->normalise = a->normalise || a->mean[i] != 0 || a->std[i] != 1;
        if ((a->mean[i] != 0 || a->std[i] != 1) && i >= a->channels) {
            return mui_fail(c, MU_ERR_ARG, "loader options mean and std are given for channel %d, but samples have "
                            "%lld", i, (long long)a->channels);
        }
        for (int v = 0; v < 256; v++) {
            float x = (float)v / 255.0f;
            a->table[i][v] = (x - a->mean[i]) / a->std[i];
        }
    }
    if (a->normalise && a->channels > MUI_AUGMENT_CHANNELS) {
        return mui_fail(c, MU_ERR_UNSUPPORTED, "samples have %lld channels: the loader normalises up to %d",
                        (long long)a->channels, MUI_AUGMENT_CHANNELS);
    }
    return MU_OK;
}

mu_status mui_augment_init(mui_augment *a, mu_context *c, mu_dims dims, const mu_loader_options *o)
{
    memset(a, 0, sizeof(*a));
    bool image = dims.ndim == 3;
    a->channels = image ? dims.dim[0] : 1;
    a->height = image ? dims.dim[1] : 1;
    a->width = image ? dims.dim[2] : 1;
    for (int i = 0; !image && i < dims.ndim; i++) {
        a->width *= dims.dim[i];
    }
    if (!image && (o->crop_padding != 0 || o->flip)) {
        return mui_fail(c, MU_ERR_SHAPE, "crop_padding and flip are for samples of (channels, height, width); these "
                        "have %d dimensions", dims.ndim);
    }
    if (o->crop_padding < 0 || o->crop_padding > MAX_PADDING) {
        return mui_fail(c, MU_ERR_ARG, "loader option crop_padding is %d: expected 0 to %d", o->crop_padding,
                        MAX_PADDING);
    }
    a->padding = o->crop_padding;
    a->flip = o->flip;
    a->key = mui_hash_u64(mui_hash_string(MUI_HASH_START, "augment"), o->seed);
    return read_normalise(a, c, o);
}

mui_draw mui_augment_draw(const mui_augment *a, int64_t epoch, int64_t index)
{
    mui_draw d = {a->padding, a->padding, false};
    if (a->padding == 0 && !a->flip) {
        return d;
    }
    mui_rng r;
    mui_rng_init(&r, mui_hash_u64(a->key, (uint64_t)epoch), (uint64_t)index);
    /* Always three draws, so that turning one kind on does not change the other. */
    d.top = (int)mui_rng_below(&r, 2 * (uint64_t)a->padding + 1);
    d.left = (int)mui_rng_below(&r, 2 * (uint64_t)a->padding + 1);
    d.mirror = mui_rng_uniform(&r) < 0.5f && a->flip;
    return d;
}

/* Where a row of the output comes from: columns first .. end-1 of it from the input's column `from` on; others are
 * padding. Before mirroring. */
typedef struct span {
    int64_t first, end, from;
} span;

static span columns(const mui_augment *a, mui_draw draw)
{
    int64_t shift = (int64_t)draw.left - a->padding; /* input column of output column 0 */
    span s = {shift < 0 ? -shift : 0, shift > 0 ? a->width - shift : a->width, shift < 0 ? 0 : shift};
    if (s.first >= s.end) { /* all padding */
        return (span){0, 0, 0};
    }
    return s;
}

static void fill(float *row, int64_t from, int64_t to, float v)
{
    for (int64_t x = from; x < to; x++) {
        row[x] = v;
    }
}

static void mirror(float *row, int64_t width)
{
    for (int64_t x = 0; x < width / 2; x++) {
        float kept = row[x];
        row[x] = row[width - 1 - x];
        row[width - 1 - x] = kept;
    }
}

void mui_augment_bytes(const mui_augment *a, mui_draw draw, const uint8_t *in, float *out)
{
    span s = columns(a, draw);
    for (int64_t ch = 0; ch < a->channels; ch++) {
        /* Beyond the fourth channel nothing is normalised, and all tables are equal. */
        const float *table = a->table[ch < MUI_AUGMENT_CHANNELS ? ch : 0];
        for (int64_t y = 0; y < a->height; y++) {
            float *row = out + (ch * a->height + y) * a->width;
            int64_t from_y = y + draw.top - a->padding;
            if (from_y < 0 || from_y >= a->height) {
                fill(row, 0, a->width, table[0]);
                continue;
            }
            const uint8_t *from = in + (ch * a->height + from_y) * a->width + s.from;
            fill(row, 0, s.first, table[0]);
            for (int64_t x = s.first; x < s.end; x++) {
                row[x] = table[from[x - s.first]];
            }
            fill(row, s.end, a->width, table[0]);
            if (draw.mirror) {
                mirror(row, a->width);
            }
        }
    }
}

void mui_augment_floats(const mui_augment *a, mui_draw draw, const float *in, float *out)
{
    span s = columns(a, draw);
    for (int64_t ch = 0; ch < a->channels; ch++) {
        float mean = a->normalise ? a->mean[ch] : 0, std = a->normalise ? a->std[ch] : 1;
        for (int64_t y = 0; y < a->height; y++) {
            float *row = out + (ch * a->height + y) * a->width, pad = (0 - mean) / std;
            int64_t from_y = y + draw.top - a->padding;
            if (from_y < 0 || from_y >= a->height) {
                fill(row, 0, a->width, pad);
                continue;
            }
            const float *from = in + (ch * a->height + from_y) * a->width + s.from;
            fill(row, 0, s.first, pad);
            for (int64_t x = s.first; x < s.end; x++) {
                row[x] = (from[x - s.first] - mean) / std;
            }
            fill(row, s.end, a->width, pad);
            if (draw.mirror) {
                mirror(row, a->width);
            }
        }
    }
}

bool mui_augment_is_copy(const mui_augment *a)
{
    return a->padding == 0 && !a->flip && !a->normalise;
}
