/* backend.cpp - what the emulated backend has in place of gemm.cu. */
#include "ops/cuda/cuda_internal.h"

/* wgmma, clusters and their barriers are not emulated: products are matrix.cu's for all numbers of
 * tokens, as on the GPUs before Hopper. */
bool has_gemm(const struct backend *)
{
    return false;
}

bool gemm_run(struct backend *, const struct product *)
{
    return false;
}
