#!/usr/bin/env python3
"""Linnet and its peers on one GPU in one run: one table, and a CSV file for bench/plot.gp.

    bench/gpu/run.py --csv out/speed.csv                      # random weights, transformers beside
    bench/gpu/run.py --model out/model --peers hf,hf-eager,vllm   # a model of bench/gpu/logits.py;
                                                              # also the time to the first token
    bench/gpu/run.py --peers= --ladder                        # what each stage is worth

All measure the rows that the options of bench/peers/shape.py name.
"""
import argparse
import csv
import json
import os
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(ROOT, "bench", "peers"))
from shape import arguments, plan  # noqa: E402

PEERS = {"hf": ["peer_hf.py"], "hf-eager": ["peer_hf.py", "--mode", "eager"],
         "vllm": ["peer_vllm.py"], "llama.cpp": ["peer_llama_cpp.py"]}
COLUMNS = ["engine", "what", "batch", "prompt", "tok_s", "ms_step", "bandwidth_share"]


def note(*words):
    print(*words, file=sys.stderr, flush=True)


def run(command, limit, env=None):
    """Standard output; what it printed before the limit is kept."""
    note("+", " ".join(command))
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit, env=env)
    except subprocess.TimeoutExpired as e:
        note(f"  stopped after {limit:.0f} s")
        return (e.stdout or b"").decode() if isinstance(e.stdout, bytes) else e.stdout or ""
    if done.returncode not in (0, 3):
        note(f"  ended with {done.returncode}")
    return done.stdout


def model_options(a):
    return ["-m", a.model] if a.model else ["--random", "qwen2.5-1.5b", "--dtype", "bf16"]


def bench(a, *options):
    text = run([a.linnet, "bench", *options, "--device", a.device, *model_options(a), "--json",
                "--generated", str(a.generated)], a.linnet_limit)
    return [dict(r, engine="linnet") for r in json.loads(text or "[]")]


def measure_linnet(a):
    """A run for each length of prompt; it gives more rows than are wanted."""
    wanted, rows = plan(a), []
    for prompt in dict.fromkeys(n for _, _, n in wanted):
        batches = [b for what, b, n in wanted if n == prompt and what == "decode"] or [1]
        rows += bench(a, "--batch", ",".join(map(str, batches)), "--prompt", str(prompt),
                      "--repeat", str(a.repeat))
    return [r for key in wanted for r in rows if (r["what"], r["batch"], r["prompt"]) == key]


def first_token(a):
    """Seconds from the start of the process, the file being in the page cache after the first."""
    times = []
    for _ in range(4):
        text = run([a.linnet, "run", "--device", a.device, "-m", a.model, "--prompt-ids",
                    ",".join(str(i) for i in range(1, 17)), "-n", "2", "--ignore-eos",
                    "--temperature", "0", "--json"], a.linnet_limit)
        if text:
            times.append(json.loads(text)["timings"]["ttft_s"])
    return times


def measure_peer(a, name):
    script, *options = PEERS[name]
    if name == "llama.cpp":
        options += ["--gguf", a.gguf]
    sizes = [f"--{key}={','.join(map(str, getattr(a, key)))}" for key in ("batches", "prefill")]
    sizes += [f"--{key}={getattr(a, key)}" for key in ("prompt", "long", "generated", "limit")]
    text = run([sys.executable, os.path.join(ROOT, "bench", "peers", script), *options, *sizes,
                *a.peer_options.split()], a.limit + 120)
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    for r in rows:
        if "error" in r:
            note(f"  {r.get('engine')} {r.get('what', '')} {r.get('batch', '')}: {r['error']}")
    return [r for r in rows if "tok_s" in r]


def table(rows):
    """Markdown: a line for each of Linnet's rows, peers beside it with Linnet's ratio to them."""
    engines = list(dict.fromkeys(r["engine"] for r in rows if r["engine"] != "linnet"))
    at = {(r["engine"], r["what"], r["batch"], r["prompt"]): r for r in rows}
    head = ["", "batch", "prompt", "tok/s", "ms a step", "of bandwidth"] + engines
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for r in [r for r in rows if r["engine"] == "linnet"]:
        cells = [r["what"], r["batch"], r["prompt"], f"{r['tok_s']:,.0f}", f"{r['ms_step']:.3f}",
                 f"{100 * r['bandwidth_share']:.0f}%" if r["what"] == "decode" else ""]
        for engine in engines:
            peer = at.get((engine, r["what"], r["batch"], r["prompt"]))
            cells.append(f"{peer['tok_s']:,.0f} ({r['tok_s'] / peer['tok_s']:.2f}x)"
                         if peer else "")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def ladder(a):
    """Markdown, as it stands in the README."""
    rows, before = bench(a, "ladder"), None
    lines = ["| stage | tokens/s | times the one before |", "| --- | --- | --- |"]
    for r in rows:
        step = f"{r['tok_s'] / before:.2f}" if before else ""
        lines.append(f"| {r['stage']} | {r['tok_s']:,.1f} | {step} |")
        before = r["tok_s"]
    return "\n".join(lines)


def main():
    p = arguments(__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.set_defaults(limit=240)
    p.add_argument("--linnet", default=os.path.join(ROOT, "build", "cuda", "linnet"))
    p.add_argument("--device", default="cuda")
    p.add_argument("--model", help="a directory or GGUF file; without: random weights")
    p.add_argument("--repeat", type=int, default=3)
    p.add_argument("--peers", default="hf", help="of " + ", ".join(PEERS) + "; empty: none")
    p.add_argument("--gguf", help="the file that llama.cpp reads")
    p.add_argument("--linnet-limit", type=float, default=300, help="seconds for a run of linnet")
    p.add_argument("--peer-options", default="", help="more for every peer: \"--layers 1\"")
    p.add_argument("--ladder", action="store_true", help="also the table of the design's stages")
    p.add_argument("--csv", help="the rows, for bench/plot.gp")
    a = p.parse_args()
    begin = time.time()
    rows = measure_linnet(a)
    if not rows:
        sys.exit("linnet gave no rows")
    for name in [n for n in a.peers.split(",") if n]:
        rows += measure_peer(a, name)
    if a.csv:
        os.makedirs(os.path.dirname(os.path.abspath(a.csv)), exist_ok=True)
        with open(a.csv, "w", newline="") as f:
            w = csv.DictWriter(f, COLUMNS, extrasaction="ignore")
            w.writeheader()
            w.writerows(rows)
    print(f"{rows[0]['device']}, {rows[0]['dtype']}\n\n{table(rows)}")
    if a.model:
        times = first_token(a)
        print("\nfirst token after", ", ".join(f"{t:.2f}" for t in times), "s from process start")
    if a.ladder:
        print("\n" + ladder(a))
    note(f"{time.time() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
