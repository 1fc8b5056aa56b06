/*
 * decode.cu - a whole decode step for up to 8 sequences in one kernel, for Hopper. A block on each
 * multiprocessor stays for the step; phases (QKV, attention, o_proj, gate_up, down, head) are
 * parted by barriers over all blocks. Weights depend on nothing, so each warp's share of all
 * matrices, in the order in which it will need them, streams through a ring of its own in shared
 * memory: memory is read on while a barrier is waited for. The sums are those of matrix_product and
 * attention_run, bit for bit.
 */
#include <stdlib.h>
#include <string.h>

#include "ops/cuda/attention.cuh"
#include "ops/cuda/product.cuh"
#include "ops/cuda/rope.cuh"

enum {
    WARPS = 8,     /* that compute */
    FINISHERS = 3, /* warps that add up segments and store; one more copies weights */
    THREADS = 32 * WARPS,
    WORKING_THREADS = THREADS + 32 * FINISHERS,
    ALL_THREADS = WORKING_THREADS + 32,
    MOST_SLOTS = 16,
    SLAB = 2048,             /* bytes: K_UNIT columns of a panel */
    IN_FLIGHT = 4,           /* slabs of a warp on their way from memory at a time */
    BATCH_UNITS = 8,         /* K_UNITs whose inputs a lane holds in registers */
    DIRECT_CHUNKS = 8,       /* of a sequence: up to this many o_proj may merge itself */
    MOST_ROWS = 256,         /* heads of all tokens, likewise */
    ROW_PAD = 8,             /* bf16 values between rows in shared memory, against conflicts */
    SCORES = CHUNK_KEYS + 4, /* floats in a row of scores */
};

/* Named barriers. Sums have a buffer for each finisher. */
enum {
    SYNC_WORKING = 1,
    SYNC_COMPUTING,
    SYNC_FINISHING,
    SUMS_FULL,
    SUMS_FREE = SUMS_FULL + FINISHERS
};

enum phase { QKV, O_PROJ, GATE_UP, DOWN, HEAD, N_PHASES };

struct phase_shape {
    int32_t units, segments;
};

struct decode_layer {
    const uint8_t *weights[4];
    const float *qkv_bias, *q_norm, *k_norm, *o_bias, *post_norm, *next_norm;
    bf16 *keys, *values;
};

struct decode_args {
    const struct decode_layer *layers;
    const uint8_t *head;
    const bf16 *embedding;
    const float *first_norm;
    const int2 *work; /* [N_PHASES][blocks] first panel and end */
    struct phase_shape phases[N_PHASES];
    struct device_step step;
    const struct chosen *chosen;
    struct act normed, attn, act;
    float *x, *qkv, *squares, *logits;
    float *parts;      /* [tokens, heads, max_chunks, head_dim] */
    float2 *part_sums; /* [tokens, heads, max_chunks] maximum, sum */
    unsigned *arrived;
    unsigned before; /* arrivals of earlier steps */
    int32_t n, n_layers, hidden, hidden_panels, intermediate, vocab;
    int32_t n_heads, n_kv_heads, head_dim, max_blocks, max_chunks, n_slots;
    bool merge_apart;    /* chunks merge in a phase of their own */
    int32_t most_chunks; /* of a sequence in this step */
    float eps, scale;
};

/* ---- asynchronous copies ----------------------------------------------------------------- */

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define NEEDS_HOPPER 1
#endif

static __device__ __forceinline__ void bulk_copy(void *to, const void *from, uint64_t *barrier)
{
#ifndef NEEDS_HOPPER
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(SLAB)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], "
                 "%2, [%3];" ::"r"(shared_address(to)),
                 "l"(from), "r"(SLAB), "r"(shared_address(barrier))
                 : "memory");
#endif
}

/* Whether the copy that a barrier counts has come. */
static __device__ __forceinline__ bool has_come(uint64_t *barrier, uint32_t parity)
{
    uint32_t done = 1;
#ifndef NEEDS_HOPPER
    asm volatile("{\n.reg .pred done;\n"
                 "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, done;\n}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
#endif
    return done;
}

static __device__ __forceinline__ void wait_copy(uint64_t *barrier, uint32_t parity)
{
#ifndef NEEDS_HOPPER
    asm volatile("{\n.reg .pred done;\nAGAIN:\n"
                 "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
                 "@!done bra AGAIN;\n}" ::"r"(shared_address(barrier)),
                 "r"(parity)
                 : "memory");
#endif
}

static __device__ __forceinline__ void copy_16(void *to, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
}

static __device__ __forceinline__ void load_matrices(uint32_t r[4], const bf16 *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
}

static __device__ __forceinline__ void load_pair(uint32_t r[2], const bf16 *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row)));
}

static __device__ __forceinline__ void load_transposed(uint32_t r[4], const bf16 *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
}

/* ---- shared memory ----------------------------------------------------------------------- */

/* A warp's share of a phase: its panels, and the K_UNITs of its segment; of 16 segments it has two,
 * the second from `middle` on. */
struct share {
    int32_t panel, panels_end, unit, middle, units_end;
};

struct shared {
    float4 sums[FINISHERS][16][32]; /* [segment] */
    float scores[16][SCORES];
    uint64_t full[WARPS][MOST_SLOTS];
    int32_t taken[WARPS]; /* slabs that a warp is done with */
    struct share shares[WARPS][N_PHASES];
    float scales[8];
    int32_t positions[8];
};

