/* `muster diff A B`: how the tensors of two checkpoints differ. Reads them one by one. docs/checkpoint-json.md describes
 * --json. Pairing names is here, comparing elements in diff_values.c. */
#include "commands.h"
#include "diff_values.h"
#include "look.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct diff_options {
    const char *file[2], *key, *key_of[2];
    flag_list rename;
    double rtol, atol;
    bool json, all, dtypes;
    look_reading reading;
} diff_options;

#define AT(field) offsetof(diff_options, field)
static const flag diff_flags[] = {
    {"A", FLAG_FILE, AT(file[0]), NULL, NULL, 0, 0, FLAG_FREE},
    {"B", FLAG_FILE, AT(file[1]), NULL, NULL, 0, 0, FLAG_FREE},
    {"json", FLAG_SWITCH, AT(json), NULL, "write JSON, for programs (docs/checkpoint-json.md)", 0, 0, FLAG_FREE},
    {"all", FLAG_SWITCH, AT(all), NULL, "show equal tensors too", 0, 0, FLAG_FREE},
    {"atol", FLAG_FLOAT, AT(atol), "X", "elements are equal when |a-b| <= atol + rtol*|b| (0)", 0, 1e300, FLAG_FREE},
    {"rtol", FLAG_FLOAT, AT(rtol), "X", "see --atol (0)", 0, 1e300, FLAG_FREE},
    {"dtypes", FLAG_SWITCH, AT(dtypes), NULL, "another element type is a difference even where the values are equal", 0, 0,
     FLAG_FREE},
    {"key", FLAG_TEXT, AT(key), "PATH", "of the state dict in both files; \"\": the whole file", -1, 0, FLAG_FREE},
    {"key-a", FLAG_TEXT, AT(key_of[0]), "PATH", "in A", -1, 0, FLAG_FREE},
    {"key-b", FLAG_TEXT, AT(key_of[1]), "PATH", "in B", -1, 0, FLAG_FREE},
    {"rename", FLAG_LIST, AT(rename), "FROM=TO", "change A's names by extended regular expression; may be repeated", 0, 0,
     FLAG_FREE},
    LOOK_FLAGS(diff_options, reading),
};
static const char about[] =
    "Compares the tensors of two checkpoints by name, across formats and element types: the largest absolute difference,\n"
    "the largest relative one (|a-b|/|b|, as torch.testing has it; infinite where only b is 0), where it is, and how many\n"
    "elements differ. NaN equals NaN. A prefix such as \"module.\" on one side is seen through, and said.\n"
    "Exit codes: 0 the same (within the tolerance), 1 different, 2 something went wrong.";

typedef struct side {
    mu_checkpoint_file *file;
    mu_state_dict dict;
    const char **names; /* [dict.count], below the dict, renamed; NULL: not to be compared */
    struct named {
        const char *name;
        int64_t index;  /* of names */
    } *sorted;          /* [named], by name */
    int64_t named;
    bool *met;          /* [dict.count]: the other side has it */
    size_t prefix;      /* bytes of every name that are left out */
} side;

static const char *name_of(const side *s, int64_t i)
{
    return s->names[i] + (s->prefix < strlen(s->names[i]) ? s->prefix : 0);
}

static int by_name(const void *a, const void *b)
{
    const struct named *x = a, *y = b;
    int order = strcmp(x->name, y->name);
    return order != 0 ? order : x->index < y->index ? -1 : x->index > y->index;
}

/* The index of the entry that is called name when the prefix is left out, which all names share, so that their order
 * stays; -1: there is none. */
static int64_t find(const side *s, const char *name)
{
    int64_t low = 0, high = s->named;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        int order = strcmp(s->sorted[middle].name + s->prefix, name);
        if (order == 0) {
            return s->sorted[middle].index;
        }
        low = order < 0 ? middle + 1 : low;
        high = order < 0 ? high : middle;
    }
    return -1;
}

