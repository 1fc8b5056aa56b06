/*
 * sample.cu - the device's choice of tokens beside the CPU's: the same id for every row of many
 * random ones, then the time of a step's choice.
 *
 *   flags="-Isrc -Iinclude"
 *   for f in engine/sampler base/error base/memory; do
 *       gcc -O2 -ffp-contract=off $flags -D_GNU_SOURCE -c src/$f.c -o $(basename $f).o; done
 *   nvcc -std=c++17 -O3 -fmad=false --expt-relaxed-constexpr -arch=sm_90 -cudart static $flags \
 *       bench/gpu/sample.cu src/ops/cuda/sample.cu sampler.o error.o memory.o -o sample
 *   ./sample [rounds]
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "ops/cuda/sample.cuh"

extern "C" {
#include "base/random.h"
#include "engine/sampler.h"
}

static void must(bool good, const char *what)
{
    if (good) return;
    fprintf(stderr, "failed: %s (%s)\n", what, cudaGetErrorString(cudaGetLastError()));
    exit(1);
}

/* The device's memory for steps of up to n rows. */
struct device {
    struct sample_work work;
    float *logits;
    struct chosen *chosen;
    void *rules, *host_rules, *scratch;
};

static struct device device_open(int32_t vocab, int32_t n)
{
    struct device d;
    struct shape shape = {};
    struct limits limits = {};
    shape.vocab = vocab;
    limits.max_logits = n;
    size_t bytes = sample_bytes(&shape, &limits);
    must(!cudaMalloc(&d.scratch, bytes) && !cudaMemset(d.scratch, 0, bytes), "scratch");
    sample_place(&shape, &limits, d.scratch, &d.work);
    must(!cudaMalloc(&d.logits, (size_t)n * vocab * sizeof(float)), "logits");
    must(!cudaMalloc(&d.chosen, n * sizeof(struct chosen)), "chosen");
    must(!cudaMalloc(&d.rules, sample_rules_bytes(&limits)), "rules");
    must(!cudaMallocHost(&d.host_rules, sample_rules_bytes(&limits)), "pinned rules");
    return d;
}

static void device_close(struct device *d)
{
    cudaFree(d->scratch);
    cudaFree(d->logits);
    cudaFree(d->chosen);
    cudaFree(d->rules);
    cudaFreeHost(d->host_rules);
}

static enum sample_stage send(struct device *d, const float *logits, int32_t vocab,
                              const struct choice_rule *rules, int32_t n)
{
    enum sample_stage stage;
    size_t bytes = sample_pack(rules, n, d->host_rules, d->rules, &stage);
    must(!cudaMemcpy(d->rules, d->host_rules, bytes, cudaMemcpyHostToDevice), "send rules");
    must(!cudaMemcpy(d->logits, logits, (size_t)n * vocab * sizeof(float), cudaMemcpyHostToDevice),
         "send logits");
    return stage;
}

/* ---- random rows and settings ---- */

static uint64_t state = 1;

static uint64_t bits(void)
{
    return random_u64(99, state++, 0);
}

static int32_t below(int32_t n)
{
    return (int32_t)(bits() % (uint64_t)n);
}

template <class T> static T pick(std::initializer_list<T> list)
{
    return list.begin()[below((int32_t)list.size())];
}

static float normal(void)
{
    uint64_t b = bits();
    double sum = 0;
    for (int i = 0; i < 4; i++) sum += (double)(b >> 16 * i & 0xFFFF) / 65536 - 0.5;
    return (float)(sum * 1.7320508);
}

static float from_bits(uint32_t b)
{
    float f;
    memcpy(&f, &b, 4);
    return f;
}

static void fill(float *x, int32_t n, int32_t n_allowed)
{
    int32_t kind = below(16);
    float spread = kind == 0 ? 8.0f : kind == 1 ? 0.01f : kind == 2 ? 1e-4f : 3.0f;
    for (int32_t i = 0; i < n; i++) x[i] = spread * normal() - 5;
    for (int32_t i = 0; i < n; i++) {
        if (kind == 3) x[i] = 1.5f;
        if (kind == 4) x[i] = roundf(2 * x[i]) / 2;
        if (kind == 5) x[i] = 20.0f * (float)i / (float)n;
        if (kind == 6 && below(n) > 10) x[i] = -INFINITY;
        if (kind == 7) x[i] = i % 2 ? 0.0f : -0.0f;
        if (kind == 8) memset(&x[i], 0, 2); /* like bf16 */
        if (kind == 9) x[i] = i % 3 ? -1.0f : -1.0f - 1e-6f;
    }
    if (kind == 10) x[below(n)] = pick({40.0f, 1e30f, 3e38f});
    if (kind != 11) return;
    switch (below(5)) {
    case 0: x[below(n)] = NAN; break;
    case 1: x[below(n)] = INFINITY; break;
    case 2: x[below(n)] = from_bits(0xFFC00000u | (uint32_t)below(20)); break;
    case 3: std::fill(x, x + n, -INFINITY); break;
    default: std::fill(x, x + n_allowed, -INFINITY);
    }
}

