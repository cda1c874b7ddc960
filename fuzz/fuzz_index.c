/* Sharded checkpoints: two bytes say how long the index is; what follows it is the shard, which the index knows as "100".
 * Both are files without a name, and so are neighbours in the folder of open descriptors. */
#define _GNU_SOURCE
#include "fuzz_target.h"
#include "io/bytes.h"

#include <fcntl.h>
#include <unistd.h>

#define SHARD 100

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes < 2) {
        return 0;
    }
    char path[64];
    size_t rest = bytes - 2, index = mui_le16(data);
    index = index < rest ? index : rest;
    int fd = fuzz_file(data + 2 + index, rest - index, path);
    if (dup3(fd, SHARD, O_CLOEXEC) != SHARD) {
        fuzz_broken("cannot make a shard");
    }
    fuzz_open(data + 2, index, true);
    close(SHARD);
    close(fd);
    return 0;
}
