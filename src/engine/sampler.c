#include "engine/sampler.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "ops/choice.h"

/*
 * Rows are walked in chunks whose maximum (later: sum) is remembered, so that a search looks into
 * few of them.
 */
enum { CHUNK = 256, LANES = 8 };

/* A value and what it counts for in a selection: its weight, or 1. */
struct item {
    double x;
    uint64_t mass;
};

struct sampler {
    int32_t n_vocab;
    int32_t n;          /* candidates: ids[0..n) ascending, with x[0..n) and weights[0..n) */
    double *x;          /* [n_vocab rounded up to CHUNK] logits */
    uint64_t *weights;  /* the same */
    double *maxima;     /* [chunks] of x */
    uint64_t *sums;     /* [chunks] of weights */
    struct item *items; /* [n_vocab] for selection */
    int32_t *ids;
    struct adjustment *adjustments; /* [n_vocab] */
    uint32_t generation;            /* slots[id] is of this rule if stamps[id] == generation */
    uint32_t *stamps;
    int32_t *slots; /* where among the adjustments an id is */
};

static int32_t chunks_of(int32_t n)
{
    return n / CHUNK + (n % CHUNK != 0);
}

linnet_status sampler_create(int32_t n_vocab, struct sampler **out, linnet_error *err)
{
    if (n_vocab < 1 || n_vocab > CHOICE_MAX_VOCAB)
        return error_set(err, LINNET_INVALID, "vocabulary: expected 1 to %d tokens, found %d",
                         CHOICE_MAX_VOCAB, n_vocab);
    size_t n = (size_t)n_vocab, n_chunks = (size_t)chunks_of(n_vocab);
    struct sampler *s = mem_new(1, sizeof *s);
    if (s) {
        s->n_vocab = n_vocab;
        s->x = mem_new(n_chunks * CHUNK, sizeof *s->x);
        s->weights = mem_new(n_chunks * CHUNK, sizeof *s->weights);
        s->maxima = mem_new(n_chunks, sizeof *s->maxima);
        s->sums = mem_new(n_chunks, sizeof *s->sums);
        s->items = mem_new(n, sizeof *s->items);
        s->ids = mem_new(n, sizeof *s->ids);
        s->adjustments = mem_new(n, sizeof *s->adjustments);
        s->stamps = mem_new(n, sizeof *s->stamps);
        s->slots = mem_new(n, sizeof *s->slots);
    }
    if (!s || !s->x || !s->weights || !s->maxima || !s->sums || !s->items || !s->ids ||
        !s->adjustments || !s->stamps || !s->slots) {
        sampler_destroy(s);
        return error_memory(err, "the sampler",
                            n * (2 * sizeof(double) + sizeof(struct item) +
                                 sizeof(struct adjustment) + 3 * sizeof(int32_t)));
    }
    *out = s;
    return LINNET_OK;
}

void sampler_destroy(struct sampler *s)
{
    if (!s) return;
    free(s->x);
    free(s->weights);
    free(s->maxima);
    free(s->sums);
    free(s->items);
    free(s->ids);
    free(s->adjustments);
    free(s->stamps);
    free(s->slots);
    free(s);
}

/* ---- the rule ---- */

static bool repeats(const struct sampling *g)
{
    return g->repetition_penalty != 1;
}

/* The tokens that penalties look at are [first_penalized, n_prompt + n_output). */
static int32_t first_penalized(const struct sampling *g, const struct sample_context *c)
{
    if (!has_penalties(g)) return c->n_prompt + c->n_output;
    return repeats(g) ? 0 : c->n_prompt;
}

int32_t sampler_rule_capacity(int32_t n_vocab, const struct sampling *settings,
                              const struct sample_context *context)
{
    int64_t n = (int64_t)context->n_prompt + context->n_output;
    n += (int64_t)settings->n_bias + context->n_banned - first_penalized(settings, context);
    return n < n_vocab ? (int32_t)n : n_vocab;
}

/* The rule's adjustment of an id, new if there is none yet; NULL if the id is never chosen. */
static struct adjustment *adjustment_of(struct sampler *s, struct choice_rule *rule,
                                        struct adjustment *adjustments, int32_t id)
{
    if (id < 0 || id >= rule->n_allowed) return NULL;
    if (s->stamps[id] != s->generation) {
        s->stamps[id] = s->generation;
        s->slots[id] = rule->n_adjustments++;
        adjustments[s->slots[id]] = (struct adjustment){.id = id};
    }
    return &adjustments[s->slots[id]];
}

