/*
 * batch - a file of OpenAI batch requests, all through continuous batching. A bounded number of
 * requests is in flight; results come out in the order of the input.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/memory.h"
#include "cli/commands.h"
#include "cli/input.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/output_file.h"
#include "cli/progress.h"
#include "cli/session.h"

struct batch;

/* One line of the input, from reading to writing. */
struct item {
    struct item *next;
    struct batch *batch;
    json_t *custom_id; /* NULL if the line gave none */
    struct openai_request request;
    struct openai_answer *answers; /* prompt by prompt, n each */
    struct openai_part {
        struct item *item;
        size_t first; /* of its answers */
        uint64_t id;
    } * parts;
    size_t n_answers, n_parts;
    size_t n_finished; /* under the batch's lock */
    struct openai_fault fault;
    bool refused; /* nothing was submitted: fault says why */
    int64_t created;
    size_t line_size;
};

struct batch {
    struct session session;
    pthread_mutex_t lock;
    struct item *first, *last; /* in flight, in input order */
    size_t in_flight, window;
    int64_t line, written, n_failed, bytes_done, bytes_total;
    struct output_file out;
};

static void on_event(void *user, const linnet_event *event)
{
    struct openai_part *part = user;
    struct item *item = part->item;
    pthread_mutex_lock(&item->batch->lock);
    openai_answer_add(&item->answers[part->first + (size_t)event->choice], event);
    if (event->type == LINNET_EVENT_FINISHED && ++item->n_finished == item->n_answers)
        interrupt_wake();
    pthread_mutex_unlock(&item->batch->lock);
}

static bool is_finished(struct batch *b, const struct item *item)
{
    pthread_mutex_lock(&b->lock);
    bool finished = item->refused || item->n_finished == item->n_answers;
    pthread_mutex_unlock(&b->lock);
    return finished;
}

static void item_free(struct item *item)
{
    for (size_t i = 0; i < item->n_answers; i++) openai_answer_free(&item->answers[i]);
    openai_request_free(&item->request);
    free(item->answers);
    free(item->parts);
    json_decref(item->custom_id);
    free(item);
}

/* ---- in ------------------------------------------------------------------------------------ */

static linnet_status fault(struct item *item, const char *field, const char *message)
{
    snprintf(item->fault.field, sizeof item->fault.field, "%s", field);
    return error_set(&item->fault.error, LINNET_INVALID, "%s", message);
}

static bool is_text(const json_t *json, const char *text)
{
    return json_is_string(json) && json_string_length(json) == strlen(text) &&
           memcmp(json_string_value(json), text, strlen(text)) == 0;
}

static linnet_status parse_line(struct item *item, const json_t *line)
{
    json_t *custom_id = json_object_get(line, "custom_id");
    const json_t *method = json_object_get(line, "method"), *url = json_object_get(line, "url");
    if (!json_is_object(line)) return fault(item, "", "the line is not a JSON object");
    if (json_is_string(custom_id)) item->custom_id = json_incref(custom_id);
    if (!item->custom_id)
        return fault(item, "custom_id", "custom_id: expected a string in every line");
    if (method && !is_text(method, "POST"))
        return fault(item, "method", "method: expected \"POST\", or leave the field out");
    bool chat = is_text(url, "/v1/chat/completions");
    if (!chat && !is_text(url, "/v1/completions"))
        return fault(item, "url", "url: expected \"/v1/chat/completions\" or \"/v1/completions\"");
    linnet_status status =
        openai_request_parse(item->batch->session.model, chat ? OPENAI_CHAT : OPENAI_COMPLETIONS,
                             json_object_get(line, "body"), &item->request, &item->fault);
    if (!status && item->request.stream)
        return fault(item, "stream", "stream: a batch cannot stream: leave the field out");
    return status;
}

static linnet_status submit(struct item *item)
{
    struct openai_request *r = &item->request;
    size_t n = (size_t)r->request.n;
    item->n_answers = n * r->n_prompts;
    item->answers = mem_new(item->n_answers, sizeof *item->answers);
    item->parts = mem_new(r->n_prompts, sizeof *item->parts);
    if (!item->answers || !item->parts) {
        item->n_answers = 0;
        return error_memory(&item->fault.error, "the answers", n * sizeof *item->answers);
    }
    for (size_t i = 0; i < item->n_answers; i++)
        openai_answer_start(&item->answers[i], &item->request);
    for (size_t i = 0; i < r->n_prompts; i++) {
        item->parts[i] = (struct openai_part){item, i * n, 0};
        r->request.prompt = r->prompts[i].ids;
        r->request.n_prompt = r->prompts[i].n;
        r->request.on_event = on_event;
        r->request.user = &item->parts[i];
        linnet_status status = linnet_engine_submit(item->batch->session.engine, &r->request,
                                                    &item->parts[i].id, &item->fault.error);
        if (status) {
            const char *field = r->endpoint == OPENAI_CHAT ? "messages" : "prompt";
            if (status == LINNET_TOO_LONG)
                snprintf(item->fault.field, sizeof item->fault.field, "%s", field);
            return status;
        }
        item->n_parts++;
    }
    return LINNET_OK;
}

