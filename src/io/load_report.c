/* One small object per context, found among those it owns. */
#include "io/load_report.h"
#include "base/alloc.h"

typedef struct keeper {
    mu_context *context;
    char *texts[MUI_KEPT_COUNT];
} keeper;

static void destroy(void *object)
{
    keeper *k = object;
    for (int i = 0; i < MUI_KEPT_COUNT; i++) {
        mui_free(k->context, k->texts[i]);
    }
    mui_free(k->context, k);
}

static keeper *find(mu_context *c)
{
    for (size_t i = 0; i < c->owned_count; i++) {
        if (c->owned[i].destroy == destroy) {
            return c->owned[i].object;
        }
    }
    keeper *k = mui_calloc(c, 1, sizeof(*k));
    if (k == NULL) {
        return NULL;
    }
    k->context = c;
    return mui_context_own(c, k, destroy, MUI_OWN_DEFAULT) == MU_OK ? k : NULL;
}

const char *mui_keep_text(mu_context *c, mui_kept kind, const char *text)
{
    keeper *k = find(c);
    char *copy = k != NULL ? mui_strdup(c, text) : NULL;
    if (copy == NULL) {
        return NULL;
    }
    mui_free(c, k->texts[kind]);
    k->texts[kind] = copy;
    return copy;
}
