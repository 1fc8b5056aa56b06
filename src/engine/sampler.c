#include "engine/sampler.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "base/random.h"

/*
 * Rows are walked in chunks whose maximum (later: sum) is remembered, so that a search looks into
 * few of them. Every sum is over doubles in an order written down here, never the compiler's.
 */
enum { CHUNK = 256, LANES = 8 };

struct sampler {
    int32_t n_vocab;
    int32_t n;      /* candidates: ids[0..n) ascending, with x[0..n) */
    double *x;      /* [n_vocab rounded up to CHUNK] logits, then weights */
    double *values; /* [n_vocab] copy for selection */
    double *chunk;  /* [chunks] maximum or sum of each chunk of x */
    int32_t *ids;
    uint32_t generation; /* counts[id] is of this call if stamps[id] == generation, else 0 */
    uint32_t *stamps;
    int32_t *counts; /* in the output */
};

static int32_t chunks_of(int32_t n)
{
    return n / CHUNK + (n % CHUNK != 0);
}

linnet_status sampler_create(int32_t n_vocab, struct sampler **out, linnet_error *err)
{
    if (n_vocab < 1 || n_vocab > INT32_MAX - CHUNK)
        return error_set(err, LINNET_INVALID, "vocabulary: expected 1 to %d tokens, found %d",
                         INT32_MAX - CHUNK, n_vocab);
    size_t n = (size_t)n_vocab, n_chunks = (size_t)chunks_of(n_vocab);
    struct sampler *s = mem_new(1, sizeof *s);
    if (s) {
        s->n_vocab = n_vocab;
        s->x = mem_new(n_chunks * CHUNK, sizeof *s->x);
        s->values = mem_new(n, sizeof *s->values);
        s->chunk = mem_new(n_chunks, sizeof *s->chunk);
        s->ids = mem_new(n, sizeof *s->ids);
        s->stamps = mem_new(n, sizeof *s->stamps);
        s->counts = mem_new(n, sizeof *s->counts);
    }
    if (!s || !s->x || !s->values || !s->chunk || !s->ids || !s->stamps || !s->counts) {
        sampler_destroy(s);
        return error_memory(err, "the sampler", n * (2 * sizeof(double) + 3 * sizeof(int32_t)));
    }
    *out = s;
    return LINNET_OK;
}

void sampler_destroy(struct sampler *s)
{
    if (!s) return;
    free(s->x);
    free(s->values);
    free(s->chunk);
    free(s->ids);
    free(s->stamps);
    free(s->counts);
    free(s);
}

/* ---- the raw row ---- */

struct peak {
    float max;    /* -infinity if there is nothing above it */
    int32_t id;   /* lowest id that has it; -1 */
    bool damaged; /* NaN or +infinity somewhere */
};

/* Maximum of x[0..CHUNK); *damaged is set where a value is NaN or +infinity. */
static float chunk_peak(const float *x, bool *damaged)
{
    float max[LANES];
    int32_t bad[LANES] = {0};
    for (int l = 0; l < LANES; l++) max[l] = -INFINITY;
    for (int i = 0; i < CHUNK; i += LANES)
        for (int l = 0; l < LANES; l++) {
            float v = x[i + l];
            max[l] = v > max[l] ? v : max[l];
            bad[l] |= !(v <= FLT_MAX);
        }
    float all = max[0];
    for (int l = 0; l < LANES; l++) {
        if (max[l] > all) all = max[l];
        if (bad[l]) *damaged = true;
    }
    return all;
}

static struct peak find_peak(const float *x, int32_t begin, int32_t end)
{
    struct peak p = {.max = -INFINITY, .id = -1};
    int32_t i = begin, best = begin;
    for (; end - i >= CHUNK; i += CHUNK) {
        float max = chunk_peak(x + i, &p.damaged);
        if (max > p.max) p.max = max, best = i;
    }
    for (; i < end; i++) {
        if (!(x[i] <= FLT_MAX)) p.damaged = true;
        if (x[i] > p.max) p.max = x[i], best = i;
    }
    if (p.max > -INFINITY)
        for (p.id = best; x[p.id] != p.max;) p.id++;
    return p;
}

/*
 * Refuses a row that no sound model gives. *max: of the whole row; *best: the lowest id < n_allowed
 * with the maximum of those, -1 if all are -infinity.
 */
