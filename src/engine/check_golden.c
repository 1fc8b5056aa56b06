/* check_golden.c - a model against results that were computed elsewhere and lie beside it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/memory.h"
#include "engine/check_internal.h"
#include "file/safetensors.h"
#include "model/simple.h"

struct golden {
    json_t *json;
    struct safetensors arrays;
    bool has_arrays;
    char directory[1024], name[256];
    struct simple *simple;
    double activation_error; /* of the decoder */
    float *logits;           /* [vocab] */
};

static const double BF16_ERROR = 0.0017; /* an activation_error above it is that of 8 bits */

/* The files' names: NAME for a directory, gguf-NAME for a GGUF file; in golden/ beside or above. */
static bool find_golden(const linnet_model *m, struct golden *g)
{
    char path[1400];
    static const char *const places[] = {"golden", "../golden", "../../golden"};
    size_t end = strlen(m->path);
    while (end > 0 && m->path[end - 1] == '/') end--;
    while (end > 0 && m->path[end - 1] != '/') end--;
    for (size_t i = 0; i < 3; i++) {
        snprintf(g->directory, sizeof g->directory, "%.*s%s", (int)(end < 900 ? end : 900), m->path,
                 places[i]);
        snprintf(g->name, sizeof g->name, "%s%s", m->checkpoint->gguf ? "gguf-" : "", m->name);
        snprintf(path, sizeof path, "%s/%s.json", g->directory, g->name);
        if (access(path, R_OK) == 0) return true;
    }
    return false;
}

static linnet_status read_json(struct golden *g, linnet_error *err)
{
    char path[1400];
    json_error_t error;
    snprintf(path, sizeof path, "%s/%s.json", g->directory, g->name);
    json_decref(g->json);
    g->json = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    if (!g->json)
        return error_set(err, LINNET_FORMAT, "%s: line %d: %s", path, error.line, error.text);
    return LINNET_OK;
}

static linnet_status open_golden(struct golden *g, linnet_error *err)
{
    char file[300];
    linnet_status status = read_json(g, err);
    const char *same = json_string_value(json_object_get(g->json, "same_as"));
    if (!status && same) {
        if (strchr(same, '/'))
            return error_set(err, LINNET_FORMAT, "%s/%s.json: same_as: expected a plain name",
                             g->directory, g->name);
        snprintf(g->name, sizeof g->name, "%s", same);
        status = read_json(g, err);
    }
    snprintf(file, sizeof file, "%s.safetensors", g->name);
    if (!status) status = safetensors_open_in(g->directory, file, &g->arrays, err);
    g->has_arrays = !status;
    return status;
}

static const struct tensor *find_array(const struct golden *g, const char *name)
{
    for (size_t i = 0; i < g->arrays.n_tensors; i++)
        if (strcmp(g->arrays.tensors[i].name, name) == 0) return &g->arrays.tensors[i];
    return NULL;
}

/* The reference's logits after a prompt of n tokens, alone or as the last of all rows; or NULL. */
static const float *last_logits(const struct golden *g, int32_t n, int32_t vocab)
{
    char name[64];
    size_t row = (size_t)vocab * sizeof(float);
    snprintf(name, sizeof name, "logits.p%d.last", n);
    const struct tensor *t = find_array(g, name);
    if (t) return t->dtype == DTYPE_F32 && t->bytes == row ? t->data : NULL;
    snprintf(name, sizeof name, "logits.p%d.all", n);
    t = find_array(g, name);
    bool fits = t && t->dtype == DTYPE_F32 && t->bytes == row * (size_t)n;
    return fits ? (const float *)t->data + (size_t)(n - 1) * (size_t)vocab : NULL;
}

static double number_at(const json_t *json, const char *a, const char *b, const char *c)
{
    return json_number_value(json_object_get(json_object_get(json_object_get(json, a), b), c));
}

/* The set's own rules: in fp32 four times what Hugging Face's differs from float64, in bf16 one and
 * a half times what its bf16 differs from its fp32, with activations in 8 bits one and a half times
 * what that changes in fp32. */
static double golden_bound(const struct golden *g)
{
    if (g->activation_error > BF16_ERROR)
        return 1.5 * number_at(g->json, "int8_activation_error", "logits.last", "rms_rel");
    if (g->activation_error > 0)
        return 1.5 * number_at(g->json, "hf_bf16_error", "logits.last", "rms_rel");
    return 4 * number_at(g->json, "hf_fp32_error_vs_float64", "logits.last", "rms_rel") + 1e-7;
}

/*
 * Greedy tokens, 48 or 64 of them. In fp32 all must agree; else up to the first step whose gap
 * between winner and runner-up is no larger than four times what the rounding changes it by. The
 * row counts those that differ before.
 */
