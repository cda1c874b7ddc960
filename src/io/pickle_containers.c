/* Containers and object records. Targets must be of a kind that Python could change, so that no later code has to
 * wonder what an item of an integer is. */
#include "io/pickle_machine.h"
#include "base/alloc.h"

#include <string.h>

static mu_status seq_reserve(mui_machine *m, mui_seq *s, size_t more)
{
    if (more <= s->capacity - s->count) {
        return MU_OK;
    }
    /* Doubling in an arena wastes at most as much again. */
    size_t capacity = s->capacity * 2; /* the first time, what is asked for: most things are made whole */
    capacity = capacity < s->count + more ? s->count + more : capacity;
    mui_value **items = mui_arena_calloc(&m->p->arena, capacity, sizeof(mui_value *));
    if (items == NULL) {
        return mu_context_status(m->context);
    }
    if (s->count > 0) {
        memcpy(items, s->items, s->count * sizeof(mui_value *));
    }
    s->items = items;
    s->capacity = capacity;
    return MU_OK;
}

static mu_status seq_add(mui_machine *m, mui_seq *s, mui_value *const *items, size_t count)
{
    MUI_CHECK(seq_reserve(m, s, count));
    if (count > 0) {
        memcpy(s->items + s->count, items, count * sizeof(mui_value *));
    }
    s->count += count;
    return MU_OK;
}

static mu_status push_seq(mui_machine *m, mui_kind kind, mui_value *const *items, size_t count)
{
    mui_value *v = mui_machine_new(m, kind);
    if (v == NULL) {
        return mui_machine_push(m, NULL);
    }
    /* items may be the stack's own: copied before anything is pushed. */
    MUI_CHECK(seq_add(m, &v->seq, items, count));
    return mui_machine_push(m, v);
}

static mu_status check_keys(mui_machine *m, mui_value *const *items, size_t count)
{
    if (count % 2 != 0) {
        return mui_machine_fail(m, MU_ERR_FORMAT, "a key without a value");
    }
    for (size_t i = 0; i < count; i += 2) {
        mui_kind k = items[i]->kind;
        if (k == MUI_LIST || k == MUI_DICT || k == MUI_SET) {
            return mui_machine_fail(m, MU_ERR_FORMAT, "a %s as key of a dict", mui_kind_name(k));
        }
    }
    return MU_OK;
}

static mu_status set_items(mui_machine *m, mui_value *target, mui_value *const *items, size_t count)
{
    MUI_CHECK(check_keys(m, items, count));
    if (target->kind == MUI_DICT) {
        return seq_add(m, &target->seq, items, count);
    }
    if (target->kind == MUI_OBJECT) {
        return seq_add(m, &target->object->pairs, items, count);
    }
    return mui_machine_fail(m, MU_ERR_FORMAT, "sets items of a %s", mui_kind_name(target->kind));
}

static mu_status append_items(mui_machine *m, mui_value *target, mui_kind wanted, mui_value *const *items,
                              size_t count)
{
    if (target->kind == wanted) {
        return seq_add(m, &target->seq, items, count);
    }
    if (target->kind == MUI_OBJECT) {
        return seq_add(m, &target->object->appended, items, count);
    }
    return mui_machine_fail(m, MU_ERR_FORMAT, "adds items to a %s", mui_kind_name(target->kind));
}

/* Items above the mark go into what lies below it. The items stay readable while nothing is pushed. */
static mu_status marked_into_target(mui_machine *m)
{
    mui_value **items = NULL, *target = NULL;
    size_t count = 0;
    MUI_CHECK(mui_machine_pop_mark(m, &items, &count));
    MUI_CHECK(mui_machine_pop(m, &target));
    if (m->op == 'u') {
        MUI_CHECK(set_items(m, target, items, count));
    } else {
        MUI_CHECK(append_items(m, target, m->op == 'e' ? MUI_LIST : MUI_SET, items, count));
    }
    return mui_machine_push(m, target);
}

static mu_status marked_into_new(mui_machine *m)
{
    mui_value **items = NULL;
    size_t count = 0;
    MUI_CHECK(mui_machine_pop_mark(m, &items, &count));
    if (m->op == 'd') {
        MUI_CHECK(check_keys(m, items, count));
    }
    mui_kind kind = m->op == 'l' ? MUI_LIST : m->op == 'd' ? MUI_DICT : m->op == 't' ? MUI_TUPLE : MUI_SET;
    return push_seq(m, kind, items, count);
}

static mu_status small_tuple(mui_machine *m, size_t count)
{
    mui_value *items[3] = {0};
    for (size_t i = count; i-- > 0;) {
        MUI_CHECK(mui_machine_pop(m, &items[i]));
    }
    return push_seq(m, MUI_TUPLE, items, count);
}

