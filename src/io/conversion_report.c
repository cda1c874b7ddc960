/* What a conversion says it did; above all, what of the file is not in the new one. */
#include "base/alloc.h"
#include "io/conversion.h"

#include <stdlib.h>
#include <string.h>

enum { LOSSES_SHOWN = 100, CHANGES_SHOWN = 8 }; /* names of each kind; the counts are always whole */

/* One kind of line, e.g. "left out: a, b, c". */
typedef struct line {
    mui_text *text;
    const char *what;
    int64_t shown, count;
} line;

static bool next(line *l)
{
    l->count++;
    if (l->count <= l->shown) {
        mui_text_add(l->text, "%s", l->count == 1 ? l->what : ", ");
    }
    return l->count <= l->shown;
}

static void end_line(line *l)
{
    if (l->count > l->shown) {
        mui_text_add(l->text, ", and %lld more", (long long)(l->count - l->shown));
    }
    if (l->count > 0) {
        mui_text_add(l->text, "\n");
    }
}

static const char *kind_of(const mui_value *v)
{
    const mui_seq *items = NULL;
    return mui_dict_items(v, &items) ? "dict" : mui_kind_name(v->kind);
}

static void put_key(mui_text *t, const char *above, const mui_value *key)
{
    const char *dot = above[0] != '\0' ? "." : "";
    if (key->kind == MUI_STR || key->kind == MUI_BYTES) {
        int n = key->text.bytes < 200 ? (int)key->text.bytes : 200;
        mui_text_add(t, "%s%s%.*s", above, dot, n, key->text.data);
    } else if (key->kind == MUI_INT) {
        mui_text_add(t, "%s%s%lld", above, dot, (long long)key->i);
    } else {
        mui_text_add(t, "%s%s<%s>", above, dot, mui_kind_name(key->kind));
    }
}

/* Whether the item of a dict above the state dict leads to it, by the name of the state dict's first tensor. */
static bool leads_to(const mui_conversion *v, const mui_branch *above, const mui_value *key)
{
    mui_text t;
    mui_text_init(&t, v->file->context);
    put_key(&t, above->path, key);
    const char *name = v->file->tree.entries[v->dict.first].name;
    bool yes = strncmp(name, mui_text_get(&t), t.length) == 0 &&
               (name[t.length] == '\0' || strchr(".[<", name[t.length]) != NULL);
    mui_text_free(&t);
    return yes;
}

/* Items of a dict above the state dict that do not lead to it; of one in it, or of itself, those without tensors. */
static void add_items(mui_conversion *v, line *l, const mui_branch *b, bool above)
{
    const mui_seq *items = NULL;
    if (b->value == NULL || b->kind == MUI_BRANCH_MODULE || !mui_dict_items(b->value, &items)) {
        return;
    }
    for (size_t i = 0; i + 1 < items->count; i += 2) {
        const mui_value *key = items->items[i], *value = items->items[i + 1];
        bool kept = above ? leads_to(v, b, key) : mui_holds_tensors(value);
        if (!kept && next(l)) {
            put_key(l->text, b->path, key);
            mui_text_add(l->text, " (%s)", kind_of(value));
        }
    }
}

static void add_list(line *l, const mui_value *root)
{
    for (size_t i = 0; mui_is_sequence(root) && i < root->seq.count; i++) {
        if (!mui_holds_tensors(root->seq.items[i]) && next(l)) {
            mui_text_add(l->text, "[%zu] (%s)", i, kind_of(root->seq.items[i]));
        }
    }
}

