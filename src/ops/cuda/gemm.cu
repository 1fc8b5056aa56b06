/*
 * gemm.cu - products for more than 8 tokens on Hopper (wgmma). Weights are the M operand and come
 * to registers as they lie in memory, tokens are N and are read from shared memory. One warp copies
 * K_UNIT columns of a tile at a time into a ring of stages, the warpgroups of consumers multiply 64
 * rows each, and three more warps turn sums of squares into the tokens' scales meanwhile.
 *
 * The order of sums is that of every kernel (cuda_internal.h): a segment is one chain from zero,
 * and the segments' sums are added in ascending order. Tiles differ in how blocks work together:
 * alone; in pairs that share the tokens' columns, each copying one half to both; or in clusters
 * that split the columns on segment boundaries, for few tiles of long rows. These hand each
 * segment's sums to the block that adds them up, which is one of the cluster for each 16 x 8 part.
 */
#include "ops/cuda/hopper.cuh"
#include "ops/cuda/norm.cuh"

enum mode { ALONE, SHARED, SPLIT };

enum {
    GROUP_PANELS = 4,              /* panels of a warpgroup: one for each warp */
    UNIT_BYTES = PANEL_ROWS * 128, /* of a panel and K_UNIT columns */
    MAX_STAGES = 12,
    SCALE_WARPS = 3
};

/* What a launch does. */
struct work {
    struct product p; /* p.m is the host's; the next lines say what matters of it */
    const bf16 *weights;
    int32_t rows, units, panels;
    int32_t row_tiles, token_tiles, n_tiles; /* row_tiles: of a whole cluster */
    int32_t band;                            /* token tiles that are done together */
    int32_t stages, cluster;
};

#ifdef HOPPER_CODE

/* ---- what becomes of the sums ---- */

/* One lane's part of a panel: rows g and g + 8, tokens token + 8 i + 0, 1 of COUNT cores. */
struct place {
    int32_t panel, token; /* token: first of the first core, + 2 t */
    const float *scales;  /* of `token` on, in shared memory; NULL: 1 */
};

/* What the epilogue reads of global memory, apart so that it can be under way early. */
template <int COUNT> struct operands {
    float bias[2], gamma[2], x[COUNT][4];
};

template <int COUNT>
static __device__ __forceinline__ struct operands<COUNT> load_operands(const struct work &w,
                                                                       const struct place &at) {
    const struct product &p = w.p;
    struct operands<COUNT> o;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = at.panel * PANEL_ROWS + 8 * half + threadIdx.x % 32 / 4;
        o.bias[half] = p.bias && row < w.rows ? p.bias[row] : 0.0f;
        o.gamma[half] = p.gamma && row < w.rows ? p.gamma[row] : 0.0f;
        const float *y = p.y + (int64_t)at.token * w.rows + row;
#pragma unroll
        for (int i = 0; i < 2 * COUNT; i++) {
            int token = i / 2 * 8 + i % 2;
            bool real = p.to == TO_RESIDUAL && row < w.rows && at.token + token < p.n;
            o.x[i / 2][2 * half + i % 2] = real ? y[(int64_t)token * w.rows] : 0.0f;
        }
    }
    return o;
}

template <int COUNT>
static __device__ __forceinline__ void to_rows(const struct work &w, const struct place &at,
                                               const struct operands<COUNT> &o, float (*v)[4])
{
    const struct product &p = w.p;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = at.panel * PANEL_ROWS + 8 * half + threadIdx.x % 32 / 4;
        if (row >= w.rows) continue;
        float *y = p.y + (int64_t)at.token * w.rows + row;
#pragma unroll
        for (int i = 0; i < 2 * COUNT; i++) {
            int token = i / 2 * 8 + i % 2;
            float value = v[i / 2][2 * half + i % 2];
            if (at.scales) value = value * at.scales[token];
            if (p.bias) value = value + o.bias[half];
            if (at.token + token < p.n) y[(int64_t)token * w.rows] = value;
        }
    }
}

