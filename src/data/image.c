/* Reading JPEG (TurboJPEG API) and PNG (libspng). Files are hostile until proven otherwise: sizes are capped before
 * memory is asked for, and a damaged file is an error, never a grey picture. */
#define _GNU_SOURCE
#include "data/image.h"
#include "base/alloc.h"
#include "base/os.h"

#include <errno.h>
#include <fcntl.h>
#include <spng.h>
#include <string.h>
#include <sys/stat.h>
#include <turbojpeg.h>
#include <unistd.h>

/* Deflate cannot shrink below this; a PNG that claims more pixels than its bytes can hold is refused early. */
#define DEFLATE_MAX_RATIO 1032

void mui_scratch_free(mui_scratch *s)
{
    mui_buffer *all[] = {&s->file, &s->decoded, &s->narrow, &s->weights[0], &s->weights[1], &s->out};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        mui_free(s->context, all[i]->data);
    }
    *s = (mui_scratch){.context = s->context};
}

void *mui_buffer_need(mu_context *c, mui_buffer *b, size_t bytes)
{
    if (bytes <= b->capacity && b->data != NULL) {
        return b->data;
    }
    /* An eighth more, so that images of nearly equal sizes soon stop growing it. */
    size_t want = 0;
    if (!mui_size_add(bytes, bytes / 8, &want)) {
        want = bytes;
    }
    mui_free(c, b->data);
    b->data = mui_alloc(c, want);
    b->capacity = b->data != NULL ? want : 0;
    return b->data;
}

