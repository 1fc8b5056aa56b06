/*
 * attention.cu - paged grouped-query attention, by the arithmetic of attention.cuh. Two kernels:
 * tiles, for sequences with several tokens in the step, and single tokens, where the warps of one
 * or several blocks take different chunks of a sequence. Both give a row the same bits.
 */
#include <limits.h>
#include <stdlib.h>

#include "ops/cuda/attention_tiles.cuh"
#include "ops/cuda/launch.cuh"

enum {
    MAX_WARPS = 8,
    SPLIT_BLOCKS = 264, /* as many blocks as several share a sequence for */
    SCRATCH_LIMIT = 64 << 20,
    GROUP_ROWS = 16,
    OWN_SHARED = 1024 /* bytes at most that single_kernel has beside the dynamic ones */
};

/* ---- single tokens --------------------------------------------------------------------------- */

/* A block's part in one token and up to 16 heads of one group. */
struct share {
    int token, first_head, n_rows;
    int n_keys;
    int split, n_active;   /* of the blocks that share the sequence */
    int item;              /* token and heads, counted over the grid */
    int begin, end, after; /* chunks: own; those that have a slot begin with `after` */
    float *slots;          /* [1 + n_chunks - after][slot_floats], or NULL */
};

/*
 * Block 0 of a sequence merges the first chunks as it goes and leaves the result in slot 0; each
 * chunk of the others has a slot of its own, as chunks merge strictly from left to right. When
 * there are too few slots, block 0 has more to do.
 */
static __device__ __forceinline__ struct share find_share(const struct attention &p)
{
    struct share s;
    int tile = blockIdx.z, split = 0;
    if (p.n_splits > 1) split = tile % p.n_splits, tile /= p.n_splits;
    s.token = p.singles ? p.singles[blockIdx.x] : blockIdx.x;
    s.first_head = blockIdx.y * p.group + tile * GROUP_ROWS;
    s.n_rows = min(GROUP_ROWS, p.group - tile * GROUP_ROWS);
    s.n_keys = p.positions[s.token] + 1;
    s.split = split;
    s.item = (tile * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    int n_chunks = (s.n_keys + CHUNK_KEYS - 1) / CHUNK_KEYS;
    s.n_active =
        p.n_splits == 1 ? 1 : min(p.n_splits, (n_chunks + p.split_chunks - 1) / p.split_chunks);
    s.begin = 0;
    s.end = s.after = n_chunks;
    s.slots = NULL;
    if (s.n_active == 1) return s;
    s.after = max(n_chunks / s.n_active, n_chunks - (p.slots - 1));
    int others = s.n_active - 1, rest = n_chunks - s.after;
    if (split > 0 && split <= others)
        s.begin = s.after + rest * (split - 1) / others, s.end = s.after + rest * split / others;
    else if (split == 0)
        s.end = s.after;
    s.slots = p.scratch + (int64_t)s.item * p.slots * p.slot_floats;
    return s;
}

/* The running result of the block's rows in shared memory. Its values, in a warp's fragment order,
 * [2 halves of the rows][D / 8][32 lanes][2], begin the dynamic part. */
struct running {
    float max[GROUP_ROWS], sum[GROUP_ROWS];
    uint64_t turns[MAX_WARPS]; /* barriers */
};

/* A chunk's result to its slot: values [n_rows][D], maxima, sums. */
template <int D>
static __device__ __forceinline__ void store_slot(float *slot, int n_rows, const float o[D / 8][4],
                                                  const float max[2], const float sum[2])
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        int row = g + 8 * j;
        if (row >= n_rows) break;
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            *(float2 *)&slot[row * D + 8 * n + 2 * t] = make_float2(o[n][2 * j], o[n][2 * j + 1]);
        if (t == 0) {
            slot[n_rows * D + row] = max[j];
            slot[n_rows * D + n_rows + row] = sum[j];
        }
    }
}

/* Merges a warp's chunk when its turn has come: it waits at its own barrier, where the warp that
 * has the chunk before arrives. */