/* Stores 8 tokens x 8 columns: lane 4 g + t has column g of tokens 2t, 2t + 1. */
static __device__ __forceinline__ void store_core(const struct product &p, bf16 *core, int token,
                                                  float v0, float v1)
{
    __nv_bfloat162 pair = __floats2bfloat162_rn(v0, v1);
    uint32_t turned = transpose_8x8(*(uint32_t *)&pair);
    if (token < p.n) *(uint32_t *)core = turned;
}

template <int COUNT>
static __device__ __forceinline__ void to_act(const struct work &w, const struct place &at,
                                              float (*v)[4])
{
    const struct product &p = w.p;
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, first = at.token - 2 * t + g;
    bool real = at.panel * 8 + g < w.rows / 2;
    bf16 *core = p.out.data + act_at(p.out, first, at.panel * 8 + 2 * t);
    int64_t stride = p.out.cores ? 512 : p.out.padded * 8;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        float out[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float scale = at.scales ? at.scales[8 * i + j] : 1.0f;
            out[j] = real ? silu(v[i][j] * scale) * (v[i][2 + j] * scale) : 0.0f;
        }
        store_core(p, core + i * stride, first + 8 * i, out[0], out[1]);
    }
}

template <int COUNT>
static __device__ __forceinline__ void to_residual(const struct work &w, const struct place &at,
                                                   const struct operands<COUNT> &o, float (*v)[4])
{
    const struct product &p = w.p;
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, first = at.token - 2 * t + g;
    float x[COUNT][4];
    bf16 *core[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = at.panel * PANEL_ROWS + 8 * half + g;
        float *y = p.y + (int64_t)at.token * w.rows + row;
#pragma unroll
        for (int i = 0; i < 2 * COUNT; i++) {
            int token = i / 2 * 8 + i % 2, j = 2 * half + i % 2;
            float sum = v[i / 2][j];
            if (p.bias) sum = sum + o.bias[half];
            x[i / 2][j] = row < w.rows ? o.x[i / 2][j] + sum : 0.0f;
            if (row < w.rows && at.token + token < p.n) y[(int64_t)token * w.rows] = x[i / 2][j];
        }
        core[half] = p.out.data + act_at(p.out, first, at.panel * PANEL_ROWS + 8 * half + 2 * t);
    }
    if (!p.gamma) return;
    int64_t stride = p.out.cores ? 512 : p.out.padded * 8;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++)
            store_core(p, core[half] + i * stride, first + 8 * i, x[i][2 * half] * o.gamma[half],
                       x[i][2 * half + 1] * o.gamma[half]);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float squares = panel_squares(x[i][j], x[i][2 + j]);
            int token = at.token + 8 * i + j;
            if (g == 0 && token < p.n)
                p.out_squares[(int64_t)token * w.panels + at.panel] = squares;
        }
    }
}

template <int COUNT>
static __device__ __forceinline__ void finish(const struct work &w, const struct place &at,
                                              const struct operands<COUNT> &o, float (*v)[4])
{
    if (w.p.to == TO_ROWS)
        to_rows<COUNT>(w, at, o, v);
    else if (w.p.to == TO_ACT)
        to_act<COUNT>(w, at, v);
    else
        to_residual<COUNT>(w, at, o, v);
}

/* token_scale() of 8 tokens at once, so that their loads are in flight together. */
static __device__ __forceinline__ void core_scales(const struct product &p, int token, float *to)
{
    float sum[8] = {};
    uint32_t last = (p.n - 1) * p.in_panels, lane = threadIdx.x % 32;
    for (uint32_t i = lane; i < (uint32_t)p.in_panels; i += 32) {
        uint32_t at = token * p.in_panels;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            sum[j] += __ldcg(p.squares + min(at, last) + i);
            at += p.in_panels;
        }
    }
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2)
            sum[j] += __shfl_xor_sync(~0u, sum[j], offset);
#pragma unroll
    for (int j = 1; j < 8; j++) sum[0] = lane == j ? sum[j] : sum[0]; /* lane j: token j */
    if (lane < 8) to[lane] = 1.0f / sqrtf(sum[0] / (float)p.in_width + p.eps);
}

