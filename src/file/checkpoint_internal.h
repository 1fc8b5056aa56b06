/* checkpoint_internal.h - what the sources of a checkpoint share. */
#ifndef LINNET_FILE_CHECKPOINT_INTERNAL_H
#define LINNET_FILE_CHECKPOINT_INTERNAL_H

#include "file/checkpoint.h"
#include "file/mapping.h"
#include "file/safetensors.h"

/* Behind checkpoint.internal: what the tensors and texts of a checkpoint point into. */
struct storage {
    struct safetensors *shards;
    size_t n_shards;
    struct mapping tokenizer_json;
    char **names; /* of a GGUF file's tensors, translated, or of those made in memory */
    size_t n_names;
    void *pages; /* of tensors made in memory */
    size_t page_bytes;
};

/* Each fills cp (path and storage are there); on failure checkpoint_close clears up. */
linnet_status checkpoint_read_gguf(struct checkpoint *cp, linnet_error *err);
linnet_status checkpoint_read_directory(struct checkpoint *cp, linnet_error *err);

/* "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"; a name that is not known
 * stays. free() it; NULL if memory is short. */
char *checkpoint_name_from_gguf(const char *name);

#endif
