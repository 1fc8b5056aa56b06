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
    MOST_TOKENS = 8,
    MOST_SLOTS = 16,
    SLAB = 2048,             /* bytes: K_UNIT columns of a panel */
    IN_FLIGHT = 4,           /* slabs of a warp on their way from memory at a time */
    DIRECT_CHUNKS = 8,       /* of a sequence: up to this many o_proj may merge itself */
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
    float *x, *qkv, *squares, *logits;
    float *parts;      /* [tokens, heads, max_chunks, head_dim] */
    float2 *part_sums; /* [tokens, heads, max_chunks] maximum, sum */
    unsigned *arrived;
    unsigned before; /* arrivals of earlier steps */
    int32_t n, n_layers, hidden, hidden_panels;
    int32_t n_heads, n_kv_heads, max_blocks, max_chunks, n_slots;
    bool merge_apart; /* chunks merge in a phase of their own */
    float eps, scale;
};

/* ---- shared memory ----------------------------------------------------------------------- */

/*
 * A warp's share of a phase. Panels go in groups: of a matrix with 8 segments two panels at a time,
 * of which the warp has the same segment; of one with 16 segments one panel, of which it has two
 * neighbouring segments. Either way two parts of unit[j] to + count[j] K_UNITs, whose slabs take
 * turns in the ring; the last group may lack its second part.
 */
struct share {
    int32_t panel, panels; /* first and how many */
    int32_t groups;
    int32_t unit[2], count[2];
};

struct shared {
    float4 sums[FINISHERS][16][32]; /* [segment, or 8 * panel of the group + segment] */
    float scores[8][SCORES];
    uint64_t full[WARPS][MOST_SLOTS];
    int32_t taken[WARPS]; /* slabs that a warp is done with */
    struct share shares[WARPS][N_PHASES];
    float scales[MOST_TOKENS];
    int32_t positions[MOST_TOKENS];
    float running[2]; /* of a merge: maximum, sum */
};

/* All of it: this struct, the rings, queries, keys and values of a chunk, the layers. */
struct memory {
    struct shared *s;
    uint8_t *ring; /* [WARPS][n_slots][SLAB] */
    bf16 *q, *k, *v;
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

/* ---- copies ------------------------------------------------------------------------------ */

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define NEEDS_HOPPER 1
#endif

static __device__ __forceinline__ void bulk_copy(void *to, const void *from, uint64_t *barrier)
{
#ifndef NEEDS_HOPPER
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"((int)SLAB)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], "
                 "%2, [%3];" ::"r"(shared_address(to)),
                 "l"(from), "r"((int)SLAB), "r"(shared_address(barrier))
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

static __device__ __forceinline__ void wait_copy(uint32_t barrier, uint32_t parity)
{
#ifndef NEEDS_HOPPER
    asm volatile("{\n.reg .pred done;\nAGAIN:\n"
                 "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
                 "@!done bra AGAIN;\n}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
#endif
}

/* ---- the stream of weights --------------------------------------------------------------- */

/* Where the copying of a warp's slabs has come to. */
struct stream {
    int32_t layer, phase, group, unit, part;
    bool ended;
};

static __device__ __forceinline__ bool is_whole(const struct decode_args &a, int32_t phase)
{
    return a.phases[phase].segments == 2 * WARPS;
}

static __device__ __forceinline__ bool has_part(const struct decode_args &a,
                                                const struct share &share, int32_t phase,
                                                int32_t group, int32_t part)
{
    return part == 0 || is_whole(a, phase) || 2 * group + 1 < share.panels;
}

/* To the next slab: parts take turns, then come units, groups, phases, layers. */
static __device__ void next_slab(struct stream *w, const struct decode_args &a,
                                 const struct share *shares)
{
    for (;;) {
        const struct share &share = shares[w->phase];
        if (++w->part == 2) w->part = 0, w->unit++;
        if (w->unit >= max(share.count[0], share.count[1])) w->part = 0, w->unit = 0, w->group++;
        if (w->group >= share.groups || max(share.count[0], share.count[1]) == 0) {
            w->part = -1, w->unit = w->group = 0;
            if (w->phase == HEAD) {
                w->ended = true;
                return;
            }
            if (w->phase == DOWN && w->layer + 1 < a.n_layers)
                w->phase = QKV, w->layer++;
            else
                w->phase++;
            continue;
        }
        if (w->unit < share.count[w->part] && has_part(a, share, w->phase, w->group, w->part))
            return;
    }
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
    uint8_t *ring = m.ring + warp * a.n_slots * SLAB;
    struct stream w = {-1, DOWN, shares[DOWN].groups, 0, -1, false}; /* before the first layer */
    int32_t slot = 0, behind = 0, issued = 0; /* behind: the slot of slab issued - IN_FLIGHT */
    uint32_t parity = 0;                      /* of behind */
    for (next_slab(&w, a, shares); !w.ended;) {
        bool full = issued - *(volatile int32_t *)&m.s->taken[warp] >= a.n_slots;
        if (full || (issued >= IN_FLIGHT && !has_come(&m.s->full[warp][behind], parity))) {
            __nanosleep(40); /* the others need the issue slots */
            continue;
        }
        if (issued >= IN_FLIGHT && ++behind == a.n_slots) behind = 0, parity ^= 1;
        const struct share &share = shares[w.phase];
        bool whole = is_whole(a, w.phase);
        int32_t panel = share.panel + (whole ? w.group : 2 * w.group + w.part);
        int64_t slab = (int64_t)panel * a.phases[w.phase].units + share.unit[w.part] + w.unit;
        const uint8_t *matrix = w.phase == HEAD ? a.head : m.layers[w.layer].weights[w.phase];
        bulk_copy(ring + slot * SLAB, matrix + slab * SLAB, &m.s->full[warp][slot]);
        issued++;
        if (++slot == a.n_slots) slot = 0;
        next_slab(&w, a, shares);
    }
}

/* A computing warp's place in its ring. */
struct place {
    uint32_t slab, slab_end;      /* shared addresses, of this lane's first 16 bytes */
    uint32_t barrier, ring_bytes; /* of the slab's slot; of the whole ring */
    uint32_t parity;
    int32_t taken, n_slots;
};

static __device__ __forceinline__ struct place first_place(const struct decode_args &a,
                                                           const struct memory &m)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    struct place w;
    w.ring_bytes = (uint32_t)(a.n_slots * SLAB);
    w.slab = shared_address(m.ring) + warp * w.ring_bytes + lane * 16;
    w.slab_end = w.slab + w.ring_bytes;
    w.barrier = shared_address(&m.s->full[warp][0]);
    w.parity = 0;
    w.taken = 0;
    w.n_slots = a.n_slots;
    return w;
}

static __device__ __forceinline__ uint4 load_shared(uint32_t address)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

/* The A fragments of the next K_UNIT. */
static __device__ __forceinline__ void take_slab(struct place *w, uint4 fragments[4])
{
    wait_copy(w->barrier, w->parity);
#pragma unroll
    for (int i = 0; i < 4; i++) fragments[i] = load_shared(w->slab + 512 * i);
    w->slab += SLAB;
    w->barrier += sizeof(uint64_t);
    w->taken++;
    if (w->slab == w->slab_end) {
        w->slab -= w->ring_bytes;
        w->barrier -= w->n_slots * (uint32_t)sizeof(uint64_t);
        w->parity ^= 1;
    }
}

/* What was taken may be written over. */
static __device__ __forceinline__ void give_back_slabs(const struct place &w,
                                                       const struct memory &m)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) *(volatile int32_t *)&m.s->taken[threadIdx.x / 32] = w.taken;
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

#endif
