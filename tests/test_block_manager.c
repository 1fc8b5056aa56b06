/* test_block_manager.c - each sentence of kv/block_manager.h, then a random walk beside a model. */
#include "support.h"

#include <malloc.h>

#include "base/random.h"
#include "kv/block_manager.h"

static struct block_manager *create(int32_t n_blocks, bool prefix_caching, uint64_t hash_mask)
{
    struct block_manager_options options = {.n_blocks = n_blocks,
                                            .prefix_caching = prefix_caching,
                                            .hash_seed = 12345,
                                            .hash_mask = hash_mask};
    struct block_manager *m = NULL;
    linnet_error err;
    assert_ok(block_manager_create(&options, &m, &err), err);
    return m;
}

static void check(const struct block_manager *m)
{
    char message[200];
    if (!block_manager_check(m, message, sizeof message)) fail_msg("%s", message);
}

/* Takes and registers the blocks of a prompt of n_blocks full blocks, as an engine would. */
static void fill(struct block_manager *m, const int32_t *tokens, int32_t n_blocks, uint64_t key,
                 int32_t *blocks)
{
    for (int32_t i = 0; i < n_blocks; i++) {
        blocks[i] = block_take(m);
        assert_int_not_equal(blocks[i], -1);
        block_register(m, blocks[i], i ? blocks[i - 1] : -1, tokens + i * BLOCK_TOKENS, key);
    }
}

static void release_all(struct block_manager *m, const int32_t *blocks, int32_t n)
{
    while (n-- > 0) block_release(m, blocks[n]);
}

static void set_tokens(int32_t *tokens, int32_t n, int32_t value)
{
    for (int32_t i = 0; i < n; i++) tokens[i] = value;
}

static void test_create_refuses(void **state)
{
    (void)state;
    struct block_manager *m = NULL;
    linnet_error err;
    int32_t wrong[] = {0, -1, INT32_MIN, INT32_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct block_manager_options options = {.n_blocks = wrong[i]};
        assert_int_equal(block_manager_create(&options, &m, &err), LINNET_INVALID);
        assert_non_null(strstr(err.message, "n_blocks"));
        assert_null(m);
    }
    block_manager_destroy(NULL);
}

static void test_take_hold_release(void **state)
{
    (void)state;
    struct block_manager *m = create(3, true, 0);
    assert_int_equal(block_free_count(m), 3);
    int32_t a = block_take(m), b = block_take(m), c = block_take(m);
    assert_true(a != b && b != c && a != c);
    assert_int_equal(block_take(m), -1);
    assert_int_equal(block_free_count(m), 0);
    assert_int_equal(block_held_count(m), 3);
    block_hold(m, b);
    assert_int_equal(block_count(m, b), 2);
    block_release(m, b);
    assert_int_equal(block_free_count(m), 0);
    assert_int_equal(block_take(m), -1);
    block_release(m, b);
    assert_int_equal(block_free_count(m), 1);
    assert_int_equal(block_count(m, b), 0);
    assert_int_equal(block_take(m), b);
    check(m);
    block_manager_destroy(m);
}

/* The head of the free list is what was released first. */
static void test_lru_order(void **state)
{
    (void)state;
    struct block_manager *m = create(4, true, 0);
    int32_t tokens[65], blocks[4], found[4];
    for (int32_t i = 0; i < 65; i++) tokens[i] = i;
    fill(m, tokens, 4, 0, blocks);
    release_all(m, blocks, 4);
    for (int32_t left = 3; left >= 0; left--) { /* the tail dies first */
        assert_int_equal(block_take(m), blocks[left]);
        assert_int_equal(block_match(m, tokens, 65, 0, found), left);
        check(m);
    }
    /* used again in between: a hit moves to the tail when it is released */
    release_all(m, blocks, 4);
    fill(m, tokens, 4, 0, blocks);
    for (int32_t i = 0; i < 4; i++) block_release(m, blocks[i]);
    block_hold(m, blocks[0]);
    block_release(m, blocks[0]);
    assert_int_equal(block_take(m), blocks[1]);
    assert_int_equal(block_take(m), blocks[2]);
    assert_int_equal(block_take(m), blocks[3]);
    assert_int_equal(block_match(m, tokens, 65, 0, found), 1);
    assert_int_equal(block_take(m), blocks[0]);
    assert_int_equal(block_match(m, tokens, 65, 0, found), 0);
    block_manager_destroy(m);
}

