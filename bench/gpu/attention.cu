/*
 * attention.cu - tests and times src/ops/cuda/attention.cu alone, on random data:
 *
 *   nvcc -std=c++17 -gencode=arch=compute_90a,code=sm_90a -O3 -fmad=false \
 *        --expt-relaxed-constexpr -Isrc -Iinclude -cudart static -o attention \
 *        bench/gpu/attention.cu
 *   ./attention test      bits of the kernels against each other, values against double precision
 *   ./attention time      microseconds a layer
 */
#include <algorithm>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <vector>

#include "ops/cuda/attention.cu"

bool cuda_good(struct backend *b, cudaError_t status, const char *what)
{
    if (status != cudaSuccess && b->failed == cudaSuccess) {
        b->failed = status;
        b->failed_at = what;
    }
    return b->failed == cudaSuccess;
}

static void check(cudaError_t status, const char *what)
{
    if (status == cudaSuccess) return;
    printf("%s: %s\n", what, cudaGetErrorString(status));
    exit(1);
}

static uint64_t random_state = 1;

static uint64_t random_bits(void)
{
    uint64_t z = random_state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static float random_normal(void) /* nearly */
{
    float sum = 0;
    for (int i = 0; i < 4; i++) sum += (float)(random_bits() >> 40) / (float)(1 << 24) - 0.5f;
    return sum * 1.7f;
}

/* A sequence's part in a step. */
struct seq {
    int n_new, context; /* tokens of the step; tokens in the cache with them */
};

/* A step, its cache and queries, on host and device. */
struct world {
    struct backend b;
    struct step s;
    std::vector<int32_t> positions, query_start, context_lens, tables, seq_of;
    std::vector<uint16_t> q, cache;
    int32_t *numbers;
};

static void *reserve(size_t bytes)
{
    void *p = NULL;
    check(cudaMalloc(&p, bytes), "reserving memory");
    check(cudaMemset(p, 0xFF, bytes), "poisoning memory");
    return p;
}

static uint16_t to_bf16(float v)
{
    uint32_t u;
    memcpy(&u, &v, 4);
    return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

static float from_bf16(uint16_t v)
{
    uint32_t u = (uint32_t)v << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/* Block of the table: in random order, of a pool with some to spare. */
static void deal_blocks(struct world *w, const std::vector<struct seq> &seqs)
{
    int blocks = 0, longest = 0;
    for (const struct seq &q : seqs) {
        int n = (q.context + KV_BLOCK - 1) / KV_BLOCK;
        blocks += n, longest = std::max(longest, n);
    }
    w->s.max_blocks = longest + 3;
    w->b.limits.n_blocks = blocks + 5;
    std::vector<int32_t> order((size_t)w->b.limits.n_blocks);
    for (size_t i = 0; i < order.size(); i++) order[i] = (int32_t)i;
    for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[random_bits() % i]);
    w->tables.assign(seqs.size() * (size_t)w->s.max_blocks, 0x7FFFFFFF); /* never to be read */
    size_t next = 0;
    for (size_t i = 0; i < seqs.size(); i++)
        for (int k = 0; k < (seqs[i].context + KV_BLOCK - 1) / KV_BLOCK; k++)
            w->tables[i * (size_t)w->s.max_blocks + (size_t)k] = order[next++];
}

/* A step like w's of other parts of the same sequences: step numbers only. */
static void set_step(struct world *w, const std::vector<struct seq> &seqs)
{
    w->positions.clear(), w->seq_of.clear(), w->context_lens.clear();
    w->query_start.assign(1, 0);
    for (size_t i = 0; i < seqs.size(); i++) {
        for (int t = seqs[i].context - seqs[i].n_new; t < seqs[i].context; t++) {
            w->positions.push_back(t);
            w->seq_of.push_back((int32_t)i);
        }
        w->query_start.push_back((int32_t)w->positions.size());
        w->context_lens.push_back(seqs[i].context);
    }
    w->s.n_tokens = (int32_t)w->positions.size();
    w->s.n_seqs = (int32_t)seqs.size();
    w->s.positions = w->positions.data();
    w->s.query_start = w->query_start.data();
    w->s.context_lens = w->context_lens.data();
    w->s.block_tables = w->tables.data();
}

/* The step's numbers to the device, as send_step would. */
static void send(struct world *w)
{
    struct backend *b = &w->b;
    size_t tiles = (size_t)attention_tiles(&b->shape, b->limits.max_tokens, b->limits.max_seqs) * 4,
           tokens = (size_t)b->limits.max_tokens;
    std::vector<int32_t> host(tiles + 3 * tokens + w->tables.size());
    struct device_step h = {};
    h.tiles = host.data();
    h.singles = h.tiles + tiles;
    attention_plan(b, &w->s, &h);
    int32_t *at = h.singles + tokens;
    std::copy(w->positions.begin(), w->positions.end(), at);
    std::copy(w->seq_of.begin(), w->seq_of.end(), at + tokens);
    std::copy(w->tables.begin(), w->tables.end(), at + 2 * tokens);
    check(cudaMemcpy(w->numbers, host.data(), host.size() * 4, cudaMemcpyHostToDevice), "sending");
    b->step.tiles = w->numbers;
    b->step.singles = b->step.tiles + tiles;
    b->step.positions = b->step.singles + tokens;
    b->step.seq_of = b->step.positions + tokens;
    b->step.block_tables = b->step.seq_of + tokens;
}

static void open_world(struct world *w, int heads, int kv_heads, int head_dim, int n_layers,
                       const std::vector<struct seq> &seqs, bool cores)
{
    *w = {};
    struct backend *b = &w->b;
    deal_blocks(w, seqs);
    set_step(w, seqs);
    b->shape.n_layers = n_layers;
    b->shape.n_heads = heads;
    b->shape.n_kv_heads = kv_heads;
    b->shape.head_dim = head_dim;
    b->limits.max_tokens = w->s.n_tokens;
    b->limits.max_seqs = w->s.n_seqs;
    b->limits.max_context = w->s.max_blocks * KV_BLOCK;
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
    b->capability = 10 * major + minor;
    check(cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking), "a stream");
    attention_open(b);
    int64_t width = (int64_t)heads * head_dim;
    b->attn.padded = padded_columns(width);
    b->attn.capacity = (w->s.n_tokens + ACT_TOKENS - 1) / ACT_TOKENS * ACT_TOKENS;
    b->attn.cores = cores;
    b->attn.data = (bf16 *)reserve((size_t)(b->attn.padded * b->attn.capacity) * 2);
    w->numbers = (int32_t *)reserve(
        ((size_t)attention_tiles(&b->shape, b->limits.max_tokens, b->limits.max_seqs) * 4 +
         3 * (size_t)w->s.n_tokens + w->tables.size()) *
        4);
    b->q = (bf16 *)reserve((size_t)(width * w->s.n_tokens) * 2);
    w->q.resize((size_t)(width * w->s.n_tokens));
    for (uint16_t &v : w->q) v = to_bf16(random_normal() * 1.5f);
    check(cudaMemcpy(b->q, w->q.data(), w->q.size() * 2, cudaMemcpyHostToDevice), "queries");
    size_t half = (size_t)b->limits.n_blocks * KV_BLOCK * (size_t)(kv_heads * head_dim);
    b->cache = (bf16 *)reserve(2 * half * 2 * (size_t)n_layers);
    w->cache.assign(2 * half, 0xFFFF); /* NaN where no token is */
    for (size_t i = 0; i < seqs.size(); i++)
        for (int t = 0; t < seqs[i].context; t++)
            for (int h = 0; h < kv_heads; h++)
                for (int d = 0; d < head_dim; d++) {
                    int block = w->tables[i * (size_t)w->s.max_blocks + (size_t)(t / KV_BLOCK)];
                    size_t at = (((size_t)block * (size_t)kv_heads + (size_t)h) * KV_BLOCK +
                                 (size_t)(t % KV_BLOCK)) *
                                    (size_t)head_dim +
                                (size_t)d;
                    w->cache[at] = to_bf16(random_normal());
                    w->cache[half + at] = to_bf16(random_normal());
                }
    check(cudaMemcpy(b->cache, w->cache.data(), 4 * half, cudaMemcpyHostToDevice), "the cache");
    for (int l = 1; l < n_layers; l++)
        check(cudaMemcpy(cache_of(b, l, 0), b->cache, 4 * half, cudaMemcpyDeviceToDevice),
              "the cache");
}

static void close_world(struct world *w)
{
    attention_close(&w->b);
    cudaFree(w->b.attn.data);
    cudaFree(w->b.q);
    cudaFree(w->b.cache);
    cudaFree(w->numbers);
    cudaStreamDestroy(w->b.stream);
}

/* [n_tokens, width] in rows. */
static std::vector<uint16_t> output(struct world *w)
{
    struct backend *b = &w->b;
    check(cudaStreamSynchronize(b->stream), "running");
    if (b->failed != cudaSuccess) check(b->failed, b->failed_at);
    size_t all = (size_t)(b->attn.padded * b->attn.capacity);
    std::vector<uint16_t> raw(all), rows;
    check(cudaMemcpy(raw.data(), b->attn.data, all * 2, cudaMemcpyDeviceToHost), "results");
    check(cudaMemset(b->attn.data, 0xFF, all * 2), "poisoning");
    for (int t = 0; t < w->s.n_tokens; t++)
        for (int c = 0; c < b->shape.n_heads * b->shape.head_dim; c++)
            rows.push_back(raw[(size_t)act_at(b->attn, t, c)]);
    return rows;
}

/* By the plan, or every token by itself; division of 0 warps: attention_run's own. */
static std::vector<uint16_t> attend(struct world *w, bool each, struct division d)
{
    struct backend *b = &w->b;
    send(w);
    if (each) b->attention.n_tiles = 0;
    run_step(b, &w->s, 0, d.warps ? &d : NULL);
    return output(w);
}

/* Error relative to the norm of a row of one head; the worst. */
static double worst_error(const struct world *w, const std::vector<uint16_t> &out)
{
    const struct shape *s = &w->b.shape;
    int group = s->n_heads / s->n_kv_heads, dim = s->head_dim;
    size_t half = w->cache.size() / 2;
    double worst = 0;
    for (int t = 0; t < w->s.n_tokens; t++)
        for (int h = 0; h < s->n_heads; h++) {
            if (w->s.n_tokens > 50 && (t * s->n_heads + h) % 37) continue;
            const uint16_t *q = &w->q[((size_t)t * (size_t)s->n_heads + (size_t)h) * (size_t)dim];
            std::vector<double> score, value((size_t)dim);
            std::vector<size_t> at;
            double most = -INFINITY, sum = 0, error = 0, norm = 0;
            for (int k = 0; k <= w->positions[(size_t)t]; k++) {
                int block =
                    w->tables[(size_t)(w->seq_of[(size_t)t] * w->s.max_blocks + k / KV_BLOCK)];
                at.push_back(
                    (((size_t)block * (size_t)s->n_kv_heads + (size_t)(h / group)) * KV_BLOCK +
                     (size_t)(k % KV_BLOCK)) *
                    (size_t)dim);
                double dot = 0;
                for (int d = 0; d < dim; d++)
                    dot += (double)from_bf16(q[d]) * from_bf16(w->cache[at.back() + (size_t)d]);
                score.push_back(dot / sqrt((double)dim));
                most = std::max(most, score.back());
            }
            for (size_t k = 0; k < score.size(); k++) {
                double weight = exp(score[k] - most);
                sum += weight;
                for (int d = 0; d < dim; d++)
                    value[(size_t)d] += weight * from_bf16(w->cache[half + at[k] + (size_t)d]);
            }
            for (int d = 0; d < dim; d++) {
                double exact = value[(size_t)d] / sum,
                       got = from_bf16(out[(size_t)((t * s->n_heads + h) * dim + d)]);
                error += (got - exact) * (got - exact);
                norm += exact * exact;
            }
            error = sqrt(error / norm);
            if (!(error <= worst)) worst = error;
        }
    return worst;
}

static int n_failed, n_checks;

static void expect(bool good, const char *what, const struct world *w)
{
    n_checks++;
    if (good) return;
    n_failed++;
    if (n_failed < 40)
        printf("FAILED %s: %d heads, %d kv heads, head_dim %d, %d tokens, first context %d\n", what,
               w->b.shape.n_heads, w->b.shape.n_kv_heads, w->b.shape.head_dim, w->s.n_tokens,
               w->context_lens[0]);
}

static const struct division divisions[] = {{1, 1, 1}, {2, 1, 1}, {3, 1, 1},  {1, 2, 1}, {2, 3, 1},
                                            {1, 4, 2}, {2, 7, 1}, {1, 16, 1}, {2, 5, 3}, {}};

/* Every way to run the step that w holds has the same bits. */
static void all_ways(struct world *w, const char *what)
{
    std::vector<uint16_t> first = attend(w, true, divisions[0]);
    double error = worst_error(w, first);
    /* weights and results are rounded to bf16, 2^-9 each at most */
    expect(error < 0.005, what, w);
    bool few = w->s.n_tokens * head_blocks(&w->b.shape) <= SPLIT_BLOCKS;
    for (const struct division &d : divisions)
        if (few || d.splits < 2)
            expect(attend(w, true, d) == first, "single tokens, another division", w);
    int64_t had = w->b.attention.scratch_floats; /* too few slots: block 0 merges more itself */
    w->b.attention.scratch_floats =
        3 * slot_floats(&w->b.shape) * w->s.n_tokens * head_blocks(&w->b.shape);
    if (few && w->b.attention.scratch_floats <= had)
        expect(attend(w, true, {2, 4, 1}) == first, "single tokens, three slots", w);
    w->b.attention.scratch_floats = had;
    expect(attend(w, false, {}) == first, "by the plan", w);
}

/* The last token of each context, as decoding sees it, then as the last of a chunk. */
static void test_shape(int group, int kv_heads, int head_dim, bool cores)
{
    std::vector<struct seq> decode, mixed;
    for (int context : {1, 15, 16, 17, 63, 64, 65, 300, 1000}) {
        decode.push_back({1, context});
        mixed.push_back({context > 60 ? 33 : std::min(context, 2), context});
    }
    mixed.push_back({1, 130});
    mixed.push_back({64, 64});
    mixed.push_back({1, 700});
    struct world w;
    open_world(&w, group * kv_heads, kv_heads, head_dim, 1, decode, cores);
    all_ways(&w, "decoding, value");
    close_world(&w);
    open_world(&w, group * kv_heads, kv_heads, head_dim, 1, mixed, cores);
    all_ways(&w, "mixed, value");
    close_world(&w);
}

/* A prompt whole and in chunks, on one cache. */
static void test_chunks(int group, int head_dim)
{
    struct world w;
    const int length = 500;
    size_t width = (size_t)(group * 2 * head_dim);
    open_world(&w, group * 2, 2, head_dim, 1, {{length, length}}, true);
    std::vector<uint16_t> whole = attend(&w, false, {}), queries = w.q;
    expect(worst_error(&w, whole) < 0.005, "a prompt, value", &w);
    for (int size : {1, 7, 64, 100, 333})
        for (int done = 0; done < length; done += size) {
            int n = std::min(size, length - done);
            if (size == 1 && done % 50) continue;
            set_step(&w, {{n, done + n}});
            check(cudaMemcpy(w.b.q, queries.data() + (size_t)done * width, (size_t)n * width * 2,
                             cudaMemcpyHostToDevice),
                  "queries");
            std::vector<uint16_t> part = attend(&w, false, {});
            expect(!memcmp(part.data(), &whole[(size_t)done * width], part.size() * 2),
                   "a prompt in chunks", &w);
        }
    close_world(&w);
}

/* ---- times ----------------------------------------------------------------------------------- */

/* Median microseconds a layer over replays of a graph of all layers, each with a cache of its own.
 */
static double time_layers(struct world *w, int n_layers, struct division d)
{
    struct backend *b = &w->b;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
    std::vector<float> times;
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    send(w);
    check(cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal), "recording");
    for (int l = 0; l < n_layers; l++) run_step(b, &w->s, l, d.warps ? &d : NULL);
    check(cudaStreamEndCapture(b->stream, &graph), "recording");
    check(cudaGraphInstantiate(&exec, graph, 0), "recording");
    for (int i = 0; i < 60; i++) {
        float ms;
        cudaEventRecord(begin, b->stream);
        cudaGraphLaunch(exec, b->stream);
        cudaEventRecord(end, b->stream);
        check(cudaEventSynchronize(end), "timing");
        cudaEventElapsedTime(&ms, begin, end);
        if (i >= 10) times.push_back(ms * 1000 / (float)n_layers);
    }
    if (b->failed != cudaSuccess) check(b->failed, b->failed_at);
    std::sort(times.begin(), times.end());
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return times[times.size() / 2];
}