/* ---- the kernel ---- */

template <int N> struct barriers {
    uint64_t full[MAX_STAGES], empty[MAX_STAGES], scales_full[2], scales_empty[2];
    float scales[2][N];
};

struct tile {
    int32_t panel, token;
};

/* Where the copying warp is in its tiles, and a warp in the ring. */
struct cursor {
    int32_t stage;
    uint32_t phase;
    int32_t index, unit;
    struct tile tile; /* number `index` */
};

struct block {
    uint32_t ring;      /* shared memory: stages, then (SPLIT) the sums of segments */
    int32_t rank;       /* in the cluster */
    int32_t tile, step; /* its first tile, and how far to the next */
    int32_t first_unit, end_unit;
};

/* Tiles go token tile by token tile within a band, then row by row, then band by band: what runs
 * at one time shares weights and tokens in the L2 cache. */
template <int N, int GROUPS, int MODE>
static __device__ __forceinline__ struct tile tile_at(const struct work &w, const struct block &b,
                                                      int32_t i)
{
    int32_t of_band = w.band * w.row_tiles, first = i / of_band * w.band;
    int32_t in_band = i % of_band, width = min(w.band, w.token_tiles - first);
    int32_t row_tile = in_band / width;
    if (MODE == SHARED) row_tile = row_tile * 2 + b.rank;
    struct tile t = {row_tile * GROUPS * GROUP_PANELS, (first + in_band % width) * N};
    return t;
}

static __device__ __forceinline__ void next_stage(const struct work &w, struct cursor *c)
{
    if (++c->stage < w.stages) return;
    c->stage = 0;
    c->phase ^= 1;
}

template <int N, int GROUPS, int MODE>
static __device__ __forceinline__ void next_unit(const struct work &w, const struct block &b,
                                                 struct cursor *c)
{
    next_stage(w, c);
    if (++c->unit < b.end_unit) return;
    c->unit = b.first_unit;
    c->index += b.step;
    c->tile = tile_at<N, GROUPS, MODE>(w, b, c->index);
}

/* All of a unit's bytes are announced here. */
template <int N, int GROUPS, int MODE>
static __device__ __forceinline__ void copy_weights(const struct work &w, const struct block &b,
                                                    const struct cursor &c, uint64_t *full)
{
    const int STAGE_BYTES = GROUPS * GROUP_PANELS * UNIT_BYTES + N * 128;
    int panels = max(0, min(w.panels - c.tile.panel, GROUPS * GROUP_PANELS));
    int tokens = min(N, (int)w.p.in.capacity - c.tile.token);
    const bf16 *from = w.weights + ((int64_t)c.tile.panel * w.units + c.unit) * (UNIT_BYTES / 2);
    uint32_t to = b.ring + c.stage * STAGE_BYTES;
    if (!elected()) return;
    barrier_expect(&full[c.stage], panels * UNIT_BYTES + tokens * 128);
#pragma unroll
    for (int i = 0; i < GROUPS * GROUP_PANELS; i++)
        if (i < panels)
            copy(to + i * UNIT_BYTES, from + (int64_t)i * w.units * (UNIT_BYTES / 2), UNIT_BYTES,
                 &full[c.stage]);
}

template <int N, int GROUPS, int MODE>
static __device__ __forceinline__ void copy_tokens(const struct work &w, const struct block &b,
                                                   const struct cursor &c, uint64_t *full)
{
    const int WEIGHT_BYTES = GROUPS * GROUP_PANELS * UNIT_BYTES;
    int first = MODE == SHARED ? b.rank * N / 2 : 0, most = MODE == SHARED ? N / 2 : N;
    int tokens = min(most, (int)w.p.in.capacity - c.tile.token - first);
    if (tokens <= 0) return;
    uint32_t to = b.ring + c.stage * (WEIGHT_BYTES + N * 128) + WEIGHT_BYTES + first * 128;
    const bf16 *from = w.p.in.data + (c.unit * w.p.in.capacity + c.tile.token + first) * K_UNIT;
    if (!elected()) return;
    if (MODE == SHARED)
        copy_to_both(to, from, tokens * 128, &full[c.stage]);
    else
        copy(to, from, tokens * 128, &full[c.stage]);
}

