#include "serve/metrics.h"

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

static const double first_token_bounds[] = {.001, .005, .01, .02, .04, .06, .08, .1,
                                            .25,  .5,   .75, 1,   2.5, 5,   7.5, 10,
                                            20,   40,   80,  160, 640, 2560};
static const double token_bounds[] = {.01, .025, .05, .075, .1,  .15, .2, .3, .4, .5,
                                      .75, 1,    2.5, 5,    7.5, 10,  20, 40, 80};
static const double request_bounds[] = {.3, .5, .8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
                                        30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680};
static const double length_bounds[] = {1,    2,    5,    10,    20,    50,    100,    200,   500,
                                       1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000};

#define BOUNDS(list) list, sizeof list / sizeof *list
static const struct {
    const char *name, *help;
    const double *bounds;
    size_t n;
} kinds[N_HISTOGRAMS] = {
    [TIME_TO_FIRST_TOKEN] = {"time_to_first_token_seconds",
                             "From the arrival of a request to its first token",
                             BOUNDS(first_token_bounds)},
    [INTER_TOKEN_LATENCY] = {"inter_token_latency_seconds", "Between two tokens of one answer",
                             BOUNDS(token_bounds)},
    [TIME_PER_OUTPUT_TOKEN] = {"request_time_per_output_token_seconds",
                               "Mean time between an answer's tokens", BOUNDS(token_bounds)},
    [E2E_REQUEST_LATENCY] = {"e2e_request_latency_seconds",
                             "From the arrival of a request to its last token",
                             BOUNDS(request_bounds)},
    [REQUEST_QUEUE_TIME] = {"request_queue_time_seconds", "Before the first step",
                            BOUNDS(request_bounds)},
    [REQUEST_INFERENCE_TIME] = {"request_inference_time_seconds",
                                "From the first step to the last token", BOUNDS(request_bounds)},
    [REQUEST_PREFILL_TIME] = {"request_prefill_time_seconds",
                              "From the first step to the first token", BOUNDS(request_bounds)},
    [REQUEST_DECODE_TIME] = {"request_decode_time_seconds", "From the first token to the last",
                             BOUNDS(request_bounds)},
    [REQUEST_PROMPT_TOKENS] = {"request_prompt_tokens", "Tokens of a prompt",
                               BOUNDS(length_bounds)},
    [REQUEST_GENERATION_TOKENS] = {"request_generation_tokens", "Tokens of an answer",
                                   BOUNDS(length_bounds)},
};

void metrics_init(struct metrics *m)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    m->started = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    pthread_mutex_init(&m->mutex, NULL);
}

void metrics_free(struct metrics *m)
{
    pthread_mutex_destroy(&m->mutex);
}

void metrics_observe(struct metrics *m, enum histogram_id id, double value)
{
    struct histogram *h = &m->histograms[id];
    size_t i = 0;
    while (i < kinds[id].n && value > kinds[id].bounds[i]) i++;
    pthread_mutex_lock(&m->mutex);
    h->buckets[i]++;
    h->count++;
    h->sum += value;
    pthread_mutex_unlock(&m->mutex);
}

void metrics_count_finish(struct metrics *m, linnet_finish finish)
{
    pthread_mutex_lock(&m->mutex);
    m->finished[finish]++;
    pthread_mutex_unlock(&m->mutex);
}

void metrics_count_status(struct metrics *m, int status)
{
    pthread_mutex_lock(&m->mutex);
    for (size_t i = 0; i < METRICS_STATUSES; i++) {
        if (m->http[i].status && m->http[i].status != status) continue;
        m->http[i].status = status;
        m->http[i].count++;
        break;
    }
    pthread_mutex_unlock(&m->mutex);
}

/* ---- text ---------------------------------------------------------------------------------- */

/* What a label's value may not hold as it is. */
static void write_escaped(struct strbuf *out, const char *text)
{
    for (; *text; text++) {
        if (*text == '\n') {
            strbuf_text(out, "\\n");
            continue;
        }
        if (*text == '"' || *text == '\\') strbuf_char(out, '\\');
        strbuf_char(out, *text);
    }
}

