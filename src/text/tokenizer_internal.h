/*
 * tokenizer_internal.h - what the files of a tokenizer share. The way of a text:
 *     added tokens -> normalizer -> added tokens of normalized text -> pre-tokenizer -> merges.
 */
#ifndef LINNET_TEXT_TOKENIZER_INTERNAL_H
#define LINNET_TEXT_TOKENIZER_INTERNAL_H

#include <jansson.h>

#include "base/strbuf.h"
#include "text/pattern.h"
#include "text/tokenizer.h"

enum {
    TOKEN_ID_LIMIT = 1 << 22, /* far above any model; keeps a broken file's table small */
    STEP_LIMIT = 16,          /* steps of a normalizer or pre-tokenizer */
    ADDED_TOKEN_LIMIT = 512   /* bytes: each place of a text is compared with as many */
};

/* How many bytes the steps that edit a text of n bytes may add to it in all. The longest
 * decomposition of Unicode is eleven times its character; a file's own replacements could grow
 * without end. */
static inline size_t growth_allowed(size_t n)
{
    enum { FACTOR = 16, LEAST = 64 << 10 };
    return n < (SIZE_MAX - LEAST) / FACTOR ? FACTOR * n + LEAST : SIZE_MAX;
}

/* ---- vocabulary (vocabulary.c) ----------------------------------------------------------- */

enum {
    TOKEN_PRESENT = 1,
    TOKEN_SPECIAL = 2, /* gives no text when specials are skipped */
    TOKEN_BYTE = 4,    /* "<0xNN>" of a decoder with byte fallback */
    TOKEN_FIXED = 8,   /* GGUF scores: never the part or the result of a merge */
    TOKEN_ADDED = 16   /* not of the model's own vocabulary: found as an added token only */
};

struct token {
    uint32_t written, written_size; /* the form in the file, in the arena: "Ġthe" */
    uint32_t text, text_size;       /* the bytes it decodes to: " the" */
    uint8_t flags;
};

struct vocabulary_slot {
    uint32_t hash;
    int32_t id; /* -1: free */
};

struct vocabulary {
    struct strbuf arena;
    struct token *tokens;
    int32_t size; /* highest id + 1 */
    size_t capacity;
    struct vocabulary_slot *slots;
    size_t slot_mask;
    uint64_t seed;    /* random: no file can know which of its tokens share a slot */
    size_t longest;   /* written form, bytes */
    int64_t id_limit; /* by the number of tokens announced */
    bool repeats;     /* two ids have one form */
};

/* Room for `count` tokens in all. */
linnet_status vocabulary_create(struct vocabulary *v, size_t count, linnet_error *err);
void vocabulary_free(struct vocabulary *v);
linnet_status vocabulary_add(struct vocabulary *v, int64_t id, const char *written, size_t size,
                             linnet_error *err);
int32_t vocabulary_find(const struct vocabulary *v, const char *written, size_t size);
/* Two forms in one, looked for at the id `guess` first, which need not exist: what merges make
 * mostly has ascending ids. `room` is overwritten; -1 also if it cannot grow. */
int32_t vocabulary_find_joined(const struct vocabulary *v, const char *left, size_t n_left,
                               const char *right, size_t n_right, int32_t guess,
                               struct strbuf *room);
/* The same for what a text may become by itself: neither added nor special tokens, which are found
 * by added_scan_next alone; but a letter of the model's own vocabulary stays one, even where the
 * file uses it as padding, say. */
int32_t vocabulary_find_plain(const struct vocabulary *v, const char *written, size_t size);
/* The value of "<0xNN>", or -1. */
int byte_token_value(const char *written, size_t size);
/* GPT-2's mapping between bytes and printable characters. */
uint32_t byte_to_character(uint8_t byte);
int character_to_byte(uint32_t character); /* -1: no byte's character */

/* ---- normalizer (normalizer.c) ----------------------------------------------------------- */

enum normalizer_kind {
    NORMALIZE_NFC,
    NORMALIZE_NFD,
    NORMALIZE_NFKC,
    NORMALIZE_NFKD,
    NORMALIZE_PREPEND,
    NORMALIZE_REPLACE,
    NORMALIZE_STRIP,
    NORMALIZE_LOWERCASE
};

struct normalizer_step {
    enum normalizer_kind kind;
    struct strbuf content;  /* PREPEND, REPLACE */
    struct pattern pattern; /* REPLACE */
    bool left, right;       /* STRIP */
};

/* Untrusted ranges that follow a text through its changes. */
struct marks {
    struct span *spans;
    size_t count, capacity;
    size_t begins, ends; /* how many have been moved by the present step */
};

void marks_restart(struct marks *m);
/* Bytes [from.begin, from.end) became [to.begin, to.end); ranges inside map byte by byte if both
 * are equal, else they grow to the whole. Calls must ascend. */
void marks_move(struct marks *m, struct span from, struct span to, bool equal);
/* Takes what a step added from *growth; LINNET_UNSUPPORTED if there is not so much. */
linnet_status growth_spend(size_t *growth, size_t before, size_t after, linnet_error *err);

/* Appends `text` after one step to out. *growth: how many bytes it may add, less what it did. */
linnet_status normalize(const struct normalizer_step *step, struct matcher *matcher,
                        const char *text, size_t n, struct strbuf *out, struct marks *marks,
                        size_t *growth, linnet_error *err);

/* ---- pre-tokenizer (pretokenizer.c) ------------------------------------------------------ */

enum split_behavior {
    SPLIT_REMOVED,
    SPLIT_ISOLATED,
    SPLIT_MERGED_WITH_PREVIOUS,
    SPLIT_MERGED_WITH_NEXT,
    SPLIT_CONTIGUOUS
};

