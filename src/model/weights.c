#include "model/weights.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"

struct binder {
    const struct checkpoint *cp;
    bool *used; /* [n_tensors] */
    linnet_error *err;
    linnet_status status;
};

static void describe(const int64_t *shape, int n_dims, char *out, size_t n)
{
    size_t used = (size_t)snprintf(out, n, "[");
    for (int i = 0; i < n_dims && used < n; i++)
        used +=
            (size_t)snprintf(out + used, n - used, "%s%lld", i ? ", " : "", (long long)shape[i]);
    if (used < n) snprintf(out + used, n - used, "]");
}

/* The tensor of that name and shape [rows] or [rows, columns]; columns 0: a vector. NULL and an
 * error if it is required and absent, or misshapen. */
static const struct tensor *take(struct binder *b, bool required, int64_t rows, int64_t columns,
                                 const char *format, ...) __attribute__((format(printf, 5, 6)));

static const struct tensor *take(struct binder *b, bool required, int64_t rows, int64_t columns,
                                 const char *format, ...)
{
    char name[160], expected[64], found[96];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    if (b->status != LINNET_OK) return NULL;
    const struct tensor *t = checkpoint_find(b->cp, name);
    int64_t shape[2] = {rows, columns};
    int n_dims = columns ? 2 : 1;
    describe(shape, n_dims, expected, sizeof expected);
    if (!t) {
        if (required)
            b->status =
                error_set(b->err, LINNET_FORMAT,
                          "%s: tensor %s: expected %s, found nothing: the model is incomplete",
                          b->cp->path, name, expected);
        return NULL;
    }
    bool right =
        t->n_dims == n_dims && t->shape[0] == rows && (n_dims == 1 || t->shape[1] == columns);
    if (!right) {
        describe(t->shape, t->n_dims, found, sizeof found);
        b->status = error_set(b->err, LINNET_FORMAT, "%s: tensor %s: expected %s, found %s %s",
                              b->cp->path, name, expected, found, dtype_name(t->dtype));
        return NULL;
    }
    b->used[t - b->cp->tensors] = true;
    return t;
}

static void bind_layer(struct binder *b, const struct model_config *c, int32_t i,
                       struct layer_tensors *l)
{
    const struct shape *s = &c->shape;
    int64_t hidden = s->hidden, q = (int64_t)s->n_heads * s->head_dim,
            kv = (int64_t)s->n_kv_heads * s->head_dim;
    static const char *const names[3] = {"q", "k", "v"};
    l->input_norm = take(b, true, hidden, 0, "model.layers.%d.input_layernorm.weight", i);
    l->post_norm = take(b, true, hidden, 0, "model.layers.%d.post_attention_layernorm.weight", i);
    char merged[96];
    snprintf(merged, sizeof merged, "model.layers.%d.self_attn.qkv_proj.weight", i);
    if (checkpoint_find(b->cp, merged)) {
        l->qkv[0] =
            take(b, true, q + 2 * kv, hidden, "model.layers.%d.self_attn.qkv_proj.weight", i);
        if (c->qkv_bias)
            l->bias[0] = take(b, true, q + 2 * kv, 0, "model.layers.%d.self_attn.qkv_proj.bias", i);
    } else {
        for (int j = 0; j < 3; j++) {
            l->qkv[j] = take(b, true, j ? kv : q, hidden,
                             "model.layers.%d.self_attn.%s_proj.weight", i, names[j]);
            if (c->qkv_bias)
                l->bias[j] = take(b, true, j ? kv : q, 0, "model.layers.%d.self_attn.%s_proj.bias",
                                  i, names[j]);
        }
    }
    if (c->qk_norm) {
        l->q_norm = take(b, true, s->head_dim, 0, "model.layers.%d.self_attn.q_norm.weight", i);
        l->k_norm = take(b, true, s->head_dim, 0, "model.layers.%d.self_attn.k_norm.weight", i);
    }
    l->o_proj = take(b, true, hidden, q, "model.layers.%d.self_attn.o_proj.weight", i);
    if (c->o_bias) l->o_bias = take(b, true, hidden, 0, "model.layers.%d.self_attn.o_proj.bias", i);
    l->gate = take(b, true, s->intermediate, hidden, "model.layers.%d.mlp.gate_proj.weight", i);
    l->up = take(b, true, s->intermediate, hidden, "model.layers.%d.mlp.up_proj.weight", i);
    l->down = take(b, true, hidden, s->intermediate, "model.layers.%d.mlp.down_proj.weight", i);
}

/* Buffers that old exporters wrote although the model derives them. */
static bool harmless(const char *name)
{
    static const char suffix[] = ".rotary_emb.inv_freq";
    size_t n = strlen(name);
    return n > sizeof suffix && strcmp(name + n - (sizeof suffix - 1), suffix) == 0;
}

static void refuse_unused(struct binder *b)
{
    for (size_t i = 0; i < b->cp->n_tensors && b->status == LINNET_OK; i++)
        if (!b->used[i] && !harmless(b->cp->tensors[i].name))
            b->status = error_set(b->err, LINNET_FORMAT,
                                  "%s: tensor %s has no place in this architecture: the model "
                                  "would not be what its files say",
                                  b->cp->path, b->cp->tensors[i].name);
}

linnet_status weights_bind(const struct checkpoint *cp, const struct model_config *c,
                           struct weights *out, linnet_error *err)
{
    const struct shape *s = &c->shape;
    *out = (struct weights){0};
    struct binder b = {.cp = cp, .err = err, .used = mem_new(cp->n_tensors, sizeof(bool))};
    out->layers = mem_new((size_t)s->n_layers, sizeof *out->layers);
    if (!b.used || !out->layers) b.status = error_memory(err, "the tensor table", cp->n_tensors);
    out->embedding = take(&b, true, s->vocab, s->hidden, "model.embed_tokens.weight");
    out->final_norm = take(&b, true, s->hidden, 0, "model.norm.weight");
    out->head = take(&b, !c->tied, s->vocab, s->hidden, "lm_head.weight");
    if (c->tied) out->head = out->embedding; /* a copy in the file, if any, goes unused as in HF */
    out->rope_freqs = take(&b, false, s->head_dim / 2, 0, "rope_freqs.weight");
    for (int32_t i = 0; i < s->n_layers && b.status == LINNET_OK; i++)
        bind_layer(&b, c, i, &out->layers[i]);
    if (b.status == LINNET_OK) refuse_unused(&b);
    free(b.used);
    if (b.status != LINNET_OK) weights_free(out);
    return b.status;
}

void weights_free(struct weights *w)
{
    free(w->layers);
    w->layers = NULL;
}
