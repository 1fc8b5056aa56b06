/* The scheduler alone: integers in, integers out. */
#include "support.h"

#include "base/random.h"
#include "engine/scheduler.h"

enum { MAX_TOKENS = 512 };

struct sequence_memory {
    struct sequence sequence;
    int32_t tokens[MAX_TOKENS], blocks[MAX_TOKENS / BLOCK_TOKENS];
};

struct bench {
    struct block_manager *blocks;
    struct scheduler *scheduler;
    const struct planned *items;
    int32_t n;
};

static struct bench bench_new(int32_t n_blocks, int32_t max_seqs, int32_t budget, bool caching)
{
    struct bench b = {0};
    linnet_error err;
    struct block_manager_options options = {.n_blocks = n_blocks, .prefix_caching = caching};
    assert_ok(block_manager_create(&options, &b.blocks, &err), err);
    assert_ok(scheduler_create(b.blocks, max_seqs, budget, &b.scheduler, &err), err);
    return b;
}

static void bench_free(struct bench *b)
{
    char message[256];
    if (!block_manager_check(b->blocks, message, sizeof message)) fail_msg("%s", message);
    scheduler_destroy(b->scheduler);
    block_manager_destroy(b->blocks);
}

/* Tokens start at `first`, so that equal firsts are equal prefixes. */
static void add_with(struct bench *b, struct sequence_memory *m, int32_t n_prompt, int32_t first,
                     int32_t priority)
{
    *m = (struct sequence_memory){0};
    m->sequence = (struct sequence){.tokens = m->tokens,
                                    .blocks = m->blocks,
                                    .n_prompt = n_prompt,
                                    .n_known = n_prompt,
                                    .n_max = MAX_TOKENS,
                                    .priority = priority,
                                    .next_sibling = &m->sequence};
    for (int32_t i = 0; i < n_prompt; i++) m->tokens[i] = first + i;
    scheduler_add(b->scheduler, &m->sequence);
}

static void add(struct bench *b, struct sequence_memory *m, int32_t n_prompt, int32_t first)
{
    add_with(b, m, n_prompt, first, 0);
}

static void plan(struct bench *b)
{
    b->n = scheduler_plan(b->scheduler, &b->items);
}

static void plan_ahead(struct bench *b)
{
    b->n = scheduler_plan_ahead(b->scheduler, &b->items);
}

/* The step runs; each sequence that was computed to its end gets a token. */
static void run(struct bench *b)
{
    scheduler_commit(b->scheduler);
    for (int32_t i = 0; i < b->n; i++) {
        struct sequence *q = b->items[i].sequence;
        if (q->n_coming > 0) scheduler_append(b->scheduler, q, 7);
    }
}

static void expect_item(const struct bench *b, int32_t i, const struct sequence_memory *m,
                        int32_t begin, int32_t count)
{
    assert_true(i < b->n);
    assert_ptr_equal(b->items[i].sequence, &m->sequence);
    assert_int_equal(b->items[i].begin, begin);
    assert_int_equal(b->items[i].count, count);
}

static void chunks_end_at_absolute_multiples(void **state)
{
    (void)state;
    static struct sequence_memory a, c;
    struct bench b = bench_new(64, 8, 100, false);
    add(&b, &a, 300, 1000);
    add(&b, &c, 10, 5000);
    plan(&b);
    expect_item(&b, 0, &a, 0, 64);
    expect_item(&b, 1, &c, 0, 10); /* what the edge left over */
    run(&b);
    plan(&b); /* 99 tokens of room: the next edge is 128 */
    expect_item(&b, 0, &a, 64, 64);
    expect_item(&b, 1, &c, 10, 1);
    run(&b);
    scheduler_remove(b.scheduler, &c.sequence);
    plan(&b);
    expect_item(&b, 0, &a, 128, 64);
    run(&b);
    plan(&b);
    run(&b);
    plan(&b); /* the end need not be an edge */
    expect_item(&b, 0, &a, 256, 44);
    run(&b);
    plan(&b);
    expect_item(&b, 0, &a, 300, 1);
    assert_int_equal(b.n, 1);
    scheduler_remove(b.scheduler, &a.sequence);
    bench_free(&b);
}

