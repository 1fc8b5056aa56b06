/* gguf_builder.h - GGUF bytes, field by field, so that a test can put a wrong one anywhere. */
#ifndef LINNET_TESTS_GGUF_BUILDER_H
#define LINNET_TESTS_GGUF_BUILDER_H

#include "support.h"

#include "base/strbuf.h"
#include "file/gguf.h"

static inline void put_u32(struct strbuf *b, uint32_t v)
{
    strbuf_append(b, &v, 4);
}

static inline void put_u64(struct strbuf *b, uint64_t v)
{
    strbuf_append(b, &v, 8);
}

static inline void put_string(struct strbuf *b, const char *text)
{
    put_u64(b, strlen(text));
    strbuf_text(b, text);
}

static inline void put_header(struct strbuf *b, uint32_t version, uint64_t n_tensors,
                              uint64_t n_keys)
{
    strbuf_text(b, "GGUF");
    put_u32(b, version);
    put_u64(b, n_tensors);
    put_u64(b, n_keys);
}

static inline void put_key(struct strbuf *b, const char *key, uint32_t type)
{
    put_string(b, key);
    put_u32(b, type);
}

static inline void put_key_u32(struct strbuf *b, const char *key, uint32_t value)
{
    put_key(b, key, GGUF_U32);
    put_u32(b, value);
}

static inline void put_key_array(struct strbuf *b, const char *key, uint32_t element,
                                 uint64_t count)
{
    put_key(b, key, GGUF_ARRAY);
    put_u32(b, element);
    put_u64(b, count);
}

/* A matrix of rows x columns (columns first in the file; rows 0: a vector). */
static inline void put_tensor(struct strbuf *b, const char *name, uint64_t rows, uint64_t columns,
                              uint32_t type, uint64_t offset)
{
    put_string(b, name);
    put_u32(b, rows ? 2 : 1);
    put_u64(b, columns);
    if (rows) put_u64(b, rows);
    put_u32(b, type);
    put_u64(b, offset);
}

/* Zeros up to the alignment, then `bytes` bytes of data 0, 1, 2, ... */
static inline void put_data(struct strbuf *b, size_t alignment, size_t bytes)
{
    while (b->size % alignment) strbuf_char(b, 0);
    for (size_t i = 0; i < bytes; i++) strbuf_char(b, (char)i);
}

#endif
