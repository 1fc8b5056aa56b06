#!/usr/bin/env python3
"""Many clients for a long time on a crowded server: what must hold is checked, and exits not 0.

    soak.py --linnet build/release/linnet --seconds 600 --clients 64

Starts a server with little cache and a short queue, so that it preempts and refuses. First each
kind of request is asked alone. Then clients ask at random: whole or streamed, one answer or
several, with and without stop texts; some hang up at any time, wait, or read slowly. Checked: each
complete answer is the one that the request got alone; every request ends within --patience seconds;
at the end nothing runs or waits, every block is back, and, if it took five minutes, memory is within
2% of its level after the first fifth of the time.
"""
import argparse
import asyncio
import os
import random
import re
import sys
import time

from client import Refused, started

KINDS = 48  # of requests


def kind(i):
    """One of the requests; the same each time it is asked for."""
    r = random.Random(i)
    words = " ".join(r.choice(["the", "first", "number", "of", "all", "others", "is", "last"])
                     for _ in range(r.choice([2, 5, 20, 60])))
    body = {"prompt": words, "max_tokens": r.choice([1, 5, 20, 60, 120]), "seed": i, "ignore_eos": True,
            "temperature": r.choice([0, 0.8, 1.5]), "n": r.choice([1, 1, 1, 2, 4]), "priority": r.choice([0, 0, 0, 1, -1])}
    if r.random() < 0.3:
        body["stop"] = r.sample(["e", "a", " t", "\n"], 2)
    if r.random() < 0.2:
        body["logprobs"] = 2
    return body


def texts(choices, n):
    """Of a whole answer's choices, or of a stream's."""
    parts = [""] * n
    for c in choices:
        parts[c["index"]] += c["text"]
    return parts


class Soak:
    def __init__(self, args, server):
        self.args, self.server = args, server
        self.alone, self.wrong = [], []
        self.counts = dict.fromkeys(["complete", "left", "refused"], 0)

    async def ask(self, i, stream):
        body = kind(i)
        if not stream:
            reply = await self.server.ask("POST", "/v1/completions", body)
            return texts(reply["choices"], body["n"])
        choices = []
        async for event in self.server.events("/v1/completions", dict(body, stream=True)):
            if "error" in event:
                raise ValueError(event["error"])
            choices += event["choices"]
            if random.random() < 0.02:
                await asyncio.sleep(0.2)  # a slow reader
        return texts(choices, body["n"])

    async def leave(self, i):
        """Asks and hangs up somewhere."""
        reader, writer = await self.server.open()
        message = self.server.message("POST", "/v1/completions", dict(kind(i), stream=random.random() < 0.5))
        try:
            writer.write(message[: random.choice([len(message), len(message), len(message) // 2])])
            await writer.drain()
            await asyncio.sleep(random.random() * 0.3)
            if random.random() < 0.5:
                await asyncio.wait_for(reader.read(random.randrange(1, 400)), 1)
        finally:
            writer.close()

    async def client(self, end):
        while time.monotonic() < end:
            i = random.randrange(KINDS)
            try:
                if random.random() < 0.15:
                    try:
                        await self.leave(i)
                    except asyncio.TimeoutError:
                        pass
                    self.counts["left"] += 1
                    continue
                got = await asyncio.wait_for(self.ask(i, random.random() < 0.6), self.args.patience)
                self.counts["complete"] += 1
                if got != self.alone[i]:
                    self.wrong.append(f"kind {i}: {got!r} is not {self.alone[i]!r}")
            except Refused as e:
                self.counts["refused"] += 1
                if e.status != 429:
                    self.wrong.append(f"kind {i}: {e}")
                await asyncio.sleep(0.05)
            except asyncio.TimeoutError:
                self.wrong.append(f"kind {i}: not answered within {self.args.patience} s")
            except (OSError, ValueError, EOFError) as e:
                self.wrong.append(f"kind {i}: {e!r}")


def resident(pid):
    with open(f"/proc/{pid}/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def metric(server, name):
    found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)", await server.ask("GET", "/metrics"), re.M)
    return float(found.group(1)) if found else float("nan")


async def wait_until_idle(server):
    for _ in range(100):
        if await metric(server, "linnet:num_requests_running") + await metric(server, "linnet:num_requests_waiting") == 0:
            return True
        await asyncio.sleep(0.1)
    return False


async def soak(args, server, pid):
    s = Soak(args, server)
    for i in range(KINDS):
        s.alone.append(await s.ask(i, False))
    begun = time.monotonic()
    clients = [asyncio.create_task(s.client(begun + args.seconds)) for _ in range(args.clients)]
    levels = []
    while not all(c.done() for c in clients):
        await asyncio.sleep(min(args.seconds / 20, 10))
        levels.append((time.monotonic() - begun, resident(pid)))
        print(f"{levels[-1][0]:6.0f} s  {levels[-1][1]:8.1f} MiB  {s.counts}  wrong {len(s.wrong)}", flush=True)
    await asyncio.gather(*clients)
    if not await wait_until_idle(server):
        s.wrong.append("requests run or wait although nobody asks")
    used = await metric(server, "linnet:kv_cache_usage_perc")
    preempted = await metric(server, "linnet:num_preemptions_total")
    if used != 0:
        s.wrong.append(f"{100 * used:.2f}% of the blocks did not come back")
    for i in range(KINDS):  # it still answers
        if await s.ask(i, True) != s.alone[i]:
            s.wrong.append(f"kind {i}: another answer at the end")
    warm = next(m for t, m in levels if t >= args.seconds / 5)
    last = resident(pid)
    print(f"memory {warm:.1f} MiB after a fifth, {last:.1f} at the end ({100 * (last / warm - 1):+.2f}%); "
          f"{preempted:.0f} preemptions; {s.counts}")
    if args.seconds >= 300 and last > warm * 1.02:
        s.wrong.append("memory has grown by more than 2%")
    if s.counts["refused"] == 0:
        s.wrong.append("no request was refused: the load is too light")
    if not preempted > 0:
        s.wrong.append("nothing was preempted: the load is too light")
    for w in s.wrong[:20]:
        print("WRONG", w[:500])
    print(f"{len(s.wrong)} wrong")
    return 1 if s.wrong else 0


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    p.add_argument("--linnet", default=os.path.join(root, "build/release/linnet"))
    p.add_argument("--model", default=os.path.join(root, "tests/data/qwen3-tiny"))
    p.add_argument("--kv-cache-memory", default="640K")
    p.add_argument("--max-model-len", default="256")
    p.add_argument("--clients", type=int, default=64)
    p.add_argument("--seconds", type=float, default=600)
    p.add_argument("--patience", type=float, default=60, help="seconds that an answer may take")
    args = p.parse_args()
    options = ["-m", args.model, "--device", "cpu", "--kv-cache-memory", args.kv_cache_memory, "-c", args.max_model_len,
               "--max-num-seqs", "16", "--max-queue-requests", "24"]
    with started(args.linnet, options) as (server, process):
        status = asyncio.run(soak(args, server, process.pid))
    if process.returncode != 0:
        print("WRONG the server ended with", process.returncode)
        status = 1
    sys.exit(status)


if __name__ == "__main__":
    main()
