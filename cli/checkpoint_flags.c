/* Reads the flags that say how a checkpoint is opened. */
#include "checkpoint_flags.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static bool read_number(const char *s, int64_t *out)
{
    static const char suffixes[] = "KMGT";
    char *end = NULL;
    errno = 0;
    long long n = strtoll(s, &end, 10);
    if (s[0] < '0' || s[0] > '9' || errno != 0 || n <= 0) {
        return false;
    }
    const char *suffix = *end != '\0' ? strchr(suffixes, *end) : NULL;
    int64_t unit = suffix != NULL ? (int64_t)1 << (10 * (suffix - suffixes + 1)) : 1;
    int64_t value = 0;
    if (end[suffix != NULL] != '\0' || __builtin_mul_overflow((int64_t)n, unit, &value)) {
        return false;
    }
    *out = value;
    return true;
}

const char *checkpoint_limit_set(mu_checkpoint_options *o, const char *text)
{
    const struct {
        const char *name;
        int64_t *target;
    } rows[] = {{"pickle", &o->max_pickle_bytes},
                {"members", &o->max_members},
                {"header", &o->max_header_bytes},
                {"tensor", &o->max_tensor_bytes},
                {"ratio", &o->max_inflate_ratio}};
    const char *equals = strchr(text, '=');
    size_t n = equals != NULL ? (size_t)(equals - text) : 0;
    for (size_t i = 0; n > 0 && i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (strlen(rows[i].name) == n && strncmp(rows[i].name, text, n) == 0) {
            return read_number(equals + 1, rows[i].target)
                       ? NULL
                       : "a number above 0 was expected after '=', it may end in K, M, G or T";
        }
    }
    return "pickle=, members=, header=, tensor= or ratio= was expected";
}
