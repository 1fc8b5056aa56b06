/* api.c - an engine over a real model: the decoder behind the runner's seam. */
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/memory.h"
#include "base/threads.h"
#include "engine/api_internal.h"
#include "model/decoder.h"

const char *linnet_finish_name(linnet_finish finish)
{
    switch (finish) {
    case LINNET_FINISH_NONE: return "none";
    case LINNET_FINISH_STOP: return "stop";
    case LINNET_FINISH_LENGTH: return "length";
    case LINNET_FINISH_CANCELLED: return "cancelled";
    case LINNET_FINISH_ERROR: return "error";
    }
    return "unknown";
}

/* The decoder with the threads that it computes on. */
struct compute {
    struct pool *pool;
    struct decoder *decoder;
};

static linnet_status compute_step(void *self, const struct step *s, linnet_error *err)
{
    struct compute *c = self;
    return decoder_step(c->decoder, s, err);
}

static const float *compute_logits(void *self, int32_t i)
{
    const struct compute *c = self;
    return decoder_logits(c->decoder, i);
}

static linnet_status compute_submit(void *self, const struct step *s,
                                    const struct choice_rule *rules, linnet_error *err)
{
    struct compute *c = self;
    return decoder_submit(c->decoder, s, rules, err);
}

static linnet_status compute_collect(void *self, const struct chosen **out, linnet_error *err)
{
    struct compute *c = self;
    return decoder_collect(c->decoder, out, err);
}

static void compute_close(void *self)
{
    struct compute *c = self;
    decoder_destroy(c->decoder);
    pool_destroy(c->pool);
    free(c);
}

static linnet_status compute_open(const linnet_model *m, const struct device *device,
                                  const linnet_plan *plan, const linnet_engine_options *o,
                                  struct compute **out, linnet_error *err)
{
    struct compute *c = mem_new(1, sizeof *c);
    if (!c) return error_memory(err, "the engine", sizeof *c);
    struct limits limits = plan_limits(plan, o);
    linnet_status status = pool_create(plan->threads, &c->pool, err);
    if (!status)
        status = decoder_create(m->checkpoint, &m->config, device->ops, c->pool, &limits,
                                o->progress, o->progress_user, &c->decoder, err);
    if (status) {
        compute_close(c);
        return status;
    }
    *out = c;
    return LINNET_OK;
}

static struct engine_config engine_settings(const linnet_model *m, const linnet_engine_options *o,
                                            const linnet_plan *plan)
{
    const struct rope_config *rope = &m->config.rope;
    struct engine_config config = {
        .tokenizer = m->tokenizer,
        .n_vocab = m->config.shape.vocab,
        .n_eos = m->config.n_eos,
        .limits = plan_limits(plan, o),
        .prefix_caching = !o->no_prefix_caching,
        .dynamic_rope_context = rope->kind == ROPE_DYNAMIC ? rope->original_context : 0,
    };
    memcpy(config.eos, m->config.eos, sizeof config.eos);
    return config;
}

linnet_status linnet_engine_create(linnet_model *m, const linnet_engine_options *options,
                                   linnet_engine **out, linnet_error *err)
{
    static const linnet_engine_options defaults = {0};
    const linnet_engine_options *o = options ? options : &defaults;
    linnet_plan plan;
    struct device device;
    struct compute *compute = NULL;
    if (!m->checkpoint)
        return error_set(err, LINNET_INVALID, "%s is a tokenizer without a model", m->path);
    linnet_status status = find_device(o->device, &device, err);
    if (!status) status = plan_on(m, o, &device, &plan, err);
    if (status) return status;
    struct engine_config config = engine_settings(m, o, &plan);
    if (getrandom(&config.hash_seed, sizeof config.hash_seed, 0) != sizeof config.hash_seed)
        return error_set(err, LINNET_IO, "the system gives no random numbers");
    status = compute_open(m, &device, &plan, o, &compute, err);
    if (status) return status;
    config.runner = (struct runner){
        .self = compute, .step = compute_step, .logits = compute_logits, .close = compute_close};
    if (decoder_can_choose(compute->decoder)) {
        config.runner.submit = compute_submit;
        config.runner.collect = compute_collect;
        config.runner.max_adjustments = device.ops->max_adjustments;
    }
    linnet_engine *e;
    status = engine_open(&config, &e, err);
    if (status) return status;
    e->plan = plan;
    e->plan.packed = compute->decoder->packed != NULL;
    if (compute->decoder->unpacked.status)
        e->plan.packed_reason = compute->decoder->unpacked.message;
    status = engine_start_thread(e, err);
    if (status) {
        linnet_engine_destroy(e);
        return status;
    }
    *out = e;
    return LINNET_OK;
}

void linnet_engine_get_plan(const linnet_engine *e, linnet_plan *plan)
{
    *plan = e->plan;
}