/* What Python would call must at least look callable. */
static mu_status check_callable(mui_machine *m, const mui_value *v)
{
    if (v->kind == MUI_GLOBAL || v->kind == MUI_OBJECT || v->kind == MUI_PERSISTENT) {
        return MU_OK;
    }
    return mui_machine_fail(m, MU_ERR_FORMAT, "calls a %s", mui_kind_name(v->kind));
}

static mu_status push_object(mui_machine *m, mui_value *callable, mui_value *args, mui_value *kwargs)
{
    MUI_CHECK(check_callable(m, callable));
    if (kwargs != NULL && kwargs->kind != MUI_DICT) {
        return mui_machine_fail(m, MU_ERR_FORMAT, "the arguments by name are a %s", mui_kind_name(kwargs->kind));
    }
    if (args->kind != MUI_TUPLE) {
        return mui_machine_fail(m, MU_ERR_FORMAT, "the arguments are a %s", mui_kind_name(args->kind));
    }
    mui_value *v = mui_machine_new(m, MUI_OBJECT);
    if (v == NULL) {
        return mui_machine_push(m, NULL);
    }
    v->object = mui_arena_calloc(&m->p->arena, 1, sizeof(*v->object));
    if (v->object == NULL) {
        return mu_context_status(m->context);
    }
    *v->object = (mui_object){.callable = callable, .args = args, .kwargs = kwargs};
    return mui_machine_push(m, v);
}

static mu_status do_call(mui_machine *m)
{
    mui_value *args = NULL, *callable = NULL, *kwargs = NULL;
    if (m->op == 0x92) {
        MUI_CHECK(mui_machine_pop(m, &kwargs));
    }
    MUI_CHECK(mui_machine_pop(m, &args));
    MUI_CHECK(mui_machine_pop(m, &callable));
    return push_object(m, callable, args, kwargs);
}

/* INST and OBJ: classes of Python 2. */
static mu_status do_old_instance(mui_machine *m)
{
    mui_value **items = NULL, *callable = NULL, *args = NULL;
    size_t count = 0;
    if (m->op == 'i') {
        MUI_CHECK(mui_machine_global_lines(m, &callable));
        MUI_CHECK(mui_machine_pop_mark(m, &items, &count));
    } else {
        MUI_CHECK(mui_machine_pop_mark(m, &items, &count));
        if (count == 0) {
            return mui_machine_fail(m, MU_ERR_FORMAT, "no class below the arguments");
        }
        callable = items[0];
        items++;
        count--;
    }
    MUI_CHECK(push_seq(m, MUI_TUPLE, items, count));
    MUI_CHECK(mui_machine_pop(m, &args));
    return push_object(m, callable, args, NULL);
}

static mu_status do_build(mui_machine *m)
{
    mui_value *state = NULL, *target = NULL;
    MUI_CHECK(mui_machine_pop(m, &state));
    MUI_CHECK(mui_machine_pop(m, &target));
    if (target->kind != MUI_OBJECT) {
        return mui_machine_fail(m, MU_ERR_FORMAT, "gives state to a %s", mui_kind_name(target->kind));
    }
    target->object->state = state;
    return mui_machine_push(m, target);
}

static mu_status do_single(mui_machine *m)
{
    mui_value *items[2] = {0}, *target = NULL;
    if (m->op == 's') {
        MUI_CHECK(mui_machine_pop(m, &items[1]));
        MUI_CHECK(mui_machine_pop(m, &items[0]));
        MUI_CHECK(mui_machine_pop(m, &target));
        MUI_CHECK(set_items(m, target, items, 2));
    } else {
        MUI_CHECK(mui_machine_pop(m, &items[0]));
        MUI_CHECK(mui_machine_pop(m, &target));
        MUI_CHECK(append_items(m, target, MUI_LIST, items, 1));
    }
    return mui_machine_push(m, target);
}

mu_status mui_machine_container(mui_machine *m, bool *mine)
{
    switch (m->op) {
    case ']': return push_seq(m, MUI_LIST, NULL, 0);
    case '}': return push_seq(m, MUI_DICT, NULL, 0);
    case 0x8f: return push_seq(m, MUI_SET, NULL, 0);
    case 'a': case 's': return do_single(m);
    case 'e': case 'u': case 0x90: return marked_into_target(m);
    case 'l': case 'd': case 't': case 0x91: return marked_into_new(m);
    case 0x85: return small_tuple(m, 1);
    case 0x86: return small_tuple(m, 2);
    case 0x87: return small_tuple(m, 3);
    case 'R': case 0x81: case 0x92: return do_call(m);
    case 'i': case 'o': return do_old_instance(m);
    case 'b': return do_build(m);
    default: *mine = false; return MU_OK;
    }
}
