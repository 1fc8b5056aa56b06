/*
 * attention.cu - paged grouped-query attention, decode and prefill alike: a block for one query
 * head of one token. Keys are taken in chunks of CHUNK_KEYS at absolute positions, a warp for each
 * 32 of a chunk; the warps' results add up in ascending order, and so do the chunks'.
 */
#include <float.h>

#include "ops/cuda/cuda_internal.h"

enum { CHUNK = 256, WARPS = CHUNK / 32, THREADS = CHUNK, MAX_HEAD = 256, PAIRS = MAX_HEAD / 64 };

struct attention {
    const bf16 *q, *keys, *values;
    const int32_t *positions, *seq_of, *block_tables;
    struct act out;
    int32_t n_heads, n_kv_heads, head_dim, max_blocks;
    float scale;
};

/* Maximum or sum over the block, in a fixed order. */
template <bool MAX> static __device__ float block_reduce(float v)
{
    __shared__ float warps[THREADS / 32];
    for (int offset = 16; offset > 0; offset /= 2) {
        float other = __shfl_xor_sync(~0u, v, offset);
        v = MAX ? fmaxf(v, other) : v + other;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
    __syncthreads();
    float all = warps[0];
    for (int w = 1; w < THREADS / 32; w++) all = MAX ? fmaxf(all, warps[w]) : all + warps[w];
    return all;
}

/* One key's score, 16 bytes at a time where rows are so aligned (every head_dim of 8). */
static __device__ float dot(const float *q, const bf16 *key, int n)
{
    float sum = 0;
    int d = 0;
    for (; n % 8 == 0 && d < n; d += 8) {
        uint4 raw = *(const uint4 *)(key + d);
        const __nv_bfloat162 *pair = (const __nv_bfloat162 *)&raw;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 k = __bfloat1622float2(pair[i]);
            sum = fmaf(q[d + 2 * i], k.x, sum);
            sum = fmaf(q[d + 2 * i + 1], k.y, sum);
        }
    }
    for (; d < n; d++) sum = fmaf(q[d], __bfloat162float(key[d]), sum);
    return sum;
}

/* part[] = sum over this warp's keys of weight * value, lane l holding pairs l, l + 32, ... */
static __device__ void weigh_values(const bf16 *values, int64_t row, float weight, int n,
                                    int head_dim, float2 part[PAIRS])
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < PAIRS; k++) part[k] = make_float2(0, 0);
#pragma unroll 4
    for (int i = 0; i < n; i++) {
        float w = __shfl_sync(~0u, weight, i);
        const bf16 *value = values + __shfl_sync(~0u, row, i);
#pragma unroll
        for (int k = 0; k < PAIRS; k++) {
            int d = 2 * (lane + 32 * k);
            if (d >= head_dim) break;
            float2 v = __bfloat1622float2(*(const __nv_bfloat162 *)(value + d));
            part[k].x = fmaf(w, v.x, part[k].x);
            part[k].y = fmaf(w, v.y, part[k].y);
        }
    }
}

static __global__ void __launch_bounds__(THREADS) attention_kernel(struct attention p)
{
    __shared__ float q[MAX_HEAD], parts[WARPS][MAX_HEAD];
    int token = blockIdx.x, head = blockIdx.y, kv_head = head / (p.n_heads / p.n_kv_heads);
    int n_keys = p.positions[token] + 1, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t *table = p.block_tables + (int64_t)p.seq_of[token] * p.max_blocks;
    if (threadIdx.x < p.head_dim)
        q[threadIdx.x] =
            __bfloat162float(p.q[((int64_t)token * p.n_heads + head) * p.head_dim + threadIdx.x]);
    __syncthreads();
    float max = -FLT_MAX, sum = 0, out = 0; /* out: of dimension threadIdx.x */
    for (int first = 0; first < n_keys; first += CHUNK) {
        int key = first + threadIdx.x;
        bool valid = key < n_keys;
        int64_t row = 0;
        if (valid)
            row = (((int64_t)table[key / KV_BLOCK] * p.n_kv_heads + kv_head) * KV_BLOCK +
                   key % KV_BLOCK) *
                  p.head_dim;
        float score = valid ? dot(q, p.keys + row, p.head_dim) * p.scale : -FLT_MAX;
        float highest = block_reduce<true>(score);
        float weight = valid ? expf(score - highest) : 0.0f;
        float total = block_reduce<false>(weight);
        float2 part[PAIRS];
        int left = n_keys - first - warp * 32;
        weigh_values(p.values, row, weight, left < 0 ? 0 : left < 32 ? left : 32, p.head_dim, part);
#pragma unroll
        for (int k = 0; k < PAIRS; k++) {
            int d = 2 * (lane + 32 * k);
            if (d < p.head_dim) *(float2 *)&parts[warp][d] = part[k];
        }
        __syncthreads();
        float new_max = fmaxf(max, highest), old_scale = first ? expf(max - new_max) : 0.0f,
              scale = expf(highest - new_max), all = 0;
        if (threadIdx.x < p.head_dim)
            for (int w = 0; w < WARPS; w++) all += parts[w][threadIdx.x];
        out = out * old_scale + all * scale;
        sum = sum * old_scale + total * scale;
        max = new_max;
        __syncthreads(); /* parts is free again */
    }
    if (threadIdx.x < p.head_dim)
        p.out.data[act_at(p.out, token, head * p.head_dim + threadIdx.x)] =
            __float2bfloat16(out / sum);
}

void attention_run(struct backend *b, const struct step *s, int32_t layer)
{
    const struct shape *shape = &b->shape;
    struct attention p = {b->q,
                          cache_of(b, layer, 0),
                          cache_of(b, layer, 1),
                          b->step.positions,
                          b->step.seq_of,
                          b->step.block_tables,
                          b->attn,
                          shape->n_heads,
                          shape->n_kv_heads,
                          shape->head_dim,
                          s->max_blocks,
                          1.0f / sqrtf((float)shape->head_dim)};
    attention_kernel<<<dim3((unsigned)s->n_tokens, (unsigned)shape->n_heads), THREADS, 0,
                       b->stream>>>(p);
    cuda_good(b, cudaGetLastError(), "attention");
}
