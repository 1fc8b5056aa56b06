/*
 * json_lists.h - the two long lists of a tokenizer.json. A vocabulary and its merges are nine
 * tenths of the file; as a tree of values they would take most of the time of opening. They are
 * cut out and read in place, and only the rest is parsed into a tree.
 */
#ifndef LINNET_TEXT_JSON_LISTS_H
#define LINNET_TEXT_JSON_LISTS_H

#include "base/error.h"
#include "base/strbuf.h"

struct json_range {
    const char *data; /* NULL: not there */
    size_t size;
};

/* Finds "vocab" and "merges" of the object "model"; *rest becomes the text with null for both. */
linnet_status json_cut_lists(const char *bytes, size_t size, struct json_range *vocab,
                             struct json_range *merges, struct strbuf *rest, linnet_error *err);

/* Reads one list, value by value. After a failure everything fails. */
struct json_cursor {
    struct json_range range;
    size_t pos;
    bool failed;
    struct strbuf strings[2]; /* where strings with escapes are written, by turns */
    size_t n_strings;
};

/* Skips blanks, then c. False (and nothing skipped but blanks) if it is another character. */
bool json_skip(struct json_cursor *c, char expected);
/* The bytes stay valid until the second string after this one. */
bool json_string_at(struct json_cursor *c, struct json_range *out);
bool json_integer_at(struct json_cursor *c, int64_t *out);
/* An upper bound of the number of elements. */
size_t json_count_commas(struct json_range range);
void json_cursor_free(struct json_cursor *c);

#endif
