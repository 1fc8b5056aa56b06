/* Any bytes as a safetensors file: refused, or all that is handed out can be read. */
#include "file/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    struct safetensors s;
    linnet_error err;
    if (safetensors_open_memory(bytes, size, "fuzz", &s, &err)) return 0;
    volatile unsigned total = 0;
    for (size_t i = 0; i < s.n_tensors; i++)
        for (size_t j = 0; j < s.tensors[i].bytes; j++)
            total += ((const uint8_t *)s.tensors[i].data)[j];
    safetensors_close(&s);
    return 0;
}
