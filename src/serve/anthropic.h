/*
 * anthropic.h - the Anthropic Messages API in the OpenAI API's terms: its requests become chat
 * requests, answers to these become its messages and streams. No socket and no thread here.
 *
 *     anthropic_request -> openai_request_parse(OPENAI_CHAT) -> openai_answer_start, _add ...
 *     -> anthropic_message, or anthropic_stream_write after each piece; or anthropic_count
 *
 * Text is appended to a strbuf: check its `failed` at the end. docs/serving-anthropic.md lists the
 * fields.
 */
#ifndef LINNET_SERVE_ANTHROPIC_H
#define LINNET_SERVE_ANTHROPIC_H

#include "serve/openai.h"

enum anthropic_endpoint { ANTHROPIC_MESSAGES, ANTHROPIC_COUNT_TOKENS };

/*
 * The body of POST /v1/messages (or /v1/messages/count_tokens, where only max_tokens may be absent
 * besides) as that of POST /v1/chat/completions. What the fields common to both mean is checked by
 * openai_request_parse, whose faults then name them rightly.
 */
linnet_status anthropic_request(enum anthropic_endpoint endpoint, const json_t *body, json_t **chat,
                                struct openai_fault *fault);

/* {"input_tokens": n}: of the prompt as it was rendered. NULL out of memory. */
json_t *anthropic_count(const struct openai_request *request);

/* ---- errors -------------------------------------------------------------------------------- */

/* The HTTP status here where the other endpoints answer `http`: 529 (overloaded) for 503. */
int anthropic_http_status(int http);

/* {"type": "error", "error": {"type", "message"}, "request_id"} with the type of that status;
 * without request_id if it is NULL. NULL out of memory. */
json_t *anthropic_error(int http, const char *message, const char *request_id);

/* ---- answers ------------------------------------------------------------------------------- */

enum { ANTHROPIC_ID_SIZE = OPENAI_ID_SIZE };

/* "msg_" and 24 hexadecimal digits. */
void anthropic_make_id(char id[ANTHROPIC_ID_SIZE]);

/* What an answer belongs to. All outlive the call. */
struct anthropic_reply {
    const char *id; /* see anthropic_make_id */
    const char *model_name;
    const struct openai_request *request;
    const struct openai_answer *answer; /* begun by openai_answer_start */
    const linnet_error *why;            /* it was cancelled; NULL: as when the server stops */
};

/* Null until the answer has finished, and if it failed or was cancelled: then it is no message. */
const char *anthropic_stop_reason(const struct anthropic_reply *reply);

/* Appends the whole message as JSON: the answer has a stop reason. Tool arguments stand as the
 * model wrote them. */
void anthropic_message(const struct anthropic_reply *reply, struct strbuf *out);

/* What is open in a stream. */
enum anthropic_block {
    ANTHROPIC_BLOCK_NONE,
    ANTHROPIC_BLOCK_TEXT,
    ANTHROPIC_BLOCK_THINKING,
    ANTHROPIC_BLOCK_TOOL_USE
};

/* Zeroed at first. */
struct anthropic_stream {
    bool begun, ended;
    enum anthropic_block block;
    size_t n_blocks; /* begun so far */
    size_t call;     /* of the answer, with ANTHROPIC_BLOCK_TOOL_USE */
    size_t sent;     /* deltas of the answer */
};

/*
 * Appends all events that are due: message_start and ping with the first call, what the answer has
 * grown by, and at its end message_delta and message_stop, or error if there is no message. From
 * then on `ended` is set and nothing more is written. Neighbouring deltas go as one, up to `most`
 * at a time; once out has `most` bytes it stops. False: more waits.
 */
bool anthropic_stream_write(struct anthropic_stream *stream, const struct anthropic_reply *reply,
                            size_t most, struct strbuf *out);

/* An event that says nothing, to keep a connection awake: between any two writes. */
void anthropic_stream_ping(struct strbuf *out);

/* The event of an error that the answer does not know of; it ends the stream. */
void anthropic_stream_fail(struct anthropic_stream *stream, int http, const char *message,
                           struct strbuf *out);

#endif
