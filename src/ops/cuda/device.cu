/*
 * device.cu - the CUDA backend's table of operations: the device and its memory, looking at
 * results, the way in. The operations of a step are in step.cu.
 */
#include <stdlib.h>
#include <string.h>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/sample.cuh"

static thread_local int selected; /* the device that linnet_cuda_ops was asked for last */

/* ---- the device -------------------------------------------------------------------------- */

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
    if (cudaSetDevice(selected) != cudaSuccess || cudaMalloc(&data, bytes) != cudaSuccess) {
        cudaGetLastError(); /* no backend's failure */
        return 0;
    }
    cudaMemset(data, 1, bytes);
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    for (int pass = 0; pass < 10; pass++) {
        float milliseconds = 0;
        cudaEventRecord(begin);
        launch_plain(NULL, read_kernel, dim3(132 * 16), 512, (const uint4 *)data,
                     (int64_t)(bytes / 16), (uint32_t *)data);
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

/*
 * The compute capability that kernels may count on: the device's, or a lower one if the backend was
 * built for none that is closer. What needs a higher one is empty in that code.
 */
static cudaError_t find_capability(int device, int *out)
{
    cudaFuncAttributes code = {};
    int major = 0, minor = 0;
    cudaError_t status = cudaSetDevice(device);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (status == cudaSuccess) status = cudaFuncGetAttributes(&code, read_kernel);
    *out = code.ptxVersion < 10 * major + minor ? code.ptxVersion : 10 * major + minor;
    return status;
}

/* ---- memory ------------------------------------------------------------------------------ */

static int64_t cuda_cache_bytes(const struct shape *s, enum kv_type, int32_t n_blocks)
{
    return 2 * (int64_t)sizeof(bf16) * s->n_layers * n_blocks * KV_BLOCK * s->n_kv_heads *
           s->head_dim;
}

struct buffer_request {
    void **memory;
    size_t bytes;
};

enum { MOST_BUFFERS = 16 };

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
                                       (size_t)cuda_cache_bytes(s, KV_OWN, b->limits.n_blocks)};
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
    cudaSetDevice(b->device); /* whoever opened it may have been another thread */
    if (b->stream) cudaStreamSynchronize(b->stream);
    cuda_unload(b);
    struct buffer_request list[MOST_BUFFERS];
    for (int i = 0, n = list_buffers(b, list); i < n; i++) cudaFree(*list[i].memory);
    step_close(b);
    decode_close(b);
    attention_close(b);
    free(b->model.layers);
    if (b->stream) cudaStreamDestroy(b->stream);
    free(b);
}

static int64_t cuda_buffer_bytes(const struct shape *shape, const struct limits *limits,
                                 int32_t n_threads)
{
    (void)n_threads;
    struct backend b = {};
    struct buffer_request list[MOST_BUFFERS];
    b.shape = *shape;
    b.limits = *limits;
    find_capability(selected, &b.capability);
    size_t bytes = step_bytes(shape, limits) + attention_bytes(shape, limits) +
                   decode_bytes(b.capability, shape, limits);
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
    return step_open(b) && attention_open(b) && decode_open(b);
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
    cudaGetLastError(); /* what failed before is not this backend's */
    cuda_good(b, find_capability(selected, &b->capability), "choosing the device");
    cuda_good(b,
              cudaDeviceGetAttribute(&b->multiprocessors, cudaDevAttrMultiProcessorCount, selected),
              "choosing the device");
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

/* ---- looking at results ------------------------------------------------------------------ */

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

static bool cuda_has_whole_step(const struct backend *b)
{
    return b->decode != NULL;
}

/* ---- the way in -------------------------------------------------------------------------- */

static double cuda_activation_error(enum dtype)
{
    return 0.0017; /* bf16, whatever the weights */
}

static const struct ops table = {
    "cuda",
    cuda_activation_error,
    cuda_open,
    cuda_close,
    NULL, /* use_store */
    0,
    cuda_load_matrix,
    cuda_load_embedding,
    cuda_load_vector,
    cuda_loaded,
    cuda_matrix_bytes,
    cuda_embedding_bytes,
    cuda_cache_bytes,
    cuda_buffer_bytes,
    step_use_rope,
    step_begin,
    step_embed,
    step_qkv,
    step_attention,
    step_o_proj,
    step_gate_up,
    step_down,
    step_head,
    step_finish,
    step_choose,
    step_submit,
    step_collect,
    SAMPLE_ADJUSTMENTS,
    rows_copy_blocks,
    cuda_has_whole_step,
    cuda_read_bandwidth,
    step_logits,
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
