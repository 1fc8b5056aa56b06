/*
 * step.cu - the operations of a step: its numbers on their way to the device, the choice of
 * kernels, recording, and what comes back. Everything is enqueued on one stream. Steps that choose
 * their tokens on the device may be two under way, so what the host writes has two places.
 */
#include <stdlib.h>
#include <string.h>

#include "ops/cuda/cuda_internal.h"
#include "ops/cuda/sample.cuh"

enum { STEPS = 2, LEAST_BLOCKS = 64 };

struct graph {
    cudaGraphExec_t exec; /* NULL: not yet */
    int32_t max_blocks;
};

/* What a step needs besides the model's buffers. */
struct steps {
    void *device_numbers, *numbers[STEPS]; /* device and pinned: struct device_step */
    void *device_rules, *rules[STEPS];     /* the same for sample.cuh's rules */
    void *scratch;
    struct sample_work work;
    size_t rules_bytes;           /* of the last step's, which lie on the device */
    struct chosen *chosen[STEPS]; /* pinned; the device writes them */
    cudaEvent_t done[STEPS];
    int64_t n_begun, n_submitted, n_collected;
    float *host_logits;                 /* pinned, [max_logits, vocab]; from the first finish on */
    struct graph graphs[MAX_GRAPH + 1]; /* by number of tokens */
    struct graph *graph;                /* of this step, or NULL */
    bool recording;
};

/* ---- memory ------------------------------------------------------------------------------ */

/* Where the parts of a step lie, one after another; returns the bytes of all. */
static size_t lay_step(const struct shape *shape, size_t tokens, size_t seqs, size_t logits,
                       size_t max_blocks, bool rope, char *memory, struct device_step *out)
{
    size_t counts[] = {tokens,
                       tokens,
                       tokens,
                       tokens,
                       seqs + 1,
                       seqs,
                       logits,
                       seqs * max_blocks,
                       4 * (size_t)attention_tiles(shape, (int64_t)tokens, (int64_t)seqs),
                       seqs,
                       rope ? tokens * (size_t)shape->head_dim : 0};
    int32_t **parts[] = {&out->token_ids,  &out->positions,       &out->slot_mapping,
                         &out->seq_of,     &out->query_start,     &out->context_lens,
                         &out->logit_rows, &out->block_tables,    &out->tiles,
                         &out->singles,    (int32_t **)&out->rope};
    size_t at = 0;
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        *parts[i] = (int32_t *)(memory + at);
        at += (counts[i] * sizeof(int32_t) + 15) / 16 * 16;
    }
    return at;
}

/* The longest row of a block table. */
static int32_t most_blocks(const struct limits *l)
{
    int32_t blocks = l->max_context / KV_BLOCK + (l->max_context % KV_BLOCK != 0);
    return blocks > LEAST_BLOCKS ? blocks : LEAST_BLOCKS;
}

static size_t numbers_bytes(const struct shape *shape, const struct limits *l)
{
    struct device_step step;
    return lay_step(shape, (size_t)l->max_tokens, (size_t)l->max_seqs, (size_t)l->max_logits,
                    (size_t)most_blocks(l), true, NULL, &step);
}

size_t step_bytes(const struct shape *shape, const struct limits *l)
{
    return numbers_bytes(shape, l) + sample_bytes(shape, l) + sample_rules_bytes(l);
}

bool step_open(struct backend *b)
{
    struct steps *t = (struct steps *)mem_new(1, sizeof *t);
    if (!t) return cuda_good(b, cudaErrorMemoryAllocation, "a step");
    b->steps = t;
    size_t numbers = numbers_bytes(&b->shape, &b->limits), rules = sample_rules_bytes(&b->limits),
           scratch = sample_bytes(&b->shape, &b->limits);
    bool good = cuda_good(b, cudaMalloc(&t->device_numbers, numbers), "a step") &&
                cuda_good(b, cudaMalloc(&t->device_rules, rules), "choosing tokens") &&
                cuda_good(b, cudaMalloc(&t->scratch, scratch), "choosing tokens") &&
                cuda_good(b, cudaMemsetAsync(t->scratch, 0, scratch, b->stream), "choosing tokens");
    for (int i = 0; i < STEPS && good; i++)
        good =
            cuda_good(b, cudaMallocHost(&t->numbers[i], numbers), "a step") &&
            cuda_good(b, cudaMallocHost(&t->rules[i], rules), "choosing tokens") &&
            cuda_good(b,
                      cudaMallocHost((void **)&t->chosen[i],
                                     (size_t)b->limits.max_logits * sizeof(struct chosen)),
                      "choosing tokens") &&
            cuda_good(b, cudaEventCreateWithFlags(&t->done[i], cudaEventDisableTiming), "a step");
    if (good) sample_place(&b->shape, &b->limits, t->scratch, &t->work);
    return good;
}

