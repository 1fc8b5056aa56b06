/*
 * decode.cuh - what the parts of the decode kernel share: its arguments, its shared memory, the
 * stream of weights, barriers. See decode.cu.
 *
 * The kernel's code runs once a layer, so it is kept short: fetching instructions takes longer than
 * executing them. Most loops are not unrolled for that reason.
 */
#ifndef LINNET_OPS_CUDA_DECODE_CUH
#define LINNET_OPS_CUDA_DECODE_CUH

#include "ops/cuda/attention.cuh"
#include "ops/cuda/product.cuh"
#include "ops/cuda/rope.cuh"

enum {
    WARPS = 8,     /* that compute */
    FINISHERS = 3, /* warps that add up segments and store; one more copies weights */
    THREADS = 32 * WARPS,
    WORKING_THREADS = THREADS + 32 * FINISHERS,
    ALL_THREADS = WORKING_THREADS + 32,
    COMPUTING_REGISTERS = 200, /* of a thread; the warps come in fours for that */
    OTHER_REGISTERS = 104,
    MOST_TOKENS = 8,
    UNIT_BYTES = 2048,              /* K_UNIT columns of a panel */
    SLAB_UNITS = 3,                 /* of a panel that are copied and multiplied at a time */
    SLOT = SLAB_UNITS * UNIT_BYTES, /* bytes */
    MOST_SLOTS = 8,
    SCORES = CHUNK_KEYS + 4, /* floats in a row of scores */
};

/* Named barriers. Sums have a buffer for each finisher. */
enum {
    ALL_ARRIVED = 1,
    SYNC_COMPUTING,
    SYNC_FINISHING,
    SUMS_FULL,
    SUMS_FREE = SUMS_FULL + FINISHERS
};

enum phase { QKV, O_PROJ, GATE_UP, DOWN, HEAD, N_PHASES };

struct phase_shape {
    int32_t units, segments, rows;
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
    bf16 *normed, *attn, *act; /* in fragments */
    int32_t attn_padded;
    float *x, *squares, *logits;
    /* Tagged words, layer i's with first_tag + i. Who writes a layer's is behind a barrier to which
     * the readers of the layer before came after reading. */
    uint32_t first_tag;
    uint64_t *qkv;       /* [4][rows][tokens 2 t, 2 t + 1] */
    uint64_t *parts;     /* [tokens, heads, max_chunks, head_dim] */
    uint64_t *part_sums; /* [tokens, heads, max_chunks][maximum, sum] */
    unsigned *arrived;
    unsigned before; /* arrivals of earlier steps */
    int32_t n, n_layers, hidden, hidden_panels;
    int32_t n_heads, n_kv_heads, max_blocks, max_chunks, n_slots;
    int32_t in_flight[N_PHASES]; /* slabs of a warp on their way from memory at a time */
    float eps, scale;
};

/* ---- shared memory ----------------------------------------------------------------------- */

/*
 * A warp's share of a phase: count[j] K_UNITs from unit[j] on. Of a matrix with 8 segments panels
 * go in groups of two, of which the warp has the same segment: slabs of the two panels take turns
 * in the ring; the last group may have but one. Of a matrix with 16 segments a group is one panel,
 * of which the warp has two neighbouring segments, one after the other.
 */
struct share {
    int32_t panel, panels; /* first and how many */
    int32_t groups;
    int32_t unit[2], count[2];
};

struct shared {
    float4 sums[FINISHERS][16][32]; /* [segment, or 8 * panel of the group + segment] */
    float scores[8][SCORES];
    uint64_t full[WARPS][MOST_SLOTS], empty[WARPS][MOST_SLOTS]; /* barriers of the rings' slots */
    uint64_t passed;                                            /* a barrier over all blocks is */
    struct share shares[WARPS][N_PHASES];
    float scales[MOST_TOKENS];
    int32_t positions[MOST_TOKENS];
    int32_t pages[CHUNK_KEYS / KV_BLOCK]; /* blocks of the first task's chunk */
};

/* All of it: this struct, the rings, queries, keys and values of a chunk, the layers. */
struct memory {
    struct shared *s;
    uint8_t *ring;   /* [WARPS][n_slots][SLOT] */
    bf16 *q, *k, *v; /* of a chunk; in their place, */
    float *stage;    /* what chunks of a head gave */
    struct decode_layer *layers;
};

