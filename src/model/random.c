#include "model/random.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/memory.h"
#include "base/random.h"
#include "base/strbuf.h"

/* From the published config.json files. */
static const struct random_shape shapes[] = {
    {"qwen2.5-0.5b", "qwen2", 896, 4864, 24, 14, 2, 64, 151936, 32768, 1e6, 1e-6, true},
    {"qwen2.5-1.5b", "qwen2", 1536, 8960, 28, 12, 2, 128, 151936, 32768, 1e6, 1e-6, true},
    {"qwen2.5-7b", "qwen2", 3584, 18944, 28, 28, 4, 128, 152064, 32768, 1e6, 1e-6, false},
    {"qwen3-0.6b", "qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 40960, 1e6, 1e-6, true},
    {"llama-3.2-1b", "llama", 2048, 8192, 16, 32, 8, 64, 128256, 131072, 5e5, 1e-5, true},
    {"smollm2-135m", "llama", 576, 1536, 30, 9, 3, 64, 49152, 8192, 1e5, 1e-5, true},
};

enum { N_SHAPES = sizeof shapes / sizeof *shapes, NAME = 80 };

struct table {
    struct tensor *tensors;
    char (*names)[NAME];
    size_t n;
    enum dtype dtype;
};

static void add(struct table *t, int64_t rows, int64_t columns, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* columns 0: a vector, in F32 */
static void add(struct table *t, int64_t rows, int64_t columns, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(t->names[t->n], NAME, format, args);
    va_end(args);
    t->tensors[t->n] = (struct tensor){.name = t->names[t->n],
                                       .dtype = columns ? t->dtype : DTYPE_F32,
                                       .n_dims = columns ? 2 : 1,
                                       .shape = {rows, columns}};
    t->n++;
}

static void list_tensors(const struct random_shape *p, struct table *t)
{
    static const char *const names[] = {"q", "k", "v"};
    add(t, p->vocab, p->hidden, "model.embed_tokens.weight");
    add(t, p->hidden, 0, "model.norm.weight");
    if (!p->tied) add(t, p->vocab, p->hidden, "lm_head.weight");
    for (int i = 0; i < p->layers; i++) {
        int q = p->heads * p->head_dim, kv = p->kv_heads * p->head_dim;
        add(t, p->hidden, 0, "model.layers.%d.input_layernorm.weight", i);
        add(t, p->hidden, 0, "model.layers.%d.post_attention_layernorm.weight", i);
        for (int j = 0; j < 3; j++) {
            add(t, j ? kv : q, p->hidden, "model.layers.%d.self_attn.%s_proj.weight", i, names[j]);
            if (p->type[4] == '2')
                add(t, j ? kv : q, 0, "model.layers.%d.self_attn.%s_proj.bias", i, names[j]);
            if (p->type[4] == '3' && j < 2)
                add(t, p->head_dim, 0, "model.layers.%d.self_attn.%s_norm.weight", i, names[j]);
        }
        add(t, p->hidden, q, "model.layers.%d.self_attn.o_proj.weight", i);
        add(t, p->intermediate, p->hidden, "model.layers.%d.mlp.gate_proj.weight", i);
        add(t, p->intermediate, p->hidden, "model.layers.%d.mlp.up_proj.weight", i);
        add(t, p->hidden, p->intermediate, "model.layers.%d.mlp.down_proj.weight", i);
    }
}

static json_t *config_of(const struct random_shape *p)
{
    return json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:f, s:b}", "model_type",
                     p->type, "hidden_size", p->hidden, "intermediate_size", p->intermediate,
                     "num_hidden_layers", p->layers, "num_attention_heads", p->heads,
                     "num_key_value_heads", p->kv_heads, "head_dim", p->head_dim, "vocab_size",
                     p->vocab, "max_position_embeddings", p->context, "rope_theta", p->theta,
                     "rms_norm_eps", p->eps, "tie_word_embeddings", p->tied);
}

/* A quick stream: random_u64 is too slow for billions of weights. Multiplicative generator of
 * Vigna ("splitmix64"), started from a proper random number. */
static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

/* Sixteen random bits as a bf16 of either sign between 2^-8 and 2^-4: weights as trained ones are.
 */
static uint16_t small_bf16(uint64_t bits)
{
    return (uint16_t)((bits & 0x807F) | (uint64_t)(119 + (bits >> 8 & 3)) << 7);
}

