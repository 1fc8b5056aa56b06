#include "cli/progress.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "cli/output.h"

static const double first_after_s = 0.3, again_after_s = 0.1;
enum { BAR_WIDTH = 24 };

static struct {
    bool enabled, active;
    volatile bool visible;
    const char *label, *unit;
    double begun, next;
} progress;

void progress_enable(bool enable)
{
    progress.enabled = enable && isatty(STDERR_FILENO);
}

void progress_begin(const char *label, const char *unit)
{
    progress_end();
    progress.active = progress.enabled;
    progress.label = label;
    progress.unit = unit;
    progress.begun = clock_seconds();
    progress.next = progress.begun + first_after_s;
}

void progress_update(int64_t done, int64_t total)
{
    double now = clock_seconds();
    if (!progress.active || now < progress.next || total <= 0) return;
    progress.next = now + again_after_s;
    if (done > total) done = total;
    int filled = (int)((double)BAR_WIDTH * (double)done / (double)total);
    char bar[BAR_WIDTH + 1], count[96];
    memset(bar, '-', BAR_WIDTH);
    memset(bar, '#', (size_t)filled);
    bar[BAR_WIDTH] = 0;
    if (progress.unit)
        snprintf(count, sizeof count, "%lld of %lld %s", (long long)done, (long long)total,
                 progress.unit);
    else
        snprintf(count, sizeof count, "%s of %s", output_bytes(done), output_bytes(total));
    double rest = done > 0 ? (now - progress.begun) * (double)(total - done) / (double)done : 0;
    progress.visible = true;
    fprintf(stderr, "\r\033[K%s [%s] %3d%% %s, %.0f s left", progress.label, bar,
            (int)(100.0 * (double)done / (double)total), count, rest);
    fflush(stderr);
}

void progress_erase(void)
{
    static const char erase[] = "\r\033[K";
    if (!progress.visible) return;
    progress.visible = false;
    ssize_t ignored = write(STDERR_FILENO, erase, sizeof erase - 1);
    (void)ignored;
}

void progress_loading(void *user, int64_t done, int64_t total)
{
    (void)user;
    progress_update(done, total);
}

void progress_end(void)
{
    progress.active = false;
    progress_erase();
}
