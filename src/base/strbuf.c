#include "base/strbuf.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"

static bool reserve(struct strbuf *b, size_t more)
{
    size_t need;
    if (b->failed) return false;
    if (!size_add(b->size, more, &need) || !size_add(need, 1, &need) ||
        !mem_reserve((void **)&b->data, &b->capacity, need, 1)) {
        b->failed = true;
        return false;
    }
    return true;
}

void strbuf_append(struct strbuf *b, const void *bytes, size_t n)
{
    if (!reserve(b, n)) return;
    if (n) memcpy(b->data + b->size, bytes, n);
    b->size += n;
    b->data[b->size] = 0;
}

void strbuf_text(struct strbuf *b, const char *text)
{
    strbuf_append(b, text, strlen(text));
}

void strbuf_char(struct strbuf *b, char c)
{
    strbuf_append(b, &c, 1);
}

void strbuf_utf8(struct strbuf *b, uint32_t c)
{
    char s[4];
    if (c < 0x80) {
        s[0] = (char)c;
        strbuf_append(b, s, 1);
    } else if (c < 0x800) {
        s[0] = (char)(0xC0 | c >> 6);
        s[1] = (char)(0x80 | (c & 63));
        strbuf_append(b, s, 2);
    } else if (c < 0x10000) {
        s[0] = (char)(0xE0 | c >> 12);
        s[1] = (char)(0x80 | (c >> 6 & 63));
        s[2] = (char)(0x80 | (c & 63));
        strbuf_append(b, s, 3);
    } else {
        s[0] = (char)(0xF0 | c >> 18);
        s[1] = (char)(0x80 | (c >> 12 & 63));
        s[2] = (char)(0x80 | (c >> 6 & 63));
        s[3] = (char)(0x80 | (c & 63));
        strbuf_append(b, s, 4);
    }
}

void strbuf_format(struct strbuf *b, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    if (n < 0 || !reserve(b, (size_t)n)) {
        b->failed = true;
        return;
    }
    va_start(args, format);
    vsnprintf(b->data + b->size, (size_t)n + 1, format, args);
    va_end(args);
    b->size += (size_t)n;
}

void strbuf_clear(struct strbuf *b)
{
    b->size = 0;
    b->failed = false;
    if (b->data) b->data[0] = 0;
}

void strbuf_free(struct strbuf *b)
{
    free(b->data);
    *b = (struct strbuf){0};
}

const char *strbuf_cstr(const struct strbuf *b)
{
    return b->data ? b->data : "";
}
