/*
 * account.c - the memory of all requests and replies in one account. What each holds: a body until
 * it is read; prompts and the answers to them as they grow; a reply while it is made and until it
 * is sent.
 */
#include "serve/server_internal.h"

/* About what these take while a reply is made: as JSON values and as text. */
enum { CHOICE_BYTES = 1024, ID_BYTES = 48, LOGPROB_BYTES = 1024, TEXT_TIMES = 4 };

/* Who has a part of what there is: those with a share for a request that is read, or its reply.
 * Bodies under way are nobody's part. */
static void share_changed(struct exchange *x, const atomic_size_t *share, size_t before, size_t now)
{
    struct server *s = x->server;
    if (share == &x->body_held) atomic_fetch_add(&s->body_bytes, now - before); /* wraps round */
    if (share != &x->reply_held) return;
    if (!before && now) atomic_fetch_add(&s->n_sharing, 1);
    if (before && !now) atomic_fetch_sub(&s->n_sharing, 1);
}

bool account_take(struct exchange *x, atomic_size_t *share, size_t n)
{
    struct server *s = x->server;
    size_t most = (size_t)s->options.max_memory, held = atomic_load(&s->held_bytes);
    do
        if (held > most || n > most - held) return false;
    while (!atomic_compare_exchange_weak(&s->held_bytes, &held, held + n));
    size_t before = atomic_fetch_add(share, n);
    share_changed(x, share, before, before + n);
    return true;
}

void account_add(struct exchange *x, atomic_size_t *share, size_t n)
{
    size_t before = atomic_fetch_add(share, n);
    share_changed(x, share, before, before + n);
    atomic_fetch_add(&x->server->held_bytes, n);
}

void account_set(struct exchange *x, atomic_size_t *share, size_t n)
{
    size_t before = atomic_exchange(share, n);
    share_changed(x, share, before, n);
    if (n >= before)
        atomic_fetch_add(&x->server->held_bytes, n - before);
    else
        atomic_fetch_sub(&x->server->held_bytes, before - n);
}

static size_t share_of(struct exchange *x)
{
    return atomic_load(&x->reply_held) + atomic_load(&x->out_held);
}

size_t account_part(struct server *s)
{
    size_t most = (size_t)s->options.max_memory, bodies = atomic_load(&s->body_bytes),
           n = (size_t)atomic_load(&s->n_sharing);
    if (bodies > most / 2) bodies = most / 2;
    return (most - bodies) / (n ? n : 1);
}

bool account_is_greedy(struct exchange *x)
{
    struct server *s = x->server;
    return atomic_load(&s->held_bytes) > (size_t)s->options.max_memory &&
           share_of(x) > account_part(s);
}

bool account_is_too_large(struct exchange *x)
{
    return share_of(x) > (size_t)x->server->options.max_memory / 4 * 3;
}

bool account_holds_up(struct exchange *x)
{
    struct server *s = x->server;
    return atomic_load(&s->held_bytes) > (size_t)s->options.max_memory / 2 &&
           share_of(x) + atomic_load(&x->body_held) > account_part(s) / 2;
}

size_t account_request(const struct exchange *x)
{
    const struct openai_request *r = &x->request;
    size_t n = x->n_answers * sizeof *x->answers + r->rendered_size;
    for (size_t i = 0; i < r->n_prompts; i++)
        n += r->prompts[i].n * sizeof *r->prompts[i].ids + r->prompts[i].text_size;
    return n;
}

size_t account_event(const struct exchange *x, const linnet_event *e)
{
    const struct openai_request *r = &x->request;
    size_t tokens = e->type == LINNET_EVENT_TOKEN;
    size_t n = tokens * (sizeof(struct openai_token) + sizeof(struct openai_delta)) +
               2 * e->text_size + e->n_top * sizeof *e->top;
    if (r->stream) return n;
    n += TEXT_TIMES * e->text_size; /* and of the reply, as account_reply */
    if (r->return_token_ids) n += ID_BYTES * tokens;
    if (r->request.want_logprobs) n += LOGPROB_BYTES * (tokens + e->n_top);
    return n;
}

size_t account_reply(const struct exchange *x)
{
    const struct openai_request *r = &x->request;
    size_t n = 0;
    for (size_t i = 0; i < x->n_answers; i++) {
        const struct openai_answer *a = &x->answers[i];
        const struct openai_prompt *prompt = &r->prompts[i / (size_t)r->request.n];
        n += CHOICE_BYTES + TEXT_TIMES * (a->text.size + prompt->text_size);
        if (r->return_token_ids) n += ID_BYTES * (a->n_tokens + prompt->n);
        if (a->has_logprobs) n += LOGPROB_BYTES * (a->n_tokens + a->n_top);
    }
    return n + account_debug(x);
}

size_t account_debug(const struct exchange *x)
{
    const struct openai_request *r = &x->request;
    size_t n = TEXT_TIMES * r->rendered_size;
    for (size_t i = 0; i < r->n_prompts; i++) n += 2 * ID_BYTES * r->prompts[i].n;
    return r->debug ? n : 0;
}

const char *account_reason(const struct exchange *x)
{
    const struct openai_request *r = &x->request;
    size_t echo = 0, ids = 0, n = (size_t)r->request.n;
    for (size_t i = 0; i < r->n_prompts; i++) {
        echo += n * TEXT_TIMES * r->prompts[i].text_size;
        if (r->return_token_ids) ids += n * ID_BYTES * r->prompts[i].n;
    }
    const struct {
        const char *field;
        size_t bytes;
    } reasons[] = {{"n", x->n_answers * (CHOICE_BYTES + sizeof *x->answers)},
                   {"echo", echo},
                   {"return_token_ids", ids},
                   {"debug", account_debug(x)}};
    size_t most = 0;
    for (size_t i = 1; i < sizeof reasons / sizeof *reasons; i++)
        if (reasons[i].bytes > reasons[most].bytes) most = i;
    return reasons[most].field;
}
