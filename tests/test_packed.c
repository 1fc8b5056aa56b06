/*
 * Files of packed weights (file/packed.h): an engine that maps one computes the same bits, and one
 * that is not this model's, or not as it was written, is never used.
 */
#include <dirent.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/random.h"
#include "file/packed.h"
#include "linnet.h"
#include "ops/cpu/kernels.h"
#include "support.h"

enum { N = 60 };

static char folder[] = "/tmp/linnet-packed-XXXXXX";

static void run(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void run(const char *format, ...)
{
    char command[1000];
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    assert_int_equal(system(command), 0);
}

/* A path in the folder of this test; valid until the fourth call after it. */
static const char *in_folder(const char *name)
{
    static char paths[4][200];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static int set_up(void **state)
{
    (void)state;
    if (!mkdtemp(folder)) return 1;
    run("cp -r '%s' '%s'", data_path("qwen3-tiny"), in_folder("directory"));
    run("cp '%s' '%s'", data_path("gguf/qwen2-mini-q4_k_mix.gguf"), in_folder("mix.gguf"));
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    run("rm -r '%s'", folder);
    return 0;
}

static linnet_model *open_model(const char *path)
{
    linnet_model *model;
    linnet_error err;
    assert_ok(linnet_model_open(path, &model, &err), err);
    return model;
}

/* How likely the model finds some tokens, on two threads. */
static void score_numa(const char *path, const char *numa, double out[N - 1])
{
    linnet_model *model = open_model(path);
    linnet_scorer *scorer;
    linnet_error err;
    linnet_engine_options options = {
        .device = "cpu", .threads = 2, .max_model_len = N, .numa = numa};
    int32_t ids[N];
    for (int32_t i = 0; i < N; i++) ids[i] = 3 + 7 * i % 250;
    assert_ok(linnet_scorer_create(model, &options, &scorer, &err), err);
    assert_ok(linnet_score(scorer, ids, N, 1, out, &err), err);
    linnet_scorer_destroy(scorer);
    linnet_model_close(model);
}

static void score(const char *path, double out[N - 1])
{
    score_numa(path, NULL, out);
}

/* Whether an engine maps the model's file; if not, its reason contains `why` (NULL: it has none).
 */
static void assert_packed(const char *path, bool packed, const char *why)
{
    linnet_model *model = open_model(path);
    linnet_engine *engine;
    linnet_error err;
    linnet_engine_options options = {.device = "cpu", .threads = 1, .max_model_len = N};
    linnet_plan plan;
    assert_ok(linnet_engine_create(model, &options, &engine, &err), err);
    linnet_engine_get_plan(engine, &plan);
    if (plan.packed != packed) fail_msg("%s: packed %d, expected %d", path, plan.packed, packed);
    if (why && (!plan.packed_reason || !strstr(plan.packed_reason, why)))
        fail_msg("%s: \"%s\" does not contain \"%s\"", path,
                 plan.packed_reason ? plan.packed_reason : "", why);
    if (!why) assert_null(plan.packed_reason);
    linnet_engine_destroy(engine);
    linnet_model_close(model);
}

static void pack(const char *model_path, const char *expected_path)
{
    linnet_model *model = open_model(model_path);
    linnet_error err;
    struct stat about;
    char *path;
    int64_t bytes;
    assert_ok(linnet_pack(model, NULL, &path, &bytes, &err), err);
    assert_string_equal(path, expected_path);
    assert_int_equal(stat(path, &about), 0);
    assert_int_equal(about.st_size, bytes);
    linnet_free(path);
    linnet_model_close(model);
}

/* Nothing in the folders but the models and what is named after them in full. */
static void assert_no_leftovers(void)
{
    DIR *open_folder = opendir(in_folder("directory"));
    assert_non_null(open_folder);
    for (const struct dirent *e; (e = readdir(open_folder));)
        if (strncmp(e->d_name, "linnet", 6) == 0) assert_string_equal(e->d_name, "linnet.packed");
    closedir(open_folder);
    open_folder = opendir(folder);
    assert_non_null(open_folder);
    for (const struct dirent *e; (e = readdir(open_folder));)
        if (strncmp(e->d_name, "mix.gguf.", 9) == 0)
            assert_string_equal(e->d_name, "mix.gguf.packed");
    closedir(open_folder);
}

static const char *const models[][2] = {{"mix.gguf", "mix.gguf.packed"},
                                        {"directory", "directory/linnet.packed"}};

static void same_bits(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        const char *model = in_folder(models[i][0]);
        double before[N - 1], after[N - 1];
        score(model, before);
        assert_packed(model, false, NULL);
        pack(model, in_folder(models[i][1]));
        assert_packed(model, true, NULL);
        score(model, after);
        assert_memory_equal(before, after, sizeof before);
        pack(model, in_folder(models[i][1])); /* in place of the one before */
        assert_packed(model, true, NULL);
    }
    assert_no_leftovers();
}

/* Memory over all nodes is not a file's. */
static void interleaved(void **state)
{
    (void)state;
    const char *path = in_folder("mix.gguf");
    double mapped[N - 1], spread[N - 1];
    linnet_model *model;
    linnet_engine *engine;
    linnet_error err;
    linnet_plan plan;
    linnet_engine_options options = {
        .device = "cpu", .threads = 1, .max_model_len = N, .numa = "interleave"};
    pack(path, in_folder("mix.gguf.packed"));
    model = open_model(path);
    linnet_status status = linnet_engine_create(model, &options, &engine, &err);
    if (status == LINNET_OK) { /* a container may forbid it */
        linnet_engine_get_plan(engine, &plan);
        assert_false(plan.packed);
        linnet_engine_destroy(engine);
        score(path, mapped);
        score_numa(path, "interleave", spread);
        assert_memory_equal(mapped, spread, sizeof mapped);
    } else {
        assert_int_equal(status, LINNET_UNSUPPORTED);
        assert_non_null(strstr(err.message, "leave --numa out"));
    }
    options.numa = "isolate";
    assert_int_equal(linnet_engine_create(model, &options, &engine, &err), LINNET_INVALID);
    assert_non_null(strstr(err.message, "use none or interleave"));
    linnet_model_close(model);
}

/* Of the model as it was, not as it is. */
static void other_sources(void **state)
{
    (void)state;
    static const char why[] = "was made from other files";
    const char *model = in_folder("mix.gguf");
    struct stat about;
    pack(model, in_folder("mix.gguf.packed"));
    assert_int_equal(stat(model, &about), 0);
    struct timespec times[2] = {about.st_atim, about.st_mtim};
    times[1].tv_nsec ^= 1;
    assert_int_equal(utimensat(AT_FDCWD, model, times, 0), 0);
    assert_packed(model, false, why);
    times[1].tv_nsec ^= 1;
    assert_int_equal(utimensat(AT_FDCWD, model, times, 0), 0);
    assert_packed(model, true, NULL);

    run("printf x >> '%s'", model); /* longer, of the same time */
    assert_int_equal(utimensat(AT_FDCWD, model, times, 0), 0);
    assert_packed(model, false, why);
    assert_int_equal(truncate(model, about.st_size), 0);
    assert_int_equal(utimensat(AT_FDCWD, model, times, 0), 0);
    assert_packed(model, true, NULL);

    size_t n; /* the same size and time, other weights */
    char *bytes = load_file(model, &n);
    int fd = open(model, O_WRONLY);
    for (size_t i = n / 2; i < n; i++) bytes[i] ^= 1;
    assert_int_equal(pwrite(fd, bytes, n, 0), n);
    close(fd);
    assert_int_equal(utimensat(AT_FDCWD, model, times, 0), 0);
    assert_packed(model, false, why);
    free(bytes);
    run("cp '%s' '%s'", data_path("gguf/qwen2-mini-q4_k_mix.gguf"), model);

    run("cp '%s' '%s'", in_folder("directory/linnet.packed"), in_folder("mix.gguf.packed"));
    assert_packed(model, false, why);
}

/* An output matrix beside the embedding in a safetensors file: the embedding's rows, one further.
 */
static void add_output_matrix(const char *path)
{
    size_t n;
    uint64_t header_bytes;
    char *bytes = load_file(path, &n);
    memcpy(&header_bytes, bytes, 8);
    json_t *header = json_loadb(bytes + 8, header_bytes, 0, NULL), *entry;
    const json_t *embedding = json_object_get(header, "model.embed_tokens.weight");
    const json_t *offsets = json_object_get(embedding, "data_offsets");
    json_int_t begin = json_integer_value(json_array_get(offsets, 0)),
               end = json_integer_value(json_array_get(offsets, 1)),
               data = (json_int_t)(n - 8 - header_bytes);
    const char *rows = bytes + 8 + header_bytes + begin;
    size_t size = (size_t)(end - begin), row = size / 480;
    entry = json_pack("{s:O,s:O,s:[I,I]}", "dtype", json_object_get(embedding, "dtype"), "shape",
                      json_object_get(embedding, "shape"), "data_offsets", data,
                      data + (json_int_t)size);
    json_object_set_new(header, "lm_head.weight", entry);
    char *text = json_dumps(header, JSON_COMPACT);
    uint64_t length = strlen(text);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(&length, 8, 1, f), 1);
    assert_int_equal(fwrite(text, length, 1, f), 1);
    assert_int_equal(fwrite(bytes + 8 + header_bytes, (size_t)data, 1, f), 1);
    assert_int_equal(fwrite(rows + row, size - row, 1, f), 1);
    assert_int_equal(fwrite(rows, row, 1, f), 1);
    assert_int_equal(fclose(f), 0);
    json_decref(header);
    free(text);
    free(bytes);
}

