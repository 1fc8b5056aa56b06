/*
 * The operations inside a layer, each fed with the reference's own input: RMSNorm, the q, k, gate
 * and up products, q/k norms, RoPE, SiLU-mul; plain and by every kernel set. Weights come from the
 * model files, so names, shapes, biases and row order are tested with them.
 */
#include "golden.h"

#include <math.h>

#include "model/rope.h"
#include "model/weights.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/plain.h"

struct rows_ops {
    const char *name;
    void (*rmsnorm)(const float *, const float *, int32_t, float, float *);
    void (*rope)(float *, const float *, int32_t);
    void (*silu_mul)(const float *, const float *, int32_t, float *);
};

static struct rows_ops sets[8] = {{"plain", plain_rmsnorm, plain_rope, plain_silu_mul}};
static int n_sets = 1;

static int find_kernels(void **state)
{
    (void)state;
    const struct kernels *k;
    for (int i = 0; (k = kernels_usable(i)); i++)
        sets[n_sets++] = (struct rows_ops){k->name, k->rmsnorm, k->rope, k->silu_mul};
    return 0;
}

struct model {
    struct checkpoint *cp;
    struct model_config config;
    struct weights weights;
    json_t *golden;
    struct arrays arrays;
    int32_t rows[16], n_rows, layer;
    int compared;
};

static const float *find(const struct model *m, const char *tensor, size_t *n)
{
    char name[64];
    snprintf(name, sizeof name, "op.L%d.%s", m->layer, tensor);
    return arrays_find(&m->arrays, name, sizeof(float), n);
}

/* The operation's own error: one of K products in fp32, so far below the chain's up to there. */
static void compare(struct model *m, const char *set, const char *tensor, const float *got)
{
    size_t n;
    const float *want = find(m, tensor, &n);
    char kind[64];
    snprintf(kind, sizeof kind, "L%d.%s", m->layer, tensor);
    const json_t *error =
        json_object_get(json_object_get(m->golden, "hf_fp32_error_vs_float64"), kind);
    double sum = 0, sum_want = 0;
    for (size_t i = 0; i < n; i++) {
        sum += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        sum_want += (double)want[i] * want[i];
    }
    double rms_rel = sqrt(sum / sum_want), bound = 4 * number(error, "rms_rel") + 1e-7;
    if (!(rms_rel <= bound))
        fail_msg("%s: %s by %s: rms_rel %.3g (bound %.3g)", m->cp->path, kind, set, rms_rel, bound);
    m->compared++;
}

static float *expand(const struct tensor *t)
{
    int64_t n = t->shape[0] * (t->n_dims == 2 ? t->shape[1] : 1);
    float *out = malloc((size_t)n * sizeof(float));
    dtype_to_f32(t->dtype, t->data, n, out);
    return out;
}

static void check_norm(struct model *m, const char *in, const char *out,
                       const struct tensor *weight, int32_t width)
{
    size_t n;
    const float *x = find(m, in, &n), *want = find(m, out, &n);
    if (!x || !want) return;
    float *w = expand(weight), *got = malloc(n * sizeof(float));
    for (int s = 0; s < n_sets; s++) {
        for (size_t i = 0; i < n; i += (size_t)width)
            sets[s].rmsnorm(x + i, w, width, m->config.shape.norm_eps, got + i);
        compare(m, sets[s].name, out, got);
    }
    free(w), free(got);
}

static void check_product(struct model *m, const char *in, const char *out,
                          const struct tensor *weight, const struct tensor *bias)
{
    size_t n;
    const float *x = find(m, in, &n);
    if (!x || !find(m, out, &n)) return;
    int64_t rows = weight->shape[0], columns = weight->shape[1];
    float *w = expand(weight), *b = bias ? expand(bias) : NULL, *got = malloc(n * sizeof(float));
    for (size_t t = 0; t < n / (size_t)rows; t++) {
        plain_matvec(w, x + t * (size_t)columns, rows, columns, got + t * (size_t)rows);
        for (int64_t r = 0; b && r < rows; r++) got[t * (size_t)rows + (size_t)r] += b[r];
    }
    compare(m, "plain", out, got);
    free(w), free(b), free(got);
}