static void tell_left_out(mui_conversion *v)
{
    const mui_tree *t = &v->file->tree;
    size_t first = (size_t)v->dict.first, end = first + (size_t)v->dict.count;
    line l = {&v->text, "left out: ", LOSSES_SHOWN, 0};
    add_list(&l, v->file->pickle.value);
    for (size_t i = 0; i < t->branch_count && t->branches[i].first < end; i++) {
        const mui_branch *b = &t->branches[i];
        bool around = b->first <= first && b->end >= end, within = b->first >= first && b->end <= end;
        if (around || within) { /* a parent stands before its children, so the branch itself parts the two */
            add_items(v, &l, b, v->branch != NULL ? b < v->branch : !within);
        }
    }
    for (size_t i = first; i < end; i++) {
        if (t->entries[i].tensor->bare_storage && next(&l)) {
            mui_text_add(l.text, "%s (bare storage)", t->entries[i].name);
        }
    }
    if (v->file->format == MUI_FILE_TORCHSCRIPT && next(&l)) {
        mui_text_add(l.text, "the program (TorchScript)");
    }
    if (v->branch != NULL && v->branch->kind == MUI_BRANCH_MODULE && next(&l)) {
        mui_text_add(l.text, "the modules' classes and attributes");
    }
    end_line(&l);
    v->report.left_out = l.count;
    if (t->count > (size_t)v->dict.count) {
        size_t n = t->count - (size_t)v->dict.count;
        mui_text_add(&v->text, "left out: %zu tensor%s outside the state dict\n", n, n == 1 ? "" : "s");
    }
}

/* Tensors of one storage that are not one and the same view. */
typedef struct share {
    const mui_blob *blob;
    size_t index;
} share;

static int by_blob(const void *a, const void *b)
{
    const share *x = a, *y = b;
    if (x->blob != y->blob) {
        return (uintptr_t)x->blob < (uintptr_t)y->blob ? -1 : 1;
    }
    return x->index < y->index ? -1 : x->index > y->index;
}

static mu_status tell_separated(mui_conversion *v)
{
    size_t n = 0;
    line l = {&v->text, "shared a storage, and have elements of their own now: ", LOSSES_SHOWN, 0};
    share *shares = mui_calloc(v->file->context, v->list.count, sizeof(*shares));
    if (shares == NULL) {
        return MU_ERR_NOMEM;
    }
    for (size_t i = 0; i < v->list.count; i++) {
        const mui_file_tensor *t = v->file->tree.entries[v->entries[i]].tensor;
        if (v->list.tensors[i].same_as == i && mui_out_elements(&v->list.tensors[i]) > 0) {
            shares[n++] = (share){t->storage->blob, i};
        }
    }
    if (n > 0) {
        qsort(shares, n, sizeof(*shares), by_blob);
    }
    for (size_t i = 0; i < n; i++) {
        bool shared = (i > 0 && shares[i - 1].blob == shares[i].blob) || (i + 1 < n && shares[i + 1].blob == shares[i].blob);
        if (shared && next(&l)) {
            mui_text_add(l.text, "%s", v->list.tensors[shares[i].index].name);
        }
    }
    end_line(&l);
    v->report.separated = l.count;
    mui_free(v->file->context, shares);
    return MU_OK;
}

static void tell_tensors(mui_conversion *v)
{
    line tied = {&v->text, "tied: ", LOSSES_SHOWN, 0}, renamed = {&v->text, "renamed: ", CHANGES_SHOWN, 0};
    for (size_t i = 0; i < v->list.count; i++) {
        const mui_out_tensor *t = &v->list.tensors[i];
        if (t->same_as != i && next(&tied)) {
            mui_text_add(tied.text, "%s to %s", t->name, v->list.tensors[t->same_as].name);
        }
    }
    end_line(&tied);
    if (v->report.converted > 0) {
        mui_text_add(&v->text, "converted to %s: %lld tensor%s\n", mu_dtype_name(v->options->dtype),
                     (long long)v->report.converted, v->report.converted == 1 ? "" : "s");
    }
    for (size_t i = 0; i < v->list.count; i++) {
        const mui_out_tensor *t = &v->list.tensors[i];
        if (strcmp(t->name, v->old_names[i]) != 0 && next(&renamed)) {
            mui_text_add(renamed.text, "%s to %s", v->old_names[i], t->name);
        }
    }
    end_line(&renamed);
}

mu_status mui_convert_tell(mui_conversion *v)
{
    tell_left_out(v);
    mu_status s = tell_separated(v);
    tell_tensors(v);
    return s == MU_OK && v->text.failed ? mu_context_status(v->file->context) : s;
}
