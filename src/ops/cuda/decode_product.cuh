/*
 * decode_product.cuh - matrix products of the decode kernel. Computing warps multiply: each has a
 * segment of two panels at a time, or two segments of one. Finisher warps add the segments up and
 * store.
 */
#ifndef LINNET_OPS_CUDA_DECODE_PRODUCT_CUH
#define LINNET_OPS_CUDA_DECODE_PRODUCT_CUH

#include "ops/cuda/decode.cuh"

enum { BATCH_SLABS = 3, BATCH = BATCH_SLABS * SLAB_UNITS }; /* units whose inputs a lane holds */

/* What a phase multiplies: fragments, 32 of 16 bytes for 32 columns. */
static __device__ __forceinline__ const uint4 *input_of(const struct decode_args &a, int phase)
{
    return (const uint4 *)(phase == DOWN ? a.act : phase == O_PROJ ? a.attn : a.normed);
}

/* The inputs of one unit, two fragments, of `left` that there are from x on. */
static __device__ __forceinline__ void load_unit(const uint4 *x, int unit, int32_t left,
                                                 uint4 in[2])
{
    in[0] = in[1] = make_uint4(0, 0, 0, 0);
    if (unit < left) in[0] = x[2 * unit * 32], in[1] = x[(2 * unit + 1) * 32];
}

static __device__ __forceinline__ void multiply_unit(const uint4 f[4], const uint4 in[2],
                                                     float c[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint4 v = in[i / 2];
        mma_16816(c, f[i].x, f[i].y, f[i].z, f[i].w, i % 2 ? v.z : v.x, i % 2 ? v.w : v.y);
    }
}

/* Both chains in turns, so that neither waits for the other. */
static __device__ __forceinline__ void multiply_two(const uint4 f[4], const uint4 g[4],
                                                    const uint4 in[2], float c[4], float d[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint4 v = in[i / 2];
        mma_16816(c, f[i].x, f[i].y, f[i].z, f[i].w, i % 2 ? v.z : v.x, i % 2 ? v.w : v.y);
        mma_16816(d, g[i].x, g[i].y, g[i].z, g[i].w, i % 2 ? v.z : v.x, i % 2 ? v.w : v.y);
    }
}

/*
 * n units (at most BATCH) of a panel, or of two; a slab that has been used gives its inputs'
 * registers to those of the next batch: next_left units from next on.
 */
template <bool PAIR>
static __device__ __forceinline__ void multiply_batch(struct place *w, int32_t n,
                                                      uint4 in[BATCH][2], float c[2][4],
                                                      const uint4 *next, int32_t next_left)
{
#pragma unroll
    for (int s = 0; s < BATCH_SLABS; s++) {
        if (s * SLAB_UNITS < n) {
            const struct slab slab = take_slab(w), second = PAIR ? take_slab(w) : slab;
#pragma unroll
            for (int u = s * SLAB_UNITS; u < (s + 1) * SLAB_UNITS; u++) {
                if (u >= n) break;
                uint4 f[4], g[4];
                load_fragments(slab.at + UNIT_BYTES * (u % SLAB_UNITS), f);
                if (PAIR) {
                    load_fragments(second.at + UNIT_BYTES * (u % SLAB_UNITS), g);
                    multiply_two(f, g, in[u], c[0], c[1]);
                } else {
                    multiply_unit(f, in[u], c[0]);
                }
            }
            give_back(slab);
            if (PAIR) give_back(second);
        }
        if constexpr (!PAIR) {
            if (next_left == 0) continue;
#pragma unroll
            for (int u = s * SLAB_UNITS; u < (s + 1) * SLAB_UNITS; u++)
                load_unit(next, u, next_left, in[u]);
        }
    }
}

static __device__ __forceinline__ void park_sums(float4 *sums, const float c[4])
{
    sums[threadIdx.x % 32] = make_float4(c[0], c[1], c[2], c[3]);
}

/* A panel's segments one after another: all of the warp's two, or its only one. Inputs come
 * batch by batch, the next panel's beginning with this one's. */
static __device__ __forceinline__ void multiply_panel(struct place *w, const struct share &share,
                                                      bool whole, const uint4 *x, bool on,
                                                      bool more, uint4 in[BATCH][2],
                                                      float4 (*sums)[32])
{
    int32_t end = share.count[0] + (whole ? share.count[1] : 0), unit = 0;
    bool keep = !whole; /* the same inputs for all panels: they fit into a batch */
    float c[2][4] = {};
#pragma unroll 1
    for (int part = 0; part < 1 + whole; part++) {
        int32_t part_end = part ? end : share.count[0];
#pragma unroll 1
        while (unit < part_end) {
            int32_t n = min(part_end - unit, (int)BATCH), next = unit + n, next_left = 0;
            if (next == end) next = 0;
            if (!keep && on && (next > 0 || more))
                next_left = (next < share.count[0] ? share.count[0] : end) - next;
            multiply_batch<false>(w, n, in, c, x + 2 * next * 32, next_left);
            unit += n;
        }
        park_sums(sums[part], c[0]);
        c[0][0] = c[0][1] = c[0][2] = c[0][3] = 0;
    }
}