static void write_head(struct strbuf *out, const char *name, const char *type, const char *help)
{
    strbuf_format(out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void write_number(struct strbuf *out, double value)
{
    if (value == floor(value) && fabs(value) < 0x1p53)
        strbuf_format(out, "%.0f", value);
    else
        strbuf_format(out, "%.9g", value);
}

/* One metric with one value. */
static void write_one(struct strbuf *out, const char *labels, const char *name, const char *type,
                      const char *help, double value)
{
    write_head(out, name, type, help);
    strbuf_format(out, "%s%s ", name, labels);
    write_number(out, value);
    strbuf_char(out, '\n');
}

static void write_histogram(struct strbuf *out, const char *inside, enum histogram_id id,
                            const struct histogram *h)
{
    char name[80];
    uint64_t sum = 0;
    snprintf(name, sizeof name, "linnet:%s", kinds[id].name);
    write_head(out, name, "histogram", kinds[id].help);
    for (size_t i = 0; i <= kinds[id].n; i++) {
        sum += h->buckets[i];
        strbuf_format(out, "%s_bucket{%s,le=\"", name, inside);
        if (i < kinds[id].n)
            strbuf_format(out, "%g", kinds[id].bounds[i]);
        else
            strbuf_text(out, "+Inf");
        strbuf_format(out, "\"} %llu\n", (unsigned long long)sum);
    }
    strbuf_format(out, "%s_sum{%s} %.9g\n%s_count{%s} %llu\n", name, inside, h->sum, name, inside,
                  (unsigned long long)h->count);
}

static void write_finished(struct strbuf *out, const char *inside, const uint64_t *finished)
{
    static const char name[] = "linnet:request_success_total";
    write_head(out, name, "counter", "Answers, by how they ended");
    for (int f = LINNET_FINISH_STOP; f <= LINNET_FINISH_ERROR; f++)
        strbuf_format(out, "%s{%s,finished_reason=\"%s\"} %llu\n", name, inside,
                      linnet_finish_name((linnet_finish)f), (unsigned long long)finished[f]);
}

static void write_engine(struct strbuf *out, const char *labels, const linnet_stats *s,
                         const linnet_plan *plan)
{
    const struct {
        const char *name, *type, *help;
        double value;
    } rows[] = {
        {"linnet:num_requests_running", "gauge", "Sequences in the engine's steps", s->n_running},
        {"linnet:num_requests_waiting", "gauge", "Sequences that wait for a place", s->n_waiting},
        {"linnet:kv_cache_usage_perc", "gauge", "Share of the cache's blocks in use, 0 to 1",
         s->n_blocks ? 1 - (double)s->n_blocks_free / s->n_blocks : 0},
        {"linnet:kv_cache_blocks", "gauge", "Blocks of the cache", s->n_blocks},
        {"linnet:kv_cache_blocks_free", "gauge", "Blocks that no sequence holds", s->n_blocks_free},
        {"linnet:prefix_cache_queries_total", "counter", "Prompt tokens looked up in the cache",
         (double)s->prompt_tokens},
        {"linnet:prefix_cache_hits_total", "counter", "Prompt tokens found in the cache",
         (double)s->cached_tokens},
        {"linnet:num_preemptions_total", "counter", "Sequences that lost their place",
         (double)s->n_preemptions},
        {"linnet:prompt_tokens_total", "counter", "Prompt tokens read", (double)s->prompt_tokens},
        {"linnet:prompt_tokens_cached_total", "counter", "Prompt tokens taken from the cache",
         (double)s->cached_tokens},
        {"linnet:generation_tokens_total", "counter", "Tokens generated",
         (double)s->generated_tokens},
        {"linnet:engine_steps_total", "counter", "Steps", (double)s->n_steps},
        {"linnet:engine_step_seconds_total", "counter", "Time in steps", s->step_seconds},
        {"linnet:engine_last_step_age_seconds", "gauge",
         "Since the loop last turned; 0 while there is nothing to do", s->last_step_age_s},
        {"linnet:max_model_len", "gauge", "Tokens of the longest sequence", plan->max_model_len},
        {"linnet:max_num_seqs", "gauge", "Sequences in one step", plan->max_num_seqs},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        write_one(out, labels, rows[i].name, rows[i].type, rows[i].help, rows[i].value);
    strbuf_text(out, "# HELP linnet:cache_config_info The cache, as labels\n"
                     "# TYPE linnet:cache_config_info gauge\n");
    strbuf_format(out,
                  "linnet:cache_config_info{block_size=\"%d\",num_blocks=\"%d\",bytes=\"%lld\"} "
                  "1\n",
                  plan->block_tokens, plan->n_blocks, (long long)plan->kv_cache);
}

static void write_process(struct strbuf *out, double started)
{
    long pages = 0, resident = 0, fds = 0;
    struct rusage usage;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f && fscanf(f, "%ld %ld", &pages, &resident) != 2) pages = resident = 0;
    if (f) fclose(f);
    DIR *folder = opendir("/proc/self/fd");
    while (folder && readdir(folder)) fds++;
    if (folder) closedir(folder);
    getrusage(RUSAGE_SELF, &usage);
    double page = (double)sysconf(_SC_PAGESIZE);
    double cpu = (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
                 1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
    write_one(out, "", "process_resident_memory_bytes", "gauge", "Resident memory",
              (double)resident * page);
    write_one(out, "", "process_virtual_memory_bytes", "gauge", "Address space",
              (double)pages * page);
    write_one(out, "", "process_cpu_seconds_total", "counter", "Processor time", cpu);
    write_one(out, "", "process_open_fds", "gauge", "Open files and sockets",
              fds > 2 ? (double)fds - 2 : 0);
    write_one(out, "", "process_start_time_seconds", "gauge", "Start, since the epoch", started);
}

void metrics_write(struct metrics *m, const struct metrics_view *view, struct strbuf *out)
{
    struct strbuf inside = {0}, labels = {0};
    strbuf_text(&inside, "model_name=\"");
    write_escaped(&inside, view->model_name);
    strbuf_text(&inside, "\",engine=\"0\"");
    strbuf_format(&labels, "{%s}", strbuf_cstr(&inside));
    if (view->stats) write_engine(out, strbuf_cstr(&labels), view->stats, view->plan);
    pthread_mutex_lock(&m->mutex);
    for (int i = 0; i < N_HISTOGRAMS; i++)
        write_histogram(out, strbuf_cstr(&inside), (enum histogram_id)i, &m->histograms[i]);
    write_finished(out, strbuf_cstr(&inside), m->finished);
    write_head(out, "linnet:http_requests_total", "counter", "Replies, by status");
    for (size_t i = 0; i < METRICS_STATUSES && m->http[i].status; i++)
        strbuf_format(out, "linnet:http_requests_total{status=\"%d\"} %llu\n", m->http[i].status,
                      (unsigned long long)m->http[i].count);
    pthread_mutex_unlock(&m->mutex);
    write_one(out, "", "linnet:http_connections", "gauge", "Open connections", view->connections);
    write_process(out, m->started);
    strbuf_free(&inside);
    strbuf_free(&labels);
}
