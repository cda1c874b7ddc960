/* `muster names FILE`: which parameters the indices in PyTorch's message mean ("Parameter indices which did not receive
 * grad for rank 0: 160 161"): DDP counts module.parameters() that require gradients, in registration order, each once. A
 * state dict has that order, with buffers between. docs/checkpoint-json.md describes --json. */
#include "commands.h"
#include "look.h"

#include <ctype.h>
#include <inttypes.h>
#include <regex.h>
#include <stdlib.h>
#include <string.h>

typedef struct names_options {
    const char *file, *key, *frozen, *buffers;
    flag_list indices;
    bool json;
    look_reading reading;
} names_options;

#define AT(field) offsetof(names_options, field)
static const flag names_flags[] = {
    {"FILE", FLAG_FILE, AT(file), NULL, NULL, 0, 0, FLAG_FREE},
    {"indices", FLAG_LIST, AT(indices), "LIST", "only these, e.g. 160,161; or the whole message, quoted; may be repeated", 0,
     0, FLAG_FREE},
    {"frozen", FLAG_TEXT, AT(frozen), "REGEX", "parameters with requires_grad=False, which DDP does not count", 0, 0,
     FLAG_FREE},
    {"buffers", FLAG_TEXT, AT(buffers), "REGEX", "tensors that are buffers, where the file does not tell", 0, 0, FLAG_FREE},
    {"key", FLAG_TEXT, AT(key), "PATH", "of the state dict in the file; \"\": the whole file", -1, 0, FLAG_FREE},
    {"json", FLAG_SWITCH, AT(json), NULL, "write JSON, for programs (docs/checkpoint-json.md)", 0, 0, FLAG_FREE},
    LOOK_FLAGS(names_options, reading),
};
static const char about[] =
    "Tells which parameters the numbers in PyTorch's \"Parameter indices which did not receive grad\" mean: those of the\n"
    "state dict in its order, without buffers and frozen ones, tied ones once. Regular expressions are POSIX extended.\n"
    "Exit codes: 0 done, 1 the file is damaged or has no such index, 2 bad flags, no such file, or one without the order\n"
    "of registration (safetensors).";

typedef enum verdict { PARAMETER = 0, DOUBTFUL, SKIP_BUFFER, SKIP_WHOLE, SKIP_SAID, SKIP_FROZEN, SKIP_TIED, SKIP_OTHER } verdict;
static const char *const whys[] = {NULL, NULL, "buffer", "not of floating-point type", "--buffers", "frozen", "tied",
                                   "not a tensor"};

typedef struct work {
    mu_checkpoint_file *file;
    mu_state_dict dict;
    verdict *verdicts;     /* [dict.count] */
    int64_t *parameters;   /* entries that are counted, in order */
    int64_t count, doubtful;
    regex_t frozen, buffers;
    bool has_frozen, has_buffers;
} work;

/* -- indices ------------------------------------------------------------------------------------------------------ */

typedef struct indices {
    int64_t *item;
    int64_t count, room;
} indices;

static bool add_index(indices *x, int64_t n)
{
    if (x->count == x->room) {
        int64_t room = x->room == 0 ? 16 : 2 * x->room;
        int64_t *item = realloc(x->item, (size_t)room * sizeof(*item));
        if (item == NULL) {
            return false;
        }
        x->item = item;
        x->room = room;
    }
    x->item[x->count++] = n;
    return true;
}

/* Numbers with commas, spaces or brackets between; of PyTorch's message, what follows "for rank N:". Returns NULL, or
 * where it went wrong. */
static const char *read_indices(const char *text, indices *out)
{
    const char *message = strstr(text, "did not receive grad"), *p = text;
    if (message != NULL) {
        p = strchr(message, ':');
        if (p == NULL) {
            return message;
        }
        p++;
    }
    int64_t before = out->count;
    for (;;) {
        p += strspn(p, " \t\r\n,;[](){}");
        if (!isdigit((unsigned char)*p)) {
            break;
        }
        int64_t n = 0;
        for (; isdigit((unsigned char)*p); p++) {
            if (__builtin_mul_overflow(n, (int64_t)10, &n) || __builtin_add_overflow(n, (int64_t)(*p - '0'), &n)) {
                return p;
            }
        }
        if (!add_index(out, n)) {
            return p;
        }
    }
    /* The message goes on with other words. */
    return out->count == before || (*p != '\0' && message == NULL) ? p : NULL;
}

