/*
 * attention_tiles.cuh - attention for sequences with several tokens in the step: a block has a tile
 * of rows, its warps 16 each, and takes one chunk of keys after another. tile_kernel is for any
 * GPU; warpgroup_kernel gives the same bits by Hopper's wgmma.
 */
#ifndef LINNET_OPS_CUDA_ATTENTION_TILES_CUH
#define LINNET_OPS_CUDA_ATTENTION_TILES_CUH

#include "ops/cuda/attention.cuh"
#ifdef __CUDACC__
#include "ops/cuda/hopper.cuh"
#endif

/* Rows, (token, head of the group) pairs from `row` on, of a sequence with tokens start to end in
 * the step; n_keys: what its last row sees. */
struct tile {
    int32_t start, end, row, n_keys;
};

struct attention {
    const bf16 *q, *keys, *values;
    const int32_t *positions, *seq_of, *block_tables;
    const struct tile *tiles;
    const int32_t *singles; /* NULL: every token */
    struct act out;
    int64_t block_stride;
    int32_t n_heads, n_kv_heads, group, head_dim, max_blocks;
    float scale;
    int32_t stages; /* tiles: buffers for a chunk */
    /* single tokens */
    int32_t n_splits, split_chunks, slots;
    int64_t slot_floats;
    int32_t shared_floats;
    float *scratch;
    uint32_t *tickets;
};

/* Two values of a query row, zeros beyond head_dim or without a row. */
static __device__ __forceinline__ uint32_t query_pair(const struct attention &p, const bf16 *row,
                                                      int d)
{
    return row && d < p.head_dim ? *(const uint32_t *)(row + d) : 0;
}

/* The A fragments of 16 query rows, of which this lane has two. */
template <int D>
static __device__ __forceinline__ void
load_queries(uint32_t a[D / 16][4], const struct attention &p, const bf16 *row0, const bf16 *row1)
{
    int t = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        int d = 16 * k + 2 * t;
        a[k][0] = query_pair(p, row0, d);
        a[k][1] = query_pair(p, row1, d);
        a[k][2] = query_pair(p, row0, d + 8);
        a[k][3] = query_pair(p, row1, d + 8);
    }
}

/* Where a warp's results lie in shared memory: o[n][2 j] and o[n][2 j + 1] of row g + 8 j of its
 * lanes side by side. For rows and dimensions (even ones) by their number: */
template <int D> static __device__ __forceinline__ int result_at(int row, int d)
{
    return ((row / 8 * (D / 8) + d / 8) * 32 + row % 8 * 4 + d % 8 / 2) * 2;
}

/* A token's dimensions d, d + 1 of a head. */
static __device__ __forceinline__ void write_pair(const struct attention &p, int token, int head,
                                                  int d, float2 v, float sum)
{
    *(uint32_t *)(p.out.data + act_token(p.out, token) + act_column(p.out, head * p.head_dim + d)) =
        pack_bf16(v.x / sum, v.y / sum);
}

/* ---- tiles of any GPU ------------------------------------------------------------------------ */

/* A warp has 16 rows, and one more warp loads for all. Queries stay in registers, or lie in shared
 * memory if too many. */
template <int D> struct tile_shape {
    static constexpr int WARPS = D > 128 ? 4 : 7;
    static constexpr int ROWS = 16 * WARPS;
    static constexpr bool SHARED_Q = D > 128;
    static constexpr int SLICE = D % 32 == 0 ? 32 : 16; /* dimensions at a time */
    static constexpr int CHUNK = CHUNK_KEYS * (D + 8);
    static constexpr int Q = SHARED_Q ? ROWS * (D + 8) : 0;
};

/* What a lane of the tile kernel knows of its rows, g and g + 8 of the warp's. */
struct tile_rows {
    int visible[2];  /* keys that the row sees; 0: no row */
    int least, most; /* of them, over the warp */
};

static __device__ __forceinline__ struct tile_rows find_rows(const struct attention &p, int start,
                                                             int first, int end_row)
{
    struct tile_rows r;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        int row = first + 8 * j + threadIdx.x % 32 / 4;
        r.visible[j] = row < end_row ? p.positions[start + row / p.group] + 1 : 0;
    }
    r.least = __reduce_min_sync(~0u, min(r.visible[0], r.visible[1]));
    r.most = __reduce_max_sync(~0u, max(r.visible[0], r.visible[1]));
    return r;
}

/* A row of a sequence's queries; NULL: none. */
static __device__ __forceinline__ const bf16 *query_row(const struct attention &p, int start,
                                                        int row, int end_row)
{
    int64_t at =
        (int64_t)(start + row / p.group) * p.n_heads + blockIdx.x * p.group + row % p.group;
    return row < end_row ? p.q + at * p.head_dim : NULL;
}

