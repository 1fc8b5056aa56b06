/*
 * decode_attention.cuh - attention of the decode kernel: a block takes a chunk of keys of one
 * sequence and kv head; what chunks give is merged either by every block that o_proj needs it in,
 * or in a phase of its own. The arithmetic is attention.cuh's.
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

/* What a lane knows of a task's token before its queries are there. */
template <int D> struct turned {
    static constexpr int N = (D / 2 + 31) / 32;
    float cosine[N], sine[N];
    int32_t slot;
};

/* Starts the copy of a chunk's keys and values but the newest, which this step makes; reads the
 * token's RoPE row. */
template <int D>
static __device__ __forceinline__ void
begin_task(const struct decode_args &a, const struct memory &m, const struct decode_layer &layer,
           const struct task &t, struct turned<D> *r)
{
    int32_t position = m.s->positions[t.token];
    const int32_t *table = a.step.block_tables + t.token * a.max_blocks;
#pragma unroll 2
    for (int i = threadIdx.x; i < CHUNK_KEYS * (D / 8); i += THREADS) {
        int32_t row = i / (D / 8), d = i % (D / 8) * 8, key = t.chunk * CHUNK_KEYS + row;
        bf16 *k = m.k + row * row_stride<D>() + d, *v = m.v + row * row_stride<D>() + d;
        if (key == position) continue;
        int32_t block = key < position ? table[key / KV_BLOCK] : 0;
        int64_t at =
            cache_offset(block * KV_BLOCK + key % KV_BLOCK, t.kv_head, a.n_kv_heads, D) + d;
        copy_async<16>(k, layer.keys + at, key < position);
        copy_async<16>(v, layer.values + at, key < position);
    }
    copy_commit();
    const float *rope = a.step.rope + t.token * D;
#pragma unroll
    for (int i = 0; i < turned<D>::N; i++) {
        int j = (int)threadIdx.x % 32 + 32 * i;
        if (j >= D / 2) continue;
        r->cosine[i] = rope[j];
        r->sine[i] = rope[D / 2 + j];
    }
    r->slot = a.step.slot_mapping[t.token];
}

/*
 * The group's queries, and the newest key and value if the chunk has them: each a warp's, normed
 * and turned as by rope_head, in shared memory; the latter in the cache too.
 */
template <int D>
static __device__ __forceinline__ void
load_newest(const struct decode_args &a, const struct memory &m, const struct decode_layer &layer,
            const struct task &t, const struct turned<D> &r)
{
    int group = a.n_heads / a.n_kv_heads, lane = threadIdx.x % 32;
    int32_t position = m.s->positions[t.token], heads = a.n_heads + a.n_kv_heads;
    int32_t n = position / CHUNK_KEYS == t.chunk ? group + 2 : group;
    int64_t at = cache_offset(r.slot, t.kv_head, a.n_kv_heads, D);
    int32_t row = position % CHUNK_KEYS * row_stride<D>();
    const float *qkv = a.qkv + t.token * (heads + a.n_kv_heads) * D;
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < n; i += WARPS) {
        bool key = i == group, value = i == group + 1;
        const float *in = qkv + (value ? heads + t.kv_head
                                 : key ? a.n_heads + t.kv_head
                                       : t.kv_head * group + i) *
                                    D;
        const float *norm = value ? NULL : key ? layer.k_norm : layer.q_norm;
        bf16 *out = value ? m.v + row : key ? m.k + row : m.q + i * row_stride<D>();
        bf16 *also = value ? layer.values + at : key ? layer.keys + at : NULL;
        float scale = norm ? head_scale<D>(in, a.eps) : 1.0f;
#pragma unroll
        for (int k = 0; k < turned<D>::N; k++) {
            int j = lane + 32 * k;
            if (j >= D / 2) continue;
            float low = in[j], high = in[D / 2 + j];
            if (norm) low = low * scale * norm[j], high = high * scale * norm[D / 2 + j];
            float c = r.cosine[k], s = r.sine[k];
            bf16 first = __float2bfloat16(value ? low : low * c - high * s);
            bf16 second = __float2bfloat16(value ? high : high * c + low * s);
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
                                                    const struct memory &m, const struct task &t)
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
    int32_t part = (t.token * a.n_heads + t.kv_head * group + row) * a.max_chunks + t.chunk;
    if (warp == 0 && row < group && lane % 4 == 0)
        a.part_sums[part] = make_float2(c.max[0], c.sum[0]);
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
            *(float2 *)(a.parts + (int64_t)part * D + tile * 8 + lane % 4 * 2) =
                make_float2(o[0], o[1]);
    }
}

/* The block's tasks, of which the first has been begun. */
template <int D>
static __device__ __forceinline__ void
attention_phase(const struct decode_args &a, const struct memory &m,
                const struct decode_layer &layer, struct task t, struct turned<D> &r)
{
#pragma unroll 1
    for (int32_t i = (int32_t)blockIdx.x; t.token >= 0;) {
        load_newest<D>(a, m, layer, t, r);
        copy_wait<0>();
        sync_computing();
        chunk_scores<D>(m);
        sync_computing();
        chunk_values<D>(a, m, t);
        i += (int32_t)gridDim.x;
        t = find_task(a, m, i);
        if (t.token < 0) return;
        sync_computing(); /* the chunk before is done with */
        begin_task<D>(a, m, layer, t, &r);
    }
}

/* ---- merging ----------------------------------------------------------------------------- */

/*
 * Attention's output as o_proj's input, [columns / 32][n][4 lanes][8 values], where the sums of
 * products lie else. Rows are heads of tokens, a warp's each; a lane has four dimensions. All
 * chunks of all rows are asked for before the first is used; nobody reads another lane's copies.
 */