/* The copying thread, before earlier kernels end: weights that fit the ring. Returns what is next.
 */
template <int N, int GROUPS, int MODE>
static __device__ __forceinline__ struct cursor
produce_early(const struct work &w, const struct block &b, struct barriers<N> &s)
{
    struct cursor c = {0, 0, b.tile, b.first_unit, tile_at<N, GROUPS, MODE>(w, b, b.tile)};
    if (b.first_unit == b.end_unit) c.index = w.n_tiles;
    while (c.phase == 0 && c.index < w.n_tiles) {
        copy_weights<N, GROUPS, MODE>(w, b, c, s.full);
        next_unit<N, GROUPS, MODE>(w, b, &c);
    }
    return c;
}

/* Then the tokens of these stages, and the rest of the tiles. */
template <int N, int GROUPS, int MODE>
static __device__ __forceinline__ void produce(const struct work &w, const struct block &b,
                                               const struct cursor &ahead, struct barriers<N> &s)
{
    previous_wait();
    asm volatile("fence.proxy.async.global;" ::: "memory");
    struct cursor c = {0, 0, b.tile, b.first_unit, tile_at<N, GROUPS, MODE>(w, b, b.tile)};
    if (b.first_unit == b.end_unit) return;
    while (c.phase == 0 && c.index < w.n_tiles) {
        copy_tokens<N, GROUPS, MODE>(w, b, c, s.full);
        next_unit<N, GROUPS, MODE>(w, b, &c);
    }
    for (c = ahead; c.index < w.n_tiles; next_unit<N, GROUPS, MODE>(w, b, &c)) {
        barrier_wait(&s.empty[c.stage], c.phase ^ 1);
        copy_weights<N, GROUPS, MODE>(w, b, c, s.full);
        copy_tokens<N, GROUPS, MODE>(w, b, c, s.full);
    }
}

/* The warps that turn squares into scales: a pair of buffers, one for a tile. */
template <int N, int GROUPS, int MODE>
static __device__ __forceinline__ void produce_scales(const struct work &w, const struct block &b,
                                                      int32_t first_core, int32_t end_core,
                                                      struct barriers<N> &s)
{
    if (!w.p.squares) return;
    previous_wait();
    int32_t turn = 0;
    for (int32_t i = b.tile; i < w.n_tiles; i += b.step, turn++) {
        struct tile t = tile_at<N, GROUPS, MODE>(w, b, i);
        barrier_wait(&s.scales_empty[turn % 2], turn / 2 % 2 ^ 1);
        for (int core = first_core + threadIdx.x / 32 - 1; core < end_core; core += SCALE_WARPS)
            core_scales(w.p, t.token + core * 8, s.scales[turn % 2] + core * 8);
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(&s.scales_full[turn % 2]);
    }
}

/* One lane of each warp says that its warp has read a stage; in both blocks of a pair. */
template <int MODE> static __device__ __forceinline__ void release(uint64_t *empty)
{
    if (MODE == SHARED) {
        if (threadIdx.x % 32 < 2) barrier_arrive_in(empty, threadIdx.x % 32);
    } else if (threadIdx.x % 32 == 0) {
        barrier_arrive(empty);
    }
}

/*
 * One segment: acc = the chain over `units` stages. Two products of 16 columns are always under
 * way while the fragments of the next two are loaded.
 */
