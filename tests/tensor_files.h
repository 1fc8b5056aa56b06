/* tensor_files.h - a model's directory with other tensors and another config.json. */
#ifndef LINNET_TESTS_TENSOR_FILES_H
#define LINNET_TESTS_TENSOR_FILES_H

#include "scratch.h"

#include "base/strbuf.h"

/* A safetensors file taken apart. */
struct tensors {
    json_t *header;
    char *bytes; /* of the whole file */
    const char *data;
};

static inline struct tensors read_tensors(const char *path)
{
    struct tensors t;
    uint64_t size;
    t.bytes = load_file(path, NULL);
    memcpy(&size, t.bytes, 8);
    t.header = json_loadb(t.bytes + 8, size, 0, NULL);
    assert_non_null(t.header);
    json_object_del(t.header, "__metadata__");
    t.data = t.bytes + 8 + size;
    return t;
}

/* Writes it without tensor `left_out` and with a copy of `original` under the name `copy` (NULL:
 * neither). */
static inline void write_tensors(const struct tensors *t, const char *path, const char *left_out,
                                 const char *copy, const char *original)
{
    json_t *out = json_object(), *entry;
    struct strbuf data = {0};
    const char *name;
    for (int pass = 0; pass < 2; pass++) json_object_foreach(t->header, name, entry)
        {
            if (left_out && strcmp(name, left_out) == 0) continue;
            if (pass && (!copy || strcmp(name, original) != 0)) continue;
            const json_t *range = json_object_get(entry, "data_offsets");
            json_int_t begin = json_integer_value(json_array_get(range, 0)),
                       end = json_integer_value(json_array_get(range, 1)),
                       at = (json_int_t)data.size;
            strbuf_append(&data, t->data + begin, (size_t)(end - begin));
            json_t *moved = json_copy(entry);
            json_object_set_new(moved, "data_offsets",
                                json_pack("[I,I]", at, (json_int_t)data.size));
            json_object_set_new(out, pass ? copy : name, moved);
        }
    char *header = json_dumps(out, JSON_COMPACT);
    uint64_t size = strlen(header);
    FILE *f = fopen(path, "wb");
    assert_true(f && fwrite(&size, 8, 1, f) == 1 && fwrite(header, size, 1, f) == 1 &&
                fwrite(data.data, data.size, 1, f) == 1 && fclose(f) == 0);
    free(header);
    strbuf_free(&data);
    json_decref(out);
}

static inline void set_config(const char *directory, const char *key, json_t *value)
{
    const char *path = scratch_path(directory, "config.json");
    json_t *json = load_json(path);
    json_object_set_new(json, key, value);
    assert_int_equal(json_dump_file(json, path, 0), 0);
    json_decref(json);
}

#endif
