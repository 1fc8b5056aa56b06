/* pack - the weights as the CPU computes with them, in a file beside the model. */
#include "cli/commands.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "cli/session.h"

int command_pack(const struct options *o)
{
    struct session s = {0};
    linnet_engine_options engine = {.threads = (int32_t)o->threads, .progress = progress_loading};
    linnet_error err;
    char *path = NULL;
    int64_t bytes;
    linnet_status status = session_open(&s, o, true, &err);
    if (!status) {
        progress_begin("packing", NULL);
        status = linnet_pack(s.model, &engine, &path, &bytes, &err);
        progress_end();
    }
    int code = status ? output_error(&err) : EXIT_DONE;
    if (!status && !o->quiet) output_note("%s: %s", path, output_bytes(bytes));
    linnet_free(path);
    session_close(&s);
    return code;
}
