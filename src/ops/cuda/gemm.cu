/*
 * gemm.cu - products for more than 8 tokens on Hopper (wgmma). Weights are the M operand and come
 * to registers as they lie in memory, tokens are N and are read from shared memory. Two warps copy
 * weights and tokens, K_UNIT columns at a time, into a ring of stages; warpgroups of consumers
 * multiply 64 rows each; two more warps turn sums of squares into the tokens' scales meanwhile.
 *
 * The order of sums is that of every kernel (cuda_internal.h): a segment is one chain from zero,
 * and the segments' sums are added in ascending order. Where there are few tiles of long rows, the
 * blocks of a cluster split the columns of a tile on segment boundaries (SPLIT), and each hands its
 * segments' sums to the block that adds them up, which is one for each 16 x 8 part of the tile.
 */
#include "ops/cuda/hopper.cuh"
#include "ops/cuda/norm.cuh"

/* A GPU of this capability takes these kernels: they must not be empty. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(HOPPER_CODE)
#error "build for the architecture 90a, not 90: see CMAKE_CUDA_ARCHITECTURES"
#endif

enum {
    GROUP_PANELS = 4,              /* panels of a warpgroup: one for each warp */
    UNIT_BYTES = PANEL_ROWS * 128, /* of a panel and K_UNIT columns */
    CORES = 512,                   /* values of 8 tokens and K_UNIT columns of activations */
    MAX_STAGES = 12,
    SCALE_WARPS = 2 /* 2 and 3 of the block; 0 copies weights, 1 tokens */
};

/* What a launch does. */
struct work {
    struct product p; /* p.m is the host's; the next lines say what matters of it */
    const bf16 *weights;
    int32_t rows, units, panels, segments, segment_bits; /* 2^segment_bits segments */
    int32_t row_tiles;
    int32_t band; /* token tiles that are done together */
    int32_t step; /* row tiles from one of a block to its next */
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

template <enum product_to TO, int COUNT>
static __device__ __forceinline__ void load_operands(const struct work &w, const struct place &at,
                                                     struct operands<COUNT> &o)
{
    const struct product &p = w.p;
    if constexpr (TO != TO_ACT)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = at.panel * PANEL_ROWS + 8 * half + threadIdx.x % 32 / 4;
            o.bias[half] = p.bias && row < w.rows ? p.bias[row] : 0.0f;
            o.gamma[half] = p.gamma && row < w.rows ? p.gamma[row] : 0.0f;
            const float *y = p.y + (int64_t)at.token * w.rows + row;
#pragma unroll
            for (int i = 0; i < 2 * COUNT; i++) {
                int token = i / 2 * 8 + i % 2;
                bool real = TO == TO_RESIDUAL && row < w.rows && at.token + token < p.n;
                o.x[i / 2][2 * half + i % 2] = real ? y[(int64_t)token * w.rows] : 0.0f;
            }
        }
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

/* Where a lane's two values of 8 tokens x 8 columns go (which are one core of p.out); `column`:
 * first of them, / 8. Cores of the next 8 tokens follow. */
static __device__ __forceinline__ bf16 *core_of(const struct product &p, const struct place &at,
                                                int32_t column)
{
    int32_t lane = threadIdx.x % 32, token = at.token - lane % 4 * 2;
    int64_t unit = column / 8 * (int32_t)(p.out.capacity / 8) + token / 8;
    return p.out.data + unit * CORES + column % 8 * 64 + lane * 2;
}

/* v: column g of tokens 2t, 2t + 1. */
static __device__ __forceinline__ void store_core(const struct product &p, const struct place &at,
                                                  bf16 *core, int i, float v0, float v1)
{
    __nv_bfloat162 pair = __floats2bfloat162_rn(v0, v1);
    uint32_t turned = transpose_8x8(*(uint32_t *)&pair);
    int32_t lane = threadIdx.x % 32, token = at.token - lane % 4 * 2 + lane / 4;
    if (token + 8 * i < p.n) *(uint32_t *)(core + i * CORES) = turned;
}

/* silu()'s bits: whether e^-v is denormal or zero, 1 + e^-v is 1. */
static __device__ __forceinline__ float fast_silu(float v)
{
    return __fdividef(v, 1.0f + exp2_normal(-v * 1.4426950408889634f));
}

template <int COUNT>
static __device__ __forceinline__ void to_act(const struct work &w, const struct place &at,
                                              float (*v)[4])
{
    bool real = at.panel * 8 + threadIdx.x % 32 / 4 < w.rows / 2;
    bf16 *core = core_of(w.p, at, at.panel);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        float2 scale = {1.0f, 1.0f};
        if (at.scales) scale = *(const float2 *)(at.scales + 8 * i);
        float v0 = fast_silu(v[i][0] * scale.x) * (v[i][2] * scale.x);
        float v1 = fast_silu(v[i][1] * scale.y) * (v[i][3] * scale.y);
        store_core(w.p, at, core, i, real ? v0 : 0.0f, real ? v1 : 0.0f);
    }
}

