/* utf8.h - UTF-8 read as Python's "replace" and Rust's from_utf8_lossy do: what cannot be part of
 * a character is cut into maximal subparts, each of which stands for one U+FFFD. */
#ifndef LINNET_TEXT_UTF8_H
#define LINNET_TEXT_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    UTF8_INVALID = 0x110000,    /* these bytes are one U+FFFD */
    UTF8_INCOMPLETE = 0x110001, /* so are these, unless more bytes complete them */
    UTF8_REPLACEMENT = 0xFFFD
};

/* Decodes the character at s (n >= 1 bytes there). Returns how many bytes it takes. */
size_t utf8_decode(const char *s, size_t n, uint32_t *code_point);
/* Decodes the character that ends at s + n (well-formed text, n >= 1). */
size_t utf8_decode_last(const char *s, size_t n, uint32_t *code_point);
/* Returns how many bytes were written (at most 4). */
size_t utf8_encode(uint32_t code_point, char *out);
/* How many bytes from s on are well-formed. */
size_t utf8_valid(const char *s, size_t n);
/* Unicode's White_Space. */
bool utf8_is_white_space(uint32_t code_point);

#endif
