#include "ops/cuda/launch.cuh"
#include "ops/cuda/sample_row.cuh"
#include "ops/cuda/sample_select.cuh"

/*
 * A row is cut into parts, one for each block; who is last to arrive at the end of a kernel merges
 * the parts of its row. Sums of weights are kept for each tile of a row.
 *
 *   scan    adjusts; maximum, damage. Greedy rows end here.
 *   weigh   sums of tiles, then the draw; or, if there is top_k or top_p, how many candidates and
 *           what mass fall into each bin of exponents
 *   narrow  only for both: the k-th largest, exactly, which the total of top_p depends on
 *   cut     the last that stays, exactly, among those of its bin; sums of tiles, the draw
 */

/* ---- scan ---- */

__device__ inline struct sample_peak higher(struct sample_peak a, struct sample_peak b)
{
    bool other = b.max > a.max || (b.max == a.max && b.id >= 0 && (a.id < 0 || b.id < a.id));
    int32_t flags = a.flags | b.flags;
    float min = fminf(a.min, b.min);
    if (other) a = b;
    a.flags = flags;
    a.min = min;
    return a;
}

__device__ struct sample_peak block_peak(struct sample_peak p)
{
    __shared__ struct sample_peak warps[WARPS];
    for (int i = 16; i > 0; i /= 2)
        p = higher(p, {__shfl_xor_sync(~0u, p.max, i), __shfl_xor_sync(~0u, p.id, i),
                       __shfl_xor_sync(~0u, p.flags, i), __shfl_xor_sync(~0u, p.min, i)});
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = p;
    __syncthreads();
    p = warps[0];
    for (int i = 1; i < WARPS; i++) p = higher(p, warps[i]);
    return p;
}

/* Puts adjusted values and marks in place; returns flags of what was there. */
__device__ int32_t adjust(const struct view &v)
{
    int32_t flags = 0;
    for (int32_t i = (int32_t)threadIdx.x; i < v.rule->n_adjustments; i += THREADS) {
        const struct adjustment a = v.rule->adjustments[i];
        if (a.id < v.begin || a.id >= v.end || a.id >= v.n_allowed) continue;
        float logit = v.logits[a.id];
        if (!(logit <= FLT_MAX)) flags |= DAMAGED;
        if (logit > -INFINITY) flags |= FINITE;
        v.adjusted[i] = choice_adjusted(v.rule, &a, logit);
        v.logits[a.id] = __uint_as_float(MARK | (uint32_t)i);
    }
    __syncthreads();
    return flags;
}

__device__ struct sample_peak part_peak(const struct view &v)
{
    int32_t flags = v.rule->n_adjustments > 0 ? adjust(v) : 0;
    struct sample_peak adjusted = {-INFINITY, -1, 0, INFINITY};
    float best = -INFINITY, min = INFINITY, bar = -INFINITY;
    int32_t best_id = -1;
    bool finite = false, damaged = false, sampled = v.rule->temperature > 0;
    walk(
        v.logits, v.vocab, v.begin, v.end,
        [&](int32_t id, float logit) {
            if (logit <= FLT_MAX) {
                finite |= logit > -INFINITY;
                if (id >= v.n_allowed) return;
                if (logit > best) best = logit, best_id = id;
                if (logit > -INFINITY) min = fminf(min, logit);
                return;
            }
            int32_t slot = slot_of(logit);
            if (logit == logit || slot >= v.rule->n_adjustments ||
                v.rule->adjustments[slot].id != id) {
                damaged = true;
                return;
            }
            double x = v.adjusted[slot];
            adjusted = higher(adjusted, {x, x > -INFINITY ? id : -1, 0, INFINITY});
        },
        /* the bar is the warp's best of the tiles before, whose ids are lower: what is not above it
         * is nothing new, nor is it damaged or a mark */
        [&](int32_t) {
            bar = best;
            for (int i = 16; i > 0; i /= 2) bar = fmaxf(bar, __shfl_xor_sync(~0u, bar, i));
        },
        [&](const float4 &four) {
            if (!(four.x <= bar && four.y <= bar && four.z <= bar && four.w <= bar)) return false;
            float least = fminf(fminf(four.x, four.y), fminf(four.z, four.w));
            if (sampled && least == -INFINITY) return false;
            min = fminf(min, least);
            return true;
        });
    flags |= (finite ? FINITE : 0) | (damaged ? DAMAGED : 0);
    return block_peak(higher({best, best_id, flags, min}, adjusted));
}

