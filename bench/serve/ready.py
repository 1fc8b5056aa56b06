#!/usr/bin/env python3
"""How long a server takes from the start of its process until /health says that it is ready.

    ready.py --linnet build/release/linnet --runs 5       # the model that script/quickstart installed
"""
import argparse
import asyncio
import os
import statistics
import time

from client import Refused, started


async def until_ready(server):
    while True:
        try:
            return await server.ask("GET", "/health")
        except (OSError, EOFError, Refused):
            await asyncio.sleep(0.002)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    p.add_argument("--linnet", default=os.path.join(root, "build/release/linnet"))
    p.add_argument("--options", default="--device cpu", type=str.split, help="of the server: model, device, memory")
    p.add_argument("--runs", type=int, default=5)
    args = p.parse_args()
    times = []
    for _ in range(args.runs):
        begun = time.perf_counter()
        with started(args.linnet, args.options) as (server, _):
            asyncio.run(asyncio.wait_for(until_ready(server), 60))
            times.append(time.perf_counter() - begun)
    print("ready after", ", ".join(f"{t:.3f}" for t in times), f"s; median {statistics.median(times):.3f}")


if __name__ == "__main__":
    main()