static void match_with_mask(uint64_t hash_mask)
{
    struct block_manager *m = create(8, true, hash_mask);
    int32_t tokens[64], blocks[4], found[4] = {-7, -7, -7, -7};
    for (int32_t i = 0; i < 64; i++) tokens[i] = i;
    assert_int_equal(block_match(m, tokens, 64, 0, found), 0);
    fill(m, tokens, 3, 0, blocks);
    assert_int_equal(block_match(m, tokens, 64, 0, found), 3);
    assert_memory_equal(found, blocks, 3 * sizeof *blocks);
    assert_int_equal(found[3], -7);
    for (int32_t i = 0; i < 3; i++) assert_int_equal(block_count(m, blocks[i]), 1);
    release_all(m, blocks, 3); /* still findable without a holder */
    assert_int_equal(block_free_count(m), 8);
    assert_int_equal(block_match(m, tokens, 64, 0, found), 3);
    assert_int_equal(block_free_count(m), 8);
    for (int32_t i = 0; i < 3; i++) block_hold(m, found[i]);
    assert_int_equal(block_free_count(m), 5);
    for (int32_t at = 0; at < 48; at++) { /* every token counts */
        tokens[at] ^= 1 << 30;
        assert_int_equal(block_match(m, tokens, 64, 0, found), at / BLOCK_TOKENS);
        tokens[at] ^= 1 << 30;
    }
    assert_int_equal(block_match(m, tokens, 64, 1, found), 0); /* and the key */
    assert_int_equal(block_match(m, tokens, 0, 0, found), 0);
    check(m);
    block_manager_destroy(m);
}

static void test_match(void **state)
{
    (void)state;
    match_with_mask(0);
    match_with_mask(1); /* the comparison, not the hash, tells blocks apart */
}

/* K01: at least one token is left to compute. */
static void test_match_limit(void **state)
{
    (void)state;
    struct block_manager *m = create(32, true, 0);
    int32_t tokens[272], blocks[17], found[17];
    set_tokens(tokens, 272, 7);
    fill(m, tokens, 17, 0, blocks);
    int32_t sizes[] = {16, 32, 48, 64, 128, 256, 257};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int32_t n = sizes[i] - 1; n <= sizes[i] + 1; n++) {
            assert_int_equal(block_match(m, tokens, n, 0, found), (n - 1) / 16);
            assert_true(16 * ((n - 1) / 16) < n);
            assert_memory_equal(found, blocks, (size_t)((n - 1) / 16) * sizeof *blocks);
        }
    block_manager_destroy(m);
}

static void test_register_does_nothing(void **state)
{
    (void)state;
    int32_t tokens[33], found[2];
    set_tokens(tokens, 33, 3);
    struct block_manager *m = create(8, true, 0);
    int32_t stranger = block_take(m), child = block_take(m);
    block_register(m, child, stranger, tokens, 0); /* parent not registered */
    assert_int_equal(block_match(m, tokens, 33, 0, found), 0);
    int32_t first = block_take(m), copy = block_take(m);
    block_register(m, first, -1, tokens, 0);
    block_register(m, copy, -1, tokens, 0); /* equal: the older stays */
    assert_int_equal(block_match(m, tokens, 33, 0, found), 1);
    assert_int_equal(found[0], first);
    block_register(m, first, -1, tokens, 9); /* already registered */
    assert_int_equal(block_match(m, tokens, 33, 9, found), 0);
    assert_int_equal(block_match(m, tokens, 33, 0, found), 1);
    /* the copy stands for the older as a parent */
    int32_t second = block_take(m);
    block_register(m, second, copy, tokens + 16, 0);
    assert_int_equal(block_match(m, tokens, 33, 0, found), 2);
    assert_int_equal(found[0], first);
    assert_int_equal(found[1], second);
    check(m);
    block_manager_destroy(m);

    m = create(8, false, 0); /* caching off */
    int32_t block = block_take(m);
    block_register(m, block, -1, tokens, 0);
    assert_int_equal(block_match(m, tokens, 33, 0, found), 0);
    check(m);
    block_manager_destroy(m);
}