static bool open_side(look *l, const diff_options *o, int which, side *s)
{
    const char *rules[FLAG_LIST_MAX + 1] = {NULL};
    for (int i = 0; which == 0 && i < o->rename.count; i++) {
        rules[i] = o->rename.item[i];
    }
    const char *key = o->key_of[which] != NULL ? o->key_of[which] : o->key;
    s->file = look_open(l, o->file[which], &o->reading);
    if (s->file == NULL || mu_checkpoint_find_state_dict(s->file, key, &s->dict) != MU_OK) {
        return false;
    }
    size_t n = (size_t)s->dict.count;
    s->names = calloc(n > 0 ? n : 1, sizeof(*s->names));
    s->sorted = calloc(n > 0 ? n : 1, sizeof(*s->sorted));
    s->met = calloc(n > 0 ? n : 1, sizeof(*s->met));
    if (s->names == NULL || s->sorted == NULL || s->met == NULL) {
        cli_fail(l->command, CLI_FAILED, "out of memory");
        return false;
    }
    if (mu_checkpoint_names_in(s->file, &s->dict, rules, s->names) != MU_OK) {
        return false;
    }
    for (int64_t i = 0; i < s->dict.count; i++) {
        if (mu_checkpoint_get(s->file, s->dict.first + i).is_storage) {
            s->names[i] = NULL;
        }
        if (s->names[i] != NULL) {
            s->sorted[s->named++] = (struct named){s->names[i], i};
        }
    }
    qsort(s->sorted, (size_t)s->named, sizeof(*s->sorted), by_name);
    return true;
}

static int64_t matches(const side *a, const side *b)
{
    int64_t n = 0;
    for (int64_t i = 0; i < a->dict.count; i++) {
        n += a->names[i] != NULL && strlen(a->names[i]) > a->prefix && find(b, a->names[i] + a->prefix) >= 0;
    }
    return n;
}

/* Leaves out, on one side, the longest chain of "module.", "model." and so on that all its names share, or a part of the
 * chain, where that makes more names match. */
static void find_prefix(side *a, side *b)
{
    int64_t most = matches(a, b);
    side *best = a;
    size_t best_prefix = 0;
    for (int which = 0; which < 2; which++) {
        side *x = which == 0 ? a : b, *y = which == 0 ? b : a;
        if (x->named == 0) {
            continue;
        }
        const char *first = x->sorted[0].name, *last = x->sorted[x->named - 1].name;
        size_t n = look_prefix(first), shared = 0;
        while (shared < n && first[shared] == last[shared]) {
            shared++;
        }
        for (size_t cut = 1; cut <= shared; cut++) {
            if (first[cut - 1] != '.') {
                continue;
            }
            x->prefix = cut;
            int64_t m = matches(x, y);
            if (m > most) {
                most = m;
                best = x;
                best_prefix = cut;
            }
        }
        x->prefix = 0;
    }
    best->prefix = best_prefix;
}

typedef struct tally {
    int64_t equal, differ, shapes, dtypes, only[2], incomparable;
    double max_abs, max_rel;
    const char *worst;
} tally;

/* -- printing ----------------------------------------------------------------------------------------------------- */

static void json_pair(json *j, const char *name, const mu_checkpoint_entry *a, const mu_checkpoint_entry *b,
                      const values_diff *d)
{
    json_open(j, NULL, '{');
    json_text(j, "name", name);
    json_text(j, "status", values_status_name(d->status));
    json_text(j, "dtype_a", a->dtype_name);
    json_text(j, "dtype_b", b->dtype_name);
    json_ints(j, "shape_a", a->dims.dim, a->dims.ndim);
    json_ints(j, "shape_b", b->dims.dim, b->dims.ndim);
    if (d->status == VALUES_EQUAL || d->status == VALUES_DIFFER) {
        json_int(j, "elements", d->elements);
        json_int(j, "differ", d->differ);
        json_int(j, "nan_on_one_side", d->nan_on_one_side);
        if (d->no_numbers) {
            json_null(j, "max_abs");
            json_null(j, "max_rel");
        } else {
            json_number(j, "max_abs", d->max_abs);
            json_number(j, "max_rel", d->max_rel);
        }
        int64_t at[MU_MAX_DIMS];
        json_ints(j, "at", at, d->worst >= 0 ? values_index(b->dims, d->worst, at) : 0);
    } else {
        json_text(j, "why", d->why);
    }
    json_close(j);
}