static void fill_blocks(const struct tensor *t, uint8_t *data, uint64_t *state)
{
    size_t block = (size_t)dtype_block_bytes(t->dtype), i = 0;
    for (; i + 8 <= t->bytes; i += 8) memcpy(data + i, &(uint64_t){next(state)}, 8);
    for (; i < t->bytes; i++) data[i] = (uint8_t)next(state);
    /* scales that bring the weights to a few hundredths, as trained ones are */
    static const float scales[DTYPE_COUNT] = {
        [DTYPE_Q8_0] = 3e-4f, [DTYPE_Q4_0] = 4e-3f, [DTYPE_Q4_1] = 4e-3f, [DTYPE_Q5_0] = 2e-3f,
        [DTYPE_Q5_1] = 2e-3f, [DTYPE_Q4_K] = 1e-4f, [DTYPE_Q5_K] = 5e-5f, [DTYPE_Q6_K] = 1e-5f};
    static const float minima[DTYPE_COUNT] = {
        [DTYPE_Q4_1] = -3e-2f, [DTYPE_Q5_1] = -3e-2f, [DTYPE_Q4_K] = 8e-4f, [DTYPE_Q5_K] = 8e-4f};
    uint16_t d = f16_from_f32(scales[t->dtype]), m = f16_from_f32(minima[t->dtype]);
    size_t at = t->dtype == DTYPE_Q6_K ? offsetof(struct block_q6_k, d) : 0;
    for (size_t b = 0; b < t->bytes; b += block) {
        memcpy(data + b + at, &d, 2);
        if (minima[t->dtype] != 0) memcpy(data + b + 2, &m, 2);
    }
}

static void fill(const struct tensor *t, uint8_t *data, uint64_t seed, uint64_t stream)
{
    uint64_t state = random_u64(seed, 0, stream), bits = 0;
    size_t n = t->bytes / (size_t)dtype_block_bytes(t->dtype);
    if (dtype_block(t->dtype) > 1) {
        fill_blocks(t, data, &state);
        return;
    }
    bool norm = strstr(t->name, "norm") != NULL;
    for (size_t i = 0; i < n; i++) {
        bits = i % 4 ? bits >> 16 : next(&state);
        uint16_t h = small_bf16(bits & 0xFFFF);
        float f = f32_from_bf16(h) + (norm ? 1.0f : 0.0f);
        if (t->dtype == DTYPE_BF16) memcpy(data + 2 * i, &h, 2);
        if (t->dtype == DTYPE_F16) memcpy(data + 2 * i, &(uint16_t){f16_from_f32(f)}, 2);
        if (t->dtype == DTYPE_F32) memcpy(data + 4 * i, &f, 4);
    }
}

static const struct random_shape *find_shape(const char *name, linnet_error *err)
{
    struct strbuf known = {0};
    for (int i = 0; i < N_SHAPES; i++) {
        if (strcmp(shapes[i].name, name) == 0) {
            strbuf_free(&known);
            return &shapes[i];
        }
        strbuf_format(&known, "%s%s", i ? ", " : "", shapes[i].name);
    }
    error_set(err, LINNET_INVALID, "no shape '%s'; there are %s", name, strbuf_cstr(&known));
    strbuf_free(&known);
    return NULL;
}

int32_t random_shape_count(void)
{
    return N_SHAPES;
}

const struct random_shape *random_shape_at(int32_t i)
{
    return &shapes[i];
}

linnet_status random_checkpoint(const char *shape, enum dtype dtype, uint64_t seed,
                                struct checkpoint **out, linnet_error *err)
{
    const struct random_shape *p = find_shape(shape, err);
    return p ? random_checkpoint_of(p, dtype, seed, out, err) : LINNET_INVALID;
}

linnet_status random_checkpoint_of(const struct random_shape *p, enum dtype dtype, uint64_t seed,
                                   struct checkpoint **out, linnet_error *err)
{
    int64_t block = dtype_block(dtype);
    if (p->hidden % block || p->intermediate % block || p->heads * p->head_dim % block)
        return error_set(err, LINNET_INVALID,
                         "%s has rows that are no multiple of the %lld weights of a %s block",
                         p->name, (long long)block, dtype_name(dtype));
    size_t room = (size_t)p->layers * 14 + 3;
    struct table t = {
        .tensors = mem_new(room, sizeof *t.tensors), .names = mem_new(room, NAME), .dtype = dtype};
    json_t *config = config_of(p);
    linnet_status status = LINNET_MEMORY;
    if (t.tensors && t.names && config) {
        list_tensors(p, &t);
        status = checkpoint_create(p->name, config, t.tensors, t.n, out, err);
    } else {
        json_decref(config);
        error_memory(err, "the tensor table", room * (sizeof *t.tensors + NAME));
    }
    if (status == LINNET_OK)
        for (size_t i = 0; i < (*out)->n_tensors; i++) {
            const struct tensor *tensor = &(*out)->tensors[i];
            fill(tensor, (uint8_t *)(uintptr_t)tensor->data, seed, i); /* ours to write until now */
        }
    free(t.tensors);
    free(t.names);
    return status;
}
