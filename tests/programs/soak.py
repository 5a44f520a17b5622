"""Small requests alongside requests of others that try to shut them out, for minutes.

`python tests/programs/soak.py --minutes 15` starts a server with the demo model and look-up drafts;
`--url URL --pid PID` uses a running one. Besides small requests it sends predictions of 7 MB, large
echoes with log-probabilities, echoes beyond the limit of an answer, grammars that take seconds to
compile, and WebSocket upgrades; with `--attacks` also all attacks of attacks.py. The server has
`--api_processes N`, by default none; kills.py ends them. Each minute, and at the end, it prints the
latency of the small requests, the memory of the server, and how often each kind of request got
each status. The exit code is 1 if a small request failed or had a wrong answer, if any request had
an internal error, if the server ended, or if it does not come to rest with all pages free.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from helpers.processes import children
from helpers.server import run_server
from programs import attacks
from programs.server_load import Client, resident_mb, settle

FLAGS = (
    *("--max_batch_size", "8", "--max_queue", "256", "--max_seq_len", "4096"),
    *("--speculate", "lookup"),
)
SMALL_CLIENTS = 4
SMALL_SOURCE = "127.0.0.3"  # the others have other addresses
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PREDICTION = "a cat sat " * 700_000
UPGRADE = (
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


class Soak:
    """The requests of one run, and what they have shown so far."""

    def __init__(self, url: str, pid: int, *, has_attacks: bool) -> None:
        self.client = Client(url)
        self.small_client = Client(url, source=SMALL_SOURCE)
        self.has_attacks = has_attacks
        self.wanted: dict[int, str] = {}  # the answer of each small request, by its seed
        self.num_wrong = 0
        self.pid = pid
        self.latencies: list[float] = []
        self.statuses: defaultdict[str, attacks.Statuses] = defaultdict(Counter)
        self.memory = [resident_mb(pid)]
        self.serial = itertools.count()

    async def small(self) -> None:
        """Send a small request, and note its time."""
        began = time.perf_counter()
        seed = next(self.serial) % 20
        body = {"prompt": "Once", "max_tokens": 4, "seed": seed}
        content = await self.post("small", TEXT, body, self.small_client)
        self.latencies.append(time.perf_counter() - began)
        if content:
            text = json.loads(content)["choices"][0]["text"]
            self.num_wrong += text != self.wanted.setdefault(seed, text)
        await asyncio.sleep(0.05)

    async def prediction(self) -> None:
        """Send a prediction of 7 MB for four answers, streamed every other time."""
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "prediction": {"type": "content", "content": PREDICTION},
            "max_tokens": 20,
            "n": 4,
        }
        if next(self.serial) % 2:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        await self.post("prediction", CHAT, body)

    async def echo(self) -> None:
        """Ask for the log-probabilities of a long prompt before each of 16 answers."""
        prompt = [
            next(self.serial) % 1000,
            *[self.client.draw.randrange(1000) for _ in range(1500)],
        ]
        body = {"prompt": prompt, "echo": True, "logprobs": 20, "n": 16, "max_tokens": 2}
        await self.post("echo", TEXT, {**body, "stream": bool(next(self.serial) % 2)})

    async def too_large(self) -> None:
        """Ask for an answer that is larger than the server makes."""
        body = {"prompt": [7] * 3900, "echo": True, "logprobs": 100, "n": 64, "max_tokens": 100}
        await self.post("too large", TEXT, body)
        await asyncio.sleep(0.5)

    async def grammar(self) -> None:
        """Send a grammar that takes seconds to compile, and that no earlier request had."""
        count = 6000
        rules = [f"r{i}: r{i + 1}?" for i in range(count)]
        lines = [f"// {next(self.serial)}", "start: r0", *rules, f'r{count}: "e"']
        body = {"prompt": "a", "max_tokens": 2, "structured_outputs": {"grammar": "\n".join(lines)}}
        await self.post("grammar", TEXT, body)

    async def upgrades(self) -> None:
        """Ask for 20 upgrades to WebSockets, and leave."""
        for _ in range(20):
            reader, writer = await self.client.connect()
            writer.write(UPGRADE)
            line = await reader.readline()
            self.statuses["upgrade"][int(line.split()[1]) if line else 0] += 1
            writer.close()
        await asyncio.sleep(0.2)

    async def post(
        self, kind: str, path: str, body: dict[str, Any], client: Client | None = None
    ) -> bytes:
        """Send a request and note its status, which is 0 if the connection failed.

        Returns:
            The answer; empty for any status but 200.
        """
        content = b""
        try:
            status, _, content = await (client or self.client).post(body, path=path)
        except OSError:
            status = 0
        self.statuses[kind][status] += 1
        if status == 200:
            return content
        await asyncio.sleep(0.2)
        return b""

    @property
    def is_right(self) -> bool:
        """Whether all small requests were answered rightly, and none had an internal error."""
        has_failed = set(self.statuses["small"]) != {200}
        has_faults = any(500 in counts for counts in self.statuses.values())
        return not (has_failed or has_faults or self.num_wrong)

    async def watch(self) -> None:
        """Note the memory of the server each second."""
        self.memory.append(resident_mb(self.pid))
        await asyncio.sleep(1.0)

    def report(self, minutes: float) -> None:
        """Print the figures so far."""
        cuts = statistics.quantiles(self.latencies, n=1000, method="inclusive")
        parts = {"p50": cuts[499], "p90": cuts[899], "p99": cuts[989], "max": max(self.latencies)}
        shown = ", ".join(f"{name} {1e3 * value:.0f}" for name, value in parts.items())
        first, *_, last = self.memory
        print(f"{minutes:.1f} minutes, {len(self.latencies)} small requests, in ms: {shown}")
        print(
            f"  resident MB: {first:.0f} at first, {last:.0f} now, {max(self.memory):.0f} at most;"
            f" processes that it has started: {[round(resident_mb(x)) for x in children(self.pid)]}"
        )
        for kind, counts in sorted(self.statuses.items()):
            print(f"  {kind}: {dict(sorted(counts.items(), key=str))}", flush=True)
        print(f"  wrong answers of small requests: {self.num_wrong}", flush=True)


async def repeat(work: Callable[[], Awaitable[None]], end: float) -> None:
    """Call a function again and again until a time."""
    while time.monotonic() < end:
        await work()


async def run(soak: Soak, minutes: float) -> None:
    began = time.monotonic()
    end = began + 60 * minutes
    for _ in range(20):
        await soak.small()
    works = [soak.small] * SMALL_CLIENTS + [soak.grammar] * 6 + [soak.prediction] * 2
    works += [soak.echo] * 2 + [soak.too_large, soak.upgrades, soak.watch]
    tasks = [asyncio.create_task(repeat(work, end)) for work in works]
    if soak.has_attacks:
        attacker = Client(soak.client.url, source=attacks.OTHER)
        for name, attack in attacks.ATTACKS.items():
            rounds = attacks.repeat(attack, attacker, soak.statuses[name], end)
            tasks.append(asyncio.create_task(rounds))
    while time.monotonic() < end:
        await asyncio.sleep(min(60.0, max(0.0, end - time.monotonic())))
        soak.report((time.monotonic() - began) / 60)
    await asyncio.gather(*tasks)
    await settle(soak.client)
    await asyncio.sleep(2.0)
    soak.memory.append(resident_mb(soak.pid))
    print("at the end, idle:")
    soak.report((time.monotonic() - began) / 60)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--url")
    parser.add_argument("--pid", type=int)
    parser.add_argument("--attacks", action="store_true")
    parser.add_argument("--api_processes", type=int, default=0)
    options = parser.parse_args()
    count = str(options.api_processes)
    if options.url:
        soak = Soak(options.url, options.pid, has_attacks=options.attacks)
        asyncio.run(run(soak, options.minutes))
        return int(not soak.is_right)
    with (
        tempfile.TemporaryDirectory() as folder,
        run_server(attacks.model(Path(folder)), *FLAGS, "--api_processes", count) as server,
    ):
        soak = Soak(server.url, server.process.pid, has_attacks=options.attacks)
        asyncio.run(run(soak, options.minutes))
        has_ended = server.process.poll() is not None
        print("the server's log:", *server.log[-5:], sep="\n  ")
        assert has_ended or server.stop() == 0
    return int(has_ended or not soak.is_right)


if __name__ == "__main__":
    sys.exit(main())
