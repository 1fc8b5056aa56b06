/*
 * avx512.h - AVX-512 for machines without it: the intrinsics that the CPU's kernels use, from
 * SIMDe, and here the few that it lacks. Forced in front of src/ops/cpu's sources, which then
 * believe that they are compiled for such a machine.
 */
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx2.h>
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>
#include <string.h>

#include "base/dtype.h"

#define _IMMINTRIN_H_INCLUDED /* the compiler's own */
#define __IMMINTRIN_H
#define __AVX512F__ 1
#if LINNET_EMULATE_DOTS
#define __AVX512VNNI__ 1
#define __AVX512BF16__ 1
/* in place of the instructions in dots.h, which only a machine that has them can test */
#define DOT(acc, w, x) _mm512_dpbusd_epi32(acc, w, b_quad(x))
#define BF16_DOT(acc, w, x) \
    _mm512_dpbf16_ps(acc, (__m512bh)(w), (__m512bh)b_quad((const int8_t *)(x)))
#endif

#define KEEP(b) (void)(b)

#undef _mm512_madd_epi16 /* SIMDe 0.7.4's alias has two parameters too many */
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)

static inline __m512i emulated_words(const int32_t w[16])
{
    __m512i out;
    memcpy(&out, w, sizeof out);
    return out;
}

static inline __m512 emulated_floats(const float f[16])
{
    __m512 out;
    memcpy(&out, f, sizeof out);
    return out;
}

static inline __m512i _mm512_cvtepu8_epi32(__m128i a)
{
    uint8_t in[16];
    int32_t out[16];
    memcpy(in, &a, sizeof in);
    for (int i = 0; i < 16; i++) out[i] = in[i];
    return emulated_words(out);
}

static inline __m512i _mm512_cvtepi8_epi32(__m128i a)
{
    int8_t in[16];
    int32_t out[16];
    memcpy(in, &a, sizeof in);
    for (int i = 0; i < 16; i++) out[i] = in[i];
    return emulated_words(out);
}

static inline __m128i _mm512_cvtepi32_epi8(__m512i a)
{
    int32_t in[16];
    int8_t out[16];
    __m128i packed;
    memcpy(in, &a, sizeof in);
    for (int i = 0; i < 16; i++) out[i] = (int8_t)in[i];
    memcpy(&packed, out, sizeof packed);
    return packed;
}

static inline __m512i _mm512_cvtps_epi32(__m512 a)
{
    float in[16];
    int32_t out[16];
    memcpy(in, &a, sizeof in);
    for (int i = 0; i < 16; i++)
        out[i] = in[i] >= -0x1p31f && in[i] < 0x1p31f ? (int32_t)__builtin_rintf(in[i]) : INT32_MIN;
    return emulated_words(out);
}

static inline __m512 _mm512_cvtepi32_ps(__m512i a)
{
    int32_t in[16];
    float out[16];
    memcpy(in, &a, sizeof in);
    for (int i = 0; i < 16; i++) out[i] = (float)in[i];
    return emulated_floats(out);
}

static inline __m512 _mm512_cvtph_ps(__m256i a)
{
    uint16_t in[16];
    float out[16];
    memcpy(in, &a, sizeof in);
    for (int i = 0; i < 16; i++) out[i] = f32_from_f16(in[i]);
    return emulated_floats(out);
}

static inline __m256bh _mm512_cvtneps_pbh(__m512 a)
{
    float in[16];
    uint16_t out[16];
    __m256bh packed;
    memcpy(in, &a, sizeof in);
    for (int i = 0; i < 16; i++) out[i] = bf16_from_f32(in[i]);
    memcpy(&packed, out, sizeof packed);
    return packed;
}
