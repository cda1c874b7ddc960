/* Renaming by regular expressions, as sed's s/FROM/TO/g. */
#include "io/rename.h"
#include "base/alloc.h"
#include "io/tree.h"

#include <regex.h>
#include <stdlib.h>
#include <string.h>

#define GROUPS 10

typedef struct rule {
    const char *text; /* as given */
    char *from;
    const char *to;
    regex_t regex;
    bool compiled, used;
} rule;

struct mui_renames {
    mu_context *context;
    rule *rules;
    size_t count;
};

/* FROM of "FROM=TO" with \= made =, and where TO begins; NULL when there is no =. */
static char *split(mu_context *c, const char *text, const char **to)
{
    char *from = mui_strdup(c, text);
    size_t n = 0;
    for (const char *p = text; from != NULL && *p != '\0'; p++) {
        if (*p == '=') {
            from[n] = '\0';
            *to = p + 1;
            return from;
        }
        if (*p == '\\' && p[1] != '\0') {
            if (p[1] != '=') {
                from[n++] = *p;
            }
            p++;
        }
        from[n++] = *p;
    }
    if (from != NULL) {
        mui_fail(c, MU_ERR_ARG, "rename '%s': FROM=TO was expected", text);
    }
    mui_free(c, from);
    return NULL;
}

static mu_status check_to(mu_context *c, const rule *r)
{
    for (const char *p = r->to; *p != '\0'; p++) {
        if (*p != '\\') {
            continue;
        }
        p++;
        if (*p != '\\' && (*p < '0' || *p > '9')) {
            return mui_fail(c, MU_ERR_ARG, "rename '%s': after a backslash TO may have a digit or a backslash only",
                            r->text);
        }
        if (*p >= '0' && *p <= '9' && (size_t)(*p - '0') > r->regex.re_nsub) {
            return mui_fail(c, MU_ERR_ARG, "rename '%s': TO has \\%c, FROM has %zu groups", r->text, *p,
                            r->regex.re_nsub);
        }
    }
    return MU_OK;
}

static mu_status compile(mu_context *c, const char *text, rule *r)
{
    r->text = text;
    r->from = split(c, text, &r->to);
    if (r->from == NULL) {
        return mu_context_status(c);
    }
    if (r->from[0] == '\0') {
        return mui_fail(c, MU_ERR_ARG, "rename '%s': FROM is empty", text);
    }
    int code = regcomp(&r->regex, r->from, REG_EXTENDED);
    if (code != 0) {
        char why[200];
        regerror(code, &r->regex, why, sizeof(why));
        return mui_fail(c, code == REG_ESPACE ? MU_ERR_NOMEM : MU_ERR_ARG, "rename '%s': '%s' is no regular expression: %s",
                        text, r->from, why);
    }
    r->compiled = true;
    return check_to(c, r);
}

mu_status mui_renames_open(mu_context *c, const char *const *rules, mui_renames **out)
{
    size_t n = 0;
    *out = NULL;
    while (rules != NULL && rules[n] != NULL) {
        n++;
    }
    if (n == 0) {
        return MU_OK;
    }
    mui_renames *r = mui_calloc(c, 1, sizeof(*r));
    if (r == NULL) {
        return MU_ERR_NOMEM;
    }
    r->context = c;
    r->rules = mui_calloc(c, n, sizeof(*r->rules));
    mu_status s = r->rules != NULL ? MU_OK : MU_ERR_NOMEM;
    while (s == MU_OK && r->count < n) {
        r->count++; /* also what failed half way is closed */
        s = compile(c, rules[r->count - 1], &r->rules[r->count - 1]);
    }
    if (s != MU_OK) {
        mui_renames_close(r);
        return s;
    }
    *out = r;
    return MU_OK;
}

void mui_renames_close(mui_renames *r)
{
    if (r == NULL) {
        return;
    }
    for (size_t i = 0; i < r->count; i++) {
        if (r->rules[i].compiled) {
            regfree(&r->rules[i].regex);
        }
        mui_free(r->context, r->rules[i].from);
    }
    mui_free(r->context, r->rules);
    mui_free(r->context, r);
}

typedef struct output {
    char text[MUI_MAX_NAME_BYTES + 1];
    size_t n;
    bool fits;
} output;

static void put(output *o, const char *data, size_t bytes)
{
    if (bytes > MUI_MAX_NAME_BYTES - o->n) {
        o->fits = false;
        return;
    }
    memcpy(o->text + o->n, data, bytes);
    o->n += bytes;
}

