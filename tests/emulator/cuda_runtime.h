/*
 * cuda_runtime.h - enough of CUDA to run the backend on the host: a stand-in for the toolkit's
 * header. Device memory is the host's. Each thread of a launch is a fiber of its own (emulator.h),
 * so that what kernels promise each other by barriers and warp operations is put to the test,
 * though not what hardware may reorder. runtime.cpp has the calls.
 */
#ifndef LINNET_EMULATOR_RUNTIME_H
#define LINNET_EMULATOR_RUNTIME_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <tuple>

#include "emulator.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
/* Blocks that have such variables run one after another; a section of its own, so that each block
 * finds them poisoned. */
#define __shared__ static __attribute__((section("shared_memory")))

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

/* ---- intrinsics ---- */

template <class T> static inline T __ldcg(const T *p)
{
    return *p;
}
static inline float __fdividef(float a, float b)
{
    return a / b;
}
#define __expf expf
template <class T, class F> static inline T bits_of(F v)
{
    static_assert(sizeof(T) == sizeof(F), "the same bits");
    T out;
    memcpy(&out, &v, sizeof out);
    return out;
}
static inline float __uint_as_float(unsigned v)
{
    return bits_of<float>(v);
}
static inline unsigned __float_as_uint(float v)
{
    return bits_of<unsigned>(v);
}
static inline long long __double_as_longlong(double v)
{
    return bits_of<long long>(v);
}
static inline double __longlong_as_double(long long v)
{
    return bits_of<double>(v);
}
static inline float __double2float_rd(double v)
{
    float f = (float)v;
    return f > v ? nextafterf(f, -INFINITY) : f;
}
static inline int __clzll(long long v)
{
    return v ? __builtin_clzll((unsigned long long)v) : 64;
}

#define threadIdx (emulator::current->thread)
#define blockIdx  (emulator::current->block->id)
using emulator::blockDim;
using emulator::gridDim;

static inline void __syncthreads()
{
    emulator::barrier_sync(0, (int)blockDim.x);
}
static inline void __syncwarp()
{
    emulator::exchange(0);
}
static inline void __threadfence()
{
}
static inline void __threadfence_block()
{
}
static inline void __nanosleep(unsigned)
{
    emulator::yield();
}
template <class T> static inline T __shfl_sync(unsigned, T v, int lane)
{
    return emulator::shuffle(v, lane);
}
template <class T> static inline T __shfl_xor_sync(unsigned, T v, int mask)
{
    return emulator::shuffle(v, (int)(threadIdx.x % 32) ^ mask);
}
template <class T> static inline T __shfl_up_sync(unsigned, T v, int n)
{
    return emulator::shuffle(v, (int)(threadIdx.x % 32) - n);
}
static inline int __reduce_min_sync(unsigned, int v)
{
    return emulator::reduce(v, [](int a, int b) { return a < b ? a : b; });
}
static inline int __reduce_max_sync(unsigned, int v)
{
    return emulator::reduce(v, [](int a, int b) { return a > b ? a : b; });
}
static inline unsigned __reduce_and_sync(unsigned, unsigned v)
{
    return emulator::reduce(v, [](unsigned a, unsigned b) { return a & b; });
}
static inline unsigned __reduce_or_sync(unsigned, unsigned v)
{
    return emulator::reduce(v, [](unsigned a, unsigned b) { return a | b; });
}
static inline bool __all_sync(unsigned, bool v)
{
    return emulator::reduce(v, [](bool a, bool b) { return a && b; });
}

static inline unsigned __ballot_sync(unsigned, bool v)
{
    return emulator::reduce(v ? 1u << threadIdx.x % 32 : 0u,
                            [](unsigned a, unsigned b) { return a | b; });
}
static inline int __ffs(unsigned v)
{
    return __builtin_ffs((int)v);
}

/* Nobody runs between a read and a write. */
template <class T, class V> static inline T atomicAdd(T *at, V v)
{
    T old = *at;
    *at = old + (T)v;
    return old;
}
static inline unsigned atomicInc(unsigned *at, unsigned last)
{
    unsigned old = *at;
    *at = old >= last ? 0 : old + 1;
    return old;
}
static inline unsigned atomicAnd(unsigned *at, unsigned v)
{
    unsigned old = *at;
    *at = old & v;
    return old;
}
static inline unsigned atomicOr(unsigned *at, unsigned v)
{
    unsigned old = *at;
    *at = old | v;
    return old;
}

/* ---- the runtime's calls ---- */

enum cudaError_t {
    cudaSuccess,
    cudaErrorInvalidValue,
    cudaErrorMemoryAllocation,
    cudaErrorLaunchFailure,
    cudaErrorNoDevice,
    cudaErrorInsufficientDriver
};
typedef struct emulated_stream *cudaStream_t;
typedef struct emulated_event *cudaEvent_t;
typedef struct emulated_graph *cudaGraph_t, *cudaGraphExec_t;

enum cudaDeviceAttr {
    cudaDevAttrMaxSharedMemoryPerBlockOptin,
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrComputeCapabilityMinor,
    cudaDevAttrComputeMode
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum { cudaComputeModeDefault, cudaComputeModeProhibited };
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming, cudaStreamCaptureModeThreadLocal };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
enum { cudaLaunchAttributeCooperative, cudaLaunchAttributeProgrammaticStreamSerialization };

struct cudaLaunchAttribute {
    int id;
    struct {
        int cooperative, programmaticStreamSerializationAllowed;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};
struct cudaFuncAttributes {
    int ptxVersion;
};
struct cudaDeviceProp {
    char name[256];
    int major, minor;
};

cudaError_t cudaMalloc(void **p, size_t n);
cudaError_t cudaMallocHost(void **p, size_t n);
cudaError_t cudaFree(void *p);
cudaError_t cudaFreeHost(void *p);
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemset(void *p, int v, size_t n);
cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaEventCreate(cudaEvent_t *out);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
cudaError_t cudaGetDeviceCount(int *n);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *out, int device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int *out, cudaDeviceAttr which, int device);
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaGetLastError();
const char *cudaGetErrorName(cudaError_t error);
const char *cudaGetErrorString(cudaError_t error);

/* Kernels are not told apart. */
cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute which, int value);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *out, const void *kernel);
template <class... P>
static inline cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute which,
                                               int value)
{
    return cudaFuncSetAttribute((const void *)kernel, which, value);
}
template <class... P>
static inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *out, void (*kernel)(P...))
{
    return cudaFuncGetAttributes(out, (const void *)kernel);
}

cudaError_t emulated_launch(const cudaLaunchConfig_t *config, const std::function<void()> &kernel);

template <class... P, class... A>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(P...),
                                             A &&...arguments)
{
    std::tuple<P...> kept(arguments...);
    return emulated_launch(config, [kernel, kept] { std::apply(kernel, kept); });
}

#endif
