/*
 * matrix.cu - products with packed weights on tensor cores. The columns are cut into N_SEGMENTS
 * segments, a function of their number alone; each is one chain of products into fp32
 * accumulators, and the segments' sums are added in ascending order. So an output has the same
 * bits for 1 token and for 2,048.
 */
#include "ops/cuda/cuda_internal.h"

static __global__ void pack_kernel(const bf16 *rows, int64_t first, int64_t n, int64_t columns,
                                   int64_t padded, bf16 *packed)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; /* one value of the source's grid */
    if (i >= n * padded) return;
    int64_t row = first + i / padded, column = i % padded, in_step = column % K_STEP;
    /* the lane's 16 values: per product rows g, g + 8, then the same of the next four columns */
    int64_t lane = row % 8 * 4 + in_step / 8, j = in_step % 8, product = j / 4, pair = j % 4 / 2;
    int64_t value = product * 8 + pair * 4 + row % 16 / 8 * 2 + j % 2;
    int64_t at =
        ((row / PANEL_ROWS * (padded / K_STEP) + column / K_STEP) * 32 + lane) * 16 + value;
    packed[at] = column < columns ? rows[i / padded * columns + column] : __float2bfloat16(0.0f);
}

void matrix_pack(struct backend *b, const bf16 *rows, int64_t first, int64_t n, struct matrix *m)
{
    int64_t count = n * m->padded;
    pack_kernel<<<(unsigned)((count + 255) / 256), 256, 0, b->stream>>>(rows, first, n, m->columns,
                                                                        m->padded, m->data);
    cuda_good(b, cudaGetLastError(), "packing weights");
}

/* c += a b for one 16 x 8 tile and 16 columns */
static __device__ __forceinline__ void mma(float c[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                           uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/*
 * A block computes one panel of 16 rows for up to 8 * TILES tokens; warp s does segment s of the
 * columns, and the block adds the segments up.
 */
template <int TILES>
static __global__ void __launch_bounds__(32 * N_SEGMENTS)
    product_kernel(const bf16 *packed, int64_t rows, int64_t padded, const bf16 *x, int32_t n,
                   float *y, const float *bias, bool add)
{
    __shared__ float sums[N_SEGMENTS][TILES][PANEL_ROWS * 8];
    int64_t steps = padded / K_STEP, panel = blockIdx.x;
    int segment = threadIdx.x / 32, lane = threadIdx.x % 32,
        first_token = (int)blockIdx.y * 8 * TILES;
    int64_t begin = steps * segment / N_SEGMENTS, end = steps * (segment + 1) / N_SEGMENTS;
    float acc[TILES][4] = {};
    const uint4 *weights = (const uint4 *)packed + (panel * steps * 32 + lane) * 2;
#pragma unroll 4
    for (int64_t step = begin; step < end; step++) {
        uint4 w0 = weights[step * 64], w1 = weights[step * 64 + 1];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            int token = first_token + tile * 8 + lane / 4;
            uint4 v = make_uint4(0, 0, 0, 0);
            if (token < n) v = *(const uint4 *)(x + token * padded + step * K_STEP + lane % 4 * 8);
            mma(acc[tile], w0.x, w0.y, w0.z, w0.w, v.x, v.y);
            mma(acc[tile], w1.x, w1.y, w1.z, w1.w, v.z, v.w);
        }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        float *s = sums[segment][tile]; /* [token in tile][row] */
        int row = lane / 4, token = lane % 4 * 2;
        s[token * PANEL_ROWS + row] = acc[tile][0];
        s[(token + 1) * PANEL_ROWS + row] = acc[tile][1];
        s[token * PANEL_ROWS + row + 8] = acc[tile][2];
        s[(token + 1) * PANEL_ROWS + row + 8] = acc[tile][3];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TILES * 8 * PANEL_ROWS; i += blockDim.x) {
        int tile = i / (8 * PANEL_ROWS), in_tile = i % (8 * PANEL_ROWS),
            token = first_token + tile * 8 + in_tile / PANEL_ROWS;
        int64_t row = panel * PANEL_ROWS + in_tile % PANEL_ROWS;
        if (token >= n || row >= rows) continue;
        float sum = 0;
        for (int s = 0; s < N_SEGMENTS; s++) sum += sums[s][tile][in_tile];
        if (bias) sum += bias[row];
        float *to = y + token * rows + row;
        *to = add ? *to + sum : sum;
    }
}

template <int TILES>
static void launch(struct backend *b, const struct matrix *m, const bf16 *x, int32_t n, float *y,
                   const float *bias, bool add)
{
    dim3 grid((unsigned)((m->rows + PANEL_ROWS - 1) / PANEL_ROWS),
              (unsigned)((n + 8 * TILES - 1) / (8 * TILES)));
    product_kernel<TILES>
        <<<grid, 32 * N_SEGMENTS, 0, b->stream>>>(m->data, m->rows, m->padded, x, n, y, bias, add);
}

void matrix_product(struct backend *b, const struct matrix *m, const bf16 *x, int32_t n, float *y,
                    const struct vector *bias, bool add)
{
    const float *values = bias ? bias->data : NULL;
    if (n <= 8)
        launch<1>(b, m, x, n, y, values, add);
    else if (n <= 16)
        launch<2>(b, m, x, n, y, values, add);
    else if (n <= 32)
        launch<4>(b, m, x, n, y, values, add);
    else
        launch<8>(b, m, x, n, y, values, add);
    cuda_good(b, cudaGetLastError(), "a matrix product");
}
