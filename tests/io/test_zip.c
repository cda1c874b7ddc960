/* The zip reader and writer: round trips, zip64, and that no single damaged byte goes unnoticed or crashes. */
#include "base/alloc.h"
#include "io/bytes.h"
#include "io/filemap.h"
#include "io/zip_reader.h"
#include "io/zip_writer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>

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

static const char *const names[] = {"r/data.pkl", "r/data/0", "r/data/1", "r/version"};
static const size_t sizes[] = {100, 5000, 0, 2};

static char content(size_t member, size_t i)
{
    return (char)(member * 31 + i * 7 + (i >> 8));
}

static void write_zip(mu_context *c, const char *path, uint64_t wide_from)
{
    mui_outfile f;
    mui_zip_writer z;
    assert_int_equal(mui_outfile_open(c, path, &f), MU_OK);
    mui_zip_writer_init(&z, &f);
    z.wide_from = wide_from;
    for (size_t m = 0; m < 4; m++) {
        mui_zip_begin(&z, names[m], sizes[m]);
        for (size_t i = 0; i < sizes[m]; i++) {
            char b = content(m, i);
            mui_zip_add(&z, &b, 1);
        }
        mui_zip_end(&z);
    }
    assert_int_equal(mui_zip_finish(&z), MU_OK);
    assert_int_equal(mui_outfile_commit(&f), MU_OK);
}

static bool members_equal(mui_zip *z)
{
    for (size_t m = 0; m < 4; m++) {
        mui_zip_member *found = mui_zip_find(z, names[m]);
        const unsigned char *data = NULL;
        void *owned = NULL;
        if (found == NULL || found->bytes != sizes[m] || mui_zip_read(z, found, &data, &owned) != MU_OK) {
            return false;
        }
        for (size_t i = 0; i < sizes[m]; i++) {
            if ((char)data[i] != content(m, i)) {
                return false;
            }
        }
        mui_free(z->context, owned);
    }
    return true;
}

/* What other implementations say of the archive: Info-ZIP's test of all data, libzip's consistency check (which also
 * compares local headers with the directory) and Python's. A judge that is not installed says nothing. */
static void judge(const char *path, long members)
{
    char command[600];
    snprintf(command, sizeof(command), "command -v unzip >/dev/null || exit 0; unzip -tqq %s", path);
    assert_int_equal(system(command), 0);
    snprintf(command, sizeof(command),
             "command -v ziptool >/dev/null || exit 0; [ \"$(ziptool -c %s get_num_entries 0)\" = \""
             "%ld entries in archive\" ] && ziptool -c %s cat %ld cat 0 >/dev/null",
             path, members, path, members - 1);
    assert_int_equal(system(command), 0);
    snprintf(command, sizeof(command),
             "/usr/bin/python3 -c \"import zipfile; z = zipfile.ZipFile('%s'); "
             "assert z.testzip() is None and len(z.namelist()) == %ld\"",
             path, members);
    assert_int_equal(system(command), 0);
}

/* With a low limit every size and offset takes the zip64 form, as real files do from 4 GiB on. */
static void test_round_trip(void **state)
{
    static const uint64_t limits[] = {UINT32_MAX, 4000, 200, 0};
    (void)state;
    for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
        mu_context *c = context();
        mui_filemap map;
        mui_zip z;
        write_zip(c, "round.zip", limits[i]);
        assert_int_equal(mui_filemap_open(c, "round.zip", &map), MU_OK);
        assert_int_equal(mui_zip_open(c, "round.zip", map.data, map.bytes, NULL, &z), MU_OK);
        assert_int_equal(z.count, 4);
        assert_int_equal(z.trailing, 0);
        assert_true(members_equal(&z));
        for (size_t m = 0; m < z.count; m++) {
            assert_int_equal(z.members[m].offset % 64, 0);
        }
        assert_null(mui_zip_find(&z, "r/data/2"));
        mui_zip_close(&z);
        mui_filemap_close(&map);
        assert_int_equal(c->live_allocations, 0);
        mu_context_close(c);
        judge("round.zip", 4);
    }
    unlink("round.zip");
}

/* More members than the ordinary end record can count. */
static void test_many_members(void **state)
{
    enum { MANY = 65536 + 7 };
    (void)state;
    mu_context *c = context();
    mui_outfile f;
    mui_zip_writer w;
    mui_filemap map;
    mui_zip z;
    char name[40];
    assert_int_equal(mui_outfile_open(c, "many.zip", &f), MU_OK);
    mui_zip_writer_init(&w, &f);
    for (int i = 0; i < MANY; i++) {
        snprintf(name, sizeof(name), "r/data/%d", i);
        mui_zip_member_write(&w, name, &i, i % 3 == 0 ? 0 : sizeof(i));
    }
    assert_int_equal(mui_zip_finish(&w), MU_OK);
    assert_int_equal(mui_outfile_commit(&f), MU_OK);
    judge("many.zip", MANY);
    assert_int_equal(mui_filemap_open(c, "many.zip", &map), MU_OK);
    assert_int_equal(mui_zip_open(c, "many.zip", map.data, map.bytes, NULL, &z), MU_OK);
    assert_int_equal(z.count, MANY);
    mui_zip_close(&z);
    mui_filemap_close(&map);
    unlink("many.zip");
    assert_int_equal(c->live_allocations, 0);
    mu_context_close(c);
}

