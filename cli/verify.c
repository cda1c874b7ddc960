/* `muster verify FILE`: reads every byte that means something. docs/checkpoint-json.md describes --json. */
#include "commands.h"
#include "look.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct verify_options {
    const char *file;
    bool json, finite;
    look_reading reading;
} verify_options;

#define AT(field) offsetof(verify_options, field)
static const flag verify_flags[] = {
    {"FILE", FLAG_FILE, AT(file), NULL, NULL, 0, 0, FLAG_FREE},
    {"json", FLAG_SWITCH, AT(json), NULL, "write JSON, for programs (docs/checkpoint-json.md)", 0, 0, FLAG_FREE},
    {"finite", FLAG_SWITCH, AT(finite), NULL, "NaN and infinity are a failure too", 0, 0, FLAG_FREE},
    LOOK_FLAGS(verify_options, reading),
};
static const char about[] =
    "Reads all of a checkpoint: its structure, the checksum of every member, every tensor. Reports tensors with NaN or\n"
    "infinity, bytes after the end, and storages that nothing refers to.\n"
    "Exit codes: 0 it is whole, 1 it is not (or, with --finite, has NaN or infinity), 2 bad flags or no such file.";

/* What was found in one tensor or in all. */
typedef struct tally {
    int64_t tensors, elements, tied, unreadable, nan, inf;
} tally;

/* One tensor with numbers that are not finite. */
typedef struct odd_tensor {
    const char *name;
    int64_t nan, inf;
} odd_tensor;

typedef struct found {
    tally all;
    odd_tensor *odd;
    size_t odd_count, odd_room;
    int64_t verified;
} found;

static bool is_complex(const mu_checkpoint_entry *e)
{
    return e->dtype == MU_C64 || e->dtype == MU_C128;
}

static bool is_floating(const mu_checkpoint_entry *e)
{
    return e->dtype == MU_F32 || e->dtype == MU_F64 || e->dtype == MU_F16 || e->dtype == MU_BF16 ||
           strncmp(e->dtype_name, "float8_e4", 9) == 0 || strncmp(e->dtype_name, "float8_e5", 9) == 0;
}

static bool add_odd(found *f, odd_tensor t)
{
    if (f->odd_count == f->odd_room) {
        size_t room = f->odd_room == 0 ? 16 : 2 * f->odd_room;
        odd_tensor *odd = realloc(f->odd, room * sizeof(*odd));
        if (odd == NULL) {
            cli_fail("verify", CLI_FAILED, "out of memory");
            return false;
        }
        f->odd = odd;
        f->odd_room = room;
    }
    f->odd[f->odd_count++] = t;
    return true;
}

/* Elements as float or double; exact enough to tell what is not finite. */
static void count_odd(const void *data, bool doubles, uint64_t n, odd_tensor *t)
{
    for (uint64_t i = 0; i < n; i++) {
        double x = doubles ? ((const double *)data)[i] : (double)((const float *)data)[i];
        t->nan += isnan(x) ? 1 : 0;
        t->inf += isinf(x) ? 1 : 0;
    }
}

static bool verify_entry(const look *l, mu_checkpoint_file *k, int64_t i, found *f)
{
    mu_checkpoint_entry e = mu_checkpoint_get(k, i);
    uint64_t elements = look_elements(&e), bytes = look_bytes(&e);
    f->all.tensors++;
    f->all.tied += e.tied_to != NULL;
    bool readable = false;
    if (!look_readable(l, k, i, &readable)) {
        return false;
    }
    if (!readable) {
        f->all.unreadable++;
        return true;
    }
    f->all.elements += (int64_t)elements;
    bool doubles = e.dtype == MU_F64 || e.dtype == MU_C128;
    size_t need = is_floating(&e) ? (size_t)elements * (doubles ? 8 : 4) : (size_t)bytes;
    void *data = look_room(l, &e, need);
    if (data == NULL) {
        return false;
    }
    odd_tensor t = {.name = e.name};
    mu_status s = is_floating(&e) ? mu_checkpoint_read_as(k, i, doubles ? MU_F64 : MU_F32, data, need)
                                  : mu_checkpoint_read(k, i, data, need);
    if (s == MU_OK && (is_floating(&e) || is_complex(&e))) {
        count_odd(data, doubles, is_complex(&e) ? 2 * elements : elements, &t);
    }
    free(data);
    f->all.nan += t.nan;
    f->all.inf += t.inf;
    return s == MU_OK && (t.nan + t.inf == 0 || add_odd(f, t));
}

