/*
 * dots.h - integer dot products of unsigned weights with signed activations, exact on every
 * instruction set. `bytes` are four columns of LANES rows: row r's four in lane r. A `dots` holds
 * one running sum a row; what it is made of differs, so it is begun, added to and ended here.
 *
 * How large weights are decides how sums may be kept where there is no dot product (AVX2, NEON):
 * two products of bytes are added in 16 bits, and those that fit are added up there.
 */
#ifndef LINNET_OPS_CPU_DOTS_H
#define LINNET_OPS_CPU_DOTS_H

#include "ops/cpu/vector.h"

enum magnitude {
    UP_TO_15, /* 8 pairs of products fit in 16 bits */
    UP_TO_63, /* 2 */
    ANY_BYTE  /* signed weights; the others are unsigned */
};

#if defined(__AVX512F__) || defined(__AVX2__)
#if defined(__AVX512F__)
typedef __m512i bytes;
typedef __m512i dots;
#define I(name)  _mm512_##name
#define I_(name) _mm512_##name##_si512
#else
typedef __m256i bytes;
typedef __m256i dots;
#define I(name)  _mm256_##name
#define I_(name) _mm256_##name##_si256
#endif
INLINE bytes b_load(const void *p)
{
    return I_(loadu)(p);
}
INLINE bytes b_quad(const int8_t *p) /* the same four columns in every lane */
{
    int32_t quad;
    memcpy(&quad, p, 4);
    return I(set1_epi32)(quad);
}
INLINE bytes b_or(bytes a, bytes b)
{
    return I_(or)(a, b);
}
INLINE bytes b_left(bytes b, int n, uint8_t mask) /* (b << n) & mask, byte by byte */
{
    return I_(and)(n ? I(slli_epi16)(b, n) : b, I(set1_epi8)((char)mask));
}
INLINE bytes b_right(bytes b, int n, uint8_t mask)
{
    return I_(and)(n ? I(srli_epi16)(b, n) : b, I(set1_epi8)((char)mask));
}
INLINE dots i_set(int32_t n)
{
    return I(set1_epi32)(n);
}
INLINE dots i_times(const int32_t *n, int power_of_2) /* in every lane; straight from memory */
{
    return I(slli_epi32)(I(set1_epi32)(*n), __builtin_ctz((unsigned)power_of_2));
}
INLINE dots i_add(dots a, dots b)
{
    return I(add_epi32)(a, b);
}
INLINE vec v_from_dots(dots d)
{
    return I(cvtepi32_ps)(d);
}

/* In a register: compilers would load it again for each use of it, and each load of a line that is
 * still on its way takes a place among those that may wait. */
#if defined(KEEP) /* the emulator's */
#elif defined(__AVX512F__)
#define KEEP(b) __asm__("" : "+v"(b))
#else
#define KEEP(b) (void)(b) /* there are too few */
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#if defined(DOT) /* the emulator's */
#elif defined(__AVX512VNNI__)
/* The instruction reads the quad itself. As an intrinsic compilers load it first, and copy sums
 * from register to register. */
INLINE dots DOT(dots d, bytes w, const int8_t *x)
{
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(d) : "v"(w), "m"(*(const int8_t(*)[4])x));
    return d;
}
#else
#define DOT(acc, w, x) _mm256_dpbusd_avx_epi32(acc, w, b_quad(x))
#endif
enum { SIGNED_OFFSET = 128 }; /* signed weights are made unsigned by adding it */
enum { DOT_CHAINS = 2 };      /* of one token's sums at most: each waits less for itself */
INLINE bytes b_weights(enum magnitude m, bytes b)
{
    return m == ANY_BYTE ? I_(xor)(b, I(set1_epi8)((char)128)) : b;
}
INLINE dots d_begin(enum magnitude m, dots first)
{
    (void)m;
    return first;
}
INLINE dots d_add(enum magnitude m, dots d, bytes w0, const int8_t *x0, bytes w1, const int8_t *x1)
{
    (void)m;
    return DOT(DOT(d, w0, x0), w1, x1);
}
INLINE dots d_end(enum magnitude m, dots d, dots first)
{
    (void)m, (void)first;
    return d;
}
#else
enum { SIGNED_OFFSET = 0, DOT_CHAINS = 1 };
INLINE bytes b_weights(enum magnitude m, bytes b)
{
    (void)m;
    return b;
}
INLINE dots d_begin(enum magnitude m, dots first)
{
    return m == UP_TO_15 ? i_set(0) : first;
}
INLINE dots add_pairs(dots d, bytes pairs)
{
    return i_add(d, I(madd_epi16)(pairs, I(set1_epi16)(1)));
}
#if defined(__AVX512F__)
INLINE bytes signed_products(bytes w, bytes x)
{
    return I(maddubs_epi16)(I(abs_epi8)(w),
                            I(mask_sub_epi8)(x, I(movepi8_mask)(w), I_(setzero)(), x));
}
#else
INLINE bytes signed_products(bytes w, bytes x) /* |w| 128 at most, |x| 127: they fit */
{
    return I(maddubs_epi16)(I(abs_epi8)(w), I(sign_epi8)(x, w));
}
#endif
INLINE dots d_add(enum magnitude m, dots d, bytes w0, const int8_t *x0, bytes w1, const int8_t *x1)
{
    if (m == ANY_BYTE)
        return add_pairs(add_pairs(d, signed_products(w0, b_quad(x0))),
                         signed_products(w1, b_quad(x1)));
    bytes pairs = I(add_epi16)(I(maddubs_epi16)(w0, b_quad(x0)), I(maddubs_epi16)(w1, b_quad(x1)));
    return m == UP_TO_15 ? I(add_epi16)(d, pairs) : add_pairs(d, pairs);
}
INLINE dots d_end(enum magnitude m, dots d, dots first)
{
    return m == UP_TO_15 ? add_pairs(first, d) : d;
}
#endif
#undef I
#undef I_

