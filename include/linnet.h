/*
 * linnet.h - the one public header of liblinnet, an inference engine for language models.
 *
 * A *model* is opened from a GGUF file or a Hugging Face directory. It is immutable and may be
 * shared by any number of threads. An *engine* owns everything mutable: the cache, the scheduler,
 * the compute threads. A *request* is one prompt and how to sample from it; it is handed to the
 * engine, which answers through events.
 *
 * The library never exits, aborts or prints. Every function that can fail returns a linnet_status
 * and, where it takes a linnet_error, says in it what went wrong and what to do next.
 *
 * Promise: with one model and one device type, the tokens of a request depend on nothing but the
 * request. Not on what else runs, how its prompt was cut, or whether its prefix was cached.
 */
#ifndef LINNET_H
#define LINNET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LINNET_VERSION_MAJOR 0
#define LINNET_VERSION_MINOR 1
#define LINNET_VERSION_PATCH 0
#define LINNET_VERSION       "0.1.0"

#ifndef LINNET_API
#define LINNET_API __attribute__((visibility("default")))
#endif

/* ---- status ------------------------------------------------------------------------------ */

typedef enum linnet_status {
    LINNET_OK = 0,
    LINNET_INVALID,     /* an argument or option is wrong */
    LINNET_IO,          /* the operating system refused (missing file, full disk, ...) */
    LINNET_FORMAT,      /* a file is damaged or contradicts itself */
    LINNET_UNSUPPORTED, /* well formed, but not something this version can do */
    LINNET_MEMORY,      /* not enough memory */
    LINNET_TOO_LONG,    /* prompt or context can never fit */
    LINNET_CANCELLED,   /* the caller asked for it */
    LINNET_NUMERIC,     /* the model produced NaN or infinity */
    LINNET_DEVICE,      /* the compute device failed */
    LINNET_INTERNAL     /* a fault of ours: please report it */
} linnet_status;

#define LINNET_ERROR_SIZE 1024

typedef struct linnet_error {
    linnet_status status;
    char message[LINNET_ERROR_SIZE]; /* one line of UTF-8, no final full stop or newline */
} linnet_error;

/* A short English name of a status ("out of memory"). Static storage. */
LINNET_API const char *linnet_status_name(linnet_status status);

/* "0.1.0". Static storage. */
LINNET_API const char *linnet_version(void);

/* Frees what this library returned as char * or int32_t *. NULL is allowed. */
LINNET_API void linnet_free(void *memory);

/* ---- model ------------------------------------------------------------------------------- */

typedef struct linnet_model linnet_model;

/*
 * Opens a GGUF file, a directory as Hugging Face lays it out, or a name found in $LINNET_MODELS or
 * $XDG_DATA_HOME/linnet/models (with or without ".gguf"). NULL: the one that script/quickstart
 * installed there. Reads metadata, tokenizer and template; weights stay in the file until an
 * engine loads them. Close it after its engines.
 */
LINNET_API linnet_status linnet_model_open(const char *path, linnet_model **out, linnet_error *err);

/* A bare tokenizer.json: only the functions of "text" work with it. */
LINNET_API linnet_status linnet_model_open_tokenizer(const char *path, linnet_model **out,
                                                     linnet_error *err);

/*
 * A model of a published shape with random weights made in memory (needs no file, has no
 * tokenizer): "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen3-0.6b", "llama-3.2-1b",
 * "smollm2-135m". dtype: "f32", "f16", "bf16", "q8_0", "q4_0",
 * "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k". For benchmarks.
 */
LINNET_API linnet_status linnet_model_random(const char *shape, const char *dtype, uint64_t seed,
                                             linnet_model **out, linnet_error *err);
LINNET_API void linnet_model_close(linnet_model *model);

typedef struct linnet_model_info {
    const char *path;         /* as found; owned by the model, like the other strings */
    const char *name;         /* short name for people */
    const char *architecture; /* "llama", "qwen2", "qwen3" */
    const char *dtype;        /* of most of the weights: "Q4_1" */
    int32_t n_layers, hidden_size, intermediate_size, n_heads, n_kv_heads, head_dim;
    int32_t vocab_size;     /* rows of the output matrix */
    int32_t context_length; /* tokens the model was made for */
    int64_t n_parameters, weight_bytes;
    bool has_tokenizer, has_chat_template;
} linnet_model_info;

