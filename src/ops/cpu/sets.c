/* sets.c - which of the kernels' instruction sets this machine can run. */
#include <stdatomic.h>
#include <string.h>

#include "ops/cpu/cpu_internal.h"
#include "ops/cpu/features.h"

static const struct kernels *forced;

#if defined(__x86_64__)
static bool has_slow_bf16(void)
{
    return has_avx512_bf16() && !has_fast_bf16();
}
#endif

/* All sets, the best first, and what a machine must have for them. */
static const struct {
    const struct kernels *kernels;
    bool (*usable)(void); /* NULL: nothing */
} sets[] = {
#if defined(__x86_64__)
    {&kernels_avx512_bf16, has_fast_bf16},
    {&kernels_avx512_vnni, has_avx512_vnni},
    {&kernels_avx512_bf16, has_slow_bf16},
    {&kernels_avx512, has_avx512},
    {&kernels_avx2_vnni, has_avx_vnni},
    {&kernels_avx2, has_avx2},
#elif defined(__aarch64__)
    {&kernels_neon_dot, has_neon_dot},
    {&kernels_neon, NULL},
#endif
    {&kernels_generic, NULL},
};
enum { N_SETS = sizeof sets / sizeof *sets };

const struct kernels *kernels_usable(int i)
{
    for (int set = 0; set < N_SETS; set++)
        if ((!sets[set].usable || sets[set].usable()) && i-- == 0) return sets[set].kernels;
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
