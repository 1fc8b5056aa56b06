#!/usr/bin/env python3
"""How long a server takes from the start of its process until /health says that it is ready.

    ready.py --linnet build/release/linnet --runs 5       # the model that script/quickstart installed
"""
import argparse
import asyncio
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from client import Refused, Server


async def until_ready(process, log, begun):
    while time.perf_counter() - begun < 60:
        log.seek(0)
        found = re.search(r"http://\S+", log.read())
        try:
            if found:
                await Server(found.group().rstrip("/.,")).ask("GET", "/health")
                return time.perf_counter() - begun
        except (OSError, EOFError, Refused):
            pass
        if process.poll() is not None:
            break
        await asyncio.sleep(0.002)
    log.seek(0)
    sys.exit(f"the server is not ready: {log.read()}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    p.add_argument("--linnet", default=os.path.join(root, "build/release/linnet"))
    p.add_argument("--options", default="--device cpu", type=str.split, help="of the server: model, device, memory")
    p.add_argument("--runs", type=int, default=5)
    args = p.parse_args()
    times = []
    for _ in range(args.runs):
        with tempfile.TemporaryFile("w+") as log:
            begun = time.perf_counter()
            process = subprocess.Popen([args.linnet, "serve", *args.options, "--port", "0", "--log-format", "none"],
                                       stdout=log, stderr=log)
            try:
                times.append(asyncio.run(until_ready(process, log, begun)))
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
    print("ready after", ", ".join(f"{t:.3f}" for t in times), f"s; median {statistics.median(times):.3f}")


if __name__ == "__main__":
    main()
