#include "support.h"

#include <time.h>
#include <unistd.h>

static const char *join(const char *root, const char *name)
{
    static char buffers[16][1024];
    static unsigned next;
    char *path = buffers[next++ % 16];
    snprintf(path, sizeof buffers[0], "%s/%s", root, name);
    return path;
}

static const char *if_present(const char *path)
{
    return access(path, R_OK) == 0 ? path : NULL;
}

const char *data_path(const char *name)
{
    return join(LINNET_SOURCE_DIR "/tests/data", name);
}

const char *reference_path(const char *name)
{
    return if_present(join(LINNET_SOURCE_DIR "/../shared/reference", name));
}

const char *cases_path(const char *name)
{
    return if_present(join(LINNET_SOURCE_DIR "/../shared/cases", name));
}

json_t *load_json(const char *path)
{
    size_t size;
    char *text = load_file(path, &size);
    json_error_t error;
    json_t *json = json_loadb(text, size, JSON_ALLOW_NUL, &error);
    free(text);
    if (!json) fail_msg("%s: line %d: %s", path, error.line, error.text);
    return json;
}

char *load_file(const char *path, size_t *size)
{
    size_t n = strlen(path), capacity = 1 << 16, used = 0;
    char command[1200];
    snprintf(command, sizeof command, "gzip -dc '%s'", path);
    bool packed = n > 3 && strcmp(path + n - 3, ".gz") == 0;
    FILE *f = packed ? popen(command, "r") : fopen(path, "rb");
    if (!f) fail_msg("cannot open %s", path);
    char *text = malloc(capacity);
    for (size_t got; (got = fread(text + used, 1, capacity - used - 1, f)) > 0;) {
        used += got;
        if (used + 1 >= capacity) text = realloc(text, capacity *= 2);
    }
    int status = packed ? pclose(f) : fclose(f);
    if (status != 0) fail_msg("cannot read %s", path);
    text[used] = 0;
    if (size) *size = used;
    return text;
}

double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

const char *smollm2_path(void)
{
    const char *models = getenv("LINNET_MODELS"), *data = getenv("XDG_DATA_HOME"),
               *home = getenv("HOME");
    static const char file[] = "SmolLM2-135M-Instruct.Q4_1.gguf";
    char root[800];
    if (models && *models) return if_present(join(models, file));
    if (data && *data)
        snprintf(root, sizeof root, "%s/linnet/models", data);
    else
        snprintf(root, sizeof root, "%s/.local/share/linnet/models", home ? home : "");
    return if_present(join(root, file));
}
