/* `muster inspect FILE`: what is inside a checkpoint, without running anything of it. docs/checkpoint-json.md describes
 * --json. */
#include "commands.h"
#include "look.h"
#include "sha256.h"

#include <stdlib.h>
#include <string.h>

typedef struct inspect_options {
    const char *file, *key;
    bool json, hash, globals, strict;
    look_reading reading;
} inspect_options;

#define AT(field) offsetof(inspect_options, field)
static const flag inspect_flags[] = {
    {"FILE", FLAG_FILE, AT(file), NULL, NULL, 0, 0, FLAG_FREE},
    {"json", FLAG_SWITCH, AT(json), NULL, "write JSON, for programs (docs/checkpoint-json.md)", 0, 0, FLAG_FREE},
    {"hash", FLAG_SWITCH, AT(hash), NULL,
     "add the SHA-256 of each tensor's elements (row-major, little-endian); checks all data on the way", 0, 0, FLAG_FREE},
    {"globals", FLAG_SWITCH, AT(globals), NULL, "list all Python names in the file: what runs code, and what is data", 0,
     0, FLAG_FREE},
    {"strict", FLAG_SWITCH, AT(strict), NULL, "exit with 3 if loading it in Python would run code", 0, 0, FLAG_FREE},
    {"key", FLAG_TEXT, AT(key), "PATH", "only what is below that path in the file", -1, 0, FLAG_FREE},
    LOOK_FLAGS(inspect_options, reading),
};
static const char about[] =
    "Shows the tensors of a checkpoint (PyTorch's zip or legacy, TorchScript, safetensors), which parts of it can be a\n"
    "state dict, and what Python would import or call to load it. Nothing of the file is run.\n"
    "Exit codes: 0 done, 1 the file is damaged or no checkpoint, 2 bad flags or no such file, 3 with --strict: Python\n"
    "would run code.";

/* hex is "" when the tensor has no data to hash. Returns false on error, which the context then has. */
static bool hash_entry(const look *l, mu_checkpoint_file *k, int64_t i, char hex[65])
{
    mu_checkpoint_entry e = mu_checkpoint_get(k, i);
    uint64_t bytes = look_bytes(&e);
    hex[0] = '\0';
    bool readable = false;
    if (!look_readable(l, k, i, &readable) || !readable) {
        return mu_context_status(l->context) == MU_OK;
    }
    /* Most tensors lie in the file as they are; others are laid out first. */
    const void *data = mu_checkpoint_data(k, i);
    void *laid_out = NULL;
    mu_status s = mu_context_status(l->context);
    if (s == MU_OK && data == NULL) {
        data = laid_out = look_room(l, &e, bytes);
        if (data == NULL) {
            return false;
        }
        s = mu_checkpoint_read(k, i, laid_out, (size_t)bytes);
    }
    if (s == MU_OK) {
        cli_sha256 h;
        cli_sha256_start(&h);
        cli_sha256_add(&h, data, (size_t)bytes);
        cli_sha256_hex(&h, hex);
    }
    free(laid_out);
    return s == MU_OK;
}

typedef enum entry_kind { TENSOR, ARRAY, STORAGE } entry_kind;

static entry_kind kind_of(mu_checkpoint_entry e)
{
    return e.is_storage ? STORAGE : e.is_array ? ARRAY : TENSOR;
}

static uint64_t total_bytes(const mu_checkpoint_file *k, const mu_state_dict *d)
{
    uint64_t all = 0;
    for (int64_t i = d->first; i < d->first + d->count; i++) {
        mu_checkpoint_entry e = mu_checkpoint_get(k, i);
        if (kind_of(e) == TENSOR && e.tied_to == NULL && __builtin_add_overflow(all, look_bytes(&e), &all)) {
            all = UINT64_MAX;
        }
    }
    return all;
}

/* -- JSON --------------------------------------------------------------------------------------------------------- */

/* The scales of a quantised tensor: all of them, however many. */
static bool json_quantization(json *j, mu_checkpoint_file *k, int64_t i)
{
    mu_quantization q = {0};
    if (mu_checkpoint_quantization(k, i, &q) != MU_OK) {
        return false;
    }
    if (q.scheme == NULL) {
        json_null(j, "quantization");
        return true;
    }
    json_open(j, "quantization", '{');
    json_text(j, "scheme", q.scheme);
    json_int(j, "axis", q.axis);
    for (int part = 0; part < 2; part++) {
        json_open(j, part == 0 ? "scales" : "zero_points", '[');
        for (int64_t n = 0; n < q.count; n++) {
            json_number(j, NULL, part == 0 ? q.scales[n] : q.zero_points[n]);
        }
        json_close(j);
    }
    json_close(j);
    return true;
}

