/* Any bytes as a GGUF file: refused, or all that is handed out can be read. */
#include "file/gguf.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static void read_all(const void *bytes, size_t n)
{
    const volatile uint8_t *p = bytes;
    for (size_t i = 0; i < n; i++) (void)p[i];
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    struct gguf *g;
    linnet_error err;
    if (gguf_open_memory(bytes, size, "fuzz", &g, &err)) return 0;
    char text[40];
    for (size_t i = 0; i < gguf_key_count(g); i++) {
        read_all(gguf_key(g, i).data, gguf_key(g, i).size);
        gguf_describe(g, i, text, sizeof text);
    }
    for (size_t i = 0; i < gguf_tensor_count(g); i++)
        read_all(gguf_tensor(g, i)->data, gguf_tensor(g, i)->bytes);
    gguf_close(g);
    return 0;
}