template <int COUNT>
static __device__ __forceinline__ void to_residual(const struct work &w, const struct place &at,
                                                   const struct operands<COUNT> &o, float (*v)[4])
{
    const struct product &p = w.p;
    int g = threadIdx.x % 32 / 4;
    float x[COUNT][4];
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
    }
    if (!p.gamma) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        bf16 *core = core_of(p, at, at.panel * 2 + half);
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            store_core(p, at, core, i, x[i][2 * half] * o.gamma[half],
                       x[i][2 * half + 1] * o.gamma[half]);
    }
#pragma unroll
    for (int i = 0; i < 2 * COUNT; i++) {
        float squares = panel_squares(x[i / 2][i % 2], x[i / 2][2 + i % 2]);
        int token = at.token + i / 2 * 8 + i % 2;
        if (g == 0 && token < p.n) p.out_squares[(int64_t)token * w.panels + at.panel] = squares;
    }
}

template <enum product_to TO, int COUNT>
static __device__ __forceinline__ void finish(const struct work &w, const struct place &at,
                                              const struct operands<COUNT> &o, float (*v)[4])
{
    if constexpr (TO == TO_ROWS) to_rows<COUNT>(w, at, o, v);
    if constexpr (TO == TO_ACT) to_act<COUNT>(w, at, v);
    if constexpr (TO == TO_RESIDUAL) to_residual<COUNT>(w, at, o, v);
}

/* token_scale() of 8 tokens at once, with the loads of three panels a lane in flight together. A
 * sum over lanes is halved at each step: a lane goes on with half of the tokens it had. */
static __device__ __forceinline__ void scales_of(const struct product &p, int32_t token, float *to)
{
    const int TOKENS = 8;
    float sum[TOKENS] = {};
    int32_t lane = threadIdx.x % 32;
    const float *squares = p.squares + (int64_t)token * p.in_panels + lane;
    for (int32_t left = p.in_panels - lane; left > 0; left -= 96, squares += 96) {
        float v[3][TOKENS];
#pragma unroll
        for (int j = 0; j < TOKENS; j++)
#pragma unroll
            for (int k = 0; k < 3; k++) {
                bool there = token + j < p.n && 32 * k < left;
                v[k][j] = there ? __ldcg(squares + j * p.in_panels + 32 * k) : 0.0f;
            }
#pragma unroll
        for (int k = 0; k < 3; k++)
#pragma unroll
            for (int j = 0; j < TOKENS; j++) sum[j] += v[k][j];
    }
#pragma unroll
    for (int count = TOKENS / 2, offset = 16; offset > 0; count /= 2, offset /= 2) {
        bool high = lane & offset;
#pragma unroll
        for (int j = 0; j < count; j++) {
            float other = __shfl_xor_sync(~0u, high ? sum[j] : sum[j + count], offset);
            sum[j] = (high ? sum[j + count] : sum[j]) + other;
        }
        if (count == 0) sum[0] += __shfl_xor_sync(~0u, sum[0], offset);
    }
    /* bits 4, 3 and 2 of the lane have chosen */
    if (lane % 4 == 0) to[lane / 4] = 1.0f / sqrtf(sum[0] / (float)p.in_width + p.eps);
}

