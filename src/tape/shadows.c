/* Copies of parameters' book-keeping for a replica's tape. */
#include "tape/tape_state.h"

#include <string.h>

static size_t slot_of(const mui_shadows *s, const mu_parameter *p)
{
    size_t i = (size_t)(((uint64_t)(uintptr_t)p >> 4) * 0x9e3779b97f4a7c15u >> 20) & s->mask;
    while (s->slots[i] != 0 && s->originals[s->slots[i] - 1] != p) {
        i = (i + 1) & s->mask;
    }
    return i;
}

mu_parameter *mui_shadow_of(const mui_shadows *s, const mu_parameter *p)
{
    uint32_t found = s->slots[slot_of(s, p)];
    return found != 0 ? &s->copies[found - 1] : NULL;
}

static void add(mui_shadows *s, mu_parameter *p, const mui_node *reader)
{
    size_t at = p != NULL ? slot_of(s, p) : 0;
    if (p == NULL || s->slots[at] != 0) {
        return;
    }
    mu_parameter *copy = &s->copies[s->store.count];
    *copy = *p;
    copy->store = p->store != NULL ? &s->store : NULL;
    copy->grad_state = MUI_GRAD_NONE;
    s->originals[s->store.count] = p;
    s->readers[s->store.count] = reader;
    s->store.parameters[s->store.count++] = copy;
    s->slots[at] = (uint32_t)s->store.count;
}

mu_status mui_shadows_make(mu_tape *t, const mu_tensor *y)
{
    size_t most = 1, slots = 4;
    for (size_t i = 0; i < t->node_count; i++) {
        const mui_node *n = t->nodes[i];
        for (int k = 0; k < n->in_count; k++) {
            most += mui_base_of(n->in[k])->parameter != NULL;
        }
    }
    while (slots < 2 * most) {
        slots *= 2;
    }
    mui_shadows *s = &t->shadows;
    *s = (mui_shadows){.store = {.context = t->context}, .mask = slots - 1};
    s->copies = mui_arena_alloc(&t->arena, most * sizeof(*s->copies));
    s->originals = mui_arena_alloc(&t->arena, most * sizeof(*s->originals));
    s->readers = mui_arena_alloc(&t->arena, most * sizeof(*s->readers));
    s->store.parameters = mui_arena_alloc(&t->arena, most * sizeof(*s->store.parameters));
    s->slots = mui_arena_calloc(&t->arena, slots, sizeof(*s->slots));
    if (s->copies == NULL || s->originals == NULL || s->readers == NULL || s->store.parameters == NULL ||
        s->slots == NULL) {
        return MU_ERR_NOMEM;
    }
    for (size_t i = 0; i < t->node_count; i++) {
        const mui_node *n = t->nodes[i];
        for (int k = 0; k < n->in_count; k++) {
            add(s, mui_base_of(n->in[k])->parameter, n);
        }
    }
    add(s, y->parameter, NULL);
    t->has_shadows = true;
    return MU_OK;
}
