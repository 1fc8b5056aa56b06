/* poison.cu - see poison.h. It knows the backend's memory, and calls nothing of the backend. */
#include "poison.h"

#include "ops/cuda/launch.cuh"

static bool poison(void *p, size_t bytes)
{
    return bytes == 0 || cudaMemset(p, 0xFF, bytes) == cudaSuccess;
}

/* What has been started is done. */
static bool settle(const struct backend *b)
{
    return cudaSetDevice(b->device) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess;
}

static bool poison_inputs(const struct act_set *set)
{
    bool good = true;
    for (const struct act *a : {&set->normed, &set->attn, &set->act})
        if (a->data) good &= poison(a->data, (size_t)(a->capacity * a->padded) * sizeof(bf16));
    return good;
}

bool poison_buffers(struct backend *b, bool inputs)
{
    const struct shape *s = &b->shape;
    size_t tokens = (size_t)b->limits.max_tokens, logits = (size_t)b->limits.max_logits,
           q = (size_t)(s->n_heads * s->head_dim), kv = (size_t)(s->n_kv_heads * s->head_dim),
           rows = tokens > logits ? tokens : logits, panels = (size_t)b->hidden_panels;
    return settle(b) && poison(b->x, tokens * (size_t)s->hidden * sizeof(float)) &&
           poison(b->squares, rows * panels * sizeof(float)) &&
           poison(b->head_squares, rows * panels * sizeof(float)) &&
           poison(b->qkv, tokens * (q + 2 * kv) * sizeof(float)) &&
           poison(b->q, tokens * q * sizeof(bf16)) &&
           poison(b->logits, logits * (size_t)s->vocab * sizeof(float)) &&
           poison(b->attention.scratch, (size_t)b->attention.scratch_floats * sizeof(float)) &&
           (!inputs || (poison_inputs(&b->fragments) && poison_inputs(&b->cores))) && settle(b);
}

/* Grid (blocks, 2 layers, kv heads). */
static __global__ void cache_kernel(uint16_t *cache, const int32_t *used, int32_t head_dim)
{
    int64_t head = ((int64_t)blockIdx.y * gridDim.x + blockIdx.x) * gridDim.z + blockIdx.z;
    uint16_t *slots = cache + head * KV_BLOCK * head_dim;
    for (int32_t i = used[blockIdx.x] * head_dim + (int32_t)threadIdx.x; i < KV_BLOCK * head_dim;
         i += (int32_t)blockDim.x)
        slots[i] = 0xFFFF;
}

bool poison_cache(struct backend *b, const int32_t *used)
{
    const struct shape *s = &b->shape;
    size_t bytes = (size_t)b->limits.n_blocks * sizeof *used;
    int32_t *there = NULL;
    dim3 grid((unsigned)b->limits.n_blocks, 2 * (unsigned)s->n_layers, (unsigned)s->n_kv_heads);
    bool good = settle(b) && cudaMalloc((void **)&there, bytes) == cudaSuccess &&
                cudaMemcpy(there, used, bytes, cudaMemcpyHostToDevice) == cudaSuccess &&
                launch_plain(NULL, cache_kernel, grid, 128, (uint16_t *)b->cache,
                             (const int32_t *)there, s->head_dim) == cudaSuccess &&
                settle(b);
    return cudaFree(there) == cudaSuccess && good;
}