static __global__ void __launch_bounds__(THREADS, 6) scan_rows(struct args a)
{
    struct view v = view_row(a);
    bool sampled = v.rule->temperature > 0;
    if (sampled && (v.top_k || v.top_p)) {
        int64_t bins = (int64_t)blockIdx.y * BINS;
        for (int i = blockIdx.x * THREADS + threadIdx.x; i < BINS; i += gridDim.x * THREADS)
            a.work.masses[bins + i] = 0, a.work.counts[bins + i] = 0;
    }
    struct sample_peak *peaks = a.work.peaks + (int64_t)blockIdx.y * MAX_PARTS;
    struct sample_peak p = part_peak(v);
    if (threadIdx.x == 0) peaks[blockIdx.x] = p;
    if (!last_of_row(v.row)) return;
    p = {-INFINITY, -1, 0, INFINITY};
    if (threadIdx.x < gridDim.x) {
        const struct sample_peak *other = peaks + threadIdx.x;
        p = {__ldcg(&other->max), __ldcg(&other->id), __ldcg(&other->flags), __ldcg(&other->min)};
    }
    p = block_peak(p);
    if (threadIdx.x > 0) return;
    bool bad = (p.flags & DAMAGED) || !(p.flags & FINITE) || p.id < 0;
    v.row->state = bad || !sampled ? ROW_DONE : ROW_WEIGH;
    if (bad || !sampled) {
        tell(v, {bad ? -1 : p.id, bad ? LINNET_NUMERIC : LINNET_OK});
        return;
    }
    v.row->n_list = 0;
    v.row->max = p.max;
    v.row->scale = choice_scale(v.rule);
    v.row->floor = -INFINITY;
    double range = fmin((p.max - p.min) * v.row->scale, (double)-CHOICE_LEAST_EXPONENT);
    v.row->bin_scale = -BINS / fmax(range, 1e-30);
}

/* ---- the draw ---- */

/* kept(x, exponent, id); sums of tiles in shared memory. */
template <class Kept> __device__ void draw(const struct view &v, const mass *sums, Kept kept)
{
    enum { TILES = MAX_TILES / THREADS };
    int32_t first = (int32_t)threadIdx.x * TILES;
    mass sum = 0;
    for (int i = 0; i < TILES; i++) sum += (first + i) * TILE < v.vocab ? sums[first + i] : 0;
    mass total = block_sum(sum);
    struct found f = find_thread(sum, choice_draw(v.rule, total) + 1);
    int32_t tile = f.thread * TILES;
    while (sums[tile] < f.rest) f.rest -= sums[tile++];

    double max = v.row->max, scale = v.row->scale;
    int32_t id = tile * TILE + 4 * (int32_t)threadIdx.x;
    uint64_t weights[4];
    sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        weights[i] = 0;
        if (id + i < v.n_allowed) {
            double x = value_of(v, v.logits[id + i]), y = choice_exponent(x, max, scale);
            uint64_t weight = choice_weight(y);
            if (weight >= v.least && kept(x, y, id + i)) weights[i] = weight;
        }
        sum += weights[i];
    }
    f = find_thread(sum, f.rest);
    if (f.thread != (int32_t)threadIdx.x) return;
    int i = 0;
    for (; i < 3 && weights[i] < f.rest; i++) f.rest -= weights[i];
    tell(v, {id + i, LINNET_OK});
}

/* ---- weigh ---- */

/* Sums of weight(id, logit) over the tiles of [begin, end), in shared memory. */
template <class Weight>
__device__ inline void sum_tiles(const struct view &v, mass *sums, int32_t begin, int32_t end,
                                 Weight weight)
{
    mass own = 0;
    for (int i = threadIdx.x; i < MAX_TILES; i += THREADS) sums[i] = 0;
    __syncthreads();
    walk(
        v.logits, v.vocab, begin, end,
        [&](int32_t id, float logit) {
            if (id < v.n_allowed) own += weight(id, logit);
        },
        [&](int32_t tile) {
            mass sum = warp_sum(own);
            if (threadIdx.x % 32 == 0 && sum > 0) atomicAdd(sums + tile / TILE, sum);
            own = 0;
        },
        never);
    __syncthreads();
}

