/*
 * vector.h - the few vector operations that the kernels are written in, for the instruction set
 * that the including file is compiled for. A `vec` has LANES floats; + - * / work on it; there is
 * room for REGISTERS of them. Sixteen lanes' worth of rows, VECS vectors, are always handled
 * together, so a row's sum is the same chain whatever the width. v_sum adds the halves of a vector,
 * then the halves of that: any width adds 16 lanes in the same order. v_largest's does not matter.
 */
#ifndef LINNET_OPS_CPU_VECTOR_H
#define LINNET_OPS_CPU_VECTOR_H

#include <stdint.h>
#include <string.h>

#include "base/dtype.h"

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX2__)
#include <immintrin.h>
INLINE float largest_of_8(__m256 v)
{
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
INLINE float sum_of_8(__m256 v)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#endif

#if defined(__AVX512F__)
enum { LANES = 16, REGISTERS = 32 };
typedef __m512 vec;
INLINE vec v_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
INLINE void v_store(float *p, vec v)
{
    _mm512_storeu_ps(p, v);
}
INLINE vec v_set(float f)
{
    return _mm512_set1_ps(f);
}
INLINE vec v_fma(vec a, vec b, vec c)
{
    return _mm512_fmadd_ps(a, b, c);
}
INLINE vec v_max(vec a, vec b)
{
    return _mm512_max_ps(a, b);
}
INLINE vec v_min(vec a, vec b)
{
    return _mm512_min_ps(a, b);
}
INLINE vec v_round(vec a)
{
    return _mm512_roundscale_ps(a, 0);
}
INLINE vec v_power_of_2(vec n) /* n a whole number in [-126, 127] */
{
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
INLINE vec v_from_i32(__m512i i)
{
    return _mm512_cvtepi32_ps(i);
}
INLINE __m128i load_bytes(const void *p)
{
    return _mm_loadu_si128(p);
}
INLINE vec v_from_u8(const uint8_t *p)
{
    return v_from_i32(_mm512_cvtepu8_epi32(load_bytes(p)));
}
INLINE vec v_from_i8(const int8_t *p)
{
    return v_from_i32(_mm512_cvtepi8_epi32(load_bytes(p)));
}
INLINE vec v_from_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE vec v_from_bf16_pair(const void *p, int odd)
{
    __m512i pair = _mm512_loadu_si512(p);
    return _mm512_castsi512_ps(odd ? _mm512_and_si512(pair, _mm512_set1_epi32(-65536))
                                   : _mm512_slli_epi32(pair, 16));
}
INLINE vec v_abs(vec a)
{
    return _mm512_abs_ps(a);
}
INLINE void v_store_i8(int8_t *p, vec a) /* whole numbers in [-128, 127] */
{
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}
INLINE __m256 v_half(vec v, int i)
{
    __m512d d = _mm512_castps_pd(v);
    return _mm256_castpd_ps(i ? _mm512_extractf64x4_pd(d, 1) : _mm512_castpd512_pd256(d));
}
INLINE float v_largest(vec v)
{
    return largest_of_8(_mm256_max_ps(v_half(v, 0), v_half(v, 1)));
}
INLINE float v_sum(vec v)
{
    return sum_of_8(_mm256_add_ps(v_half(v, 0), v_half(v, 1)));
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
enum { LANES = 8, REGISTERS = 16 };
typedef __m256 vec;
INLINE vec v_load(const float *p)
{
    return _mm256_loadu_ps(p);
}
INLINE void v_store(float *p, vec v)
{
    _mm256_storeu_ps(p, v);
}
INLINE vec v_set(float f)
{
    return _mm256_set1_ps(f);
}
INLINE vec v_fma(vec a, vec b, vec c)
{
    return _mm256_fmadd_ps(a, b, c);
}
INLINE vec v_max(vec a, vec b)
{
    return _mm256_max_ps(a, b);
}
INLINE vec v_min(vec a, vec b)
{
    return _mm256_min_ps(a, b);
}
INLINE vec v_round(vec a)
{
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE vec v_power_of_2(vec n) /* n a whole number in [-126, 127] */
{
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE vec v_from_i32(__m256i i)
{
    return _mm256_cvtepi32_ps(i);
}
INLINE __m128i load_bytes(const void *p)
{
    return _mm_loadl_epi64(p);
}
INLINE vec v_from_u8(const uint8_t *p)
{
    return v_from_i32(_mm256_cvtepu8_epi32(load_bytes(p)));
}
INLINE vec v_from_i8(const int8_t *p)
{
    return v_from_i32(_mm256_cvtepi8_epi32(load_bytes(p)));
}
INLINE vec v_from_f16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
INLINE vec v_from_bf16_pair(const void *p, int odd)
{
    __m256i pair = _mm256_loadu_si256(p);
    return _mm256_castsi256_ps(odd ? _mm256_and_si256(pair, _mm256_set1_epi32(-65536))
                                   : _mm256_slli_epi32(pair, 16));
}
INLINE vec v_abs(vec a)
{
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
}
INLINE void v_store_i8(int8_t *p, vec a) /* whole numbers in [-128, 127] */
{
    __m256i i = _mm256_cvtps_epi32(a);
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(words, words));
}
INLINE float v_largest(vec v)
{
    return largest_of_8(v);
}
INLINE float v_sum(vec v)
{
    return sum_of_8(v);
}

#elif defined(KERNEL_NEON)
#include <arm_neon.h>
enum { LANES = 4, REGISTERS = 32 };
typedef float32x4_t vec;
INLINE vec v_load(const float *p)
{
    return vld1q_f32(p);
}
INLINE void v_store(float *p, vec v)
{
    vst1q_f32(p, v);
}
INLINE vec v_set(float f)
{
    return vdupq_n_f32(f);
}
INLINE vec v_fma(vec a, vec b, vec c)
{
    return vfmaq_f32(c, a, b);
}
INLINE vec v_max(vec a, vec b)
{
    return vmaxq_f32(a, b);
}
INLINE vec v_min(vec a, vec b)
{
    return vminq_f32(a, b);
}
INLINE vec v_round(vec a)
{
    return vrndnq_f32(a);
}
INLINE vec v_power_of_2(vec n) /* n a whole number in [-126, 127] */
{
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}
INLINE vec v_from_u8(const uint8_t *p)
{
    uint32_t four;
    memcpy(&four, p, sizeof four);
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))));
}
INLINE vec v_from_i8(const int8_t *p)
{
    uint32_t four;
    memcpy(&four, p, sizeof four);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four)))));
}
INLINE vec v_from_f16(const uint16_t *p)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
INLINE vec v_from_bf16_pair(const void *p, int odd)
{
    uint32x4_t pair = vreinterpretq_u32_u8(vld1q_u8(p));
    return vreinterpretq_f32_u32(odd ? vandq_u32(pair, vdupq_n_u32(0xFFFF0000))
                                     : vshlq_n_u32(pair, 16));
}
INLINE vec v_abs(vec a)
{
    return vabsq_f32(a);
}
INLINE void v_store_i8(int8_t *p, vec a) /* whole numbers in [-128, 127] */
{
    int16x4_t words = vmovn_s32(vcvtq_s32_f32(a));
    int8x8_t eight = vmovn_s16(vcombine_s16(words, words));
    memcpy(p, &eight, LANES);
}
INLINE float v_largest(vec v)
{
    return vmaxvq_f32(v);
}
INLINE float v_sum(vec v)
{
    return vaddv_f32(vadd_f32(vget_low_f32(v), vget_high_f32(v)));
}