/* -- what is a parameter ------------------------------------------------------------------------------------------ */

static const char *last_part(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot != NULL ? dot + 1 : name;
}

static bool is_floating(const mu_checkpoint_entry *e)
{
    return strncmp(e->dtype_name, "float", 5) == 0 || strcmp(e->dtype_name, "bfloat16") == 0 ||
           strncmp(e->dtype_name, "complex", 7) == 0 || strcmp(e->dtype_name, "unknown") == 0;
}

static verdict judge(const work *w, const mu_checkpoint_entry *e, const char *name)
{
    static const char *const buffers[] = {"running_mean", "running_var", "num_batches_tracked"};
    const char *last = last_part(name);
    if (e->is_storage || e->is_array || strcmp(last, "_extra_state") == 0) {
        return SKIP_OTHER;
    }
    if (e->is_buffer) {
        return SKIP_BUFFER;
    }
    if (w->has_buffers && regexec(&w->buffers, name, 0, NULL, 0) == 0) {
        return SKIP_SAID;
    }
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]) && !e->is_parameter; i++) {
        if (strcmp(last, buffers[i]) == 0) {
            return SKIP_BUFFER;
        }
    }
    if (!is_floating(e)) {
        return SKIP_WHOLE;
    }
    if ((e->is_parameter && !e->requires_grad) || (w->has_frozen && regexec(&w->frozen, name, 0, NULL, 0) == 0)) {
        return SKIP_FROZEN;
    }
    return e->is_parameter || e->requires_grad || strstr(last, "weight") != NULL || strstr(last, "bias") != NULL ? PARAMETER
                                                                                                               : DOUBTFUL;
}

/* Entries over one storage and view, by the name of the first of them in the file: its pointer is theirs all. */
typedef struct group {
    const char *first;
    int64_t index;
} group;

static int by_group(const void *a, const void *b)
{
    const group *x = a, *y = b;
    return x->first != y->first ? (x->first < y->first ? -1 : 1) : x->index < y->index ? -1 : x->index > y->index;
}

static bool drop_tied(work *w)
{
    group *g = calloc(w->dict.count > 0 ? (size_t)w->dict.count : 1, sizeof(*g));
    size_t n = 0;
    if (g == NULL) {
        return false;
    }
    for (int64_t i = 0; i < w->dict.count; i++) {
        mu_checkpoint_entry e = mu_checkpoint_get(w->file, w->dict.first + i);
        if (w->verdicts[i] <= DOUBTFUL || w->verdicts[i] == SKIP_FROZEN) {
            g[n++] = (group){e.tied_to != NULL ? e.tied_to : e.name, i};
        }
    }
    qsort(g, n, sizeof(*g), by_group);
    for (size_t i = 1; i < n; i++) {
        if (g[i].first == g[i - 1].first) {
            w->verdicts[g[i].index] = SKIP_TIED;
        }
    }
    free(g);
    return true;
}

static bool count(look *l, work *w)
{
    size_t room = w->dict.count > 0 ? (size_t)w->dict.count : 1;
    w->verdicts = calloc(room, sizeof(*w->verdicts));
    w->parameters = calloc(room, sizeof(*w->parameters));
    bool good = w->verdicts != NULL && w->parameters != NULL;
    for (int64_t i = 0; good && i < w->dict.count; i++) {
        mu_checkpoint_entry e = mu_checkpoint_get(w->file, w->dict.first + i);
        const char *name = mu_checkpoint_name_in(w->file, &w->dict, w->dict.first + i);
        w->verdicts[i] = name != NULL ? judge(w, &e, name) : SKIP_OTHER;
    }
    if (!good || !drop_tied(w)) {
        cli_fail(l->command, CLI_FAILED, "out of memory");
        return false;
    }
    for (int64_t i = 0; i < w->dict.count; i++) {
        if (w->verdicts[i] <= DOUBTFUL) {
            w->parameters[w->count++] = w->dict.first + i;
            w->doubtful += w->verdicts[i] == DOUBTFUL;
        }
    }
    return true;
}

