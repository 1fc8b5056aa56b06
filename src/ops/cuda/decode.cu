/*
 * decode.cu - a whole decode step for up to 8 sequences in one kernel, for Hopper. A block on each
 * multiprocessor stays for the step; phases (qkv with attention, o_proj, gate_up, down; the head)
 * are parted by barriers over all blocks. Within the first, attention finds q, k and v in tagged
 * words (ptx.cuh) as soon as they are there, and merging what the chunks of keys gave. Weights
 * depend on nothing, so each warp's share of all matrices, in the order in which it will need them,
 * streams through a ring of its own in shared memory: memory is read on while a barrier is waited
 * for. The sums are those of matrix_product and attention_run, bit for bit.
 */
#include <stdlib.h>
#include <string.h>

#include "ops/cuda/decode_attention.cuh"
#include "ops/cuda/decode_product.cuh"

static __device__ __forceinline__ void set_up(const struct decode_args &a, const struct memory &m)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int n_words = a.n_layers * (int)(sizeof *m.layers / sizeof(uint64_t));
#pragma unroll 1
    for (int i = threadIdx.x; i < n_words; i += ALL_THREADS)
        ((uint64_t *)m.layers)[i] = ((const uint64_t *)a.layers)[i];
    if ((int)threadIdx.x < a.n) m.s->positions[threadIdx.x] = a.step.positions[threadIdx.x];
    if (warp < WARPS && lane < N_PHASES) {
        const struct phase_shape p = a.phases[lane];
        bool whole = p.segments == 2 * WARPS;
        int2 panels = a.work[lane * gridDim.x + blockIdx.x];
        struct share *share = &m.s->shares[warp][lane];
        share->panel = panels.x;
        share->panels = panels.y - panels.x;
        share->groups = whole ? share->panels : (share->panels + 1) / 2;
        for (int j = 0; j < 2; j++) {
            int segment = whole ? 2 * warp + j : warp;
            share->unit[j] = p.units * segment / p.segments;
            share->count[j] = p.units * (segment + 1) / p.segments - share->unit[j];
        }
    }
    if (warp < WARPS && lane < a.n_slots) {
        barrier_init(&m.s->full[warp][lane], 1);
        barrier_init(&m.s->empty[warp][lane], 32);
    }
    if (threadIdx.x == 0) barrier_init(&m.s->passed, 1);
    barriers_ready();
    __syncthreads();
}

/* x, and the first layer's input, from the embedding: a warp for each panel. */
static __device__ __forceinline__ void embed_phase(const struct decode_args &a)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
#pragma unroll 1
    for (int32_t panel = (int32_t)(blockIdx.x + gridDim.x * warp); panel < a.hidden_panels;
         panel += (int32_t)gridDim.x * WARPS)
#pragma unroll 1
        for (int j = 0; j < 2; j++) {
            int32_t token = lane % 4 * 2 + j, id = token < a.n ? a.step.token_ids[token] : 0;
            if (id < 0) id = max(a.chosen[-1 - id].id, 0);
            float v[2] = {0, 0};
            for (int i = 0; i < 2; i++) {
                int32_t row = panel * PANEL_ROWS + g + 8 * i;
                if (token >= a.n || row >= a.hidden) continue;
                v[i] = __bfloat162float(a.embedding[(int64_t)id * a.hidden + row]);
                a.x[token * a.hidden + row] = v[i];
                a.normed[panel / 2 * 256 + token * 32 + g / 2 * 8 + panel % 2 * 4 + 2 * i + g % 2] =
                    __float2bfloat16(v[i] * a.first_norm[row]);
            }
            float squares = panel_squares(v[0], v[1]);
            if (g == 0 && token < a.n) a.squares[token * a.hidden_panels + panel] = squares;
        }
}

/* What a step's phase number i is. */
static __device__ __forceinline__ int phase_of(const struct decode_args &a, int32_t i)
{
    return i < 4 * a.n_layers ? i % 4 : HEAD;
}

