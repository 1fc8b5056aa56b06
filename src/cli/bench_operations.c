/* bench_operations.c - `bench --operations`: where the time of a step goes, and how far each part
 * is from what memory and arithmetic allow. */
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "cli/bench_internal.h"
#include "cli/output.h"

struct table {
    const struct session *session;
    linnet_plan plan;
    double bandwidth;
    linnet_peaks peaks;
    json_t *rows;       /* or NULL: text */
    bool titled, ended; /* ended: the last row was that of a whole step */
    bool failed;        /* could not write a row */
};

void bench_limits(double bandwidth, const linnet_peaks *peaks, struct strbuf *out)
{
    const struct {
        const char *name;
        double peak;
    } all[] = {{"fp32", peaks->fp32}, {"int8", peaks->int8}, {"bf16", peaks->bf16}};
    const char *before = "; arithmetic peaks: ";
    strbuf_format(out, "memory reads at %.1f GB/s", bandwidth / 1e9);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (all[i].peak <= 0) continue;
        strbuf_format(out, "%s%s %.0f", before, all[i].name, all[i].peak / 1e9);
        before = ", ";
    }
    if (strcmp(before, ", ") == 0) strbuf_text(out, " GFLOP/s");
}

static void title(struct table *t, struct strbuf *line)
{
    strbuf_text(line, "device: ");
    session_device(t->plan.device, t->plan.device_reason, line);
    strbuf_format(line, "\n%s, %s, %d thread%s; ", t->session->info.name, t->session->info.dtype,
                  t->plan.threads, t->plan.threads == 1 ? "" : "s");
    bench_limits(t->bandwidth, &t->peaks, line);
    strbuf_char(line, '\n');
    t->titled = true;
}

static void heading(const linnet_operation_row *r, struct strbuf *line)
{
    if (strcmp(r->what, "prefill") == 0)
        strbuf_format(line, "\nprefill of %d tokens\n", r->prompt);
    else
        strbuf_format(line, "\ndecode of %d sequence%s after %d tokens\n", r->batch,
                      r->batch == 1 ? "" : "s", r->prompt);
    strbuf_format(line, "%-10s %10s %8s %8s %9s %9s %8s\n", "", "ms", "of step", "GB/s",
                  "of memory", "GFLOP/s", "of peak");
}

static void on_row(void *user, const linnet_operation_row *r)
{
    struct table *t = user;
    double rate = r->seconds > 0 ? r->bytes / r->seconds : 0;
    double flops = r->seconds > 0 ? r->flops / r->seconds : 0;
    double memory = t->bandwidth > 0 ? rate / t->bandwidth : 0;
    double peak = r->seconds > 0 ? r->least_seconds / r->seconds : 0;
    if (t->failed) return; /* said once is enough */
    if (t->rows) {
        json_t *row =
            json_pack("{s:s,s:s,s:s,s:s,s:i,s:i,s:f,s:f,s:f,s:f,s:f,s:f}", "what", r->what,
                      "operation", r->operation, "device", t->plan.device, "dtype",
                      t->session->info.dtype, "batch", r->batch, "prompt", r->prompt, "ms",
                      r->seconds * 1e3, "step_share", r->step_share, "gbytes_s", rate / 1e9,
                      "bandwidth_share", memory, "gflops", flops / 1e9, "peak_share", peak);
        t->failed = json_array_append_new(t->rows, row) != 0;
        return;
    }
    struct strbuf line = {0};
    if (!t->titled) title(t, &line);
    if (t->ended) heading(r, &line);
    t->ended = strcmp(r->operation, "step") == 0;
    strbuf_format(&line, "%-10s %10.3f %7.1f%% %8.2f %8.0f%% %9.1f %7.0f%%\n", r->operation,
                  r->seconds * 1e3, 100 * r->step_share, rate / 1e9, 100 * memory, flops / 1e9,
                  100 * peak);
    t->failed = !output_strbuf(&line);
}

/* Numbers that the option table holds below 2^31. */
static int32_t *narrow(const struct integers *list)
{
    int32_t *out = mem_new(list->n, sizeof *out);
    for (size_t i = 0; out && i < list->n; i++) out[i] = (int32_t)list->items[i];
    return out;
}

int bench_operations(const struct session *session, const linnet_engine_options *engine,
                     const struct integers *prompts, const struct integers *batches, json_t *rows)
{
    struct table t = {.session = session, .rows = rows, .ended = true};
    linnet_error err;
    linnet_status status = linnet_engine_plan(session->model, engine, &t.plan, &err);
    int32_t *lengths = narrow(prompts), *sizes = narrow(batches);
    if (!status && (!lengths || !sizes)) status = error_memory(&err, "the steps", prompts->n * 4);
    if (!status) {
        const struct options *o = session->options;
        t.bandwidth = linnet_measure_bandwidth(o->device, t.plan.threads);
        linnet_measure_peaks(o->device, t.plan.threads, &t.peaks);
        linnet_operations_options what = {.prompts = lengths,
                                          .batches = sizes,
                                          .n_prompts = prompts->n,
                                          .n_batches = o->generated ? batches->n : 0,
                                          .repeat = (int32_t)o->repeat,
                                          .decode_steps = (int32_t)o->generated};
        status = linnet_operations(session->model, engine, &what, &t.peaks, on_row, &t, &err);
    }
    free(lengths);
    free(sizes);
    if (status) return output_error(&err);
    return t.failed ? EXIT_FAILED : EXIT_DONE;
}