/* All of it: this struct, the rings, queries, keys and values of a chunk, the layers. */
struct memory {
    struct shared *s;
    uint8_t *ring; /* [WARPS][n_slots][SLAB] */
    bf16 *q, *k, *v;
    struct decode_layer *layers;
};

static __host__ __device__ size_t chunk_bytes(int32_t head_dim)
{
    return (size_t)(16 + 2 * CHUNK_KEYS) * (size_t)(head_dim + ROW_PAD) * sizeof(bf16);
}

static size_t shared_bytes(const struct shape *s, int32_t n_slots)
{
    return (sizeof(struct shared) + 127) / 128 * 128 + (size_t)WARPS * n_slots * SLAB +
           chunk_bytes(s->head_dim) + (size_t)s->n_layers * sizeof(struct decode_layer);
}

/* ---- the stream of weights --------------------------------------------------------------- */

/* Where the copying of a warp's slabs has come to. */
struct stream {
    int32_t layer, phase, panel, unit;
    bool ended;
};

static __device__ __forceinline__ void next_phase(struct stream *w, const struct decode_args &a,
                                                  const struct share *shares)
{
    do {
        if (w->phase == HEAD) {
            w->ended = true;
            return;
        }
        if (w->phase == DOWN && w->layer + 1 < a.n_layers)
            w->phase = QKV, w->layer++;
        else
            w->phase++;
    } while (shares[w->phase].panel >= shares[w->phase].panels_end ||
             shares[w->phase].unit >= shares[w->phase].units_end);
    w->panel = shares[w->phase].panel;
    w->unit = shares[w->phase].unit;
}

static __device__ __forceinline__ void next_slab(struct stream *w, const struct decode_args &a,
                                                 const struct share *shares)
{
    if (++w->unit < shares[w->phase].units_end) return;
    w->unit = shares[w->phase].unit;
    if (++w->panel == shares[w->phase].panels_end) next_phase(w, a, shares);
}

/*
 * The warp that copies: a lane for each warp that computes. A slab is asked for when its slot is
 * free, but no more than IN_FLIGHT at a time: requests that the memory cannot serve yet would stand
 * in the way of those that a phase waits for.
 */
static __device__ void copy_weights(const struct decode_args &a, const struct memory &m)
{
    int warp = threadIdx.x % 32;
    if (warp >= WARPS) return;
    const struct share *shares = m.s->shares[warp];
    uint8_t *ring = m.ring + (size_t)warp * a.n_slots * SLAB;
    struct stream w = {-1, DOWN, 0, 0, false};
    next_phase(&w, a, shares);
    int32_t slot = 0, behind = 0, issued = 0; /* behind: the slot of slab issued - IN_FLIGHT */
    uint32_t parity = 0;                      /* of behind */
    while (!w.ended) {
        bool full = issued - *(volatile int32_t *)&m.s->taken[warp] >= a.n_slots;
        if (full || (issued >= IN_FLIGHT && !has_come(&m.s->full[warp][behind], parity))) {
            __nanosleep(40); /* the others need the issue slots */
            continue;
        }
        if (issued >= IN_FLIGHT) {
            if (++behind == a.n_slots) behind = 0, parity ^= 1;
        }
        const uint8_t *matrix = w.phase == HEAD ? a.head : m.layers[w.layer].weights[w.phase];
        int64_t slab = (int64_t)w.panel * a.phases[w.phase].units + w.unit;
        bulk_copy(ring + slot * SLAB, matrix + slab * SLAB, &m.s->full[warp][slot]);
        issued++;
        if (++slot == a.n_slots) slot = 0;
        next_slab(&w, a, shares);
    }
}

/* A warp's place in its ring. */
struct place {
    int32_t slot, taken;
    uint32_t parity;
};

/* The A fragments of the next K_UNIT. */
static __device__ __forceinline__ void take_slab(struct place *w, const struct decode_args &a,
                                                 const struct memory &m, uint4 fragments[4])
{
    int warp = threadIdx.x / 32;
    wait_copy(&m.s->full[warp][w->slot], w->parity);
    const uint4 *slab =
        (const uint4 *)(m.ring + ((size_t)warp * a.n_slots + w->slot) * SLAB) + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) fragments[i] = slab[32 * i];
    if (++w->slot == a.n_slots) w->slot = 0, w->parity ^= 1;
    w->taken++;
    __syncwarp();
    if (threadIdx.x % 32 == 0) *(volatile int32_t *)&m.s->taken[warp] = w->taken;
}

/* ---- barriers ---------------------------------------------------------------------------- */

static __device__ __forceinline__ void sync_named(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

static __device__ __forceinline__ void arrive_named(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

static __device__ __forceinline__ void sync_computing()
{
    sync_named(SYNC_COMPUTING, THREADS);
}

/* All that this block has written is visible to who has waited for the same barrier. */
static __device__ __forceinline__ void arrive(const struct decode_args &a, unsigned *target)
{
    *target += gridDim.x;
    sync_named(SYNC_WORKING, WORKING_THREADS);
    if (threadIdx.x == 0)
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(a.arrived) : "memory");
}

static __device__ __forceinline__ void wait_all(const struct decode_args &a, unsigned target)
{
    if (threadIdx.x == 0) {
        unsigned now;
        do
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                         : "=r"(now)
                         : "l"(a.arrived)
                         : "memory");
        while ((int)(now - target) < 0);
    }
    sync_named(SYNC_WORKING, WORKING_THREADS);
}

