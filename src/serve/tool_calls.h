/*
 * tool_calls.h - an answer's text, as it grows, told apart into reasoning, content and tool calls.
 *
 * Reasoning stands between <think> and </think> at the beginning of an answer. A call is either
 *     <tool_call>{"name": ..., "arguments": {...}}</tool_call>      (Hermes, Qwen)
 * anywhere in the content, or, as all that follows the reasoning,
 *     {"name": ..., "parameters": {...}}                            (Llama 3)
 * perhaps behind <|python_tag|>, several with ';' or blanks between. Both take either key, in any
 * order; without arguments a call has {}.
 *
 * What is no call after all (broken JSON, an unknown name, an object that never ends) is content,
 * to the last byte. A complete object that the answer's end left without its </tool_call> is a
 * call. Blanks beside a tag are layout: those around reasoning and before and between calls are
 * dropped. Everything else is passed on as soon as it can be nothing else, in linear time and with
 * memory bounded by the answer's length, and the result does not depend on how the text was cut.
 */
#ifndef LINNET_SERVE_TOOL_CALLS_H
#define LINNET_SERVE_TOOL_CALLS_H

#include "base/strbuf.h"
#include "serve/json_scan.h"

enum { TOOL_NAME_SIZE = 65 }; /* a name of 64 letters and its NUL */

enum tool_event_type {
    TOOL_CONTENT,
    TOOL_REASONING,
    TOOL_CALL_BEGIN,     /* `name` is known */
    TOOL_CALL_ARGUMENTS, /* more of the JSON, as the model wrote it */
    TOOL_CALL_END,       /* complete; text: everything that the call was read from */
    TOOL_CALL_ABANDONED  /* begun, but no call: all of it comes again, as content */
};

/* Lives only during the call. */
struct tool_event {
    enum tool_event_type type;
    size_t index; /* of the call among those begun, from 0 */
    const char *name;
    const char *text;
    size_t size;
};
typedef void (*tool_event_fn)(void *user, const struct tool_event *event);

struct tool_options {
    const char *const *names; /* that may be called; they outlive the parser */
    size_t n_names;           /* 0: there are no calls, only reasoning and content */
    bool in_reasoning;        /* the prompt ended with <think> */
    bool one_call;            /* the answer ends with its first call; the rest is dropped */
};

enum tool_state {
    TOOL_AT_START, /* nothing but blanks, or a whole <think> block, so far */
    TOOL_IN_REASONING,
    TOOL_IN_CONTENT,
    TOOL_BEFORE_OBJECT, /* a tag was read: its object must come */
    TOOL_IN_OBJECT,
    TOOL_AFTER_OBJECT,
    TOOL_CLOSED
};

enum tool_field { TOOL_FIELD_OTHER, TOOL_FIELD_NAME, TOOL_FIELD_ARGUMENTS };

/* A call that is being read. */
struct tool_reading {
    struct strbuf source; /* from its tag or brace on */
    struct json_scan scan;
    bool tagged;           /* by <tool_call> */
    enum tool_field field; /* whose value is at hand */
    bool seen[3];
    bool begun;
    char name[TOOL_NAME_SIZE];                    /* "": not known yet */
    size_t arguments_begin, arguments_end, given; /* offsets in source; 0: not yet */
};

/* Zeroed or initialized at first. */
struct tool_parser {
    struct tool_options options;
    enum tool_state state;
    bool thought, has_reasoning, has_content;
    bool after_tag;      /* nothing but blanks since the last block or call */
    char tag[20];        /* what may become a tag */
    size_t tag_size;     /* also: how much of </tool_call> was read */
    struct strbuf blank; /* blanks that may turn out to be layout */
    struct strbuf text;  /* content or reasoning, to be given out */
    enum tool_event_type text_type;
    struct tool_reading call;
    size_t n_begun, n_complete;
    tool_event_fn emit;
    void *user;
};

void tool_parser_init(struct tool_parser *p, const struct tool_options *options);

/* The next piece of the answer, cut anywhere; calls emit for what is certain by now. */
void tool_parser_feed(struct tool_parser *p, const char *text, size_t n, tool_event_fn emit,
                      void *user);
/* The answer has ended. */
void tool_parser_finish(struct tool_parser *p, tool_event_fn emit, void *user);
void tool_parser_free(struct tool_parser *p);

/* Memory ran out: what was given out is not whole. */
bool tool_parser_failed(const struct tool_parser *p);

#endif
