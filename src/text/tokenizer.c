#include "text/tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "text/tokenizer_internal.h"
#include "text/utf8.h"

/* ---- life --------------------------------------------------------------------------------- */

linnet_status tokenizer_new(struct tokenizer **out, linnet_error *err)
{
    struct tokenizer *t = mem_new(1, sizeof *t);
    *out = t;
    if (!t) return error_memory(err, "a tokenizer", sizeof *t);
    t->bos = t->eos = t->bpe.unknown = -1;
    return LINNET_OK;
}

void tokenizer_close(struct tokenizer *t)
{
    if (!t) return;
    vocabulary_free(&t->vocabulary);
    free(t->bpe.merges.slots);
    free(t->bpe.score_rank);
    added_set_free(&t->added);
    added_set_free(&t->added_normalized);
    for (size_t i = 0; i < t->n_normalizer; i++) {
        strbuf_free(&t->normalizer[i].content);
        pattern_free(&t->normalizer[i].pattern);
    }
    for (size_t i = 0; i < t->n_pretokenizer; i++) {
        pattern_free(&t->pretokenizer[i].pattern);
        strbuf_free(&t->pretokenizer[i].replacement);
    }
    strbuf_free(&t->decoder.from);
    strbuf_free(&t->decoder.to);
    free(t);
}

linnet_status tokenizer_open_json(const char *bytes, size_t size, const char *name,
                                  struct tokenizer **out, linnet_error *err)
{
    *out = NULL;
    struct tokenizer *t;
    linnet_status status = tokenizer_new(&t, err);
    if (status == LINNET_OK) status = tokenizer_from_json(t, bytes, size, NULL, err);
    if (status != LINNET_OK) {
        tokenizer_close(t);
        error_prefix(err, "%s", name);
        return status;
    }
    *out = t;
    return LINNET_OK;
}

static linnet_status open_directory(const struct checkpoint *cp, struct tokenizer *t,
                                    linnet_error *err)
{
    if (!cp->tokenizer_json)
        return error_set(err, LINNET_UNSUPPORTED,
                         "no tokenizer.json; other forms of tokenizer are not understood");
    linnet_status status = tokenizer_from_json(t, cp->tokenizer_json, cp->tokenizer_json_size,
                                               cp->tokenizer_config, err);
    if (status != LINNET_OK) error_prefix(err, "tokenizer.json");
    return status;
}

linnet_status tokenizer_open(const struct checkpoint *cp, struct tokenizer **out, linnet_error *err)
{
    struct tokenizer *t;
    *out = NULL;
    linnet_status status = tokenizer_new(&t, err);
    if (status == LINNET_OK)
        status = cp->gguf ? tokenizer_from_gguf(t, cp->gguf, err) : open_directory(cp, t, err);
    if (status != LINNET_OK) {
        tokenizer_close(t);
        error_prefix(err, "%s", cp->path);
        return status;
    }
    *out = t;
    return LINNET_OK;
}

/* ---- the last steps of opening ------------------------------------------------------------ */

linnet_status tokenizer_add_token(struct tokenizer *t, const struct added_token *token,
                                  linnet_error *err)
{
    if (token->size == 0) return LINNET_OK;
    int shown = token->size < 40 ? (int)token->size : 40;
    if (token->size > ADDED_TOKEN_LIMIT)
        return error_set(err, LINNET_UNSUPPORTED,
                         "added token '%.*s...' (id %d): expected at most %d bytes, found %zu",
                         shown, token->content, (int)token->id, ADDED_TOKEN_LIMIT, token->size);
    if (utf8_valid(token->content, token->size) < token->size) /* it would cut characters in two */
        return error_set(err, LINNET_FORMAT, "added token of id %d: expected UTF-8",
                         (int)token->id);
    if (token->special) t->vocabulary.tokens[token->id].flags |= TOKEN_SPECIAL;
    struct added_set *set = token->normalized ? &t->added_normalized : &t->added;
    return added_set_add(set, token, err);
}

/* Appends what a token decodes to; a token with a character that stands for no byte is taken as
 * it is written. */
