/* What `bench` measures besides requests: the machine's limits, and the operations of a step. */
#include "support.h"

#include "linnet.h"

static linnet_error err;

static linnet_model *open_tiny(void)
{
    linnet_model *model;
    assert_ok(linnet_model_open(data_path("qwen3-tiny"), &model, &err), err);
    return model;
}

/* No processor does more, so that a probe which the compiler has removed is found out: two vectors
 * of 64 bytes a cycle, at 8 GHz. */
static const double most = 2.0 * 2 * 64 * 8e9;

static void peaks_are_plausible(void **state)
{
    (void)state;
    linnet_peaks one, two;
    linnet_measure_peaks("cpu", 1, &one);
    linnet_measure_peaks("cpu", 2, &two);
    assert_true(one.fp32 > 1e8 && one.fp32 < most / 4);
    assert_true(one.int8 >= 0 && one.int8 < most);
    assert_true(one.bf16 >= 0 && one.bf16 < most / 2);
    assert_true(two.fp32 > 1e8 && two.fp32 < most / 2);
    assert_true((two.int8 > 0) == (one.int8 > 0));
    linnet_measure_peaks("nothing", 1, &two);
    assert_true(two.fp32 == 0 && two.int8 == 0 && two.bf16 == 0);
}

static void the_peak_of_a_type(void **state)
{
    (void)state;
    static const struct {
        const char *dtype, *arithmetic;
        double peak;
    } cases[] = {{"F32", "fp32", 1},  {"F16", "fp32", 1},  {"BF16", "bf16", 4}, {"Q8_0", "int8", 2},
                 {"Q4_1", "int8", 2}, {"q6_k", "int8", 2}, {"none", "fp32", 1}};
    linnet_peaks all = {.fp32 = 1, .int8 = 2, .bf16 = 4}, few = {.fp32 = 1};
    const char *arithmetic;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_true(linnet_peak_of(&all, cases[i].dtype, &arithmetic) == cases[i].peak);
        assert_string_equal(arithmetic, cases[i].arithmetic);
        assert_true(linnet_peak_of(&few, cases[i].dtype, &arithmetic) == 1);
        assert_string_equal(arithmetic, "fp32");
        assert_true(linnet_peak_of(&few, cases[i].dtype, NULL) == 1);
    }
}

enum { MAX_ROWS = 64, ROWS = 8 }; /* rows of a step */

struct rows {
    linnet_operation_row rows[MAX_ROWS];
    size_t n;
};

static void on_row(void *user, const linnet_operation_row *row)
{
    struct rows *rows = user;
    assert_true(rows->n < MAX_ROWS);
    rows->rows[rows->n++] = *row;
}

/* Seven operations and their sum. */
static void check_step(const linnet_operation_row *rows, const char *what, int32_t batch,
                       int32_t prompt)
{
    static const char *const names[ROWS] = {"embed",   "qkv",  "attention", "o_proj",
                                            "gate_up", "down", "head",      "step"};
    double seconds = 0, share = 0, bytes = 0, flops = 0, least = 0;
    for (int i = 0; i < ROWS; i++) {
        assert_string_equal(rows[i].operation, names[i]);
        assert_string_equal(rows[i].what, what);
        assert_int_equal(rows[i].batch, batch);
        assert_int_equal(rows[i].prompt, prompt);
        assert_true(rows[i].seconds >= 0 && rows[i].bytes > 0);
        if (i == ROWS - 1) break;
        seconds += rows[i].seconds;
        share += rows[i].step_share;
        bytes += rows[i].bytes;
        flops += rows[i].flops;
        least += rows[i].least_seconds;
    }
    const linnet_operation_row *step = &rows[ROWS - 1];
    assert_true(seconds > 0 && step->seconds == seconds && step->step_share == 1);
    assert_true(share > 0.999 && share < 1.001);
    assert_true(step->bytes == bytes && step->flops == flops && step->least_seconds == least);
}

/* qwen3-tiny: 2 layers of width 160, 4 heads of 64, 2 KV heads, feed-forward 288, 480 tokens. */
static void check_work(const linnet_operation_row *rows, double tokens, double logits, double keys)
{
    enum { LAYERS = 2, HIDDEN = 160, Q = 256, KV = 128, FF = 288, VOCAB = 480 };
    assert_true(rows[0].flops == 0);
    assert_true(rows[1].flops == 2 * tokens * LAYERS * HIDDEN * (Q + 2 * KV));
    assert_true(rows[2].flops == 4 * keys * LAYERS * Q);
    assert_true(rows[3].flops == 2 * tokens * LAYERS * HIDDEN * Q);
    assert_true(rows[4].flops == 2 * tokens * LAYERS * HIDDEN * 2 * FF);
    assert_true(rows[5].flops == 2 * tokens * LAYERS * HIDDEN * FF);
    assert_true(rows[6].flops == 2 * logits * HIDDEN * VOCAB);
    for (int i = 0; i < ROWS; i++) { /* the peaks below are 1 for fp32 and 4 for bf16 */
        double peak = rows[i].flops / rows[i].least_seconds;
        if (i == 2) assert_true(peak == 1);
        if (i == 1 || (i > 2 && i < ROWS - 1)) assert_true(peak == 4);
    }
}

