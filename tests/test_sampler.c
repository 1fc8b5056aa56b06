/* test_sampler.c - the goldens, a naive sampler beside it, the draw, and rows that must fail. */
#include "support.h"

#include <malloc.h>
#include <math.h>

#include "base/random.h"
#include "engine/sampler.h"
#include "ops/choice.h"

static const struct sampling plain = {.temperature = 1, .top_p = 1, .repetition_penalty = 1};

/* A weight below half of this, relative to the maximum's, is none. */
static const double least_weight = 0x1p-44;

static struct sampler *create(int32_t n_vocab)
{
    struct sampler *s = NULL;
    linnet_error err;
    assert_ok(sampler_create(n_vocab, &s, &err), err);
    return s;
}

static int32_t choose(struct sampler *s, const float *logits, const struct sampling *settings,
                      const struct sample_context *context)
{
    struct sample out = {0};
    linnet_error err;
    assert_ok(sampler_choose(s, logits, settings, context, -1, &out, &err), err);
    return out.id;
}

/* Logits like a trained model's: a few high, most far below. */
static float random_logit(uint64_t seed, int32_t i)
{
    double sum = -6;
    for (uint64_t j = 0; j < 12; j++) sum += random_uniform(seed, (uint64_t)i, j);
    return (float)(3 * sum);
}

static void test_create_refuses(void **state)
{
    (void)state;
    struct sampler *s = NULL;
    linnet_error err;
    int32_t wrong[] = {0, -5, (1 << 19) + 1, INT32_MAX};
    for (int i = 0; i < 4; i++)
        assert_int_equal(sampler_create(wrong[i], &s, &err), LINNET_INVALID);
    assert_null(s);
    sampler_destroy(NULL);
}

/* ---- goldens ---- */

/* The data of a tensor in a safetensors file held in memory. */
static const void *tensor(const char *file, const char *name, size_t *bytes)
{
    uint64_t n_header;
    memcpy(&n_header, file, 8);
    json_t *header = json_loadb(file + 8, n_header, 0, NULL);
    json_int_t begin = -1, end = -1;
    assert_int_equal(json_unpack(header, "{s:{s:[I,I]}}", name, "data_offsets", &begin, &end), 0);
    json_decref(header);
    *bytes = (size_t)(end - begin);
    return file + 8 + n_header + begin;
}

static int32_t read_ids(const json_t *list, int32_t *ids)
{
    size_t i;
    json_t *item;
    json_array_foreach(list, i, item) ids[i] = (int32_t)json_integer_value(item);
    return (int32_t)json_array_size(list);
}

static void check_golden(struct sampler *s, const char *file, const json_t *vectors,
                         const json_t *golden)
{
    const char *vector;
    int number, top_k, kept, top_id;
    double temperature, top_p, min_p, repetition, presence, frequency;
    assert_int_equal(
        json_unpack((json_t *)golden, "{s:s, s:i, s:F, s:i, s:F, s:F, s:F, s:F, s:F, s:i, s:i}",
                    "vector", &vector, "case", &number, "temperature", &temperature, "top_k",
                    &top_k, "top_p", &top_p, "min_p", &min_p, "repetition", &repetition, "presence",
                    &presence, "frequency", &frequency, "kept", &kept, "top_id", &top_id),
        0);
    json_t *margin = json_object_get(golden, "margin"), *ids = json_object_get(vectors, vector);
    if (json_is_number(margin) && json_number_value(margin) < 1e-6) return;

    char name[40];
    size_t bytes;
    snprintf(name, sizeof name, "logits.%s", vector);
    const float *logits = tensor(file, name, &bytes);
    assert_int_equal(bytes, 1024 * sizeof(float));
    snprintf(name, sizeof name, "probs.%s.%d", vector, number);
    const double *want = tensor(file, name, &bytes);
    assert_int_equal(bytes, 1024 * sizeof(double));

    int32_t tokens[64];
    struct sample_context context = {.tokens = tokens, .n_allowed = 1024};
    context.n_prompt = read_ids(json_object_get(ids, "prompt_ids"), tokens);
    context.n_output = read_ids(json_object_get(ids, "output_ids"), tokens + context.n_prompt);
    struct sampling settings = {.temperature = (float)temperature,
                                .top_k = top_k,
                                .top_p = (float)top_p,
                                .min_p = (float)min_p,
                                .repetition_penalty = (float)repetition,
                                .presence_penalty = (float)presence,
                                .frequency_penalty = (float)frequency};
    float got[1024];
    linnet_error err;
    assert_ok(sampler_distribution(s, logits, &settings, &context, got, &err), err);
    int n_kept = 0;
    for (int i = 0; i < 1024; i++) {
        double p;
        memcpy(&p, want + i, sizeof p);
        bool kept_alike = (got[i] > 0) == (p > 0) || (p > 0 && p < least_weight);
        if (fabs(got[i] - p) > 1e-6 || !kept_alike)
            fail_msg("%s: token %d: expected %.9g, found %.9g", name, i, p, got[i]);
        n_kept += p > 0;
    }
    assert_int_equal(n_kept, kept);
    settings.temperature = 0;
    settings.top_k = 0;
    assert_int_equal(choose(s, logits, &settings, &context), top_id);
}

