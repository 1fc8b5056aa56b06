/*
 * arena.h - memory that is taken piece by piece and given back all at once, with a bound, for work
 * whose input decides how much it asks for.
 */
#ifndef LINNET_BASE_ARENA_H
#define LINNET_BASE_ARENA_H

#include <stdbool.h>
#include <stddef.h>

struct arena_block;

/* {.limit = BYTES} is an empty arena. */
struct arena {
    size_t limit; /* bytes it may take from the system in all */
    size_t taken;
    struct arena_block *blocks;
    char *next; /* free bytes of the newest block: [next, end) */
    char *end;
};

/* count * size bytes, 16-byte aligned, not zeroed; NULL beyond the limit or out of memory. */
void *arena_array(struct arena *a, size_t count, size_t size);

/* The same, zeroed. */
void *arena_new(struct arena *a, size_t count, size_t size);

/* Frees everything; the arena is then empty and may be used again. */
void arena_free(struct arena *a);

#endif