/* inputs: the barrier that they are behind; what does not need them comes before it. */
static __device__ __forceinline__ void product_phase(struct place *w, const struct decode_args &a,
                                                     const struct memory &m, int phase,
                                                     const struct meeting &inputs)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const struct share &share = m.s->shares[warp][phase];
    bool whole = is_whole(a, phase), on = lane / 4 < a.n;
    int32_t groups = share.groups, count = share.count[0];
    const uint4 *x = input_of(a, phase) + 2 * share.unit[0] * 32 + lane;
    wait_all(a, m, inputs);
    if (groups == 0) return;
    uint4 in[BATCH][2];
#pragma unroll
    for (int u = 0; u < BATCH; u++) load_unit(x, u, on ? count : 0, in[u]);
#pragma unroll 1
    for (int32_t group = 0; group < groups; group++) {
        int turn = group % FINISHERS;
        if (group >= FINISHERS) sync_named(SUMS_FREE + turn, THREADS + 32);
        if (is_pair(share, whole, group)) {
            float c[2][4] = {};
            multiply_batch<true>(w, count, in, c, x, 0);
            park_sums(m.s->sums[turn][warp], c[0]);
            park_sums(m.s->sums[turn][WARPS + warp], c[1]);
        } else {
            multiply_panel(w, share, whole, x, on, group + 1 < groups, in,
                           m.s->sums[turn] + (whole ? 2 * warp : warp));
        }
        arrive_named(SUMS_FULL + turn, THREADS + 32);
    }
}

/* ---- the finishers ----------------------------------------------------------------------- */

/* The end of a phase: as struct product_end, but of up to 8 tokens in fragments. */
struct decode_end {
    enum product_to to;
    int32_t n, rows, panels;
    const float *bias, *gamma;
    float *y, *out_squares;
    bf16 *out;
    uint64_t *tagged; /* of TO_ROWS: goes here instead of y, or NULL */
    uint32_t tag;
};

/* The head has no layer. */
static __device__ __forceinline__ struct decode_end
end_of_phase(const struct decode_args &a, const struct decode_layer &w, int phase, uint32_t tag)
{
    struct decode_end e;
    e.to = phase == GATE_UP ? TO_ACT : phase == QKV || phase == HEAD ? TO_ROWS : TO_RESIDUAL;
    e.n = a.n;
    e.rows = a.phases[phase].rows;
    e.panels = a.hidden_panels;
    e.bias = phase == QKV ? w.qkv_bias : phase == O_PROJ ? w.o_bias : NULL;
    e.gamma = phase == DOWN ? w.next_norm : phase == O_PROJ ? w.post_norm : NULL;
    e.y = phase == HEAD ? a.logits : a.x;
    e.tagged = phase == QKV ? a.qkv : NULL;
    e.tag = tag;
    e.out_squares = a.squares;
    e.out = phase == GATE_UP ? a.act : a.normed;
    return e;
}

/* What the end reads, of rows g and g + 8 of a panel; of y two tokens each. */
struct decode_tail {
    float y[2][2], bias[2], gamma[2];
};

static __device__ __forceinline__ void load_decode_tail(const struct decode_end &e, int32_t panel,
                                                        struct decode_tail *t)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int32_t row = panel * PANEL_ROWS + lane / 4 + 8 * i;
        bool on = e.to != TO_ACT && row < e.rows;
        t->bias[i] = on && e.bias ? e.bias[row] : 0.0f;
        t->gamma[i] = on && e.gamma ? e.gamma[row] : 0.0f;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int32_t token = lane % 4 * 2 + j;
            t->y[i][j] =
                on && e.to == TO_RESIDUAL && token < e.n ? e.y[token * e.rows + row] : 0.0f;
        }
    }
}

/* The sums of two tokens side by side, as store_sums. */
static __device__ __forceinline__ void store_tagged_rows(const struct decode_end &e, int32_t row,
                                                         const float c[4],
                                                         const struct decode_tail &t,
                                                         const float *scales)
{
    int token = (int)threadIdx.x % 4 * 2;
    uint64_t *to = e.tagged + ((int64_t)(token / 2) * e.rows + row) * 2;
    if (token >= e.n) return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float v[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            v[j] = c[2 * i + j] * scales[token + j];
            if (e.bias) v[j] += t.bias[i];
        }
        if (row + 8 * i < e.rows)
            store_tagged(to + 16 * i, __float_as_uint(v[0]), __float_as_uint(v[1]), e.tag);
    }
}

