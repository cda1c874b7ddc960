/* `muster inspect FILE [--json] [--hash]`: what is inside a checkpoint, without running anything of it.
 *
 * --json writes one object:
 *   "file"      the path as given
 *   "format"    "torch zip", "torch legacy" or "torchscript"
 *   "tensors"   in file order; each {"name", "dtype", "shape": [..], "bytes", "tied_to": name or null,
 *               "location": where PyTorch had it, e.g. "cuda:0", "" when not told, "note": text or null, and with --hash "sha256": 64 digits or null}
 *   "arrays"    NumPy's arrays and scalars, in the same form
 *   "storages"  bare storages, as one-dimensional tensors, in the same form
 *   "bytes"     of all tensors, tied ones once
 *   "state_dicts" the parts that --key can name and that can be meant without it: each {"path", "tensors": how many}
 *   "globals"   names that Python would import or call to load the file, other than PyTorch's own constructors
 * "name" is the path in the file's object: keys joined by dots, "[i]" for items of lists and tuples, "<Class>" after an
 * instance of a class; a pickled torch.nn.Module shows its state_dict's names. "dtype" is PyTorch's. "bytes" is of the
 * elements laid out row by row, and "sha256" is of those bytes, little-endian. Names that are not valid Unicode have
 * \udXXX escapes. */
#include "checkpoint_flags.h"
#include "commands.h"
#include "sha256.h"

#include <muster/checkpoint.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct inspect_options {
    const char *file;
    bool json, hash;
    mu_checkpoint_options reading;
} inspect_options;

static const char usage[] =
    "usage: muster inspect FILE [--json] [--hash] [--limit NAME=N] [--no-checksum] [--big-endian]\n"
    "\n"
    "Shows the tensors of a PyTorch checkpoint (zip or legacy) or TorchScript archive, and what Python would import or\n"
    "call to load it. Nothing of the file is run.\n"
    "\n"
    "  --json   write JSON, for programs\n"
    "  --hash   add the SHA-256 of each tensor's elements (row-major, little-endian); checks all data on the way\n"
    CHECKPOINT_FLAGS_HELP
    "\n"
    "Exit codes: 0 done, 1 the file is damaged or no checkpoint, 2 bad flags or no such file.\n";

/* Returns -1 to go on, else an exit code. */
static int parse(int argc, char **argv, inspect_options *o)
{
    bool flags_end = false;
    int code = -1;
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i];
        if (!flags_end && (strcmp(a, "--help") == 0 || strcmp(a, "-h") == 0)) {
            fputs(usage, stdout);
            return CLI_OK;
        }
        if (!flags_end && strcmp(a, "--") == 0) {
            flags_end = true;
        } else if (!flags_end && strcmp(a, "--json") == 0) {
            o->json = true;
        } else if (!flags_end && strcmp(a, "--hash") == 0) {
            o->hash = true;
        } else if (!flags_end && checkpoint_flag("inspect", argc, argv, &i, &o->reading, &code)) {
            if (code >= 0) {
                return code;
            }
        } else if (!flags_end && a[0] == '-' && a[1] != '\0') {
            return cli_usage_error("inspect", "no flag '%s'", a);
        } else if (o->file != NULL) {
            return cli_usage_error("inspect", "one file is wanted, '%s' and '%s' were given", o->file, a);
        } else {
            o->file = a;
        }
    }
    return o->file != NULL ? -1 : cli_usage_error("inspect", "which file?");
}

/* Errors are printed once at the end; warnings at once. */
static void on_log(void *user, mu_log_level level, const char *message)
{
    (void)user;
    if (level == MU_LOG_WARN) {
        fprintf(stderr, "muster inspect: warning: %s\n", message);
    }
}

/* Saturating: a file may claim any shape. */
static uint64_t bytes_of(mu_checkpoint_entry e)
{
    uint64_t n = mu_dtype_bytes(e.dtype);
    for (int i = 0; i < e.dims.ndim; i++) {
        if (__builtin_mul_overflow(n, (uint64_t)e.dims.dim[i], &n)) {
            n = UINT64_MAX;
        }
    }
    return n;
}

/* One character of a name at s as JSON or, for people, with control characters made visible; returns its end. */
static const char *put_char(const char *s, bool json)
{
    unsigned char c = (unsigned char)*s;
    if (c < 0x20 || c == 0x7f) {
        printf(json ? "\\u%04x" : "\\x%02x", c);
        return s + 1;
    }
    if (json && (c == '"' || c == '\\')) {
        printf("\\%c", c);
        return s + 1;
    }
    /* A lone surrogate, which UTF-8 does not allow but Python's pickles do. */
    if (c == 0xed && (unsigned char)s[1] >= 0xa0 && s[1] != '\0' && s[2] != '\0') {
        printf("\\u%04x", 0xd000u | ((unsigned char)s[1] & 0x3fu) << 6 | ((unsigned char)s[2] & 0x3fu));
        return s + 3;
    }
    /* C1 control characters act on terminals too. */
    if (!json && c == 0xc2 && (unsigned char)s[1] >= 0x80 && (unsigned char)s[1] < 0xa0) {
        printf("\\x%02x", (unsigned char)s[1]);
        return s + 2;
    }
    putchar(c);
    return s + 1;
}

