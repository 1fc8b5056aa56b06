#define XXH_INLINE_ALL
#include <xxhash.h>

#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "base/seed.h"
#include "text/tokenizer_internal.h"
#include "text/utf8.h"

linnet_status vocabulary_create(struct vocabulary *v, size_t count, linnet_error *err)
{
    enum { ID_FACTOR = 4, ID_ROOM = 64 << 10 }; /* gaps between ids cost memory */
    if (count > TOKEN_ID_LIMIT)
        return error_set(err, LINNET_UNSUPPORTED, "%zu tokens: expected at most %d", count,
                         TOKEN_ID_LIMIT);
    size_t capacity = 16;
    while (capacity < 2 * count) capacity *= 2;
    int64_t id_limit = (int64_t)count * ID_FACTOR + ID_ROOM;
    v->id_limit = id_limit < TOKEN_ID_LIMIT ? id_limit : TOKEN_ID_LIMIT;
    v->slots = mem_new(capacity, sizeof *v->slots);
    if (!v->slots || !mem_reserve((void **)&v->tokens, &v->capacity, count, sizeof *v->tokens))
        return error_memory(err, "the vocabulary", capacity * sizeof *v->slots);
    if (v->capacity) memset(v->tokens, 0, v->capacity * sizeof *v->tokens);
    v->seed = seed_for_hashing();
    v->slot_mask = capacity - 1;
    for (size_t i = 0; i < capacity; i++) v->slots[i].id = -1;
    return LINNET_OK;
}

void vocabulary_free(struct vocabulary *v)
{
    strbuf_free(&v->arena);
    free(v->tokens);
    free(v->slots);
}

/* The slot of this written form, or the free one where it belongs. */
static struct vocabulary_slot *slot_of(const struct vocabulary *v, const char *written, size_t size,
                                       uint64_t full_hash)
{
    size_t i = full_hash & v->slot_mask;
    uint32_t hash = (uint32_t)(full_hash >> 32);
    for (;; i = (i + 1) & v->slot_mask) {
        struct vocabulary_slot *slot = &v->slots[i];
        if (slot->id < 0) return slot;
        if (slot->hash != hash) continue;
        const struct token *token = &v->tokens[slot->id];
        if (token->written_size == size &&
            memcmp(v->arena.data + token->written, written, size) == 0)
            return slot;
    }
}

int32_t vocabulary_find(const struct vocabulary *v, const char *written, size_t size)
{
    if (size > v->longest) return -1;
    return slot_of(v, written, size, XXH3_64bits_withSeed(written, size, v->seed))->id;
}

int32_t vocabulary_find_joined(const struct vocabulary *v, const char *left, size_t n_left,
                               const char *right, size_t n_right, int32_t guess,
                               struct strbuf *room)
{
    if (!v->repeats && guess >= 0 && guess < v->size && v->tokens[guess].flags & TOKEN_PRESENT) {
        const struct token *token = &v->tokens[guess];
        const char *written = v->arena.data + token->written;
        if (token->written_size == n_left + n_right && memcmp(written, left, n_left) == 0 &&
            memcmp(written + n_left, right, n_right) == 0)
            return guess;
    }
    strbuf_clear(room);
    strbuf_append(room, left, n_left);
    strbuf_append(room, right, n_right);
    return room->failed ? -1 : vocabulary_find(v, strbuf_cstr(room), room->size);
}

int32_t vocabulary_find_plain(const struct vocabulary *v, const char *written, size_t size)
{
    int32_t id = vocabulary_find(v, written, size);
    uint32_t c;
    if (id < 0 || v->tokens[id].flags & TOKEN_ADDED) return -1;
    bool letter = size > 0 && utf8_decode(written, size, &c) == size;
    return v->tokens[id].flags & TOKEN_SPECIAL && !letter ? -1 : id;
}

static linnet_status reserve_ids(struct vocabulary *v, size_t need, linnet_error *err)
{
    size_t old = v->capacity;
    if (!mem_reserve((void **)&v->tokens, &v->capacity, need, sizeof *v->tokens))
        return error_memory(err, "the vocabulary", need * sizeof *v->tokens);
    if (v->capacity > old) memset(v->tokens + old, 0, (v->capacity - old) * sizeof *v->tokens);
    return LINNET_OK;
}

linnet_status vocabulary_add(struct vocabulary *v, int64_t id, const char *written, size_t size,
                             linnet_error *err)
{
    if (id < 0 || id >= v->id_limit)
        return error_set(err, LINNET_FORMAT, "token '%.*s' has id %lld: expected 0 to %lld",
                         (int)(size < 40 ? size : 40), written, (long long)id,
                         (long long)v->id_limit - 1);
    linnet_status status = reserve_ids(v, (size_t)id + 1, err);
    if (status != LINNET_OK) return status;
    struct token *token = &v->tokens[id];
    if (token->flags & TOKEN_PRESENT)
        return error_set(err, LINNET_FORMAT, "id %lld belongs to two tokens, one is '%.*s'",
                         (long long)id, (int)(size < 40 ? size : 40), written);
    if (size >= UINT32_MAX || v->arena.size >= UINT32_MAX - size)
        return error_set(err, LINNET_UNSUPPORTED, "the vocabulary has more than 4 GiB of text");
    token->written = (uint32_t)v->arena.size;
    token->written_size = (uint32_t)size;
    token->flags = TOKEN_PRESENT;
    strbuf_append(&v->arena, written, size);
    if (v->arena.failed) return error_memory(err, "the vocabulary", size);
    if (id >= v->size) v->size = (int32_t)id + 1;
    if (size > v->longest) v->longest = size;
    uint64_t hash = XXH3_64bits_withSeed(written, size, v->seed);
    /* Of two ids with one form the later is found, as in a map that is filled in order. */
    struct vocabulary_slot *slot = slot_of(v, written, size, hash);
    if (slot->id >= 0) v->repeats = true;
    *slot = (struct vocabulary_slot){(uint32_t)(hash >> 32), (int32_t)id};
    return LINNET_OK;
}

static int hexadecimal(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                  : -1;
}

int byte_token_value(const char *s, size_t size)
{
    if (size != 6 || memcmp(s, "<0x", 3) != 0 || s[5] != '>') return -1;
    int high = hexadecimal(s[3]), low = hexadecimal(s[4]);
    return high < 0 || low < 0 ? -1 : high * 16 + low;
}

/* Bytes that are no printable Latin-1 characters take, in order, U+0100 and up. */
static bool stands_for_itself(uint32_t c)
{
    return (c >= 0x21 && c <= 0x7E) || (c >= 0xA1 && c <= 0xAC) || (c >= 0xAE && c <= 0xFF);
}

uint32_t byte_to_character(uint8_t byte)
{
    if (stands_for_itself(byte)) return byte;
    if (byte <= 0x20) return 0x100u + byte;
    if (byte <= 0xA0) return 0x121u + (byte - 0x7Fu);
    return 0x143;
}

int character_to_byte(uint32_t c)
{
    if (stands_for_itself(c)) return (int)c;
    if (c < 0x100 || c > 0x143) return -1;
    if (c <= 0x120) return (int)(c - 0x100);
    if (c <= 0x142) return (int)(c - 0x121 + 0x7F);
    return 0xAD;
}
