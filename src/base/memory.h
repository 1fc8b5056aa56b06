/* memory.h - allocation whose sizes cannot wrap. All functions return NULL on failure. */
#ifndef LINNET_BASE_MEMORY_H
#define LINNET_BASE_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* *out = a * b (or a + b); false if the result does not fit. */
static inline bool size_mul(size_t a, size_t b, size_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

static inline bool size_add(size_t a, size_t b, size_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}

/* count * size zeroed bytes; free() them. */
void *mem_new(size_t count, size_t size);

/* Like realloc for count * size bytes; the old block survives a failure. */
void *mem_resize(void *old, size_t count, size_t size);

/*
 * Makes room for at least `need` elements of `size` bytes, growing *capacity by half again at
 * least. False (and nothing changed) on failure.
 */
bool mem_reserve(void **items, size_t *capacity, size_t need, size_t size);

/* Copy of n bytes with a final NUL; free() it. */
char *mem_string(const char *bytes, size_t n);

/*
 * Zeroed pages for weights and caches, 64-byte aligned. `huge` asks for huge pages: for memory that
 * is filled as a whole and then read from end to end. What is never touched costs nothing. Give the
 * same byte count back to mem_pages_free.
 */
void *mem_pages(size_t bytes, bool huge);
void mem_pages_free(void *pages, size_t bytes);

/* Spreads pages that nobody has touched over the memory of all processors of the machine (NUMA
 * nodes) that this process may use. False: the system knows no such thing. */
bool mem_interleave(void *pages, size_t bytes);

#endif