template <int D>
static __device__ __forceinline__ void merge_in_turn(struct running *run, float *values, int n_rows,
                                                     int chunk, const struct chunk &c,
                                                     const float o[D / 8][4])
{
    int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    if (chunk > 0) barrier_wait(&run->turns[chunk % warps], (chunk - 1) / warps % 2);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 2; j++) {
        int row = lane / 4 + 8 * j;
        if (8 * j >= n_rows) break;
        float max = chunk ? run->max[row] : -INFINITY, sum = chunk ? run->sum[row] : 0, old, add;
        merge_factors(&max, &sum, c.max[j], c.sum[j], &old, &add);
        __syncwarp();
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            float2 *at = (float2 *)&values[((j * (D / 8) + n) * 32 + lane) * 2];
            float2 v = chunk ? *at : make_float2(0, 0);
            v.x = merge_value(v.x, o[n][2 * j], old, add);
            v.y = merge_value(v.y, o[n][2 * j + 1], old, add);
            *at = v;
        }
        if (lane % 4 == 0) run->max[row] = max, run->sum[row] = sum;
    }
    barrier_arrive(&run->turns[(chunk + 1) % warps]);
}

/* What block 0 has merged: to the output, or to slot 0 if others have more. */
template <int D>
static __device__ __forceinline__ void pass_on(const struct attention &p, const struct share &s,
                                               const struct running *run, const float *values)
{
    __syncthreads();
    for (int u = threadIdx.x; u < s.n_rows * (D / 2); u += blockDim.x) {
        int row = u / (D / 2), d = u % (D / 2) * 2;
        float2 v = *(const float2 *)&values[result_at<D>(row, d)];
        if (s.slots)
            *(float2 *)&s.slots[row * D + d] = v;
        else if (d < p.head_dim)
            write_pair(p, s.token, s.first_head + row, d, v, run->sum[row]);
    }
    if (s.slots && threadIdx.x < s.n_rows) {
        s.slots[s.n_rows * D + threadIdx.x] = run->max[threadIdx.x];
        s.slots[s.n_rows * D + s.n_rows + threadIdx.x] = run->sum[threadIdx.x];
    }
}

/* For each of n slots and each row, what merge_factors would give: prefix maxima, by a warp a row.
 */
static __device__ __forceinline__ void slot_factors(const float *slots, int64_t slot_floats,
                                                    int maxima, int n, int n_rows,
                                                    float *running_max, float2 *factors)
{
    int lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < n_rows; row += blockDim.x / 32) {
        float before = running_max[row];
        for (int i = lane; i - lane < n; i += 32) {
            float own = i < n ? slots[i * slot_floats + maxima + row] : -INFINITY, old, add;
            before = merge_factors_of_lanes(before, own, &old, &add);
            if (i < n) factors[i * n_rows + row] = make_float2(old, add);
        }
        __syncwarp();
        if (lane == 0) running_max[row] = before;
    }
}