/* ---- the kernel ---- */

template <int N> struct barriers {
    uint64_t full[MAX_STAGES], empty[MAX_STAGES], scales_full[2], scales_empty[2];
    float scales[2][N];
};

struct tile {
    int32_t row, token; /* row: number of the row tile */
};

/* Where the copying warp is in its tiles, and a warp in the ring. */
struct cursor {
    int32_t stage;
    uint32_t phase;
    int32_t unit;
    struct tile tile;
};

struct block {
    uint32_t ring; /* shared memory: stages, then (SPLIT) the sums of segments */
    int32_t rank;  /* in the cluster */
    int32_t first_unit, end_unit;
};

/* Tiles go token tile by token tile within a band, then row by row, then band by band: what runs
 * at one time shares weights and tokens in the L2 cache. Blocks step by whole bands' widths, so
 * that each keeps its tokens within a band. A block is done when a tile has no tokens. */
template <int N> static __device__ __forceinline__ void settle(const struct work &w, struct tile *t)
{
    while (t->row >= w.row_tiles) {
        t->row -= w.row_tiles;
        t->token += w.band * N;
    }
}

template <int N> static __device__ __forceinline__ struct tile first_tile(const struct work &w)
{
    int32_t i = (int32_t)blockIdx.x / w.cluster;
    struct tile t = {i / w.band, i % w.band * N};
    settle<N>(w, &t);
    return t;
}

template <int N>
static __device__ __forceinline__ void next_tile(const struct work &w, struct tile *t)
{
    t->row += w.step;
    settle<N>(w, t);
}

static __device__ __forceinline__ void next_stage(const struct work &w, struct cursor *c)
{
    if (++c->stage < w.stages) return;
    c->stage = 0;
    c->phase ^= 1;
}

static __device__ __forceinline__ int32_t previous_stage(const struct work &w,
                                                         const struct cursor &c)
{
    return (c.stage == 0 ? w.stages : c.stage) - 1;
}

template <int N>
static __device__ __forceinline__ void next_unit(const struct work &w, const struct block &b,
                                                 struct cursor *c)
{
    next_stage(w, c);
    if (++c->unit < b.end_unit) return;
    c->unit = b.first_unit;
    next_tile<N>(w, &c->tile);
}

/* All of a block's units, weights or tokens. The weights that fit the ring are under way before
 * earlier kernels end. */
template <int N, int GROUPS, bool WEIGHTS>
static __device__ __forceinline__ void produce(const struct work &w, const struct block &b,
                                               struct barriers<N> &s)
{
    const int PANELS = GROUPS * GROUP_PANELS, WEIGHT_BYTES = PANELS * UNIT_BYTES;
    struct cursor c = {0, 0, b.first_unit, first_tile<N>(w)};
    if (b.first_unit == b.end_unit) return;
    if (!WEIGHTS) {
        previous_wait();
        asm volatile("fence.proxy.async.global;" ::: "memory");
    }
    for (uint32_t lap = 0; c.tile.token < w.p.n; lap |= c.phase) {
        if (lap) barrier_wait(&s.empty[c.stage], c.phase ^ 1);
        uint32_t to = b.ring + c.stage * (WEIGHT_BYTES + N * 128);
        if (WEIGHTS) {
            int64_t stride = (int64_t)w.units * (UNIT_BYTES / 2);
            int32_t first = c.tile.row * PANELS, panels = min(w.panels - first, PANELS);
            const bf16 *from = w.weights + first * stride + c.unit * (UNIT_BYTES / 2);
            if (elected()) {
                barrier_expect(&s.full[c.stage], panels * UNIT_BYTES);
#pragma unroll
                for (int i = 0; i < PANELS; i++, from += stride)
                    if (i < panels)
                        bulk_copy(to + i * UNIT_BYTES, from, UNIT_BYTES, &s.full[c.stage]);
            }
        } else {
            int64_t stride = w.p.in.capacity * K_UNIT;
            const bf16 *from = w.p.in.data + c.unit * stride + c.tile.token * K_UNIT;
            uint32_t bytes = min(N, (int)w.p.in.capacity - c.tile.token) * 128;
            if (elected()) {
                barrier_expect(&s.full[c.stage], bytes);
                bulk_copy(to + WEIGHT_BYTES, from, bytes, &s.full[c.stage]);
            }
        }
        next_unit<N>(w, b, &c);
    }
}

