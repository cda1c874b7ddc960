/* Traces, alone and after a small good one. What is merged without an error is a trace again, of as many events. */
#include "fuzz_target.h"

#include <muster/trace.h>

#include <stdio.h>
#include <unistd.h>

static int64_t merge(const char *const *files, int count, const char *out)
{
    mu_context *c = fuzz_context();
    const mu_trace_summary *s = mu_trace_merge(c, files, count, out);
    int64_t events = s != NULL ? s->events : -1;
    if ((s == NULL) != (mu_context_status(c) != MU_OK)) {
        fuzz_broken("an error without a message, or a result with one");
    }
    mu_context_close(c); /* frees the summary, too */
    return events;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static const char good[] = "[{\"ph\":\"M\",\"pid\":9,\"tid\":0,\"name\":\"muster_trace\",\"args\":{\"version\":1,\"rank\":9,"
                               "\"run\":\"a\",\"offset_ns\":1500,\"offset_error_ns\":10}},\n"
                               "{\"ph\":\"X\",\"pid\":9,\"ts\":1.5,\"dur\":2,\"cat\":\"wait\",\"name\":\"w\"}]";
    char path[64], first[64], out[64];
    int fd = fuzz_file(data, bytes, path), head = fuzz_file((const uint8_t *)good, sizeof(good) - 1, first);
    snprintf(out, sizeof(out), "/dev/shm/fuzz-trace-%ld", (long)getpid());
    int64_t events = merge((const char *[]){first, path}, 2, out);
    if (events >= 0 && merge((const char *[]){out}, 1, NULL) != events) {
        fuzz_broken("what was merged is another trace");
    }
    unlink(out);
    close(head);
    close(fd);
    return 0;
}
