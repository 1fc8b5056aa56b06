/*
 * runtime.cpp - streams, events, graphs, memory. Work for a stream is a closure. It is done at once
 * (emulator::early), or when somebody waits for it and not before, so that whoever reads results
 * without waiting, or changes what a step under way has still to read, is found out.
 */
#include "runtime.h"

#include <stdio.h>
#include <stdlib.h>

#include <mutex>

typedef std::vector<std::function<void()>> work_list;

struct emulated_stream {
    work_list queue;
    size_t done = 0; /* of the queue */
    emulated_graph *recording = nullptr;
};

struct emulated_event {
    emulated_stream *stream = nullptr;
    size_t end = 0; /* of the stream's queue */
};

struct emulated_graph {
    work_list work;
};

namespace
{
struct device {
    int capability = 90, multiprocessors = 3;
    long calls = 0, fail_at = 0, live = 0;
    emulator_counts counts = {};
    std::vector<emulated_stream *> streams;
    std::recursive_mutex mutex;
} device;

enum { POISON_LIMIT = 16 << 20, SHARED_LIMIT = 227 << 10 };

thread_local cudaError_t last_error;
} // namespace

typedef std::lock_guard<std::recursive_mutex> guard;

static cudaError_t fail(cudaError_t error)
{
    return last_error = error;
}

/* A call that may fail: whether it does so now. */
static bool failing()
{
    guard lock(device.mutex);
    return ++device.calls == device.fail_at;
}

static cudaError_t result()
{
    return failing() ? fail(cudaErrorLaunchFailure) : cudaSuccess;
}

static void check(bool good, const char *what)
{
    if (good) return;
    fprintf(stderr, "emulator: %s\n", what);
    abort();
}

/* ---- control.h --------------------------------------------------------------------------- */

void emulator_set_device(int capability, int multiprocessors)
{
    device.capability = capability;
    device.multiprocessors = multiprocessors;
}

void emulator_set_early(bool on)
{
    cudaDeviceSynchronize();
    emulator::set_early(on);
}

long emulator_fail(long n)
{
    long calls = device.calls;
    device.calls = 0;
    device.fail_at = n;
    return calls;
}

long emulator_live(void)
{
    return device.live;
}

struct emulator_counts emulator_count(void)
{
    return device.counts;
}

/* ---- memory ------------------------------------------------------------------------------ */

static cudaError_t allocate(void **p, size_t n)
{
    *p = nullptr;
    if (failing()) return fail(cudaErrorMemoryAllocation);
    *p = aligned_alloc(256, (n + 255) / 256 * 256);
    if (!*p) return fail(cudaErrorMemoryAllocation);
    /* NaN in every format: nothing may be read before it is written. What is larger only takes
     * time. */
    if (n <= POISON_LIMIT) memset(*p, 0xFF, n);
    guard lock(device.mutex);
    device.live++;
    return cudaSuccess;
}

static cudaError_t release(void *p)
{
    if (!p) return cudaSuccess;
    cudaDeviceSynchronize();
    free(p);
    guard lock(device.mutex);
    device.live--;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t n)
{
    return allocate(p, n);
}
cudaError_t cudaMallocHost(void **p, size_t n)
{
    return allocate(p, n);
}
cudaError_t cudaFree(void *p)
{
    return release(p);
}
cudaError_t cudaFreeHost(void *p)
{
    return release(p);
}

/* ---- streams ----------------------------------------------------------------------------- */

static void work_until(emulated_stream *s, size_t end)
{
    guard lock(device.mutex);
    while (s->done < end) s->queue[s->done++]();
    if (s->done == s->queue.size()) s->queue.clear(), s->done = 0;
}

void emulator::enqueue(cudaStream_t s, const std::function<void()> &work)
{
    guard lock(device.mutex);
    if (!s) {
        work();
    } else if (s->recording) {
        s->recording->work.push_back(work);
    } else {
        s->queue.push_back(work);
        if (emulator::early) work_until(s, s->queue.size());
    }
}

static cudaError_t enqueue_good(cudaStream_t s, const std::function<void()> &work)
{
    cudaError_t status = result();
    if (status == cudaSuccess) emulator::enqueue(s, work);
    return status;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned)
{
    *out = nullptr;
    if (failing()) return fail(cudaErrorMemoryAllocation);
    guard lock(device.mutex);
    device.streams.push_back(*out = new emulated_stream);
    device.live++;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    guard lock(device.mutex);
    work_until(s, s->queue.size());
    for (size_t i = 0; i < device.streams.size(); i++)
        if (device.streams[i] == s) device.streams.erase(device.streams.begin() + (long)i);
    delete s;
    device.live--;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    cudaError_t status = result();
    guard lock(device.mutex);
    check(!s || !s->recording, "waiting for a stream that is being recorded");
    if (s) work_until(s, s->queue.size());
    return status;
}

cudaError_t cudaDeviceSynchronize()
{
    guard lock(device.mutex);
    for (emulated_stream *s : device.streams) work_until(s, s->queue.size());
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t n, cudaMemcpyKind)
{
    cudaError_t status = result();
    if (status == cudaSuccess) memcpy(to, from, n);
    return status;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, cudaMemcpyKind, cudaStream_t s)
{
    return enqueue_good(s, [=] { memcpy(to, from, n); });
}

