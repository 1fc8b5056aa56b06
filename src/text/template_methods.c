/* Methods of strings, dicts and lists. */
#include <string.h>
#include <utf8proc.h>

#include "text/template_internal.h"

typedef const struct arguments *args_t;

static bool no_arguments(struct run *r, const char *what, args_t args)
{
    return jinja_bind(r, what, args, NULL, 0, 0, NULL);
}

/* ---- stripping and splitting ------------------------------------------------------------- */

static bool in_set(const struct text *chars, const char *c, size_t n)
{
    for (size_t at = 0; at < chars->size;) {
        int32_t ignored;
        size_t m = template_decode(chars->bytes, chars->size, at, &ignored);
        if (m == n && memcmp(chars->bytes + at, c, n) == 0) return true;
        at += m;
    }
    return false;
}

static size_t last_start(const struct text *t, size_t begin, size_t end)
{
    size_t start = end - 1;
    while (start > begin && end - start < 4 && ((unsigned char)t->bytes[start] & 0xC0) == 0x80)
        start--;
    return start;
}

static bool strip_text(struct run *r, const char *what, const struct text *t, args_t args,
                       bool left, bool right, struct value *out)
{
    static const char *const names[] = {"chars"};
    struct value slot;
    size_t begin = 0, end = t->size;
    if (!jinja_bind(r, what, args, names, 1, 0, &slot)) return false;
    if (slot.kind == VALUE_ABSENT || slot.kind == VALUE_NONE) {
        if (left) begin = text_skip_space(t->bytes, begin, end);
        if (right) end = text_back_over_space(t->bytes, begin, end);
        return jinja_subtext(r, t, begin, end, out);
    }
    struct text *chars;
    if (!jinja_need_text(r, what, slot, &chars)) return false;
    while (left && begin < end) {
        int32_t c;
        size_t n = template_decode(t->bytes, end, begin, &c);
        if (!in_set(chars, t->bytes + begin, n)) break;
        if (!jinja_work(r, 1 + chars->size / 16)) return false;
        begin += n;
    }
    while (right && begin < end) {
        size_t start = last_start(t, begin, end);
        if (!in_set(chars, t->bytes + start, end - start)) break;
        if (!jinja_work(r, 1 + chars->size / 16)) return false;
        end = start;
    }
    return jinja_subtext(r, t, begin, end, out);
}

static bool method_strip(struct run *r, struct value self, args_t args, struct value *out)
{
    return strip_text(r, "strip", self.text, args, true, true, out);
}

static bool method_lstrip(struct run *r, struct value self, args_t args, struct value *out)
{
    return strip_text(r, "lstrip", self.text, args, true, false, out);
}

static bool method_rstrip(struct run *r, struct value self, args_t args, struct value *out)
{
    return strip_text(r, "rstrip", self.text, args, false, true, out);
}

/* Parts being gathered, in a buffer that grows. */
struct parts {
    struct value *items;
    size_t count, capacity;
};

static bool add_part(struct run *r, struct parts *p, const struct text *t, size_t begin, size_t end)
{
    if (!jinja_work(r, 1)) return false;
    if (p->count == p->capacity) {
        size_t capacity = p->capacity ? 2 * p->capacity : 8;
        struct value *items = jinja_array(r, capacity, sizeof *items);
        if (!items) return false;
        if (p->count) memcpy(items, p->items, p->count * sizeof *items);
        p->items = items;
        p->capacity = capacity;
    }
    return jinja_subtext(r, t, begin, end, &p->items[p->count++]);
}

static bool parts_done(struct run *r, struct parts *p, bool reversed, struct value *out)
{
    if (!jinja_new_list(r, VALUE_LIST, p->count, out)) return false;
    for (size_t i = 0; i < p->count; i++)
        out->list->items[i] = p->items[reversed ? p->count - 1 - i : i];
    return true;
}

