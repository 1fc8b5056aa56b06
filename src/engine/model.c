/* model.c - opening a model, and what is known of it. */
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "base/strbuf.h"
#include "engine/model_internal.h"
#include "file/gguf.h"
#include "file/mapping.h"

void linnet_free(void *memory)
{
    free(memory);
}

/* ---- opening ----------------------------------------------------------------------------- */

static bool states_tokenizer(const struct checkpoint *cp)
{
    return cp->gguf ? gguf_has(cp->gguf, "tokenizer.ggml.model") : cp->tokenizer_json != NULL;
}

static void count_weights(linnet_model *m)
{
    int64_t elements[DTYPE_COUNT] = {0};
    enum dtype most = DTYPE_F32;
    for (size_t i = 0; i < m->checkpoint->n_tensors; i++) {
        const struct tensor *t = &m->checkpoint->tensors[i];
        int64_t n = 1;
        for (int k = 0; k < t->n_dims; k++) n *= t->shape[k]; /* checked when the file was opened */
        elements[t->dtype] += n;
        m->n_parameters += n;
        m->weight_bytes += (int64_t)t->bytes;
    }
    for (enum dtype d = 0; d < DTYPE_COUNT; d++)
        if (elements[d] > elements[most]) most = d;
    m->dtype = dtype_name(most);
}

/* The last part of the path, without ".gguf". */
static char *short_name(const char *path)
{
    size_t end = strlen(path);
    while (end > 1 && path[end - 1] == '/') end--;
    size_t begin = end;
    while (begin > 0 && path[begin - 1] != '/') begin--;
    if (end - begin > 5 && memcmp(path + end - 5, ".gguf", 5) == 0) end -= 5;
    return mem_string(path + begin, end - begin);
}

linnet_status model_from_checkpoint(struct checkpoint *cp, linnet_model **out, linnet_error *err)
{
    linnet_model *m = mem_new(1, sizeof *m);
    if (!m) {
        checkpoint_close(cp);
        return error_memory(err, "the model", sizeof *m);
    }
    m->checkpoint = cp;
    m->path = mem_string(cp->path, strlen(cp->path));
    m->name = short_name(cp->path);
    count_weights(m);
    linnet_status status = LINNET_OK;
    if (!m->path || !m->name) status = error_memory(err, "a path", strlen(cp->path));
    if (!status) status = model_config_read(cp, &m->config, err);
    if (!status && states_tokenizer(cp)) status = tokenizer_open(cp, &m->tokenizer, err);
    if (!status && m->tokenizer) model_config_add_eos(&m->config, tokenizer_eos(m->tokenizer));
    if (!status && m->tokenizer && cp->chat_template) {
        status = template_compile(cp->chat_template, strlen(cp->chat_template), "chat template",
                                  &m->chat_template, err);
        if (status) error_prefix(err, "%s", cp->path);
    }
    if (status) {
        linnet_model_close(m);
        return status;
    }
    *out = m;
    return LINNET_OK;
}

linnet_status linnet_model_open(const char *path, linnet_model **out, linnet_error *err)
{
    char *found;
    linnet_status status = model_locate(path, &found, err);
    if (status) return status;
    struct checkpoint *cp;
    status = checkpoint_open(found, &cp, err);
    free(found);
    return status ? status : model_from_checkpoint(cp, out, err);
}

linnet_status linnet_model_open_tokenizer(const char *path, linnet_model **out, linnet_error *err)
{
    struct mapping mapping;
    linnet_status status = mapping_open(path, &mapping, err);
    if (status) return status;
    linnet_model *m = mem_new(1, sizeof *m);
    if (!m) status = error_memory(err, "the model", sizeof *m);
    if (!status) {
        m->path = mem_string(path, strlen(path));
        m->name = short_name(path);
        m->dtype = "";
        if (!m->path || !m->name) status = error_memory(err, "a path", strlen(path));
    }
    if (!status)
        status =
            tokenizer_open_json((const char *)mapping.data, mapping.size, path, &m->tokenizer, err);
    mapping_close(&mapping);
    if (status) {
        linnet_model_close(m);
        return status;
    }
    *out = m;
    return LINNET_OK;
}

void linnet_model_close(linnet_model *m)
{
    if (!m) return;
    if (m->chat_template) template_free(m->chat_template);
    if (m->tokenizer) tokenizer_close(m->tokenizer);
    if (m->checkpoint) checkpoint_close(m->checkpoint);
    free(m->path);
    free(m->name);
    free(m);
}

/* ---- what is known of it ----------------------------------------------------------------- */

void linnet_model_get_info(const linnet_model *m, linnet_model_info *info)
{
    const struct shape *s = &m->config.shape;
    *info = (linnet_model_info){
        .path = m->path,
        .name = m->name,
        .architecture = m->checkpoint ? architecture_name(m->config.arch) : "",
        .dtype = m->dtype,
        .n_layers = s->n_layers,
        .hidden_size = s->hidden,
        .intermediate_size = s->intermediate,
        .n_heads = s->n_heads,
        .n_kv_heads = s->n_kv_heads,
        .head_dim = s->head_dim,
        .vocab_size = m->checkpoint ? s->vocab : tokenizer_size(m->tokenizer),
        .context_length = m->config.context_length,
        .n_parameters = m->n_parameters,
        .weight_bytes = m->weight_bytes,
        .has_tokenizer = m->tokenizer != NULL,
        .has_chat_template = m->chat_template != NULL,
    };
}

