/* Lists a module's state. */
#include "io/state_list.h"
#include "base/alloc.h"
#include "base/rng.h"

#include <stdlib.h>

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
    mui_state **sorted = status == MU_OK ? mui_calloc(c, s.count, sizeof(*sorted)) : NULL;
    status = status == MU_OK && sorted == NULL ? MU_ERR_NOMEM : status;
    if (status != MU_OK) {
        mui_states_free(&s);
        return status;
    }
    for (size_t i = 0; i < s.count; i++) {
        sorted[i] = &s.items[i];
    }
    if (s.count > 0) {
        qsort(sorted, s.count, sizeof(*sorted), by_value);
    }
    for (size_t i = 1; i < s.count; i++) {
        if (sorted[i]->value == sorted[i - 1]->value) {
            sorted[i]->same_as = sorted[i - 1]->same_as;
        }
    }
    mui_free(c, sorted);
    *out = s;
    return MU_OK;
}

void mui_states_free(mui_states *s)
{
    mui_arena_free(&s->arena);
    mui_free(s->context, s->items);
    *s = (mui_states){0};
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
