/* model_internal.h - what stands behind linnet_model. Immutable once open. */
#ifndef LINNET_ENGINE_MODEL_INTERNAL_H
#define LINNET_ENGINE_MODEL_INTERNAL_H

#include "file/checkpoint.h"
#include "model/config.h"
#include "text/template.h"
#include "text/tokenizer.h"

struct linnet_model {
    char *path; /* as found */
    char *name;
    struct checkpoint *checkpoint; /* NULL: a bare tokenizer, and config means nothing */
    struct model_config config;
    struct tokenizer *tokenizer;         /* NULL if the model has none */
    struct chat_template *chat_template; /* likewise */
    const char *dtype;
    int64_t n_parameters, weight_bytes;
};

/* Reads configuration, tokenizer and template of a checkpoint, and owns it from now on: it is
 * closed with the model, or at once on failure. */
linnet_status model_from_checkpoint(struct checkpoint *checkpoint, linnet_model **out,
                                    linnet_error *err);

/* Where a model lies: `name` itself if there is such a path, else what bears that name among the
 * installed models. NULL: the default one. free() *path. */
linnet_status model_locate(const char *name, char **path, linnet_error *err);

/* A string of a file as JSON; bytes that are not UTF-8 come out as '?'. */
json_t *json_text(const char *bytes, size_t n);

#endif
