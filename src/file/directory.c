/* A model as Hugging Face lays it out: JSON files, a chat template, one or many safetensors. */
#include <stdlib.h>

#include "base/memory.h"
#include "file/checkpoint_internal.h"

enum { MIB = 1 << 20, MAX_JSON = 16 * MIB, MAX_INDEX = 100 * MIB, MAX_TOKENIZER = 256 * MIB };

static const char single_name[] = "model.safetensors",
                  index_name[] = "model.safetensors.index.json",
                  template_name[] = "chat_template.jinja";

static linnet_status open_bounded(const char *directory, const char *name, size_t max,
                                  struct mapping *out, linnet_error *err)
{
    linnet_status status = mapping_open_in(directory, name, out, err);
    if (status || out->size <= max) return status;
    status = error_set(err, LINNET_FORMAT, "%s/%s: expected at most %zu bytes, found %zu",
                       directory, name, max, out->size);
    mapping_close(out);
    return status;
}

/* A JSON object, which must be there. */
static linnet_status load_object(const char *directory, const char *name, size_t max, json_t **out,
                                 linnet_error *err)
{
    struct mapping text;
    json_error_t error;
    linnet_status status = open_bounded(directory, name, max, &text, err);
    if (status) return status;
    *out = json_loadb((const char *)text.data, text.size, JSON_REJECT_DUPLICATES, &error);
    mapping_close(&text);
    if (!*out)
        return error_set(err, LINNET_FORMAT, "%s/%s: line %d: %s", directory, name, error.line,
                         error.text);
    if (json_is_object(*out)) return LINNET_OK;
    json_decref(*out);
    *out = NULL;
    return error_set(err, LINNET_FORMAT, "%s/%s: expected a JSON object", directory, name);
}

static linnet_status load_optional(const char *directory, const char *name, json_t **out,
                                   linnet_error *err)
{
    if (!mapping_present_in(directory, name)) return LINNET_OK;
    return load_object(directory, name, MAX_JSON, out, err);
}

/* ---- the chat template ------------------------------------------------------------------- */

static linnet_status load_template_file(struct checkpoint *cp, linnet_error *err)
{
    struct mapping text;
    linnet_status status = open_bounded(cp->path, template_name, MAX_JSON, &text, err);
    if (status) return status;
    if (memchr(text.data, 0, text.size))
        status = error_set(err, LINNET_FORMAT, "%s/%s: contains NUL; expected text", cp->path,
                           template_name);
    else if (!(cp->chat_template = mem_string((const char *)text.data, text.size)))
        status = error_memory(err, "the chat template", text.size);
    mapping_close(&text);
    return status;
}

/* The template of tokenizer_config.json: a string, or in a list the one named "default". */
static linnet_status find_template(const struct checkpoint *cp, const json_t **out,
                                   linnet_error *err)
{
    const json_t *value = json_object_get(cp->tokenizer_config, "chat_template"), *entry;
    size_t i;
    *out = NULL;
    if (!value || json_is_null(value)) return LINNET_OK;
    if (json_is_string(value)) *out = value;
    json_array_foreach(value, i, entry)
    {
        const char *name = json_string_value(json_object_get(entry, "name"));
        if (name && strcmp(name, "default") == 0) *out = json_object_get(entry, "template");
    }
    if (json_is_string(*out) || (json_is_array(value) && !*out)) return LINNET_OK;
    return error_set(err, LINNET_FORMAT,
                     "%s/tokenizer_config.json: chat_template: expected a string or a list of "
                     "names and templates",
                     cp->path);
}

static linnet_status load_template(struct checkpoint *cp, linnet_error *err)
{
    const json_t *text;
    if (mapping_present_in(cp->path, template_name)) return load_template_file(cp, err);
    linnet_status status = find_template(cp, &text, err);
    if (status || !text) return status;
    cp->chat_template = mem_string(json_string_value(text), json_string_length(text));
    return cp->chat_template ? LINNET_OK
                             : error_memory(err, "the chat template", json_string_length(text));
}

/* ---- the weights ------------------------------------------------------------------------- */

/* The distinct files of the index: name -> number of the shard (a JSON integer). */
static linnet_status list_shards(const struct checkpoint *cp, json_t *weight_map, json_t *shards,
                                 linnet_error *err)
{
    const char *tensor;
    json_t *file;
    json_object_foreach(weight_map, tensor, file)
    {
        const char *name = json_string_value(file);
        if (!name)
            return error_set(err, LINNET_FORMAT,
                             "%s/%s: weight_map: tensor %s: expected a file name as a string",
                             cp->path, index_name, tensor);
        if (json_object_get(shards, name)) continue;
        if (json_object_set_new(shards, name, json_integer((json_int_t)json_object_size(shards))))
            return error_memory(err, "the shard index", json_object_size(weight_map));
    }
    return LINNET_OK;
}

/* Every tensor of the shard must be one that the index says is there. */
static linnet_status check_listed(const struct checkpoint *cp, const json_t *weight_map,
                                  const char *name, const struct safetensors *shard,
                                  linnet_error *err)
{
    for (size_t i = 0; i < shard->n_tensors; i++) {
        const char *tensor = shard->tensors[i].name;
        const char *listed = json_string_value(json_object_get(weight_map, tensor));
        if (!listed || strcmp(listed, name) != 0)
            return error_set(err, LINNET_FORMAT,
                             "%s/%s: tensor %s lies in %s, but the index puts it in %s; index and "
                             "shards are not of one download",
                             cp->path, index_name, tensor, name, listed ? listed : "no file");
    }
    return LINNET_OK;
}

