/* SHA-256 (FIPS 180-4), for `muster inspect --hash`. */
#ifndef MUSTER_CLI_SHA256_H
#define MUSTER_CLI_SHA256_H

#include <stddef.h>
#include <stdint.h>

typedef struct cli_sha256 {
    uint32_t state[8];
    uint64_t bytes;
    unsigned char block[64];
} cli_sha256;

void cli_sha256_start(cli_sha256 *h);
void cli_sha256_add(cli_sha256 *h, const void *data, size_t bytes);
void cli_sha256_hex(cli_sha256 *h, char out[65]); /* ends it: 64 lower-case digits */

#endif
