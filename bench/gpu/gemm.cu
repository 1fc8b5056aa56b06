/*
 * gemm.cu - the products of src/ops/cuda/gemm.cu against a slow kernel in the order of sums that
 * every kernel keeps to (bit for bit) and against a sum in double; then their speed.
 *
 *   nvcc -std=c++17 -gencode=arch=compute_90a,code=sm_90a -O3 -fmad=false \
 *        --expt-relaxed-constexpr -Isrc -Iinclude -cudart static -o gemm bench/gpu/gemm.cu
 *   ./gemm check | ./gemm time | ./gemm variants; before these only=NUMBER: of one variant,
 *   n=NUMBER: times for so many tokens
 */
#include "ops/cuda/attention.cuh"
#include "ops/cuda/gemm.cu"

#include <algorithm>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <vector>

bool cuda_good(struct backend *b, cudaError_t status, const char *what)
{
    if (status == cudaSuccess) return true;
    printf("%s: %s\n", what, cudaGetErrorString(status));
    exit(1);
}

static void good(cudaError_t status)
{
    cuda_good(NULL, status, "CUDA");
}

static int only = -1;     /* the one variant to look at */
static int only_n = -1;   /* and number of tokens */
static char current[128]; /* what runs, for when it does not end */

static void hangs(int signal)
{
    (void)signal;
    fprintf(stderr, "no end: %s\n", current);
    _exit(1);
}

/* ---- data ---- */

static __host__ __device__ uint32_t mixed(uint64_t v)
{
    v = (v ^ v >> 31) * 0x9e3779b97f4a7c15ull;
    v = (v ^ v >> 29) * 0xbf58476d1ce4e5b9ull;
    return (uint32_t)(v >> 32);
}

static __host__ __device__ float random_value(uint64_t i, uint32_t seed)
{
    uint32_t a = mixed(i * 2 + ((uint64_t)seed << 40)),
             c = mixed(i * 2 + 1 + ((uint64_t)seed << 40));
    return (float)((int)(a >> 8) - (1 << 23)) / (1 << 23) +
           (float)((int)(c >> 8) - (1 << 23)) / (1 << 23);
}

/* which row and column a packed value belongs to */
static __host__ __device__ void unpacked(int64_t i, int64_t padded, int64_t *row, int64_t *column)
{
    int64_t v = i % 8, lane = i / 8 % 32, step = i / 256 % (padded / 16), panel = i / 16 / padded;
    *row = panel * 16 + lane / 4 + v / 2 % 2 * 8;
    *column = step * 16 + lane % 4 * 2 + v % 2 + v / 4 * 8;
}

/* Rows beyond the matrix hold NaN, columns beyond it zeros. */
static __global__ void fill_matrix(bf16 *data, int64_t count, int64_t rows, int64_t columns,
                                   int64_t padded, uint32_t seed)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x) {
        int64_t row, column;
        unpacked(i, padded, &row, &column);
        data[i] = __float2bfloat16(column >= columns ? 0.0f
                                   : row >= rows     ? NAN
                                                     : random_value(i, seed) * 0.04f);
    }
}

/* Tokens beyond n hold NaN. */
static __global__ void fill_act(struct act a, int64_t columns, int32_t n, uint32_t seed)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < a.padded * a.capacity;
         i += (int64_t)gridDim.x * blockDim.x) {
        int64_t token = i / a.padded, column = i % a.padded;
        a.data[act_at(a, token, column)] =
            __float2bfloat16(token >= n          ? NAN
                             : column >= columns ? 0.0f
                                                 : random_value(i, seed));
    }
}

static __global__ void fill_floats(float *data, int64_t count, uint32_t seed, float low,
                                   float width)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x)
        data[i] = low + width * (random_value(i, seed) + 2.0f) / 4.0f;
}

/* One reservation for all; `used` goes back to what it was when a case is done. */
static uint8_t *arena;
static size_t memory_used;
enum { MEMORY_BYTES = 1 << 30 };