/* The last block to arrive merges a sequence's slots, as many at a time as shared memory holds. */
template <int D>
static __device__ void merge_slots(const struct attention &p, const struct share &s,
                                   struct running *run, float *result, float *memory, int n_slots)
{
    int n_rows = s.n_rows, slot_floats = (int)p.slot_floats, units = n_rows * D / 4;
    float4 *values = (float4 *)result; /* [n_rows][D] now */
    __shared__ float sums[2][GROUP_ROWS];
    int at_once = p.shared_floats / (slot_floats + 2 * n_rows);
    if (threadIdx.x < n_rows) run->max[threadIdx.x] = -INFINITY, sums[0][threadIdx.x] = 0;
    for (int first = 0, odd = 0; first < n_slots; first += at_once, odd ^= 1) {
        int n = min(at_once, n_slots - first);
        float2 *factors = (float2 *)(memory + (int64_t)n * slot_floats);
        const float *from = s.slots + (int64_t)first * slot_floats;
        __syncthreads();
        for (int i = threadIdx.x; i < n * slot_floats / 4; i += blockDim.x)
            copy_async<16>(memory + 4 * i, from + 4 * i, true);
        copy_commit();
        copy_wait<0>();
        __syncthreads();
        slot_factors(memory, slot_floats, n_rows * D, n, n_rows, run->max, factors);
        __syncthreads();
        for (int u = threadIdx.x; u < units; u += blockDim.x) {
            int row = u / (D / 4), d = u % (D / 4) * 4;
            float4 v = first ? values[u] : make_float4(0, 0, 0, 0);
            float sum = sums[odd][row];
#pragma unroll 4
            for (int i = 0; i < n; i++) {
                const float *slot = memory + i * slot_floats;
                float2 f = factors[i * n_rows + row];
                float4 w = *(const float4 *)&slot[row * D + d];
                sum = fmaf(slot[n_rows * D + n_rows + row], f.y, sum * f.x);
                v.x = merge_value(v.x, w.x, f.x, f.y);
                v.y = merge_value(v.y, w.y, f.x, f.y);
                v.z = merge_value(v.z, w.z, f.x, f.y);
                v.w = merge_value(v.w, w.w, f.x, f.y);
            }
            if (first + n < n_slots) {
                values[u] = v;
                if (d == 0) sums[odd ^ 1][row] = sum;
                continue;
            }
            if (d < p.head_dim)
                write_pair(p, s.token, s.first_head + row, d, make_float2(v.x, v.y), sum);
            if (d + 2 < p.head_dim)
                write_pair(p, s.token, s.first_head + row, d + 2, make_float2(v.z, v.w), sum);
        }
    }
}

