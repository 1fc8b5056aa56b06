#!/usr/bin/env python3
"""How many requests for one token a second a server answers, over connections that stay open.

    one_token.py --url http://127.0.0.1:8000 --connections 1,16,64 --seconds 5

Each connection sends its next request when the answer to the one before is there. The client is
Python and takes processor time itself: the server's own time a request is therefore shown beside,
from its process_cpu_seconds_total, where it has one.
"""
import argparse
import asyncio
import re
import sys
import time

from client import Server, read_body, read_head
from load import percentile


async def worker(server, message, end, latencies):
    reader, writer = await server.open()
    begun = time.perf_counter()
    while True:  # one at least
        writer.write(message)
        status, headers = await read_head(reader)
        body = b"".join([piece async for piece in read_body(reader, headers)])
        if status != 200:
            sys.exit(f"{status}: {body.decode(errors='replace')}")
        now = time.perf_counter()
        latencies.append(now - begun)
        if now >= end:
            break
        begun = now
    writer.close()


async def server_seconds(server):
    try:
        text = await server.ask("GET", "/metrics")
    except Exception:
        return float("nan")
    found = re.search(r"^process_cpu_seconds_total (\S+)", text, re.M)
    return float(found.group(1)) if found else float("nan")


async def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key")
    parser.add_argument("--connections", default="1,16,64")
    parser.add_argument("--seconds", type=float, default=5)
    args = parser.parse_args()
    server = Server(args.url, args.api_key)
    model = (await server.ask("GET", "/v1/models"))["data"][0]["id"]
    message = server.message("POST", "/v1/completions", {"model": model, "prompt": [1], "max_tokens": 1, "temperature": 0})
    print("connections  requests/s   p50 ms   p99 ms  server ms  client ms   (processor time a request)")
    for n in (int(c) for c in args.connections.split(",")):
        latencies = []
        server_begun, client_begun, begun = await server_seconds(server), time.process_time(), time.perf_counter()
        await asyncio.gather(*[worker(server, message, begun + args.seconds, latencies) for _ in range(n)])
        seconds, count = time.perf_counter() - begun, len(latencies)
        client = time.process_time() - client_begun
        used = await server_seconds(server) - server_begun
        print(f"{n:11d}  {count / seconds:10.0f}  {1e3 * percentile(latencies, .5):7.2f}  {1e3 * percentile(latencies, .99):7.2f}  "
              f"{1e3 * used / count:9.3f}  {1e3 * client / count:9.3f}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