static void small_rooms_use_smaller_edges(void **state)
{
    (void)state;
    static struct sequence_memory a;
    struct bench b = bench_new(64, 8, 40, false);
    add(&b, &a, 300, 0);
    plan(&b);
    expect_item(&b, 0, &a, 0, 32);
    run(&b);
    plan(&b);
    expect_item(&b, 0, &a, 32, 32); /* up to 64 */
    scheduler_remove(b.scheduler, &a.sequence);
    bench_free(&b);
    b = bench_new(64, 8, 9, false);
    add(&b, &a, 300, 0);
    plan(&b);
    expect_item(&b, 0, &a, 0, 9);
    run(&b);
    plan(&b);
    expect_item(&b, 0, &a, 9, 9);
    scheduler_remove(b.scheduler, &a.sequence);
    bench_free(&b);
}

/* A prompt that would take the whole budget leaves a token to each that decodes, also to those
 * behind it. */
static void decoding_is_never_starved(void **state)
{
    (void)state;
    static struct sequence_memory a, c, d;
    struct bench b = bench_new(64, 8, 64, false);
    add(&b, &c, 100, 0);
    plan(&b);
    run(&b);
    add(&b, &d, 20, 1000);
    plan(&b);
    expect_item(&b, 0, &c, 64, 36);
    expect_item(&b, 1, &d, 0, 20);
    run(&b);
    add(&b, &a, 200, 2000);
    plan(&b);
    expect_item(&b, 0, &c, 100, 1);
    expect_item(&b, 1, &d, 20, 1);
    expect_item(&b, 2, &a, 0, 48);
    run(&b);
    scheduler_remove(b.scheduler, &c.sequence);
    plan(&b);
    expect_item(&b, 0, &d, 21, 1);
    expect_item(&b, 1, &a, 48, 48); /* at edges of 16 */
    scheduler_remove(b.scheduler, &a.sequence);
    scheduler_remove(b.scheduler, &d.sequence);
    bench_free(&b);
}

static void first_come_first_served(void **state)
{
    (void)state;
    static struct sequence_memory a, c, d;
    struct bench b = bench_new(10, 2, 512, false);
    add(&b, &a, 90, 0);
    add(&b, &c, 80, 1000); /* needs 5 of the 4 that are left */
    add(&b, &d, 5, 2000);  /* would fit, but is not its turn */
    plan(&b);
    assert_int_equal(b.n, 1);
    assert_int_equal(scheduler_waiting(b.scheduler), 2);
    scheduler_remove(b.scheduler, &a.sequence);
    plan(&b);
    assert_int_equal(b.n, 2);
    expect_item(&b, 0, &c, 0, 80);
    expect_item(&b, 1, &d, 0, 5);
    assert_int_equal(scheduler_running(b.scheduler), 2); /* and no more */
    scheduler_remove(b.scheduler, &c.sequence);
    scheduler_remove(b.scheduler, &d.sequence);
    bench_free(&b);
}

static void more_important_ones_come_first(void **state)
{
    (void)state;
    static struct sequence_memory a, c, d, e;
    struct bench b = bench_new(64, 1, 100, false);
    add_with(&b, &a, 20, 0, 0);
    add_with(&b, &c, 20, 100, 5);
    add_with(&b, &d, 20, 200, -3);
    add_with(&b, &e, 20, 300, 0);
    struct sequence_memory *order[] = {&d, &a, &e, &c};
    for (size_t i = 0; i < 4; i++) {
        plan(&b);
        assert_int_equal(b.n, 1);
        expect_item(&b, 0, order[i], 0, 20);
        run(&b);
        scheduler_remove(b.scheduler, &order[i]->sequence);
    }
    bench_free(&b);
}

static void least_important_is_preempted_first(void **state)
{
    (void)state;
    static struct sequence_memory a, c, late;
    struct bench b = bench_new(6, 4, 512, false);
    add_with(&b, &a, 30, 0, 1); /* the oldest, and the least important */
    plan(&b);
    run(&b);
    add_with(&b, &c, 30, 1000, 0);
    plan(&b);
    expect_item(&b, 0, &a, 30, 1);
    expect_item(&b, 1, &c, 0, 30);
    run(&b);
    add_with(&b, &late, 30, 2000, 1); /* no room */
    for (int steps = 0; scheduler_preemptions(b.scheduler) == 0; steps++) {
        assert_true(steps < 40);
        plan(&b);
        expect_item(&b, 0, &c, c.sequence.n_known - 1, 1); /* walked first */
        run(&b);
    }
    assert_int_equal(a.sequence.state, SEQUENCE_WAITING);
    assert_ptr_equal(a.sequence.next, &late.sequence);
    assert_int_equal(c.sequence.n_preemptions, 0);
    scheduler_remove(b.scheduler, &a.sequence);
    scheduler_remove(b.scheduler, &c.sequence);
    scheduler_remove(b.scheduler, &late.sequence);
    bench_free(&b);
}

