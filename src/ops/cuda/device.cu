/*
 * device.cu - the CUDA backend's table of operations: the device and its stream, all memory, the
 * way in and out. Everything is enqueued on one stream; `finish` waits for it.
 */
#include <stdlib.h>
#include <string.h>

#include "ops/cuda/cuda_internal.h"

static int selected; /* the device that linnet_cuda_ops was asked for last */

static int capability_of(int device)
{
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    return 10 * major + minor;
}

/* ---- memory -----------------------------------------------------------------------------------
 */

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

struct buffer_request {
    void **memory;
    size_t bytes;
};

enum { MOST_BUFFERS = 16 };

/* Whether gemm.cu works here. */
static bool has_gemm(const struct backend *b)
{
    return false && b->capability == 90;
}

/* Tokens of the two orders of inputs. */
static int64_t fragment_tokens(const struct backend *b, int64_t rows)
{
    return has_gemm(b) ? ACT_TOKENS : (rows + ACT_TOKENS - 1) / ACT_TOKENS * ACT_TOKENS;
}

static int64_t core_tokens(const struct backend *b, int64_t rows)
{
    return has_gemm(b) ? (rows + ACT_TOKENS - 1) / ACT_TOKENS * ACT_TOKENS : 0;
}

static int add_acts(struct act_set *set, int64_t capacity, bool cores, const struct shape *s,
                    struct buffer_request *out)
{
    struct act *acts[3] = {&set->normed, &set->attn, &set->act};
    int64_t columns[3] = {s->hidden, (int64_t)s->n_heads * s->head_dim, s->intermediate};
    for (int i = 0; i < 3; i++) {
        acts[i]->padded = padded_columns(columns[i]);
        acts[i]->capacity = capacity;
        acts[i]->cores = cores;
        out[i] = (struct buffer_request){(void **)&acts[i]->data,
                                         (size_t)(capacity * acts[i]->padded) * sizeof(bf16)};
    }
    return 3;
}

/* The first is the cache, the last the logits. */
static int list_buffers(struct backend *b, struct buffer_request out[MOST_BUFFERS])
{
    const struct shape *s = &b->shape;
    size_t tokens = (size_t)b->limits.max_tokens, q = (size_t)(s->n_heads * s->head_dim),
           kv = (size_t)(s->n_kv_heads * s->head_dim), logits = (size_t)b->limits.max_logits;
    size_t rows = tokens > logits ? tokens : logits, panels = (size_t)panel_count(s->hidden, false);
    size_t widest = (size_t)s->intermediate > q ? (size_t)s->intermediate : q;
    int n = 0;
    b->hidden_panels = (int32_t)panels;
    out[n++] = (struct buffer_request){(void **)&b->cache,
                                       (size_t)cuda_cache_bytes(s, b->limits.n_blocks)};
    n += add_acts(&b->fragments, fragment_tokens(b, (int64_t)rows), false, s, out + n);
    n += add_acts(&b->cores, core_tokens(b, (int64_t)rows), true, s, out + n);
    const struct buffer_request list[] = {
        {(void **)&b->x, tokens * (size_t)s->hidden * sizeof(float)},
        {(void **)&b->squares, rows * panels * sizeof(float)},
        {(void **)&b->head_squares, rows * panels * sizeof(float)},
        {(void **)&b->qkv, tokens * (q + 2 * kv) * sizeof(float)},
        {(void **)&b->q, tokens * q * sizeof(bf16)},
        {(void **)&b->row, widest * sizeof(float)},
        {(void **)&b->chosen, logits * sizeof(struct chosen)},
        {(void **)&b->logits, logits * (size_t)s->vocab * sizeof(float)}};
    memcpy(out + n, list, sizeof list);
    return n + (int)(sizeof list / sizeof *list);
}