mu_status mui_image_read_file(mui_scratch *s, const char *path, size_t *bytes, mui_trouble *t)
{
    /* Non-blocking, or opening a FIFO that somebody named x.jpg would wait for ever. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        return mui_trouble_set(t, MU_ERR_IO, "cannot open: %s", mui_errno_text(errno));
    }
    struct stat st;
    mu_status status = MU_OK;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        status = mui_trouble_set(t, MU_ERR_IO, "not a regular file");
        goto close_file;
    }
    if ((uint64_t)st.st_size > MUI_IMAGE_MAX_FILE_BYTES) {
        status = mui_trouble_set(t, MU_ERR_LIMIT, "%lld bytes, more than the limit of %zu", (long long)st.st_size,
                                 MUI_IMAGE_MAX_FILE_BYTES);
        goto close_file;
    }
    size_t size = (size_t)st.st_size, used = 0;
    char *data = mui_buffer_need(s->context, &s->file, size > 0 ? size : 1);
    if (data == NULL) {
        status = mui_trouble_set(t, MU_ERR_NOMEM, "no memory for %zu bytes", size);
        goto close_file;
    }
    while (used < size) {
        ssize_t n = read(fd, data + used, size - used);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            status = mui_trouble_set(t, MU_ERR_IO, "reading stopped at byte %zu of %zu: %s", used, size,
                                     n == 0 ? "the file was cut" : mui_errno_text(errno));
            goto close_file;
        }
        used += (size_t)n;
    }
    *bytes = size;
close_file:
    close(fd);
    return status;
}

static mu_status check_size(const char *what, int64_t width, int64_t height, mui_trouble *t)
{
    if (width < 1 || height < 1) {
        return mui_trouble_set(t, MU_ERR_FORMAT, "%s of %lld x %lld pixels", what, (long long)width,
                               (long long)height);
    }
    if (width > MUI_IMAGE_MAX_SIDE || height > MUI_IMAGE_MAX_SIDE || width * height > MUI_IMAGE_MAX_PIXELS) {
        return mui_trouble_set(t, MU_ERR_LIMIT, "%s of %lld x %lld pixels; the limits are %d a side and %lld in all",
                               what, (long long)width, (long long)height, MUI_IMAGE_MAX_SIDE,
                               (long long)MUI_IMAGE_MAX_PIXELS);
    }
    return MU_OK;
}

/* True when the last scan of the file has an end marker: inside a scan's data those two bytes cannot come. */
static bool has_end(const uint8_t *file, size_t bytes)
{
    bool ended = false;
    for (size_t i = 0; i + 1 < bytes; i++) {
        if (file[i] == 0xff && file[i + 1] == 0xda) {
            ended = false;
        } else if (file[i] == 0xff && file[i + 1] == 0xd9) {
            ended = true;
        }
    }
    return ended;
}

/* libjpeg goes on after damage and only warns. These warnings do no harm to the picture, and real data sets cause them;
 * all others make the image bad. What the library says is needed, for its code of a failure that follows a warning is
 * that of a warning, and then nothing has been decoded. Only the first of several warnings is told, so that a cut file
 * must be noticed here too. */
static bool harmless_warning(tjhandle jpeg, const uint8_t *file, size_t bytes)
{
    static const char *const harmless[] = {
        "extraneous bytes before marker",        "unknown JFIF revision number", "Unknown Adobe color transform code",
        "Invalid SOS parameters for sequential", "bad ICC marker",
    };
    const char *text = tjGetErrorStr2(jpeg);
    for (size_t i = 0; i < sizeof(harmless) / sizeof(harmless[0]); i++) {
        if (strstr(text, harmless[i]) != NULL) {
            return tjGetErrorCode(jpeg) == TJERR_WARNING && has_end(file, bytes);
        }
    }
    return false;
}

static uint8_t mul_255(unsigned a, unsigned b)
{
    unsigned v = a * b + 128;
    return (uint8_t)(((v >> 8) + v) >> 8);
}

/* (H, W, 4) to (H, W, 3) in place. Files hold inverted CMYK, as Adobe writes it and everybody else reads it. */
static void cmyk_to_rgb(uint8_t *data, size_t pixels)
{
    for (size_t i = 0; i < pixels; i++) {
        const uint8_t *p = data + 4 * i;
        uint8_t k = p[3];
        uint8_t rgb[3];
        for (int j = 0; j < 3; j++) {
            rgb[j] = (uint8_t)(k - mul_255(255u - p[j], k));
        }
        memcpy(data + 3 * i, rgb, 3);
    }
}

static mu_status decode_jpeg_with(tjhandle jpeg, mui_scratch *s, const uint8_t *file, size_t bytes, mui_image *out,
                                  mui_trouble *t)
{
    int width = 0, height = 0, subsampling = 0, space = -1;
    bool readable = tjDecompressHeader3(jpeg, file, bytes, &width, &height, &subsampling, &space) == 0;
    /* Rare subsamplings have no name in this API, which then fails here after writing the rest; decoding to RGB does
     * not need the name. */
    bool unnamed = !readable && space >= 0 && strstr(tjGetErrorStr2(jpeg), "subsampling type") != NULL;
    if (!readable && !unnamed && !harmless_warning(jpeg, file, bytes)) {
        return mui_trouble_set(t, MU_ERR_FORMAT, "damaged JPEG: %s", tjGetErrorStr2(jpeg));
    }
    mu_status status = check_size("JPEG", width, height, t);
    if (status != MU_OK) {
        return status;
    }
    bool cmyk = space == TJCS_CMYK || space == TJCS_YCCK;
    size_t pixels = (size_t)width * (size_t)height;
    uint8_t *data = mui_buffer_need(s->context, &s->decoded, pixels * (cmyk ? 4 : 3));
    if (data == NULL) {
        return mui_trouble_set(t, MU_ERR_NOMEM, "no memory for %d x %d pixels", width, height);
    }
    if (tjDecompress2(jpeg, file, bytes, data, width, 0, height, cmyk ? TJPF_CMYK : TJPF_RGB,
                      TJFLAG_ACCURATEDCT | TJFLAG_LIMITSCANS) != 0 &&
        !harmless_warning(jpeg, file, bytes)) {
        return mui_trouble_set(t, MU_ERR_FORMAT, "damaged JPEG: %s", tjGetErrorStr2(jpeg));
    }
    if (cmyk) {
        cmyk_to_rgb(data, pixels);
    }
    *out = (mui_image){data, width, height, 3};
    return MU_OK;
}

static mu_status decode_jpeg(mui_scratch *s, const uint8_t *file, size_t bytes, mui_image *out, mui_trouble *t)
{
    /* A decoder of its own for every image: one that was used before remembers tables, with which a file that lacks
     * its own is then read, and after a failure it may be left in the middle of the bad file. Images must not depend
     * on those before them. Making one costs microseconds. */
    tjhandle jpeg = tjInitDecompress();
    if (jpeg == NULL) {
        return mui_trouble_set(t, MU_ERR_NOMEM, "libturbojpeg cannot start");
    }
    mu_status status = decode_jpeg_with(jpeg, s, file, bytes, out, t);
    tjDestroy(jpeg);
    return status;
}

static mu_status png_fail(int code, mui_trouble *t)
{
    mu_status status = code == SPNG_EMEM ? MU_ERR_NOMEM : MU_ERR_FORMAT;
    return mui_trouble_set(t, status, "damaged PNG: %s", spng_strerror(code));
}

static mu_status decode_png_with(spng_ctx *png, mui_scratch *s, const uint8_t *file, size_t bytes, mui_image *out,
                                 mui_trouble *t)
{
    struct spng_ihdr head;
    size_t decoded_bytes = 0;
    /* libspng would refuse a wide image without saying how wide; the check below says it. */
    int code = spng_set_chunk_limits(png, (size_t)1 << 26, (size_t)1 << 27);
    code = code != 0 ? code : spng_set_png_buffer(png, file, bytes);
    code = code != 0 ? code : spng_get_ihdr(png, &head);
    if (code != 0) {
        return png_fail(code, t);
    }
    mu_status status = check_size("PNG", head.width, head.height, t);
    if (status != MU_OK) {
        return status;
    }
    static const uint8_t samples[7] = {1, 0, 3, 1, 2, 0, 4}; /* by colour type, checked by libspng */
    uint64_t row_bits = (uint64_t)head.width * head.bit_depth * samples[head.color_type];
    if ((row_bits / 8 + 1) * head.height / DEFLATE_MAX_RATIO > bytes) {
        return mui_trouble_set(t, MU_ERR_FORMAT, "PNG claims %u x %u pixels, more than its %zu bytes can hold",
                               head.width, head.height, bytes);
    }
    code = spng_decoded_image_size(png, SPNG_FMT_RGB8, &decoded_bytes);
    if (code != 0) {
        return png_fail(code, t);
    }
    if (decoded_bytes != (size_t)head.width * head.height * 3) {
        return mui_trouble_set(t, MU_ERR_INTERNAL, "libspng decodes %u x %u pixels to %zu bytes", head.width,
                               head.height, decoded_bytes);
    }
    uint8_t *data = mui_buffer_need(s->context, &s->decoded, decoded_bytes);
    if (data == NULL) {
        return mui_trouble_set(t, MU_ERR_NOMEM, "no memory for %u x %u pixels", head.width, head.height);
    }
    code = spng_decode_image(png, data, decoded_bytes, SPNG_FMT_RGB8, 0);
    code = code != 0 ? code : spng_decode_chunks(png); /* up to the end chunk: a cut file lacks it */
    if (code != 0) {
        return png_fail(code, t);
    }
    *out = (mui_image){data, (int)head.width, (int)head.height, 3};
    return MU_OK;
}

static mu_status decode_png(mui_scratch *s, const uint8_t *file, size_t bytes, mui_image *out, mui_trouble *t)
{
    spng_ctx *png = spng_ctx_new(0);
    if (png == NULL) {
        return mui_trouble_set(t, MU_ERR_NOMEM, "libspng cannot start");
    }
    mu_status status = decode_png_with(png, s, file, bytes, out, t);
    spng_ctx_free(png);
    return status;
}

/* ITU-R 601 luma in 16-bit fixed point: (H, W, 3) to (H, W, 1) in place. */
static void to_grey(uint8_t *data, size_t pixels)
{
    for (size_t i = 0; i < pixels; i++) {
        const uint8_t *p = data + 3 * i;
        data[i] = (uint8_t)((19595u * p[0] + 38470u * p[1] + 7471u * p[2] + 32768u) >> 16);
    }
}

mu_status mui_image_decode(mui_scratch *s, const uint8_t *file, size_t bytes, int channels, mui_image *out,
                           mui_trouble *t)
{
    static const uint8_t png_magic[8] = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'};
    mui_image image;
    mu_status status;
    if (bytes >= 3 && file[0] == 0xff && file[1] == 0xd8 && file[2] == 0xff) {
        status = decode_jpeg(s, file, bytes, &image, t);
    } else if (bytes >= 8 && memcmp(file, png_magic, 8) == 0) {
        status = decode_png(s, file, bytes, &image, t);
    } else {
        char found[16] = "";
        for (size_t i = 0; i < 4 && i < bytes; i++) {
            static const char digits[] = "0123456789abcdef";
            char hex[4] = {' ', digits[file[i] >> 4], digits[file[i] & 15], '\0'};
            strcat(found, hex);
        }
        return mui_trouble_set(t, MU_ERR_FORMAT, "neither JPEG nor PNG: %zu bytes, starting with%s", bytes,
                               bytes > 0 ? found : " nothing");
    }
    if (status != MU_OK) {
        return status;
    }
    if (channels == 1) {
        to_grey((uint8_t *)s->decoded.data, (size_t)image.width * (size_t)image.height);
        image.channels = 1;
    }
    *out = image;
    return MU_OK;
}
