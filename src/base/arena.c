#include "base/arena.h"

#include <stdlib.h>
#include <string.h>

#include "base/memory.h"

enum { ALIGNMENT = 16, FIRST_BLOCK = 32 << 10, LARGEST_BLOCK = 1 << 20 };

struct arena_block {
    _Alignas(ALIGNMENT) struct arena_block *previous;
    size_t size; /* bytes after the header */
};

static struct arena_block *new_block(struct arena *a, size_t size)
{
    size_t total;
    if (!size_add(size, sizeof(struct arena_block), &total)) return NULL;
    if (total > a->limit - a->taken) return NULL;
    struct arena_block *block = malloc(total);
    if (!block) return NULL;
    block->previous = a->blocks;
    block->size = size;
    a->blocks = block;
    a->taken += total;
    return block;
}

void *arena_array(struct arena *a, size_t count, size_t size)
{
    size_t bytes;
    if (!size_mul(count, size, &bytes) || !size_add(bytes, ALIGNMENT - 1, &bytes)) return NULL;
    bytes &= ~(size_t)(ALIGNMENT - 1);
    if (bytes == 0) bytes = ALIGNMENT; /* an empty piece is not NULL either */
    if (bytes > (size_t)(a->end - a->next)) {
        size_t usual = a->taken < FIRST_BLOCK     ? FIRST_BLOCK
                       : a->taken < LARGEST_BLOCK ? a->taken
                                                  : LARGEST_BLOCK;
        if (bytes > usual / 4) { /* a large piece gets a block of its own */
            struct arena_block *own = new_block(a, bytes);
            return own ? own + 1 : NULL;
        }
        struct arena_block *block = new_block(a, usual);
        if (!block) return NULL;
        a->next = (char *)(block + 1);
        a->end = a->next + block->size;
    }
    void *piece = a->next;
    a->next += bytes;
    return piece;
}

void *arena_new(struct arena *a, size_t count, size_t size)
{
    void *piece = arena_array(a, count, size);
    if (piece) memset(piece, 0, count * size);
    return piece;
}

void arena_free(struct arena *a)
{
    for (struct arena_block *block = a->blocks; block;) {
        struct arena_block *previous = block->previous;
        free(block);
        block = previous;
    }
    *a = (struct arena){.limit = a->limit};
}
