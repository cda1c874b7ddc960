/* Rules that rename: against sed, which has the same rules for matching and replacing, and what is refused. */
#include "base/context.h"
#include "io/rename.h"
#include "io/tree.h"
#include <muster/muster.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static char last_warning[512];

static void keep_warning(void *user, mu_log_level level, const char *message)
{
    (void)user;
    if (level == MU_LOG_WARN) {
        snprintf(last_warning, sizeof(last_warning), "%s", message);
    }
}

static mu_context *context(void)
{
    last_warning[0] = '\0';
    return mu_context_open(&(mu_context_options){.log = keep_warning});
}

static void test_against_sed(void **state)
{
    (void)state;
    static const char *const rules[] = {"gamma$=weight", "norm\\.([12])=norm\\1", "^=model.", "$=.x", "x*=-", "(a|b)(c)?=<\\2\\1>",
                                        "[0-9]+=n", "^module\\.=", "\\.=&", "l(.)\\1=L\\0\\\\"};
    static const char *const names[] = {"bert.gamma", "denselayer1.norm.1.weight", "module.module.fc", "abcac.bx", "x", "xx.y.xx",
                                        "features.denseblock1.denselayer12.norm.2.running_mean", "l.module.allll", "", "lxx"};
    mu_context *c = context();
    for (size_t i = 0; i < sizeof(rules) / sizeof(rules[0]); i++) {
        mui_renames *r = NULL;
        mui_arena arena;
        mui_arena_init(&arena, c);
        assert_int_equal(mui_renames_open(c, (const char *const[]){rules[i], NULL}, &r), MU_OK);
        for (size_t j = 0; j < sizeof(names) / sizeof(names[0]); j++) {
            char command[1024], sed[512] = "";
            const char *equals = strchr(rules[i], '='), *mine = NULL;
            /* sed's & is \& here, and its \0 is GNU's */
            snprintf(command, sizeof(command), "printf '%%s\\n' '%s' | sed -E 's/%.*s/%s/g'", names[j],
                     (int)(equals - rules[i]), rules[i], equals[1] == '&' ? "\\&" : equals + 1);
            FILE *p = popen(command, "r");
            assert_non_null(p);
            assert_non_null(fgets(sed, sizeof(sed), p));
            pclose(p);
            sed[strcspn(sed, "\n")] = '\0';
            assert_int_equal(mui_renames_apply(r, "f", names[j], &arena, &mine), MU_OK);
            if (strcmp(mine, sed) != 0) {
                fail_msg("%s on %s: %s, sed has %s", rules[i], names[j], mine, sed);
            }
        }
        mui_renames_close(r);
        mui_arena_free(&arena);
    }
    mu_context_close(c);
}

static void test_refused(void **state)
{
    (void)state;
    static const struct {
        const char *rule, *word;
    } rows[] = {{"nothing", "FROM=TO was expected"},
                {"=x", "FROM is empty"},
                {"a(b=c", "'a(b' is no regular expression: "},
                {"a[b=c", "'a[b' is no regular expression: "},
                {"a=\\1", "TO has \\1, FROM has 0 groups"},
                {"(a)=\\2", "TO has \\2, FROM has 1 groups"},
                {"a=\\n", "after a backslash"},
                {"a=b\\", "after a backslash"},
                {"a\\=b", "FROM=TO was expected"}};
    mu_context *c = context();
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        mui_renames *r = NULL;
        assert_int_equal(mui_renames_open(c, (const char *const[]){"ok=ok", rows[i].rule, NULL}, &r), MU_ERR_ARG);
        assert_null(r);
        assert_non_null(strstr(mu_context_message(c), rows[i].word));
        assert_non_null(strstr(mu_context_message(c), rows[i].rule));
        mu_context_clear(c);
    }
    mu_context_close(c);
}

static void test_order_and_collisions(void **state)
{
    (void)state;
    mu_context *c = context();
    mui_renames *r = NULL;
    mui_arena arena;
    const char *out[3] = {0};
    mui_arena_init(&arena, c);
    /* in order; \= is a = */
    assert_int_equal(mui_renames_open(c, (const char *const[]){"z=y", "a=b", "b=c", "c\\=d=e=f", NULL}, &r), MU_OK);
    assert_int_equal(mui_renames_apply_all(r, "f", (const char *const[]){"a", NULL, "a=d"}, 3, &arena, out), MU_OK);
    assert_string_equal(out[0], "c");
    assert_null(out[1]);
    assert_string_equal(out[2], "e=f");
    mui_renames_warn_unused(r, "f.pt");
    assert_string_equal(last_warning, "f.pt: rename 'z=y' matched no name");
    assert_int_equal(mui_renames_apply_all(r, "f.pt", (const char *const[]){"b.w", "q", "a.w"}, 3, &arena, out),
                     MU_ERR_FORMAT);
    assert_string_equal(mu_context_message(c), "f.pt: renaming makes both 'b.w' and 'a.w' into 'c.w'");
    mu_context_clear(c);
    /* the same name twice is not renaming's fault */
    assert_int_equal(mui_renames_apply_all(r, "f.pt", (const char *const[]){"b.w", "q", "b.w"}, 3, &arena, out), MU_OK);
    mui_renames_close(r);
    /* too long */
    char to[3000];
    memset(to, 'x', sizeof(to) - 1);
    to[0] = 'a';
    to[1] = '=';
    to[sizeof(to) - 1] = '\0';
    assert_int_equal(mui_renames_open(c, (const char *const[]){to, NULL}, &r), MU_OK);
    assert_int_equal(mui_renames_apply(r, "f.pt", "a", &arena, out), MU_OK);
    assert_int_equal(strlen(out[0]), 2997);
    assert_int_equal(mui_renames_apply(r, "f.pt", "aa", &arena, out), MU_ERR_LIMIT);
    mu_context_clear(c);
    mui_renames_close(r);
    /* no rules */
    assert_int_equal(mui_renames_open(c, NULL, &r), MU_OK);
    assert_null(r);
    assert_int_equal(mui_renames_apply(r, "f", "a", &arena, out), MU_OK);
    assert_string_equal(out[0], "a");
    mui_renames_close(r);
    mui_arena_free(&arena);
    mu_context_close(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_against_sed), cmocka_unit_test(test_refused),
                                       cmocka_unit_test(test_order_and_collisions)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
