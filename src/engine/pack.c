/* pack.c - weights as a backend lays them out, into a file beside the model. */
#include "engine/api_internal.h"
#include "file/packed.h"
#include "model/decoder.h"

linnet_status linnet_pack(linnet_model *m, const linnet_engine_options *options, char **path,
                          int64_t *bytes, linnet_error *err)
{
    static const linnet_engine_options defaults = {0};
    const linnet_engine_options *o = options ? options : &defaults;
    struct pool *pool = NULL;
    struct device device;
    if (!m->checkpoint)
        return error_set(err, LINNET_INVALID, "%s is a tokenizer without a model", m->path);
    linnet_status status = find_device("cpu", &device, err);
    char *written = packed_path(m->checkpoint);
    if (!status && !written) status = error_memory(err, "a path", 0);
    if (!status) status = pool_create(o->threads, &pool, err);
    if (!status)
        status = decoder_pack(m->checkpoint, &m->config, device.ops, pool, o->progress,
                              o->progress_user, bytes, err);
    pool_destroy(pool);
    if (status)
        linnet_free(written);
    else
        *path = written;
    return status;
}
