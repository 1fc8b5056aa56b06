/*
 * options.h - the command line. One table states every option; the parser, --help, the man page
 * and the shell completions are all made from it.
 */
#ifndef LINNET_CLI_OPTIONS_H
#define LINNET_CLI_OPTIONS_H

#include "base/error.h"

enum command {
    COMMAND_RUN,
    COMMAND_CHAT,
    COMMAND_BATCH,
    COMMAND_SERVE,
    COMMAND_BENCH,
    COMMAND_TOKENIZE,
    COMMAND_INSPECT,
    COMMAND_CHECK,
    COMMAND_PERPLEXITY,
    COMMAND_PACK,
    COMMAND_GENERATE, /* hidden: the build makes man page and completions with it */
    COMMAND_COUNT,
    COMMAND_NONE = COMMAND_COUNT
};

struct command_spec {
    const char *name, *arguments, *summary;
    int max_arguments;
    bool hidden;
};
extern const struct command_spec command_table[COMMAND_COUNT];

enum option_id {
    OPTION_MODEL,
    OPTION_TOKENIZER,
    OPTION_RANDOM,
    OPTION_DTYPE,
    OPTION_DEVICE,
    OPTION_THREADS,
    OPTION_MAX_MODEL_LEN,
    OPTION_MAX_NUM_SEQS,
    OPTION_MAX_NUM_BATCHED_TOKENS,
    OPTION_KV_CACHE_MEMORY,
    OPTION_KV_CACHE_DTYPE,
    OPTION_NUMA,
    OPTION_NO_PREFIX_CACHING,
    OPTION_ENFORCE_EAGER,
    OPTION_MAX_TOKENS,
    OPTION_MIN_TOKENS,
    OPTION_TEMPERATURE,
    OPTION_TOP_P,
    OPTION_TOP_K,
    OPTION_MIN_P,
    OPTION_REPETITION_PENALTY,
    OPTION_PRESENCE_PENALTY,
    OPTION_FREQUENCY_PENALTY,
    OPTION_SEED,
    OPTION_STOP,
    OPTION_IGNORE_EOS,
    OPTION_ANSWERS,
    OPTION_LOGPROBS,
    OPTION_SYSTEM,
    OPTION_RAW,
    OPTION_PROMPT_IDS,
    OPTION_FILE,
    OPTION_SPECIAL,
    OPTION_DECODE,
    OPTION_CHAT,
    OPTION_TENSORS,
    OPTION_ALL,
    OPTION_OUTPUT,
    OPTION_BATCH,
    OPTION_PROMPT,
    OPTION_GENERATED,
    OPTION_REPEAT,
    OPTION_OPERATIONS,
    OPTION_JSON,
    OPTION_DRY_RUN,
    OPTION_HOST,
    OPTION_PORT,
    OPTION_UNIX_SOCKET,
    OPTION_SERVED_MODEL_NAME,
    OPTION_API_KEY,
    OPTION_API_KEY_FILE,
    OPTION_CORS_ORIGIN,
    OPTION_TLS_CERTIFICATE,
    OPTION_TLS_KEY,
    OPTION_MAX_CONNECTIONS,
    OPTION_MAX_QUEUE_REQUESTS,
    OPTION_MAX_QUEUE_TOKENS,
    OPTION_MAX_BODY,
    OPTION_DRAIN_TIMEOUT,
    OPTION_LOG_FORMAT,
    OPTION_QUIET,
    OPTION_VERBOSE,
    OPTION_VERSION,
    OPTION_HELP,
    OPTION_COUNT
};

struct texts {
    const char **items;
    size_t n;
};

struct integers {
    int64_t *items;
    size_t n;
};

/* What was asked for. Strings belong to argv. */
struct options {
    enum command command;
    struct texts arguments; /* what stands after the command and is no option */
    bool given[OPTION_COUNT];

    const char *model, *tokenizer, *random, *dtype, *device, *kv_cache_dtype, *numa, *system, *file,
        *output, *host, *unix_socket, *api_key_file, *tls_certificate, *tls_key, *log_format;
    int64_t threads, max_model_len, max_num_seqs, max_num_batched_tokens, kv_cache_memory;
    int64_t max_tokens, min_tokens, top_k, seed, answers, logprobs, generated, repeat;
    int64_t port, max_connections, max_queue_requests, max_queue_tokens, max_body;
    double drain_timeout;
    double temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
    bool no_prefix_caching, enforce_eager, ignore_eos, raw, special, decode, chat, tensors, all,
        operations, json, dry_run, quiet, verbose, version, help;
    struct texts stop, served_model_name, api_key, cors_origin;
    struct integers prompt_ids, batch, prompt;
};

enum option_kind {
    OPTION_KIND_FLAG,     /* bool */
    OPTION_KIND_INTEGER,  /* int64_t */
    OPTION_KIND_NUMBER,   /* double */
    OPTION_KIND_SIZE,     /* int64_t bytes: "2G", "512MiB" */
    OPTION_KIND_TEXT,     /* const char * */
    OPTION_KIND_FILE,     /* const char *, completed as a path */
    OPTION_KIND_CHOICE,   /* const char *, one of `choices` */
    OPTION_KIND_TEXTS,    /* struct texts: may be given several times */
    OPTION_KIND_INTEGERS, /* struct integers: "1,2,4" */
};

enum option_group {
    GROUP_MODEL,
    GROUP_ENGINE,
    GROUP_SAMPLING,
    GROUP_INPUT,
    GROUP_SERVER,
    GROUP_GENERAL,
    GROUP_COUNT
};
extern const char *const group_titles[GROUP_COUNT];

struct option_spec {
    const char *name, *other; /* long spellings; `other` may be NULL */
    char letter;              /* or 0 */
    enum option_kind kind;
    enum option_group group;
    const char *argument; /* what help calls the value */
    const char *choices;  /* "a|b|c"; ":N" at the end of one stands for a colon and a number */
    double min, max;      /* of numbers, and of each in a list; of texts: how many */
    unsigned commands;    /* bit 1 << enum command */
    size_t offset;        /* in struct options */
    const char *help;
};
extern const struct option_spec option_table[OPTION_COUNT];

/*
 * Reads the command line. LINNET_INVALID, with the nearest right spelling where there is one, for
 * anything that is not understood. After any outcome options_free may be called.
 */
linnet_status options_parse(int argc, char **argv, struct options *options, linnet_error *err);
void options_free(struct options *options);

/* Which options go together, and which leave one another without a meaning; for once all are read.
 */
linnet_status options_check(const struct options *options, linnet_error *err);

/* Sets one option of `command` by its long name, as if it stood on the command line. Nothing
 * changes on failure. The text must live as long as the options do. */
linnet_status options_assign(struct options *options, const char *name, const char *text,
                             linnet_error *err);

/* Byte count of "1500", "2G", "512MiB" (both letters and "iB" forms are powers of 1024); false if
 * it is none. */
bool options_size(const char *text, int64_t *bytes);

/* Whole numbers with commas or blanks between, brackets around them allowed: "[1, 2, 3]". */
linnet_status options_integers(const char *text, const char *what, double min, double max,
                               struct integers *out, linnet_error *err);

#endif