void step_close(struct backend *b)
{
    struct steps *t = b->steps;
    if (!t) return;
    cudaFree(t->device_numbers);
    cudaFree(t->device_rules);
    cudaFree(t->scratch);
    for (int i = 0; i < STEPS; i++) {
        cudaFreeHost(t->numbers[i]);
        cudaFreeHost(t->rules[i]);
        cudaFreeHost(t->chosen[i]);
        if (t->done[i]) cudaEventDestroy(t->done[i]);
    }
    cudaFreeHost(t->host_logits);
    for (int i = 0; i <= MAX_GRAPH; i++)
        if (t->graphs[i].exec) cudaGraphExecDestroy(t->graphs[i].exec);
    free(t);
}

/* ---- the operations ---------------------------------------------------------------------- */

/* Row length for the block tables: few different ones, because recordings hold it. */
static int32_t table_width(const struct backend *b, const struct step *s)
{
    int32_t width = LEAST_BLOCKS, all = most_blocks(&b->limits);
    for (int32_t i = 0; i < s->n_seqs; i++)
        while (width * KV_BLOCK < s->context_lens[i]) width *= 2;
    return width < all ? width : all;
}

/* The step's numbers go over in one copy. b->now is the step with tables as wide as they lie. */
static void send_step(struct backend *b, const struct step *s, const float *rope)
{
    struct steps *t = b->steps;
    struct device_step host;
    char *memory = (char *)t->numbers[t->n_begun++ % STEPS];
    b->now = *s;
    b->now.max_blocks = table_width(b, s);
    size_t width = (size_t)b->now.max_blocks;
    size_t bytes = lay_step(&b->shape, (size_t)s->n_tokens, (size_t)s->n_seqs, (size_t)s->n_logits,
                            width, rope, memory, &host);
    lay_step(&b->shape, (size_t)s->n_tokens, (size_t)s->n_seqs, (size_t)s->n_logits, width, rope,
             (char *)t->device_numbers, &b->step);
    b->step.rope_by_position = !rope;
    if (!rope) b->step.rope = b->rope->data;
    size_t tokens = (size_t)s->n_tokens * sizeof(int32_t);
    memcpy(host.token_ids, s->token_ids, tokens);
    memcpy(host.positions, s->positions, tokens);
    memcpy(host.slot_mapping, s->slot_mapping, tokens);
    memcpy(host.query_start, s->query_start, (size_t)(s->n_seqs + 1) * sizeof(int32_t));
    memcpy(host.context_lens, s->context_lens, (size_t)s->n_seqs * sizeof(int32_t));
    memcpy(host.logit_rows, s->logit_rows, (size_t)s->n_logits * sizeof(int32_t));
    if (rope)
        memcpy((float *)host.rope, rope,
               (size_t)s->n_tokens * (size_t)b->shape.head_dim * sizeof(float));
    for (int32_t seq = 0; seq < s->n_seqs; seq++) {
        for (int32_t i = s->query_start[seq]; i < s->query_start[seq + 1]; i++)
            host.seq_of[i] = seq;
        size_t used = (size_t)((s->context_lens[seq] + KV_BLOCK - 1) / KV_BLOCK);
        memcpy(host.block_tables + (size_t)seq * width,
               s->block_tables + (size_t)seq * (size_t)s->max_blocks, used * sizeof(int32_t));
    }
    attention_plan(b, s, &host);
    cuda_good(b,
              cudaMemcpyAsync(t->device_numbers, memory, bytes, cudaMemcpyHostToDevice, b->stream),
              "sending a step");
}

/* Whether this step's inputs of products lie in cores. */
static bool in_cores(const struct backend *b, int32_t rows)
{
    return b->cores.normed.capacity > 0 && rows > 8;
}

void step_use_rope(struct backend *b, const struct vector *table)
{
    b->rope = table;
}

