#include "ops/peak.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "base/clock.h"
#include "base/limits.h"
#include "base/threads.h"
#include "ops/cpu/features.h"

/* ---- probes -------------------------------------------------------------------------------- */

/*
 * A probe is a loop over independent chains: more of them than an instruction's latency times its
 * issue rate. Each link passes through an empty `asm`, of which the compiler knows nothing: it can
 * neither leave a link out nor compute it once for all rounds.
 */
enum { CHAINS = 12 };
#define EACH_CHAIN(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)

#if defined(__aarch64__)
#define UNKNOWN(v) __asm__ volatile("" : "+w"(v));
#elif defined(__x86_64__)
#define UNKNOWN(v) __asm__ volatile("" : "+v"(v));
#else
#define UNKNOWN(v) __asm__ volatile("" : "+m"(v)); /* through memory: a low limit, not none */
#endif
#define UNKNOWN_CHAIN(i) UNKNOWN(a##i)
#define START_CHAIN(i)   a##i = sum_start;

/* LINK(i) continues chain a##i with the factors x and y. */
#define PROBE(name, attribute, factor, x_value, y_value, sum, sum_value, LINK)       \
    attribute static void name(int64_t rounds)                                       \
    {                                                                                \
        factor x = x_value, y = y_value;                                             \
        sum sum_start = sum_value, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11; \
        UNKNOWN(y)                                                                   \
        EACH_CHAIN(START_CHAIN)                                                      \
        for (; rounds > 0; rounds--) {                                               \
            EACH_CHAIN(LINK)                                                         \
            EACH_CHAIN(UNKNOWN_CHAIN)                                                \
            UNKNOWN(x)                                                               \
        }                                                                            \
    }

struct probe {
    enum arithmetic arithmetic;
    bool (*usable)(void);
    void (*run)(int64_t rounds);
    int operations; /* of one link */
};

#define TARGET(features) __attribute__((target(features)))

#if defined(__x86_64__)

/* a x + y stays near 2. */
#define LINK(i) a##i = _mm512_fmadd_ps(a##i, x, y);
PROBE(f32_avx512, TARGET("avx512f"), __m512, _mm512_set1_ps(0.5f), _mm512_set1_ps(1), __m512,
      _mm512_set1_ps(2), LINK)
#undef LINK

#define LINK(i) a##i = _mm256_fmadd_ps(a##i, x, y);
PROBE(f32_avx2, TARGET("avx2,fma"), __m256, _mm256_set1_ps(0.5f), _mm256_set1_ps(1), __m256,
      _mm256_set1_ps(2), LINK)
#undef LINK

/* Part of every x86-64: a product and a sum. */
#define LINK(i) a##i = _mm_add_ps(_mm_mul_ps(a##i, x), y);
PROBE(f32_sse, , __m128, _mm_set1_ps(0.5f), _mm_set1_ps(1), __m128, _mm_set1_ps(2), LINK)
#undef LINK

#define LINK(i) a##i = _mm512_dpbusd_epi32(a##i, x, y);
PROBE(int8_avx512, TARGET("avx512f,avx512vnni"), __m512i, _mm512_set1_epi8(85),
      _mm512_set1_epi8(-51), __m512i, _mm512_setzero_si512(), LINK)
#undef LINK

/* As an instruction of its own: compilers call the intrinsic differently. */
#define LINK(i) __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(a##i) : "x"(x), "x"(y));
PROBE(int8_avx_vnni, TARGET("avx2"), __m256i, _mm256_set1_epi8(85), _mm256_set1_epi8(-51), __m256i,
      _mm256_setzero_si256(), LINK)
#undef LINK

/* Products in pairs to 16 bits, pairs to 32, and the sum: x is unknown anew each time, or the first
 * two would be done once. */
#define LINK(i)                   \
    UNKNOWN(x)                    \
    a##i = _mm256_add_epi32(a##i, \
                            _mm256_madd_epi16(_mm256_maddubs_epi16(x, y), _mm256_set1_epi16(1)));
PROBE(int8_avx2, TARGET("avx2"), __m256i, _mm256_set1_epi8(85), _mm256_set1_epi8(-51), __m256i,
      _mm256_setzero_si256(), LINK)
#undef LINK

/* 0x3E80 is 1/4 in bf16. */
#define LINK(i) a##i = _mm512_dpbf16_ps(a##i, (__m512bh)x, (__m512bh)y);
PROBE(bf16_avx512, TARGET("avx512f,avx512bf16"), __m512i, _mm512_set1_epi16(0x3E80),
      _mm512_set1_epi16(0x3E80), __m512, _mm512_setzero_ps(), LINK)
#undef LINK

static const struct probe probes[] = {
    {ARITHMETIC_F32, has_avx512, f32_avx512, 2 * 16},
    {ARITHMETIC_F32, has_avx2, f32_avx2, 2 * 8},
    {ARITHMETIC_F32, NULL, f32_sse, 2 * 4},
    {ARITHMETIC_INT8, has_avx512_vnni, int8_avx512, 2 * 64},
    {ARITHMETIC_INT8, has_avx_vnni, int8_avx_vnni, 2 * 32},
    {ARITHMETIC_INT8, has_avx2, int8_avx2, 2 * 32},
    {ARITHMETIC_BF16, has_avx512_bf16, bf16_avx512, 2 * 32},
};

#elif defined(__aarch64__)

