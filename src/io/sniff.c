/* Tells what a file is by its content, never by its name. */
#include "io/bytes.h"
#include "io/checkpoint_file.h"
#include "io/sniff_text.h"

#include <string.h>

static bool starts(const unsigned char *data, size_t bytes, const char *with, size_t n)
{
    return bytes >= n && memcmp(data, with, n) == 0;
}
#define STARTS(text) starts(data, bytes, (text), sizeof(text) - 1)

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
    {"\x89HDF\r\n\x1a\n", 0, 8, "an HDF5 file (Keras?), not a PyTorch checkpoint"},
    {"GGUF", 0, 4, "a GGUF file (llama.cpp), not a PyTorch checkpoint"},
    {"\x93NUMPY", 0, 6, "a NumPy array (.npy), not a PyTorch checkpoint"},
    {"PYTORCH1", 0, 8, "in PyTorch's preview container of 2018: load and save it again with a newer PyTorch"},
    {"GGML", 0, 4, "a GGML file, not a PyTorch checkpoint"},
    {"lmgg", 0, 4, "a GGML file (llama.cpp, old), not a PyTorch checkpoint"},
    {"tjgg", 0, 4, "a GGJT file (llama.cpp, old), not a PyTorch checkpoint"},
    {"TFL3", 4, 4, "a TensorFlow Lite model, not a PyTorch checkpoint"},
    {"\x1f\x8b", 0, 2, "compressed by gzip: decompress it first"},
    {"\xfd" "7zXZ", 0, 5, "compressed by xz: decompress it first"},
    {"(\xb5/\xfd", 0, 4, "compressed by zstd: decompress it first"},
    {"\x04\x22\x4d\x18", 0, 4, "compressed by lz4: decompress it first"},
    {"BZh", 0, 3, "compressed by bzip2: decompress it first"},
    {"Rar!", 0, 4, "a RAR archive, not a PyTorch checkpoint"},
    {"7z\xbc\xaf", 0, 4, "a 7z archive, not a PyTorch checkpoint"},
    {"\x7f" "ELF", 0, 4, "a program, not a PyTorch checkpoint"},
    {"\x89PNG", 0, 4, "a PNG image, not a PyTorch checkpoint"},
    {"\xff\xd8\xff", 0, 3, "a JPEG image, not a PyTorch checkpoint"},
};

/* ONNX is a protobuf: field 1 (ir_version, a small number), then a text or message: producer_name, producer_version,
 * domain, graph or opset_import. */
static bool is_onnx(const unsigned char *data, size_t bytes)
{
    return bytes > 4 && data[0] == 0x08 && data[1] >= 1 && data[1] <= 20 && data[2] != 0 &&
           strchr("\x12\x1a\x22\x3a\x42", data[2]) != NULL;
}

/* A header of tar: its check sum, with the sum's own 8 bytes taken as spaces, is right. */
static bool is_tar_header(const unsigned char *h)
{
    unsigned sum = 8 * ' ', said = 0;
    for (int i = 0; i < 512; i++) {
        sum += i >= 148 && i < 156 ? 0 : h[i];
    }
    for (int i = 148; i < 156; i++) {
        said = h[i] >= '0' && h[i] <= '7' ? said * 8 + (h[i] - '0') : said;
    }
    return said == sum;
}

/* PyTorch before 0.1.10 wrote tar archives of three members. */
static mu_status refuse_tar(mu_context *c, const char *path, const unsigned char *data, size_t bytes)
{
    static const char *const wanted[3] = {"storages", "tensors", "pickle"};
    unsigned found = 0;
    for (size_t at = 0; at + 512 <= bytes && is_tar_header(data + at);) {
        const char *h = (const char *)data + at;
        uint64_t size = 0;
        for (int i = 124; i < 136; i++) {
            size = h[i] >= '0' && h[i] <= '7' ? size * 8 + (uint64_t)(h[i] - '0') : size;
        }
        for (unsigned i = 0; i < 3; i++) {
            const char *name = strncmp(h, "./", 2) == 0 ? h + 2 : h;
            found |= strncmp(name, wanted[i], 98) == 0 ? 1u << i : 0;
        }
        if (size > bytes - at) {
            break;
        }
        at += 512 + (size + 511) / 512 * 512;
    }
    return found == 7 ? mui_fail(c, MU_ERR_UNSUPPORTED,
                                 "%s: a legacy tar of PyTorch before 0.1.10, which is not read: load it and save it again "
                                 "with PyTorch (1.13 still can)",
                                 path)
                      : mui_fail(c, MU_ERR_FORMAT, "%s: a tar archive, not a checkpoint: unpack it", path);
}

