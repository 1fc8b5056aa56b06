#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "base/memory.h"
#include "text/tokenizer_internal.h"
#include "text/utf8.h"

linnet_status added_set_add(struct added_set *set, const struct added_token *token,
                            linnet_error *err)
{
    char *content = mem_string(token->content, token->size);
    if (!content ||
        !mem_reserve((void **)&set->tokens, &set->capacity, set->count + 1, sizeof *set->tokens)) {
        free(content);
        return error_memory(err, "added tokens", token->size);
    }
    set->tokens[set->count] = *token;
    set->tokens[set->count++].content = content;
    return LINNET_OK;
}

void added_set_free(struct added_set *set)
{
    for (size_t i = 0; i < set->count; i++) free((char *)set->tokens[i].content);
    free(set->tokens);
}

static int by_content(const void *a, const void *b)
{
    const struct added_token *x = a, *y = b;
    size_t n = x->size < y->size ? x->size : y->size;
    int order = memcmp(x->content, y->content, n);
    if (order) return order;
    return x->size < y->size ? -1 : x->size > y->size;
}

void added_set_prepare(struct added_set *set)
{
    if (set->count) qsort(set->tokens, set->count, sizeof *set->tokens, by_content);
    size_t next = 0;
    for (size_t byte = 0; byte <= 256; byte++) {
        while (next < set->count && (uint8_t)set->tokens[next].content[0] < byte) next++;
        set->first[byte] = next;
    }
}

/* The first entry of [low, high) whose byte at `depth` is at least `byte`. All of them agree in
 * the bytes before; those that end there come first. */
static size_t lower_bound(const struct added_set *set, size_t low, size_t high, size_t depth,
                          int byte)
{
    while (low < high) {
        size_t middle = (low + high) / 2;
        const struct added_token *token = &set->tokens[middle];
        int here = token->size > depth ? (uint8_t)token->content[depth] : -1;
        if (here < byte)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The longest entry that text begins with, or NULL; of special ones only such as lie within the
 * first `trusted` bytes. */
static const struct added_token *longest_at(const struct added_set *set, const char *text, size_t n,
                                            size_t trusted)
{
    size_t low = set->first[(uint8_t)text[0]], high = set->first[(uint8_t)text[0] + 1];
    const struct added_token *best = NULL;
    for (size_t depth = 1; low < high; depth++) {
        const struct added_token *token = &set->tokens[low];
        if (token->size == depth && (!token->special || depth <= trusted)) best = token;
        if (depth == n) break;
        int byte = (uint8_t)text[depth];
        low = lower_bound(set, low, high, depth, byte);
        high = lower_bound(set, low, high, depth, byte + 1);
    }
    return best;
}

/* Unicode's \w: alphabetic, marks, decimal digits, connectors, joiners. */
static bool is_word(uint32_t c)
{
    switch (utf8proc_category((utf8proc_int32_t)c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC: return true;
    default: break;
    }
    return c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) ||
           (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
           (c >= 0x1F170 && c <= 0x1F189);
}

static bool inside_word(const char *text, size_t n, struct span range)
{
    uint32_t c;
    if (range.begin > 0) {
        utf8_decode_last(text, range.begin, &c);
        if (is_word(c)) return true;
    }
    if (range.end < n) {
        utf8_decode(text + range.end, n - range.end, &c);
        if (is_word(c)) return true;
    }
    return false;
}

static void strip(const struct added_token *token, const struct added_scan *scan,
                  struct span *range)
{
    uint32_t c;
    if (token->lstrip) {
        if (range->begin < scan->last_end) range->begin = scan->last_end;
        while (range->begin > scan->last_end) {
            size_t n = utf8_decode_last(scan->text, range->begin, &c);
            if (!utf8_is_white_space(c)) break;
            range->begin -= n;
        }
    }
    if (token->rstrip)
        while (range->end < scan->size) {
            size_t n = utf8_decode(scan->text + range->end, scan->size - range->end, &c);
            if (!utf8_is_white_space(c)) break;
            range->end += n;
        }
}

/* How many bytes from `at` on are before the next untrusted one. Spans before it are dropped. */
static size_t trusted_bytes(struct added_scan *scan, size_t at)
{
    while (scan->n_untrusted &&
           (scan->untrusted->end <= at || scan->untrusted->end == scan->untrusted->begin)) {
        scan->untrusted++;
        scan->n_untrusted--;
    }
    if (!scan->n_untrusted) return scan->size - at;
    return scan->untrusted->begin > at ? scan->untrusted->begin - at : 0;
}

bool added_scan_next(struct added_scan *scan, struct added_match *match)
{
    const struct added_set *set = scan->set;
    while (set->count && scan->next < scan->size) {
        const char *at = scan->text + scan->next;
        const struct added_token *token =
            longest_at(set, at, scan->size - scan->next, trusted_bytes(scan, scan->next));
        if (!token) {
            scan->next++;
            continue;
        }
        struct span range = {scan->next, scan->next + token->size};
        scan->next = range.end;
        if (token->special && !scan->parse_special) continue;
        if (token->single_word && inside_word(scan->text, scan->size, range)) continue;
        strip(token, scan, &range);
        if (range.begin >= range.end) continue; /* the token before has taken all of it */
        scan->last_end = range.end;
        *match = (struct added_match){range, token->id};
        return true;
    }
    return false;
}