/* ---- products ---------------------------------------------------------------------------- */

/* What a phase multiplies: fragments, `stride` of them for 32 columns. */
struct input {
    const uint4 *x;
    int32_t stride;
    bool resident; /* in shared memory, in the way of the sums */
};

/* The inputs of one unit: two fragments. Lanes of tokens that are not there have zeros. */
static __device__ __forceinline__ void load_unit(const struct input &from, int32_t unit, bool on,
                                                 uint4 in[2])
{
    const uint4 *x = from.x + 2 * unit * from.stride + threadIdx.x % 32;
    in[0] = in[1] = make_uint4(0, 0, 0, 0);
    if (on) in[0] = x[0], in[1] = x[from.stride];
}

static __device__ __forceinline__ void multiply_unit(const uint4 f[4], const uint4 in[2],
                                                     float c[4])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        mma_16816(c, f[2 * i].x, f[2 * i].y, f[2 * i].z, f[2 * i].w, in[i].x, in[i].y);
        mma_16816(c, f[2 * i + 1].x, f[2 * i + 1].y, f[2 * i + 1].z, f[2 * i + 1].w, in[i].z,
                  in[i].w);
    }
}

static __device__ __forceinline__ void park_sums(float4 *sums, float c[4])
{
    sums[threadIdx.x % 32] = make_float4(c[0], c[1], c[2], c[3]);
    c[0] = c[1] = c[2] = c[3] = 0;
}

/* This block's panels of a matrix, one after another; a segment or two of each for a warp. */
static __device__ __forceinline__ void product_phase(struct place *w, const struct decode_args &a,
                                                     const struct memory &m, int phase,
                                                     const struct input &from)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const struct share share = m.s->shares[warp][phase];
    int32_t total = share.units_end - share.unit, split = share.middle - share.unit;
    bool keep = total <= BATCH_UNITS; /* inputs are the same for all panels */
    bool on = lane / 4 < a.n;
    uint4 in[BATCH_UNITS][2], f[2][4];
    float c[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int32_t done = 0; done < share.panels_end - share.panel; done++) {
        int turn = done % FINISHERS;
        if (done == 0 || !keep)
#pragma unroll
            for (int u = 0; u < BATCH_UNITS; u++)
                load_unit(from, share.unit + u, on && u < total, in[u]);
        if (done == 0 && from.resident) sync_computing();
        float4(*sums)[32] = m.s->sums[turn] + warp * (a.phases[phase].segments / WARPS);
        if (done >= FINISHERS) sync_named(SUMS_FREE + turn, THREADS + 32);
        if (total > 0) take_slab(w, a, m, f[0]);
#pragma unroll 1
        for (int32_t first = 0; first < total; first += BATCH_UNITS)
#pragma unroll
            for (int u = 0; u < BATCH_UNITS; u++) {
                if (first + u >= total) break;
                if (first + u + 1 < total) take_slab(w, a, m, f[(u + 1) % 2]);
                if (first + u == split) park_sums(*sums++, c);
                multiply_unit(f[u % 2], in[u], c);
                int32_t next = first + u + BATCH_UNITS;
                if (next < total) load_unit(from, share.unit + next, on, in[u]);
            }
        park_sums(*sums, c);
        arrive_named(SUMS_FULL + turn, THREADS + 32);
    }
}

/* The finishers' part of it: segments add up in ascending order, a panel after the other. */
static __device__ __forceinline__ void finish_phase(const struct decode_args &a,
                                                    const struct memory &m, int phase,
                                                    const struct product_end &end)
{
    int turn = (threadIdx.x - THREADS) / 32, lane = threadIdx.x % 32;
    const struct share &share = m.s->shares[0][phase];
    if (share.panel >= share.panels_end) return;
    if (end.scaled) {
        for (int token = turn; token < a.n; token += FINISHERS) {
            float scale =
                token_scale(a.squares + token * a.hidden_panels, a.hidden_panels, a.hidden, a.eps);
            if (lane == 0) m.s->scales[token] = scale;
        }
        sync_named(SYNC_FINISHING, 32 * FINISHERS);
    }
#pragma unroll 1
    for (int32_t panel = share.panel + turn; panel < share.panels_end; panel += FINISHERS) {
        struct product_tail tail;
        load_tail(end, panel, 0, &tail);
        sync_named(SUMS_FULL + turn, THREADS + 32);
        float c[4] = {0, 0, 0, 0};
#pragma unroll 8
        for (int s = 0; s < a.phases[phase].segments; s++) {
            float4 part = m.s->sums[turn][s][lane];
            c[0] += part.x, c[1] += part.y, c[2] += part.z, c[3] += part.w;
        }
        if (panel + FINISHERS < share.panels_end) arrive_named(SUMS_FREE + turn, THREADS + 32);
        store_fragment(end, panel, 0, c, tail, m.s->scales);
    }
}

/* ---- attention --------------------------------------------------------------------------- */

