/*
 * engine_internal.h - what the files of this room share: the engine over any runner, requests, and
 * the model behind linnet_model.
 *
 * Who may touch what. A request belongs to the thread that submits it until it lies in the inbox,
 * then to the engine's thread. Everything under "shared" is read and written under the mutex only;
 * the list of requests is changed by the engine's thread alone, under the mutex, so that this
 * thread may read it without. Callbacks run without the mutex.
 */
#ifndef LINNET_ENGINE_INTERNAL_H
#define LINNET_ENGINE_INTERNAL_H

#include <pthread.h>

#include "engine/sampler.h"
#include "engine/scheduler.h"
#include "model/config.h"
#include "ops/ops.h"
#include "text/tokenizer.h"

/* What runs a step: the decoder, or in tests a model that checks where everything lies. */
struct runner {
    void *self;
    linnet_status (*step)(void *self, const struct step *s, linnet_error *err);
    const float *(*logits)(void *self, int32_t i); /* wanted row i of the last step */
    void (*close)(void *self);                     /* NULL: nothing to free */

    /*
     * A device that chooses tokens itself (NULL: the host does, after each step). `submit` has read
     * the step and its rules when it returns: both may change at once. Each step whose submission
     * succeeded is collected once, even after a failure; at most two are under way, and none when
     * `step` is called.
     */
    linnet_status (*submit)(void *self, const struct step *s, const struct choice_rule *rules,
                            linnet_error *err);
    linnet_status (*collect)(void *self, const struct chosen **out, linnet_error *err);
    int32_t max_adjustments; /* in the rules of a step together: with more the host chooses */
};

struct engine_config {
    struct runner runner;              /* the engine closes it */
    const struct tokenizer *tokenizer; /* NULL: events carry no text */
    int32_t n_vocab;                   /* logits in a row */
    int32_t eos[CONFIG_MAX_EOS];
    int32_t n_eos;
    struct limits limits;
    bool prefix_caching;
    uint64_t hash_seed;
    /* Dynamic RoPE scaling: the length from which on keys depend on the prompt's; 0 for others. */
    int32_t dynamic_rope_context;
};

/* One answer. */
struct choice {
    struct sequence sequence;
    struct request *request;
    int32_t index;
    struct detokenizer *detokenizer; /* NULL: no text */
    bool stopped;                    /* a stop string has ended the text */
    int32_t prompt_done;             /* the most that was ever computed of the prompt */
    int32_t row;                     /* wanted row of its newest token in the step begun last */
    struct adjustment *adjustments;  /* room for those of its next token */
    double started, first_token;     /* clock_seconds; 0: not yet */
};

struct request {
    uint64_t id;
    struct request *previous, *next; /* inbox or requests */
    struct request *next_cancelled;  /* chain made by receive() */
    bool cancelled;                  /* shared */
    linnet_event_fn on_event;
    void *user;
    double submitted;
    struct sampling sampling; /* bias points to memory of the request's own */
    int32_t n_logprobs;       /* as sampler_choose takes it */
    int32_t *ends;            /* ids that end an answer */
    int32_t n_ends;
    int32_t max_tokens, min_tokens; /* max_tokens: never beyond the context */
    bool include_stop;
    int32_t n_active;  /* choices not finished */
    int32_t n_pending; /* entries of pending steps */
    int32_t n_choices;
    int32_t *numbers; /* the choices' tokens and block tables */
    struct adjustment *adjustments;
    struct choice choices[];
};

struct request_list {
    struct request *first, *last;
};

/* A step that was begun and whose outcome nobody has been told yet. */
struct pending_step {
    const struct planned *items;
    int32_t n_items;
    double begun; /* clock_seconds */
};

struct linnet_engine {
    struct engine_config config;

    /* The engine's thread. */
    struct block_manager *blocks;
    struct scheduler *scheduler;
    struct sampler *sampler;
    struct step step;
    struct step_arrays {
        int32_t *token_ids, *positions, *slot_mapping, *rope_lens; /* [max_tokens] */
        int32_t *query_start;                                      /* [max_seqs + 1] */
        int32_t *context_lens, *logit_rows;                        /* [max_seqs] */
        int32_t *block_tables;                                     /* [max_seqs, max_blocks] */
    } arrays;
    int32_t *numbers;               /* the memory of the arrays */
    struct choice_rule *rules;      /* [max_seqs] */
    struct pending_step pending[2]; /* the older first */
    int32_t n_pending;
    double last_outcome; /* when the last step was done with */
    linnet_stats stats;

    /* Shared. */
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    struct request_list inbox, requests;
    int32_t n_inbox; /* choices */
    uint64_t last_id;
    bool cancel_pending, stopping, idle;
    linnet_error closed; /* status not LINNET_OK: no more submissions, and why */
    linnet_stats published;
    double last_turn;

    bool has_thread;
    pthread_t thread;
    linnet_plan plan;
};

/* ---- request.c ---- */

/* Checks a request against the engine's limits and copies all of it. */
linnet_status request_create(const struct engine_config *config, const linnet_request *in,
                             struct request **out, linnet_error *err);
void request_free(struct request *r);

/* ---- engine.c ---- */

/* How many numbers the arrays of a step take in all. */
size_t step_numbers(const struct limits *limits);

/* Everything but the thread. On failure the runner is closed too. */
linnet_status engine_open(const struct engine_config *config, linnet_engine **out,
                          linnet_error *err);
linnet_status engine_start_thread(linnet_engine *e, linnet_error *err);

/* Parts of a turn. */
void engine_receive(linnet_engine *e);
void engine_emit(struct choice *c, linnet_event *event);
void engine_finish(linnet_engine *e, struct choice *c, linnet_finish why,
                   const linnet_error *error);
void engine_reap(linnet_engine *e);
void engine_publish(linnet_engine *e);
void engine_close(linnet_engine *e, linnet_finish why, const linnet_error *error);

/* ---- turn.c ---- */

/* One turn of the loop: takes what was submitted and cancelled, begins a step, reports what is
 * known. True while there are requests left. The thread's own; tests call it on an engine without
 * one. */
bool engine_turn(linnet_engine *e);

/* Waits for what is under way and forgets it. */
void engine_drop_steps(linnet_engine *e);

#endif
