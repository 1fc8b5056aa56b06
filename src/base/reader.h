/*
 * reader.h - the bounded reader: the only way in which untrusted bytes are read.
 * Each call either reads inside [0, size) and moves on, or returns false and moves nothing.
 * Numbers are little-endian, as every format here is.
 */
#ifndef LINNET_BASE_READER_H
#define LINNET_BASE_READER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct reader {
    const uint8_t *data;
    size_t size;
    size_t pos; /* always <= size */
};

/* *out points at the next n bytes, inside the reader's data. */
static inline bool reader_bytes(struct reader *r, size_t n, const uint8_t **out)
{
    if (n > r->size - r->pos) return false;
    *out = r->data + r->pos;
    r->pos += n;
    return true;
}

static inline bool reader_copy(struct reader *r, void *out, size_t n)
{
    const uint8_t *p;
    if (!reader_bytes(r, n, &p)) return false;
    memcpy(out, p, n);
    return true;
}

static inline bool reader_skip(struct reader *r, size_t n)
{
    const uint8_t *p;
    return reader_bytes(r, n, &p);
}

static inline bool reader_u8(struct reader *r, uint8_t *out)
{
    return reader_copy(r, out, 1);
}

static inline bool reader_u16(struct reader *r, uint16_t *out)
{
    return reader_copy(r, out, 2);
}

static inline bool reader_u32(struct reader *r, uint32_t *out)
{
    return reader_copy(r, out, 4);
}

static inline bool reader_u64(struct reader *r, uint64_t *out)
{
    return reader_copy(r, out, 8);
}

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "linnet reads little-endian files on little-endian machines only"
#endif

#endif