template <int N, int GROUPS, int MODE>
static __device__ __forceinline__ void chain(const struct work &w, const struct block &b,
                                             int32_t units, struct cursor *c, struct barriers<N> &s,
                                             float (&acc)[N / 2])
{
    const int WEIGHT_BYTES = GROUPS * GROUP_PANELS * UNIT_BYTES;
    uint32_t lane_at = (threadIdx.x / 32 - 4) * UNIT_BYTES + threadIdx.x % 32 * 16;
    int32_t previous = -1;
#pragma unroll
    for (int j = 0; j < N / 2; j++) acc[j] = 0.0f;
    for (int32_t u = 0; u < units; u++) {
        uint32_t stage = b.ring + c->stage * (WEIGHT_BYTES + N * 128);
        uint64_t tokens = descriptor(stage + WEIGHT_BYTES);
        barrier_wait(&s.full[c->stage], c->phase);
        uint4 a0 = load_fragment(stage + lane_at), a1 = load_fragment(stage + lane_at + 512);
        mma_fence();
        mma<N>(acc, a0, tokens);
        mma<N>(acc, a1, tokens + (256 >> 4));
        mma_commit();
        mma_wait<1>();
        if (previous >= 0) release<MODE>(&s.empty[previous]);
        uint4 a2 = load_fragment(stage + lane_at + 1024),
              a3 = load_fragment(stage + lane_at + 1536);
        mma_fence();
        mma<N>(acc, a2, tokens + (512 >> 4));
        mma<N>(acc, a3, tokens + (768 >> 4));
        mma_commit();
        mma_wait<1>();
        previous = c->stage;
        next_stage(w, c);
    }
    mma_wait<0>();
    if (previous >= 0) release<MODE>(&s.empty[previous]);
}

/* ALONE, SHARED: whole tiles, one after another. */
template <int N, int GROUPS, int MODE>
static __device__ __forceinline__ void consume(const struct work &w, const struct block &b,
                                               struct barriers<N> &s)
{
    const int BATCH = N == 64 ? 2 : N < 64 ? N / 8 : 4;
    struct cursor c = {};
    int32_t segments = n_segments(w.units * K_UNIT), turn = 0;
    for (int32_t i = b.tile; i < w.n_tiles; i += b.step, turn++) {
        float sum[N / 8][4] = {};
        for (int32_t segment = 0; segment < segments; segment++) {
            int32_t units = w.units * (segment + 1) / segments - w.units * segment / segments;
            if (units == 0) continue;
            float acc[N / 2];
            chain<N, GROUPS, MODE>(w, b, units, &c, s, acc);
#pragma unroll
            for (int j = 0; j < N / 2; j++) sum[j / 4][j % 4] = sum[j / 4][j % 4] + acc[j];
        }
        struct tile t = tile_at<N, GROUPS, MODE>(w, b, i);
        struct place at = {t.panel + (int)threadIdx.x / 32 - 4, t.token + (int)threadIdx.x % 4 * 2,
                           NULL};
        if (w.p.squares) {
            at.scales = s.scales[turn % 2] + threadIdx.x % 4 * 2;
            barrier_wait(&s.scales_full[turn % 2], turn / 2 % 2);
        }
        if (turn == 0) previous_wait();
        if (at.panel < w.panels)
#pragma unroll
            for (int j = 0; j < N / 8; j += BATCH) {
                struct place part = {at.panel, at.token + 8 * j,
                                     at.scales ? at.scales + 8 * j : NULL};
                finish<BATCH>(w, part, load_operands<BATCH>(w, part), sum + j);
            }
        __syncwarp();
        if (w.p.squares && threadIdx.x % 32 == 0) barrier_arrive(&s.scales_empty[turn % 2]);
    }
}

/* SPLIT: the segments of this block are handed, each 16 x 8 part to the block that adds them up. */
template <int N, int GROUPS, int MODE>
static __device__ __forceinline__ void consume_segments(const struct work &w, const struct block &b,
                                                        int32_t per_block, uint32_t exchange,
                                                        struct barriers<N> &s)
{
    struct cursor c = {};
    int32_t segments = n_segments(w.units * K_UNIT), lane = threadIdx.x % 32;
    for (int32_t segment = segments * b.rank / w.cluster;
         segment < segments * (b.rank + 1) / w.cluster; segment++) {
        int32_t units = w.units * (segment + 1) / segments - w.units * segment / segments;
        if (units == 0) continue;
        float acc[N / 2];
        chain<N, GROUPS, MODE>(w, b, units, &c, s, acc);
#pragma unroll
        for (int core = 0; core < N / 8; core++) {
            int32_t part = core * GROUPS * GROUP_PANELS + threadIdx.x / 32 - 4;
            uint32_t to = exchange + ((part % per_block * segments + segment) * 32 + lane) * 16;
            store_in_cluster(address_in(to, part / per_block), acc + 4 * core);
        }
    }
}

