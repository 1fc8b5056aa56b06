#!/usr/bin/env python3
"""What HTTP costs: the engine's decoding speed behind the server beside that of `linnet bench`.

    overhead.py --linnet build/release/linnet --batch 16 --pairs 5

In turns: `linnet bench` with so many sequences, and a server that so many clients ask for as many
tokens, after a prompt of the same length. Both speeds are of the time in which all sequences decode, if all
prompts fit one step (--batch times --prompt, on the CPU at most 512); the server's is from the tokens
that its /metrics has counted. The machine should do nothing else.
"""
import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time

from client import started


def bench(args):
    out = subprocess.run(
        [args.linnet, "bench", *args.options, "--batch", str(args.batch), "--prompt", str(args.prompt),
         "--generated", str(args.generated), "--repeat", "1", "--json"], stdout=subprocess.PIPE, text=True, check=True)
    return next(r["tok_s"] for r in json.loads(out.stdout) if r["what"] == "decode")


async def counts(server):
    text = await server.ask("GET", "/metrics")
    return [float(re.search(rf"^linnet:{name}(?:{{[^}}]*}})? (\S+)", text, re.M).group(1))
            for name in ("prompt_tokens_total", "generation_tokens_total")]


async def served(args, server):
    prompts, generated = await counts(server)
    bodies = [{"prompt": [random.randrange(1, 1000) for _ in range(args.prompt)], "max_tokens": args.generated,
               "ignore_eos": True, "temperature": 0} for _ in range(args.batch)]
    asked = [asyncio.create_task(server.ask("POST", "/v1/completions", b)) for b in bodies]
    first = last = None
    while not any(a.done() for a in asked):
        read, written = await counts(server)
        now = time.perf_counter()
        if read - prompts >= args.batch * args.prompt and written - generated >= 2 * args.batch:
            first = first or (now, written)
            last = now, written
        await asyncio.sleep(0.25)
    await asyncio.gather(*asked)
    if not first or last[0] - first[0] < 1:
        sys.exit("too short to measure: raise --generated")
    return (last[1] - first[1]) / (last[0] - first[0])


def serve(args):
    with started(args.linnet, [*args.options, "--max-num-seqs", str(args.batch)]) as (server, _):
        return asyncio.run(served(args, server))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    p.add_argument("--linnet", default=os.path.join(root, "build/release/linnet"))
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--prompt", type=int, default=32)
    p.add_argument("--generated", type=int, default=256)
    p.add_argument("--pairs", type=int, default=5)
    p.add_argument("--options", default="--device cpu --kv-cache-memory 512M", type=str.split,
                   help="of both: model, device, memory")
    args = p.parse_args()
    ratios = []
    for i in range(args.pairs):
        ways = [bench, serve] if i % 2 else [serve, bench]
        speed = {way: way(args) for way in ways}
        ratios.append(speed[serve] / speed[bench])
        print(f"bench {speed[bench]:8.1f} tokens/s, served {speed[serve]:8.1f}: {ratios[-1]:.3f}", flush=True)
    print(f"median of {args.pairs}: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
