/* Open addressing over the model's names. Nothing of a file is ever put in, so no file can make the table slow. */
#include "io/name_table.h"
#include "base/alloc.h"

#include <string.h>

const char *const mui_wrappers[MUI_WRAPPERS] = {"module.", "_orig_mod.", "model.", "net."};
static const size_t wrapper_bytes[MUI_WRAPPERS] = {7, 10, 6, 4};

int mui_wrapper_at(const char *name)
{
    if (*name != 'm' && *name != '_' && *name != 'n') {
        return -1;
    }
    for (int i = 0; i < MUI_WRAPPERS; i++) {
        if (strncmp(name, mui_wrappers[i], wrapper_bytes[i]) == 0) {
            return i;
        }
    }
    return -1;
}

static const char *next_part(const char *name)
{
    const char *dot = strchr(name, '.');
    return dot != NULL ? dot + 1 : name + strlen(name);
}

unsigned mui_wrappers_in(const char *name, int counts[MUI_WRAPPERS])
{
    unsigned found = 0;
    for (; *name != '\0'; name = next_part(name)) {
        int w = mui_wrapper_at(name);
        if (w >= 0) {
            found |= 1u << w;
            if (counts != NULL) {
                counts[w]++;
            }
        }
    }
    return found;
}

/* `before` and then `name`, without what is dropped. */
typedef struct reader {
    const char *at, *then;
    unsigned dropped;
    bool starts; /* a part begins here */
} reader;

static reader read_name(const char *before, const char *name, unsigned dropped)
{
    return (reader){.at = before, .then = name, .dropped = dropped, .starts = true};
}

/* The next byte, '\0' at the end. */
static char next_byte(reader *r)
{
    for (;;) {
        if (*r->at == '\0' && r->then != NULL) {
            r->at = r->then;
            r->then = NULL;
            continue;
        }
        int w = r->starts && r->dropped != 0 ? mui_wrapper_at(r->at) : -1;
        if (w < 0 || (r->dropped >> w & 1) == 0) {
            break;
        }
        r->at += wrapper_bytes[w];
    }
    if (*r->at == '\0') {
        return '\0';
    }
    r->starts = *r->at == '.';
    return *r->at++;
}

static uint64_t hash(reader r)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (char b = next_byte(&r); b != '\0'; b = next_byte(&r)) {
        h = (h ^ (unsigned char)b) * 0x100000001b3u;
    }
    return h ^ h >> 29;
}

static bool equal(reader a, reader b)
{
    for (;;) {
        char x = next_byte(&a);
        if (x != next_byte(&b)) {
            return false;
        }
        if (x == '\0') {
            return true;
        }
    }
}

/* The slot that holds such a name, or the free one where it belongs. */
static size_t slot_of(const mui_name_table *t, reader name, uint64_t h)
{
    for (size_t i = (size_t)h & t->mask;; i = (i + 1) & t->mask) {
        size_t x = t->slots[i];
        if (x == SIZE_MAX ||
            (t->hashes[x] == h && equal(name, read_name("", t->states->items[x].name, t->dropped)))) {
            return i;
        }
    }
}

mu_status mui_name_table_make(const mui_states *s, unsigned dropped, mui_name_table *out)
{
    mui_name_table t = {.states = s, .dropped = dropped, .mask = 1};
    while (t.mask < 2 * s->count) {
        t.mask = 2 * t.mask + 1;
    }
    t.slots = mui_calloc(s->context, t.mask + 1, sizeof(*t.slots));
    t.hashes = mui_calloc(s->context, s->count, sizeof(*t.hashes));
    t.next = mui_calloc(s->context, s->count, sizeof(*t.next));
    if (t.slots == NULL || t.hashes == NULL || t.next == NULL) {
        mui_name_table_free(&t);
        return MU_ERR_NOMEM;
    }
    memset(t.slots, 0xff, (t.mask + 1) * sizeof(*t.slots));
    for (size_t i = 0; i < s->count; i++) {
        reader name = read_name("", s->items[i].name, dropped);
        t.hashes[i] = hash(name);
        size_t slot = slot_of(&t, name, t.hashes[i]);
        t.next[i] = t.slots[slot];
        t.slots[slot] = i;
    }
    *out = t;
    return MU_OK;
}

void mui_name_table_free(mui_name_table *t)
{
    if (t->states != NULL) {
        mui_free(t->states->context, t->slots);
        mui_free(t->states->context, t->hashes);
        mui_free(t->states->context, t->next);
    }
    *t = (mui_name_table){0};
}

size_t mui_name_table_find(const mui_name_table *t, const char *before, const char *name)
{
    reader r = read_name(before, name, t->dropped);
    size_t slot = slot_of(t, r, hash(r));
    return t->slots[slot] != SIZE_MAX ? slot : SIZE_MAX;
}
