/*
 * launch.cuh - launches of kernels. A step's follow one another closely: on Hopper a kernel may
 * begin before the one ahead of it has ended: it calls previous_wait (ptx.cuh) before it reads or
 * writes anything that a kernel before it may write or read, and next_launch as early as it likes.
 * Every kernel waits: so the last one's end is the end of all, and a step's numbers, which came by
 * a copy before its first kernel, may be read without waiting.
 */
#ifndef LINNET_OPS_CUDA_LAUNCH_CUH
#define LINNET_OPS_CUDA_LAUNCH_CUH

#include "ops/cuda/cuda_internal.h"

/* A kernel that takes no part in that. */
template <class... PARAMETERS>
static cudaError_t launch_plain(cudaStream_t stream, void (*kernel)(PARAMETERS...), dim3 grid,
                                unsigned threads, PARAMETERS... arguments)
{
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <class... PARAMETERS>
static void launch_next(struct backend *b, const char *what, void (*kernel)(PARAMETERS...),
                        dim3 grid, unsigned threads, size_t shared, PARAMETERS... arguments)
{
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = b->stream;
    config.attrs = &attribute;
    config.numAttrs = b->capability >= 90;
    cuda_good(b, cudaLaunchKernelEx(&config, kernel, arguments...), what);
}

#endif
