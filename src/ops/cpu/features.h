/* features.h - what the processor can do, where the system lets programs use it. */
#ifndef LINNET_OPS_CPU_FEATURES_H
#define LINNET_OPS_CPU_FEATURES_H

#include <stdbool.h>

#if defined(__x86_64__)
#include <cpuid.h>

/* Some of these are not names that every compiler's __builtin_cpu_supports knows. That the system
 * saves the wide registers is asked of it all the same. */
enum feature_register { FEATURE_EAX, FEATURE_ECX };

static inline bool feature_bit(unsigned leaf, unsigned subleaf, enum feature_register in, int bit)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(leaf, subleaf, &a, &b, &c, &d) &&
           ((in == FEATURE_EAX ? a : c) >> bit & 1);
}

static inline bool has_avx2(void) /* with FMA and f16 */
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           feature_bit(1, 0, FEATURE_ECX, 29);
}

static inline bool has_avx_vnni(void)
{
    return has_avx2() && feature_bit(7, 1, FEATURE_EAX, 4);
}

static inline bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

static inline bool has_avx512_vnni(void)
{
    return has_avx512() && feature_bit(7, 0, FEATURE_ECX, 11);
}

static inline bool has_avx512_bf16(void) /* with VNNI */
{
    return has_avx512_vnni() && feature_bit(7, 1, FEATURE_EAX, 5);
}

/* Dot products of bf16 that are faster than multiply-adds of fp32: Intel's take twice as long as
 * AMD's, and give half of what fp32 does. */
static inline bool has_fast_bf16(void)
{
    return has_avx512_bf16() && !__builtin_cpu_is("intel");
}

#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>

static inline bool has_neon_dot(void)
{
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
}
#endif

#endif
