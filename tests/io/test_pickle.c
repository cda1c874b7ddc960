/* The pickle machine on hand-made pickles: values, refusals that name the place, and inputs that make recursive or
 * trusting readers fall over, in bounded time. */
#include "base/alloc.h"
#include "base/os.h"
#include "io/tree.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void quiet(void *user, mu_log_level level, const char *message)
{
    (void)user;
    (void)level;
    (void)message;
}

static mu_context *context(void)
{
    return mu_context_open(&(mu_context_options){.log = quiet});
}

#define READ(c, text, out) mui_pickle_read((c), "file", "data.pkl", (const unsigned char *)(text), sizeof(text) - 1, (out))

static void test_values(void **state)
{
    (void)state;
    mu_context *c = context();
    mui_pickle p;
    static const struct {
        const char *text;
        size_t bytes;
        int64_t value;
    } ints[] = {
        {"K\xff.", 3, 255},      {"M\x34\x12.", 4, 0x1234},       {"J\xff\xff\xff\xff.", 6, -1}, {"\x8a\x00.", 3, 0},
        {"\x8a\x01\x80.", 4, -128}, {"\x8a\x02\xff\x00.", 5, 255}, {"I-12\n.", 6, -12},           {"L123L\n.", 7, 123},
        {"\x8b\x02\x00\x00\x00\x00\x80.", 8, -32768},
    };
    for (size_t i = 0; i < sizeof(ints) / sizeof(ints[0]); i++) {
        assert_int_equal(mui_pickle_read(c, "f", "p", (const unsigned char *)ints[i].text, ints[i].bytes, &p), MU_OK);
        assert_int_equal(p.value->kind, MUI_INT);
        assert_int_equal(p.value->i, ints[i].value);
        assert_int_equal(p.used, ints[i].bytes);
        mui_pickle_free(&p);
    }
    assert_int_equal(READ(c, "G\x3f\xf8\0\0\0\0\0\0.", &p), MU_OK);
    assert_true(p.value->kind == MUI_FLOAT && p.value->f == 1.5);
    mui_pickle_free(&p);
    assert_int_equal(READ(c, "F1.25\n.", &p), MU_OK);
    assert_true(p.value->f == 1.25);
    mui_pickle_free(&p);
    assert_int_equal(READ(c, "I01\n.", &p), MU_OK);
    assert_true(p.value->kind == MUI_BOOL && p.value->truth);
    mui_pickle_free(&p);
    /* [1, (2, 3), {'a': None}, b'x'] with POP, DUP and memo in between */
    assert_int_equal(READ(c, "\x80\x04](K\x01K\x02K\x03\x86}\x8c\x01" "aNs\x94" "0h\x00" "C\x01x2" "0e.", &p), MU_OK);
    assert_int_equal(p.value->kind, MUI_LIST);
    assert_int_equal(p.value->seq.count, 4);
    assert_int_equal(p.value->seq.items[1]->seq.count, 2);
    assert_int_equal(p.value->seq.items[2]->kind, MUI_DICT);
    assert_true(mui_text_is(p.value->seq.items[2]->seq.items[0], "a"));
    assert_int_equal(p.value->seq.items[3]->kind, MUI_BYTES);
    mui_pickle_free(&p);
    /* an object: class, arguments, state, items; nothing is looked up, whatever its name */
    assert_int_equal(READ(c, "cos\nsystem\n(X\x02\0\0\0rmtR}X\x01\0\0\0kK\x07sb.", &p), MU_OK);
    assert_int_equal(p.value->kind, MUI_OBJECT);
    assert_true(mui_global_is(p.value->object->callable, "os", "system"));
    assert_true(mui_text_is(p.value->object->args->seq.items[0], "rm"));
    assert_int_equal(mui_dict_get(p.value->object->state, "k")->i, 7);
    assert_int_equal(p.global_count, 1);
    mui_pickle_free(&p);
    assert_int_equal(READ(c, "(ios\nsystem\n.", &p), MU_OK);
    assert_int_equal(p.value->kind, MUI_OBJECT);
    mui_pickle_free(&p);
    assert_int_equal(c->live_allocations, 0);
    mu_context_close(c);
}

