#include "model/config.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "file/gguf.h"

const char *architecture_name(enum architecture arch)
{
    static const char *const names[] = {"llama", "qwen2", "qwen3"};
    return names[arch];
}

static bool find_architecture(const char *name, size_t n, enum architecture *out)
{
    for (enum architecture a = ARCH_LLAMA; a <= ARCH_QWEN3; a++) {
        const char *known = architecture_name(a);
        if (strlen(known) == n && memcmp(known, name, n) == 0) {
            *out = a;
            return true;
        }
    }
    return false;
}

void model_config_add_eos(struct model_config *c, int64_t id)
{
    if (id < 0 || id >= c->shape.vocab || c->n_eos == CONFIG_MAX_EOS) return;
    for (int32_t i = 0; i < c->n_eos; i++)
        if (c->eos[i] == id) return;
    c->eos[c->n_eos++] = (int32_t)id;
}

static void set_defaults(struct model_config *c)
{
    *c = (struct model_config){0};
    c->sampling.temperature = c->sampling.top_p = c->sampling.repetition_penalty = 1;
    c->rope.theta = 10000;
    c->rope.factor = 1;
    c->rope.beta_fast = 32;
    c->rope.beta_slow = 1;
    c->rope.truncate = true;
}

/* ---- config.json --------------------------------------------------------------------------- */

/* A reader of one JSON object that keeps the first error. */
struct object {
    const json_t *json;
    const char *file; /* for messages: "DIR/config.json" */
    linnet_error *err;
    linnet_status status;
};

static void object_fail(struct object *o, const char *key, const char *expected)
{
    if (o->status != LINNET_OK) return;
    const json_t *v = json_object_get(o->json, key);
    char *found = v ? json_dumps(v, JSON_ENCODE_ANY) : NULL;
    o->status = error_set(o->err, LINNET_FORMAT, "%s: %s: expected %s, found %.80s", o->file, key,
                          expected, found ? found : "nothing");
    free(found);
}

static bool present(const struct object *o, const char *key)
{
    const json_t *v = json_object_get(o->json, key);
    return v && !json_is_null(v);
}

/* An integer in [min, max]; `fallback` < min makes it required. */
static int32_t get_int(struct object *o, const char *key, int32_t min, int32_t max,
                       int32_t fallback)
{
    const json_t *v = json_object_get(o->json, key);
    if (!present(o, key) && fallback >= min) return fallback;
    if (!json_is_integer(v) || json_integer_value(v) < min || json_integer_value(v) > max) {
        char expected[64];
        snprintf(expected, sizeof expected, "a whole number from %d to %d", min, max);
        object_fail(o, key, expected);
        return min;
    }
    return (int32_t)json_integer_value(v);
}

/* A finite positive number; `fallback` 0 makes it required. */
static double get_number(struct object *o, const char *key, double fallback)
{
    const json_t *v = json_object_get(o->json, key);
    if (!present(o, key) && fallback != 0) return fallback;
    double d = json_number_value(v);
    if (!json_is_number(v) || !isfinite(d) || d <= 0) {
        object_fail(o, key, "a number above 0");
        return 1;
    }
    return d;
}

static bool get_bool(struct object *o, const char *key, bool fallback)
{
    if (!present(o, key)) return fallback;
    const json_t *v = json_object_get(o->json, key);
    if (!json_is_boolean(v)) object_fail(o, key, "true or false");
    return json_is_true(v);
}

/* Both published spellings: "rope_parameters" (transformers 5) and "rope_theta" + "rope_scaling".
 */