/* The warps that turn squares into scales, when a block comes to other tokens: a pair of buffers.
 */
template <int N, int GROUPS>
static __device__ __forceinline__ void produce_scales(const struct work &w, const struct block &b,
                                                      int32_t first_core, int32_t end_core,
                                                      struct barriers<N> &s)
{
    if (!w.p.squares) return;
    previous_wait();
    int32_t turn = -1, token = -1;
    for (struct tile t = first_tile<N>(w); t.token < w.p.n; next_tile<N>(w, &t)) {
        if (t.token == token) continue;
        token = t.token;
        turn++;
        barrier_wait(&s.scales_empty[turn % 2], turn / 2 % 2 ^ 1);
        int32_t end = min(end_core * 8, w.p.n - token);
        for (int j = (first_core + threadIdx.x / 32 - 2) * 8; j < end; j += SCALE_WARPS * 8)
            scales_of(w.p, token + j, s.scales[turn % 2] + j);
        barrier_arrive(&s.scales_full[turn % 2]);
    }
}

/* The weights of one unit are four fragments a lane; each is loaded two products ahead. */
struct fragments {
    uint4 k[4];
};

template <int N, int GROUPS>
static __device__ __forceinline__ uint32_t stage_at(const struct block &b, const struct cursor &c)
{
    return b.ring + c.stage * (GROUPS * GROUP_PANELS * UNIT_BYTES + N * 128);
}

static __device__ __forceinline__ uint32_t lane_at()
{
    return (threadIdx.x / 32 - 4) * UNIT_BYTES + threadIdx.x % 32 * 16;
}

/* Before the first unit of a tile. */
template <int N, int GROUPS>
static __device__ __forceinline__ void load_first(const struct block &b, const struct cursor &c,
                                                  struct barriers<N> &s, struct fragments &f)
{
    uint32_t at = stage_at<N, GROUPS>(b, c) + lane_at();
    barrier_wait(&s.full[c.stage], c.phase);
    f.k[0] = load_shared(at);
    f.k[1] = load_shared(at + 512);
}

/* acc = (FIRST) or += the products of one unit, whose first two fragments are loaded; the next
 * unit's first two are loaded here if it belongs to the tile (`ahead`). */
template <int N, int GROUPS, bool FIRST>
static __device__ __forceinline__ void
multiply_unit(const struct work &w, const struct block &b, bool ahead, struct cursor *c,
              struct barriers<N> &s, struct fragments &f, float (&acc)[N / 2])
{
    uint32_t stage = stage_at<N, GROUPS>(b, *c), at = stage + lane_at();
    uint64_t tokens = descriptor(stage + GROUPS * GROUP_PANELS * UNIT_BYTES);
    int32_t previous = previous_stage(w, *c);
    next_stage(w, c);
    mma_fence();
    mma<N, !FIRST>(acc, f.k[0], tokens);
    mma_commit();
    mma_wait<2>();
    f.k[2] = load_shared(at + 1024);
    mma_fence();
    mma<N, true>(acc, f.k[1], tokens + (256 >> 4));
    mma_commit();
    mma_wait<2>();
    if (!FIRST) barrier_arrive(&s.empty[previous]);
    f.k[3] = load_shared(at + 1536);
    mma_fence();
    mma<N, true>(acc, f.k[2], tokens + (512 >> 4));
    mma_commit();
    at = stage_at<N, GROUPS>(b, *c) + lane_at();
    if (ahead) barrier_wait(&s.full[c->stage], c->phase);
    mma_wait<2>();
    if (ahead) f.k[0] = load_shared(at);
    mma_fence();
    mma<N, true>(acc, f.k[3], tokens + (768 >> 4));
    mma_commit();
    mma_wait<2>();
    if (ahead) f.k[1] = load_shared(at + 512);
}

