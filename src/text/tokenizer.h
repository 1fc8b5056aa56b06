/*
 * tokenizer.h - text to token ids and back, with ids equal to Hugging Face's.
 * Byte-level BPE and SentencePiece-style BPE with byte fallback, from tokenizer.json or from GGUF
 * metadata. A tokenizer is immutable once open and may be shared by threads.
 */
#ifndef LINNET_TEXT_TOKENIZER_H
#define LINNET_TEXT_TOKENIZER_H

#include "base/error.h"
#include "file/checkpoint.h"

struct tokenizer;

/* Growing list of ids; free with token_list_free. */
struct token_list {
    int32_t *ids;
    size_t count, capacity;
};
void token_list_free(struct token_list *list);

/* Half-open byte range of a text. */
struct span {
    size_t begin, end;
};

struct encode_options {
    bool add_special;   /* what the tokenizer itself adds: BOS, as its post-processor says */
    bool parse_special; /* "<|im_end|>" in the text becomes that token */
    /* With parse_special: ranges in ascending order in which it does not (the users' own words).
     * A special token that touches one stays text; a shorter one that does not is still found.
     * Added tokens that are not special (such as <think>) are always parsed, as Hugging Face does.
     */
    const struct span *untrusted;
    size_t n_untrusted;
};

linnet_status tokenizer_open(const struct checkpoint *cp, struct tokenizer **out,
                             linnet_error *err);
/* A bare tokenizer.json in memory; `name` is for messages. The bytes may go once it returns. */
linnet_status tokenizer_open_json(const char *bytes, size_t size, const char *name,
                                  struct tokenizer **out, linnet_error *err);
void tokenizer_close(struct tokenizer *t);

/*
 * Appends the ids of text (n bytes; invalid UTF-8 is replaced by U+FFFD as Hugging Face would see
 * it) to out. Linear time (merging: n log n), no recursion. Fails for want of memory, where the
 * file's regular expression takes PCRE2 past its limit of steps, or where its replacements make the
 * text grow without end; out is then as before.
 */
linnet_status tokenizer_encode(const struct tokenizer *t, const char *text, size_t n,
                               const struct encode_options *options, struct token_list *out,
                               linnet_error *err);

/* Highest id + 1. A model's matrix may have more rows: those ids decode to nothing. */
int32_t tokenizer_size(const struct tokenizer *t);

/* The raw bytes of one token as they stand inside a text (for SentencePiece with the blank, so
 * "\xE2\x96\x81the" gives " the"); size 0 for ids outside the tokenizer. Owned by the tokenizer. */
const char *tokenizer_bytes(const struct tokenizer *t, int32_t id, size_t *size);

bool tokenizer_is_special(const struct tokenizer *t, int32_t id);
/* The id of a token by its written form ("<|im_end|>"), or -1. */
int32_t tokenizer_find(const struct tokenizer *t, const char *token);
/* -1 where there is none. */
int32_t tokenizer_bos(const struct tokenizer *t);
int32_t tokenizer_eos(const struct tokenizer *t);

/* ---- streaming back to text ------------------------------------------------------------- */

/*
 * A detokenizer turns ids, one by one, into text that may be shown: only whole UTF-8 characters
 * (invalid bytes come out as U+FFFD, as Hugging Face's decoder gives, at the latest at the end),
 * and no text that may still become a stop string. All memory is reserved by detokenizer_create:
 * pushing allocates nothing. Not thread-safe.
 * One difference remains: in a run of SentencePiece's byte tokens that is not UTF-8, Hugging Face
 * turns every byte into U+FFFD, also those before the first invalid one. Here characters that are
 * complete have been given out by then, and stay; from the invalid byte on it is the same.
 */
struct detokenizer;

struct detokenizer_options {
    bool skip_special;        /* special tokens give no text (the default of chat) */
    const char *const *stops; /* stop strings, each not empty; copied */
    size_t n_stops;
    bool include_stop; /* keep the stop string in the text */
};

linnet_status detokenizer_create(const struct tokenizer *t,
                                 const struct detokenizer_options *options,
                                 struct detokenizer **out, linnet_error *err);
void detokenizer_destroy(struct detokenizer *d);

/*
 * Adds one id. *text and *size: what may now be given out (possibly nothing), valid until the next
 * call. Returns true once a stop string has been completed: the earliest-completed one wins, the
 * text given out ends before it, and nothing more must be pushed.
 */
bool detokenizer_push(struct detokenizer *d, int32_t id, const char **text, size_t *size);
/* Which stop string that was: its index among the options' stops, from 1; 0: none so far. */
size_t detokenizer_stop(const struct detokenizer *d);
/* The end of the answer: gives out what was held back. */
void detokenizer_finish(struct detokenizer *d, const char **text, size_t *size);
/* Ready for another answer with the same options (the sequence starts anew). */
void detokenizer_reset(struct detokenizer *d);

/* Whole-list decoding, equal to pushing all ids and finishing. Appends to out. */
struct strbuf;
linnet_status tokenizer_decode(const struct tokenizer *t, const int32_t *ids, size_t n,
                               bool skip_special, struct strbuf *out, linnet_error *err);

#endif
