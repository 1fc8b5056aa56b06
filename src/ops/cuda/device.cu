/*
 * device.cu - the CUDA backend's table of operations: the device and its stream, all memory, the
 * way in and out. Everything is enqueued on one stream; `finish` waits for it.
 */
#include <stdlib.h>
#include <string.h>

#include "ops/cuda/cuda_internal.h"

static int selected; /* the device that linnet_cuda_ops was asked for last */

/* ---- memory -----------------------------------------------------------------------------------
 */

static void cuda_close(struct backend *b)
{
    if (!b) return;
    cuda_unload(b);
    void *device[] = {b->cache, b->x,       b->normed, b->qkv,    b->q,
                      b->attn,  b->gate_up, b->act,    b->logits, b->step_memory};
    for (size_t i = 0; i < sizeof device / sizeof *device; i++) cudaFree(device[i]);
    cudaFreeHost(b->host_logits);
    cudaFreeHost(b->host_step);
    for (int i = 0; i <= MAX_GRAPH; i++)
        if (b->graphs[i].exec) cudaGraphExecDestroy(b->graphs[i].exec);
    if (b->stream) cudaStreamDestroy(b->stream);
    free(b);
}

static int64_t cuda_cache_bytes(const struct shape *s, int32_t n_blocks)
{
    return 2 * (int64_t)sizeof(bf16) * s->n_layers * n_blocks * KV_BLOCK * s->n_kv_heads *
           s->head_dim;
}

/* Where the parts of a step lie, one after another; returns the bytes of all. */
static size_t lay_step(const struct shape *s, const struct limits *l, char *memory,
                       struct device_step *out)
{
    size_t tokens = (size_t)l->max_tokens,
           blocks = (size_t)((l->max_context + KV_BLOCK - 1) / KV_BLOCK);
    size_t counts[] = {
        tokens, tokens, tokens, tokens, (size_t)l->max_seqs * blocks, (size_t)l->max_logits};
    int32_t **parts[] = {&out->token_ids, &out->positions,    &out->slot_mapping,
                         &out->seq_of,    &out->block_tables, &out->logit_rows};
    size_t at = 0;
    for (int i = 0; i < 6; i++) {
        *parts[i] = (int32_t *)(memory + at);
        at += counts[i] * sizeof(int32_t);
    }
    out->rope = (float *)(memory + at);
    return at + tokens * (size_t)s->head_dim * sizeof(float);
}

struct request {
    void **memory;
    size_t bytes;
};

static int list_buffers(struct backend *b, struct request out[9])
{
    const struct shape *s = &b->shape;
    size_t tokens = (size_t)b->limits.max_tokens, q = (size_t)(s->n_heads * s->head_dim),
           kv = (size_t)(s->n_kv_heads * s->head_dim);
    size_t rows = tokens > (size_t)b->limits.max_logits ? tokens : (size_t)b->limits.max_logits;
    const struct request list[9] = {
        {(void **)&b->cache, (size_t)cuda_cache_bytes(s, b->limits.n_blocks)},
        {(void **)&b->x, tokens * (size_t)s->hidden * sizeof(float)},
        {(void **)&b->normed, rows * (size_t)padded_columns(s->hidden) * sizeof(bf16)},
        {(void **)&b->qkv, tokens * (q + 2 * kv) * sizeof(float)},
        {(void **)&b->q, tokens * q * sizeof(bf16)},
        {(void **)&b->attn, tokens * (size_t)padded_columns((int64_t)q) * sizeof(bf16)},
        {(void **)&b->gate_up, tokens * 2 * (size_t)s->intermediate * sizeof(float)},
        {(void **)&b->act, tokens * (size_t)padded_columns(s->intermediate) * sizeof(bf16)},
        {(void **)&b->logits, (size_t)b->limits.max_logits * (size_t)s->vocab * sizeof(float)}};
    memcpy(out, list, sizeof list);
    return 9;
}

static int64_t cuda_buffer_bytes(const struct shape *shape, const struct limits *limits,
                                 int32_t n_threads)
{
    (void)n_threads;
    struct backend b = {};
    struct device_step step;
    struct request list[9];
    b.shape = *shape;
    b.limits = *limits;
    size_t bytes = lay_step(shape, limits, NULL, &step);
    for (int i = 1, n = list_buffers(&b, list); i < n; i++)
        bytes += list[i].bytes; /* 0 is the cache */
    return (int64_t)bytes;
}

