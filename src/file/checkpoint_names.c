/* GGUF's tensor names and Hugging Face's, for the Llama and Qwen families. */
#include "base/memory.h"
#include "base/strbuf.h"
#include "file/checkpoint_internal.h"

struct pair {
    const char *gguf, *hf;
};

static const struct pair whole[] = {
    {"token_embd", "model.embed_tokens"},
    {"output_norm", "model.norm"},
    {"output", "lm_head"},
};

static const struct pair in_layer[] = {
    {"attn_norm", "input_layernorm"},
    {"attn_q", "self_attn.q_proj"},
    {"attn_k", "self_attn.k_proj"},
    {"attn_v", "self_attn.v_proj"},
    {"attn_qkv", "self_attn.qkv_proj"},
    {"attn_output", "self_attn.o_proj"},
    {"attn_q_norm", "self_attn.q_norm"},
    {"attn_k_norm", "self_attn.k_norm"},
    {"ffn_norm", "post_attention_layernorm"},
    {"ffn_gate", "mlp.gate_proj"},
    {"ffn_up", "mlp.up_proj"},
    {"ffn_down", "mlp.down_proj"},
};

static const char *translate(const struct pair *pairs, size_t n, const char *name, size_t size)
{
    for (size_t i = 0; i < n; i++)
        if (strlen(pairs[i].gguf) == size && memcmp(pairs[i].gguf, name, size) == 0)
            return pairs[i].hf;
    return NULL;
}

/* "3." of "3.attn_q.weight": the layer's number as it would be printed, and the dot; else 0. */
static size_t layer_number(const char *text)
{
    size_t digits = strspn(text, "0123456789");
    if (digits == 0 || (text[0] == '0' && digits > 1)) return 0;
    return text[digits] == '.' ? digits + 1 : 0;
}

char *checkpoint_name_from_gguf(const char *name)
{
    static const char block[] = "blk.";
    const char *kind = strrchr(name, '.'); /* ".weight" or ".bias" */
    const char *hf = NULL;
    struct strbuf out = {0};
    if (kind && (strcmp(kind, ".weight") == 0 || strcmp(kind, ".bias") == 0)) {
        size_t prefix = strncmp(name, block, sizeof block - 1) == 0 ? sizeof block - 1 : 0;
        size_t number = prefix ? layer_number(name + prefix) : 0;
        const char *base = name + prefix + number;
        if (number && base < kind)
            hf = translate(in_layer, sizeof in_layer / sizeof in_layer[0], base,
                           (size_t)(kind - base));
        else if (!prefix)
            hf = translate(whole, sizeof whole / sizeof whole[0], base, (size_t)(kind - base));
        if (hf && number) {
            strbuf_text(&out, "model.layers.");
            strbuf_append(&out, name + prefix, number);
        }
    }
    if (hf) strbuf_text(&out, hf);
    strbuf_text(&out, hf ? kind : name);
    if (out.failed) strbuf_free(&out);
    return out.data;
}