/*
 * A step of one token a sequence, all wanting logits (decoding), is recorded once for each of its
 * shapes and replayed from then on: all that changes between two such steps lies in the buffers of
 * send_step. Hopper's steps of up to 8 sequences are one kernel, which needs no recording.
 */
void step_begin(struct backend *b, const struct step *s, const float *rope, bool whole)
{
    struct steps *t = b->steps;
    cuda_good(b, cudaSetDevice(b->device), "choosing the device");
    send_step(b, s, rope);
    s = &b->now;
    t->graph = NULL;
    b->in_decode = whole && b->limits.launching == LAUNCH_BEST && decode_can(b, s);
    const struct act_set *set = in_cores(b, s->n_tokens) ? &b->cores : &b->fragments;
    b->normed = set->normed, b->attn = set->attn, b->act = set->act;
    bool recordable = whole && b->limits.launching != LAUNCH_EACH && !b->in_decode &&
                      s->n_tokens == s->n_logits && s->n_tokens == s->n_seqs &&
                      s->n_tokens <= MAX_GRAPH;
    if (!recordable || b->failed != cudaSuccess) return;
    t->graph = &t->graphs[s->n_tokens];
    if (t->graph->exec && t->graph->max_blocks == s->max_blocks) return;
    if (t->graph->exec) cudaGraphExecDestroy(t->graph->exec);
    *t->graph = (struct graph){};
    t->graph->max_blocks = s->max_blocks;
    t->recording = cuda_good(b, cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal),
                             "recording a step");
}

/* True if the operation is already in what finish will launch, or must not be launched because
 * something before it has failed. */
static bool skipped(const struct backend *b)
{
    const struct graph *graph = b->steps->graph;
    return b->failed != cudaSuccess || b->in_decode || (graph && graph->exec);
}

static void product(struct backend *b, const struct product *p)
{
    if (p->in.cores)
        gemm_run(b, p);
    else
        matrix_product(b, p);
}

/* A product whose input is the residual stream, half normed. */
static struct product from_normed(const struct backend *b, enum product_to to,
                                  const struct matrix *m, int32_t n)
{
    struct product p = {};
    p.to = to;
    p.m = m;
    p.in = b->normed;
    p.n = n;
    p.squares = b->squares;
    p.in_panels = b->hidden_panels;
    p.in_width = b->shape.hidden;
    p.eps = b->shape.norm_eps;
    return p;
}

/* A product that adds to the residual stream and makes the next input of it. */
static void to_residual(struct backend *b, const struct matrix *m, struct act in,
                        const struct vector *bias, const struct vector *norm, int32_t n)
{
    struct product p = {};
    p.to = TO_RESIDUAL;
    p.m = m;
    p.in = in;
    p.n = n;
    p.bias = bias ? bias->data : NULL;
    p.y = b->x;
    p.out = b->normed;
    p.gamma = norm->data;
    p.out_squares = b->squares;
    product(b, &p);
}

void step_embed(struct backend *b, const struct step *s, const struct matrix *embedding)
{
    b->model.embedding = embedding;
    if (!skipped(b)) rows_embed(b, embedding, s->n_tokens);
}

void step_qkv(struct backend *b, const struct step *s, int32_t layer, const struct layer *w)
{
    b->model.layers[layer] = w;
    if (skipped(b)) return;
    if (layer == 0) rows_prepare(b, w->input_norm, NULL, s->n_tokens, b->normed, b->squares);
    struct product p = from_normed(b, TO_ROWS, w->qkv, s->n_tokens);
    p.bias = w->qkv_bias ? w->qkv_bias->data : NULL;
    p.y = b->qkv;
    product(b, &p);
    rows_rope_store(b, layer, w, s->n_tokens);
}

void step_attention(struct backend *b, const struct step *s, int32_t layer)
{
    (void)s;
    if (!skipped(b)) attention_run(b, &b->now, layer);
}

void step_o_proj(struct backend *b, const struct step *s, const struct layer *w)
{
    if (!skipped(b)) to_residual(b, w->o_proj, b->attn, w->o_bias, w->post_norm, s->n_tokens);
}

void step_gate_up(struct backend *b, const struct step *s, const struct layer *w)
{
    if (skipped(b)) return;
    struct product p = from_normed(b, TO_ACT, w->gate_up, s->n_tokens);
    p.out = b->act;
    product(b, &p);
}

