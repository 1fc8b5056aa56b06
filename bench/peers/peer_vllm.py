#!/usr/bin/env python3
"""Speed of vLLM, dummy weights. Decoding is timed between two lengths of answer."""
import json
import os
import random
import statistics
import sys
import tempfile
import time

from shape import CONFIG, FIRST_ID, LAST_ID, Rows, arguments, plan

for key, value in (("VLLM_USE_FLASHINFER_SAMPLER", "0"), ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
                   ("VLLM_NO_USAGE_STATS", "1"), ("HF_HUB_OFFLINE", "1")):
    os.environ.setdefault(key, value)
try:
    from vllm import LLM, SamplingParams
except ImportError as e:
    print(json.dumps(dict(engine="vLLM", error=f"not installed: {e}")))
    sys.exit(3)


class Peer:
    def __init__(self, a):
        folder = tempfile.mkdtemp()
        with open(os.path.join(folder, "config.json"), "w") as f:
            json.dump(dict(CONFIG, torch_dtype="bfloat16"), f)
        self.llm = LLM(model=folder, load_format="dummy", skip_tokenizer_init=True,
                       max_model_len=max(a.long, a.prompt, *a.prefill) + a.generated + 64,
                       dtype="bfloat16", gpu_memory_utilization=0.5, enable_prefix_caching=False,
                       max_num_seqs=max(a.batches), max_num_batched_tokens=8192,
                       disable_log_stats=True)
        self.random, self.generated = random.Random(0), a.generated

    def seconds(self, batch, prompt, n):
        prompts = [{"prompt_token_ids": [self.random.randrange(FIRST_ID, LAST_ID)
                                         for _ in range(prompt)]} for _ in range(batch)]
        rule = SamplingParams(temperature=0.0, max_tokens=n, min_tokens=n, ignore_eos=True,
                              detokenize=False)
        begin = time.time()
        answers = self.llm.generate(prompts, rule, use_tqdm=False)
        seconds = time.time() - begin
        assert all(len(x.outputs[0].token_ids) == n for x in answers)
        return seconds

    def decode(self, batch, prompt):
        short, full = 8, 8 + self.generated
        for n in (short, full):  # kernels are compiled when they are first used
            self.seconds(batch, prompt, n)
        steps = statistics.median(self.seconds(batch, prompt, full) for _ in range(3)) - \
            statistics.median(self.seconds(batch, prompt, short) for _ in range(3))
        return batch * self.generated / steps, 1e3 * steps / self.generated

    def prefill(self, batch, prompt):
        best = min(self.seconds(batch, prompt, 1) for _ in range(6))
        return batch * prompt / best, 1e3 * best


def main():
    a = arguments(__doc__).parse_args()
    rows = Rows("vLLM", a.limit)
    begin = time.time()
    peer = Peer(a)
    print(json.dumps(dict(engine="vLLM", what="start", seconds=round(time.time() - begin, 1))),
          flush=True)
    for what, batch, prompt in plan(a):
        rows.measure(what, batch, prompt, lambda: getattr(peer, what)(batch, prompt))


if __name__ == "__main__":
    main()