static void newest_is_preempted_first(void **state)
{
    (void)state;
    static struct sequence_memory a, c, d;
    struct bench b = bench_new(8, 4, 512, false);
    add(&b, &a, 31, 0); /* 2 blocks each, and one more soon */
    add(&b, &c, 30, 1000);
    add(&b, &d, 20, 2000);
    plan(&b);
    assert_int_equal(b.n, 3);
    run(&b);
    static struct sequence_memory late;
    add(&b, &late, 1, 3000); /* 2 blocks left for 3 running: not admitted */
    for (int step = 0; step < 2; step++) {
        plan(&b);
        assert_int_equal(b.n, 3);
        run(&b);
    }
    assert_int_equal(block_free_count(b.blocks), 1); /* a has 3 */
    plan(&b);
    run(&b); /* c has 3: none is left */
    assert_int_equal(block_free_count(b.blocks), 0);
    int steps = 0;
    for (; scheduler_preemptions(b.scheduler) == 0; steps++) {
        plan(&b);
        run(&b);
        assert_true(steps < 20);
    }
    /* d wanted a third block first and was itself the newest: its turn is over, nobody else's */
    assert_int_equal(d.sequence.state, SEQUENCE_WAITING);
    assert_int_equal(d.sequence.n_known, 33);
    assert_int_equal(d.sequence.n_computed, 0);
    assert_int_equal(b.n, 2);
    assert_int_equal(late.sequence.state, SEQUENCE_WAITING); /* behind d */
    scheduler_remove(b.scheduler, &a.sequence);
    plan(&b);
    expect_item(&b, 1, &d, 0, 33); /* output and all */
    /* late may only come after d, and only once d has been taken */
    assert_true(d.sequence.admitted);
    if (late.sequence.admitted) assert_ptr_equal(late.sequence.previous, &d.sequence);
    scheduler_remove(b.scheduler, &c.sequence);
    scheduler_remove(b.scheduler, &d.sequence);
    scheduler_remove(b.scheduler, &late.sequence);
    bench_free(&b);
}

static void cached_blocks_are_held_before_any_is_taken(void **state)
{
    (void)state;
    static struct sequence_memory a, c;
    struct bench b = bench_new(6, 4, 512, true);
    add(&b, &a, 49, 0);
    plan(&b);
    run(&b);
    scheduler_remove(b.scheduler, &a.sequence); /* 3 of its blocks stay findable */
    add(&b, &c, 96, 0);
    plan(&b); /* takes the other 3, and not those that it found */
    expect_item(&b, 0, &c, 48, 48);
    assert_int_equal(c.sequence.n_cached, 48);
    bool seen[6] = {false};
    for (int i = 0; i < 6; i++) {
        assert_false(seen[c.blocks[i]]);
        seen[c.blocks[i]] = true;
    }
    scheduler_remove(b.scheduler, &c.sequence);
    bench_free(&b);
}

static void siblings_wait_for_the_prompt(void **state)
{
    (void)state;
    static struct sequence_memory m[3];
    struct bench b = bench_new(32, 4, 64, false);
    for (int i = 0; i < 3; i++) add(&b, &m[i], 100, 0);
    for (int i = 0; i < 3; i++) m[i].sequence.next_sibling = &m[(i + 1) % 3].sequence;
    plan(&b);
    assert_int_equal(b.n, 1);
    run(&b);
    plan(&b);
    expect_item(&b, 0, &m[0], 64, 36);
    assert_int_equal(b.n, 1);
    scheduler_remove(b.scheduler, &m[0].sequence); /* cancelled in mid-prompt */
    plan(&b);
    expect_item(&b, 0, &m[1], 0, 64); /* the next one does it */
    run(&b);
    plan(&b);
    run(&b);
    plan(&b);
    expect_item(&b, 0, &m[1], 100, 1);
    expect_item(&b, 1, &m[2], 96, 4);
    assert_int_equal(block_count(b.blocks, m[1].blocks[0]), 2);
    scheduler_remove(b.scheduler, &m[1].sequence);
    assert_int_equal(block_count(b.blocks, m[2].blocks[5]), 1);
    scheduler_remove(b.scheduler, &m[2].sequence);
    assert_int_equal(block_held_count(b.blocks), 0);
    bench_free(&b);
}

