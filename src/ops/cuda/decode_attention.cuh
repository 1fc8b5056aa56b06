/*
 * decode_attention.cuh - attention of the decode kernel, by the computing warps: a block takes a
 * chunk of keys of one sequence and kv head; what the chunks of a head give is merged by one block
 * or several. The arithmetic is attention.cuh's.
 */
#ifndef LINNET_OPS_CUDA_DECODE_ATTENTION_CUH
#define LINNET_OPS_CUDA_DECODE_ATTENTION_CUH

#include "ops/cuda/decode.cuh"

/* One chunk of keys for one sequence and kv head; token < 0: none. */
struct task {
    int32_t token, kv_head, chunk;
};

static __device__ __forceinline__ int32_t chunks_of(int32_t position)
{
    return position / CHUNK_KEYS + 1;
}

static __device__ __forceinline__ struct task find_task(const struct decode_args &a,
                                                        const struct memory &m, int32_t index)
{
#pragma unroll 1
    for (int32_t token = 0; token < a.n; token++) {
        int32_t chunks = chunks_of(m.s->positions[token]), count = chunks * a.n_kv_heads;
        if (index < count) return {token, index / chunks, index % chunks};
        index -= count;
    }
    return {-1, 0, 0};
}

/* A lane's part of a token's RoPE row. */
template <int D> struct turned {
    static constexpr int N = (D / 2 + 31) / 32;
    float cosine[N], sine[N];
};

/* Block of a key of the task's sequence. */
static __device__ __forceinline__ int32_t page_of(const struct decode_args &a, const struct task &t,
                                                  int32_t key)
{
    return a.step.block_tables[t.token * a.max_blocks + key / KV_BLOCK];
}

/* Starts the copy of a chunk's keys and values but the newest, which this step makes, with zeros
 * beyond. pages: of the chunk, or NULL. */
template <int D>
static __device__ __forceinline__ void
begin_task(const struct decode_args &a, const struct memory &m, const struct decode_layer &layer,
           const struct task &t, const int32_t *pages)
{
    int32_t position = m.s->positions[t.token];
#pragma unroll 1
    for (int i = threadIdx.x; i < CHUNK_KEYS * (D / 8); i += THREADS) {
        int32_t row = i / (D / 8), d = i % (D / 8) * 8, key = t.chunk * CHUNK_KEYS + row;
        int32_t at = row * row_stride<D>() + d, block = 0;
        if (key == position) continue;
        if (key < position) block = pages ? pages[row / KV_BLOCK] : page_of(a, t, key);
        int64_t from =
            cache_offset(block * KV_BLOCK + key % KV_BLOCK, t.kv_head, a.n_kv_heads, D) + d;
        copy_async<16>(m.k + at, layer.keys + from, key < position);
        copy_async<16>(m.v + at, layer.values + from, key < position);
    }
    copy_commit();
}

/* One value of q, k or v; of a pair of tokens the one with that parity. */
static __device__ __forceinline__ float await_value(const uint64_t *from, int parity, uint32_t tag)
{
    uint32_t v[2];
    while (!load_tagged(from, tag, &v[0], &v[1])) {
    }
    return __uint_as_float(parity ? v[1] : v[0]);
}

/*
 * The group's queries, and the newest key and value if the chunk has them: each a warp's, normed
 * and turned as by rope_store_kernel, in shared memory; the latter in the cache too.
 */
