#include "file/checkpoint.h"

#include <stdlib.h>
#include <sys/stat.h>

#include "base/memory.h"
#include "file/checkpoint_internal.h"
#include "file/gguf.h"

static linnet_status read_gguf_template(struct checkpoint *cp, linnet_error *err)
{
    static const char key[] = "tokenizer.chat_template";
    struct view text;
    if (!gguf_has(cp->gguf, key)) return LINNET_OK;
    if (!gguf_string(cp->gguf, key, &text) || (text.size && memchr(text.data, 0, text.size)))
        return error_set(err, LINNET_FORMAT, "%s: key %s: expected a string without NUL", cp->path,
                         key);
    cp->chat_template = mem_string(text.data, text.size);
    return cp->chat_template ? LINNET_OK : error_memory(err, "the chat template", text.size);
}

linnet_status checkpoint_read_gguf(struct checkpoint *cp, linnet_error *err)
{
    struct storage *storage = cp->internal;
    linnet_status status = gguf_open(cp->path, &cp->gguf, err);
    if (status) return status;
    size_t n = gguf_tensor_count(cp->gguf);
    cp->tensors = mem_new(n, sizeof *cp->tensors);
    storage->names = mem_new(n, sizeof *storage->names);
    if (!cp->tensors || !storage->names)
        return error_memory(err, "the tensor table", n * sizeof *cp->tensors);
    cp->n_tensors = storage->n_names = n;
    for (size_t i = 0; i < n; i++) {
        cp->tensors[i] = *gguf_tensor(cp->gguf, i);
        storage->names[i] = checkpoint_name_from_gguf(cp->tensors[i].name);
        if (!storage->names[i]) return error_memory(err, "a tensor's name", 64);
        cp->tensors[i].name = storage->names[i];
    }
    return read_gguf_template(cp, err);
}

static int compare_tensors(const void *a, const void *b)
{
    const struct tensor *x = a, *y = b;
    return strcmp(x->name, y->name);
}

static linnet_status sort_tensors(struct checkpoint *cp, linnet_error *err)
{
    qsort(cp->tensors, cp->n_tensors, sizeof *cp->tensors, compare_tensors);
    for (size_t i = 1; i < cp->n_tensors; i++)
        if (strcmp(cp->tensors[i - 1].name, cp->tensors[i].name) == 0)
            return error_set(err, LINNET_FORMAT,
                             "%s: tensor %s is there twice, under both of its "
                             "names",
                             cp->path, cp->tensors[i].name);
    return LINNET_OK;
}

static linnet_status read_any(struct checkpoint *cp, linnet_error *err)
{
    struct stat info;
    if (stat(cp->path, &info) != 0)
        return error_set(err, LINNET_IO,
                         "%s: %m; give a GGUF file or a Hugging Face model directory", cp->path);
    linnet_status status =
        S_ISDIR(info.st_mode) ? checkpoint_read_directory(cp, err) : checkpoint_read_gguf(cp, err);
    return status ? status : sort_tensors(cp, err);
}

linnet_status checkpoint_open(const char *path, struct checkpoint **out, linnet_error *err)
{
    struct checkpoint *cp = mem_new(1, sizeof *cp);
    if (!cp) return error_memory(err, "the checkpoint", sizeof *cp);
    cp->path = mem_string(path, strlen(path));
    cp->internal = mem_new(1, sizeof(struct storage));
    linnet_status status = cp->path && cp->internal
                               ? read_any(cp, err)
                               : error_memory(err, "the checkpoint", sizeof(struct storage));
    if (status)
        checkpoint_close(cp);
    else
        *out = cp;
    return status;
}

static void free_storage(struct storage *storage)
{
    if (!storage) return;
    for (size_t i = 0; i < storage->n_shards; i++) safetensors_close(&storage->shards[i]);
    for (size_t i = 0; i < storage->n_names; i++) free(storage->names[i]);
    mapping_close(&storage->tokenizer_json);
    free(storage->shards);
    free(storage->names);
    free(storage);
}

void checkpoint_close(struct checkpoint *cp)
{
    if (!cp) return;
    free_storage(cp->internal);
    gguf_close(cp->gguf);
    json_decref(cp->config);
    json_decref(cp->generation_config);
    json_decref(cp->tokenizer_config);
    free(cp->chat_template);
    free(cp->tensors);
    free(cp->path);
    free(cp);
}

const struct tensor *checkpoint_find(const struct checkpoint *cp, const char *name)
{
    struct tensor wanted = {.name = name};
    return bsearch(&wanted, cp->tensors, cp->n_tensors, sizeof *cp->tensors, compare_tensors);
}