template <class T> static T *take(int64_t count)
{
    size_t bytes = ((size_t)count * sizeof(T) + 255) / 256 * 256;
    if (!arena) good(cudaMalloc(&arena, 3 * (size_t)MEMORY_BYTES));
    if (memory_used + bytes > 3 * (size_t)MEMORY_BYTES)
        cuda_good(NULL, cudaErrorMemoryAllocation, "memory");
    memory_used += bytes;
    return (T *)(arena + memory_used - bytes);
}

/* ---- the slow kernels ---- */

/* One warp for 16 rows x 8 tokens; sums [tokens][panels * 16]. */
static __global__ void slow_sums(const bf16 *weights, struct act in, int32_t panels, float *sums)
{
    int panel = blockIdx.x, g = threadIdx.x / 4, t = threadIdx.x % 4;
    int64_t first = (int64_t)blockIdx.y * 8, steps = in.padded / 16;
    const uint4 *a = (const uint4 *)weights + panel * steps * 32 + threadIdx.x;
    float total[4] = {};
    for (int s = 0; s < n_segments(in.padded); s++) {
        float acc[4] = {};
        for (int64_t k = segment_begin(in.padded, s); k < segment_begin(in.padded, s + 1);
             k += 16) {
            uint4 w = a[k / 16 * 32];
            uint32_t b0 = *(const uint32_t *)(in.data + act_at(in, first + g, k + 2 * t));
            uint32_t b1 = *(const uint32_t *)(in.data + act_at(in, first + g, k + 2 * t + 8));
            mma_16816(acc, w.x, w.y, w.z, w.w, b0, b1);
        }
        for (int j = 0; j < 4; j++) total[j] = total[j] + acc[j];
    }
    for (int j = 0; j < 4; j++)
        sums[(first + 2 * t + j % 2) * panels * 16 + panel * 16 + g + j / 2 * 8] = total[j];
}

static __global__ void slow_scales(struct product p, float *scales)
{
    float scale = p.squares ? token_scale(p.squares + (int64_t)blockIdx.x * p.in_panels,
                                          p.in_panels, p.in_width, p.eps)
                            : 1.0f;
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
}

/* One warp for a panel of 4 tokens. */
static __global__ void slow_finish(struct product p, int32_t rows, int32_t panels,
                                   const float *sums, const float *scales)
{
    int panel = blockIdx.x, token = blockIdx.y * 4 + threadIdx.x % 4, g = threadIdx.x / 4;
    bool real = token < p.n;
    float x[2] = {};
    for (int half = 0; half < (p.to == TO_ACT ? 1 : 2) && real; half++) {
        int row = panel * 16 + half * 8 + g;
        float v = sums[((int64_t)token * panels + panel) * 16 + half * 8 + g];
        float *y = p.y + (int64_t)token * rows + row;
        if (p.to == TO_ACT) {
            int column = panel * 8 + g;
            float up = sums[((int64_t)token * panels + panel) * 16 + 8 + g] * scales[token];
            float out = column < rows / 2 ? silu(v * scales[token]) * up : 0.0f;
            p.out.data[act_at(p.out, token, column)] = __float2bfloat16(out);
        } else if (p.to == TO_ROWS) {
            v = v * scales[token];
            if (row < rows) *y = p.bias ? v + p.bias[row] : v;
        } else {
            if (row < rows) {
                float add = p.bias ? v + p.bias[row] : v;
                x[half] = *y = *y + add;
            }
            if (p.gamma)
                p.out.data[act_at(p.out, token, row)] =
                    __float2bfloat16(row < rows ? x[half] * p.gamma[row] : 0.0f);
        }
    }
    if (p.to != TO_RESIDUAL || !p.gamma) return;
    float squares = panel_squares(x[0], x[1]);
    if (g == 0 && real) p.out_squares[(int64_t)token * panels + panel] = squares;
}