/* K05: the same second block after different first blocks is another block. */
static void test_parent_counts(void **state)
{
    (void)state;
    uint64_t masks[] = {0, 15, 1};
    for (size_t i = 0; i < 3; i++) {
        struct block_manager *m = create(8, true, masks[i]);
        int32_t a[33], b[33], of_a[2], of_b[2], found[2];
        set_tokens(a, 33, 8);
        set_tokens(b, 33, 8);
        set_tokens(a, 16, 7);
        set_tokens(b, 16, 9);
        fill(m, a, 2, 0, of_a);
        fill(m, b, 1, 0, of_b);
        assert_int_equal(block_match(m, b, 33, 0, found), 1);
        fill(m, b, 2, 0, of_b);
        assert_int_equal(block_match(m, a, 33, 0, found), 2);
        assert_memory_equal(found, of_a, sizeof found);
        assert_int_equal(block_match(m, b, 33, 0, found), 2);
        assert_int_equal(found[1], of_b[1]);
        /* the second block alone starts no sequence */
        assert_int_equal(block_match(m, a + 16, 17, 0, found), 0);
        check(m);
        block_manager_destroy(m);
    }
}

/* A parent that was taken for other tokens must not lend its name to its old children. */
static void test_forgotten_parent(void **state)
{
    (void)state;
    struct block_manager *m = create(2, true, 0);
    int32_t a[33], b[33], blocks[2], found[2];
    set_tokens(a, 33, 8);
    set_tokens(b, 33, 8);
    set_tokens(b, 16, 9);
    fill(m, a, 2, 0, blocks);
    block_release(m, blocks[0]);
    int32_t taken = block_take(m);
    assert_int_equal(taken, blocks[0]);
    block_register(m, taken, -1, b, 0);
    assert_int_equal(block_match(m, b, 33, 0, found), 1);
    assert_int_equal(block_match(m, a, 33, 0, found), 0);
    check(m);
    block_manager_destroy(m);
}

/* K05: 200 prompts of 64 tokens, sent twice, 4 bits of hash: the answer is never another's. */
static void test_hash_collisions(void **state)
{
    (void)state;
    enum { N = 200, PER = 4 };
    static int32_t tokens[N][64], blocks[N][PER];
    struct block_manager *m = create(N * PER, true, 15);
    for (int32_t p = 0; p < N; p++) {
        for (int32_t i = 0; i < 64; i++) tokens[p][i] = '0' + (int32_t)(random_u64(1, p, i) % 2);
        if (p % 4 == 1) memcpy(tokens[p], tokens[p - 1], 16 * sizeof(int32_t));
        if (p % 4 == 2) memcpy(tokens[p] + 16, tokens[p - 2] + 16, 48 * sizeof(int32_t));
    }
    for (int32_t p = 0; p < N; p++) {
        int32_t n = block_match(m, tokens[p], 64, 0, blocks[p]);
        assert_int_equal(n, p % 4 == 1);
        for (int32_t i = 0; i < PER; i++) {
            if (i < n) {
                assert_int_equal(blocks[p][i], blocks[p - 1][i]);
                block_hold(m, blocks[p][i]);
                continue;
            }
            blocks[p][i] = block_take(m);
            block_register(m, blocks[p][i], i ? blocks[p][i - 1] : -1, tokens[p] + 16 * i, 0);
        }
    }
    for (int32_t p = 0; p < N; p++) release_all(m, blocks[p], PER);
    for (int32_t p = 0; p < N; p++) {
        int32_t found[PER], longer[65];
        assert_int_equal(block_match(m, tokens[p], 64, 0, found), 3);
        assert_memory_equal(found, blocks[p], sizeof(int32_t) * 3);
        memcpy(longer, tokens[p], sizeof tokens[p]);
        longer[64] = 0;
        assert_int_equal(block_match(m, longer, 65, 0, found), 4);
        assert_memory_equal(found, blocks[p], sizeof found);
    }
    check(m);
    block_manager_destroy(m);
}