static void keys_keep_equal_tokens_apart(void **state)
{
    (void)state;
    static struct sequence_memory a, c;
    struct bench b = bench_new(32, 4, 512, true);
    add(&b, &a, 64, 0);
    plan(&b);
    run(&b);
    add(&b, &c, 64, 0);
    plan(&b);
    assert_int_equal(c.sequence.n_cached, 48);
    scheduler_remove(b.scheduler, &c.sequence);
    add(&b, &c, 64, 0);
    c.sequence.key = 5;
    plan(&b);
    assert_int_equal(c.sequence.n_cached, 0);
    scheduler_remove(b.scheduler, &c.sequence);
    scheduler_remove(b.scheduler, &a.sequence);
    bench_free(&b);
}

static void plans_ahead(void **state)
{
    (void)state;
    static struct sequence_memory a, c, d;
    struct bench b = bench_new(4, 4, 64, true);
    add(&b, &a, 30, 0);
    a.sequence.n_max = 34;
    add(&b, &c, 3, 1000);
    c.sequence.n_max = 4;
    plan(&b);
    scheduler_commit(b.scheduler);
    assert_int_equal(a.sequence.n_coming, 1);
    plan_ahead(&b); /* c has its last token coming */
    assert_int_equal(b.n, 1);
    expect_item(&b, 0, &a, 30, 1);
    scheduler_commit(b.scheduler);
    assert_int_equal(a.sequence.n_coming, 2);
    scheduler_append(b.scheduler, &a.sequence, 7);
    scheduler_append(b.scheduler, &c.sequence, 7);
    scheduler_remove(b.scheduler, &c.sequence);
    plan_ahead(&b);
    expect_item(&b, 0, &a, 31, 1); /* completes a block with a token not yet known */
    scheduler_commit(b.scheduler);
    assert_int_equal(a.sequence.n_registered, 1);
    scheduler_append(b.scheduler, &a.sequence, 7);
    assert_int_equal(a.sequence.n_registered, 2);

    add(&b, &d, 20, 2000); /* takes the last block but one for a */
    d.sequence.needs_tokens = true;
    plan_ahead(&b);
    assert_int_equal(b.n, -1);
    d.sequence.needs_tokens = false;
    a.sequence.needs_tokens = true;
    plan_ahead(&b);
    assert_int_equal(b.n, -1);
    a.sequence.needs_tokens = false;
    int32_t block = block_take(b.blocks), other = block_take(b.blocks);
    plan_ahead(&b); /* nothing is left for a */
    assert_int_equal(b.n, -1);
    block_release(b.blocks, other);
    plan_ahead(&b);
    expect_item(&b, 0, &a, 32, 1);
    scheduler_commit(b.scheduler);
    scheduler_append(b.scheduler, &a.sequence, 7);
    plan_ahead(&b); /* 34 is the end, and d does not fit */
    assert_int_equal(b.n, 0);
    block_release(b.blocks, block);
    scheduler_remove(b.scheduler, &a.sequence);
    plan(&b);
    expect_item(&b, 0, &d, 0, 20);
    scheduler_remove(b.scheduler, &d.sequence);
    bench_free(&b);
}

/* Random lengths, ends and cancels: the rules hold in every step, and all get done. */
static void check_step(const struct bench *b, int32_t max_seqs, int32_t budget)
{
    char message[256];
    if (!block_manager_check(b->blocks, message, sizeof message)) fail_msg("%s", message);
    int32_t total = 0;
    for (int32_t i = 0; i < b->n; i++) {
        const struct planned *p = &b->items[i];
        const struct sequence *q = p->sequence;
        assert_int_equal(p->begin, q->n_computed);
        int32_t length = q->n_known + q->n_coming;
        assert_true(p->count >= 1 && p->begin + p->count <= length && length < q->n_max);
        assert_true(p->chooses == (p->begin + p->count == length));
        assert_true(q->n_blocks * BLOCK_TOKENS >= p->begin + p->count);
        assert_true(q->n_blocks == blocks_for(length));
        for (int32_t k = 0; k < i; k++) assert_ptr_not_equal(b->items[k].sequence, q);
        total += p->count;
    }
    assert_true(total <= budget);
    assert_true(b->n <= max_seqs && scheduler_running(b->scheduler) <= max_seqs);
}

