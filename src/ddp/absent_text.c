/* Absent parameters as text: whole modules where everything is absent for one reason, else parameters by module. */
#include "base/alloc.h"
#include "ddp/replica.h"

#include <string.h>

enum { LEAVES_NAMED = 6, WHOLE_LEAF = 4 };

static const mu_absent *absent_of(const mu_ddp *d, const mui_member *m)
{
    return m->stamp == d->absent_stamp && m->absent_at < d->absent_count ? &d->absent[m->absent_at] : NULL;
}

static bool selects(mui_absent_filter which, const mui_member *m, const mu_absent *a)
{
    switch (which) {
    case MUI_ABSENT_ANYWHERE: return true;
    case MUI_ABSENT_EVERYWHERE: return a->ranks_present == 0;
    case MUI_ABSENT_PENDING: return m->pending;
    }
    return false;
}

mu_status mui_absent_list_make(mu_ddp *d, mui_absent_filter which, mui_absent_list *list)
{
    size_t n = (size_t)d->member_count + 1;
    *list = (mui_absent_list){.items = mui_calloc(d->context, n, sizeof(*list->items)),
                              .names = mui_calloc(d->context, n, sizeof(*list->names))};
    if (list->items == NULL || list->names == NULL) {
        return MU_ERR_NOMEM;
    }
    for (int64_t i = 0; i < d->listed_count; i++) {
        int64_t at = d->slice_of[i];
        if (at < 0) {
            continue;
        }
        const mui_member *m = &d->members[at];
        const mu_absent *a = absent_of(d, m);
        list->names[list->count] = m->name;
        if (a != NULL && selects(which, m, a)) {
            list->items[list->count] = a;
            list->selected++;
        }
        list->count++;
    }
    return MU_OK;
}

void mui_absent_list_free(mu_ddp *d, mui_absent_list *list)
{
    mui_free(d->context, (void *)list->items);
    mui_free(d->context, (void *)list->names);
    *list = (mui_absent_list){0};
}

static const char *shown(const char *module)
{
    return module != NULL && module[0] != '\0' ? module : "the root";
}

static void add_reader(mui_text *t, const mu_absent *a, const char *inside, size_t n)
{
    if (inside != NULL) {
        mui_text_add(t, "read in %.*s", n > 0 ? (int)n : 8, n > 0 ? inside : "the root");
    } else {
        mui_text_add(t, "read by %s in %s", a->op ? a->op : "an operation", shown(a->module));
    }
}

/* inside: several operations of this module read them; NULL: name the one. */
static void add_reason(mui_text *t, const mu_absent *a, const char *inside, size_t n)
{
    switch (a->here) {
    case MU_PRESENT: mui_text_add(t, "present here"); return;
    case MU_NOT_READ: mui_text_add(t, "not read by any operation of this step (its layer was not called)"); return;
    case MU_FROZEN: mui_text_add(t, "frozen"); return;
    case MU_NO_LOSS: mui_text_add(t, "this rank had no loss"); return;
    case MU_NOT_REACHED:
        add_reader(t, a, inside, n);
        mui_text_add(t, ", but nothing that leads to the loss uses the result");
        if (a->end_op != NULL) {
            mui_text_add(t, " (the path ends at %s in %s)", a->end_op, shown(a->end_module));
        }
        return;
    case MU_DETACHED:
        add_reader(t, a, inside, n);
        mui_text_add(t, ", but cut off from the loss");
        if (a->region != NULL) {
            mui_text_add(t, " by the no-grad region%s%s", a->region[0] != '\0' ? " " : "", a->region);
        }
        if (a->end_op != NULL) {
            mui_text_add(t, "%s at %s in %s", a->region != NULL ? "," : "", a->end_op, shown(a->end_module));
        }
        return;
    }
}

static size_t module_length(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot != NULL ? (size_t)(dot - name) : 0;
}

/* Texts are copies of each member's own, so compare contents. */
static bool same_text(const char *a, const char *b)
{
    return a == b || (a != NULL && b != NULL && strcmp(a, b) == 0);
}

static bool same_end(const mu_absent *a, const mu_absent *b)
{
    return b != NULL && a->here == b->here && a->ranks_present == b->ranks_present && a->ranks == b->ranks &&
           same_text(a->end_op, b->end_op) && same_text(a->end_module, b->end_module) &&
           same_text(a->region, b->region);
}

