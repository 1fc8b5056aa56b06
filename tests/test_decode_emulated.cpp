/*
 * test_decode_emulated.cpp - the decode kernel run on the host (tests/emulator), against the model
 * written out plainly: indices, barriers, who reads what when. Numbers agree to bf16's precision;
 * equal bits are test_cuda_emulated's affair.
 */
#include <stdio.h>

#include <memory>
#include <random>
#include <vector>

#define MERGE_ROUND 5 /* chunks, so that a long context has several rounds */
#include "control.h"
#include "ops/cuda/decode.cu"

bool cuda_good(struct backend *b, cudaError_t status, const char *what)
{
    if (status != cudaSuccess) b->failed = status, b->failed_at = what;
    return b->failed == cudaSuccess;
}

static std::mt19937 generator(1);

static float random_value(float scale)
{
    return scale * std::normal_distribution<float>()(generator);
}

static float rounded(double v)
{
    return __bfloat162float(__float2bfloat16((float)v));
}

/* Rows as a file has them, and the same packed. */
struct weights {
    std::vector<float> values;
    struct matrix m = {};

    weights(int64_t rows, int64_t columns, bool paired = false)
    {
        m.rows = rows, m.columns = columns, m.padded = padded_columns(columns);
        m.paired = paired, m.panels = panel_count(rows, paired);
        size_t n = (size_t)(m.panels * PANEL_ROWS * m.padded);
        m.data = (bf16 *)calloc(n, sizeof(bf16));
        values.resize((size_t)(rows * columns));
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < columns; c++)
                m.data[at(r, c)] = __float2bfloat16(values[(size_t)(r * columns + c)] = rounded(
                                                        random_value(1 / sqrtf((float)columns))));
    }

    ~weights()
    {
        free(m.data);
    }

    /* As struct matrix says. */
    int64_t at(int64_t row, int64_t column) const
    {
        int64_t half = m.rows / 2, panel = row / 16, in = row % 16;
        if (m.paired) panel = row % half / 8, in = row % half % 8 + (row < half ? 0 : 8);
        int64_t lane = in % 8 * 4 + column % 8 / 2;
        int64_t value = column % 16 / 8 * 4 + in / 8 * 2 + column % 2;
        return ((panel * (m.padded / 16) + column / 16) * 32 + lane) * 8 + value;
    }

    double dot(int64_t row, const std::vector<float> &x) const
    {
        double sum = 0;
        for (int64_t c = 0; c < m.columns; c++)
            sum += (double)values[(size_t)(row * m.columns + c)] * x[(size_t)c];
        return sum;
    }
};

struct values {
    std::vector<float> data;
    struct vector v = {};

    values(int n, float mean, float scale)
    {
        for (int i = 0; i < n; i++) data.push_back(mean + random_value(scale));
        v.data = data.data();
    }
};

struct test_layer {
    weights qkv, o, gate_up, down;
    values bias, q_norm, k_norm, o_bias, input_norm, post_norm;
    struct layer l = {};

    test_layer(const struct shape &s, bool norms)
        : qkv((s.n_heads + 2 * s.n_kv_heads) * s.head_dim, s.hidden),
          o(s.hidden, s.n_heads * s.head_dim), gate_up(2 * s.intermediate, s.hidden, true),
          down(s.hidden, s.intermediate),
          bias((s.n_heads + 2 * s.n_kv_heads) * s.head_dim, 0, 0.1f), q_norm(s.head_dim, 1, 0.1f),
          k_norm(s.head_dim, 1, 0.1f), o_bias(s.hidden, 0, 0.1f), input_norm(s.hidden, 1, 0.1f),
          post_norm(s.hidden, 1, 0.1f)
    {
        l.qkv = &qkv.m, l.o_proj = &o.m, l.gate_up = &gate_up.m, l.down = &down.m;
        l.input_norm = &input_norm.v, l.post_norm = &post_norm.v;
        if (norms)
            l.q_norm = &q_norm.v, l.k_norm = &k_norm.v;
        else
            l.qkv_bias = &bias.v, l.o_bias = &o_bias.v;
    }
};

struct rig {
    struct shape s;
    std::vector<std::unique_ptr<test_layer>> layers;
    weights head, embedding;
    values final_norm;
    std::vector<bf16> rows; /* of the embedding */
    std::vector<const struct layer *> pointers;
    struct matrix embedding_rows = {};
    struct backend b = {};

