/*
 * product.cuh - what becomes of a product's sums: the ends of struct product, for kernels that hold
 * them as the accumulators of m16n8k16.
 */
#ifndef LINNET_OPS_CUDA_PRODUCT_CUH
#define LINNET_OPS_CUDA_PRODUCT_CUH

#include "ops/cuda/norm.cuh"

/* The end of a struct product, as a kernel takes it. */
struct product_end {
    enum product_to to;
    int32_t n, panels;
    int64_t rows;
    bool scaled; /* by scale(t) */
    const float *bias;
    float *y;
    struct act out;
    const float *gamma;
    float *out_squares;
};

static inline struct product_end end_of(const struct product *p)
{
    return (struct product_end){
        p->to,  p->n,     (int32_t)p->m->panels, p->m->rows, p->squares != NULL, p->bias, p->y,
        p->out, p->gamma, p->out_squares};
}

/* Of a paired matrix: panel rows 0 to 7 are the upper half's, 8 to 15 the lower half's. */
static __device__ __forceinline__ void store_act(const struct product_end &p, int64_t panel,
                                                 int32_t token, float gate, float up, float scale)
{
    int64_t column = panel * 8 + threadIdx.x % 32 / 4;
    if (token >= p.n || column >= p.rows / 2) return;
    p.out.data[act_at(p.out, token, column)] = __float2bfloat16(silu(gate * scale) * (up * scale));
}

static __device__ __forceinline__ void store_row(const struct product_end &p, int64_t row,
                                                 int32_t token, float sum, float scale, float bias)
{
    if (token >= p.n || row >= p.rows) return;
    float v = sum * scale;
    p.y[token * p.rows + row] = p.bias ? v + bias : v;
}

/* What the end of a product reads, for a lane's four sums: asked for early, used late. */
struct product_tail {
    float y[2][2], bias[2], gamma[2]; /* rows g and g + 8; of y two tokens each */
};

static __device__ __forceinline__ void load_tail(const struct product_end &p, int64_t panel,
                                                 int32_t first, struct product_tail *t)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int64_t row = panel * PANEL_ROWS + lane / 4 + 8 * i;
        bool on = p.to != TO_ACT && row < p.rows;
        t->bias[i] = on && p.bias ? p.bias[row] : 0.0f;
        t->gamma[i] = on && p.gamma ? p.gamma[row] : 0.0f;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int32_t token = first + lane % 4 * 2 + j;
            t->y[i][j] = on && p.to == TO_RESIDUAL && token < p.n
                             ? __ldcg(p.y + token * p.rows + row)
                             : 0.0f;
        }
    }
}

/* The new value of the residual stream, 0 outside the matrix. */
static __device__ __forceinline__ float add_residual(const struct product_end &p, int64_t row,
                                                     int32_t token, float sum, float y, float bias,
                                                     float gamma)
{
    if (token >= p.n || row >= p.rows) return 0.0f;
    float v = y + (p.bias ? sum + bias : sum);
    p.y[token * p.rows + row] = v;
    if (p.gamma) p.out.data[act_at(p.out, token, row)] = __float2bfloat16(v * gamma);
    return v;
}

/*
 * Stores a fragment: c[j], c[2 + j] are the sums of rows g and g + 8 of the panel for token
 * first + 2 t + j. scale: of the tile's 8 tokens. A whole warp calls it.
 */
static __device__ __forceinline__ void store_fragment(const struct product_end &p, int64_t panel,
                                                      int32_t first, const float c[4],
                                                      const struct product_tail &t,
                                                      const float *scale)
{
    int lane = threadIdx.x % 32, pair = lane % 4 * 2;
    int64_t row = panel * PANEL_ROWS + lane / 4;
#pragma unroll 1
    for (int j = 0; j < 2; j++) { /* once in the code: instructions are fetched too */
        float low = j ? c[1] : c[0], high = j ? c[3] : c[2];
        int32_t token = first + pair + j;
        float s = p.scaled ? scale[pair + j] : 1.0f;
        if (p.to == TO_ACT) store_act(p, panel, token, low, high, s);
        if (p.to == TO_ROWS) {
            store_row(p, row, token, low, s, t.bias[0]);
            store_row(p, row + 8, token, high, s, t.bias[1]);
        }
        if (p.to == TO_RESIDUAL) {
            low =
                add_residual(p, row, token, low, j ? t.y[0][1] : t.y[0][0], t.bias[0], t.gamma[0]);
            high = add_residual(p, row + 8, token, high, j ? t.y[1][1] : t.y[1][0], t.bias[1],
                                t.gamma[1]);
            float squares = panel_squares(low, high);
            if (p.gamma && lane / 4 == 0 && token < p.n)
                p.out_squares[token * p.panels + panel] = squares;
        }
    }
}

#endif