/* Takes one chunk into the running results of a warp's rows. */
template <int D>
static __device__ __forceinline__ void
take_chunk(const struct attention &p, const struct tile_rows &rows, int first_key,
           const uint32_t (*q)[4], const bf16 *shared_q, const bf16 *keys, const bf16 *values,
           float running_max[2], float running_sum[2], float o[D / 8][4])
{
    constexpr int SLICE = tile_shape<D>::SLICE;
    float s[KEY_TILES][4] = {}, old[2], add[2];
    uint32_t weights[KEY_TILES / 2][4];
    struct chunk c;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        if (tile_shape<D>::SHARED_Q) {
            uint32_t a[4];
            ldmatrix(a, shared_q + threadIdx.x % 16 * row_stride<D>() + 16 * k +
                            threadIdx.x % 32 / 16 * 8);
            add_scores<D>(s, a, keys, 16 * k);
        } else {
            add_scores<D>(s, q[k], keys, 16 * k);
        }
    }
    int n_keys[2] = {max(rows.visible[0] - first_key, 0), max(rows.visible[1] - first_key, 0)};
    if (rows.least >= first_key + CHUNK_KEYS)
        c = chunk_weights<false>(s, p.scale, n_keys, weights);
    else
        c = chunk_weights(s, p.scale, n_keys, weights);
#pragma unroll
    for (int j = 0; j < 2; j++)
        merge_factors(&running_max[j], &running_sum[j], c.max[j], c.sum[j], &old[j], &add[j]);
#pragma unroll
    for (int d = 0; d < D; d += SLICE) {
        float part[SLICE / 8][4];
        weigh_values<D, SLICE / 8>(part, weights, values, d);
#pragma unroll
        for (int n = 0; n < SLICE / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float &v = o[d / 8 + n][i];
                v = merge_value(v, part[n][i], old[i / 2], add[i / 2]);
            }
    }
}

/* A warp's results, through shared memory (room for [16][D]) because code that is unrolled over
 * registers costs more to fetch than to run. */
template <int D>
static __device__ __forceinline__ void write_tile(const struct attention &p, const struct tile &t,
                                                  int first, int end_row, float *room,
                                                  const float o[D / 8][4], const float sum[2])
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            *(float2 *)&room[((j * (D / 8) + n) * 32 + lane) * 2] =
                make_float2(o[n][2 * j], o[n][2 * j + 1]);
    __syncwarp();
    for (int r = 0; r < 16 && first + r < end_row; r++) {
        int row = first + r, token = t.start + row / p.group,
            head = blockIdx.x * p.group + row % p.group;
        float row_sum = __shfl_sync(~0u, r < 8 ? sum[0] : sum[1], r % 8 * 4);
        for (int d = 2 * lane; d < p.head_dim; d += 64)
            write_pair(p, token, head, d, *(float2 *)&room[result_at<D>(r, d)], row_sum);
    }
}