enum pretokenizer_kind {
    PRETOKENIZE_SPLIT,  /* by `pattern` */
    PRETOKENIZE_DIGITS, /* by characters that are numeric */
    PRETOKENIZE_EDIT    /* blanks become `replacement`, and one may be put in front */
};

enum prepend_scheme { PREPEND_NEVER, PREPEND_FIRST, PREPEND_ALWAYS };

struct pretokenizer_step {
    enum pretokenizer_kind kind;
    struct pattern pattern;
    enum split_behavior behavior;
    bool invert;
    struct strbuf replacement;   /* EDIT */
    enum prepend_scheme prepend; /* EDIT: where a piece does not begin with it already */
};

struct pieces {
    struct span *spans;
    size_t count, capacity;
};

/* ---- added tokens (added_tokens.c) ------------------------------------------------------- */

struct added_token {
    int32_t id;
    const char *content; /* of the set's own strings */
    size_t size;
    bool single_word, lstrip, rstrip, normalized, special;
};

/* Sorted by content: the entries that begin with one byte lie together, and so on inwards. */
struct added_set {
    struct added_token *tokens;
    size_t count, capacity;
    size_t first[257];
};

struct added_match {
    struct span range;
    int32_t id;
};

struct added_scan {
    const struct added_set *set;
    const char *text;
    size_t size;
    bool parse_special;
    const struct span *untrusted; /* in offsets of text */
    size_t n_untrusted;
    size_t next, last_end; /* state: zero at first */
};

/* Copies the content. */
linnet_status added_set_add(struct added_set *set, const struct added_token *token,
                            linnet_error *err);
void added_set_prepare(struct added_set *set);
void added_set_free(struct added_set *set);
bool added_scan_next(struct added_scan *scan, struct added_match *match);

/* ---- merges (bpe.c) ---------------------------------------------------------------------- */

struct merge {
    int32_t left, right; /* left < 0: free slot */
    int32_t rank, result;
};

struct merges {
    struct merge *slots;
    size_t mask, count;
    uint64_t seed;
};

linnet_status merges_create(struct merges *m, size_t count, linnet_error *err);
linnet_status merges_add(struct merges *m, int32_t left, int32_t right, int32_t rank,
                         int32_t result, linnet_error *err);

struct bpe {
    struct merges merges;
    int32_t *score_rank; /* instead of merges: rank of each id by its score, 0 the best */
    bool byte_level, byte_fallback, fuse_unknown, ignore_merges;
    int32_t unknown;             /* -1: none */
    int32_t byte_character[256]; /* byte level: the id of a byte's character, or -1 */
    int32_t byte_token[256];     /* "<0xNN>", or -1 */
};

/* ---- the whole --------------------------------------------------------------------------- */

enum { AFFIX_LIMIT = 8 };

struct decoder_config {
    bool byte_level;
    bool byte_fallback;     /* "<0xNN>" is a byte; an invalid one gives a U+FFFD of its own */
    size_t strip_left;      /* blanks taken off the start of the whole text */
    bool first_dropped;     /* Metaspace: the first token loses all its blanks */
    struct strbuf from, to; /* Replace */
    int stage;              /* how far the list of decoders has been read */
};

struct tokenizer {
    struct vocabulary vocabulary;
    struct bpe bpe;
    struct added_set added, added_normalized;
    struct normalizer_step normalizer[STEP_LIMIT];
    size_t n_normalizer;
    struct pretokenizer_step pretokenizer[STEP_LIMIT];
    size_t n_pretokenizer;
    int32_t prefix[AFFIX_LIMIT], suffix[AFFIX_LIMIT]; /* what add_special adds */
    size_t n_prefix, n_suffix;
    struct decoder_config decoder;
    size_t longest_text; /* of one token, bytes */
    int32_t bos, eos;
};

struct symbol {
    int32_t id; /* -1: merged into its left neighbour */
    uint32_t begin;
    uint32_t previous, next; /* UINT32_MAX: none */
};

/* The memory of one encoding: kept from piece to piece. */
struct encoder {
    const struct tokenizer *t;
    struct token_list *out;
    struct matcher matcher;
    size_t growth; /* left */
    struct strbuf repaired, normal[2], edited[2], characters;
    struct marks marks, segment_marks;
    struct pieces pieces[2];
    struct symbol *symbols;
    size_t n_symbols, symbol_capacity;
    uint64_t *heap;
    size_t n_heap, heap_capacity;
    linnet_error *err;
};

linnet_status encoder_push(struct encoder *e, int32_t id);
/* Cuts text into pieces; *base is where their offsets point. */
linnet_status pretokenize(struct encoder *e, const char *text, size_t n, bool first,
                          const char **base, const struct pieces **pieces);
linnet_status bpe_encode(struct encoder *e, const char *piece, size_t n);

/* Once vocabulary, added tokens and decoder are known: fills the tables of bpe, the texts of all
 * tokens and the sets' indexes. */
linnet_status tokenizer_finish(struct tokenizer *t, linnet_error *err);
linnet_status tokenizer_add_token(struct tokenizer *t, const struct added_token *token,
                                  linnet_error *err);
linnet_status tokenizer_new(struct tokenizer **out, linnet_error *err);

/* tokenizer_json.c: tokenizer_config.json (may be NULL) names BOS and EOS. */
linnet_status tokenizer_from_json(struct tokenizer *t, const char *bytes, size_t size,
                                  const json_t *config, linnet_error *err);
/* tokenizer_gguf.c */
linnet_status tokenizer_from_gguf(struct tokenizer *t, const struct gguf *g, linnet_error *err);

/* Patterns that both kinds of file need. */
extern const char gpt2_pattern[];

#endif