void sampler_rule(struct sampler *s, const struct sampling *g, const struct sample_context *c,
                  struct adjustment *adjustments, struct choice_rule *out)
{
    *out = (struct choice_rule){.temperature = g->temperature,
                                .top_p = g->top_p,
                                .min_p = g->min_p,
                                .top_k = g->top_k,
                                .repetition_penalty = g->repetition_penalty,
                                .presence_penalty = g->presence_penalty,
                                .frequency_penalty = g->frequency_penalty,
                                .seed = g->seed,
                                .position = (uint64_t)c->n_prompt + (uint64_t)c->n_output,
                                .stream = c->stream,
                                .n_allowed = c->n_allowed < 0            ? 0
                                             : c->n_allowed < s->n_vocab ? c->n_allowed
                                                                         : s->n_vocab,
                                .adjustments = adjustments};
    if (++s->generation == 0) {
        memset(s->stamps, 0, (size_t)s->n_vocab * sizeof *s->stamps);
        s->generation = 1;
    }
    struct adjustment *a;
    for (int32_t i = 0; i < g->n_bias; i++) {
        float bias = g->bias[i].bias;
        if (isnan(bias) || !(a = adjustment_of(s, out, adjustments, g->bias[i].id))) continue;
        a->bias += bias > 1e4f ? 1e4f : bias < -1e4f ? -1e4f : bias;
    }
    for (int32_t i = first_penalized(g, c); i < c->n_prompt + c->n_output; i++) {
        if (!(a = adjustment_of(s, out, adjustments, c->tokens[i]))) continue;
        a->seen = repeats(g);
        a->count += i >= c->n_prompt;
    }
    for (int32_t i = 0; i < c->n_banned; i++)
        if ((a = adjustment_of(s, out, adjustments, c->banned[i]))) a->banned = true;
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

/* Leaves the maximum of each chunk of x[0..n) in maxima[]; returns that of all. */
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
        s->maxima[c] = max[0];
        if (max[0] > all) all = max[0];
    }
    return all;
}

struct cut {
    double x;      /* the smallest that stays: a logit, or an exponent */
    uint64_t ties; /* how many of those equal to it are needed */
};

static double median(double a, double b, double c)
{
    double low = a < b ? a : b, high = a < b ? b : a;
    return c < low ? low : c > high ? high : c;
}

/*
 * The smallest set of the largest items whose mass reaches `need`: at least 1, at most that of
 * all. Equal items have equal mass. Quickselect; the set ends up in front.
 */
static struct cut find_cut(struct item *items, int32_t n, uint64_t need)
{
    int32_t begin = 0, end = n;
    while (begin < end) {
        double pivot = median(items[begin].x, items[begin + (end - begin) / 2].x, items[end - 1].x);
        int32_t above = begin, same = begin, below = end; /* above | same as pivot | ? | below */
        uint64_t mass = 0, one = 0;
        while (same < below) {
            struct item item = items[same];
            if (item.x > pivot) {
                mass += item.mass;
                items[same++] = items[above];
                items[above++] = item;
            } else if (item.x == pivot) {
                one = item.mass;
                same++;
            } else {
                items[same] = items[--below];
                items[below] = item;
            }
        }
        if (mass >= need) {
            end = above;
            continue;
        }
        need -= mass;
        uint64_t n_same = (uint64_t)(same - above);
        if (need <= one * n_same)
            return (struct cut){.x = pivot, .ties = need / one + (need % one != 0)};
        need -= one * n_same;
        begin = same;
    }
    return (struct cut){.x = -DBL_MAX};
}

/* The k-th largest of x[0..n), whose maxima are in maxima[]; if fewer are finite, the least. */
static double kth_largest(struct sampler *s, int32_t n, int32_t k)
{
    int32_t limit = k < n / 4 ? 2 * k + CHUNK : n, used = 0;
    double bound = -INFINITY; /* k values at least as large are known */
    for (int32_t c = 0; c < chunks_of(n); c++) {
        if (s->maxima[c] <= bound) continue;
        for (int32_t i = c * CHUNK; i < (c + 1) * CHUNK; i++) {
            if (!(s->x[i] > bound)) continue;
            s->items[used++] = (struct item){s->x[i], 1};
            if (used < limit || used <= k) continue;
            bound = find_cut(s->items, used, (uint64_t)k).x;
            used = k;
        }
    }
    return used < k ? -DBL_MAX : find_cut(s->items, used, (uint64_t)k).x;
}