/* y + a x stays near 2. */
#define LINK(i) a##i = vfmaq_f32(y, a##i, x);
PROBE(f32_neon, , float32x4_t, vdupq_n_f32(0.5f), vdupq_n_f32(1), float32x4_t, vdupq_n_f32(2), LINK)
#undef LINK

/* Compilers differ in the name. */
#if defined(__clang__)
#define WITH_DOTS TARGET("dotprod")
#else
#define WITH_DOTS TARGET("arch=armv8.2-a+dotprod")
#endif

/* As an instruction: not every compiler gives the intrinsic to a single function. */
#define LINK(i) __asm__("sdot %0.4s, %1.16b, %2.16b" : "+w"(a##i) : "w"(x), "w"(y));
PROBE(int8_neon_dot, WITH_DOTS, int8x16_t, vdupq_n_s8(85), vdupq_n_s8(-51), int32x4_t,
      vdupq_n_s32(0), LINK)
#undef LINK

/* Products to 16 bits, two of them added, and pairs to the sum: x is unknown anew each time, or the
 * first two would be done once. */
#define LINK(i) \
    UNKNOWN(x)  \
    a##i = vpadalq_s16(a##i, vmlal_high_s8(vmull_s8(vget_low_s8(x), vget_low_s8(y)), x, y));
PROBE(int8_neon, , int8x16_t, vdupq_n_s8(85), vdupq_n_s8(-51), int32x4_t, vdupq_n_s32(0), LINK)
#undef LINK

static const struct probe probes[] = {
    {ARITHMETIC_F32, NULL, f32_neon, 2 * 4},
    {ARITHMETIC_INT8, has_neon_dot, int8_neon_dot, 2 * 16},
    {ARITHMETIC_INT8, NULL, int8_neon, 2 * 16},
};

#else

#define LINK(i) a##i = a##i * x + y;
PROBE(f32_scalar, , float, 0.5f, 1, float, 2, LINK)
#undef LINK

static const struct probe probes[] = {{ARITHMETIC_F32, NULL, f32_scalar, 2}};

#endif

/* ---- all threads at once ------------------------------------------------------------------- */

struct run {
    const struct probe *probe;
    double rates[LIMIT_THREADS];
};

/* Each thread counts what it does in the same time, so that one that starts late or shares its
 * processor lowers the sum by its own part only. */
static void run_share(void *arg, int thread, int n_threads)
{
    enum { ROUNDS = 20000 };
    struct run *r = arg;
    double begin = clock_seconds(), seconds;
    int64_t rounds = 0;
    (void)n_threads;
    do {
        r->probe->run(ROUNDS);
        rounds += ROUNDS;
        seconds = clock_seconds() - begin;
    } while (seconds < 0.01);
    r->rates[thread] = (double)rounds * CHAINS * r->probe->operations / seconds;
}

double cpu_peak(struct pool *pool, enum arithmetic arithmetic)
{
    enum { PASSES = 3 };
    size_t i = 0, n = sizeof probes / sizeof *probes;
    double best = 0;
    while (i < n &&
           (probes[i].arithmetic != arithmetic || (probes[i].usable && !probes[i].usable())))
        i++;
    if (i == n) return 0;
    struct run r = {.probe = &probes[i]};
    for (int pass = 0; pass < PASSES; pass++) {
        double rate = 0;
        pool_run(pool, run_share, &r);
        for (int t = 0; t < pool_threads(pool); t++) rate += r.rates[t];
        best = rate > best ? rate : best;
    }
    return best;
}

/* ---- memory -------------------------------------------------------------------------------- */

/* Four vectors of sums, so that neither the loads nor the additions wait for one another. */
#define READER(name, attribute, width)                                                  \
    attribute static uint64_t name(const void *data, int64_t bytes, enum reader reader) \
    {                                                                                   \
        typedef uint64_t lanes __attribute__((vector_size(width)));                     \
        enum { AHEAD = 4096, VECTORS = READ_UNIT / (width) };                           \
        lanes sum[4] = {{0}};                                                           \
        for (const char *p = data, *end = p + bytes; p < end; p += READ_UNIT) {         \
            for (int i = 0; i < READ_UNIT; i += CACHE_LINE) {                           \
                if (reader == READ_AHEAD) __builtin_prefetch(p + AHEAD + i);            \
                if (reader == READ_NEXT) __builtin_prefetch(p + CACHE_LINE + i, 0, 0);  \
            }                                                                           \
            _Pragma("GCC unroll 16") for (int i = 0; i < VECTORS; i++) sum[i % 4] +=    \
                ((const lanes *)(const void *)p)[i];                                    \
        }                                                                               \
        sum[0] += sum[1] + sum[2] + sum[3];                                             \
        uint64_t total = 0;                                                             \
        for (size_t i = 0; i < (width) / sizeof total; i++) total += sum[0][i];         \
        return total;                                                                   \
    }

READER(read_16, , 16)
#if defined(__x86_64__)
READER(read_32, TARGET("avx2"), 32)
READER(read_64, TARGET("avx512f"), 64)
#endif

uint64_t cpu_read(const void *data, int64_t bytes, enum reader reader)
{
#if defined(__x86_64__)
    if (has_avx512()) return read_64(data, bytes, reader);
    if (has_avx2()) return read_32(data, bytes, reader);
#endif
    return read_16(data, bytes, reader);
}
