/*
 * Every model of the reference set, from safetensors and GGUF, against what Hugging Face computed:
 * tensors between operations, logits, greedy tokens, log-probabilities, likelihood. The tolerances
 * are those of the set's README. Where activations stay fp32 and weights exact: rms_rel <= 4 *
 * hf_fp32_error_vs_float64 + 1e-7 and max_abs <= 10 * the same. Where they are bf16 (a GPU, bf16
 * weights on some CPUs): rms_rel <= 1.5 * hf_bf16_error and max_abs <= 2.5 * the same; where
 * quantized weights take them in 8 bits, likewise with int8_activation_error.
 */
#include "golden.h"

#include <math.h>

#include "base/threads.h"
#include "engine/api_internal.h"
#include "model/simple.h"
#include "ops/cpu/kernels.h"

struct fixture {
    struct checkpoint *cp;
    struct model_config config;
    struct pool *pool;
    struct decoder *decoder;
    struct simple *simple;
    json_t *golden;
    struct arrays arrays;
    char label[200];
    int compared;                   /* arrays of the golden that were looked at */
    enum { FP32, BF16, INT8 } rule; /* which of the golden's errors are to be expected */
};

static void open_model(struct fixture *f, const char *model, const char *golden_root,
                       const char *golden, const struct ops *ops, int threads)
{
    linnet_error err;
    char path[1400];
    *f = (struct fixture){0};
    snprintf(f->label, sizeof f->label, "%s on %s", strrchr(model, '/') + 1,
             ops == &ops_cpu ? ops_cpu_kernels() : ops->name);
    snprintf(path, sizeof path, "%s/%s.json", golden_root, golden);
    f->golden = load_json(path);
    snprintf(path, sizeof path, "%s/%s.safetensors", golden_root, golden);
    f->arrays = arrays_open(path);
    assert_ok(checkpoint_open(model, &f->cp, &err), err);
    assert_ok(model_config_read(f->cp, &f->config, &err), err);
    assert_ok(pool_create(threads, &f->pool, &err), err);
    struct limits limits = {
        .max_tokens = 320, .max_logits = 320, .max_seqs = 1, .max_context = 320, .n_blocks = 20};
    assert_ok(
        decoder_create(f->cp, &f->config, ops, f->pool, &limits, NULL, NULL, &f->decoder, &err),
        err);
    double error = f->decoder->activation_error;
    f->rule = error == 0 ? FP32 : error < 0.002 ? BF16 : INT8;
    assert_ok(simple_create(f->decoder, &f->simple, &err), err);
}

/* Every array of the golden but the likelihoods and those of smaller operations has been compared.
 */
static void close_model(struct fixture *f)
{
    static const char *const inner[] = {"nll.",   "in_norm", "post_norm", "final_norm", "_proj",
                                        "q_norm", "k_norm",  ".gate",     ".up"};
    const char *name;
    json_t *entry;
    int expected = 0;
    json_object_foreach(f->arrays.header, name, entry)
    {
        bool other = strcmp(name, "__metadata__") == 0;
        for (size_t i = 0; i < sizeof inner / sizeof *inner; i++)
            other |= strstr(name, inner[i]) != NULL;
        expected += !other;
    }
    if (f->compared != expected)
        fail_msg("%s: compared %d arrays of %d", f->label, f->compared, expected);
    simple_destroy(f->simple);
    decoder_destroy(f->decoder);
    pool_destroy(f->pool);
    checkpoint_close(f->cp);
    json_decref(f->golden);
    arrays_close(&f->arrays);
}

/* Compares with an array of the golden by the error of the class `kind` that it states. */
static void compare(struct fixture *f, const char *name, const char *kind, const float *got,
                    size_t count)
{
    size_t n;
    const float *want = arrays_find(&f->arrays, name, sizeof(float), &n);
    if (!want) return; /* not every model has every tensor */
    assert_int_equal(n, count);
    f->compared++;
    static const char *const errors[] = {"hf_fp32_error_vs_float64", "hf_bf16_error",
                                         "int8_activation_error"};
    /* of 8 bits the golden states the error of the last rows alone */
    if (f->rule == INT8 && strcmp(kind, "logits.p40.all") == 0) kind = "logits.last";
    const json_t *error = json_object_get(json_object_get(f->golden, errors[f->rule]), kind);
    if (!error) fail_msg("%s: golden has no error for %s", f->label, kind);
    double max = 0, sum = 0, sum_want = 0;
    for (size_t i = 0; i < n; i++) {
        double d = (double)got[i] - want[i];
        if (!(fabs(d) <= max)) max = fabs(d);
        sum += d * d;
        sum_want += (double)want[i] * want[i];
    }
    double rms_rel = sqrt(sum / sum_want), rms_bound = 4 * number(error, "rms_rel") + 1e-7;
    double max_bound = 10 * number(error, "max_abs") + 1e-7 * number(error, "ref_max");
    if (f->rule != FP32)
        rms_bound = 1.5 * number(error, "rms_rel"), max_bound = 2.5 * number(error, "max_abs");
    if (!(rms_rel <= rms_bound) || !(max <= max_bound))
        fail_msg("%s: %s: rms_rel %.3g (bound %.3g), max_abs %.3g (bound %.3g)", f->label, name,
                 rms_rel, rms_bound, max, max_bound);
}

