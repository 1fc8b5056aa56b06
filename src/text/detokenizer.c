#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "base/strbuf.h"
#include "text/tokenizer_internal.h"
#include "text/utf8.h"

/* A stop string is looked for with the automaton of Knuth, Morris and Pratt: after each byte of
 * text, `matched` is the longest prefix of the stop that the text ends with. What is longest over
 * all stops is what must be held back. */
struct stop {
    const char *bytes;
    size_t size;
    size_t *fallback; /* [size]: longest proper border of the first i + 1 bytes */
    size_t matched;
};

struct detokenizer {
    const struct tokenizer *t;
    bool skip_special, include_stop;
    struct stop *stops;
    size_t n_stops;
    char *storage;   /* bytes of all stops */
    size_t *borders; /* their fallbacks */
    char pending[4]; /* the start of a character whose rest is yet to come */
    size_t n_pending;
    bool in_run;     /* the last token was a byte token */
    bool run_broken; /* its run has an invalid byte: the rest of it is U+FFFD as well */
    size_t strip;    /* leading blanks still to be taken off */
    bool started, stopped;
    size_t stop; /* which of stops it was, from 1 */
    char *buffer;
    size_t size, given; /* buffer[0, given) was given out by the last call */
};

static void find_borders(struct stop *s)
{
    size_t border = 0;
    s->fallback[0] = 0;
    for (size_t i = 1; i < s->size; i++) {
        while (border && s->bytes[i] != s->bytes[border]) border = s->fallback[border - 1];
        if (s->bytes[i] == s->bytes[border]) border++;
        s->fallback[i] = border;
    }
}

static linnet_status copy_stops(struct detokenizer *d, const struct detokenizer_options *options,
                                size_t total, linnet_error *err)
{
    d->stops = mem_new(options->n_stops, sizeof *d->stops);
    d->storage = mem_new(total, 1);
    d->borders = mem_new(total, sizeof *d->borders);
    if (!d->stops || !d->storage || !d->borders) return error_memory(err, "stop strings", total);
    size_t used = 0;
    for (size_t i = 0; i < options->n_stops; i++) {
        struct stop *s = &d->stops[d->n_stops++];
        s->size = strlen(options->stops[i]);
        if (s->size == 0 || utf8_valid(options->stops[i], s->size) < s->size)
            return error_set(err, LINNET_INVALID, "stop string %zu is %s", i,
                             s->size ? "not UTF-8" : "empty");
        memcpy(d->storage + used, options->stops[i], s->size);
        s->bytes = d->storage + used;
        s->fallback = d->borders + used;
        used += s->size;
        find_borders(s);
    }
    return LINNET_OK;
}

linnet_status detokenizer_create(const struct tokenizer *t,
                                 const struct detokenizer_options *options,
                                 struct detokenizer **out, linnet_error *err)
{
    *out = NULL;
    struct detokenizer *d = mem_new(1, sizeof *d);
    if (!d) return error_memory(err, "a detokenizer", sizeof *d);
    d->t = t;
    d->skip_special = options->skip_special;
    d->include_stop = options->include_stop;
    size_t total = 0, longest = 0, need = 0;
    for (size_t i = 0; i < options->n_stops; i++) {
        size_t size = strlen(options->stops[i]);
        if (size > longest) longest = size;
        total += size;
    }
    linnet_status status = copy_stops(d, options, total, err);
    if (status == LINNET_OK) {
        /* One token adds at most a U+FFFD (3 bytes) for each of its and of the pending bytes. */
        bool fits = size_add(t->longest_text, sizeof d->pending, &need) &&
                    size_mul(need, 3, &need) && size_add(need, longest, &need);
        d->buffer = fits ? mem_new(need, 1) : NULL;
        if (!d->buffer) status = error_memory(err, "a detokenizer", need);
    }
    if (status != LINNET_OK) {
        detokenizer_destroy(d);
        return status;
    }
    detokenizer_reset(d);
    *out = d;
    return LINNET_OK;
}

void detokenizer_destroy(struct detokenizer *d)
{
    if (!d) return;
    free(d->stops);
    free(d->storage);
    free(d->borders);
    free(d->buffer);
    free(d);
}

void detokenizer_reset(struct detokenizer *d)
{
    d->n_pending = d->size = d->given = d->stop = 0;
    d->strip = d->t->decoder.strip_left;
    d->started = d->stopped = d->in_run = d->run_broken = false;
    for (size_t i = 0; i < d->n_stops; i++) d->stops[i].matched = 0;
}

static size_t advance(const struct stop *s, size_t matched, char byte)
{
    while (matched && s->bytes[matched] != byte) matched = s->fallback[matched - 1];
    return matched + (s->bytes[matched] == byte);
}

