/* device.c - from the name of a device to the backend that computes on it. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/api_internal.h"

static void find_cpu(struct device *out)
{
    static const struct {
        const char *kernels, *text;
    } texts[] = {{"avx512", "cpu (avx512)"}, {"avx2", "cpu (avx2)"}, {"generic", "cpu (generic)"}};
    *out = (struct device){&ops_cpu, "cpu", available_memory()};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (strcmp(ops_cpu_kernels(), texts[i].kernels) == 0) out->text = texts[i].text;
}

/* Beside the program or library that this code is in, then where libraries are looked for. */
static void *open_library(char *why, size_t n)
{
    char path[4096];
    Dl_info self;
    void *library = NULL;
    const char *end = dladdr(&ops_cpu, &self) ? strrchr(self.dli_fname, '/') : NULL;
    static const char *const places[] = {"/", "/../lib/", "/../" LINNET_LIBRARY_DIRECTORY "/"};
    for (size_t i = 0; end && i < sizeof places / sizeof *places && !library; i++) {
        snprintf(path, sizeof path, "%.*s%s%s", (int)(end - self.dli_fname), self.dli_fname,
                 places[i], OPS_CUDA_LIBRARY);
        library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    if (!library) library = dlopen(OPS_CUDA_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    const char *error = library ? NULL : dlerror();
    if (error) snprintf(why, n, "%s", error);
    return library;
}

/* The library is loaded once and stays: backends of it may live on. */
static struct {
    pthread_once_t once;
    ops_cuda_fn open;
    char why[512];
} cuda = {.once = PTHREAD_ONCE_INIT};

static void load_cuda(void)
{
    void *library = open_library(cuda.why, sizeof cuda.why);
    void *symbol = library ? dlsym(library, OPS_CUDA_SYMBOL) : NULL;
    if (library && !symbol)
        snprintf(cuda.why, sizeof cuda.why, "%s has no %s", OPS_CUDA_LIBRARY, OPS_CUDA_SYMBOL);
    memcpy(&cuda.open, &symbol, sizeof symbol); /* ISO C has no cast from data to function */
}

enum { MAX_GPUS = 64 };

static linnet_status find_cuda(int index, struct device *out, linnet_error *err)
{
    static char texts[MAX_GPUS][128];
    char text[128] = "";
    pthread_once(&cuda.once, load_cuda);
    if (!cuda.open)
        return error_set(err, LINNET_UNSUPPORTED,
                         "the CUDA backend is not there (%s): use --device cpu, or build with the "
                         "preset \"cuda\"",
                         cuda.why);
    struct ops_cuda_request request = {OPS_ABI, index};
    linnet_error why = {LINNET_DEVICE, "unknown"};
    out->ops = cuda.open(&request, text, sizeof text, &out->available, &why);
    if (!out->ops) return error_set(err, why.status, "%s; use --device cpu", why.message);
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&mutex);
    if (!*texts[index]) memcpy(texts[index], text, sizeof text);
    pthread_mutex_unlock(&mutex);
    out->text = texts[index];
    return LINNET_OK;
}

linnet_status find_device(const char *name, struct device *out, linnet_error *err)
{
    char *end;
    if (!name || strcmp(name, "auto") == 0) {
        if (find_cuda(0, out, NULL) != LINNET_OK) find_cpu(out);
        return LINNET_OK;
    }
    if (strcmp(name, "cpu") == 0) {
        find_cpu(out);
        return LINNET_OK;
    }
    if (strcmp(name, "cuda") == 0) return find_cuda(0, out, err);
    long index = strncmp(name, "cuda:", 5) == 0 ? strtol(name + 5, &end, 10) : -1;
    if (index >= 0 && end != name + 5 && !*end && index < MAX_GPUS)
        return find_cuda((int)index, out, err);
    return error_set(err, LINNET_INVALID,
                     "device \"%s\" is unknown: use \"auto\", \"cpu\", \"cuda\" or \"cuda:N\"",
                     name);
}
