/* The machine's loop, and all opcodes that push constants, texts and references. Opcodes as in CPython's
 * Lib/pickletools.py; what is refused and why: mui_pickle_read's tests and section 2 of the format notes. */
#include "io/pickle_machine.h"
#include "base/alloc.h"
#include "base/text.h"
#include "io/bytes.h"

#include <errno.h>
#include <locale.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_BIGINT_BYTES ((uint32_t)1 << 20)
/* The most arena bytes one byte of pickle can ask for (an empty dict: a value, an array of 8 items), with room. */
#define ARENA_PER_BYTE 512u

static const char *opcode_name(unsigned char op)
{
    static const char *const names[256] = {
        ['('] = "MARK", ['.'] = "STOP", ['0'] = "POP", ['1'] = "POP_MARK", ['2'] = "DUP", ['F'] = "FLOAT",
        ['I'] = "INT", ['J'] = "BININT", ['K'] = "BININT1", ['L'] = "LONG", ['M'] = "BININT2", ['N'] = "NONE",
        ['P'] = "PERSID", ['Q'] = "BINPERSID", ['R'] = "REDUCE", ['S'] = "STRING", ['T'] = "BINSTRING",
        ['U'] = "SHORT_BINSTRING", ['V'] = "UNICODE", ['X'] = "BINUNICODE", ['a'] = "APPEND", ['b'] = "BUILD",
        ['c'] = "GLOBAL", ['d'] = "DICT", ['}'] = "EMPTY_DICT", ['e'] = "APPENDS", ['g'] = "GET", ['h'] = "BINGET",
        ['i'] = "INST", ['j'] = "LONG_BINGET", ['l'] = "LIST", [']'] = "EMPTY_LIST", ['o'] = "OBJ", ['p'] = "PUT",
        ['q'] = "BINPUT", ['r'] = "LONG_BINPUT", ['s'] = "SETITEM", ['t'] = "TUPLE", [')'] = "EMPTY_TUPLE",
        ['u'] = "SETITEMS", ['G'] = "BINFLOAT", [0x80] = "PROTO", [0x81] = "NEWOBJ", [0x82] = "EXT1", [0x83] = "EXT2",
        [0x84] = "EXT4", [0x85] = "TUPLE1", [0x86] = "TUPLE2", [0x87] = "TUPLE3", [0x88] = "NEWTRUE",
        [0x89] = "NEWFALSE", [0x8a] = "LONG1", [0x8b] = "LONG4", ['B'] = "BINBYTES", ['C'] = "SHORT_BINBYTES",
        [0x8c] = "SHORT_BINUNICODE", [0x8d] = "BINUNICODE8", [0x8e] = "BINBYTES8", [0x8f] = "EMPTY_SET",
        [0x90] = "ADDITEMS", [0x91] = "FROZENSET", [0x92] = "NEWOBJ_EX", [0x93] = "STACK_GLOBAL", [0x94] = "MEMOIZE",
        [0x95] = "FRAME", [0x96] = "BYTEARRAY8", [0x97] = "NEXT_BUFFER", [0x98] = "READONLY_BUFFER",
    };
    return names[op];
}

mu_status mui_machine_fail(mui_machine *m, mu_status s, const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    const char *name = opcode_name(m->op);
    return mui_fail(m->context, s, "%s: %s, byte %zu%s%s: %s", m->path, m->what, m->op_at,
                    name != NULL ? ", opcode " : "", name != NULL ? name : "", text);
}

mui_value *mui_machine_new(mui_machine *m, mui_kind kind)
{
    mui_value *v = mui_arena_calloc(&m->p->arena, 1, sizeof(*v));
    if (v != NULL) {
        v->kind = kind;
    }
    return v;
}

mu_status mui_machine_push(mui_machine *m, mui_value *v)
{
    if (v == NULL || !MUI_GROW(m->context, m->stack, m->depth, m->stack_capacity)) {
        return v == NULL ? mu_context_status(m->context) : MU_ERR_NOMEM;
    }
    m->stack[m->depth++] = v;
    return MU_OK;
}

mu_status mui_machine_pop(mui_machine *m, mui_value **v)
{
    size_t floor = m->mark_count > 0 ? m->marks[m->mark_count - 1] : 0;
    if (m->depth <= floor) {
        return mui_machine_fail(m, MU_ERR_FORMAT, "needs more values than the pickle's stack has");
    }
    *v = m->stack[--m->depth];
    return MU_OK;
}