static bool split_at_space(struct run *r, const struct text *t, int64_t limit, struct value *out)
{
    struct parts p = {0};
    size_t at = text_skip_space(t->bytes, 0, t->size);
    while (at < t->size) {
        size_t end = at, next;
        if (limit >= 0 && (int64_t)p.count == limit)
            return add_part(r, &p, t, at, t->size) && parts_done(r, &p, false, out);
        for (int32_t c; end < t->size; end += next) {
            next = template_decode(t->bytes, t->size, end, &c);
            if (code_point_is_space(c)) break;
        }
        if (!add_part(r, &p, t, at, end)) return false;
        at = text_skip_space(t->bytes, end, t->size);
    }
    return parts_done(r, &p, false, out);
}

static bool rsplit_at_space(struct run *r, const struct text *t, int64_t limit, struct value *out)
{
    struct parts p = {0};
    size_t end = text_back_over_space(t->bytes, 0, t->size);
    while (end > 0) {
        size_t begin = end;
        if (limit >= 0 && (int64_t)p.count == limit) {
            if (!add_part(r, &p, t, 0, end)) return false;
            break;
        }
        while (begin > 0) {
            size_t start = last_start(t, 0, begin);
            int32_t c;
            template_decode(t->bytes, begin, start, &c);
            if (code_point_is_space(c)) break;
            begin = start;
        }
        if (!add_part(r, &p, t, begin, end)) return false;
        end = text_back_over_space(t->bytes, 0, begin);
    }
    return parts_done(r, &p, true, out);
}

static bool split_arguments(struct run *r, const char *what, args_t args, struct text **separator,
                            int64_t *limit)
{
    static const char *const names[] = {"sep", "maxsplit"};
    struct value slots[2];
    *separator = NULL;
    *limit = -1;
    if (!jinja_bind(r, what, args, names, 2, 0, slots)) return false;
    if (slots[0].kind != VALUE_ABSENT && slots[0].kind != VALUE_NONE) {
        if (!jinja_need_text(r, what, slots[0], separator)) return false;
        if ((*separator)->size == 0) return jinja_fail(r, "%s: empty separator", what);
    }
    return slots[1].kind == VALUE_ABSENT || jinja_need_int(r, what, slots[1], limit);
}

static bool method_split(struct run *r, struct value self, args_t args, struct value *out)
{
    const struct text *t = self.text;
    struct text *separator;
    struct parts p = {0};
    int64_t limit;
    size_t begin = 0;
    if (!split_arguments(r, "split", args, &separator, &limit) || !jinja_work(r, t->size / 64))
        return false;
    if (!separator) return split_at_space(r, t, limit, out);
    for (;;) {
        size_t end =
            limit >= 0 && (int64_t)p.count == limit ? SIZE_MAX : text_find(t, begin, separator);
        if (!add_part(r, &p, t, begin, end == SIZE_MAX ? t->size : end)) return false;
        if (end == SIZE_MAX) return parts_done(r, &p, false, out);
        begin = end + separator->size;
    }
}

/* The last place before `end` where needle stands whole, or SIZE_MAX. Every place may cost as much
 * as the needle is long. */
static bool find_last(struct run *r, const struct text *t, size_t end, const struct text *needle,
                      size_t *out)
{
    *out = SIZE_MAX;
    if (needle->size > end) return true;
    if (needle->size == 0) {
        *out = end;
        return true;
    }
    size_t last = end - needle->size + 1; /* places */
    for (const char *at; (at = memrchr(t->bytes, needle->bytes[0], last)); last = *out) {
        if (!jinja_work(r, 1 + needle->size / 64)) return false;
        *out = (size_t)(at - t->bytes);
        if (memcmp(at, needle->bytes, needle->size) == 0) return true;
    }
    *out = SIZE_MAX;
    return true;
}

static bool method_rsplit(struct run *r, struct value self, args_t args, struct value *out)
{
    const struct text *t = self.text;
    struct text *separator;
    struct parts p = {0};
    int64_t limit;
    size_t end = t->size;
    if (!split_arguments(r, "rsplit", args, &separator, &limit) || !jinja_work(r, t->size / 16))
        return false;
    if (!separator) return rsplit_at_space(r, t, limit, out);
    for (;;) {
        size_t at = SIZE_MAX;
        bool more = limit < 0 || (int64_t)p.count < limit;
        if (more && !find_last(r, t, end, separator, &at)) return false;
        if (!add_part(r, &p, t, at == SIZE_MAX ? 0 : at + separator->size, end)) return false;
        if (at == SIZE_MAX) return parts_done(r, &p, true, out);
        end = at;
    }
}