static void read_rope(struct object *o, struct model_config *c)
{
    struct rope_config *r = &c->rope;
    struct object scaling = {json_object_get(o->json, "rope_parameters"), o->file, o->err,
                             LINNET_OK};
    if (!json_is_object(scaling.json)) scaling.json = json_object_get(o->json, "rope_scaling");
    r->theta = get_number(o, "rope_theta", 10000);
    if (!json_is_object(scaling.json)) return;
    r->theta = get_number(&scaling, "rope_theta", r->theta);
    const char *type = json_string_value(json_object_get(scaling.json, "rope_type"));
    if (!type) type = json_string_value(json_object_get(scaling.json, "type"));
    if (!type && (present(&scaling, "factor") || present(&scaling, "rope_type") ||
                  present(&scaling, "type")))
        object_fail(&scaling, "rope_type", "the name of a RoPE scaling");
    static const char *const kinds[] = {"default", "linear", "dynamic", "yarn", "llama3"};
    int kind = 0;
    while (kind < 5 && type && strcmp(type, kinds[kind]) != 0) kind++;
    if (kind == 5 && o->status == LINNET_OK)
        o->status = error_set(
            o->err, LINNET_UNSUPPORTED,
            "%s: RoPE scaling '%s' is not supported (default, linear, dynamic, yarn, llama3 are)",
            o->file, type);
    r->kind = (enum rope_kind)(kind % 5);
    r->original_context =
        get_int(&scaling, "original_max_position_embeddings", 1, INT32_MAX, c->context_length);
    double stretch = (double)c->context_length / r->original_context;
    if (r->kind != ROPE_DEFAULT)
        r->factor = get_number(&scaling, "factor", r->kind == ROPE_YARN ? stretch : 0);
    if (r->kind == ROPE_YARN) {
        r->attention_factor =
            present(&scaling, "attention_factor") ? get_number(&scaling, "attention_factor", 0) : 0;
        r->beta_fast = get_number(&scaling, "beta_fast", 32);
        r->beta_slow = get_number(&scaling, "beta_slow", 1);
        r->truncate = get_bool(&scaling, "truncate", true);
        if (!r->attention_factor && present(&scaling, "mscale") &&
            present(&scaling, "mscale_all_dim")) {
            double a = get_number(&scaling, "mscale", 0),
                   b = get_number(&scaling, "mscale_all_dim", 0);
            double log_factor = r->factor > 1 ? 0.1 * log(r->factor) : 0;
            r->attention_factor = (a * log_factor + 1) / (b * log_factor + 1);
        }
    }
    if (r->kind == ROPE_LLAMA3) {
        r->low_freq_factor = get_number(&scaling, "low_freq_factor", 0);
        r->high_freq_factor = get_number(&scaling, "high_freq_factor", 0);
    }
    double reach = r->kind == ROPE_YARN ? r->original_context * r->factor
                   : r->kind == ROPE_LINEAR || r->kind == ROPE_DYNAMIC
                       ? c->context_length * r->factor
                       : 0;
    if (reach > c->context_length && reach < INT32_MAX) c->context_length = (int32_t)reach;
    if (scaling.status != LINNET_OK) o->status = scaling.status;
}

static void unsupported(struct object *o, const char *key, const char *what)
{
    if (o->status != LINNET_OK) return;
    o->status =
        error_set(o->err, LINNET_UNSUPPORTED, "%s: %s: %s is not supported", o->file, key, what);
}

static void refuse_unknown_features(struct object *o)
{
    const char *act = json_string_value(json_object_get(o->json, "hidden_act"));
    if (act && strcmp(act, "silu") != 0) unsupported(o, "hidden_act", act);
    if (present(o, "quantization_config"))
        unsupported(o, "quantization_config", "a quantized checkpoint (use GGUF)");
    if (get_bool(o, "use_sliding_window", false))
        unsupported(o, "use_sliding_window", "sliding-window attention");
    if (get_bool(o, "mlp_bias", false)) unsupported(o, "mlp_bias", "an MLP with biases");
    if (get_number(o, "partial_rotary_factor", 1) != 1)
        unsupported(o, "partial_rotary_factor", "partial RoPE");
    size_t i;
    json_t *type;
    json_array_foreach(json_object_get(o->json, "layer_types"), i, type)
    {
        const char *name = json_string_value(type);
        if (!name || strcmp(name, "full_attention") != 0)
            unsupported(o, "layer_types", name ? name : "a layer without a name");
    }
}

static void read_eos(struct model_config *c, const json_t *object)
{
    const json_t *eos = json_object_get(object, "eos_token_id");
    if (json_is_integer(eos)) model_config_add_eos(c, json_integer_value(eos));
    size_t i;
    json_t *id;
    json_array_foreach(eos, i, id) if (json_is_integer(id))
        model_config_add_eos(c, json_integer_value(id));
}