/* -- doubts ------------------------------------------------------------------------------------------------------- */

#define MAX_DOUBTS 4
typedef struct doubts {
    char text[MAX_DOUBTS][400];
    const char *list[MAX_DOUBTS + 1];
    int count;
} doubts;

static void doubt(doubts *d, const char *text)
{
    snprintf(d->text[d->count], sizeof(d->text[0]), "%s", text);
    d->list[d->count] = d->text[d->count];
    d->count++;
}

/* In how many parameters an optimiser beside the state dict sees the matter otherwise; -1: none, or it agrees. */
static int64_t disagreeing(const work *w, int64_t *optimizers)
{
    int64_t have[16] = {0};
    *optimizers = mu_checkpoint_optimizers(w->file, have, 16);
    for (int64_t i = 0; i < *optimizers && i < 16; i++) {
        if (have[i] == w->count) {
            return -1;
        }
    }
    return *optimizers > 0 ? have[0] : -1;
}

static void find_doubts(const work *w, doubts *d)
{
    char text[400];
    int64_t optimizers = 0, other = disagreeing(w, &optimizers);
    if (other >= 0) {
        snprintf(text, sizeof(text),
                 "the file's optimiser has %" PRId64 " parameters, %" PRId64 " are counted here: indices may be shifted "
                 "(buffers taken for parameters? frozen ones?)", other, w->count);
        doubt(d, text);
    }
    if (w->doubtful > 0) {
        snprintf(text, sizeof(text),
                 "%" PRId64 " tensors marked ? may be buffers, which a state dict does not tell: give those as --buffers REGEX",
                 w->doubtful);
        doubt(d, text);
    }
    if (strcmp(mu_checkpoint_format(w->file), "torchscript") == 0) {
        doubt(d, "a TorchScript archive does not tell parameters from buffers, and has attributes in the order of its type");
    }
}

/* -- printing ----------------------------------------------------------------------------------------------------- */

static void json_parameter(json *j, const work *w, int64_t index)
{
    int64_t i = w->parameters[index];
    mu_checkpoint_entry e = mu_checkpoint_get(w->file, i);
    json_open(j, NULL, '{');
    json_int(j, "index", index);
    json_text(j, "name", mu_checkpoint_name_in(w->file, &w->dict, i));
    json_text(j, "dtype", e.dtype_name);
    json_ints(j, "shape", e.dims.dim, e.dims.ndim);
    json_bool(j, "doubtful", w->verdicts[i - w->dict.first] == DOUBTFUL);
    json_close(j);
}

static void print_json(const look *l, const work *w, const names_options *o, const indices *x, const doubts *d)
{
    json j = {0};
    int64_t optimizers = 0, other = disagreeing(w, &optimizers);
    json_open(&j, NULL, '{');
    json_text(&j, "file", o->file);
    json_text(&j, "format", mu_checkpoint_format(w->file));
    json_text(&j, "key", w->dict.path);
    json_int(&j, "count", w->count);
    if (optimizers > 0) {
        json_int(&j, "optimizer_count", other >= 0 ? other : w->count);
    } else {
        json_null(&j, "optimizer_count");
    }
    json_open(&j, "parameters", '[');
    for (int64_t i = 0; i < (o->indices.count > 0 ? x->count : w->count); i++) {
        json_parameter(&j, w, o->indices.count > 0 ? x->item[i] : i);
    }
    json_close(&j);
    json_open(&j, "not_counted", '[');
    for (int64_t i = 0; i < w->dict.count; i++) {
        if (w->verdicts[i] > DOUBTFUL) {
            json_open(&j, NULL, '{');
            json_text(&j, "name", mu_checkpoint_name_in(w->file, &w->dict, w->dict.first + i));
            json_text(&j, "why", whys[w->verdicts[i]]);
            json_close(&j);
        }
    }
    json_close(&j);
    json_texts(&j, "doubts", d->list);
    json_texts(&j, "warnings", l->warnings);
    json_close(&j);
}