static void test_goldens(void **state)
{
    (void)state;
    json_t *golden = load_json(data_path("sampling.json")), *item;
    char *file = load_file(data_path("sampling.safetensors"), NULL);
    struct sampler *s = create(1024);
    size_t i;
    json_t *cases = json_object_get(golden, "cases");
    assert_int_equal(json_array_size(cases), 48);
    json_array_foreach(cases, i, item)
        check_golden(s, file, json_object_get(golden, "vectors"), item);
    sampler_destroy(s);
    free(file);
    json_decref(golden);
}

/* ---- a naive sampler ---- */

struct entry {
    double x;
    int32_t id;
};

static int descending(const void *a, const void *b)
{
    const struct entry *p = a, *q = b;
    if (p->x != q->x) return p->x < q->x ? 1 : -1;
    return (p->id > q->id) - (p->id < q->id);
}

/* Sorts everything; weights[n] (0: not kept). False where a threshold is too close to call. */
static bool naive(const float *logits, int32_t n, const struct sampling *g, double *weights)
{
    static struct entry e[1 << 14];
    for (int32_t i = 0; i < n; i++) e[i] = (struct entry){logits[i], i};
    qsort(e, (size_t)n, sizeof *e, descending);
    memset(weights, 0, (size_t)n * sizeof *weights);
    int32_t kept = n;
    if (g->top_k > 0 && g->top_k < n) {
        kept = g->top_k;
        while (kept < n && e[kept].x == e[kept - 1].x) kept++;
    }
    double total = 0, sum = 0, max = e[0].x;
    for (int32_t i = 0; i < kept; i++) total += exp((e[i].x - max) / g->temperature);
    bool sure = true;
    for (int32_t i = 0; i < kept; i++) {
        double w = exp((e[i].x - max) / g->temperature);
        if (fabs(w - g->min_p) < 1e-9) sure = false;
        if (i > 0 && fabs(sum / total - g->top_p) < 1e-9 && g->top_p < 1) sure = false;
        if (i > 0 && ((sum >= g->top_p * total && g->top_p < 1) || w < g->min_p)) break;
        weights[e[i].id] = w;
        sum += w;
    }
    return sure;
}

static void compare_with_naive(struct sampler *s, const float *logits, int32_t n,
                               const struct sampling *g, uint64_t *n_compared)
{
    static double weights[1 << 14];
    static float got[1 << 14];
    struct sample_context context = {.n_allowed = n};
    linnet_error err;
    if (!naive(logits, n, g, weights)) return;
    ++*n_compared;
    assert_ok(sampler_distribution(s, logits, g, &context, got, &err), err);
    double total = 0, running = 0;
    for (int32_t i = 0; i < n; i++) total += weights[i];
    for (int32_t i = 0; i < n; i++)
        if (fabs(got[i] - weights[i] / total) > 1e-6 * weights[i] / total + least_weight)
            fail_msg("n %d, top_k %d, top_p %g, min_p %g, temperature %g: token %d: expected %.9g, "
                     "found %.9g",
                     n, g->top_k, g->top_p, g->min_p, g->temperature, i, weights[i] / total,
                     got[i]);
    for (int32_t at = 0; at < 4; at++) { /* and the draw walks these weights, ids ascending */
        context.n_prompt = at, context.n_output = 3;
        double u = random_uniform(g->seed, (uint64_t)at + 3, 0) * total;
        int32_t want = 0;
        running = 0;
        while (want < n - 1 && running + weights[want] <= u) running += weights[want++];
        bool sure = u - running > 1e-9 * total && running + weights[want] - u > 1e-9 * total;
        if (sure) assert_int_equal(choose(s, logits, g, &context), want);
    }
}

