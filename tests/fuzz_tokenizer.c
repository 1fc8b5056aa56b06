/* Any bytes as a tokenizer.json: refused, or texts can be encoded and every id decoded. */
#include <stdlib.h>

#include "base/strbuf.h"
#include "text/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static void encode_and_decode(const struct tokenizer *t, const char *text, size_t n, bool special)
{
    const struct span untrusted[] = {{2, n / 3}, {n / 2, n}};
    struct encode_options options = {special, true, untrusted, n > 8 ? 2 : 0};
    struct token_list list = {0};
    struct strbuf out = {0};
    linnet_error err;
    if (tokenizer_encode(t, text, n, &options, &list, &err) == LINNET_OK &&
        tokenizer_decode(t, list.ids, list.count, special, &out, &err) == LINNET_OK)
        for (size_t i = 0; i < list.count; i++)
            if (list.ids[i] < 0 || list.ids[i] >= tokenizer_size(t)) abort();
    token_list_free(&list);
    strbuf_free(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    static const char text[] =
        " Hello  w\xC3\xB6rld 12\xE2\x96\x81\n<s>e\xCC\x81\xFF<|im_end|>\t\xF0\x9F";
    struct tokenizer *t;
    linnet_error err;
    if (tokenizer_open_json((const char *)bytes, size, "fuzz", &t, &err)) return 0;
    encode_and_decode(t, text, sizeof text - 1, true);
    size_t n = size < 200 ? size : 200;
    encode_and_decode(t, (const char *)bytes + size - n, n, false);
    tokenizer_close(t);
    return 0;
}