/* Grid: kv heads, tiles. */
template <int D>
static __global__ void __launch_bounds__(32 * (tile_shape<D>::WARPS + 1), 1)
    tile_kernel(const struct attention p)
{
    typedef tile_shape<D> shape;
    uint8_t *memory = dynamic_shared();
    bf16 *buffers = (bf16 *)memory;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, kv_head = blockIdx.x;
    next_launch();
    /* The step's numbers came by a copy before its first kernel: no need to wait for them. */
    struct tile t = p.tiles[blockIdx.y];
    int end_row = (t.end - t.start) * p.group, first = t.row + 16 * warp;
    int n_chunks = (t.n_keys + CHUNK_KEYS - 1) / CHUNK_KEYS;
    const int32_t *table = p.block_tables + (int64_t)p.seq_of[t.start] * p.max_blocks;
    int64_t heads = (int64_t)kv_head * KV_BLOCK * p.head_dim;
    struct tile_rows rows = find_rows(p, t.start, first, end_row);
    const bf16 *from[2] = {query_row(p, t.start, first + lane / 4, end_row),
                           query_row(p, t.start, first + lane / 4 + 8, end_row)};

    int page = chunk_page(table, 0, t.n_keys);
    auto load = [&](int c, bf16 *to) {
        int left = t.n_keys - c * CHUNK_KEYS;
        load_chunk<D, 32>(to, p.keys + heads, p.block_stride, p.head_dim, page, left, lane);
        load_chunk<D, 32>(to + shape::CHUNK, p.values + heads, p.block_stride, p.head_dim, page,
                          left, lane);
        copy_commit();
        page = chunk_page(table, c + 1, t.n_keys); /* in time for the next */
    };
    previous_wait();
    bf16 *shared_q = buffers + p.stages * 2 * shape::CHUNK + warp * 16 * row_stride<D>();
    int ahead = p.stages > 1 ? 2 * shape::CHUNK : 0;
    bool loads = warp == shape::WARPS; /* chunk c + 1, while the others are at c */
    if (loads && ahead) load(0, buffers);
    uint32_t q[D / 16][4];
    load_queries<D>(q, p, from[0], from[1]);
    if (shape::SHARED_Q && !loads) {
#pragma unroll
        for (int k = 0; k < D / 16; k++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                *(uint32_t *)(shared_q + (lane / 4 + i % 2 * 8) * row_stride<D>() + 16 * k +
                              i / 2 * 8 + lane % 4 * 2) = q[k][i];
        __syncwarp();
    }
    float o[D / 8][4] = {}, running_max[2] = {-INFINITY, -INFINITY}, running_sum[2] = {};
    for (int c = 0; c < n_chunks; c++) {
        if (!ahead) __syncthreads();
        if (loads && !ahead) load(c, buffers);
        if (loads) copy_wait<0>();
        __syncthreads();
        const bf16 *keys = buffers + c % 2 * ahead;
        if (loads && ahead && c + 1 < n_chunks)
            load(c + 1, buffers + (c + 1) % 2 * ahead);
        else if (!loads && rows.most > c * CHUNK_KEYS)
            take_chunk<D>(p, rows, c * CHUNK_KEYS, q, shared_q, keys, keys + shape::CHUNK,
                          running_max, running_sum, o);
    }
    __syncthreads(); /* nobody reads the buffers now */
    if (!loads)
        write_tile<D>(p, t, first, end_row, (float *)memory + warp * 16 * D, o, running_sum);
}

/* ---- tiles of Hopper ------------------------------------------------------------------------- */

#ifdef __CUDACC__

/* Two warpgroups of 64 rows and one that loads. Keys and values of a chunk lie in shared memory
 * as wgmma wants them: 64 dimensions a part, rows of 128 bytes, their 16-byte pieces exchanged by
 * the row's number (128-byte swizzle). */
template <int D> struct warpgroup_shape {
    static constexpr int WARPS = 8, THREADS = 32 * WARPS + 128, STAGES = D > 64 ? 6 : 8;
    static constexpr int PART = CHUNK_KEYS * 128; /* bytes */
    static constexpr int HALF = D / 64 * PART;    /* keys, or values */
    static constexpr int AHEAD = 3;               /* chunks on their way */
};

#ifdef HOPPER_CODE

/* Keys or values of one block, by a warp; zeros from key n_keys on. */
template <int D>
static __device__ __forceinline__ void load_block(uint32_t to, const bf16 *from, int n_keys)
{
    const int UNITS = D / 8, ROWS = 32 / UNITS;
    int lane = threadIdx.x % 32, key = lane / UNITS, unit = lane % UNITS;
    from += key * D + unit * 8;
    to += unit / 8 * warpgroup_shape<D>::PART + key * 128;
#pragma unroll
    for (int i = 0; i < KV_BLOCK; i += ROWS)
        copy_piece(to + i * 128 + (unit % 8 ^ (i + key) % 8) * 16, from + i * D, i + key < n_keys);
}

/* Of wgmma, for a part of a chunk from some row or piece on. Keys: rows are N, 1024 bytes to the
 * next 8. Values: rows are K, dimensions N, PART bytes to the next 64. */
template <int D> static __device__ __forceinline__ uint64_t swizzled(uint32_t address)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(warpgroup_shape<D>::PART >> 4) << 16 |
           (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

static __device__ __forceinline__ uint4 fragment(const uint32_t a[4])
{
    return make_uint4(a[0], a[1], a[2], a[3]);
}

/* All chunks of a tile, by a warpgroup: of each chunk a warp loads one block. */
template <int D>
static __device__ __forceinline__ void load_chunks(const struct attention &p, const struct tile &t,
                                                   int n_chunks, uint32_t buffers, uint64_t *full,
                                                   uint64_t *empty)
{
    typedef warpgroup_shape<D> shape;
    const int BLOCKS = CHUNK_KEYS / KV_BLOCK;
    int own = threadIdx.x / 32 % 4;
    const int32_t *table = p.block_tables + (int64_t)p.seq_of[t.start] * p.max_blocks;
    const bf16 *keys = p.keys + (int64_t)blockIdx.x * KV_BLOCK * D,
               *values = p.values + (int64_t)blockIdx.x * KV_BLOCK * D;
    previous_wait();
    for (int c = 0; c < n_chunks + shape::AHEAD; c++) {
        int stage = c % shape::STAGES, come = c - shape::AHEAD;
        if (c < n_chunks) {
            int block = c * BLOCKS + own, left = t.n_keys - block * KV_BLOCK;
            int64_t at = left > 0 ? table[block] * p.block_stride : 0;
            if (c >= shape::STAGES) barrier_wait(&empty[stage], c / shape::STAGES % 2 ^ 1);
            uint32_t to = buffers + stage * 2 * shape::HALF + own * KV_BLOCK * 128;
            load_block<D>(to, keys + at, left);
            load_block<D>(to + shape::HALF, values + at, left);
        }
        copy_commit();
        if (come < 0) continue;
        copy_wait<shape::AHEAD>();
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        barrier_arrive(&full[come % shape::STAGES]);
    }
}

/* take_chunk, by a warpgroup. */
template <int D>
static __device__ __forceinline__ void
take_chunk_together(const struct attention &p, const struct tile_rows &rows, int first_key,
                    const uint32_t (*q)[4], uint32_t keys, uint64_t *empty, float running_max[2],
                    float running_sum[2], float o[D / 8][4])
{
    float s[KEY_TILES * 4], part[D / 2], old[2], add[2];
    float(*scores)[4] = (float(*)[4])s;
    uint32_t weights[KEY_TILES / 2][4];
    struct chunk c;
    mma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint64_t b = swizzled<D>(keys + k / 4 * warpgroup_shape<D>::PART + k % 4 * 32);
        if (k == 0)
            mma<CHUNK_KEYS, false>(s, fragment(q[k]), b);
        else
            mma<CHUNK_KEYS, true>(s, fragment(q[k]), b);
    }
    mma_commit();
    mma_wait<0>();
    int n_keys[2] = {max(rows.visible[0] - first_key, 0), max(rows.visible[1] - first_key, 0)};
    if (rows.least >= first_key + CHUNK_KEYS)
        c = chunk_weights<false>(scores, p.scale, n_keys, weights);
    else
        c = chunk_weights(scores, p.scale, n_keys, weights);
    mma_fence();
#pragma unroll
    for (int k = 0; k < CHUNK_KEYS / 16; k++) {
        uint64_t b = swizzled<D>(keys + warpgroup_shape<D>::HALF + k * 16 * 128);
        if (k == 0)
            mma<D, false, true>(part, fragment(weights[k]), b);
        else
            mma<D, true, true>(part, fragment(weights[k]), b);
    }
    mma_commit();
    bool some = rows.most > first_key;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        old[j] = 1;
        if (some)
            merge_factors(&running_max[j], &running_sum[j], c.max[j], c.sum[j], &old[j], &add[j]);
    }
    mma_wait<0>();
    barrier_arrive(empty);
    if (!some) return;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            o[n][i] = merge_value(o[n][i], part[4 * n + i], old[i / 2], add[i / 2]);
}

