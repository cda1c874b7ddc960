/* One image file to bytes of a fixed size: decode, grey or colour, resize, crop. Not for: augmentation (augment.h). */
#ifndef MUI_IMAGE_H
#define MUI_IMAGE_H

#include "base/context.h"
#include "data/trouble.h"

/* A hostile header may claim any size; what is beyond these is refused before memory is asked for. */
#define MUI_IMAGE_MAX_SIDE 65500
#define MUI_IMAGE_MAX_PIXELS ((int64_t)100 * 1000 * 1000)
#define MUI_IMAGE_MAX_FILE_BYTES ((size_t)1 << 29)

/* Memory that only grows, so that reading images stops asking for any. */
typedef struct mui_buffer {
    void *data;
    size_t capacity;
} mui_buffer;

/* What one thread needs to read images. Zero-initialise with its context; free with mui_scratch_free. */
typedef struct mui_scratch {
    mu_context *context;
    mui_buffer file;    /* the file's bytes */
    mui_buffer decoded; /* (H, W, 3), then (H, W, channels), bytes */
    mui_buffer narrow;  /* between the two passes of resizing */
    mui_buffer weights[2];
    mui_buffer out;     /* (channels, side, side) */
} mui_scratch;

void mui_scratch_free(mui_scratch *s);
/* Makes the buffer at least so large; content is lost when it grows. NULL without memory. */
void *mui_buffer_need(mu_context *c, mui_buffer *b, size_t bytes);

/* Reads a regular file into s->file. */
mu_status mui_image_read_file(mui_scratch *s, const char *path, size_t *bytes, mui_trouble *t) MU_MUST_USE;

/* A decoded image, rows of interleaved bytes without gaps; data belongs to the scratch. */
typedef struct mui_image {
    const uint8_t *data;
    int width, height, channels;
} mui_image;

/* JPEG or PNG, told apart by content. channels is 3 or 1; alpha is dropped, 16 bits become 8. */
mu_status mui_image_decode(mui_scratch *s, const uint8_t *file, size_t bytes, int channels, mui_image *out,
                           mui_trouble *t) MU_MUST_USE;

/* Shorter side to `side`, then the centre: *out is (channels, side, side), in the scratch. As torchvision's
 * Resize(side) and CenterCrop(side) on a PIL image. */
mu_status mui_image_fit(mui_scratch *s, const mui_image *image, int side, const uint8_t **out, mui_trouble *t)
    MU_MUST_USE;

#endif