static bool json_entry(json *j, const look *l, mu_checkpoint_file *k, const inspect_options *o, int64_t i)
{
    mu_checkpoint_entry e = mu_checkpoint_get(k, i);
    char hex[65] = "";
    if (o->hash && !hash_entry(l, k, i, hex)) {
        return false;
    }
    json_open(j, NULL, '{');
    json_text(j, "name", e.name);
    json_text(j, "dtype", e.dtype_name);
    json_ints(j, "shape", e.dims.dim, e.dims.ndim);
    json_uint(j, "bytes", look_bytes(&e));
    json_text(j, "tied_to", e.tied_to);
    json_text(j, "location", e.location);
    json_text(j, "note", e.note);
    json_text(j, "role", e.is_parameter ? "parameter" : e.is_buffer ? "buffer" : NULL);
    json_bool(j, "requires_grad", e.requires_grad);
    if (!json_quantization(j, k, i)) {
        return false;
    }
    if (o->hash) {
        json_text(j, "sha256", hex[0] != '\0' ? hex : NULL);
    }
    json_close(j);
    return true;
}

static bool json_entries(json *j, const look *l, mu_checkpoint_file *k, const inspect_options *o, const mu_state_dict *d,
                         entry_kind kind)
{
    static const char *const keys[] = {"tensors", "arrays", "storages"};
    bool good = true;
    json_open(j, keys[kind], '[');
    for (int64_t i = d->first; good && i < d->first + d->count; i++) {
        good = kind_of(mu_checkpoint_get(k, i)) != kind || json_entry(j, l, k, o, i);
    }
    json_close(j);
    return good;
}

static void json_state_dicts(json *j, const mu_checkpoint_file *k)
{
    json_open(j, "state_dicts", '[');
    for (int64_t i = 0; i < mu_checkpoint_state_dicts(k); i++) {
        mu_state_dict d = mu_checkpoint_state_dict(k, i);
        char prefix[256];
        const char *first = mu_checkpoint_name_in(k, &d, d.first);
        snprintf(prefix, sizeof(prefix), "%.*s", (int)look_common_prefix(k, &d), first != NULL ? first : "");
        json_open(j, NULL, '{');
        json_text(j, "path", d.path);
        json_int(j, "tensors", d.count);
        json_text(j, "prefix", prefix);
        json_close(j);
    }
    json_close(j);
}

/* Both lists are sorted alike, and the first is part of the second. */
static void list_globals(json *j, const mu_checkpoint_file *k)
{
    const char *const *running = mu_checkpoint_globals(k), *const *all = mu_checkpoint_all_globals(k);
    for (; *all != NULL; all++) {
        bool runs = *running != NULL && strcmp(*running, *all) == 0;
        running += runs;
        if (j != NULL) {
            json_open(j, NULL, '{');
            json_text(j, "name", *all);
            json_bool(j, "runs_code", runs);
            json_close(j);
        } else {
            fputs(runs ? "  runs code  " : "  data       ", stdout);
            put_text(*all);
            putchar('\n');
        }
    }
}

static bool print_json(const look *l, mu_checkpoint_file *k, const inspect_options *o, const mu_state_dict *d)
{
    json j = {0};
    json_open(&j, NULL, '{');
    json_text(&j, "file", o->file);
    json_text(&j, "format", mu_checkpoint_format(k));
    if (!json_entries(&j, l, k, o, d, TENSOR) || !json_entries(&j, l, k, o, d, ARRAY) ||
        !json_entries(&j, l, k, o, d, STORAGE)) {
        return false;
    }
    json_uint(&j, "bytes", total_bytes(k, d));
    json_state_dicts(&j, k);
    json_texts(&j, "globals", mu_checkpoint_globals(k));
    if (o->globals) {
        json_open(&j, "all_globals", '[');
        list_globals(&j, k);
        json_close(&j);
    }
    json_int(&j, "trailing_bytes", mu_checkpoint_get_facts(k).trailing_bytes);
    json_texts(&j, "warnings", l->warnings);
    json_close(&j);
    return true;
}

/* -- text --------------------------------------------------------------------------------------------------------- */