mu_status mui_machine_pop_mark(mui_machine *m, mui_value ***items, size_t *count)
{
    if (m->mark_count == 0) {
        return mui_machine_fail(m, MU_ERR_FORMAT, "needs a MARK, and there is none");
    }
    size_t from = m->marks[--m->mark_count];
    /* An empty stack may still be NULL. */
    *items = m->stack != NULL ? m->stack + from : NULL;
    *count = m->depth - from;
    m->depth = from;
    return MU_OK;
}

mu_status mui_machine_take(mui_machine *m, uint64_t bytes, const unsigned char **out)
{
    if (bytes > m->bytes - m->at) {
        return mui_machine_fail(m, MU_ERR_FORMAT, "%llu bytes should follow, but only %zu are left",
                                (unsigned long long)bytes, m->bytes - m->at);
    }
    *out = m->data + m->at;
    m->at += (size_t)bytes;
    return MU_OK;
}

mu_status mui_machine_line(mui_machine *m, mui_slice *out)
{
    const unsigned char *start = m->data + m->at;
    const unsigned char *end = memchr(start, '\n', m->bytes - m->at);
    if (end == NULL) {
        return mui_machine_fail(m, MU_ERR_FORMAT, "its line of text does not end");
    }
    *out = (mui_slice){(const char *)start, (size_t)(end - start)};
    m->at += out->bytes + 1;
    return MU_OK;
}

static mu_status push_int(mui_machine *m, int64_t i)
{
    mui_value *v = mui_machine_new(m, MUI_INT);
    if (v != NULL) {
        v->i = i;
    }
    return mui_machine_push(m, v);
}

static mu_status push_long(mui_machine *m, uint64_t bytes)
{
    const unsigned char *data = NULL;
    MUI_CHECK(mui_machine_take(m, bytes, &data));
    if (bytes > MAX_BIGINT_BYTES) {
        return mui_machine_fail(m, MU_ERR_LIMIT, "an integer of %llu bytes", (unsigned long long)bytes);
    }
    /* Bytes that only repeat the sign add nothing. */
    while (bytes > 8 && data[bytes - 1] == ((data[bytes - 2] & 0x80) != 0 ? 0xff : 0)) {
        bytes--;
    }
    if (bytes > 8) {
        return mui_machine_text(m, MUI_BIGINT, data, bytes);
    }
    uint64_t v = bytes > 0 && (data[bytes - 1] & 0x80) != 0 ? UINT64_MAX : 0;
    for (size_t i = (size_t)bytes; i-- > 0;) {
        v = v << 8 | data[i];
    }
    return push_int(m, (int64_t)v);
}

static mu_status push_int_line(mui_machine *m)
{
    mui_slice line = {0};
    MUI_CHECK(mui_machine_line(m, &line));
    if (m->op == 'I' && line.bytes == 2 && (mui_slice_is(line, "00") || mui_slice_is(line, "01"))) {
        return mui_machine_push(m, line.data[1] == '1' ? m->yes : m->no);
    }
    size_t n = line.bytes > 0 && line.data[line.bytes - 1] == 'L' ? line.bytes - 1 : line.bytes;
    size_t sign = n > 0 && (line.data[0] == '-' || line.data[0] == '+');
    bool good = n > sign;
    for (size_t i = sign; good && i < n; i++) {
        good = line.data[i] >= '0' && line.data[i] <= '9';
    }
    if (!good) {
        return mui_machine_fail(m, MU_ERR_FORMAT, "'%.*s' is not an integer", (int)(n < 20 ? n : 20), line.data);
    }
    char text[32] = "";
    memcpy(text, line.data, n < sizeof(text) ? n : 0);
    errno = 0;
    long long v = strtoll(text, NULL, 10);
    if (n >= sizeof(text) || errno != 0) {
        return n <= MAX_BIGINT_BYTES ? mui_machine_text(m, MUI_BIGINT, (const unsigned char *)line.data, n)
                                     : mui_machine_fail(m, MU_ERR_LIMIT, "an integer of %zu digits", n);
    }
    return push_int(m, v);
}