/* One segment: acc = the chain over `units` stages; `more`: others of the tile follow. */
template <int N, int GROUPS>
static __device__ __forceinline__ void
chain(const struct work &w, const struct block &b, int32_t units, bool more, struct cursor *c,
      struct barriers<N> &s, struct fragments &f, float (&acc)[N / 2])
{
    multiply_unit<N, GROUPS, true>(w, b, units > 1 || more, c, s, f, acc);
    for (int32_t u = 1; u < units; u++)
        multiply_unit<N, GROUPS, false>(w, b, u + 1 < units || more, c, s, f, acc);
    mma_wait<0>();
    barrier_arrive(&s.empty[previous_stage(w, *c)]);
}

/* Units of a segment. */
static __device__ __forceinline__ int32_t units_of(const struct work &w, int32_t segment)
{
    return (w.units * (segment + 1) >> w.segment_bits) - (w.units * segment >> w.segment_bits);
}

/* Whole tiles, one after another. */
template <int N, int GROUPS, enum product_to TO>
static __device__ __forceinline__ void consume(const struct work &w, const struct block &b,
                                               struct barriers<N> &s)
{
    const int BATCH = N == 192 ? 8 : N == 64 || N == 16 ? 2 : 4;
    struct cursor c = {};
    struct fragments f;
    int32_t turn = -1, token = -1, warp = threadIdx.x / 32 - 4;
    for (struct tile t = first_tile<N>(w); t.token < w.p.n; next_tile<N>(w, &t)) {
        float sum[N / 8][4] = {};
        load_first<N, GROUPS>(b, c, s, f);
        for (int32_t segment = 0, left = w.units; left > 0; segment++) {
            int32_t units = units_of(w, segment);
            if (units == 0) continue;
            float acc[N / 2];
            left -= units;
            chain<N, GROUPS>(w, b, units, left > 0, &c, s, f, acc);
#pragma unroll
            for (int j = 0; j < N / 2; j++) sum[j / 4][j % 4] = sum[j / 4][j % 4] + acc[j];
        }
        if (t.token != token) {
            if (turn >= 0) barrier_arrive(&s.scales_empty[turn % 2]);
            token = t.token;
            turn++;
            if (w.p.squares) barrier_wait(&s.scales_full[turn % 2], turn / 2 % 2);
            previous_wait();
        }
        int32_t in_tile = threadIdx.x % 4 * 2, panel = t.row * GROUPS * GROUP_PANELS + warp;
        if (panel < w.panels)
#pragma unroll
            for (int j = 0; j < N / 8; j += BATCH) {
                struct place at = {panel, token + 8 * j + in_tile,
                                   w.p.squares ? s.scales[turn % 2] + 8 * j + in_tile : NULL};
                if (token + 8 * j >= w.p.n) break;
                struct operands<BATCH> o;
                load_operands<TO, BATCH>(w, at, o);
                finish<TO, BATCH>(w, at, o, sum + j);
            }
        __syncwarp();
    }
}

/* SPLIT: the segments of this block are handed, each 16 x 8 part to the block that adds them up. */
template <int N, int GROUPS>
static __device__ __forceinline__ void consume_segments(const struct work &w, const struct block &b,
                                                        int32_t per_block, uint32_t exchange,
                                                        struct barriers<N> &s)
{
    struct cursor c = {};
    struct fragments f;
    int32_t left = b.end_unit - b.first_unit, lane = threadIdx.x % 32;
    if (left > 0) load_first<N, GROUPS>(b, c, s, f);
    for (int32_t segment = w.segments * b.rank / w.cluster; left > 0; segment++) {
        int32_t units = units_of(w, segment);
        if (units == 0) continue;
        float acc[N / 2];
        left -= units;
        chain<N, GROUPS>(w, b, units, left > 0, &c, s, f, acc);
#pragma unroll
        for (int core = 0; core < N / 8; core++) {
            int32_t part = core * GROUPS * GROUP_PANELS + threadIdx.x / 32 - 4;
            uint32_t to = exchange + ((part % per_block * w.segments + segment) * 32 + lane) * 16;
            store_in_cluster(address_in(to, part / per_block), acc + 4 * core);
        }
    }
}