static void test_naive(void **state)
{
    (void)state;
    static float logits[1 << 14];
    uint64_t n_compared = 0;
    int32_t sizes[] = {1, 2, 7, 255, 256, 257, 1000, 5003, 1 << 14};
    for (uint64_t round = 0; round < 180; round++) {
        int32_t n = sizes[round % 9];
        struct sampler *s = create(n);
        uint64_t shape = round / 9 % 4; /* spread, ties, nearly flat, ascending */
        for (int32_t i = 0; i < n; i++) {
            float x = random_logit(round, i);
            logits[i] = shape == 1   ? roundf(2 * x) / 2
                        : shape == 2 ? x / 100
                        : shape == 3 ? 20.0f * (float)i / (float)n
                                     : x;
        }
        struct sampling g = plain;
        g.seed = round;
        for (uint64_t j = 0; j < 3; j++) {
            uint64_t r = random_u64(7, round, j);
            g.top_k = r % 3 ? (int32_t)(r / 3 % (uint64_t)(r % 2 ? n + 2 : 60)) : 0;
            g.top_p = r >> 20 & 1 ? (float)(r >> 21 & 1023) / 1023 : 1;
            g.min_p = r >> 32 & 1 ? (float)(r >> 33 & 255) / 2550 : 0;
            g.temperature = r >> 50 & 1 ? 0.2f + (float)(r >> 51 & 15) / 5 : 1;
            compare_with_naive(s, logits, n, &g, &n_compared);
        }
        sampler_destroy(s);
    }
    assert_true(n_compared > 450);
}

/* ---- each setting alone, on four tokens whose numbers can be done by hand ---- */

static void expect(const float *logits, const struct sampling *g, const struct sample_context *c,
                   float p0, float p1, float p2, float p3)
{
    struct sampler *s = create(4);
    float got[4], want[4] = {p0, p1, p2, p3};
    linnet_error err;
    assert_ok(sampler_distribution(s, logits, g, c, got, &err), err);
    for (int i = 0; i < 4; i++)
        if (fabsf(got[i] - want[i]) > 1e-6f)
            fail_msg("token %d: expected %g, found %g", i, want[i], got[i]);
    sampler_destroy(s);
}