static void print_pair(const char *name, const mu_checkpoint_entry *a, const mu_checkpoint_entry *b, const values_diff *d)
{
    fputs("  ", stdout);
    put_text(name);
    printf("  %s ", a->dtype_name);
    put_shape(a->dims.ndim, a->dims.dim, "()");
    if (strcmp(a->dtype_name, b->dtype_name) != 0 || d->status == VALUES_SHAPE) {
        printf(" and %s ", b->dtype_name);
        put_shape(b->dims.ndim, b->dims.dim, "()");
    }
    if (d->status == VALUES_EQUAL && d->max_abs == 0) {
        fputs("  equal", stdout);
    } else if (d->status == VALUES_SHAPE) {
        fputs("  shapes differ", stdout);
    } else if (d->status == VALUES_INCOMPARABLE) {
        fputs("  cannot be compared: ", stdout);
        put_text(d->why);
    } else if (d->no_numbers) {
        printf("  %" PRId64 " of %" PRId64 " differ", d->differ, d->elements);
    } else {
        int64_t at[MU_MAX_DIMS];
        printf("  max abs %.6g", d->max_abs);
        if (d->worst >= 0) {
            fputs(" at ", stdout);
            put_shape(values_index(b->dims, d->worst, at), at, "[]");
        }
        printf(", max rel %.6g, %" PRId64 " of %" PRId64 " differ", d->max_rel, d->differ, d->elements);
        if (d->nan_on_one_side > 0) {
            printf(", %" PRId64 " NaN on one side", d->nan_on_one_side);
        }
    }
    putchar('\n');
}

/* -- comparing ---------------------------------------------------------------------------------------------------- */

static bool compare_pair(look *l, const diff_options *o, json *j, const side *a, const side *b, int64_t i, int64_t at,
                         tally *t)
{
    const char *name = name_of(a, i);
    mu_checkpoint_entry x = mu_checkpoint_get(a->file, a->dict.first + i);
    mu_checkpoint_entry y = mu_checkpoint_get(b->file, b->dict.first + at);
    values_diff d;
    if (!values_compare(l, a->file, a->dict.first + i, b->file, b->dict.first + at, o->rtol, o->atol, &d)) {
        return false;
    }
    t->dtypes += strcmp(x.dtype_name, y.dtype_name) != 0;
    t->equal += d.status == VALUES_EQUAL;
    t->differ += d.status == VALUES_DIFFER;
    t->shapes += d.status == VALUES_SHAPE;
    t->incomparable += d.status == VALUES_INCOMPARABLE;
    if (d.status <= VALUES_DIFFER && d.max_abs > t->max_abs) {
        t->max_abs = d.max_abs;
        t->worst = name;
    }
    t->max_rel = d.status <= VALUES_DIFFER && d.max_rel > t->max_rel ? d.max_rel : t->max_rel;
    if (o->json) {
        json_pair(j, name, &x, &y, &d);
    } else if (o->all || d.status != VALUES_EQUAL || (o->dtypes && strcmp(x.dtype_name, y.dtype_name) != 0)) {
        print_pair(name, &x, &y, &d);
    }
    return true;
}

static bool compare_all(look *l, const diff_options *o, json *j, side *a, side *b, tally *t)
{
    for (int64_t i = 0; i < a->dict.count; i++) {
        int64_t at = a->names[i] == NULL ? -1 : find(b, name_of(a, i));
        if (at >= 0) {
            a->met[i] = b->met[at] = true;
            if (!compare_pair(l, o, j, a, b, i, at, t)) {
                return false;
            }
        }
    }
    return true;
}

static void list_missing(json *j, const diff_options *o, const char *key, const side *sides, int which, tally *t)
{
    const side *s = &sides[which];
    if (o->json) {
        json_open(j, key, '[');
    }
    for (int64_t i = 0; i < s->dict.count; i++) {
        if (s->names[i] == NULL || s->met[i]) {
            continue;
        }
        t->only[which]++;
        if (o->json) {
            json_text(j, NULL, s->names[i]);
        } else {
            printf("  only in %s: ", which == 0 ? "A" : "B");
            put_text(s->names[i]);
            putchar('\n');
        }
    }
    if (o->json) {
        json_close(j);
    }
}

