/* The limits' defaults, in one place. */
#include "io/limits.h"
#include "base/os.h"

mui_limits mui_limits_default(void)
{
    return (mui_limits){.pickle_bytes = (uint64_t)512 << 20,
                        .members = 1000000,
                        .header_bytes = 100000000,
                        .tensor_bytes = mui_ram_bytes(),
                        .inflate_ratio = 100};
}

size_t mui_limits_texts(size_t pickle_bytes)
{
    size_t most = (size_t)1 << 29;
    return ((size_t)64 << 20) + (pickle_bytes < most ? pickle_bytes : most) * 512;
}

mu_status mui_limits_read(mu_context *c, const mu_checkpoint_options *o, mui_limits *out)
{
    static const mu_checkpoint_options none = {0};
    mui_limits l = mui_limits_default();
    o = o != NULL ? o : &none;
    const struct {
        const char *name;
        int64_t given;
        uint64_t *target;
    } rows[] = {{"max_pickle_bytes", o->max_pickle_bytes, &l.pickle_bytes},
                {"max_members", o->max_members, &l.members},
                {"max_header_bytes", o->max_header_bytes, &l.header_bytes},
                {"max_tensor_bytes", o->max_tensor_bytes, &l.tensor_bytes},
                {"max_inflate_ratio", o->max_inflate_ratio, &l.inflate_ratio}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (rows[i].given < 0) {
            return mui_fail(c, MU_ERR_ARG, "mu_checkpoint_options: %s is %lld; 0 (the default) or more was expected",
                            rows[i].name, (long long)rows[i].given);
        }
        if (rows[i].given > 0) {
            *rows[i].target = (uint64_t)rows[i].given;
        }
    }
    l.no_checksum = o->no_checksum;
    l.big_endian = o->big_endian;
    *out = l;
    return MU_OK;
}
