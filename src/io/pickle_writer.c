/* Pickles, written. Opcodes as CPython's pickle writes them, without memo: nothing here is shared but storages. */
#include "io/pickle_writer.h"
#include "base/alloc.h"
#include "base/text.h"
#include "io/bytes.h"

#include <string.h>

static void put(mui_pickle_writer *w, const void *data, size_t bytes)
{
    if (!w->failed && bytes > w->capacity - w->bytes) {
        size_t capacity = w->capacity < 4096 ? 4096 : w->capacity * 2;
        capacity = capacity < w->bytes + bytes ? w->bytes + bytes : capacity;
        unsigned char *grown = mui_realloc(w->context, w->data, capacity);
        w->failed = grown == NULL;
        if (grown != NULL) {
            w->data = grown;
            w->capacity = capacity;
        }
    }
    if (!w->failed && bytes > 0) {
        memcpy(w->data + w->bytes, data, bytes);
        w->bytes += bytes;
    }
}

void mui_pk_start(mui_pickle_writer *w, mu_context *c)
{
    *w = (mui_pickle_writer){.context = c};
    put(w, "\x80\x02", 2);
}

void mui_pk_op(mui_pickle_writer *w, unsigned char op)
{
    put(w, &op, 1);
}

void mui_pk_text(mui_pickle_writer *w, const char *s)
{
    unsigned char head[5] = "X";
    size_t n = strlen(s);
    if (!w->failed && !mui_is_utf8(s, n)) { /* a reader would refuse the whole file */
        mui_fail(w->context, MU_ERR_ARG, "\"%.100s\" is not UTF-8, and no checkpoint can have it as a name or note", s);
        w->failed = true;
    }
    mui_put_le32(head + 1, (uint32_t)n);
    put(w, head, sizeof(head));
    put(w, s, n);
}

void mui_pk_int(mui_pickle_writer *w, int64_t i)
{
    unsigned char b[10];
    if (i >= 0 && i < 256) {
        b[0] = 'K';
        b[1] = (unsigned char)i;
        put(w, b, 2);
    } else if (i >= 0 && i < 65536) {
        b[0] = 'M';
        mui_put_le16(b + 1, (uint16_t)i);
        put(w, b, 3);
    } else if (i >= INT32_MIN && i <= INT32_MAX) {
        b[0] = 'J';
        mui_put_le32(b + 1, (uint32_t)i);
        put(w, b, 5);
    } else {
        b[0] = 0x8a;
        b[1] = 8;
        mui_put_le64(b + 2, (uint64_t)i);
        put(w, b, 10);
    }
}

void mui_pk_uint(mui_pickle_writer *w, uint64_t i)
{
    unsigned char b[11] = {0x8a, 9};
    if (i <= INT64_MAX) {
        mui_pk_int(w, (int64_t)i);
        return;
    }
    mui_put_le64(b + 2, i); /* a ninth byte of zero keeps it positive */
    put(w, b, sizeof(b));
}

void mui_pk_float(mui_pickle_writer *w, double f)
{
    unsigned char b[9] = "G";
    uint64_t bits;
    memcpy(&bits, &f, sizeof(bits));
    for (int i = 0; i < 8; i++) {
        b[1 + i] = (unsigned char)(bits >> (56 - 8 * i));
    }
    put(w, b, sizeof(b));
}

void mui_pk_bool(mui_pickle_writer *w, bool b)
{
    mui_pk_op(w, b ? 0x88 : 0x89);
}

void mui_pk_global(mui_pickle_writer *w, const char *module, const char *name)
{
    mui_pk_op(w, 'c');
    put(w, module, strlen(module));
    put(w, "\n", 1);
    put(w, name, strlen(name));
    put(w, "\n", 1);
}

void mui_pk_ordered_dict(mui_pickle_writer *w)
{
    mui_pk_global(w, "collections", "OrderedDict");
    mui_pk_op(w, ')');
    mui_pk_op(w, 'R');
}

void mui_pk_free(mui_pickle_writer *w)
{
    mui_free(w->context, w->data);
    *w = (mui_pickle_writer){0};
}
