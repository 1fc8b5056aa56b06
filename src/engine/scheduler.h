/*
 * scheduler.h - which tokens of which sequences the next step computes. Integers only: no model, no
 * text, no thread, no clock.
 *
 * There is one rule: each step hands out tokens from one budget so that what is computed of a
 * sequence catches up with what is known of it. Decoding is the case where one token is missing.
 *
 *   - Running sequences come first, in the order of their priorities, and of one priority in the
 *     order in which they were admitted. Each decoding one has a token of the budget set aside, so
 *     that no long prompt stops the others.
 *   - A decoding sequence that finds no free block takes those of the last running one in that
 *     order, which goes back to the front of its priority's queue and is recomputed later, output
 *     and all (its tokens are kept). It comes last in the walk, so what is already planned is never
 *     taken back.
 *   - If nobody was preempted, waiting sequences are admitted by priority, and first come, first
 *     served: each gets the blocks of everything known of it at once, cached ones first, and none
 *     is admitted that would leave the running ones without a block each to grow. Nobody is
 *     preempted for one that waits, however important.
 *   - Answers to one request share the full blocks of its prompt: while one of them computes these,
 *     the next waits, then holds them too.
 *
 * A request that fits the pool alone always gets done, unless more important ones keep coming: the
 * first running sequence never yields.
 *
 * A plan needs to know where tokens lie, not which they are. So the next step may be planned while
 * a device still chooses the tokens of the one before (scheduler_plan_ahead): steps run in the
 * order of their commits, hence what a committed step computes may be built upon, and blocks that
 * are released meanwhile are written by their next holder later. Only what looks at the tokens
 * themselves waits until they are known: preemption and the prefix index.
 */
#ifndef LINNET_ENGINE_SCHEDULER_H
#define LINNET_ENGINE_SCHEDULER_H

#include "base/error.h"
#include "kv/block_manager.h"

enum sequence_state {
    SEQUENCE_NEW,        /* not yet handed to the scheduler */
    SEQUENCE_WAITING,    /* never admitted, or preempted */
    SEQUENCE_PREFILLING, /* admitted; what was known at that time is being computed */
    SEQUENCE_DECODING,   /* all but the newest token is computed */
    SEQUENCE_FINISHED    /* holds nothing */
};

struct sequence {
    /* The owner's, set before scheduler_add. */
    int32_t *tokens; /* prompt, then output; room for all it may ever have */
    int32_t *blocks; /* the block table; room for the blocks of all that */
    int32_t n_prompt;
    int32_t n_known;               /* prompt and output; at first the prompt */
    int32_t n_max;                 /* the most it may come to have; the last is never computed */
    int32_t priority;              /* smaller: sooner */
    bool needs_tokens;             /* its next token depends on which the others are: not ahead */
    uint64_t key;                  /* block_match's */
    struct sequence *next_sibling; /* ring of the answers to one request; itself if alone */
    void *owner;

    /* The scheduler's; zero before scheduler_add. */
    enum sequence_state state;
    int32_t n_coming;     /* tokens after the known ones that committed steps choose */
    int32_t n_computed;   /* tokens whose keys and values committed steps put into the cache */
    int32_t n_blocks;     /* entries of blocks in use */
    int32_t n_registered; /* leading blocks that were offered to the prefix index */
    int32_t n_cached;     /* tokens that the first admission found computed */
    int32_t n_preemptions;
    bool admitted; /* once at least */
    struct sequence *previous, *next;
};

/* tokens[begin, begin + count) of a sequence belong to the step. */
struct planned {
    struct sequence *sequence;
    int32_t begin, count;
    bool chooses; /* up to its newest token: the step chooses the one after it */
};

struct scheduler;

/* The block manager is the caller's and outlives the scheduler. */
linnet_status scheduler_create(struct block_manager *blocks, int32_t max_num_seqs,
                               int32_t max_num_batched_tokens, struct scheduler **out,
                               linnet_error *err);
void scheduler_destroy(struct scheduler *s);

/* Puts a new sequence at the end of its priority's queue. All it may come to have but the last
 * token must fit the pool alone. */
void scheduler_add(struct scheduler *s, struct sequence *sequence);

/* Finished or cancelled: takes it out wherever it is (even if it was never added); its blocks are
 * free at once. Not between scheduler_plan and scheduler_commit. */
void scheduler_remove(struct scheduler *s, struct sequence *sequence);

/*
 * Plans a step: *items, valid until the plan after the next; returns how many. At most max_num_seqs
 * items and max_num_batched_tokens tokens. 0 only if there is no sequence. All tokens are known.
 */
int32_t scheduler_plan(struct scheduler *s, const struct planned **items);

/*
 * The same while tokens of the last step are still coming. 0: nothing can be done without them.
 * -1: the plan would preempt, or take in a sequence that needs_tokens: append them first.
 */
int32_t scheduler_plan_ahead(struct scheduler *s, const struct planned **items);

/* The step that was planned last runs before any that is planned from now on: what it computes
 * counts, and full blocks of known tokens may be found by others. */
void scheduler_commit(struct scheduler *s);

/* A token that was coming is known; `sequence` is not finished. */
void scheduler_append(struct scheduler *s, struct sequence *sequence, int32_t token);

int32_t scheduler_running(const struct scheduler *s);
int32_t scheduler_waiting(const struct scheduler *s);
int64_t scheduler_preemptions(const struct scheduler *s);

static inline int32_t blocks_for(int32_t n_tokens)
{
    return (int32_t)(((int64_t)n_tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS);
}

#endif