    rig(const struct shape &shape, bool norms, int blocks)
        : s(shape), head(s.vocab, s.hidden), embedding(s.vocab, s.hidden),
          final_norm(s.hidden, 1, 0.1f)
    {
        for (int i = 0; i < s.n_layers; i++)
            layers.push_back(std::make_unique<test_layer>(s, norms));
        for (int i = 0; i < s.n_layers; i++) {
            layers[(size_t)i]->l.next_norm =
                i + 1 < s.n_layers ? &layers[(size_t)i + 1]->input_norm.v : &final_norm.v;
            pointers.push_back(&layers[(size_t)i]->l);
        }
        for (float v : embedding.values) rows.push_back(__float2bfloat16(v));
        embedding_rows.data = rows.data();
        b.shape = s;
        b.limits = {};
        b.limits.max_tokens = b.limits.max_logits = b.limits.max_seqs = 8;
        b.limits.max_context = 1024;
        b.limits.n_blocks = 600;
        b.capability = 90;
        b.multiprocessors = blocks;
        emulator_set_device(90, blocks);
        b.model.embedding = &embedding_rows;
        b.model.head = &head.m;
        b.model.layers = pointers.data();
        b.hidden_panels = (int32_t)panel_count(s.hidden, false);
        reserve((void **)&b.cache, (size_t)s.n_layers * 2 * 600 * KV_BLOCK *
                                       (size_t)(s.n_kv_heads * s.head_dim) * sizeof(bf16));
        inputs(&b.fragments.normed, s.hidden);
        inputs(&b.fragments.attn, s.n_heads * s.head_dim);
        inputs(&b.fragments.act, s.intermediate);
        reserve((void **)&b.x, 8 * (size_t)s.hidden * sizeof(float));
        reserve((void **)&b.squares, 8 * (size_t)b.hidden_panels * sizeof(float));
        reserve((void **)&b.qkv,
                8 * (size_t)((s.n_heads + 2 * s.n_kv_heads) * s.head_dim) * sizeof(float));
        reserve((void **)&b.logits, 8 * (size_t)s.vocab * sizeof(float));
        reserve((void **)&b.chosen, 8 * sizeof(struct chosen));
        if (!decode_open(&b) || !b.decode) abort();
    }

    ~rig()
    {
        decode_close(&b);
        void *memory[] = {b.cache,
                          b.fragments.normed.data,
                          b.fragments.attn.data,
                          b.fragments.act.data,
                          b.x,
                          b.squares,
                          b.qkv,
                          b.logits,
                          b.chosen};
        for (void *p : memory) free(p);
    }

    static void reserve(void **p, size_t n)
    {
        cudaMalloc(p, n);
    }

    static void inputs(struct act *a, int columns)
    {
        *a = {NULL, padded_columns(columns), ACT_TOKENS, false};
        size_t n = (size_t)(a->capacity * a->padded) * sizeof(bf16);
        cudaMalloc((void **)&a->data, n);
        memset(a->data, 0, n);
    }
};

/* A head as the cache has it: normed, turned, rounded. */
static void turn(std::vector<float> &x, int from, int n, const float *rope, const values *norm,
                 float eps)
{
    double sum = 0, scale = 1;
    for (int i = 0; i < n; i++) sum += (double)x[(size_t)(from + i)] * x[(size_t)(from + i)];
    if (norm) scale = 1 / sqrt(sum / n + eps);
    for (int j = 0; j < n / 2; j++) {
        float *low = &x[(size_t)(from + j)], *high = &x[(size_t)(from + n / 2 + j)];
        double a = *low, b = *high, c = rope[j], s = rope[n / 2 + j];
        if (norm) a *= scale * norm->data[(size_t)j], b *= scale * norm->data[(size_t)(n / 2 + j)];
        *low = rounded(a * c - b * s);
        *high = rounded(b * c + a * s);
    }
}

/* RMSNorm in its two halves: bf16 inputs, and what sums are multiplied by. */
static std::vector<float> half_normed(const std::vector<float> &x, const values &norm, float eps,
                                      double *scale)
{
    std::vector<float> out;
    double sum = 0;
    for (size_t i = 0; i < x.size(); i++) {
        sum += (double)x[i] * x[i];
        out.push_back(rounded(x[i] * norm.data[i]));
    }
    *scale = 1 / sqrt(sum / (double)x.size() + eps);
    return out;
}

struct sequence {
    int position, token;
    std::vector<int> blocks;
    float *rope;
};

static bf16 *slot_of(const rig &r, int layer, int values, const sequence &q, int key, int kv_head)
{
    int64_t block = q.blocks[(size_t)(key / KV_BLOCK)];
    return cache_of(&r.b, layer, values) +
           ((block * r.s.n_kv_heads + kv_head) * KV_BLOCK + key % KV_BLOCK) * r.s.head_dim;
}

