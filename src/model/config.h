/*
 * config.h - what a checkpoint says about its model, from config.json or GGUF metadata, checked.
 */
#ifndef LINNET_MODEL_CONFIG_H
#define LINNET_MODEL_CONFIG_H

#include "file/checkpoint.h"
#include "ops/ops.h"

enum architecture { ARCH_LLAMA, ARCH_QWEN2, ARCH_QWEN3 };

enum rope_kind { ROPE_DEFAULT, ROPE_LINEAR, ROPE_DYNAMIC, ROPE_YARN, ROPE_LLAMA3 };

struct rope_config {
    enum rope_kind kind;
    double theta;
    double factor;
    int32_t original_context;    /* tokens before scaling (yarn, llama3, dynamic) */
    double attention_factor;     /* yarn: multiplies cos and sin; 0 = derived from factor */
    double beta_fast, beta_slow; /* yarn */
    double low_freq_factor, high_freq_factor; /* llama3 */
    bool truncate;                            /* yarn: round the correction range */
};

enum { CONFIG_MAX_EOS = 16 };

struct model_config {
    enum architecture arch;
    struct shape shape;
    int32_t context_length;
    struct rope_config rope;
    bool tied;                   /* the output matrix is the embedding */
    bool qkv_bias;               /* Qwen2; Llama with attention_bias */
    bool o_bias;                 /* Llama with attention_bias */
    bool qk_norm;                /* Qwen3 */
    int32_t eos[CONFIG_MAX_EOS]; /* union of all that the files call an end token */
    int32_t n_eos;
    linnet_sampling sampling; /* recommended by generation_config.json or general.sampling.* */
};

const char *architecture_name(enum architecture arch);

/* Fails naming the key, what was expected and what was found. */
linnet_status model_config_read(const struct checkpoint *cp, struct model_config *out,
                                linnet_error *err);

/* One more end token; ids outside the matrix, such as -1, are ignored. */
void model_config_add_eos(struct model_config *c, int64_t id);

#endif