/* One chunk of keys for one sequence and kv head. */
struct task {
    int32_t token, kv_head, chunk;
};

static __device__ __forceinline__ int32_t chunks_of(int32_t position)
{
    return position / CHUNK_KEYS + 1;
}

static __device__ bool find_task(const struct decode_args &a, const struct memory &m, int32_t index,
                                 struct task *out)
{
#pragma unroll 1
    for (int32_t token = 0; token < a.n; token++) {
        int32_t chunks = chunks_of(m.s->positions[token]), count = chunks * a.n_kv_heads;
        if (index < count) {
            *out = (struct task){token, index / chunks, index % chunks};
            return true;
        }
        index -= count;
    }
    return false;
}

/* Starts the copy of a chunk's keys and values but the newest, which this step makes. */
template <int D>
static __device__ void load_chunk(const struct decode_args &a, const struct memory &m,
                                  const struct decode_layer &layer, const struct task &t)
{
    int32_t position = m.s->positions[t.token], pieces = D / 8, row_size = D + ROW_PAD;
    const int32_t *table = a.step.block_tables + (int64_t)t.token * a.max_blocks;
#pragma unroll 2
    for (int i = threadIdx.x; i < CHUNK_KEYS * pieces; i += THREADS) {
        int32_t row = i / pieces, d = i % pieces * 8, key = t.chunk * CHUNK_KEYS + row;
        bf16 *k = m.k + row * row_size + d, *v = m.v + row * row_size + d;
        if (key < position) {
            int64_t at = cache_offset(table[key / KV_BLOCK] * KV_BLOCK + key % KV_BLOCK, t.kv_head,
                                      a.n_kv_heads, D) +
                         d;
            copy_16(k, layer.keys + at);
            copy_16(v, layer.values + at);
        } else if (key > position) {
            *(uint4 *)k = *(uint4 *)v = make_uint4(0, 0, 0, 0);
        }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* The group's queries, and the newest key and value if the chunk has them: rotated, in shared
 * memory; the latter in the cache too. */
template <int D>
static __device__ void load_newest(const struct decode_args &a, const struct memory &m,
                                   const struct decode_layer &layer, const struct task &t)
{
    int warp = threadIdx.x / 32, group = a.n_heads / a.n_kv_heads;
    int32_t position = m.s->positions[t.token], heads = a.n_heads + a.n_kv_heads,
            row_size = D + ROW_PAD;
    const float *rope = a.step.rope + (int64_t)t.token * D;
    const float *qkv = a.qkv + (int64_t)t.token * (heads + a.n_kv_heads) * D;
    bool newest = position / CHUNK_KEYS == t.chunk;
    int64_t at = cache_offset(a.step.slot_mapping[t.token], t.kv_head, a.n_kv_heads, D);
    int32_t row = position % CHUNK_KEYS * row_size;
#pragma unroll 1
    for (int i = warp; i < group + 2; i += WARPS) {
        if (i < group)
            rope_head(qkv + (t.kv_head * group + i) * D, rope, layer.q_norm, D, a.eps,
                      m.q + i * row_size);
        else if (newest && i == group)
            rope_head(qkv + (a.n_heads + t.kv_head) * D, rope, layer.k_norm, D, a.eps, m.k + row,
                      layer.keys + at);
        else if (newest)
            copy_head(qkv + (heads + t.kv_head) * D, D, m.v + row, layer.values + at);
    }
}

/* Scores of 8 keys by each of the first warps. */
template <int D>
static __device__ void chunk_scores(const struct decode_args &a, const struct memory &m)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int32_t row_size = D + ROW_PAD;
    if (warp >= KEY_TILES) return;
    float c[4] = {0, 0, 0, 0};
    const bf16 *q = m.q + lane % 16 * row_size + lane / 16 * 8;
    const bf16 *k = m.k + (warp * 8 + lane % 8) * row_size + lane / 8 % 2 * 8;
    for (int32_t d = 0; d < D; d += 16) {
        uint32_t qf[4], kf[2];
        load_matrices(qf, q + d);
        load_pair(kf, k + d);
        mma_16816(c, qf[0], qf[1], qf[2], qf[3], kf[0], kf[1]);
    }
    int row = lane / 4, key = warp * 8 + lane % 4 * 2;
    *(float2 *)&m.s->scores[row][key] = make_float2(c[0], c[1]);
    *(float2 *)&m.s->scores[row + 8][key] = make_float2(c[2], c[3]);
}

/* Values and sums of head row `row` of the task's group, dimensions d and d + 1. */
template <int D>
static __device__ __forceinline__ void store_part(const struct decode_args &a, const struct task &t,
                                                  int row, int32_t d, float v0, float v1, float max,
                                                  float sum)
{
    int32_t group = a.n_heads / a.n_kv_heads, head = t.kv_head * group + row;
    if (row >= group || d >= D) return;
    int64_t part = ((int64_t)t.token * a.n_heads + head) * a.max_chunks + t.chunk;
    *(float2 *)(a.parts + part * D + d) = make_float2(v0, v1);
    if (d == 0) a.part_sums[part] = make_float2(max, sum);
}

template <int D>
static __device__ void chunk_values(const struct decode_args &a, const struct memory &m,
                                    const struct task &t)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4;
    int32_t row_size = D + ROW_PAD;
    int32_t left = m.s->positions[t.token] + 1 - t.chunk * CHUNK_KEYS;
    const int n_keys[2] = {left, left};
    float s[KEY_TILES][4];
    uint32_t p[KEY_TILES / 2][4];
#pragma unroll
    for (int i = 0; i < KEY_TILES; i++) {
        float2 low = *(const float2 *)&m.s->scores[row][i * 8 + lane % 4 * 2];
        float2 high = *(const float2 *)&m.s->scores[row + 8][i * 8 + lane % 4 * 2];
        s[i][0] = low.x, s[i][1] = low.y, s[i][2] = high.x, s[i][3] = high.y;
    }
    struct chunk c = a.n_heads / a.n_kv_heads > 8 ? chunk_weights<true, 2>(s, a.scale, n_keys, p)
                                                  : chunk_weights<true, 1>(s, a.scale, n_keys, p);
#pragma unroll 1
    for (int32_t tile = warp; tile < D / 8; tile += WARPS) {
        float o[4] = {0, 0, 0, 0};
        const bf16 *v = m.v + lane * row_size + tile * 8;
#pragma unroll
        for (int i = 0; i < KEY_TILES / 4; i++) {
            uint32_t f[4];
            load_transposed(f, v + i * 32 * row_size);
            mma_16816(o, p[2 * i][0], p[2 * i][1], p[2 * i][2], p[2 * i][3], f[0], f[1]);
            mma_16816(o, p[2 * i + 1][0], p[2 * i + 1][1], p[2 * i + 1][2], p[2 * i + 1][3], f[2],
                      f[3]);
        }
        int32_t d = tile * 8 + lane % 4 * 2;
        store_part<D>(a, t, row, d, o[0], o[1], c.max[0], c.sum[0]);
        store_part<D>(a, t, row + 8, d, o[2], o[3], c.max[1], c.sum[1]);
    }
}