static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        size_t bytes;
        const char *words;
    } rows[] = {
#define ROW(text, words) {text, sizeof(text) - 1, words}
        ROW("", "ends early"),
        ROW("N", "without STOP"),
        ROW(".", "byte 0, opcode STOP"),
        ROW("NN.", "left over"),
        ROW("(N.", "byte 2, opcode STOP"),
        ROW("0.", "opcode POP"),
        ROW("K", "opcode BININT1: 1 bytes should follow, but only 0"),
        ROW("X\xff\xff\xff\xff" "a.", "4294967295 bytes should follow"),
        ROW("\x8d\xff\xff\xff\xff\xff\xff\xff\xff" "a.", "18446744073709551615 bytes"),
        ROW("T\xff\xff\xff\xff" "a.", "negative length"),
        ROW("\x8b\xff\xff\xff\xff.", "negative length"),
        ROW("X\x02\0\0\0\xc3(.", "not UTF-8"),
        ROW("\x80\x06N.", "protocol 6"),
        ROW("\x95\xff\0\0\0\0\0\0\0N.", "a frame of 255 bytes"),
        ROW("h\x00.", "memo slot 0 was never filled"),
        ROW("j\xff\xff\xff\xff.", "memo slot 4294967295"),
        ROW("Nr\xff\xff\xff\xff.", "memo slot 4294967295 after only 2"),
        ROW("Np18446744073709551616\n.", "not a number"),
        ROW("q\x00N.", "empty"),
        ROW("(q\x00N.", "empty"),
        ROW("](N0q\x00.", "empty"),
        ROW("NNa.", "adds items to a None"),
        ROW("NNNs.", "sets items of a None"),
        ROW("}(Nu.", "without a value"),
        ROW("}(]Nu.", "a list as key"),
        ROW("}}Ns.", "a dict as key"),
        ROW("K\x01)R.", "calls a int"),
        ROW("ca\nb\nNR.", "the arguments are a None"),
        ROW("]Nb.", "gives state to a list"),
        ROW("K\x01K\x02\x93.", "not a module and a name"),
        ROW("Pabc\n.", "protocol 0"),
        ROW("\x82\x01.", "EXT1"),
        ROW("\x97.", "NEXT_BUFFER"),
        ROW("\xff.", "0xff is no pickle opcode"),
        ROW("ca\nb", "does not end"),
        ROW("Fabc\n.", "not a number"),
        ROW("I9x\n.", "is not an integer"),
        ROW("I\n.", "is not an integer"),
        ROW("Sabc\n.", "not quoted"),
        ROW("(o.", "no class"),
        ROW("e.", "needs a MARK"),
        ROW("(1" "1.", "needs a MARK"),
#undef ROW
    };
    mu_context *c = context();
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        mui_pickle p;
        mu_status s = mui_pickle_read(c, "file", "data.pkl", (const unsigned char *)rows[i].text, rows[i].bytes, &p);
        if (s == MU_OK || strstr(mu_context_message(c), rows[i].words) == NULL) {
            fail_msg("row %zu ('%s'): %s", i, rows[i].words, mu_context_message(c));
        }
        mu_context_clear(c);
        assert_int_equal(c->live_allocations, 0);
    }
    mu_context_close(c);
}

/* Reads a pickle and builds its tree; both must end, soon. */
static mu_status walk(mu_context *c, const unsigned char *data, size_t bytes, size_t *tensors, double *seconds)
{
    double start = mui_now();
    mui_pickle p;
    mui_tree t;
    mui_meaning w = {.context = c, .path = "file"};
    mu_status s = mui_pickle_read(c, "file", "data.pkl", data, bytes, &p);
    if (s == MU_OK) {
        s = mui_tree_build(&w, p.value, bytes, &t);
        if (s == MU_OK) {
            *tensors = t.count;
            mui_tree_free(&t);
        }
        mui_pickle_free(&p);
    }
    *seconds = mui_now() - start;
    return s;
}

static void repeat(unsigned char *data, size_t *n, const char *piece, size_t piece_bytes, size_t times)
{
    for (size_t i = 0; i < times; i++, *n += piece_bytes) {
        memcpy(data + *n, piece, piece_bytes);
    }
}