/* Which matrices there are depends on config.json too: the output matrix of its own, or the
 * embedding's. */
static void other_recipe(void **state)
{
    (void)state;
    const char *model = in_folder("untied");
    static const char config[] = "/config.json";
    double tied[N - 1], untied[N - 1], again[N - 1];
    char path[300];
    run("cp -r '%s' '%s' && rm -f '%s/linnet.packed'", in_folder("directory"), model, model);
    snprintf(path, sizeof path, "%s%s", model, config);
    add_output_matrix(in_folder("untied/model.safetensors"));
    json_t *json = load_json(path);
    json_object_set_new(json, "tie_word_embeddings", json_true());
    assert_int_equal(json_dump_file(json, path, 0), 0);
    score(model, tied);
    pack(model, in_folder("untied/linnet.packed"));
    assert_packed(model, true, NULL);
    json_object_set_new(json, "tie_word_embeddings", json_false());
    assert_int_equal(json_dump_file(json, path, 0), 0);
    json_decref(json);
    assert_packed(model, false, "was made from other files");
    score(model, again);
    run("rm '%s/linnet.packed'", model);
    score(model, untied);
    assert_memory_equal(again, untied, sizeof untied);
    assert_memory_not_equal(again, tied, sizeof tied);
}

/* A file with all hashes right and not enough in it: as if there were none. */
static void too_short(void **state)
{
    (void)state;
    const char *model = in_folder("mix.gguf");
    struct checkpoint *cp;
    struct packed *packed;
    struct pool *pool;
    linnet_error err;
    void *place;
    bool filled;
    int64_t bytes;
    double before[N - 1], after[N - 1];
    run("rm -f '%s'", in_folder("mix.gguf.packed"));
    score(model, before);
    assert_ok(pool_create(1, &pool, &err), err);
    assert_ok(checkpoint_open(model, &cp, &err), err);
    assert_ok(packed_create(cp, PACK_LAYOUT, true, &packed, &err), err);
    assert_ok(packed_next(packed, 5000, &place, &filled, &err), err);
    assert_false(filled);
    memset(place, 1, 5000);
    assert_ok(packed_commit(packed, pool, &bytes, &err), err);
    packed_close(packed);
    checkpoint_close(cp);
    pool_destroy(pool);
    assert_packed(model, false, "was made from other files");
    score(model, after);
    assert_memory_equal(before, after, sizeof before);
    assert_no_leftovers();
}