static linnet_status scan(const struct sampler *s, const float *logits, int32_t n_allowed,
                          float *max, int32_t *best, linnet_error *err)
{
    struct peak p = find_peak(logits, 0, n_allowed);
    struct peak padding = find_peak(logits, n_allowed, s->n_vocab);
    *max = padding.max > p.max ? padding.max : p.max;
    *best = p.id;
    const char *cause = "the model's file is damaged or a sum overflowed: compare the file with "
                        "its source";
    if (p.damaged || padding.damaged) {
        int32_t id = 0;
        while (logits[id] <= FLT_MAX) id++;
        return error_set(err, LINNET_NUMERIC,
                         "logits: token %d of %d: expected a finite number, found %s; %s", id,
                         s->n_vocab, isnan(logits[id]) ? "NaN" : "+infinity", cause);
    }
    if (*max == -INFINITY)
        return error_set(err, LINNET_NUMERIC,
                         "logits: expected a finite number, found -infinity for all %d tokens; %s",
                         s->n_vocab, cause);
    return LINNET_OK;
}

static linnet_status none_left(linnet_error *err)
{
    return error_set(err, LINNET_NUMERIC,
                     "no token can be chosen: all with a finite logit are banned, padding or out "
                     "of range after the penalties; relax the request's settings");
}

/* ---- x: chunks, selection, exponentials ---- */

/* Fills x[n..) with value up to a whole chunk, so that inner loops have a fixed length. */
static void pad(struct sampler *s, int32_t n, double value)
{
    for (int32_t i = n; i < chunks_of(n) * CHUNK; i++) s->x[i] = value;
}

static void load(struct sampler *s, const float *logits, int32_t n)
{
    int32_t i = 0;
    for (; n - i >= LANES; i += LANES)
        for (int l = 0; l < LANES; l++) s->x[i + l] = logits[i + l];
    for (; i < n; i++) s->x[i] = logits[i];
    pad(s, n, -INFINITY);
}

/* Leaves the maximum of each chunk of x[0..n) in chunk[]; returns that of all. */
static double find_maxima(struct sampler *s, int32_t n)
{
    double all = -INFINITY;
    for (int32_t c = 0; c < chunks_of(n); c++) {
        const double *x = s->x + c * CHUNK;
        double max[LANES];
        for (int l = 0; l < LANES; l++) max[l] = -INFINITY;
        for (int i = 0; i < CHUNK; i += LANES)
            for (int l = 0; l < LANES; l++) max[l] = x[i + l] > max[l] ? x[i + l] : max[l];
        for (int l = 1; l < LANES; l++) max[0] = max[l] > max[0] ? max[l] : max[0];
        s->chunk[c] = max[0];
        if (max[0] > all) all = max[0];
    }
    return all;
}

struct cut {
    double value; /* the smallest that stays */
    double ties;  /* how many of those equal to it are needed */
};

static double median(double a, double b, double c)
{
    double low = a < b ? a : b, high = a < b ? b : a;
    return c < low ? low : c > high ? high : c;
}

/*
 * The smallest set of the largest values whose mass reaches `need` > 0, the mass of a value being
 * itself (by_mass) or 1. Quickselect on values[0..n), n >= 1, which end up with the set in front.
 */
static struct cut find_cut(double *values, int32_t n, double need, bool by_mass)
{
    struct cut cut = {.value = values[0]};
    int32_t begin = 0, end = n;
    while (begin < end) {
        double pivot = median(values[begin], values[begin + (end - begin) / 2], values[end - 1]);
        int32_t above = begin, same = begin, below = end; /* above | same as pivot | ? | below */
        double mass = 0;
        while (same < below) {
            double v = values[same];
            if (v > pivot) {
                mass += by_mass ? v : 1;
                values[same++] = values[above];
                values[above++] = v;
            } else if (v == pivot) {
                same++;
            } else {
                values[same] = values[--below];
                values[below] = v;
            }
        }
        if (mass >= need) {
            end = above;
            continue;
        }
        double one = by_mass ? pivot : 1;
        cut = (struct cut){.value = pivot, .ties = ceil((need - mass) / one)};
        if (cut.ties <= same - above) break;
        need -= mass + one * (same - above);
        begin = same;
    }
    return cut;
}

/* The k-th largest of x[0..n), whose maxima are in chunk[]; if fewer are finite, the least. */
static double kth_largest(struct sampler *s, int32_t n, int32_t k)
{
    int32_t limit = k < n / 4 ? 2 * k + CHUNK : n, used = 0;
    double bound = -INFINITY; /* k values at least as large are known */
    for (int32_t c = 0; c < chunks_of(n); c++) {
        if (s->chunk[c] <= bound) continue;
        for (int32_t i = c * CHUNK; i < (c + 1) * CHUNK; i++) {
            if (!(s->x[i] > bound)) continue;
            s->values[used++] = s->x[i];
            if (used < limit || used <= k) continue;
            bound = find_cut(s->values, used, k, false).value;
            used = k;
        }
    }
    return used < k ? -DBL_MAX : find_cut(s->values, used, k, false).value;
}