#if defined(__AVX512BF16__) && !defined(BF16_DOT)
/* d += the products of a pair of bf16 in each lane with the pair at x, as DOT. */
INLINE vec BF16_DOT(vec d, bytes w, const char *x)
{
    __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(d) : "v"(w), "m"(*(const char(*)[4])x));
    return d;
}
#endif

#else /* four lanes: the compiler's own vectors, but for products */
#define KEEP(b) (void)(b)
#if defined(__SSE2__)
#include <emmintrin.h>
#endif
typedef uint8_t bytes __attribute__((vector_size(16)));
typedef int32_t dots __attribute__((vector_size(16)));
typedef int16_t wide __attribute__((vector_size(16)));
enum { SIGNED_OFFSET = 0, DOT_CHAINS = 1 };
INLINE bytes b_load(const void *p)
{
    bytes b;
    memcpy(&b, p, sizeof b);
    return b;
}
INLINE bytes b_quad(const int8_t *p)
{
    int32_t quad;
    memcpy(&quad, p, 4);
    return (bytes)(dots){quad, quad, quad, quad};
}
INLINE bytes b_or(bytes a, bytes b)
{
    return a | b;
}
INLINE bytes b_left(bytes b, int n, uint8_t mask)
{
    return (b << n) & mask;
}
INLINE bytes b_right(bytes b, int n, uint8_t mask)
{
#if defined(KERNEL_NEON)
    if (255 >> n == mask) return b >> n; /* compilers would keep the mask */
#endif
    return (b >> n) & mask;
}
INLINE bytes b_weights(enum magnitude m, bytes b)
{
    (void)m;
    return b;
}
INLINE dots i_set(int32_t n)
{
    return (dots){n, n, n, n};
}
INLINE dots i_times(const int32_t *n, int power_of_2)
{
    return i_set(*n * power_of_2);
}
INLINE dots i_add(dots a, dots b)
{
    return a + b;
}
INLINE vec v_from_dots(dots d)
{
    return __builtin_convertvector(d, vec);
}
#if defined(KERNEL_NEON) && !defined(__ARM_FEATURE_DOTPROD)
/* Products in 16 bits: the lower and the upper two rows' of one quad, then of the other added. */
INLINE dots d_begin(enum magnitude m, dots first)
{
    return m == UP_TO_15 ? i_set(0) : first;
}
INLINE dots d_add(enum magnitude m, dots d, bytes w0, const int8_t *x0, bytes w1, const int8_t *x1)
{
    int8x16_t a = (int8x16_t)w0, b = (int8x16_t)w1, x = (int8x16_t)b_quad(x0),
              y = (int8x16_t)b_quad(x1);
    int16x8_t low = vmlal_s8(vmull_s8(vget_low_s8(a), vget_low_s8(x)), vget_low_s8(b),
                             vget_low_s8(y)),
              high = vmlal_high_s8(vmull_high_s8(a, x), b, y);
    if (m == ANY_BYTE) /* of -128 times -127 two fit, not four */
        return d + (dots)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
    int16x8_t pairs = vpaddq_s16(low, high);
    return m == UP_TO_15 ? (dots)((wide)d + (wide)pairs) : (dots)vpadalq_s16((int32x4_t)d, pairs);
}
INLINE dots d_end(enum magnitude m, dots d, dots first)
{
    return m == UP_TO_15 ? (dots)vpadalq_s16((int32x4_t)first, (int16x8_t)d) : d;
}
#else
INLINE dots d_begin(enum magnitude m, dots first)
{
    (void)m;
    return first;
}
/* All weights fit in a signed byte. */
#if defined(KERNEL_NEON)
INLINE dots dot(dots d, bytes w, const int8_t *x)
{
    uint32_t quad;
    memcpy(&quad, x, 4);
    return (dots)vdotq_lane_s32((int32x4_t)d, (int8x16_t)w, vcreate_s8(quad), 0);
}
#else
INLINE dots dot(dots d, bytes w, const int8_t *quad)
{
    bytes x = b_quad(quad);
    wide w0 = (wide)w << 8 >> 8, w1 = (wide)w >> 8, x0 = (wide)x << 8 >> 8, x1 = (wide)x >> 8;
#if defined(__SSE2__)
    return d + (dots)_mm_madd_epi16((__m128i)w0, (__m128i)x0) +
           (dots)_mm_madd_epi16((__m128i)w1, (__m128i)x1);
#else
    for (int half = 0; half < 2; half++) { /* columns 0 and 2, then 1 and 3 */
        dots a = (dots)(half ? w1 : w0), b = (dots)(half ? x1 : x0);
        d += (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
    }
    return d;
#endif
}
#endif
INLINE dots d_add(enum magnitude m, dots d, bytes w0, const int8_t *x0, bytes w1, const int8_t *x1)
{
    (void)m;
    return dot(dot(d, w0, x0), w1, x1);
}
INLINE dots d_end(enum magnitude m, dots d, dots first)
{
    (void)m, (void)first;
    return d;
}
#endif
#endif

#endif
