#!/usr/bin/env python3
"""Linnet and llama.cpp on the CPU, in turn, on the same GGUF files and threads.

    bench/peers/cpu.py --llama llama.cpp/build/bin --csv out/cpu.csv model.gguf ...

For each file: decoding of one sequence, one prompt, decoding of many sequences. Each pair is one
run of both, the order changing from pair to pair, with the machine's read bandwidth before and
after (`linnet bench limits`): a pair between two different probes is not worth much. Printed are
medians, and the range of the ratios. Exit code 3 if a program is missing. Needs only Python's
standard library; llama.cpp is built by bench/peers/build_llama_cpp.sh.
"""
import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WORKS = ("decode", "prefill", "batch")
COLUMNS = ["file", "what", "sequences", "prompt", "threads", "linnet_tok_s", "llama_tok_s", "ratio",
           "ratio_min", "ratio_max", "pairs", "bandwidth_share", "peak_share", "read_gbytes_s_min",
           "read_gbytes_s_max"]


def note(*words):
    print(*words, file=sys.stderr, flush=True)


def run(command, limit):
    """Standard output, or None: it failed or stalled, which is said."""
    # Bound to cores, its threads survive a neighbour; by themselves they may stall for minutes.
    environment = dict(os.environ, OMP_PROC_BIND="true", OMP_PLACES="cores")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit,
                              env=environment)
    except subprocess.TimeoutExpired:
        note(f"  no result within {limit:.0f} s: {' '.join(command)}")
        return None
    if done.returncode != 0:
        note(f"  ended with {done.returncode}: {' '.join(command)}\n{done.stderr[-500:]}")
        return None
    return done.stdout


# ---- one measurement: tokens a second, and what else linnet says ---------------------------------

def linnet(a, path, what, threads):
    sizes = {"decode": ("1", "1", a.generated), "prefill": ("1", str(a.prefill), 0),
             "batch": (str(a.batch), str(a.batch_prompt), a.batch_generated)}[what]
    batch, prompt, generated = sizes
    text = run([a.linnet, "bench", "--device", "cpu", "-m", path, "-t", str(threads), "--json",
                "--batch", batch, "--prompt", prompt, "--generated", str(generated), "--repeat",
                str(a.repeat)], a.limit)
    wanted = "prefill" if what == "prefill" else "decode"
    rows = [r for r in json.loads(text or "[]") if r["what"] == wanted]
    return rows[0] if rows else None


def llama(a, path, what, threads):
    if what == "batch":
        context = a.batch * (a.batch_prompt + a.batch_generated)
        text = run([a.batched_bench, "-m", path, "-t", str(threads), "-c", str(context), "-b",
                    "2048", "-ub", "512", "-npp", str(a.batch_prompt), "-ntg",
                    str(a.batch_generated), "-npl", str(a.batch), "--output-format", "jsonl"],
                   a.limit)
        rows = [json.loads(line) for line in (text or "").splitlines() if line.startswith("{")]
        return rows[0]["speed_tg"] if rows else None
    sizes = {"decode": (0, a.generated), "prefill": (a.prefill, 0)}[what]
    text = run([a.bench, "-m", path, "-t", str(threads), "-p", str(sizes[0]), "-n", str(sizes[1]),
                "-r", str(a.repeat), "-o", "jsonl"], a.limit)
    rows = [json.loads(line) for line in (text or "").splitlines() if line.startswith("{")]
    return statistics.median(rows[0]["samples_ts"]) if rows else None


def probe(a, threads):
    """GB/s that memory reads at just now, by so many threads."""
    text = run([a.linnet, "bench", "limits", "--device", "cpu", "--json", "-t", str(threads)], 60)
    return json.loads(text)["read_gbytes_s"] if text else 0


def pair(a, path, what, index):
    threads = a.batch_threads if what == "batch" else a.threads
    engines = (linnet, llama) if index % 2 == 0 else (llama, linnet)
    before = probe(a, threads)
    got = {engine: engine(a, path, what, threads) for engine in engines}
    after, ours, theirs = probe(a, threads), got[linnet], got[llama]
    if not ours or not theirs:
        return None
    row = dict(file=os.path.basename(path), what=what, threads=threads, pair=index,
               linnet_tok_s=ours["tok_s"], llama_tok_s=theirs, ratio=ours["tok_s"] / theirs,
               read_gbytes_s_before=before, read_gbytes_s_after=after,
               bandwidth_share=ours["bandwidth_share"], peak_share=ours["peak_share"])
    note(f"  {what} {index + 1}/{a.pairs}: linnet {ours['tok_s']:.1f}, llama.cpp {theirs:.1f} tok/s"
         f" ({row['ratio']:.2f}x), memory {before:.1f} then {after:.1f} GB/s")
    return row


# ---- all of them ---------------------------------------------------------------------------------

