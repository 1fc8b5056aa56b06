/*
 * openai.h - the OpenAI API's messages: a request's JSON becomes linnet_requests, and what the
 * engine answers becomes response JSON. No socket and no thread here.
 *
 * Unknown fields are ignored. A field that is known, but cannot be obeyed, is an error naming the
 * field, unless its value would change nothing.
 */
#ifndef LINNET_SERVE_OPENAI_H
#define LINNET_SERVE_OPENAI_H

#include <jansson.h>

#include "base/error.h"
#include "base/limits.h"
#include "base/strbuf.h"
#include "serve/tool_calls.h"

enum openai_endpoint { OPENAI_CHAT, OPENAI_COMPLETIONS };

struct openai_prompt {
    int32_t *ids; /* at least one */
    size_t n;
    char *text; /* with echo: what stands before the answer; linnet_free */
    size_t text_size;
};

enum { OPENAI_MAX_PROMPTS = 128, OPENAI_MAX_CHOICES = LIMIT_CHOICES, OPENAI_FIELD_SIZE = 64 };

struct openai_request {
    enum openai_endpoint endpoint;
    /* How to answer each prompt. The caller sets prompt, n_prompt, on_event and user, and submits
     * once for each prompt; choice c of prompt p is choice p * n + c of the response. */
    linnet_request request;
    struct openai_prompt *prompts; /* chat has one */
    size_t n_prompts;
    bool stream, include_usage, return_token_ids;
    bool echo;      /* completions: prompts stand before their answers */
    bool debug;     /* the answer says what was made of the request */
    char *model;    /* as asked for; NULL if not */
    char *rendered; /* with debug: what the template made of a chat; linnet_free */
    size_t rendered_size;

    /* Chat: how the answers' text is read (see openai_answer_start). */
    char **tools; /* names of the functions that may be called; none with tool_choice "none" */
    size_t n_tools;
    const char *chosen_tool; /* by tool_choice, one of tools; NULL: any */
    bool call_demanded;      /* tool_choice "required" or a name */
    bool one_call;           /* an answer ends with its first call */
    bool in_reasoning;       /* the prompt's template opened <think> */
    char *answer_prefix;     /* what was put behind the prompt to demand a call; NULL: nothing */

    linnet_logit_bias *logit_bias; /* what request points at */
    char **stop;
    int32_t *stop_ids;
};

/* What was wrong with a request. */
struct openai_fault {
    linnet_error error;
    char field[OPENAI_FIELD_SIZE]; /* "" if it is no single field's fault */
};

/* Free the request after any outcome. */
linnet_status openai_request_parse(const linnet_model *model, enum openai_endpoint endpoint,
                                   const json_t *body, struct openai_request *out,
                                   struct openai_fault *fault);
void openai_request_free(struct openai_request *request);

/* A number without a fraction, also when written as 5.0. */
bool openai_integer(const json_t *value, int64_t *out);

/* 400 for what the caller can mend, else 500 (503 out of memory). */
int openai_http_status(linnet_status status);

/* {"error": {"message", "type", "param", "code"}}; NULL out of memory. */
json_t *openai_error(const struct openai_fault *fault);

/* ---- answers ------------------------------------------------------------------------------- */

struct openai_token {
    int32_t id;
    float logprob;
    size_t first_top, n_top; /* in openai_answer.top */
    size_t text_offset;      /* where its text begins, in bytes */
};

enum { OPENAI_ID_SIZE = 40 };

struct openai_call {
    char id[OPENAI_ID_SIZE]; /* "call_..." */
    char name[TOOL_NAME_SIZE];
    struct strbuf arguments; /* JSON text of an object once complete */
    bool complete;           /* false: still growing, or no call after all */
};

/* A piece of a chat answer in the order in which a stream tells them. */
struct openai_delta {
    enum tool_event_type type; /* all but TOOL_CALL_END and TOOL_CALL_ABANDONED */
    size_t call;               /* of openai_answer.calls; TOOL_CALL_* */
    size_t begin, size;        /* bytes of content, reasoning or the call's arguments */
};

/* One choice as it grows. Zeroed at first; not locked. */
struct openai_answer {
    struct strbuf text; /* all of it, as the model wrote it */