static void test_settings_alone(void **state)
{
    (void)state;
    const float x[4] = {logf(1), logf(2), logf(4), logf(1)};
    const int32_t tokens[] = {2, 0, 0, 3, 1};
    struct sample_context c = {.tokens = tokens, .n_prompt = 2, .n_output = 2, .n_allowed = 4};
    struct sampling g = plain;
    expect(x, &g, &c, 0.125f, 0.25f, 0.5f, 0.125f);
    g.temperature = 0.5f;
    expect(x, &g, &c, 1 / 22.0f, 4 / 22.0f, 16 / 22.0f, 1 / 22.0f);
    g.temperature = 0;
    expect(x, &g, &c, 0, 0, 1, 0);
    g.temperature = 1e-30f;
    expect(x, &g, &c, 0, 0, 1, 0);
    g.temperature = 1e30f;
    expect(x, &g, &c, 0.25f, 0.25f, 0.25f, 0.25f);
    g = plain, g.top_k = 2;
    expect(x, &g, &c, 0, 2 / 6.0f, 4 / 6.0f, 0);
    g.top_k = 3; /* the tie stays */
    expect(x, &g, &c, 0.125f, 0.25f, 0.5f, 0.125f);
    g.top_k = 100;
    expect(x, &g, &c, 0.125f, 0.25f, 0.5f, 0.125f);
    g = plain, g.top_p = 0.7f;
    expect(x, &g, &c, 0, 2 / 6.0f, 4 / 6.0f, 0);
    g.top_p = 0.8f; /* of the tie only the lower id is needed */
    expect(x, &g, &c, 1 / 7.0f, 2 / 7.0f, 4 / 7.0f, 0);
    g.top_p = 0;
    expect(x, &g, &c, 0, 0, 1, 0);
    g.top_k = 2, g.top_p = 0.6f; /* of the two: 4 / 6 suffices */
    expect(x, &g, &c, 0, 0, 1, 0);
    g = plain, g.min_p = 0.4f;
    expect(x, &g, &c, 0, 2 / 6.0f, 4 / 6.0f, 0);
    g.min_p = 2;
    expect(x, &g, &c, 0, 0, 1, 0);
    g = plain, g.repetition_penalty = 2; /* 0, 2 and 3 occurred: ln 4 is halved, 0 stays */
    expect(x, &g, &c, 1 / 6.0f, 2 / 6.0f, 2 / 6.0f, 1 / 6.0f);
    g = plain, g.presence_penalty = logf(2); /* output is 0, 3 */
    expect(x, &g, &c, 0.5f / 7, 2 / 7.0f, 4 / 7.0f, 0.5f / 7);
    c.n_prompt = 1, c.n_output = 3; /* output is 0, 0, 3 */
    expect(x, &g, &c, 0.5f / 7, 2 / 7.0f, 4 / 7.0f, 0.5f / 7);
    g = plain, g.frequency_penalty = logf(2);
    expect(x, &g, &c, 0.25f / 6.75f, 2 / 6.75f, 4 / 6.75f, 0.5f / 6.75f);
}

static void test_repetition_of_negative(void **state)
{
    (void)state;
    const float x[4] = {-1, -1, -1, -INFINITY};
    const int32_t tokens[] = {0, 3, 0};
    struct sample_context c = {.tokens = tokens, .n_prompt = 3, .n_allowed = 4};
    struct sampling g = plain;
    g.repetition_penalty = 2;
    float e = expf(-1), sum = 2 + e;
    expect(x, &g, &c, e / sum, 1 / sum, 1 / sum, 0);
}

static void test_bias(void **state)
{
    (void)state;
    const float x[4] = {0, 0, 0, 0};
    struct sample_context c = {.n_allowed = 4};
    struct sampling g = plain;
    linnet_logit_bias bias[4] = {{1, logf(2)}, {1, logf(2)}};
    g.bias = bias;
    g.n_bias = 2;
    expect(x, &g, &c, 1 / 7.0f, 4 / 7.0f, 1 / 7.0f, 1 / 7.0f);
    /* absurd ids and numbers change nothing else and never become NaN */
    bias[0] = (linnet_logit_bias){-1, 5}, bias[1] = (linnet_logit_bias){4, 5};
    bias[2] = (linnet_logit_bias){INT32_MAX, 5}, bias[3] = (linnet_logit_bias){2, NAN};
    g.n_bias = 4;
    expect(x, &g, &c, 0.25f, 0.25f, 0.25f, 0.25f);
    bias[0] = (linnet_logit_bias){3, INFINITY}, bias[1] = (linnet_logit_bias){2, 1e4f};
    g.n_bias = 2;
    expect(x, &g, &c, 0, 0, 0.5f, 0.5f); /* clamped to the same */
    bias[0].bias = -INFINITY, bias[1].bias = -3e38f;
    expect(x, &g, &c, 0.5f, 0.5f, 0, 0);
    g.temperature = 0;
    bias[0] = (linnet_logit_bias){2, 0.5f};
    struct sampler *s = create(4);
    g.n_bias = 1;
    assert_int_equal(choose(s, x, &g, &c), 2);
    /* bias comes before the repetition penalty: 1 / 2 < 0.75, while 0 / 2 + 1 would win */
    const float y[4] = {0, 0.75f, -9, -9};
    const int32_t tokens[] = {0};
    bias[0] = (linnet_logit_bias){0, 1};
    c.tokens = tokens, c.n_prompt = 1;
    g.repetition_penalty = 2;
    assert_int_equal(choose(s, y, &g, &c), 1);
    sampler_destroy(s);
}

