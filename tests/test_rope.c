/* RoPE tables of every kind of scaling against the reference in float64. */
#include "golden.h"

#include <math.h>

#include "model/rope.h"

static void check_variant(const char *name, const json_t *v, const struct arrays *a,
                          const double *positions)
{
    static const char *const kinds[] = {"default", "linear", "dynamic", "yarn", "llama3"};
    linnet_error err;
    struct rope rope;
    struct rope_config c = {.theta = number(v, "rope_theta"),
                            .factor = 1,
                            .beta_fast = 32,
                            .beta_slow = 1,
                            .truncate = true};
    const char *kind = json_string_value(json_object_get(v, "rope_type"));
    while (strcmp(kinds[c.kind], kind) != 0) c.kind++;
    if (json_object_get(v, "factor")) c.factor = number(v, "factor");
    c.original_context = 96; /* the dynamic model's; the others say theirs */
    if (json_object_get(v, "original_max_position_embeddings"))
        c.original_context = (int32_t)number(v, "original_max_position_embeddings");
    if (json_object_get(v, "low_freq_factor")) c.low_freq_factor = number(v, "low_freq_factor");
    if (json_object_get(v, "high_freq_factor")) c.high_freq_factor = number(v, "high_freq_factor");
    int32_t head_dim = (int32_t)number(v, "head_dim"), half = head_dim / 2;
    const json_t *seq_len = json_object_get(v, "seq_len");
    int32_t length = json_is_integer(seq_len) ? (int32_t)json_integer_value(seq_len) : 0;
    assert_ok(rope_create(&c, head_dim, 32768, NULL, &rope, &err), err);
    assert_true(fabs(rope.attention_factor - number(v, "attention_scaling")) < 1e-12);

    char key[100];
    size_t n;
    double inv_freq[64];
    snprintf(key, sizeof key, "%s.inv_freq", name);
    const double *want = arrays_find(a, key, sizeof(double), &n);
    assert_non_null(want);
    rope_inverse_frequencies(&rope, length, inv_freq);
    for (int32_t j = 0; j < half; j++) assert_true(fabs(inv_freq[j] - want[j]) <= 1e-12 * want[j]);
    for (int part = 0; part < 2; part++) {
        snprintf(key, sizeof key, "%s.%s", name, part ? "sin" : "cos");
        want = arrays_find(a, key, sizeof(double), &n);
        assert_int_equal(n, 6 * half);
        for (int p = 0; p < 6; p++) {
            float row[128];
            rope_row(&rope, (int32_t)positions[p], length, row);
            /* computed in double: one rounding of the result, and the angle's own error */
            for (int32_t j = 0; j < half; j++) {
                double bound = 0x1p-23 + positions[p] * 1e-13, got = row[part * half + j];
                if (!(fabs(got - want[p * half + j]) <= bound))
                    fail_msg("%s: position %g, pair %d: %.9g, expected %.9g", key, positions[p], j,
                             got, want[p * half + j]);
            }
        }
    }
    rope_destroy(&rope);
}

static void tables_equal_reference(void **state)
{
    (void)state;
    static const double positions[] = {0, 1, 15, 16, 2047, 32767};
    struct arrays a = arrays_open(data_path("golden/rope.safetensors"));
    json_t *json = load_json(data_path("golden/rope.json")), *variant;
    const char *name;
    int n = 0;
    json_object_foreach(json_object_get(json, "variants"), name, variant)
    {
        check_variant(name, variant, &a, positions);
        n++;
    }
    assert_true(n >= 9);
    json_decref(json);
    arrays_close(&a);
}

static void odd_sizes_are_refused(void **state)
{
    (void)state;
    linnet_error err;
    struct rope rope;
    struct rope_config c = {.theta = 10000, .factor = 1};
    assert_int_equal(rope_create(&c, 63, 16, NULL, &rope, &err), LINNET_UNSUPPORTED);
    assert_int_equal(rope_create(&c, 4096, 16, NULL, &rope, &err), LINNET_UNSUPPORTED);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tables_equal_reference),
        cmocka_unit_test(odd_sizes_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
