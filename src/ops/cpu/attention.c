/*
 * attention.c - a step's attention, dealt out to the threads. Queries of a sequence's tokens and of
 * the heads of a kv head share its keys; how they are cut into items changes no bit.
 */
#include "ops/cpu/cpu_internal.h"

/* What an item is. */
enum cut {
    CUT_GROUPS, /* a run of tokens and a kv head, with all of its heads and keys */
    CUT_HEADS,  /* a token and a head */
    CUT_CHUNKS  /* a run of tokens, a kv head, and a chunk of keys; merged afterwards */
};

struct attention {
    struct backend *b;
    const struct step *s;
    int32_t layer;
    enum cut cut;
    int32_t group; /* heads of a kv head */
    int32_t run;   /* tokens that go together: where heads are few, to share keys */
};

/* A run of tokens of a sequence. */
struct run {
    int32_t seq, begin, end;
    int32_t chunks;   /* that the last of them looks at */
    int64_t at_part;  /* parts of chunks: of the runs before this one */
    int64_t at_chunk; /* (run, chunk) pairs of the runs before */
};

static int32_t chunks_for(int32_t n_keys)
{
    return (int32_t)(((int64_t)n_keys + ATTENTION_CHUNK - 1) / ATTENTION_CHUNK);
}

/* The run after r, and the first one after a zeroed one. False: there is none. */
static bool next_run(const struct attention *a, struct run *r)
{
    const struct step *s = a->s;
    r->at_part += (int64_t)(r->end - r->begin) * a->b->shape.n_heads * r->chunks;
    r->at_chunk += r->chunks;
    r->begin = r->end;
    while (r->seq < s->n_seqs && r->begin == s->query_start[r->seq + 1]) r->seq++;
    if (r->seq == s->n_seqs) return false;
    int32_t left = s->query_start[r->seq + 1] - r->begin;
    r->end = r->begin + (left < a->run ? left : a->run);
    r->chunks = chunks_for(s->positions[r->end - 1] + 1);
    return true;
}

static struct query query_of(const struct attention *a, int32_t token, int32_t head)
{
    const struct backend *b = a->b;
    const struct shape *shape = &b->shape;
    int64_t stride = (int64_t)(shape->n_heads + 2 * shape->n_kv_heads) * shape->head_dim;
    return (struct query){.q = b->qkv + token * stride + head * shape->head_dim,
                          .n_keys = a->s->positions[token] + 1,
                          .out =
                              b->attn + ((int64_t)token * shape->n_heads + head) * shape->head_dim};
}

/* Where the parts of a query of a run lie, one for each of the run's chunks. */
static float *parts_of(const struct attention *a, const struct run *r, int32_t token, int32_t head)
{
    const struct shape *shape = &a->b->shape;
    int64_t query = (int64_t)(token - r->begin) * shape->n_heads + head;
    return a->b->parts + (r->at_part + query * r->chunks) * attention_part(shape->head_dim);
}

/* The queries of some heads of one kv head, of a run's tokens: all their keys, or one chunk. */
static void attend_some(const struct attention *a, const struct run *r, int32_t first_head,
                        int32_t end_head, int32_t chunk, float *scratch)
{
    struct backend *b = a->b;
    int32_t head_dim = b->shape.head_dim, first_key = chunk * ATTENTION_CHUNK, n = 0;
    struct kv_head kv = cpu_kv_head(b, a->layer, first_head / a->group);
    const int32_t *table = a->s->block_tables + (int64_t)r->seq * a->s->max_blocks;
    struct query queries[ATTENTION_QUERIES];
    float *parts[ATTENTION_QUERIES];
    for (int32_t t = r->begin; t < r->end; t++)
        for (int32_t h = first_head; h < end_head; h++) {
            queries[n] = query_of(a, t, h);
            if (a->cut == CUT_CHUNKS)
                parts[n] = parts_of(a, r, t, h) + chunk * attention_part(head_dim);
            n++;
            if (n < b->kernels->queries && (h + 1 < end_head || t + 1 < r->end)) continue;
            if (a->cut != CUT_CHUNKS)
                b->kernels->attend(queries, n, &kv, table, head_dim, scratch);
            else if (queries[n - 1].n_keys > first_key)
                b->kernels->attend_chunk(queries, n, &kv, table, head_dim, first_key, parts,
                                         scratch);
            n = 0;
        }
}

/* Items are dealt out in turn: later tokens have more keys. */
static void attention_share(void *arg, int thread, int n_threads)
{
    const struct attention *a = arg;
    const struct shape *shape = &a->b->shape;
    int32_t heads = a->cut == CUT_HEADS ? 1 : a->group, columns = shape->n_heads / heads;
    float *scratch = a->b->scratch + thread * a->b->scratch_size;
    int64_t item = 0;
    for (struct run r = {0}; next_run(a, &r);)
        for (int32_t chunk = 0; chunk < (a->cut == CUT_CHUNKS ? r.chunks : 1); chunk++)
            for (int32_t c = 0; c < columns; c++)
                if (item++ % n_threads == thread)
                    attend_some(a, &r, c * heads, (c + 1) * heads, chunk, scratch);
}

static void merge_share(void *arg, int thread, int n_threads)
{
    const struct attention *a = arg;
    struct backend *b = a->b;
    int64_t item = 0;
    for (struct run r = {0}; next_run(a, &r);)
        for (int32_t t = r.begin; t < r.end; t++)
            for (int32_t h = 0; h < b->shape.n_heads; h++)
                if (item++ % n_threads == thread) {
                    struct query q = query_of(a, t, h);
                    b->kernels->merge_chunks(parts_of(a, &r, t, h), chunks_for(q.n_keys),
                                             b->shape.head_dim, q.out);
                }
}

/* Of parts: those of one sequence that decodes, whatever its length. */
static int64_t room_for_parts(const struct shape *s, const struct limits *l)
{
    return (int64_t)s->n_heads * chunks_for(l->max_context);
}

int64_t cpu_attention_parts(const struct shape *s, const struct limits *l)
{
    return room_for_parts(s, l) * attention_part(s->head_dim);
}

/*
 * Groups read each key once. Where they are few and unequal for the threads, chunks do so too, if
 * they are enough that their own lengths do not matter; heads read keys several times.
 */
static void choose_cut(struct attention *a)
{
    enum { GROUPS_A_THREAD = 8, CHUNKS_A_THREAD = 4 }; /* enough of them */
    const struct shape *shape = &a->b->shape;
    int64_t n_threads = pool_threads(a->b->pool), n_runs = 0;
    struct run r = {0};
    while (next_run(a, &r)) n_runs++;
    int64_t groups = n_runs * shape->n_kv_heads, chunks = r.at_chunk * shape->n_kv_heads;
    a->cut = CUT_GROUPS;
    if (groups % n_threads == 0 || groups >= GROUPS_A_THREAD * n_threads) return;
    bool fits = r.at_part <= room_for_parts(shape, &a->b->limits);
    a->cut = fits && chunks >= CHUNKS_A_THREAD * n_threads ? CUT_CHUNKS : CUT_HEADS;
    if (a->cut == CUT_HEADS) a->run = 1;
}

void cpu_attention(struct backend *b, const struct step *s, int32_t layer)
{
    struct attention a = {b, s, layer, CUT_GROUPS, b->shape.n_heads / b->shape.n_kv_heads, 1};
    if (a.group < b->kernels->queries) a.run = b->kernels->queries / a.group;
    choose_cut(&a);
    pool_run(b->pool, attention_share, &a);
    if (a.cut == CUT_CHUNKS) pool_run(b->pool, merge_share, &a);
}