/* The name of a module is in the pickle as text, near its start. */
static bool mentions(const unsigned char *data, size_t bytes, const char *what)
{
    return mui_find_bytes(data, bytes < 65536 ? bytes : 65536, what) != NULL;
}

static mu_status refuse_pickle(mu_context *c, const char *path, const unsigned char *data, size_t bytes)
{
    const char *what = mentions(data, bytes, "_load_from_bytes") ? " with tensors of PyTorch in it"
                       : mentions(data, bytes, "joblib")         ? " of joblib"
                       : mentions(data, bytes, "numpy")          ? " with NumPy arrays in it"
                                                                 : "";
    return mui_fail(c, MU_ERR_FORMAT,
                    "%s: a bare pickle (pickle.dump)%s, not a file of torch.save: load it in Python, if you trust it, and "
                    "write it with torch.save",
                    path, what);
}

/* Protocols 0 and 1 have no header: an empty container and its place in the memo, a mark or a global come first, STOP
 * last. */
static bool is_old_pickle(const unsigned char *data, size_t bytes)
{
    return bytes >= 4 && data[bytes - 1] == '.' &&
           (((data[0] == '}' || data[0] == ']') && data[1] == 'q') ||
            (data[0] == '(' && (data[1] == 'd' || data[1] == 'l' || data[1] == 't')) ||
            (data[0] == 'c' && mentions(data, bytes < 200 ? bytes : 200, "\np")));
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
    if (mui_inside(257, 255, bytes) && memcmp(data + 257, "ustar", 5) == 0) {
        return refuse_tar(c, path, data, bytes);
    }
    if (mui_is_shard_index(data, bytes)) {
        *out = MUI_FILE_SHARDED_SAFETENSORS;
        return MU_OK;
    }
    if (mui_refuse_text(c, path, data, bytes) != MU_OK) {
        return mu_context_status(c);
    }
    if (STARTS("PK\5\6")) {
        return mui_fail(c, MU_ERR_FORMAT, "%s: an empty zip archive", path);
    }
    if (is_safetensors(data, bytes)) {
        *out = MUI_FILE_SAFETENSORS;
        return MU_OK;
    }
    if ((data[0] == 0x80 && bytes > 1 && data[1] <= 5) || is_old_pickle(data, bytes)) {
        return refuse_pickle(c, path, data, bytes);
    }
    if (is_onnx(data, bytes)) {
        return mui_fail(c, MU_ERR_FORMAT, "%s: looks like an ONNX model, not a PyTorch checkpoint", path);
    }
    const unsigned char *zip = mui_find_bytes(data, bytes < 4096 + 3 ? bytes : 4096 + 3, "PK\3\4");
    if (zip != NULL) {
        return mui_fail(c, MU_ERR_FORMAT,
                        "%s: a zip begins at byte %zu, after something else: PyTorch's zips begin at byte 0", path,
                        (size_t)(zip - data));
    }
    if (mui_refuse_any_text(c, path, data, bytes) != MU_OK) {
        return mu_context_status(c);
    }
    if (bytes <= 8) {
        return mui_fail(c, MU_ERR_FORMAT, "%s: not a checkpoint: only %zu bytes", path, bytes);
    }
    if (mui_le64(data) <= bytes - 8) { /* not certain, so both are said */
        return mui_fail(c, MU_ERR_FORMAT,
                        "%s: not a checkpoint; if it is meant to be a safetensors file: its header of %llu bytes is no "
                        "JSON object in UTF-8",
                        path, (unsigned long long)mui_le64(data));
    }
    return mui_fail(c, MU_ERR_FORMAT,
                    "%s: not a PyTorch checkpoint: begins with bytes %02x %02x %02x %02x (%zu bytes in all)", path,
                    data[0], data[1], data[2], data[3], bytes);
}