static __host__ __device__ inline size_t rings_offset()
{
    return (sizeof(struct shared) + 127) / 128 * 128;
}

/* Queries of a group in a tile of 16 rows, and a chunk's keys and values. */
static __host__ __device__ inline size_t chunk_bytes(int32_t head_dim)
{
    return (size_t)(16 + 2 * CHUNK_KEYS) * (size_t)(head_dim + 8) * sizeof(bf16);
}

/* ---- the stream of weights --------------------------------------------------------------- */

static __device__ __forceinline__ bool is_whole(const struct decode_args &a, int32_t phase)
{
    return a.phases[phase].segments == 2 * WARPS;
}

/* Whether a group has two panels. */
static __device__ __forceinline__ bool is_pair(const struct share &share, bool whole, int32_t group)
{
    return !whole && 2 * group + 1 < share.panels;
}

/* Where the copying of a warp's slabs has come to; unit: of the part, where the slab begins. */
struct stream {
    int32_t layer, phase, group, part, unit;
    bool ended;
};

static __device__ void next_phase(struct stream *w, const struct decode_args &a,
                                  const struct share *shares)
{
    w->group = w->part = w->unit = 0;
    do {
        if (w->phase == HEAD) {
            w->ended = true;
            return;
        }
        if (w->phase == DOWN && w->layer + 1 < a.n_layers)
            w->phase = QKV, w->layer++;
        else
            w->phase++;
    } while (shares[w->phase].groups == 0 || shares[w->phase].count[0] == 0);
}

static __device__ void next_slab(struct stream *w, const struct decode_args &a,
                                 const struct share *shares)
{
    const struct share &share = shares[w->phase];
    if (is_pair(share, is_whole(a, w->phase), w->group)) {
        w->part ^= 1;
        if (w->part == 0) w->unit += SLAB_UNITS;
    } else {
        w->unit += SLAB_UNITS;
        if (is_whole(a, w->phase) && w->part == 0 && w->unit >= share.count[0])
            w->part = 1, w->unit = 0;
    }
    if (w->unit < share.count[w->part]) return;
    w->part = w->unit = 0;
    if (++w->group == share.groups) next_phase(w, a, shares);
}

/*
 * The warp that copies: a lane for each warp that computes. A slab is asked for when its slot is
 * free, but only so many at a time: requests that the memory cannot serve yet would stand in the
 * way of those that a phase waits for. The lanes poll each its own barriers, all at once, which
 * compute-sanitizer's racecheck does not follow; one after another they are too slow.
 */
static __device__ void copy_weights(const struct decode_args &a, const struct memory &m)
{
    int warp = threadIdx.x % 32;
    if (warp >= WARPS) return;
    const struct share *shares = m.s->shares[warp];
    uint32_t ring = shared_address(m.ring + warp * a.n_slots * SLOT);
    uint32_t full = shared_address(m.s->full[warp]), empty = shared_address(m.s->empty[warp]);
    struct stream w = {-1, DOWN, 0, 0, 0, false};       /* before the first layer */
    int32_t slot = 0, behind = 0, issued = 0, come = 0; /* behind: the slot of slab `come` */
    uint32_t parity = 0, emptied = 1;                   /* of behind; of slot, a lap ago */
    for (next_phase(&w, a, shares); !w.ended;) {
        if (come < issued && has_come(full + 8 * behind, parity)) {
            come++;
            if (++behind == a.n_slots) behind = 0, parity ^= 1;
        }
        if (issued - come >= a.in_flight[w.phase] ||
            (issued >= a.n_slots && !has_come(empty + 8 * slot, emptied))) {
            __nanosleep(40); /* the others need the issue slots */
            continue;
        }
        const struct share &share = shares[w.phase];
        bool whole = is_whole(a, w.phase);
        int32_t panel = share.panel + (whole ? w.group : 2 * w.group + w.part);
        int64_t unit = (int64_t)panel * a.phases[w.phase].units + share.unit[w.part] + w.unit;
        int32_t n = min(share.count[w.part] - w.unit, (int)SLAB_UNITS);
        const uint8_t *matrix = w.phase == HEAD ? a.head : m.layers[w.layer].weights[w.phase];
        uint32_t bytes = (uint32_t)(n * UNIT_BYTES);
        barrier_expect(full + 8 * slot, bytes);
        bulk_copy(ring + slot * SLOT, matrix + unit * UNIT_BYTES, bytes, full + 8 * slot);
        issued++;
        if (++slot == a.n_slots) slot = 0, emptied ^= 1;
        next_slab(&w, a, shares);
    }
}