static mu_status push_float(mui_machine *m)
{
    mui_value *v = mui_machine_new(m, MUI_FLOAT);
    if (v == NULL) {
        return mui_machine_push(m, NULL);
    }
    if (m->op == 'G') { /* the one big-endian number of the format */
        const unsigned char *data = NULL;
        MUI_CHECK(mui_machine_take(m, 8, &data));
        uint64_t bits = 0;
        for (int i = 0; i < 8; i++) {
            bits = bits << 8 | data[i];
        }
        memcpy(&v->f, &bits, 8);
        return mui_machine_push(m, v);
    }
    mui_slice line = {0};
    MUI_CHECK(mui_machine_line(m, &line));
    char text[64], *end = NULL;
    if (line.bytes == 0 || line.bytes >= sizeof(text)) {
        return mui_machine_fail(m, MU_ERR_FORMAT, "%zu bytes of text are not a number", line.bytes);
    }
    memcpy(text, line.data, line.bytes);
    text[line.bytes] = '\0';
    char *point = strchr(text, '.'); /* strtod wants the program's locale's, which may be a comma */
    if (point != NULL) {
        *point = localeconv()->decimal_point[0];
    }
    v->f = strtod(text, &end);
    if (*end != '\0' || strlen(text) != line.bytes || strpbrk(text, "xX \t") != NULL) {
        return mui_machine_fail(m, MU_ERR_FORMAT, "'%.30s' is not a number", text);
    }
    return mui_machine_push(m, v);
}

static mu_status memo_put(mui_machine *m, uint64_t index)
{
    if (m->depth == (m->mark_count > 0 ? m->marks[m->mark_count - 1] : 0)) {
        return mui_machine_fail(m, MU_ERR_FORMAT, "needs a value, and the pickle's stack is empty");
    }
    /* Every pickler numbers its memo without gaps, so an index cannot pass the number of opcodes; one that does only
     * asks for memory. */
    if (index > m->ops) {
        return mui_machine_fail(m, MU_ERR_FORMAT, "memo slot %llu after only %llu opcodes", (unsigned long long)index,
                                (unsigned long long)m->ops);
    }
    while (m->memo_count <= index) {
        if (!MUI_GROW(m->context, m->memo, m->memo_count, m->memo_capacity)) {
            return MU_ERR_NOMEM;
        }
        m->memo[m->memo_count++] = NULL;
    }
    m->memo[index] = m->stack[m->depth - 1];
    return MU_OK;
}

static mu_status memo_get(mui_machine *m, uint64_t index)
{
    if (index >= m->memo_count || m->memo[index] == NULL) {
        return mui_machine_fail(m, MU_ERR_FORMAT, "memo slot %llu was never filled", (unsigned long long)index);
    }
    return mui_machine_push(m, m->memo[index]);
}

static mu_status memo_line(mui_machine *m)
{
    mui_slice line = {0};
    MUI_CHECK(mui_machine_line(m, &line));
    uint64_t index = 0;
    bool good = line.bytes > 0 && line.bytes < 19;
    for (size_t i = 0; good && i < line.bytes; i++) {
        good = line.data[i] >= '0' && line.data[i] <= '9';
        index = index * 10 + (uint64_t)(line.data[i] - '0');
    }
    if (!good) {
        return mui_machine_fail(m, MU_ERR_FORMAT, "the memo slot is not a number");
    }
    return m->op == 'p' ? memo_put(m, index) : memo_get(m, index);
}

/* Both are UTF-8. */
static mu_status new_global(mui_machine *m, mui_slice module, mui_slice name, mui_value **out)
{
    mui_value *v = mui_machine_new(m, MUI_GLOBAL);
    if (v == NULL) {
        return mu_context_status(m->context);
    }
    v->global.module = module;
    v->global.name = name;
    if (!MUI_GROW(m->context, m->p->globals, m->p->global_count, m->p->global_capacity)) {
        return MU_ERR_NOMEM;
    }
    m->p->globals[m->p->global_count++] = v;
    *out = v;
    return MU_OK;
}

mu_status mui_machine_global_lines(mui_machine *m, mui_value **out)
{
    mui_slice module = {0}, name = {0};
    MUI_CHECK(mui_machine_line(m, &module));
    MUI_CHECK(mui_machine_line(m, &name));
    if (!mui_is_utf8(module.data, module.bytes) || !mui_is_utf8(name.data, name.bytes)) {
        return mui_machine_fail(m, MU_ERR_FORMAT, "the class name is not UTF-8");
    }
    return new_global(m, module, name, out);
}

