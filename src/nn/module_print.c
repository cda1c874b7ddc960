/* A tree as text, in the form of Python's print(module). */
#include "nn/nn.h"
#include "base/alloc.h"
#include "base/text.h"

#include <string.h>

static void print(mui_text *out, const mu_module *m, int indent)
{
    mui_text_add(out, "%s(", m->kind);
    const char *extra = m->extra != NULL ? m->extra : "";
    if (m->child_count == 0) {
        mui_text_add(out, "%s)", extra);
        return;
    }
    mui_text_add(out, "\n");
    if (extra[0] != '\0') {
        mui_text_add(out, "%*s%s\n", indent + 2, "", extra);
    }
    for (size_t i = 0; i < m->child_count; i++) {
        mui_text_add(out, "%*s(%s): ", indent + 2, "", m->children[i]->name);
        print(out, m->children[i], indent + 2);
        mui_text_add(out, "\n");
    }
    mui_text_add(out, "%*s)", indent, "");
}

size_t mu_module_print(mu_module *root, char *out, size_t size)
{
    mui_text text;
    mui_text_init(&text, root != NULL ? root->source.context : NULL);
    if (root != NULL) {
        print(&text, root, 0);
    }
    return mui_text_give(&text, out, size);
}