void step_down(struct backend *b, const struct step *s, const struct layer *w)
{
    if (!skipped(b)) to_residual(b, w->down, b->act, NULL, w->next_norm, s->n_tokens);
}

void step_head(struct backend *b, const struct step *s, const struct vector *norm,
               const struct matrix *w)
{
    b->model.head = w;
    if (b->in_decode) decode_run(b, &b->now);
    if (skipped(b)) return;
    struct act in = in_cores(b, s->n_logits) ? b->cores.normed : b->fragments.normed;
    rows_prepare(b, norm, b->step.logit_rows, s->n_logits, in, b->head_squares);
    struct product p = from_normed(b, TO_ROWS, w, s->n_logits);
    p.in = in;
    p.squares = b->head_squares;
    p.y = b->logits;
    product(b, &p);
}

static void end_recording(struct backend *b)
{
    struct steps *t = b->steps;
    cudaGraph_t graph = NULL;
    t->recording = false;
    if (cuda_good(b, cudaStreamEndCapture(b->stream, &graph), "recording a step"))
        cuda_good(b, cudaGraphInstantiate(&t->graph->exec, graph, 0), "recording a step");
    if (graph) cudaGraphDestroy(graph);
}

/* Starts what has not been started by the operations themselves. */
static void start(struct backend *b)
{
    struct steps *t = b->steps;
    if (t->recording) end_recording(b);
    if (t->graph && t->graph->exec)
        cuda_good(b, cudaGraphLaunch(t->graph->exec, b->stream), "a step");
    t->graph = NULL;
}

linnet_status step_finish(struct backend *b, linnet_error *err)
{
    struct steps *t = b->steps;
    size_t row = (size_t)b->shape.vocab * sizeof(float);
    start(b);
    if (!t->host_logits)
        cuda_good(b, cudaMallocHost((void **)&t->host_logits, (size_t)b->limits.max_logits * row),
                  "logits");
    if (b->failed == cudaSuccess && b->now.n_logits > 0)
        cuda_good(b,
                  cudaMemcpyAsync(t->host_logits, b->logits, (size_t)b->now.n_logits * row,
                                  cudaMemcpyDeviceToHost, b->stream),
                  "fetching logits");
    cuda_good(b, cudaStreamSynchronize(b->stream), "a step");
    return cuda_failure(b, err);
}

const float *step_logits(struct backend *b, int32_t i)
{
    return b->steps->host_logits + (int64_t)i * b->shape.vocab;
}

/* ---- tokens chosen on the device --------------------------------------------------------- */

void step_choose(struct backend *b, const struct step *s, const struct choice_rule *rules)
{
    struct steps *t = b->steps;
    enum sample_stage stage;
    void *host = t->rules[t->n_submitted % STEPS], *last = t->rules[(t->n_submitted + 1) % STEPS];
    start(b); /* the logits come first */
    if (b->failed != cudaSuccess) return;
    size_t bytes = sample_pack(rules, s->n_logits, host, t->device_rules, &stage);
    if (bytes != t->rules_bytes || memcmp(host, last, bytes) != 0) /* greedy ones are the same */
        cuda_good(b,
                  cudaMemcpyAsync(t->device_rules, host, bytes, cudaMemcpyHostToDevice, b->stream),
                  "choosing tokens");
    t->rules_bytes = bytes;
    cuda_good(b,
              sample_run(b->stream, &t->work, b->logits, t->device_rules, s->n_logits, stage,
                         b->chosen, t->chosen[t->n_submitted % STEPS]),
              "choosing tokens");
}

linnet_status step_submit(struct backend *b, linnet_error *err)
{
    struct steps *t = b->steps;
    start(b);
    cuda_good(b, cudaEventRecord(t->done[t->n_submitted++ % STEPS], b->stream), "a step");
    return cuda_failure(b, err);
}

linnet_status step_collect(struct backend *b, const struct chosen **out, linnet_error *err)
{
    struct steps *t = b->steps;
    int64_t i = t->n_collected++ % STEPS;
    cuda_good(b, cudaSetDevice(b->device), "choosing the device");
    cuda_good(b, cudaEventSynchronize(t->done[i]), "a step");
    *out = t->chosen[i];
    return cuda_failure(b, err);
}