static void test_banned_and_padding(void **state)
{
    (void)state;
    enum { N = 600 };
    float x[N], p[N];
    for (int i = 0; i < N; i++) x[i] = (float)i / 100;
    struct sampler *s = create(N);
    const int32_t banned[] = {499, 498, -1, N, INT32_MAX};
    struct sample_context c = {.n_allowed = 500};
    linnet_error err;
    for (float t = 0; t < 2; t++) {
        struct sampling g = plain;
        g.temperature = t;
        c.banned = NULL, c.n_banned = 0;
        assert_ok(sampler_distribution(s, x, &g, &c, p, &err), err);
        for (int i = 500; i < N; i++) assert_true(p[i] == 0);
        assert_true(p[499] > 0);
        c.banned = banned, c.n_banned = 5;
        assert_ok(sampler_distribution(s, x, &g, &c, p, &err), err);
        assert_true(p[499] == 0 && p[498] == 0 && p[497] > 0);
        for (int i = 0; i < 200; i++) {
            c.n_output = i;
            int32_t id = choose(s, x, &g, &c);
            assert_true(id < 498 && (t > 0 || id == 497));
        }
        /* nothing left: an error that says so, and the sampler works on */
        struct sample out;
        struct sample_context none = {.n_allowed = 0};
        assert_int_equal(sampler_choose(s, x, &g, &none, -1, &out, &err), LINNET_NUMERIC);
        assert_non_null(strstr(err.message, "banned"));
        const int32_t only[] = {0};
        none = (struct sample_context){.n_allowed = 1, .banned = only, .n_banned = 1};
        assert_int_equal(sampler_choose(s, x, &g, &none, 5, &out, &err), LINNET_NUMERIC);
        assert_int_equal(sampler_distribution(s, x, &g, &none, p, &err), LINNET_NUMERIC);
    }
    sampler_destroy(s);
}

/* S06: a broken row ends the request, wherever in the row it is broken. */
static void test_broken_rows(void **state)
{
    (void)state;
    enum { N = 1000 };
    float x[N];
    struct sampler *s = create(N);
    struct sample out;
    linnet_error err;
    int32_t at[] = {0, 5, 255, 256, 600, 767, 768, 998, 999};
    for (int i = 0; i < N; i++) x[i] = random_logit(3, i);
    for (int greedy = 0; greedy < 2; greedy++) {
        struct sampling g = plain;
        g.temperature = greedy ? 0 : 1;
        struct sample_context c = {.n_allowed = N - 1};
        for (size_t i = 0; i < sizeof at / sizeof *at; i++)
            for (int kind = 0; kind < 3; kind++) {
                float old = x[at[i]];
                char name[20];
                snprintf(name, sizeof name, "token %d ", at[i]);
                x[at[i]] = kind == 0 ? NAN : kind == 1 ? INFINITY : -NAN;
                assert_int_equal(sampler_choose(s, x, &g, &c, -1, &out, &err), LINNET_NUMERIC);
                assert_non_null(strstr(err.message, name));
                assert_non_null(strstr(err.message, kind == 1 ? "+infinity" : "NaN"));
                x[at[i]] = old;
            }
        float all[N];
        for (int i = 0; i < N; i++) all[i] = NAN;
        assert_int_equal(sampler_choose(s, all, &g, &c, -1, &out, &err), LINNET_NUMERIC);
        for (int i = 0; i < N; i++) all[i] = -INFINITY;
        assert_int_equal(sampler_choose(s, all, &g, &c, -1, &out, &err), LINNET_NUMERIC);
        assert_non_null(strstr(err.message, "-infinity"));
        all[777] = -1e30f; /* one token that can be chosen is chosen, at any draw */
        for (int i = 0; i < 50; i++) {
            c.n_output = i;
            assert_int_equal(choose(s, all, &g, &c), 777);
        }
        all[777] = -INFINITY, all[N - 1] = 3; /* only padding is left */
        assert_int_equal(sampler_choose(s, all, &g, &c, -1, &out, &err), LINNET_NUMERIC);
        assert_int_equal(sampler_choose(s, x, &g, &c, -1, &out, NULL), LINNET_OK);
    }
    sampler_destroy(s);
}

