/* JPEG and PNG files: decoding and resizing. The first two bytes choose the side and the channels. Images beyond a
 * million pixels are left alone: allowed, but slow to try. */
#include "base/alloc.h"
#include "data/image.h"
#include "fuzz_target.h"

#include <string.h>
#include <turbojpeg.h>

#define MOST_PIXELS 1000000

static uint64_t claimed_pixels(const uint8_t *file, size_t bytes)
{
    if (bytes >= 24 && file[0] == 0x89) {
        uint64_t size[2] = {0, 0};
        for (int i = 0; i < 8; i++) {
            size[i / 4] = size[i / 4] << 8 | file[16 + i];
        }
        return size[0] <= MUI_IMAGE_MAX_SIDE && size[1] <= MUI_IMAGE_MAX_SIDE ? size[0] * size[1] : 0;
    }
    int width = 0, height = 0, subsampling = 0, space = 0;
    tjhandle h = tjInitDecompress();
    tjDecompressHeader3(h, file, bytes, &width, &height, &subsampling, &space);
    tjDestroy(h);
    return (uint64_t)width * (uint64_t)height;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes < 2 || claimed_pixels(data + 2, bytes - 2) > MOST_PIXELS) {
        return 0;
    }
    int side = 1 + data[0] % 64, channels = data[1] % 2 == 0 ? 3 : 1;
    mu_context *c = fuzz_context();
    mui_scratch s = {.context = c};
    /* Twice with the same scratch: what a file leaves behind must not change what the next one gives. */
    for (int round = 0; round < 2; round++) {
        mui_trouble t = {MU_OK, ""};
        mui_image image = {NULL, 0, 0, 0};
        const uint8_t *fitted = NULL;
        static uint8_t first[3 * 64 * 64];
        static mu_status first_status;
        mu_status status = mui_image_decode(&s, data + 2, bytes - 2, channels, &image, &t);
        if (status == MU_OK) {
            status = mui_image_fit(&s, &image, side, &fitted, &t);
        }
        if (status != t.status || (status != MU_OK && t.text[0] == '\0')) {
            fuzz_broken("a status without its trouble");
        }
        size_t out = (size_t)channels * (size_t)side * (size_t)side;
        if (round == 0) {
            first_status = status;
            if (status == MU_OK) {
                memcpy(first, fitted, out);
            }
        } else if (status != first_status || (status == MU_OK && memcmp(first, fitted, out) != 0)) {
            fuzz_broken("the same file gives something else the second time");
        }
    }
    mui_scratch_free(&s);
    fuzz_close(c);
    return 0;
}