static bool verify(const look *l, mu_checkpoint_file *k, found *f)
{
    bool good = mu_checkpoint_check_members(k, &f->verified) == MU_OK;
    for (int64_t i = 0; good && i < mu_checkpoint_count(k); i++) {
        good = verify_entry(l, k, i, f);
    }
    return good;
}

static void print_json(const look *l, const mu_checkpoint_file *k, const verify_options *o, const found *f, bool whole)
{
    mu_checkpoint_facts facts = mu_checkpoint_get_facts(k);
    json j = {0};
    json_open(&j, NULL, '{');
    json_text(&j, "file", o->file);
    json_text(&j, "format", k != NULL ? mu_checkpoint_format(k) : NULL);
    json_bool(&j, "ok", whole);
    json_text(&j, "error", whole ? NULL : mu_context_message(l->context));
    json_int(&j, "file_bytes", facts.file_bytes);
    json_int(&j, "members", facts.members);
    json_int(&j, "checksums", f->verified);
    json_int(&j, "storages", facts.storages);
    json_int(&j, "storage_bytes", facts.storage_bytes);
    json_int(&j, "unreferenced", facts.unreferenced);
    json_int(&j, "unreferenced_bytes", facts.unreferenced_bytes);
    json_int(&j, "trailing_bytes", facts.trailing_bytes);
    json_int(&j, "tensors", f->all.tensors);
    json_int(&j, "elements", f->all.elements);
    json_int(&j, "tied", f->all.tied);
    json_int(&j, "without_data", f->all.unreadable);
    json_open(&j, "not_finite", '[');
    for (size_t i = 0; i < f->odd_count; i++) {
        json_open(&j, NULL, '{');
        json_text(&j, "name", f->odd[i].name);
        json_int(&j, "nan", f->odd[i].nan);
        json_int(&j, "inf", f->odd[i].inf);
        json_close(&j);
    }
    json_close(&j);
    json_texts(&j, "warnings", l->warnings);
    json_close(&j);
}

static void print_text(const mu_checkpoint_file *k, const verify_options *o, const found *f)
{
    mu_checkpoint_facts facts = mu_checkpoint_get_facts(k);
    for (size_t i = 0; i < f->odd_count; i++) {
        fputs("  ", stdout);
        put_text(f->odd[i].name);
        printf("  %lld NaN, %lld infinite\n", (long long)f->odd[i].nan, (long long)f->odd[i].inf);
    }
    if (facts.unreferenced > 0) {
        printf("  %lld storages (", (long long)facts.unreferenced);
        put_size((uint64_t)facts.unreferenced_bytes);
        puts(") that nothing refers to");
    }
    if (facts.trailing_bytes > 0) {
        printf("  %lld bytes after the end\n", (long long)facts.trailing_bytes);
    }
    printf("%s: ", f->odd_count > 0 && o->finite ? "NOT FINITE" : "OK");
    put_text(o->file);
    printf(": %s, ", mu_checkpoint_format(k));
    put_size((uint64_t)facts.file_bytes);
    printf(", %lld tensor%s (%lld tied, %lld without data), %lld elements", (long long)f->all.tensors,
           f->all.tensors == 1 ? "" : "s", (long long)f->all.tied, (long long)f->all.unreadable, (long long)f->all.elements);
    if (facts.members > 0) {
        printf(", %lld members, %lld checksums", (long long)facts.members, (long long)f->verified);
    }
    printf(", %lld NaN, %lld infinite\n", (long long)f->all.nan, (long long)f->all.inf);
}

int cmd_verify(int argc, char **argv)
{
    verify_options o = {0};
    look l;
    int code = flags_parse("verify", about, verify_flags, &o, argc, argv);
    code = code < 0 ? look_begin(&l, "verify", &o.reading) : code;
    if (code >= 0) {
        return code;
    }
    found f = {0};
    mu_checkpoint_file *k = look_open(&l, o.file, &o.reading);
    bool whole = k != NULL && verify(&l, k, &f);
    if (o.json) {
        print_json(&l, k, &o, &f, whole);
    } else if (whole) {
        print_text(k, &o, &f);
    }
    free(f.odd);
    return look_end(&l, !whole || (o.finite && f.odd_count > 0) ? CLI_FAILED : CLI_OK);
}
