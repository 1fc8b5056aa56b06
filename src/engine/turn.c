/*
 * turn.c - one turn of the loop.
 *
 * Where the host chooses tokens, a turn runs a step and tells what came of it. Where the device
 * does, the host never stands between two steps: a turn begins step k + 1 while step k is under
 * way, naming the tokens that k is still choosing by their rows, and only then waits for k and
 * tells its tokens. What step k + 1 computes for an answer that turns out to have ended with k is
 * thrown away; the end by length is known beforehand. Plans that cannot be made without the
 * tokens (see scheduler.h) wait for them.
 */
#include <string.h>

#include "base/clock.h"
#include "engine/engine_internal.h"

/* ---- the step's arrays ------------------------------------------------------------------- */

static void add_tokens(linnet_engine *e, const struct planned *p)
{
    const struct sequence *q = p->sequence;
    const struct choice *c = q->owner;
    struct step_arrays *a = &e->arrays;
    struct step *s = &e->step;
    for (int32_t position = p->begin; position < p->begin + p->count; position++) {
        int32_t i = s->n_tokens++;
        a->token_ids[i] = position < q->n_known ? q->tokens[position] : -1 - c->row;
        a->positions[i] = position;
        a->slot_mapping[i] =
            q->blocks[position / BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS;
        if (s->rope_lens) a->rope_lens[i] = position < q->n_prompt ? q->n_prompt : position + 1;
    }
}

static void build_step(linnet_engine *e, const struct planned *items, int32_t n)
{
    struct step_arrays *a = &e->arrays;
    struct step *s = &e->step;
    s->n_tokens = s->n_logits = 0;
    s->n_seqs = n;
    for (int32_t i = 0; i < n; i++) {
        const struct sequence *q = items[i].sequence;
        a->query_start[i] = s->n_tokens;
        add_tokens(e, &items[i]);
        a->context_lens[i] = items[i].begin + items[i].count;
        memcpy(a->block_tables + (size_t)i * (size_t)s->max_blocks, q->blocks,
               (size_t)q->n_blocks * sizeof *q->blocks);
        if (!items[i].chooses) continue;
        struct choice *c = q->owner;
        c->row = s->n_logits;
        a->logit_rows[s->n_logits++] = s->n_tokens - 1;
    }
    a->query_start[n] = s->n_tokens;
}

/* ---- how tokens are chosen --------------------------------------------------------------- */

/* For the token after the first n. */
static struct sample_context context_of(const linnet_engine *e, const struct choice *c, int32_t n)
{
    const struct request *r = c->request;
    const struct tokenizer *t = e->config.tokenizer;
    int32_t n_output = n - c->sequence.n_prompt;
    int32_t n_allowed = t ? tokenizer_size(t) : e->config.n_vocab;
    return (struct sample_context){
        .tokens = c->sequence.tokens,
        .n_prompt = c->sequence.n_prompt,
        .n_output = n_output,
        .banned = r->ends,
        .n_banned = n_output < r->min_tokens ? r->n_ends : 0,
        .n_allowed = n_allowed < e->config.n_vocab ? n_allowed : e->config.n_vocab,
        .stream = (uint64_t)c->index,
    };
}

/* How the device is to choose. False: the host does, because log-probabilities are its affair, or
 * the adjustments are more than the device takes (request.c: no such step is planned ahead). */
static bool build_rules(linnet_engine *e, const struct planned *items, int32_t n)
{
    int64_t n_adjustments = 0;
    if (!e->config.runner.submit) return false;
    for (int32_t i = 0; i < n; i++) {
        const struct choice *c = items[i].sequence->owner;
        if (!items[i].chooses) continue;
        if (c->request->n_logprobs >= 0) return false;
        struct sample_context context = context_of(e, c, items[i].begin + items[i].count);
        struct choice_rule *rule = &e->rules[c->row];
        sampler_rule(e->sampler, &c->request->sampling, &context, c->adjustments, rule);
        n_adjustments += rule->n_adjustments;
    }
    return n_adjustments <= e->config.runner.max_adjustments;
}

/* ---- what came of it --------------------------------------------------------------------- */

static void report_prompt(struct choice *c, int32_t computed)
{
    const struct sequence *q = &c->sequence;
    int32_t done = computed < q->n_prompt ? computed : q->n_prompt;
    if (done <= c->prompt_done) return; /* decoding, or computed again after a preemption */
    c->prompt_done = done;
    linnet_event event = {.type = LINNET_EVENT_PROMPT, .text = ""};
    engine_emit(c, &event);
}

static bool is_end(const struct request *r, int32_t id)
{
    for (int32_t i = 0; i < r->n_ends; i++)
        if (r->ends[i] == id) return true;
    return false;
}

/* Appends a chosen token and tells it. End tokens, then stop strings, then the length end it. */
static void accept_token(linnet_engine *e, struct choice *c, const struct sample *sample)
{
    struct request *r = c->request;
    struct sequence *q = &c->sequence;
    scheduler_append(e->scheduler, q, sample->id);
    e->stats.generated_tokens++;
    if (!c->first_token) c->first_token = clock_seconds();

    linnet_event event = {.type = LINNET_EVENT_TOKEN, .text = "", .token = sample->id};
    linnet_logprob top[SAMPLER_MAX_LOGPROBS];
    if (r->n_logprobs >= 0) {
        for (int32_t i = 0; i < sample->n_top; i++)
            top[i] = (linnet_logprob){sample->top[i].id, sample->top[i].logprob};
        event.has_logprobs = true;
        event.logprob = sample->logprob;
        event.top = top;
        event.n_top = (size_t)sample->n_top;
    }
    bool end = is_end(r, sample->id);
    if (c->detokenizer && (!end || r->include_stop))
        c->stopped = detokenizer_push(c->detokenizer, sample->id, &event.text, &event.text_size);
    engine_emit(c, &event);
    if (end || c->stopped)
        engine_finish(e, c, LINNET_FINISH_STOP, NULL);
    else if (q->n_known - q->n_prompt == r->max_tokens)
        engine_finish(e, c, LINNET_FINISH_LENGTH, NULL);
}

/* From a row of logits (the host chooses) or from what the device chose. */
static void take_token(linnet_engine *e, struct choice *c, const float *logits,
                       const struct chosen *chosen)
{
    const struct request *r = c->request;
    struct sample sample;
    linnet_error error = {0};
    if (logits) {
        struct sample_context context = context_of(e, c, c->sequence.n_known);
        sampler_choose(e->sampler, logits, &r->sampling, &context, r->n_logprobs, &sample, &error);
    } else if (chosen->status) {
        error_set(&error, chosen->status,
                  "the device finds no token to choose: a logit is NaN or infinite (compare the "
                  "model's file with its source), or all that are finite are banned, padding or "
                  "out of range after the penalties (relax the request's settings)");
    } else {
        sample.id = chosen->id;
    }
    if (error.status)
        engine_finish(e, c, LINNET_FINISH_ERROR, &error);
    else
        accept_token(e, c, &sample);
}

static struct pending_step pop_step(linnet_engine *e)
{
    struct pending_step step = e->pending[0];
    e->pending[0] = e->pending[1];
    e->n_pending--;
    for (int32_t i = 0; i < step.n_items; i++) {
        const struct choice *c = step.items[i].sequence->owner;
        c->request->n_pending--;
    }
    return step;
}

/* Tells the outcome of the oldest step. `chosen`: by the device; NULL: its logits are at hand. */
static void tell_outcome(linnet_engine *e, const struct chosen *chosen)
{
    const struct runner *runner = &e->config.runner;
    struct pending_step step = pop_step(e);
    e->stats.n_steps++;
    for (int32_t i = 0, row = 0; i < step.n_items; i++) {
        const struct planned *p = &step.items[i];
        struct choice *c = p->sequence->owner;
        int32_t its_row = row;
        row += p->chooses;
        if (p->sequence->state == SEQUENCE_FINISHED) continue; /* since the step was begun */
        report_prompt(c, p->begin + p->count);
        if (!p->chooses) continue;
        if (chosen)
            take_token(e, c, NULL, &chosen[its_row]);
        else
            take_token(e, c, runner->logits(runner->self, its_row), NULL);
    }
    double now = clock_seconds();
    e->stats.step_seconds += now - (step.begun > e->last_outcome ? step.begun : e->last_outcome);
    e->last_outcome = now;
}

/* ---- the turn ---------------------------------------------------------------------------- */

/* Notes a first admission before the step, so that the wait ends where the work begins. */
static void note_started(linnet_engine *e, struct choice *c, double now)
{
    if (c->started) return;
    c->started = now;
    e->stats.prompt_tokens += c->sequence.n_prompt;
    e->stats.cached_tokens += c->sequence.n_cached;
}

static linnet_status begin_step(linnet_engine *e, const struct planned *items, int32_t n,
                                linnet_error *err)
{
    const struct runner *runner = &e->config.runner;
    double now = clock_seconds();
    for (int32_t i = 0; i < n; i++) note_started(e, items[i].sequence->owner, now);
    build_step(e, items, n);
    bool device = build_rules(e, items, n);
    linnet_status status = device ? runner->submit(runner->self, &e->step, e->rules, err)
                                  : runner->step(runner->self, &e->step, err);
    if (status) return status;
    scheduler_commit(e->scheduler);
    e->pending[e->n_pending++] = (struct pending_step){items, n, now};
    for (int32_t i = 0; i < n; i++) {
        const struct choice *c = items[i].sequence->owner;
        c->request->n_pending++;
    }
    if (!device) tell_outcome(e, NULL);
    return LINNET_OK;
}

static linnet_status collect_step(linnet_engine *e, linnet_error *err)
{
    const struct runner *runner = &e->config.runner;
    const struct chosen *chosen;
    linnet_status status = runner->collect(runner->self, &chosen, err);
    if (status)
        pop_step(e);
    else
        tell_outcome(e, chosen);
    return status;
}

void engine_drop_steps(linnet_engine *e)
{
    const struct runner *runner = &e->config.runner;
    const struct chosen *chosen;
    linnet_error err;
    for (; e->n_pending > 0; pop_step(e)) runner->collect(runner->self, &chosen, &err);
}

/* Begins a step, and leaves no more than that one under way. */
static linnet_status advance(linnet_engine *e, linnet_error *err)
{
    const struct planned *items;
    bool under_way = e->n_pending > 0;
    int32_t n = under_way ? scheduler_plan_ahead(e->scheduler, &items)
                          : scheduler_plan(e->scheduler, &items);
    if (n < 0) {
        linnet_status status = collect_step(e, err);
        if (status) return status;
        n = scheduler_plan(e->scheduler, &items);
    }
    if (n == 0 && !under_way && e->requests.first)
        return error_set(err, LINNET_INTERNAL, "the scheduler finds nothing to do");
    if (n > 0) {
        linnet_status status = begin_step(e, items, n, err);
        if (status) return status;
    }
    return e->n_pending > (n > 0) ? collect_step(e, err) : LINNET_OK;
}

bool engine_turn(linnet_engine *e)
{
    linnet_error err = {0};
    engine_receive(e);
    engine_reap(e);
    if (advance(e, &err)) {
        error_prefix(&err, "the engine has stopped");
        engine_close(e, LINNET_FINISH_ERROR, &err);
    }
    engine_reap(e);
    engine_publish(e);
    return e->requests.first != NULL;
}
