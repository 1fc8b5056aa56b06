/*
 * vector.h - the few vector operations that the kernels are written in, for the instruction set
 * that the including file is compiled for. A `vec` has LANES floats; + - * / work on it. Sixteen
 * lanes' worth of rows, VECS vectors, are always handled together, so a row's sum is the same
 * chain whatever the width.
 */
#ifndef LINNET_OPS_CPU_VECTOR_H
#define LINNET_OPS_CPU_VECTOR_H

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#include <immintrin.h>
enum { LANES = 16 };
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
INLINE vec v_from_low(const uint8_t *p)
{
    return v_from_i32(_mm512_cvtepu8_epi32(_mm_and_si128(load_bytes(p), _mm_set1_epi8(15))));
}
INLINE vec v_from_high(const uint8_t *p)
{
    return v_from_i32(
        _mm512_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16(load_bytes(p), 4), _mm_set1_epi8(15))));
}
INLINE vec v_from_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE vec v_from_bf16(const uint16_t *p)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
enum { LANES = 8 };
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
INLINE vec v_from_low(const uint8_t *p)
{
    return v_from_i32(_mm256_cvtepu8_epi32(_mm_and_si128(load_bytes(p), _mm_set1_epi8(15))));
}
INLINE vec v_from_high(const uint8_t *p)
{
    return v_from_i32(
        _mm256_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16(load_bytes(p), 4), _mm_set1_epi8(15))));
}
INLINE vec v_from_f16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
INLINE vec v_from_bf16(const uint16_t *p)
{
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

#else /* any machine: the compiler's own vectors of four; a product and a sum where there is no \
         FMA */
#include "base/dtype.h"
enum { LANES = 4 };
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
INLINE vec v_from_low(const uint8_t *p)
{
    return (vec){p[0] & 15, p[1] & 15, p[2] & 15, p[3] & 15};
}
INLINE vec v_from_high(const uint8_t *p)
{
    return (vec){p[0] >> 4, p[1] >> 4, p[2] >> 4, p[3] >> 4};
}
INLINE vec v_from_f16(const uint16_t *p)
{
    return (vec){f32_from_f16(p[0]), f32_from_f16(p[1]), f32_from_f16(p[2]), f32_from_f16(p[3])};
}
INLINE vec v_from_bf16(const uint16_t *p)
{
    return (vec)((vec_int){p[0], p[1], p[2], p[3]} << 16);
}
#endif

enum { VECS = 16 / LANES };

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

#endif
