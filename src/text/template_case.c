/* Methods of strings about letters: upper, lower, title, capitalize, isdigit... */
#include <string.h>
#include <utf8proc.h>

#include "text/template_internal.h"

typedef const struct arguments *args_t;

enum letter { UPPER, LOWER, TITLE };

/* Characters that become several (Unicode's SpecialCasing), but for Greek with iota subscript. */
static const struct {
    int32_t from;
    const char *upper, *title;
} special[] = {
    {0xDF, "SS", "Ss"},
    {0x149, "\u02BCN", "\u02BCN"},
    {0x1F0, "J\u030C", "J\u030C"},
    {0x587, "\u0535\u0552", "\u0535\u0582"},
    {0x1E96, "H\u0331", "H\u0331"},
    {0x1E97, "T\u0308", "T\u0308"},
    {0x1E98, "W\u030A", "W\u030A"},
    {0x1E99, "Y\u030A", "Y\u030A"},
    {0x1E9A, "A\u02BE", "A\u02BE"},
    {0xFB00, "FF", "Ff"},
    {0xFB01, "FI", "Fi"},
    {0xFB02, "FL", "Fl"},
    {0xFB03, "FFI", "Ffi"},
    {0xFB04, "FFL", "Ffl"},
    {0xFB05, "ST", "St"},
    {0xFB06, "ST", "St"},
};

static bool is_cased(int32_t c)
{
    utf8proc_category_t category = utf8proc_category(c);
    return category == UTF8PROC_CATEGORY_LU || category == UTF8PROC_CATEGORY_LL ||
           category == UTF8PROC_CATEGORY_LT;
}

static bool is_letter(int32_t c)
{
    utf8proc_category_t category = utf8proc_category(c);
    return category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO;
}

/* A capital sigma that ends a word has a small form of its own. */
static bool ends_word(const struct text *t, size_t next, bool after_letter)
{
    int32_t c;
    if (!after_letter) return false;
    if (next >= t->size) return true;
    template_decode(t->bytes, t->size, next, &c);
    return !is_letter(c);
}

static bool build_letter(struct run *r, struct builder *b, int32_t c, enum letter letter,
                         bool untrusted)
{
    if (c < 0x80) {
        bool upper = letter != LOWER;
        if (upper && c >= 'a' && c <= 'z') c -= 'a' - 'A';
        if (!upper && c >= 'A' && c <= 'Z') c += 'a' - 'A';
        char byte = (char)c;
        return build(r, b, &byte, 1, untrusted);
    }
    for (size_t i = 0; letter != LOWER && i < sizeof special / sizeof *special; i++) {
        const char *text = letter == UPPER ? special[i].upper : special[i].title;
        if (special[i].from == c) return build(r, b, text, strlen(text), untrusted);
    }
    if (letter == LOWER && c == 0x130) return build(r, b, "i\u0307", 3, untrusted);
    int32_t to = letter == UPPER   ? utf8proc_toupper(c)
                 : letter == LOWER ? utf8proc_tolower(c)
                                   : utf8proc_totitle(c);
    return build_code_point(r, b, to, untrusted);
}

/* Each character in the case that `choose` says, given whether a cased one stands before it. */
static bool change_case(struct run *r, const struct text *t,
                        enum letter (*choose)(int32_t c, size_t index, bool after_cased),
                        struct value *out)
{
    struct builder b = {0};
    bool after_cased = false;
    size_t index = 0;
    for (size_t at = 0; at < t->size; index++) {
        int32_t c;
        size_t n = template_decode(t->bytes, t->size, at, &c);
        enum letter letter = choose(c, index, after_cased);
        if (letter == LOWER && c == 0x3A3 && ends_word(t, at + n, after_cased)) {
            if (!build_code_point(r, &b, 0x3C2, text_untrusted(t, at))) return false;
        } else if (!build_letter(r, &b, c, letter, text_untrusted(t, at))) {
            return false;
        }
        after_cased = is_cased(c);
        at += n;
    }
    return build_done(r, &b, out);
}

static enum letter choose_upper(int32_t c, size_t index, bool after_cased)
{
    (void)c, (void)index, (void)after_cased;
    return UPPER;
}

static enum letter choose_lower(int32_t c, size_t index, bool after_cased)
{
    (void)c, (void)index, (void)after_cased;
    return LOWER;
}

static enum letter choose_capitalize(int32_t c, size_t index, bool after_cased)
{
    (void)c, (void)after_cased;
    return index == 0 ? TITLE : LOWER;
}

static enum letter choose_title(int32_t c, size_t index, bool after_cased)
{
    (void)c, (void)index;
    return after_cased ? LOWER : TITLE;
}

static enum letter choose_swap(int32_t c, size_t index, bool after_cased)
{
    (void)index, (void)after_cased;
    return utf8proc_category(c) == UTF8PROC_CATEGORY_LU ? LOWER : UPPER;
}

bool jinja_upper(struct run *r, const struct text *t, struct value *out)
{
    return change_case(r, t, choose_upper, out);
}

bool jinja_lower(struct run *r, const struct text *t, struct value *out)
{
    return change_case(r, t, choose_lower, out);
}

bool jinja_capitalize(struct run *r, const struct text *t, struct value *out)
{
    return change_case(r, t, choose_capitalize, out);
}

static bool ends_title_word(int32_t c)
{
    return c == '-' || c == '(' || c == '{' || c == '[' || c == '<' || code_point_is_space(c);
}