static void cuda_close(struct backend *b)
{
    if (!b) return;
    cuda_unload(b);
    struct buffer_request list[MOST_BUFFERS];
    for (int i = 0, n = list_buffers(b, list); i < n; i++) cudaFree(*list[i].memory);
    cudaFree(b->step_memory);
    decode_close(b);
    free(b->model.layers);
    cudaFreeHost(b->host_logits);
    cudaFreeHost(b->host_step);
    for (int i = 0; i <= MAX_GRAPH; i++)
        if (b->graphs[i].exec) cudaGraphExecDestroy(b->graphs[i].exec);
    if (b->stream) cudaStreamDestroy(b->stream);
    free(b);
}

static int64_t cuda_buffer_bytes(const struct shape *shape, const struct limits *limits,
                                 int32_t n_threads)
{
    (void)n_threads;
    struct backend b = {};
    struct device_step step;
    struct buffer_request list[MOST_BUFFERS];
    b.shape = *shape;
    b.limits = *limits;
    b.capability = capability_of(selected);
    size_t bytes = lay_step(shape, limits, NULL, &step) + decode_bytes(shape, limits);
    for (int i = 1, n = list_buffers(&b, list); i < n; i++)
        bytes += list[i].bytes; /* 0 is the cache */
    return (int64_t)bytes;
}

static bool reserve(struct backend *b)
{
    struct buffer_request list[MOST_BUFFERS];
    int n = list_buffers(b, list);
    b->model.layers =
        (const struct layer **)mem_new((size_t)b->shape.n_layers, sizeof *b->model.layers);
    if (!b->model.layers) return cuda_good(b, cudaErrorMemoryAllocation, "the layers");
    for (int i = 0; i < n; i++) {
        if (list[i].bytes == 0) continue;
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
        !cuda_good(b, cudaMallocHost((void **)&b->host_logits, list[n - 1].bytes), "logits"))
        return false;
    lay_step(&b->shape, &b->limits, (char *)b->step_memory, &b->step);
    return decode_open(b);
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
    b->capability = capability_of(selected);
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

/* Whether this step's inputs of products lie in cores. */
static bool in_cores(const struct backend *b, int32_t rows)
{
    return b->cores.normed.capacity > 0 && rows > 8;
}

/*
 * A step in which every token wants logits (decoding) is recorded once for each of its shapes and
 * replayed from then on: all that changes between two such steps lies in the buffers of send_step.
 * Hopper's steps of up to 8 sequences are one kernel, which needs no recording.
 */
static void cuda_begin(struct backend *b, const struct step *s, const float *rope, bool whole)
{
    cuda_good(b, cudaSetDevice(b->device), "choosing the device");
    send_step(b, s, rope);
    b->n_logits = s->n_logits;
    b->graph = NULL;
    b->in_decode = whole && !b->limits.eager && decode_can(b, s);
    const struct act_set *set = in_cores(b, s->n_tokens) ? &b->cores : &b->fragments;
    b->normed = set->normed, b->attn = set->attn, b->act = set->act;
    bool recordable = whole && !b->limits.eager && !b->in_decode && s->n_tokens == s->n_logits &&
                      s->n_tokens <= MAX_GRAPH;
    if (!recordable || b->failed != cudaSuccess) return;
    b->graph = &b->graphs[s->n_tokens];
    if (b->graph->exec && b->graph->max_blocks == s->max_blocks) return;
    if (b->graph->exec) cudaGraphExecDestroy(b->graph->exec);
    *b->graph = (struct graph){};
    b->graph->max_blocks = s->max_blocks;
    b->recording = cuda_good(b, cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal),
                             "recording a step");
}

/* True if the operation is already in what finish will launch. */
static bool replayed(const struct backend *b)
{
    return b->in_decode || (b->graph && b->graph->exec);
}

static void product(struct backend *b, const struct product *p)
{
    matrix_product(b, p);
}