static mu_status push_global(mui_machine *m)
{
    mui_value *module = NULL, *name = NULL, *v = NULL;
    if (m->op == 'c') {
        MUI_CHECK(mui_machine_global_lines(m, &v));
        return mui_machine_push(m, v);
    }
    MUI_CHECK(mui_machine_pop(m, &name));
    MUI_CHECK(mui_machine_pop(m, &module));
    if (module->kind != MUI_STR || name->kind != MUI_STR) {
        return mui_machine_fail(m, MU_ERR_FORMAT, "a %s and a %s are not a module and a name",
                                mui_kind_name(module->kind), mui_kind_name(name->kind));
    }
    MUI_CHECK(new_global(m, module->text, name->text, &v));
    return mui_machine_push(m, v);
}

static mu_status push_persistent(mui_machine *m)
{
    mui_value *v = mui_machine_new(m, MUI_PERSISTENT);
    if (v == NULL) {
        return mui_machine_push(m, NULL);
    }
    MUI_CHECK(mui_machine_pop(m, &v->id));
    if (m->p->persistent_count >= UINT32_MAX) {
        return mui_machine_fail(m, MU_ERR_LIMIT, "too many persistent ids");
    }
    if (!MUI_GROW(m->context, m->p->persistent, m->p->persistent_count, m->p->persistent_capacity)) {
        return MU_ERR_NOMEM;
    }
    v->number = (uint32_t)m->p->persistent_count;
    m->p->persistent[m->p->persistent_count++] = v;
    return mui_machine_push(m, v);
}

/* Opcodes that only move the stack or say something about the stream. */
static mu_status do_stack(mui_machine *m)
{
    const unsigned char *arg = NULL;
    mui_value *v = NULL, **items = NULL;
    size_t count = 0;
    switch (m->op) {
    case 0x80:
        MUI_CHECK(mui_machine_take(m, 1, &arg));
        return arg[0] <= 5 ? MU_OK
                           : mui_machine_fail(m, MU_ERR_UNSUPPORTED, "protocol %u; 0 to 5 can be read", arg[0]);
    case 0x95: /* the length helps a reader of streams; ours has it all */
        MUI_CHECK(mui_machine_take(m, 8, &arg));
        return mui_le64(arg) <= m->bytes - m->at
                   ? MU_OK
                   : mui_machine_fail(m, MU_ERR_FORMAT, "a frame of %llu bytes, but only %zu are left",
                                      (unsigned long long)mui_le64(arg), m->bytes - m->at);
    case '(':
        if (!MUI_GROW(m->context, m->marks, m->mark_count, m->mark_capacity)) {
            return MU_ERR_NOMEM;
        }
        m->marks[m->mark_count++] = m->depth;
        return MU_OK;
    case '0': /* a MARK on top is popped like a value */
        if (m->mark_count > 0 && m->marks[m->mark_count - 1] == m->depth) {
            m->mark_count--;
            return MU_OK;
        }
        return mui_machine_pop(m, &v);
    case '1':
        return mui_machine_pop_mark(m, &items, &count);
    default: /* DUP */
        MUI_CHECK(mui_machine_pop(m, &v));
        MUI_CHECK(mui_machine_push(m, v));
        return mui_machine_push(m, v);
    }
}

static mu_status do_number(mui_machine *m)
{
    uint64_t n = 0;
    switch (m->op) {
    case 'J': MUI_CHECK(mui_machine_length(m, 4, &n)); return push_int(m, (int32_t)(uint32_t)n);
    case 'K': MUI_CHECK(mui_machine_length(m, 1, &n)); return push_int(m, (int64_t)n);
    case 'M': MUI_CHECK(mui_machine_length(m, 2, &n)); return push_int(m, (int64_t)n);
    case 0x8a: MUI_CHECK(mui_machine_length(m, 1, &n)); return push_long(m, n);
    case 0x8b: MUI_CHECK(mui_machine_signed_length(m, &n)); return push_long(m, n);
    case 'I':
    case 'L': return push_int_line(m);
    default: return push_float(m); /* F, G */
    }
}

static mu_status do_memo(mui_machine *m)
{
    uint64_t n = 0;
    switch (m->op) {
    case 'q': MUI_CHECK(mui_machine_length(m, 1, &n)); return memo_put(m, n);
    case 'r': MUI_CHECK(mui_machine_length(m, 4, &n)); return memo_put(m, n);
    case 'h': MUI_CHECK(mui_machine_length(m, 1, &n)); return memo_get(m, n);
    case 'j': MUI_CHECK(mui_machine_length(m, 4, &n)); return memo_get(m, n);
    case 0x94: return memo_put(m, m->memo_count);
    default: return memo_line(m); /* p, g */
    }
}

