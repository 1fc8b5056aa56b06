#include "serve/json_scan.h"

bool json_is_blank(char c)
{
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool in_object(const struct json_scan *s)
{
    return s->objects[(s->depth - 1) / 8] >> ((s->depth - 1) % 8) & 1;
}

static enum json_step go(struct json_scan *s, enum json_scan_state state, enum json_step step)
{
    s->state = state;
    return step;
}

static enum json_step open(struct json_scan *s, bool object)
{
    if (s->depth == JSON_SCAN_DEPTH) return JSON_STEP_BAD;
    uint8_t bit = (uint8_t)(1U << (s->depth % 8));
    if (object)
        s->objects[s->depth / 8] |= bit;
    else
        s->objects[s->depth / 8] &= (uint8_t)~bit;
    s->depth++;
    return go(s, object ? JSON_SCAN_FIRST_KEY : JSON_SCAN_FIRST_ELEMENT, JSON_STEP_BEGIN);
}

static enum json_step close(struct json_scan *s, char c)
{
    if (s->depth == 0 || c != (in_object(s) ? '}' : ']')) return JSON_STEP_BAD;
    s->depth--;
    return go(s, JSON_SCAN_AFTER, JSON_STEP_END);
}

/* ---- strings ------------------------------------------------------------------------------- */

static enum json_step begin_string(struct json_scan *s, bool is_key)
{
    s->is_key = is_key;
    s->text_size = 0;
    return go(s, JSON_SCAN_STRING, is_key ? JSON_STEP_MORE : JSON_STEP_BEGIN);
}

static enum json_step keep(struct json_scan *s, char c)
{
    if (s->text_size < sizeof s->text) s->text[s->text_size] = c;
    s->text_size++;
    return go(s, JSON_SCAN_STRING, JSON_STEP_MORE);
}

static enum json_step in_string(struct json_scan *s, char c)
{
    if (c == '"')
        return s->is_key ? go(s, JSON_SCAN_COLON, JSON_STEP_KEY)
                         : go(s, JSON_SCAN_AFTER, JSON_STEP_END);
    if (c == '\\') return go(s, JSON_SCAN_ESCAPE, JSON_STEP_MORE);
    return (unsigned char)c < 0x20 ? JSON_STEP_BAD : keep(s, c);
}

static enum json_step in_escape(struct json_scan *s, char c)
{
    switch (c) {
    case '"':
    case '\\':
    case '/': return keep(s, c);
    case 'b': return keep(s, '\b');
    case 'f': return keep(s, '\f');
    case 'n': return keep(s, '\n');
    case 'r': return keep(s, '\r');
    case 't': return keep(s, '\t');
    case 'u':
        s->n_hex = 4;
        s->unit = 0;
        return go(s, JSON_SCAN_HEX, JSON_STEP_MORE);
    default: return JSON_STEP_BAD;
    }
}

static enum json_step in_hex(struct json_scan *s, char c)
{
    char lower = (char)(c | 0x20);
    if (!is_digit(c) && !(lower >= 'a' && lower <= 'f')) return JSON_STEP_BAD;
    s->unit = (uint16_t)(s->unit << 4 | (is_digit(c) ? c - '0' : lower - 'a' + 10));
    if (--s->n_hex) return JSON_STEP_MORE;
    return keep(s, s->unit < 0x80 ? (char)s->unit : (char)0xFF);
}

/* ---- values -------------------------------------------------------------------------------- */

static enum json_step begin_literal(struct json_scan *s, const char *rest)
{
    s->literal = rest;
    return go(s, JSON_SCAN_LITERAL, JSON_STEP_BEGIN);
}

static enum json_step begin_value(struct json_scan *s, char c)
{
    switch (c) {
    case '{': return open(s, true);
    case '[': return open(s, false);
    case '"': return begin_string(s, false);
    case 't': return begin_literal(s, "rue");
    case 'f': return begin_literal(s, "alse");
    case 'n': return begin_literal(s, "ull");
    case '-': return go(s, JSON_SCAN_MINUS, JSON_STEP_BEGIN);
    case '0': return go(s, JSON_SCAN_ZERO, JSON_STEP_BEGIN);
    default: return is_digit(c) ? go(s, JSON_SCAN_INTEGER, JSON_STEP_BEGIN) : JSON_STEP_BAD;
    }
}

static enum json_step in_literal(struct json_scan *s, char c)
{
    if (c != *s->literal) return JSON_STEP_BAD;
    return go(s, *++s->literal ? JSON_SCAN_LITERAL : JSON_SCAN_AFTER, JSON_STEP_MORE);
}

static enum json_step after_value(struct json_scan *s, char c)
{
    if (c == ',' && s->depth > 0)
        return go(s, in_object(s) ? JSON_SCAN_KEY : JSON_SCAN_VALUE, JSON_STEP_MORE);
    return close(s, c);
}

/* Only what follows a number shows that it has ended. */
static enum json_step end_number(struct json_scan *s, char c)
{
    s->state = JSON_SCAN_AFTER;
    return json_is_blank(c) ? JSON_STEP_MORE : after_value(s, c);
}

static enum json_step in_number(struct json_scan *s, char c)
{
    bool digit = is_digit(c), e = c == 'e' || c == 'E';
    switch (s->state) {
    case JSON_SCAN_MINUS:
        if (digit) return go(s, c == '0' ? JSON_SCAN_ZERO : JSON_SCAN_INTEGER, JSON_STEP_MORE);
        return JSON_STEP_BAD;
    case JSON_SCAN_ZERO:
    case JSON_SCAN_INTEGER:
        if (digit && s->state == JSON_SCAN_INTEGER) return JSON_STEP_MORE;
        if (c == '.') return go(s, JSON_SCAN_POINT, JSON_STEP_MORE);
        return e ? go(s, JSON_SCAN_E, JSON_STEP_MORE) : end_number(s, c);
    case JSON_SCAN_FRACTION:
        if (e) return go(s, JSON_SCAN_E, JSON_STEP_MORE);
        return digit ? JSON_STEP_MORE : end_number(s, c);
    case JSON_SCAN_EXPONENT: return digit ? JSON_STEP_MORE : end_number(s, c);
    case JSON_SCAN_POINT: return digit ? go(s, JSON_SCAN_FRACTION, JSON_STEP_MORE) : JSON_STEP_BAD;
    case JSON_SCAN_E:
        if (c == '+' || c == '-') return go(s, JSON_SCAN_SIGN, JSON_STEP_MORE);
        return digit ? go(s, JSON_SCAN_EXPONENT, JSON_STEP_MORE) : JSON_STEP_BAD;
    default: return digit ? go(s, JSON_SCAN_EXPONENT, JSON_STEP_MORE) : JSON_STEP_BAD;
    }
}

enum json_step json_scan(struct json_scan *s, char c)
{
    switch (s->state) {
    case JSON_SCAN_STRING: return in_string(s, c);
    case JSON_SCAN_ESCAPE: return in_escape(s, c);
    case JSON_SCAN_HEX: return in_hex(s, c);
    case JSON_SCAN_LITERAL: return in_literal(s, c);
    case JSON_SCAN_VALUE:
    case JSON_SCAN_FIRST_KEY:
    case JSON_SCAN_KEY:
    case JSON_SCAN_COLON:
    case JSON_SCAN_FIRST_ELEMENT:
    case JSON_SCAN_AFTER: break;
    default: return in_number(s, c);
    }
    if (json_is_blank(c)) return JSON_STEP_MORE;
    switch (s->state) {
    case JSON_SCAN_FIRST_KEY:
        if (c == '}') return close(s, c);
        return c == '"' ? begin_string(s, true) : JSON_STEP_BAD;
    case JSON_SCAN_KEY: return c == '"' ? begin_string(s, true) : JSON_STEP_BAD;
    case JSON_SCAN_COLON: return c == ':' ? go(s, JSON_SCAN_VALUE, JSON_STEP_MORE) : JSON_STEP_BAD;
    case JSON_SCAN_FIRST_ELEMENT: return c == ']' ? close(s, c) : begin_value(s, c);
    case JSON_SCAN_AFTER: return after_value(s, c);
    default: return begin_value(s, c);
    }
}
