/*
 * attention.cu - paged grouped-query attention, decode and prefill alike: a block for one query
 * head of one token. Keys are taken in chunks of CHUNK_KEYS at absolute positions; the chunks'
 * results merge in ascending order.
 */
#include <float.h>

#include "ops/cuda/cuda_internal.h"

enum { THREADS = 128, MAX_HEAD = 256, KEYS_A_THREAD = CHUNK_KEYS / THREADS };

struct attention {
    const bf16 *q, *keys, *values;
    const int32_t *positions, *seq_of, *block_tables;
    bf16 *out;
    int64_t out_stride;
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

static __device__ float dot(const float *q, const bf16 *key, int n)
{
    float sum = 0;
    for (int d = 0; d < n; d += 2) {
        float2 k = __bfloat1622float2(*(const __nv_bfloat162 *)(key + d));
        sum = fmaf(q[d], k.x, sum);
        sum = fmaf(q[d + 1], k.y, sum);
    }
    return sum;
}

static __global__ void __launch_bounds__(THREADS) attention_kernel(struct attention p)
{
    __shared__ float q[MAX_HEAD], weights[CHUNK_KEYS];
    __shared__ int64_t rows[CHUNK_KEYS]; /* where each key's row begins */
    int token = blockIdx.x, head = blockIdx.y, kv_head = head / (p.n_heads / p.n_kv_heads);
    int n_keys = p.positions[token] + 1;
    const int32_t *table = p.block_tables + (int64_t)p.seq_of[token] * p.max_blocks;
    for (int d = threadIdx.x; d < p.head_dim; d += THREADS)
        q[d] = __bfloat162float(p.q[((int64_t)token * p.n_heads + head) * p.head_dim + d]);
    float max = -FLT_MAX, sum = 0, out[MAX_HEAD / THREADS] = {};
    for (int first = 0; first < n_keys; first += CHUNK_KEYS) {
        int n = min(n_keys - first, (int)CHUNK_KEYS);
        float score[KEYS_A_THREAD], highest = -FLT_MAX, total = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += THREADS) {
            int key = first + i;
            rows[i] = (((int64_t)table[key / KV_BLOCK] * p.n_kv_heads + kv_head) * KV_BLOCK +
                       key % KV_BLOCK) *
                      p.head_dim;
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < KEYS_A_THREAD; j++) {
            int i = threadIdx.x + j * THREADS;
            score[j] = i < n ? dot(q, p.keys + rows[i], p.head_dim) * p.scale : -FLT_MAX;
            highest = score[j] != score[j] ? score[j] : fmaxf(highest, score[j]);
        }
        highest = block_reduce<true>(highest);
#pragma unroll
        for (int j = 0; j < KEYS_A_THREAD; j++) {
            int i = threadIdx.x + j * THREADS;
            float w = i < n ? expf(score[j] - highest) : 0.0f;
            weights[i] = w;
            total += w;
        }
        total = block_reduce<false>(total); /* also a barrier for weights */
        float new_max = fmaxf(max, highest), old_scale = first ? expf(max - new_max) : 0.0f,
              scale = expf(highest - new_max);
#pragma unroll
        for (int k = 0; k < MAX_HEAD / THREADS; k++) {
            int d = threadIdx.x + k * THREADS;
            if (d >= p.head_dim) break;
            float part = 0;
            for (int i = 0; i < n; i++)
                part = fmaf(weights[i], __bfloat162float(p.values[rows[i] + d]), part);
            out[k] = out[k] * old_scale + part * scale;
        }
        sum = sum * old_scale + total * scale;
        max = new_max;
    }
#pragma unroll
    for (int k = 0; k < MAX_HEAD / THREADS; k++) {
        int d = threadIdx.x + k * THREADS;
        if (d < p.head_dim)
            p.out[token * p.out_stride + head * p.head_dim + d] = __float2bfloat16(out[k] / sum);
    }
}

void attention_run(struct backend *b, const struct step *s, int32_t layer)
{
    const struct shape *shape = &b->shape;
    int64_t width = (int64_t)shape->n_heads * shape->head_dim;
    struct attention p = {b->q,
                          cache_of(b, layer, 0),
                          cache_of(b, layer, 1),
                          b->step.positions,
                          b->step.seq_of,
                          b->step.block_tables,
                          b->attn,
                          padded_columns(width),
                          shape->n_heads,
                          shape->n_kv_heads,
                          shape->head_dim,
                          s->max_blocks,
                          1.0f / sqrtf((float)shape->head_dim)};
    attention_kernel<<<dim3((unsigned)s->n_tokens, (unsigned)shape->n_heads), THREADS, 0,
                       b->stream>>>(p);
    cuda_good(b, cudaGetLastError(), "attention");
}