static bool print_entry(const look *l, mu_checkpoint_file *k, const inspect_options *o, int64_t i, int width)
{
    mu_checkpoint_entry e = mu_checkpoint_get(k, i);
    char hex[65] = "";
    if (o->hash && !hash_entry(l, k, i, hex)) {
        return false;
    }
    fputs("  ", stdout);
    const char *name = e.name[0] != '\0' ? e.name : "(the object itself)";
    put_text(name);
    int pad = width - (int)strlen(name);
    printf("%*s  %-10s ", pad > 0 ? pad : 0, "", e.dtype_name);
    put_shape(e.dims.ndim, e.dims.dim, "()");
    if (o->hash) {
        printf("  %s", hex[0] != '\0' ? hex : "no data");
    }
    if (e.is_storage || e.is_array || e.is_buffer) {
        fputs(e.is_storage ? "  bare storage" : e.is_array ? "  NumPy" : "  buffer", stdout);
    }
    if (e.is_parameter && !e.requires_grad) {
        fputs("  frozen", stdout);
    }
    if (e.tied_to != NULL) {
        fputs("  tied to ", stdout);
        put_text(e.tied_to);
    }
    if (e.note != NULL) {
        fputs("  (", stdout);
        put_text(e.note);
        putchar(')');
    }
    putchar('\n');
    return true;
}

static void print_state_dicts(const mu_checkpoint_file *k)
{
    int64_t n = mu_checkpoint_state_dicts(k);
    for (int64_t i = 0; i < n; i++) {
        mu_state_dict d = mu_checkpoint_state_dict(k, i);
        const char *first = mu_checkpoint_name_in(k, &d, d.first);
        size_t prefix = look_common_prefix(k, &d);
        if (n == 1 && d.path[0] == '\0' && prefix == 0) {
            return; /* nothing that is not plain to see */
        }
        if (i == 0) {
            puts(n > 1 ? "State dicts; give one as --key:" : "State dict:");
        }
        fputs("  ", stdout);
        put_text(d.path[0] != '\0' ? d.path : "(the whole file)");
        printf("  %lld tensor%s", (long long)d.count, d.count == 1 ? "" : "s");
        if (prefix > 0) {
            printf(", all names begin with \"%.*s\"", (int)prefix, first);
        }
        putchar('\n');
    }
}

static bool print_text(const look *l, mu_checkpoint_file *k, const inspect_options *o, const mu_state_dict *d)
{
    int width = 4;
    int64_t tensors = 0, storages = 0, end = d->first + d->count;
    for (int64_t i = d->first; i < end; i++) {
        mu_checkpoint_entry e = mu_checkpoint_get(k, i);
        size_t n = strlen(e.name);
        width = n <= 60 && (int)n > width ? (int)n : width;
        tensors += kind_of(e) == TENSOR;
        storages += e.is_storage;
    }
    put_text(o->file);
    printf(": %s, %lld tensor%s, ", mu_checkpoint_format(k), (long long)tensors, tensors == 1 ? "" : "s");
    put_size(total_bytes(k, d));
    if (storages > 0) {
        printf(", %lld bare storage%s", (long long)storages, storages == 1 ? "" : "s");
    }
    putchar('\n');
    for (int64_t i = d->first; i < end; i++) {
        if (!print_entry(l, k, o, i, width)) {
            return false;
        }
    }
    if (o->key == NULL) {
        print_state_dicts(k);
    }
    const char *const *g = mu_checkpoint_globals(k);
    if (o->globals && mu_checkpoint_all_globals(k)[0] != NULL) {
        puts("Python names in it:");
        list_globals(NULL, k);
    }
    for (size_t i = 0; g[i] != NULL && !o->globals; i++) {
        fputs(i == 0 ? "Loading it in Python would import or call:\n  " : "  ", stdout);
        put_text(g[i]);
        putchar('\n');
    }
    return true;
}

int cmd_inspect(int argc, char **argv)
{
    inspect_options o = {0};
    look l;
    int code = flags_parse("inspect", about, inspect_flags, &o, argc, argv);
    code = code < 0 ? look_begin(&l, "inspect", &o.reading) : code;
    if (code >= 0) {
        return code;
    }
    mu_checkpoint_file *k = look_open(&l, o.file, &o.reading);
    mu_state_dict d = {.path = "", .count = mu_checkpoint_count(k)};
    bool good = k != NULL && (o.key == NULL || mu_checkpoint_find_state_dict(k, o.key, &d) == MU_OK) &&
                (o.json ? print_json(&l, k, &o, &d) : print_text(&l, k, &o, &d));
    code = !good ? CLI_FAILED : o.strict && mu_checkpoint_globals(k)[0] != NULL ? CLI_RUNS_CODE : CLI_OK;
    return look_end(&l, code);
}