static void check_logits(struct fixture *f, const int32_t *ids, int32_t n)
{
    linnet_error err;
    char name[64];
    size_t vocab = (size_t)f->config.shape.vocab;
    float *logits = malloc((size_t)n * vocab * sizeof(float));
    assert_ok(simple_forward(f->simple, ids, n, 0, n, 0, true, logits, &err), err);
    snprintf(name, sizeof name, "logits.p%d.all", n);
    compare(f, name, "logits.p40.all", logits, (size_t)n * vocab);
    snprintf(name, sizeof name, "logits.p%d.last", n);
    compare(f, name, "logits.last", logits + (size_t)(n - 1) * vocab, vocab);
    free(logits);
}

static double log_sum_exp(const float *x, int32_t n)
{
    double max = x[0], sum = 0;
    for (int32_t i = 1; i < n; i++) max = x[i] > max ? x[i] : max;
    for (int32_t i = 0; i < n; i++) sum += exp(x[i] - max);
    return max + log(sum);
}

static void check_top20(struct fixture *f, const json_t *top20, const int32_t *tokens,
                        int32_t n_prompt)
{
    linnet_error err;
    int32_t vocab = f->config.shape.vocab;
    float *logits = malloc((size_t)vocab * sizeof(float));
    size_t n_steps = f->rule == FP32 ? json_array_size(top20) : 0; /* stated for fp32 alone */
    for (size_t step = 0; step < n_steps; step++) {
        const json_t *entry = json_array_get(top20, step), *ids = json_object_get(entry, "ids");
        int32_t n = n_prompt + (int32_t)step;
        assert_ok(simple_forward(f->simple, tokens, n_prompt, step ? n - 1 : 0, n, 0, false, logits,
                                 &err),
                  err);
        double norm = log_sum_exp(logits, vocab);
        for (size_t i = 0; i < json_array_size(ids); i++) {
            double want = json_number_value(json_array_get(json_object_get(entry, "logprobs"), i));
            double got = logits[json_integer_value(json_array_get(ids, i))] - norm;
            if (!(fabs(got - want) <= 1e-4))
                fail_msg("%s: step %zu, top %zu: log-prob %g, expected %g", f->label, step, i, got,
                         want);
        }
    }
    free(logits);
}

/* Whether rounding may choose another token here: it changes gaps by as much as this one. */
static bool near_tie(const struct fixture *f, const json_t *prompt, int32_t t)
{
    double gap = json_number_value(json_array_get(json_object_get(prompt, "gap"), (size_t)t));
    const json_t *noise =
        f->rule == INT8
            ? json_object_get(json_object_get(f->golden, "int8_activation_error"), "gap_noise")
            : json_object_get(f->golden, "bf16_gap_noise");
    return f->rule != FP32 && gap <= 4 * number(noise, "rms");
}

/* Logits of every prompt; with `generate` the 48 tokens and the log-probabilities along them too.
 */
static void check_prompts(struct fixture *f, bool generate)
{
    linnet_error err;
    size_t i;
    json_t *prompt;
    json_array_foreach(json_object_get(f->golden, "prompts"), i, prompt)
    {
        int32_t n, n_new;
        int32_t *ids = integers(json_object_get(prompt, "ids"), 64, &n);
        check_logits(f, ids, n);
        const json_t *greedy = json_object_get(prompt, "greedy_fp32");
        if (generate && json_is_array(greedy)) {
            int32_t *want = integers(greedy, 0, &n_new);
            assert_int_equal(n_new, 48);
            assert_ok(simple_generate(f->simple, ids, n, n_new, f->config.shape.vocab, true, &err),
                      err);
            for (int32_t t = 0; t < n_new; t++) {
                if (ids[n + t] == want[t]) continue;
                if (near_tie(f, prompt, t)) break; /* what follows is another text */
                fail_msg("%s: prompt of %d: token %d is %d, expected %d", f->label, n, t,
                         ids[n + t], want[t]);
            }
            check_top20(f, json_object_get(prompt, "top20"), ids, n);
            free(want);
        }
        free(ids);
    }
}

static double logits_error(const struct fixture *f, const char *kind)
{
    return number(json_object_get(json_object_get(f->golden, kind), "logits.last"), "rms_rel");
}