/* True for the last of the blocks that share a sequence, once all have written their slots. */
static __device__ bool last_to_arrive(uint32_t *ticket, int n_active)
{
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(ticket, 1) == (uint32_t)n_active - 1;
        if (last) *ticket = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

/* Grid: tokens, kv heads, tiles of 16 heads of a group times blocks that may share a sequence. */
template <int D>
static __global__ void __launch_bounds__(32 * MAX_WARPS) single_kernel(const struct attention p)
{
    uint8_t *memory = dynamic_shared();
    __shared__ struct running run;
    constexpr int CHUNK = CHUNK_KEYS * (D + 8);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    next_launch();
    struct share s = find_share(p);
    if (s.split >= s.n_active) {
        previous_wait();
        return;
    }
    if (threadIdx.x < warps) barrier_init(&run.turns[threadIdx.x], 32);
    barriers_ready();
    __syncthreads();
    int64_t heads = (int64_t)blockIdx.y * KV_BLOCK * p.head_dim;
    const int32_t *table = p.block_tables + (int64_t)p.seq_of[s.token] * p.max_blocks;
    bf16 *keys = (bf16 *)((float *)memory + GROUP_ROWS * D) + warp * 2 * CHUNK,
         *values = keys + CHUNK;
    auto load = [&](bf16 *to, const bf16 *from, int chunk, int page) {
        if (chunk < s.end)
            load_chunk<D, 32>(to, from + heads, p.block_stride, p.head_dim, page,
                              s.n_keys - chunk * CHUNK_KEYS, lane);
        copy_commit();
    };
    int chunk = s.begin + warp, page = chunk_page(table, chunk, s.n_keys);
    previous_wait();
    load(keys, p.keys, chunk, page);
    load(values, p.values, chunk, page);
    uint32_t q[D / 16][4];
    {
        const bf16 *row =
            p.q + ((int64_t)s.token * p.n_heads + s.first_head + lane / 4) * p.head_dim;
        load_queries<D>(q, p, lane / 4 < s.n_rows ? row : NULL,
                        lane / 4 + 8 < s.n_rows ? row + 8 * p.head_dim : NULL);
    }
    for (; chunk < s.end; chunk += warps) {
        page = chunk_page(table, chunk + warps, s.n_keys);
        float scores[KEY_TILES][4] = {};
        copy_wait<1>();
        __syncwarp();
#pragma unroll
        for (int k = 0; k < D / 16; k++) add_scores<D>(scores, q[k], keys, 16 * k);
        __syncwarp();
        load(keys, p.keys, chunk + warps, page);
        int n = min(s.n_keys - chunk * CHUNK_KEYS, (int)CHUNK_KEYS), n_keys[2] = {n, n};
        uint32_t weights[KEY_TILES / 2][4];
        struct chunk c;
        if (s.n_rows > 8)
            c = chunk_weights(scores, p.scale, n_keys, weights);
        else if (n < CHUNK_KEYS)
            c = chunk_weights<true, 1>(scores, p.scale, n_keys, weights);
        else
            c = chunk_weights<false, 1>(scores, p.scale, n_keys, weights);
        copy_wait<1>();
        __syncwarp();
        float o[D / 8][4];
        weigh_values<D, D / 8>(o, weights, values, 0);
        __syncwarp();
        load(values, p.values, chunk + warps, page);
        if (s.split == 0)
            merge_in_turn<D>(&run, (float *)memory, s.n_rows, chunk, c, o);
        else
            store_slot<D>(s.slots + (1 + chunk - s.after) * p.slot_floats, s.n_rows, o, c.max,
                          c.sum);
    }
    copy_wait<0>();
    if (s.split == 0) pass_on<D>(p, s, &run, (float *)memory);
    if (s.slots && last_to_arrive(p.tickets + s.item, s.n_active)) {
        int n_chunks = (s.n_keys + CHUNK_KEYS - 1) / CHUNK_KEYS;
        merge_slots<D>(p, s, &run, (float *)memory, (float *)memory + GROUP_ROWS * D,
                       1 + n_chunks - s.after);
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

struct variant {
    int d;
    void (*tile)(const struct attention), (*single)(const struct attention);
    int tile_warps, tile_q, chunk; /* bytes of shared memory: queries; a chunk's keys and values */
    int tile_threads, tile_shared; /* bytes; 0: see run_tiles */
};

template <int D> static struct variant variant_of(void)
{
    typedef tile_shape<D> shape;
    return {D,
            tile_kernel<D>,
            single_kernel<D>,
            shape::WARPS,
            shape::Q * (int)sizeof(bf16),
            2 * shape::CHUNK * (int)sizeof(bf16),
            32 * (shape::WARPS + 1)};
}

static struct variant find_variant(const struct shape *shape)
{
    int d = shape->head_dim;
    return d <= 16    ? variant_of<16>()
           : d <= 32  ? variant_of<32>()
           : d <= 64  ? variant_of<64>()
           : d <= 80  ? variant_of<80>()
           : d <= 96  ? variant_of<96>()
           : d <= 128 ? variant_of<128>()
                      : variant_of<256>();
}

#ifdef __CUDACC__
template <int D> static void use_warpgroups(struct variant *v)
{
    typedef warpgroup_shape<D> shape;
    v->tile = warpgroup_kernel<D>;
    v->tile_warps = shape::WARPS;
    v->tile_threads = shape::THREADS;
    v->tile_shared = shape::STAGES * 2 * shape::HALF + 1024;
}
#endif

/* What is best on this device. */
static struct variant device_variant(const struct backend *b)
{
    struct variant v = find_variant(&b->shape);
#ifdef __CUDACC__
    if (b->capability == 90 && b->shape.head_dim == 64) use_warpgroups<64>(&v);
    if (b->capability == 90 && b->shape.head_dim == 128) use_warpgroups<128>(&v);
#endif
    return v;
}

int64_t attention_tiles(const struct shape *shape, int64_t n_tokens, int64_t n_seqs)
{
    return n_tokens * (shape->n_heads / shape->n_kv_heads) / (16 * find_variant(shape).tile_warps) +
           n_seqs;
}

/* A slot's floats, a multiple of 16 bytes; see store_slot. */
static int64_t slot_floats(const struct shape *shape)
{
    int group = shape->n_heads / shape->n_kv_heads, rows = group < GROUP_ROWS ? group : GROUP_ROWS;
    return ((int64_t)rows * (find_variant(shape).d + 2) + 3) / 4 * 4;
}

/* Blocks of 16 heads of a group that each token has. */
static int32_t head_blocks(const struct shape *shape)
{
    int group = shape->n_heads / shape->n_kv_heads;
    return shape->n_kv_heads * ((group + GROUP_ROWS - 1) / GROUP_ROWS);
}

/* Slots for every chunk of the longest sequence, for as many as several blocks may share: SPLIT /
 * 2; or SCRATCH_LIMIT. */
static int64_t scratch_floats(const struct shape *shape, const struct limits *limits)
{
    int64_t chunks = (limits->max_context + CHUNK_KEYS - 1) / CHUNK_KEYS;
    int64_t most = (int64_t)SPLIT_BLOCKS / 2 * (chunks + 1) * slot_floats(shape);
    int64_t limit = SCRATCH_LIMIT / (int64_t)sizeof(float);
    return most < limit ? most : limit;
}

size_t attention_bytes(const struct shape *shape, const struct limits *limits)
{
    return (size_t)scratch_floats(shape, limits) * sizeof(float) + SPLIT_BLOCKS * sizeof(uint32_t);
}

bool attention_open(struct backend *b)
{
    struct attention_memory *m = &b->attention;
    struct variant v = device_variant(b);
    m->scratch_floats = scratch_floats(&b->shape, &b->limits);
    if (!cuda_good(b, cudaMalloc((void **)&m->scratch, attention_bytes(&b->shape, &b->limits)),
                   "attention's scratch memory"))
        return false;
    m->tickets = (uint32_t *)(m->scratch + m->scratch_floats);
    cuda_good(b, cudaMemsetAsync(m->tickets, 0, SPLIT_BLOCKS * sizeof(uint32_t), b->stream),
              "clearing memory");
    cuda_good(b,
              cudaDeviceGetAttribute(&m->shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                     b->device),
              "the shared memory's size");
    cudaFuncAttribute limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
    cuda_good(b,
              cudaFuncSetAttribute(v.tile, limit, v.tile_shared ? v.tile_shared : m->shared_limit),
              "attention's shared memory");
    return cuda_good(b, cudaFuncSetAttribute(v.single, limit, m->shared_limit - OWN_SHARED),
                     "attention's shared memory");
}

void attention_close(struct backend *b)
{
    cudaFree(b->attention.scratch);
    b->attention = (struct attention_memory){};
}

/* How single tokens are divided. */
struct division {
    int warps, splits, split_chunks;
};

/* Nothing here may depend on what changes between two steps of as many tokens. */
static struct division divide(const struct backend *b, const struct variant *v, int64_t items)
{
    struct division d;
    int room = b->attention.shared_limit - OWN_SHARED,
        fixed = GROUP_ROWS * v->d * (int)sizeof(float);
    if (items > SPLIT_BLOCKS / 2) room = room / 2 - 1024; /* two blocks a multiprocessor */
    d.warps = (room - fixed) / v->chunk;
    d.warps = d.warps < 1 ? 1 : d.warps > MAX_WARPS ? MAX_WARPS : d.warps;
    d.splits = (int)(SPLIT_BLOCKS / 2 / items);
    if (d.splits < 1) d.splits = 1;
    d.split_chunks = 3; /* what a block does by itself sooner than it finds company */
    return d;
}

static void run_singles(struct backend *b, const struct variant *v, struct attention p, int32_t n,
                        struct division d)
{
    int fixed = GROUP_ROWS * v->d * (int)sizeof(float), shared = fixed + d.warps * v->chunk;
    int32_t blocks = head_blocks(&b->shape);
    p.n_splits = d.splits;
    p.split_chunks = d.split_chunks;
    p.slot_floats = slot_floats(&b->shape);
    p.slots = (int32_t)(b->attention.scratch_floats / (p.slot_floats * n * blocks));
    p.shared_floats = (shared - fixed) / (int)sizeof(float);
    p.scratch = b->attention.scratch;
    p.tickets = b->attention.tickets;
    if (p.slots < 2) p.n_splits = 1;
    dim3 grid((unsigned)n, (unsigned)p.n_kv_heads, (unsigned)(blocks / p.n_kv_heads * p.n_splits));
    launch_next(b, "attention", v->single, grid, 32 * (unsigned)d.warps, (size_t)shared, p);
}

static void run_tiles(struct backend *b, const struct variant *v, struct attention p)
{
    p.stages = 2 * v->chunk + v->tile_q <= b->attention.shared_limit ? 2 : 1;
    launch_next(b, "attention", v->tile,
                dim3((unsigned)p.n_kv_heads, (unsigned)b->attention.n_tiles),
                (unsigned)v->tile_threads,
                (size_t)(v->tile_shared ? v->tile_shared : p.stages * v->chunk + v->tile_q), p);
}

/* ---- a step ---------------------------------------------------------------------------------- */

/* Longest first; the rest only for a fixed order. */
static int compare_tiles(const void *x, const void *y)
{
    const struct tile *a = (const struct tile *)x, *b = (const struct tile *)y;
    if (a->n_keys != b->n_keys) return a->n_keys > b->n_keys ? -1 : 1;
    if (a->start != b->start) return a->start < b->start ? -1 : 1;
    return (a->row < b->row) - (a->row > b->row);
}

void attention_plan(struct backend *b, const struct step *s, struct device_step *host)
{
    int32_t group = b->shape.n_heads / b->shape.n_kv_heads,
            tile_rows = 16 * device_variant(b).tile_warps, n_tiles = 0, n_singles = 0;
    struct tile *tiles = (struct tile *)host->tiles;
    for (int32_t seq = 0; seq < s->n_seqs; seq++) {
        int32_t start = s->query_start[seq], end = s->query_start[seq + 1],
                rows = (end - start) * group;
        if (end - start == 1) host->singles[n_singles++] = start;
        if (end - start < 2) continue;
        for (int32_t row = 0; row < rows; row += tile_rows) {
            int32_t last = (row + tile_rows < rows ? row + tile_rows : rows) - 1;
            tiles[n_tiles++] = {start, end, row, s->positions[start + last / group] + 1};
        }
    }
    qsort(tiles, (size_t)n_tiles, sizeof *tiles, compare_tiles);
    b->attention.n_tiles = n_tiles;
    b->attention.n_singles = n_singles;
}

/* forced: how to divide single tokens, for those who compare; NULL: as is best. */
static void run_step(struct backend *b, const struct step *s, int32_t layer,
                     const struct division *forced)
{
    const struct shape *shape = &b->shape;
    struct variant v = device_variant(b);
    struct attention p = {};
    p.q = b->q;
    p.keys = cache_of(b, layer, 0);
    p.values = cache_of(b, layer, 1);
    p.positions = b->step.positions;
    p.seq_of = b->step.seq_of;
    p.block_tables = b->step.block_tables;
    p.out = b->attn;
    p.block_stride = (int64_t)shape->n_kv_heads * KV_BLOCK * shape->head_dim;
    p.n_heads = shape->n_heads;
    p.n_kv_heads = shape->n_kv_heads;
    p.group = shape->n_heads / shape->n_kv_heads;
    p.head_dim = shape->head_dim;
    p.max_blocks = s->max_blocks;
    p.scale = attention_scale(shape->head_dim);
    bool each = b->attention.n_tiles == 0;
    int32_t n = each ? s->n_tokens : b->attention.n_singles;
    if (!each) {
        p.tiles = (const struct tile *)b->step.tiles;
        p.singles = b->step.singles;
        run_tiles(b, &v, p);
    }
    if (n > 0)
        run_singles(b, &v, p, n, forced ? *forced : divide(b, &v, (int64_t)n * head_blocks(shape)));
}

void attention_run(struct backend *b, const struct step *s, int32_t layer)
{
    run_step(b, s, layer, NULL);
}