/* Makes those of x[0..n) that reach `least` the candidates, ids ascending. */
static void gather(struct sampler *s, int32_t n, double least)
{
    int32_t used = 0;
    for (int32_t c = 0; c < chunks_of(n); c++) {
        if (s->maxima[c] < least) continue;
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

/* x[0..CHUNK) become exponents, weights theirs; returns the sum of those. */
static uint64_t weigh_chunk(double *x, double max, double scale, uint64_t *weights)
{
    uint64_t sum[LANES] = {0};
    for (int i = 0; i < CHUNK; i++) x[i] = choice_exponent(x[i], max, scale);
    for (int i = 0; i < CHUNK; i += LANES)
        for (int l = 0; l < LANES; l++) {
            uint64_t weight = choice_weight(x[i + l]);
            weights[i + l] = weight;
            sum[l] += weight;
        }
    for (int l = 1; l < LANES; l++) sum[0] += sum[l];
    return sum[0];
}

/* The same for x[0..n), sums of chunks in sums[]; -infinity weighs 0. Returns the total. */
static uint64_t weigh_all(struct sampler *s, int32_t n, double max, double scale)
{
    uint64_t total = 0;
    for (int32_t c = 0; c < chunks_of(n); c++)
        total += s->sums[c] = weigh_chunk(s->x + c * CHUNK, max, scale, s->weights + c * CHUNK);
    return total;
}

/* ---- log-probabilities of the raw row ---- */

/* Leaves out what is -infinity. */
static void find_top(struct sampler *s, const float *logits, int32_t n_allowed, int32_t n_top,
                     double log_total, struct sample *out)
{
    out->n_top = 0;
    if (n_top <= 0 || n_allowed <= 0) return;
    load(s, logits, n_allowed);
    find_maxima(s, n_allowed);
    double least = kth_largest(s, n_allowed, n_top);
    for (int32_t c = 0; c < chunks_of(n_allowed); c++) {
        if (s->maxima[c] < least) continue;
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

/* log of the sum of e^logit over the whole row */
static double find_log_total(struct sampler *s, const float *logits, double max)
{
    load(s, logits, s->n_vocab);
    return max + log((double)weigh_all(s, s->n_vocab, max, 1) * 0x1p-44);
}

/* ---- candidates ---- */

/* x[0..n_allowed): the adjusted row, maxima beside it. Returns the maximum. */
static double load_adjusted(struct sampler *s, const float *logits, const struct choice_rule *rule)
{
    load(s, logits, rule->n_allowed);
    for (int32_t i = 0; i < rule->n_adjustments; i++) {
        const struct adjustment *a = &rule->adjustments[i];
        s->x[a->id] = choice_adjusted(rule, a, logits[a->id]);
    }
    return find_maxima(s, rule->n_allowed);
}

/* Bins of exponents, highest first, 32 to each 1; what has no weight is in the last. */
enum { BINS = -32 * CHOICE_LEAST_EXPONENT };

static inline int32_t bin_of(double exponent)
{
    return (int32_t)(exponent * -32);
}

/* The cut of top_p among the candidates. The exact search looks into one bin only. */
static struct cut find_top_p(struct sampler *s, uint64_t need)
{
    uint64_t masses[BINS + 1] = {0};
    for (int32_t i = 0; i < s->n; i++) masses[bin_of(s->x[i])] += s->weights[i];
    int32_t bin = 0, used = 0;
    for (; masses[bin] < need; bin++) need -= masses[bin];
    for (int32_t i = 0; i < s->n; i++)
        if (bin_of(s->x[i]) == bin) s->items[used++] = (struct item){s->x[i], s->weights[i]};
    return find_cut(s->items, used, need);
}

/* Drops the candidates below the cut or of a weight below `least`. */
static void drop(struct sampler *s, struct cut cut, uint64_t least)
{
    int32_t used = 0;
    for (int32_t i = 0; i < s->n; i++) {
        double x = s->x[i];
        uint64_t weight = s->weights[i], tie = (x == cut.x) & (cut.ties > 0);
        cut.ties -= tie;
        s->ids[used] = s->ids[i]; /* overwritten by the next one if this does not stay */
        s->weights[used] = weight;
        used += (weight >= least) & ((x > cut.x) | (int)tie);
    }
    s->n = used;
}

/* Sum of weights[0..n); those of the chunks stay in sums[]. */
static uint64_t sum_chunks(struct sampler *s)
{
    uint64_t total = 0;
    for (int32_t i = s->n; i < chunks_of(s->n) * CHUNK; i++) s->weights[i] = 0;
    for (int32_t c = 0; c < chunks_of(s->n); c++) {
        uint64_t sum = 0;
        for (int i = 0; i < CHUNK; i++) sum += s->weights[c * CHUNK + i];
        total += s->sums[c] = sum;
    }
    return total;
}

/* Candidates, their weights, sums beside them. Returns the total, 0 if there are none. */
static uint64_t weigh(struct sampler *s, const float *logits, const struct choice_rule *rule)
{
    int32_t n = rule->n_allowed;
    double max = load_adjusted(s, logits, rule), scale = choice_scale(rule);
    if (max == -INFINITY) return 0;
    /* what is lower has no weight, however the exponent is rounded */
    double least = max + (CHOICE_LEAST_EXPONENT - 1) * (double)rule->temperature;
    if (rule->top_k > 0 && rule->top_k < n) {
        double kth = kth_largest(s, n, rule->top_k);
        if (kth > least) least = kth;
    }
    gather(s, n, least);
    pad(s, s->n, -INFINITY);
    uint64_t total = weigh_all(s, s->n, max, scale);
    if (!(rule->top_p < 1) && !(rule->min_p > 0)) return total;
    struct cut cut = {.x = -INFINITY};
    if (rule->top_p < 1) cut = find_top_p(s, choice_need(rule->top_p, total));
    drop(s, cut, choice_least(rule->min_p));
    return sum_chunks(s);
}

/* The first candidate, ids ascending, at which the running sum of weights passes `at`. */
static int32_t draw(const struct sampler *s, uint64_t at)
{
    int32_t c = 0;
    for (; at >= s->sums[c]; c++) at -= s->sums[c];
    int32_t i = c * CHUNK;
    for (; at >= s->weights[i]; i++) at -= s->weights[i];
    return s->ids[i];
}

/* The lowest id with the maximum of the adjusted row; -1 if there is none. */
static int32_t choose_greedy(struct sampler *s, const float *logits, const struct choice_rule *rule,
                             int32_t raw_best)
{
    if (rule->n_adjustments == 0) return raw_best;
    double max = load_adjusted(s, logits, rule);
    if (max == -INFINITY) return -1;
    int32_t id = 0;
    while (s->maxima[id / CHUNK] != max) id += CHUNK;
    while (s->x[id] != max) id++;
    return id;
}

/* ---- the contract ---- */

linnet_status sampler_choose(struct sampler *s, const float *logits,
                             const struct sampling *settings, const struct sample_context *context,
                             int32_t n_logprobs, struct sample *out, linnet_error *err)
{
    struct choice_rule rule;
    sampler_rule(s, settings, context, s->adjustments, &rule);
    int32_t best;
    float max;
    linnet_status status = scan(s, logits, rule.n_allowed, &max, &best, err);
    if (status != LINNET_OK) return status;

    double log_total = 0;
    if (n_logprobs >= 0) {
        log_total = find_log_total(s, logits, max);
        find_top(s, logits, rule.n_allowed,
                 n_logprobs < SAMPLER_MAX_LOGPROBS ? n_logprobs : SAMPLER_MAX_LOGPROBS, log_total,
                 out);
    }
    if (rule.temperature > 0) {
        uint64_t total = weigh(s, logits, &rule);
        if (total == 0) return none_left(err);
        out->id = draw(s, choice_draw(&rule, total));
    } else {
        out->id = choose_greedy(s, logits, &rule, best);
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
    struct choice_rule rule;
    sampler_rule(s, settings, context, s->adjustments, &rule);
    int32_t best;
    float max;
    linnet_status status = scan(s, logits, rule.n_allowed, &max, &best, err);
    if (status != LINNET_OK) return status;

    memset(probabilities, 0, (size_t)s->n_vocab * sizeof *probabilities);
    if (!(rule.temperature > 0)) {
        int32_t id = choose_greedy(s, logits, &rule, best);
        if (id < 0) return none_left(err);
        probabilities[id] = 1;
        return LINNET_OK;
    }
    uint64_t total = weigh(s, logits, &rule);
    if (total == 0) return none_left(err);
    for (int32_t i = 0; i < s->n; i++)
        probabilities[s->ids[i]] = (float)((double)s->weights[i] / (double)total);
    return LINNET_OK;
}
