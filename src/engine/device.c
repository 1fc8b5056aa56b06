/* device.c - from the name of a device to the backend that computes on it. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/api_internal.h"

static char cpu_text[64];

static void name_cpu(void)
{
    snprintf(cpu_text, sizeof cpu_text, "cpu (%s)", ops_cpu_kernels());
}

static void find_cpu(struct device *out)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, name_cpu);
    *out = (struct device){.ops = &ops_cpu, .text = cpu_text, .available = available_memory()};
}

/* Beside the program or library that this code is in, else where libraries are looked for. One that
 * is there and cannot be loaded is not passed over. */
static void *open_library(char *why, size_t n)
{
    char path[4096] = OPS_CUDA_LIBRARY;
    Dl_info self;
    const char *end = dladdr(&ops_cpu, &self) ? strrchr(self.dli_fname, '/') : NULL;
    static const char *const places[] = {"/", "/../lib/", "/../" LINNET_LIBRARY_DIRECTORY "/"};
    bool found = false;
    for (size_t i = 0; end && i < sizeof places / sizeof *places && !found; i++) {
        snprintf(path, sizeof path, "%.*s%s%s", (int)(end - self.dli_fname), self.dli_fname,
                 places[i], OPS_CUDA_LIBRARY);
        found = access(path, F_OK) == 0;
    }
    void *library = dlopen(found ? path : OPS_CUDA_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    const char *error = library ? NULL : dlerror();
    bool absent = error && strstr(error, OPS_CUDA_LIBRARY ": cannot open shared object file");
    if (error) snprintf(why, n, "%s", absent ? OPS_CUDA_LIBRARY " is not installed" : error);
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

/* Keeps the first text that is put in a place: others may be reading it. */
static const char *keep_text(char *place, size_t size, const char *text)
{
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&mutex);
    if (!*place) snprintf(place, size, "%s", text);
    pthread_mutex_unlock(&mutex);
    return place;
}

enum { MAX_GPUS = 64 };

static linnet_status find_cuda(int index, struct device *out, linnet_error *err)
{
    static char texts[MAX_GPUS][128];
    char text[128] = "";
    pthread_once(&cuda.once, load_cuda);
    if (!cuda.open) return error_set(err, LINNET_UNSUPPORTED, "%s", cuda.why);
    struct ops_cuda_request request = {OPS_ABI, index};
    *out = (struct device){.gpu = true};
    out->ops = cuda.open(&request, text, sizeof text, &out->available, err);
    if (!out->ops) return err->status;
    out->text = keep_text(texts[index], sizeof texts[index], text);
    return LINNET_OK;
}

/* A GPU that was asked for. */
static linnet_status need_cuda(int index, struct device *out, linnet_error *err)
{
    linnet_error why = {LINNET_DEVICE, ""};
    if (find_cuda(index, out, &why) == LINNET_OK) return LINNET_OK;
    return error_set(err, why.status, "%s; %s", why.message,
                     cuda.open ? "or use --device cpu"
                               : "build it with the preset \"cuda\", or use --device cpu");
}

static void find_any(struct device *out)
{
    static char reason[LINNET_ERROR_SIZE];
    linnet_error why = {LINNET_DEVICE, ""};
    if (find_cuda(0, out, &why) == LINNET_OK) return;
    find_cpu(out);
    out->reason = keep_text(reason, sizeof reason, why.message);
}

linnet_status find_device(const char *name, struct device *out, linnet_error *err)
{
    char *end;
    if (!name || strcmp(name, "auto") == 0) {
        find_any(out);
        return LINNET_OK;
    }
    if (strcmp(name, "cpu") == 0) {
        find_cpu(out);
        return LINNET_OK;
    }
    if (strcmp(name, "cuda") == 0) return need_cuda(0, out, err);
    long index = strncmp(name, "cuda:", 5) == 0 ? strtol(name + 5, &end, 10) : -1;
    if (index >= 0 && end != name + 5 && !*end && index < MAX_GPUS)
        return need_cuda((int)index, out, err);
    return error_set(err, LINNET_INVALID,
                     "device \"%s\" is unknown: use \"auto\", \"cpu\", \"cuda\" or \"cuda:N\"",
                     name);
}

linnet_status linnet_device_find(const char *name, linnet_device_info *info, linnet_error *err)
{
    struct device device;
    linnet_status status = find_device(name, &device, err);
    if (!status)
        *info = (linnet_device_info){device.text, device.reason, device.available, device.gpu};
    return status;
}