static void json_side(json *j, const char *key, const diff_options *o, const side *s, int which)
{
    char *prefix = strndup(s->prefix > 0 ? s->sorted[0].name : "", s->prefix);
    json_open(j, key, '{');
    json_text(j, "file", o->file[which]);
    json_text(j, "format", mu_checkpoint_format(s->file));
    json_text(j, "key", s->dict.path);
    json_text(j, "prefix_removed", prefix);
    json_int(j, "tensors", s->named);
    json_close(j);
    free(prefix);
}

static void print_sides(const diff_options *o, const side *sides)
{
    for (int i = 0; i < 2; i++) {
        printf("%s: ", i == 0 ? "A" : "B");
        put_text(o->file[i]);
        if (sides[i].dict.path[0] != '\0') {
            fputs(", \"", stdout);
            put_text(sides[i].dict.path);
            putchar('"');
        }
        if (sides[i].prefix > 0) {
            printf(", names without \"%.*s\"", (int)sides[i].prefix, sides[i].sorted[0].name);
        }
        putchar('\n');
    }
}

static void print_summary(const tally *t)
{
    printf("%" PRId64 " tensors compared: %" PRId64 " equal, %" PRId64 " differ", t->equal + t->differ, t->equal, t->differ);
    if (t->worst != NULL) {
        printf(" (max abs %.6g in ", t->max_abs);
        put_text(t->worst);
        printf(", max rel %.6g)", t->max_rel);
    }
    printf("; %" PRId64 " of other shapes, %" PRId64 " of other types, %" PRId64 " cannot be compared, %" PRId64
           " only in A, %" PRId64 " only in B\n",
           t->shapes, t->dtypes, t->incomparable, t->only[0], t->only[1]);
}

static bool run(look *l, const diff_options *o, side sides[2], bool *same)
{
    side *a = &sides[0], *b = &sides[1];
    if (!open_side(l, o, 0, a) || !open_side(l, o, 1, b)) {
        return false;
    }
    find_prefix(a, b);
    tally t = {0};
    json j = {0};
    if (o->json) {
        json_open(&j, NULL, '{');
        json_side(&j, "a", o, a, 0);
        json_side(&j, "b", o, b, 1);
        json_open(&j, "tensors", '[');
    } else {
        print_sides(o, sides);
    }
    bool good = compare_all(l, o, &j, a, b, &t);
    if (good) {
        if (o->json) {
            json_close(&j);
        }
        list_missing(&j, o, "only_in_a", sides, 0, &t);
        list_missing(&j, o, "only_in_b", sides, 1, &t);
        *same = t.differ + t.shapes + t.incomparable + t.only[0] + t.only[1] + (o->dtypes ? t.dtypes : 0) == 0;
        if (o->json) {
            json_bool(&j, "same", *same);
            json_int(&j, "equal", t.equal);
            json_int(&j, "differ", t.differ);
            json_int(&j, "other_shapes", t.shapes);
            json_int(&j, "other_dtypes", t.dtypes);
            json_int(&j, "incomparable", t.incomparable);
            json_number(&j, "max_abs", t.max_abs);
            json_number(&j, "max_rel", t.max_rel);
            json_texts(&j, "warnings", l->warnings);
            json_close(&j);
        } else {
            print_summary(&t);
        }
    }
    return good;
}

int cmd_diff(int argc, char **argv)
{
    static diff_options o;
    look l;
    int code = flags_parse("diff", about, diff_flags, &o, argc, argv);
    code = code < 0 ? look_begin(&l, "diff", &o.reading) : code;
    if (code >= 0) {
        return code;
    }
    side sides[2] = {{0}, {0}};
    bool same = false;
    bool good = run(&l, &o, sides, &same);
    for (int i = 0; i < 2; i++) {
        free(sides[i].names);
        free(sides[i].sorted);
        free(sides[i].met);
    }
    code = look_end(&l, !good ? CLI_USAGE : same ? CLI_OK : CLI_FAILED);
    return !good ? CLI_USAGE : code; /* as diff(1): 1 means that both were read, and differ */
}
