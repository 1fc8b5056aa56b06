/* Byte-pair merging of one piece: a linked list of symbols and a heap of possible merges, so that
 * n symbols take O(n log n) whatever they are. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "base/seed.h"
#include "text/tokenizer_internal.h"
#include "text/utf8.h"

static const uint32_t none = UINT32_MAX;

/* ---- the table of merges ------------------------------------------------------------------ */

linnet_status merges_create(struct merges *m, size_t count, linnet_error *err)
{
    size_t capacity = 16, two_thirds;
    if (count > INT32_MAX) return error_set(err, LINNET_UNSUPPORTED, "%zu merges", count);
    do {
        capacity *= 2;
        two_thirds = capacity / 3 * 2;
    } while (two_thirds < count);
    m->slots = mem_new(capacity, sizeof *m->slots);
    if (!m->slots) return error_memory(err, "merges", capacity * sizeof *m->slots);
    for (size_t i = 0; i < capacity; i++) m->slots[i].left = -1;
    m->mask = capacity - 1;
    m->seed = seed_for_hashing();
    return LINNET_OK;
}

static struct merge *merge_slot(const struct merges *m, int32_t left, int32_t right)
{
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    size_t i = XXH3_64bits_withSeed(&key, sizeof key, m->seed) & m->mask;
    for (;; i = (i + 1) & m->mask) {
        struct merge *slot = &m->slots[i];
        if (slot->left < 0 || (slot->left == left && slot->right == right)) return slot;
    }
}

linnet_status merges_add(struct merges *m, int32_t left, int32_t right, int32_t rank,
                         int32_t result, linnet_error *err)
{
    struct merge *slot = merge_slot(m, left, right);
    if (slot->left < 0 && ++m->count > m->mask / 3 * 2 + 1)
        return error_set(err, LINNET_INTERNAL, "more merges than announced");
    *slot = (struct merge){left, right, rank, result}; /* of two equal ones the later counts */
    return LINNET_OK;
}

/* ---- one piece ---------------------------------------------------------------------------- */

/* Whether the symbol at `left` merges with its right neighbour: the rank (less is sooner) and
 * what becomes of them. */
static bool merge_of(const struct encoder *e, const char *piece, size_t n, uint32_t left,
                     int32_t *rank, int32_t *result)
{
    const struct bpe *bpe = &e->t->bpe;
    uint32_t right = e->symbols[left].next;
    if (right == none) return false;
    const struct symbol *a = &e->symbols[left], *b = &e->symbols[right];
    if (!bpe->score_rank) {
        const struct merge *merge = merge_slot(&bpe->merges, a->id, b->id);
        if (merge->left < 0) return false;
        *rank = merge->rank;
        *result = merge->result;
        return true;
    }
    const struct vocabulary *v = &e->t->vocabulary;
    if ((v->tokens[a->id].flags | v->tokens[b->id].flags) & TOKEN_FIXED) return false;
    size_t end = b->next == none ? n : e->symbols[b->next].begin;
    *result = vocabulary_find(v, piece + a->begin, end - a->begin);
    if (*result < 0 || v->tokens[*result].flags & TOKEN_FIXED) return false;
    *rank = bpe->score_rank[*result];
    return true;
}

/* Candidates are rank << 32 | position of the left symbol: equal ranks go from left to right. */
static linnet_status heap_push(struct encoder *e, uint64_t candidate)
{
    if (!mem_reserve((void **)&e->heap, &e->heap_capacity, e->n_heap + 1, sizeof *e->heap))
        return error_memory(e->err, "merging", (e->n_heap + 1) * sizeof *e->heap);
    size_t i = e->n_heap++;
    while (i > 0 && e->heap[(i - 1) / 2] > candidate) {
        e->heap[i] = e->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    e->heap[i] = candidate;
    return LINNET_OK;
}

static uint64_t heap_pop(struct encoder *e)
{
    uint64_t top = e->heap[0], last = e->heap[--e->n_heap];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < e->n_heap; i = child) {
        if (child + 1 < e->n_heap && e->heap[child + 1] < e->heap[child]) child++;
        if (e->heap[child] >= last) break;
        e->heap[i] = e->heap[child];
    }
    if (e->n_heap) e->heap[i] = last;
    return top;
}

static linnet_status consider(struct encoder *e, const char *piece, size_t n, uint32_t left)
{
    int32_t rank, result;
    if (!merge_of(e, piece, n, left, &rank, &result)) return LINNET_OK;
    return heap_push(e, (uint64_t)(uint32_t)rank << 32 | left);
}