static bool is_line_end(int32_t c)
{
    return (c >= 10 && c <= 13) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 ||
           c == 0x2029;
}

static bool method_splitlines(struct run *r, struct value self, args_t args, struct value *out)
{
    static const char *const names[] = {"keepends"};
    const struct text *t = self.text;
    struct value keep;
    struct parts p = {0};
    if (!jinja_bind(r, "splitlines", args, names, 1, 0, &keep) || !jinja_work(r, t->size / 16))
        return false;
    size_t begin = 0;
    for (size_t at = 0; at < t->size;) {
        int32_t c;
        size_t end = at;
        at += template_decode(t->bytes, t->size, at, &c);
        if (!is_line_end(c)) continue;
        if (c == '\r' && at < t->size && t->bytes[at] == '\n') at++;
        if (!add_part(r, &p, t, begin, value_truth(keep) ? at : end)) return false;
        begin = at;
    }
    if (begin < t->size && !add_part(r, &p, t, begin, t->size)) return false;
    return parts_done(r, &p, false, out);
}

static bool partition(struct run *r, const char *what, struct value self, args_t args, bool last,
                      struct value *out)
{
    static const char *const names[] = {"sep"};
    struct value slot;
    struct text *separator;
    const struct text *t = self.text;
    if (!jinja_bind(r, what, args, names, 1, 1, &slot) ||
        !jinja_need_text(r, what, slot, &separator) || !jinja_work(r, t->size / 16) ||
        !jinja_new_list(r, VALUE_TUPLE, 3, out))
        return false;
    if (separator->size == 0) return jinja_fail(r, "%s: empty separator", what);
    size_t at = last ? 0 : text_find(t, 0, separator);
    if (last && !find_last(r, t, t->size, separator, &at)) return false;
    bool found = at != SIZE_MAX;
    size_t first_end = found ? at : last ? 0 : t->size;
    size_t second_end = found ? at + separator->size : first_end;
    struct value *parts = out->list->items;
    return jinja_subtext(r, t, 0, first_end, &parts[0]) &&
           jinja_subtext(r, t, first_end, second_end, &parts[1]) &&
           jinja_subtext(r, t, second_end, t->size, &parts[2]);
}

static bool method_partition(struct run *r, struct value self, args_t args, struct value *out)
{
    return partition(r, "partition", self, args, false, out);
}

static bool method_rpartition(struct run *r, struct value self, args_t args, struct value *out)
{
    return partition(r, "rpartition", self, args, true, out);
}

/* ---- looking for parts ------------------------------------------------------------------- */

static bool stands_at(const struct text *t, const struct text *part, bool end)
{
    if (part->size > t->size) return false;
    return part->size == 0 ||
           memcmp(t->bytes + (end ? t->size - part->size : 0), part->bytes, part->size) == 0;
}

/* Leaves the part of self that optional start and end arguments choose. *outside: it begins behind
 * its end, where not even an empty string is found. */
static bool window(struct run *r, struct value *self, const struct value *start,
                   const struct value *end, bool *outside)
{
    struct value bounds[3] = {*start, *end, {.kind = VALUE_ABSENT}};
    size_t size;
    int64_t from = 0, to = INT64_MAX;
    *outside = false;
    if (start->kind == VALUE_ABSENT && end->kind == VALUE_ABSENT) return true;
    if (!jinja_length(r, *self, &size) || !jinja_slice(r, *self, bounds, self)) return false;
    int64_t count = (int64_t)size;
    value_is_integer(*start, &from);
    value_is_integer(*end, &to);
    if (from < 0) from = from < -count ? 0 : from + count;
    if (to < 0) to = to < -count ? 0 : to + count;
    *outside = from > (to < count ? to : count);
    return true;
}