LINNET_API void linnet_model_get_info(const linnet_model *model, linnet_model_info *info);

/* Everything in the file as one JSON object (metadata, tensors, tokenizer): `inspect`'s source. */
LINNET_API linnet_status linnet_model_describe(const linnet_model *model, char **json,
                                               linnet_error *err);

/* ---- text -------------------------------------------------------------------------------- */

enum {
    LINNET_ADD_SPECIAL = 1,   /* what the tokenizer itself adds (BOS) */
    LINNET_PARSE_SPECIAL = 2, /* control tokens written in the text become tokens */
    LINNET_SKIP_SPECIAL = 4   /* decoding: control tokens give no text */
};

/* *ids is malloc'ed: linnet_free. n is in bytes; the text may contain NUL. */
LINNET_API linnet_status linnet_tokenize(const linnet_model *model, const char *text, size_t n,
                                         unsigned flags, int32_t **ids, size_t *n_ids,
                                         linnet_error *err);
LINNET_API linnet_status linnet_detokenize(const linnet_model *model, const int32_t *ids, size_t n,
                                           unsigned flags, char **text, size_t *size,
                                           linnet_error *err);

/*
 * Renders a chat with the model's template. `request` is a JSON object with "messages" and
 * optionally "tools", "add_generation_prompt" (default true), "chat_template_kwargs"; contents may
 * be strings or lists of {"type":"text"} parts (joined with nothing between). Text of messages
 * never becomes control tokens. *rendered is the text, *rendered_size its bytes (it may contain
 * NUL; both pointers may be NULL), *ids its tokens.
 */
LINNET_API linnet_status linnet_chat_tokenize(const linnet_model *model, const char *request,
                                              size_t n, char **rendered, size_t *rendered_size,
                                              int32_t **ids, size_t *n_ids, linnet_error *err);

/* ---- engine ------------------------------------------------------------------------------ */

typedef struct linnet_device_info {
    const char *name;   /* "cuda:0 (NVIDIA H200)", "cpu (avx2)"; static storage */
    const char *reason; /* why "auto" took no GPU; NULL: it did, or was not asked; static storage */
    int64_t available;  /* bytes of memory that are free on it */
    bool gpu;
} linnet_device_info;

/*
 * The device that a name means: "auto" (or NULL), "cpu", "cuda", "cuda:N". The first call for a GPU
 * wakes it, which takes a third of a second: one may do so on a thread while a model is opened.
 */
LINNET_API linnet_status linnet_device_find(const char *device, linnet_device_info *info,
                                            linnet_error *err);

typedef struct linnet_engine linnet_engine;

/* Called on the thread that loads: done of total bytes. Must return soon. */
typedef void (*linnet_progress_fn)(void *user, int64_t done, int64_t total);

typedef struct linnet_engine_options {
    const char *device;             /* "auto", "cpu", "cuda", "cuda:N"; NULL: auto */
    int32_t threads;                /* 0: what this machine gives */
    int32_t max_model_len;          /* tokens of one sequence; 0: the model's, within memory */
    int32_t max_num_seqs;           /* sequences in one step; 0: 64, on a GPU 256 */
    int32_t max_num_batched_tokens; /* tokens in one step; 0: 512, on a GPU 2048 */
    int64_t kv_cache_memory;        /* bytes; 0: what suits the device and max_model_len */
    bool no_prefix_caching;
    bool enforce_eager; /* GPU: no graphs. Changes no bit */
    const char *numa;   /* CPU: "interleave" spreads weights and cache over the memory of all
                           processors, and maps no packed file; NULL, "none": the system decides */
    linnet_progress_fn progress;
    void *progress_user;
    /* What keys and values are kept in: "auto" (NULL): fp32 on the CPU, bf16 on a GPU; "int8": 8
     * bits and a scale for each token and head, CPU only. docs/numerics.md has the error. */
    const char *kv_cache_dtype;
} linnet_engine_options;

