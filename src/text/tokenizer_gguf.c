/* Reads a tokenizer from GGUF metadata, which names the pre-tokenizer instead of stating it. */
#include <string.h>

#include "base/memory.h"
#include "base/reader.h"
#include "file/gguf.h"
#include "text/tokenizer_internal.h"

/* tokenizer.ggml.token_type */
enum { TYPE_NORMAL = 1, TYPE_UNKNOWN, TYPE_CONTROL, TYPE_USER_DEFINED, TYPE_UNUSED, TYPE_BYTE };

#define CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define WORD_REST    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define O200K_UPPER  "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define O200K_LOWER  "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"

static const char qwen2_pattern[] = CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}" WORD_REST;
static const char llama3_pattern[] =
    CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}" WORD_REST;
static const char o200k_pattern[] =
    "[^\\r\\n\\p{L}\\p{N}]?" O200K_UPPER "*" O200K_LOWER "+" CONTRACTIONS "?"
    "|[^\\r\\n\\p{L}\\p{N}]?" O200K_UPPER "+" O200K_LOWER "*" CONTRACTIONS "?"
    "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

/* tokenizer.ggml.pre, as far as the tokenizer.json behind a name is known for certain. */
static const struct known_pretokenizer {
    const char *name, *pattern;
    bool digits, nfc, ignore_merges, add_bos;
} known_pretokenizers[] = {
    {"qwen2", qwen2_pattern, .nfc = true},
    {"deepseek-r1-qwen", qwen2_pattern, .nfc = true},
    {"llama-bpe", llama3_pattern, .ignore_merges = true, .add_bos = true},
    {"llama3", llama3_pattern, .ignore_merges = true, .add_bos = true},
    {"llama-v3", llama3_pattern, .ignore_merges = true, .add_bos = true},
    {"smollm", gpt2_pattern, .digits = true},
    {"starcoder", gpt2_pattern, .digits = true},
    {"gpt-2", gpt2_pattern, .digits = false},
    {"gpt-4o", o200k_pattern, .digits = false},
};

static bool string_at(struct reader *r, struct view *out)
{
    uint64_t size;
    const uint8_t *bytes;
    if (!reader_u64(r, &size) || size > SIZE_MAX || !reader_bytes(r, (size_t)size, &bytes))
        return false;
    *out = (struct view){(const char *)bytes, (size_t)size};
    return true;
}

static linnet_status get_array(const struct gguf *g, const char *key, enum gguf_type element,
                               size_t count, struct gguf_array *out, linnet_error *err)
{
    if (!gguf_array(g, key, out) || out->element != element)
        return error_set(err, LINNET_FORMAT, "%s: missing, or an array of another type", key);
    if (count != SIZE_MAX && out->count != count)
        return error_set(err, LINNET_FORMAT, "%s: expected %zu entries, found %zu", key, count,
                         out->count);
    return LINNET_OK;
}

/* -1 where there is none, or where the id fills the matrix up only. */
static int32_t get_id(const struct tokenizer *t, const struct gguf *g, const char *key)
{
    int32_t id = gguf_token_id(g, key);
    bool present =
        id >= 0 && id < t->vocabulary.size && t->vocabulary.tokens[id].flags & TOKEN_PRESENT;
    return present ? id : -1;
}

static bool get_flag(const struct gguf *g, const char *key, bool otherwise)
{
    bool value;
    return gguf_bool(g, key, &value) ? value : otherwise;
}

/* Reads the element at `i` of an array of 4-byte numbers. */
static int32_t number_at(const struct gguf_array *a, size_t i)
{
    int32_t value;
    memcpy(&value, a->data + 4 * i, sizeof value);
    return value;
}

static linnet_status read_tokens(struct tokenizer *t, const struct gguf *g,
                                 struct gguf_array *types, size_t *count, linnet_error *err)
{
    struct gguf_array tokens;
    linnet_status status =
        get_array(g, "tokenizer.ggml.tokens", GGUF_STRING, SIZE_MAX, &tokens, err);
    if (status != LINNET_OK) return status;
    *count = tokens.count;
    status = get_array(g, "tokenizer.ggml.token_type", GGUF_I32, *count, types, err);
    if (status == LINNET_OK) status = vocabulary_create(&t->vocabulary, *count, err);
    struct reader reader = {tokens.data, tokens.size, 0};
    for (size_t i = 0; i < *count && status == LINNET_OK; i++) {
        struct view token;
        if (!string_at(&reader, &token))
            return error_set(err, LINNET_FORMAT, "tokenizer.ggml.tokens: entry %zu is cut off", i);
        int32_t type = number_at(types, i);
        if (type < TYPE_NORMAL || type > TYPE_BYTE)
            return error_set(err, LINNET_FORMAT,
                             "tokenizer.ggml.token_type: entry %zu: expected 1 to 6, found %d", i,
                             (int)type);
        /* Unused ones fill the matrix up; no tokenizer.json has them. */
        if (type == TYPE_UNUSED) continue;
        status = vocabulary_add(&t->vocabulary, (int64_t)i, token.data, token.size, err);
    }
    return status;
}

