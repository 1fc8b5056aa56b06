/* test_choice.c - the integers that a choice is made of, and the rules that devices choose by. */
#include "support.h"

#include <math.h>

#include "engine/sampler.h"
#include "ops/choice.h"

static void test_weights(void **state)
{
    (void)state;
    const uint64_t one = (uint64_t)1 << CHOICE_WEIGHT_BITS;
    assert_true(choice_weight(0) == one);
    assert_true(choice_weight(-0.0) == one);
    assert_true(choice_weight(CHOICE_LEAST_EXPONENT) == 0);
    assert_true(choice_weight(-31) == 1);
    for (int i = 0; i < 100000; i++) {
        double y = -32 * random_uniform(17, (uint64_t)i, 0), want = exp(y) * (double)one;
        double got = (double)choice_weight(y);
        if (fabs(got - want) > 8e-9 * want + 0.5)
            fail_msg("weight of %.17g: expected %.17g, found %.17g", y, want, got);
    }
    assert_true(choice_exponent(-INFINITY, 5, 2) == CHOICE_LEAST_EXPONENT);
    assert_true(choice_exponent(5, 5, 1e300) == 0);
    assert_true(choice_exponent(-1e300, 5, 1e300) == CHOICE_LEAST_EXPONENT);
}

static void test_need_and_draw(void **state)
{
    (void)state;
    const uint64_t huge = (uint64_t)1 << 63;
    assert_true(choice_need(0, huge) == 1);
    assert_true(choice_need(-1, huge) == 1);
    assert_true(choice_need(0x1p-126f, huge) == 1);
    assert_true(choice_need(0.5f, 1) == 1);
    assert_true(choice_need(0.5f, 10) == 5); /* exact: not rounded up */
    assert_true(choice_need(0.5f, 11) == 6);
    assert_true(choice_need(0.5f, huge) == huge / 2);
    assert_true(choice_need(0x1.fffffep-1f, huge) == huge - ((uint64_t)1 << 39));
    assert_true(choice_least(0) == 0);
    assert_true(choice_least(-1) == 0);
    assert_true(choice_least(0x1p-100f) == 1);
    assert_true(choice_least(0.25f) == (uint64_t)1 << 42);
    assert_true(choice_least(3) == (uint64_t)1 << 44);
    struct choice_rule rule = {.seed = 5};
    uint64_t below_half = 0;
    for (rule.position = 0; rule.position < 1000; rule.position++) {
        assert_true(choice_draw(&rule, 1) == 0);
        assert_true(choice_draw(&rule, 7) < 7);
        uint64_t r = random_u64(5, rule.position, 0);
        assert_true(choice_draw(&rule, huge) == r / 2);
        below_half += choice_draw(&rule, huge) < huge / 2;
    }
    assert_true(below_half > 400 && below_half < 600);
}

static const struct adjustment *find(const struct choice_rule *rule, int32_t id)
{
    const struct adjustment *found = NULL;
    for (int32_t i = 0; i < rule->n_adjustments; i++)
        if (rule->adjustments[i].id == id) {
            assert_null(found); /* each id once */
            found = &rule->adjustments[i];
        }
    return found;
}

static void test_rule(void **state)
{
    (void)state;
    enum { N = 100, ALLOWED = 90 };
    struct sampler *s = NULL;
    linnet_error err;
    assert_ok(sampler_create(N, &s, &err), err);
    const int32_t tokens[] = {5, 6, 5, 95, -1, /* output: */ 6, 7, 7, 8}, banned[] = {7, 50, N, -3};
    const linnet_logit_bias bias[] = {{6, 1.5f}, {9, -1e9f}, {6, 0.25f},
                                      {-1, 1},   {95, 1},    {3, NAN}};
    struct sampling g = {.top_p = 1, .repetition_penalty = 1};
    struct sample_context c = {
        .tokens = tokens, .n_prompt = 5, .n_output = 4, .n_allowed = ALLOWED, .stream = 2};
    struct adjustment adjustments[N];
    struct choice_rule rule;
    g.top_k = 3, g.top_p = 0.5f, g.min_p = 0.1f, g.seed = 11, g.temperature = 0.7f;
    assert_int_equal(sampler_rule_capacity(N, &g, &c), 0); /* nothing looks at the tokens */
    sampler_rule(s, &g, &c, adjustments, &rule);
    assert_int_equal(rule.n_adjustments, 0);
    assert_true(rule.top_k == 3 && rule.top_p == 0.5f && rule.min_p == 0.1f);
    assert_true(rule.seed == 11 && rule.position == 9 && rule.stream == 2);
    assert_true(rule.temperature == 0.7f && rule.n_allowed == ALLOWED);

    g.presence_penalty = 1; /* the output alone */
    assert_int_equal(sampler_rule_capacity(N, &g, &c), 4);
    sampler_rule(s, &g, &c, adjustments, &rule);
    assert_int_equal(rule.n_adjustments, 3);
    assert_true(find(&rule, 6)->count == 1 && !find(&rule, 6)->seen);
    assert_true(find(&rule, 7)->count == 2 && find(&rule, 8)->count == 1);

    g.repetition_penalty = 2, g.bias = bias, g.n_bias = 6, c.banned = banned, c.n_banned = 4;
    assert_int_equal(sampler_rule_capacity(N, &g, &c), 9 + 6 + 4);
    sampler_rule(s, &g, &c, adjustments, &rule);
    assert_int_equal(rule.n_adjustments, 6); /* 5, 6, 7, 8, 9, 50 */
    assert_true(find(&rule, 5)->seen && find(&rule, 5)->count == 0);
    const struct adjustment *six = find(&rule, 6);
    assert_true(six->bias == 1.75f && six->seen && six->count == 1 && !six->banned);
    assert_true(choice_adjusted(&rule, six, 1) == 2.75 / 2 - 1);
    assert_true(choice_adjusted(&rule, six, -3) == -1.25 * 2 - 1);
    assert_true(find(&rule, 7)->banned && choice_adjusted(&rule, find(&rule, 7), 1) == -INFINITY);
    assert_true(find(&rule, 9)->bias == -1e4f && !find(&rule, 9)->seen);
    assert_true(find(&rule, 50)->banned && !find(&rule, 50)->seen);

    c.n_allowed = N + 5; /* the capacity is never more than the vocabulary */
    sampler_rule(s, &g, &c, adjustments, &rule);
    assert_int_equal(rule.n_allowed, N);
    static int32_t many[1000];
    c.tokens = many, c.n_prompt = 1000, c.n_output = 0;
    assert_int_equal(sampler_rule_capacity(N, &g, &c), N);
    sampler_destroy(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_weights),
        cmocka_unit_test(test_need_and_draw),
        cmocka_unit_test(test_rule),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