static void check_likelihood(struct fixture *f)
{
    linnet_error err;
    const json_t *nll = json_object_get(f->golden, "nll");
    int32_t n, vocab = f->config.shape.vocab;
    int32_t *ids = integers(json_object_get(nll, "ids"), 0, &n);
    float *logits = malloc((size_t)n * (size_t)vocab * sizeof(float));
    assert_ok(simple_forward(f->simple, ids, n, 0, n, 0, true, logits, &err), err);
    size_t count;
    const float *want = arrays_find(&f->arrays, "nll.per_token", sizeof(float), &count);
    double sum = 0;
    for (int32_t t = 1; t < n; t++) {
        const float *row = logits + (size_t)(t - 1) * (size_t)vocab;
        double loss = log_sum_exp(row, vocab) - row[ids[t]];
        if (f->rule == FP32 && !(fabs(loss - want[t - 1]) <= 1e-4))
            fail_msg("%s: token %d: likelihood %g, expected %g", f->label, t, loss, want[t - 1]);
        sum += loss;
    }
    double mean = sum / (n - 1), expected = number(nll, "mean_fp32");
    double bound = 1e-5;
    if (f->rule != FP32) {
        double noise = number(nll, "rms_bf16_per_token");
        if (f->rule == INT8)
            noise *= logits_error(f, "int8_activation_error") / logits_error(f, "hf_bf16_error");
        bound = 3 * noise / sqrt(n - 1) + 0.002;
    }
    if (!(fabs(mean - expected) <= bound))
        fail_msg("%s: mean likelihood %.8f, expected %.8f", f->label, mean, expected);
    free(logits);
    free(ids);
}

/* ---- tensors between the operations ------------------------------------------------------ */

struct observation {
    struct fixture *f;
    int32_t rows[16], n_rows, n_tokens;
};

static void compare_buffer(const struct observation *o, enum buffer which, size_t width,
                           int32_t layer, const char *tensor)
{
    char name[64];
    float *values = malloc((size_t)o->n_rows * width * sizeof(float));
    const struct decoder *d = o->f->decoder;
    for (int32_t i = 0; i < o->n_rows; i++)
        d->ops->read_buffer(d->backend, which, o->rows[i], values + (size_t)i * width);
    if (layer < 0)
        snprintf(name, sizeof name, "op.%s", tensor);
    else
        snprintf(name, sizeof name, "op.L%d.%s", layer, tensor);
    compare(o->f, name, name + 3, values, (size_t)o->n_rows * width);
    free(values);
}

static void compare_cache(const struct observation *o, int32_t layer)
{
    char name[64];
    const struct decoder *d = o->f->decoder;
    size_t width = (size_t)(d->config->shape.n_kv_heads * d->config->shape.head_dim),
           all = (size_t)o->n_tokens * width;
    float *k = malloc(all * sizeof(float)), *v = malloc(all * sizeof(float));
    for (int32_t t = 0; t < o->n_tokens; t++)
        d->ops->read_kv(d->backend, layer, t, k + (size_t)t * width, v + (size_t)t * width);
    snprintf(name, sizeof name, "op.L%d.k_rope", layer);
    compare(o->f, name, name + 3, k, all);
    snprintf(name, sizeof name, "op.L%d.v", layer);
    compare(o->f, name, name + 3, v, all);
    free(k);
    free(v);
}

static void observe(void *user, const char *operation, int32_t layer)
{
    const struct observation *o = user;
    const struct shape *s = &o->f->config.shape;
    size_t hidden = (size_t)s->hidden, q = (size_t)(s->n_heads * s->head_dim);
    if (strcmp(operation, "embed") == 0) {
        compare_buffer(o, BUFFER_X, hidden, -1, "embed");
        compare_buffer(o, BUFFER_X, hidden, 0, "x");
    } else if (strcmp(operation, "qkv") == 0) {
        compare_buffer(o, BUFFER_Q, q, layer, "q_rope");
        compare_cache(o, layer);
    } else if (strcmp(operation, "attention") == 0) {
        compare_buffer(o, BUFFER_ATTN, q, layer, "attn");
    } else if (strcmp(operation, "o_proj") == 0) {
        compare_buffer(o, BUFFER_X, hidden, layer, "attn_resid");
    } else if (strcmp(operation, "gate_up") == 0) {
        compare_buffer(o, BUFFER_ACT, (size_t)s->intermediate, layer, "act");
    } else if (strcmp(operation, "down") == 0) {
        compare_buffer(o, BUFFER_X, hidden, layer, "out");
        compare_buffer(o, BUFFER_X, hidden, layer + 1, "x");
    }
}