/* What an engine with these options will take, known before anything is loaded. Bytes. */
typedef struct linnet_plan {
    const char *device; /* "cpu (avx2)"; static storage */
    int64_t weights, kv_cache, activations, total, available;
    int32_t n_blocks, block_tokens, max_model_len, max_num_seqs, max_num_batched_tokens, threads;
    int64_t kv_bytes_per_token;
    const char *device_reason;  /* why "auto" took no GPU; NULL: it did, or was not asked */
    int64_t scratch;            /* GPU: what loading and recorded steps take besides */
    const char *kv_cache_dtype; /* "fp32", "bf16", "int8"; static storage */
    bool packed; /* of an engine that is there: its weights are mapped from linnet_pack's file */
    const char *packed_reason; /* why such a file is there and not used, or NULL; the engine's */
} linnet_plan;

/* LINNET_MEMORY or LINNET_TOO_LONG, with the numbers and the largest length that would fit. */
LINNET_API linnet_status linnet_engine_plan(const linnet_model *model,
                                            const linnet_engine_options *options, linnet_plan *plan,
                                            linnet_error *err);

/* Loads the weights, reserves all memory, starts the engine's thread. */
LINNET_API linnet_status linnet_engine_create(linnet_model *model,
                                              const linnet_engine_options *options,
                                              linnet_engine **out, linnet_error *err);
/* Cancels what runs (its last events are still delivered), stops the thread, frees all. */
LINNET_API void linnet_engine_destroy(linnet_engine *engine);
LINNET_API void linnet_engine_get_plan(const linnet_engine *engine, linnet_plan *plan);

/*
 * Writes a model's weights as the CPU computes with them into a file beside it: MODEL.gguf.packed,
 * or linnet.packed in a directory; *path (linnet_free) and *bytes tell of it. Engines on a CPU map
 * it from then on and need not pack weights when they start. It is used only while the model's
 * files are what they were and all of it is as it was written, and may be deleted at any time but
 * must not be changed in place. A file that is there is replaced once the new one is whole. Of the
 * options threads and progress count; NULL: none.
 */
LINNET_API linnet_status linnet_pack(linnet_model *model, const linnet_engine_options *options,
                                     char **path, int64_t *bytes, linnet_error *err);

/* ---- requests ---------------------------------------------------------------------------- */

typedef struct linnet_logit_bias {
    int32_t id;
    float bias; /* added to the logit; clamped to +-1e4 */
} linnet_logit_bias;

typedef struct linnet_sampling {
    float temperature;        /* 0: greedy */
    float top_p;              /* 1: off */
    float min_p;              /* 0: off */
    int32_t top_k;            /* 0: off */
    float repetition_penalty; /* 1: off */
    float presence_penalty;   /* 0: off */
    float frequency_penalty;  /* 0: off */
    uint64_t seed;
    bool has_seed; /* without: a random one for each request */
    const linnet_logit_bias *logit_bias;
    size_t n_logit_bias;
} linnet_sampling;

/* What generation_config.json (or the GGUF's general.sampling.*) recommends; else temperature 1. */
LINNET_API void linnet_sampling_defaults(const linnet_model *model, linnet_sampling *sampling);

typedef enum linnet_finish {
    LINNET_FINISH_NONE = 0,
    LINNET_FINISH_STOP,   /* an end token, a stop id or a stop string */
    LINNET_FINISH_LENGTH, /* max_tokens, or the context is full */
    LINNET_FINISH_CANCELLED,
    LINNET_FINISH_ERROR
} linnet_finish;

/* "stop", "length", "cancelled", "error". Static storage. */
LINNET_API const char *linnet_finish_name(linnet_finish finish);

typedef struct linnet_logprob {
    int32_t id;
    float logprob; /* of the model's raw distribution */
} linnet_logprob;

typedef enum linnet_event_type {
    LINNET_EVENT_PROMPT,  /* more of the prompt has been read (once a step) */
    LINNET_EVENT_TOKEN,   /* one more token; text may be empty while characters are incomplete */
    LINNET_EVENT_FINISHED /* the last event of a choice */
} linnet_event_type;

typedef struct linnet_timings {
    double queued_s, prefill_s, decode_s; /* up to the first step, to the first token, from there */
} linnet_timings;

