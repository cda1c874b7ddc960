/* What a rank has not delivered, for warnings and errors about it: follows from how many collectives it has started,
 * since buckets go out in one order on all ranks. */
#include "ddp/reducer_state.h"

#include <stdio.h>
#include <string.h>

void mui_reducer_lack(void *user, int rank, uint64_t calls, mui_lack why, char *out, size_t size)
{
    const mui_reducer *r = user;
    int64_t k = 0, named = 0;
    (void)rank;
    /* Buckets that this rank has not launched yet will come right after what it has started. */
    while (k < r->bucket_count &&
           calls > (k < r->launched ? r->numbers[k] : r->group->calls + (uint64_t)(k - r->launched))) {
        k++;
    }
    out[0] = '\0';
    if (r->failed != MU_OK) {
        return;
    }
    if (k == r->bucket_count) {
        if (why != MUI_LACK_LEFT && r->hook == NULL) {
            snprintf(out, size,
                     "it %s delivered all %lld parameters of reduction %llu, but not done its part in adding them "
                     "up",
                     why == MUI_LACK_LATE ? "has" : "had", (long long)r->count, (unsigned long long)r->sequence);
        }
        return;
    }
    if (why == MUI_LACK_LEFT) {
        snprintf(out, size, "a rank that has no batch left takes part in a reduction with loss NULL");
        return;
    }
    int64_t first = r->buckets[k].first, missing = r->count - first;
    int n = snprintf(out, size,
                     "it %s delivered %lld of %lld buckets of reduction %llu; %lld of %lld parameters are missing:",
                     why == MUI_LACK_LATE ? "has" : "had", (long long)k, (long long)r->bucket_count,
                     (unsigned long long)r->sequence, (long long)missing, (long long)r->count);
    size_t used = n > 0 ? (size_t)n : 0;
    enum { MOST = 5, TAIL = 32 };
    for (int64_t i = first; i < r->count && named < MOST; i++, named++) {
        size_t length = strlen(r->slices[i].name);
        if (used + length + TAIL > size) {
            break;
        }
        used += (size_t)snprintf(out + used, size - used, "%s %s", named > 0 ? "," : "", r->slices[i].name);
    }
    if (named < missing && used + TAIL <= size) {
        snprintf(out + used, size - used, "%s%lld more", named > 0 ? " and " : " ", (long long)(missing - named));
    }
}
