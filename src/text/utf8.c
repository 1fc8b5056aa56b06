#include "text/utf8.h"

#include <string.h>

size_t utf8_decode(const char *s, size_t n, uint32_t *code_point)
{
    const uint8_t *b = (const uint8_t *)s;
    if (b[0] < 0x80) {
        *code_point = b[0];
        return 1;
    }
    *code_point = UTF8_INVALID;
    if (b[0] < 0xC2 || b[0] > 0xF4) return 1;
    size_t length = b[0] < 0xE0 ? 2 : b[0] < 0xF0 ? 3 : 4;
    uint32_t c = b[0] & (0x7F >> length);
    for (size_t i = 1; i < length; i++) {
        if (i == n) {
            *code_point = UTF8_INCOMPLETE;
            return n;
        }
        /* The second byte alone decides about overlong forms, surrogates and the upper end. */
        uint8_t low = 0x80, high = 0xBF;
        if (i == 1) {
            if (b[0] == 0xE0) low = 0xA0;
            if (b[0] == 0xED) high = 0x9F;
            if (b[0] == 0xF0) low = 0x90;
            if (b[0] == 0xF4) high = 0x8F;
        }
        if (b[i] < low || b[i] > high) return i;
        c = c << 6 | (b[i] & 0x3F);
    }
    *code_point = c;
    return length;
}

size_t utf8_decode_last(const char *s, size_t n, uint32_t *code_point)
{
    size_t length = 1;
    while (length < n && length < 4 && ((uint8_t)s[n - length] & 0xC0) == 0x80) length++;
    return utf8_decode(s + n - length, length, code_point);
}

size_t utf8_encode(uint32_t c, char *out)
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    size_t length = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = length - 1; i > 0; i--, c >>= 6) out[i] = (char)(0x80 | (c & 0x3F));
    out[0] = (char)((0xF00 >> length & 0xFF) | c);
    return length;
}

size_t utf8_valid(const char *s, size_t n)
{
    size_t i = 0;
    while (i < n) {
        uint64_t eight;
        if (n - i >= sizeof eight) {
            memcpy(&eight, s + i, sizeof eight);
            if ((eight & 0x8080808080808080u) == 0) {
                i += sizeof eight;
                continue;
            }
        }
        uint32_t c;
        size_t length = utf8_decode(s + i, n - i, &c);
        if (c >= UTF8_INVALID) return i;
        i += length;
    }
    return n;
}

bool utf8_is_white_space(uint32_t c)
{
    return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
           c == 0x205F || c == 0x3000;
}