/* Where the system has no files without a name: what a killed process left is overwritten, what one
 * is at is not. */
static void named_while_written(void **state)
{
    (void)state;
    struct checkpoint *cp;
    struct packed *packed, *second;
    linnet_error err;
    struct stat about;
    run("printf old > '%s'", in_folder("mix.gguf.packed.new"));
    assert_ok(checkpoint_open(in_folder("mix.gguf"), &cp, &err), err);
    assert_ok(packed_create(cp, PACK_LAYOUT, true, &packed, &err), err);
    assert_int_equal(stat(in_folder("mix.gguf.packed.new"), &about), 0);
    assert_int_equal(about.st_size, 0);
    assert_int_equal(packed_create(cp, PACK_LAYOUT, true, &second, &err), LINNET_IO);
    assert_non_null(strstr(err.message, "another process is writing it"));
    assert_int_equal(access(in_folder("mix.gguf.packed.new"), F_OK), 0);
    packed_close(packed);
    checkpoint_close(cp);
    assert_no_leftovers();
}

/* It may be read by whom the model may be, whatever the mask of new files. */
static void mode_of_the_model(void **state)
{
    (void)state;
    struct stat about, model;
    mode_t mask = umask(077);
    static const mode_t modes[] = {0644, 0400, 0640};
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        assert_int_equal(chmod(in_folder("mix.gguf"), modes[i]), 0);
        pack(in_folder("mix.gguf"), in_folder("mix.gguf.packed"));
        assert_int_equal(stat(in_folder("mix.gguf.packed"), &about), 0);
        assert_int_equal(stat(in_folder("mix.gguf"), &model), 0);
        assert_int_equal(about.st_mode & 0777, modes[i]);
        assert_int_equal(about.st_gid, model.st_gid);
    }
    umask(mask);
    assert_int_equal(chmod(in_folder("mix.gguf"), 0644), 0);
    run(": > '%s'", in_folder("mix.gguf.packed"));
    assert_packed(in_folder("mix.gguf"), false, "'linnet pack' makes it anew"); /* empty */
}