/* What the computing warps do in a step. */
template <int D>
static __device__ __forceinline__ void compute(const struct decode_args &a, const struct memory &m)
{
    struct place w = first_place(a, m);
    struct meeting next = first_meeting(a);
    const struct task task = find_task(a, m, (int32_t)blockIdx.x); /* of all layers */
    int page = (int)threadIdx.x;
    if (task.token >= 0 && page < CHUNK_KEYS / KV_BLOCK) {
        int32_t key = task.chunk * CHUNK_KEYS + page * KV_BLOCK;
        m.s->pages[page] = key < m.s->positions[task.token] ? page_of(a, task, key) : 0;
    }
    embed_phase(a);
    arrive(a, &next);
#pragma unroll 1
    for (int32_t i = 0;; i++) {
        int phase = phase_of(a, i);
        product_phase(&w, a, m, phase, next);
        if (phase == HEAD) return;
        if (phase == QKV) {
            const struct decode_layer &layer = m.layers[i / 4];
            uint32_t tag = a.first_tag + i / 4;
            if (task.token >= 0) {
                begin_task<D>(a, m, layer, task, m.s->pages);
                attention_phase<D>(a, m, layer, task, tag);
            }
            merge_phase<D>(a, m, tag);
        }
        arrive(a, &next);
    }
}

/* And the finishers. */
static __device__ __forceinline__ void finish(const struct decode_args &a, const struct memory &m)
{
    struct meeting next = first_meeting(a);
    arrive(a, &next);
#pragma unroll 1
    for (int32_t i = 0;; i++) {
        int phase = phase_of(a, i);
        const struct decode_layer &layer = m.layers[phase == HEAD ? 0 : i / 4];
        finish_phase(a, m, phase, end_of_phase(a, layer, phase, a.first_tag + i / 4), next);
        if (phase == HEAD) return;
        arrive(a, &next);
    }
}

template <int D>
static __global__ void __launch_bounds__(ALL_THREADS, 1)
    decode_kernel(const __grid_constant__ struct decode_args a)
{
    uint8_t *raw = dynamic_shared();
    struct memory m;
    m.s = (struct shared *)raw;
    m.ring = raw + rings_offset();
    m.q = (bf16 *)(m.ring + (size_t)WARPS * a.n_slots * SLOT);
    m.k = m.q + 16 * row_stride<D>();
    m.v = m.k + CHUNK_KEYS * row_stride<D>();
    m.stage = (float *)m.q;
    m.layers = (struct decode_layer *)(m.v + CHUNK_KEYS * row_stride<D>());
    set_up(a, m);
    if (threadIdx.x < THREADS) {
        take_registers<COMPUTING_REGISTERS>();
        compute<D>(a, m);
        return;
    }
    leave_registers<OTHER_REGISTERS>();
    if (threadIdx.x < WORKING_THREADS)
        finish(a, m);
    else
        copy_weights(a, m);
}

/* ---- the host's side --------------------------------------------------------------------- */

struct decode {
    int32_t blocks, n_slots, max_chunks;
    bool ready; /* the tables are on the device */
    struct decode_args args;
    struct decode_layer *layers;
    int2 *work;
    uint64_t *words; /* tagged: qkv, parts, part_sums */
    size_t n_words;
};

/* Tagged words of a step; at: where they begin, from `words` on, or NULL. */
static size_t lay_words(const struct shape *s, const struct limits *l, uint64_t *words,
                        struct decode_args *at)
{
    size_t heads = (size_t)s->n_heads, dims = (size_t)s->head_dim;
    size_t qkv = MOST_TOKENS * (heads + 2 * (size_t)s->n_kv_heads) * dims;
    size_t parts = MOST_TOKENS * heads * (size_t)((l->max_context + CHUNK_KEYS - 1) / CHUNK_KEYS);
    if (at) {
        at->qkv = words;
        at->parts = words + qkv;
        at->part_sums = at->parts + parts * dims;
    }
    return qkv + parts * (dims + 2);
}

static struct phase_shape shape_of(const struct matrix *m)
{
    return (struct phase_shape){(int32_t)(m->padded / K_UNIT), n_segments(m->padded),
                                (int32_t)m->rows};
}

static size_t shared_bytes(const struct shape *s, int32_t n_slots)
{
    return rings_offset() + (size_t)WARPS * (size_t)n_slots * SLOT + chunk_bytes(s->head_dim) +
           (size_t)s->n_layers * sizeof(struct decode_layer);
}

/* Slots of each warp's ring that fit into a multiprocessor's shared memory; 0: none. */
static int32_t ring_slots(struct backend *b)
{
    int most = 0;
    cuda_good(b, cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, b->device),
              "the shared memory's size");
    for (int32_t n = MOST_SLOTS; n > 1; n--)
        if (shared_bytes(&b->shape, n) <= (size_t)most) return n;
    return 0;
}

typedef void (*decode_fn)(const struct decode_args);

/* The kernel for a head_dim, or NULL. */
static decode_fn kernel_for(int32_t head_dim)
{
    switch (head_dim) {
    case 64: return decode_kernel<64>;
    case 80: return decode_kernel<80>;
    case 96: return decode_kernel<96>;
    case 128: return decode_kernel<128>;
    default: return NULL;
    }
}

