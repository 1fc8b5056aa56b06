/* Template source to tokens, with Jinja's rules for the white space around tags. */
#include <stdlib.h>
#include <string.h>

#include "text/template_internal.h"

struct lexer {
    struct compile *compile;
    const char *source; /* newlines are all "\n" */
    size_t size, pos;
    int line;
    bool line_starting; /* the last thing read ended with a newline */
};

static bool refuse(struct lexer *l, const char *message)
{
    return jinja_refuse(l->compile, LINNET_FORMAT, l->line, "%s", message);
}

static struct token *add(struct lexer *l, enum token_kind kind)
{
    struct token_vector *v = &l->compile->tokens;
    if (!mem_reserve((void **)&v->items, &v->capacity, v->count + 1, sizeof *v->items)) {
        error_memory(l->compile->err, "a chat template", v->count * sizeof *v->items);
        return NULL;
    }
    struct token *token = &v->items[v->count++];
    *token = (struct token){.kind = kind, .line = l->line};
    return token;
}

static bool starts(const struct lexer *l, size_t at, const char *text)
{
    size_t n = strlen(text);
    return at <= l->size && n <= l->size - at && memcmp(l->source + at, text, n) == 0;
}

static size_t skip_space(const struct lexer *l, size_t at)
{
    return text_skip_space(l->source, at, l->size);
}

static void advance(struct lexer *l, size_t to)
{
    for (size_t i = l->pos; i < to; i++) l->line += l->source[i] == '\n';
    if (to > l->pos) l->line_starting = l->source[to - 1] == '\n';
    l->pos = to;
}

/* The end of a closing tag at `at` (with its sign and the white space it eats), or 0. */
static size_t closing(const struct lexer *l, size_t at, const char *tag, bool takes_newline)
{
    bool minus = starts(l, at, "-");
    if (minus || (takes_newline && starts(l, at, "+"))) {
        if (!starts(l, at + 1, tag)) return 0;
        return minus ? skip_space(l, at + 3) : at + 3;
    }
    if (!starts(l, at, tag)) return 0;
    return at + 2 + (takes_newline && starts(l, at + 2, "\n"));
}

/* Text before a tag at `end`: `sign` and `strips` (not for variables) say what it loses. */
static bool add_data(struct lexer *l, size_t begin, size_t end, char sign, bool strips)
{
    if (sign == '-') {
        end = text_back_over_space(l->source, begin, end);
    } else if (sign != '+' && strips) {
        size_t line = end;
        while (line > begin && l->source[line - 1] != '\n') line--;
        if ((line > begin || l->line_starting) &&
            text_back_over_space(l->source, line, end) == line)
            end = line;
    }
    if (end == begin) return true;
    struct token *token = add(l, TOKEN_DATA);
    if (!token) return false;
    token->bytes = l->source + begin;
    token->size = end - begin;
    return true;
}

/* {% raw %} at `tag`: the position after its closing, or 0 if the tag is another one. */
static size_t raw_begin(const struct lexer *l, size_t after_sign)
{
    size_t at = skip_space(l, after_sign);
    if (!starts(l, at, "raw")) return 0;
    at = skip_space(l, at + 3);
    if (starts(l, at, "-%}")) return skip_space(l, at + 3);
    return starts(l, at, "%}") ? at + 2 : 0;
}

static bool read_raw(struct lexer *l)
{
    for (size_t at = l->pos; at < l->size; at++) {
        if (!starts(l, at, "{%")) continue;
        char sign = at + 2 < l->size ? l->source[at + 2] : 0;
        size_t word = skip_space(l, at + 2 + (sign == '-' || sign == '+'));
        if (!starts(l, word, "endraw")) continue;
        size_t end = closing(l, skip_space(l, word + 6), "%}", true);
        if (!end) continue;
        if (!add_data(l, l->pos, at, sign, true)) return false;
        advance(l, end);
        return true;
    }
    return refuse(l, "missing end of raw directive; add {% endraw %}");
}