static bool affix(struct run *r, const char *what, struct value self, args_t args, bool end,
                  struct value *out)
{
    static const char *const names[] = {"affix", "start", "end"};
    struct value slots[3];
    struct text *part;
    bool found = false, outside;
    if (!jinja_bind(r, what, args, names, 3, 1, slots)) return false;
    if (!window(r, &self, &slots[1], &slots[2], &outside)) return false;
    size_t count = slots[0].kind == VALUE_TUPLE ? slots[0].list->count : 1;
    for (size_t i = 0; i < count; i++) {
        struct value one = slots[0].kind == VALUE_TUPLE ? slots[0].list->items[i] : slots[0];
        if (!jinja_need_text(r, what, one, &part) || !jinja_work(r, 1 + part->size / 64))
            return false;
        found |= !outside && stands_at(self.text, part, end);
    }
    *out = value_bool(found);
    return true;
}

static bool method_startswith(struct run *r, struct value self, args_t args, struct value *out)
{
    return affix(r, "startswith", self, args, false, out);
}

static bool method_endswith(struct run *r, struct value self, args_t args, struct value *out)
{
    return affix(r, "endswith", self, args, true, out);
}

static bool remove_affix(struct run *r, const char *what, struct value self, args_t args, bool end,
                         struct value *out)
{
    static const char *const names[] = {"affix"};
    struct value slot;
    struct text *part;
    if (!jinja_bind(r, what, args, names, 1, 1, &slot) || !jinja_need_text(r, what, slot, &part) ||
        !jinja_work(r, 1 + part->size / 64))
        return false;
    size_t n = stands_at(self.text, part, end) ? part->size : 0;
    return jinja_subtext(r, self.text, end ? 0 : n, self.text->size - (end ? n : 0), out);
}

static bool method_removeprefix(struct run *r, struct value self, args_t args, struct value *out)
{
    return remove_affix(r, "removeprefix", self, args, false, out);
}

static bool method_removesuffix(struct run *r, struct value self, args_t args, struct value *out)
{
    return remove_affix(r, "removesuffix", self, args, true, out);
}

/* Character index of a part within [start, end), or -1. */
static bool position(struct run *r, const char *what, struct value self, args_t args, bool last,
                     int64_t *out)
{
    static const char *const names[] = {"sub", "start", "end"};
    struct value slots[3], whole = self, none = {.kind = VALUE_ABSENT};
    struct text *part;
    bool outside, ignored;
    *out = -1;
    if (!jinja_bind(r, what, args, names, 3, 1, slots) ||
        !jinja_need_text(r, what, slots[0], &part) || !jinja_work(r, self.text->size / 16))
        return false;
    if (!window(r, &self, &slots[1], &slots[2], &outside)) return false;
    size_t at = last ? 0 : text_find(self.text, 0, part);
    if (last && !find_last(r, self.text, self.text->size, part, &at)) return false;
    if (at == SIZE_MAX || outside) return true;
    size_t before = 0;
    if (slots[1].kind != VALUE_ABSENT) { /* what the start argument left out */
        struct value rest = whole;
        if (!window(r, &rest, &slots[1], &none, &ignored)) return false;
        before = utf8_count(whole.text->bytes, whole.text->size - rest.text->size);
    }
    *out = (int64_t)(before + utf8_count(self.text->bytes, at));
    return true;
}

static bool method_find(struct run *r, struct value self, args_t args, struct value *out)
{
    *out = value_int(0);
    return position(r, "find", self, args, false, &out->integer);
}

static bool method_rfind(struct run *r, struct value self, args_t args, struct value *out)
{
    *out = value_int(0);
    return position(r, "rfind", self, args, true, &out->integer);
}

static bool list_index(struct run *r, struct value self, args_t args, bool count, struct value *out)
{
    static const char *const names[] = {"value"};
    struct value wanted;
    int64_t found = 0;
    if (!jinja_bind(r, count ? "count" : "index", args, names, 1, 1, &wanted)) return false;
    for (size_t i = 0; i < self.list->count; i++) {
        bool equal;
        if (!jinja_equal(r, self.list->items[i], wanted, 0, &equal)) return false;
        if (equal && !count) {
            *out = value_int((int64_t)i);
            return true;
        }
        found += equal;
    }
    *out = value_int(found);
    return count || jinja_fail(r, "index: the value is not in the list");
}

