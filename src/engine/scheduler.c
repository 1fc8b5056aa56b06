#include "engine/scheduler.h"

#include <stdlib.h>

#include "base/memory.h"

enum { COARSE_EDGE = 64 }; /* tokens */

struct list {
    struct sequence *first, *last;
    int32_t count;
};

struct scheduler {
    struct block_manager *blocks;
    int32_t max_num_seqs, max_num_batched_tokens;
    /* Both by priority; of one priority: */
    struct list waiting; /* first come, first served; preempted ones at the front */
    struct list running; /* in order of admission */
    int64_t n_preemptions;

    /* The step being planned. */
    struct planned *items; /* [max_num_seqs], in one half of `memory` */
    int32_t n_items;
    int32_t budget;         /* tokens left */
    int32_t reserved;       /* of which for decoding sequences that the walk has not reached */
    struct planned *memory; /* [2, max_num_seqs] */
};

static void list_unlink(struct list *list, struct sequence *q)
{
    *(q->previous ? &q->previous->next : &list->first) = q->next;
    *(q->next ? &q->next->previous : &list->last) = q->previous;
    q->previous = q->next = NULL;
    list->count--;
}

/* before: NULL puts q at the front. */
static void list_insert_after(struct list *list, struct sequence *before, struct sequence *q)
{
    q->previous = before;
    q->next = before ? before->next : list->first;
    *(before ? &before->next : &list->first) = q;
    *(q->next ? &q->next->previous : &list->last) = q;
    list->count++;
}

/* The last of its priority. */
static void list_push_back(struct list *list, struct sequence *q)
{
    struct sequence *before = list->last;
    while (before && before->priority > q->priority) before = before->previous;
    list_insert_after(list, before, q);
}

/* The first of its priority. */
static void list_push_front(struct list *list, struct sequence *q)
{
    struct sequence *before = NULL, *after = list->first;
    while (after && after->priority < q->priority) before = after, after = after->next;
    list_insert_after(list, before, q);
}

static bool is_running(const struct sequence *q)
{
    return q->state == SEQUENCE_PREFILLING || q->state == SEQUENCE_DECODING;
}

/* Known or not yet. */
static int32_t length(const struct sequence *q)
{
    return q->n_known + q->n_coming;
}

/* One token to compute. A sequence whose last one is coming only waits for it. */
static bool decodes(const struct sequence *q)
{
    return q->state == SEQUENCE_DECODING && length(q) < q->n_max;
}

/* From last to first, so that of a cached sequence the tail is the first to be overwritten. */
static void release_blocks(struct scheduler *s, struct sequence *q)
{
    while (q->n_blocks > 0) block_release(s->blocks, q->blocks[--q->n_blocks]);
    q->n_computed = q->n_registered = 0;
}

static void preempt(struct scheduler *s, struct sequence *q)
{
    if (q->state == SEQUENCE_DECODING) s->reserved--;
    list_unlink(&s->running, q);
    release_blocks(s, q);
    q->state = SEQUENCE_WAITING;
    q->n_preemptions++;
    s->n_preemptions++;
    list_push_front(&s->waiting, q);
}

static void plan_tokens(struct scheduler *s, struct sequence *q, int32_t count)
{
    bool chooses = q->n_computed + count == length(q);
    s->items[s->n_items++] = (struct planned){q, q->n_computed, count, chooses};
    s->budget -= count;
}

/*
 * How much of a prompt the step takes. A chunk that does not reach the end stops at an absolute
 * multiple, as coarse as the room allows, so that edges do not follow the load.
 */
static int32_t chunk_size(const struct sequence *q, int32_t room)
{
    int32_t begin = q->n_computed;
    if (q->n_known - begin <= room) return q->n_known - begin;
    int32_t edge = room >= COARSE_EDGE ? COARSE_EDGE : room >= BLOCK_TOKENS ? BLOCK_TOKENS : 1;
    return (begin + room) / edge * edge - begin;
}

/* A block for the newest token, at the expense of sequences that come later. False: q itself had to
 * go. */
static bool grow(struct scheduler *s, struct sequence *q)
{
    while (q->n_blocks < blocks_for(length(q))) {
        int32_t block = block_take(s->blocks);
        if (block >= 0) {
            q->blocks[q->n_blocks++] = block;
            continue;
        }
        struct sequence *victim = s->running.last;
        preempt(s, victim);
        if (victim == q) return false;
    }
    return true;
}

static void plan_running(struct scheduler *s)
{
    for (struct sequence *q = s->running.first, *next; q && s->budget > 0; q = next) {
        if (decodes(q)) {
            if (!grow(s, q)) return;
            s->reserved--;
            plan_tokens(s, q, 1);
        } else if (q->state == SEQUENCE_PREFILLING && s->budget > s->reserved) {
            plan_tokens(s, q, chunk_size(q, s->budget - s->reserved));
        }
        next = q->next; /* only now: growing may have preempted the next one */
    }
}

/*
 * The prompt's full blocks from a sibling that has computed them: enters them in q's block table if
 * they are more than the `hits` already there, and returns how many q now has. -1: a sibling is
 * still computing them, so that q had better wait.
 */
static int32_t match_siblings(struct sequence *q, int32_t hits)
{
    int32_t shared = (q->n_prompt - 1) / BLOCK_TOKENS;
    if (hits >= shared) return hits;
    bool coming = false;
    for (const struct sequence *t = q->next_sibling; t != q; t = t->next_sibling) {
        if (!is_running(t)) continue;
        coming = true;
        if (t->n_computed < shared * BLOCK_TOKENS) continue;
        for (int32_t i = hits; i < shared; i++) q->blocks[i] = t->blocks[i];
        return shared;
    }
    return coming ? -1 : hits;
}

