/*
 * matrix.cu - packing of weights for tensor cores, and the product with them that works on every
 * GPU and for any number of tokens: the one to compare the others with. Hopper takes gemm.cu for
 * many tokens and decode.cu for few.
 */
#include "ops/cuda/launch.cuh"
#include "ops/cuda/product.cuh"
#include "ops/cuda/ptx.cuh"

static __global__ void pack_kernel(const bf16 *rows, int64_t first, int64_t n, struct matrix m)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; /* of the padded rows */
    if (i >= n * m.padded) return;
    int64_t row = first + i / m.padded, column = i % m.padded, panel, in_panel;
    if (m.paired) {
        int64_t half = m.rows / 2, r = row < half ? row : row - half;
        panel = r / 8, in_panel = r % 8 + (row < half ? 0 : 8);
    } else {
        panel = row / PANEL_ROWS, in_panel = row % PANEL_ROWS;
    }
    int64_t in_step = column % 16, lane = in_panel % 8 * 4 + in_step % 8 / 2;
    int64_t value = in_step / 8 * 4 + in_panel / 8 * 2 + column % 2;
    m.data[((panel * (m.padded / 16) + column / 16) * 32 + lane) * 8 + value] =
        column < m.columns ? rows[i / m.padded * m.columns + column] : __float2bfloat16(0.0f);
}

void matrix_pack(struct backend *b, cudaStream_t stream, const bf16 *rows, int64_t first, int64_t n,
                 struct matrix *m)
{
    int64_t count = n * m->padded;
    cuda_good(b,
              launch_plain(stream, pack_kernel, dim3((unsigned)((count + 255) / 256)), 256, rows,
                           first, n, *m),
              "packing weights");
}

/* ---- the product ------------------------------------------------------------------------- */

struct product_in {
    const uint4 *weights; /* [panels, padded / 16, 32] fragments */
    const uint4 *x;       /* [tokens / 8, padded / 32, 32] fragments */
    int64_t padded;
    const float *squares;
    int32_t panels, width;
    float eps;
};

enum { MOST_SEGMENTS = 16 };

/*
 * A block computes one panel of 16 rows for up to 8 * TILES tokens; warp s does segment s of the
 * columns, and the block adds the segments up.
 */
template <int TILES>
static __global__ void __launch_bounds__(32 * MOST_SEGMENTS)
    product_kernel(struct product_in in, struct product_end end)
{
    __shared__ float4 sums[MOST_SEGMENTS][TILES][32];
    __shared__ float scales[8 * TILES];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
    int64_t panel = blockIdx.x, steps = in.padded / 32;
    int32_t first = (int32_t)blockIdx.y * 8 * TILES;
    next_launch();
    previous_wait();
    float acc[TILES][4] = {};
    const uint4 *weights = in.weights + panel * steps * 64 + lane;
    const uint4 *x = in.x + (int64_t)blockIdx.y * TILES * steps * 32 + lane;
    int64_t last = segment_begin(in.padded, warp + 1) / 32;
#pragma unroll 2
    for (int64_t step = segment_begin(in.padded, warp) / 32; step < last; step++) {
        uint4 w0 = weights[step * 64], w1 = weights[step * 64 + 32];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            uint4 v = make_uint4(0, 0, 0, 0);
            if (first + tile * 8 + lane / 4 < end.n) v = x[(tile * steps + step) * 32];
            mma_16816(acc[tile], w0.x, w0.y, w0.z, w0.w, v.x, v.y);
            mma_16816(acc[tile], w1.x, w1.y, w1.z, w1.w, v.z, v.w);
        }
    }
    if (end.scaled)
        for (int i = warp; i < 8 * TILES && first + i < end.n; i += n_warps) {
            float scale = token_scale(in.squares + (int64_t)(first + i) * in.panels, in.panels,
                                      in.width, in.eps);
            if (lane == 0) scales[i] = scale;
        }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
        sums[warp][tile][lane] =
            make_float4(acc[tile][0], acc[tile][1], acc[tile][2], acc[tile][3]);
    __syncthreads();
    for (int tile = warp; tile < TILES; tile += n_warps) {
        float c[4] = {};
        for (int s = 0; s < n_warps; s++) {
            float4 part = sums[s][tile][lane];
            c[0] += part.x, c[1] += part.y, c[2] += part.z, c[3] += part.w;
        }
        struct product_tail tail;
        load_tail(end, panel, first + tile * 8, &tail);
        store_fragment(end, panel, first + tile * 8, c, tail, scales + tile * 8);
    }
}

template <int TILES> static void launch(struct backend *b, const struct product *p)
{
    struct product_in in = {(const uint4 *)p->m->data,
                            (const uint4 *)p->in.data,
                            p->m->padded,
                            p->squares,
                            p->in_panels,
                            p->in_width,
                            p->eps};
    dim3 grid((unsigned)p->m->panels, (unsigned)((p->n + 8 * TILES - 1) / (8 * TILES)));
    launch_next(b, "a matrix product", product_kernel<TILES>, grid,
                32 * (unsigned)n_segments(p->m->padded), 0, in, end_of(p));
}

void matrix_product(struct backend *b, const struct product *p)
{
    if (p->n <= 8)
        launch<1>(b, p);
    else if (p->n <= 16)
        launch<2>(b, p);
    else
        launch<4>(b, p);
}
