/* sets.c - which of the kernels' instruction sets this machine can run. */
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <stdatomic.h>
#include <string.h>

#include "ops/cpu/cpu_internal.h"

static const struct kernels *forced;

#if defined(__x86_64__)
static bool has_f16c(void) /* not a name that every compiler's builtin knows */
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

enum { AVX_VNNI = 1 << 4, AVX512_BF16 = 1 << 5 }; /* in eax of leaf 7, subleaf 1 */

static bool has_leaf_7_1(unsigned bit)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & bit);
}
#endif

/* All sets, the best first, and what a machine must have for them. */
static const struct {
    const struct kernels *kernels;
    bool avx2, avx_vnni, avx512, avx512_vnni, avx512_bf16;
} sets[] = {
#if defined(__x86_64__)
    {&kernels_avx512_bf16, true, false, true, true, true},
    {&kernels_avx512_vnni, true, false, true, true, false},
    {&kernels_avx512, true, false, true, false, false},
    {&kernels_avx2_vnni, true, true, false, false, false},
    {&kernels_avx2, true, false, false, false, false},
#endif
    {&kernels_generic, false, false, false, false, false},
};
enum { N_SETS = sizeof sets / sizeof *sets };

static bool runs(int set)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return (!sets[set].avx2 || avx2) && (!sets[set].avx_vnni || has_leaf_7_1(AVX_VNNI)) &&
           (!sets[set].avx512 || avx512) &&
           (!sets[set].avx512_vnni || __builtin_cpu_supports("avx512vnni")) &&
           (!sets[set].avx512_bf16 || has_leaf_7_1(AVX512_BF16));
#else
    return set == N_SETS - 1;
#endif
}

const struct kernels *kernels_usable(int i)
{
    for (int set = 0; set < N_SETS; set++)
        if (runs(set) && i-- == 0) return sets[set].kernels;
    return NULL;
}

const struct kernels *kernels_chosen(void)
{
    static _Atomic(const struct kernels *)
        best; /* a virtual machine takes long to say what it has */
    if (forced) return forced;
    if (!best) best = kernels_usable(0);
    return best;
}

const char *ops_cpu_kernels(void)
{
    return kernels_chosen()->name;
}

bool ops_cpu_force(const char *name)
{
    forced = NULL;
    if (!name) return true;
    for (int i = 0; !forced && kernels_usable(i); i++)
        if (strcmp(kernels_usable(i)->name, name) == 0) forced = kernels_usable(i);
    return forced != NULL;
}