static void read_generation_config(struct model_config *c, const json_t *g)
{
    const struct {
        const char *key;
        float *to;
        double min, max;
    } numbers[] = {{"temperature", &c->sampling.temperature, 0, 100},
                   {"top_p", &c->sampling.top_p, 1e-6, 1},
                   {"min_p", &c->sampling.min_p, 0, 1},
                   {"repetition_penalty", &c->sampling.repetition_penalty, 1e-3, 100}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        const json_t *v = json_object_get(g, numbers[i].key);
        double d = json_number_value(v);
        if (json_is_number(v) && d >= numbers[i].min && d <= numbers[i].max)
            *numbers[i].to = (float)d;
    }
    const json_t *top_k = json_object_get(g, "top_k");
    if (json_is_integer(top_k) && json_integer_value(top_k) >= 0 &&
        json_integer_value(top_k) < INT32_MAX)
        c->sampling.top_k = (int32_t)json_integer_value(top_k);
    if (json_is_false(json_object_get(g, "do_sample"))) c->sampling.temperature = 0;
}

static linnet_status read_directory(const struct checkpoint *cp, struct model_config *c,
                                    linnet_error *err)
{
    char file[512];
    snprintf(file, sizeof file, "%s/config.json", cp->path);
    struct object o = {cp->config, file, err, LINNET_OK};
    const char *type = json_string_value(json_object_get(cp->config, "model_type"));
    if (!type)
        return error_set(err, LINNET_FORMAT, "%s: model_type: expected a string, found nothing",
                         file);
    if (!find_architecture(type, strlen(type), &c->arch))
        return error_set(err, LINNET_UNSUPPORTED,
                         "%s: model_type '%s' is not supported (llama, qwen2, qwen3 are)", file,
                         type);
    struct shape *s = &c->shape;
    s->hidden = get_int(&o, "hidden_size", 1, 1 << 20, 0);
    s->intermediate = get_int(&o, "intermediate_size", 1, 1 << 22, 0);
    s->n_layers = get_int(&o, "num_hidden_layers", 1, 4096, 0);
    s->n_heads = get_int(&o, "num_attention_heads", 1, 4096, 0);
    s->n_kv_heads = get_int(&o, "num_key_value_heads", 1, 4096, s->n_heads);
    s->head_dim =
        get_int(&o, "head_dim", 1, 4096, s->hidden / s->n_heads ? s->hidden / s->n_heads : 1);
    s->vocab = get_int(&o, "vocab_size", 1, 1 << 24, 0);
    s->norm_eps = (float)get_number(&o, "rms_norm_eps", 1e-6);
    c->context_length = get_int(&o, "max_position_embeddings", 1, INT32_MAX, 2048);
    c->tied = get_bool(&o, "tie_word_embeddings", false);
    bool attention_bias = get_bool(&o, "attention_bias", false);
    c->qkv_bias = c->arch == ARCH_QWEN2 || attention_bias;
    c->o_bias = c->arch != ARCH_QWEN2 && attention_bias;
    c->qk_norm = c->arch == ARCH_QWEN3;
    refuse_unknown_features(&o);
    read_rope(&o, c);
    read_eos(c, cp->config);
    read_eos(c, cp->generation_config);
    read_generation_config(c, cp->generation_config);
    return o.status;
}

/* ---- GGUF ----------------------------------------------------------------------------------- */

/* Metadata under the architecture's prefix, keeping the first error. */
struct metadata {
    const struct gguf *g;
    char prefix[16];
    linnet_error *err;
    linnet_status status;
};

static const char *full_key(const struct metadata *m, const char *key, char out[96])
{
    snprintf(out, 96, "%s.%s", m->prefix, key);
    return out;
}

