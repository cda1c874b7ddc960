/* Tells what a file is by its content, never by its name. */
#include "io/bytes.h"
#include "io/checkpoint_file.h"

#include <ctype.h>
#include <string.h>

static bool starts(const unsigned char *data, size_t bytes, const char *with, size_t n)
{
    return bytes >= n && memcmp(data, with, n) == 0;
}
#define STARTS(text) starts(data, bytes, (text), sizeof(text) - 1)

static bool starts_nocase(const unsigned char *data, size_t bytes, const char *with)
{
    size_t i = 0;
    for (; with[i] != '\0' && i < bytes; i++) {
        if (tolower(data[i]) != with[i]) {
            return false;
        }
    }
    return with[i] == '\0';
}

static bool is_html(const unsigned char *data, size_t bytes)
{
    while (bytes > 0 && (isspace(*data) || *data == 0xef || *data == 0xbb || *data == 0xbf)) {
        data++;
        bytes--;
    }
    return starts_nocase(data, bytes, "<!doctype") || starts_nocase(data, bytes, "<html") ||
           starts_nocase(data, bytes, "<?xml") || starts_nocase(data, bytes, "<head");
}

static size_t after_space(const unsigned char *data, size_t bytes, size_t at)
{
    while (at < bytes && (data[at] == ' ' || data[at] == '\t' || data[at] == '\r' || data[at] == '\n')) {
        at++;
    }
    return at;
}

/* A length, then JSON that is an object with a name in it, or an object of that length. */
static bool is_safetensors(const unsigned char *data, size_t bytes)
{
    size_t at = bytes > 8 ? after_space(data, bytes, 8) : bytes;
    if (at == bytes || data[at] != '{') {
        return false;
    }
    at = after_space(data, bytes, at + 1);
    return (at < bytes && (data[at] == '"' || data[at] == '}')) || mui_le64(data) <= bytes - 8;
}

/* PyTorch's legacy stream begins with a pickle of its magic number: PROTO, perhaps FRAME, LONG1 of these ten bytes. */
static bool is_legacy(const unsigned char *data, size_t bytes)
{
    static const char magic[] = "\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19";
    size_t at = 2;
    if (bytes < 2 || data[0] != 0x80 || data[1] > 5) {
        return false;
    }
    if (bytes > at && data[at] == 0x95) {
        at += 9;
    }
    if (bytes < at + 13 || memcmp(data + at, magic, 12) != 0) {
        return false;
    }
    at += 12;
    if (data[at] == 0x94) { /* MEMOIZE; BINPUT takes an index */
        at++;
    } else if (data[at] == 'q') {
        at += 2;
    }
    return at < bytes && data[at] == '.';
}

/* Formats that are named only to be refused. */
static const struct {
    const char *magic;
    size_t offset, bytes;
    const char *what;
} others[] = {
    {"version https://git-lfs", 0, 23,
     "a Git LFS pointer, not the file itself: run `git lfs pull`, or download the file it points to"},
    {"\x89HDF\r\n\x1a\n", 0, 8, "an HDF5 file (Keras?), not a PyTorch checkpoint"},
    {"GGUF", 0, 4, "a GGUF file (llama.cpp), not a PyTorch checkpoint"},
    {"\x93NUMPY", 0, 6, "a NumPy array (.npy), not a PyTorch checkpoint"},
    {"PYTORCH1", 0, 8, "in PyTorch's preview container of 2018: load and save it again with a newer PyTorch"},
    {"ustar", 257, 5,
     "a tar archive: unpack it, or, if it is a checkpoint of PyTorch 0.1, load and save it again with PyTorch"},
    {"\x1f\x8b", 0, 2, "compressed by gzip: decompress it first"},
    {"\xfd" "7zXZ", 0, 5, "compressed by xz: decompress it first"},
    {"(\xb5/\xfd", 0, 4, "compressed by zstd: decompress it first"},
    {"BZh", 0, 3, "compressed by bzip2: decompress it first"},
    {"Rar!", 0, 4, "a RAR archive, not a PyTorch checkpoint"},
    {"7z\xbc\xaf", 0, 4, "a 7z archive, not a PyTorch checkpoint"},
    {"\x7f" "ELF", 0, 4, "a program, not a PyTorch checkpoint"},
    {"\x89PNG", 0, 4, "a PNG image, not a PyTorch checkpoint"},
    {"\xff\xd8\xff", 0, 3, "a JPEG image, not a PyTorch checkpoint"},
};

/* ONNX is a protobuf: field 1 (ir_version, a small number), then a text field. */
static bool is_onnx(const unsigned char *data, size_t bytes)
{
    return bytes > 4 && data[0] == 0x08 && data[1] >= 1 && data[1] <= 20 && (data[2] == 0x12 || data[2] == 0x1a);
}

mu_status mui_sniff(mu_context *c, const char *path, const unsigned char *data, size_t bytes, mui_file_format *out)
{
    if (bytes == 0) {
        return mui_fail(c, MU_ERR_FORMAT, "%s: the file is empty", path);
    }
    if (STARTS("PK\3\4")) {
        *out = MUI_FILE_TORCH_ZIP;
        return MU_OK;
    }
    if (is_legacy(data, bytes)) {
        *out = MUI_FILE_TORCH_LEGACY;
        return MU_OK;
    }
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        if (mui_inside(others[i].offset, others[i].bytes, bytes) &&
            memcmp(data + others[i].offset, others[i].magic, others[i].bytes) == 0) {
            return mui_fail(c, MU_ERR_FORMAT, "%s: %s", path, others[i].what);
        }
    }
    if (is_html(data, bytes)) {
        return mui_fail(c, MU_ERR_FORMAT,
                        "%s: an HTML page, not a checkpoint: the download gave a web page (a login or error page?)",
                        path);
    }
    if (STARTS("PK\5\6")) {
        return mui_fail(c, MU_ERR_FORMAT, "%s: an empty zip archive", path);
    }
    if (is_safetensors(data, bytes)) {
        *out = MUI_FILE_SAFETENSORS;
        return MU_OK;
    }
    if (data[0] == 0x80 && bytes > 1 && data[1] <= 5) {
        return mui_fail(c, MU_ERR_FORMAT,
                        "%s: a bare pickle (pickle.dump), not a file of torch.save: load it in Python and write it with "
                        "torch.save",
                        path);
    }
    if (is_onnx(data, bytes)) {
        return mui_fail(c, MU_ERR_FORMAT, "%s: looks like an ONNX model, not a PyTorch checkpoint", path);
    }
    for (size_t i = 0; i + 4 <= bytes && i < 4096; i++) {
        if (memcmp(data + i, "PK\3\4", 4) == 0) {
            return mui_fail(c, MU_ERR_FORMAT,
                            "%s: a zip begins at byte %zu, after something else: PyTorch's zips begin at byte 0", path,
                            i);
        }
    }
    return mui_fail(c, MU_ERR_FORMAT,
                    "%s: not a PyTorch checkpoint: begins with bytes %02x %02x %02x %02x (%zu bytes in all)", path,
                    data[0], bytes > 1 ? data[1] : 0, bytes > 2 ? data[2] : 0, bytes > 3 ? data[3] : 0, bytes);
}