/* Whether a model may have the kernel on a device. */
static bool has_decode(int capability, const struct shape *s)
{
    return capability >= 90 && kernel_for(s->head_dim) && s->n_heads / s->n_kv_heads <= 8;
}

size_t decode_bytes(int capability, const struct shape *s, const struct limits *l)
{
    if (!has_decode(capability, s)) return 0;
    return lay_words(s, l, NULL, NULL) * sizeof(uint64_t) +
           (size_t)s->n_layers * sizeof(struct decode_layer) + (1 << 16);
}

bool decode_open(struct backend *b)
{
    const struct shape *s = &b->shape;
    int32_t slots = ring_slots(b);
    if (!has_decode(b->capability, s) || slots == 0)
        return b->failed == cudaSuccess; /* other kernels do it */
    struct decode *d = (struct decode *)mem_new(1, sizeof *d);
    if (!d) return cuda_good(b, cudaErrorMemoryAllocation, "decoding");
    b->decode = d;
    d->n_slots = slots;
    d->max_chunks = (b->limits.max_context + CHUNK_KEYS - 1) / CHUNK_KEYS;
    d->blocks = b->multiprocessors;
    d->n_words = lay_words(s, &b->limits, NULL, NULL);
    return cuda_good(b, cudaMalloc((void **)&d->words, d->n_words * sizeof *d->words),
                     "decoding") &&
           cuda_good(b, cudaMalloc((void **)&d->args.arrived, sizeof(unsigned)), "decoding") &&
           cuda_good(b, cudaMemsetAsync(d->args.arrived, 0, sizeof(unsigned), b->stream),
                     "decoding") &&
           cuda_good(b, cudaMalloc((void **)&d->layers, (size_t)s->n_layers * sizeof *d->layers),
                     "decoding") &&
           cuda_good(b,
                     cudaMalloc((void **)&d->work,
                                (size_t)N_PHASES * (size_t)d->blocks * sizeof *d->work),
                     "decoding") &&
           cuda_good(b,
                     cudaFuncSetAttribute(kernel_for(s->head_dim),
                                          cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          (int)shared_bytes(s, slots)),
                     "decoding");
}

void decode_close(struct backend *b)
{
    struct decode *d = b->decode;
    if (!d) return;
    cudaFree(d->words);
    cudaFree(d->args.arrived);
    cudaFree(d->layers);
    cudaFree(d->work);
    free(d);
}

/*
 * Hands the panels of a phase to blocks evenly, those that are over to the ones that have the least
 * to read so far. Ranges are in order of the blocks.
 */
static void share_out(int32_t blocks, struct phase_shape p, int64_t panels, int64_t *load,
                      int2 *out)
{
    int64_t most = (panels + blocks - 1) / blocks;
    int32_t first = 0;
    for (int32_t i = 0; i < blocks; i++) out[i] = make_int2(0, 0);
    for (int64_t k = 0; k < panels; k++) {
        int32_t best = -1;
        for (int32_t i = 0; i < blocks; i++)
            if (out[i].y < most && (best < 0 || load[i] < load[best])) best = i;
        out[best].y++;
        load[best] += p.units;
    }
    for (int32_t i = 0; i < blocks; i++) {
        out[i] = make_int2(first, first + out[i].y);
        first = out[i].y;
    }
}

static const float *values_of(const struct vector *v)
{
    return v ? v->data : NULL;
}

