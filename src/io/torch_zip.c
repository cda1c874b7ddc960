/* PyTorch's zip format: finds the root, the pickle and the storages among the members. */
#include "base/alloc.h"
#include "base/text.h"
#include "io/checkpoint_file.h"

#include <stdio.h>
#include <string.h>

#define SUSPICIOUS_PICKLE_BYTES ((uint64_t)16 << 20)

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), m = strlen(end);
    return n >= m && strcmp(s + n - m, end) == 0;
}

/* A zip that is not PyTorch's: what else it may be. */
static mu_status refuse(mu_checkpoint_file *k)
{
    static const struct {
        const char *end, *inside; /* of a member's name; inside NULL: anything */
        mu_status status;
        const char *what;
    } known[] = {
        {".npy", NULL, MU_ERR_FORMAT, "NumPy arrays (.npz), not a PyTorch checkpoint"},
        {"archive_format", NULL, MU_ERR_UNSUPPORTED,
         "a program of torch.export (.pt2), not a checkpoint: save its state_dict with torch.save"},
        {".json", "models/", MU_ERR_UNSUPPORTED,
         "a program of torch.export (.pt2), not a checkpoint: save its state_dict with torch.save"},
        {"serialized_exported_program.json", NULL, MU_ERR_UNSUPPORTED,
         "a program of torch.export (.pt2), not a checkpoint: save its state_dict with torch.save"},
        {".data/extern_modules", NULL, MU_ERR_UNSUPPORTED,
         "a package of torch.package, which holds Python code: load it in Python and save its state_dict with torch.save"},
        {"model.weights.h5", NULL, MU_ERR_FORMAT, "a Keras model, not a PyTorch checkpoint"},
        {"[Content_Types].xml", NULL, MU_ERR_FORMAT, "a document (docx, xlsx), not a PyTorch checkpoint"},
        {"META-INF/MANIFEST.MF", NULL, MU_ERR_FORMAT, "a Java archive, not a PyTorch checkpoint"},
    };
    static const char *const inside[] = {".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".th", ".tar", NULL};
    const mui_zip *z = &k->zip;
    const char *checkpoint = NULL;
    for (size_t i = 0; i < z->count; i++) {
        const char *name = z->members[i].name;
        for (size_t n = 0; n < sizeof(known) / sizeof(known[0]); n++) {
            if (ends_with(name, known[n].end) && (known[n].inside == NULL || strstr(name, known[n].inside) != NULL)) {
                return mui_fail(k->context, known[n].status, "%s: %s", k->path, known[n].what);
            }
        }
        for (size_t n = 0; inside[n] != NULL && checkpoint == NULL; n++) {
            checkpoint = ends_with(name, inside[n]) ? name : NULL;
        }
    }
    if (checkpoint != NULL) {
        return mui_fail(k->context, MU_ERR_FORMAT, "%s: a zip that has '%.200s' in it, but is no checkpoint itself: unpack it",
                        k->path, checkpoint);
    }
    mui_text t;
    mui_text_init(&t, k->context);
    for (size_t i = 0; i < z->count && i < 3; i++) {
        mui_text_add(&t, "%s'%.100s'", i > 0 ? ", " : "", z->members[i].name);
    }
    mu_status s = mui_fail(k->context, MU_ERR_FORMAT,
                           "%s: a zip, but not a PyTorch checkpoint: it has no data.pkl in its one folder; its %zu member%s: "
                           "%s%s",
                           k->path, z->count, z->count == 1 ? " is" : "s are", mui_text_get(&t),
                           z->count > 3 ? ", ..." : "");
    mui_text_free(&t);
    return s;
}

/* Root is the folder of the first member, with its slash; all members must be below it. */
static mu_status find_root(mu_checkpoint_file *k, char **root)
{
    const mui_zip *z = &k->zip;
    const char *slash = z->count > 0 ? strchr(z->members[0].name, '/') : NULL;
    if (slash == NULL) {
        return refuse(k);
    }
    size_t bytes = (size_t)(slash - z->members[0].name) + 1;
    for (size_t i = 1; i < z->count; i++) {
        if (strncmp(z->members[i].name, z->members[0].name, bytes) != 0) {
            bool pickle = ends_with(z->members[i].name, "/data.pkl") || ends_with(z->members[0].name, "/data.pkl");
            return !pickle ? refuse(k)
                           : mui_fail(k->context, MU_ERR_FORMAT,
                                      "%s: member '%s' is not in the folder '%.*s' of the others", k->path,
                                      z->members[i].name, (int)bytes, z->members[0].name);
        }
    }
    *root = mui_strndup(k->context, z->members[0].name, bytes);
    return *root != NULL ? MU_OK : MU_ERR_NOMEM;
}

static mui_zip_member *find(mu_checkpoint_file *k, const char *root, const char *name)
{
    char *full = mui_format(k->context, "%s%s", root, name);
    mui_zip_member *m = full != NULL ? mui_zip_find(&k->zip, full) : NULL;
    mui_free(k->context, full);
    return m;
}

/* A small text member, without white space at its end. */
static mu_status read_word(mu_checkpoint_file *k, mui_zip_member *m, char *out, size_t out_bytes)
{
    const unsigned char *data = NULL;
    void *owned = NULL;
    if (m->bytes >= out_bytes) {
        return mui_fail(k->context, MU_ERR_FORMAT, "%s: member '%s' has %llu bytes, a word was expected", k->path,
                        m->name, (unsigned long long)m->bytes);
    }
    mu_status s = mui_zip_read(&k->zip, m, &data, &owned);
    if (s != MU_OK) {
        return s;
    }
    size_t n = (size_t)m->bytes;
    while (n > 0 && (data[n - 1] == '\n' || data[n - 1] == '\r' || data[n - 1] == ' ')) {
        n--;
    }
    memcpy(out, data, n);
    out[n] = '\0';
    mui_free(k->context, owned);
    return MU_OK;
}

static mu_status check_version(mu_checkpoint_file *k, const char *root)
{
    char text[32];
    mui_zip_member *m = find(k, root, "version");
    m = m != NULL ? m : find(k, root, ".data/version");
    if (m == NULL) {
        return mui_failed(k->context)
                   ? MU_ERR_NOMEM
                   : mui_fail(k->context, MU_ERR_FORMAT, "%s: damaged: the member '%sversion' is missing", k->path, root);
    }
    mu_status s = read_word(k, m, text, sizeof(text));
    if (s != MU_OK) {
        return s;
    }
    int version = 0, used = 0;
    if (sscanf(text, "%3d%n", &version, &used) != 1 || text[used] != '\0' || text[0] < '0' || text[0] > '9') {
        return mui_fail(k->context, MU_ERR_FORMAT, "%s: member '%s' is not a version number", k->path, m->name);
    }
    if (version < 1 || version > 10) {
        return mui_fail(k->context, MU_ERR_UNSUPPORTED, "%s: file version %d; 1 to 10 can be read", k->path, version);
    }
    return MU_OK;
}

static mu_status read_byte_order(mu_checkpoint_file *k, const char *root)
{
    char text[32];
    mui_zip_member *m = find(k, root, "byteorder");
    if (m == NULL) { /* before PyTorch 2.1: the writer's order, which was little for all but mainframes */
        k->big_endian = k->limits.big_endian;
        return mui_failed(k->context) ? MU_ERR_NOMEM : MU_OK;
    }
    mu_status s = read_word(k, m, text, sizeof(text));
    if (s != MU_OK) {
        return s;
    }
    k->big_endian = strcmp(text, "big") == 0;
    if (!k->big_endian && strcmp(text, "little") != 0) {
        return mui_fail(k->context, MU_ERR_FORMAT, "%s: byte order '%s'; little or big were expected", k->path, text);
    }
    return MU_OK;
}

/* Storages are the members below root/data/. The zip's names are sorted, and so are what follows a common start. */
static mu_status list_blobs(mu_checkpoint_file *k, const char *root)
{
    char *start = mui_format(k->context, "%sdata/", root);
    k->blobs = mui_calloc(k->context, k->zip.count, sizeof(*k->blobs));
    if (start == NULL || k->blobs == NULL) {
        mui_free(k->context, start);
        return MU_ERR_NOMEM;
    }
    size_t bytes = strlen(start);
    for (size_t i = 0; i < k->zip.count; i++) {
        mui_zip_member *m = k->zip.sorted[i];
        if (strncmp(m->name, start, bytes) == 0) {
            k->blobs[k->blob_count++] = (mui_blob){.key = m->name + bytes, .member = m};
        }
    }
    mui_free(k->context, start);
    return MU_OK;
}

static mu_status check_blobs(mu_checkpoint_file *k)
{
    for (size_t i = 0; i < k->blob_count; i++) {
        const mui_blob *b = &k->blobs[i];
        if (b->dtype == NULL) {
            continue; /* nothing refers to it */
        }
        if (b->member->bytes != mui_blob_bytes(b)) {
            return mui_fail(k->context, MU_ERR_FORMAT,
                            "%s: storage data/%s holds %llu bytes, its %lld elements of %s need %zu", k->path, b->key,
                            (unsigned long long)b->member->bytes, (long long)b->elements, b->dtype->name,
                            mui_blob_bytes(b));
        }
        mu_status s = mui_zip_check_ratio(&k->zip, b->member);
        if (s != MU_OK) {
            return s;
        }
    }
    return MU_OK;
}

static mu_status read_pickle(mu_checkpoint_file *k, const char *root)
{
    mui_zip_member *m = find(k, root, "data.pkl");
    if (m == NULL) {
        return mui_failed(k->context) ? MU_ERR_NOMEM : refuse(k);
    }
    if (m->bytes > k->limits.pickle_bytes) {
        return mui_fail(k->context, MU_ERR_LIMIT, "%s: data.pkl has %llu bytes, more than the limit of %llu", k->path,
                        (unsigned long long)m->bytes, (unsigned long long)k->limits.pickle_bytes);
    }
    /* Values take many times the memory of their bytes, so a bomb is told earlier than among the storages. */
    if (m->method != 0 && m->bytes > SUSPICIOUS_PICKLE_BYTES && m->bytes / k->limits.inflate_ratio > m->packed) {
        return mui_fail(k->context, MU_ERR_LIMIT,
                        "%s: data.pkl would inflate %llu bytes to %llu: refused as a decompression bomb (the limit is %llu "
                        "to 1)",
                        k->path, (unsigned long long)m->packed, (unsigned long long)m->bytes,
                        (unsigned long long)k->limits.inflate_ratio);
    }
    const unsigned char *data = NULL;
    mu_status s = mui_zip_read(&k->zip, m, &data, &k->pickle_bytes);
    if (s != MU_OK) {
        return s;
    }
    s = check_version(k, root);
    if (s != MU_OK) {
        return s;
    }
    k->format = find(k, root, "constants.pkl") != NULL ? MUI_FILE_TORCHSCRIPT : MUI_FILE_TORCH_ZIP;
    s = read_byte_order(k, root);
    if (s != MU_OK) {
        return s;
    }
    s = mui_pickle_read(k->context, k->path, "data.pkl", data, (size_t)m->bytes, &k->pickle);
    if (s == MU_OK && k->pickle.used != m->bytes) {
        mui_log(k->context, MU_LOG_WARN, "%s: data.pkl has %llu bytes after its end", k->path,
                (unsigned long long)(m->bytes - k->pickle.used));
    }
    return s;
}

mu_status mui_torch_zip_open(mu_checkpoint_file *k)
{
    char *root = NULL;
    mu_status s = mui_zip_open(k->context, k->path, k->map.data, k->map.bytes, &k->limits, &k->zip);
    if (s != MU_OK) {
        return s;
    }
    k->zip.map = &k->map;
    k->trailing_bytes = k->zip.trailing;
    if (k->zip.trailing > 0) {
        mui_log(k->context, MU_LOG_WARN, "%s: %zu bytes follow the end of the zip; they are ignored", k->path,
                k->zip.trailing);
    }
    s = find_root(k, &root);
    if (s == MU_OK) {
        s = read_pickle(k, root);
    }
    if (s == MU_OK) {
        s = list_blobs(k, root);
    }
    if (s == MU_OK) {
        s = mui_refs_read(k, false);
    }
    if (s == MU_OK) {
        s = check_blobs(k);
    }
    mui_free(k->context, root);
    return s;
}
