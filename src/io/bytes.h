/* Little-endian numbers at any address, and bounds without overflow. */
#ifndef MUI_BYTES_H
#define MUI_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static inline uint16_t mui_le16(const void *p)
{
    const unsigned char *b = p;
    return (uint16_t)(b[0] | b[1] << 8);
}

static inline uint32_t mui_le32(const void *p)
{
    const unsigned char *b = p;
    return b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

static inline uint64_t mui_le64(const void *p)
{
    return mui_le32(p) | (uint64_t)mui_le32((const char *)p + 4) << 32;
}

static inline void mui_put_le16(void *p, uint16_t v)
{
    unsigned char *b = p;
    b[0] = (unsigned char)v;
    b[1] = (unsigned char)(v >> 8);
}

static inline void mui_put_le32(void *p, uint32_t v)
{
    mui_put_le16(p, (uint16_t)v);
    mui_put_le16((char *)p + 2, (uint16_t)(v >> 16));
}

static inline void mui_put_le64(void *p, uint64_t v)
{
    mui_put_le32(p, (uint32_t)v);
    mui_put_le32((char *)p + 4, (uint32_t)(v >> 32));
}

/* True when [offset, offset + bytes) lies inside [0, size). */
static inline bool mui_inside(uint64_t offset, uint64_t bytes, uint64_t size)
{
    return offset <= size && bytes <= size - offset;
}

#endif