static void test_greedy_ties(void **state)
{
    (void)state;
    enum { N = 2000 };
    static float x[N];
    struct sampler *s = create(N);
    struct sample_context c = {.n_allowed = N};
    struct sampling g = plain;
    g.temperature = 0;
    for (int32_t first = 0; first < N; first += 37)
        for (int32_t second = first + 1; second < N; second += 211) {
            for (int i = 0; i < N; i++) x[i] = -2;
            x[first] = x[second] = -1;
            assert_int_equal(choose(s, x, &g, &c), first);
            g.frequency_penalty = 1; /* the longer way, same rule */
            assert_int_equal(choose(s, x, &g, &c), first);
            g.frequency_penalty = 0;
        }
    for (int i = 0; i < N; i++) x[i] = i % 2 ? 0.0f : -0.0f;
    assert_int_equal(choose(s, x, &g, &c), 0);
    sampler_destroy(s);
}

/* ---- the draw ---- */

static void test_determinism(void **state)
{
    (void)state;
    enum { N = 3000, DRAWS = 200 };
    static float x[N], other[N];
    static int32_t tokens[64];
    for (int i = 0; i < N; i++) x[i] = random_logit(11, i), other[i] = random_logit(12, i);
    for (int i = 0; i < 64; i++) tokens[i] = (i * i) % 50;
    struct sampler *one = create(N), *busy = create(N);
    struct sampling g = plain, neighbour = plain;
    g.seed = 42, g.temperature = 1.5f, g.frequency_penalty = 0.5f, g.top_p = 0.95f;
    neighbour.seed = 1, neighbour.repetition_penalty = 1.7f, neighbour.top_k = 40;
    int same_seed = 0, same_stream = 0, same_position = 0, before = -1;
    for (int i = 0; i < DRAWS; i++) {
        struct sample_context c = {
            .tokens = tokens, .n_prompt = 3 + i % 2, .n_output = 5, .n_allowed = N};
        c.n_output = i / 4;
        struct sampling h = g;
        int32_t id = choose(one, x, &h, &c);
        choose(busy, other, &neighbour, &c);
        assert_int_equal(choose(busy, x, &h, &c), id);
        h.frequency_penalty = g.frequency_penalty;
        h.seed = 43;
        same_seed += choose(one, x, &h, &c) == id;
        h.seed = g.seed;
        c.stream = 1;
        same_stream += choose(one, x, &h, &c) == id;
        same_position += id == before;
        before = id;
    }
    assert_true(same_seed < DRAWS / 4);
    assert_true(same_stream < DRAWS / 4);
    assert_true(same_position < DRAWS / 2); /* position changes at every second or fourth draw */
    /* a prompt that took in its output (after a preemption) draws the same */
    struct sample_context split = {.tokens = tokens, .n_prompt = 4, .n_output = 6, .n_allowed = N};
    struct sample_context whole = {.tokens = tokens, .n_prompt = 10, .n_allowed = N};
    g.frequency_penalty = 0;
    assert_int_equal(choose(one, x, &g, &split), choose(one, x, &g, &whole));
    sampler_destroy(one);
    sampler_destroy(busy);
}

static void chi_square(const struct sampling *g, const float *x, int32_t n, bool by_stream)
{
    enum { DRAWS = 20000 };
    static float p[1000];
    static int32_t seen[1000];
    struct sampler *s = create(n);
    struct sample_context c = {.n_allowed = n};
    linnet_error err;
    assert_ok(sampler_distribution(s, x, g, &c, p, &err), err);
    memset(seen, 0, sizeof seen);
    for (int i = 0; i < DRAWS; i++) {
        if (by_stream)
            c.stream = (uint64_t)i;
        else
            c.n_output = i;
        seen[choose(s, x, g, &c)]++;
    }
    double statistic = 0, rest_want = 0, rest_seen = 0;
    int cells = 0;
    for (int32_t i = 0; i < n; i++) {
        double want = (double)p[i] * DRAWS;
        if (p[i] == 0) assert_int_equal(seen[i], 0);
        if (want < 8) { /* rare ones in one cell */
            rest_want += want, rest_seen += seen[i];
            continue;
        }
        statistic += (seen[i] - want) * (seen[i] - want) / want;
        cells++;
    }
    if (rest_want >= 8)
        statistic += (rest_seen - rest_want) * (rest_seen - rest_want) / rest_want, cells++;
    double freedom = cells - 1, limit = freedom + 4 * sqrt(2 * freedom);
    assert_true(cells > 3);
    if (statistic > limit) fail_msg("chi-square %.1f, limit %.1f", statistic, limit);
    sampler_destroy(s);
}