/* Before the barrier: `begun` says that a chunk is on its way; after it: the block's tasks. */
template <int D>
static __device__ bool attention_begin(const struct decode_args &a, const struct memory &m,
                                       const struct decode_layer &layer)
{
    struct task t;
    if (!find_task(a, m, (int32_t)blockIdx.x, &t)) return false;
    load_chunk<D>(a, m, layer, t);
    return true;
}

template <int D>
static __device__ void attention_phase(const struct decode_args &a, const struct memory &m,
                                       const struct decode_layer &layer)
{
    struct task t;
#pragma unroll 1
    for (int32_t i = (int32_t)blockIdx.x; find_task(a, m, i, &t); i += (int32_t)gridDim.x) {
        if (i != (int32_t)blockIdx.x) {
            sync_computing(); /* the chunk before is done with */
            load_chunk<D>(a, m, layer, t);
        }
        load_newest<D>(a, m, layer, t);
        asm volatile("cp.async.wait_all;" ::: "memory");
        sync_computing();
        chunk_scores<D>(a, m);
        sync_computing();
        chunk_values<D>(a, m, t);
    }
}

/*
 * Attention's output as o_proj's input, [columns / 32][n][4 lanes][8 values] where the sums of
 * products lie else: all chunks of all heads come to shared memory, factors are worked out, then
 * each thread runs through the chunks of four dimensions.
 */
