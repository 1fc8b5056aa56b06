/* check - every operation of a device against the plain reference. */
#include <math.h>
#include <stdio.h>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/session.h"

struct report {
    bool json, failed; /* failed: could not write */
    json_t *rows;
    int32_t n;
};

static json_t *number(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static void on_row(void *user, const linnet_check_row *row)
{
    struct report *report = user;
    report->n++;
    if (report->failed) return;
    if (report->json) {
        json_t *json = json_pack("{s:s,s:s,s:s,s:s,s:o,s:o,s:o,s:b}", "operation", row->operation,
                                 "device", row->device, "dtype", row->dtype, "shape", row->shape,
                                 "max_abs", number(row->max_abs), "rms_rel", number(row->rms_rel),
                                 "bound", number(row->bound), "pass", row->pass);
        report->failed = json_array_append_new(report->rows, json) != 0;
        return;
    }
    struct strbuf line = {0};
    if (report->n == 1)
        strbuf_format(&line, "%-20s %-13s %-6s %-24s %10s %10s %10s\n", "operation", "device",
                      "dtype", "shape", "max abs", "rms rel", "bound");
    strbuf_format(&line, "%-20s %-13s %-6s %-24s %10.3g %10.3g %10.3g  %s\n", row->operation,
                  row->device, row->dtype, row->shape, row->max_abs, row->rms_rel, row->bound,
                  row->pass ? "ok" : "FAILED");
    report->failed = !output_strbuf(&line);
}

int command_check(const struct options *o)
{
    struct session s = {0};
    struct report report = {.json = o->json, .rows = json_array()};
    linnet_error err;
    int32_t n_failed = 0;
    linnet_status status = LINNET_OK;
    if (o->model || o->arguments.n) status = session_open(&s, o, true, &err);
    if (!status)
        status =
            linnet_check(s.model, o->device, (int32_t)o->threads, on_row, &report, &n_failed, &err);
    int code = EXIT_FAILED;
    if (status) {
        code = output_error(&err);
    } else if (!report.failed) {
        bool good = !o->json || output_json(json_incref(report.rows), JSON_INDENT(1));
        if (good && n_failed == 0) code = EXIT_DONE;
        if (!o->json && !o->quiet) output_note("%d compared, %d failed", report.n, n_failed);
    }
    json_decref(report.rows);
    session_close(&s);
    return code;
}