void linnet_sampling_defaults(const linnet_model *m, linnet_sampling *sampling)
{
    *sampling = m->checkpoint
                    ? m->config.sampling
                    : (linnet_sampling){.temperature = 1, .top_p = 1, .repetition_penalty = 1};
}

json_t *json_text(const char *bytes, size_t n)
{
    json_t *text = json_stringn(bytes, n);
    if (text) return text;
    char *clean = mem_string(bytes, n);
    for (size_t i = 0; clean && i < n; i++)
        if ((unsigned char)clean[i] >= 0x80) clean[i] = '?';
    text = clean ? json_stringn(clean, n) : NULL;
    free(clean);
    return text;
}

static json_t *describe_metadata(const struct gguf *g)
{
    json_t *all = json_object();
    char value[512];
    for (size_t i = 0; i < gguf_key_count(g); i++) {
        struct view key = gguf_key(g, i);
        json_t *name = json_text(key.data, key.size);
        gguf_describe(g, i, value, sizeof value);
        if (name)
            json_object_set_new(all, json_string_value(name), json_text(value, strlen(value)));
        json_decref(name);
    }
    return all;
}

static json_t *describe_tensors(const struct checkpoint *cp)
{
    json_t *all = json_array();
    for (size_t i = 0; i < cp->n_tensors; i++) {
        const struct tensor *t = &cp->tensors[i];
        json_t *shape = json_array();
        for (int k = 0; k < t->n_dims; k++) json_array_append_new(shape, json_integer(t->shape[k]));
        json_array_append_new(all, json_pack("{s:o,s:s,s:o,s:I}", "name",
                                             json_text(t->name, strlen(t->name)), "dtype",
                                             dtype_name(t->dtype), "shape", shape, "bytes",
                                             (json_int_t)t->bytes));
    }
    return all;
}

static json_t *token_of(const struct tokenizer *t, int32_t id)
{
    size_t n;
    if (id < 0) return json_null();
    const char *bytes = tokenizer_bytes(t, id, &n);
    return json_pack("{s:i,s:o}", "id", id, "text", json_text(bytes, n));
}

static json_t *describe_tokenizer(const linnet_model *m)
{
    if (!m->tokenizer) return json_null();
    json_t *ends = json_array();
    for (int32_t i = 0; m->checkpoint && i < m->config.n_eos; i++)
        json_array_append_new(ends, token_of(m->tokenizer, m->config.eos[i]));
    return json_pack("{s:i,s:o,s:o,s:o}", "tokens", tokenizer_size(m->tokenizer), "bos",
                     token_of(m->tokenizer, tokenizer_bos(m->tokenizer)), "eos",
                     token_of(m->tokenizer, tokenizer_eos(m->tokenizer)), "end_tokens", ends);
}

static json_t *describe_shape(const linnet_model *m)
{
    const struct shape *s = &m->config.shape;
    return json_pack("{s:s,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:f,s:b}", "architecture",
                     architecture_name(m->config.arch), "n_layers", s->n_layers, "hidden_size",
                     s->hidden, "intermediate_size", s->intermediate, "n_heads", s->n_heads,
                     "n_kv_heads", s->n_kv_heads, "head_dim", s->head_dim, "vocab_size", s->vocab,
                     "context_length", m->config.context_length, "rope_theta", m->config.rope.theta,
                     "tied_embeddings", m->config.tied);
}

linnet_status linnet_model_describe(const linnet_model *m, char **json, linnet_error *err)
{
    const struct checkpoint *cp = m->checkpoint;
    json_t *all =
        json_pack("{s:o,s:o,s:o}", "path", json_text(m->path, strlen(m->path)), "name",
                  json_text(m->name, strlen(m->name)), "tokenizer", describe_tokenizer(m));
    if (cp) {
        json_object_set_new(all, "model", describe_shape(m));
        json_object_set_new(all, "dtype", json_string(m->dtype));
        json_object_set_new(all, "n_parameters", json_integer(m->n_parameters));
        json_object_set_new(all, "weight_bytes", json_integer(m->weight_bytes));
        if (cp->gguf) json_object_set_new(all, "metadata", describe_metadata(cp->gguf));
        if (cp->config) json_object_set(all, "config", cp->config);
        if (cp->generation_config) json_object_set(all, "generation_config", cp->generation_config);
        if (cp->chat_template)
            json_object_set_new(all, "chat_template",
                                json_text(cp->chat_template, strlen(cp->chat_template)));
        json_object_set_new(all, "tensors", describe_tensors(cp));
    }
    *json = all ? json_dumps(all, JSON_INDENT(2)) : NULL;
    json_decref(all);
    return *json ? LINNET_OK : error_set(err, LINNET_MEMORY, "out of memory: describing the model");
}