/* The sum of all segments of one of this block's parts. */
static __device__ __forceinline__ void add_segments(const struct work &w, uint32_t part_at,
                                                    float *sum)
{
    for (int j = 0; j < 4; j++) sum[j] = 0.0f;
    for (int32_t segment = 0; segment < w.segments; segment++) {
        if (units_of(w, segment) == 0) continue;
        uint4 v = load_shared(part_at + (segment * 32 + threadIdx.x % 32) * 16);
        sum[0] = sum[0] + __uint_as_float(v.x);
        sum[1] = sum[1] + __uint_as_float(v.y);
        sum[2] = sum[2] + __uint_as_float(v.z);
        sum[3] = sum[3] + __uint_as_float(v.w);
    }
}

/* SPLIT: one tile. */
template <int N, int GROUPS, enum product_to TO>
static __device__ __forceinline__ void consume_split(const struct work &w, const struct block &b,
                                                     int32_t per_block, uint32_t exchange,
                                                     struct barriers<N> &s)
{
    const int PANELS = GROUPS * GROUP_PANELS;
    struct tile tile = first_tile<N>(w);
    int32_t slot = threadIdx.x / 32 - 4;
    auto place_of = [&](int32_t slot) {
        int32_t part = b.rank * per_block + slot, token = part / PANELS * 8 + threadIdx.x % 4 * 2;
        struct place at = {tile.row * PANELS + part % PANELS, tile.token + token,
                           w.p.squares ? s.scales[0] + token : NULL};
        return at;
    };
    struct place at = place_of(slot);
    previous_wait();
    struct operands<1> o;
    if (slot < per_block && at.panel < w.panels) load_operands<TO, 1>(w, at, o);
    consume_segments<N, GROUPS>(w, b, per_block, exchange, s);
    __syncwarp();
    cluster_arrive();
    cluster_wait();
    if (w.p.squares) barrier_wait(&s.scales_full[0], 0);
    while (slot < per_block) {
        float sum[1][4];
        add_segments(w, exchange + slot * w.segments * 512, sum[0]);
        if (at.panel < w.panels) finish<TO, 1>(w, at, o, sum);
        slot += PANELS;
        at = place_of(slot);
        if (slot < per_block && at.panel < w.panels) load_operands<TO, 1>(w, at, o);
    }
}

template <int N, int GROUPS>
static __device__ __forceinline__ void init_barriers(const struct work &w, struct barriers<N> &s)
{
    if (threadIdx.x == 0) {
        for (int i = 0; i < w.stages; i++) {
            barrier_init(&s.full[i], 2);
            barrier_init(&s.empty[i], GROUPS * 128);
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(&s.scales_full[i], SCALE_WARPS * 32);
            barrier_init(&s.scales_empty[i], GROUPS * 128);
        }
        barriers_ready();
    }
    __syncthreads();
}

#endif

/* Registers of a thread of the copying warpgroup and of a consumer: together at most what the
 * launch bounds give; 0: all have the same. */
template <int N, int GROUPS> struct registers {
    static const int few = N == 192 ? 40 : N >= 32 ? 56 : 0;
    static const int many = N == 192 ? 232 : N == 128 ? (GROUPS == 2 ? 224 : 200) : 104;
};