static __global__ void double_sums(const bf16 *weights, struct act in, int32_t rows, int32_t panels,
                                   int32_t n, const float *sums, int32_t *wrong)
{
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    int64_t token = mixed(i) % n, row = mixed(i + (1ull << 33)) % rows, panel = row / 16;
    double sum = 0, size = 0;
    for (int64_t k = 0; k < in.padded; k++) {
        int64_t lane = row % 8 * 4 + k % 8 / 2, v = k % 2 + row % 16 / 8 * 2 + k % 16 / 8 * 4;
        double product = (double)__bfloat162float(
                             weights[((panel * (in.padded / 16) + k / 16) * 32 + lane) * 8 + v]) *
                         (double)__bfloat162float(in.data[act_at(in, token, k)]);
        sum += product;
        size += fabs(product);
    }
    float got = sums[(token * panels + panel) * 16 + row % 16];
    if (!(fabs(got - sum) <= 1e-6 * size + 1e-12)) atomicAdd(wrong, 1);
}

/* ---- one case ---- */

struct problem {
    struct product p;
    struct matrix m;
    int64_t out_count, y_count, squares_count;
};

static void make(struct problem *q, enum product_to to, int64_t rows, int64_t columns, int32_t n,
                 bool extras)
{
    q->p = {};
    q->m = {};
    bool paired = to == TO_ACT;
    struct matrix *m = &q->m;
    *m = {rows, columns, padded_columns(columns), paired ? (rows / 2 + 7) / 8 : (rows + 15) / 16,
          paired};
    int64_t capacity = (n + ACT_TOKENS - 1) / ACT_TOKENS * ACT_TOKENS;
    int64_t count = m->panels * 16 * m->padded;
    m->data = take<bf16>(count);
    fill_matrix<<<1024, 256>>>(m->data, count, paired ? m->panels * 16 : rows, columns, m->padded,
                               1);
    struct product *p = &q->p;
    p->to = to;
    p->m = m;
    p->n = n;
    p->in = {take<bf16>(capacity * m->padded), m->padded, capacity, true};
    fill_act<<<1024, 256>>>(p->in, columns, n, 2);
    if (to != TO_RESIDUAL && extras) {
        p->in_width = (int32_t)columns;
        p->in_panels = (int32_t)(columns + 15) / 16;
        p->eps = 1e-6f;
        float *squares = take<float>((int64_t)n * p->in_panels);
        fill_floats<<<256, 256>>>(squares, (int64_t)n * p->in_panels, 3, 1, 30);
        p->squares = squares;
    }
    if (to != TO_ACT && extras) {
        float *bias = take<float>(rows);
        fill_floats<<<256, 256>>>(bias, rows, 4, -1, 2);
        p->bias = bias;
    }
    q->y_count = (int64_t)n * rows;
    q->out_count = capacity * padded_columns(paired ? rows / 2 : rows);
    q->squares_count = (int64_t)n * m->panels;
    p->y = take<float>(q->y_count);
    p->out = {take<bf16>(q->out_count), padded_columns(paired ? rows / 2 : rows), capacity, true};
    p->out_squares = take<float>(q->squares_count);
    if (to == TO_RESIDUAL && extras) {
        float *gamma = take<float>(rows);
        fill_floats<<<256, 256>>>(gamma, rows, 5, 0.5f, 1);
        p->gamma = gamma;
    }
}

static void poison(const struct problem *q, const struct product *p, cudaStream_t stream)
{
    fill_floats<<<1024, 256, 0, stream>>>(p->y, q->y_count, 6, -2, 4);
    good(cudaMemsetAsync(p->out.data, 0xff, (size_t)q->out_count * 2, stream));
    good(cudaMemsetAsync(p->out_squares, 0xff, (size_t)q->squares_count * 4, stream));
}

