/* Any bytes as a GGUF file: refused, or all that is handed out can be read. */
#include "file/gguf.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static unsigned sum(const void *bytes, size_t n)
{
    unsigned total = 0;
    for (size_t i = 0; i < n; i++) total += ((const uint8_t *)bytes)[i];
    return total;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    struct gguf *g;
    linnet_error err;
    if (gguf_open_memory(bytes, size, "fuzz", &g, &err)) return 0;
    volatile unsigned total = 0;
    char text[40];
    for (size_t i = 0; i < gguf_key_count(g); i++) {
        total += sum(gguf_key(g, i).data, gguf_key(g, i).size);
        gguf_describe(g, i, text, sizeof text);
    }
    for (size_t i = 0; i < gguf_tensor_count(g); i++)
        total += sum(gguf_tensor(g, i)->data, gguf_tensor(g, i)->bytes);
    gguf_close(g);
    return 0;
}
