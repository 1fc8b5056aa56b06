/* gguf_internal.h - what the GGUF sources share: one parsed file of a set. */
#ifndef LINNET_FILE_GGUF_INTERNAL_H
#define LINNET_FILE_GGUF_INTERNAL_H

#include "base/reader.h"
#include "file/gguf.h"
#include "file/mapping.h"

struct gguf_entry {
    struct view key;
    enum gguf_type type;
    enum gguf_type element; /* of an array */
    size_t count;           /* elements of an array */
    const uint8_t *data;    /* the scalar, the string's bytes, or the array's elements */
    size_t size;            /* bytes of data */
};

struct gguf_part {
    char *path;
    struct mapping map;   /* zero for bytes in memory */
    struct reader reader; /* the whole file; after gguf_read_metadata at the tensor table */
    size_t n_tensors;
    struct gguf_entry *entries; /* in file order */
    size_t n_entries, capacity;
    const struct gguf_entry **by_key; /* the same, sorted */
};

struct gguf {
    char *path;
    struct gguf_part *parts; /* the metadata of the set is that of the first */
    size_t n_parts;
    struct tensor *tensors; /* of all parts; each name is owned */
    size_t n_tensors, capacity;
};

/* part->reader stands at the start of the file. */
linnet_status gguf_read_metadata(struct gguf_part *part, linnet_error *err);
const struct gguf_entry *gguf_find(const struct gguf_part *part, struct view key);

/* Appends the part's tensors to g->tensors. */
linnet_status gguf_read_tensors(struct gguf *g, struct gguf_part *part, linnet_error *err);
/* Over all parts: no name twice, no byte in two tensors. */
linnet_status gguf_check_tensors(const struct gguf *g, linnet_error *err);

/* What the tokenizer's arrays and ids must satisfy before anyone indexes one by another. */
linnet_status gguf_check_vocabulary(const struct gguf *g, linnet_error *err);

const char *gguf_type_name(enum gguf_type type);
bool view_is_utf8(struct view v);

static inline struct view view_text(const char *text)
{
    return (struct view){text, strlen(text)};
}

static inline bool view_equal(struct view a, struct view b)
{
    return a.size == b.size && (a.size == 0 || memcmp(a.data, b.data, a.size) == 0);
}

/* For "%.*s" in messages: enough to recognise a name, not enough to flood a log. */
static inline int view_shown(struct view v)
{
    return v.size < 100 ? (int)v.size : 100;
}

#endif