static void check_operations(struct fixture *f)
{
    linnet_error err;
    size_t i;
    json_t *prompt, *row;
    struct observation o = {.f = f};
    json_array_foreach(json_object_get(f->golden, "ops_rows"), i, row) o.rows[o.n_rows++] =
        (int32_t)json_integer_value(row);
    json_array_foreach(json_object_get(f->golden, "prompts"), i, prompt)
    {
        int32_t n;
        int32_t *ids = integers(json_object_get(prompt, "ids"), 0, &n), seq[321],
                query_start[2] = {0, n};
        for (int32_t t = 0; t < 321; t++) seq[t] = t;
        int32_t lens[321], last = n - 1;
        for (int32_t t = 0; t < n; t++) lens[t] = n;
        struct step step = {n, 1, 1, 20, ids, seq, seq, query_start, &n, seq, &last, lens};
        o.n_tokens = n;
        if (n == 40) assert_ok(decoder_step_observed(f->decoder, &step, observe, &o, &err), err);
        free(ids);
    }
}

/* `thorough`: the portable kernels too, and tokens from the (slow) reference backend. */
static void run_model(const char *model, const char *golden_root, const char *golden, bool thorough)
{
    struct fixture f;
    if (!EMULATED) {
        open_model(&f, model, golden_root, golden, &ops_reference, 1);
        check_operations(&f);
        check_prompts(&f, thorough);
        check_likelihood(&f);
        close_model(&f);
    }
    for (int i = 0; kernels_usable(i); i++) {
        const char *set = kernels_usable(i)->name;
        if ((!thorough || EMULATED) && strcmp(set, "generic") == 0) continue;
        assert_true(ops_cpu_force(set));
        open_model(&f, model, golden_root, golden, &ops_cpu, EMULATED ? 1 : 2);
        check_operations(&f);
        check_prompts(&f, true);
        check_likelihood(&f);
        close_model(&f);
    }
    ops_cpu_force(NULL);
    struct device gpu;
    if (find_device("cuda", &gpu, NULL) != LINNET_OK) return;
    print_message("%s: %s\n", gpu.text, golden);
    open_model(&f, model, golden_root, golden, gpu.ops, 2);
    check_operations(&f);
    check_prompts(&f, true);
    check_likelihood(&f);
    close_model(&f);
}

static void own_models(void **state)
{
    (void)state;
    char model[1200], root[1200];
    snprintf(root, sizeof root, "%s", data_path("golden"));
    snprintf(model, sizeof model, "%s", data_path("qwen2-nano-f32"));
    run_model(model, root, "qwen2-nano-f32", true);
    snprintf(model, sizeof model, "%s", data_path("gguf/qwen2-nano-f32.gguf"));
    run_model(model, root, "qwen2-nano-f32", true);
    snprintf(model, sizeof model, "%s", data_path("gguf/qwen2-mini-q4_k_mix.gguf"));
    run_model(model, root, "gguf-qwen2-mini-q4_k_mix", true);
    snprintf(model, sizeof model, "%s", data_path("qwen3-tiny"));
    run_model(model, root, "qwen3-tiny", true);
}

static void reference_models(void **state)
{
    (void)state;
    static const char *const directories[] = {
        "qwen2-tiny", "qwen2-seedlike", "llama-tiny",    "qwen3-tiny",     "smollm2-shape",
        "qwen2-yarn", "llama-linear",   "llama-dynamic", "qwen2-nano-f32", "qwen2-nano-f16"};
    if (EMULATED || !reference_path("golden")) skip();
    char model[1200], root[1200];
    snprintf(root, sizeof root, "%s", reference_path("golden"));
    for (size_t i = 0; i < sizeof directories / sizeof *directories; i++) {
        snprintf(model, sizeof model, "%s", reference_path(directories[i]));
        run_model(model, root, directories[i], false);
    }
}

static void reference_gguf(void **state)
{
    (void)state;
    static const char *const files[] = {
        "llama-tiny-bf16",     "qwen2-nano-f32",  "qwen2-nano-f16",  "smollm2-shape-q4_0",
        "qwen2-mini-bf16",     "qwen2-mini-q8_0", "qwen2-mini-q4_0", "qwen2-mini-q4_1",
        "qwen2-mini-q4_k_mix", "qwen2-mini-q6_k"};
    if (EMULATED || !reference_path("gguf")) skip();
    char model[1200], root[1200], golden[100], path[1400];
    snprintf(root, sizeof root, "%s", reference_path("golden"));
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        snprintf(model, sizeof model, "%s/%s.gguf", reference_path("gguf"), files[i]);
        snprintf(golden, sizeof golden, "gguf-%s", files[i]);
        snprintf(path, sizeof path, "%s/%s.json", root, golden);
        json_t *json = load_json(path);
        const char *same = json_string_value(json_object_get(json, "same_as"));
        run_model(model, root, same ? same : golden, false);
        json_decref(json);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(own_models),
        cmocka_unit_test(reference_models),
        cmocka_unit_test(reference_gguf),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