static void append_byte_level(struct strbuf *out, const char *written, size_t size)
{
    size_t begin = out->size, n = 0;
    strbuf_append(out, written, size); /* at least as long as the bytes */
    if (out->failed) return;
    char *bytes = out->data + begin;
    for (size_t i = 0; i < size;) {
        uint32_t c;
        i += utf8_decode(written + i, size - i, &c);
        int byte = character_to_byte(c);
        if (byte < 0) {
            memcpy(bytes, written, size);
            return;
        }
        bytes[n++] = (char)byte;
    }
    out->size = begin + n;
}

static void append_replaced(struct strbuf *out, const struct decoder_config *d, const char *written,
                            size_t size, size_t limit)
{
    const char *at;
    while (d->from.size && out->size <= limit &&
           (at = memmem(written, size, d->from.data, d->from.size))) {
        strbuf_append(out, written, (size_t)(at - written));
        strbuf_append(out, d->to.data, d->to.size);
        size -= (size_t)(at - written) + d->from.size;
        written = at + d->from.size;
    }
    strbuf_append(out, written, size);
}

static linnet_status fill_texts(struct tokenizer *t, linnet_error *err)
{
    struct vocabulary *v = &t->vocabulary;
    struct strbuf texts = {0}; /* apart from the arena, which is being read */
    size_t offset = v->arena.size, limit = growth_allowed(offset);
    for (int32_t id = 0; id < v->size; id++) {
        struct token *token = &v->tokens[id];
        const char *written = v->arena.data + token->written;
        size_t begin = texts.size;
        if (!(token->flags & TOKEN_PRESENT)) continue;
        int byte = t->decoder.byte_fallback ? byte_token_value(written, token->written_size) : -1;
        if (byte >= 0) {
            token->flags |= TOKEN_BYTE;
            strbuf_char(&texts, (char)byte);
        } else if (t->decoder.byte_level) {
            append_byte_level(&texts, written, token->written_size);
        } else {
            append_replaced(&texts, &t->decoder, written, token->written_size, limit);
        }
        if (texts.size > limit || texts.size >= UINT32_MAX - offset) {
            strbuf_free(&texts);
            return error_set(err, LINNET_UNSUPPORTED,
                             "decoded, the vocabulary is larger than %zu bytes", limit);
        }
        token->text = (uint32_t)(offset + begin);
        token->text_size = (uint32_t)(texts.size - begin);
        if (token->text_size > t->longest_text) t->longest_text = token->text_size;
    }
    strbuf_append(&v->arena, strbuf_cstr(&texts), texts.size);
    bool failed = texts.failed || v->arena.failed;
    strbuf_free(&texts);
    return failed ? error_memory(err, "the vocabulary", 2 * offset) : LINNET_OK;
}

linnet_status tokenizer_finish(struct tokenizer *t, linnet_error *err)
{
    for (int byte = 0; byte < 256; byte++) {
        char written[8];
        size_t n = utf8_encode(byte_to_character((uint8_t)byte), written);
        t->bpe.byte_character[byte] = vocabulary_find_plain(&t->vocabulary, written, n);
        snprintf(written, sizeof written, "<0x%02X>", (unsigned)byte);
        t->bpe.byte_token[byte] = vocabulary_find_plain(&t->vocabulary, written, 6);
    }
    added_set_prepare(&t->added);
    added_set_prepare(&t->added_normalized);
    return fill_texts(t, err);
}

/* ---- encoding ----------------------------------------------------------------------------- */

void token_list_free(struct token_list *list)
{
    free(list->ids);
    *list = (struct token_list){0};
}

linnet_status encoder_push(struct encoder *e, int32_t id)
{
    struct token_list *list = e->out;
    if (!mem_reserve((void **)&list->ids, &list->capacity, list->count + 1, sizeof *list->ids))
        return error_memory(e->err, "token ids", (list->count + 1) * sizeof *list->ids);
    list->ids[list->count++] = id;
    return LINNET_OK;
}