static void test_chi_square(void **state)
{
    (void)state;
    static float x[1000];
    for (int i = 0; i < 1000; i++) x[i] = random_logit(5, i);
    struct sampling g = plain;
    g.seed = 9;
    chi_square(&g, x, 1000, false);
    chi_square(&g, x, 1000, true);
    g.top_p = 0.9f, g.temperature = 0.8f;
    chi_square(&g, x, 1000, false);
    g = plain, g.top_k = 50, g.min_p = 0.05f;
    chi_square(&g, x, 1000, false);
    for (int i = 0; i < 600; i++) x[i] = 0; /* uniform, over several chunks */
    chi_square(&plain, x, 600, false);
}

/* Of equal ones at the cut of top_p as many stay as it takes, lowest ids first. */
static void test_ties_at_the_cut(void **state)
{
    (void)state;
    enum { N = 2000 };
    static float x[N], p[N];
    struct sampler *s = create(N);
    struct sample_context c = {.n_allowed = N};
    linnet_error err;
    for (int i = 0; i < N; i++) x[i] = -1;
    struct { /* how many stay of N equal ones: the smallest k with k >= top_p N, exactly */
        float top_p;
        int kept;
    } cases[] = {{0, 1}, {0x1p-20f, 1}, {0.25f, 500}, {0.5f, 1000}, {0.500244140625f, 1001}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct sampling g = plain;
        g.top_p = cases[i].top_p;
        assert_ok(sampler_distribution(s, x, &g, &c, p, &err), err);
        for (int j = 0; j < N; j++) assert_true((p[j] > 0) == (j < cases[i].kept));
        for (int j = 0; j < 50; j++) {
            c.n_output = j;
            assert_true(choose(s, x, &g, &c) < cases[i].kept);
        }
    }
    /* one above them: its weight is e times theirs */
    struct sampling g = plain;
    x[1500] = 0;
    g.top_p = 0.5f;
    assert_ok(sampler_distribution(s, x, &g, &c, p, &err), err);
    int kept = (int)ceil(0.5 * (N - 1 + exp(1)) - exp(1));
    for (int j = 0; j < N; j++) assert_true((p[j] > 0) == (j < kept || j == 1500));
    sampler_destroy(s);
}

/* The draw by hand: the same weights, a running sum in 128 bits. */
static void test_draw(void **state)
{
    (void)state;
    enum { N = 700 };
    static float x[N];
    struct sampler *s = create(N);
    for (int i = 0; i < N; i++) x[i] = random_logit(31, i);
    x[0] = x[699] = 9.5f;
    x[300] = -INFINITY;
    double max = -INFINITY;
    for (int i = 0; i < N; i++) max = x[i] > max ? x[i] : max;
    struct sampling g = plain;
    g.seed = 77, g.temperature = 0.8f;
    struct choice_rule rule = {.temperature = 0.8f, .seed = 77};
    double scale = choice_scale(&rule);
    for (int i = 0; i < 500; i++) {
        struct sample_context c = {.n_allowed = N, .n_output = i, .stream = 3};
        unsigned __int128 total = 0, sum = 0;
        for (int j = 0; j < N; j++) total += choice_weight(choice_exponent(x[j], max, scale));
        unsigned __int128 at = random_u64(77, (uint64_t)i, 3) * total >> 64;
        int32_t want = 0;
        while ((sum += choice_weight(choice_exponent(x[want], max, scale))) <= at) want++;
        assert_int_equal(choose(s, x, &g, &c), want);
    }
    sampler_destroy(s);
}