/* What a request with a refused prompt has begun ends, and is waited for, before it is freed. */
static void withdraw(struct item *item)
{
    struct batch *b = item->batch;
    size_t submitted = item->n_parts * (size_t)item->request.request.n;
    for (size_t i = 0; i < item->n_parts; i++)
        linnet_engine_cancel(b->session.engine, item->parts[i].id);
    for (bool done = submitted == 0; !done;) {
        usleep(1000);
        pthread_mutex_lock(&b->lock);
        done = item->n_finished == submitted;
        pthread_mutex_unlock(&b->lock);
    }
}

static struct item *new_item(struct batch *b, const char *text, size_t size)
{
    struct item *item = mem_new(1, sizeof *item);
    json_error_t where;
    if (!item) return NULL;
    item->batch = b;
    item->created = time(NULL);
    item->line_size = size;
    json_t *line = json_loadb(text, size, JSON_ALLOW_NUL, &where);
    linnet_status status;
    if (!line)
        status = error_set(&item->fault.error, LINNET_INVALID, "line %" PRId64 " is no JSON: %s",
                           b->line, where.text);
    else
        status = parse_line(item, line);
    json_decref(line);
    if (!status) {
        status = submit(item);
        if (status) withdraw(item);
    }
    item->refused = status != LINNET_OK;
    if (b->last)
        b->last->next = item;
    else
        b->first = item;
    b->last = item;
    b->in_flight++;
    return item;
}

/* ---- out ----------------------------------------------------------------------------------- */

/* An answer that ended in an error makes the whole request one. */
static void adopt_error(struct item *item)
{
    for (size_t i = 0; i < item->n_answers && !item->refused; i++) {
        const struct openai_answer *a = &item->answers[i];
        if (a->finish == LINNET_FINISH_ERROR) {
            item->fault.error = a->error;
            item->refused = true;
        } else if (a->finish == LINNET_FINISH_CANCELLED) {
            error_set(&item->fault.error, LINNET_CANCELLED, "the request was cancelled");
            item->refused = true;
        }
    }
}

static linnet_status write_item(struct batch *b, struct item *item, linnet_error *err)
{
    char id[OPENAI_ID_SIZE];
    openai_make_id(item->request.endpoint, id);
    adopt_error(item);
    const linnet_model_info *info = &b->session.info;
    struct openai_reply reply = {
        .id = id,
        .model_name = item->request.model ? item->request.model : info->name,
        .created = item->created,
        .answers = item->answers,
        .n_answers = item->n_answers,
    };
    json_t *body = item->refused ? openai_error(&item->fault)
                                 : openai_response(b->session.model, &item->request, &reply);
    int http = item->refused ? openai_http_status(item->fault.error.status) : 200;
    json_t *custom_id = item->custom_id ? json_incref(item->custom_id) : json_null();
    json_t *failure = item->refused ? json_incref(json_object_get(body, "error")) : json_null();
    char number[40];
    snprintf(number, sizeof number, "batch_req_%" PRId64, b->written + 1);
    json_t *line =
        json_pack("{s:s,s:o,s:{s:i,s:s,s:o},s:o}", "id", number, "custom_id", custom_id, "response",
                  "status_code", http, "request_id", id, "body", body, "error", failure);
    char *text = line ? json_dumps(line, JSON_COMPACT | JSON_REAL_PRECISION(9)) : NULL;
    json_decref(line);
    if (!text) return error_set(err, LINNET_MEMORY, "out of memory: a line of the output");
    linnet_status status = output_all(b->out.fd, b->out.path, text, strlen(text), err);
    if (!status) status = output_all(b->out.fd, b->out.path, "\n", 1, err);
    free(text);
    b->written++;
    b->n_failed += item->refused;
    return status;
}