static void print_text(const look *l, const work *w, const names_options *o, const indices *x, const doubts *d)
{
    for (int64_t i = 0; i < (o->indices.count > 0 ? x->count : w->count); i++) {
        int64_t index = o->indices.count > 0 ? x->item[i] : i, entry = w->parameters[index];
        mu_checkpoint_entry e = mu_checkpoint_get(w->file, entry);
        printf("%6" PRId64 "  ", index);
        put_text(mu_checkpoint_name_in(w->file, &w->dict, entry));
        printf("  %s ", e.dtype_name);
        put_shape(e.dims.ndim, e.dims.dim, "()");
        puts(w->verdicts[entry - w->dict.first] == DOUBTFUL ? "  ?" : "");
    }
    int64_t of[SKIP_OTHER + 1] = {0};
    for (int64_t i = 0; i < w->dict.count; i++) {
        of[w->verdicts[i]]++;
    }
    printf("%" PRId64 " parameters are counted; not: %" PRId64 " buffers, %" PRId64 " frozen, %" PRId64 " tied, %" PRId64
           " others\n",
           w->count, of[SKIP_BUFFER] + of[SKIP_WHOLE] + of[SKIP_SAID], of[SKIP_FROZEN], of[SKIP_TIED], of[SKIP_OTHER]);
    fflush(stdout);
    for (int i = 0; i < d->count; i++) {
        fprintf(stderr, "muster %s: warning: %s\n", l->command, d->list[i]);
    }
}

/* -- the command -------------------------------------------------------------------------------------------------- */

static int compile(const char *flag_name, const char *text, regex_t *out, bool *has)
{
    char problem[200];
    int wrong = text != NULL ? regcomp(out, text, REG_EXTENDED | REG_NOSUB) : 0;
    *has = text != NULL && wrong == 0;
    if (wrong != 0) {
        regerror(wrong, out, problem, sizeof(problem));
        return cli_usage_error("names", "--%s '%s': %s", flag_name, text, problem);
    }
    return -1;
}

static int run(look *l, const names_options *o, work *w, const indices *x)
{
    doubts d = {.count = 0};
    w->file = look_open(l, o->file, &o->reading);
    if (w->file == NULL) {
        return CLI_FAILED;
    }
    if (strstr(mu_checkpoint_format(w->file), "safetensors") != NULL) { /* sharded ones too */
        return cli_fail(l->command, CLI_USAGE,
                        "%s: a safetensors file has its tensors sorted, not in the order of registration, which the indices "
                        "count: use a file of torch.save(model.state_dict()), or list [n for n, p in "
                        "model.named_parameters() if p.requires_grad] in Python",
                        o->file);
    }
    if (mu_checkpoint_find_state_dict(w->file, o->key, &w->dict) != MU_OK || !count(l, w)) {
        return CLI_FAILED;
    }
    for (int64_t i = 0; i < x->count; i++) {
        if (x->item[i] >= w->count) {
            return cli_fail(l->command, CLI_FAILED, "%s: there is no parameter %" PRId64 ": %" PRId64 " are counted, from 0",
                            o->file, x->item[i], w->count);
        }
    }
    find_doubts(w, &d);
    if (o->json) {
        print_json(l, w, o, x, &d);
    } else {
        print_text(l, w, o, x, &d);
    }
    return CLI_OK;
}

int cmd_names(int argc, char **argv)
{
    static names_options o;
    static work w;
    look l;
    indices x = {0};
    int code = flags_parse("names", about, names_flags, &o, argc, argv);
    for (int i = 0; code < 0 && i < o.indices.count; i++) {
        const char *wrong = read_indices(o.indices.item[i], &x);
        if (wrong != NULL) {
            code = cli_usage_error("names", "--indices: numbers were expected, not '%.60s'", wrong);
        }
    }
    code = code < 0 ? compile("frozen", o.frozen, &w.frozen, &w.has_frozen) : code;
    code = code < 0 ? compile("buffers", o.buffers, &w.buffers, &w.has_buffers) : code;
    code = code < 0 ? look_begin(&l, "names", &o.reading) : code;
    if (code < 0) {
        code = look_end(&l, run(&l, &o, &w, &x));
    }
    if (w.has_frozen) {
        regfree(&w.frozen);
    }
    if (w.has_buffers) {
        regfree(&w.buffers);
    }
    free(w.verdicts);
    free(w.parameters);
    free(x.item);
    return code;
}