/* fallback < min: required */
static int32_t meta_int(struct metadata *m, const char *key, int32_t min, int32_t max,
                        int32_t fallback)
{
    char full[96];
    int64_t v;
    full_key(m, key, full);
    if (!gguf_has(m->g, full) && fallback >= min) return fallback;
    bool found = gguf_integer(m->g, full, &v);
    if (found && v >= min && v <= max) return (int32_t)v;
    if (m->status == LINNET_OK) {
        char what[32] = "nothing of that kind";
        if (found) snprintf(what, sizeof what, "%lld", (long long)v);
        m->status = error_set(m->err, LINNET_FORMAT,
                              "%s: %s: expected a whole number from %d to %d, found %s",
                              gguf_path(m->g), full, min, max, what);
    }
    return min;
}

/* fallback 0: required */
static double meta_number(struct metadata *m, const char *key, double fallback)
{
    char full[96];
    double v;
    full_key(m, key, full);
    if (!gguf_has(m->g, full) && fallback != 0) return fallback;
    if (gguf_number(m->g, full, &v) && isfinite(v) && v > 0) return v;
    if (m->status == LINNET_OK)
        m->status = error_set(m->err, LINNET_FORMAT, "%s: %s: expected a number above 0",
                              gguf_path(m->g), full);
    return 1;
}

static void meta_rope(struct metadata *m, struct model_config *c)
{
    char full[96];
    struct view type;
    struct rope_config *r = &c->rope;
    r->theta = meta_number(m, "rope.freq_base", 10000);
    r->original_context = c->context_length;
    if (meta_int(m, "rope.dimension_count", 1, 4096, c->shape.head_dim) != c->shape.head_dim &&
        m->status == LINNET_OK)
        m->status = error_set(m->err, LINNET_UNSUPPORTED, "%s: %s: partial RoPE is not supported",
                              gguf_path(m->g), full_key(m, "rope.dimension_count", full));
    bool named = gguf_string(m->g, full_key(m, "rope.scaling.type", full), &type);
    if (!named && gguf_has(m->g, full) && m->status == LINNET_OK)
        m->status =
            error_set(m->err, LINNET_FORMAT, "%s: %s: expected a string", gguf_path(m->g), full);
    if (!named) {
        double linear = meta_number(m, "rope.scale_linear", 1);
        if (linear != 1) {
            r->kind = ROPE_LINEAR;
            r->factor = linear;
        }
        return;
    }
    if (type.size == 4 && memcmp(type.data, "none", 4) == 0) return;
    r->factor = meta_number(m, "rope.scaling.factor", 1);
    r->original_context =
        meta_int(m, "rope.scaling.original_context_length", 1, INT32_MAX, c->context_length);
    if (type.size == 6 && memcmp(type.data, "linear", 6) == 0) {
        r->kind = ROPE_LINEAR;
    } else if (type.size == 4 && memcmp(type.data, "yarn", 4) == 0) {
        r->kind = ROPE_YARN;
        double derived = r->factor > 1 ? 0.1 * log(r->factor) + 1 : 1;
        r->attention_factor = derived * meta_number(m, "rope.scaling.attn_factor", 1);
        r->beta_fast = meta_number(m, "rope.scaling.yarn_beta_fast", 32);
        r->beta_slow = meta_number(m, "rope.scaling.yarn_beta_slow", 1);
    } else if (m->status == LINNET_OK) {
        m->status =
            error_set(m->err, LINNET_UNSUPPORTED,
                      "%s: %s: RoPE scaling '%.*s' is not supported (none, linear, yarn are)",
                      gguf_path(m->g), full, (int)type.size, type.data);
    }
}

static void meta_sampling(const struct gguf *g, struct model_config *c)
{
    const struct {
        const char *key;
        float *to;
        double min, max;
    } numbers[] = {{"general.sampling.temp", &c->sampling.temperature, 0, 100},
                   {"general.sampling.top_p", &c->sampling.top_p, 1e-6, 1},
                   {"general.sampling.min_p", &c->sampling.min_p, 0, 1},
                   {"general.sampling.penalty_repeat", &c->sampling.repetition_penalty, 1e-3, 100}};
    double v;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (gguf_number(g, numbers[i].key, &v) && v >= numbers[i].min && v <= numbers[i].max)
            *numbers[i].to = (float)v;
    int64_t top_k;
    if (gguf_integer(g, "general.sampling.top_k", &top_k) && top_k >= 0 && top_k < INT32_MAX)
        c->sampling.top_k = (int32_t)top_k;
}

