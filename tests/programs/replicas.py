"""Measures two replicas of the demo model behind HAProxy: prefix hits, delay of events, a kill.

`python tests/programs/replicas.py hits` sends eight chats of ten turns at once to one server, to
two replicas, and to two replicas that are chosen at random, three times in turn. `delay` sends
streams of events with the time of their making through HAProxy and around it, in turn. `kill` sends
100 streams, kills a replica in their middle, and waits until it is back. `all` does all of it. The
last line is JSON. Needs HAProxy and an otherwise idle machine; the figures are in
docs/guides/replicas.md.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx

from helpers.server import RunningServer, run_server
from llama.cli.replicas.haproxy import Config, find_haproxy

CHAT = "/v1/chat/completions"
NUM_CHATS = 8
NUM_TURNS = 10
NUM_STREAMS = 100
NUM_TOKENS = 300
FLAGS = ("--replicas", "2", "--max_seq_len", "512", "--max_batch_size", "64")


async def hit_rate(
    url: str,
    name: str,
    *,
    is_random: bool = False,
    chats: int = NUM_CHATS,
    turns: int = NUM_TURNS,
    at_once: int = NUM_CHATS,
) -> float:
    """Return the share of prompt tokens that the prefix cache had, over all chats and turns.

    Args:
        url: The server.
        name: Part of all prompts, so that no other run has computed them.
        is_random: Whether each request chooses its replica at random.
        chats: Number of chats.
        turns: Turns of each chat.
        at_once: Number of chats that run at once.
    """
    slots = asyncio.Semaphore(at_once)

    async def chat(client: httpx.AsyncClient, i: int) -> tuple[int, int]:
        async with slots:
            return await _chat(client, url, f"{name} {i}", turns, is_random)

    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        counts = await asyncio.gather(*(chat(client, i) for i in range(chats)))
    return sum(cached for cached, _ in counts) / sum(total for _, total in counts)


async def _chat(
    client: httpx.AsyncClient, url: str, name: str, turns: int, is_random: bool
) -> tuple[int, int]:
    """Return the cached tokens and all tokens of the prompts of one chat."""
    messages = [{"role": "system", "content": f"You are {name.split()[0]}, who answers briefly."}]
    cached = 0
    total = 0
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{name} asks for the {turn}th time?"})
        body = {"model": "demo", "messages": messages, "max_tokens": 8, "temperature": 0}
        # The hash of this header spreads the turns; it is the same in each run.
        headers = {"X-Session-Id": f"{name} {turn}"} if is_random else {}
        response = await client.post(url + CHAT, json=body, headers=headers)
        answer = response.raise_for_status().json()
        cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        total += answer["usage"]["prompt_tokens"]
        messages.append(answer["choices"][0]["message"])
    return cached, total


def measure_hits(rounds: int = 3) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {"one": [], "two": [], "random": []}
    with run_server(*FLAGS) as server:
        for i in range(rounds):
            for name, url in (
                ("one", f"{server.url}/replicas/0"),
                ("two", server.url),
                ("random", server.url),
            ):
                rate = asyncio.run(hit_rate(url, f"{name}{i}", is_random=name == "random"))
                rates[name].append(round(rate, 3))
                print(f"round {i}, {name}: {rate:.3f} of the prompt tokens were cached")
    return rates


async def _stamped(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer with events that have the time of their making, one each 10 ms."""
    head = await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(0 if b"/ready" in head else 200):
        event = b"data: %d\n\n" % time.monotonic_ns()
        writer.write(b"%x\r\n%s\r\n" % (len(event), event))
        await writer.drain()
        await asyncio.sleep(0.01)
    writer.write(b"0\r\n\r\n")
    writer.close()