/* As store_fragment of product.cuh. c[j], c[2 + j]: rows g and g + 8 of token 2 t + j. */
static __device__ __forceinline__ void store_sums(const struct decode_end &e, int32_t panel,
                                                  const float c[4], const struct decode_tail &t,
                                                  const float *scales)
{
    int lane = threadIdx.x % 32, g = lane / 4;
    int32_t row = panel * PANEL_ROWS + g;
    bool on_low = row < e.rows, on_high = row + 8 < e.rows;
    if (e.tagged) {
        store_tagged_rows(e, row, c, t, scales);
        return;
    }
#pragma unroll 1
    for (int j = 0; j < min(e.n, 2); j++) {
        int32_t token = lane % 4 * 2 + j;
        bool on = token < e.n;
        float low = j ? c[1] : c[0], high = j ? c[3] : c[2];
        if (e.to != TO_RESIDUAL) low *= scales[token], high *= scales[token];
        if (e.to == TO_ACT) { /* gate and up of column 8 panel + g */
            int32_t at = panel / 4 * 256 + token * 32 + g / 2 * 8 + panel / 2 % 2 * 4 +
                         panel % 2 * 2 + g % 2;
            if (on && panel * 8 + g < e.rows / 2) e.out[at] = __float2bfloat16(silu(low) * high);
            continue;
        }
        if (e.to == TO_RESIDUAL) {
            low = (j ? t.y[0][1] : t.y[0][0]) + (e.bias ? low + t.bias[0] : low);
            high = (j ? t.y[1][1] : t.y[1][0]) + (e.bias ? high + t.bias[1] : high);
            int32_t at = panel / 2 * 256 + token * 32 + g / 2 * 8 + panel % 2 * 4 + g % 2;
            if (on && on_low) e.out[at] = __float2bfloat16(low * t.gamma[0]);
            if (on && on_high) e.out[at + 2] = __float2bfloat16(high * t.gamma[1]);
            float squares = panel_squares(on && on_low ? low : 0.0f, on && on_high ? high : 0.0f);
            if (g == 0 && on) e.out_squares[token * e.panels + panel] = squares;
        } else if (e.bias) {
            low += t.bias[0], high += t.bias[1];
        }
        float *y = e.y + token * e.rows + row;
        if (on && on_low) y[0] = low;
        if (on && on_high) y[8] = high;
    }
}

static __device__ __forceinline__ void finish_phase(const struct decode_args &a,
                                                    const struct memory &m, int phase,
                                                    const struct decode_end &end,
                                                    const struct meeting &inputs)
{
    int turn = threadIdx.x / 32 - WARPS, lane = threadIdx.x % 32;
    const struct share &share = m.s->shares[0][phase];
    bool whole = is_whole(a, phase);
    int32_t groups = share.groups, n_sums = whole ? 16 : 8;
    wait_all(a, m, inputs);
    if (groups == 0) return;
    if (end.to != TO_RESIDUAL) {
#pragma unroll 1
        for (int token = turn; token < a.n; token += FINISHERS) {
            float scale =
                token_scale(a.squares + token * a.hidden_panels, a.hidden_panels, a.hidden, a.eps);
            if (lane == 0) m.s->scales[token] = scale;
        }
        sync_named(SYNC_FINISHING, 32 * FINISHERS);
    }
#pragma unroll 1
    for (int32_t group = turn; group < groups; group += FINISHERS) {
        int32_t panel = share.panel + (whole ? group : 2 * group);
        bool two = is_pair(share, whole, group);
        struct decode_tail tail, second;
        load_decode_tail(end, panel, &tail);
        if (two) load_decode_tail(end, panel + 1, &second);
        sync_named(SUMS_FULL + turn, THREADS + 32);
#pragma unroll 1
        for (int q = 0; q < 1 + two; q++) {
            float c[4] = {0, 0, 0, 0};
#pragma unroll 4
            for (int s = 0; s < n_sums; s++) {
                float4 part = m.s->sums[turn][8 * q + s][lane];
                c[0] += part.x, c[1] += part.y, c[2] += part.z, c[3] += part.w;
            }
            store_sums(end, panel + q, c, tail, m.s->scales);
            tail = second;
        }
        if (group + FINISHERS < groups) arrive_named(SUMS_FREE + turn, THREADS + 32);
    }
}

#endif
