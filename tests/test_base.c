/* The base room: errors that are safe to print, buffers, reader bounds, threads, random numbers. */
#include "support.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/dtype.h"
#include "base/memory.h"
#include "base/random.h"
#include "base/reader.h"
#include "base/strbuf.h"
#include "base/threads.h"

static void error_is_printable(void **state)
{
    (void)state;
    linnet_error err;
    assert_int_equal(error_set(&err, LINNET_IO, "a\x1b[2J\n\xff\xc3\xa9\xc2\x85%s", "\xe2\x82"),
                     LINNET_IO);
    assert_string_equal(err.message, "a?[2J??\xc3\xa9????");
    error_prefix(&err, "file %d", 7);
    assert_string_equal(err.message, "file 7: a?[2J??\xc3\xa9????");
    assert_int_equal(error_set(NULL, LINNET_IO, "x"), LINNET_IO);
}

static void reader_stays_inside(void **state)
{
    (void)state;
    uint8_t bytes[5] = {1, 2, 3, 4, 5};
    struct reader r = {bytes, 5, 0};
    uint32_t u;
    uint64_t w;
    const uint8_t *p;
    assert_false(reader_u64(&r, &w));
    assert_true(reader_u32(&r, &u));
    assert_int_equal(u, 0x04030201);
    assert_false(reader_bytes(&r, SIZE_MAX, &p));
    assert_false(reader_bytes(&r, 2, &p));
    assert_true(reader_bytes(&r, 1, &p));
    assert_true(reader_bytes(&r, 0, &p));
    assert_int_equal(r.pos, 5);
}

static void strbuf_grows(void **state)
{
    (void)state;
    struct strbuf b = {0};
    for (int i = 0; i < 1000; i++) strbuf_format(&b, "%d,", i);
    assert_int_equal(b.size, 3890);
    strbuf_clear(&b);
    strbuf_utf8(&b, 0x24);
    strbuf_utf8(&b, 0xE9);
    strbuf_utf8(&b, 0x20AC);
    strbuf_utf8(&b, 0x1F999);
    assert_string_equal(strbuf_cstr(&b), "$é€🦙");
    strbuf_append(&b, "x", SIZE_MAX - 2);
    assert_true(b.failed);
    strbuf_free(&b);
}

static void half_precision_round_trip(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 0x10000; h++) {
        float f = f32_from_f16((uint16_t)h);
        if (f == f) assert_int_equal(f16_from_f32(f), h);
    }
    assert_int_equal(f16_from_f32(65519.9f), 0x7BFF);
    assert_int_equal(f16_from_f32(65520.0f), 0x7C00);
    assert_int_equal(bf16_from_f32(1.00390625f), 0x3F80); /* a tie goes to even */
    assert_int_equal(bf16_from_f32(1.01171875f), 0x3F82);
}

struct counter {
    int seen[4096];
};

static void count_share(void *arg, int thread, int n_threads)
{
    struct counter *c = arg;
    int64_t begin, end;
    pool_share(4096, 16, thread, n_threads, &begin, &end);
    for (int64_t i = begin; i < end; i++) c->seen[i]++;
}

static void pool_does_each_item_once(void **state)
{
    (void)state;
    linnet_error err;
    for (int n = 1; n <= 5; n++) {
        struct pool *pool;
        struct counter c = {0};
        assert_ok(pool_create(n, &pool, &err), err);
        for (int round = 0; round < 500; round++) {
            if (round % 50 == 0) usleep(2000); /* long enough that the others fall asleep */
            pool_run(pool, count_share, &c);
        }
        for (int i = 0; i < 4096; i++) assert_int_equal(c.seen[i], 500);
        pool_destroy(pool);
    }
    struct pool *none;
    assert_int_equal(pool_create(-1, &none, &err), LINNET_INVALID);
}

/* Known answers of Philox 4x32-10, from its authors' published test vectors. */
static void random_known_answers(void **state)
{
    (void)state;
    assert_int_equal((uint32_t)random_u64(0, 0, 0), 0x6627e8d5);
    assert_int_equal((uint32_t)(random_u64(0, 0, 0) >> 32), 0xe169c58d);
    assert_int_equal((uint32_t)random_u64(~0ull, ~0ull, ~0ull), 0x408f276d);
    double sum = 0;
    for (uint64_t i = 0; i < 100000; i++) sum += random_uniform(42, i, 0);
    assert_true(sum > 49500 && sum < 50500);
}

/* The system says of the pages what was asked for. Where it knows no such thing, all say so. */
static void pages_over_all_nodes(void **state)
{
    (void)state;
    enum { BYTES = 1 << 20 };
    int policy = -1;
    char *pages = mem_pages(BYTES, true);
    assert_non_null(pages);
    bool known = syscall(SYS_get_mempolicy, &policy, NULL, 0, pages, MPOL_F_ADDR) == 0;
    assert_int_equal(mem_interleave(pages, BYTES), known);
    if (known) {
        assert_int_equal(
            syscall(SYS_get_mempolicy, &policy, NULL, 0, pages + BYTES - 1, MPOL_F_ADDR), 0);
        assert_int_equal(policy, MPOL_INTERLEAVE);
    }
    pages[BYTES - 1] = 1;
    mem_pages_free(pages, BYTES);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(error_is_printable),
        cmocka_unit_test(reader_stays_inside),
        cmocka_unit_test(strbuf_grows),
        cmocka_unit_test(half_precision_round_trip),
        cmocka_unit_test(pool_does_each_item_once),
        cmocka_unit_test(random_known_answers),
        cmocka_unit_test(pages_over_all_nodes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