/* Any one byte changed: an error, or the same contents (times, versions and padding mean nothing). */
static void test_every_byte(void **state)
{
    (void)state;
    mu_context *c = context();
    mui_filemap map;
    write_zip(c, "bytes.zip", 200);
    assert_int_equal(mui_filemap_open(c, "bytes.zip", &map), MU_OK);
    unsigned char *copy = malloc(map.bytes);
    assert_non_null(copy);
    size_t caught = 0;
    for (size_t i = 0; i < map.bytes; i++) {
        static const unsigned char flips[] = {0x01, 0x80, 0xff};
        for (size_t k = 0; k < sizeof(flips); k++) {
            mui_zip z;
            memcpy(copy, map.data, map.bytes);
            copy[i] ^= flips[k];
            if (mui_zip_open(c, "bytes.zip", copy, map.bytes, NULL, &z) != MU_OK) {
                caught++;
            } else {
                bool equal = members_equal(&z);
                bool failed = mu_context_status(c) != MU_OK;
                bool renamed = mui_zip_find(&z, names[0]) == NULL || mui_zip_find(&z, names[1]) == NULL ||
                               mui_zip_find(&z, names[2]) == NULL || mui_zip_find(&z, names[3]) == NULL;
                assert_true(equal || failed || renamed);
                caught += failed;
                mui_zip_close(&z);
            }
            mu_context_clear(c);
        }
    }
    assert_true(caught > 3 * 5000); /* the data alone */
    for (size_t n = 0; n < map.bytes; n++) {
        mui_zip z;
        assert_int_not_equal(mui_zip_open(c, "bytes.zip", map.data, n, NULL, &z), MU_OK);
        mu_context_clear(c);
    }
    free(copy);
    mui_filemap_close(&map);
    unlink("bytes.zip");
    assert_int_equal(c->live_allocations, 0);
    mu_context_close(c);
}

static void expect_refused(mu_context *c, const unsigned char *data, size_t bytes, const char *words)
{
    mui_zip z;
    assert_int_not_equal(mui_zip_open(c, "z", data, bytes, NULL, &z), MU_OK);
    if (strstr(mu_context_message(c), words) == NULL) {
        fail_msg("'%s' is not in: %s", words, mu_context_message(c));
    }
    mu_context_clear(c);
}

/* Entry i of the central directory. */
static unsigned char *entry(unsigned char *data, size_t bytes, int i)
{
    unsigned char *p = data + mui_le32(data + bytes - 6);
    while (i-- > 0) {
        p += 46 + mui_le16(p + 28) + mui_le16(p + 30) + mui_le16(p + 32);
    }
    return p;
}

static void test_lies(void **state)
{
    (void)state;
    mu_context *c = context();
    char *data = NULL;
    size_t bytes = 0;
    write_zip(c, "lies.zip", UINT32_MAX);
    for (int lie = 0; lie < 8; lie++) {
        static const char *const words[] = {"encrypted", "masked", "overlap", "no member begins", "stored", "another name",
                                            "absolute", "'..'"};
        mui_filemap map;
        assert_int_equal(mui_filemap_open(c, "lies.zip", &map), MU_OK);
        bytes = map.bytes;
        data = malloc(bytes);
        memcpy(data, map.data, bytes);
        mui_filemap_close(&map);
        unsigned char *d = (unsigned char *)data, *e = entry(d, bytes, 1);
        switch (lie) {
        case 0: e[8] |= 1; break;
        case 1: e[9] |= 0x20; break;
        case 2: /* the second member lies inside the first */
            mui_put_le32(e + 20, 5100);
            mui_put_le32(e + 24, 5100);
            break;
        case 3: mui_put_le32(e + 42, mui_le32(e + 42) + 1); break;
        case 4: mui_put_le32(e + 24, 4999); break;
        case 5: e[46 + 7] = '9'; break;
        case 6: e[46] = '/'; break;
        case 7: memcpy(e + 46, "../a", 4); break;
        }
        expect_refused(c, d, bytes, words[lie]);
        free(data);
    }
    unlink("lies.zip");
    mu_context_close(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_many_members),
        cmocka_unit_test(test_every_byte),
        cmocka_unit_test(test_lies),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