template <int D>
static __device__ __forceinline__ void
load_newest(const struct decode_args &a, const struct memory &m, const struct decode_layer &layer,
            const struct task &t, uint32_t tag)
{
    struct turned<D> r;
    const float *rope =
        a.step.rope + (a.step.rope_by_position ? m.s->positions[t.token] : t.token) * D;
#pragma unroll
    for (int i = 0; i < turned<D>::N; i++) {
        int j = min((int)threadIdx.x % 32 + 32 * i, D / 2 - 1);
        r.cosine[i] = rope[j];
        r.sine[i] = rope[D / 2 + j];
    }
    int group = a.n_heads / a.n_kv_heads, lane = threadIdx.x % 32, parity = t.token % 2;
    int32_t position = m.s->positions[t.token], heads = a.n_heads + a.n_kv_heads;
    int32_t n = position / CHUNK_KEYS == t.chunk ? group + 2 : group;
    int64_t at = cache_offset(a.step.slot_mapping[t.token], t.kv_head, a.n_kv_heads, D);
    int32_t row = position % CHUNK_KEYS * row_stride<D>();
    const uint64_t *qkv = a.qkv + (int64_t)(t.token / 2) * (heads + a.n_kv_heads) * D * 2;
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < n; i += WARPS) {
        bool key = i == group, value = i == group + 1;
        const uint64_t *in = qkv + (value ? heads + t.kv_head
                                    : key ? a.n_heads + t.kv_head
                                          : t.kv_head * group + i) *
                                       D * 2;
        const float *norm = value ? NULL : key ? layer.k_norm : layer.q_norm;
        bf16 *out = value ? m.v + row : key ? m.k + row : m.q + i * row_stride<D>();
        bf16 *also = value ? layer.values + at : key ? layer.keys + at : NULL;
        float scale = 1, x[turned<D>::N][2] = {};
        await_words(tag, [&]() {
            const uint64_t *missing = NULL;
#pragma unroll
            for (int k = 0; k < 2 * turned<D>::N; k++) {
                int j = lane + k / 2 * 32;
                const uint64_t *word = in + (k % 2 * (D / 2) + j) * 2;
                uint32_t v[2];
                if (j >= D / 2) continue;
                if (!load_tagged(word, tag, &v[0], &v[1])) missing = word;
                x[k / 2][k % 2] = __uint_as_float(parity ? v[1] : v[0]);
            }
            return missing;
        });
        if (norm) { /* as head_scale sums */
            float sum = 0;
#pragma unroll 1
            for (int j = lane; j < D; j += 32) {
                float v = await_value(in + j * 2, parity, tag);
                sum = fmaf(v, v, sum);
            }
            __syncwarp();
            for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
            scale = 1.0f / sqrtf(sum / (float)D + a.eps);
        }
#pragma unroll
        for (int k = 0; k < turned<D>::N; k++) {
            int j = lane + 32 * k;
            if (j >= D / 2) continue;
            float low = x[k][0], high = x[k][1];
            if (norm) low = low * scale * norm[j], high = high * scale * norm[D / 2 + j];
            if (!value) rotate(low, high, r.cosine[k], r.sine[k], &low, &high);
            bf16 first = __float2bfloat16(low), second = __float2bfloat16(high);
            out[j] = first;
            out[D / 2 + j] = second;
            if (also) also[j] = first, also[D / 2 + j] = second;
        }
    }
}

/* Scores of 8 keys by each warp; rows of the tile beyond the group's heads are nobody's. */
template <int D> static __device__ __forceinline__ void chunk_scores(const struct memory &m)
{
    static_assert((int)WARPS == (int)KEY_TILES, "a warp for each tile of keys");
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float c[4] = {0, 0, 0, 0};
    const bf16 *q = m.q + lane % 16 * row_stride<D>() + lane / 16 * 8;
    const bf16 *k = m.k + (warp * 8 + lane % 8) * row_stride<D>() + lane / 8 * 8;
#pragma unroll
    for (int d = 0; d < D / 16; d++) {
        uint32_t qf[4], kf[4];
        ldmatrix(qf, q + 16 * d);
        if (d % 2 == 0 && d + 1 < D / 16) ldmatrix(kf, k + 16 * d); /* of two steps */
        if (d % 2 == 0 && d + 1 == D / 16) ldmatrix(kf, k + 16 * d - lane / 16 * 16);
        mma_16816(c, qf[0], qf[1], qf[2], qf[3], kf[d % 2 * 2], kf[d % 2 * 2 + 1]);
    }
    *(float2 *)&m.s->scores[lane / 4][warp * 8 + lane % 4 * 2] = make_float2(c[0], c[1]);
}

template <int D>
static __device__ __forceinline__ void chunk_values(const struct decode_args &a,
                                                    const struct memory &m, const struct task &t,
                                                    uint32_t tag)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4;
    int32_t left = m.s->positions[t.token] + 1 - t.chunk * CHUNK_KEYS;
    int32_t group = a.n_heads / a.n_kv_heads;
    const int n_keys[2] = {left, left};
    float s[KEY_TILES][4];
    uint32_t p[KEY_TILES / 2][4];