/* K07: a shared block is freed once, after its last holder. */
static void test_shared_prompt(void **state)
{
    (void)state;
    struct block_manager *m = create(6, true, 0);
    int32_t tokens[32], blocks[2];
    set_tokens(tokens, 32, 5);
    fill(m, tokens, 2, 0, blocks);
    for (int32_t choice = 1; choice < 4; choice++)
        for (int32_t i = 0; i < 2; i++) block_hold(m, blocks[i]);
    for (int32_t choice = 0; choice < 4; choice++) {
        assert_int_equal(block_free_count(m), 4);
        release_all(m, blocks, 2);
        check(m);
    }
    assert_int_equal(block_free_count(m), 6);
    block_manager_destroy(m);
}

static void test_no_allocation(void **state)
{
    (void)state;
    enum { N = 512 };
    static int32_t tokens[N * BLOCK_TOKENS + 1], blocks[N];
    struct block_manager *m = create(N, true, 0);
    for (int32_t i = 0; i <= N * BLOCK_TOKENS; i++) tokens[i] = i;
    size_t before = mallinfo2().uordblks;
    for (int32_t round = 0; round < 3; round++) {
        tokens[0] = round;
        fill(m, tokens, N, 0, blocks);
        assert_int_equal(block_match(m, tokens, N * BLOCK_TOKENS + 1, 0, blocks), N);
        release_all(m, blocks, N);
    }
    assert_int_equal(mallinfo2().uordblks, before);
    block_manager_destroy(m);
}

/* ---- random walk: the model stores whole prefixes and searches them one by one ---- */

enum { POOL = 12, DEPTH = 5, SEQUENCES = 6, ANY_PARENT = -1 };

struct model_block {
    int32_t count;
    bool findable, registered;
    uint64_t key;
    int32_t n_prefix; /* blocks */
    int32_t prefix[DEPTH * BLOCK_TOKENS];
    int64_t serial, parent_serial; /* when its prefix became known, and its parent's */
};

struct sequence {
    uint64_t key;
    int32_t n; /* blocks held */
    int32_t blocks[DEPTH];
    int32_t tokens[DEPTH * BLOCK_TOKENS + 1];
};

struct walk {
    struct block_manager *m;
    struct model_block model[POOL];
    int32_t lru[POOL], n_lru;
    int64_t last_serial;
    struct sequence sequences[SEQUENCES];
    uint64_t seed, counter;
    int64_t n_hits, n_orphans;
};

static int32_t pick(struct walk *w, int32_t n)
{
    return (int32_t)(random_u64(w->seed, w->counter++, 0) % (uint64_t)n);
}

static int32_t model_find(const struct walk *w, const int32_t *tokens, int32_t n_prefix,
                          uint64_t key, int64_t parent_serial)
{
    for (int32_t b = 0; b < POOL; b++) {
        const struct model_block *x = &w->model[b];
        if (x->findable && x->n_prefix == n_prefix && x->key == key &&
            (x->parent_serial == parent_serial || parent_serial == ANY_PARENT) &&
            memcmp(x->prefix, tokens, sizeof(int32_t) * BLOCK_TOKENS * (size_t)n_prefix) == 0)
            return b;
    }
    return -1;
}

/* Few different blocks, so that prefixes meet and part again. */
static void new_tokens(struct walk *w, struct sequence *s)
{
    s->key = pick(w, 8) == 0;
    for (int32_t i = 0; i < DEPTH; i++)
        set_tokens(s->tokens + i * BLOCK_TOKENS, BLOCK_TOKENS, pick(w, 2));
    s->tokens[DEPTH * BLOCK_TOKENS] = 0;
}

static void model_release(struct walk *w, int32_t block)
{
    block_release(w->m, block);
    if (--w->model[block].count == 0) w->lru[w->n_lru++] = block;
}

static void lru_remove(struct walk *w, int32_t block)
{
    int32_t i = 0;
    while (w->lru[i] != block) i++;
    memmove(w->lru + i, w->lru + i + 1, sizeof *w->lru * (size_t)(--w->n_lru - i));
}

