/* backend.cpp - what the emulated backend has in place of gemm.cu, and what tests do to it. */
#include "control.h"
#include "ops/cuda/cuda_internal.h"
#include "runtime.h"

/* wgmma, clusters and their barriers are not emulated: products are matrix.cu's for all numbers of
 * tokens, as on the GPUs before Hopper. */
bool has_gemm(const struct backend *)
{
    return false;
}

bool gemm_run(struct backend *, const struct product *)
{
    return false;
}

static void poison(void *p, size_t bytes)
{
    memset(p, 0xFF, bytes);
}

void emulator_poison_buffers(struct backend *b, bool inputs)
{
    const struct shape *s = &b->shape;
    size_t tokens = (size_t)b->limits.max_tokens, logits = (size_t)b->limits.max_logits,
           q = (size_t)(s->n_heads * s->head_dim), kv = (size_t)(s->n_kv_heads * s->head_dim),
           rows = tokens > logits ? tokens : logits, panels = (size_t)b->hidden_panels;
    cudaDeviceSynchronize();
    poison(b->x, tokens * (size_t)s->hidden * sizeof(float));
    poison(b->squares, rows * panels * sizeof(float));
    poison(b->head_squares, rows * panels * sizeof(float));
    poison(b->qkv, tokens * (q + 2 * kv) * sizeof(float));
    poison(b->q, tokens * q * sizeof(bf16));
    poison(b->logits, logits * (size_t)s->vocab * sizeof(float));
    poison(b->attention.scratch, (size_t)b->attention.scratch_floats * sizeof(float));
    for (const struct act *a : {&b->fragments.normed, &b->fragments.attn, &b->fragments.act})
        if (inputs) poison(a->data, (size_t)(a->capacity * a->padded) * sizeof(bf16));
}

void emulator_poison_cache(struct backend *b, const int32_t *used)
{
    size_t slot = (size_t)b->shape.head_dim;
    cudaDeviceSynchronize();
    for (int32_t layer = 0; layer < b->shape.n_layers; layer++)
        for (int values = 0; values < 2; values++)
            for (int64_t i = 0; i < (int64_t)b->limits.n_blocks * b->shape.n_kv_heads; i++) {
                int32_t n = used[i / b->shape.n_kv_heads];
                bf16 *at = cache_of(b, layer, values) + i * KV_BLOCK * (int64_t)slot;
                poison(at + (size_t)n * slot, (size_t)(KV_BLOCK - n) * slot * sizeof(bf16));
            }
}
