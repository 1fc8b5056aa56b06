#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/limits.h"
#include "base/threads.h"
#include "base/threads_internal.h"

/* The first line of a file of the kernel's without its newline; false if there is none. */
__attribute__((format(printf, 3, 4))) static bool read_line(char *line, size_t size,
                                                            const char *format, ...)
{
    char path[2 * PATH_MAX];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(path, sizeof path, format, args);
    va_end(args);
    FILE *f = n < (int)sizeof path ? fopen(path, "r") : NULL;
    if (!f) return false;
    bool read = fgets(line, (int)size, f) != NULL;
    fclose(f);
    if (read) line[strcspn(line, "\n")] = 0;
    return read;
}

/* ---- cores ------------------------------------------------------------------------------- */

/* Whether a list like "0-3,8" has a processor of the mask below `cpu`. */
static bool has_lower(const char *list, int cpu, const cpu_set_t *mask, size_t mask_bytes)
{
    while (*list) {
        char *end;
        long first = strtol(list, &end, 10), last = first;
        if (end == list) return false;
        if (*end == '-') last = strtol(end + 1, &end, 10);
        for (long i = first < 0 ? 0 : first; i <= last && i < cpu; i++)
            if (CPU_ISSET_S((size_t)i, mask_bytes, mask)) return true;
        list = *end == ',' ? end + 1 : end;
        if (*end != ',') return false;
    }
    return false;
}

/* A core counts once, however many of its hardware threads are in the mask. */
static int cores_in(const char *root, const cpu_set_t *mask, size_t mask_bytes)
{
    int n = 0;
    for (int cpu = 0; cpu < (int)(8 * mask_bytes); cpu++) {
        char siblings[4096];
        if (!CPU_ISSET_S((size_t)cpu, mask_bytes, mask)) continue;
        bool known =
            read_line(siblings, sizeof siblings,
                      "%s/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", root, cpu);
        if (!known || !has_lower(siblings, cpu, mask, mask_bytes)) n++;
    }
    return n;
}

/* ---- control groups ---------------------------------------------------------------------- */

/* Processors that one group's quota allows, rounded up; 0 if it sets none. */
static int quota_of(const char *root, const char *mount, const char *group)
{
    char line[128];
    long long quota = 0, period = 0;
    if (read_line(line, sizeof line, "%s%s%s/cpu.max", root, mount, group)) {
        if (sscanf(line, "%lld %lld", &quota, &period) != 2) return 0; /* "max 100000" */
    } else {
        if (!read_line(line, sizeof line, "%s%s%s/cpu.cfs_quota_us", root, mount, group)) return 0;
        quota = strtoll(line, NULL, 10);
        if (!read_line(line, sizeof line, "%s%s%s/cpu.cfs_period_us", root, mount, group)) return 0;
        period = strtoll(line, NULL, 10);
    }
    if (quota <= 0 || period <= 0) return 0;
    long long n = quota / period + (quota % period != 0);
    return n < INT_MAX ? (int)n : INT_MAX;
}

/*
 * The least of what a group and its ancestors allow; 0 if nothing. In a container the group's name
 * may be the host's while what is mounted is the container's own: then only the root is found.
 */
static int quota_above(const char *root, const char *mount, char *group)
{
    int least = 0;
    for (;;) {
        if (!strcmp(group, "/")) *group = 0;
        int n = quota_of(root, mount, group);
        if (n > 0 && (least == 0 || n < least)) least = n;
        char *slash = strrchr(group, '/');
        if (!slash) return least;
        *slash = 0;
    }
}

static bool lists_cpu(char *controllers)
{
    char *rest = NULL;
    for (char *c = strtok_r(controllers, ",", &rest); c; c = strtok_r(NULL, ",", &rest))
        if (!strcmp(c, "cpu")) return true;
    return false;
}

/* By the lines of /proc/self/cgroup, "id:controllers:group": no controllers are version 2. */
static int control_group_limit(const char *root)
{
    char path[PATH_MAX], *line = NULL;
    size_t size = 0;
    int least = 0;
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *f = fopen(path, "r");
    while (f && getline(&line, &size, f) > 0) {
        line[strcspn(line, "\n")] = 0;
        char *controllers = strchr(line, ':'),
             *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group) continue;
        *controllers++ = 0;
        *group++ = 0;
        const char *mount = "/sys/fs/cgroup";
        if (*controllers) {
            if (!lists_cpu(controllers)) continue;
            mount = "/sys/fs/cgroup/cpu";
        }
        int n = quota_above(root, mount, group);
        if (n > 0 && (least == 0 || n < least)) least = n;
    }
    free(line);
    if (f) fclose(f);
    return least;
}

int threads_for(const char *root, const cpu_set_t *mask, size_t mask_bytes)
{
    int n = cores_in(root, mask, mask_bytes), limit = control_group_limit(root);
    if (limit > 0 && limit < n) n = limit;
    if (n > LIMIT_THREADS) n = LIMIT_THREADS;
    return n < 1 ? 1 : n;
}

int pool_default_threads(void)
{
    enum { MAX_PROCESSORS = 8192 };
    size_t bytes = CPU_ALLOC_SIZE(MAX_PROCESSORS);
    cpu_set_t *mask = CPU_ALLOC(MAX_PROCESSORS);
    int n = mask && sched_getaffinity(0, bytes, mask) == 0 ? threads_for("", mask, bytes) : 1;
    CPU_FREE(mask);
    return n;
}
