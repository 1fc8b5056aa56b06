#!/usr/bin/env python3
"""Throughput against latency of a server that speaks OpenAI's API, at several rates of arrival.

    load.py --url http://127.0.0.1:8000 --rates 1,2,4,8,inf --requests 200 --csv load.csv
    load.py --dataset ShareGPT_V3_unfiltered_cleaned_split.json --rates 2,4

Requests arrive as a Poisson process (inf: all at once) and are streamed. Their lengths are random
(--input, --output: the mean and, behind a colon, the share by which it may be more or less; the
prompts are random token ids) or a dataset's, in the form of ShareGPT and with the filter of vLLM's
benchmark: the first two turns of a conversation, prompts of 4 to 1024 tokens, at most 2048 with
the answer, whose length is the one that is asked for. No answer ends early (ignore_eos).

A line a rate. Times: ttft from sending to the first token, itl between two chunks, tpot the mean
time of a token after the first, e2e to the last. Percentiles are of the requests that completed;
those refused (429) or failed are counted beside.
"""
import argparse
import asyncio
import csv
import json
import random
import sys
import time

from client import Refused, Server

KINDS = "ttft", "itl", "tpot", "e2e"
COLUMNS = ["rate", "requests", "completed", "refused", "failed", "seconds", "most_at_once", "requests_s", "input_tok_s",
           "output_tok_s", "total_tok_s"] + [f"{kind}_{q}_ms" for kind in KINDS for q in ("mean", "p50", "p90", "p99")]


def percentile(values, share):
    """Between the two nearest, as numpy does."""
    if not values:
        return float("nan")
    values = sorted(values)
    at = share * (len(values) - 1)
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


def length(text, rng):
    mean, _, spread = text.partition(":")
    mean, spread = int(mean), float(spread or 0)
    return rng.randint(max(1, round(mean * (1 - spread))), max(1, round(mean * (1 + spread))))


def random_requests(args, rng, n):
    for _ in range(n):
        prompt = [rng.randrange(args.vocabulary) for _ in range(length(args.input, rng))]
        yield prompt, length(args.output, rng)


async def read_dataset(path, server, rng, most):
    """Prompts and lengths of answers, in random order."""
    with open(path) as file:
        talks = [t.get("conversations") or t.get("conversation") or [] for t in json.load(file)]
    talks = [t for t in talks if len(t) >= 2]
    rng.shuffle(talks)
    found = []
    for talk in talks:
        prompt, answer = talk[0]["value"], talk[1]["value"]
        if not prompt or not answer:
            continue
        n_prompt, n_answer = [(await server.ask("POST", "/tokenize", {"prompt": text}))["count"] for text in (prompt, answer)]
        if 4 <= n_prompt <= 1024 and n_answer >= 4 and n_prompt + n_answer <= 2048:
            found.append((prompt, n_answer))
        if len(found) == most:
            break
    if not found:
        sys.exit(f"{path}: no conversation passes the filter")
    return found