    /* The same text told apart: only after openai_answer_start. */
    bool is_parsed;
    struct tool_parser parser;
    struct strbuf content, reasoning;
    struct openai_call *calls; /* also those that turned out to be none: see complete */
    size_t n_calls, call_capacity;
    struct openai_delta *deltas;
    size_t n_deltas, delta_capacity;
    int32_t reasoning_tokens;

    struct openai_token *tokens;
    size_t n_tokens, token_capacity;
    linnet_logprob *top;
    size_t n_top, top_capacity;
    int32_t prompt_tokens, cached_tokens, completion_tokens;
    bool has_logprobs;
    bool failed; /* memory ran out: what is here is not whole */
    linnet_finish finish;
    int32_t stop;       /* as linnet_event says it */
    linnet_error error; /* with LINNET_FINISH_ERROR */
    linnet_timings timings;
};

/*
 * Before the first event of a chat's choice: tells its text apart into reasoning, content and tool
 * calls as the request wants it. The request must outlive the answer. Without this call an answer
 * has only its text.
 */
void openai_answer_start(struct openai_answer *answer, const struct openai_request *request);
void openai_answer_add(struct openai_answer *answer, const linnet_event *event);
void openai_answer_free(struct openai_answer *answer);

/* Nothing more of this answer will be told: with parallel_tool_calls false its call has come. */
bool openai_answer_is_closed(const struct openai_answer *answer);

/* The answer is one: it has not failed, and was not cut off but where it is closed. */
bool openai_answer_is_good(const struct openai_answer *answer);

/* "stop", "length", "tool_calls", ...: a stop after at least one complete call is "tool_calls". */
const char *openai_finish_reason(const struct openai_answer *answer);

/* {"role", "content", "refusal", "reasoning_content", "tool_calls"}, the last two only where there
 * are any; content is null where there is nothing but calls or reasoning. */
json_t *openai_message(const struct openai_answer *answer);

/*
 * A stream: after each openai_answer_add, what is new are deltas[sent..n_deltas), where `sent` is
 * the writer's own counter (begin with 0; openai_answer_start may already have added some); each
 * becomes the "delta" of a chunk:
 *     {"content": ...}, {"reasoning_content": ...},
 *     {"tool_calls": [{"index", "id", "type", "function": {"name", "arguments": ""}}]}, then
 *     {"tool_calls": [{"index", "function": {"arguments": ...}}]}
 * The role chunk before and the finish chunk after (openai_finish_reason) are the writer's.
 * Neighbours of one kind may be sent as one: openai_delta_join says where the next chunk begins.
 */
json_t *openai_delta(const struct openai_answer *answer, size_t first, size_t end);
/* The end of the run of deltas from `first` on that one chunk can carry. */
size_t openai_delta_join(const struct openai_answer *answer, size_t first);

struct openai_reply {
    const char *id; /* "chatcmpl-..." or "cmpl-...": see openai_make_id */
    const char *model_name;
    int64_t created; /* seconds since the epoch */
    const struct openai_answer *answers;
    size_t n_answers; /* n_prompts * n */
};

/* "chatcmpl-" or "cmpl-" and 24 hexadecimal digits. */
void openai_make_id(enum openai_endpoint endpoint, char id[OPENAI_ID_SIZE]);

/* With echo: the prompt of this choice, as text; else empty. */
json_t *openai_echo(const struct openai_request *request, size_t choice);

/* The body of a whole response; NULL out of memory. */
json_t *openai_response(const linnet_model *model, const struct openai_request *request,
                        const struct openai_reply *reply);

/* The "logprobs" of a choice, of the tokens in `answer`; null if there are none. */
json_t *openai_logprobs(const linnet_model *model, enum openai_endpoint endpoint,
                        const struct openai_answer *answer);

/* One event of a stream around its choices (a list, taken over): "usage" may be NULL. */
json_t *openai_chunk(const struct openai_request *request, const struct openai_reply *reply,
                     json_t *choices, json_t *usage);

/* {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"} and, where there
 * was reasoning, "completion_tokens_details": a prompt counts once, however many answers it has. */
json_t *openai_usage(const struct openai_answer *answers, size_t n_answers, size_t n_per_prompt);

/* JSON has no infinity: -9999 is what other servers say. */
json_t *openai_logprob(float logprob);

/* A JSON string of any bytes: what is not UTF-8 becomes U+FFFD. */
json_t *openai_text(const char *bytes, size_t n);

#endif
