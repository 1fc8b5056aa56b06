/* inspect - what a model file holds and what it will need. */
#include <string.h>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/session.h"

enum { LONGEST_LIST = 8, LONGEST_TEXT = 96, MOST_TENSORS = 12 };

/* A value on one line, long ones cut. */
static void value_text(const json_t *value, struct strbuf *out)
{
    if (json_is_string(value)) {
        const char *text = json_string_value(value);
        size_t n = json_string_length(value), cut = n < LONGEST_TEXT ? n : LONGEST_TEXT;
        while (cut < n && cut > 0 && ((unsigned char)text[cut] & 0xC0) == 0x80) cut--;
        for (size_t i = 0; i < cut; i++) {
            if (text[i] == '\n')
                strbuf_text(out, "\\n");
            else
                strbuf_char(out, (unsigned char)text[i] < 0x20 || text[i] == 0x7F ? '?' : text[i]);
        }
        if (cut < n) strbuf_format(out, "... (%zu bytes)", n);
        return;
    }
    if (json_is_array(value) && json_array_size(value) > LONGEST_LIST) {
        strbuf_format(out, "%zu values", json_array_size(value));
        return;
    }
    char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(7));
    if (!text) out->failed = true;
    if (text) strbuf_text(out, text);
    linnet_free(text);
}

static void object_lines(const char *title, json_t *object, struct strbuf *out)
{
    const char *key;
    json_t *value;
    size_t width = 0;
    if (json_object_size(object) == 0) return;
    strbuf_format(out, "\n%s\n", title);
    json_object_foreach(object, key, value) if (strlen(key) > width && strlen(key) <= 48) width =
        strlen(key);
    json_object_foreach(object, key, value)
    {
        strbuf_format(out, "  %-*s  ", (int)width, key);
        value_text(value, out);
        strbuf_char(out, '\n');
    }
}

static void tensor_lines(json_t *tensors, bool all, struct strbuf *out)
{
    size_t i, n = json_array_size(tensors), width = 0, shown = all ? n : MOST_TENSORS;
    json_t *tensor, *value;
    const char *key;
    strbuf_format(out, "\ntensors (%zu)\n", n);
    json_array_foreach(tensors, i, tensor)
    {
        size_t length = json_string_length(json_object_get(tensor, "name"));
        if (i < shown && length > width) width = length;
    }
    json_array_foreach(tensors, i, tensor)
    {
        if (i == shown) break;
        const char *name = json_string_value(json_object_get(tensor, "name"));
        strbuf_format(out, "  %-*s", (int)width, name ? name : "?");
        json_object_foreach(tensor, key, value)
        {
            if (strcmp(key, "name") == 0) continue;
            strbuf_format(out, "  %s ", key);
            value_text(value, out);
        }
        strbuf_char(out, '\n');
    }
    if (shown < n) strbuf_format(out, "  ... and %zu more: --tensors lists all\n", n - shown);
}

static void summary(const linnet_model_info *info, struct strbuf *out)
{
    strbuf_format(out, "%s: %s, %.4g million parameters, %s, %s of weights\n", info->name,
                  info->architecture, (double)info->n_parameters / 1e6, info->dtype,
                  output_bytes(info->weight_bytes));
    strbuf_format(out, "  file     %s\n", info->path);
    strbuf_format(out, "  layers   %d of width %d, feed-forward %d\n", info->n_layers,
                  info->hidden_size, info->intermediate_size);
    strbuf_format(out, "  heads    %d queries, %d keys and values, of width %d\n", info->n_heads,
                  info->n_kv_heads, info->head_dim);
    strbuf_format(out, "  tokens   %d in the vocabulary, %d in the context\n", info->vocab_size,
                  info->context_length);
}

static json_t *describe(const struct session *s, linnet_error *err)
{
    char *text;
    json_error_t where;
    if (linnet_model_describe(s->model, &text, err)) return NULL;
    json_t *description = json_loads(text, JSON_ALLOW_NUL, &where);
    linnet_free(text);
    if (!description)
        error_set(err, LINNET_INTERNAL, "the description is no JSON: line %d: %s", where.line,
                  where.text);
    return description;
}

static bool print_all(const struct session *s, json_t *description, const linnet_plan *plan,
                      const linnet_error *no_plan)
{
    static const char *const sections[] = {"metadata", "config", "tokenizer"};
    struct strbuf out = {0};
    summary(&s->info, &out);
    for (size_t i = 0; i < sizeof sections / sizeof *sections; i++)
        object_lines(sections[i], json_object_get(description, sections[i]), &out);
    tensor_lines(json_object_get(description, "tensors"), s->options->tensors, &out);
    strbuf_text(&out, "\nmemory plan\n");
    if (plan)
        session_print_plan(plan, &out);
    else
        strbuf_format(&out, "%s\n", no_plan->message);
    return output_strbuf(&out);
}

int command_inspect(const struct options *o)
{
    struct session s = {0};
    linnet_error err, no_plan;
    linnet_plan plan;
    linnet_engine_options engine = session_engine_options(o);
    int code = EXIT_FAILED;
    json_t *description = NULL;
    if (session_open(&s, o, true, &err)) {
        code = output_error(&err);
    } else if (o->dry_run) {
        code = session_dry_run(&s, &engine);
    } else if (!(description = describe(&s, &err))) {
        code = output_error(&err);
    } else {
        bool fits = linnet_engine_plan(s.model, &engine, &plan, &no_plan) == LINNET_OK, good;
        if (o->json) {
            json_t *needs =
                fits ? session_plan_json(&plan) : json_pack("{s:s}", "error", no_plan.message);
            json_object_set_new(description, "plan", needs);
            good = output_json(json_incref(description), JSON_INDENT(2));
        } else {
            good = print_all(&s, description, fits ? &plan : NULL, &no_plan);
        }
        if (good) code = EXIT_DONE;
    }
    json_decref(description);
    session_close(&s);
    return code;
}