static bool read_comment(struct lexer *l)
{
    for (size_t at = l->pos; at + 1 < l->size; at++) {
        size_t end = closing(l, at, "#}", true);
        if (!end) continue;
        advance(l, end);
        return true;
    }
    return refuse(l, "missing end of comment tag; add #}");
}

static bool name_start(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

static bool digit(char c)
{
    return c >= '0' && c <= '9';
}

static char at(const struct lexer *l, size_t i)
{
    return i < l->size ? l->source[i] : 0;
}

/* Digits with single underscores between them: the end, or `i` if there are none. */
static size_t digits(const struct lexer *l, size_t i)
{
    while (digit(at(l, i))) i += 1 + (at(l, i + 1) == '_' && digit(at(l, i + 2)));
    return i;
}

static size_t hex_value(const char *s, size_t n, uint32_t *out)
{
    *out = 0;
    for (size_t i = 0; i < n; i++) {
        char c = (char)(s[i] | 0x20);
        if (!digit(s[i]) && (c < 'a' || c > 'f')) return 0;
        *out = *out << 4 | (uint32_t)(digit(s[i]) ? s[i] - '0' : c - 'a' + 10);
    }
    return n;
}

/* One escape at s (after the backslash): appends what it means, returns the bytes read or 0. */
static size_t escape(const char *s, size_t left, struct strbuf *out)
{
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    uint32_t c = 0;
    const char *simple = s[0] ? strchr(from, s[0]) : NULL;
    if (simple) {
        strbuf_char(out, to[simple - from]);
        return 1;
    }
    if (s[0] == '\n') return 1;
    if (s[0] >= '0' && s[0] <= '7') {
        size_t n = 0;
        for (; n < 3 && n < left && s[n] >= '0' && s[n] <= '7'; n++)
            c = c * 8 + (uint32_t)(s[n] - '0');
        strbuf_utf8(out, c);
        return n;
    }
    size_t n = s[0] == 'x' ? 2 : s[0] == 'u' ? 4 : s[0] == 'U' ? 8 : 0;
    if (n) {
        if (left <= n || !hex_value(s + 1, n, &c) || c > 0x10FFFF || (c >> 11) == 0x1B) return 0;
        strbuf_utf8(out, c);
        return n + 1;
    }
    if (s[0] == 'N') return 0;
    strbuf_char(out, '\\'); /* an unknown escape stands for itself */
    if ((unsigned char)s[0] < 0x80) {
        strbuf_char(out, s[0]);
        return 1;
    }
    /* Jinja's detour through ASCII turns a backslash before e.g. U+00E9 into the text \xe9. */
    int32_t code;
    n = template_decode(s, left, 0, &code);
    strbuf_format(out, code < 0x100 ? "x%02x" : code < 0x10000 ? "u%04x" : "U%08x", (unsigned)code);
    return n;
}

static bool unescape(struct compile *c, struct token *token)
{
    struct strbuf text = {0};
    for (size_t i = 0; i < token->size;) {
        if (token->bytes[i] != '\\') {
            strbuf_char(&text, token->bytes[i++]);
            continue;
        }
        size_t n = escape(token->bytes + i + 1, token->size - i - 1, &text);
        if (n == 0) {
            strbuf_free(&text);
            return jinja_refuse(c, LINNET_FORMAT, token->line,
                                "a string has a bad or unsupported escape \\%c",
                                token->bytes[i + 1]);
        }
        i += 1 + n;
    }
    char *copy = text.failed ? NULL : arena_array(&c->t->arena, text.size + 1, 1);
    if (copy) memcpy(copy, strbuf_cstr(&text), text.size + 1);
    token->bytes = copy;
    token->size = text.size;
    strbuf_free(&text);
    return copy != NULL;
}

static bool read_number(struct lexer *l)
{
    size_t begin = l->pos, end = digits(l, begin), whole = end;
    bool after_dot = begin > 0 && l->source[begin - 1] == '.', real = false;
    int base = 10;
    if (!after_dot && at(l, end) == '.' && digit(at(l, end + 1))) {
        end = digits(l, end + 1);
        real = true;
    }
    if (!after_dot && (at(l, end) == 'e' || at(l, end) == 'E')) {
        size_t exponent = end + 1 + (at(l, end + 1) == '+' || at(l, end + 1) == '-');
        if (digit(at(l, exponent))) {
            end = digits(l, exponent);
            real = true;
        }
    }
    char kind = (char)(at(l, begin + 1) | 0x20);
    if (!real && l->source[begin] == '0') {
        base = kind == 'x' ? 16 : kind == 'o' ? 8 : kind == 'b' ? 2 : 10;
        if (base != 10) end = begin + 2;
        while (base != 10 && strchr("0123456789abcdef_", at(l, end) | 0x20) && at(l, end)) end++;
        if (base == 10 && strspn(l->source + begin, "0_") < whole - begin)
            return refuse(l, "a number may not start with 0");
    }
    char text[400];
    size_t n = 0;
    for (size_t i = begin + (base == 10 ? 0 : 2); i < end; i++) {
        if (l->source[i] == '_') continue;
        if (n + 1 == sizeof text) return refuse(l, "a number is too long");
        text[n++] = l->source[i];
    }
    text[n] = 0;
    struct token *token = add(l, real ? TOKEN_FLOAT : TOKEN_INTEGER);
    if (!token) return false;
    if (real) {
        bool ok;
        token->real = float_parse(text, n, &ok);
    }
    for (size_t i = 0; !real && i < n; i++) {
        int value = digit(text[i]) ? text[i] - '0' : (text[i] | 0x20) - 'a' + 10;
        if (value >= base) return refuse(l, "a digit is too large for its number's base");
        if (__builtin_mul_overflow(token->integer, base, &token->integer) ||
            __builtin_add_overflow(token->integer, value, &token->integer))
            return refuse(l, "an integer does not fit in 64 bits");
    }
    if (n == 0) return refuse(l, "a number has no digits");
    advance(l, end);
    return true;
}

static bool read_string(struct lexer *l)
{
    char quote = l->source[l->pos];
    size_t begin = l->pos + 1, end = begin;
    bool escaped = false;
    while (end < l->size && l->source[end] != quote) {
        escaped |= l->source[end] == '\\';
        end += 1 + (l->source[end] == '\\');
    }
    if (end >= l->size) return refuse(l, "a string has no end; add the closing quote");
    struct token *token = add(l, TOKEN_STRING);
    if (!token) return false;
    token->bytes = l->source + begin;
    token->size = end - begin;
    if (escaped && !unescape(l->compile, token)) return false;
    advance(l, end + 1);
    return true;
}

static bool read_name(struct lexer *l)
{
    size_t end = l->pos;
    while (name_start(at(l, end)) || digit(at(l, end))) end++;
    struct token *token = add(l, TOKEN_NAME);
    char *copy = arena_new(&l->compile->t->arena, end - l->pos + 1, 1);
    if (!token || !copy) return false;
    memcpy(copy, l->source + l->pos, end - l->pos);
    token->bytes = copy;
    token->size = end - l->pos;
    advance(l, end);
    return true;
}

static bool read_operator(struct lexer *l, char *open, size_t *n_open)
{
    static const struct {
        char text[3];
        int op;
    } pairs[] = {{"==", OP_EQ}, {"!=", OP_NE},    {"<=", OP_LE},
                 {">=", OP_GE}, {"**", OP_POWER}, {"//", OP_FLOOR_DIVIDE}};
    char c = l->source[l->pos];
    int op = c;
    size_t length = 1;
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        if (!starts(l, l->pos, pairs[i].text)) continue;
        op = pairs[i].op;
        length = 2;
    }
    if (length == 1 && (!c || !strchr("+-*/%~()[]{},:.|<>=;", c)))
        return jinja_refuse(l->compile, LINNET_FORMAT, l->line,
                            "unexpected character '%c' in a tag", c);
    if (length == 1 && strchr("([{", c)) {
        if (*n_open == MAX_NESTING)
            return refuse(l, "brackets are nested too deeply; the limit is 200");
        open[(*n_open)++] = c == '(' ? ')' : c == '[' ? ']' : '}';
    } else if (length == 1 && strchr(")]}", c)) {
        if (*n_open == 0 || open[--*n_open] != c)
            return jinja_refuse(l->compile, LINNET_FORMAT, l->line, "unexpected '%c'", c);
    }
    struct token *token = add(l, TOKEN_OPERATOR);
    if (!token) return false;
    token->op = op;
    advance(l, l->pos + length);
    return true;
}