/* Everything in an event lives only during the call. */
typedef struct linnet_event {
    linnet_event_type type;
    uint64_t request;
    int32_t choice;        /* 0..n-1 */
    int32_t prompt_tokens; /* length of the prompt */
    int32_t prompt_done;   /* how much of it is in the cache */
    int32_t cached_tokens; /* how much of it came from the prefix cache */
    int32_t completion_tokens;
    int32_t token;    /* TOKEN only */
    const char *text; /* TOKEN and FINISHED: whole characters that may be shown now */
    size_t text_size;
    bool has_logprobs;
    float logprob;
    const linnet_logprob *top; /* descending */
    size_t n_top;
    linnet_finish finish;      /* FINISHED only, like what follows */
    const linnet_error *error; /* with LINNET_FINISH_ERROR */
    linnet_timings timings;
    int32_t preemptions;
    int32_t stop; /* which stop string ended the text: its index in the request, from 1; 0: none */
} linnet_event;

/*
 * Called on the engine's thread, for one request in order. Must not block, and must not call
 * linnet_engine_destroy; submit and cancel are allowed.
 */
typedef void (*linnet_event_fn)(void *user, const linnet_event *event);

typedef struct linnet_request {
    const int32_t *prompt; /* token ids, at least one */
    size_t n_prompt;
    linnet_sampling sampling;
    int32_t n;          /* answers, sharing the prompt's blocks; 0 means 1 */
    int32_t max_tokens; /* 0: as many as the context takes */
    int32_t min_tokens; /* no end token before */
    bool ignore_eos;
    bool include_stop;        /* leave the stop string in the text */
    bool keep_special_tokens; /* give out control tokens as text */
    const char *const *stop;  /* stop strings */
    size_t n_stop;
    const int32_t *stop_ids;
    size_t n_stop_ids;
    int32_t logprobs; /* how many of the top; with want_logprobs; at most 20 */
    bool want_logprobs;
    int32_t priority; /* smaller: sooner, and later to yield its place; usually 0 */
    linnet_event_fn on_event;
    void *user;
} linnet_request;

/*
 * Hands a request over; everything in it is copied. A request that can never run is refused here:
 * LINNET_TOO_LONG with both numbers, LINNET_INVALID for ids or settings out of range.
 */
LINNET_API linnet_status linnet_engine_submit(linnet_engine *engine, const linnet_request *request,
                                              uint64_t *id, linnet_error *err);

/* Ends a request within one step; its choices finish with LINNET_FINISH_CANCELLED. Unknown or
 * finished ids are ignored. */
LINNET_API void linnet_engine_cancel(linnet_engine *engine, uint64_t id);

typedef struct linnet_stats {
    int32_t n_running, n_waiting; /* sequences */
    int32_t n_blocks, n_blocks_free;
    int64_t n_steps, n_preemptions;
    int64_t prompt_tokens, cached_tokens, generated_tokens;
    double step_seconds;    /* sum over all steps */
    double last_step_age_s; /* since the loop last turned; grows only if it is stuck */
} linnet_stats;
LINNET_API void linnet_engine_get_stats(linnet_engine *engine, linnet_stats *stats);

/* ---- checking and measuring -------------------------------------------------------------- */

typedef struct linnet_check_row {
    const char *operation, *device, *dtype, *shape;
    double max_abs, rms_rel, bound;
    bool pass;
} linnet_check_row;
typedef void (*linnet_check_fn)(void *user, const linnet_check_row *row);

/*
 * Compares every operation of a device (not keys and values in 8 bits) with the plain reference
 * and, if model is not NULL, the model's logits on both. Calls on_row for each; *n_failed counts
 * those that did not pass.
 */
LINNET_API linnet_status linnet_check(linnet_model *model, const char *device, int32_t threads,
                                      linnet_check_fn on_row, void *user, int32_t *n_failed,
                                      linnet_error *err);

/*
 * Says how likely a model finds tokens that are given, not chosen. It has weights and a cache of
 * its own; of the options device, threads, max_model_len (the longest sequence it is asked about;
 * 0: the model's), kv_cache_dtype, numa, enforce_eager and progress count. One thread at a time may
 * use it. Close it before its model.
 */
typedef struct linnet_scorer linnet_scorer;
LINNET_API linnet_status linnet_scorer_create(linnet_model *model,
                                              const linnet_engine_options *options,
                                              linnet_scorer **out, linnet_error *err);
LINNET_API void linnet_scorer_destroy(linnet_scorer *scorer);

