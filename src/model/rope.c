#include "model/rope.h"

#include <math.h>
#include <stdlib.h>

#include "base/memory.h"

static const double TWO_PI = 6.283185307179586;

/* The dimension at which a wave turns `rotations` times within the original context (yarn). */
static double correction_dim(const struct rope_config *c, int32_t head_dim, double rotations)
{
    return head_dim * log(c->original_context / (rotations * TWO_PI)) / (2 * log(c->theta));
}

static void yarn_frequencies(const struct rope *r, double *inv_freq)
{
    const struct rope_config *c = &r->config;
    int32_t half = r->head_dim / 2;
    double low = correction_dim(c, r->head_dim, c->beta_fast);
    double high = correction_dim(c, r->head_dim, c->beta_slow);
    if (c->truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0);
    high = fmin(high, r->head_dim - 1);
    if (low == high) high += 0.001;
    for (int32_t j = 0; j < half; j++) {
        double ramp = fmin(fmax((j - low) / (high - low), 0), 1);
        double plain = inv_freq[j], stretched = plain / c->factor;
        inv_freq[j] = stretched * ramp + plain * (1 - ramp);
    }
}

static void llama3_frequencies(const struct rope *r, double *inv_freq)
{
    const struct rope_config *c = &r->config;
    double low_wave = c->original_context / c->low_freq_factor;
    double high_wave = c->original_context / c->high_freq_factor;
    for (int32_t j = 0; j < r->head_dim / 2; j++) {
        double wave = TWO_PI / inv_freq[j];
        if (wave > low_wave) {
            inv_freq[j] /= c->factor;
        } else if (wave >= high_wave) {
            double smooth = (c->original_context / wave - c->low_freq_factor) /
                            (c->high_freq_factor - c->low_freq_factor);
            inv_freq[j] = (1 - smooth) * inv_freq[j] / c->factor + smooth * inv_freq[j];
        }
    }
}

void rope_inverse_frequencies(const struct rope *r, int32_t length, double *inv_freq)
{
    const struct rope_config *c = &r->config;
    int32_t half = r->head_dim / 2;
    double base = c->theta;
    if (c->kind == ROPE_DYNAMIC && length > c->original_context) {
        double stretch = c->factor * length / c->original_context - (c->factor - 1);
        base *= pow(stretch, (double)r->head_dim / (r->head_dim - 2));
    }
    for (int32_t j = 0; j < half; j++) {
        inv_freq[j] = pow(base, -2.0 * j / r->head_dim);
        if (r->divisors)
            inv_freq[j] /= r->divisors[j];
        else if (c->kind == ROPE_LINEAR)
            inv_freq[j] /= c->factor;
    }
    if (r->divisors) return; /* the file has the scaling worked out */
    if (c->kind == ROPE_YARN) yarn_frequencies(r, inv_freq);
    if (c->kind == ROPE_LLAMA3) llama3_frequencies(r, inv_freq);
}

static void fill_row(const struct rope *r, int32_t position, const double *inv_freq, float *row)
{
    int32_t half = r->head_dim / 2;
    for (int32_t j = 0; j < half; j++) {
        double angle = position * inv_freq[j];
        row[j] = (float)(cos(angle) * r->attention_factor);
        row[half + j] = (float)(sin(angle) * r->attention_factor);
    }
}

enum { MAX_HALF = 512 };

linnet_status rope_create(const struct rope_config *config, int32_t head_dim, int32_t max_context,
                          const float *divisors, struct rope *out, linnet_error *err)
{
    if (head_dim < 2 || head_dim % 2 || head_dim / 2 > MAX_HALF)
        return error_set(err, LINNET_UNSUPPORTED, "head_dim %d: RoPE needs an even number up to %d",
                         head_dim, 2 * MAX_HALF);
    *out = (struct rope){.config = *config,
                         .head_dim = head_dim,
                         .max_context = max_context,
                         .attention_factor = 1.0,
                         .divisors = divisors};
    if (config->kind == ROPE_YARN) {
        double derived = config->factor > 1 ? 0.1 * log(config->factor) + 1 : 1;
        out->attention_factor = config->attention_factor > 0 ? config->attention_factor : derived;
    }
    if (config->kind == ROPE_DYNAMIC) return LINNET_OK;
    out->table = mem_new((size_t)max_context * (size_t)head_dim, sizeof(float));
    if (!out->table)
        return error_memory(err, "the RoPE table",
                            (size_t)max_context * (size_t)head_dim * sizeof(float));
    return LINNET_OK;
}

void rope_fill(struct rope *r, int32_t n)
{
    double inv_freq[MAX_HALF];
    if (n <= r->n_filled) return;
    rope_inverse_frequencies(r, 0, inv_freq);
    for (int32_t p = r->n_filled; p < n; p++)
        fill_row(r, p, inv_freq, r->table + (size_t)p * (size_t)r->head_dim);
    r->n_filled = n;
}

void rope_destroy(struct rope *r)
{
    free(r->table);
    r->table = NULL;
}

void rope_row(struct rope *r, int32_t position, int32_t length, float *row)
{
    if (r->table) {
        rope_fill(r, position + 1);
        const float *from = r->table + (size_t)position * (size_t)r->head_dim;
        for (int32_t j = 0; j < r->head_dim; j++) row[j] = from[j];
        return;
    }
    double inv_freq[MAX_HALF];
    rope_inverse_frequencies(r, length, inv_freq);
    fill_row(r, position, inv_freq, row);
}