static linnet_status open_bytes(const void *bytes, size_t n, const uint64_t source[2],
                                uint32_t layout, linnet_error *err)
{
    struct pool *pool;
    struct packed *packed;
    assert_ok(pool_create(1, &pool, err), *err);
    linnet_status status = packed_open_memory(bytes, n, "file", source, layout, pool, &packed, err);
    if (!status) packed_close(packed);
    pool_destroy(pool);
    return status;
}

/* A bit or an end that is not as it was written, wherever. */
static void damage(void **state)
{
    (void)state;
    const char *model = in_folder("mix.gguf"), *path = in_folder("mix.gguf.packed");
    size_t n;
    uint64_t source[2];
    linnet_error err;
    pack(model, path);
    char *bytes = load_file(path, &n);
    memcpy(source, bytes + 16, sizeof source);
    assert_ok(open_bytes(bytes, n, source, PACK_LAYOUT, &err), err);
    size_t step = 1;
    for (size_t i = 0; i < n; i += step) {
        step = i < 63 || i >= n - 16 ? 1 : i == 63 ? PACKED_PAGE - 63 : 997; /* none of the gap */
        bytes[i] ^= 4;
        linnet_status status = open_bytes(bytes, n, source, PACK_LAYOUT, &err);
        if (status != LINNET_FORMAT) fail_msg("byte %zu changed: status %d", i, status);
        bytes[i] ^= 4;
    }
    for (size_t i = 0; i < n; i += i < 70 ? 1 : 4093)
        assert_int_equal(open_bytes(bytes, i, source, PACK_LAYOUT, &err), LINNET_FORMAT);
    char *longer = realloc(bytes, n + 8);
    memset(longer + n, 0, 8);
    assert_int_equal(open_bytes(longer, n + 8, source, PACK_LAYOUT, &err), LINNET_FORMAT);
    assert_int_equal(open_bytes(longer, n, source, PACK_LAYOUT + 1, &err), LINNET_UNSUPPORTED);
    assert_non_null(strstr(err.message, "another version's"));
    source[1] ^= 1;
    assert_int_equal(open_bytes(longer, n, source, PACK_LAYOUT, &err), LINNET_INVALID);
    free(longer);
    run("truncate -s -8 '%s'", path);
    assert_packed(model, false, "is damaged");
    run("rm '%s' && ln -s nowhere '%s'", path, path);
    assert_packed(model, false, NULL); /* as if there were none */
    run("rm '%s' && mkfifo '%s'", path, path);
    assert_packed(model, false, "pipe");
    run("rm '%s'", path);
}

