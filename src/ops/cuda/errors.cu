/* errors.cu - finding a GPU, and saying why one cannot be used. */
#include <stdio.h>

#include "ops/cuda/cuda_internal.h"

extern "C" {
#include "ops/gpu_error.h"
}

bool cuda_good(struct backend *b, cudaError_t status, const char *what)
{
    if (status != cudaSuccess && b->failed == cudaSuccess) {
        b->failed = status;
        b->failed_at = what;
    }
    return b->failed == cudaSuccess;
}

linnet_status cuda_failure(const struct backend *b, linnet_error *err)
{
    if (b->failed == cudaSuccess) return LINNET_OK;
    return gpu_error(cudaGetErrorName(b->failed), cudaGetErrorString(b->failed), b->failed_at, err);
}

static linnet_status opening_error(cudaError_t status, linnet_error *err)
{
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (status == cudaErrorInsufficientDriver) return gpu_driver_error(driver, runtime, err);
    return gpu_error(cudaGetErrorName(status), cudaGetErrorString(status), NULL, err);
}

static linnet_status check_device(int index, const cudaDeviceProp *p, linnet_error *err)
{
    int mode = 0;
    if (p->major < 8)
        return error_set(err, LINNET_UNSUPPORTED,
                         "GPU %d (%s) has compute capability %d.%d, and 8.0 is the least", index,
                         p->name, p->major, p->minor);
    if (cudaDeviceGetAttribute(&mode, cudaDevAttrComputeMode, index) == cudaSuccess &&
        mode == cudaComputeModeProhibited)
        return error_set(err, LINNET_DEVICE,
                         "GPU %d (%s) is closed to computing: open it with nvidia-smi -i %d -c "
                         "DEFAULT",
                         index, p->name, index);
    return LINNET_OK;
}

linnet_status cuda_find(int index, char *text, size_t text_size, int64_t *free_bytes,
                        linnet_error *err)
{
    int count = 0;
    cudaDeviceProp p;
    size_t free_now = 0, total = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaSuccess && count == 0) status = cudaErrorNoDevice;
    if (status != cudaSuccess) return opening_error(status, err);
    if (index < 0 || index >= count)
        return error_set(err, LINNET_DEVICE, "there is no GPU %d: the machine has %d, from 0",
                         index, count);
    status = cudaGetDeviceProperties(&p, index);
    if (status == cudaSuccess) {
        linnet_status refused = check_device(index, &p, err);
        if (refused) return refused;
    }
    if (status == cudaSuccess) status = cudaSetDevice(index);
    if (status == cudaSuccess) status = cudaMemGetInfo(&free_now, &total);
    if (status != cudaSuccess) return opening_error(status, err);
    snprintf(text, text_size, "cuda:%d (%s)", index, p.name);
    *free_bytes = (int64_t)free_now;
    return LINNET_OK;
}