static void random_sequences(void **state)
{
    (void)state;
    enum { N = 40 };
    static struct sequence_memory m[N];
    for (uint64_t seed = 0; seed < 30; seed++) {
        uint64_t counter = 0;
        int32_t max_seqs = 1 + (int32_t)(random_u64(seed, counter++, 0) % 8);
        int32_t budget = 1 + (int32_t)(random_u64(seed, counter++, 0) % 100);
        struct bench b = bench_new(12, max_seqs, budget, seed % 2);
        int32_t limits[N], added = 0, done = 0;
        for (int step = 0; done < N; step++) {
            assert_true(step < 50000);
            if (added < N && random_u64(seed, counter++, 0) % 3 == 0) {
                int32_t n_prompt = 1 + (int32_t)(random_u64(seed, counter++, 0) % 120);
                limits[added] = n_prompt + 1 + (int32_t)(random_u64(seed, counter++, 0) % 72);
                int32_t first = (int32_t)(random_u64(seed, counter++, 0) % 3);
                int32_t priority = seed % 3 ? (int32_t)(random_u64(seed, counter++, 0) % 3) : 0;
                add_with(&b, &m[added++], n_prompt, first, priority);
            }
            plan(&b);
            check_step(&b, max_seqs, budget);
            run(&b);
            for (int32_t i = 0; i < added; i++) {
                struct sequence *q = &m[i].sequence;
                bool cancel = random_u64(seed, counter++, 0) % 300 == 0;
                if (q->state == SEQUENCE_FINISHED || (q->n_known < limits[i] && !cancel)) continue;
                scheduler_remove(b.scheduler, q);
                done++;
            }
        }
        assert_int_equal(block_held_count(b.blocks), 0);
        plan(&b);
        assert_int_equal(b.n, 0);
        bench_free(&b);
    }
}

/* The same one step ahead: a token is known, and an end found, when the next step is begun. */
static void random_sequences_ahead(void **state)
{
    (void)state;
    enum { N = 40 };
    static struct sequence_memory m[N];
    int32_t n_ahead = 0, n_refused = 0;
    for (uint64_t seed = 0; seed < 30; seed++) {
        uint64_t counter = 0;
        int32_t max_seqs = 1 + (int32_t)(random_u64(seed, counter++, 1) % 8);
        int32_t budget = 1 + (int32_t)(random_u64(seed, counter++, 1) % 100);
        struct bench b = bench_new(12, max_seqs, budget, seed % 2), before = {0};
        int32_t limits[N], added = 0, done = 0;
        for (int step = 0; done < N; step++) {
            assert_true(step < 50000);
            if (added < N && random_u64(seed, counter++, 1) % 3 == 0) {
                int32_t n_prompt = 1 + (int32_t)(random_u64(seed, counter++, 1) % 120);
                limits[added] = n_prompt + 1 + (int32_t)(random_u64(seed, counter++, 1) % 72);
                int32_t first = (int32_t)(random_u64(seed, counter++, 1) % 3);
                int32_t priority = seed % 3 ? (int32_t)(random_u64(seed, counter++, 1) % 3) : 0;
                add_with(&b, &m[added], n_prompt, first, priority);
                m[added++].sequence.n_max = 192;
            }
            if (before.n > 0) {
                int64_t preemptions = scheduler_preemptions(b.scheduler);
                plan_ahead(&b);
                assert_int_equal(preemptions, scheduler_preemptions(b.scheduler));
                n_ahead += b.n > 0;
                n_refused += b.n < 0;
            } else {
                plan(&b);
            }
            if (b.n > 0) check_step(&b, max_seqs, budget);
            if (b.n > 0) scheduler_commit(b.scheduler);
            for (int32_t i = 0; i < before.n; i++) { /* what the step before has chosen */
                struct sequence *q = before.items[i].sequence;
                if (!before.items[i].chooses || q->state == SEQUENCE_FINISHED) continue;
                scheduler_append(b.scheduler, q, 7);
                int32_t id = (int32_t)((struct sequence_memory *)q - m);
                bool cancel = random_u64(seed, counter++, 1) % 100 == 0;
                if (q->n_known < limits[id] && q->n_known < q->n_max && !cancel) continue;
                scheduler_remove(b.scheduler, q);
                done++;
            }
            before = b;
        }
        assert_int_equal(block_held_count(b.blocks), 0);
        bench_free(&b);
    }
    assert_true(n_ahead > 5000 && n_refused > 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunks_end_at_absolute_multiples),
        cmocka_unit_test(small_rooms_use_smaller_edges),
        cmocka_unit_test(decoding_is_never_starved),
        cmocka_unit_test(first_come_first_served),
        cmocka_unit_test(newest_is_preempted_first),
        cmocka_unit_test(more_important_ones_come_first),
        cmocka_unit_test(least_important_is_preempted_first),
        cmocka_unit_test(cached_blocks_are_held_before_any_is_taken),
        cmocka_unit_test(siblings_wait_for_the_prompt),
        cmocka_unit_test(keys_keep_equal_tokens_apart),
        cmocka_unit_test(plans_ahead),
        cmocka_unit_test(random_sequences),
        cmocka_unit_test(random_sequences_ahead),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
