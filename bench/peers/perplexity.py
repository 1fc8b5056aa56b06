#!/usr/bin/env python3
"""Perplexity of one GGUF file on one text by Linnet and by llama.cpp's llama-perplexity.

A JSON line each, then one with the ratio of the perplexities. Both get the same bytes, take them
literally and count alike: chunks of --context tokens, the second half of each scored.
"""
import argparse
import json
import re
import shutil
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
    return done.stdout + done.stderr if engine == "llama.cpp" else done.stdout


def linnet(a, text):
    command = [a.linnet, "perplexity", "--json", "-m", a.gguf, "-c", str(a.context),
               "--device", a.device, *threads(a), *a.linnet_options.split(), "--file", text]
    if a.chunks:
        command += ["--max-tokens", str(a.chunks * a.context)]
    r = json.loads(run("linnet", command, a.limit))
    return dict(engine="linnet", perplexity=r["perplexity"], error=r["perplexity_error"],
                chunks=r["chunks"], device=r["device"], tok_s=r["tok_s"])


def llama(a, text):
    # --no-escape: or it reads "\n" in the text as a line's end
    command = [a.program, "-m", a.gguf, "-f", text, "--no-escape", "-c", str(a.context),
               *threads(a), *a.peer_options.split()]
    if a.chunks:
        command += ["--chunks", str(a.chunks)]
    out = run("llama.cpp", command, a.limit)
    final = re.search(r"Final estimate: PPL = ([0-9.]+) \+/- ([0-9.]+)", out)
    chunks = re.search(r"calculating perplexity over (\d+) chunks", out)
    if not final or not chunks:
        fail("llama.cpp", out.strip()[-300:], 1)
    return dict(engine="llama.cpp", perplexity=float(final[1]), error=float(final[2]),
                chunks=int(chunks[1]))


def threads(a):
    return ["-t", str(a.threads)] if a.threads else []


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("text", help="a text file of at least two chunks")
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
    p.add_argument("--within", type=float, help="exit 1 if they differ by more per cent than this")
    a = p.parse_args()
    for engine, program in (("llama.cpp", a.program), ("linnet", a.linnet)):
        if not shutil.which(program):
            fail(engine, f"not installed: {program}", 3)
    with tempfile.NamedTemporaryFile(suffix=".txt") as text:
        # llama-perplexity leaves out a line's end at the end of a file
        text.write(Path(a.text).read_bytes().rstrip(b"\n"))
        text.flush()
        ours, theirs = linnet(a, text.name), llama(a, text.name)
    print(json.dumps(ours))
    print(json.dumps(theirs))
    if ours["chunks"] != theirs["chunks"]:
        fail("both", "they cut the text into different numbers of chunks: other tokens?", 1)
    ratio = ours["perplexity"] / theirs["perplexity"]
    print(json.dumps(dict(ratio=ratio, difference_percent=100 * (ratio - 1))))
    sys.exit(a.within is not None and abs(100 * (ratio - 1)) > a.within)


if __name__ == "__main__":
    main()