/* ---- log-probabilities ---- */

static void test_logprobs(void **state)
{
    (void)state;
    enum { N = 1500, ALLOWED = 1400 };
    static float x[N];
    static struct entry sorted[N];
    for (int i = 0; i < N; i++) x[i] = roundf(4 * random_logit(21, i)) / 4; /* ties */
    x[7] = x[900] = -INFINITY;
    x[1450] = 30; /* padding counts in the sum, but is no answer */
    double total = 0;
    for (int i = 0; i < N; i++) total += exp(x[i]);
    for (int i = 0; i < ALLOWED; i++) sorted[i] = (struct entry){x[i], i};
    qsort(sorted, ALLOWED, sizeof *sorted, descending);
    struct sampler *s = create(N);
    struct sample_context c = {.n_allowed = ALLOWED};
    linnet_error err;
    for (int32_t want = 0; want <= 25; want++) {
        struct sampling g = plain;
        g.temperature = want % 2 ? 0 : 0.3f; /* the raw ones do not look at the settings */
        linnet_logit_bias bias = {12, 100};
        g.bias = &bias;
        g.n_bias = want % 3 == 0;
        c.n_output = want;
        struct sample out;
        assert_ok(sampler_choose(s, x, &g, &c, want, &out, &err), err);
        assert_int_equal(out.n_top, want < 20 ? want : 20);
        assert_true(fabs(out.logprob - (x[out.id] - log(total))) < 1e-5);
        if (g.n_bias) assert_int_equal(out.id, 12);
        for (int i = 0; i < out.n_top; i++) {
            assert_int_equal(out.top[i].id, sorted[i].id);
            assert_true(fabs(out.top[i].logprob - (sorted[i].x - log(total))) < 1e-5);
        }
        assert_int_equal(choose(s, x, &g, &c), out.id); /* asking changes no choice */
    }
    for (int i = 0; i < N; i++) x[i] = -INFINITY; /* fewer than asked for */
    x[3] = 1, x[2] = 1, x[1400] = 1;
    struct sample out;
    assert_ok(sampler_choose(s, x, &plain, &c, 5, &out, &err), err);
    assert_int_equal(out.n_top, 2);
    assert_int_equal(out.top[0].id, 2);
    assert_int_equal(out.top[1].id, 3);
    assert_true(fabs(out.logprob + log(3)) < 1e-6);
    sampler_destroy(s);
}

static void test_leaves_alone(void **state)
{
    (void)state;
    enum { N = 5000 };
    static float x[N], copy[N];
    const int32_t tokens[] = {5, 6, N, -1, 5}; /* ids out of range are passed over */
    for (int i = 0; i < N; i++) x[i] = copy[i] = random_logit(2, i);
    struct sampler *s = create(N);
    struct sampling g = plain;
    struct sample_context c = {.tokens = tokens, .n_prompt = 2, .n_output = 3, .n_allowed = N};
    g.top_k = 40, g.top_p = 0.9f, g.repetition_penalty = 1.1f, g.frequency_penalty = 1;
    linnet_logit_bias bias = {9, 3};
    g.bias = &bias, g.n_bias = 1;
    struct sample out;
    linnet_error err;
    size_t before = mallinfo2().uordblks;
    assert_ok(sampler_choose(s, x, &g, &c, 20, &out, &err), err);
    assert_int_equal(mallinfo2().uordblks, before);
    assert_memory_equal(x, copy, sizeof x);
    sampler_destroy(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_create_refuses),
        cmocka_unit_test(test_goldens),
        cmocka_unit_test(test_naive),
        cmocka_unit_test(test_settings_alone),
        cmocka_unit_test(test_repetition_of_negative),
        cmocka_unit_test(test_bias),
        cmocka_unit_test(test_banned_and_padding),
        cmocka_unit_test(test_broken_rows),
        cmocka_unit_test(test_greedy_ties),
        cmocka_unit_test(test_determinism),
        cmocka_unit_test(test_chi_square),
        cmocka_unit_test(test_ties_at_the_cut),
        cmocka_unit_test(test_draw),
        cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_leaves_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
