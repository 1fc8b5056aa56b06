#include "kv/block_manager.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "base/memory.h"

enum { NONE = -1 };

/*
 * What a findable block holds, exactly. The tokens before its own are named by a chain number: each
 * registered prefix gets one that is never used again, so equal identities are equal prefixes, and
 * the children of a forgotten block can match nothing any more.
 */
struct identity {
    uint64_t parent; /* chain number of the prefix before; 0: these tokens start the sequence */
    uint64_t key;
    int32_t tokens[BLOCK_TOKENS];
};

static_assert(sizeof(struct identity) == 16 + 4 * BLOCK_TOKENS, "hashed and compared as bytes");

struct block {
    int32_t count;
    int32_t previous, next; /* free list, while count is 0 */
    int32_t bucket_next;    /* index, while findable */
    bool findable;
    uint64_t chain; /* of the prefix that ends with this block; 0: not registered */
    struct identity identity;
};

struct block_manager {
    int32_t n_blocks, n_free;
    bool prefix_caching;
    uint64_t hash_seed, bucket_mask;
    uint64_t last_chain;
    int32_t *buckets;     /* [bucket_mask + 1] first block of each */
    struct block *blocks; /* [n_blocks + 1] the last is the free list's two ends */
};

/* ---- free list: a ring through the sentinel; head = its next, tail = its previous ---- */

static void free_list_append(struct block_manager *m, int32_t block)
{
    struct block *end = &m->blocks[m->n_blocks], *b = &m->blocks[block];
    b->previous = end->previous;
    b->next = m->n_blocks;
    m->blocks[end->previous].next = block;
    end->previous = block;
    m->n_free++;
}

static void free_list_remove(struct block_manager *m, int32_t block)
{
    struct block *b = &m->blocks[block];
    m->blocks[b->previous].next = b->next;
    m->blocks[b->next].previous = b->previous;
    m->n_free--;
}

/* ---- index: chained buckets ---- */

static int32_t *bucket_of(const struct block_manager *m, const struct identity *identity)
{
    uint64_t hash = XXH3_64bits_withSeed(identity, sizeof *identity, m->hash_seed);
    return &m->buckets[hash & m->bucket_mask];
}

static struct identity make_identity(uint64_t parent, uint64_t key, const int32_t *tokens)
{
    struct identity identity = {.parent = parent, .key = key};
    memcpy(identity.tokens, tokens, sizeof identity.tokens);
    return identity;
}

static int32_t find(const struct block_manager *m, const struct identity *identity)
{
    for (int32_t b = *bucket_of(m, identity); b != NONE; b = m->blocks[b].bucket_next)
        if (memcmp(&m->blocks[b].identity, identity, sizeof *identity) == 0) return b;
    return NONE;
}

static void forget(struct block_manager *m, int32_t block)
{
    struct block *b = &m->blocks[block];
    b->chain = 0;
    if (!b->findable) return;
    b->findable = false;
    int32_t *link = bucket_of(m, &b->identity);
    while (*link != block) link = &m->blocks[*link].bucket_next;
    *link = b->bucket_next;
}

/* ---- the contract ---- */

static uint64_t buckets_for(int32_t n_blocks)
{
    uint64_t n = 1;
    while (n < (uint64_t)n_blocks) n *= 2;
    return n;
}

linnet_status block_manager_create(const struct block_manager_options *options,
                                   struct block_manager **out, linnet_error *err)
{
    int32_t n_blocks = options->n_blocks;
    if (n_blocks < 1 || n_blocks == INT32_MAX)
        return error_set(err, LINNET_INVALID,
                         "n_blocks: expected 1 to %d, found %d: give the cache more memory",
                         INT32_MAX - 1, n_blocks);
    uint64_t n_buckets = buckets_for(n_blocks);
    struct block_manager *m = mem_new(1, sizeof *m);
    if (m) {
        m->blocks = mem_new((size_t)n_blocks + 1, sizeof *m->blocks);
        m->buckets = mem_new(n_buckets, sizeof *m->buckets);
    }
    if (!m || !m->blocks || !m->buckets) {
        block_manager_destroy(m);
        return error_memory(err, "the block manager",
                            ((size_t)n_blocks + 1) * sizeof *m->blocks +
                                n_buckets * sizeof *m->buckets);
    }
    m->n_blocks = n_blocks;
    m->prefix_caching = options->prefix_caching;
    m->hash_seed = options->hash_seed;
    m->bucket_mask = (n_buckets - 1) & (options->hash_mask ? options->hash_mask : UINT64_MAX);
    for (uint64_t i = 0; i < n_buckets; i++) m->buckets[i] = NONE;
    m->blocks[n_blocks].previous = m->blocks[n_blocks].next = n_blocks;
    for (int32_t b = 0; b < n_blocks; b++) free_list_append(m, b);
    *out = m;
    return LINNET_OK;
}