/* Makes those of x[0..n) that reach `least` the candidates, ids ascending. */
static void gather(struct sampler *s, int32_t n, double least)
{
    int32_t used = 0;
    for (int32_t c = 0; c < chunks_of(n); c++) {
        if (s->chunk[c] < least) continue;
        int32_t end = (c + 1) * CHUNK < n ? (c + 1) * CHUNK : n;
        for (int32_t i = c * CHUNK; i < end; i++) {
            double x = s->x[i];
            s->ids[used] = i; /* overwritten by the next one if this does not count */
            s->x[used] = x;
            used += x >= least;
        }
    }
    s->n = used;
}

/*
 * e^y for -700 <= y <= 0, the same bits on every machine: y = k ln 2 + r, |r| <= ln 2 / 2, Taylor
 * to r^9 (relative error below 1e-11). No branch, so that compilers vectorise it.
 */
static inline double exp_weight(double y)
{
    const double to_integer = 0x1.8p52; /* adding it leaves round(y / ln 2) in the low bits */
    const double ln2_high = 0x1.62e42feep-1, ln2_low = 0x1.a39ef35793c76p-33;
    double shifted = y * 0x1.71547652b82fep+0 + to_integer;
    double k = shifted - to_integer;
    double r = y - k * ln2_high - k * ln2_low;
    double e = 1.0 / 362880;
    e = e * r + 1.0 / 40320;
    e = e * r + 1.0 / 5040;
    e = e * r + 1.0 / 720;
    e = e * r + 1.0 / 120;
    e = e * r + 1.0 / 24;
    e = e * r + 1.0 / 6;
    e = e * r + 0.5;
    e = e * r + 1;
    e = e * r + 1;
    uint64_t exponent, bits;
    memcpy(&exponent, &shifted, 8);
    memcpy(&bits, &e, 8);
    bits += exponent << 52;
    memcpy(&e, &bits, 8);
    return e;
}

/*
 * out[0..CHUNK) = e^((x - max) * scale); returns their sum. x and out may be the same. What is
 * below -700, or NaN, counts as -700: 1e-304, which no sum that has a 1 in it notices.
 */
