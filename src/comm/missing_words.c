/* Words about ranks that a call waits for. */
#include "comm/missing_words.h"
#include "comm/naming.h"

#include <stdio.h>

#define WHO_BYTES (3 * MUI_BOARD_BYTES + MUI_LACK_BYTES + 200)
#define MOST_NAMED 2

static bool is_missing(const mui_missing *m, int rank)
{
    return rank != m->group->rank && m->lacks(m->group, m->call, rank);
}

static int count_missing(const mui_missing *m)
{
    int count = 0;
    for (int r = 0; r < m->group->size; r++) {
        count += is_missing(m, r);
    }
    return count;
}

void mui_missing_lack(const mui_missing *m, int rank, mui_lack why, char *out, size_t size)
{
    char lack[MUI_LACK_BYTES] = "";
    const mu_group *g = m->group;
    if (g->lack != NULL) {
        g->lack(g->lack_user, rank, m->calls(g, rank), why, lack, sizeof(lack));
    }
    snprintf(out, size, "%s%s", lack[0] != '\0' ? "; " : "", lack);
}

int mui_missing_describe(const mui_missing *m, mui_lack why, char *out, size_t size)
{
    size_t used = 0;
    int count = count_missing(m), named = 0;
    out[0] = '\0';
    for (int r = 0; r < m->group->size && named < MOST_NAMED; r++) {
        if (!is_missing(m, r)) {
            continue;
        }
        char who[WHO_BYTES], lack[MUI_LACK_BYTES + 4];
        m->name(m->group, r, who, sizeof(who));
        mui_missing_lack(m, r, why, lack, sizeof(lack));
        mui_join(out, size, &used, ", and ", who);
        mui_join(out, size, &used, "", lack);
        named++;
    }
    if (count > named) {
        char text[48];
        snprintf(text, sizeof(text), ", and %d more", count - named);
        mui_join(out, size, &used, "", text);
    }
    return count;
}

int mui_missing_list(const mui_missing *m, char *out, size_t size)
{
    size_t used = 0;
    int count = count_missing(m);
    char one[16];
    out[0] = '\0';
    mui_join(out, size, &used, "", count > 1 ? "ranks" : "rank");
    for (int r = 0, k = 0; r < m->group->size; r++) {
        if (is_missing(m, r)) {
            snprintf(one, sizeof(one), "%s%d", k++ > 0 ? ", " : " ", r);
            mui_join(out, size, &used, "", one);
        }
    }
    return count;
}
