#include "ops/gpu_error.h"

#include <string.h>

static const struct meaning {
    const char *name;
    const char *sentence; /* NULL: the context is lost with it, and every later call fails too */
} meanings[] = {
    {"cudaErrorNoDevice", "no NVIDIA GPU is visible: nvidia-smi must list one and "
                          "CUDA_VISIBLE_DEVICES must not hide it"},
    {"cudaErrorDevicesUnavailable",
     "the GPU is held by another process, or closed to computing by its mode: end that process, or "
     "set the mode with nvidia-smi -c DEFAULT"},
    {"cudaErrorNoKernelImageForDevice",
     "the CUDA backend was not built for this GPU: build it with its architecture in "
     "CMAKE_CUDA_ARCHITECTURES"},
    {"cudaErrorSystemDriverMismatch",
     "the NVIDIA driver's kernel module and its libraries are of different versions: reboot after "
     "a driver update"},
    {"cudaErrorSystemNotReady",
     "the NVIDIA driver is not ready: start nvidia-fabricmanager, or wait until it has"},
    {"cudaErrorOperatingSystem",
     "the NVIDIA driver's device files cannot be opened: see that /dev/nvidia* exist and that this "
     "user may read and write them"},
    {"cudaErrorCompatNotSupportedOnDevice",
     "this GPU does not run with the CUDA compatibility libraries that are installed: update the "
     "NVIDIA driver instead"},
    {"cudaErrorIllegalAddress", NULL},
    {"cudaErrorIllegalInstruction", NULL},
    {"cudaErrorInvalidAddressSpace", NULL},
    {"cudaErrorInvalidPc", NULL},
    {"cudaErrorMisalignedAddress", NULL},
    {"cudaErrorHardwareStackError", NULL},
    {"cudaErrorAssert", NULL},
    {"cudaErrorLaunchFailure", NULL},
    {"cudaErrorLaunchTimeout", NULL},
    {"cudaErrorECCUncorrectable", NULL},
    {"cudaErrorNvlinkUncorrectable", NULL},
    {"cudaErrorContained", NULL},
    {"cudaErrorContextIsDestroyed", NULL},
    {"cudaErrorUnknown", NULL},
};

linnet_status gpu_error(const char *name, const char *text, const char *what, linnet_error *err)
{
    if (strcmp(name, "cudaErrorMemoryAllocation") == 0)
        return error_set(err, LINNET_MEMORY,
                         "the GPU has too little free memory for %s: lower max_model_len, "
                         "max_num_seqs or kv_cache_memory, or end what else runs on it",
                         what ? what : "its own bookkeeping");
    for (size_t i = 0; i < sizeof meanings / sizeof *meanings; i++) {
        if (strcmp(meanings[i].name, name) != 0) continue;
        if (meanings[i].sentence) return error_set(err, LINNET_DEVICE, "%s", meanings[i].sentence);
        return error_set(err, LINNET_DEVICE,
                         "the GPU was lost in %s (%s): every request has ended, and this process "
                         "must be restarted",
                         what ? what : "opening it", text);
    }
    if (what) return error_set(err, LINNET_DEVICE, "the GPU failed in %s: %s", what, text);
    return error_set(err, LINNET_DEVICE, "the GPU cannot be used: %s", text);
}

linnet_status gpu_driver_error(int driver, int runtime, linnet_error *err)
{
    if (driver == 0)
        return error_set(err, LINNET_DEVICE,
                         "no NVIDIA driver is installed (libcuda.so.1 was not found): install one "
                         "that offers CUDA %d.%d",
                         runtime / 1000, runtime % 1000 / 10);
    return error_set(err, LINNET_DEVICE,
                     "the NVIDIA driver is too old: it offers CUDA %d.%d and the backend needs "
                     "%d.%d: update the driver",
                     driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
}