def summary(a, what, pairs):
    def middle(key):
        return statistics.median(p[key] for p in pairs)

    ratios = [p["ratio"] for p in pairs]
    probes = [p[k] for p in pairs for k in ("read_gbytes_s_before", "read_gbytes_s_after")]
    row = {key: middle(key) for key in ("linnet_tok_s", "llama_tok_s", "ratio", "bandwidth_share",
                                        "peak_share")}
    return dict(row, file=pairs[0]["file"], what=what, threads=pairs[0]["threads"],
                sequences=a.batch if what == "batch" else 1, pairs=len(pairs),
                prompt={"decode": 0, "prefill": a.prefill, "batch": a.batch_prompt}[what],
                ratio_min=min(ratios), ratio_max=max(ratios),
                read_gbytes_s_min=min(probes), read_gbytes_s_max=max(probes))


def table(rows):
    """Markdown."""
    head = ["file", "", "threads", "linnet tok/s", "llama.cpp tok/s", "ratio (range)",
            "of read bandwidth", "of arithmetic peak", "GB/s, all probes"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for r in rows:
        what = {"decode": "decode, 1 sequence", "prefill": f"prefill {r['prompt']}",
                "batch": f"decode, {r['sequences']} sequences"}[r["what"]]
        cells = [r["file"], what, r["threads"], f"{r['linnet_tok_s']:.1f}",
                 f"{r['llama_tok_s']:.1f}",
                 f"{r['ratio']:.2f} ({r['ratio_min']:.2f}-{r['ratio_max']:.2f})",
                 f"{r['bandwidth_share']:.2f}", f"{r['peak_share']:.2f}",
                 f"{r['read_gbytes_s_min']:.1f}-{r['read_gbytes_s_max']:.1f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def arguments():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("files", nargs="+", metavar="GGUF")
    p.add_argument("--linnet", default=os.path.join(ROOT, "build", "release", "linnet"))
    p.add_argument("--llama", help="the folder of llama-bench and llama-batched-bench "
                   "(default: where programs are looked for)")
    p.add_argument("--works", default=",".join(WORKS), help="of " + ",".join(WORKS))
    p.add_argument("--pairs", type=int, default=5)
    p.add_argument("--repeat", type=int, default=3, help="measurements in a run, of which the "
                   "median counts")
    p.add_argument("--threads", type=int, default=1, help="of decode and prefill")
    p.add_argument("--batch-threads", type=int, default=2)
    p.add_argument("--generated", type=int, default=64)
    p.add_argument("--prefill", type=int, default=512)
    p.add_argument("--batch", type=int, default=16, help="sequences that decode together")
    p.add_argument("--batch-prompt", type=int, default=32)
    p.add_argument("--batch-generated", type=int, default=32)
    p.add_argument("--limit", type=float, default=600, help="seconds for one run")
    p.add_argument("--csv", help="the medians, for bench/peers/cpu.gp")
    p.add_argument("--json", help="every pair")
    a = p.parse_args()
    a.works = a.works.split(",")
    unknown = [w for w in a.works if w not in WORKS]
    if unknown:
        p.error(f"--works: expected {', '.join(WORKS)}, found {unknown[0]}")
    if a.pairs < 1:
        p.error("--pairs: expected at least 1")
    return a


def find_programs(a):
    def find(name):
        path = shutil.which(name, path=a.llama) if a.llama else shutil.which(name)
        return path and os.path.abspath(path)

    a.bench, a.batched_bench = find("llama-bench"), find("llama-batched-bench")
    missing = [name for name, path in (("llama-bench", a.bench), (a.linnet, shutil.which(a.linnet)),
                                       ("llama-batched-bench", a.batched_bench)) if not path]
    missing += [path for path in a.files if not os.path.isfile(path)]
    if missing:
        note(f"missing: {', '.join(missing)} (build llama.cpp with "
             "bench/peers/build_llama_cpp.sh and name its folder with --llama)")
        sys.exit(3)


def main():
    a = arguments()
    find_programs(a)
    rows, pairs = [], []
    for path in a.files:
        note(path)
        got = {what: [] for what in a.works}
        for index in range(a.pairs):
            for what in a.works:
                row = pair(a, path, what, index)
                if row:
                    got[what].append(row)
                    pairs.append(row)
        rows += [summary(a, what, got[what]) for what in a.works if got[what]]
    for path, write in ((a.csv, write_csv), (a.json, write_json)):
        if path:
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            with open(path, "w", newline="") as f:
                write(f, rows, pairs)
    print(table(rows))
    if len(rows) < len(a.files) * len(a.works):
        sys.exit("some were not measured")


def write_csv(f, rows, _):
    w = csv.DictWriter(f, COLUMNS)
    w.writeheader()
    w.writerows(rows)


def write_json(f, _, pairs):
    json.dump(pairs, f, indent=1)


if __name__ == "__main__":
    main()
