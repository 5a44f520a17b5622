"""Random kill -9 of the API processes of a server that streams and answers, for minutes.

`python tests/programs/kills.py --minutes 15` starts a server with the demo model and two API
processes, and ends one of them every few seconds. A request whose connection another process has
at that moment must get its whole answer, and the same as without kills; so must all that are sent
once the server has waited for the killed process. At the end the server must come to rest: no
sequence, no page in use, as many descriptors as at first, and no answer counted twice. Four times a
minute the memory of the engine's process is printed; --without shows that of the same without
kills. The exit code is 1 if anything of this is not so.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from helpers.processes import children
from helpers.server import run_server
from programs.server_load import Client, resident_mb, settle

FLAGS = ("--max_batch_size", "16", "--max_seq_len", "512", "--dtype", "fp32")
CLIENTS = 12
LENGTHS = (4, 30, 120)  # tokens of the answers
SEEDS = 8
PROMPT = "Once"
PATH = "/v1/completions"


def _sockets_of(pid: int) -> set[str]:
    """Return the inodes of the sockets of a process."""
    found = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            found.add(os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[")[:-1])
    except OSError:  # it is ending
        pass
    return found


def _living(pid: int) -> list[int]:
    """Return the API processes of a server that have sockets."""
    return [each for each in children(pid) if _sockets_of(each)]


def _clients_of(pid: int, port: int) -> set[int]:
    """Return the ports of the clients whose connections to a server's port a process has."""
    sockets = _sockets_of(pid)
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, *rest = line.split()
        if int(local.partition(":")[2], 16) == port and rest[6] in sockets:
            found.add(int(remote.partition(":")[2], 16))
    return found


@dataclass(eq=False)
class Sent:
    """A request that has no whole answer yet.

    Attributes:
        began: when it was sent, by `time.monotonic`.
        port: the port of the client, once it is connected.
        is_exposed: whether a process was killed that may have had its connection.
    """

    began: float
    port: int = 0
    is_exposed: bool = False


class Kills:
    """The requests of one run, and what they have shown so far."""

    def __init__(self, url: str, pid: int) -> None:
        self.client = Client(url)
        self.pid = pid
        self.port = int(url.rpartition(":")[2])
        self.sent: set[Sent] = set()
        self.wanted: dict[str, str] = {}  # the text of each answer
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.killed = 0.0  # when a process was killed last
        self.gone = 0.0  # when the engine's process had noticed its end

    async def ask(self, draw: random.Random) -> None:
        """Send a request, and compare its answer."""
        body: dict[str, Any] = {
            **{"prompt": PROMPT, "ignore_eos": True, "seed": draw.randrange(SEEDS)},
            **{"max_tokens": draw.choice(LENGTHS), "stream": draw.random() < 0.5},
        }
        key = json.dumps([body["seed"], body["max_tokens"]])
        if draw.random() < 0.3:  # a prompt that takes new pages; its answer is compared with none
            body |= {"prompt": [draw.randrange(1000) for _ in range(300)], "max_tokens": 4}
            key = str(body["prompt"])
        began = time.monotonic()
        sent, answer, text = Sent(began), b"", None
        self.sent.add(sent)
        try:
            reader, writer = await self.client.send(body)
            sent.port = writer.get_extra_info("sockname")[1]
            answer = await reader.read()
            writer.close()
            text = _text_of(answer, is_stream=body["stream"])
        except OSError:
            pass
        finally:
            self.sent.discard(sent)
        if text is not None:
            self.counts["answered"] += 1
            if text != self.wanted.get(key, text):
                self.problems.append(f"a wrong answer: {key}: {text!r}")
            elif body["prompt"] == PROMPT:
                self.wanted[key] = text
            return
        self.counts["cut"] += 1
        if sent.is_exposed:
            return
        self.counts["cut, sent after the kill"] += 1
        if not self.killed < began < self.gone:
            self.problems.append(f"a request of another process failed: {key}, {answer[:300]!r}")

    async def kill(self, draw: random.Random, num_processes: int) -> None:
        """Kill an API process, and wait until another one was started and some are answered."""
        await asyncio.sleep(draw.uniform(0.2, 6.0))
        pids = _living(self.pid)
        victim = draw.choice(pids)
        safe = set().union(*(_clients_of(x, self.port) for x in pids if x != victim))
        for sent in self.sent:
            sent.is_exposed |= sent.port not in safe
        os.kill(victim, signal.SIGKILL)
        self.killed, self.gone = time.monotonic(), float("inf")
        self.counts["kills"] += 1
        while os.path.exists(f"/proc/{victim}"):
            await asyncio.sleep(0.001)
        self.gone = time.monotonic()
        while len(set(_living(self.pid)) - {victim}) < num_processes:
            await asyncio.sleep(0.01)
        enough = self.counts["answered"] + CLIENTS
        while self.counts["answered"] < enough:
            await asyncio.sleep(0.01)

    def report(self, seconds: float) -> None:
        """Print the figures so far."""
        print(
            f"{seconds / 60:.1f} minutes: {dict(self.counts)}; {resident_mb(self.pid):.1f} MB, "
            f"{_descriptors(self.pid)} descriptors; problems: {len(self.problems)}",
            flush=True,
        )


