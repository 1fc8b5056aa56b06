/*
 * rows.cu - what is done row by row: embedding, the first half of RMSNorm, RoPE with the cache
 * store, and reading activations back.
 */
#include "ops/cuda/launch.cuh"
#include "ops/cuda/norm.cuh"
#include "ops/cuda/ptx.cuh"
#include "ops/cuda/rope.cuh"

enum {
    THREADS = 256,
    ROPE_THREADS = 64, /* small blocks spread over the multiprocessors */
    HEADS = 4
};

struct prepare {
    const float *x;        /* [tokens, hidden]; or */
    const bf16 *embedding; /* [vocab, hidden] and */
    const int32_t *ids;    /* [n], -1 - i: chosen[i] */
    const struct chosen *chosen;
    float *x_out;          /* with an embedding: [n, hidden] */
    const int32_t *row_of; /* [n] rows of x, or NULL: row i */
    int32_t n, hidden, panels;
    const float *gamma;
    struct act out;
    float *squares; /* [n, panels] */
};

/* One row of a panel for one token. */
static __device__ float prepare_value(const struct prepare &p, int32_t token, int32_t row)
{
    if (token >= p.n || row >= p.hidden) return 0.0f;
    float v;
    if (p.embedding) { /* the rest comes with the first layer */
        int32_t id = p.ids[token];
        if (id < 0) id = p.chosen[-1 - id].id;
        v = __bfloat162float(p.embedding[(int64_t)(id < 0 ? 0 : id) * p.hidden + row]);
        p.x_out[(int64_t)token * p.hidden + row] = v;
        return 0.0f;
    } else {
        v = p.x[(int64_t)(p.row_of ? p.row_of[token] : token) * p.hidden + row];
    }
    p.out.data[act_at(p.out, token, row)] = __float2bfloat16(v * p.gamma[row]);
    return v;
}

/* A warp for one panel of 8 tokens. */
static __global__ void __launch_bounds__(THREADS) prepare_kernel(struct prepare p)
{
    int panel = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    next_launch();
    previous_wait();
    if (panel >= p.panels) return;
    int32_t row = panel * PANEL_ROWS + lane / 4;
    for (int j = 0; j < 2; j++) {
        int32_t token = (int32_t)blockIdx.y * 8 + lane % 4 * 2 + j;
        float low = prepare_value(p, token, row), high = prepare_value(p, token, row + 8);
        float squares = panel_squares(low, high);
        if (p.squares && lane / 4 == 0 && token < p.n)
            p.squares[(int64_t)token * p.panels + panel] = squares;
    }
}

static void prepare(struct backend *b, const struct prepare *p)
{
    int per_block = THREADS / 32;
    dim3 grid((unsigned)((p->panels + per_block - 1) / per_block), (unsigned)((p->n + 7) / 8));
    launch_next(b, "the embedding", prepare_kernel, grid, THREADS, 0, *p);
}

void rows_embed(struct backend *b, const struct matrix *embedding, int32_t n)
{
    struct prepare p = {};
    p.embedding = embedding->data;
    p.ids = b->step.token_ids;
    p.chosen = b->chosen;
    p.x_out = b->x;
    p.n = n;
    p.hidden = b->shape.hidden;
    p.panels = b->hidden_panels;
    prepare(b, &p);
}

void rows_prepare(struct backend *b, const struct vector *norm, const int32_t *row_of, int32_t n,
                  struct act out, float *squares)
{
    struct prepare p = {};
    p.x = b->x;
    p.row_of = row_of;
    p.n = n;
    p.hidden = b->shape.hidden;
    p.panels = b->hidden_panels;
    p.gamma = norm->data;
    p.out = out;
    p.squares = squares;
    prepare(b, &p);
}

/* ---- RoPE and the cache ------------------------------------------------------------------ */

struct rope_store {
    struct device_step step;
    const float *qkv, *q_norm, *k_norm;
    bf16 *q, *keys, *values;
    int32_t n, n_heads, n_kv_heads, head_dim;
    float eps;
};

/* N values side by side, written by other blocks. */
template <int N> static __device__ __forceinline__ void load_values(const float *from, float v[N])
{
    if constexpr (N == 2) {
        float2 pair = __ldcg((const float2 *)from);
        v[0] = pair.x, v[1] = pair.y;
    } else {
        v[0] = __ldcg(from);
    }
}

template <int N> static __device__ __forceinline__ void store_values(bf16 *to, const float v[N])
{
    if constexpr (N == 2)
        *(__nv_bfloat162 *)to = __floats2bfloat162_rn(v[0], v[1]);
    else
        to[0] = __float2bfloat16(v[0]);
}

/* What a warp does with one head. */
struct head {
    const float *in, *norm; /* norm: of q or k, or NULL */
    bf16 *out;
    bool turned; /* not a value */
};

static __device__ __forceinline__ struct head find_head(const struct rope_store &p, int64_t token,
                                                        int32_t i, int32_t slot)
{
    int32_t heads = p.n_heads + p.n_kv_heads, kv = i < heads ? i - p.n_heads : i - heads;
    struct head h;
    h.in = p.qkv + (token * (heads + p.n_kv_heads) + i) * p.head_dim;
    h.turned = i < heads;
    h.norm = i < p.n_heads ? p.q_norm : h.turned ? p.k_norm : NULL;
    h.out = i < p.n_heads
                ? p.q + (token * p.n_heads + i) * p.head_dim
                : (h.turned ? p.keys : p.values) + cache_offset(slot, kv, p.n_kv_heads, p.head_dim);
    return h;
}

/*
 * A warp for HEADS heads of one token, a lane for N neighbouring values of either half at a time;
 * N = 2 wants an even half. Grid: of warps, [n tokens][heads / HEADS].
 */
