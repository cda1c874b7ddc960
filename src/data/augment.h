/* From a sample to its row in the batch: crop, flip and normalise in one pass. */
#ifndef MUI_AUGMENT_H
#define MUI_AUGMENT_H

#include "base/context.h"
#include <muster/data.h>

#define MUI_AUGMENT_CHANNELS 4

typedef struct mui_augment {
    int64_t channels, height, width; /* 1, 1, elements for samples that are no images */
    int padding;
    bool flip;
    bool normalise;                      /* some mean or deviation was given */
    float mean[MUI_AUGMENT_CHANNELS], std[MUI_AUGMENT_CHANNELS];
    float table[MUI_AUGMENT_CHANNELS][256]; /* byte to normalised float, exactly as computed one by one */
    uint64_t key;
} mui_augment;

/* What was drawn for one sample: the crop's corner in the padded image, and whether to mirror. */
typedef struct mui_draw {
    int top, left;
    bool mirror;
} mui_draw;

mu_status mui_augment_init(mui_augment *a, mu_context *c, mu_dims dims, const mu_loader_options *o) MU_MUST_USE;
/* Depends on (seed, epoch, index) only. */
mui_draw mui_augment_draw(const mui_augment *a, int64_t epoch, int64_t index);
/* (C, H, W) bytes to floats v / 255, cropped, mirrored, normalised. */
void mui_augment_bytes(const mui_augment *a, mui_draw draw, const uint8_t *in, float *out);
/* The same for floats, which are not scaled. in and out do not overlap. */
void mui_augment_floats(const mui_augment *a, mui_draw draw, const float *in, float *out);
/* True when mui_augment_floats would only copy. */
bool mui_augment_is_copy(const mui_augment *a);

#endif