def _text_of(answer: bytes, *, is_stream: bool) -> str | None:
    """Return the text of an answer; None if it is not whole."""
    head, _, content = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        return None
    if not is_stream:
        try:
            return str(json.loads(content)["choices"][0]["text"])
        except ValueError:
            return None
    events = re.findall(rb"^data: (.*)$", content, re.M)
    if not events or events.pop().strip() != b"[DONE]":
        return None
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def run(kills: Kills, minutes: float, num_processes: int, *, has_kills: bool) -> None:
    """Send requests for some minutes, and check that the server then comes to rest."""
    draw = random.Random(0)
    await asyncio.gather(*(kills.ask(draw) for _ in range(40)))
    await settle(kills.client)
    num_descriptors = _descriptors(kills.pid)
    began = time.monotonic()
    end = began + 60 * minutes
    kills.report(0)

    async def repeat(seed: int) -> None:
        while time.monotonic() < end or not killing.done():  # A kill waits for answers after it.
            await kills.ask(random.Random(f"{seed} {time.monotonic()}"))

    async def kill() -> None:
        while has_kills and time.monotonic() < end:
            await kills.kill(draw, num_processes)

    async def watch() -> None:
        while time.monotonic() < end:
            await asyncio.sleep(min(15.0, max(0.0, end - time.monotonic())))
            kills.report(time.monotonic() - began)

    killing = asyncio.create_task(kill())
    await asyncio.gather(killing, watch(), *(repeat(i) for i in range(CLIENTS)))
    await settle(kills.client)
    await asyncio.sleep(3.0)
    kills.report(time.monotonic() - began)
    if _descriptors(kills.pid) > num_descriptors + 2:
        kills.problems.append(f"{_descriptors(kills.pid)} descriptors; {num_descriptors} at first")
    figures = httpx.get(f"{kills.client.url}/metrics").text
    done = re.findall(r'request_success_total\{finished_reason="length"\} (\S+)', figures)
    if float(done[0]) > kills.counts["answered"] + kills.counts["cut"]:
        kills.problems.append(f"{done[0]} answers are counted")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--api_processes", type=int, default=2)
    parser.add_argument("--without", action="store_true", help="the same without kills")
    options = parser.parse_args()
    count = str(options.api_processes)
    with run_server(*FLAGS, "--api_processes", count) as server:
        kills = Kills(server.url, server.process.pid)
        asyncio.run(
            run(kills, options.minutes, options.api_processes, has_kills=not options.without)
        )
        print(*kills.problems[:20], sep="\n")
        code = server.stop()
    return int(bool(kills.problems) or code != 0)


if __name__ == "__main__":
    sys.exit(main())
