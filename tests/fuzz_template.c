/* Any source with any context: it renders, or it is refused. "SOURCE NUL JSON". */
#include <stdlib.h>
#include <string.h>

#include "text/template.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char usual[] =
        "{\"messages\":[{\"role\":\"user\",\"content\":\"h\xC3\xA9 <b>\"},{\"role\":\"assistant\","
        "\"content\":\"a</think>b\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":"
        "{\"x\":[1,2.5,null,true]}}}]}],\"tools\":null,\"bos_token\":\"<s>\",\"n\":3}";
    static const char *const trusted[] = {"bos_token", NULL};
    const uint8_t *end = size ? memchr(data, 0, size) : NULL;
    size_t n = end ? (size_t)(end - data) : size;
    struct chat_template *t;
    linnet_error err;
    if (template_compile((const char *)data, n, "fuzz", &t, &err) != LINNET_OK) return 0;
    json_t *context =
        end ? json_loadb((const char *)end + 1, size - n - 1, JSON_ALLOW_NUL, NULL) : NULL;
    if (!json_is_object(context)) {
        json_decref(context);
        context = json_loads(usual, 0, NULL);
    }
    struct rendered out;
    if (template_render(t, context, trusted, 1717230000, &out, &err) == LINNET_OK) {
        size_t at = 0;
        for (size_t i = 0; i < out.n_untrusted; i++) {
            if (out.untrusted[i].begin >= out.untrusted[i].end ||
                (i && out.untrusted[i].begin <= at))
                abort();
            at = out.untrusted[i].end;
        }
        if (at > out.text.size) abort();
        rendered_free(&out);
    }
    json_decref(context);
    template_free(t);
    return 0;
}