template <int D>
static __device__ __forceinline__ void merge_directly(const struct decode_args &a,
                                                      const struct memory &m)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *values = (float *)m.q + lane * 4; /* [row][chunk][D] */
    float2 *parts = (float2 *)m.s->scores;   /* [row][chunk] */
    bf16 *out = (bf16 *)m.s->sums;
    bool on = lane < D / 4;
    int32_t rows = a.n * a.n_heads, most = 0;
    for (int i = 0; i < a.n; i++) most = max(most, chunks_of(m.s->positions[i]));
#pragma unroll 1
    for (int32_t row = warp; row < rows; row += WARPS) {
        int32_t chunks = chunks_of(m.s->positions[row / a.n_heads]);
        const float *from = a.parts + (int64_t)row * a.max_chunks * D + lane * 4;
#pragma unroll 1
        for (int c = 0; c < chunks; c++)
            if (on) copy_async<16>(values + (row * most + c) * D, from + c * D, true);
        const float *sums = (const float *)(a.part_sums + row * a.max_chunks + lane);
        if (lane >= chunks) continue;
        copy_async<4>(&parts[row * most + lane].x, sums, true);
        copy_async<4>(&parts[row * most + lane].y, sums + 1, true);
    }
    copy_commit();
    copy_wait<0>();
#pragma unroll 1
    for (int32_t row = warp; row < rows; row += WARPS) {
        int32_t token = row / a.n_heads, chunks = chunks_of(m.s->positions[token]);
        float2 mine = make_float2(0, 0);
        if (lane < chunks) mine = parts[row * most + lane];
        float max = -INFINITY, sum = 0, old, add;
        float4 v = make_float4(0, 0, 0, 0);
#pragma unroll 1
        for (int c = 0; c < chunks; c++) {
            merge_factors(&max, &sum, __shfl_sync(~0u, mine.x, c), __shfl_sync(~0u, mine.y, c),
                          &old, &add);
            float4 part = make_float4(0, 0, 0, 0);
            if (on) part = *(const float4 *)(values + (row * most + c) * D);
            v.x = merge_value(v.x, part.x, old, add);
            v.y = merge_value(v.y, part.y, old, add);
            v.z = merge_value(v.z, part.z, old, add);
            v.w = merge_value(v.w, part.w, old, add);
        }
        /* columns 4 i to 4 i + 3 are values of two lanes that are neighbours */
        int32_t column = row % a.n_heads * D + lane * 4;
        bf16 *to = out + (column / 32 * a.n + token) * 32 + column % 8 * 4 + column / 16 % 2 * 4 +
                   column / 8 % 2 * 2;
        if (!on) continue;
        *(uint32_t *)to = pack_bf16(v.x / sum, v.y / sum);
        *(uint32_t *)(to + 8) = pack_bf16(v.z / sum, v.w / sum);
    }
    for (int32_t i = a.n_heads * D + (int32_t)threadIdx.x; i < a.attn_padded; i += THREADS)
        for (int32_t token = 0; token < a.n; token++) /* whole pieces of 32: any order */
            out[(i / 32 * a.n + token) * 32 + i % 32] = __float2bfloat16(0.0f);
    sync_computing();
}

/* A block for one head of one token: chunks come to shared memory in rounds, their factors are
 * worked out first, then each thread runs through the chunks of its dimension. */
template <int D>
static __device__ __forceinline__ void merge_phase(const struct decode_args &a,
                                                   const struct memory &m)
{
    float *values = (float *)m.q;
    float2 *factors = (float2 *)m.s->scores;
    const int32_t fits = (int32_t)(chunk_bytes(D) / (D * sizeof(float)));
    const int32_t most = (int32_t)(sizeof m.s->scores / sizeof(float2));
    const int32_t round = fits < most ? fits : most;
    bool on = threadIdx.x < D;
#pragma unroll 1
    for (int32_t i = (int32_t)blockIdx.x; i < a.n * a.n_heads; i += (int32_t)gridDim.x) {
        int32_t token = i / a.n_heads, chunks = chunks_of(m.s->positions[token]);
        int32_t part = i * a.max_chunks;
        float out = 0, max = -INFINITY, sum = 0, old, add; /* max and sum: thread 0's */
#pragma unroll 1
        for (int32_t first = 0; first < chunks; first += round) {
            int32_t count = min(chunks - first, round);
            const float *from = a.parts + (int64_t)(part + first) * D;
            sync_computing();
#pragma unroll 1
            for (int j = threadIdx.x * 4; j < count * D; j += THREADS * 4)
                copy_async<16>(values + j, from + j, true);
            copy_commit();
#pragma unroll 1
            for (int j = threadIdx.x; j < count; j += THREADS)
                factors[j] = __ldcg(a.part_sums + part + first + j);
            sync_computing();
            if (threadIdx.x == 0) {
#pragma unroll 1
                for (int j = 0; j < count; j++) {
                    merge_factors(&max, &sum, factors[j].x, factors[j].y, &old, &add);
                    factors[j] = make_float2(old, add);
                }
                m.s->running[0] = sum;
            }
            copy_wait<0>();
            sync_computing();
#pragma unroll 4
            for (int j = 0; j < count && on; j++)
                out = merge_value(out, values[j * D + threadIdx.x], factors[j].x, factors[j].y);
        }
        struct act to = {a.attn, a.attn_padded, MOST_TOKENS, false};
        if (on)
            to.data[act_at(to, token, i % a.n_heads * D + (int)threadIdx.x)] =
                __float2bfloat16(out / m.s->running[0]);
        sync_computing();
    }
}

#endif
