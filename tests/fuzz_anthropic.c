/*
 * Any JSON as a Messages request: it is refused with a word for the caller, or becomes a chat in
 * which each call has its result. The same bytes as an answer, in pieces: its events never end
 * within a block, and at the end of the stream nothing is open.
 */
#include <stdlib.h>
#include <string.h>

#include "serve/anthropic.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool condition)
{
    if (!condition) abort();
}

static const char *text_at(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));
    require(text != NULL);
    return text;
}

static void check_chat(const json_t *chat)
{
    const json_t *messages = json_object_get(chat, "messages"), *message;
    const json_t *calls = NULL;
    size_t i, answered = 0;
    require(json_array_size(messages) > 0);
    json_array_foreach(messages, i, message)
    {
        bool tool = strcmp(text_at(message, "role"), "tool") == 0;
        require(json_is_string(json_object_get(message, "content")));
        require(tool == (answered < json_array_size(calls)));
        if (tool) {
            const json_t *call = json_array_get(calls, answered++);
            require(!strcmp(text_at(call, "id"), text_at(message, "tool_call_id")));
            require(
                json_is_object(json_object_get(json_object_get(call, "function"), "arguments")));
            continue;
        }
        calls = json_object_get(message, "tool_calls");
        answered = 0;
    }
    require(answered == json_array_size(calls));
}

static void check_request(enum anthropic_endpoint endpoint, const json_t *body)
{
    json_t *chat;
    struct openai_fault fault;
    linnet_status status = anthropic_request(endpoint, body, &chat, &fault);
    if (status) {
        require(!chat && fault.error.status == status && fault.error.message[0]);
        require(openai_http_status(status) == 400);
        require(!strncmp(fault.error.message, fault.field, strlen(fault.field)));
        return;
    }
    check_chat(chat);
    json_decref(chat);
}

static void check_answer(const uint8_t *data, size_t size)
{
    static char name[] = "f";
    char *tools[] = {name};
    struct openai_prompt prompt = {.n = 1};
    struct openai_request request = {.endpoint = OPENAI_CHAT,
                                     .prompts = &prompt,
                                     .n_prompts = 1,
                                     .tools = tools,
                                     .n_tools = 1,
                                     .one_call = data[0] & 1,
                                     .in_reasoning = data[0] & 2};
    struct openai_answer answer = {0};
    struct anthropic_reply reply = {"msg_1", "m", &request, &answer, NULL};
    struct anthropic_stream stream = {0};
    struct strbuf out = {0}, whole = {0};
    size_t step = 1 + data[0] / 4 % 16, most = data[0] & 64 ? SIZE_MAX : 1 + data[0] % 64 * 8;
    openai_answer_start(&answer, &request);
    for (size_t at = 0; at < size; at += step) {
        linnet_event event = {.type = LINNET_EVENT_TOKEN,
                              .text = (const char *)data + at,
                              .text_size = step < size - at ? step : size - at};
        openai_answer_add(&answer, &event);
        while (!anthropic_stream_write(&stream, &reply, most, &out)) strbuf_clear(&out);
        require(!stream.ended && stream.sent == answer.n_deltas);
    }
    linnet_event end = {.type = LINNET_EVENT_FINISHED, .text = "", .finish = LINNET_FINISH_STOP};
    openai_answer_add(&answer, &end);
    strbuf_clear(&out);
    while (!anthropic_stream_write(&stream, &reply, most, &out)) strbuf_clear(&out);
    require(stream.ended && stream.block == ANTHROPIC_BLOCK_NONE && !out.failed);
    anthropic_message(&reply, &whole);
    require(!whole.failed && whole.data[0] == '{' && whole.data[whole.size - 1] == '}');
    strbuf_free(&out);
    strbuf_free(&whole);
    openai_answer_free(&answer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    json_t *body = json_loadb((const char *)data, size, JSON_ALLOW_NUL | JSON_DECODE_ANY, NULL);
    if (body) {
        check_request(ANTHROPIC_MESSAGES, body);
        check_request(ANTHROPIC_COUNT_TOKENS, body);
        json_decref(body);
    }
    if (size) check_answer(data, size);
    return 0;
}