static void operations_of_steps(void **state)
{
    (void)state;
    linnet_model *model = open_tiny();
    static const int32_t prompts[] = {5, 40}, batches[] = {1, 3};
    linnet_engine_options engine = {.device = "cpu",
                                    .threads = 2,
                                    .max_num_seqs = 3,
                                    .max_num_batched_tokens = 16, /* 40 tokens take three steps */
                                    .max_model_len = 64};
    linnet_operations_options what = {prompts, batches, 2, 2, 2, 3};
    linnet_peaks peaks = {.fp32 = 1, .bf16 = 4};
    struct rows got = {0};
    assert_ok(linnet_operations(model, &engine, &what, &peaks, on_row, &got, &err), err);
    assert_int_equal(got.n, 2 * 3 * ROWS);
    for (int p = 0; p < 2; p++) {
        const linnet_operation_row *rows = got.rows + p * 3 * ROWS;
        double n = prompts[p];
        check_step(rows, "prefill", 1, prompts[p]);
        check_work(rows, n, 1, n * (n + 1) / 2);
        for (int b = 0; b < 2; b++) {
            check_step(rows + (b + 1) * ROWS, "decode", batches[b], prompts[p]);
            check_work(rows + (b + 1) * ROWS, batches[b], batches[b], batches[b] * (n + 1));
        }
    }
    /* every weight once a step: three for 40 tokens, one for 5 */
    assert_true(got.rows[3 * ROWS + 4].bytes == 3 * got.rows[4].bytes);
    linnet_model_close(model);
}

static void expect_refused(const linnet_model *model, linnet_engine_options engine,
                           linnet_operations_options what, linnet_status status, const char *words)
{
    linnet_peaks peaks = {.fp32 = 1};
    struct rows got = {0};
    assert_int_equal(linnet_operations((linnet_model *)(uintptr_t)model, &engine, &what, &peaks,
                                       on_row, &got, &err),
                     status);
    if (!strstr(err.message, words)) fail_msg("\"%s\" lacks \"%s\"", err.message, words);
    assert_int_equal(got.n, 0);
}

static void what_cannot_be_measured(void **state)
{
    (void)state;
    linnet_model *model = open_tiny(), *bare;
    static const int32_t eight[] = {8}, none[] = {0}, many[] = {9};
    linnet_engine_options engine = {.device = "cpu", .max_num_seqs = 8, .max_model_len = 9};
    linnet_operations_options what = {eight, eight, 1, 1, 1, 1};
    struct rows got = {0};
    linnet_peaks unknown = {0};
    assert_ok(linnet_operations(model, &engine, &what, &unknown, on_row, &got, &err), err);
    assert_true(got.rows[ROWS - 1].least_seconds == 0);
    engine.max_model_len = 8;
    expect_refused(model, engine, what, LINNET_TOO_LONG, "max_model_len 8");
    engine.max_model_len = 9;
    what.prompts = none;
    expect_refused(model, engine, what, LINNET_TOO_LONG, "prompt");
    what.prompts = eight;
    what.batches = many;
    expect_refused(model, engine, what, LINNET_INVALID, "max_num_seqs (8)");
    what.batches = none;
    expect_refused(model, engine, what, LINNET_INVALID, "found 0");
    what.batches = eight;
    engine.kv_cache_memory = 64 << 10;
    expect_refused(model, engine, what, LINNET_TOO_LONG, "kv_cache_memory");
    engine.kv_cache_memory = 0;
    what.repeat = 0;
    expect_refused(model, engine, what, LINNET_INVALID, "repeat");
    what.repeat = 1;
    what.decode_steps = 0;
    expect_refused(model, engine, what, LINNET_INVALID, "decode_steps");
    engine.device = "no such";
    expect_refused(model, engine, what, LINNET_INVALID, "no such");
    engine.device = "cpu";
    assert_ok(linnet_model_open_tokenizer(data_path("qwen3-tiny/tokenizer.json"), &bare, &err),
              err);
    expect_refused(bare, engine, what, LINNET_INVALID, "tokenizer");
    linnet_model_close(bare);
    linnet_model_close(model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(peaks_are_plausible),
        cmocka_unit_test(the_peak_of_a_type),
        cmocka_unit_test(operations_of_steps),
        cmocka_unit_test(what_cannot_be_measured),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