template <int N, int GROUPS, int BLOCKS, bool SPLIT, enum product_to TO>
static __global__ void __launch_bounds__(128 * (GROUPS + 1), BLOCKS)
    gemm_kernel(const __grid_constant__ struct work w)
{
#ifdef HOPPER_CODE
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ struct barriers<N> s;
    typedef struct registers<N, GROUPS> registers;
    const int PANELS = GROUPS * GROUP_PANELS, STAGE_BYTES = PANELS * UNIT_BYTES + N * 128;
    int32_t cluster = SPLIT ? w.cluster : 1, per_block = PANELS * (N / 8) / cluster;
    struct block b = {shared_address(memory), (int32_t)blockIdx.x % cluster};
    b.first_unit = w.units * (w.segments * b.rank / cluster) / w.segments;
    b.end_unit = w.units * (w.segments * (b.rank + 1) / cluster) / w.segments;
    int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    next_launch();
    init_barriers<N, GROUPS>(w, s);
    if (SPLIT) cluster_arrive();
    if (SPLIT) cluster_wait(); /* now the other blocks' shared memory may be written */
    if (warp < 4) {
        if constexpr (registers::few > 0) leave_registers<registers::few>();
        if (warp == 0)
            produce<N, GROUPS, true>(w, b, s);
        else if (warp == 1)
            produce<N, GROUPS, false>(w, b, s);
        else
            produce_scales<N, GROUPS>(w, b, b.rank * per_block / PANELS,
                                      ((b.rank + 1) * per_block - 1) / PANELS + 1, s);
        __syncwarp();
        if (SPLIT) cluster_arrive();
        if (SPLIT) cluster_wait();
    } else {
        if constexpr (registers::few > 0) take_registers<registers::many>();
        if (SPLIT)
            consume_split<N, GROUPS, TO>(w, b, per_block, b.ring + w.stages * STAGE_BYTES, s);
        else
            consume<N, GROUPS, TO>(w, b, s);
    }
#endif
}

/* ---- which kernel for which shape ---- */

struct variant {
    void (*kernels[3])(const struct work); /* by enum product_to */
    int32_t tokens, groups, blocks;        /* blocks: that fit a multiprocessor's registers */
    bool split;
};

#define VARIANT(N, GROUPS, BLOCKS, SPLIT)                    \
    {                                                        \
        {gemm_kernel<N, GROUPS, BLOCKS, SPLIT, TO_ROWS>,     \
         gemm_kernel<N, GROUPS, BLOCKS, SPLIT, TO_RESIDUAL>, \
         gemm_kernel<N, GROUPS, BLOCKS, SPLIT, TO_ACT>},     \
            N, GROUPS, BLOCKS, SPLIT                         \
    }

static const struct variant variants[] = {
    VARIANT(16, 1, 3, false),  VARIANT(16, 1, 3, true),   VARIANT(32, 1, 3, false),
    VARIANT(32, 1, 3, true),   VARIANT(64, 1, 3, false),  VARIANT(64, 1, 3, true),
    VARIANT(128, 1, 2, false), VARIANT(128, 1, 2, true),  VARIANT(128, 2, 1, false),
    VARIANT(128, 2, 1, true),  VARIANT(192, 2, 1, false),
};

enum {
    N_VARIANTS = sizeof variants / sizeof *variants,
    SHARED_BYTES = 228 << 10,
    MIN_STAGES = 4,
    SMALL_RING =
        100 << 10 /* leaves room for a block of attention; without what clusters exchange */
};

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

/* Units of the block that has most. */
static int32_t most_units(const struct work *w)
{
    int32_t most = 0;
    for (int32_t i = 0; i < w->cluster; i++) {
        int32_t units = w->units * (w->segments * (i + 1) / w->cluster) / w->segments -
                        w->units * (w->segments * i / w->cluster) / w->segments;
        most = units > most ? units : most;
    }
    return most;
}

