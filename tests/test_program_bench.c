/* `linnet bench` as people run it, with a tiny model of tests/data. */
#include "program.h"

static void bench_rows(void **state)
{
    (void)state;
    static const char *const keys[] = {"what",     "device",          "dtype",   "batch",
                                       "prompt",   "generated",       "ms_step", "tok_s",
                                       "gbytes_s", "bandwidth_share", "tflops",  "peak_share"};
    RUN(NULL, "bench", "-m", tiny_path(), "--json", "--batch", "1,2", "--prompt", "16,8",
        "--generated", "8", "--repeat", "1");
    assert_code(0);
    json_t *json = output_json(), *row;
    size_t i;
    assert_int_equal(json_array_size(json), 6); /* 2 prefills, 2 batches after 2 prompts */
    json_array_foreach(json, i, row)
    {
        for (size_t k = 0; k < sizeof keys / sizeof *keys; k++)
            assert_non_null(json_object_get(row, keys[k]));
        assert_true(json_number_value(json_object_get(row, "tok_s")) > 0);
    }
    json_decref(json);
    RUN(NULL, "bench", "ladder", "-m", tiny_path(), "--prompt", "8", "--generated", "4", "--json");
    assert_code(0);
    json = output_json();
    assert_true(json_array_size(json) >= 6);
    row = json_array_get(json, 2);
    assert_string_equal(json_string_value(json_object_get(row, "stage")), "paged cache, gathered");
    json_decref(json);
}

static void ladder(void **state)
{
    (void)state;
    RUN(NULL, "bench", "ladder", "-m", tiny_path(), "--dry-run");
    assert_code(0);
    assert_contains(result.out, "KV cache");
    assert_null(strstr(result.out, "stage"));
    RUN(NULL, "bench", "ladder", "-m", tiny_path(), "--device", "cpu", "--prompt", "8",
        "--generated", "8", "--kv-cache-dtype", "int8"); /* every stage in 8 bits: same tokens */
    assert_code(0);
    RUN_INTO("/dev/full", "bench", "ladder", "-m", tiny_path(), "--prompt", "4", "--generated",
             "2");
    assert_code(1);
    assert_contains(result.err, "No space left");
}

/* Where the time goes: as a table and as JSON, and the machine alone, which takes no model. */
static void operations(void **state)
{
    (void)state;
    json_t *json, *row;
    size_t i;
    double shares = 0;
    RUN(NULL, "bench", "--operations", "-m", tiny_path(), "--device", "cpu", "--prompt", "8",
        "--batch", "2", "--generated", "4", "--json");
    assert_code(0);
    json = output_json();
    assert_int_equal(json_array_size(json), 16); /* of prefill and decode */
    json_array_foreach(json, i, row)
    {
        static const char *const keys[] = {
            "what", "operation", "device",          "dtype",      "batch",  "prompt",
            "ms",   "gbytes_s",  "bandwidth_share", "step_share", "gflops", "peak_share"};
        for (size_t k = 0; k < sizeof keys / sizeof *keys; k++)
            assert_non_null(json_object_get(row, keys[k]));
        shares += json_number_value(json_object_get(row, "step_share"));
    }
    assert_true(shares > 3.99 && shares < 4.01); /* the operations' and the whole step's, twice */
    json_decref(json);
    RUN(NULL, "bench", "--operations", "-m", tiny_path(), "--device", "cpu", "--prompt", "8",
        "--generated", "0");
    assert_code(0);
    assert_contains(result.out, "fp32");
    assert_contains(result.out, "prefill of 8 tokens");
    assert_contains(result.out, "gate_up");
    assert_null(strstr(result.out, "decode"));
    RUN_INTO("/dev/full", "bench", "--operations", "-m", tiny_path(), "--device", "cpu", "--prompt",
             "8", "--generated", "2");
    assert_code(1);
    assert_contains(result.err, "No space left");
    RUN(NULL, "bench", "limits", "--device", "cpu", "-t", "1", "--json");
    assert_code(0);
    json = output_json();
    assert_true(json_number_value(json_object_get(json, "read_gbytes_s")) > 0);
    assert_true(json_number_value(json_object_get(json, "fp32_gflops")) > 0);
    json_decref(json);
    RUN(NULL, "bench", "limits", "-m", tiny_path());
    assert_code(2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bench_rows),
        cmocka_unit_test(ladder),
        cmocka_unit_test(operations),
    };
    return cmocka_run_group_tests(tests, prepare, tidy_up);
}
