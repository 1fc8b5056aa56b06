/*
 * Any body: it becomes requests that the engine could take, or it is refused with a reason. The
 * first byte chooses the endpoint.
 */
#include <stdlib.h>
#include <string.h>

#include "serve/openai.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The folder that this file lies in has the model. */
static linnet_model *open_model(void)
{
    char path[1024] = __FILE__;
    char *end = strrchr(path, '/');
    linnet_model *model = NULL;
    linnet_error err;
    snprintf(end, sizeof path - (size_t)(end - path), "/data/qwen3-tiny");
    if (linnet_model_open(path, &model, &err)) abort();
    return model;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static linnet_model *model;
    static linnet_model_info info;
    struct openai_request request;
    struct openai_fault fault;
    if (!model) {
        model = open_model();
        linnet_model_get_info(model, &info);
    }
    if (size == 0) return 0;
    enum openai_endpoint endpoint = data[0] & 1 ? OPENAI_COMPLETIONS : OPENAI_CHAT;
    json_t *body = json_loadb((const char *)data + 1, size - 1, JSON_ALLOW_NUL, NULL);
    if (!body) return 0;
    linnet_status status = openai_request_parse(model, endpoint, body, &request, &fault);
    if (status) {
        if (fault.error.status != status || !fault.error.message[0]) abort();
        json_decref(openai_error(&fault));
    } else {
        if (request.n_prompts == 0 || request.request.n < 1) abort();
        for (size_t i = 0; i < request.n_prompts; i++) {
            const struct openai_prompt *prompt = &request.prompts[i];
            if (prompt->n == 0) abort();
            for (size_t k = 0; k < prompt->n; k++)
                if (prompt->ids[k] < 0 || prompt->ids[k] >= info.vocab_size) abort();
        }
    }
    openai_request_free(&request);
    json_decref(body);
    return 0;
}