struct row {
    struct sampling settings;
    struct sample_context context;
    std::vector<int32_t> tokens, banned;
    std::vector<linnet_logit_bias> bias;
    std::vector<struct adjustment> adjustments;
};

static void random_rule(struct row *r, int32_t n, int32_t n_allowed)
{
    struct sampling *g = &r->settings;
    *g = {};
    g->temperature = below(4) == 0   ? 0
                     : below(8) == 0 ? pick({1e-3f, 1e4f, 1e-30f, 1e30f})
                                     : 0.2f + (float)below(16) / 8;
    g->top_k = below(2) ? 0 : pick({1, 2, 5, 50, n / 2 + 1, n});
    g->top_p = below(2) ? 1 : pick({0.0f, 1e-6f, 0.1f, 0.5f, 0.9f, 0.95f, 0.999999f});
    g->min_p = below(3) ? 0 : pick({1e-4f, 0.05f, 0.5f, 1.0f});
    g->repetition_penalty = below(3) ? 1 : pick({1.1f, 0.7f, 1e4f, 1e-4f});
    g->presence_penalty = below(3) ? 0 : pick({0.5f, -2.0f});
    g->frequency_penalty = below(3) ? 0 : pick({0.1f, -0.3f});
    g->seed = bits();
    r->tokens.clear();
    r->banned.clear();
    r->bias.clear();
    for (int32_t i = below(300); i > 0; i--) r->tokens.push_back(below(below(2) ? n : 7));
    if (below(4) == 0)
        for (int32_t i = below(20); i > 0; i--)
            r->bias.push_back({below(n), pick({0.1f, 3.0f, -5.0f, 100.0f, -1e5f, 1e9f})});
    if (below(4) == 0)
        for (int32_t i = below(9); i > 0; i--) r->banned.push_back(below(n));
    g->bias = r->bias.data();
    g->n_bias = (int32_t)r->bias.size();
    int32_t n_tokens = (int32_t)r->tokens.size();
    r->context = {};
    r->context.tokens = r->tokens.data();
    r->context.n_prompt = n_tokens ? below(n_tokens + 1) : 0;
    r->context.n_output = n_tokens - r->context.n_prompt;
    r->context.banned = r->banned.data();
    r->context.n_banned = (int32_t)r->banned.size();
    r->context.n_allowed = below(30) ? n_allowed : below(n + 1);
    r->context.stream = bits() % 3;
}

/* ---- the same token ---- */

static int32_t check(int32_t vocab, int32_t n, int32_t rounds)
{
    int32_t n_allowed = vocab - vocab / 560, n_wrong = 0, n_refused = 0;
    struct device d = device_open(vocab, n);
    struct sampler *s;
    linnet_error err;
    must(!sampler_create(vocab, &s, &err), "sampler");
    std::vector<float> logits((size_t)vocab * n);
    std::vector<struct row> rows(n);
    std::vector<struct choice_rule> rules(n);
    std::vector<struct chosen> chosen(n);
    for (int32_t round = 0; round < rounds; round++) {
        int32_t used = round % 2 ? n : 1 + below(n);
        for (int32_t i = 0; i < used; i++) {
            struct row *r = &rows[i];
            fill(&logits[(size_t)i * vocab], vocab, n_allowed);
            random_rule(r, vocab, n_allowed);
            r->adjustments.resize(sampler_rule_capacity(vocab, &r->settings, &r->context));
            sampler_rule(s, &r->settings, &r->context, r->adjustments.data(), &rules[i]);
        }
        enum sample_stage stage = send(&d, logits.data(), vocab, rules.data(), used);
        if (round % 3 == 0) stage = SAMPLE_NARROW; /* more kernels do no harm */
        must(!sample_run(0, &d.work, d.logits, d.rules, used, stage, d.chosen, NULL), "launch");
        must(!cudaMemcpy(chosen.data(), d.chosen, used * sizeof(struct chosen),
                         cudaMemcpyDeviceToHost),
             "run");
        for (int32_t i = 0; i < used; i++) {
            struct sample want;
            linnet_status status = sampler_choose(s, &logits[(size_t)i * vocab], &rows[i].settings,
                                                  &rows[i].context, -1, &want, &err);
            if (status) want.id = -1;
            n_refused += status != LINNET_OK;
            if (chosen[i].status == status && chosen[i].id == want.id) continue;
            const struct choice_rule *g = &rules[i];
            if (n_wrong++ < 10)
                printf("vocab %d, round %d, row %d of %d: expected %d, found %d (status %d); "
                       "temperature %g, top_k %d, top_p %g, min_p %g, %d adjustments\n",
                       vocab, round, i, used, want.id, chosen[i].id, (int)chosen[i].status,
                       g->temperature, g->top_k, g->top_p, g->min_p, g->n_adjustments);
        }
    }
    printf("vocab %6d: %d rounds of up to %d rows, %d refused, %d wrong\n", vocab, rounds, n,
           n_refused, n_wrong);
    fflush(stdout);
    sampler_destroy(s);
    device_close(&d);
    return n_wrong;
}