static mu_status do_opcode(mui_machine *m)
{
    bool mine = true;
    mu_status s = mui_machine_container(m, &mine);
    if (mine) {
        return s;
    }
    switch (m->op) {
    case 0x80: case 0x95: case '(': case '0': case '1': case '2': return do_stack(m);
    case 'N': return mui_machine_push(m, m->none);
    case 0x88: return mui_machine_push(m, m->yes);
    case 0x89: return mui_machine_push(m, m->no);
    case ')': return mui_machine_push(m, m->unit);
    case 'J': case 'K': case 'M': case 0x8a: case 0x8b: case 'I': case 'L': case 'F': case 'G': return do_number(m);
    case 'X': case 0x8c: case 0x8d: case 'V': case 'B': case 'C': case 0x8e: case 0x96: case 'S': case 'T': case 'U':
        return mui_machine_do_text(m);
    case 'q': case 'r': case 'h': case 'j': case 'p': case 'g': case 0x94: return do_memo(m);
    case 'c': case 0x93: return push_global(m);
    case 'Q': return push_persistent(m);
    case 'P':
        return mui_machine_fail(m, MU_ERR_UNSUPPORTED,
                                "written with pickle protocol 0, which PyTorch cannot load either: save it again with "
                                "the default protocol");
    case 0x82: case 0x83: case 0x84: case 0x97: case 0x98:
        return mui_machine_fail(m, MU_ERR_UNSUPPORTED, "refers to things outside the file");
    default:
        return mui_machine_fail(m, MU_ERR_FORMAT, "0x%02x is no pickle opcode: not a pickle, or a damaged one", m->op);
    }
}

static mu_status run(mui_machine *m)
{
    m->none = mui_machine_new(m, MUI_NONE);
    m->yes = mui_machine_new(m, MUI_BOOL);
    m->no = mui_machine_new(m, MUI_BOOL);
    m->unit = mui_machine_new(m, MUI_TUPLE);
    if (m->none == NULL || m->yes == NULL || m->no == NULL || m->unit == NULL) {
        return MU_ERR_NOMEM;
    }
    m->yes->truth = true;
    for (;;) {
        if (m->at == m->bytes) {
            return mui_fail(m->context, MU_ERR_FORMAT, "%s: %s ends early, at byte %zu, without STOP", m->path, m->what,
                            m->bytes);
        }
        m->op_at = m->at;
        m->op = m->data[m->at++];
        m->ops++;
        if (m->op == '.') {
            break;
        }
        MUI_CHECK(do_opcode(m));
        if (m->at > m->limit) {
            return mui_machine_fail(m, MU_ERR_LIMIT, "the pickle is longer than the limit of %llu bytes",
                                    (unsigned long long)m->limit);
        }
    }
    MUI_CHECK(mui_machine_pop(m, &m->p->value));
    if (m->depth != 0 || m->mark_count != 0) {
        return mui_machine_fail(m, MU_ERR_FORMAT, "%zu values are left over", m->depth);
    }
    m->p->used = m->at;
    return MU_OK;
}

mu_status mui_pickle_read(mu_context *c, const char *path, const char *what, const unsigned char *data, size_t bytes,
                          mui_pickle *out)
{
    return mui_pickle_read_within(c, path, what, data, bytes, UINT64_MAX, out);
}

mu_status mui_pickle_read_within(mu_context *c, const char *path, const char *what, const unsigned char *data,
                                 size_t bytes, uint64_t limit, mui_pickle *out)
{
    uint64_t most = bytes < limit ? bytes : limit;
    mui_pickle p = {.context = c};
    mui_arena_init(&p.arena, c);
    p.arena.limit_bytes = most < SIZE_MAX / (2 * ARENA_PER_BYTE) ? (size_t)most * ARENA_PER_BYTE + 4096 : SIZE_MAX;
    mui_machine m = {.p = &p, .context = c, .path = path, .what = what, .data = data, .bytes = bytes,
                     .limit = limit};
    mu_status s = run(&m);
    mui_free(c, m.stack);
    mui_free(c, m.marks);
    mui_free(c, m.memo);
    if (s != MU_OK) {
        mui_pickle_free(&p);
        return s;
    }
    *out = p;
    return MU_OK;
}

void mui_pickle_free(mui_pickle *p)
{
    mui_arena_free(&p->arena);
    mui_free(p->context, p->persistent);
    mui_free(p->context, p->globals);
    *p = (mui_pickle){0};
}