static bool reserve(struct backend *b)
{
    struct request list[9];
    for (int i = 0, n = list_buffers(b, list); i < n; i++) {
        if (!cuda_good(b, cudaMalloc(list[i].memory, list[i].bytes),
                       i ? "activations" : "the cache"))
            return false;
        /* zeros where nothing is ever written: padding of rows, slots never filled */
        if (!cuda_good(b, cudaMemsetAsync(*list[i].memory, 0, list[i].bytes, b->stream),
                       "clearing memory"))
            return false;
    }
    b->step_bytes = lay_step(&b->shape, &b->limits, NULL, &b->step);
    if (!cuda_good(b, cudaMalloc(&b->step_memory, b->step_bytes), "a step") ||
        !cuda_good(b, cudaMallocHost(&b->host_step, b->step_bytes), "a step") ||
        !cuda_good(b, cudaMallocHost((void **)&b->host_logits, list[8].bytes), "logits"))
        return false;
    lay_step(&b->shape, &b->limits, (char *)b->step_memory, &b->step);
    return true;
}

static linnet_status cuda_open(const struct shape *shape, const struct limits *limits,
                               struct pool *pool, struct backend **out, linnet_error *err)
{
    if (shape->head_dim > 256 || shape->head_dim % 2)
        return error_set(err, LINNET_UNSUPPORTED,
                         "head_dim %d: the CUDA backend takes even numbers up to 256",
                         shape->head_dim);
    struct backend *b = (struct backend *)mem_new(1, sizeof *b);
    if (!b) return error_memory(err, "the CUDA backend", sizeof *b);
    b->shape = *shape;
    b->limits = *limits;
    b->pool = pool;
    b->device = selected;
    cuda_good(b, cudaSetDevice(b->device),
              "choosing the device"); /* a thread's choice is its own */
    if (!cuda_good(b, cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking),
                   "opening a stream") ||
        !reserve(b)) {
        linnet_status status = cuda_failure(b, err);
        cuda_close(b);
        return status;
    }
    *out = b;
    return LINNET_OK;
}

/* ---- the operations
 * ------------------------------------------------------------------------------ */

/* The step's numbers go over in one copy. */
static void send_step(struct backend *b, const struct step *s, const float *rope)
{
    struct device_step host;
    lay_step(&b->shape, &b->limits, (char *)b->host_step, &host);
    size_t tokens = (size_t)s->n_tokens * sizeof(int32_t);
    size_t rope_bytes = (size_t)s->n_tokens * (size_t)b->shape.head_dim * sizeof(float);
    memcpy(host.token_ids, s->token_ids, tokens);
    memcpy(host.positions, s->positions, tokens);
    memcpy(host.slot_mapping, s->slot_mapping, tokens);
    memcpy(host.block_tables, s->block_tables,
           (size_t)s->n_seqs * (size_t)s->max_blocks * sizeof(int32_t));
    memcpy(host.logit_rows, s->logit_rows, (size_t)s->n_logits * sizeof(int32_t));
    memcpy(host.rope, rope, rope_bytes);
    for (int32_t seq = 0; seq < s->n_seqs; seq++)
        for (int32_t t = s->query_start[seq]; t < s->query_start[seq + 1]; t++)
            host.seq_of[t] = seq;
    size_t bytes = (size_t)((char *)host.rope - (char *)b->host_step) + rope_bytes;
    cuda_good(
        b, cudaMemcpyAsync(b->step_memory, b->host_step, bytes, cudaMemcpyHostToDevice, b->stream),
        "sending a step");
}

/*
 * A step in which every token wants logits (decoding) is recorded once for each of its shapes and
 * replayed from then on: all that changes between two such steps lies in the buffers of send_step.
 */
static void cuda_begin(struct backend *b, const struct step *s, const float *rope, bool whole)
{
    cuda_good(b, cudaSetDevice(b->device), "choosing the device");
    send_step(b, s, rope);
    b->n_logits = s->n_logits;
    b->graph = NULL;
    bool recordable =
        whole && !b->limits.eager && s->n_tokens == s->n_logits && s->n_tokens <= MAX_GRAPH;
    if (!recordable || b->failed != cudaSuccess) return;
    b->graph = &b->graphs[s->n_tokens];
    if (b->graph->exec && b->graph->max_blocks == s->max_blocks) return;
    if (b->graph->exec) cudaGraphExecDestroy(b->graph->exec);
    *b->graph = (struct graph){};
    b->graph->max_blocks = s->max_blocks;
    b->recording = cuda_good(b, cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal),
                             "recording a step");
}

