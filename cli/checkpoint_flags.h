/* Flags of every command that reads a checkpoint: --limit NAME=VALUE, --no-checksum, --big-endian. */
#ifndef MUSTER_CLI_CHECKPOINT_FLAGS_H
#define MUSTER_CLI_CHECKPOINT_FLAGS_H

#include <muster/checkpoint.h>

#include <stdbool.h>

/* Lines for a command's --help. */
#define CHECKPOINT_FLAGS_HELP                                                                                          \
    "  --limit NAME=N  refuse a file that asks for more than N; N may end in K, M, G or T (powers of 1024). NAME is\n"    \
    "                  pickle (bytes of the pickled object, default 512M), members (of a zip, 1000000), header\n"        \
    "                  (bytes of safetensors' JSON, 100000000), tensor (bytes of one tensor laid out, this\n"            \
    "                  machine's memory) or ratio (of a zip member that inflates to over 256M, 100); may be repeated\n"  \
    "  --no-checksum   do not verify the checksums of a zip's members\n"                                                \
    "  --big-endian    take a zip that does not tell its byte order for big-endian (s390x before PyTorch 2.1)\n"

/* Sets a limit from "NAME=N"; returns NULL, or what is wrong with it in words. */
const char *checkpoint_limit_set(mu_checkpoint_options *o, const char *text);

/* If argv[*i] is one of these flags, takes it and its argument (*i is then the last word taken) and returns true; *code
 * is then -1, or the exit code after a message about what is wrong. */
bool checkpoint_flag(const char *command, int argc, char **argv, int *i, mu_checkpoint_options *o, int *code);

#endif
