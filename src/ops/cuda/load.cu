/*
 * load.cu - weights, from the file's pages to the GPU. The pool's threads turn rows into bf16 in
 * pinned buffers, several for each, and send them off on streams of their own; the device packs
 * them while the next rows are read.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "ops/cuda/cuda_internal.h"

extern "C" {
#include "base/threads.h"
}

/* Pinning memory takes 0.3 s a GB: few and small, but enough that nobody waits. */
enum { BUFFER_BYTES = 4 << 20, N_BUFFERS = 16 };

struct buffer_slot {
    cudaStream_t stream;
    char *host, *device; /* BUFFER_BYTES each */
};

struct loading {
    pthread_mutex_t mutex; /* calls into CUDA, the backend's `failed`, a job's position */
    char *host, *device;
    struct buffer_slot slots[N_BUFFERS];
};

/* ---- memory for weights --------------------------------------------------------------------- */

/* cudaMalloc is slow, and there are hundreds of weights: they share blocks. */
struct weight_block {
    char *data;
    size_t used, size;
    struct weight_block *next;
};

enum { WEIGHT_ALIGN = 256, LEAST_BLOCK = 4 << 20, MOST_BLOCK = 256 << 20 };

static struct weight_block *new_block(struct backend *b, size_t bytes)
{
    struct weight_block *block = (struct weight_block *)mem_new(1, sizeof *block);
    size_t all = 0;
    if (!block) {
        cuda_good(b, cudaErrorMemoryAllocation, "the weights");
        return NULL;
    }
    for (struct weight_block *other = b->weight_blocks; other; other = other->next)
        all += other->size;
    /* a quarter of what there is: what stays unused is little beside it */
    block->size = all / 4 < LEAST_BLOCK ? LEAST_BLOCK : all / 4 > MOST_BLOCK ? MOST_BLOCK : all / 4;
    if (block->size < bytes) block->size = bytes;
    cudaError_t status = cudaMalloc((void **)&block->data, block->size);
    if (status == cudaErrorMemoryAllocation && block->size > bytes) {
        cudaGetLastError(); /* this one is mended */
        block->size = bytes;
        status = cudaMalloc((void **)&block->data, block->size);
    }
    block->next = b->weight_blocks;
    b->weight_blocks = block;
    if (cuda_good(b, status, "the weights")) return block;
    block->size = 0;
    return NULL;
}

static void *weight_memory(struct backend *b, size_t bytes)
{
    bytes = (bytes + WEIGHT_ALIGN - 1) / WEIGHT_ALIGN * WEIGHT_ALIGN;
    struct weight_block *block = b->weight_blocks;
    while (block && block->size - block->used < bytes) block = block->next;
    if (!block) block = new_block(b, bytes);
    if (!block) return NULL;
    block->used += bytes;
    return block->data + block->used - bytes;
}

/* ---- the buffers on the way ------------------------------------------------------------------ */

static bool open_loading(struct backend *b)
{
    if (b->loading) return b->failed == cudaSuccess;
    struct loading *l = b->loading = (struct loading *)mem_new(1, sizeof *l);
    const size_t bytes = (size_t)BUFFER_BYTES * N_BUFFERS;
    if (!l) return cuda_good(b, cudaErrorMemoryAllocation, "loading weights");
    pthread_mutex_init(&l->mutex, NULL);
    cuda_good(b, cudaSetDevice(b->device), "choosing the device");
    if (!cuda_good(b, cudaMallocHost((void **)&l->host, bytes), "loading weights") ||
        !cuda_good(b, cudaMalloc((void **)&l->device, bytes), "loading weights"))
        return false;
    for (int i = 0; i < N_BUFFERS; i++) {
        struct buffer_slot *slot = &l->slots[i];
        slot->host = l->host + (size_t)i * BUFFER_BYTES;
        slot->device = l->device + (size_t)i * BUFFER_BYTES;
        if (!cuda_good(b, cudaStreamCreateWithFlags(&slot->stream, cudaStreamNonBlocking),
                       "loading weights"))
            return false;
    }
    return true;
}

