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

enum openai_endpoint { OPENAI_CHAT, OPENAI_COMPLETIONS };

struct openai_prompt {
    int32_t *ids; /* at least one */
    size_t n;
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
    bool debug;     /* the answer says what was made of the request */
    char *model;    /* as asked for; NULL if not */
    char *rendered; /* with debug: what the template made of a chat; linnet_free */
    size_t rendered_size;

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

/* One choice as it grows. Zeroed at first; not locked. */
struct openai_answer {
    struct strbuf text;
    struct openai_token *tokens;
    size_t n_tokens, token_capacity;
    linnet_logprob *top;
    size_t n_top, top_capacity;
    int32_t prompt_tokens, cached_tokens, completion_tokens;
    bool has_logprobs;
    bool failed; /* memory ran out: what is here is not whole */
    linnet_finish finish;
    linnet_error error; /* with LINNET_FINISH_ERROR */
    linnet_timings timings;
};

void openai_answer_add(struct openai_answer *answer, const linnet_event *event);
void openai_answer_free(struct openai_answer *answer);

struct openai_reply {
    const char *id; /* "chatcmpl-..." or "cmpl-...": see openai_make_id */
    const char *model_name;
    int64_t created; /* seconds since the epoch */
    const struct openai_answer *answers;
    size_t n_answers; /* n_prompts * n */
};

/* "chatcmpl-" or "cmpl-" and 24 hexadecimal digits. */
enum { OPENAI_ID_SIZE = 40 };
void openai_make_id(enum openai_endpoint endpoint, char id[OPENAI_ID_SIZE]);

/* The body of a whole response; NULL out of memory. */
json_t *openai_response(const linnet_model *model, const struct openai_request *request,
                        const struct openai_reply *reply);

/* The "logprobs" of a choice, of the tokens in `answer`; null if there are none. */
json_t *openai_logprobs(const linnet_model *model, enum openai_endpoint endpoint,
                        const struct openai_answer *answer);

/* One event of a stream around its choices (a list, taken over): "usage" may be NULL. */
json_t *openai_chunk(const struct openai_request *request, const struct openai_reply *reply,
                     json_t *choices, json_t *usage);

/* {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"}: a prompt counts
 * once, however many answers it has. */
json_t *openai_usage(const struct openai_answer *answers, size_t n_answers, size_t n_per_prompt);

/* JSON has no infinity: -9999 is what other servers say. */
json_t *openai_logprob(float logprob);

/* A JSON string of any bytes: what is not UTF-8 becomes U+FFFD. */
json_t *openai_text(const char *bytes, size_t n);

#endif