static linnet_status encode_plain(struct encoder *e, const char *text, size_t n, bool first)
{
    const char *base;
    const struct pieces *pieces;
    linnet_status status = pretokenize(e, text, n, first, &base, &pieces);
    for (size_t i = 0; i < pieces->count && status == LINNET_OK; i++)
        status = bpe_encode(e, base + pieces->spans[i].begin,
                            pieces->spans[i].end - pieces->spans[i].begin);
    return status;
}

/* The untrusted parts of [begin, end), as offsets from `begin`. Segments ascend, so spans before
 * this one are skipped for good. */
static linnet_status segment_marks(struct encoder *e, struct span segment, size_t *next)
{
    struct marks *from = &e->marks, *to = &e->segment_marks;
    to->count = 0;
    while (*next < from->count && from->spans[*next].end <= segment.begin) (*next)++;
    for (size_t i = *next; i < from->count && from->spans[i].begin < segment.end; i++) {
        struct span s = from->spans[i];
        if (s.begin < segment.begin) s.begin = segment.begin;
        if (s.end > segment.end) s.end = segment.end;
        if (!mem_reserve((void **)&to->spans, &to->capacity, to->count + 1, sizeof s))
            return error_memory(e->err, "untrusted ranges", (to->count + 1) * sizeof s);
        to->spans[to->count++] = (struct span){s.begin - segment.begin, s.end - segment.begin};
    }
    return LINNET_OK;
}

/* Text between added tokens: normalizes it, and looks for the tokens that match normalized text. */
static linnet_status encode_segment(struct encoder *e, const char *text, size_t n, bool first,
                                    bool parse_special)
{
    const struct tokenizer *t = e->t;
    for (size_t i = 0; i < t->n_normalizer; i++) {
        struct strbuf *out = &e->normal[i % 2];
        strbuf_clear(out);
        linnet_status status = normalize(&t->normalizer[i], &e->matcher, text, n, out,
                                         &e->segment_marks, &e->growth, e->err);
        if (status != LINNET_OK) return status;
        text = strbuf_cstr(out);
        n = out->size;
    }
    struct added_scan scan = {.set = &t->added_normalized,
                              .text = text,
                              .size = n,
                              .parse_special = parse_special,
                              .untrusted = e->segment_marks.spans,
                              .n_untrusted = e->segment_marks.count};
    struct added_match match;
    size_t done = 0;
    linnet_status status = LINNET_OK;
    while (status == LINNET_OK && added_scan_next(&scan, &match)) {
        if (match.range.begin > done)
            status = encode_plain(e, text + done, match.range.begin - done, first && done == 0);
        if (status == LINNET_OK) status = encoder_push(e, match.id);
        done = match.range.end;
    }
    if (status == LINNET_OK && done < n)
        status = encode_plain(e, text + done, n - done, first && done == 0);
    return status;
}

static linnet_status encode_text(struct encoder *e, const char *text, size_t n, bool parse_special)
{
    struct added_scan scan = {.set = &e->t->added,
                              .text = text,
                              .size = n,
                              .parse_special = parse_special,
                              .untrusted = e->marks.spans,
                              .n_untrusted = e->marks.count};
    size_t done = 0, next_mark = 0;
    linnet_status status = LINNET_OK;
    for (bool more = true; more && status == LINNET_OK;) {
        struct added_match match;
        more = added_scan_next(&scan, &match);
        struct span segment = {done, more ? match.range.begin : n};
        if (segment.begin < segment.end) {
            status = segment_marks(e, segment, &next_mark);
            if (status == LINNET_OK)
                status = encode_segment(e, text + segment.begin, segment.end - segment.begin,
                                        segment.begin == 0, parse_special);
        }
        if (more && status == LINNET_OK) status = encoder_push(e, match.id);
        if (more) done = match.range.end;
    }
    return status;
}