/* Control tokens are special; what users have defined is matched in texts as well. */
static linnet_status add_tokens(struct tokenizer *t, const struct gguf_array *types,
                                linnet_error *err)
{
    linnet_status status = LINNET_OK;
    for (int32_t id = 0; id < t->vocabulary.size && status == LINNET_OK; id++) {
        int32_t type = number_at(types, (size_t)id);
        struct token *entry = &t->vocabulary.tokens[id];
        if (!(entry->flags & TOKEN_PRESENT)) continue;
        if (type != TYPE_NORMAL && type != TYPE_USER_DEFINED) entry->flags |= TOKEN_FIXED;
        if (type != TYPE_UNKNOWN && type != TYPE_CONTROL && type != TYPE_USER_DEFINED) continue;
        struct added_token token = {.id = id,
                                    .content = t->vocabulary.arena.data + entry->written,
                                    .size = entry->written_size,
                                    .special = type != TYPE_USER_DEFINED};
        entry->flags |= TOKEN_ADDED;
        status = tokenizer_add_token(t, &token, err);
    }
    return status;
}

static linnet_status read_merges(struct tokenizer *t, const struct gguf *g, linnet_error *err)
{
    static const char key[] = "tokenizer.ggml.merges";
    const struct vocabulary *v = &t->vocabulary;
    struct gguf_array merges;
    linnet_status status = get_array(g, key, GGUF_STRING, SIZE_MAX, &merges, err);
    if (status == LINNET_OK) status = merges_create(&t->bpe.merges, merges.count, err);
    struct reader reader = {merges.data, merges.size, 0};
    struct strbuf whole = {0};
    int32_t result = -1;
    for (size_t i = 0; status == LINNET_OK && i < merges.count; i++) {
        struct view merge = {NULL, 0};
        const char *blank = NULL;
        if (string_at(&reader, &merge) && merge.size > 2)
            blank = memchr(merge.data + 1, ' ', merge.size - 2);
        if (!blank) {
            status = error_set(err, LINNET_FORMAT, "%s: entry %zu '%.*s': expected two tokens", key,
                               i, (int)(merge.size < 40 ? merge.size : 40), merge.data);
            break;
        }
        size_t left = (size_t)(blank - merge.data), right = merge.size - left - 1;
        int32_t a = vocabulary_find(v, merge.data, left);
        int32_t b = vocabulary_find(v, blank + 1, right);
        result = vocabulary_find_joined(v, merge.data, left, blank + 1, right, result + 1, &whole);
        if (a < 0 || b < 0 || result < 0)
            status = error_set(err, LINNET_FORMAT,
                               "%s: entry %zu '%.*s': a part or the whole is no token", key, i,
                               (int)(merge.size < 40 ? merge.size : 40), merge.data);
        else if (!(v->tokens[result].flags & (TOKEN_SPECIAL | TOKEN_ADDED)))
            status = merges_add(&t->bpe.merges, a, b, (int32_t)i, result, err);
    }
    strbuf_free(&whole);
    return status;
}

static linnet_status add_pattern(struct tokenizer *t, const char *pattern, linnet_error *err)
{
    struct pretokenizer_step *step = &t->pretokenizer[t->n_pretokenizer++];
    step->kind = PRETOKENIZE_SPLIT;
    step->behavior = SPLIT_ISOLATED;
    return pattern_compile(&step->pattern, pattern, strlen(pattern), err);
}

static linnet_status read_byte_level(struct tokenizer *t, const struct gguf *g, bool *add_bos,
                                     linnet_error *err)
{
    struct view pre = {"", 0};
    const struct known_pretokenizer *known = NULL;
    gguf_string(g, "tokenizer.ggml.pre", &pre);
    for (size_t i = 0; i < sizeof known_pretokenizers / sizeof known_pretokenizers[0]; i++)
        if (strlen(known_pretokenizers[i].name) == pre.size &&
            memcmp(known_pretokenizers[i].name, pre.data, pre.size) == 0)
            known = &known_pretokenizers[i];
    if (!known)
        return error_set(err, LINNET_UNSUPPORTED,
                         "tokenizer.ggml.pre '%.*s' is not understood; convert the model anew, or "
                         "use its directory with tokenizer.json",
                         (int)(pre.size < 80 ? pre.size : 80), pre.data);
    if (known->nfc) t->normalizer[t->n_normalizer++].kind = NORMALIZE_NFC;
    if (known->digits) {
        t->pretokenizer[t->n_pretokenizer].kind = PRETOKENIZE_DIGITS;
        t->pretokenizer[t->n_pretokenizer++].behavior = SPLIT_ISOLATED;
    }
    linnet_status status = add_pattern(t, known->pattern, err);
    t->bpe.byte_level = t->decoder.byte_level = true;
    t->bpe.ignore_merges = known->ignore_merges;
    *add_bos = known->add_bos;
    return status == LINNET_OK ? read_merges(t, g, err) : status;
}