static void check_rope(struct model *m, const char *in, const char *out, int32_t heads)
{
    linnet_error err;
    size_t n;
    struct rope rope;
    int32_t head_dim = m->config.shape.head_dim;
    const float *x = find(m, in, &n);
    if (!x || !find(m, out, &n) || (int32_t)n != m->n_rows * heads * head_dim)
        return; /* k_rope has all rows */
    assert_ok(rope_create(&m->config.rope, head_dim, 64, NULL, &rope, &err), err);
    float *got = malloc(n * sizeof(float)), row[512];
    for (int s = 0; s < n_sets; s++) {
        memcpy(got, x, n * sizeof(float));
        for (int32_t i = 0; i < m->n_rows * heads; i++) {
            rope_row(&rope, m->rows[i / heads], 40, row);
            sets[s].rope(got + i * head_dim, row, head_dim);
        }
        compare(m, sets[s].name, out, got);
    }
    free(got);
    rope_destroy(&rope);
}

static void check_silu(struct model *m)
{
    size_t n;
    const float *gate = find(m, "gate", &n), *up = find(m, "up", &n);
    if (!gate || !up) return;
    float *got = malloc(n * sizeof(float));
    size_t width = (size_t)m->config.shape.intermediate;
    for (int s = 0; s < n_sets; s++) {
        for (size_t i = 0; i < n; i += width)
            sets[s].silu_mul(gate + i, up + i, (int32_t)width, got + i);
        compare(m, sets[s].name, "act", got);
    }
    free(got);
}

static void check_layer(struct model *m)
{
    const struct layer_tensors *l = &m->weights.layers[m->layer];
    const struct shape *s = &m->config.shape;
    check_norm(m, "x", "in_norm", l->input_norm, s->hidden);
    check_product(m, "in_norm", "q_proj", l->qkv[0], l->bias[0]);
    check_product(m, "in_norm", "k_proj", l->qkv[1], l->bias[1]);
    if (l->q_norm) {
        check_norm(m, "q_proj", "q_norm", l->q_norm, s->head_dim);
        check_norm(m, "k_proj", "k_norm", l->k_norm, s->head_dim);
    }
    check_rope(m, l->q_norm ? "q_norm" : "q_proj", "q_rope", s->n_heads);
    check_norm(m, "attn_resid", "post_norm", l->post_norm, s->hidden);
    check_product(m, "post_norm", "gate", l->gate, NULL);
    check_product(m, "post_norm", "up", l->up, NULL);
    check_silu(m);
}

static void check_model(const char *path, const char *golden)
{
    linnet_error err;
    struct model m = {0};
    char file[1400];
    size_t i;
    json_t *item;
    snprintf(file, sizeof file, "%s.json", golden);
    m.golden = load_json(file);
    snprintf(file, sizeof file, "%s.safetensors", golden);
    m.arrays = arrays_open(file);
    assert_ok(checkpoint_open(path, &m.cp, &err), err);
    assert_ok(model_config_read(m.cp, &m.config, &err), err);
    assert_ok(weights_bind(m.cp, &m.config, &m.weights, &err), err);
    json_array_foreach(json_object_get(m.golden, "ops_rows"), i, item) m.rows[m.n_rows++] =
        (int32_t)json_integer_value(item);
    json_array_foreach(json_object_get(m.golden, "ops_layers"), i, item)
    {
        m.layer = (int32_t)json_integer_value(item);
        check_layer(&m);
    }
    assert_true(m.compared >= n_sets);
    weights_free(&m.weights);
    checkpoint_close(m.cp);
    arrays_close(&m.arrays);
    json_decref(m.golden);
}

static void operators_equal_reference(void **state)
{
    (void)state;
    static const char *const directories[] = {"qwen2-tiny",    "qwen2-seedlike", "llama-tiny",
                                              "smollm2-shape", "qwen2-yarn",     "llama-linear",
                                              "llama-dynamic"};
    char golden[1200], model[1200];
    snprintf(golden, sizeof golden, "%s", data_path("golden/qwen3-tiny"));
    check_model(data_path("qwen3-tiny"), golden);
    for (size_t i = 0; i < sizeof directories / sizeof *directories; i++) {
        if (!reference_path(directories[i])) continue;
        snprintf(model, sizeof model, "%s", reference_path(directories[i]));
        snprintf(golden, sizeof golden, "%s/%s", reference_path("golden"), directories[i]);
        check_model(model, golden);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(operators_equal_reference)};
    return cmocka_run_group_tests(tests, find_kernels, NULL);
}
