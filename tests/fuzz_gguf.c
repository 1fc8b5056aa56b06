/* Any bytes as a GGUF file: refused, or all that is handed out can be read, and texts go through
 * its tokenizer and back. */
#include <stdlib.h>

#include "base/strbuf.h"
#include "file/gguf.h"
#include "text/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static void read_all(const void *bytes, size_t n)
{
    const volatile uint8_t *p = bytes;
    for (size_t i = 0; i < n; i++) (void)p[i];
}

static void encode_and_decode(const struct tokenizer *t, const char *text, size_t n)
{
    const struct span untrusted[] = {{2, n / 3}, {n / 2, n}};
    struct encode_options options = {true, true, untrusted, n > 8 ? 2 : 0};
    struct token_list list = {0};
    struct strbuf out = {0};
    linnet_error err;
    if (tokenizer_encode(t, text, n, &options, &list, &err) == LINNET_OK &&
        tokenizer_decode(t, list.ids, list.count, false, &out, &err) == LINNET_OK)
        for (size_t i = 0; i < list.count; i++)
            if (list.ids[i] < 0 || list.ids[i] >= tokenizer_size(t)) abort();
    token_list_free(&list);
    strbuf_free(&out);
}

static void try_tokenizer(struct gguf *g, const uint8_t *bytes, size_t size)
{
    static const char text[] =
        " Hello  w\xC3\xB6rld 12\xE2\x96\x81\n<s>e\xCC\x81\xFF<|im_end|>\t\xF0\x9F\x98\x80 "
        "\xF0\x9F";
    struct checkpoint cp = {.path = (char *)"fuzz", .gguf = g};
    struct tokenizer *t;
    linnet_error err;
    if (tokenizer_open(&cp, &t, &err)) return;
    encode_and_decode(t, text, sizeof text - 1);
    size_t n = size < 200 ? size : 200;
    encode_and_decode(t, (const char *)bytes + size - n, n);
    tokenizer_close(t);
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
    try_tokenizer(g, bytes, size);
    gguf_close(g);
    return 0;
}