void block_manager_destroy(struct block_manager *m)
{
    if (!m) return;
    free(m->blocks);
    free(m->buckets);
    free(m);
}

int32_t block_free_count(const struct block_manager *m)
{
    return m->n_free;
}

int32_t block_held_count(const struct block_manager *m)
{
    return m->n_blocks - m->n_free;
}

int32_t block_count(const struct block_manager *m, int32_t block)
{
    return m->blocks[block].count;
}

int32_t block_match(const struct block_manager *m, const int32_t *tokens, int32_t n, uint64_t key,
                    int32_t *blocks)
{
    if (!m->prefix_caching) return 0;
    uint64_t parent = 0;
    int32_t found = 0;
    for (; found < (n - 1) / BLOCK_TOKENS; found++) {
        struct identity identity = make_identity(parent, key, tokens + found * BLOCK_TOKENS);
        int32_t b = find(m, &identity);
        if (b == NONE) break;
        blocks[found] = b;
        parent = m->blocks[b].chain;
    }
    return found;
}

void block_hold(struct block_manager *m, int32_t block)
{
    struct block *b = &m->blocks[block];
    assert(b->count > 0 || b->findable);
    if (b->count++ == 0) free_list_remove(m, block);
}

int32_t block_take(struct block_manager *m)
{
    if (m->n_free == 0) return NONE;
    int32_t block = m->blocks[m->n_blocks].next;
    free_list_remove(m, block);
    forget(m, block);
    m->blocks[block].count = 1;
    return block;
}

void block_release(struct block_manager *m, int32_t block)
{
    struct block *b = &m->blocks[block];
    assert(b->count > 0);
    if (--b->count == 0) free_list_append(m, block);
}

void block_register(struct block_manager *m, int32_t block, int32_t parent, const int32_t *tokens,
                    uint64_t key)
{
    struct block *b = &m->blocks[block];
    assert(b->count > 0);
    uint64_t parent_chain = parent == NONE ? 0 : m->blocks[parent].chain;
    bool parent_unknown = parent != NONE && parent_chain == 0;
    if (!m->prefix_caching || parent_unknown || b->chain) return;
    b->identity = make_identity(parent_chain, key, tokens);
    int32_t older = find(m, &b->identity);
    if (older != NONE) {
        b->chain = m->blocks[older].chain; /* so that what follows this copy is found, too */
        return;
    }
    int32_t *bucket = bucket_of(m, &b->identity);
    b->chain = ++m->last_chain;
    b->findable = true;
    b->bucket_next = *bucket;
    *bucket = block;
}

/* ---- checking ---- */

static bool check_free_list(const struct block_manager *m, char *message, size_t n)
{
    int32_t end = m->n_blocks, length = 0, without_holder = 0, b = end;
    for (int32_t i = 0; i < end; i++) without_holder += m->blocks[i].count == 0;
    do { /* links that agree in both directions make a ring: no block comes twice */
        int32_t next = m->blocks[b].next;
        bool linked = next >= 0 && next <= end && m->blocks[next].previous == b;
        if (!linked || (b != end && m->blocks[b].count != 0)) {
            snprintf(message, n, "free list: block %d (count %d) is linked wrongly or held", b,
                     m->blocks[b].count);
            return false;
        }
        b = next;
        length += b != end;
    } while (b != end);
    if (length == without_holder && length == m->n_free) return true;
    snprintf(message, n, "free list: %d blocks in it, %d without holder, %d counted", length,
             without_holder, m->n_free);
    return false;
}

static bool check_index(const struct block_manager *m, char *message, size_t n)
{
    int32_t indexed = 0, findable = 0;
    for (uint64_t i = 0; i <= m->bucket_mask; i++)
        for (int32_t b = m->buckets[i]; b != NONE; b = m->blocks[b].bucket_next) {
            const struct block *x = &m->blocks[b];
            if (++indexed > m->n_blocks || !x->findable || find(m, &x->identity) != b) {
                snprintf(message, n, "index: block %d is there twice, stale or in a wrong bucket",
                         b);
                return false;
            }
        }
    for (int32_t b = 0; b < m->n_blocks; b++) {
        const struct block *x = &m->blocks[b];
        findable += x->findable;
        if (x->findable && (x->chain == 0 || x->chain <= x->identity.parent)) {
            snprintf(message, n, "block %d: chain number not above its parent's", b);
            return false;
        }
    }
    if (indexed == findable) return true;
    snprintf(message, n, "index: %d blocks in it, %d findable", indexed, findable);
    return false;
}

bool block_manager_check(const struct block_manager *m, char *message, size_t n)
{
    return check_free_list(m, message, n) && check_index(m, message, n);
}
