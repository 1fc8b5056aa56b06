/*
 * gguf.h - a GGUF file (versions 2 and 3): metadata and tensor table, every length and offset
 * checked when it is opened. All views stay valid until gguf_close.
 * Specification: the GGUF document of the ggml project.
 */
#ifndef LINNET_FILE_GGUF_H
#define LINNET_FILE_GGUF_H

#include "base/dtype.h"
#include "base/error.h"
#include "file/checkpoint.h"

struct gguf;

enum gguf_type {
    GGUF_U8,
    GGUF_I8,
    GGUF_U16,
    GGUF_I16,
    GGUF_U32,
    GGUF_I32,
    GGUF_F32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_U64,
    GGUF_I64,
    GGUF_F64
};

/* Bytes inside the file; not NUL-terminated. */
struct view {
    const char *data;
    size_t size;
};

/* An array of the metadata: `count` elements of type `element`, all inside the file (strings
 * included: a walk over `count` of them stays within `size`). No array of arrays is ever opened. */
struct gguf_array {
    enum gguf_type element;
    size_t count;
    const uint8_t *data; /* unaligned; strings lie as u64 length + bytes, one after another */
    size_t size;         /* bytes of data */
};

/*
 * Opens `path` (for a split file: any part; the others are found beside it and checked). Of the
 * vocabulary it is checked that tokens and merges are strings (a merge is "left right"),
 * token_type i32 and scores f32, one a token, and bos, eos, eot, eom and unknown ids are below the
 * number of tokens or stand for "none". Tokens need not be UTF-8. Keys and tensor names are UTF-8
 * without NUL, each unique.
 */
linnet_status gguf_open(const char *path, struct gguf **out, linnet_error *err);
/* The same over bytes in memory, which must outlive it (tests, fuzzing). No split files. */
linnet_status gguf_open_memory(const void *bytes, size_t size, const char *name, struct gguf **out,
                               linnet_error *err);
void gguf_close(struct gguf *g);
const char *gguf_path(const struct gguf *g);

/* Metadata. False if the key is absent or has another type; integers of any width convert if they
 * fit, and F32/F64 both read as double. */
bool gguf_has(const struct gguf *g, const char *key);
bool gguf_string(const struct gguf *g, const char *key, struct view *out);
bool gguf_integer(const struct gguf *g, const char *key, int64_t *out);
bool gguf_number(const struct gguf *g, const char *key, double *out);
bool gguf_bool(const struct gguf *g, const char *key, bool *out);
bool gguf_array(const struct gguf *g, const char *key, struct gguf_array *out);

/* The token that one of the ids checked above names; -1 for none: the key is absent or holds -1,
 * which some write as 4294967295. */
int32_t gguf_token_id(const struct gguf *g, const char *key);

/* All keys, for `inspect`: name and a short printable form of the value (at most n bytes). */
size_t gguf_key_count(const struct gguf *g);
struct view gguf_key(const struct gguf *g, size_t i);
void gguf_describe(const struct gguf *g, size_t i, char *out, size_t n);

/* Tensors in file order, names as in the file ("blk.0.attn_q.weight"), shape slowest first. */
size_t gguf_tensor_count(const struct gguf *g);
const struct tensor *gguf_tensor(const struct gguf *g, size_t i);

#endif