/* True if the operation is already in the graph that finish will launch. */
static bool replayed(const struct backend *b)
{
    return b->graph && b->graph->exec;
}

static void cuda_embed(struct backend *b, const struct step *s, const struct matrix *embedding)
{
    if (!replayed(b)) rows_embed(b, embedding, s->n_tokens);
}

static void cuda_qkv(struct backend *b, const struct step *s, int32_t layer, const struct layer *w)
{
    if (replayed(b)) return;
    rows_norm(b, w->input_norm, NULL, s->n_tokens);
    matrix_product(b, w->qkv, b->normed, s->n_tokens, b->qkv, w->qkv_bias, false);
    rows_rope_store(b, layer, w, s->n_tokens);
}

static void cuda_attention(struct backend *b, const struct step *s, int32_t layer)
{
    if (!replayed(b)) attention_run(b, s, layer);
}

static void cuda_o_proj(struct backend *b, const struct step *s, const struct layer *w)
{
    if (!replayed(b)) matrix_product(b, w->o_proj, b->attn, s->n_tokens, b->x, w->o_bias, true);
}

static void cuda_gate_up(struct backend *b, const struct step *s, const struct layer *w)
{
    if (replayed(b)) return;
    rows_norm(b, w->post_norm, NULL, s->n_tokens);
    matrix_product(b, w->gate_up, b->normed, s->n_tokens, b->gate_up, NULL, false);
    rows_silu_mul(b, s->n_tokens);
}

static void cuda_down(struct backend *b, const struct step *s, const struct layer *w)
{
    if (!replayed(b)) matrix_product(b, w->down, b->act, s->n_tokens, b->x, NULL, true);
}

static void cuda_head(struct backend *b, const struct step *s, const struct vector *norm,
                      const struct matrix *w)
{
    if (replayed(b)) return;
    rows_norm(b, norm, b->step.logit_rows, s->n_logits);
    matrix_product(b, w, b->normed, s->n_logits, b->logits, NULL, false);
}

static void end_recording(struct backend *b)
{
    cudaGraph_t graph = NULL;
    b->recording = false;
    if (!cuda_good(b, cudaStreamEndCapture(b->stream, &graph), "recording a step")) return;
    cuda_good(b, cudaGraphInstantiate(&b->graph->exec, graph, 0), "recording a step");
    cudaGraphDestroy(graph);
}

static linnet_status cuda_finish(struct backend *b, linnet_error *err)
{
    size_t bytes = (size_t)b->n_logits * (size_t)b->shape.vocab * sizeof(float);
    if (b->recording) end_recording(b);
    if (replayed(b)) cuda_good(b, cudaGraphLaunch(b->graph->exec, b->stream), "a step");
    if (bytes)
        cuda_good(
            b, cudaMemcpyAsync(b->host_logits, b->logits, bytes, cudaMemcpyDeviceToHost, b->stream),
            "fetching logits");
    cuda_good(b, cudaStreamSynchronize(b->stream), "a step");
    return cuda_failure(b, err);
}

/* ---- looking at results
 * ---------------------------------------------------------------------------- */

static const float *cuda_logits(struct backend *b, int32_t i)
{
    return b->host_logits + (int64_t)i * b->shape.vocab;
}

static void read_bf16(struct backend *b, const bf16 *from, int64_t n, float *out)
{
    uint16_t part[512];
    for (int64_t at = 0; at < n; at += 512) {
        int64_t count = n - at < 512 ? n - at : 512;
        if (!cuda_good(b, cudaMemcpy(part, from + at, (size_t)count * 2, cudaMemcpyDeviceToHost),
                       "reading a buffer"))
            return;
        for (int64_t i = 0; i < count; i++) out[at + i] = f32_from_bf16(part[i]);
    }
}

