/* plan.c - what an engine will take, decided before anything is loaded. */
#include <stdio.h>
#include <string.h>

#include "base/limits.h"
#include "base/threads.h"
#include "engine/api_internal.h"
#include "model/decoder.h"

enum {
    MAX_BLOCKS = INT32_MAX / BLOCK_TOKENS, /* slots are 32-bit numbers */
    TOKENS_PER_SEQ = 1024                  /* for which a cache in the host's memory has room */
};

/* What suits a device, where nothing was asked for. */
struct habits {
    int32_t seqs, batched_tokens;
    /* a GPU's memory besides weights, cache and activations: the buffers of loading, what its
     * blocks of weights leave unused, recorded steps */
    int64_t scratch;
};

static struct habits device_habits(const struct device *device)
{
    return device->gpu ? (struct habits){256, 2048, 384 << 20} : (struct habits){64, 512, 0};
}

static int64_t minimum(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t maximum(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* ---- the machine ------------------------------------------------------------------------- */

/* "KEY   12345 kB" of a file of such lines, in units of the file; -1 if it is not there. */
static int64_t read_figure(const char *path, const char *key)
{
    char line[256];
    long long value = -1;
    size_t n = strlen(key);
    FILE *f = fopen(path, "r");
    while (f && value < 0 && fgets(line, sizeof line, f))
        if (strncmp(line, key, n) == 0 && sscanf(line + n, "%lld", &value) != 1) value = -1;
    if (f) fclose(f);
    return value;
}

int64_t available_memory(void)
{
    int64_t kilobytes = read_figure("/proc/meminfo", "MemAvailable:");
    int64_t available = kilobytes < 0 ? INT64_MAX : kilobytes * 1024;
    int64_t limit = read_figure("/sys/fs/cgroup/memory.max", "");
    int64_t used = read_figure("/sys/fs/cgroup/memory.current", "");
    int64_t cached = read_figure("/sys/fs/cgroup/memory.stat", "inactive_file ");
    if (limit < 0 || used < 0) return available; /* "max": no limit */
    int64_t left = limit - used + (cached > 0 ? cached : 0);
    return minimum(available, left > 0 ? left : 0);
}

/* ---- options ----------------------------------------------------------------------------- */

static linnet_status check_option(const char *name, int64_t value, int64_t high, linnet_error *err)
{
    if (value >= 0 && value <= high) return LINNET_OK;
    return error_set(err, LINNET_INVALID, "%s must be between 1 and %lld, not %lld", name,
                     (long long)high, (long long)value);
}

static linnet_status check_options(const linnet_engine_options *o, const struct model_config *c,
                                   linnet_error *err)
{
    linnet_status status = check_option("threads", o->threads, LIMIT_THREADS, err);
    if (!status) status = check_option("max_num_seqs", o->max_num_seqs, LIMIT_SEQS, err);
    if (!status)
        status = check_option("max_num_batched_tokens", o->max_num_batched_tokens,
                              LIMIT_BATCHED_TOKENS, err);
    if (!status) status = check_option("max_model_len", o->max_model_len, INT32_MAX, err);
    if (!status) status = check_option("kv_cache_memory", o->kv_cache_memory, INT64_MAX, err);
    if (status) return status;
    if (o->max_num_seqs && o->max_num_batched_tokens && o->max_num_seqs > o->max_num_batched_tokens)
        return error_set(err, LINNET_INVALID,
                         "max_num_seqs %d is more than max_num_batched_tokens %d: each sequence "
                         "needs a token in the step",
                         o->max_num_seqs, o->max_num_batched_tokens);
    if (o->max_model_len > c->context_length)
        return error_set(err, LINNET_TOO_LONG,
                         "max_model_len %d: the model was made for %d tokens; that is the largest",
                         o->max_model_len, c->context_length);
    if (o->max_model_len && o->max_model_len < LIMIT_LEAST_CONTEXT)
        return error_set(err, LINNET_INVALID,
                         "max_model_len %d leaves no token for an answer: the least is %d",
                         o->max_model_len, LIMIT_LEAST_CONTEXT);
    return LINNET_OK;
}

/* ---- the cache --------------------------------------------------------------------------- */

/* The cache's size is given: the context is what fits it. */
static linnet_status plan_given_cache(const linnet_engine_options *o, int32_t model_length,
                                      int64_t block, linnet_plan *plan, linnet_error *err)
{
    int64_t n_blocks = minimum(o->kv_cache_memory / block, MAX_BLOCKS);
    int64_t fits = minimum(n_blocks * BLOCK_TOKENS, model_length);
    int64_t length = o->max_model_len ? o->max_model_len : fits;
    if (length > fits || length < 2)
        return error_set(
            err, LINNET_TOO_LONG,
            "kv_cache_memory of %lld bytes holds %lld tokens and one sequence may have "
            "%lld: the largest max_model_len is %lld, or give at least %lld bytes",
            (long long)o->kv_cache_memory, (long long)(n_blocks * BLOCK_TOKENS),
            (long long)(length < 2 ? 2 : length), (long long)fits,
            (long long)(blocks_for((int32_t)(length < 2 ? 2 : length)) * block));
    plan->n_blocks = (int32_t)n_blocks;
    plan->max_model_len = (int32_t)length;
    return LINNET_OK;
}

/* The part of what is left that a cache takes unasked. The host's memory is shared with everything
 * else: a quarter. A GPU's is there for this: up to 85% of what was free, or half of what is left
 * if the weights are that large. */
static int64_t cache_share(const struct device *device, int64_t left)
{
    if (!device->gpu) return left / 4;
    return maximum(left - device->available / 100 * 15, left / 2);
}

/*
 * The cache's size is ours to choose: a context of the model's length if its share of the memory
 * holds it, else what that holds; and within the same share room for every sequence at its full
 * length, in the host's memory for TOKENS_PER_SEQ tokens of each. A length that was asked for may
 * take all that is left.
 */
static linnet_status plan_own_cache(const linnet_engine_options *o, const struct device *device,
                                    int32_t model_length, int64_t block, int64_t left,
                                    linnet_plan *plan, linnet_error *err)
{
    int64_t most = minimum(left / block, MAX_BLOCKS),
            share = minimum(cache_share(device, left) / block, MAX_BLOCKS);
    int64_t length = o->max_model_len;
    if (!length) length = minimum(model_length, share * BLOCK_TOKENS);
    if (length < 2 || blocks_for((int32_t)length) > most)
        return error_set(err, LINNET_MEMORY,
                         "a context of %lld tokens needs %lld bytes of cache and %lld are left "
                         "beside the weights: the largest max_model_len that fits is %lld",
                         (long long)length,
                         (long long)(blocks_for((int32_t)(length < 2 ? 2 : length)) * block),
                         (long long)left, (long long)minimum(model_length, most * BLOCK_TOKENS));
    int64_t each = device->gpu ? length : minimum(length, TOKENS_PER_SEQ);
    int64_t wanted = plan->max_num_seqs * (int64_t)blocks_for((int32_t)each);
    plan->n_blocks = (int32_t)maximum(minimum(wanted, share), blocks_for((int32_t)length));
    plan->max_model_len = (int32_t)length;
    return LINNET_OK;
}

enum kv_type plan_kv(const linnet_engine_options *o)
{
    const char *name = o->kv_cache_dtype;
    return name && strcmp(name, "int8") == 0 ? KV_INT8 : KV_OWN;
}

static linnet_status check_kv(const linnet_engine_options *o, const struct device *device,
                              linnet_error *err)
{
    if (plan_kv(o) == KV_OWN && o->kv_cache_dtype && strcmp(o->kv_cache_dtype, "auto") != 0)
        return error_set(err, LINNET_INVALID, "kv_cache_dtype \"%s\": use auto or int8",
                         o->kv_cache_dtype);
    if (plan_kv(o) == KV_INT8 && !device->ops->int8_kv)
        return error_set(err, LINNET_UNSUPPORTED,
                         "kv_cache_dtype int8: on %s keys and values are bf16; use auto, or "
                         "--device cpu",
                         device->text);
    return LINNET_OK;
}

bool plan_interleaves(const linnet_engine_options *o)
{
    return o->numa && strcmp(o->numa, "interleave") == 0;
}

static linnet_status check_numa(const linnet_engine_options *o, const struct device *device,
                                linnet_error *err)
{
    if (!o->numa || strcmp(o->numa, "none") == 0) return LINNET_OK;
    if (!plan_interleaves(o))
        return error_set(err, LINNET_INVALID, "numa \"%s\": use none or interleave", o->numa);
    if (device->gpu)
        return error_set(err, LINNET_UNSUPPORTED,
                         "numa interleave is about the CPU's memory: use --device cpu, or none");
    return LINNET_OK;
}

linnet_status plan_check_device(const linnet_engine_options *o, const struct device *device,
                                linnet_error *err)
{
    linnet_status status = check_kv(o, device, err);
    return status ? status : check_numa(o, device, err);
}

struct limits plan_limits(const linnet_plan *plan, const linnet_engine_options *o)
{
    return (struct limits){.max_tokens = plan->max_num_batched_tokens,
                           .max_logits = plan->max_num_seqs,
                           .max_seqs = plan->max_num_seqs,
                           .max_context = plan->max_model_len,
                           .n_blocks = plan->n_blocks,
                           .kv = plan_kv(o),
                           .launching = o->enforce_eager ? LAUNCH_EACH : LAUNCH_BEST,
                           .interleaved = plan_interleaves(o)};
}

static void plan_batch(const linnet_engine_options *o, const struct habits *habits,
                       linnet_plan *plan)
{
    int32_t seqs = o->max_num_seqs, tokens = o->max_num_batched_tokens;
    if (!seqs) seqs = tokens && tokens < habits->seqs ? tokens : habits->seqs;
    if (!tokens) tokens = seqs > habits->batched_tokens ? seqs : habits->batched_tokens;
    plan->max_num_seqs = seqs;
    plan->max_num_batched_tokens = tokens;
}

linnet_status plan_on(const linnet_model *m, const linnet_engine_options *o,
                      const struct device *device, linnet_plan *plan, linnet_error *err)
{
    const struct model_config *config = &m->config;
    linnet_status status = check_options(o, config, err);
    *plan = (linnet_plan){.block_tokens = BLOCK_TOKENS};
    if (!status)
        status = decoder_check_tensors(m->checkpoint, config, device->ops, &plan->weights, err);
    if (status) return status;
    status = plan_check_device(o, device, err);
    if (status) return status;
    enum kv_type kv = plan_kv(o);
    plan->kv_cache_dtype = kv == KV_INT8 ? "int8" : device->gpu ? "bf16" : "fp32";
    struct habits habits = device_habits(device);
    plan->device = device->text;
    plan->device_reason = device->reason;
    plan->threads = o->threads ? o->threads : pool_default_threads();
    plan->available = device->available;
    plan->scratch = habits.scratch;
    plan_batch(o, &habits, plan);
    struct limits limits = plan_limits(plan, o);
    limits.max_context = o->max_model_len ? o->max_model_len : config->context_length;
    plan->activations = device->ops->buffer_bytes(&config->shape, &limits, plan->threads) +
                        decoder_buffer_bytes(config, &limits) +
                        (int64_t)(step_numbers(&limits) * sizeof(int32_t));
    int64_t block = device->ops->cache_bytes(&config->shape, kv, 1);
    plan->kv_bytes_per_token = block / BLOCK_TOKENS;
    int64_t left = plan->available - plan->weights - plan->activations - plan->scratch;
    if (left < 0)
        return error_set(err, LINNET_MEMORY,
                         "the weights need %lld bytes and the activations %lld, and %lld are "
                         "available on %s: %s",
                         (long long)plan->weights, (long long)(plan->activations + plan->scratch),
                         (long long)plan->available, plan->device,
                         device->gpu ? "use a smaller model (quantized weights are kept as bf16 "
                                       "here), lower max_num_seqs and max_num_batched_tokens, end "
                                       "what else runs on it, or use --device cpu"
                                     : "use a smaller or more quantized model, or lower "
                                       "max_num_batched_tokens");
    status = o->kv_cache_memory
                 ? plan_given_cache(o, config->context_length, block, plan, err)
                 : plan_own_cache(o, device, config->context_length, block, left, plan, err);
    if (status) return status;
    plan->kv_cache = plan->n_blocks * block;
    plan->total = plan->weights + plan->kv_cache + plan->activations + plan->scratch;
    if (plan->kv_cache > left)
        return error_set(err, LINNET_MEMORY,
                         "kv_cache_memory of %lld bytes is more than the %lld that are left beside "
                         "the weights: the largest max_model_len that fits is %lld",
                         (long long)plan->kv_cache, (long long)left,
                         (long long)minimum(config->context_length, left / block * BLOCK_TOKENS));
    return LINNET_OK;
}

linnet_status linnet_engine_plan(const linnet_model *m, const linnet_engine_options *options,
                                 linnet_plan *plan, linnet_error *err)
{
    static const linnet_engine_options defaults = {0};
    const linnet_engine_options *o = options ? options : &defaults;
    struct device device;
    if (!m->checkpoint)
        return error_set(err, LINNET_INVALID, "%s is a tokenizer without a model", m->path);
    linnet_status status = find_device(o->device, &device, err);
    return status ? status : plan_on(m, o, &device, plan, err);
}