/* Gives the part's sums to the others; the last of the row then has all of them in `sums`. */
__device__ bool merge_tiles(const struct args &a, const struct view &v, mass *sums)
{
    mass *all = a.work.sums + (int64_t)blockIdx.y * MAX_TILES;
    for (int i = v.begin / TILE + threadIdx.x; i * TILE < v.end; i += THREADS) all[i] = sums[i];
    if (!last_of_row(v.row)) return false;
    for (int i = threadIdx.x; i * TILE < v.vocab; i += THREADS) sums[i] = __ldcg(all + i);
    __syncthreads();
    return true;
}

/* Rows without top_k and top_p. */
__device__ void weigh_and_draw(const struct args &a, const struct view &v, mass *sums)
{
    double max = v.row->max, scale = v.row->scale;
    sum_tiles(v, sums, v.begin, v.end, [&](int32_t, float logit) -> uint64_t {
        uint64_t weight = choice_weight(choice_exponent(value_of(v, logit), max, scale));
        return weight >= v.least ? weight : 0;
    });
    if (merge_tiles(a, v, sums)) draw(v, sums, [](double, double, int32_t) { return true; });
}

/* Where the cut is: thread 0. */
__device__ void set_bin(const struct view &v, int32_t bin, mass need, enum row_state state)
{
    struct sample_row *row = v.row;
    row->state = state;
    row->bin = bin;
    row->need = need;
    row->low = -INFINITY;
    if (bin == BINS) return;
    double exponent = bin < BINS - 1 ? (bin + 1) / row->bin_scale : CHOICE_LEAST_EXPONENT;
    double depth = -exponent / row->scale * (1 + 0x1p-20); /* far more than rounding can do */
    if (depth > fabs(row->max) * 0x1p-30) row->low = __double2float_rd(row->max - depth);
}

/* Whether the row goes on with a cut at top_p, for a total that is what `masses` hold. */
__device__ void plan_top_p(const struct view &v, const mass *masses)
{
    mass sum = 0;
    for (int i = 0; i < EACH; i++) sum += __ldcg(masses + threadIdx.x * EACH + i);
    struct found f = find_bin(masses, choice_need(v.rule->top_p, block_sum(sum)));
    if (threadIdx.x == 0) set_bin(v, f.thread, f.rest, ROW_CUT);
}

__device__ void plan(const struct view &v, const mass *masses, const uint32_t *counts)
{
    struct found k = {-1, 0, 0};
    if (v.top_k) k = find_bin(counts, (mass)v.rule->top_k);
    if (v.top_p && k.thread < 0) { /* fewer than k have a weight, if there is a k */
        plan_top_p(v, masses);
    } else if (threadIdx.x == 0) {
        set_bin(v, k.thread < 0 ? BINS : k.thread, k.rest, v.top_p ? ROW_NARROW : ROW_CUT);
    }
}

static __global__ void __launch_bounds__(THREADS) weigh_rows(struct args a)
{
    __shared__ mass sums[MAX_TILES];
    __shared__ struct sums32<BINS> masses;
    __shared__ uint32_t counts[BINS];
    struct view v = view_row(a);
    if (v.row->state == ROW_DONE) return;
    if (!v.top_k && !v.top_p) {
        weigh_and_draw(a, v, sums);
        return;
    }
    for (int i = threadIdx.x; i < BINS; i += THREADS)
        masses.low[i] = masses.high[i] = counts[i] = 0;
    __syncthreads();
    double max = v.row->max, scale = v.row->scale, bin_scale = v.row->bin_scale;
    walk(
        v.logits, v.vocab, v.begin, v.end,
        [&](int32_t id, float logit) {
            if (id >= v.n_allowed) return;
            double y = choice_exponent(value_of(v, logit), max, scale);
            int32_t bin = bin_of(y, bin_scale);
            if (bin == BINS) return;
            if (v.top_k) atomicAdd(counts + bin, 1);
            if (v.top_p) add_to(&masses, bin, choice_weight(y));
        },
        nothing, never);
    __syncthreads();
    mass *all_masses = a.work.masses + (int64_t)blockIdx.y * BINS;
    uint32_t *all_counts = a.work.counts + (int64_t)blockIdx.y * BINS;
    for (int i = threadIdx.x; i < BINS; i += THREADS) {
        mass m = sum_at(&masses, i);
        if (m > 0) atomicAdd(all_masses + i, m);
        if (counts[i] > 0) atomicAdd(all_counts + i, counts[i]);
    }
    if (last_of_row(v.row)) plan(v, all_masses, all_counts);
}