#pragma unroll
    for (int i = 0; i < KEY_TILES; i++) {
        float2 v = *(const float2 *)&m.s->scores[row][i * 8 + lane % 4 * 2];
        s[i][0] = v.x, s[i][1] = v.y;
    }
    struct chunk c = chunk_weights<true, 1>(s, a.scale, n_keys, p);
    int64_t part =
        (int64_t)(t.token * a.n_heads + t.kv_head * group + row) * a.max_chunks + t.chunk;
    if (warp == 0 && row < group && lane % 4 == 0)
        store_tagged(a.part_sums + part * 2, __float_as_uint(c.max[0]), __float_as_uint(c.sum[0]),
                     tag);
#pragma unroll 1
    for (int tile = warp; tile < D / 8; tile += WARPS) {
        float o[4] = {0, 0, 0, 0};
        const bf16 *v = m.v + lane * row_stride<D>() + tile * 8;
#pragma unroll
        for (int i = 0; i < KEY_TILES / 4; i++) {
            uint32_t f[4];
            ldmatrix_transposed(f, v + i * 32 * row_stride<D>());
            mma_16816(o, p[2 * i][0], 0, p[2 * i][2], 0, f[0], f[1]);
            mma_16816(o, p[2 * i + 1][0], 0, p[2 * i + 1][2], 0, f[2], f[3]);
        }
        if (row < group)
            store_tagged(a.parts + part * D + tile * 8 + lane % 4 * 2, __float_as_uint(o[0]),
                         __float_as_uint(o[1]), tag);
    }
}

/* The block's tasks; the first has begun. */
template <int D>
static __device__ __forceinline__ void
attention_phase(const struct decode_args &a, const struct memory &m,
                const struct decode_layer &layer, struct task t, uint32_t tag)
{
#pragma unroll 1
    for (int32_t i = (int32_t)blockIdx.x;;) {
        load_newest<D>(a, m, layer, t, tag);
        copy_wait<0>();
        sync_computing();
        chunk_scores<D>(m);
        sync_computing();
        chunk_values<D>(a, m, t, tag);
        sync_computing(); /* the chunk is done with */
        i += (int32_t)gridDim.x;
        t = find_task(a, m, i);
        if (t.token < 0) return;
        begin_task<D>(a, m, layer, t, NULL);
    }
}

/* ---- merging ----------------------------------------------------------------------------- */

#ifndef MERGE_ROUND /* chunks at most that are merged at a time */
#define MERGE_ROUND INT32_MAX
#endif

/* A head's dimensions are merged in so many pieces, each by a block, that many blocks have work. */
static __device__ __forceinline__ int32_t pieces_of(const struct decode_args &a)
{
    int32_t heads = a.n * a.n_heads, blocks = (int32_t)gridDim.x;
    return 4 * heads <= blocks ? 4 : 2 * heads <= blocks ? 2 : 1;
}

/* What a block merges: `dims` dimensions from `first` on of a head. */
struct merge {
    int32_t token, head, first, dims;
    int64_t part; /* the head's first chunk */
};

static __device__ __forceinline__ struct merge merge_of(const struct decode_args &a, int32_t D,
                                                        int32_t i)
{
    struct merge u;
    int32_t pieces = pieces_of(a), head = i / pieces;
    u.token = head / a.n_heads;
    u.head = head % a.n_heads;
    u.dims = D / pieces;
    u.first = i % pieces * u.dims;
    u.part = (int64_t)head * a.max_chunks;
    return u;
}

/* Where chunks come to: their maxima and sums, their values, and for each warp what merge_factors
 * gives with the sums. */
struct merge_room {
    float2 *sums;    /* [chunks] */
    float *values;   /* [chunks][dims] */
    float4 *factors; /* [warps that merge][chunks]: old, add, sum */
    int32_t chunks;  /* that fit */
};

template <int D>
static __device__ __forceinline__ struct merge_room room_of(const struct memory &m, int32_t dims)
{
    struct merge_room r;
    int32_t bytes = (int32_t)chunk_bytes(D), warps = (dims + 31) / 32;
    r.chunks = min(bytes / (int32_t)(dims * sizeof(float) + warps * sizeof(float4)),
                   (int32_t)(sizeof m.s->scores / sizeof(float2)));
    r.chunks = min(r.chunks, MERGE_ROUND);
    r.sums = (float2 *)m.s->scores;
    r.factors = (float4 *)m.stage;
    r.values = (float *)(r.factors + warps * r.chunks);
    return r;
}