static void cuda_read_buffer(struct backend *b, enum buffer which, int32_t row, float *out)
{
    const struct shape *s = &b->shape;
    int64_t q = (int64_t)s->n_heads * s->head_dim;
    cuda_good(b, cudaStreamSynchronize(b->stream), "a step");
    switch (which) {
    case BUFFER_X:
        cuda_good(b,
                  cudaMemcpy(out, b->x + (int64_t)row * s->hidden,
                             (size_t)s->hidden * sizeof(float), cudaMemcpyDeviceToHost),
                  "reading a buffer");
        return;
    case BUFFER_Q: read_bf16(b, b->q + row * q, q, out); return;
    case BUFFER_ATTN: read_bf16(b, b->attn + row * padded_columns(q), q, out); return;
    case BUFFER_ACT:
        read_bf16(b, b->act + row * padded_columns(s->intermediate), s->intermediate, out);
        return;
    case BUFFER_LOGITS:
        cuda_good(b,
                  cudaMemcpy(out, b->logits + (int64_t)row * s->vocab,
                             (size_t)s->vocab * sizeof(float), cudaMemcpyDeviceToHost),
                  "reading a buffer");
        return;
    }
}

static void cuda_read_kv(struct backend *b, int32_t layer, int32_t slot, float *k, float *v)
{
    const struct shape *s = &b->shape;
    cuda_good(b, cudaStreamSynchronize(b->stream), "a step");
    for (int32_t h = 0; h < s->n_kv_heads; h++) {
        int64_t at =
            (((int64_t)(slot / KV_BLOCK) * s->n_kv_heads + h) * KV_BLOCK + slot % KV_BLOCK) *
            s->head_dim;
        read_bf16(b, cache_of(b, layer, 0) + at, s->head_dim, k + h * s->head_dim);
        read_bf16(b, cache_of(b, layer, 1) + at, s->head_dim, v + h * s->head_dim);
    }
}

/* ---- bandwidth ---------------------------------------------------------------------------- */

static __global__ void read_kernel(const uint4 *data, int64_t n, uint32_t *out)
{
    int64_t stride = (int64_t)gridDim.x * blockDim.x;
    uint32_t sum = 0;
#pragma unroll 4
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
        uint4 v = data[i];
        sum += v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x9E3779B9u) *out = sum; /* never, but the compiler cannot know */
}

static double cuda_read_bandwidth(void)
{
    const size_t bytes = (size_t)2 << 30;
    void *data = NULL;
    cudaEvent_t begin, end;
    float best = 0;
    if (cudaSetDevice(selected) != cudaSuccess || cudaMalloc(&data, bytes) != cudaSuccess) return 0;
    cudaMemset(data, 1, bytes);
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    for (int pass = 0; pass < 10; pass++) {
        float milliseconds = 0;
        cudaEventRecord(begin);
        read_kernel<<<132 * 16, 512>>>((const uint4 *)data, (int64_t)(bytes / 16),
                                       (uint32_t *)data);
        cudaEventRecord(end);
        if (cudaEventSynchronize(end) != cudaSuccess ||
            cudaEventElapsedTime(&milliseconds, begin, end) != cudaSuccess)
            break;
        if (best == 0 || milliseconds < best) best = milliseconds;
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaFree(data);
    return best > 0 ? (double)bytes / (best * 1e-3) : 0;
}

/* ---- the way in
 * ------------------------------------------------------------------------------------ */

static const struct ops table = {
    "cuda",
    0.0017, /* bf16 */
    cuda_open,
    cuda_close,
    cuda_load_matrix,
    cuda_load_embedding,
    cuda_load_vector,
    cuda_loaded,
    cuda_matrix_bytes,
    cuda_embedding_bytes,
    cuda_cache_bytes,
    cuda_buffer_bytes,
    cuda_begin,
    cuda_embed,
    cuda_qkv,
    cuda_attention,
    cuda_o_proj,
    cuda_gate_up,
    cuda_down,
    cuda_head,
    cuda_finish,
    cuda_read_bandwidth,
    cuda_logits,
    cuda_read_buffer,
    cuda_read_kv,
};

/* The one symbol of the shared object; see src/engine/device.c. */
extern "C" __attribute__((visibility("default"))) const struct ops *
linnet_cuda_ops(const struct ops_cuda_request *request, char *text, size_t text_size,
                int64_t *free_bytes, linnet_error *err)
{
    if (request->abi != OPS_ABI) {
        error_set(err, LINNET_DEVICE,
                  "liblinnet_cuda.so is of another version than linnet: install both together");
        return NULL;
    }
    if (cuda_find(request->index, text, text_size, free_bytes, err) != LINNET_OK) return NULL;
    selected = request->index;
    return &table;
}
