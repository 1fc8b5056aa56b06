/*
 * perplexity - how well a model predicts a text. The convention of llama.cpp's llama-perplexity:
 * the tokens of the whole text are cut into chunks, each is read alone, beginning with BOS in place
 * of its first token where the tokenizer adds one, and of each only the second half is scored, so
 * that every scored token has half a chunk before it.
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/memory.h"
#include "cli/commands.h"
#include "cli/input.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "cli/session.h"

enum { USUAL_CHUNK = 512 };

struct measurement {
    struct session session;
    linnet_scorer *scorer;
    int32_t *ids;     /* the text's, and a chunk's while it is scored */
    size_t n_ids;     /* of the text, or as many as were asked for */
    size_t chunk;     /* tokens */
    int32_t bos;      /* -1: the tokenizer adds none */
    double *logprobs; /* [chunk] */

    size_t n_chunks;
    int64_t n_read, n_scored;
    double sum, sum_of_squares; /* of the negative logarithms */
    double seconds;
};

/* What comes out: estimates with their standard errors, NaN where one value gives none. */
struct estimate {
    double nll, nll_error, perplexity, perplexity_error;
};

static struct estimate estimate(const struct measurement *m)
{
    double n = (double)m->n_scored, mean = m->sum / n,
           variance = m->sum_of_squares / n - mean * mean;
    double error = n > 1 ? sqrt(fmax(variance, 0) / (n - 1)) : NAN;
    return (struct estimate){mean, error, exp(mean), error * exp(mean)};
}

/* ---- in ------------------------------------------------------------------------------------ */

static linnet_status read_text(const struct options *o, struct strbuf *text, linnet_error *err)
{
    const char *path = o->file ? o->file : o->arguments.n ? o->arguments.items[0] : NULL;
    if (!path && isatty(STDIN_FILENO))
        return error_set(err, LINNET_INVALID, "no text: name a file, or give it on standard input");
    return input_read(path ? path : "-", text, err);
}

/* What the tokenizer puts before a text is all that it makes of an empty one. */
static linnet_status find_bos(struct measurement *m, linnet_error *err)
{
    int32_t *ids;
    size_t n;
    linnet_status status =
        linnet_tokenize(m->session.model, "", 0, LINNET_ADD_SPECIAL, &ids, &n, err);
    if (status) return status;
    m->bos = n > 0 && m->n_ids > 0 && m->ids[0] == ids[0] ? ids[0] : -1;
    linnet_free(ids);
    return LINNET_OK;
}

static linnet_status choose_chunk(struct measurement *m, linnet_error *err)
{
    const struct options *o = m->session.options;
    int32_t longest = m->session.info.context_length;
    m->chunk = longest < USUAL_CHUNK ? (size_t)longest : USUAL_CHUNK;
    if (o->max_model_len) m->chunk = (size_t)o->max_model_len;
    if (m->chunk < 3 && !o->all)
        return error_set(err, LINNET_INVALID,
                         "chunks of %zu tokens leave none to score: expected --max-model-len 3 or "
                         "more, or --all",
                         m->chunk);
    size_t least = o->all ? 2 : m->chunk;
    if (m->n_ids >= least) return LINNET_OK;
    const char *whose = o->given[OPTION_MAX_TOKENS] && m->n_ids == (size_t)o->max_tokens
                            ? "--max-tokens leaves"
                            : "the text has";
    return error_set(err, LINNET_FORMAT, "%s %zu tokens, and a chunk takes %zu: give more%s", whose,
                     m->n_ids, least, o->all ? "" : ", shorter chunks (--max-model-len), or --all");
}

static linnet_status prepare(struct measurement *m, const struct strbuf *text, linnet_error *err)
{
    const struct options *o = m->session.options;
    linnet_status status = linnet_tokenize(m->session.model, strbuf_cstr(text), text->size,
                                           LINNET_ADD_SPECIAL, &m->ids, &m->n_ids, err);
    if (!status && o->max_tokens && m->n_ids > (size_t)o->max_tokens)
        m->n_ids = (size_t)o->max_tokens;
    if (!status) status = find_bos(m, err);
    if (!status) status = choose_chunk(m, err);
    if (status) return status;
    m->logprobs = mem_new(m->chunk, sizeof *m->logprobs);
    return m->logprobs ? LINNET_OK
                       : error_memory(err, "the scores", m->chunk * sizeof *m->logprobs);
}

static linnet_status load(struct measurement *m, linnet_error *err)
{
    linnet_engine_options options = session_engine_options(m->session.options);
    options.max_model_len = (int32_t)m->chunk;
    options.progress = progress_loading;
    progress_begin("loading", NULL);
    linnet_status status = linnet_scorer_create(m->session.model, &options, &m->scorer, err);
    progress_end();
    return status;
}

/* ---- scoring ------------------------------------------------------------------------------- */