/* The sum of all segments of one of this block's parts. */
static __device__ __forceinline__ void add_segments(const struct work &w, uint32_t part_at,
                                                    float *sum)
{
    int32_t segments = n_segments(w.units * K_UNIT);
    for (int j = 0; j < 4; j++) sum[j] = 0.0f;
    for (int32_t segment = 0; segment < segments; segment++) {
        if (w.units * (segment + 1) / segments == w.units * segment / segments) continue;
        uint4 v = load_fragment(part_at + (segment * 32 + threadIdx.x % 32) * 16);
        sum[0] = sum[0] + __uint_as_float(v.x);
        sum[1] = sum[1] + __uint_as_float(v.y);
        sum[2] = sum[2] + __uint_as_float(v.z);
        sum[3] = sum[3] + __uint_as_float(v.w);
    }
}

/* SPLIT: one tile. */
template <int N, int GROUPS, int MODE>
static __device__ __forceinline__ void consume_split(const struct work &w, const struct block &b,
                                                     int32_t per_block, uint32_t exchange,
                                                     struct barriers<N> &s)
{
    const int PANELS = GROUPS * GROUP_PANELS;
    struct tile t = tile_at<N, GROUPS, MODE>(w, b, b.tile);
    int32_t slot = threadIdx.x / 32 - 4;
    auto place_of = [&](int32_t slot) {
        int32_t part = b.rank * per_block + slot, token = part / PANELS * 8 + threadIdx.x % 4 * 2;
        struct place at = {t.panel + part % PANELS, t.token + token,
                           w.p.squares ? s.scales[0] + token : NULL};
        return at;
    };
    struct place at = place_of(slot);
    previous_wait();
    struct operands<1> o = {
    };
    if (slot < per_block && at.panel < w.panels) o = load_operands<1>(w, at);
    consume_segments<N, GROUPS, MODE>(w, b, per_block, exchange, s);
    __syncwarp();
    cluster_arrive();
    cluster_wait();
    if (w.p.squares) barrier_wait(&s.scales_full[0], 0);
    while (slot < per_block) {
        float sum[1][4];
        add_segments(w, exchange + slot * n_segments(w.units * K_UNIT) * 512, sum[0]);
        if (at.panel < w.panels) finish<1>(w, at, o, sum);
        slot += PANELS;
        at = place_of(slot);
        if (slot < per_block && at.panel < w.panels) o = load_operands<1>(w, at);
    }
}

template <int N, int GROUPS, int MODE>
static __device__ __forceinline__ void init_barriers(const struct work &w, struct barriers<N> &s)
{
    if (threadIdx.x == 0) {
        for (int i = 0; i < w.stages; i++) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], GROUPS * 4 * (MODE == SHARED ? 2 : 1));
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(&s.scales_full[i], SCALE_WARPS);
            barrier_init(&s.scales_empty[i], GROUPS * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
}

#endif

/* Registers of a thread of the copying warpgroup and of a consumer: together at most what the
 * launch bounds give; 0: all have the same. */
template <int N, int GROUPS> struct registers {
    static const int few = N >= 64 ? 40 : 0;
    static const int many = N >= 128 ? (GROUPS == 2 ? 232 : 216) : GROUPS == 2 ? 96 : 120;
};

