/* Lists a module's state. */
#include "io/state_list.h"
#include "base/alloc.h"
#include "base/rng.h"

#include <stdlib.h>
#include <string.h>

static bool add(void *user, const char *name, mu_tensor *value, mu_parameter *p)
{
    mui_states *s = user;
    if (!MUI_GROW(s->context, s->items, s->count, s->capacity)) {
        return false;
    }
    char *copy = mui_arena_strdup(&s->arena, name);
    if (copy == NULL) {
        return false;
    }
    s->items[s->count] = (mui_state){.name = copy, .value = value, .parameter = p, .same_as = s->count};
    s->count++;
    return true;
}

static int by_name(const void *a, const void *b)
{
    return strcmp((*(mui_state *const *)a)->name, (*(mui_state *const *)b)->name);
}

static int by_value(const void *a, const void *b)
{
    const mui_state *x = *(mui_state *const *)a, *y = *(mui_state *const *)b;
    if (x->value != y->value) {
        return (uintptr_t)x->value < (uintptr_t)y->value ? -1 : 1;
    }
    return x < y ? -1 : x > y;
}

mu_status mui_states_list(mu_context *c, mu_module *root, mui_states *out)
{
    mui_states s = {.context = c};
    mui_arena_init(&s.arena, c);
    mu_status status = mu_module_each_state(root, add, &s);
    status = status == MU_OK ? mu_context_status(c) : status;
    if (status == MU_OK) {
        s.sorted = mui_calloc(c, s.count, sizeof(*s.sorted));
        status = s.sorted != NULL ? MU_OK : MU_ERR_NOMEM;
    }
    if (status != MU_OK) {
        mui_states_free(&s);
        return status;
    }
    for (size_t i = 0; i < s.count; i++) {
        s.sorted[i] = &s.items[i];
    }
    if (s.count > 0) {
        qsort(s.sorted, s.count, sizeof(*s.sorted), by_value);
    }
    for (size_t i = 1; i < s.count; i++) {
        if (s.sorted[i]->value == s.sorted[i - 1]->value) {
            s.sorted[i]->same_as = s.sorted[i - 1]->same_as;
        }
    }
    if (s.count > 0) {
        qsort(s.sorted, s.count, sizeof(*s.sorted), by_name);
    }
    *out = s;
    return MU_OK;
}

void mui_states_free(mui_states *s)
{
    mui_arena_free(&s->arena);
    mui_free(s->context, s->items);
    mui_free(s->context, s->sorted);
    *s = (mui_states){0};
}

static int name_against(const void *key, const void *state)
{
    return strcmp(key, (*(mui_state *const *)state)->name);
}

mui_state *mui_states_find(const mui_states *s, const char *name)
{
    if (s->count == 0) {
        return NULL;
    }
    mui_state **found = bsearch(name, s->sorted, s->count, sizeof(*s->sorted), name_against);
    return found != NULL ? *found : NULL;
}

uint64_t mui_states_hash(const mui_states *s)
{
    uint64_t h = MUI_HASH_START;
    for (size_t i = 0; i < s->count; i++) {
        const mui_state *x = &s->items[i];
        h = mui_hash_string(h, x->name);
        h = mui_hash_u64(h, (uint64_t)x->value->dtype << 8 | (uint64_t)x->value->dims.ndim);
        for (int d = 0; d < x->value->dims.ndim; d++) {
            h = mui_hash_u64(h, (uint64_t)x->value->dims.dim[d]);
        }
    }
    return h;
}