@contextlib.contextmanager
def _proxy(folder: Path) -> Iterator[str]:
    """Run HAProxy before the sockets of the folder, and yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = Config(
            sockets=[folder / "0.sock", folder / "1.sock"],
            listener=listener.fileno(),
            admin=folder / "admin.sock",
            num_threads=1,
            max_connections=100,
            max_per_address=100,
            drain_s=1,
        )
        process = subprocess.Popen(
            [find_haproxy(), "-db", "-f", str(config.write(folder))],
            pass_fds=[listener.fileno()],
            stderr=subprocess.DEVNULL,
        )
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            process.kill()
            process.wait()


async def _delays(client: httpx.AsyncClient, url: str) -> AsyncIterator[float]:
    """Yield the milliseconds from the making of each event to its arrival."""
    async with client.stream("POST", f"{url}{CHAT}", json={"messages": []}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                yield (time.monotonic_ns() - int(line.removeprefix("data: "))) / 1e6


async def measure_delay(rounds: int = 5, streams: int = 8) -> dict[str, list[float]]:
    """Return the median and the 90th percentile of the delay of events, in ms, of both ways."""
    delays: dict[str, list[float]] = {"direct": [], "HAProxy": []}

    async def collect(client: httpx.AsyncClient, url: str, name: str) -> None:
        delays[name] += [delay async for delay in _delays(client, url)]

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        backends = [
            await asyncio.start_unix_server(_stamped, folder / f"{i}.sock") for i in range(2)
        ]
        with _proxy(folder) as url:
            await asyncio.sleep(2.5)  # HAProxy has checked both.
            direct = httpx.AsyncHTTPTransport(uds=str(folder / "0.sock"))
            async with (
                httpx.AsyncClient(transport=direct, trust_env=False) as around,
                httpx.AsyncClient(trust_env=False, timeout=60) as through,
            ):
                for _ in range(rounds):
                    ways = ((around, "http://localhost", "direct"), (through, url, "HAProxy"))
                    for client, address, way in ways:
                        await asyncio.gather(
                            *(collect(client, address, way) for _ in range(streams))
                        )
        for backend in backends:
            backend.close()
    figures = {}
    for way, values in delays.items():
        tenths = statistics.quantiles(values, n=10)
        figures[way] = [round(statistics.median(values), 3), round(tenths[8], 3)]
        print(f"{way}: median {figures[way][0]} ms, 90th percentile {figures[way][1]} ms")
    return figures


async def _stream(
    client: httpx.AsyncClient, url: str, i: int, counts: list[int]
) -> tuple[str, bool]:
    """Return which replica answered a stream, and whether the stream was complete."""
    body = {"prompt": f"Story {i}:", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    replica = ""
    last = ""
    with contextlib.suppress(httpx.RemoteProtocolError):
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            replica = response.headers["X-Replica"]
            async for line in response.aiter_lines():
                counts[i] += line.startswith("data: ")
                last = line or last
    return replica, last == "data: [DONE]"


def process_of(server: RunningServer, index: int) -> int:
    """Return the process id of a replica."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            status = (path / "stat").read_text().rpartition(")")[2].split()
            command = (path / "cmdline").read_bytes()
            if int(status[1]) == server.process.pid and f"/{index}.sock".encode() in command:
                return int(path.name)
    raise AssertionError(f"replica {index} does not run")


async def kill_under_streams(
    server: RunningServer, num_streams: int, victim: int | None = None
) -> dict[str, Any]:
    """Kill a process in the middle of streams; return what became of them, and of replica 0.

    Args:
        server: The replicas.
        num_streams: The number of streams.
        victim: The process, of replica 0; None stands for the one that was started for it.
    """
    counts = [0] * num_streams
    limits = httpx.Limits(max_connections=num_streams)
    async with httpx.AsyncClient(timeout=120, limits=limits, trust_env=False) as client:
        streams = [
            asyncio.create_task(_stream(client, server.url, i, counts)) for i in range(num_streams)
        ]
        while min(counts) < 5:
            await asyncio.sleep(0.01)
        os.kill(victim or process_of(server, 0), signal.SIGKILL)
        killed = time.monotonic()
        at_kill = sum(counts)
        while (await client.get(f"{server.url}/replicas/0/ready")).status_code != 200:
            await asyncio.sleep(0.05)
        back_s = time.monotonic() - killed
        ends = await asyncio.gather(*streams)
    return {
        "streams_of_0": sum(replica == "0" for replica, _ in ends),
        "complete_of_0": sum(is_complete for replica, is_complete in ends if replica == "0"),
        "streams_of_1": sum(replica == "1" for replica, _ in ends),
        "complete_of_1": sum(is_complete for replica, is_complete in ends if replica == "1"),
        "events_at_kill": at_kill,
        "back_s": round(back_s, 2),
    }


def measure_kill() -> dict[str, Any]:
    began = time.monotonic()
    with run_server(*FLAGS) as server:
        load_s = time.monotonic() - began
        result = asyncio.run(kill_under_streams(server, NUM_STREAMS))
    result["load_s"] = round(load_s, 2)
    print(result)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["hits", "delay", "kill", "all"])
    what = parser.parse_args().what
    results: dict[str, Any] = {}
    if what in ("hits", "all"):
        results["hits"] = measure_hits()
    if what in ("delay", "all"):
        results["delay"] = asyncio.run(measure_delay())
    if what in ("kill", "all"):
        results["kill"] = measure_kill()
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