static linnet_status read_gguf(const struct checkpoint *cp, struct model_config *c,
                               linnet_error *err)
{
    const struct gguf *g = cp->gguf;
    struct view name;
    if (!gguf_string(g, "general.architecture", &name))
        return error_set(err, LINNET_FORMAT,
                         "%s: general.architecture: expected a string, found nothing of that kind",
                         cp->path);
    if (!find_architecture(name.data, name.size, &c->arch))
        return error_set(
            err, LINNET_UNSUPPORTED,
            "%s: general.architecture '%.*s' is not supported (llama, qwen2, qwen3 are)", cp->path,
            (int)(name.size < 80 ? name.size : 80), name.data);
    struct metadata m = {.g = g, .err = err};
    snprintf(m.prefix, sizeof m.prefix, "%s", architecture_name(c->arch));
    const struct tensor *embedding = checkpoint_find(cp, "model.embed_tokens.weight");
    if (!embedding || embedding->n_dims != 2 || embedding->shape[0] > 1 << 24)
        return error_set(err, LINNET_FORMAT,
                         "%s: tensor token_embd.weight: expected a matrix, found %s", cp->path,
                         embedding ? "another shape" : "nothing");
    struct shape *s = &c->shape;
    s->vocab = (int32_t)embedding->shape[0];
    s->hidden = meta_int(&m, "embedding_length", 1, 1 << 20, 0);
    s->intermediate = meta_int(&m, "feed_forward_length", 1, 1 << 22, 0);
    s->n_layers = meta_int(&m, "block_count", 1, 4096, 0);
    s->n_heads = meta_int(&m, "attention.head_count", 1, 4096, 0);
    s->n_kv_heads = meta_int(&m, "attention.head_count_kv", 1, 4096, s->n_heads);
    int32_t derived = s->hidden / s->n_heads ? s->hidden / s->n_heads : 1;
    s->head_dim = meta_int(&m, "attention.key_length", 1, 4096, derived);
    if (meta_int(&m, "attention.value_length", 1, 4096, s->head_dim) != s->head_dim &&
        m.status == LINNET_OK)
        m.status = error_set(err, LINNET_UNSUPPORTED,
                             "%s: keys and values of different size are not supported", cp->path);
    s->norm_eps = (float)meta_number(&m, "attention.layer_norm_rms_epsilon", 0);
    c->context_length = meta_int(&m, "context_length", 1, INT32_MAX, 2048);
    c->tied = !checkpoint_find(cp, "lm_head.weight");
    c->qkv_bias =
        c->arch == ARCH_QWEN2 || checkpoint_find(cp, "model.layers.0.self_attn.q_proj.bias");
    c->o_bias =
        c->arch != ARCH_QWEN2 && checkpoint_find(cp, "model.layers.0.self_attn.o_proj.bias");
    c->qk_norm = c->arch == ARCH_QWEN3;
    meta_rope(&m, c);
    static const char *const ends[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                       "tokenizer.ggml.eom_token_id"};
    int64_t id;
    for (size_t i = 0; i < 3; i++)
        if (gguf_integer(g, ends[i], &id)) model_config_add_eos(c, id);
    meta_sampling(g, c);
    return m.status;
}

linnet_status model_config_read(const struct checkpoint *cp, struct model_config *out,
                                linnet_error *err)
{
    set_defaults(out);
    linnet_status status = cp->gguf ? read_gguf(cp, out, err) : read_directory(cp, out, err);
    if (status != LINNET_OK) return status;
    const struct shape *s = &out->shape;
    if (s->n_heads % s->n_kv_heads)
        return error_set(err, LINNET_FORMAT,
                         "%s: %d query heads do not share %d key/value heads evenly", cp->path,
                         s->n_heads, s->n_kv_heads);
    if (s->head_dim % 2)
        return error_set(err, LINNET_UNSUPPORTED, "%s: head_dim %d: RoPE needs an even number",
                         cp->path, s->head_dim);
    return LINNET_OK;
}