static void put_to(output *o, const char *to, const char *from, const regmatch_t *groups)
{
    for (const char *p = to; *p != '\0'; p++) {
        if (*p == '\\' && p[1] != '\\') {
            const regmatch_t *g = &groups[*++p - '0'];
            if (g->rm_so >= 0) {
                put(o, from + g->rm_so, (size_t)(g->rm_eo - g->rm_so));
            }
            continue;
        }
        p += *p == '\\';
        put(o, p, 1);
    }
}

/* Every match in name replaced; false when there was none. An empty match right behind another match is none. */
static bool replace(const rule *r, const char *name, output *o)
{
    regmatch_t groups[GROUPS];
    const char *p = name, *last_end = NULL;
    bool any = false;
    o->n = 0;
    o->fits = true;
    while (o->fits && regexec(&r->regex, p, GROUPS, groups, p == name ? 0 : REG_NOTBOL) == 0) {
        const char *start = p + groups[0].rm_so, *end = p + groups[0].rm_eo;
        put(o, p, (size_t)(start - p));
        if (start != end || start != last_end) {
            put_to(o, r->to, p, groups);
            any = true;
        }
        last_end = end;
        if (start == end) {
            if (*end == '\0') {
                p = end;
                break;
            }
            put(o, end, 1);
            end++;
        }
        p = end;
    }
    put(o, p, strlen(p));
    o->text[o->n] = '\0';
    return any;
}

mu_status mui_renames_apply(mui_renames *r, const char *what, const char *name, mui_arena *arena, const char **out)
{
    output buffers[2];
    const char *now = name;
    for (size_t i = 0; r != NULL && i < r->count; i++) {
        output *o = &buffers[now == buffers[0].text];
        if (!replace(&r->rules[i], now, o)) {
            continue;
        }
        r->rules[i].used = true;
        if (!o->fits) {
            return mui_fail(r->context, MU_ERR_LIMIT, "%s: rename '%s' makes '%.200s' longer than %d bytes", what,
                            r->rules[i].text, now, MUI_MAX_NAME_BYTES);
        }
        now = o->text;
    }
    if (now != name) {
        now = mui_arena_strdup(arena, now);
    }
    if (now == NULL) {
        return MU_ERR_NOMEM;
    }
    *out = now;
    return MU_OK;
}

static int by_text(const void *a, const void *b)
{
    const char *const *x = *(const char *const *const *)a, *const *y = *(const char *const *const *)b;
    int order = strcmp(*x, *y);
    return order != 0 ? order : (x > y) - (x < y);
}

/* Names that were two before and are one now. What was given twice is no matter of renaming. */
static mu_status check_distinct(mu_context *c, const char *what, const char *const *names, const char **out, size_t n)
{
    const char ***sorted = mui_calloc(c, n, sizeof(*sorted));
    mu_status s = sorted != NULL ? MU_OK : MU_ERR_NOMEM;
    size_t count = 0;
    for (size_t i = 0; s == MU_OK && i < n; i++) {
        if (out[i] != NULL) {
            sorted[count++] = &out[i];
        }
    }
    if (count > 0) {
        qsort(sorted, count, sizeof(*sorted), by_text);
    }
    for (size_t i = 1; s == MU_OK && i < count; i++) {
        const char *a = names[sorted[i - 1] - out], *b = names[sorted[i] - out];
        if (strcmp(*sorted[i - 1], *sorted[i]) == 0 && strcmp(a, b) != 0) {
            s = mui_fail(c, MU_ERR_FORMAT, "%s: renaming makes both '%s' and '%s' into '%s'", what, a, b, *sorted[i]);
        }
    }
    mui_free(c, sorted);
    return s;
}

mu_status mui_renames_apply_all(mui_renames *r, const char *what, const char *const *names, size_t n, mui_arena *arena,
                                const char **out)
{
    mu_status s = MU_OK;
    for (size_t i = 0; i < n && s == MU_OK; i++) {
        out[i] = names[i];
        if (names[i] != NULL) {
            s = mui_renames_apply(r, what, names[i], arena, &out[i]);
        }
    }
    return s == MU_OK && r != NULL ? check_distinct(r->context, what, names, out, n) : s;
}

void mui_renames_restart(mui_renames *r)
{
    for (size_t i = 0; r != NULL && i < r->count; i++) {
        r->rules[i].used = false;
    }
}

void mui_renames_warn_unused(const mui_renames *r, const char *what)
{
    for (size_t i = 0; r != NULL && i < r->count; i++) {
        if (!r->rules[i].used) {
            mui_log(r->context, MU_LOG_WARN, "%s: rename '%s' matched no name", what, r->rules[i].text);
        }
    }
}