/* The filter, unlike the method, begins words only after blanks, '-' and opening brackets. */
bool jinja_title_filter(struct run *r, const struct text *t, struct value *out)
{
    struct builder b = {0};
    bool starts = true;
    for (size_t at = 0; at < t->size;) {
        int32_t c;
        size_t n = template_decode(t->bytes, t->size, at, &c);
        if (!build_letter(r, &b, c, starts ? UPPER : LOWER, text_untrusted(t, at))) return false;
        starts = ends_title_word(c);
        at += n;
    }
    return build_done(r, &b, out);
}

static bool no_arguments(struct run *r, const char *what, args_t args)
{
    return jinja_bind(r, what, args, NULL, 0, 0, NULL);
}

static bool method_upper(struct run *r, struct value self, args_t args, struct value *out)
{
    return no_arguments(r, "upper", args) && change_case(r, self.text, choose_upper, out);
}

static bool method_lower(struct run *r, struct value self, args_t args, struct value *out)
{
    return no_arguments(r, "lower", args) && change_case(r, self.text, choose_lower, out);
}

static bool method_title(struct run *r, struct value self, args_t args, struct value *out)
{
    return no_arguments(r, "title", args) && change_case(r, self.text, choose_title, out);
}

static bool method_capitalize(struct run *r, struct value self, args_t args, struct value *out)
{
    return no_arguments(r, "capitalize", args) && change_case(r, self.text, choose_capitalize, out);
}

static bool method_swapcase(struct run *r, struct value self, args_t args, struct value *out)
{
    return no_arguments(r, "swapcase", args) && change_case(r, self.text, choose_swap, out);
}

/* ---- questions --------------------------------------------------------------------------- */

static bool is_decimal(int32_t c)
{
    return utf8proc_category(c) == UTF8PROC_CATEGORY_ND;
}

static bool is_digit(int32_t c)
{
    return is_decimal(c) || c == 0xB2 || c == 0xB3 || c == 0xB9 || c == 0x2070 ||
           (c >= 0x2074 && c <= 0x2079) || (c >= 0x2080 && c <= 0x2089);
}

static bool is_numeric(int32_t c)
{
    utf8proc_category_t category = utf8proc_category(c);
    return category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO;
}

static bool is_alnum(int32_t c)
{
    return is_letter(c) || is_numeric(c);
}

static bool is_ascii(int32_t c)
{
    return c < 0x80;
}

/* Whether all characters are so, and there is one unless `empty`. */
static bool all_are(struct run *r, const char *what, struct value self, args_t args,
                    bool (*is)(int32_t), bool empty, struct value *out)
{
    const struct text *t = self.text;
    bool all = t->size > 0 || empty;
    if (!no_arguments(r, what, args) || !jinja_work(r, t->size / 16)) return false;
    for (size_t at = 0; all && at < t->size;) {
        int32_t c;
        at += template_decode(t->bytes, t->size, at, &c);
        all = is(c);
    }
    *out = value_bool(all);
    return true;
}

bool text_has_case(const struct text *t, bool upper)
{
    bool any = false;
    for (size_t at = 0; at < t->size;) {
        int32_t c;
        at += template_decode(t->bytes, t->size, at, &c);
        if (!is_cased(c)) continue;
        if (utf8proc_category(c) != (upper ? UTF8PROC_CATEGORY_LU : UTF8PROC_CATEGORY_LL))
            return false;
        any = true;
    }
    return any;
}

static bool method_isdigit(struct run *r, struct value self, args_t args, struct value *out)
{
    return all_are(r, "isdigit", self, args, is_digit, false, out);
}

static bool method_isdecimal(struct run *r, struct value self, args_t args, struct value *out)
{
    return all_are(r, "isdecimal", self, args, is_decimal, false, out);
}

static bool method_isnumeric(struct run *r, struct value self, args_t args, struct value *out)
{
    return all_are(r, "isnumeric", self, args, is_numeric, false, out);
}

static bool method_isalpha(struct run *r, struct value self, args_t args, struct value *out)
{
    return all_are(r, "isalpha", self, args, is_letter, false, out);
}

static bool method_isalnum(struct run *r, struct value self, args_t args, struct value *out)
{
    return all_are(r, "isalnum", self, args, is_alnum, false, out);
}

static bool method_isspace(struct run *r, struct value self, args_t args, struct value *out)
{
    return all_are(r, "isspace", self, args, code_point_is_space, false, out);
}

static bool method_isascii(struct run *r, struct value self, args_t args, struct value *out)
{
    return all_are(r, "isascii", self, args, is_ascii, true, out);
}

static bool method_islower(struct run *r, struct value self, args_t args, struct value *out)
{
    *out = value_bool(text_has_case(self.text, false));
    return no_arguments(r, "islower", args) && jinja_work(r, self.text->size / 16);
}

static bool method_isupper(struct run *r, struct value self, args_t args, struct value *out)
{
    *out = value_bool(text_has_case(self.text, true));
    return no_arguments(r, "isupper", args) && jinja_work(r, self.text->size / 16);
}

const struct method jinja_case_methods[] = {
    {"upper", method_upper},           {"lower", method_lower},         {"title", method_title},
    {"capitalize", method_capitalize}, {"swapcase", method_swapcase},   {"isdigit", method_isdigit},
    {"isdecimal", method_isdecimal},   {"isnumeric", method_isnumeric}, {"isalpha", method_isalpha},
    {"isalnum", method_isalnum},       {"isspace", method_isspace},     {"isascii", method_isascii},
    {"islower", method_islower},       {"isupper", method_isupper},     {0},
};
