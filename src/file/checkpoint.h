/*
 * checkpoint.h - a model on disk, whatever its form: a GGUF file (or split set) or a directory as
 * Hugging Face lays it out. One read-only checkpoint: metadata and a checked tensor table under
 * one set of names (Hugging Face's: "model.layers.0.self_attn.q_proj.weight").
 */
#ifndef LINNET_FILE_CHECKPOINT_H
#define LINNET_FILE_CHECKPOINT_H

#include <jansson.h>

#include "base/dtype.h"
#include "base/error.h"

struct gguf;

enum { TENSOR_MAX_DIMS = 4 };

struct tensor {
    const char *name;
    enum dtype dtype;
    int n_dims;
    int64_t shape[TENSOR_MAX_DIMS]; /* slowest first: a matrix is [rows, columns] */
    const void *data;               /* read-only mapping; alignment not guaranteed */
    size_t bytes;
};

struct checkpoint {
    char *path;
    struct gguf *gguf; /* NULL for a directory */
    json_t *config;    /* config.json; NULL for GGUF, as are the next two where absent */
    json_t *generation_config;
    json_t *tokenizer_config;
    const char *tokenizer_json; /* the bytes of tokenizer.json (mapping) or NULL */
    size_t tokenizer_json_size;
    /* Owned and NUL-terminated, NULL where there is none: chat_template.jinja before
     * tokenizer_config's chat_template (in a list: the entry "default"), or
     * tokenizer.chat_template. Templates may be long; the text is not yet parsed. */
    char *chat_template;
    size_t n_tensors;
    struct tensor *tensors; /* sorted by name (strcmp), names unique */
    void *internal;         /* mappings and name storage */
    bool mapped;            /* the tensors' data are files' */
};

/*
 * Opens a GGUF file or a directory. Fails with one message naming file and tensor or key, what was
 * expected and what was found. Weights: model.safetensors.index.json and the shards it names
 * before model.safetensors; a stray shard is ignored, a tensor that is not where the index puts it
 * is refused. Nothing outside the directory is opened: names of shards are plain names, and a
 * symbolic link must lead to a file inside, or from CACHE/snapshots/REVISION to CACHE/blobs (the
 * layout of Hugging Face's downloads). The files are mapped: they must not be changed in place
 * while the checkpoint is open. The caller frees with checkpoint_close.
 */
linnet_status checkpoint_open(const char *path, struct checkpoint **out, linnet_error *err);

/*
 * A checkpoint made in memory, for models with random weights: tensors of these names, types and
 * shapes, their data zeroed and, until it is first used, the caller's to write. `config` is what
 * config.json would hold; it is taken over, also on failure.
 */
linnet_status checkpoint_create(const char *name, json_t *config, const struct tensor *tensors,
                                size_t n, struct checkpoint **out, linnet_error *err);
void checkpoint_close(struct checkpoint *cp);

/* Once a tensor's data have been copied: its pages need not stay in memory. It may still be read.
 */
void checkpoint_release(const struct checkpoint *cp, const struct tensor *t);

/* NULL if absent. */
const struct tensor *checkpoint_find(const struct checkpoint *cp, const char *name);

#endif
