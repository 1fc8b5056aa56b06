"""What every peer is measured at: Qwen2.5-1.5B's shape with random weights, greedy, no early stop.

A row is one JSON line: {"engine", "what": "decode" or "prefill", "batch", "prompt", "tok_s",
"ms_step"}; a measurement that was not made says why: {"engine", ..., "error"}.
"""
import argparse
import json
import time

CONFIG = dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", vocab_size=151936, hidden_size=1536,
    intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
    max_position_embeddings=32768, rope_theta=1e6, rms_norm_eps=1e-6, hidden_act="silu",
    tie_word_embeddings=True, use_sliding_window=False, attention_dropout=0.0,
    bos_token_id=151643, eos_token_id=151645)
FIRST_ID, LAST_ID = 1000, 150000  # ids of random prompts


def numbers(text):
    return [int(n) for n in text.split(",") if n]


def arguments(description):
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--batches", type=numbers, default=[1, 8, 32, 64, 256],
                   help="sequences that decode together")
    p.add_argument("--prompt", type=int, default=128, help="tokens of each one's prompt")
    p.add_argument("--prefill", type=numbers, default=[128, 2048],
                   help="prompts of which one is read alone")
    p.add_argument("--long", type=int, default=3000,
                   help="context at which the first and the third batch decode again; 0: none")
    p.add_argument("--generated", type=int, default=128)
    p.add_argument("--limit", type=float, default=1e9,
                   help="seconds after which no further measurement is begun")
    return p


class Rows:
    """Prints rows, and says which ones there was no time for."""

    def __init__(self, engine, limit):
        self.engine, self.end = engine, time.time() + limit

    def measure(self, what, batch, prompt, function):
        """function() gives (tokens a second, ms a step)."""
        row = dict(engine=self.engine, what=what, batch=batch, prompt=prompt)
        if time.time() > self.end:
            row["error"] = "no time left"
        else:
            try:
                speed, milliseconds = function()
                if speed <= 0:
                    raise ValueError("the longer answer took less time than the shorter one")
                row["tok_s"], row["ms_step"] = speed, milliseconds
            except Exception as e:  # out of memory at one size must not lose the others
                row["error"] = f"{type(e).__name__}: {e}"[:300]
        print(json.dumps(row), flush=True)


def plan(a):
    """(what, batch, prompt) of every row that the arguments ask for."""
    rows = [("prefill", 1, n) for n in a.prefill] + [("decode", b, a.prompt) for b in a.batches]
    return rows + [("decode", b, a.long) for b in a.batches[0:3:2] if a.long]