static __global__ void compare(const uint32_t *a, const uint32_t *c, int64_t count, int32_t *wrong)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x)
        if (a[i] != c[i]) atomicAdd(wrong, 1);
}

static bool usable(const struct variant *v, int32_t cluster, int32_t n)
{
    if (!v->split && cluster > 1) return false;
    if (only >= 0 && v != &variants[only]) return false;
    if (n > 256 && v->tokens < 64) return false;
    if (n > 16 * v->tokens) return false;
    int32_t exchange = v->groups * 4 * v->tokens / 8 / cluster * 16 * 512;
    if (v->split && v->groups * 4 * v->tokens / 8 < cluster) return false;
    return !v->split ||
           (v->groups * 4 * v->tokens / 8 >= cluster && stages_for(v, 1, exchange) >= 2);
}

static int check_case(struct backend *b, enum product_to to, int64_t rows, int64_t columns,
                      int32_t n, bool extras, int32_t *flags, int *launches)
{
    struct problem q;
    size_t used_before = memory_used;
    make(&q, to, rows, columns, n, extras);
    int32_t panels = (int32_t)q.m.panels;
    struct product slow = q.p;
    int64_t tokens = q.p.in.capacity;
    slow.y = take<float>(q.y_count);
    slow.out.data = take<bf16>(q.out_count);
    slow.out_squares = take<float>(q.squares_count);
    float *sums = take<float>(tokens * panels * 16), *scales = take<float>(n);
    good(cudaMemset(flags, 0, 256 * sizeof *flags));
    good(cudaDeviceSynchronize());
    poison(&q, &slow, b->stream);
    slow_sums<<<dim3(panels, (n + 7) / 8), 32, 0, b->stream>>>(q.m.data, q.p.in, panels, sums);
    slow_scales<<<n, 32, 0, b->stream>>>(slow, scales);
    slow_finish<<<dim3(panels, (n + 3) / 4), 32, 0, b->stream>>>(slow, rows, panels, sums, scales);
    double_sums<<<16, 256, 0, b->stream>>>(
        q.m.data, q.p.in, to == TO_ACT ? panels * 16 : (int32_t)rows, panels, n, sums, flags);
    int used = 1;
    char names[256][64];
    for (int v = -1; v < N_VARIANTS; v++)
        for (int cluster = 1; cluster <= 8; cluster *= 2) {
            if (v < 0 ? cluster > 1 || only >= 0 : !usable(&variants[v], cluster, n)) continue;
            poison(&q, &q.p, b->stream);
            if (v < 0)
                snprintf(names[used], 64, "gemm_run");
            else
                snprintf(names[used], 64, "%d x %d split %d cluster %d", variants[v].groups * 64,
                         variants[v].tokens, variants[v].split, cluster);
            snprintf(current, sizeof current, "%s to %d rows %ld columns %ld n %d", names[used], to,
                     (long)rows, (long)columns, n);
            alarm(8);
            if (v < 0)
                gemm_run(b, &q.p);
            else
                launch(b, &q.p, &variants[v], cluster);
            cudaError_t e = cudaStreamSynchronize(b->stream);
            alarm(0);
            if (e != cudaSuccess) {
                printf("%s: to %d rows %ld columns %ld n %d: %s\n", names[used], to, (long)rows,
                       (long)columns, n, cudaGetErrorString(e));
                exit(1);
            }
            int32_t *wrong = flags + used++;
            compare<<<512, 256, 0, b->stream>>>((uint32_t *)q.p.y, (uint32_t *)slow.y, q.y_count,
                                                wrong);
            compare<<<512, 256, 0, b->stream>>>((uint32_t *)q.p.out.data, (uint32_t *)slow.out.data,
                                                q.out_count / 2, wrong);
            compare<<<512, 256, 0, b->stream>>>(
                (uint32_t *)q.p.out_squares, (uint32_t *)slow.out_squares, q.squares_count, wrong);
        }
    int32_t host[256];
    good(cudaStreamSynchronize(b->stream));
    good(cudaMemcpy(host, flags, sizeof host, cudaMemcpyDeviceToHost));
    int bad = 0;
    for (int i = 0; i < used; i++)
        if (host[i]) {
            bad++;
            printf("to %d rows %ld columns %ld n %d%s: %s: %d wrong\n", to, (long)rows,
                   (long)columns, n, extras ? "" : " bare", i ? names[i] : "double", host[i]);
        }
    *launches += used - 1;
    memory_used = used_before;
    return bad;
}

