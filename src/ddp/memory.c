/* Memory of gradient slabs: the group's when all ranks take it together, else the heap. */
#include "base/alloc.h"
#include "ddp/replica.h"

static void memory_destroy(void *object)
{
    mui_grad_memory *m = object;
    mui_free(m->context, m->blocks);
    mui_free(m->context, m->unused);
    mui_free(m->context, m);
}

mui_grad_memory *mui_grad_memory_new(mu_context *c, mu_group *g)
{
    mui_grad_memory *m = mui_calloc(c, 1, sizeof(*m));
    if (m == NULL) {
        return NULL;
    }
    m->context = c;
    m->group = g;
    /* After modules: their stores hand gradients back here even when the ddp is gone. */
    return mui_context_own(c, m, memory_destroy, MUI_OWN_LAST) == MU_OK ? m : NULL;
}

static void drop_block(mui_grad_memory *m, size_t i)
{
    void *p = m->blocks[i];
    m->count--;
    for (size_t k = i; k < m->count; k++) {
        m->blocks[k] = m->blocks[k + 1];
        m->unused[k] = m->unused[k + 1];
    }
    mu_group_free(m->group, p);
}

void mui_grad_memory_together(mui_grad_memory *m, bool together)
{
    m->together = together;
    for (size_t i = 0; together && i < m->count;) {
        if (m->unused[i]) {
            drop_block(m, i);
        } else {
            i++;
        }
    }
}

void *mui_grad_memory_alloc(void *user, size_t bytes)
{
    mui_grad_memory *m = user;
    if (!m->together) {
        return mui_calloc(m->context, 1, bytes);
    }
    if (!MUI_GROW(m->context, m->blocks, m->count, m->blocks_capacity) ||
        !MUI_GROW(m->context, m->unused, m->count, m->unused_capacity)) {
        return NULL;
    }
    void *p = mu_group_alloc(m->group, bytes);
    if (p != NULL) {
        m->blocks[m->count] = p;
        m->unused[m->count++] = false;
    }
    return p;
}

void mui_grad_memory_free(void *user, void *p)
{
    mui_grad_memory *m = user;
    if (p == NULL) {
        return;
    }
    for (size_t i = 0; i < m->count; i++) {
        if (m->blocks[i] == p) {
            /* Alone, a rank cannot give it back: the others would do something else meanwhile. */
            m->unused[i] = true;
            if (m->together) {
                drop_block(m, i);
            }
            return;
        }
    }
    mui_free(m->context, p);
}