static bool same_reader(const mu_absent *a, const mu_absent *b)
{
    return same_text(a->op, b->op) && same_text(a->module, b->module);
}

/* n bytes of `like` are a module above name; 0: the root. */
static bool is_below(const char *name, const char *like, size_t n)
{
    return n == 0 || (strncmp(name, like, n) == 0 && name[n] == '.');
}

/* Where the module of so many bytes begins at i and all of it is absent alike: the index after it; else i. */
static int64_t whole_module(const mui_absent_list *l, int64_t i, size_t n)
{
    const char *name = l->names[i];
    if (i > 0 && is_below(l->names[i - 1], name, n)) {
        return i;
    }
    int64_t end = i;
    while (end < l->count && is_below(l->names[end], name, n)) {
        if (!same_end(l->items[i], l->items[end])) {
            return i;
        }
        end++;
    }
    return end;
}

static void add_leaves(const mui_absent_list *l, mui_text *t, int64_t i, int64_t end)
{
    size_t n = module_length(l->names[i]), skip = n > 0 ? n + 1 : 0;
    if (end == i + 1) {
        mui_text_add(t, "%s", l->names[i]);
        return;
    }
    mui_text_add(t, "%.*s{", (int)skip, l->names[i]);
    for (int64_t k = i; k < end && k < i + LEAVES_NAMED; k++) {
        mui_text_add(t, "%s%s", k > i ? ", " : "", l->names[k] + skip);
    }
    if (end - i > LEAVES_NAMED) {
        mui_text_add(t, " and %lld more", (long long)(end - i - LEAVES_NAMED));
    }
    mui_text_add(t, "}");
}

void mui_add_ranks(mui_text *t, uint64_t mask, int size)
{
    const char *separator = "";
    for (int r = 0; r < size && r < MUI_RANKS_NAMED; r++) {
        if (mask >> r & 1u) {
            mui_text_add(t, "%s%d", separator, r);
            separator = ", ";
        }
    }
}

static void add_where(mui_text *t, const mu_absent *a, int ranks)
{
    if (ranks > 0 && a->ranks_present == 0) {
        mui_text_add(t, "on no rank; ");
    } else if (ranks > 0) {
        mui_text_add(t, "on rank ");
        mui_add_ranks(t, a->ranks, ranks);
        mui_text_add(t, " (%d of %d ranks); ", a->ranks_present, ranks);
    }
}

/* One group, which begins at i; returns the index after it. */
static int64_t add_group(const mui_absent_list *l, mui_text *t, int64_t i, int ranks)
{
    const mu_absent *a = l->items[i];
    const char *name = l->names[i];
    size_t own = module_length(name);
    for (size_t n = 0; n <= own; n++) {
        int64_t end = n == 0 || n == own || name[n] == '.' ? whole_module(l, i, n) : i;
        if (end < i + 2 || (n == own && end - i <= WHOLE_LEAF)) {
            continue; /* a few of one module are named below */
        }
        bool alike = true;
        for (int64_t k = i; k < end; k++) {
            alike = alike && same_reader(a, l->items[k]);
        }
        mui_text_add(t, "%.*s (%s%lld parameters): ", n > 0 ? (int)n : 15, n > 0 ? name : "the whole model", n > 0 ? "" : "all ",
                     (long long)(end - i));
        add_where(t, a, ranks);
        add_reason(t, a, alike ? NULL : name, n);
        return end;
    }
    int64_t end = i + 1;
    while (end < l->count && l->items[end] != NULL && module_length(l->names[end]) == own &&
           memcmp(l->names[end], name, own) == 0 && same_end(a, l->items[end]) && same_reader(a, l->items[end])) {
        end++;
    }
    add_leaves(l, t, i, end);
    mui_text_add(t, ": ");
    add_where(t, a, ranks);
    add_reason(t, a, NULL, 0);
    return end;
}

void mui_absent_list_add(const mui_absent_list *list, mui_text *t, int64_t groups, int ranks, const char *separator)
{
    int64_t left = list->selected, told = 0;
    for (int64_t i = 0; i < list->count && left > 0;) {
        if (list->items[i] == NULL) {
            i++;
            continue;
        }
        if (told == groups) {
            mui_text_add(t, "%sand %lld more parameters", separator, (long long)left);
            return;
        }
        mui_text_add(t, "%s", told++ > 0 ? separator : "");
        int64_t end = add_group(list, t, i, ranks);
        left -= end - i;
        i = end;
    }
}