/* ---- narrow, cut ---- */

static __global__ void __launch_bounds__(THREADS) narrow_rows(struct args a)
{
    struct view v = view_row(a);
    if (v.row->state != ROW_NARROW) return;
    double max = v.row->max, scale = v.row->scale, bin_scale = v.row->bin_scale;
    float low = v.row->low;
    int32_t bin = v.row->bin;
    walk(
        v.logits, v.vocab, v.begin, v.end,
        [&](int32_t id, float logit) {
            if (id >= v.n_allowed || logit < low) return;
            double y = choice_exponent(value_of(v, logit), max, scale);
            if (bin_of(y, bin_scale) == bin) note(a, v, id);
        },
        nothing, never);
    if (!last_of_row(v.row)) return;

    struct bin_walk each = walk_of_bin(a, v);
    double kth = select_top_k(each, v.row->need);
    mass kept = 0;
    each([&](int32_t, double x, double y) { kept += x >= kth ? choice_weight(y) : 0; });
    kept = block_sum(kept);
    mass *masses = a.work.masses + (int64_t)blockIdx.y * BINS;
    for (int i = bin + threadIdx.x; i < BINS; i += THREADS) masses[i] = i == bin ? kept : 0;
    if (threadIdx.x == 0) v.row->floor = kth, v.row->n_list = 0;
    __threadfence();
    __syncthreads();
    plan_top_p(v, masses);
}

static __global__ void __launch_bounds__(THREADS, 6) cut_rows(struct args a)
{
    __shared__ mass sums[MAX_TILES];
    struct view v = view_row(a);
    if (v.row->state != ROW_CUT) return;
    double max = v.row->max, scale = v.row->scale, floor = v.row->floor;
    double bin_scale = v.row->bin_scale;
    float low = v.row->low;
    int32_t bin = v.row->bin;
    sum_tiles(v, sums, v.begin, v.end, [&](int32_t id, float logit) -> uint64_t {
        if (logit < low) return 0;
        double x = value_of(v, logit), y = choice_exponent(x, max, scale);
        int32_t at = bin_of(y, bin_scale);
        if (at > bin || at == BINS || x < floor) return 0;
        if (at == bin) {
            note(a, v, id);
            return 0;
        }
        uint64_t weight = choice_weight(y);
        return weight >= v.least ? weight : 0;
    });
    if (!merge_tiles(a, v, sums)) return;

    bool by_count = !v.top_p;
    struct bin_walk each = walk_of_bin(a, v);
    struct cut last = {-INFINITY, INT32_MAX};
    if (bin < BINS && by_count) last.value = select_top_k(each, v.row->need);
    if (bin < BINS && !by_count) last = select_top_p(each, v.row->need);
    auto kept = [&](double x, double y, int32_t id) {
        double value = by_count ? x : y;
        return x >= floor && (value > last.value || (value == last.value && id <= last.last_tie));
    };
    auto weight_of = [&](int32_t id, double x, double y) -> uint64_t {
        uint64_t weight = choice_weight(y);
        return weight >= v.least && kept(x, y, id) ? weight : 0;
    };
    if (each.n_list <= LIST) {
        each([&](int32_t id, double x, double y) {
            atomicAdd(sums + id / TILE, (mass)weight_of(id, x, y));
        });
        __syncthreads();
    } else { /* the whole row again is cheaper than that many atomics */
        sum_tiles(v, sums, 0, v.vocab, [&](int32_t id, float logit) {
            double x = value_of(v, logit);
            return weight_of(id, x, choice_exponent(x, max, scale));
        });
    }
    draw(v, sums, kept);
}

/* ---- the host's side ---- */

/* Adds an array of n elements to the scratch memory; NULL memory only counts. */
static void *take(char *memory, size_t *used, size_t n, size_t size)
{
    void *at = memory ? memory + *used : NULL;
    *used += (n * size + 255) / 256 * 256;
    return at;
}