template <int D>
static __device__ void merge_directly(const struct decode_args &a, const struct memory &m)
{
    float *values = (float *)m.q;
    float2 *factors = (float2 *)m.s->scores;
    float *sums = (float *)m.s->sums + sizeof m.s->sums / sizeof(float) - MOST_ROWS;
    bf16 *out = (bf16 *)m.s->sums;
    int32_t rows = a.n * a.n_heads, most = a.most_chunks, row_size = most * D;
#pragma unroll 1
    for (int i = threadIdx.x * 4; i < rows * row_size; i += THREADS * 4) {
        int32_t row = i / row_size, rest = i % row_size;
        if (rest / D < chunks_of(m.s->positions[row / a.n_heads]))
            copy_16(values + i, a.parts + (int64_t)row * a.max_chunks * D + rest);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    if (threadIdx.x < rows) {
        int32_t row = (int32_t)threadIdx.x, chunks = chunks_of(m.s->positions[row / a.n_heads]);
        float2 parts[DIRECT_CHUNKS];
        float max = -INFINITY, sum = 0, old, add;
#pragma unroll
        for (int c = 0; c < DIRECT_CHUNKS; c++)
            if (c < chunks) parts[c] = __ldcg(a.part_sums + (int64_t)row * a.max_chunks + c);
#pragma unroll
        for (int c = 0; c < DIRECT_CHUNKS; c++)
            if (c < chunks) {
                merge_factors(&max, &sum, parts[c].x, parts[c].y, &old, &add);
                factors[row * most + c] = make_float2(old, add);
            }
        sums[row] = sum;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    sync_computing();
    const struct act one = {out, a.attn.padded, 8, false};
#pragma unroll 1
    for (int i = threadIdx.x * 2; i < a.n * a.attn.padded; i += THREADS * 2) {
        int32_t token = i / (int32_t)a.attn.padded, column = i % (int32_t)a.attn.padded;
        float2 v = make_float2(0, 0);
        if (column < a.n_heads * D) {
            int32_t row = token * a.n_heads + column / D, chunks = chunks_of(m.s->positions[token]);
            for (int c = 0; c < chunks; c++) {
                float2 part = *(const float2 *)(values + row * row_size + c * D + column % D);
                float2 factor = factors[row * most + c];
                v.x = merge_value(v.x, part.x, factor.x, factor.y);
                v.y = merge_value(v.y, part.y, factor.x, factor.y);
            }
            v.x /= sums[row], v.y /= sums[row];
        }
        int32_t at = (int32_t)act_at(one, 0, column); /* of token 0 among 8 */
        *(uint32_t *)(out + at / 256 * 32 * a.n + at % 256 + token * 32) = pack_bf16(v.x, v.y);
    }
    sync_computing();
}

/* A block for one head of one token: chunks come to shared memory in rounds, their factors are
 * worked out first, then each thread runs through the chunks of its dimension. */
template <int D>
static __device__ void merge_phase(const struct decode_args &a, const struct memory &m)
{
    float *values = (float *)m.k;
    float2 *factors = (float2 *)m.s->scores;
    __shared__ float running[2]; /* maximum, sum */
    int32_t fits = (int32_t)(chunk_bytes(D) - (size_t)((uint8_t *)m.k - (uint8_t *)m.q)) /
                   (D * (int32_t)sizeof(float));
    int32_t most = (int32_t)(sizeof m.s->scores / sizeof(float2)),
            round = fits < most ? fits : most;
#pragma unroll 1
    for (int32_t i = (int32_t)blockIdx.x; i < a.n * a.n_heads; i += (int32_t)gridDim.x) {
        int32_t token = i / a.n_heads, head = i % a.n_heads,
                chunks = chunks_of(m.s->positions[token]);
        int64_t part = (int64_t)i * a.max_chunks;
        float out = 0;
        if (threadIdx.x == 0) running[0] = -INFINITY, running[1] = 0;
#pragma unroll 1
        for (int32_t first = 0; first < chunks; first += round) {
            int32_t count = chunks - first < round ? chunks - first : round;
            const float *from = a.parts + (part + first) * D;
            sync_computing();
#pragma unroll 1
            for (int j = threadIdx.x * 4; j < count * D; j += THREADS * 4)
                copy_16(values + j, from + j);
            asm volatile("cp.async.commit_group;" ::: "memory");
#pragma unroll 1
            for (int j = threadIdx.x; j < count; j += THREADS)
                factors[j] = __ldcg(a.part_sums + part + first + j);
            sync_computing();
            if (threadIdx.x == 0) {
                float max = running[0], sum = running[1], old, add;
#pragma unroll 1
                for (int j = 0; j < count; j++) {
                    merge_factors(&max, &sum, factors[j].x, factors[j].y, &old, &add);
                    factors[j] = make_float2(old, add);
                }
                running[0] = max, running[1] = sum;
            }
            asm volatile("cp.async.wait_all;" ::: "memory");
            sync_computing();
            if (threadIdx.x < D)
                for (int j = 0; j < count; j++)
                    out = merge_value(out, values[j * D + threadIdx.x], factors[j].x, factors[j].y);
        }
        if (threadIdx.x < D)
            a.attn.data[act_at(a.attn, token, head * D + threadIdx.x)] =
                __float2bfloat16(out / running[1]);
        sync_computing();
    }
}

/* ---- the step ---------------------------------------------------------------------------- */

static __device__ void set_up(const struct decode_args &a, const struct memory &m)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int n_words = a.n_layers * (int)(sizeof *m.layers / sizeof(uint64_t));
#pragma unroll 1
    for (int i = threadIdx.x; i < n_words; i += ALL_THREADS)
        ((uint64_t *)m.layers)[i] = ((const uint64_t *)a.layers)[i];
    if (threadIdx.x < a.n) m.s->positions[threadIdx.x] = a.step.positions[threadIdx.x];
    if (warp < WARPS && lane < N_PHASES) {
        const struct phase_shape p = a.phases[lane];
        int32_t mine = p.segments / WARPS, first = warp * mine;
        int2 panels = a.work[lane * gridDim.x + blockIdx.x];
        struct share *share = &m.s->shares[warp][lane];
        share->panel = panels.x;
        share->panels_end = panels.y;
        share->unit = p.units * first / p.segments;
        share->middle = p.units * (first + 1) / p.segments;
        share->units_end = p.units * (first + mine) / p.segments;
    }
    if (warp < WARPS && lane == 0) m.s->taken[warp] = 0;
#ifndef NEEDS_HOPPER
    if (warp < WARPS && lane < a.n_slots)
        asm volatile(
            "mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(&m.s->full[warp][lane])));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    __syncthreads();
}

/* x, and the first layer's input, from the embedding: a warp for each panel. */
static __device__ void embed_phase(const struct decode_args &a)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int32_t panel = (int32_t)(blockIdx.x + gridDim.x * warp); panel < a.hidden_panels;
         panel += (int32_t)gridDim.x * WARPS)
        for (int j = 0; j < 2; j++) {
            int32_t token = lane % 4 * 2 + j;
            float v[2] = {0, 0};
            for (int i = 0; i < 2; i++) {
                int32_t row = panel * PANEL_ROWS + lane / 4 + 8 * i;
                if (token >= a.n || row >= a.hidden) continue;
                int32_t id = a.step.token_ids[token];
                if (id < 0) id = a.chosen[-1 - id].id;
                v[i] = __bfloat162float(a.embedding[(int64_t)(id < 0 ? 0 : id) * a.hidden + row]);
                a.x[(int64_t)token * a.hidden + row] = v[i];
                a.normed.data[act_at(a.normed, token, row)] =
                    __float2bfloat16(v[i] * a.first_norm[row]);
            }
            float squares = panel_squares(v[0], v[1]);
            if (lane / 4 == 0 && token < a.n)
                a.squares[(int64_t)token * a.hidden_panels + panel] = squares;
        }
}