/* ---- time ---- */

#ifndef SAMPLE_CHECK_ONLY
/* Microseconds of one choice in a recording of many: the median of 15 replays. */
static double measure(struct device *d, int32_t n, enum sample_stage stage)
{
    enum { RUNS = 20, REPLAYS = 15 };
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
    cudaStreamCreate(&stream);
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    for (int i = 0; i < RUNS; i++)
        must(!sample_run(stream, &d->work, d->logits, d->rules, n, stage, d->chosen, NULL),
             "launch");
    must(!cudaStreamEndCapture(stream, &graph), "capture");
    must(!cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    std::vector<float> times;
    for (int i = 0; i < REPLAYS; i++) {
        float ms = 0;
        cudaEventRecord(begin, stream);
        cudaGraphLaunch(exec, stream);
        cudaEventRecord(end, stream);
        must(!cudaEventSynchronize(end), "replay");
        cudaEventElapsedTime(&ms, begin, end);
        times.push_back(ms * 1e3f / RUNS);
    }
    std::sort(times.begin(), times.end());
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaStreamDestroy(stream);
    return times[REPLAYS / 2];
}

static void measure_all(void)
{
    enum { VOCAB = 151936, ROWS = 256 };
    struct kind {
        const char *name;
        float temperature, top_p, min_p, spread;
        int32_t top_k;
    } kinds[] = {{"greedy", 0, 1, 0, 3, 0},
                 {"temperature", 1, 1, 0, 3, 0},
                 {"min_p .05", 1, 1, 0.05f, 3, 0},
                 {"top_k 50", 1, 1, 0, 3, 50},
                 {"top_p .9", 1, 0.9f, 0, 3, 0},
                 {"t .7, top_p .9", 0.7f, 0.9f, 0, 3, 0},
                 {"top_k 50, top_p .9", 1, 0.9f, 0, 3, 50},
                 {"flat, top_p .9", 1, 0.9f, 0, 0.01f, 0},
                 {"equal, top_p .9", 1, 0.9f, 0, 0, 0}};
    struct device d = device_open(VOCAB, ROWS);
    std::vector<float> logits((size_t)VOCAB * ROWS);
    std::vector<struct choice_rule> rules(ROWS);
    printf("%-20s %8s %8s %8s %8s %8s rows of %d; us\n", "", "1", "8", "32", "64", "256", VOCAB);
    float spread = -1;
    for (const struct kind &k : kinds) {
        if (k.spread != spread)
            for (float &x : logits) x = k.spread * normal();
        spread = k.spread;
        for (int32_t i = 0; i < ROWS; i++) {
            rules[i] = {};
            rules[i].temperature = k.temperature;
            rules[i].top_p = k.top_p;
            rules[i].min_p = k.min_p;
            rules[i].top_k = k.top_k;
            rules[i].repetition_penalty = 1;
            rules[i].seed = (uint64_t)i;
            rules[i].n_allowed = 151665;
        }
        enum sample_stage stage = send(&d, logits.data(), VOCAB, rules.data(), ROWS);
        printf("%-20s", k.name);
        for (int32_t n : {1, 8, 32, 64, 256}) printf(" %8.2f", measure(&d, n, stage));
        printf("\n");
        if (k.temperature == 0) {
            printf("%-20s", "  all kernels");
            for (int32_t n : {1, 8, 32, 64, 256}) printf(" %8.2f", measure(&d, n, SAMPLE_NARROW));
            printf("\n");
        }
        fflush(stdout);
    }
    device_close(&d);
}
#endif

int main(int argc, char **argv)
{
    int32_t rounds = argc > 1 ? atoi(argv[1]) : 8, n_wrong = 0;
    n_wrong += check(7, 1024, rounds);
    n_wrong += check(500, 1024, rounds);
    n_wrong += check(5003, 300, rounds);
    n_wrong += check(32000, 256, (rounds + 1) / 2);
    n_wrong += check(151936, 96, rounds);
#ifndef SAMPLE_CHECK_ONLY
    measure_all();
#endif
    return n_wrong > 0;
}