/* One byte of text. Of stops that end here the longest counts: it began first. */
static void add_text_byte(struct detokenizer *d, char byte)
{
    size_t completed = 0;
    d->buffer[d->size++] = byte;
    for (size_t i = 0; i < d->n_stops; i++) {
        struct stop *s = &d->stops[i];
        s->matched = advance(s, s->matched, byte);
        if (s->matched < s->size || s->size <= completed) continue;
        completed = s->size;
        d->stop = i + 1;
    }
    if (!completed) return;
    d->stopped = true;
    if (!d->include_stop) d->size -= completed;
}

static void add_character(struct detokenizer *d, uint32_t c)
{
    if (d->strip && c == ' ') {
        d->strip--;
        return;
    }
    d->strip = 0;
    char bytes[4];
    size_t n = utf8_encode(c, bytes);
    for (size_t i = 0; i < n && !d->stopped; i++) add_text_byte(d, bytes[i]);
}

/* Turns the first `n` pending bytes, which are no character, into U+FFFD: one, or in a run of byte
 * tokens one for each byte, and then for all that follow in the run. */
static void drop_pending(struct detokenizer *d, size_t n)
{
    d->run_broken = d->in_run;
    for (size_t i = 0; i < (d->in_run ? n : 1) && !d->stopped; i++)
        add_character(d, UTF8_REPLACEMENT);
    d->n_pending -= n;
    memmove(d->pending, d->pending + n, d->n_pending);
}

static void flush_pending(struct detokenizer *d)
{
    if (d->n_pending && !d->stopped) drop_pending(d, d->n_pending);
    d->n_pending = 0;
}

static void add_byte(struct detokenizer *d, char byte)
{
    d->pending[d->n_pending++] = byte;
    while (d->n_pending && !d->stopped) {
        uint32_t c;
        size_t n = utf8_decode(d->pending, d->n_pending, &c);
        if (c == UTF8_INCOMPLETE && !d->run_broken) return;
        if (c >= UTF8_INVALID || d->run_broken) {
            drop_pending(d, n);
        } else {
            add_character(d, c);
            d->n_pending -= n; /* a whole character is all that can be pending */
        }
    }
}

/* What may be shown: all but the longest suffix that a stop string begins with. */
static void give_out(struct detokenizer *d, size_t held, const char **text, size_t *size)
{
    d->given = d->size - held;
    *text = d->buffer;
    *size = d->given;
}

static void drop_given(struct detokenizer *d)
{
    d->size -= d->given;
    memmove(d->buffer, d->buffer + d->given, d->size);
    d->given = 0;
}

bool detokenizer_push(struct detokenizer *d, int32_t id, const char **text, size_t *size)
{
    const struct vocabulary *v = &d->t->vocabulary;
    const struct decoder_config *config = &d->t->decoder;
    drop_given(d);
    bool known = id >= 0 && id < v->size && v->tokens[id].flags & TOKEN_PRESENT;
    if (known && !d->stopped && !(d->skip_special && v->tokens[id].flags & TOKEN_SPECIAL)) {
        const struct token *token = &v->tokens[id];
        const char *bytes = v->arena.data + token->text;
        bool is_byte = token->flags & TOKEN_BYTE;
        bool joins = config->byte_level || is_byte; /* with bytes before and after */
        if (!joins) flush_pending(d);
        d->in_run = is_byte;
        d->run_broken = d->run_broken && is_byte;
        for (size_t i = 0; i < token->text_size && !d->stopped; i++)
            if (d->started || !config->first_dropped || bytes[i] != ' ') add_byte(d, bytes[i]);
        if (!joins) flush_pending(d);
        d->started = true;
    }
    size_t held = 0;
    for (size_t i = 0; i < d->n_stops && !d->stopped; i++)
        if (d->stops[i].matched > held) held = d->stops[i].matched;
    give_out(d, held, text, size);
    return d->stopped;
}

size_t detokenizer_stop(const struct detokenizer *d)
{
    return d->stop;
}

void detokenizer_finish(struct detokenizer *d, const char **text, size_t *size)
{
    drop_given(d);
    flush_pending(d);
    give_out(d, 0, text, size);
}

linnet_status tokenizer_decode(const struct tokenizer *t, const int32_t *ids, size_t n,
                               bool skip_special, struct strbuf *out, linnet_error *err)
{
    struct detokenizer_options options = {.skip_special = skip_special};
    struct detokenizer *d;
    linnet_status status = detokenizer_create(t, &options, &d, err);
    if (status != LINNET_OK) return status;
    const char *text;
    size_t size;
    for (size_t i = 0; i < n; i++) {
        detokenizer_push(d, ids[i], &text, &size);
        strbuf_append(out, text, size);
    }
    detokenizer_finish(d, &text, &size);
    strbuf_append(out, text, size);
    detokenizer_destroy(d);
    return out->failed ? error_memory(err, "a decoded text", out->size) : LINNET_OK;
}