static size_t place(const struct shape *shape, const struct limits *limits, char *memory,
                    struct sample_work *w)
{
    size_t used = 0, n = (size_t)limits->max_logits;
    w->vocab = shape->vocab;
    w->rows = (struct sample_row *)take(memory, &used, n, sizeof *w->rows);
    w->peaks = (struct sample_peak *)take(memory, &used, n * MAX_PARTS, sizeof *w->peaks);
    w->sums = (mass *)take(memory, &used, n * MAX_TILES, sizeof *w->sums);
    w->masses = (mass *)take(memory, &used, n * BINS, sizeof *w->masses);
    w->counts = (uint32_t *)take(memory, &used, n * BINS, sizeof *w->counts);
    w->lists = (int32_t *)take(memory, &used, n * LIST, sizeof *w->lists);
    w->adjusted = (double *)take(memory, &used, SAMPLE_ADJUSTMENTS, sizeof *w->adjusted);
    return used;
}

size_t sample_bytes(const struct shape *shape, const struct limits *limits)
{
    struct sample_work work;
    return place(shape, limits, NULL, &work);
}

void sample_place(const struct shape *shape, const struct limits *limits, void *scratch,
                  struct sample_work *out)
{
    place(shape, limits, (char *)scratch, out);
}

size_t sample_rules_bytes(const struct limits *limits)
{
    return (size_t)limits->max_logits * sizeof(struct choice_rule) +
           SAMPLE_ADJUSTMENTS * sizeof(struct adjustment);
}

size_t sample_pack(const struct choice_rule *rules, int32_t n, void *host, void *device,
                   enum sample_stage *stage)
{
    struct choice_rule *out = (struct choice_rule *)host;
    struct adjustment *adjustments = (struct adjustment *)(out + n);
    const struct adjustment *there =
        (const struct adjustment *)((const struct choice_rule *)device + n);
    size_t used = 0;
    *stage = SAMPLE_GREEDY;
    for (int32_t i = 0; i < n; i++) {
        const struct choice_rule *rule = rules + i;
        size_t n_adjustments = (size_t)rule->n_adjustments;
        out[i] = *rule;
        out[i].adjustments = there + used;
        if (n_adjustments > 0)
            memcpy(adjustments + used, rule->adjustments, n_adjustments * sizeof *adjustments);
        used += n_adjustments;
        if (!(rule->temperature > 0)) {
            out[i].seed = out[i].position = out[i].stream = 0; /* the same from step to step */
            continue;
        }
        bool top_k = rule->top_k > 0, top_p = rule->top_p < 1;
        enum sample_stage needs = top_k && top_p   ? SAMPLE_NARROW
                                  : top_k || top_p ? SAMPLE_CUT
                                                   : SAMPLE_DRAW;
        if (needs > *stage) *stage = needs;
    }
    return (size_t)n * sizeof *out + used * sizeof *adjustments;
}

cudaError_t sample_run(cudaStream_t stream, const struct sample_work *work, float *logits,
                       const void *rules, int32_t n, enum sample_stage stage, struct chosen *chosen,
                       struct chosen *told)
{
    struct args a = {*work, logits, (const struct choice_rule *)rules, chosen, told, 0};
    int32_t tiles = (work->vocab + TILE - 1) / TILE;
    int32_t parts = n < BLOCKS ? BLOCKS / n : 1;
    if (parts > MAX_PARTS) parts = MAX_PARTS;
    int32_t tiles_of_part = (tiles + parts - 1) / parts;
    a.part_size = tiles_of_part * TILE;
    dim3 grid((unsigned int)((tiles + tiles_of_part - 1) / tiles_of_part), (unsigned int)n);
    static const struct {
        enum sample_stage needed_from;
        void (*kernel)(struct args);
    } kernels[] = {{SAMPLE_GREEDY, scan_rows},
                   {SAMPLE_DRAW, weigh_rows},
                   {SAMPLE_NARROW, narrow_rows},
                   {SAMPLE_CUT, cut_rows}};
    cudaError_t status = cudaSuccess;
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels && status == cudaSuccess; i++)
        if (stage >= kernels[i].needed_from)
            status = launch_plain(stream, kernels[i].kernel, grid, THREADS, a);
    return status;
}
