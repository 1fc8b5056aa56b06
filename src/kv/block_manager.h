/*
 * block_manager.h - which physical block holds which 16 tokens. Integers only: no tensor, no
 * device, no thread. All memory is reserved by block_manager_create; nothing else allocates.
 *
 * A block is either held (reference count > 0) or in the free list, never both. The free list is
 * also the LRU: a cached block with count 0 stays in it, still findable, until it is taken from
 * the head for new tokens. Only full blocks are ever shared, so nobody writes to a shared block.
 */
#ifndef LINNET_KV_BLOCK_MANAGER_H
#define LINNET_KV_BLOCK_MANAGER_H

#include "base/error.h"

enum { BLOCK_TOKENS = 16 };

struct block_manager;

struct block_manager_options {
    int32_t n_blocks;
    bool prefix_caching;
    uint64_t hash_seed; /* a random value per process, so that collisions cannot be prepared */
    uint64_t hash_mask; /* 0 means all bits; tests cut it to force collisions */
};

linnet_status block_manager_create(const struct block_manager_options *options,
                                   struct block_manager **out, linnet_error *err);
void block_manager_destroy(struct block_manager *m);

/* Blocks that block_take can hand out now (cached ones with no holder included). */
int32_t block_free_count(const struct block_manager *m);

/*
 * The cached blocks of the longest known prefix of tokens[0..n): at most (n - 1) / 16, so that at
 * least one token is left to compute. `key` tells apart sequences whose keys and values differ for
 * the same tokens (0 for most). Every hit compares the tokens and the prefix before them; the hash
 * only finds candidates. Changes nothing: block_hold what you use. Returns how many; their ids go
 * to blocks[] (room for (n - 1) / 16).
 */
int32_t block_match(const struct block_manager *m, const int32_t *tokens, int32_t n, uint64_t key,
                    int32_t *blocks);

/* One more holder of a block that is cached or held. */
void block_hold(struct block_manager *m, int32_t block);

/* A block for new tokens, held once, its old content forgotten; -1 if none is free. */
int32_t block_take(struct block_manager *m);

/* One holder less of a held block. At 0 the block goes to the tail of the free list. To let a
 * sequence's tail die first, release its blocks from last to first. */
void block_release(struct block_manager *m, int32_t block);

/*
 * Makes a held block findable: it now holds the keys and values of tokens[0..16), which follow the
 * (registered) block `parent` (-1: they start the sequence). Does nothing if prefix caching is off,
 * if the parent is not registered, or if the block is registered already. If an equal block is
 * known, the older stays the one that is found, and this one stands for it as a parent.
 */
void block_register(struct block_manager *m, int32_t block, int32_t parent, const int32_t *tokens,
                    uint64_t key);

/* True if every block is accounted for: held or free exactly once, every findable block indexed
 * once, counts add up. For tests and debugging: walks everything. `message` gets the first fault.
 */
bool block_manager_check(const struct block_manager *m, char *message, size_t n);
/* Reference count of a block, and how many blocks are held in all. */
int32_t block_count(const struct block_manager *m, int32_t block);
int32_t block_held_count(const struct block_manager *m);

#endif
