"""HTTP/1.1 over asyncio's sockets, and a server of one's own: no more than the scripts beside need."""
import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse


class Refused(Exception):
    """A reply that is no answer."""

    def __init__(self, status, body):
        super().__init__(f"{status}: {body[:200].decode(errors='replace')}")
        self.status = status


class Server:
    def __init__(self, url, key=None):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http":
            raise ValueError(f"{url}: only http:// is spoken here")
        self.host, self.port = parts.hostname, parts.port or 80
        self.headers = f"Host: {parts.netloc}\r\n" + (f"Authorization: Bearer {key}\r\n" if key else "")

    def message(self, method, path, body=None, close=False):
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\n{self.headers}Content-Length: {len(data)}\r\n"
        return (head + ("Connection: close\r\n" if close else "") + "Content-Type: application/json\r\n\r\n").encode() + data

    async def open(self):
        return await asyncio.open_connection(self.host, self.port, limit=1 << 24)

    async def ask(self, method, path, body=None):
        """The JSON (or text) of a reply."""
        reader, writer = await self.open()
        try:
            writer.write(self.message(method, path, body, close=True))
            status, headers = await read_head(reader)
            data = b"".join([piece async for piece in read_body(reader, headers)])
        finally:
            writer.close()
        if status != 200:
            raise Refused(status, data)
        return json.loads(data) if "json" in headers.get("content-type", "") else data.decode()

    async def events(self, path, body):
        """The events of a stream, as they come."""
        reader, writer = await self.open()
        try:
            writer.write(self.message("POST", path, body, close=True))
            status, headers = await read_head(reader)
            rest = b""
            async for piece in read_body(reader, headers):
                rest += piece
                if status != 200:
                    continue
                *whole, rest = rest.split(b"\n\n")
                for event in whole:
                    if event.startswith(b"data: {"):
                        yield json.loads(event[6:])
            if status != 200:
                raise Refused(status, rest)
        finally:
            writer.close()


async def read_head(reader):
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return int(lines[0].split()[1]), headers


async def read_body(reader, headers):
    if headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        yield await reader.read()


@contextlib.contextmanager
def started(linnet, options, seconds=120):
    """A server of one's own, which has said where it listens: (Server, its process). It is told to
    stop at the end, and stopped if it does not within a minute."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([linnet, "serve", *options, "--port", "0", "--log-format", "none"], stdout=log, stderr=log)
        try:
            end = time.monotonic() + seconds
            while True:
                log.seek(0)
                text = log.read()
                found = re.search(r"http://\S+", text)
                if found:
                    break
                if process.poll() is not None or time.monotonic() > end:
                    sys.exit(f"the server did not start: {text}")
                time.sleep(0.002)
            yield Server(found.group().rstrip("/.,")), process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