/* Writes what is finished at the head of the queue; waits while more than `most` are in flight. */
static linnet_status drain(struct batch *b, size_t most, linnet_error *err)
{
    linnet_status status = LINNET_OK;
    while (b->first && !status) {
        struct item *item = b->first;
        if (!is_finished(b, item)) {
            if (b->in_flight <= most) break;
            progress_update(b->bytes_done, b->bytes_total);
            interrupt_wait();
            if (interrupt_seen()) return error_set(err, LINNET_CANCELLED, "interrupted");
            continue;
        }
        status = write_item(b, item, err);
        b->first = item->next;
        if (!b->first) b->last = NULL;
        b->in_flight--;
        b->bytes_done += (int64_t)item->line_size;
        item_free(item);
    }
    return status;
}

/* ---- all of it ----------------------------------------------------------------------------- */

static bool is_blank(const char *text, size_t n)
{
    while (n > 0 && strchr(" \t\r\n", text[n - 1]) && text[n - 1]) n--;
    return n == 0;
}

static linnet_status process(struct batch *b, struct input_lines *in, const char *in_name,
                             linnet_error *err)
{
    const char *text;
    size_t n;
    enum input_result result = INPUT_LINE;
    linnet_status status = LINNET_OK;
    while (!status && !interrupt_seen() && (result = input_line(in, &text, &n)) == INPUT_LINE) {
        b->line++;
        if (is_blank(text, n)) continue;
        if (!new_item(b, text, n)) status = error_memory(err, "a request", n);
        if (!status) status = drain(b, b->window - 1, err);
        progress_update(b->bytes_done, b->bytes_total);
    }
    if (!status && interrupt_seen()) status = error_set(err, LINNET_CANCELLED, "interrupted");
    if (!status && result == INPUT_FAILED)
        status = error_set(err, LINNET_IO, "cannot read %s: %s", in_name, strerror(errno));
    return status ? status : drain(b, 0, err);
}

static linnet_status work(struct batch *b, const struct options *o, struct input_lines *in,
                          const char *in_name, linnet_error *err)
{
    linnet_engine_options engine = session_engine_options(o);
    bool to_file = o->output && strcmp(o->output, "-") != 0;
    linnet_status status = session_start(&b->session, &engine, err);
    if (status) return status;
    b->window = 4 * (size_t)b->session.plan.max_num_seqs;
    interrupt_catch();
    progress_begin("batch", NULL);
    b->out = (struct output_file){.fd = STDOUT_FILENO, .path = "standard output"};
    if (to_file) status = output_file_open(&b->out, o->output, 0666, err);
    if (!status) status = process(b, in, in_name, err);
    progress_end();
    if (status) { /* what still runs must end before its items go */
        linnet_engine_destroy(b->session.engine);
        b->session.engine = NULL;
    }
    while (b->first) {
        struct item *item = b->first;
        b->first = item->next;
        item_free(item);
    }
    return to_file ? output_file_close(&b->out, status, err) : status;
}

int command_batch(const struct options *o)
{
    struct batch b = {.lock = PTHREAD_MUTEX_INITIALIZER};
    const char *path = o->arguments.n ? o->arguments.items[0] : "-";
    bool standard = strcmp(path, "-") == 0;
    linnet_error err;
    struct stat about;
    int code = EXIT_DONE;
    if (standard && isatty(STDIN_FILENO))
        return output_usage("no requests: name a file of JSON lines, or give them on standard "
                            "input");
    if (o->dry_run) {
        linnet_engine_options engine = session_engine_options(o);
        code = session_open(&b.session, o, false, &err) ? output_error(&err)
                                                        : session_dry_run(&b.session, &engine);
        session_close(&b.session);
        return code;
    }
    struct input_lines in = {.fd = standard ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC)};
    if (in.fd < 0) {
        error_set(&err, LINNET_IO, "cannot open %s: %s", path, strerror(errno));
        return output_error(&err);
    }
    if (fstat(in.fd, &about) == 0 && S_ISREG(about.st_mode)) b.bytes_total = about.st_size;
    if (session_open(&b.session, o, false, &err) ||
        work(&b, o, &in, standard ? "standard input" : path, &err))
        code = output_error(&err);
    if (b.n_failed > 0 && code == EXIT_DONE) {
        output_note("linnet: %" PRId64 " of %" PRId64 " requests failed: see \"error\" in their "
                    "lines",
                    b.n_failed, b.written);
        code = EXIT_FAILED;
    }
    input_lines_free(&in);
    if (!standard) close(in.fd);
    session_close(&b.session);
    return code;
}