static bool method_index(struct run *r, struct value self, args_t args, struct value *out)
{
    if (self.kind != VALUE_STRING) return list_index(r, self, args, false, out);
    *out = value_int(0);
    if (!position(r, "index", self, args, false, &out->integer)) return false;
    return out->integer >= 0 || jinja_fail(r, "index: substring not found");
}

static bool method_count(struct run *r, struct value self, args_t args, struct value *out)
{
    static const char *const names[] = {"sub", "start", "end"};
    struct value slots[3];
    struct text *part;
    bool outside;
    if (self.kind != VALUE_STRING) return list_index(r, self, args, true, out);
    if (!jinja_bind(r, "count", args, names, 3, 1, slots) ||
        !jinja_need_text(r, "count", slots[0], &part) ||
        !window(r, &self, &slots[1], &slots[2], &outside) || !jinja_work(r, self.text->size / 16))
        return false;
    const struct text *t = self.text;
    size_t n = 0;
    if (part->size == 0) {
        n = outside ? 0 : utf8_count(t->bytes, t->size) + 1;
    } else {
        for (size_t at = 0; (at = text_find(t, at, part)) != SIZE_MAX; at += part->size) n++;
    }
    *out = value_int((int64_t)n);
    return true;
}

/* ---- making others ----------------------------------------------------------------------- */

bool jinja_replace(struct run *r, const struct text *t, const struct text *old,
                   const struct text *new_text, int64_t limit, struct value *out)
{
    struct builder b = {0};
    size_t at = 0;
    if (!jinja_work(r, t->size / 64)) return false;
    for (; limit != 0; limit -= limit > 0) {
        int32_t c;
        size_t found = text_find(t, at, old);
        if (found == SIZE_MAX) break;
        if (!build_text(r, &b, t, at, found) || !build_text(r, &b, new_text, 0, new_text->size) ||
            !jinja_work(r, 1))
            return false;
        at = found + old->size;
        if (old->size > 0) continue;
        if (at == t->size) break; /* an empty part stands before each character and at the end */
        size_t n = template_decode(t->bytes, t->size, at, &c);
        if (!build_text(r, &b, t, at, at + n)) return false;
        at += n;
    }
    return build_text(r, &b, t, at, t->size) && build_done(r, &b, out);
}

static bool method_replace(struct run *r, struct value self, args_t args, struct value *out)
{
    static const char *const names[] = {"old", "new", "count"};
    struct value slots[3];
    struct text *old, *replacement;
    int64_t limit = -1;
    if (!jinja_bind(r, "replace", args, names, 3, 2, slots) ||
        !jinja_need_text(r, "replace", slots[0], &old) ||
        !jinja_need_text(r, "replace", slots[1], &replacement))
        return false;
    if (slots[2].kind != VALUE_ABSENT && !jinja_need_int(r, "replace", slots[2], &limit))
        return false;
    return jinja_replace(r, self.text, old, replacement, limit, out);
}

static bool method_join(struct run *r, struct value self, args_t args, struct value *out)
{
    static const char *const names[] = {"iterable"};
    struct value slot;
    const struct value *items;
    size_t count;
    struct builder b = {0};
    if (!jinja_bind(r, "join", args, names, 1, 1, &slot) || !jinja_items(r, slot, &items, &count))
        return false;
    for (size_t i = 0; i < count; i++) {
        struct text *text;
        if (!jinja_need_text(r, "join", items[i], &text)) return false;
        if (i && !build_text(r, &b, self.text, 0, self.text->size)) return false;
        if (!build_text(r, &b, text, 0, text->size)) return false;
    }
    return build_done(r, &b, out);
}