static std::vector<float> attend(const rig &r, int layer, const sequence &q,
                                 const std::vector<float> &qkv)
{
    const struct shape &s = r.s;
    int d = s.head_dim, group = s.n_heads / s.n_kv_heads;
    std::vector<float> out;
    for (int h = 0; h < s.n_heads; h++) {
        int kv = h / group;
        std::vector<double> p;
        double sum = 0, most = -1e30;
        for (int key = 0; key <= q.position; key++) {
            double dot = 0;
            for (int i = 0; i < d; i++) {
                float k = key == q.position ? qkv[(size_t)((s.n_heads + kv) * d + i)]
                                            : __bfloat162float(slot_of(r, layer, 0, q, key, kv)[i]);
                dot += (double)qkv[(size_t)(h * d + i)] * k;
            }
            p.push_back(dot / sqrt(d));
            most = p.back() > most ? p.back() : most;
        }
        for (double &v : p) sum += v = exp(v - most);
        for (int i = 0; i < d; i++) {
            double v = 0;
            for (int key = 0; key <= q.position; key++)
                v += p[(size_t)key] *
                     (key == q.position
                          ? rounded(qkv[(size_t)((s.n_heads + s.n_kv_heads + kv) * d + i)])
                          : __bfloat162float(slot_of(r, layer, 1, q, key, kv)[i]));
            out.push_back(rounded(v / sum));
        }
    }
    return out;
}

static std::vector<float> forward(const rig &r, const sequence &q, bool norms)
{
    const struct shape &s = r.s;
    std::vector<float> x(r.embedding.values.begin() + (long)q.token * s.hidden,
                         r.embedding.values.begin() + (long)(q.token + 1) * s.hidden);
    double scale;
    for (int i = 0; i < s.n_layers; i++) {
        const test_layer &l = *r.layers[(size_t)i];
        std::vector<float> in = half_normed(x, l.input_norm, s.norm_eps, &scale), qkv, act;
        for (int64_t row = 0; row < l.qkv.m.rows; row++)
            qkv.push_back(
                (float)(l.qkv.dot(row, in) * scale + (norms ? 0 : l.bias.data[(size_t)row])));
        for (int h = 0; h < s.n_heads + s.n_kv_heads; h++)
            turn(qkv, h * s.head_dim, s.head_dim, q.rope,
                 !norms          ? NULL
                 : h < s.n_heads ? &l.q_norm
                                 : &l.k_norm,
                 s.norm_eps);
        std::vector<float> attn = attend(r, i, q, qkv);
        for (int64_t row = 0; row < s.hidden; row++)
            x[(size_t)row] +=
                (float)(l.o.dot(row, attn) + (norms ? 0 : l.o_bias.data[(size_t)row]));
        in = half_normed(x, l.post_norm, s.norm_eps, &scale);
        for (int64_t row = 0; row < s.intermediate; row++) {
            double gate = l.gate_up.dot(row, in) * scale,
                   up = l.gate_up.dot(row + s.intermediate, in) * scale;
            act.push_back(rounded(gate / (1 + exp(-gate)) * up));
        }
        for (int64_t row = 0; row < s.hidden; row++) x[(size_t)row] += (float)l.down.dot(row, act);
    }
    std::vector<float> in = half_normed(x, r.final_norm, s.norm_eps, &scale), logits;
    for (int64_t row = 0; row < s.vocab; row++)
        logits.push_back((float)(r.head.dot(row, in) * scale));
    return logits;
}

