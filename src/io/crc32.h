/* The CRC-32 of zip files, as fast as the processor allows: loading a checkpoint takes little more than this and a copy. */
#ifndef MUI_CRC32_H
#define MUI_CRC32_H

#include <stddef.h>
#include <stdint.h>

/* Goes on from crc (0 at the start) over bytes more, as zlib's crc32_z does. data is not NULL. */
uint32_t mui_crc32(uint32_t crc, const void *data, size_t bytes);

#endif
