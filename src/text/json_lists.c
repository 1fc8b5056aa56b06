#include "text/json_lists.h"

#include <string.h>

#include "text/utf8.h"

static bool is_json_blank(char c)
{
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

static size_t skip_blanks(const char *s, size_t n, size_t i)
{
    while (i < n && is_json_blank(s[i])) i++;
    return i;
}

/* From an opening quote to behind the closing one, or n. */
static size_t skip_string(const char *s, size_t n, size_t i)
{
    for (i++; i < n && s[i] != '"'; i++)
        if (s[i] == '\\') i++;
    return i < n ? i + 1 : n;
}

/* From an opening bracket to behind the closing one, or n. */
static size_t skip_nested(const char *s, size_t n, size_t i)
{
    size_t depth = 0;
    while (i < n) {
        char c = s[i];
        i = c == '"' ? skip_string(s, n, i) : i + 1;
        if (c == '{' || c == '[') depth++;
        if ((c == '}' || c == ']') && --depth == 0) return i;
    }
    return n;
}

static bool is_key(const char *s, size_t begin, size_t end, const char *key)
{
    size_t size = strlen(key);
    return end - begin == size + 2 && memcmp(s + begin + 1, key, size) == 0;
}

linnet_status json_cut_lists(const char *s, size_t n, struct json_range *vocab,
                             struct json_range *merges, struct strbuf *rest, linnet_error *err)
{
    size_t depth = 0, copied = 0;
    bool in_model = false;
    for (size_t i = 0; i < n;) {
        if (s[i] != '"') {
            if (s[i] == '{' || s[i] == '[') depth++;
            if ((s[i] == '}' || s[i] == ']') && depth && --depth == 1) in_model = false;
            i++;
            continue;
        }
        size_t end = skip_string(s, n, i), colon = skip_blanks(s, n, end);
        size_t value = colon < n && s[colon] == ':' ? skip_blanks(s, n, colon + 1) : n;
        char first = value < n ? s[value] : 0;
        bool list = depth == 2 && in_model;
        if (depth == 1 && first == '{' && is_key(s, i, end, "model")) in_model = true;
        bool is_vocab = list && first == '{' && is_key(s, i, end, "vocab");
        bool is_merges = list && first == '[' && is_key(s, i, end, "merges");
        i = end;
        if (!is_vocab && !is_merges) continue;
        i = skip_nested(s, n, value);
        *(is_vocab ? vocab : merges) = (struct json_range){s + value, i - value};
        strbuf_append(rest, s + copied, value - copied);
        strbuf_text(rest, "null");
        copied = i;
    }
    strbuf_append(rest, s + copied, n - copied);
    return rest->failed ? error_memory(err, "tokenizer.json", n) : LINNET_OK;
}

bool json_skip(struct json_cursor *c, char expected)
{
    c->pos = skip_blanks(c->range.data, c->range.size, c->pos);
    if (c->failed || c->pos == c->range.size || c->range.data[c->pos] != expected) return false;
    c->pos++;
    return true;
}

static bool hexadecimal(const char *s, size_t n, uint32_t *out)
{
    *out = 0;
    if (n < 4) return false;
    for (size_t i = 0; i < 4; i++) {
        char c = s[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0) return false;
        *out = *out << 4 | (uint32_t)digit;
    }
    return true;
}

/* What follows "\u": one unit, or two that are a surrogate pair. Returns bytes read, 0 if wrong. */
static size_t unescape_unicode(const char *s, size_t n, struct strbuf *out)
{
    uint32_t high, low;
    if (!hexadecimal(s, n, &high) || (high >= 0xDC00 && high <= 0xDFFF)) return 0;
    if (high < 0xD800 || high > 0xDBFF) {
        strbuf_utf8(out, high);
        return 4;
    }
    if (n < 10 || s[4] != '\\' || s[5] != 'u' || !hexadecimal(s + 6, n - 6, &low)) return 0;
    if (low < 0xDC00 || low > 0xDFFF) return 0;
    strbuf_utf8(out, 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00));
    return 10;
}

static bool unescape(const char *s, size_t n, struct strbuf *out)
{
    static const char letters[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    strbuf_clear(out);
    for (size_t i = 0; i < n;) {
        const char *escape = memchr(s + i, '\\', n - i);
        size_t plain = escape ? (size_t)(escape - (s + i)) : n - i;
        strbuf_append(out, s + i, plain);
        i += plain;
        if (i == n) break;
        char c = s[i + 1]; /* there is one: no string ends in a lone backslash */
        const char *letter = c ? strchr(letters, c) : NULL;
        if (letter) strbuf_char(out, meanings[letter - letters]);
        size_t used = letter ? 0 : c == 'u' ? unescape_unicode(s + i + 2, n - i - 2, out) : 0;
        if (!letter && !used) return false;
        i += 2 + used;
    }
    return !out->failed;
}

bool json_string_at(struct json_cursor *c, struct json_range *out)
{
    if (!json_skip(c, '"')) {
        c->failed = true;
        return false;
    }
    const char *s = c->range.data + c->pos;
    size_t n = c->range.size - c->pos, i = 0;
    bool escaped = false;
    for (; i < n && s[i] != '"'; i++) {
        if ((unsigned char)s[i] < 0x20) break;
        if (s[i] == '\\') escaped = true, i++;
    }
    if (i >= n || s[i] != '"') {
        c->failed = true;
        return false;
    }
    c->pos += i + 1;
    *out = (struct json_range){s, i};
    if (escaped) {
        struct strbuf *text = &c->strings[c->n_strings++ % 2];
        c->failed = !unescape(s, i, text);
        *out = (struct json_range){strbuf_cstr(text), text->size};
    }
    return !c->failed;
}

bool json_integer_at(struct json_cursor *c, int64_t *out)
{
    bool negative = json_skip(c, '-');
    const char *s = c->range.data;
    size_t begin = c->pos = skip_blanks(s, c->range.size, c->pos);
    int64_t value = 0;
    for (; c->pos < c->range.size && s[c->pos] >= '0' && s[c->pos] <= '9'; c->pos++)
        if (value < INT64_MAX / 100) value = value * 10 + (s[c->pos] - '0'); /* large is enough */
    if (c->pos == begin) c->failed = true;
    *out = negative ? -value : value;
    return !c->failed;
}

size_t json_count_commas(struct json_range range)
{
    size_t count = 1;
    for (size_t i = 0; i < range.size; i++) count += range.data[i] == ',';
    return count;
}

void json_cursor_free(struct json_cursor *c)
{
    strbuf_free(&c->strings[0]);
    strbuf_free(&c->strings[1]);
}