/* One step of sequences with so many tokens before theirs. */
static int check_step(rig &r, bool norms, const std::vector<int> &before)
{
    const struct shape &s = r.s;
    int n = (int)before.size(), failed = 0, next_block = 1;
    enum { WIDTH = 64 };
    std::vector<sequence> sequences;
    std::vector<int32_t> ids, positions, slots, tables, rows, lens, starts = {0};
    std::vector<float> rope;
    for (int i = 0; i < n; i++) {
        sequence q;
        q.position = before[(size_t)i];
        q.token = (7 * i + 3) % s.vocab;
        for (int k = 0; k <= q.position / KV_BLOCK; k++)
            q.blocks.push_back(next_block++ * 13 % 599);
        ids.push_back(i == 1 ? -1 - 2 : q.token); /* one is known to the device only */
        if (i == 1) r.b.chosen[2] = {q.token, LINNET_OK};
        positions.push_back(q.position);
        slots.push_back(q.blocks.back() * KV_BLOCK + q.position % KV_BLOCK);
        for (int k = 0; k < WIDTH; k++)
            tables.push_back(k < (int)q.blocks.size() ? q.blocks[(size_t)k] : -1);
        rows.push_back(i);
        lens.push_back(q.position + 1);
        starts.push_back(i + 1);
        for (int j = 0; j < s.head_dim; j++) {
            double angle = q.position * pow(1000.0, -2.0 * (j % (s.head_dim / 2)) / s.head_dim);
            rope.push_back((float)(j < s.head_dim / 2 ? cos(angle) : sin(angle)));
        }
        sequences.push_back(q);
    }
    for (int i = 0; i < n; i++) sequences[(size_t)i].rope = &rope[(size_t)(i * s.head_dim)];
    for (int layer = 0; layer < s.n_layers; layer++)
        for (const sequence &q : sequences)
            for (int key = 0; key < q.position; key++)
                for (int kv = 0; kv < s.n_kv_heads; kv++)
                    for (int i = 0; i < s.head_dim; i++)
                        slot_of(r, layer, 0, q, key, kv)[i] = __float2bfloat16(random_value(1)),
                                                     slot_of(r, layer, 1, q, key, kv)[i] =
                                                         __float2bfloat16(random_value(1));
    struct step step = {};
    step.n_tokens = step.n_seqs = step.n_logits = n;
    step.max_blocks = WIDTH;
    step.token_ids = ids.data(), step.positions = positions.data();
    step.slot_mapping = slots.data(), step.query_start = starts.data();
    step.context_lens = lens.data(), step.block_tables = tables.data();
    step.logit_rows = rows.data();
    r.b.step.token_ids = ids.data(), r.b.step.positions = positions.data();
    r.b.step.slot_mapping = slots.data(), r.b.step.block_tables = tables.data();
    r.b.step.rope = rope.data();
    memset(r.b.logits, 0xFF, (size_t)(n * s.vocab) * sizeof(float));
    if (!decode_can(&r.b, &step)) return 1;
    decode_run(&r.b, &step);
    if (r.b.failed != cudaSuccess) return printf("FAILED: %s\n", r.b.failed_at), 1;
    for (int i = 0; i < n; i++) {
        std::vector<float> want = forward(r, sequences[(size_t)i], norms);
        double error = 0, size = 0;
        for (int k = 0; k < s.vocab; k++) {
            double d = r.b.logits[i * s.vocab + k] - want[(size_t)k];
            error += d * d;
            size += (double)want[(size_t)k] * want[(size_t)k];
        }
        bool good = sqrt(error / size) < 0.02; /* NaN is not */
        if (!good) failed++;
        if (!good || i == 0)
            printf("%s: hidden %d, %d x %d heads of %d, %d sequences, position %d: rms_rel %.4f\n",
                   good ? "ok" : "FAILED", s.hidden, s.n_heads, s.n_kv_heads, s.head_dim, n,
                   before[(size_t)i], sqrt(error / size));
    }
    return failed;
}

int main()
{
    int failed = 0;
    /* layers, hidden, intermediate, heads, kv heads, head_dim, vocab, eps */
    const struct {
        struct shape shape;
        bool norms;
    } models[] = {
        {{2, 192, 200, 6, 2, 64, 100, 1e-6f}, false},  /* padding, an odd panel */
        {{1, 128, 4160, 2, 1, 64, 64, 1e-6f}, true},   /* 16 segments of 4 and 5 units */
        {{1, 1536, 320, 4, 1, 128, 64, 1e-5f}, false}, /* 8 segments of 3 units */
        {{1, 512, 9216, 7, 1, 96, 40, 1e-6f}, true},   /* 16 segments of 9 */
        {{1, 4160, 128, 2, 1, 64, 48, 1e-6f}, false},  /* 16 segments before attention */
        {{2, 256, 256, 3, 3, 80, 32, 1e-6f}, false},
    };
    for (const auto &m : models) {
        rig r(m.shape, m.norms, 3);
        failed += check_step(r, m.norms, {5});
        failed += check_step(r, m.norms, {0, 63, 64});
        failed += check_step(r, m.norms, {130, 1, 17, 200, 128, 127, 15, 16});
        emulator_set_early(true);
        failed += check_step(r, m.norms, {700}); /* more chunks than warps */
        failed += check_step(r, m.norms, {130, 1, 17, 200, 128, 127, 15, 16});
        emulator_set_early(false);
    }
    /* More blocks than tasks: some have no chunk, some no head to merge, some no panel. Heads are
     * merged in 2 or 4 pieces: of 64, 80 and 96 dimensions. */
    const struct {
        int model, blocks;
    } wide[] = {{0, 19}, {0, 24}, {5, 19}, {3, 28}, {3, 14}};
    for (const auto &w : wide)
        for (int early = 0; early < 2; early++) {
            rig r(models[w.model].shape, models[w.model].norms, w.blocks);
            emulator_set_early(early);
            failed += check_step(r, models[w.model].norms, {5});
            failed += check_step(r, models[w.model].norms, {700});
            failed += check_step(r, models[w.model].norms, {130, 1, 17, 200});
            emulator_set_early(false);
        }
    printf("%d failed\n", failed);
    return failed ? 1 : 0;
}