template <int N, int GROUPS, int BLOCKS, int MODE>
static __global__ void __launch_bounds__(128 * (GROUPS + 1), BLOCKS)
    gemm_kernel(const __grid_constant__ struct work w)
{
#ifdef HOPPER_CODE
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ struct barriers<N> s;
    typedef struct registers<N, GROUPS> registers;
    const int STAGE_BYTES = GROUPS * GROUP_PANELS * UNIT_BYTES + N * 128;
    int32_t cluster = MODE == ALONE ? 1 : MODE == SHARED ? 2 : w.cluster;
    struct block b = {shared_address(memory),
                      (int32_t)blockIdx.x % cluster,
                      (int32_t)blockIdx.x / cluster,
                      (int32_t)gridDim.x / cluster,
                      0,
                      w.units};
    int32_t per_block = 0, first_core = 0, end_core = N / 8;
    uint32_t exchange = b.ring + w.stages * STAGE_BYTES;
    if (MODE == SPLIT) {
        int32_t segments = n_segments(w.units * K_UNIT);
        b.first_unit = w.units * (segments * b.rank / cluster) / segments;
        b.end_unit = w.units * (segments * (b.rank + 1) / cluster) / segments;
        per_block = GROUPS * GROUP_PANELS * (N / 8) / cluster;
        first_core = b.rank * per_block / (GROUPS * GROUP_PANELS);
        end_core = ((b.rank + 1) * per_block - 1) / (GROUPS * GROUP_PANELS) + 1;
    }
    asm volatile("griddepcontrol.launch_dependents;");
    init_barriers<N, GROUPS, MODE>(w, s);
    struct cursor ahead = {};
    if (MODE != ALONE) cluster_arrive();
    int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    if (warp == 0) ahead = produce_early<N, GROUPS, MODE>(w, b, s);
    __syncwarp();
    if (MODE != ALONE) cluster_wait(); /* now the other blocks' shared memory may be used */
    if (threadIdx.x < 128) {
        if constexpr (registers::few > 0)
            asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers::few));
        if (warp == 0)
            produce<N, GROUPS, MODE>(w, b, ahead, s);
        else
            produce_scales<N, GROUPS, MODE>(w, b, first_core, end_core, s);
        __syncwarp();
        if (MODE != ALONE) cluster_arrive();
        if (MODE != ALONE) cluster_wait();
    } else {
        if constexpr (registers::few > 0)
            asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers::many));
        if (MODE == SPLIT)
            consume_split<N, GROUPS, MODE>(w, b, per_block, exchange, s);
        else
            consume<N, GROUPS, MODE>(w, b, s);
        __syncwarp();
        if (MODE == SHARED) cluster_arrive();
        if (MODE == SHARED) cluster_wait();
    }
#endif
}

/* ---- which kernel for which shape ---- */

struct variant {
    void (*kernel)(const struct work);
    int32_t tokens, groups, blocks; /* blocks: that fit a multiprocessor's registers */
    enum mode mode;
};

#define VARIANT(N, GROUPS, BLOCKS, MODE)                              \
    {                                                                 \
        gemm_kernel<N, GROUPS, BLOCKS, MODE>, N, GROUPS, BLOCKS, MODE \
    }

static const struct variant variants[] = {
    VARIANT(16, 1, 3, ALONE),  VARIANT(16, 1, 3, SPLIT),   VARIANT(32, 1, 3, ALONE),
    VARIANT(32, 1, 3, SPLIT),  VARIANT(32, 2, 2, ALONE),   VARIANT(64, 1, 3, ALONE),
    VARIANT(64, 1, 3, SPLIT),  VARIANT(64, 2, 2, ALONE),   VARIANT(64, 2, 2, SHARED),
    VARIANT(64, 2, 2, SPLIT),  VARIANT(128, 1, 2, ALONE),  VARIANT(128, 1, 2, SPLIT),
    VARIANT(128, 2, 1, ALONE), VARIANT(128, 2, 1, SHARED), VARIANT(128, 2, 1, SPLIT),
    VARIANT(192, 2, 1, ALONE), VARIANT(192, 2, 1, SHARED),
};

enum { N_VARIANTS = sizeof variants / sizeof *variants, SHARED_BYTES = 228 << 10, MIN_STAGES = 4 };

static int32_t parts(int32_t n, int32_t of)
{
    return (n + of - 1) / of;
}