static double exp_chunk(const double *x, double max, double scale, double *out)
{
    double sum[LANES] = {0};
    for (int i = 0; i < CHUNK; i++) {
        double y = (x[i] - max) * scale;
        out[i] = y > -700 ? y : -700;
    }
    for (int i = 0; i < CHUNK; i += LANES)
        for (int l = 0; l < LANES; l++) {
            double e = exp_weight(out[i + l]);
            out[i + l] = e;
            sum[l] += e;
        }
    return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

/* ---- log-probabilities of the raw row ---- */

/* x holds the raw row, -infinity from n_allowed on. Leaves out what is -infinity. */
static void find_top(struct sampler *s, int32_t n_allowed, int32_t n_top, double log_total,
                     struct sample *out)
{
    out->n_top = 0;
    if (n_top <= 0 || n_allowed <= 0) return;
    find_maxima(s, n_allowed);
    double least = kth_largest(s, n_allowed, n_top);
    for (int32_t c = 0; c < chunks_of(n_allowed); c++) {
        if (s->chunk[c] < least) continue;
        for (int32_t i = c * CHUNK; i < n_allowed && i < (c + 1) * CHUNK; i++) {
            if (s->x[i] < least) continue;
            float logprob = (float)(s->x[i] - log_total);
            int32_t at = out->n_top;
            while (at > 0 && s->x[out->top[at - 1].id] < s->x[i]) at--;
            if (at == n_top) continue;
            int32_t moved = (out->n_top < n_top ? out->n_top : n_top - 1) - at;
            memmove(&out->top[at + 1], &out->top[at], (size_t)moved * sizeof *out->top);
            out->top[at].id = i;
            out->top[at].logprob = logprob;
            if (out->n_top < n_top) out->n_top++;
        }
    }
}

/* log of the sum of e^logit over the whole row; x holds the raw row afterwards. */
static double load_log_total(struct sampler *s, const float *logits, double max)
{
    load(s, logits, s->n_vocab);
    double total = 0, weights[CHUNK];
    for (int32_t c = 0; c < chunks_of(s->n_vocab); c++)
        total += exp_chunk(s->x + c * CHUNK, max, 1, weights);
    return max + log(total);
}

/* ---- the request's settings ---- */

static bool has_penalties(const struct sampling *g)
{
    return g->repetition_penalty != 1 || g->presence_penalty != 0 || g->frequency_penalty != 0;
}

static void penalize(struct sampler *s, const struct sampling *g, const struct sample_context *c,
                     int32_t n)
{
    if (++s->generation == 0) {
        memset(s->stamps, 0, (size_t)s->n_vocab * sizeof *s->stamps);
        s->generation = 1;
    }
    double repetition = g->repetition_penalty;
    int32_t end = c->n_prompt + c->n_output;
    for (int32_t i = repetition != 1 ? 0 : c->n_prompt; i < end; i++) {
        int32_t id = c->tokens[i];
        if (id < 0 || id >= n) continue;
        if (s->stamps[id] != s->generation) {
            s->stamps[id] = s->generation;
            s->counts[id] = 0;
            s->x[id] = s->x[id] > 0 ? s->x[id] / repetition : s->x[id] * repetition;
        }
        s->counts[id] += i >= c->n_prompt;
    }
    for (int32_t i = c->n_prompt; i < end; i++) {
        int32_t id = c->tokens[i];
        if (id < 0 || id >= n || s->counts[id] == 0) continue;
        s->x[id] -= (double)g->frequency_penalty * s->counts[id] + g->presence_penalty;
        s->counts[id] = 0; /* done for this id */
    }
}

/* x[0..n): the row with bias, penalties and bans, chunk maxima beside it. Returns the maximum. */
static double load_adjusted(struct sampler *s, const float *logits, const struct sampling *g,
                            const struct sample_context *c, int32_t n)
{
    load(s, logits, n);
    for (int32_t i = 0; i < g->n_bias; i++) {
        int32_t id = g->bias[i].id;
        double bias = g->bias[i].bias;
        if (id < 0 || id >= n || isnan(bias)) continue;
        s->x[id] += bias > 1e4 ? 1e4 : bias < -1e4 ? -1e4 : bias;
    }
    if (has_penalties(g)) penalize(s, g, c, n);
    for (int32_t i = 0; i < c->n_banned; i++)
        if (c->banned[i] >= 0 && c->banned[i] < n) s->x[c->banned[i]] = -INFINITY;
    return find_maxima(s, n);
}

/* Bins of weights in (0, 1], largest first: 16 to each power of 2, all below 2^-64 in the last. */
enum { BINS = 1024 };

static inline int32_t bin_of(double weight)
{
    uint64_t bits;
    memcpy(&bits, &weight, 8);
    int32_t bin = 0x3FF0 - (int32_t)(bits >> 48);
    return bin < BINS ? bin : BINS - 1;
}

/* The cut of top_p among the candidates' weights. The exact search looks into one bin only. */
static struct cut find_top_p(struct sampler *s, double total, double top_p)
{
    double masses[BINS] = {0}, need = top_p * total > DBL_MIN ? top_p * total : DBL_MIN;
    for (int32_t i = 0; i < s->n; i++) masses[bin_of(s->x[i])] += s->x[i];
    int32_t bin = 0, used = 0;
    for (; bin < BINS - 1 && masses[bin] < need; bin++) need -= masses[bin];
    for (int32_t i = 0; i < s->n; i++) {
        s->values[used] = s->x[i];
        used += bin_of(s->x[i]) == bin;
    }
    return used ? find_cut(s->values, used, need, true) : (struct cut){0};
}

/* Drops the candidates that top_p and min_p exclude; x holds weights, 1 being the largest. */
static void cut_tail(struct sampler *s, double total, double top_p, double min_p)
{
    struct cut cut = top_p < 1 ? find_top_p(s, total, top_p) : (struct cut){0};
    double least = min_p < 1 ? min_p : 1;
    int32_t used = 0;
    for (int32_t i = 0; i < s->n; i++) {
        double x = s->x[i];
        s->ids[used] = s->ids[i]; /* overwritten by the next one if this does not stay */
        s->x[used] = x;
        used += (x >= least) & ((x > cut.value) | (x == cut.value && cut.ties-- >= 1));
    }
    s->n = used;
}

/* Sum of x[0..n); those of the chunks stay in chunk[]. */
static double sum_chunks(struct sampler *s)
{
    double total = 0;
    pad(s, s->n, 0);
    for (int32_t c = 0; c < chunks_of(s->n); c++) {
        const double *x = s->x + c * CHUNK;
        double sum[4] = {0};
        for (int i = 0; i < CHUNK; i += 4)
            for (int l = 0; l < 4; l++) sum[l] += x[i + l];
        total += s->chunk[c] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
    return total;
}

/* Candidates, their weights, chunk sums beside them. Returns the total, 0 if there are none. */
static double weigh(struct sampler *s, const float *logits, const struct sampling *g,
                    const struct sample_context *c, int32_t n)
{
    double max = load_adjusted(s, logits, g, c, n);
    double total = 0;
    if (max == -INFINITY) return 0;
    bool top_k = g->top_k > 0 && g->top_k < n;
    gather(s, n, top_k ? kth_largest(s, n, g->top_k) : -DBL_MAX);
    pad(s, s->n, -INFINITY);
    for (int32_t i = 0; i < chunks_of(s->n); i++) {
        double *x = s->x + i * CHUNK;
        total += s->chunk[i] = exp_chunk(x, max, 1.0 / g->temperature, x);
    }
    if (!(g->top_p < 1) && !(g->min_p > 0)) return total;
    cut_tail(s, total, g->top_p, g->min_p);
    return sum_chunks(s);
}

/* The first candidate, ids ascending, at which the running sum of weights passes `at`. */
static int32_t draw(const struct sampler *s, double at)
{
    int32_t last = chunks_of(s->n) - 1, c = 0;
    for (; c < last && at >= s->chunk[c]; c++) at -= s->chunk[c];
    int32_t i = c * CHUNK, end = c < last ? i + CHUNK : s->n;
    for (; i < end - 1 && at >= s->x[i]; i++) at -= s->x[i]; /* a rest by rounding: the last */
    return s->ids[i];
}

/* The lowest id with the maximum after bias, penalties and bans; -1 if there is none. */
static int32_t choose_greedy(struct sampler *s, const float *logits, const struct sampling *g,
                             const struct sample_context *c, int32_t n, int32_t raw_best)
{
    if (g->n_bias == 0 && c->n_banned == 0 && !has_penalties(g)) return raw_best;
    double max = load_adjusted(s, logits, g, c, n);
    if (max == -INFINITY) return -1;
    int32_t id = 0;
    while (s->chunk[id / CHUNK] != max) id += CHUNK;
    while (s->x[id] != max) id++;
    return id;
}

/* ---- the contract ---- */

static int32_t allowed(const struct sampler *s, const struct sample_context *c)
{
    return c->n_allowed < 0 ? 0 : c->n_allowed < s->n_vocab ? c->n_allowed : s->n_vocab;
}

linnet_status sampler_choose(struct sampler *s, const float *logits,
                             const struct sampling *settings, const struct sample_context *context,
                             int32_t n_logprobs, struct sample *out, linnet_error *err)
{
    int32_t n = allowed(s, context), best;
    float max;
    linnet_status status = scan(s, logits, n, &max, &best, err);
    if (status != LINNET_OK) return status;

    double log_total = 0;
    if (n_logprobs >= 0) {
        log_total = load_log_total(s, logits, max);
        pad(s, n, -INFINITY);
        find_top(s, n, n_logprobs < SAMPLER_MAX_LOGPROBS ? n_logprobs : SAMPLER_MAX_LOGPROBS,
                 log_total, out);
    }
    if (settings->temperature > 0) {
        int64_t position = (int64_t)context->n_prompt + context->n_output;
        double u = random_uniform(settings->seed, (uint64_t)position, context->stream);
        double total = weigh(s, logits, settings, context, n);
        if (total == 0) return none_left(err);
        out->id = draw(s, u * total);
    } else {
        out->id = choose_greedy(s, logits, settings, context, n, best);
        if (out->id < 0) return none_left(err);
    }
    if (n_logprobs >= 0) out->logprob = (float)(logits[out->id] - log_total);
    return LINNET_OK;
}

linnet_status sampler_distribution(struct sampler *s, const float *logits,
                                   const struct sampling *settings,
                                   const struct sample_context *context, float *probabilities,
                                   linnet_error *err)
{
    int32_t n = allowed(s, context), best;
    float max;
    linnet_status status = scan(s, logits, n, &max, &best, err);
    if (status != LINNET_OK) return status;

    memset(probabilities, 0, (size_t)s->n_vocab * sizeof *probabilities);
    if (!(settings->temperature > 0)) {
        int32_t id = choose_greedy(s, logits, settings, context, n, best);
        if (id < 0) return none_left(err);
        probabilities[id] = 1;
        return LINNET_OK;
    }
    double total = weigh(s, logits, settings, context, n);
    if (total == 0) return none_left(err);
    for (int32_t i = 0; i < s->n; i++) probabilities[s->ids[i]] = (float)(s->x[i] / total);
    return LINNET_OK;
}