static void close_loading(struct backend *b)
{
    struct loading *l = b->loading;
    if (!l) return;
    for (int i = 0; i < N_BUFFERS; i++) {
        if (!l->slots[i].stream) continue;
        cuda_good(b, cudaStreamSynchronize(l->slots[i].stream), "loading weights");
        cudaStreamDestroy(l->slots[i].stream);
    }
    cudaFreeHost(l->host);
    cudaFree(l->device);
    pthread_mutex_destroy(&l->mutex);
    free(l);
    b->loading = NULL;
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* A matrix on its way, and how far it is; the last three under the mutex of `loading`. */
struct job {
    struct backend *b;
    const struct matrix_part *parts;
    int n_parts;
    struct matrix *m;
    bool packed;     /* or row-major, as the embedding */
    int64_t at_once; /* rows that a thread takes */
    int part;
    int64_t row, first; /* next row of the part, whose first row is this one of the matrix */
};

struct piece {
    const struct matrix_part *part;
    int64_t row, n; /* of the part */
    int64_t first;  /* row of the matrix */
};

static bool take(struct job *j, struct piece *out)
{
    struct loading *l = j->b->loading;
    pthread_mutex_lock(&l->mutex);
    while (j->part < j->n_parts && j->row == j->parts[j->part].rows) {
        j->first += j->parts[j->part++].rows;
        j->row = 0;
    }
    bool any = j->b->failed == cudaSuccess && j->part < j->n_parts;
    if (any) {
        const struct matrix_part *p = &j->parts[j->part];
        int64_t left = p->rows - j->row, n = left < j->at_once ? left : j->at_once;
        *out = (struct piece){p, j->row, n, j->first + j->row};
        j->row += n;
    }
    pthread_mutex_unlock(&l->mutex);
    return any;
}

/* Row r of a part as bf16. */
static void convert_row(const struct matrix_part *p, int64_t r, uint16_t *out)
{
    enum { PART = 2048 }; /* a multiple of every block */
    float values[PART];
    const char *source = (const char *)p->data +
                         matrix_source_row(r, p->interleaved) * dtype_bytes(p->dtype, p->columns);
    if (p->dtype == DTYPE_BF16) {
        memcpy(out, source, (size_t)p->columns * sizeof *out);
        return;
    }
    for (int64_t c = 0; c < p->columns; c += PART) {
        int64_t n = p->columns - c < PART ? p->columns - c : PART;
        dtype_to_f32(p->dtype, source + dtype_bytes(p->dtype, c), n, values);
        for (int64_t i = 0; i < n; i++) out[c + i] = bf16_from_f32(values[i]);
    }
}

static void convert(const struct piece *piece, uint16_t *out)
{
    const struct matrix_part *p = piece->part;
    int64_t row_bytes = p->columns * (int64_t)sizeof *out;
    if (p->dtype == DTYPE_BF16 && p->interleaved <= 0) {
        memcpy(out, (const char *)p->data + piece->row * row_bytes, (size_t)(piece->n * row_bytes));
        return;
    }
    for (int64_t i = 0; i < piece->n; i++) convert_row(p, piece->row + i, out + i * p->columns);
}

static void send_piece(struct job *j, const struct piece *piece, struct buffer_slot *slot)
{
    struct backend *b = j->b;
    struct matrix *m = j->m;
    void *to = j->packed ? (void *)slot->device : (void *)(m->data + piece->first * m->columns);
    size_t bytes = (size_t)(piece->n * m->columns) * sizeof(bf16);
    pthread_mutex_lock(&b->loading->mutex);
    if (cuda_good(b, cudaMemcpyAsync(to, slot->host, bytes, cudaMemcpyHostToDevice, slot->stream),
                  "loading weights") &&
        j->packed)
        matrix_pack(b, slot->stream, (const bf16 *)slot->device, piece->first, piece->n, m);
    pthread_mutex_unlock(&b->loading->mutex);
}

/* cuda_good for several threads at once. */
static bool loading_good(struct backend *b, cudaError_t status)
{
    if (status == cudaSuccess) return true;
    pthread_mutex_lock(&b->loading->mutex);
    cuda_good(b, status, "loading weights");
    pthread_mutex_unlock(&b->loading->mutex);
    return false;
}

/* A thread's part of the job. Which rows it gets is chance, what becomes of them is not. */
static void load_rows(void *arg, int thread, int n_threads)
{
    struct job *j = (struct job *)arg;
    int stride = n_threads < N_BUFFERS ? n_threads : N_BUFFERS, slot = thread;
    struct piece piece;
    if (thread >= N_BUFFERS || !loading_good(j->b, cudaSetDevice(j->b->device))) return;
    while (take(j, &piece)) {
        struct buffer_slot *s = &j->b->loading->slots[slot];
        /* its last rows must have left it */
        if (!loading_good(j->b, cudaStreamSynchronize(s->stream))) return;
        convert(&piece, (uint16_t *)s->host);
        send_piece(j, &piece, s);
        slot = slot + stride < N_BUFFERS ? slot + stride : thread;
    }
}

/* Starts parts on their way into m; what they point to is no longer needed when it returns. */
static void load_parts(struct backend *b, const struct matrix_part *parts, int n_parts,
                       struct matrix *m, bool packed)
{
    int64_t threads = pool_threads(b->pool), share = (m->rows + threads - 1) / threads;
    int64_t fits = BUFFER_BYTES / (m->columns * (int64_t)sizeof(bf16));
    struct job job = {b, parts, n_parts, m, packed, share < PANEL_ROWS ? PANEL_ROWS : share};
    if (job.at_once > fits) job.at_once = fits;
    if (!open_loading(b) || !cuda_good(b, fits ? cudaSuccess : cudaErrorInvalidValue,
                                       "loading a row of more than 2 million weights"))
        return;
    pool_run(b->pool, load_rows, &job);
}

/* ---- the operations ---------------------------------------------------------------------- */

static struct matrix *new_matrix(struct backend *b, int64_t rows, int64_t columns, size_t bytes)
{
    struct matrix *m = (struct matrix *)mem_new(1, sizeof *m);
    if (!m) {
        cuda_good(b, cudaErrorMemoryAllocation, "a weight matrix");
        return NULL;
    }
    m->rows = rows;
    m->columns = columns;
    m->padded = padded_columns(columns);
    m->panels = panel_count(rows, false);
    m->next = b->matrices;
    b->matrices = m;
    m->data = (bf16 *)weight_memory(b, bytes);
    return m;
}

int64_t cuda_matrix_bytes(enum dtype dtype, int64_t rows, int64_t columns)
{
    (void)dtype;
    return panel_count(rows, false) * PANEL_ROWS * padded_columns(columns) * (int64_t)sizeof(bf16);
}

int64_t cuda_embedding_bytes(enum dtype dtype, int64_t rows, int64_t columns)
{
    (void)dtype;
    return rows * columns * (int64_t)sizeof(bf16);
}

/* Rows that the last panel has and the matrix has not: zeros. Packing fills all others, and the
 * columns up to `padded`. */
static void clear_last_panel(struct backend *b, struct matrix *m)
{
    int64_t rows = m->paired ? m->rows / 2 : m->rows,
            unit = m->paired ? PANEL_ROWS / 2 : PANEL_ROWS;
    size_t panel = (size_t)(PANEL_ROWS * m->padded);
    if (rows % unit == 0 || b->failed != cudaSuccess) return;
    cuda_good(b, cudaMemset(m->data + (size_t)(m->panels - 1) * panel, 0, panel * sizeof(bf16)),
              "the weights");
    cuda_good(b, cudaStreamSynchronize(NULL), "the weights"); /* packing is on other streams */
}

linnet_status cuda_load_matrix(struct backend *b, const struct matrix_part *parts, int n_parts,
                               struct matrix **out, linnet_error *err)
{
    int64_t rows = 0, columns = parts[0].columns;
    for (int i = 0; i < n_parts; i++) rows += parts[i].rows;
    int64_t panels = panel_count(rows, parts[0].paired);
    struct matrix *m = *out = new_matrix(
        b, rows, columns, (size_t)(panels * PANEL_ROWS * padded_columns(columns)) * sizeof(bf16));
    if (b->failed == cudaSuccess) {
        m->panels = panels;
        m->paired = parts[0].paired;
        clear_last_panel(b, m);
        load_parts(b, parts, n_parts, m, true);
    }
    return cuda_failure(b, err);
}

linnet_status cuda_load_embedding(struct backend *b, const struct matrix_part *part,
                                  struct matrix **out, linnet_error *err)
{
    *out = new_matrix(b, part->rows, part->columns,
                      (size_t)cuda_embedding_bytes(part->dtype, part->rows, part->columns));
    if (b->failed == cudaSuccess) load_parts(b, part, 1, *out, false);
    return cuda_failure(b, err);
}

linnet_status cuda_load_vector(struct backend *b, const float *values, int64_t n,
                               struct vector **out, linnet_error *err)
{
    struct vector *v = (struct vector *)mem_new(1, sizeof *v);
    if (!v) return error_memory(err, "a weight vector", sizeof *v);
    v->next = b->vectors;
    b->vectors = *out = v;
    v->data = (float *)weight_memory(b, (size_t)n * sizeof(float));
    if (v->data)
        cuda_good(b, cudaMemcpy(v->data, values, (size_t)n * sizeof(float), cudaMemcpyHostToDevice),
                  "loading weights");
    return cuda_failure(b, err);
}

linnet_status cuda_loaded(struct backend *b, linnet_error *err)
{
    close_loading(b);
    cuda_good(b, cudaDeviceSynchronize(), "loading weights"); /* the vectors' copies, too */
    return cuda_failure(b, err);
}

void cuda_unload(struct backend *b)
{
    close_loading(b);
    for (struct matrix *m = b->matrices, *next; m; m = next) {
        next = m->next;
        free(m);
    }
    for (struct vector *v = b->vectors, *next; v; v = next) {
        next = v->next;
        free(v);
    }
    for (struct weight_block *block = b->weight_blocks, *next; block; block = next) {
        next = block->next;
        cudaFree(block->data);
        free(block);
    }
}