static linnet_status open_shards(struct checkpoint *cp, const json_t *weight_map, json_t *shards,
                                 linnet_error *err)
{
    struct storage *storage = cp->internal;
    const char *name;
    json_t *number;
    size_t n = json_object_size(shards), total = 0;
    storage->shards = mem_new(n, sizeof *storage->shards);
    if (!storage->shards) return error_memory(err, "the shards", n * sizeof *storage->shards);
    storage->n_shards = n;
    json_object_foreach(shards, name, number)
    {
        struct safetensors *shard = &storage->shards[json_integer_value(number)];
        linnet_status status = safetensors_open_in(cp->path, name, shard, err);
        if (status) {
            error_prefix(err, "a shard of the model that %s names", index_name);
            return status;
        }
        status = check_listed(cp, weight_map, name, shard, err);
        if (status) return status;
        total += shard->n_tensors;
    }
    if (total == json_object_size(weight_map)) return LINNET_OK;

    const char *tensor; /* all found are listed, so some listed one was not found */
    const json_t *file;
    json_object_foreach((json_t *)weight_map, tensor, file)
    {
        const json_t *shard = json_object_get(shards, json_string_value(file));
        if (!json_object_get(storage->shards[json_integer_value(shard)].header, tensor))
            return error_set(err, LINNET_FORMAT,
                             "%s/%s: tensor %s should lie in %s, but is not there", cp->path,
                             index_name, tensor, json_string_value(file));
    }
    return error_set(err, LINNET_FORMAT, "%s/%s: expected %zu tensors, found %zu", cp->path,
                     index_name, json_object_size(weight_map), total);
}

static linnet_status read_index(struct checkpoint *cp, linnet_error *err)
{
    json_t *index;
    linnet_status status = load_object(cp->path, index_name, MAX_INDEX, &index, err);
    if (status) return status;
    json_t *weight_map = json_object_get(index, "weight_map"), *shards = json_object();
    if (!json_is_object(weight_map) || json_object_size(weight_map) == 0)
        status = error_set(err, LINNET_FORMAT,
                           "%s/%s: expected \"weight_map\", an object of tensor and file names",
                           cp->path, index_name);
    else if (!shards)
        status = error_memory(err, "the shard index", sizeof *shards);
    if (!status) status = list_shards(cp, weight_map, shards, err);
    if (!status) status = open_shards(cp, weight_map, shards, err);
    json_decref(shards);
    json_decref(index);
    return status;
}

static linnet_status read_single(struct checkpoint *cp, linnet_error *err)
{
    struct storage *storage = cp->internal;
    if (!mapping_present_in(cp->path, single_name))
        return error_set(err, LINNET_IO,
                         "%s: expected a model directory with %s or %s, found neither", cp->path,
                         single_name, index_name);
    storage->shards = mem_new(1, sizeof *storage->shards);
    if (!storage->shards) return error_memory(err, "the weights", sizeof *storage->shards);
    storage->n_shards = 1;
    return safetensors_open_in(cp->path, single_name, &storage->shards[0], err);
}

static linnet_status gather_tensors(struct checkpoint *cp, linnet_error *err)
{
    const struct storage *storage = cp->internal;
    size_t total = 0;
    for (size_t i = 0; i < storage->n_shards; i++) total += storage->shards[i].n_tensors;
    cp->tensors = mem_new(total, sizeof *cp->tensors);
    if (!cp->tensors) return error_memory(err, "the tensor table", total * sizeof *cp->tensors);
    for (size_t i = 0; i < storage->n_shards; i++) {
        const struct safetensors *shard = &storage->shards[i];
        for (size_t j = 0; j < shard->n_tensors; j++)
            cp->tensors[cp->n_tensors++] = shard->tensors[j];
    }
    return LINNET_OK;
}

static linnet_status load_tokenizer(struct checkpoint *cp, linnet_error *err)
{
    static const char name[] = "tokenizer.json";
    struct storage *storage = cp->internal;
    if (!mapping_present_in(cp->path, name)) return LINNET_OK;
    linnet_status status =
        open_bounded(cp->path, name, MAX_TOKENIZER, &storage->tokenizer_json, err);
    if (status) return status;
    cp->tokenizer_json = (const char *)storage->tokenizer_json.data;
    cp->tokenizer_json_size = storage->tokenizer_json.size;
    return LINNET_OK;
}

/* The weights come first: what is most often amiss is a download that stopped half-way. */
linnet_status checkpoint_read_directory(struct checkpoint *cp, linnet_error *err)
{
    linnet_status status =
        mapping_present_in(cp->path, index_name) ? read_index(cp, err) : read_single(cp, err);
    if (!status) status = gather_tensors(cp, err);
    if (!status) status = load_object(cp->path, "config.json", MAX_JSON, &cp->config, err);
    if (!status)
        status = load_optional(cp->path, "generation_config.json", &cp->generation_config, err);
    if (!status)
        status = load_optional(cp->path, "tokenizer_config.json", &cp->tokenizer_config, err);
    if (!status) status = load_tokenizer(cp, err);
    return status ? status : load_template(cp, err);
}