static void step_match(struct walk *w, struct sequence *s)
{
    int32_t n = 1 + pick(w, DEPTH * BLOCK_TOKENS + 1), found[DEPTH], want[DEPTH], n_want = 0;
    int64_t serial = 0;
    while (n_want < (n - 1) / BLOCK_TOKENS) {
        int32_t b = model_find(w, s->tokens, n_want + 1, s->key, serial);
        if (b < 0) break;
        want[n_want++] = b;
        serial = w->model[b].serial;
    }
    for (int32_t depth = n_want + 1; depth <= (n - 1) / BLOCK_TOKENS; depth++)
        w->n_orphans += model_find(w, s->tokens, depth, s->key, ANY_PARENT) >= 0;
    assert_int_equal(block_match(w->m, s->tokens, n, s->key, found), n_want);
    assert_memory_equal(found, want, sizeof *found * (size_t)n_want);
    w->n_hits += n_want;
    s->n = n_want;
    for (int32_t i = 0; i < n_want; i++) {
        s->blocks[i] = found[i];
        block_hold(w->m, found[i]);
        if (w->model[found[i]].count++ == 0) lru_remove(w, found[i]);
    }
}

static void step_grow(struct walk *w, struct sequence *s)
{
    int32_t b = block_take(w->m);
    assert_int_equal(b, w->n_lru ? w->lru[0] : -1);
    if (b < 0) return;
    lru_remove(w, b);
    w->model[b] = (struct model_block){.count = 1};
    int32_t parent = s->n ? s->blocks[s->n - 1] : -1;
    s->blocks[s->n++] = b;
    if (pick(w, 8) == 0) return; /* not full when it was left */
    block_register(w->m, b, parent, s->tokens + (s->n - 1) * BLOCK_TOKENS, s->key);
    if (parent >= 0 && !w->model[parent].registered) return;
    struct model_block *x = &w->model[b];
    x->registered = true;
    x->key = s->key;
    x->n_prefix = s->n;
    x->parent_serial = parent < 0 ? 0 : w->model[parent].serial;
    memcpy(x->prefix, s->tokens, sizeof(int32_t) * BLOCK_TOKENS * (size_t)s->n);
    int32_t older = model_find(w, s->tokens, s->n, s->key, x->parent_serial);
    x->findable = older < 0;
    x->serial = older < 0 ? ++w->last_serial : w->model[older].serial;
}

static void walk(uint64_t hash_mask, uint64_t seed, int32_t n_steps)
{
    struct walk w = {.m = create(POOL, true, hash_mask), .seed = seed, .n_lru = POOL};
    for (int32_t b = 0; b < POOL; b++) w.lru[b] = b;
    for (int32_t step = 0; step < n_steps; step++) {
        struct sequence *s = &w.sequences[pick(&w, SEQUENCES)];
        int32_t what = pick(&w, 8);
        if (s->n == 0) {
            new_tokens(&w, s);
            step_match(&w, s);
            if (s->n < DEPTH) step_grow(&w, s);
        } else if (what == 0) { /* all of it, tail first or head first */
            bool tail_first = pick(&w, 2) == 0;
            for (int32_t i = 0; i < s->n; i++)
                model_release(&w, s->blocks[tail_first ? s->n - 1 - i : i]);
            s->n = 0;
        } else if (what == 1) {
            model_release(&w, s->blocks[--s->n]);
        } else if (s->n < DEPTH) {
            step_grow(&w, s);
        }
        check(w.m);
        assert_int_equal(block_free_count(w.m), w.n_lru);
        assert_int_equal(block_held_count(w.m), POOL - w.n_lru);
        for (int32_t b = 0; b < POOL; b++) assert_int_equal(block_count(w.m, b), w.model[b].count);
    }
    assert_true(w.n_hits > n_steps / 100); /* the walk met what it is for */
    assert_true(w.n_orphans > n_steps / 1000);
    block_manager_destroy(w.m);
}

static void test_random_walk(void **state)
{
    (void)state;
    walk(0, 1, 40000);
    walk(1, 2, 20000);
    walk(15, 3, 20000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_create_refuses),  cmocka_unit_test(test_take_hold_release),
        cmocka_unit_test(test_lru_order),       cmocka_unit_test(test_match),
        cmocka_unit_test(test_match_limit),     cmocka_unit_test(test_register_does_nothing),
        cmocka_unit_test(test_parent_counts),   cmocka_unit_test(test_forgotten_parent),
        cmocka_unit_test(test_hash_collisions), cmocka_unit_test(test_shared_prompt),
        cmocka_unit_test(test_no_allocation),   cmocka_unit_test(test_random_walk),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
