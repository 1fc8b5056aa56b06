#!/usr/bin/env python3
"""Perplexity of one GGUF file on texts by Linnet and by llama.cpp's llama-perplexity.

A JSON line each, then one with the ratio of the perplexities; of several texts at last one for all
of their chunks. Both get the same bytes, take them literally and count alike: chunks of --context
tokens, the second half of each scored. The ratio's standard error is that of the mean over chunks:
the two round differently, and so no text tells more exactly which one is better. Of programs that
agree to the digits that they print, four behind the point, it is too large.
"""
import argparse
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def fail(engine, message, code):
    print(json.dumps(dict(engine=engine, error=message)))
    sys.exit(code)


def run(engine, command, limit):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        fail(engine, f"took more than {limit} s", 1)
    if done.returncode != 0:
        fail(engine, done.stderr.strip()[-300:], 1)
    return done


def by_chunk(so_far):
    """What each chunk adds to the sum of the logarithms, from the perplexities up to it."""
    sums = [0.0] + [n * math.log(float(p)) for n, p in enumerate(so_far, 1)]
    return [after - before for before, after in zip(sums, sums[1:])]


def linnet(a, text):
    command = [a.linnet, "perplexity", "--json", "--verbose", "-m", a.gguf, "-c", str(a.context),
               "--device", a.device, *threads(a), *a.linnet_options.split(), "--file", text]
    if a.chunks:
        command += ["--max-tokens", str(a.chunks * a.context)]
    done = run("linnet", command, a.limit)
    r = json.loads(done.stdout)
    row = dict(engine="linnet", perplexity=r["perplexity"], error=r["perplexity_error"],
               chunks=r["chunks"], device=r["device"], tok_s=r["tok_s"])
    return row, by_chunk(re.findall(r"chunk \d+: perplexity so far ([0-9.]+)", done.stderr))


def llama(a, text):
    # --no-escape: or it reads "\n" in the text as a line's end
    command = [a.program, "-m", a.gguf, "-f", text, "--no-escape", "-c", str(a.context),
               *threads(a), *a.peer_options.split()]
    if a.chunks:
        command += ["--chunks", str(a.chunks)]
    done = run("llama.cpp", command, a.limit)
    out = done.stdout + done.stderr
    final = re.search(r"Final estimate: PPL = ([0-9.]+) \+/- ([0-9.]+)", out)
    chunks = re.search(r"calculating perplexity over (\d+) chunks", out)
    if not final or not chunks:
        fail("llama.cpp", out.strip()[-300:], 1)
    row = dict(engine="llama.cpp", perplexity=float(final[1]), error=float(final[2]),
               chunks=int(chunks[1]))
    return row, by_chunk(re.findall(r"\[\d+\]([0-9.]+),", out))


def threads(a):
    return ["-t", str(a.threads)] if a.threads else []


def compare(a, path):
    """Prints a text's rows; returns by how much the logarithm differs, chunk by chunk."""
    with tempfile.NamedTemporaryFile(suffix=".txt") as text:
        # llama-perplexity leaves out a line's end at the end of a file
        text.write(Path(path).read_bytes().rstrip(b"\n"))
        text.flush()
        (ours, our_chunks), (theirs, their_chunks) = linnet(a, text.name), llama(a, text.name)
    print(json.dumps(dict(text=path, **ours)))
    print(json.dumps(dict(text=path, **theirs)))
    if ours["chunks"] != theirs["chunks"]:
        fail("both", "they cut the text into different numbers of chunks: other tokens?", 1)
    if not len(our_chunks) == len(their_chunks) == ours["chunks"]:
        fail("both", "not every chunk's perplexity was found in what they print", 1)
    return [x - y for x, y in zip(our_chunks, their_chunks)]


def summary(differences, **more):
    mean, n = statistics.mean(differences), len(differences)
    error = statistics.stdev(differences) / math.sqrt(n) if n > 1 else None
    row = dict(**more, chunks=n, ratio=math.exp(mean), difference_percent=100 * math.expm1(mean))
    print(json.dumps(dict(**row, error_percent=error and 100 * error)))
    return row["difference_percent"]


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("texts", nargs="+", help="text files of at least two chunks")
    p.add_argument("--gguf", required=True)
    p.add_argument("--program", default="llama-perplexity")
    p.add_argument("--linnet", default=str(Path(__file__).parents[2] / "build/release/linnet"))
    p.add_argument("--context", type=int, default=512, help="tokens of a chunk")
    p.add_argument("--chunks", type=int, help="the first N only")
    p.add_argument("--threads", type=int)
    p.add_argument("--device", default="cpu", help="Linnet's; say in --peer-options what matches")
    p.add_argument("--peer-options", default="", help='as "-ctk f32 -ctv f32"')
    p.add_argument("--linnet-options", default="")
    p.add_argument("--limit", type=float, default=3600, help="seconds for each engine")
    p.add_argument("--within", type=float, help="exit 1 if they differ by more per cent than this, "
                   "all texts together")
    a = p.parse_args()
    for engine, program in (("llama.cpp", a.program), ("linnet", a.linnet)):
        if not shutil.which(program):
            fail(engine, f"not installed: {program}", 3)
    all_differences = []
    for path in a.texts:
        differences = compare(a, path)
        percent = summary(differences, text=path)
        all_differences += differences
    if len(a.texts) > 1:
        percent = summary(all_differences, text="all")
    sys.exit(a.within is not None and abs(percent) > a.within)


if __name__ == "__main__":
    main()