#else /* any machine: the compiler's own vectors of four; a product and a sum where there is no \
         FMA */
enum { LANES = 4, REGISTERS = 16 };
typedef float vec __attribute__((vector_size(16)));
typedef int32_t vec_int __attribute__((vector_size(16)));
INLINE vec v_load(const float *p)
{
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void v_store(float *p, vec v)
{
    memcpy(p, &v, sizeof v);
}
INLINE vec v_set(float f)
{
    return (vec){f, f, f, f};
}
INLINE vec v_fma(vec a, vec b, vec c)
{
    return a * b + c;
}
INLINE vec v_max(vec a, vec b)
{
    vec_int m = a > b;
    return (vec)((m & (vec_int)a) | (~m & (vec_int)b));
}
INLINE vec v_min(vec a, vec b)
{
    vec_int m = a < b;
    return (vec)((m & (vec_int)a) | (~m & (vec_int)b));
}
INLINE vec v_round(vec a)
{
    return (a + 0x1.8p23f) - 0x1.8p23f;
} /* |a| < 2^22 */
INLINE vec v_power_of_2(vec n) /* n a whole number in [-126, 127] */
{
    return (vec)((__builtin_convertvector(n, vec_int) + 127) << 23);
}
INLINE vec v_from_u8(const uint8_t *p)
{
    return (vec){p[0], p[1], p[2], p[3]};
}
INLINE vec v_from_i8(const int8_t *p)
{
    return (vec){p[0], p[1], p[2], p[3]};
}
INLINE vec v_from_f16(const uint16_t *p)
{
    return (vec){f32_from_f16(p[0]), f32_from_f16(p[1]), f32_from_f16(p[2]), f32_from_f16(p[3])};
}
INLINE vec v_from_bf16_pair(const void *p, int odd)
{
    uint32_t pair[4];
    memcpy(pair, p, sizeof pair);
    vec v;
    for (int i = 0; i < 4; i++) v[i] = f32_from_bits(odd ? pair[i] & 0xFFFF0000 : pair[i] << 16);
    return v;
}
INLINE vec v_abs(vec a)
{
    return (vec)((vec_int)a & 0x7FFFFFFF);
}
INLINE void v_store_i8(int8_t *p, vec a) /* whole numbers in [-128, 127] */
{
    for (int i = 0; i < 4; i++) p[i] = (int8_t)a[i];
}
INLINE float v_largest(vec v)
{
    float largest = v[0];
    for (int i = 1; i < LANES; i++) largest = v[i] > largest ? v[i] : largest;
    return largest;
}
INLINE float v_sum(vec v)
{
    return v[0] + v[2] + (v[1] + v[3]);
}
#endif

enum { VECS = 16 / LANES };

/* Rounded to bf16, to the nearest, ties to even. */
INLINE void v_store_bf16(uint16_t *p, vec v)
{
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(v));
#else
    float lane[LANES];
    v_store(lane, v);
    for (int i = 0; i < LANES; i++) p[i] = bf16_from_f32(lane[i]);
#endif
}

/*
 * exp(x): 2^n * e^r with |r| <= ln(2) / 2 and a polynomial of degree 6; relative error below
 * 2.5e-7 (3 units in the last place) for x in [-87, 88], clamped outside.
 */
INLINE vec v_exp(vec x)
{
    x = v_max(v_min(x, v_set(88.0f)), v_set(-87.0f));
    vec n = v_round(x * v_set(1.44269504f));
    vec r = v_fma(n, v_set(-0.693145751953125f), x);
    r = v_fma(n, v_set(-1.42860677e-6f), r);
    vec p = v_set(1.3888889e-3f);
    p = v_fma(p, r, v_set(8.3333333e-3f));
    p = v_fma(p, r, v_set(4.1666667e-2f));
    p = v_fma(p, r, v_set(1.6666667e-1f));
    p = v_fma(p, r, v_set(0.5f));
    p = v_fma(p, r, v_set(1.0f));
    p = v_fma(p, r, v_set(1.0f));
    return p * v_power_of_2(n);
}

INLINE vec v_silu_mul(vec gate, vec up)
{
    return gate / (v_set(1) + v_exp(v_set(0) - gate)) * up;
}

#endif
