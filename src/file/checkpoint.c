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
    cp->mapped = true;
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

static int64_t tensor_bytes(const struct tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i < t->n_dims; i++) n *= t->shape[i];
    return dtype_bytes(t->dtype, n);
}

/* Where each tensor lies in the pages: at multiples of a cache line. */
static linnet_status place_tensors(struct checkpoint *cp, const struct tensor *tensors, size_t n,
                                   linnet_error *err)
{
    enum { ALIGN = 64 };
    struct storage *storage = cp->internal;
    for (size_t i = 0; i < n; i++)
        storage->page_bytes += ((size_t)tensor_bytes(&tensors[i]) + ALIGN - 1) / ALIGN * ALIGN;
    storage->pages = mem_pages(storage->page_bytes, true);
    cp->tensors = mem_new(n, sizeof *cp->tensors);
    storage->names = mem_new(n, sizeof *storage->names);
    if (!storage->pages || !cp->tensors || !storage->names)
        return error_memory(err, "the weights", storage->page_bytes);
    char *at = storage->pages;
    for (size_t i = 0; i < n; i++) {
        struct tensor *t = &cp->tensors[i];
        *t = tensors[i];
        t->name = storage->names[i] = mem_string(tensors[i].name, strlen(tensors[i].name));
        if (!t->name) return error_memory(err, "a tensor's name", strlen(tensors[i].name));
        cp->n_tensors = storage->n_names = i + 1;
        t->data = at;
        t->bytes = (size_t)tensor_bytes(t);
        at += (t->bytes + ALIGN - 1) / ALIGN * ALIGN;
    }
    return sort_tensors(cp, err);
}

linnet_status checkpoint_create(const char *name, json_t *config, const struct tensor *tensors,
                                size_t n, struct checkpoint **out, linnet_error *err)
{
    struct checkpoint *cp = mem_new(1, sizeof *cp);
    if (!cp) {
        json_decref(config);
        return error_memory(err, "the checkpoint", sizeof *cp);
    }
    cp->config = config;
    cp->path = mem_string(name, strlen(name));
    cp->internal = mem_new(1, sizeof(struct storage));
    linnet_status status = cp->path && cp->internal
                               ? place_tensors(cp, tensors, n, err)
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
    mem_pages_free(storage->pages, storage->page_bytes);
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

void checkpoint_release(const struct checkpoint *cp, const struct tensor *t)
{
    if (cp->mapped) mapping_release(t->data, t->bytes);
}

const struct tensor *checkpoint_find(const struct checkpoint *cp, const char *name)
{
    struct tensor wanted = {.name = name};
    return bsearch(&wanted, cp->tensors, cp->n_tensors, sizeof *cp->tensors, compare_tensors);
}