class Run:
    """What one rate gave."""

    def __init__(self):
        self.times = {kind: [] for kind in KINDS}
        self.completed = self.refused = self.failed = self.input = self.output = 0
        self.at_once = self.most_at_once = 0

    async def one(self, server, args, prompt, n_tokens):
        body = {"model": args.model, "prompt": prompt, "max_tokens": n_tokens, "temperature": args.temperature,
                "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        begun, arrivals, usage = time.perf_counter(), [], None
        try:
            async for event in server.events("/v1/completions", body):
                if "error" in event:
                    raise ConnectionError(event["error"]["message"])
                if any(c.get("token_ids") or c.get("text") for c in event["choices"]):
                    arrivals.append(time.perf_counter())
                usage = event.get("usage") or usage
            if not usage or not arrivals:
                raise ConnectionError("the stream ended early")
        except Refused as e:
            self.refused += e.status == 429
            self.failed += e.status != 429
            return self.complain(e if e.status != 429 else None)
        except (OSError, EOFError, ValueError) as e:
            self.failed += 1
            return self.complain(e)
        finally:
            self.at_once -= 1
        n = usage["completion_tokens"]
        self.completed += 1
        self.input += usage["prompt_tokens"]
        self.output += n
        self.times["ttft"].append(arrivals[0] - begun)
        self.times["e2e"].append(arrivals[-1] - begun)
        self.times["itl"] += [b - a for a, b in zip(arrivals, arrivals[1:])]
        if n > 1:
            self.times["tpot"].append((arrivals[-1] - arrivals[0]) / (n - 1))

    def complain(self, error):
        if error and self.failed == 1:
            print(f"the first failure: {error!r}", file=sys.stderr)

    def row(self, rate, n, seconds):
        row = {"rate": rate, "requests": n, "completed": self.completed, "refused": self.refused, "failed": self.failed,
               "seconds": seconds, "most_at_once": self.most_at_once, "requests_s": self.completed / seconds,
               "input_tok_s": self.input / seconds, "output_tok_s": self.output / seconds,
               "total_tok_s": (self.input + self.output) / seconds}
        for kind, values in self.times.items():
            row[f"{kind}_mean_ms"] = 1e3 * sum(values) / len(values) if values else float("nan")
            for q in 50, 90, 99:
                row[f"{kind}_p{q}_ms"] = 1e3 * percentile(values, q / 100)
        return row


async def at_rate(server, args, rng, rate, requests):
    run, tasks = Run(), []
    begun = due = time.perf_counter()
    for prompt, n_tokens in requests:
        await asyncio.sleep(max(0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(run.one(server, args, prompt, n_tokens)))
        due += rng.expovariate(rate) if rate != float("inf") else 0
    await asyncio.gather(*tasks)
    return run.row(rate, len(tasks), time.perf_counter() - begun)


def show(rows):
    narrow = [c for c in COLUMNS if "mean" not in c and c not in ("requests", "input_tok_s", "total_tok_s")]
    if len(rows) == 1:
        print("  ".join(f"{c.removesuffix('_ms'):>{max(7, len(c.removesuffix('_ms')))}}" for c in narrow) + "   (times in ms)")
    print("  ".join(f"{rows[-1][c]:>{max(7, len(c.removesuffix('_ms')))}.4g}" for c in narrow), flush=True)


async def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key")
    parser.add_argument("--model", help="default: the server's first")
    parser.add_argument("--rates", default="1,2,4,8,inf", help="requests a second (default %(default)s)")
    parser.add_argument("--requests", type=int, default=200, help="of each rate (default %(default)s)")
    parser.add_argument("--dataset", metavar="FILE", help="conversations as ShareGPT's; default: random tokens")
    parser.add_argument("--input", default="256:0.5", metavar="N[:SHARE]", help="random prompts (default %(default)s)")
    parser.add_argument("--output", default="64:0.5", metavar="N[:SHARE]", help="random answers (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", metavar="FILE")
    args = parser.parse_args()
    server, rng, rows = Server(args.url, args.api_key), random.Random(args.seed), []
    models = (await server.ask("GET", "/v1/models"))["data"]
    args.model = args.model or models[0]["id"]
    args.vocabulary = models[0].get("meta", {}).get("n_vocab", 1000)
    rates = [float(r) for r in args.rates.split(",")]
    found = await read_dataset(args.dataset, server, rng, args.requests * len(rates)) if args.dataset else None
    await Run().one(server, args, [1, 2, 3], 2)  # the first request warms up
    for i, rate in enumerate(rates):
        if found:  # other ones at each rate, as far as there are: a prompt seen before is cheaper
            requests = [found[(i * args.requests + k) % len(found)] for k in range(args.requests)]
        else:
            requests = list(random_requests(args, rng, args.requests))
        rows.append(await at_rate(server, args, rng, rate, requests))
        show(rows)
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows({k: f"{v:.6g}" for k, v in row.items()} for row in rows)
    return any(row["failed"] for row in rows)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