#endif

/* Grid: kv heads, tiles. head_dim is D. */
template <int D>
static __global__ void __launch_bounds__(warpgroup_shape<D>::THREADS, 1)
    warpgroup_kernel(const struct attention p)
{
#ifdef HOPPER_CODE
    typedef warpgroup_shape<D> shape;
    __shared__ uint64_t full[shape::STAGES], empty[shape::STAGES];
    uint8_t *memory = dynamic_shared();
    uint32_t buffers = shared_address(memory) + 1023 & ~1023u;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    next_launch();
    struct tile t = p.tiles[blockIdx.y];
    int end_row = (t.end - t.start) * p.group, first = t.row + 16 * warp;
    int n_chunks = (t.n_keys + CHUNK_KEYS - 1) / CHUNK_KEYS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < shape::STAGES; i++) {
            barrier_init(&full[i], 128);
            barrier_init(&empty[i], 32 * shape::WARPS);
        }
        barriers_ready();
    }
    __syncthreads();
    if (warp >= shape::WARPS) {
        leave_registers<40>();
        load_chunks<D>(p, t, n_chunks, buffers, full, empty);
        return;
    }
    take_registers<232>();
    struct tile_rows rows = find_rows(p, t.start, first, end_row);
    previous_wait();
    uint32_t q[D / 16][4];
    load_queries<D>(q, p, query_row(p, t.start, first + lane / 4, end_row),
                    query_row(p, t.start, first + lane / 4 + 8, end_row));
    float o[D / 8][4] = {}, running_max[2] = {-INFINITY, -INFINITY}, running_sum[2] = {};
    for (int c = 0; c < n_chunks; c++) {
        int stage = c % shape::STAGES;
        barrier_wait(&full[stage], c / shape::STAGES % 2);
        take_chunk_together<D>(p, rows, c * CHUNK_KEYS, q, buffers + stage * 2 * shape::HALF,
                               &empty[stage], running_max, running_sum, o);
    }
    sync_named(1, 32 * shape::WARPS); /* nobody reads the buffers now, and all copies have come */
    write_tile<D>(p, t, first, end_row, (float *)memory + warp * 16 * D, o, running_sum);
#endif
}

#endif

#endif