/* n chunks from part on, as soon as they are there: of each its maximum and sum, then its values
 * two by two. */
template <int D>
static __device__ __forceinline__ void load_parts(const struct decode_args &a,
                                                  const struct merge &u, const struct merge_room &r,
                                                  int64_t part, int32_t n, uint32_t tag)
{
    enum { AT_ONCE = 6 };
    int32_t words = 1 + u.dims / 2;
#pragma unroll 1
    for (int32_t first = (int32_t)threadIdx.x / 32 * 32; first < n * words;
         first += THREADS * AT_ONCE) {
        uint32_t v[AT_ONCE][2];
        const uint64_t *from[AT_ONCE];
        int32_t to[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            int32_t word = first + (int32_t)threadIdx.x % 32 + THREADS * i, c = word / words,
                    k = word % words;
            from[i] = k == 0 ? a.part_sums + (part + c) * 2
                             : a.parts + (part + c) * D + u.first + 2 * (k - 1);
            to[i] = word >= n * words ? INT32_MIN : k == 0 ? -1 - c : c * u.dims + 2 * (k - 1);
        }
        await_words(tag, [&]() {
            const uint64_t *missing = NULL;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (to[i] != INT32_MIN && !load_tagged(from[i], tag, &v[i][0], &v[i][1]))
                    missing = from[i];
            return missing;
        });
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            float2 pair = make_float2(__uint_as_float(v[i][0]), __uint_as_float(v[i][1]));
            if (to[i] >= 0)
                *(float2 *)(r.values + to[i]) = pair;
            else if (to[i] != INT32_MIN)
                r.sums[-1 - to[i]] = pair;
        }
    }
}

/* A head's result so far: one dimension for each thread; all threads have the maximum and sum. */
struct merged {
    float value, max, sum;
};

/* n chunks more, in ascending order. */
static __device__ __forceinline__ void merge_parts(struct merged *to, const struct merge &u,
                                                   const struct merge_room &r, int32_t n)
{
    int lane = threadIdx.x % 32;
    if ((int32_t)threadIdx.x - lane >= u.dims) return;
    float4 *factors = r.factors + threadIdx.x / 32 * r.chunks;
    const float *values = r.values + min((int32_t)threadIdx.x, u.dims - 1);
#pragma unroll 1
    for (int32_t c = lane; c - lane < n; c += 32) {
        float2 mine = c < n ? r.sums[c] : make_float2(-INFINITY, 0);
        float old, add;
        to->max = merge_factors_of_lanes(to->max, mine.x, &old, &add);
        if (c < n) factors[c] = make_float4(old, add, mine.y, 0);
    }
    __syncwarp();
#pragma unroll 8
    for (int32_t c = 0; c < n; c++) {
        const float4 f = factors[c];
        to->sum = fmaf(f.z, f.y, to->sum * f.x);
        to->value = merge_value(to->value, values[c * u.dims], f.x, f.y);
    }
}

/* The block's pieces of heads: chunks come to shared memory in rounds, then a thread for each
 * dimension runs through them. Blocks go in descending order: those that have no task of attention
 * first. */
template <int D>
static __device__ __forceinline__ void merge_phase(const struct decode_args &a,
                                                   const struct memory &m, uint32_t tag)
{
    const int32_t all = a.n * a.n_heads * pieces_of(a);
#pragma unroll 1
    for (int32_t i = (int32_t)(gridDim.x - 1 - blockIdx.x); i < all; i += (int32_t)gridDim.x) {
        const struct merge u = merge_of(a, D, i);
        const struct merge_room r = room_of<D>(m, u.dims);
        int32_t chunks = chunks_of(m.s->positions[u.token]);
        struct merged result = {0, -INFINITY, 0};
#pragma unroll 1
        for (int32_t first = 0; first < chunks; first += r.chunks) {
            int32_t count = min(chunks - first, r.chunks);
            load_parts<D>(a, u, r, u.part + first, count, tag);
            sync_computing();
            merge_parts(&result, u, r, count);
            sync_computing();
        }
        struct act to = {a.attn, a.attn_padded, MOST_TOKENS, false};
        if ((int32_t)threadIdx.x < u.dims)
            to.data[act_at(to, u.token, u.head * D + u.first + (int)threadIdx.x)] =
                __float2bfloat16(result.value / result.sum);
    }
}

#endif