/* Stages of the ring, if `blocks` of this kind are to share a multiprocessor. */
static int32_t stages_for(const struct variant *v, int32_t blocks, int32_t exchange)
{
    int32_t stage = v->groups * GROUP_PANELS * UNIT_BYTES + v->tokens * 128;
    int32_t fixed = 1024 + 16 * MAX_STAGES + 64 + 8 * v->tokens; /* the system's and ours */
    int32_t stages = (SHARED_BYTES / blocks - fixed - exchange) / stage;
    return stages < MAX_STAGES ? stages : MAX_STAGES;
}

/* cluster: blocks that split the columns (SPLIT) */
static void launch(struct backend *b, const struct product *p, const struct variant *v,
                   int32_t cluster)
{
    struct work w = {*p, p->m->data, (int32_t)p->m->rows, (int32_t)(p->m->padded / K_UNIT),
                     (int32_t)p->m->panels};
    int32_t tile_panels = v->groups * GROUP_PANELS, exchange = 0;
    w.cluster = v->mode == SPLIT ? cluster : v->mode == SHARED ? 2 : 1;
    w.row_tiles = parts(w.panels, tile_panels * (v->mode == SHARED ? 2 : 1));
    w.token_tiles = parts(p->n, v->tokens);
    w.n_tiles = w.row_tiles * w.token_tiles;
    w.band = 12;
    if (v->mode == SPLIT)
        exchange = tile_panels * v->tokens / 8 / cluster * n_segments(p->m->padded) * 512;
    int32_t blocks = v->blocks;
    while (blocks > 1 && stages_for(v, blocks, exchange) < MIN_STAGES) blocks--;
    w.stages = stages_for(v, blocks, exchange);
    int32_t units = v->mode == SPLIT ? parts(w.units, cluster) + 1 : w.units * w.n_tiles;
    if (w.stages > units) w.stages = units;
    int32_t clusters = w.n_tiles;
    if (v->mode != SPLIT && v->tokens >= 128) { /* one after another: the next is copied early */
        int32_t most = b->multiprocessors * blocks / w.cluster;
        clusters = clusters < most ? clusters : most;
    }
    size_t bytes =
        (size_t)w.stages * (size_t)(tile_panels * UNIT_BYTES + v->tokens * 128) + (size_t)exchange;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = (unsigned)w.cluster;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(clusters * w.cluster));
    config.blockDim = dim3(128 * (unsigned)(v->groups + 1));
    config.dynamicSmemBytes = bytes;
    config.stream = b->stream;
    config.attrs = attributes;
    config.numAttrs = w.cluster > 1 ? 2 : 1;
    if (cuda_good(b,
                  cudaFuncSetAttribute(v->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       (int)bytes),
                  "shared memory for a matrix product"))
        cuda_good(b, cudaLaunchKernelEx(&config, v->kernel, w), "a matrix product");
}

static const struct variant *variant_of(int32_t tokens, int32_t groups, enum mode mode)
{
    for (int i = 0; i < N_VARIANTS; i++)
        if (variants[i].tokens == tokens && variants[i].groups == groups &&
            variants[i].mode == mode)
            return &variants[i];
    return NULL;
}

bool gemm_run(struct backend *b, const struct product *p)
{
    if (b->capability != 90) return false;
    int32_t tokens = p->n <= 16 ? 16 : p->n <= 32 ? 32 : p->n <= 64 ? 64 : 128;
    /* few tiles: split the columns */
    if (p->n <= 256 && parts((int32_t)p->m->panels, 4) <= b->multiprocessors)
        launch(b, p, variant_of(tokens, 1, SPLIT), 8);
    else if (p->n <= 32)
        launch(b, p, variant_of(tokens, 1, ALONE), 1);
    else if (p->n <= 64)
        launch(b, p, variant_of(64, 2, ALONE), 1);
    else if (p->n <= 128)
        launch(b, p, variant_of(128, 1, ALONE), 1);
    else
        launch(b, p, variant_of(p->n <= 256 ? 128 : 192, 2, SHARED), 1);
    return true;
}