static void test_shapes_of_hostility(void **state)
{
    (void)state;
    unsigned char *data = malloc((size_t)16 << 20);
    size_t n = 0, tensors = 0;
    double seconds = 0;
    mu_context *c = context();
    assert_non_null(data);
    /* 200 000 lists inside each other */
    repeat(data, &n, "]", 1, 200000);
    repeat(data, &n, "a", 1, 199999);
    repeat(data, &n, ".", 1, 1);
    assert_int_equal(walk(c, data, n, &tensors, &seconds), MU_OK);
    assert_true(tensors == 0 && seconds < 10);
    /* 2 000 000 tuples inside each other */
    n = 0;
    repeat(data, &n, ")", 1, 1);
    repeat(data, &n, "\x85", 1, 2000000);
    repeat(data, &n, ".", 1, 1);
    assert_int_equal(walk(c, data, n, &tensors, &seconds), MU_OK);
    assert_true(seconds < 20);
    /* a list that holds itself */
    static const char cycle[] = "]q\0h\0a.";
    assert_int_equal(walk(c, (const unsigned char *)cycle, sizeof(cycle) - 1, &tensors, &seconds), MU_OK);
    /* 2^60 leaves without tensors: each of 60 tuples holds the one before twice */
    n = 0;
    repeat(data, &n, ")", 1, 1);
    repeat(data, &n, "2\x86", 2, 60);
    repeat(data, &n, ".", 1, 1);
    assert_int_equal(walk(c, data, n, &tensors, &seconds), MU_OK);
    assert_true(seconds < 1);
    /* the same around a tensor: it has 2^60 names, which is refused */
    static const char meta[] = "ctorch._utils\n_rebuild_meta_tensor_no_storage\n(ctorch\nfloat32\n))\x89tR";
    n = 0;
    repeat(data, &n, meta, sizeof(meta) - 1, 1);
    repeat(data, &n, "2\x86", 2, 60);
    repeat(data, &n, ".", 1, 1);
    assert_int_equal(walk(c, data, n, &tensors, &seconds), MU_ERR_LIMIT);
    mu_context_clear(c);
    assert_true(seconds < 1);
    n = 0;
    repeat(data, &n, meta, sizeof(meta) - 1, 1);
    repeat(data, &n, "2\x86", 2, 10);
    repeat(data, &n, ".", 1, 1);
    assert_int_equal(walk(c, data, n, &tensors, &seconds), MU_OK);
    assert_int_equal(tensors, 1024);
    /* one large dict as the state of very many objects: its size must not be paid each time */
    n = 0;
    repeat(data, &n, "}q\0(", 4, 1);
    repeat(data, &n, "K\x01N", 3, 100000);
    repeat(data, &n, "u0ca\nb\nq\1" "0](", 12, 1);
    repeat(data, &n, "h\1)Rh\0b", 7, 100000);
    repeat(data, &n, "e.", 2, 1);
    mu_status s = walk(c, data, n, &tensors, &seconds);
    assert_true(s == MU_ERR_LIMIT && seconds < 10);
    free(data);
    mu_context_clear(c);
    assert_int_equal(c->live_allocations, 0);
    mu_context_close(c);
}

/* Random bytes that look like pickles: whatever happens, no crash, no leak, an error that is raised. */
static void test_noise(void **state)
{
    (void)state;
    static const char ops[] = "(.012FIJKLMNPQRSTUVXabcdeghijlopqrstu)]}G\x80\x81\x85\x86\x87\x88\x89\x8a\x8c\x8f\x90\x91"
                              "\x93\x94\x95";
    mu_context *c = context();
    unsigned seed = 12345;
    for (int round = 0; round < 20000; round++) {
        unsigned char data[64];
        size_t n = 1 + seed % 63;
        for (size_t i = 0; i < n; i++) {
            seed = seed * 1103515245u + 12345u;
            unsigned r = seed >> 16;
            data[i] = r % 3 == 0 ? (unsigned char)(r >> 4 & 3) : (unsigned char)ops[(r >> 2) % (sizeof(ops) - 1)];
        }
        size_t tensors = 0;
        double seconds = 0;
        mui_pickle p;
        mu_status s = mui_pickle_read(c, "file", "noise", data, n, &p);
        if (s == MU_OK && p.persistent_count == 0) {
            mui_pickle_free(&p);
            s = walk(c, data, n, &tensors, &seconds);
        } else if (s == MU_OK) {
            mui_pickle_free(&p);
        }
        assert_true(s == MU_OK || mu_context_status(c) != MU_OK);
        mu_context_clear(c);
        assert_int_equal(c->live_allocations, 0);
    }
    mu_context_close(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_shapes_of_hostility),
        cmocka_unit_test(test_noise),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
