/* session.h - a model, its engine, and one question at a time to it. */
#ifndef LINNET_CLI_SESSION_H
#define LINNET_CLI_SESSION_H

#include <pthread.h>

#include "cli/options.h"
#include "serve/openai.h"

struct session {
    const struct options *options;
    linnet_model *model;
    linnet_engine *engine; /* NULL until session_start */
    linnet_model_info info;
    linnet_plan plan;
    double load_s;
};

/* Opens the model that the options name (or their first argument, where `positional`). */
linnet_status session_open(struct session *s, const struct options *options, bool positional,
                           linnet_error *err);
/* Starts the engine, with a progress bar. */
linnet_status session_start(struct session *s, const linnet_engine_options *engine,
                            linnet_error *err);
void session_close(struct session *s);

linnet_engine_options session_engine_options(const struct options *options);

/* The model's recommendation, overridden by what was given. */
linnet_sampling session_sampling(const struct session *s);

/* --dry-run: the plan alone, as a table or JSON. Returns the exit code. */
int session_dry_run(const struct session *s, const linnet_engine_options *engine);
json_t *session_plan_json(const linnet_plan *plan);
/* "cpu (avx2); no GPU: ..." */
void session_device(const char *device, const char *reason, struct strbuf *out);
bool session_print_plan(const linnet_plan *plan, struct strbuf *out);

/* {"messages": ...} -> ids. Refuses a model without template, naming `instead`. */
linnet_status session_chat_ids(const struct session *s, json_t *messages, const char *instead,
                               int32_t **ids, size_t *n, linnet_error *err);

/* ---- one request and its answers ----------------------------------------------------------- */

/* New text of the first answer; false stops the request. */
typedef bool (*exchange_text_fn)(void *user, const char *text, size_t n);

struct exchange {
    struct openai_answer *answers;
    size_t n;
    double first_token_at; /* on the monotonic clock */
    bool interrupted;

    pthread_mutex_t lock; /* guards all but what only the waiting thread uses */
    struct strbuf fresh;  /* of the first answer, not yet shown */
    int32_t prompt_done, prompt_tokens;
    size_t n_finished;
};

/*
 * Submits the request and waits until every answer is finished, handing out the first one's text as
 * it comes (on_text may be NULL: nothing is streamed). Ctrl-C cancels it. On LINNET_OK the answers
 * are there, maybe unfinished (interrupted, or on_text said stop); exchange_free in any case.
 */
linnet_status exchange_run(struct session *s, linnet_request *request, exchange_text_fn on_text,
                           void *user, struct exchange *x, linnet_error *err);
void exchange_free(struct exchange *x);

/* "8 tokens, 31.2 tokens/s; prompt 37 tokens, 180.4 tokens/s" */
void exchange_speed(const struct exchange *x, struct strbuf *out);
double exchange_prefill_rate(const struct openai_answer *a);
double exchange_decode_rate(const struct openai_answer *a);

#endif