static linnet_status score_chunk(struct measurement *m, size_t at, size_t n, linnet_error *err)
{
    int32_t *ids = m->ids + at, own = ids[0];
    /* llama-perplexity scores what follows tokens n / 2 to n - 2 */
    size_t first = m->session.options->all ? 1 : n / 2 + 1;
    if (m->bos >= 0) ids[0] = m->bos;
    linnet_status status = linnet_score(m->scorer, ids, n, first, m->logprobs, err);
    ids[0] = own;
    if (status) return status;
    for (size_t i = 0; i < n - first; i++) {
        m->sum -= m->logprobs[i];
        m->sum_of_squares += m->logprobs[i] * m->logprobs[i];
    }
    m->n_scored += (int64_t)(n - first);
    m->n_read += (int64_t)n;
    m->n_chunks++;
    return LINNET_OK;
}

/* With --all what is left after the last whole chunk is one too, if it has a token to score. */
static linnet_status score(struct measurement *m, linnet_error *err)
{
    size_t whole = m->n_ids / m->chunk * m->chunk, rest = m->n_ids - whole;
    size_t total = whole + (m->session.options->all && rest > 1 ? rest : 0);
    linnet_status status = LINNET_OK;
    double begun = clock_seconds();
    progress_begin("scoring", "tokens");
    for (size_t at = 0, n; at < total && !status; at += n) {
        n = total - at < m->chunk ? total - at : m->chunk;
        status = score_chunk(m, at, n, err);
        progress_update((int64_t)(at + n), (int64_t)total);
        if (m->session.options->verbose && !status)
            output_note("chunk %zu: perplexity so far %.4f", m->n_chunks, estimate(m).perplexity);
    }
    progress_end();
    m->seconds = clock_seconds() - begun;
    return status;
}

/* ---- out ----------------------------------------------------------------------------------- */

static json_t *number(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static bool print_json(const struct measurement *m, const char *device)
{
    struct estimate e = estimate(m);
    return output_json(
        json_pack("{s:o,s:o,s:o,s:o,s:I,s:I,s:I,s:I,s:I,s:o,s:s,s:o,s:o}", "perplexity",
                  number(e.perplexity), "perplexity_error", number(e.perplexity_error), "nll",
                  number(e.nll), "nll_error", number(e.nll_error), "tokens_scored",
                  (json_int_t)m->n_scored, "tokens_read", (json_int_t)m->n_read, "tokens",
                  (json_int_t)m->n_ids, "chunks", (json_int_t)m->n_chunks, "chunk_tokens",
                  (json_int_t)m->chunk, "bos", m->bos < 0 ? json_null() : json_integer(m->bos),
                  "device", device, "seconds", number(m->seconds), "tok_s",
                  number((double)m->n_read / m->seconds)),
        JSON_INDENT(2));
}

static void error_text(double error, struct strbuf *out)
{
    if (isfinite(error)) strbuf_format(out, " +/- %.5f", error);
}

static bool print_text(const struct measurement *m)
{
    struct estimate e = estimate(m);
    struct strbuf out = {0};
    strbuf_format(&out, "perplexity  %.4f", e.perplexity);
    error_text(e.perplexity_error, &out);
    strbuf_format(&out, "\nnll         %.6f", e.nll);
    error_text(e.nll_error, &out);
    strbuf_format(&out,
                  " a token\nscored      %" PRId64 " of %zu tokens: %zu chunk%s of %zu, %s%s\n",
                  m->n_scored, m->n_ids, m->n_chunks, m->n_chunks == 1 ? "" : "s", m->chunk,
                  m->session.options->all ? "all but the first of each" : "the second half of each",
                  m->bos < 0 ? "" : "; each begins with BOS");
    return output_strbuf(&out);
}

static int report(const struct measurement *m, const char *device)
{
    const struct options *o = m->session.options;
    if (o->json) return print_json(m, device) ? EXIT_DONE : EXIT_FAILED;
    if (!print_text(m)) return EXIT_FAILED;
    if (!o->quiet)
        output_note("%s: %" PRId64 " tokens in %.1f s, %.1f tokens/s", device, m->n_read,
                    m->seconds, (double)m->n_read / m->seconds);
    return EXIT_DONE;
}

int command_perplexity(const struct options *o)
{
    struct measurement m = {0};
    struct strbuf text = {0};
    linnet_device_info device;
    linnet_error err;
    linnet_status status = read_text(o, &text, &err);
    if (!status) status = session_open(&m.session, o, false, &err);
    if (!status) status = prepare(&m, &text, &err);
    strbuf_free(&text);
    if (!status) status = linnet_device_find(o->device, &device, &err);
    if (!status) status = load(&m, &err);
    if (!status) status = score(&m, &err);
    int code = status ? output_error(&err) : report(&m, device.name);
    linnet_scorer_destroy(m.scorer);
    free(m.logprobs);
    linnet_free(m.ids);
    session_close(&m.session);
    return code;
}
