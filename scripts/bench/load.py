"""Clients of a server: streams of OpenAI's completions, and the times of their events.

In: a URL, prompts as ids, how many at once or how many per second. Out: `Timing` for each request.
It speaks HTTP over plain sockets: a client that computes much would slow the server alongside it.
"""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

MODEL = "bench"  # the name that servers are started with


@dataclass
class Timing:
    """The times of one request: when it was sent, and when each event with a choice came."""

    began: float
    events: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        return self.events[0] - self.began

    @property
    def gaps(self) -> list[float]:
        return [late - soon for soon, late in zip(self.events, self.events[1:], strict=False)]


async def ask(url: str, model: str, prompt: list[int], count: int) -> Timing:
    """Send one streamed request of `count` tokens; raise RuntimeError where it is refused."""
    address = urlsplit(url)
    host, port = str(address.hostname), address.port or 80
    body = {
        "model": model, "prompt": prompt, "max_tokens": count, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    data = json.dumps(body).encode()
    head = (
        f"POST {address.path}/v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
        "Content-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    timing = Timing(time.perf_counter())
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(head.encode() + data)
        status = await reader.readline()
        if b" 200 " not in status:
            rest = (await reader.read(2000)).decode(errors="replace")
            raise RuntimeError(f"{url} answered {status.decode().strip()}: {rest[-500:]}")
        is_done = False
        while line := await reader.readline():
            if line.startswith(b"data: {") and b'"choices":[{' in line.replace(b" ", b""):
                timing.events.append(time.perf_counter())
            is_done = is_done or line.startswith(b"data: [DONE]")
    finally:
        writer.close()
    if not (is_done and timing.events):
        raise RuntimeError(f"{url} ended a stream after {len(timing.events)} events")
    return timing


async def closed_loop(send: Callable[[int], Awaitable[Timing]], count: int, at_once: int) -> Any:
    """Send `count` requests by `at_once` clients, each of which waits for its answers."""
    indices = iter(range(count))

    async def client() -> list[Timing]:
        return [await send(index) for index in indices]

    found = await asyncio.gather(*(client() for _ in range(at_once)))
    return [timing for own in found for timing in own]


async def open_loop(
    send: Callable[[int], Awaitable[Timing]], count: int, rate: float, seed: int
) -> list[Timing]:
    """Send `count` requests as a Poisson process of `rate` per second, without waiting."""
    draw = random.Random(seed)
    sent = []
    for number in range(count):
        sent.append(asyncio.ensure_future(send(number)))
        await asyncio.sleep(draw.expovariate(rate))
    return list(await asyncio.gather(*sent))


def figures(timings: list[Timing], tokens: int) -> dict[str, float]:
    """Return rates over the whole run, and percentiles of times in milliseconds."""
    seconds = max(t.events[-1] for t in timings) - min(t.began for t in timings)
    firsts = [1e3 * t.first for t in timings]
    gaps = [1e3 * gap for t in timings for gap in t.gaps] or [0.0]
    return {
        "seconds": seconds,
        "tokens_per_s": tokens * len(timings) / seconds,
        "requests_per_s": len(timings) / seconds,
        "first_p50": statistics.median(firsts),
        "first_p99": _percentile(firsts, 0.99),
        "between_p50": statistics.median(gaps),
        "between_p99": _percentile(gaps, 0.99),
    }


def _percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]
