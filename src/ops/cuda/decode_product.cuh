/*
 * decode_product.cuh - matrix products of the decode kernel. Computing warps multiply: each has a
 * segment of two panels, or two segments of one, as two chains of products that do not wait for one
 * another. Finisher warps add the segments up and store.
 */
#ifndef LINNET_OPS_CUDA_DECODE_PRODUCT_CUH
#define LINNET_OPS_CUDA_DECODE_PRODUCT_CUH

#include "ops/cuda/decode.cuh"

enum { WINDOW = 4 }; /* K_UNITs of inputs that a lane holds, of each part */

/* What a phase multiplies: fragments, `stride` of them for 32 columns. */
struct input {
    const uint4 *x;
    int32_t stride;
    bool resident; /* in shared memory, in the way of the sums */
};

/* Two fragments: the inputs of one unit. Zeros where there is none. */
static __device__ __forceinline__ void load_unit(const uint4 *x, int32_t stride, bool on,
                                                 uint4 in[2])
{
    in[0] = in[1] = make_uint4(0, 0, 0, 0);
    if (on) in[0] = x[0], in[1] = x[stride];
}

/* Both chains go on by one unit; one that has come to its end multiplies zeros. */
static __device__ __forceinline__ void multiply_both(const uint4 f[2][4], const uint4 in[2][2],
                                                     float c[2][4])
{
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint4 v = in[j][i / 2];
            mma_16816(c[j], f[j][i].x, f[j][i].y, f[j][i].z, f[j][i].w, i % 2 ? v.z : v.x,
                      i % 2 ? v.w : v.y);
        }
}

static __device__ __forceinline__ void product_phase(struct place *w, const struct decode_args &a,
                                                     const struct memory &m, int phase,
                                                     const struct input &from)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const struct share &share = m.s->shares[warp][phase];
    bool whole = is_whole(a, phase), on = lane / 4 < a.n;
    int32_t groups = share.groups, stride = from.stride;
    int32_t count0 = share.count[0], count1 = share.count[1], most = max(count0, count1);
    const uint4 *x0 = from.x + 2 * share.unit[0] * stride + lane;
    const uint4 *x1 = from.x + 2 * share.unit[1] * stride + lane;
    uint4 in[WINDOW][2][2], f[2][4] = {};
#pragma unroll 1
    for (int32_t group = 0; group < groups; group++) {
        int turn = group % FINISHERS;
        bool both = has_part(a, share, phase, group, 1);
        if (group == 0 || most > WINDOW) /* else they are the same for all panels */
#pragma unroll
            for (int u = 0; u < WINDOW; u++) {
                load_unit(x0 + 2 * u * stride, stride, on && u < count0, in[u][0]);
                load_unit(x1 + 2 * u * stride, stride, on && u < count1, in[u][1]);
            }
        if (group == 0 && from.resident) sync_computing();
        if (group >= FINISHERS) sync_named(SUMS_FREE + turn, THREADS + 32);
        float c[2][4] = {};
#pragma unroll 1
        for (int32_t first = 0; first < most; first += WINDOW)
#pragma unroll
            for (int u = 0; u < WINDOW; u++) {
                int32_t unit = first + u, next = unit + WINDOW;
                if (unit >= most) break;
                if (unit < count0) take_slab(w, f[0]);
                if (both && unit < count1) take_slab(w, f[1]);
                give_back_slabs(*w, m);
                multiply_both(f, in[u], c);
                if (next < most) {
                    load_unit(x0 + 2 * next * stride, stride, on && next < count0, in[u][0]);
                    load_unit(x1 + 2 * next * stride, stride, on && next < count1, in[u][1]);
                }
            }
#pragma unroll
        for (int j = 0; j < 2; j++)
            m.s->sums[turn][whole ? 2 * warp + j : 8 * j + warp][lane] =
                make_float4(c[j][0], c[j][1], c[j][2], c[j][3]);
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
};

/* The head has no layer. */
static __device__ __forceinline__ struct decode_end
end_of_phase(const struct decode_args &a, const struct decode_layer &w, int phase)
{
    struct decode_end e;
    e.to = phase == GATE_UP ? TO_ACT : phase == QKV || phase == HEAD ? TO_ROWS : TO_RESIDUAL;
    e.n = a.n;
    e.rows = a.phases[phase].rows;
    e.panels = a.hidden_panels;
    e.bias = phase == QKV ? w.qkv_bias : phase == O_PROJ ? w.o_bias : NULL;
    e.gamma = phase == DOWN ? w.next_norm : phase == O_PROJ ? w.post_norm : NULL;
    e.y = phase == QKV ? a.qkv : phase == HEAD ? a.logits : a.x;
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

/* As store_fragment of product.cuh. c[j], c[2 + j]: rows g and g + 8 of token 2 t + j. */
static __device__ __forceinline__ void store_sums(const struct decode_end &e, int32_t panel,
                                                  const float c[4], const struct decode_tail &t,
                                                  const float *scales)
{
    int lane = threadIdx.x % 32, g = lane / 4;
    int32_t row = panel * PANEL_ROWS + g;
    bool on_low = row < e.rows, on_high = row + 8 < e.rows;
#pragma unroll 1
    for (int j = 0; j < 2; j++) {
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
                                                    const struct decode_end &end)
{
    int turn = threadIdx.x / 32 - WARPS, lane = threadIdx.x % 32;
    const struct share &share = m.s->shares[0][phase];
    bool whole = is_whole(a, phase);
    int32_t groups = share.groups, n_sums = whole ? 16 : 8;
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
        bool two = !whole && has_part(a, share, phase, group, 1);
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
