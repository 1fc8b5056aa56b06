#!/usr/bin/env python3
"""Linnet and its peers on one GPU in one run: one table, and a CSV file for bench/plot.gp.

    bench/gpu/run.py --csv out/speed.csv                      # random weights, transformers beside
    bench/gpu/run.py --model out/model --peers hf,hf-eager,vllm   # a model of bench/gpu/logits.py;
                                                              # also the time to the first token
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


def bench(a, batches, prompts):
    text = run([a.linnet, "bench", "--device", a.device, *model_options(a), "--json",
                "--batch", batches, "--prompt", prompts, "--generated", str(a.generated),
                "--repeat", str(a.repeat)], a.limit)
    return [dict(r, engine="linnet") for r in json.loads(text or "[]")]


def measure_linnet(a):
    rows = bench(a, a.batches, "128")
    return rows + [r for r in bench(a, a.long_batches, "2048,3000")
                   if (r["what"], r["prompt"]) in (("prefill", 2048), ("decode", 3000))]


def first_token(a):
    """Seconds from the start of the process, the file being in the page cache after the first."""
    times = []
    for _ in range(4):
        text = run([a.linnet, "run", "--device", a.device, "-m", a.model, "--prompt-ids",
                    ",".join(str(i) for i in range(1, 17)), "-n", "2", "--ignore-eos",
                    "--temperature", "0", "--json"], a.limit)
        if text:
            times.append(json.loads(text)["timings"]["ttft_s"])
    return times


def measure_peer(a, name):
    script, *options = PEERS[name]
    if name == "llama.cpp":
        options += ["--gguf", a.gguf]
    text = run([sys.executable, os.path.join(ROOT, "bench", "peers", script), *options,
                "--batches", a.batches, "--generated", str(a.generated),
                "--limit", str(a.peer_limit)], a.peer_limit + 120)
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


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--linnet", default=os.path.join(ROOT, "build", "cuda", "linnet"))
    p.add_argument("--device", default="cuda")
    p.add_argument("--model", help="a directory or GGUF file; without: random weights")
    p.add_argument("--batches", default="1,8,32,64,256")
    p.add_argument("--long-batches", default="1,32", help="at a context of 3,000")
    p.add_argument("--generated", type=int, default=128)
    p.add_argument("--repeat", type=int, default=3)
    p.add_argument("--peers", default="hf", help="of " + ", ".join(PEERS) + "; empty: none")
    p.add_argument("--gguf", help="the file that llama.cpp reads")
    p.add_argument("--limit", type=float, default=300, help="seconds for each run of linnet")
    p.add_argument("--peer-limit", type=float, default=240, help="seconds for each peer")
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
    note(f"{time.time() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