/* A computing warp's place in its ring. */
struct place {
    uint32_t slot, slots_end; /* shared addresses, of this lane's first 16 bytes */
    uint32_t barrier;         /* of the slot */
    uint32_t parity, ring_bytes, barrier_bytes;
};

/* A slab that has come. */
struct slab {
    uint32_t at, full; /* shared addresses: of this lane's first 16 bytes, of its slot's barrier */
};

static __device__ __forceinline__ struct place first_place(const struct decode_args &a,
                                                           const struct memory &m)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    struct place w;
    w.ring_bytes = (uint32_t)(a.n_slots * SLOT);
    w.slot = shared_address(m.ring) + warp * w.ring_bytes + lane * 16;
    w.slots_end = w.slot + w.ring_bytes;
    w.barrier = shared_address(&m.s->full[warp][0]);
    w.barrier_bytes = (uint32_t)(a.n_slots * (int)sizeof(uint64_t));
    w.parity = 0;
    return w;
}

/* The next slab, once it is there. */
static __device__ __forceinline__ struct slab take_slab(struct place *w)
{
    struct slab slab = {w->slot, w->barrier};
    barrier_wait(w->barrier, w->parity);
    w->slot += SLOT;
    w->barrier += (uint32_t)sizeof(uint64_t);
    if (w->slot == w->slots_end) {
        w->slot -= w->ring_bytes;
        w->barrier -= w->barrier_bytes;
        w->parity ^= 1;
    }
    return slab;
}

/* A slab may be written over when the whole warp has come here. */
static __device__ __forceinline__ void give_back(const struct slab &slab)
{
    barrier_arrive(slab.full + (uint32_t)sizeof(((struct shared *)0)->full));
}

/* The A fragments of a K_UNIT. */
static __device__ __forceinline__ void load_fragments(uint32_t address, uint4 f[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) f[i] = load_shared(address + 512 * i);
}

/* ---- waiting for tagged words ------------------------------------------------------------ */

/*
 * Until a warp has all its words. round() loads what the lane needs and returns one of its words
 * that was not there yet, or NULL. Between rounds one lane asks for one word: polling for all of
 * them would take from the memory's speed what others need to finish.
 */
template <typename Round>
static __device__ __forceinline__ void await_words(uint32_t tag, Round round)
{
    for (;;) {
        const uint64_t *missing = round();
        unsigned lanes = __ballot_sync(~0u, missing != NULL);
        if (lanes == 0) return;
        if ((int)threadIdx.x % 32 == __ffs(lanes) - 1) {
            uint32_t v[2];
            while (!load_tagged(missing, tag, &v[0], &v[1])) {
            }
        }
        __syncwarp();
    }
}

/* ---- barriers ---------------------------------------------------------------------------- */

static __device__ __forceinline__ void sync_computing()
{
    sync_named(SYNC_COMPUTING, THREADS);
}

/* Of all blocks, the next barrier: how many arrivals end it, and its parity within the block. */
struct meeting {
    unsigned target;
    uint32_t parity;
};

static __device__ __forceinline__ struct meeting first_meeting(const struct decode_args &a)
{
    return {a.before, 1};
}

/* All that this block has written is visible to who has waited for the same barrier. The first warp
 * awaits the block's others and arrives for all. */
static __device__ __forceinline__ void arrive(const struct decode_args &a, struct meeting *next)
{
    next->target += gridDim.x;
    next->parity ^= 1;
    if (threadIdx.x >= 32) {
        arrive_named(ALL_ARRIVED, WORKING_THREADS);
        return;
    }
    sync_named(ALL_ARRIVED, WORKING_THREADS);
    if (threadIdx.x == 0) signal_add(a.arrived);
}

static __device__ __forceinline__ void wait_all(const struct decode_args &a, const struct memory &m,
                                                const struct meeting &next)
{
    uint32_t passed = shared_address(&m.s->passed);
    if (threadIdx.x == 0) {
        signal_await(a.arrived, next.target);
        barrier_arrive(passed);
    }
    barrier_wait(passed, next.parity);
}

#endif
