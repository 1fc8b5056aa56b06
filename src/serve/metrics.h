/* metrics.h - counters and histograms with vLLM's names and buckets, in Prometheus' text form. */
#ifndef LINNET_SERVE_METRICS_H
#define LINNET_SERVE_METRICS_H

#include <pthread.h>

#include "base/error.h"
#include "base/strbuf.h"

enum { METRICS_BUCKETS = 24, METRICS_STATUSES = 32 };

enum histogram_id {
    TIME_TO_FIRST_TOKEN,
    INTER_TOKEN_LATENCY,
    TIME_PER_OUTPUT_TOKEN,
    E2E_REQUEST_LATENCY,
    REQUEST_QUEUE_TIME,
    REQUEST_INFERENCE_TIME,
    REQUEST_PREFILL_TIME,
    REQUEST_DECODE_TIME,
    REQUEST_PROMPT_TOKENS,
    REQUEST_GENERATION_TOKENS,
    N_HISTOGRAMS
};

struct histogram {
    uint64_t buckets[METRICS_BUCKETS], count; /* the last bucket in use is without end */
    double sum;
};

/* Zeroed, then metrics_init. Any thread. */
struct metrics {
    pthread_mutex_t mutex;
    struct histogram histograms[N_HISTOGRAMS];
    uint64_t finished[LINNET_FINISH_ERROR + 1]; /* choices, by linnet_finish */
    struct {
        int status;
        uint64_t count;
    } http[METRICS_STATUSES];
    double started; /* seconds since the epoch */
};

void metrics_init(struct metrics *m);
void metrics_free(struct metrics *m);
void metrics_observe(struct metrics *m, enum histogram_id id, double value);
void metrics_count_finish(struct metrics *m, linnet_finish finish);
void metrics_count_status(struct metrics *m, int status);

struct metrics_view {
    const char *model_name;
    const linnet_stats *stats; /* NULL: no engine yet */
    const linnet_plan *plan;
    int connections;
};

/* The text of GET /metrics. */
void metrics_write(struct metrics *m, const struct metrics_view *view, struct strbuf *out);

#endif
