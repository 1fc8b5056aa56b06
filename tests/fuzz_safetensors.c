/* Any bytes as a safetensors file: refused, or all that is handed out can be read. */
#include "file/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static void read_all(const void *bytes, size_t n)
{
    const volatile uint8_t *p = bytes;
    for (size_t i = 0; i < n; i++) (void)p[i];
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    struct safetensors s;
    linnet_error err;
    if (safetensors_open_memory(bytes, size, "fuzz", &s, &err)) return 0;
    for (size_t i = 0; i < s.n_tensors; i++) read_all(s.tensors[i].data, s.tensors[i].bytes);
    safetensors_close(&s);
    return 0;
}