template <int N>
static __global__ void __launch_bounds__(ROPE_THREADS) rope_store_kernel(const struct rope_store p)
{
    int32_t all = p.n_heads + 2 * p.n_kv_heads, half = p.head_dim / 2, lane = threadIdx.x % 32;
    int32_t groups = (all + HEADS - 1) / HEADS,
            warp = (int32_t)(blockIdx.x * (ROPE_THREADS / 32) + threadIdx.x / 32),
            token = warp / groups, first = warp % groups * HEADS;
    next_launch();
    if (token >= p.n) {
        previous_wait();
        return;
    }
    /* the step's numbers came before its first kernel */
    int32_t slot = p.step.slot_mapping[token];
    const float *rope =
        p.step.rope +
        (int64_t)(p.step.rope_by_position ? p.step.positions[token] : token) * p.head_dim;
    previous_wait();
    for (int32_t j = N * lane; j - N * lane < half; j += 32 * N) {
        float cosine[N], sine[N], a[HEADS][N], b[HEADS][N];
        bool on = j < half;
        if (on) {
            load_values<N>(rope + j, cosine);
            load_values<N>(rope + half + j, sine);
        }
#pragma unroll
        for (int k = 0; k < HEADS; k++) {
            if (!on || first + k >= all) continue;
            struct head h = find_head(p, token, first + k, slot);
            load_values<N>(h.in + j, a[k]);
            load_values<N>(h.in + half + j, b[k]);
        }
#pragma unroll
        for (int k = 0; k < HEADS; k++) {
            if (first + k >= all) break;
            struct head h = find_head(p, token, first + k, slot);
            float scale = h.norm ? head_scale(h.in, p.head_dim, p.eps) : 1;
            if (!on) continue;
#pragma unroll
            for (int i = 0; i < N; i++) {
                float low = a[k][i], high = b[k][i];
                if (h.norm)
                    low = low * scale * h.norm[j + i], high = high * scale * h.norm[half + j + i];
                if (h.turned) rotate(low, high, cosine[i], sine[i], &low, &high);
                a[k][i] = low, b[k][i] = high;
            }
            store_values<N>(h.out + j, a[k]);
            store_values<N>(h.out + half + j, b[k]);
        }
    }
}

void rows_rope_store(struct backend *b, int32_t layer, const struct layer *w, int32_t n)
{
    const struct shape *s = &b->shape;
    struct rope_store p = {b->step,
                           b->qkv,
                           w->q_norm ? w->q_norm->data : NULL,
                           w->k_norm ? w->k_norm->data : NULL,
                           b->q,
                           cache_of(b, layer, 0),
                           cache_of(b, layer, 1),
                           n,
                           s->n_heads,
                           s->n_kv_heads,
                           s->head_dim,
                           s->norm_eps};
    int64_t warps = (int64_t)n * ((s->n_heads + 2 * s->n_kv_heads + HEADS - 1) / HEADS);
    launch_next(b, "RoPE and the cache store",
                s->head_dim % 4 ? rope_store_kernel<1> : rope_store_kernel<2>,
                dim3((unsigned)((warps + ROPE_THREADS / 32 - 1) / (ROPE_THREADS / 32))),
                ROPE_THREADS, 0, p);
}

enum { COPY_BLOCKS = 512, COPY_THREADS = 128 };

struct copy_blocks {
    uint4 *keys, *values; /* of the layer */
    int32_t block;        /* uint4s that a block of either has */
    int32_t to, from[COPY_BLOCKS];
};

/* Grid (blocks, 2): keys, then values. */
static __global__ void __launch_bounds__(COPY_THREADS) copy_blocks_kernel(struct copy_blocks p)
{
    uint4 *cache = blockIdx.y ? p.values : p.keys;
    const uint4 *from = cache + (int64_t)p.from[blockIdx.x] * p.block;
    uint4 *to = cache + (int64_t)(p.to + (int32_t)blockIdx.x) * p.block;
    next_launch();
    previous_wait();
    for (int32_t i = threadIdx.x; i < p.block; i += COPY_THREADS) to[i] = from[i];
}

void rows_copy_blocks(struct backend *b, int32_t layer, const int32_t *from, int32_t to, int32_t n)
{
    struct copy_blocks p = {};
    p.keys = (uint4 *)cache_of(b, layer, 0);
    p.values = (uint4 *)cache_of(b, layer, 1);
    p.block = b->shape.n_kv_heads * KV_BLOCK * b->shape.head_dim * (int32_t)sizeof(bf16) /
              (int32_t)sizeof(uint4);
    for (int32_t at = 0; at < n; at += COPY_BLOCKS) {
        int32_t count = n - at < COPY_BLOCKS ? n - at : COPY_BLOCKS;
        p.to = to + at;
        for (int32_t i = 0; i < count; i++) p.from[i] = from[at + i];
        launch_next(b, "gathering the cache", copy_blocks_kernel, dim3((unsigned)count, 2),
                    COPY_THREADS, 0, p);
    }
}

/* ---- reading back ------------------------------------------------------------------------ */

static __global__ void read_act_kernel(struct act a, int64_t token, int32_t columns, float *out)
{
    int32_t i = (int32_t)(blockIdx.x * blockDim.x + threadIdx.x);
    previous_wait();
    if (i < columns) out[i] = __bfloat162float(a.data[act_at(a, token, i)]);
}

void rows_read_act(struct backend *b, struct act a, int32_t token, int32_t columns, float *out)
{
    launch_next(b, "reading a buffer", read_act_kernel, dim3((unsigned)((columns + 255) / 256)),
                256, 0, a, (int64_t)token, columns, out);
}
