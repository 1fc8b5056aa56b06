/* option_rules.c - what single options cannot say: which go together. */
#include <inttypes.h>
#include <string.h>

#include "cli/options.h"

static bool is_given(const struct options *o, enum option_id id)
{
    return o->given[id];
}

/* Two of which one would be ignored. */
static const struct {
    enum option_id a, b;
    const char *reason;
} exclusive[] = {
    {OPTION_PROMPT_IDS, OPTION_SYSTEM, "token ids are the whole prompt"},
    {OPTION_PROMPT_IDS, OPTION_RAW, "token ids take no chat template"},
    {OPTION_PROMPT_IDS, OPTION_FILE, "which one is the prompt?"},
    {OPTION_RAW, OPTION_SYSTEM, "a raw prompt has no system message"},
    {OPTION_MODEL, OPTION_RANDOM, "which one?"},
    {OPTION_MODEL, OPTION_TOKENIZER, "which one?"},
    {OPTION_DECODE, OPTION_CHAT, "which one?"},
    {OPTION_DECODE, OPTION_SPECIAL, "ids say by themselves which tokens they are"},
    {OPTION_UNIX_SOCKET, OPTION_HOST, "which one?"},
    {OPTION_UNIX_SOCKET, OPTION_PORT, "a socket file has no port"},
    {OPTION_CHAT, OPTION_SPECIAL, "the template says which text is control tokens"},
};

/* One that means nothing without the other. */
static const struct {
    enum option_id a, b;
    const char *reason;
} needed[] = {
    {OPTION_DTYPE, OPTION_RANDOM, "a model has types of its own"},
    {OPTION_LOGPROBS, OPTION_JSON, "JSON shows them"},
    {OPTION_TLS_CERTIFICATE, OPTION_TLS_KEY, "TLS takes both"},
    {OPTION_TLS_KEY, OPTION_TLS_CERTIFICATE, "TLS takes both"},
};

static linnet_status check_pairs(const struct options *o, linnet_error *err)
{
    for (size_t i = 0; i < sizeof exclusive / sizeof *exclusive; i++)
        if (is_given(o, exclusive[i].a) && is_given(o, exclusive[i].b))
            return error_set(err, LINNET_INVALID, "--%s and --%s: %s",
                             option_table[exclusive[i].a].name, option_table[exclusive[i].b].name,
                             exclusive[i].reason);
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        if (is_given(o, needed[i].a) && !is_given(o, needed[i].b))
            return error_set(err, LINNET_INVALID, "--%s needs --%s: %s",
                             option_table[needed[i].a].name, option_table[needed[i].b].name,
                             needed[i].reason);
    return LINNET_OK;
}

static linnet_status check_numbers(const struct options *o, linnet_error *err)
{
    if (is_given(o, OPTION_MAX_TOKENS) && o->min_tokens > o->max_tokens)
        return error_set(err, LINNET_INVALID,
                         "--min-tokens: expected at most --max-tokens (%" PRId64
                         "), found %" PRId64,
                         o->max_tokens, o->min_tokens);
    if (is_given(o, OPTION_MAX_NUM_BATCHED_TOKENS) && o->max_num_seqs > o->max_num_batched_tokens)
        return error_set(err, LINNET_INVALID,
                         "--max-num-seqs: expected at most --max-num-batched-tokens (%" PRId64
                         "), found %" PRId64 ": each sequence needs a token in the step",
                         o->max_num_batched_tokens, o->max_num_seqs);
    for (size_t i = 0; i < o->batch.n && is_given(o, OPTION_MAX_NUM_SEQS); i++)
        if (o->batch.items[i] > o->max_num_seqs)
            return error_set(err, LINNET_INVALID,
                             "--batch: expected at most --max-num-seqs (%" PRId64
                             "), found %" PRId64,
                             o->max_num_seqs, o->batch.items[i]);
    return LINNET_OK;
}

/* A ladder has its own batch and is run once. */
static linnet_status check_ladder(const struct options *o, linnet_error *err)
{
    static const enum option_id ignored[] = {OPTION_BATCH, OPTION_REPEAT, OPTION_OPERATIONS};
    for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++)
        if (is_given(o, ignored[i]))
            return error_set(err, LINNET_INVALID, "bench ladder takes no --%s",
                             option_table[ignored[i]].name);
    if (o->no_prefix_caching)
        return error_set(err, LINNET_INVALID,
                         "bench ladder takes no --no-prefix-caching: it never reuses a prefix");
    if (is_given(o, OPTION_SEED) && !is_given(o, OPTION_RANDOM))
        return error_set(
            err, LINNET_INVALID,
            "bench ladder takes --seed for --random weights only: its prompt is fixed");
    if (o->prompt.n > 1)
        return error_set(err, LINNET_INVALID, "bench ladder takes one --prompt, found %zu",
                         o->prompt.n);
    if (o->generated < 1)
        return error_set(err, LINNET_INVALID, "bench ladder decodes: --generated 0 leaves nothing");
    return LINNET_OK;
}

/* The machine alone: no model, no prompt. */
static linnet_status check_limits(const struct options *o, linnet_error *err)
{
    static const enum option_id known[] = {OPTION_DEVICE, OPTION_THREADS, OPTION_JSON,
                                           OPTION_QUIET,  OPTION_VERBOSE, OPTION_HELP};
    for (int i = 0; i < OPTION_COUNT; i++) {
        bool of_use = false;
        for (size_t k = 0; k < sizeof known / sizeof *known; k++) of_use |= (int)known[k] == i;
        if (is_given(o, (enum option_id)i) && !of_use)
            return error_set(err, LINNET_INVALID,
                             "bench limits takes no --%s: it measures the machine alone",
                             option_table[i].name);
    }
    return LINNET_OK;
}

static linnet_status check_bench(const struct options *o, linnet_error *err)
{
    const char *what = o->arguments.n ? o->arguments.items[0] : "";
    if (strcmp(what, "ladder") == 0) return check_ladder(o, err);
    if (strcmp(what, "limits") == 0) return check_limits(o, err);
    if (o->arguments.n)
        return error_set(err, LINNET_INVALID, "unknown bench '%s': did you mean 'l%s'?", what,
                         strchr(what, 'm') ? "imits" : "adder");
    if (o->operations && is_given(o, OPTION_SEED) && !is_given(o, OPTION_RANDOM))
        return error_set(
            err, LINNET_INVALID,
            "--operations takes --seed for --random weights only: its prompts are fixed");
    return LINNET_OK;
}

linnet_status options_check(const struct options *o, linnet_error *err)
{
    bool arguments = o->arguments.n > 0;
    linnet_status status = check_pairs(o, err);
    if (!status) status = check_numbers(o, err);
    if (status) return status;
    if (o->command == COMMAND_BENCH) return check_bench(o, err);
    bool positional = o->command == COMMAND_INSPECT || o->command == COMMAND_CHECK ||
                      o->command == COMMAND_SERVE || o->command == COMMAND_PACK;
    if (positional && arguments && o->model)
        return error_set(err, LINNET_INVALID, "a model as argument and --model: which one?");
    if (o->command == COMMAND_RUN && arguments && is_given(o, OPTION_PROMPT_IDS))
        return error_set(err, LINNET_INVALID, "--prompt-ids is the prompt: leave the text out");
    if (arguments && o->file)
        return error_set(err, LINNET_INVALID, "a text as argument and --file: which one?");
    return LINNET_OK;
}