/* The inside of {{ }} or {% %}, with its end. */
static bool read_tag(struct lexer *l, bool block)
{
    char open[MAX_NESTING];
    size_t n_open = 0;
    while (l->pos < l->size) {
        size_t end = n_open ? 0 : closing(l, l->pos, block ? "%}" : "}}", block);
        if (end) {
            if (!add(l, block ? TOKEN_BLOCK_END : TOKEN_VARIABLE_END)) return false;
            advance(l, end);
            return true;
        }
        char c = l->source[l->pos];
        size_t space = skip_space(l, l->pos);
        bool ok = true;
        if (space > l->pos)
            advance(l, space);
        else if (digit(c))
            ok = read_number(l);
        else if (name_start(c))
            ok = read_name(l);
        else if (c == '\'' || c == '"')
            ok = read_string(l);
        else
            ok = read_operator(l, open, &n_open);
        if (!ok) return false;
    }
    return refuse(l, block ? "a tag has no end; add %}" : "an expression has no end; add }}");
}

static bool read_template(struct lexer *l)
{
    while (l->pos < l->size) {
        size_t tag = l->pos;
        char kind = 0;
        for (; tag + 1 < l->size; tag++) {
            kind = l->source[tag] == '{' ? l->source[tag + 1] : 0;
            if (kind == '%' || kind == '{' || kind == '#') break;
        }
        if (tag + 1 >= l->size) return add_data(l, l->pos, l->size, '+', false);
        char sign = at(l, tag + 2);
        size_t inside = tag + 2 + (sign == '-' || sign == '+');
        if (!add_data(l, l->pos, tag, sign, kind != '{')) return false;
        size_t raw = kind == '%' ? raw_begin(l, inside) : 0;
        advance(l, raw ? raw : inside);
        bool ok;
        if (raw)
            ok = read_raw(l);
        else if (kind == '#')
            ok = read_comment(l);
        else
            ok = add(l, kind == '%' ? TOKEN_BLOCK_BEGIN : TOKEN_VARIABLE_BEGIN) != NULL &&
                 read_tag(l, kind == '%');
        if (!ok) return false;
    }
    return true;
}

/* Newlines become "\n"; one at the very end is dropped, as Jinja does. */
static size_t normalize(const char *source, size_t size, char *out)
{
    size_t n = 0;
    for (size_t i = 0; i < size; i++) {
        if (source[i] == '\r' && i + 1 < size && source[i + 1] == '\n') continue;
        out[n++] = source[i] == '\r' ? '\n' : source[i];
    }
    if (n > 0 && out[n - 1] == '\n') n--;
    out[n] = 0;
    return n;
}

bool jinja_tokenize(struct compile *c, const char *source, size_t size)
{
    struct lexer l = {.compile = c, .line = 1, .line_starting = true};
    char *copy = arena_array(&c->t->arena, size + 1, 1);
    bool ok = copy != NULL;
    if (ok) {
        l.size = normalize(source, size, copy);
        l.source = copy;
        ok = read_template(&l) && add(&l, TOKEN_END) != NULL;
    }
    if (!ok && c->err && c->err->status == LINNET_OK) error_memory(c->err, "a chat template", size);
    return ok;
}