static linnet_status check_greedy(struct check *c, const linnet_model *m, const struct golden *g,
                                  int32_t *ids, int32_t n, const json_t *prompt, linnet_error *err)
{
    char shape[64];
    const json_t *greedy = json_object_get(prompt, "greedy_fp32"),
                 *gaps = json_object_get(prompt, "gap");
    int32_t n_new = (int32_t)json_array_size(greedy), wrong = 0, i = 0;
    linnet_status status =
        simple_generate(g->simple, ids, n, n_new, m->config.shape.vocab, true, err);
    if (status) return status;
    bool exact = g->activation_error == 0, eight_bits = g->activation_error > BF16_ERROR;
    const json_t *errors = eight_bits ? json_object_get(g->json, "int8_activation_error") : g->json;
    const json_t *gap = json_object_get(errors, eight_bits ? "gap_noise" : "bf16_gap_noise");
    double noise = 4 * json_number_value(json_object_get(gap, "rms"));
    for (; i < n_new; i++) {
        if (ids[n + i] == json_integer_value(json_array_get(greedy, (size_t)i))) continue;
        wrong += exact || json_number_value(json_array_get(gaps, (size_t)i)) > noise;
        if (!exact) break; /* what follows is another text */
    }
    snprintf(shape, sizeof shape, "prompt %d, %d of %d tokens", n, i, n_new);
    check_report(c, "golden greedy", m->dtype, shape, wrong, wrong, 0);
    return LINNET_OK;
}

static linnet_status check_prompt(struct check *c, const linnet_model *m, const struct golden *g,
                                  const json_t *prompt, linnet_error *err)
{
    enum { LONGEST = 256, NEW = 64 };
    char name[64];
    int32_t ids[LONGEST + NEW], vocab = m->config.shape.vocab;
    const json_t *list = json_object_get(prompt, "ids"),
                 *greedy = json_object_get(prompt, "greedy_fp32");
    int32_t n = (int32_t)json_array_size(list);
    if (n < 1 || n > LONGEST || json_array_size(greedy) > NEW)
        return error_set(
            err, LINNET_FORMAT,
            "%s/%s.json: a prompt of %d tokens: expected 1 to %d, and at most %d generated",
            g->directory, g->name, n, LONGEST, NEW);
    for (int32_t i = 0; i < n; i++) {
        json_int_t id = json_integer_value(json_array_get(list, (size_t)i));
        if (id < 0 || id >= vocab)
            return error_set(err, LINNET_FORMAT, "%s/%s.json: token %lld is not in the vocabulary",
                             g->directory, g->name, (long long)id);
        ids[i] = (int32_t)id;
    }
    linnet_status status = simple_forward(g->simple, ids, n, 0, n, 0, false, g->logits, err);
    if (status) return status;
    const float *want = last_logits(g, n, vocab);
    double bound = golden_bound(g);
    snprintf(name, sizeof name, "prompt %d, [%d]", n, vocab);
    if (want)
        check_compare(c, "golden logits", m->dtype, name, g->logits, want, (size_t)vocab, bound);
    else
        check_report(c, "golden logits", m->dtype, name, NAN, NAN,
                     bound); /* absent, or of another model */
    return json_is_array(greedy) ? check_greedy(c, m, g, ids, n, prompt, err) : LINNET_OK;
}

static linnet_status run_goldens(struct check *c, linnet_model *m, struct golden *g,
                                 linnet_error *err)
{
    static const struct limits limits = {
        .max_tokens = 256, .max_logits = 1, .max_seqs = 1, .max_context = 320, .n_blocks = 20};
    struct decoder *d = NULL;
    size_t i;
    json_t *prompt;
    g->logits = mem_new((size_t)m->config.shape.vocab, sizeof(float));
    linnet_status status = g->logits
                               ? open_golden(g, err)
                               : error_memory(err, "the logits", (size_t)m->config.shape.vocab * 4);
    if (!status)
        status = decoder_create(m->checkpoint, &m->config, c->device.ops, c->pool, &limits, NULL,
                                NULL, &d, err);
    if (!status) g->activation_error = d->activation_error;
    if (!status) status = simple_create(d, &g->simple, err);
    if (!status)
        json_array_foreach(json_object_get(g->json, "prompts"), i, prompt) if (!status) status =
            check_prompt(c, m, g, prompt, err);
    simple_destroy(g->simple);
    decoder_destroy(d);
    return status;
}

linnet_status check_goldens(struct check *c, linnet_model *m, linnet_error *err)
{
    struct golden g = {0};
    if (!find_golden(m, &g)) return LINNET_OK;
    linnet_status status = run_goldens(c, m, &g, err);
    free(g.logits);
    if (g.has_arrays) safetensors_close(&g.arrays);
    json_decref(g.json);
    return status;
}