/* n sequences decoding after `context` tokens; target in microseconds. */
static void time_decode(int n, int context, double target, const std::vector<struct division> &ds)
{
    struct world w;
    int layers = std::max(4, std::min(28, (int)(8e8 / ((double)n * context * 1024))));
    open_world(&w, 12, 2, 128, layers, std::vector<struct seq>((size_t)n, {1, context}), true);
    for (const struct division &d : ds) {
        double us = time_layers(&w, layers, d), bytes = (double)n * context * 2 * 2 * 128 * 2;
        printf("decode %4d x %5d: %7.2f us (target %5.1f) %5.2f TB/s", n, context, us, target,
               bytes / us * 1e-6);
        if (d.warps) printf("  [%d warps, %d splits of %d]", d.warps, d.splits, d.split_chunks);
        printf("\n");
    }
    close_world(&w);
}

static void time_prefill(int n, int before, double target)
{
    struct world w;
    open_world(&w, 12, 2, 128, 8, {{n, before + n}}, true);
    double us = time_layers(&w, 8, {}),
           flops = 4.0 * 12 * 128 * ((double)n * before + 0.5 * n * (n + 1.0));
    printf("prefill %5d after %5d: %8.2f us (target %5.1f) %6.1f TFLOP/s\n", n, before, us, target,
           flops / us * 1e-6);
    close_world(&w);
}

