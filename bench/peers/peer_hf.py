#!/usr/bin/env python3
"""Speed of Hugging Face transformers: a static cache and compiled steps, or eager.

Decoding is timed between two lengths of answer, so that the prompt and the start cancel out.
"""
import json
import sys
import time

from shape import CONFIG, FIRST_ID, LAST_ID, Rows, arguments, plan

try:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
except ImportError as e:
    print(json.dumps(dict(engine="transformers", error=f"not installed: {e}")))
    sys.exit(3)


def make_model(device, layers):
    config = dict(CONFIG, **(dict(num_hidden_layers=layers) if layers else {}))
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen2ForCausalLM(Qwen2Config(**config)).to(torch.bfloat16).eval()


class Peer:
    def __init__(self, model, device, compiled, generated):
        self.model, self.device, self.generated = model, device, generated
        self.options = dict(cache_implementation="static") if compiled else {}

    def ids(self, batch, n):
        return torch.randint(FIRST_ID, LAST_ID, (batch, n), device=self.device)

    def wait(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, ids, n):
        """Of an answer of n tokens."""
        self.wait()
        begin = time.time()
        self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n,
                            min_new_tokens=n, do_sample=False, pad_token_id=0, eos_token_id=None,
                            **self.options)
        self.wait()
        return time.time() - begin

    def decode(self, batch, prompt):
        ids = self.ids(batch, prompt)
        short, full = 8, 8 + self.generated
        # each size has its own compiled step; the cache is as long as the longest answer before
        for n in (full, short, full, short):
            self.seconds(ids, n)
        steps = min(self.seconds(ids, full) for _ in range(3)) - \
            min(self.seconds(ids, short) for _ in range(3))
        return batch * self.generated / steps, 1e3 * steps / self.generated

    def prefill(self, batch, prompt):
        ids, times = self.ids(batch, prompt), []
        for _ in range(8):
            self.wait()
            begin = time.time()
            self.model(ids, use_cache=True, logits_to_keep=1)
            self.wait()
            times.append(time.time() - begin)
        best = min(times[2:])
        return batch * prompt / best, 1e3 * best


def main():
    p = arguments(__doc__)
    p.add_argument("--mode", choices=["compiled", "eager"], default="compiled")
    p.add_argument("--device", default="cuda")
    p.add_argument("--layers", type=int, help="fewer layers, to try the script out")
    a = p.parse_args()
    torch._dynamo.config.recompile_limit = 64  # else the later sizes would run eagerly
    rows = Rows(f"transformers {a.mode}", a.limit)
    with torch.no_grad():
        peer = Peer(make_model(a.device, a.layers), a.device, a.mode == "compiled", a.generated)
        for what, batch, prompt in plan(a):
            rows.measure(what, batch, prompt, lambda: getattr(peer, what)(batch, prompt))


if __name__ == "__main__":
    main()