/* cluster: blocks that split the columns */
static void launch(struct backend *b, const struct product *p, const struct variant *v,
                   int32_t cluster)
{
    int32_t panels = v->groups * GROUP_PANELS, exchange = 0;
    struct work w = {*p, p->m->data, (int32_t)p->m->rows, (int32_t)(p->m->padded / K_UNIT)};
    w.panels = (int32_t)p->m->panels;
    w.segments = n_segments(p->m->padded);
    while (1 << w.segment_bits < w.segments) w.segment_bits++;
    w.cluster = cluster;
    w.row_tiles = parts(w.panels, panels);
    int32_t token_tiles = parts(p->n, v->tokens), bands = v->split ? 1 : parts(token_tiles, 12);
    w.band = parts(token_tiles, bands);
    int32_t units = most_units(&w), blocks = v->blocks, clusters = w.row_tiles * w.band * bands;
    if (v->split) exchange = panels * v->tokens / 8 / cluster * w.segments * 512;
    int32_t least = units < MIN_STAGES ? units : MIN_STAGES;
    while (blocks > 1 && stages_for(v, blocks, exchange) < least) blocks--;
    w.stages = stages_for(v, blocks, exchange);
    if (v->tokens <= 64) { /* if fewer blocks are on a multiprocessor, each has more */
        int32_t most = SMALL_RING / (panels * UNIT_BYTES + v->tokens * 128), used = blocks;
        while (used > 1 && (used - 1) * b->multiprocessors >= clusters * cluster) used--;
        int32_t more = stages_for(v, used, exchange);
        more = more < most ? more : most;
        w.stages = more > w.stages ? more : w.stages;
    }
    if (v->split && w.stages > units) w.stages = units;
    if (!v->split && v->tokens >= 128) { /* one after another: the next is copied early */
        int32_t most = b->multiprocessors * blocks / w.band * w.band;
        clusters = clusters < most ? clusters : most;
    }
    w.step = clusters / w.band;
    size_t bytes =
        (size_t)w.stages * (size_t)(panels * UNIT_BYTES + v->tokens * 128) + (size_t)exchange;
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
                  cudaFuncSetAttribute(v->kernels[p->to],
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes),
                  "shared memory for a matrix product"))
        cuda_good(b, cudaLaunchKernelEx(&config, v->kernels[p->to], w), "a matrix product");
}

static const struct variant *variant_of(int32_t tokens, int32_t groups, bool split)
{
    for (int i = 0; i < N_VARIANTS; i++)
        if (variants[i].tokens == tokens && variants[i].groups == groups &&
            variants[i].split == split)
            return &variants[i];
    return NULL;
}

/* Whole tiles of 128 rows, one after another: those that take least time. */
static const struct variant *variant_for_many(struct backend *b, const struct product *p)
{
    int32_t row_tiles = parts((int32_t)p->m->panels, 8), best = 0, best_cost = 0;
    for (int32_t tokens = 128; tokens <= 192; tokens += 64) {
        int32_t turns = parts(row_tiles * parts(p->n, tokens), b->multiprocessors);
        int32_t cost = turns * (tokens + 48); /* 48: what a tile costs whatever its width */
        if (best == 0 || cost < best_cost) {
            best = tokens;
            best_cost = cost;
        }
    }
    return variant_of(best, 2, false);
}

bool has_gemm(const struct backend *b)
{
    return b->capability == 90;
}

bool gemm_run(struct backend *b, const struct product *p)
{
    if (!has_gemm(b)) return false;
    int32_t tokens = p->n <= 16 ? 16 : p->n <= 32 ? 32 : 64;
    int32_t row_tiles = parts((int32_t)p->m->panels, GROUP_PANELS);
    bool few = row_tiles <= b->multiprocessors / 2;
    if (few && p->n <= 64)
        launch(b, p, variant_of(tokens, 1, true), 8);
    else if (few && p->n <= 256 && p->m->padded >= 4096)
        launch(b, p, variant_of(128, 2, true), 8);
    else if (few && p->n <= 128)
        launch(b, p, variant_of(64, 1, true), 8 * row_tiles <= b->multiprocessors * 3 / 2 ? 4 : 2);
    else if (p->n <= 64 || (few && p->n <= 512))
        launch(b, p, variant_of(tokens, 1, false), 1);
    else if (p->n <= 128)
        launch(b, p, variant_of(128, 1, false), 1);
    else
        launch(b, p, variant_for_many(b, p), 1);
    return true;
}