int main(int argc, char **argv)
{
    bool all = argc < 2;
    if (all || !strcmp(argv[1], "test")) {
        int at = 0;
        for (int head_dim : {16, 64, 80, 96, 128, 256})
            for (int group : {1, 3, 4, 6, 7, 8}) test_shape(group, 1 + at % 2, head_dim, at++ % 3);
        test_shape(20, 1, 128, true); /* more heads than a tile of rows */
        test_shape(6, 2, 72, true);   /* padded */
        test_shape(4, 2, 20, false);  /* rows that are not 16-byte aligned */
        test_shape(2, 2, 32, false);
        for (int head_dim : {64, 128, 256}) test_chunks(6, head_dim);
        test_chunks(7, 80);
        printf("%d checks, %d failed\n", n_checks, n_failed);
    }
    if (all || !strcmp(argv[1], "time")) {
        time_decode(64, 160, 6, {{}, {3, 1, 1}, {3, 2, 1}, {2, 1, 1}});
        time_decode(64, 1024, 19.5, {{}, {3, 2, 1}, {3, 1, 1}, {4, 1, 1}});
        time_decode(256, 160, 16, {{}, {2, 1, 1}, {6, 1, 1}});
        time_decode(256, 1024, 78, {{}, {2, 1, 1}, {6, 1, 1}});
        time_decode(1, 3000, 9,
                    {{}, {3, 132, 1}, {6, 132, 1}, {3, 132, 2}, {3, 132, 3}, {6, 132, 6}});
        time_decode(16, 512, 7, {{}, {3, 8, 1}, {3, 8, 2}, {6, 8, 2}, {6, 4, 2}, {6, 4, 3}});
        time_decode(32, 160, 0, {{}, {3, 4, 1}, {3, 4, 3}});
        time_decode(32, 1024, 0, {{}, {3, 4, 2}, {6, 4, 3}});
        time_prefill(2048, 0, 45);
        time_prefill(8192, 0, 0);
        time_prefill(512, 0, 0);
        time_prefill(512, 4096, 0);
    }
    if (!all && !strcmp(argv[1], "profile")) { /* few launches, for a profiler */
        time_decode(64, 160, 6, {{}});
        time_prefill(512, 4096, 0);
    }
    return n_failed != 0;
}