static int check(struct backend *b)
{
    static const int ns[] = {9, 16, 17, 33, 64, 65, 128, 200, 256, 2048};
    static const int64_t ks[] = {64, 192, 896, 1536, 8960}, all_rows[] = {40, 48, 144, 1536, 2048};
    int bad = 0, cases = 0, launches = 0;
    int32_t *flags = take<int32_t>(256);
    for (int to = TO_ROWS; to <= TO_ACT; to++)
        for (int64_t k : ks)
            for (int64_t rows : all_rows)
                for (int n : ns)
                    for (int extras = n == 17 ? 0 : 1; extras < 2; extras++) {
                        bad += check_case(b, (enum product_to)to, rows, k, n, extras, flags,
                                          &launches);
                        cases++;
                        if (bad > 40) return bad;
                    }
    printf("%d cases, %d products, %d wrong\n", cases, launches, bad);
    return bad;
}

/* ---- time ---- */

struct shape_of {
    const char *name;
    enum product_to to;
    int64_t rows, columns;
    bool scaled, biased;
};

static const struct shape_of shapes[] = {
    {"tiny", TO_ROWS, 64, 64, true, true},           {"qkv", TO_ROWS, 2048, 1536, true, true},
    {"o", TO_RESIDUAL, 1536, 1536, false, false},    {"gate_up", TO_ACT, 17920, 1536, true, false},
    {"down", TO_RESIDUAL, 1536, 8960, false, false}, {"head", TO_ROWS, 151936, 1536, true, false}};

/* Median microseconds of a product, over copies of the weights that do not fit the L2 cache. v:
 * NULL: what gemm_run chooses. */