cudaError_t cudaMemset(void *p, int v, size_t n)
{
    return cudaMemsetAsync(p, v, n, nullptr);
}

cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s)
{
    return enqueue_good(s, [=] { memset(p, v, n); });
}

cudaError_t emulated_launch(const cudaLaunchConfig_t *c, const std::function<void()> &kernel)
{
    emulator::index blocks = {c->gridDim.x, c->gridDim.y, c->gridDim.z};
    unsigned n = c->blockDim.x;
    size_t shared = c->dynamicSmemBytes;
    bool together = false;
    for (unsigned i = 0; i < c->numAttrs; i++)
        together |= c->attrs[i].id == cudaLaunchAttributeCooperative && c->attrs[i].val.cooperative;
    if (blocks.x == 0 || blocks.y == 0 || blocks.z == 0 || blocks.y > 65535 || blocks.z > 65535 ||
        n == 0 || n > 1024 || n % 32 != 0 || shared > SHARED_LIMIT ||
        (together && blocks.x > (unsigned)device.multiprocessors))
        return fail(cudaErrorInvalidValue);
    return enqueue_good(c->stream, [=] {
        device.counts.launches++;
        device.counts.cooperative += together;
        emulator::run(blocks, n, shared, together, kernel);
    });
}

/* ---- events ------------------------------------------------------------------------------ */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned)
{
    *out = nullptr;
    if (failing()) return fail(cudaErrorMemoryAllocation);
    guard lock(device.mutex);
    *out = new emulated_event;
    device.live++;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *out)
{
    return cudaEventCreateWithFlags(out, 0);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    guard lock(device.mutex);
    delete event;
    device.live--;
    return cudaSuccess;
}

/* Ends in the queue would be wrong once it has been emptied: an event is work too. */
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t s)
{
    cudaError_t status = result();
    if (status != cudaSuccess || !s) return status;
    guard lock(device.mutex);
    event->stream = s;
    emulator::enqueue(s, [event] { event->stream = nullptr; });
    if (event->stream) event->end = s->queue.size();
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    cudaError_t status = result();
    guard lock(device.mutex);
    if (event->stream) work_until(event->stream, event->end);
    return status;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t, cudaEvent_t)
{
    *milliseconds = 1;
    return cudaSuccess;
}

/* ---- graphs ------------------------------------------------------------------------------ */

cudaError_t cudaStreamBeginCapture(cudaStream_t s, int)
{
    cudaError_t status = result();
    if (status != cudaSuccess) return status;
    guard lock(device.mutex);
    s->recording = new emulated_graph;
    device.live++;
    device.counts.recordings++;
    return status;
}

cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *out)
{
    cudaError_t status = result();
    guard lock(device.mutex);
    *out = s->recording;
    s->recording = nullptr;
    if (status != cudaSuccess) { /* the recording is lost */
        cudaGraphDestroy(*out);
        *out = nullptr;
    }
    return status;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long)
{
    *out = nullptr;
    if (failing()) return fail(cudaErrorMemoryAllocation);
    guard lock(device.mutex);
    *out = new emulated_graph(*graph);
    device.live++;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s)
{
    return enqueue_good(s, [work = exec->work] {
        device.counts.replays++;
        for (const auto &f : work) f();
    });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    guard lock(device.mutex);
    delete graph;
    device.live--;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    return cudaGraphDestroy(exec);
}

/* ---- the device -------------------------------------------------------------------------- */

cudaError_t cudaGetDeviceCount(int *n)
{
    *n = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *out, int)
{
    *out = {};
    snprintf(out->name, sizeof out->name, "emulated");
    out->major = device.capability / 10;
    out->minor = device.capability % 10;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int index)
{
    if (index != 0) return fail(cudaErrorInvalidValue);
    return result();
}

cudaError_t cudaDeviceGetAttribute(int *out, cudaDeviceAttr which, int)
{
    switch (which) {
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *out = device.capability == 90 ? (int)SHARED_LIMIT : 163 << 10;
        break;
    case cudaDevAttrMultiProcessorCount: *out = device.multiprocessors; break;
    case cudaDevAttrComputeCapabilityMajor: *out = device.capability / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *out = device.capability % 10; break;
    case cudaDevAttrComputeMode: *out = cudaComputeModeDefault; break;
    }
    return result();
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    *free_bytes = *total = (size_t)1 << 30;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = 13000;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = 13000;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int value)
{
    if (value > SHARED_LIMIT) return fail(cudaErrorInvalidValue);
    return result();
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *out, const void *)
{
    out->ptxVersion = device.capability;
    return result();
}

cudaError_t cudaGetLastError()
{
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

const char *cudaGetErrorName(cudaError_t error)
{
    switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInsufficientDriver: return "cudaErrorInsufficientDriver";
    }
    return "?";
}

const char *cudaGetErrorString(cudaError_t error)
{
    return cudaGetErrorName(error);
}
