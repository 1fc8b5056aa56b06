/* rows.cu - what is done row by row: embedding, RMSNorm, RoPE with the cache store, SiLU-mul. */
#include "ops/cuda/cuda_internal.h"

enum { THREADS = 256 };

/* Sum over a block in a fixed order; every thread gets it. */
static __device__ float block_sum(float v)
{
    __shared__ float warps[THREADS / 32];
    for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(~0u, v, offset);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = 0;
    for (int w = 0; w < (int)blockDim.x / 32; w++) sum += warps[w];
    return sum;
}

static __global__ void embed_kernel(const bf16 *embedding, const int32_t *ids, int32_t hidden,
                                    float *x)
{
    const bf16 *row = embedding + (int64_t)ids[blockIdx.x] * hidden;
    for (int i = threadIdx.x; i < hidden; i += blockDim.x)
        x[(int64_t)blockIdx.x * hidden + i] = __bfloat162float(row[i]);
}

void rows_embed(struct backend *b, const struct matrix *embedding, int32_t n)
{
    embed_kernel<<<(unsigned)n, THREADS, 0, b->stream>>>(embedding->data, b->step.token_ids,
                                                         b->shape.hidden, b->x);
    cuda_good(b, cudaGetLastError(), "the embedding");
}

static __global__ void norm_kernel(const float *x, const float *weight, const int32_t *row_of,
                                   int32_t hidden, int64_t padded, float eps, bf16 *out)
{
    const float *row = x + (int64_t)(row_of ? row_of[blockIdx.x] : blockIdx.x) * hidden;
    float sum = 0;
    for (int i = threadIdx.x; i < hidden; i += blockDim.x) sum = fmaf(row[i], row[i], sum);
    float scale = 1.0f / sqrtf(block_sum(sum) / (float)hidden + eps);
    for (int i = threadIdx.x; i < padded; i += blockDim.x)
        out[blockIdx.x * padded + i] =
            __float2bfloat16(i < hidden ? row[i] * scale * weight[i] : 0.0f);
}

void rows_norm(struct backend *b, const struct vector *weight, const int32_t *row_of, int32_t n)
{
    int64_t padded = padded_columns(b->shape.hidden);
    norm_kernel<<<(unsigned)n, THREADS, 0, b->stream>>>(b->x, weight->data, row_of, b->shape.hidden,
                                                        padded, b->shape.norm_eps, b->normed);
    cuda_good(b, cudaGetLastError(), "RMSNorm");
}

struct rope_store {
    const float *qkv, *rope, *q_norm, *k_norm;
    const int32_t *slot_mapping;
    bf16 *q, *keys, *values;
    int32_t n_heads, n_kv_heads, head_dim;
    float eps;
};

/* A warp for one head of one token: grid (n_tokens, n_heads + 2 n_kv_heads). */
static __global__ void rope_store_kernel(struct rope_store p)
{
    int token = blockIdx.x, head = blockIdx.y, lane = threadIdx.x, half = p.head_dim / 2;
    int heads = p.n_heads + p.n_kv_heads;
    const float *in = p.qkv + ((int64_t)token * (heads + p.n_kv_heads) + head) * p.head_dim;
    const float *row = p.rope + (int64_t)token * p.head_dim,
                *norm = head < p.n_heads ? p.q_norm : p.k_norm;
    int slot = p.slot_mapping[token];
    int kv_head = head < heads ? head - p.n_heads : head - heads;
    /* cache: [block][kv head][16][head_dim] */
    int64_t at =
        (((int64_t)(slot / KV_BLOCK) * p.n_kv_heads + kv_head) * KV_BLOCK + slot % KV_BLOCK) *
        p.head_dim;
    if (head >= heads) { /* a value: stored as it is */
        for (int i = lane; i < p.head_dim; i += 32) p.values[at + i] = __float2bfloat16(in[i]);
        return;
    }
    float scale = 1;
    if (norm) {
        float sum = 0;
        for (int i = lane; i < p.head_dim; i += 32) sum = fmaf(in[i], in[i], sum);
        for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
        scale = 1.0f / sqrtf(sum / (float)p.head_dim + p.eps);
    }
    bf16 *out =
        head < p.n_heads ? p.q + ((int64_t)token * p.n_heads + head) * p.head_dim : p.keys + at;
    for (int j = lane; j < half; j += 32) {
        float a = in[j], b = in[half + j], c = row[j], s = row[half + j];
        if (norm) a = a * scale * norm[j], b = b * scale * norm[half + j];
        out[j] = __float2bfloat16(a * c - b * s);
        out[half + j] = __float2bfloat16(b * c + a * s);
    }
}

void rows_rope_store(struct backend *b, int32_t layer, const struct layer *w, int32_t n)
{
    const struct shape *s = &b->shape;
    struct rope_store p = {b->qkv,
                           b->step.rope,
                           w->q_norm ? w->q_norm->data : NULL,
                           w->k_norm ? w->k_norm->data : NULL,
                           b->step.slot_mapping,
                           b->q,
                           cache_of(b, layer, 0),
                           cache_of(b, layer, 1),
                           s->n_heads,
                           s->n_kv_heads,
                           s->head_dim,
                           s->norm_eps};
    rope_store_kernel<<<dim3((unsigned)n, (unsigned)(s->n_heads + 2 * s->n_kv_heads)), 32, 0,
                        b->stream>>>(p);
    cuda_good(b, cudaGetLastError(), "RoPE and the cache store");
}

static __global__ void silu_kernel(const float *gate_up, int32_t n, int64_t padded, bf16 *out)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= padded) return;
    const float *gate = gate_up + (int64_t)blockIdx.y * 2 * n, *up = gate + n;
    float value = i < n ? gate[i] / (1.0f + expf(-gate[i])) * up[i] : 0.0f;
    out[blockIdx.y * padded + i] = __float2bfloat16(value);
}

void rows_silu_mul(struct backend *b, int32_t n)
{
    int64_t padded = padded_columns(b->shape.intermediate);
    dim3 grid((unsigned)((padded + THREADS - 1) / THREADS), (unsigned)n);
    silu_kernel<<<grid, THREADS, 0, b->stream>>>(b->gate_up, b->shape.intermediate, padded, b->act);
    cuda_good(b, cudaGetLastError(), "SiLU-mul");
}
