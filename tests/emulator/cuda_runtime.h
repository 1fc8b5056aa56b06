/*
 * cuda_runtime.h - enough of CUDA to run kernels on the host, thread by thread: a stand-in for the
 * toolkit's header. Device memory is the host's. Each thread of a launch is a fiber of its own; a
 * fiber runs until it waits for others (emulator.h), so that what kernels promise each other by
 * barriers and warp operations is put to the test, though not what hardware may reorder.
 */
#ifndef LINNET_EMULATOR_RUNTIME_H
#define LINNET_EMULATOR_RUNTIME_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z)
    {
    }
};

struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct int2 {
    int x, y;
};
struct uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
static inline float2 make_float2(float x, float y)
{
    return {x, y};
}
static inline float4 make_float4(float x, float y, float z, float w)
{
    return {x, y, z, w};
}
static inline int2 make_int2(int x, int y)
{
    return {x, y};
}
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w)
{
    return {x, y, z, w};
}

static inline int max(int a, int b)
{
    return a > b ? a : b;
}
static inline int min(int a, int b)
{
    return a < b ? a : b;
}
template <class T> static inline T __ldcg(const T *p)
{
    return *p;
}
static inline float __fdividef(float a, float b)
{
    return a / b;
}
#define __expf expf
static inline float __uint_as_float(unsigned v)
{
    float f;
    memcpy(&f, &v, 4);
    return f;
}

/* ---- the runtime's calls ---- */

enum cudaError_t { cudaSuccess, cudaErrorMemoryAllocation };
typedef void *cudaStream_t;
enum { cudaDevAttrMaxSharedMemoryPerBlockOptin, cudaFuncAttributeMaxDynamicSharedMemorySize };
enum { cudaLaunchAttributeCooperative };
enum { cudaMemcpyHostToDevice };
struct cudaLaunchAttribute {
    int id;
    struct {
        int cooperative;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};

static inline cudaError_t cudaMalloc(void **p, size_t n)
{
    *p = aligned_alloc(256, (n + 255) / 256 * 256);
    memset(*p, 0xFF, n); /* NaN in every format: nothing may be read before it is written */
    return cudaSuccess;
}
static inline cudaError_t cudaFree(void *p)
{
    free(p);
    return cudaSuccess;
}
static inline cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t)
{
    memset(p, v, n);
    return cudaSuccess;
}
static inline cudaError_t cudaMemcpy(void *to, const void *from, size_t n, int)
{
    memcpy(to, from, n);
    return cudaSuccess;
}
static inline cudaError_t cudaDeviceGetAttribute(int *out, int, int)
{
    *out = 227 << 10;
    return cudaSuccess;
}
template <class F> static inline cudaError_t cudaFuncSetAttribute(F, int, int)
{
    return cudaSuccess;
}

#include "emulator.h"

template <class F, class A>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, F kernel,
                                             const A &argument)
{
    gridDim = {config->gridDim.x};
    emulator::run(config->gridDim.x, config->blockDim.x, config->dynamicSmemBytes,
                  [&] { kernel(argument); });
    return cudaSuccess;
}

#endif