static void put_text(const char *s, bool json)
{
    while (*s != '\0') {
        s = put_char(s, json);
    }
}

/* Whether bytes form UTF-8 as put_char expects; keys may be bytes. Others are shown byte by byte. */
static void put_json(const char *s)
{
    if (s == NULL) {
        fputs("null", stdout);
        return;
    }
    putchar('"');
    for (const char *p = s; *p != '\0';) {
        unsigned char c = (unsigned char)*p;
        int more = c < 0x80 ? 0 : c >= 0xc2 && c < 0xe0 ? 1 : c >= 0xe0 && c < 0xf0 ? 2 : c >= 0xf0 && c < 0xf5 ? 3 : -1;
        bool whole = more >= 0;
        for (int i = 1; whole && i <= more; i++) {
            whole = ((unsigned char)p[i] & 0xc0) == 0x80;
        }
        if (!whole) { /* not UTF-8: as Latin-1 */
            printf("\\u%04x", c);
            p++;
        } else if (more == 0 || c == 0xed) {
            p = put_char(p, true);
            /* the rest of a valid three-byte letter that begins with 0xed */
            while (((unsigned char)*p & 0xc0) == 0x80) {
                putchar(*p++);
            }
        } else {
            fwrite(p, 1, (size_t)more + 1, stdout);
            p += more + 1;
        }
    }
    putchar('"');
}

/* hex is "" when the tensor has no data to hash. Returns false on error, which the context then has. */
static bool hash_entry(mu_context *c, mu_checkpoint_file *k, int64_t i, char hex[65])
{
    mu_checkpoint_entry e = mu_checkpoint_get(k, i);
    uint64_t bytes = bytes_of(e);
    hex[0] = '\0';
    mu_status s = mu_checkpoint_read(k, i, NULL, (size_t)bytes);
    if (s < 0) {
        bool skip = e.note != NULL;
        if (skip) {
            mu_context_clear(c);
        }
        return skip;
    }
    unsigned char *data = malloc(bytes > 0 ? (size_t)bytes : 1);
    if (data == NULL) {
        cli_fail("inspect", CLI_FAILED, "out of memory: '%s' has %llu bytes", e.name, (unsigned long long)bytes);
        return false;
    }
    s = mu_checkpoint_read(k, i, data, (size_t)bytes);
    if (s == MU_OK) {
        cli_sha256 h;
        cli_sha256_start(&h);
        cli_sha256_add(&h, data, (size_t)bytes);
        cli_sha256_hex(&h, hex);
    }
    free(data);
    return s == MU_OK;
}

static void put_shape(mu_dims d, const char *open, const char *shut)
{
    fputs(open, stdout);
    for (int i = 0; i < d.ndim; i++) {
        printf("%s%lld", i > 0 ? ", " : "", (long long)d.dim[i]);
    }
    fputs(shut, stdout);
}

typedef enum entry_kind { TENSOR, ARRAY, STORAGE } entry_kind;

static entry_kind kind_of(mu_checkpoint_entry e)
{
    return e.is_storage ? STORAGE : e.is_array ? ARRAY : TENSOR;
}

/* The entries of one kind as a JSON array. */
static bool json_entries(mu_context *c, mu_checkpoint_file *k, const inspect_options *o, entry_kind kind)
{
    bool first = true;
    for (int64_t i = 0; i < mu_checkpoint_count(k); i++) {
        mu_checkpoint_entry e = mu_checkpoint_get(k, i);
        char hex[65] = "";
        if (kind_of(e) != kind) {
            continue;
        }
        if (o->hash && !hash_entry(c, k, i, hex)) {
            return false;
        }
        fputs(first ? "\n  {\"name\": " : ",\n  {\"name\": ", stdout);
        first = false;
        put_json(e.name);
        printf(", \"dtype\": \"%s\", \"shape\": ", e.dtype_name);
        put_shape(e.dims, "[", "]");
        printf(", \"bytes\": %llu, \"tied_to\": ", (unsigned long long)bytes_of(e));
        put_json(e.tied_to);
        fputs(", \"location\": ", stdout);
        put_json(e.location);
        fputs(", \"note\": ", stdout);
        put_json(e.note);
        if (o->hash) {
            fputs(", \"sha256\": ", stdout);
            put_json(hex[0] != '\0' ? hex : NULL);
        }
        putchar('}');
    }
    return true;
}

static uint64_t total_bytes(const mu_checkpoint_file *k)
{
    uint64_t all = 0;
    for (int64_t i = 0; i < mu_checkpoint_count(k); i++) {
        mu_checkpoint_entry e = mu_checkpoint_get(k, i);
        if (kind_of(e) == TENSOR && e.tied_to == NULL && __builtin_add_overflow(all, bytes_of(e), &all)) {
            all = UINT64_MAX;
        }
    }
    return all;
}