static float time_product(struct backend *b, const struct problem *q, bf16 *weights, int copies,
                          const struct variant *v, int cluster)
{
    struct matrix m = q->m;
    struct product p = q->p;
    p.m = &m;
    int64_t count = m.panels * 16 * m.padded;
    int launches = copies > 24 ? copies : 24;
    if (m.rows > 100000) launches = 4;
    if (p.n > 300) launches = copies > 4 ? 8 : 4;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    good(cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < launches; i++) {
        m.data = weights + i % copies * count;
        if (v)
            launch(b, &p, v, cluster);
        else
            gemm_run(b, &p);
    }
    good(cudaStreamEndCapture(b->stream, &graph));
    good(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t from, to;
    good(cudaEventCreate(&from));
    good(cudaEventCreate(&to));
    std::vector<float> times;
    for (int i = 0; i < 9; i++) {
        good(cudaEventRecord(from, b->stream));
        good(cudaGraphLaunch(exec, b->stream));
        good(cudaEventRecord(to, b->stream));
        snprintf(current, sizeof current, "timing %d x %d split %d cluster %d: %ld x %ld n %d",
                 v ? v->groups * 64 : 0, v ? v->tokens : 0, v ? v->split : 0, cluster, (long)m.rows,
                 (long)m.columns, p.n);
        alarm(8);
        good(cudaStreamSynchronize(b->stream));
        alarm(0);
        float ms;
        good(cudaEventElapsedTime(&ms, from, to));
        if (i > 1) times.push_back(ms * 1000 / launches);
    }
    std::sort(times.begin(), times.end());
    good(cudaGraphExecDestroy(exec));
    good(cudaGraphDestroy(graph));
    return times[times.size() / 2];
}

static void time_all(struct backend *b, bool every_variant)
{
    static const int ns[] = {16, 32, 64, 128, 256, 512, 2048};
    float prefill[sizeof ns / sizeof *ns] = {};
    for (const struct shape_of &s : shapes) {
        struct problem q;
        make(&q, s.to, s.rows, s.columns, s.rows > 100000 ? 256 : 2048, true);
        int64_t count = q.m.panels * 16 * q.m.padded;
        int copies = (int)((160 << 20) / (count * 2)) + 1;
        copies = copies < 200 ? copies : 200;
        bf16 *weights = take<bf16>(count * copies);
        for (int i = 0; i < copies; i++)
            fill_matrix<<<1024, 256>>>(weights + i * count, count, s.rows, s.columns, q.m.padded,
                                       10 + i);
        good(cudaDeviceSynchronize());
        if (!s.scaled) q.p.squares = NULL;
        if (!s.biased) q.p.bias = NULL;
        for (int i = 0; i < (int)(sizeof ns / sizeof *ns); i++) {
            q.p.n = ns[i];
            if (only_n >= 0 && ns[i] != only_n) continue;
            if (s.rows > 100000 && ns[i] > 256) continue;
            fill_floats<<<1024, 256>>>(q.p.y, q.y_count, 6, -2, 4);
            float us = time_product(b, &q, weights, copies, NULL, 1);
            printf("%-8s n %4d  %8.1f us  %5.2f TB/s  %6.1f TFLOP/s\n", s.name, ns[i], us,
                   (double)count * 2 / us / 1e6, 2.0 * s.rows * s.columns * ns[i] / us / 1e6);
            if (s.rows < 100000 && s.rows > 100) prefill[i] += us;
            for (int v = 0; every_variant && v < N_VARIANTS; v++)
                for (int cluster = 1; cluster <= 8; cluster *= 2) {
                    if (!usable(&variants[v], cluster, ns[i])) continue;
                    if (ns[i] < 128 && variants[v].tokens > 2 * ns[i]) continue;
                    if (ns[i] == 512 && variants[v].split && cluster > 4) continue;
                    if (ns[i] > 512 && (variants[v].split || variants[v].tokens < 128)) continue;
                    if (ns[i] >= 128 && variants[v].tokens < 64) continue;
                    if (s.rows > 10000 && variants[v].split && cluster > 2) continue;
                    float us = time_product(b, &q, weights, copies, &variants[v], cluster);
                    printf("    %3d x %3d %s cluster %d  %8.1f us\n", variants[v].groups * 64,
                           variants[v].tokens, variants[v].split ? "split" : "alone", cluster, us);
                }
        }
        good(cudaDeviceSynchronize());
        memory_used = 0;
    }
    for (int i = 0; i < (int)(sizeof ns / sizeof *ns); i++)
        if (only_n < 0 || ns[i] == only_n)
            printf("28 layers, n %4d: %.2f ms\n", ns[i], prefill[i] * 28 / 1000);
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGALRM, hangs);
    struct backend *b = (struct backend *)calloc(1, sizeof *b);
    cudaDeviceProp properties;
    good(cudaGetDeviceProperties(&properties, 0));
    b->capability = properties.major * 10 + properties.minor;
    b->multiprocessors = properties.multiProcessorCount;
    good(cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking));
    int bad = 0;
    for (int i = 1; i < argc; i++) {
        if (!strncmp(argv[i], "only=", 5)) only = atoi(argv[i] + 5);
        if (!strncmp(argv[i], "n=", 2)) only_n = atoi(argv[i] + 2);
        if (!strcmp(argv[i], "check")) bad += check(b);
        if (!strcmp(argv[i], "time")) time_all(b, false);
        if (!strcmp(argv[i], "variants")) time_all(b, true);
        good(cudaDeviceSynchronize());
    }
    return bad != 0;
}