static __device__ __forceinline__ struct product_end
end_of_phase(const struct decode_args &a, const struct memory &m, int phase, int32_t layer)
{
    const struct decode_layer &w = m.layers[phase == HEAD ? 0 : layer];
    struct product_end e = {};
    e.to = phase == GATE_UP ? TO_ACT : phase == QKV || phase == HEAD ? TO_ROWS : TO_RESIDUAL;
    e.n = a.n;
    e.panels = a.hidden_panels;
    e.rows = phase == QKV       ? (a.n_heads + 2 * a.n_kv_heads) * a.head_dim
             : phase == GATE_UP ? 2 * a.intermediate
             : phase == HEAD    ? a.vocab
                                : a.hidden;
    e.scaled = e.to != TO_RESIDUAL;
    e.bias = phase == QKV ? w.qkv_bias : phase == O_PROJ ? w.o_bias : NULL;
    e.y = phase == QKV ? a.qkv : phase == HEAD ? a.logits : a.x;
    e.out = phase == GATE_UP ? a.act : a.normed;
    e.out.cores = false; /* for the compiler */
    e.gamma = phase == DOWN ? w.next_norm : phase == O_PROJ ? w.post_norm : NULL;
    e.out_squares = a.squares;
    return e;
}

/* From the layer's queries, keys and values to o_proj's input, behind a barrier of all blocks. */
template <int D>
static __device__ __forceinline__ void attend(const struct decode_args &a, const struct memory &m,
                                              const struct decode_layer &layer, bool computes,
                                              unsigned *target)
{
    if (computes) attention_phase<D>(a, m, layer);
    arrive(a, target);
    wait_all(a, *target);
    if (a.merge_apart) {
        if (computes) merge_phase<D>(a, m);
        arrive(a, target);
        wait_all(a, *target);
        return;
    }
    const struct share &share = m.s->shares[0][O_PROJ];
    if (computes && share.panel < share.panels_end) merge_directly<D>(a, m);
}

template <int D>
static __global__ void __launch_bounds__(ALL_THREADS, 1)
    decode_kernel(const __grid_constant__ struct decode_args a)
{
    extern __shared__ __align__(128) uint8_t raw[];
    uint8_t *rings = raw + (sizeof(struct shared) + 127) / 128 * 128;
    int32_t row_size = D + ROW_PAD;
    struct memory m;
    m.s = (struct shared *)raw;
    m.ring = rings;
    m.q = (bf16 *)(rings + (size_t)WARPS * a.n_slots * SLAB);
    m.k = m.q + 16 * row_size;
    m.v = m.k + CHUNK_KEYS * row_size;
    m.layers = (struct decode_layer *)(m.v + CHUNK_KEYS * row_size);
    set_up(a, m);
    if (threadIdx.x >= WORKING_THREADS) {
        copy_weights(a, m);
        return;
    }
    bool computes = threadIdx.x < THREADS;
    struct place w = {0, 0, 0};
    unsigned target = a.before;
    if (computes) embed_phase(a);
    arrive(a, &target);
    wait_all(a, target);
#pragma unroll 1
    for (int32_t i = 0; i <= 4 * a.n_layers; i++) {
        int phase = i < 4 * a.n_layers ? i % 4 : HEAD;
        struct input from = {(const uint4 *)a.normed.data, 32, false};
        if (phase == DOWN) from.x = (const uint4 *)a.act.data;
        if (phase == O_PROJ)
            from = a.merge_apart ? (struct input){(const uint4 *)a.attn.data, 32, false}
                                 : (struct input){(const uint4 *)m.s->sums, 4 * a.n, true};
        if (computes)
            product_phase(&w, a, m, phase, from);
        else
            finish_phase(a, m, phase, end_of_phase(a, m, phase, i / 4));
        if (phase == HEAD) break;
        arrive(a, &target);
        if (phase == QKV && computes) attention_begin<D>(a, m, m.layers[i / 4]);
        wait_all(a, target);
        if (phase == QKV) attend<D>(a, m, m.layers[i / 4], computes, &target);
    }
}

/* ---- the host's side --------------------------------------------------------------------- */

struct decode {
    int32_t blocks, n_slots, max_chunks;
    bool ready; /* the tables are on the device */
    struct decode_args args;
    struct decode_layer *layers;
    int2 *work;
};

static int64_t part_count(const struct shape *s, const struct limits *l)
{
    return 8 * (int64_t)s->n_heads * ((l->max_context + CHUNK_KEYS - 1) / CHUNK_KEYS);
}

size_t decode_bytes(const struct shape *s, const struct limits *l)
{
    return (size_t)part_count(s, l) * ((size_t)s->head_dim * sizeof(float) + sizeof(float2)) +
           (size_t)s->n_layers * sizeof(struct decode_layer) + (1 << 16);
}

