"""Many clients at once, clients that leave, and clients that do not read, against one server.

`python tests/programs/server_load.py --clients 1000` starts a server with 8 slots and a queue of
64, and prints a line of figures for each part; `--url URL --pid PID` uses a running server.
server/test_server_load.py calls the parts with small numbers. HTTP is spoken over plain sockets, so
that a client can leave, or stop reading, at any byte.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from helpers.server import run_server

FLAGS = ("--max_batch_size", "8", "--max_queue", "64", "--max_seq_len", "512", "--dtype", "fp32")
PATH = "/v1/completions"
LONGEST_RETRY_S = 2.0  # a client of this test retries sooner than the server asks
SETTLE_S = 60.0


class Client:
    """Requests to one server, each over a connection of its own."""

    def __init__(self, url: str, seed: int = 0, source: str = "127.0.0.1") -> None:
        self.url = url
        self.source = source
        address = urlsplit(url)
        self._host, self._port = str(address.hostname), int(address.port or 80)
        self.draw = random.Random(seed)

    async def connect(
        self, limit: int = 2**16
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(
            self._host, self._port, limit=limit, local_addr=(self.source, 0)
        )

    async def send(
        self, body: dict[str, Any], *, path: str = PATH, limit: int = 2**16
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self.connect(limit)
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        await writer.drain()
        return reader, writer

    async def post(
        self, body: dict[str, Any], *, path: str = PATH
    ) -> tuple[int, dict[str, str], bytes]:
        """Return the status, the headers by their lower-case names, and the body."""
        reader, writer = await self.send(body, path=path)
        answer = await reader.read()
        writer.close()
        head, _, content = answer.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (x.partition(": ") for x in lines)}
        return int(first.split()[1]), headers, content

    def body(self, max_tokens: int, **fields: Any) -> dict[str, Any]:
        prompt = [self.draw.randrange(1000) for _ in range(self.draw.randint(1, 40))]
        return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **fields}


async def flood(client: Client, clients: int, max_tokens: int = 16) -> Counter[int]:
    """Send all requests at once, each repeated after 503; return how often each status came."""
    statuses: Counter[int] = Counter()

    async def one() -> None:
        body = client.body(max_tokens)
        while True:
            status, headers, content = await client.post(body)
            statuses[status] += 1
            if status != 503:
                break
            wait = min(LONGEST_RETRY_S, float(headers["retry-after"]))
            await asyncio.sleep(wait * client.draw.uniform(0.5, 1.0))
        if status == 200:
            assert json.loads(content)["usage"]["completion_tokens"] == max_tokens

    await asyncio.gather(*(one() for _ in range(clients)))
    return statuses


async def disconnects(client: Client, count: int, at_once: int = 12) -> int:
    """Let clients leave at random moments, streaming and not; return how many had an answer by
    then.
    """
    places, answered = asyncio.Semaphore(at_once), []

    async def one(number: int) -> None:
        async with places:
            stream = bool(number % 2)
            body = client.body(400, stream=stream, n=client.draw.choice((1, 1, 3)))
            reader, writer = await client.send(body)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(client.draw.expovariate(1 / 0.15)):
                    answered.append(await reader.read(1))
                    await asyncio.sleep(1)
            writer.transport.abort()

    await asyncio.gather(*(one(i) for i in range(count)))
    return len(answered)


async def slow_readers(
    client: Client, count: int, others: int, max_tokens: int = 400
) -> tuple[float, float]:
    """Return the median time of a small request, alone and alongside streams that nobody reads.

    The kernel's buffers can hold these; server/test_shut_out.py has streams that do not fit there.
    """
    alone = await _times(client, others)
    body = client.body(max_tokens, stream=True, logprobs=5)
    stuck = [await client.send(body, limit=1) for _ in range(count)]
    await asyncio.sleep(0.2)
    beside = await _times(client, others)
    await settle(client)  # they were computed to their end
    for _, writer in stuck:
        writer.transport.abort()
    return alone, beside


async def _times(client: Client, count: int) -> float:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        status, _, _ = await client.post(client.body(8))
        assert status == 200
        times.append(time.perf_counter() - began)
    return statistics.median(times)


async def settle(client: Client, prefix: str = "") -> None:
    """Wait until nothing runs or waits, and every page is free; the prefix names a replica."""
    end = time.monotonic() + SETTLE_S
    wanted = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    async with httpx.AsyncClient(base_url=client.url + prefix) as http:
        while True:
            text = (await http.get("/metrics")).text
            found = {name: figure(text, name) for name in wanted}
            load = (await http.get("/load")).json()["server_load"]
            if not load and not any(found.values()):
                return
            assert time.monotonic() < end, (load, found)
            await asyncio.sleep(0.05)


def figure(text: str, name: str) -> float:
    """Return the value of one line of /metrics."""
    found = re.search(rf"^llama:{re.escape(name)} (\S+)$", text, re.M)
    assert found, f"{name} is not in\n{text}"
    return float(found[1])


def resident_mb(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) / 1024


async def run_all(url: str, pid: int, clients: int) -> None:
    client = Client(url)
    await flood(client, min(clients, 64))  # keeps what the first requests allocate
    for name, part in (
        ("flood", lambda: flood(client, clients)),
        ("disconnects", lambda: disconnects(client, clients)),
        ("slow_readers", lambda: slow_readers(client, 6, max(5, clients // 20))),
        ("flood", lambda: flood(client, clients)),
        ("disconnects", lambda: disconnects(client, clients)),
    ):
        before, began = resident_mb(pid), time.monotonic()
        found = await part()
        await settle(client)
        seconds = time.monotonic() - began
        print(f"{name}: {found}, {seconds:.1f} s, RSS {before:.1f} -> {resident_mb(pid):.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--url")
    parser.add_argument("--pid", type=int)
    options = parser.parse_args()
    if options.url:
        asyncio.run(run_all(options.url, options.pid, options.clients))
        return
    with run_server(*FLAGS) as server:
        asyncio.run(run_all(server.url, server.process.pid, options.clients))
        assert server.stop() == 0


if __name__ == "__main__":
    main()