/* Replaces what is not UTF-8; *text and *n become the repaired text. */
static linnet_status repair(struct encoder *e, const char **text, size_t *n)
{
    const char *s = *text;
    struct strbuf *out = &e->repaired;
    marks_restart(&e->marks);
    for (size_t i = 0; i < *n;) {
        size_t good = utf8_valid(s + i, *n - i), begin = out->size;
        strbuf_append(out, s + i, good);
        marks_move(&e->marks, (struct span){i, i + good}, (struct span){begin, out->size}, true);
        i += good;
        if (i == *n) break;
        uint32_t c;
        size_t bad = utf8_decode(s + i, *n - i, &c);
        begin = out->size;
        strbuf_utf8(out, UTF8_REPLACEMENT);
        marks_move(&e->marks, (struct span){i, i + bad}, (struct span){begin, out->size}, false);
        i += bad;
    }
    if (out->failed) return error_memory(e->err, "a text", *n);
    *text = strbuf_cstr(out);
    *n = out->size;
    return LINNET_OK;
}

static linnet_status copy_untrusted(struct encoder *e, const struct encode_options *options,
                                    size_t n)
{
    if (!options->parse_special || !options->n_untrusted) return LINNET_OK;
    struct marks *m = &e->marks;
    if (!mem_reserve((void **)&m->spans, &m->capacity, options->n_untrusted, sizeof *m->spans))
        return error_memory(e->err, "untrusted ranges", options->n_untrusted * sizeof *m->spans);
    size_t last = 0;
    for (size_t i = 0; i < options->n_untrusted; i++) {
        struct span s = options->untrusted[i];
        if (s.begin < last) s.begin = last;
        if (s.end > n) s.end = n;
        if (s.begin >= s.end) continue;
        m->spans[m->count++] = s;
        last = s.end;
    }
    return LINNET_OK;
}

static void encoder_free(struct encoder *e)
{
    matcher_free(&e->matcher);
    strbuf_free(&e->repaired);
    strbuf_free(&e->characters);
    for (int i = 0; i < 2; i++) {
        strbuf_free(&e->normal[i]);
        strbuf_free(&e->edited[i]);
        free(e->pieces[i].spans);
    }
    free(e->marks.spans);
    free(e->segment_marks.spans);
    free(e->symbols);
    free(e->heap);
}

linnet_status tokenizer_encode(const struct tokenizer *t, const char *text, size_t n,
                               const struct encode_options *options, struct token_list *out,
                               linnet_error *err)
{
    struct encoder e = {.t = t, .out = out, .growth = growth_allowed(n), .err = err};
    size_t old_count = out->count;
    if (n == 0) text = "";
    linnet_status status = matcher_create(&e.matcher, err);
    if (status == LINNET_OK) status = copy_untrusted(&e, options, n);
    if (status == LINNET_OK && utf8_valid(text, n) < n) status = repair(&e, &text, &n);
    for (size_t i = 0; options->add_special && i < t->n_prefix && status == LINNET_OK; i++)
        status = encoder_push(&e, t->prefix[i]);
    if (status == LINNET_OK) status = encode_text(&e, text, n, options->parse_special);
    for (size_t i = 0; options->add_special && i < t->n_suffix && status == LINNET_OK; i++)
        status = encoder_push(&e, t->suffix[i]);
    if (status != LINNET_OK) out->count = old_count;
    encoder_free(&e);
    return status;
}

/* ---- questions ---------------------------------------------------------------------------- */

int32_t tokenizer_size(const struct tokenizer *t)
{
    return t->vocabulary.size;
}

static const struct token *token_of(const struct tokenizer *t, int32_t id)
{
    if (id < 0 || id >= t->vocabulary.size) return NULL;
    const struct token *token = &t->vocabulary.tokens[id];
    return token->flags & TOKEN_PRESENT ? token : NULL;
}

const char *tokenizer_bytes(const struct tokenizer *t, int32_t id, size_t *size)
{
    const struct token *token = token_of(t, id);
    *size = token ? token->text_size : 0;
    return token ? t->vocabulary.arena.data + token->text : "";
}

bool tokenizer_is_special(const struct tokenizer *t, int32_t id)
{
    const struct token *token = token_of(t, id);
    return token && token->flags & TOKEN_SPECIAL;
}

int32_t tokenizer_find(const struct tokenizer *t, const char *token)
{
    return vocabulary_find(&t->vocabulary, token, strlen(token));
}

int32_t tokenizer_bos(const struct tokenizer *t)
{
    return t->bos;
}

int32_t tokenizer_eos(const struct tokenizer *t)
{
    return t->eos;
}