static struct phase_shape shape_of(const struct matrix *m)
{
    return (struct phase_shape){(int32_t)(m->padded / K_UNIT), n_segments(m->padded)};
}

/* Slots of each warp's ring that fit into a multiprocessor's shared memory; 0: none. */
static int32_t ring_slots(const struct backend *b)
{
    int most = 0;
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, b->device);
    for (int32_t n = MOST_SLOTS; n > IN_FLIGHT; n--)
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

bool decode_open(struct backend *b)
{
    const struct shape *s = &b->shape;
    int32_t slots = ring_slots(b);
    if (b->capability < 90 || !kernel_for(s->head_dim) || s->n_heads / s->n_kv_heads > 16 ||
        slots == 0)
        return true; /* other kernels do it */
    struct decode *d = (struct decode *)mem_new(1, sizeof *d);
    if (!d) return cuda_good(b, cudaErrorMemoryAllocation, "decoding");
    b->decode = d;
    d->n_slots = slots;
    d->max_chunks = (b->limits.max_context + CHUNK_KEYS - 1) / CHUNK_KEYS;
    size_t parts = (size_t)part_count(s, &b->limits);
    d->blocks = b->multiprocessors;
    return cuda_good(
               b, cudaMalloc((void **)&d->args.parts, parts * (size_t)s->head_dim * sizeof(float)),
               "attention") &&
           cuda_good(b, cudaMalloc((void **)&d->args.part_sums, parts * sizeof(float2)),
                     "attention") &&
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
    cudaFree(d->args.parts);
    cudaFree(d->args.part_sums);
    cudaFree(d->args.arrived);
    cudaFree(d->layers);
    cudaFree(d->work);
    free(d);
}

/*
 * Hands the panels of a phase to blocks, each to the one that has the least to read so far, but no
 * more than its even share of the phase unless `uneven`. Ranges are in order of the blocks.
 */
static void share_out(int32_t blocks, struct phase_shape p, int64_t panels, bool uneven,
                      int64_t *load, int2 *out)
{
    int64_t most = uneven ? panels : (panels + blocks - 1) / blocks;
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
        share_out(d->blocks, d->args.phases[order[i]], matrices[order[i]]->panels,
                  order[i] == GATE_UP, load, work + order[i] * blocks);
    if (b->failed == cudaSuccess) {
        memset(load, 0, blocks * sizeof *load);
        share_out(d->blocks, d->args.phases[HEAD], matrices[HEAD]->panels, false, load,
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
    if (b->failed == cudaSuccess) {
        cuda_good(b,
                  cudaMemcpy(d->layers, layers, (size_t)s->n_layers * sizeof *layers,
                             cudaMemcpyHostToDevice),
                  "decoding");
        cuda_good(
            b, cudaMemcpy(d->work, work, N_PHASES * blocks * sizeof *work, cudaMemcpyHostToDevice),
            "decoding");
    }
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
    a->normed = b->fragments.normed;
    a->attn = b->fragments.attn;
    a->act = b->fragments.act;
    a->x = b->x;
    a->qkv = b->qkv;
    a->squares = b->squares;
    a->logits = b->logits;
    a->n_layers = s->n_layers;
    a->hidden = s->hidden;
    a->hidden_panels = b->hidden_panels;
    a->intermediate = s->intermediate;
    a->vocab = s->vocab;
    a->n_heads = s->n_heads;
    a->n_kv_heads = s->n_kv_heads;
    a->head_dim = s->head_dim;
    a->max_chunks = d->max_chunks;
    a->n_slots = d->n_slots;
    a->eps = s->norm_eps;
    a->scale = attention_scale(s->head_dim);
}

/* Whether o_proj finds the chunks merged: else every block of it does it for itself. */
static bool merges_apart(const struct backend *b, int32_t n, int32_t most_chunks)
{
    size_t rows = (size_t)(n * b->shape.n_heads), chunks = (size_t)most_chunks;
    size_t out = (size_t)n * (size_t)b->fragments.attn.padded * sizeof(bf16);
    return most_chunks > DIRECT_CHUNKS || rows > MOST_ROWS ||
           b->fragments.attn.padded / K_UNIT > WARPS * BATCH_UNITS ||
           rows * chunks * (size_t)b->shape.head_dim * sizeof(float) >
               chunk_bytes(b->shape.head_dim) ||
           rows * chunks * sizeof(float2) > 16 * SCORES * sizeof(float) ||
           out > FINISHERS * 16 * 32 * sizeof(float4) - MOST_ROWS * sizeof(float);
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
    d->args.n = s->n_tokens;
    d->args.step = b->step;
    d->args.max_blocks = s->max_blocks;
    d->args.most_chunks = 0;
    for (int32_t i = 0; i < s->n_tokens; i++) {
        int32_t chunks = s->positions[i] / CHUNK_KEYS + 1;
        if (chunks > d->args.most_chunks) d->args.most_chunks = chunks;
    }
    d->args.merge_apart = merges_apart(b, s->n_tokens, d->args.most_chunks);
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
    int32_t barriers = 1 + b->shape.n_layers * (d->args.merge_apart ? 6 : 5);
    d->args.before += (unsigned)(barriers * d->blocks);
}