static bool print_json(mu_context *c, mu_checkpoint_file *k, const inspect_options *o)
{
    fputs("{\"file\": ", stdout);
    put_json(o->file);
    printf(",\n \"format\": \"%s\",\n \"tensors\": [", mu_checkpoint_format(k));
    if (!json_entries(c, k, o, TENSOR)) {
        return false;
    }
    fputs("],\n \"arrays\": [", stdout);
    if (!json_entries(c, k, o, ARRAY)) {
        return false;
    }
    fputs("],\n \"storages\": [", stdout);
    if (!json_entries(c, k, o, STORAGE)) {
        return false;
    }
    printf("],\n \"bytes\": %llu,\n \"state_dicts\": [", (unsigned long long)total_bytes(k));
    for (int64_t i = 0; i < mu_checkpoint_state_dicts(k); i++) {
        mu_state_dict d = mu_checkpoint_state_dict(k, i);
        fputs(i > 0 ? ", {\"path\": " : "{\"path\": ", stdout);
        put_json(d.path);
        printf(", \"tensors\": %lld}", (long long)d.count);
    }
    fputs("],\n \"globals\": [", stdout);
    const char *const *g = mu_checkpoint_globals(k);
    for (size_t i = 0; g[i] != NULL; i++) {
        fputs(i > 0 ? ", " : "", stdout);
        put_json(g[i]);
    }
    fputs("]}\n", stdout);
    return true;
}

static void put_size(uint64_t bytes)
{
    static const char *const units[] = {"kB", "MB", "GB", "TB", "PB", "EB"};
    double x = (double)bytes / 1000;
    int u = 0;
    if (bytes < 1000) {
        printf("%llu bytes", (unsigned long long)bytes);
        return;
    }
    for (; x >= 1000 && u < 5; u++) {
        x /= 1000;
    }
    printf("%.1f %s", x, units[u]);
}

static bool print_text(mu_context *c, mu_checkpoint_file *k, const inspect_options *o)
{
    int width = 4;
    int64_t tensors = 0, storages = 0;
    for (int64_t i = 0; i < mu_checkpoint_count(k); i++) {
        mu_checkpoint_entry e = mu_checkpoint_get(k, i);
        size_t n = strlen(e.name);
        width = n <= 60 && (int)n > width ? (int)n : width;
        tensors += kind_of(e) == TENSOR;
        storages += e.is_storage;
    }
    printf("%s: %s, %lld tensor%s, ", o->file, mu_checkpoint_format(k), (long long)tensors, tensors == 1 ? "" : "s");
    put_size(total_bytes(k));
    if (storages > 0) {
        printf(", %lld bare storage%s", (long long)storages, storages == 1 ? "" : "s");
    }
    putchar('\n');
    for (int64_t i = 0; i < mu_checkpoint_count(k); i++) {
        mu_checkpoint_entry e = mu_checkpoint_get(k, i);
        char hex[65] = "";
        if (o->hash && !hash_entry(c, k, i, hex)) {
            return false;
        }
        fputs("  ", stdout);
        put_text(e.name[0] != '\0' ? e.name : "(the object itself)", false);
        int pad = width - (int)strlen(e.name);
        printf("%*s  %-10s ", pad > 0 ? pad : 0, "", e.dtype_name);
        put_shape(e.dims, "(", ")");
        if (o->hash) {
            printf("  %s", hex[0] != '\0' ? hex : "no data");
        }
        if (e.is_storage) {
            fputs("  bare storage", stdout);
        }
        if (e.is_array) {
            fputs("  NumPy", stdout);
        }
        if (e.tied_to != NULL) {
            fputs("  tied to ", stdout);
            put_text(e.tied_to, false);
        }
        if (e.note != NULL) {
            printf("  (%s)", e.note);
        }
        putchar('\n');
    }
    const char *const *g = mu_checkpoint_globals(k);
    for (size_t i = 0; g[i] != NULL; i++) {
        fputs(i == 0 ? "Loading it in Python would import or call:\n  " : "  ", stdout);
        put_text(g[i], false);
        putchar('\n');
    }
    return true;
}

int cmd_inspect(int argc, char **argv)
{
    inspect_options o = {0};
    int code = parse(argc, argv, &o);
    if (code >= 0) {
        return code;
    }
    mu_context *c = mu_context_open(&(mu_context_options){.log = on_log});
    if (c == NULL) {
        return cli_fail("inspect", CLI_FAILED, "out of memory");
    }
    mu_checkpoint_file *k = mu_checkpoint_open_with(c, o.file, &o.reading);
    bool good = k != NULL && (o.json ? print_json(c, k, &o) : print_text(c, k, &o));
    if (!good) {
        mu_status s = mu_context_status(c);
        code = k == NULL && s == MU_ERR_IO ? CLI_USAGE : CLI_FAILED;
        if (s != MU_OK) {
            fflush(stdout);
            cli_fail("inspect", code, "%s", mu_context_message(c));
        }
    } else {
        code = CLI_OK;
        if (fflush(stdout) != 0 || ferror(stdout)) {
            code = cli_fail("inspect", CLI_FAILED, "cannot write the output");
        }
    }
    mu_context_close(c);
    return code;
}