/* A product whose input is the residual stream, half normed. */
static struct product from_normed(const struct backend *b, enum product_to to,
                                  const struct matrix *m, int32_t n)
{
    struct product p = {};
    p.to = to;
    p.m = m;
    p.in = b->normed;
    p.n = n;
    p.squares = b->squares;
    p.in_panels = b->hidden_panels;
    p.in_width = b->shape.hidden;
    p.eps = b->shape.norm_eps;
    return p;
}

/* A product that adds to the residual stream and makes the next input of it. */
static void to_residual(struct backend *b, const struct matrix *m, struct act in,
                        const struct vector *bias, const struct vector *norm, int32_t n)
{
    struct product p = {};
    p.to = TO_RESIDUAL;
    p.m = m;
    p.in = in;
    p.n = n;
    p.bias = bias ? bias->data : NULL;
    p.y = b->x;
    p.out = b->normed;
    p.gamma = norm->data;
    p.out_squares = b->squares;
    product(b, &p);
}

static void cuda_embed(struct backend *b, const struct step *s, const struct matrix *embedding)
{
    b->model.embedding = embedding;
    if (!replayed(b)) rows_embed(b, embedding, s->n_tokens);
}

static void cuda_qkv(struct backend *b, const struct step *s, int32_t layer, const struct layer *w)
{
    b->model.layers[layer] = w;
    if (replayed(b)) return;
    if (layer == 0) rows_prepare(b, w->input_norm, NULL, s->n_tokens, b->normed, b->squares);
    struct product p = from_normed(b, TO_ROWS, w->qkv, s->n_tokens);
    p.bias = w->qkv_bias ? w->qkv_bias->data : NULL;
    p.y = b->qkv;
    product(b, &p);
    rows_rope_store(b, layer, w, s->n_tokens);
}

static void cuda_attention(struct backend *b, const struct step *s, int32_t layer)
{
    if (!replayed(b)) attention_run(b, s, layer);
}

static void cuda_o_proj(struct backend *b, const struct step *s, const struct layer *w)
{
    if (!replayed(b)) to_residual(b, w->o_proj, b->attn, w->o_bias, w->post_norm, s->n_tokens);
}

static void cuda_gate_up(struct backend *b, const struct step *s, const struct layer *w)
{
    if (replayed(b)) return;
    struct product p = from_normed(b, TO_ACT, w->gate_up, s->n_tokens);
    p.out = b->act;
    product(b, &p);
}

static void cuda_down(struct backend *b, const struct step *s, const struct layer *w)
{
    if (!replayed(b)) to_residual(b, w->down, b->act, NULL, w->next_norm, s->n_tokens);
}

static void cuda_head(struct backend *b, const struct step *s, const struct vector *norm,
                      const struct matrix *w)
{
    b->model.final_norm = norm;
    b->model.head = w;
    if (b->in_decode) decode_run(b, s);
    if (replayed(b)) return;
    struct act in = in_cores(b, s->n_logits) ? b->cores.normed : b->fragments.normed;
    rows_prepare(b, norm, b->step.logit_rows, s->n_logits, in, b->head_squares);
    struct product p = from_normed(b, TO_ROWS, w, s->n_logits);
    p.in = in;
    p.squares = b->head_squares;
    p.y = b->logits;
    product(b, &p);
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
    if (!b->in_decode && replayed(b))
        cuda_good(b, cudaGraphLaunch(b->graph->exec, b->stream), "a step");
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

static void read_act(struct backend *b, struct act a, int32_t token, int32_t columns, float *out)
{
    rows_read_act(b, a, token, columns, b->row);
    cuda_good(b,
              cudaMemcpyAsync(out, b->row, (size_t)columns * sizeof(float), cudaMemcpyDeviceToHost,
                              b->stream),
              "reading a buffer");
    cuda_good(b, cudaStreamSynchronize(b->stream), "reading a buffer");
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
    case BUFFER_ATTN: read_act(b, b->attn, row, (int32_t)q, out); return;
    case BUFFER_ACT: read_act(b, b->act, row, s->intermediate, out); return;
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
    NULL,
    NULL,
    NULL,
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
