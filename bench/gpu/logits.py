#!/usr/bin/env python3
"""A model of Qwen2.5-1.5B's full shape and what transformers computes with it: golden logits and
greedy tokens in fp32, and how far its own bf16 run is from them.

    bench/gpu/logits.py OUT          # OUT/model, OUT/golden/model.json and .safetensors
    linnet check --device cuda -m OUT/model

`check` finds the goldens beside the model and holds Linnet to 1.5 times the bf16 error, and to the
tokens wherever the fp32 gap between winner and runner-up is more than four times what bf16 changes
gaps by. The layout is that of the reference data that the small goldens come from. Needs torch and
transformers, no network; a GPU for the full shape (15 GB), none for --tiny.
"""
import argparse
import json
import os

import torch
from safetensors.torch import save_file
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2 import modeling_qwen2

SHAPE = dict(vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
             num_attention_heads=12, num_key_value_heads=2, max_position_embeddings=32768,
             rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=True, use_sliding_window=False)
TINY = dict(vocab_size=512, hidden_size=256, intermediate_size=384, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2)


def make_model(config, seed, std):
    """All matrices and biases normal, norms about 1; rounded to bf16, as they are stored."""
    g = torch.Generator().manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            value = torch.empty_like(p).normal_(0, std, generator=g)
            p.copy_(value + 1 if "norm" in name else value)
    return model.to(torch.bfloat16)


def load(path, dtype, device):
    model = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa")
    for p in model.parameters():  # not .to(dtype): RoPE's frequencies stay as they are
        p.data = p.data.to(device, dtype)
    for b in model.buffers():
        b.data = b.data.to(device)
    return model.eval()


def exact_norm(self, x):
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def rows(model, ids, keep, cache=None):
    """Logits of the last `keep` tokens, as fp64 on the CPU."""
    device = next(model.parameters()).device
    x = torch.tensor([ids], device=device)
    out = model(x, past_key_values=cache, use_cache=cache is not None, logits_to_keep=keep)
    return out.logits[0].double().cpu()


def greedy(model, ids, n):
    cache, tokens, gaps, seconds = DynamicCache(config=model.config), [], [], []
    x = ids
    for _ in range(n):
        top = rows(model, x, 1, cache)[0].topk(2)
        tokens.append(int(top.indices[0]))
        seconds.append(int(top.indices[1]))
        gaps.append(float(top.values[0] - top.values[1]))
        x = [tokens[-1]]
    return tokens, seconds, gaps


def error(x, want):
    d = x - want
    return dict(max_abs=float(d.abs().max()),
                rms_rel=float(d.pow(2).mean().sqrt() / want.pow(2).mean().sqrt()),
                ref_rms=float(want.pow(2).mean().sqrt()), ref_max=float(want.abs().max()))


def fp32_part(path, a, prompts):
    model = load(path, torch.float32, a.device)
    golden, last = [], []
    for ids in prompts:
        last.append(rows(model, ids, 1)[0])
        tokens, seconds, gaps = greedy(model, ids, a.tokens)
        golden.append(dict(len=len(ids), ids=ids, greedy_fp32=tokens, gap=gaps, min_gap=min(gaps),
                           runner_up=seconds))
    return golden, torch.stack(last)


def bf16_part(path, a, golden):
    """Last logits, and the change of each gap along the fp32 run's tokens."""
    model = load(path, torch.bfloat16, a.device)
    last, changes = [], []
    for p in golden:
        last.append(rows(model, p["ids"], 1)[0])
        logits = rows(model, p["ids"] + p["greedy_fp32"][:-1], a.tokens)
        pair = torch.tensor([p["greedy_fp32"], p["runner_up"]]).T
        both = logits.gather(1, pair)
        changes.append(both[:, 0] - both[:, 1] - torch.tensor(p["gap"], dtype=torch.float64))
        tokens, _, _ = greedy(model, p["ids"], a.tokens)
        same = [x == y for x, y in zip(tokens, p["greedy_fp32"])]
        p["greedy_bf16_first_diff"] = same.index(False) if False in same else None
    change = torch.cat(changes)
    return torch.stack(last), dict(rms=float(change.pow(2).mean().sqrt()),
                                   max=float(change.abs().max()))


def fp64_part(path, a, prompts):
    """In float64 but for RoPE's cosines, which transformers makes in fp32."""
    before = modeling_qwen2.Qwen2RMSNorm.forward
    modeling_qwen2.Qwen2RMSNorm.forward = exact_norm
    try:
        model = load(path, torch.float64, a.device)
        return torch.stack([rows(model, ids, 1)[0] for ids in prompts])
    finally:
        modeling_qwen2.Qwen2RMSNorm.forward = before


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out")
    p.add_argument("--tiny", action="store_true", help="a few small layers, to try the script out")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--lengths", default="100,129", help="of the prompts, each another, up to 256")
    p.add_argument("--tokens", type=int, default=64, help="of the greedy answers, up to 64")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--std", type=float, default=0.02)
    a = p.parse_args()
    lengths = [int(n) for n in a.lengths.split(",")]
    if len(set(lengths)) != len(lengths) or max(lengths) > 256 or a.tokens > 64:
        p.error("lengths must differ and be at most 256, tokens at most 64")
    torch.set_float32_matmul_precision("highest")
    path, folder = os.path.join(a.out, "model"), os.path.join(a.out, "golden")
    os.makedirs(folder, exist_ok=True)
    config = Qwen2Config(**dict(SHAPE, **(TINY if a.tiny else {})))
    config.dtype = torch.bfloat16
    g = torch.Generator().manual_seed(a.seed + 1)
    prompts = [torch.randint(0, config.vocab_size, (n,), generator=g).tolist() for n in lengths]
    if not os.path.exists(os.path.join(path, "model.safetensors")):
        make_model(config, a.seed, a.std).save_pretrained(path, max_shard_size="100GB")
    with torch.no_grad():
        golden, last = fp32_part(path, a, prompts)
        last_bf16, noise = bf16_part(path, a, golden)
        last_fp64 = fp64_part(path, a, prompts)
    whole = dict(note=f"bench/gpu/logits.py, torch {torch.__version__} on {a.device}",
                 prompts=golden, hf_bf16_error={"logits.last": error(last_bf16, last)},
                 hf_fp32_error_vs_float64={"logits.last": error(last, last_fp64)},
                 bf16_gap_noise=noise, min_gap=min(p["min_gap"] for p in golden))
    with open(os.path.join(folder, "model.json"), "w") as f:
        json.dump(whole, f, indent=1)
    save_file({f"logits.p{n}.last": x.float().contiguous() for n, x in zip(lengths, last)},
              os.path.join(folder, "model.safetensors"))
    print(json.dumps({k: whole[k] for k in ("hf_bf16_error", "hf_fp32_error_vs_float64",
                                            "bf16_gap_noise", "min_gap")}))
    for p in golden:
        safe = sum(g > 4 * noise["rms"] for g in p["gap"])
        print(f"prompt {p['len']}: {safe} of {a.tokens} gaps are clear of bf16's noise; its own "
              f"tokens differ first at {p['greedy_bf16_first_diff']}")


if __name__ == "__main__":
    main()