static bool justify(struct run *r, const char *what, struct value self, args_t args, bool left,
                    struct value *out)
{
    static const char *const names[] = {"width", "fillchar"};
    struct value slots[2], blank;
    struct text *fill;
    struct builder b = {0};
    int64_t width;
    if (!jinja_bind(r, what, args, names, 2, 1, slots) ||
        !jinja_need_int(r, what, slots[0], &width) || !jinja_literal(r, " ", &blank))
        return false;
    if (slots[1].kind == VALUE_ABSENT) slots[1] = blank;
    if (!jinja_need_text(r, what, slots[1], &fill)) return false;
    if (utf8_count(fill->bytes, fill->size) != 1)
        return jinja_fail(r, "%s: the fill must be one character", what);
    int64_t missing = width - (int64_t)utf8_count(self.text->bytes, self.text->size);
    if (left && !build_text(r, &b, self.text, 0, self.text->size)) return false;
    for (; missing > 0; missing--)
        if (!build_text(r, &b, fill, 0, fill->size)) return false;
    if (!left && !build_text(r, &b, self.text, 0, self.text->size)) return false;
    return build_done(r, &b, out);
}

static bool method_ljust(struct run *r, struct value self, args_t args, struct value *out)
{
    return justify(r, "ljust", self, args, true, out);
}

static bool method_rjust(struct run *r, struct value self, args_t args, struct value *out)
{
    return justify(r, "rjust", self, args, false, out);
}

static bool method_zfill(struct run *r, struct value self, args_t args, struct value *out)
{
    static const char *const names[] = {"width"};
    const struct text *t = self.text;
    struct value slot;
    struct builder b = {0};
    int64_t width;
    if (!jinja_bind(r, "zfill", args, names, 1, 1, &slot) ||
        !jinja_need_int(r, "zfill", slot, &width))
        return false;
    size_t sign = t->size && (t->bytes[0] == '-' || t->bytes[0] == '+');
    if (!build_text(r, &b, t, 0, sign)) return false;
    for (width -= (int64_t)utf8_count(t->bytes, t->size); width > 0; width--)
        if (!build(r, &b, "0", 1, false)) return false;
    return build_text(r, &b, t, sign, t->size) && build_done(r, &b, out);
}

/* "{} {0} {name}".format(...), without format specifications. */
static bool format_field(struct run *r, struct builder *b, const char *field, size_t size,
                         args_t args, size_t *next)
{
    const struct value *v = NULL;
    size_t index = 0;
    bool numeric = true;
    for (size_t i = 0; i < size; i++) {
        numeric &= field[i] >= '0' && field[i] <= '9' && i < 6;
        if (numeric) index = index * 10 + (size_t)(field[i] - '0');
        if (strchr(".[:!", field[i]) || !field[i])
            return jinja_fail(r, "format: only {}, {0} and {name} are supported");
    }
    if (size == 0) index = (*next)++;
    if (numeric && index < args->count) v = &args->items[index];
    for (size_t k = 0; !numeric && k < args->n_keywords; k++)
        if (strlen(args->keywords[k].name) == size &&
            memcmp(args->keywords[k].name, field, size) == 0)
            v = &args->keywords[k].value;
    if (!v) return jinja_fail(r, "format: no argument for a field");
    return jinja_print(r, b, *v, false, 0);
}

static bool method_format(struct run *r, struct value self, args_t args, struct value *out)
{
    const struct text *t = self.text;
    struct builder b = {0};
    size_t next = 0;
    for (size_t at = 0; at < t->size; at++) {
        char c = t->bytes[at];
        bool doubled = at + 1 < t->size && t->bytes[at + 1] == c;
        if ((c != '{' && c != '}') || doubled) {
            if (!build_text(r, &b, t, at, at + 1)) return false;
            at += (c == '{' || c == '}');
            continue;
        }
        const char *end = c == '{' ? memchr(t->bytes + at, '}', t->size - at) : NULL;
        if (!end) return jinja_fail(r, "format: a single '%c'", c);
        size_t close = (size_t)(end - t->bytes);
        if (!format_field(r, &b, t->bytes + at + 1, close - at - 1, args, &next)) return false;
        at = close;
    }
    return build_done(r, &b, out);
}

/* ---- dicts ------------------------------------------------------------------------------- */