/*
 * Moves the head of the queue to running, and into the step, if all that is known of it fits and
 * leaves each running sequence a block to grow. Blocks that were found are held before any is
 * taken: they may be the very ones that block_take would hand out.
 */
static bool admit(struct scheduler *s, struct sequence *q)
{
    int32_t hits = block_match(s->blocks, q->tokens, q->n_known, q->key, q->blocks);
    hits = match_siblings(q, hits);
    if (hits < 0) return false;
    int32_t need = blocks_for(q->n_known), left = block_free_count(s->blocks);
    for (int32_t i = 0; i < hits; i++) left -= block_count(s->blocks, q->blocks[i]) == 0;
    if (need - hits > left - s->running.count) return false;

    for (int32_t i = 0; i < hits; i++) block_hold(s->blocks, q->blocks[i]);
    for (int32_t i = hits; i < need; i++) q->blocks[i] = block_take(s->blocks);
    q->n_blocks = need;
    q->n_registered = hits;
    q->n_computed = hits * BLOCK_TOKENS;
    if (!q->admitted) q->n_cached = q->n_computed;
    q->admitted = true;
    q->state = SEQUENCE_PREFILLING;
    list_unlink(&s->waiting, q);
    list_push_back(&s->running, q);
    plan_tokens(s, q, chunk_size(q, s->budget));
    return true;
}

static int32_t plan(struct scheduler *s, bool ahead, const struct planned **items)
{
    int64_t preemptions = s->n_preemptions;
    s->items = s->items == s->memory ? s->memory + s->max_num_seqs : s->memory;
    s->n_items = 0;
    s->budget = s->max_num_batched_tokens;
    s->reserved = 0;
    for (const struct sequence *q = s->running.first; q; q = q->next) s->reserved += decodes(q);
    plan_running(s);
    bool more = s->n_preemptions == preemptions;
    while (more && s->budget > 0 && s->waiting.first &&
           !(ahead && s->waiting.first->needs_tokens) && s->running.count < s->max_num_seqs)
        more = admit(s, s->waiting.first);
    *items = s->items;
    return s->n_items;
}

int32_t scheduler_plan(struct scheduler *s, const struct planned **items)
{
    return plan(s, false, items);
}

int32_t scheduler_plan_ahead(struct scheduler *s, const struct planned **items)
{
    int32_t need = 0; /* blocks */
    if (s->waiting.first && s->waiting.first->needs_tokens) return -1;
    for (const struct sequence *q = s->running.first; q; q = q->next) {
        if (q->needs_tokens) return -1;
        need += decodes(q) && q->n_blocks < blocks_for(length(q));
    }
    return need > block_free_count(s->blocks) ? -1 : plan(s, true, items);
}

static void register_blocks(struct scheduler *s, struct sequence *q)
{
    int32_t n = q->n_computed < q->n_known ? q->n_computed : q->n_known;
    for (; q->n_registered < n / BLOCK_TOKENS; q->n_registered++) {
        int32_t i = q->n_registered;
        block_register(s->blocks, q->blocks[i], i ? q->blocks[i - 1] : -1,
                       q->tokens + (size_t)i * BLOCK_TOKENS, q->key);
    }
}

void scheduler_commit(struct scheduler *s)
{
    for (int32_t i = 0; i < s->n_items; i++) {
        struct sequence *q = s->items[i].sequence;
        q->n_computed += s->items[i].count;
        register_blocks(s, q);
        if (!s->items[i].chooses) continue;
        q->state = SEQUENCE_DECODING;
        q->n_coming++;
    }
}

void scheduler_append(struct scheduler *s, struct sequence *q, int32_t token)
{
    q->tokens[q->n_known++] = token;
    q->n_coming--;
    register_blocks(s, q);
}

void scheduler_add(struct scheduler *s, struct sequence *q)
{
    q->state = SEQUENCE_WAITING;
    list_push_back(&s->waiting, q);
}

void scheduler_remove(struct scheduler *s, struct sequence *q)
{
    if (is_running(q)) list_unlink(&s->running, q);
    if (q->state == SEQUENCE_WAITING) list_unlink(&s->waiting, q);
    release_blocks(s, q);
    q->n_coming = 0;
    q->state = SEQUENCE_FINISHED;
}

int32_t scheduler_running(const struct scheduler *s)
{
    return s->running.count;
}

int32_t scheduler_waiting(const struct scheduler *s)
{
    return s->waiting.count;
}

int64_t scheduler_preemptions(const struct scheduler *s)
{
    return s->n_preemptions;
}

linnet_status scheduler_create(struct block_manager *blocks, int32_t max_num_seqs,
                               int32_t max_num_batched_tokens, struct scheduler **out,
                               linnet_error *err)
{
    struct scheduler *s = mem_new(1, sizeof *s);
    struct planned *memory = mem_new(2 * (size_t)max_num_seqs, sizeof *memory);
    if (!s || !memory) {
        free(s);
        free(memory);
        return error_memory(err, "the scheduler", 2 * (size_t)max_num_seqs * sizeof *memory);
    }
    *s = (struct scheduler){.blocks = blocks,
                            .max_num_seqs = max_num_seqs,
                            .max_num_batched_tokens = max_num_batched_tokens,
                            .memory = memory};
    *out = s;
    return LINNET_OK;
}

void scheduler_destroy(struct scheduler *s)
{
    if (!s) return;
    free(s->memory);
    free(s);
}