static void cannot_be_written(void **state)
{
    (void)state;
    linnet_model *model = open_model(in_folder("mix.gguf"));
    linnet_error err;
    char *path = NULL;
    int64_t bytes;
    run("rm -f '%s' && mkdir '%s'", in_folder("mix.gguf.packed"), in_folder("mix.gguf.packed"));
    assert_int_equal(linnet_pack(model, NULL, &path, &bytes, &err), LINNET_IO);
    assert_non_null(strstr(err.message, "mix.gguf.packed: cannot be put in its place"));
    assert_null(path);
    linnet_model_close(model);
    run("rmdir '%s'", in_folder("mix.gguf.packed"));
    assert_no_leftovers();
    assert_ok(linnet_model_random("smollm2-135m", "q4_0", 1, &model, &err), err);
    assert_int_equal(linnet_pack(model, NULL, &path, &bytes, &err), LINNET_INVALID);
    linnet_model_close(model);
}

/* The hash of a file's data, of which the file has a table. */
static uint64_t data_hash(const char *path)
{
    size_t n;
    uint64_t data, hash;
    char *bytes = load_file(path, &n);
    memcpy(&data, bytes + 32, sizeof data);
    hash = XXH3_64bits(bytes + PACKED_PAGE, data);
    free(bytes);
    return hash;
}

/*
 * What a file holds: the panels of each type, and of two models which matrices, joined and paired
 * how, in what order. If this fails, files that were written before are not what the kernels read:
 * PACK_LAYOUT grows, and the hashes become those of the new layout.
 */
static void layout(void **state)
{
    (void)state;
    enum { COLUMNS = 512, ROW_BYTES = COLUMNS * 4 };
    static const struct {
        uint32_t layout;
        uint64_t panels, mix, directory;
    } known = {1, 0xb2523c69c9fd2e30, 0xd7a463c93ac0804e, 0x53a8b76310461e52};
    static uint8_t source[PANEL][ROW_BYTES];
    static uint8_t panel[PANEL * ROW_BYTES];
    const void *rows[PANEL];
    XXH3_state_t all;
    XXH3_64bits_reset(&all);
    for (int r = 0; r < PANEL; r++) {
        rows[r] = source[r];
        for (int i = 0; i < ROW_BYTES; i++)
            source[r][i] = (uint8_t)random_u64(1, (uint64_t)(r * ROW_BYTES + i), 0);
    }
    for (enum dtype d = 0; d < DTYPE_COUNT; d++) {
        size_t n = (size_t)pack_panel_bytes(pack_of(d), COLUMNS);
        assert_true(n <= sizeof panel);
        memset(panel, 0, n);
        pack_panel(d, rows, COLUMNS, panel);
        XXH3_64bits_update(&all, panel, n);
    }
    pack(in_folder("mix.gguf"), in_folder("mix.gguf.packed"));
    pack(in_folder("directory"), in_folder("directory/linnet.packed"));
    uint64_t panels = XXH3_64bits_digest(&all), mix = data_hash(in_folder("mix.gguf.packed")),
             directory = data_hash(in_folder("directory/linnet.packed"));
    assert_int_equal(PACK_LAYOUT, known.layout);
    if (panels != known.panels || mix != known.mix || directory != known.directory)
        fail_msg("the layout is now {%d, 0x%016llx, 0x%016llx, 0x%016llx}", PACK_LAYOUT,
                 (unsigned long long)panels, (unsigned long long)mix,
                 (unsigned long long)directory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_bits),
        cmocka_unit_test(interleaved),
        cmocka_unit_test(other_sources),
        cmocka_unit_test(other_recipe),
        cmocka_unit_test(damage),
        cmocka_unit_test(too_short),
        cmocka_unit_test(named_while_written),
        cmocka_unit_test(mode_of_the_model),
        cmocka_unit_test(cannot_be_written),
        cmocka_unit_test(layout),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