static bool method_get(struct run *r, struct value self, args_t args, struct value *out)
{
    static const char *const names[] = {"key", "default"};
    struct value slots[2], *found;
    if (!jinja_bind(r, "get", args, names, 2, 1, slots) ||
        !jinja_dict_find(r, self.dict, slots[0], &found))
        return false;
    *out = found ? *found : slots[1].kind == VALUE_ABSENT ? value_none() : slots[1];
    return true;
}

static bool view(struct run *r, struct value self, enum view_of of, struct value *out)
{
    struct view *v = jinja_array(r, 1, sizeof *v);
    if (!v) return false;
    *v = (struct view){self.dict, of};
    *out = (struct value){.kind = VALUE_VIEW, .view = v};
    return true;
}

static bool method_keys(struct run *r, struct value self, args_t args, struct value *out)
{
    return no_arguments(r, "keys", args) && view(r, self, VIEW_KEYS, out);
}

static bool method_values(struct run *r, struct value self, args_t args, struct value *out)
{
    return no_arguments(r, "values", args) && view(r, self, VIEW_VALUES, out);
}

static bool method_items(struct run *r, struct value self, args_t args, struct value *out)
{
    return no_arguments(r, "items", args) && view(r, self, VIEW_ITEMS, out);
}

static bool method_copy(struct run *r, struct value self, args_t args, struct value *out)
{
    *out = self; /* nothing can change it */
    return no_arguments(r, "copy", args);
}

/* ---- tables ------------------------------------------------------------------------------ */

static const struct method string_methods[] = {
    {"strip", method_strip},
    {"lstrip", method_lstrip},
    {"rstrip", method_rstrip},
    {"split", method_split},
    {"rsplit", method_rsplit},
    {"splitlines", method_splitlines},
    {"partition", method_partition},
    {"rpartition", method_rpartition},
    {"startswith", method_startswith},
    {"endswith", method_endswith},
    {"removeprefix", method_removeprefix},
    {"removesuffix", method_removesuffix},
    {"find", method_find},
    {"rfind", method_rfind},
    {"index", method_index},
    {"count", method_count},
    {"replace", method_replace},
    {"join", method_join},
    {"ljust", method_ljust},
    {"rjust", method_rjust},
    {"zfill", method_zfill},
    {"format", method_format},
    {0},
};

static const struct method dict_methods[] = {
    {"get", method_get},
    {"keys", method_keys},
    {"values", method_values},
    {"items", method_items},
    {"copy", method_copy},
    {"clear", NULL},
    {"pop", NULL},
    {"popitem", NULL},
    {"setdefault", NULL},
    {"update", NULL},
    {0},
};

static const struct method list_methods[] = {
    {"index", method_index}, {"count", method_count}, {"copy", method_copy}, {"append", NULL},
    {"clear", NULL},         {"extend", NULL},        {"insert", NULL},      {"pop", NULL},
    {"remove", NULL},        {"reverse", NULL},       {"sort", NULL},        {0},
};

/* Of objects that are not in the tables. */
static const struct method other_methods[] = {
    {"cycle", NULL}, {"changed", NULL}, {"next", NULL}, {"reset", NULL}, {0},
};

static const struct method *find_in(const struct method *table, const char *name)
{
    for (; table->name; table++)
        if (strcmp(table->name, name) == 0) return table;
    return NULL;
}

bool jinja_is_method(const char *name)
{
    return find_in(string_methods, name) || find_in(jinja_case_methods, name) ||
           find_in(dict_methods, name) || find_in(list_methods, name) ||
           find_in(other_methods, name);
}

const struct method *jinja_find_method(struct value self, const char *name)
{
    const struct method *found;
    switch (self.kind) {
    case VALUE_STRING:
        found = find_in(string_methods, name);
        return found ? found : find_in(jinja_case_methods, name);
    case VALUE_DICT: return find_in(dict_methods, name);
    case VALUE_LIST: return find_in(list_methods, name);
    case VALUE_TUPLE:
        return strcmp(name, "index") == 0 || strcmp(name, "count") == 0
                   ? find_in(list_methods, name)
                   : NULL;
    default: return NULL;
    }
}