static linnet_status merge_all(struct encoder *e, const char *piece, size_t n)
{
    linnet_status status = LINNET_OK;
    e->n_heap = 0;
    for (size_t i = 0; i + 1 < e->n_symbols && status == LINNET_OK; i++)
        status = consider(e, piece, n, (uint32_t)i);
    while (e->n_heap && status == LINNET_OK) {
        uint64_t candidate = heap_pop(e);
        uint32_t left = (uint32_t)candidate;
        struct symbol *a = &e->symbols[left];
        int32_t rank, result;
        /* The candidate is stale if either half has been merged since. */
        if (a->id < 0 || !merge_of(e, piece, n, left, &rank, &result) ||
            (uint32_t)rank != candidate >> 32)
            continue;
        struct symbol *b = &e->symbols[a->next];
        a->id = result;
        a->next = b->next;
        b->id = -1;
        if (a->next != none) e->symbols[a->next].previous = left;
        status = consider(e, piece, n, left);
        if (status == LINNET_OK && a->previous != none) status = consider(e, piece, n, a->previous);
    }
    return status;
}

static linnet_status add_symbol(struct encoder *e, int32_t id, size_t begin)
{
    if (!mem_reserve((void **)&e->symbols, &e->symbol_capacity, e->n_symbols + 1,
                     sizeof *e->symbols))
        return error_memory(e->err, "merging", (e->n_symbols + 1) * sizeof *e->symbols);
    uint32_t i = (uint32_t)e->n_symbols++;
    e->symbols[i] = (struct symbol){id, (uint32_t)begin, i ? i - 1 : none, none};
    if (i) e->symbols[i - 1].next = i;
    return LINNET_OK;
}

/* A character that is no token: its bytes' tokens, the unknown token, or nothing. `pending` is
 * where an unknown token began that is not yet written, as following ones may join it. */
static linnet_status add_unknown(struct encoder *e, const char *character, size_t size,
                                 size_t begin, size_t *pending)
{
    const struct bpe *bpe = &e->t->bpe;
    bool spelled = bpe->byte_fallback;
    for (size_t i = 0; i < size && spelled; i++)
        spelled = bpe->byte_token[(uint8_t)character[i]] >= 0;
    linnet_status status = LINNET_OK;
    if (spelled) {
        for (size_t i = 0; i < size && status == LINNET_OK; i++)
            status = add_symbol(e, bpe->byte_token[(uint8_t)character[i]], begin + i);
        return status;
    }
    if (bpe->unknown < 0) return LINNET_OK;
    if (*pending != SIZE_MAX && bpe->fuse_unknown) return LINNET_OK;
    if (*pending != SIZE_MAX) status = add_symbol(e, bpe->unknown, *pending);
    *pending = begin;
    return status;
}

static linnet_status add_symbols(struct encoder *e, const char *piece, size_t n)
{
    const struct bpe *bpe = &e->t->bpe;
    linnet_status status = LINNET_OK;
    size_t pending = SIZE_MAX;
    e->n_symbols = 0;
    for (size_t i = 0, size; i < n && status == LINNET_OK; i += size) {
        uint32_t c;
        char mapped[4];
        const char *character = piece + i;
        int32_t id;
        size_t written = size = bpe->byte_level ? 1 : utf8_decode(piece + i, n - i, &c);
        if (bpe->byte_level) {
            id = bpe->byte_character[(uint8_t)piece[i]];
            written = utf8_encode(byte_to_character((uint8_t)piece[i]), mapped);
            character = mapped;
        } else {
            id = vocabulary_find_plain(&e->t->vocabulary, character, size);
        }
        if (id < 0) {
            status = add_unknown(e, character, written, i, &pending);
            continue;
        }
        if (pending != SIZE_MAX) status = add_symbol(e, bpe->unknown, pending);
        pending = SIZE_MAX;
        if (status == LINNET_OK) status = add_symbol(e, id, i);
    }
    if (pending != SIZE_MAX && status == LINNET_OK) status = add_symbol(e, bpe->unknown, pending);
    return status;
}

/* The id of the piece if it is one token as it stands, or -1. */
static int32_t whole_piece(struct encoder *e, const char *piece, size_t n)
{
    const struct vocabulary *v = &e->t->vocabulary;
    if (!e->t->bpe.byte_level) return vocabulary_find_plain(v, piece, n);
    if (n > v->longest) return -1;
    strbuf_clear(&e->characters);
    for (size_t i = 0; i < n; i++)
        strbuf_utf8(&e->characters, byte_to_character((uint8_t)piece[i]));
    return vocabulary_find_plain(v, strbuf_cstr(&e->characters), e->characters.size);
}

linnet_status bpe_encode(struct encoder *e, const char *piece, size_t n)
{
    if (n == 0) return LINNET_OK;
    if (n >= INT32_MAX) return error_memory(e->err, "a text of one piece", n);
    if (e->t->bpe.ignore_merges) {
        int32_t id = whole_piece(e, piece, n);
        if (id >= 0) return encoder_push(e, id);
    }
    linnet_status status = add_symbols(e, piece, n);
    if (status == LINNET_OK) status = merge_all(e, piece, n);
    for (size_t i = 0; i < e->n_symbols && status == LINNET_OK; i++)
        if (e->symbols[i].id >= 0) status = encoder_push(e, e->symbols[i].id);
    return status;
}