struct scored {
    float score;
    int32_t id;
};

static int by_score(const void *a, const void *b)
{
    const struct scored *x = a, *y = b;
    return x->score > y->score ? -1 : x->score < y->score;
}

/* The better a score the lower the rank; equal scores share one. */
static linnet_status rank_scores(struct tokenizer *t, const struct gguf_array *scores,
                                 linnet_error *err)
{
    size_t count = scores->count;
    struct scored *sorted = mem_new(count, sizeof *sorted);
    t->bpe.score_rank = mem_new(count, sizeof *t->bpe.score_rank);
    linnet_status status = LINNET_OK;
    if (!sorted || !t->bpe.score_rank) status = error_memory(err, "scores", count * sizeof *sorted);
    for (size_t i = 0; i < count && status == LINNET_OK; i++) {
        sorted[i].id = (int32_t)i;
        memcpy(&sorted[i].score, scores->data + 4 * i, sizeof sorted[i].score);
        if (sorted[i].score != sorted[i].score)
            status = error_set(err, LINNET_FORMAT, "tokenizer.ggml.scores: entry %zu is NaN", i);
    }
    if (status == LINNET_OK) {
        if (count) qsort(sorted, count, sizeof *sorted, by_score);
        for (size_t i = 0, rank = 0; i < count; i++) {
            if (i && sorted[i].score != sorted[i - 1].score) rank = i;
            t->bpe.score_rank[sorted[i].id] = (int32_t)rank;
        }
    }
    free(sorted);
    return status;
}

/* SentencePiece: blanks become U+2581, one is put in front, and the pieces' scores say what is
 * merged first. */
static linnet_status read_sentencepiece(struct tokenizer *t, const struct gguf *g, size_t count,
                                        linnet_error *err)
{
    static const char mark[] = "\xE2\x96\x81";
    struct gguf_array scores;
    bool prefix = get_flag(g, "tokenizer.ggml.add_space_prefix", true);
    linnet_status status = get_array(g, "tokenizer.ggml.scores", GGUF_F32, count, &scores, err);
    if (status == LINNET_OK) status = rank_scores(t, &scores, err);
    if (status != LINNET_OK) return status;
    t->bpe.unknown = get_id(t, g, "tokenizer.ggml.unknown_token_id");
    struct normalizer_step *step;
    if (prefix) {
        step = &t->normalizer[t->n_normalizer++];
        step->kind = NORMALIZE_PREPEND;
        strbuf_text(&step->content, mark);
    }
    step = &t->normalizer[t->n_normalizer++];
    step->kind = NORMALIZE_REPLACE;
    strbuf_text(&step->content, mark);
    strbuf_text(&t->decoder.from, mark);
    strbuf_text(&t->decoder.to, " ");
    t->decoder.byte_fallback = t->bpe.byte_fallback = t->bpe.fuse_unknown = true;
    t->decoder.strip_left = prefix;
    return pattern_literal(&step->pattern, " ", 1, err);
}

linnet_status tokenizer_from_gguf(struct tokenizer *t, const struct gguf *g, linnet_error *err)
{
    struct view model = {"", 0};
    struct gguf_array types;
    size_t count = 0;
    bool add_bos = true; /* SentencePiece's default */
    gguf_string(g, "tokenizer.ggml.model", &model);
    bool byte_level = model.size == 4 && memcmp(model.data, "gpt2", 4) == 0;
    bool sentencepiece = model.size == 5 && memcmp(model.data, "llama", 5) == 0;
    if (!byte_level && !sentencepiece)
        return error_set(err, LINNET_UNSUPPORTED,
                         "tokenizer.ggml.model '%.*s' is not understood; expected gpt2 or llama",
                         (int)(model.size < 80 ? model.size : 80), model.data);
    linnet_status status = read_tokens(t, g, &types, &count, err);
    if (status == LINNET_OK) status = add_tokens(t, &types, err);
    if (status == LINNET_OK)
        status = byte_level ? read_byte_level(t, g, &add_bos, err)
                            : read_sentencepiece(t, g, count, err);
    if (status == LINNET_OK) status = tokenizer_finish(t, err);
    if (status != LINNET_OK) return status;
    t->bos = get_id(t, g, "tokenizer.ggml.bos_token_id");
    t->eos = get_id(t, g, "tokenizer.ggml.eos_token_id");
    if (get_flag(g, "tokenizer.ggml.add_bos_token", add_bos) && t->bos >= 0)
        t->prefix[t->n_prefix++] = t->bos;
    if (get_flag(g, "tokenizer.ggml.add_eos_token", false) && t->eos >= 0)
        t->suffix[t->n_suffix++] = t->eos;
    return LINNET_OK;
}