/* The tables, once the weights are known. */
static void build_tables(struct backend *b, struct decode *d)
{
    const struct shape *s = &b->shape;
    const struct layer *first = b->model.layers[0];
    size_t blocks = (size_t)d->blocks;
    struct decode_layer *layers =
        (struct decode_layer *)mem_new((size_t)s->n_layers, sizeof *layers);
    int2 *work = (int2 *)mem_new(N_PHASES * blocks, sizeof *work);
    int64_t *load = (int64_t *)mem_new(blocks, sizeof *load);
    if (!layers || !work || !load) cuda_good(b, cudaErrorMemoryAllocation, "decoding");
    const struct matrix *matrices[N_PHASES] = {first->qkv, first->o_proj, first->gate_up,
                                               first->down, b->model.head};
    static const enum phase order[] = {DOWN, O_PROJ, QKV, GATE_UP};
    for (int i = 0; i < N_PHASES; i++) d->args.phases[i] = shape_of(matrices[i]);
    for (int i = 0; b->failed == cudaSuccess && i < 4; i++)
        share_out(d->blocks, d->args.phases[order[i]], matrices[order[i]]->panels, load,
                  work + order[i] * blocks);
    if (b->failed == cudaSuccess) {
        memset(load, 0, blocks * sizeof *load);
        share_out(d->blocks, d->args.phases[HEAD], matrices[HEAD]->panels, load,
                  work + HEAD * blocks);
    }
    for (int32_t i = 0; b->failed == cudaSuccess && i < s->n_layers; i++) {
        const struct layer *w = b->model.layers[i];
        layers[i] = (struct decode_layer){
            {(const uint8_t *)w->qkv->data, (const uint8_t *)w->o_proj->data,
             (const uint8_t *)w->gate_up->data, (const uint8_t *)w->down->data},
            values_of(w->qkv_bias),
            values_of(w->q_norm),
            values_of(w->k_norm),
            values_of(w->o_bias),
            w->post_norm->data,
            w->next_norm->data,
            cache_of(b, i, 0),
            cache_of(b, i, 1)};
    }
    if (b->failed == cudaSuccess)
        cuda_good(b,
                  cudaMemcpyAsync(d->layers, layers, (size_t)s->n_layers * sizeof *layers,
                                  cudaMemcpyHostToDevice, b->stream),
                  "decoding") &&
            cuda_good(b,
                      cudaMemcpyAsync(d->work, work, N_PHASES * blocks * sizeof *work,
                                      cudaMemcpyHostToDevice, b->stream),
                      "decoding");
    cuda_good(b, cudaStreamSynchronize(b->stream), "decoding"); /* before the host's are freed */
    free(layers);
    free(work);
    free(load);
}

static void fill_args(struct backend *b, struct decode *d)
{
    const struct shape *s = &b->shape;
    struct decode_args *a = &d->args;
    a->layers = d->layers;
    a->work = d->work;
    a->head = (const uint8_t *)b->model.head->data;
    a->embedding = b->model.embedding->data;
    a->first_norm = b->model.layers[0]->input_norm->data;
    a->chosen = b->chosen;
    a->normed = b->fragments.normed.data;
    a->attn = b->fragments.attn.data;
    a->attn_padded = (int32_t)b->fragments.attn.padded;
    a->act = b->fragments.act.data;
    a->x = b->x;
    lay_words(s, &b->limits, d->words, a);
    a->squares = b->squares;
    a->logits = b->logits;
    a->n_layers = s->n_layers;
    a->hidden = s->hidden;
    a->hidden_panels = b->hidden_panels;
    a->n_heads = s->n_heads;
    a->n_kv_heads = s->n_kv_heads;
    a->max_chunks = d->max_chunks;
    a->n_slots = d->n_slots;
    /* what attention and o_proj wait for is not to stand behind weights */
    for (int i = 0; i < N_PHASES; i++) a->in_flight[i] = i == QKV || i == O_PROJ ? 1 : 2;
    a->eps = s->norm_eps;
    a->scale = attention_scale(s->head_dim);
}

bool decode_can(const struct backend *b, const struct step *s)
{
    if (!b->decode || s->n_tokens > 8 || s->n_tokens != s->n_seqs || s->n_tokens != s->n_logits)
        return false;
    for (int32_t i = 0; i < s->n_logits; i++)
        if (s->logit_rows[i] != i) return false;
    return true;
}

void decode_run(struct backend *b, const struct step *s)
{
    struct decode *d = b->decode;
    if (!d->ready) {
        build_tables(b, d);
        fill_args(b, d);
        d->ready = b->failed == cudaSuccess;
    }
    if (b->failed != cudaSuccess) return;
    if (d->args.first_tag == 0 || d->args.first_tag > UINT32_MAX - (uint32_t)b->shape.n_layers) {
        /* tags that are new to every place */
        cuda_good(b, cudaMemsetAsync(d->words, 0, d->n_words * sizeof *d->words, b->stream),
                  "decoding");
        d->args.first_tag = 1;
    }
    d->args.n = s->n_tokens;
    d->args.step = b->step;
    d->args.max_blocks = s->max_blocks;
    cudaLaunchAttribute together = {};
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)d->blocks);
    config.blockDim = dim3(ALL_THREADS);
    config.dynamicSmemBytes = shared_bytes(&b->shape, d->n_slots);
    config.stream = b->stream;
    config.attrs = &together;
    config.numAttrs = 1;
    cuda_good(b, cudaLaunchKernelEx(&config, kernel_for(b->shape.head_dim), d->args), "decoding");
    int32_t barriers = 1 + 4 * b->shape.n_layers;
    d->args.first_tag += (uint32_t)b->shape.n_layers;
    d->args.before += (unsigned)(barriers * d->blocks);
}
