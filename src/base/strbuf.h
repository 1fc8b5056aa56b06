/*
 * strbuf.h - a growing byte buffer. A failed allocation sticks: later appends do nothing, so a
 * writer checks `failed` once, at the end. `data` is always NUL-terminated once anything was
 * appended; the bytes may themselves contain NUL.
 */
#ifndef LINNET_BASE_STRBUF_H
#define LINNET_BASE_STRBUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct strbuf {
    char *data; /* NULL while empty and never written */
    size_t size;
    size_t capacity;
    bool failed;
};

void strbuf_append(struct strbuf *b, const void *bytes, size_t n);
void strbuf_text(struct strbuf *b, const char *text);
void strbuf_char(struct strbuf *b, char c);
void strbuf_utf8(struct strbuf *b, uint32_t code_point);
void strbuf_format(struct strbuf *b, const char *format, ...) __attribute__((format(printf, 2, 3)));
void strbuf_clear(struct strbuf *b); /* empties, keeps the memory */
void strbuf_free(struct strbuf *b);  /* empties, frees, ready for use again */

/* The text, "" if empty; owned by b until the next append. */
const char *strbuf_cstr(const struct strbuf *b);

#endif