/*
 * logprobs[i - first]: the natural logarithm of the probability that tokens 0..i-1 are followed by
 * token i, for each i from `first` (at least 1) up to n - 1; of the model's raw distribution over
 * all rows of its output matrix, normalised in double. Each call is for itself: nothing is kept of
 * the one before. LINNET_INVALID, LINNET_TOO_LONG, or LINNET_NUMERIC if a logit is NaN or
 * +infinity.
 */
LINNET_API linnet_status linnet_score(linnet_scorer *scorer, const int32_t *tokens, size_t n,
                                      size_t first, double *logprobs, linnet_error *err);

typedef struct linnet_ladder_row {
    const char *stage; /* "no cache", "contiguous cache", "paged cache", ... */
    int32_t n_tokens;
    double seconds;
} linnet_ladder_row;
typedef void (*linnet_ladder_fn)(void *user, const linnet_ladder_row *row);

/* Greedy decoding of n_tokens after n_prompt tokens by each stage of the design, simplest first;
 * fails with LINNET_INTERNAL if two stages give different tokens. */
LINNET_API linnet_status linnet_ladder(linnet_model *model, const linnet_engine_options *options,
                                       int32_t n_prompt, int32_t n_tokens, linnet_ladder_fn on_row,
                                       void *user, linnet_error *err);

/* Read bandwidth of a device's memory in bytes a second over a buffer far larger than its caches;
 * on the CPU by `threads` at once (0: all). Takes about a second; 0 if it cannot be measured. */
LINNET_API double linnet_measure_bandwidth(const char *device, int32_t threads);

/*
 * What the processor computes at most with every operand in a register, in operations a second (a
 * multiply-add is two), by `threads` at once (0: all). 0: it has no such instruction, or a slow one
 * that is not used (Intel's dot products of bf16), or it was not measured: the device is a GPU.
 */
typedef struct linnet_peaks {
    double fp32; /* fused multiply-adds */
    double int8; /* dot products of 8-bit integers */
    double bf16; /* dot products of bf16 */
} linnet_peaks;

/* Takes some 0.1 s. */
LINNET_API void linnet_measure_peaks(const char *device, int32_t threads, linnet_peaks *peaks);

/* The one that bounds products with weights of a type ("Q4_1", as linnet_model_info names it): int8
 * for quantized ones, bf16 for BF16, else and where these are 0 fp32.
 * *arithmetic, if not NULL: "int8", "bf16" or "fp32". */
LINNET_API double linnet_peak_of(const linnet_peaks *peaks, const char *dtype,
                                 const char **arithmetic);

/* One operation of a step, all layers together; or the whole step ("step"), after its operations.
 */
typedef struct linnet_operation_row {
    const char
        *what; /* "prefill": a prompt of one sequence; "decode": one token of each sequence */
    int32_t batch, prompt; /* sequences, and tokens before the step (prefill: in it) of each */
    const char *operation; /* "embed", "qkv", "attention", "o_proj", "gate_up", "down", "head" */
    double seconds;
    double step_share;    /* of the step's seconds */
    double bytes;         /* that must be read: weights, keys and values */
    double flops;         /* a multiply-add is two */
    double least_seconds; /* that flops take at the peaks */
} linnet_operation_row;
typedef void (*linnet_operation_fn)(void *user, const linnet_operation_row *row);

typedef struct linnet_operations_options {
    const int32_t *prompts, *batches;
    size_t n_prompts, n_batches;
    int32_t repeat;       /* steps of each kind; the rows are those of the median one */
    int32_t decode_steps; /* likewise, of decoding */
} linnet_operations_options;

/*
 * Times each operation of a step that prefills each prompt and of one that decodes each batch after
 * it, on the CPU; a prompt longer than max_num_batched_tokens (default 512) takes several steps,
 * counted as one. LINNET_UNSUPPORTED on a GPU, which starts operations without waiting for them.
 */
LINNET_API linnet_status linnet_operations(linnet_model *model,
                                           const linnet_engine_options *options,
                                           const linnet_operations_options *what,
                                           const linnet_peaks *peaks, linnet_operation_fn on_row,
                                           void *user, linnet_error *err);

#ifdef __cplusplus
}
#endif
#endif
