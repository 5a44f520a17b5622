"""Attacks that once shut others out, each against a served demo model, and probes from elsewhere.

`python tests/programs/attacks.py` runs them one after the other, 10 seconds each; names of attacks
choose some of them. `--replicas 2` puts two replicas behind HAProxy, and also stops one of them.
For each it prints the median and the largest time of /health and of a small
request, both from another address (`--same` for the same one), and the statuses that the attack
got. The exit code is 1 if a probe failed or had a wrong answer, or if the server had an internal
error. soak.py mixes all of them.
"""

import argparse
import asyncio
import functools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from helpers.checkpoints import long_demo
from helpers.server import run_server
from llama.checkpoint.write.convert import convert
from programs.replicas import process_of
from programs.server_load import Client, resident_mb, settle

FLAGS = ("--max_batch_size", "8", "--max_queue", "256", "--max_seq_len", "4096")
TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
SHORT = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
SMALL = (
    (TEXT, {"prompt": "Once", **SHORT}),
    (CHAT, {"messages": [{"role": "user", "content": "Hi"}], **SHORT}),
)
STORY = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True}
# A text of it has ever more readings, so that its masks take ever longer.
AMBIGUOUS = 'start: e "Q"\ne: e e e | e e | /[a-z ,.]/'
# A chat template that takes as long as it may for one dialog, and no time for the others.
TEMPLATE = """{{ bos_token }}{% for message in messages %}{% if message.content == "slow" %}
{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}
{{ message.role }}: {{ message.content }}
{% endfor %}"""
HOLD_S = 5.0  # how long connections are held that wait for nothing
STOPPED = "stopped replica"
ATTACKER, OTHER = "127.0.0.1", "127.0.0.2"
Statuses = Counter[int | str]
Round = Callable[[Client, Statuses], Awaitable[None]]


async def ask(client: Client, statuses: Statuses, path: str, body: dict[str, Any]) -> None:
    """Send a request, and count the status of its answer."""
    try:
        status, _, _ = await client.post(body, path=path)
    except (OSError, ValueError, IndexError):  # no whole answer
        status = 0
    statuses[status] += 1
    if status != 200:
        await asyncio.sleep(0.1)


async def prompts_again(client: Client, statuses: Statuses) -> None:
    """Send a prompt that is encoded again with each of 2,048 inputs."""
    for size in (15_000, 4_000_000):
        body = {"input": ["a"] * 2048, "prompt": "a cat " * (size // 6), "pooling": "mean"}
        await ask(client, statuses, "/v1/embeddings", body)


async def slow_masks(client: Client, statuses: Statuses) -> None:
    """Ask for 64 answers with a grammar whose masks take 0.1 s and more."""
    form = {"structured_outputs": {"grammar": AMBIGUOUS}}
    body = {"prompt": "Once", "max_tokens": 400, "n": 64, **form}
    await ask(client, statuses, TEXT, body)


async def slow_grammars(client: Client, statuses: Statuses) -> None:
    """Send a grammar that takes seconds to compile, and that no earlier request had."""
    count = 6000
    rules = [f"r{i}: r{i + 1}?" for i in range(count)]
    lines = [f"// {client.draw.random()}", "start: r0", *rules, f'r{count}: "e"']
    body = {"prompt": "a", "max_tokens": 2, "structured_outputs": {"grammar": "\n".join(lines)}}
    await ask(client, statuses, TEXT, body)


async def large_choices(client: Client, statuses: Statuses) -> None:
    """Send choices of 7.5 MB together, and of as many characters as are allowed."""
    for size in (7300, 97):
        choice = [f"{client.draw.random()}".ljust(size, "x") for _ in range(1024)]
        body = {"prompt": "a", "max_tokens": 2, "structured_outputs": {"choice": choice}}
        await ask(client, statuses, TEXT, body)


async def slow_bodies(client: Client, statuses: Statuses) -> None:
    """Begin a body of 8 MiB, and send its last part byte by byte."""
    reader, writer = await client.connect()
    size = 8 * 2**20
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {size}\r\n\r\n".encode() + b" " * (size - 1000))
    try:
        for _ in range(int(10 * HOLD_S)):
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.1)
            if reader.at_eof() or reader._buffer:  # type: ignore[attr-defined]
                break
        statuses[await _status(reader, 0.1)] += 1
    except OSError:
        statuses[0] += 1
    finally:
        writer.transport.abort()


async def unread_answers(client: Client, statuses: Statuses) -> None:
    """Ask for an answer of 31 MiB, and read only its status."""
    prompt = [client.draw.randrange(1000) for _ in range(1500)]
    body = {"prompt": prompt, "echo": True, "logprobs": 20, "n": 8, "max_tokens": 2}
    reader, writer = await client.send(body, limit=1)
    try:
        statuses[await _status(reader, 60)] += 1
        await asyncio.sleep(HOLD_S)
    except OSError:
        statuses[0] += 1
    finally:
        writer.transport.abort()


async def slow_templates(client: Client, statuses: Statuses) -> None:
    """Send a dialog for which the model's chat template loops."""
    body = {"messages": [{"role": "user", "content": "slow"}], "max_tokens": 2}
    await ask(client, statuses, CHAT, body)


async def many_calls(client: Client, statuses: Statuses) -> None:
    """Ask for an answer of 400 tokens; 62 of these run at once."""
    await ask(client, statuses, TEXT, STORY)


async def long_prompts(client: Client, statuses: Statuses) -> None:
    """Send a prompt that fills the context, and that no earlier request had."""
    prompt = [client.draw.randrange(1000) for _ in range(4090)]
    await ask(client, statuses, TEXT, {"prompt": prompt, "max_tokens": 2})


async def full_queue(client: Client, statuses: Statuses) -> None:
    """Ask for 64 answers at once; eight of these are more than the queue takes."""
    await ask(client, statuses, TEXT, {**STORY, "n": 64})


async def stopped(pids: Sequence[int], client: Client, statuses: Statuses) -> None:
    """Stop processes for some seconds; what they do not answer ends meanwhile."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(2 * HOLD_S)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    await asyncio.sleep(HOLD_S)


async def idle_connections(client: Client, statuses: Statuses) -> None:
    """Open 272 connections and send nothing."""
    opened = await asyncio.gather(*(client.connect() for _ in range(272)))
    await asyncio.sleep(HOLD_S)
    statuses["idle"] += len(opened)
    for _, writer in opened:
        writer.close()


async def odd_requests(client: Client, statuses: Statuses) -> None:
    """Send values of other types, and a path that only looks like one without a key."""
    message = [{"role": "user", "content": "x"}]
    odd: list[tuple[str, dict[str, Any]]] = [
        ("/v1/messages", {"messages": message, "max_tokens": 9, "thinking": {"type": ["x"]}}),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "x" * 300}),
        ("/metrics%0a", {}),
        ("/load%0a", {}),
    ]
    for path, body in odd:
        await ask(client, statuses, path, body)


async def _status(reader: asyncio.StreamReader, limit_s: float) -> int:
    """Return the status of an answer, or 0 if none comes in time."""
    try:
        async with asyncio.timeout(limit_s):
            return int((await reader.readexactly(12)).split()[1])
    except (TimeoutError, asyncio.IncompleteReadError):
        return 0


def model(folder: Path) -> str:
    """Make the demo model in Hugging Face's layout, with a chat template of its own."""
    made = folder / "model"
    convert(long_demo(folder / "demo"), made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return str(made)


class Attack(NamedTuple):
    """An attack: one round of it, and how many run at the same time."""

    round: Round
    num_clients: int = 1


ATTACKS = {
    "prompts again": Attack(prompts_again, 2),
    "slow masks": Attack(slow_masks),
    "slow grammars": Attack(slow_grammars, 6),
    "large choices": Attack(large_choices, 4),
    "slow bodies": Attack(slow_bodies, 8),
    "unread answers": Attack(unread_answers, 5),
    "slow templates": Attack(slow_templates, 16),
    "many calls": Attack(many_calls, 62),
    "long prompts": Attack(long_prompts, 16),
    "full queue": Attack(full_queue, 8),
    "idle connections": Attack(idle_connections),
    "odd requests": Attack(odd_requests),
}


async def repeat(attack: Attack, client: Client, statuses: Statuses, end: float) -> None:
    """Run rounds of an attack until a time; what runs then is cut off."""

    async def rounds() -> None:
        while True:
            await attack.round(client, statuses)

    try:
        async with asyncio.timeout(end - time.monotonic()):
            await asyncio.gather(*(rounds() for _ in range(attack.num_clients)))
    except TimeoutError:
        pass


class Probes:
    """Requests alongside an attack, with their times in seconds."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.wanted: dict[str, str] = {}
        self.health: list[float] = []
        self.small: list[float] = []
        self.problems: Counter[str] = Counter()

    async def ask_health(self) -> None:
        began = time.perf_counter()
        reader, writer = await self.client.connect()
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        self.health.append(time.perf_counter() - began)
        if not answer.startswith(b"HTTP/1.1 200 "):
            self.problems[f"/health: {answer[9:12].decode()}"] += 1

    async def ask_small(self) -> None:
        """Send a small request, and compare its text with that of the first one."""
        path, body = SMALL[len(self.small) % len(SMALL)]
        began = time.perf_counter()
        status, _, content = await self.client.post(body, path=path)
        self.small.append(time.perf_counter() - began)
        if status != 200:
            self.problems[f"small: {status}"] += 1
            return
        choice = json.loads(content)["choices"][0]
        text = choice["text"] if path == TEXT else choice["message"]["content"]
        if text != self.wanted.setdefault(path, text):
            self.problems["small: a wrong answer"] += 1

    async def watch(self, ask: Callable[[], Awaitable[None]], end: float) -> None:
        while time.monotonic() < end:
            await ask()
            await asyncio.sleep(0.1)


def _times(name: str, seconds: list[float]) -> str:
    return f"{name} {1e3 * statistics.median(seconds):.0f} / {1e3 * max(seconds):.0f} ms"


async def run(
    url: str,
    pid: int,
    names: list[str],
    seconds: float,
    source: str,
    replicas: Sequence[int] = (),
) -> bool:
    """Run attacks one after the other; return whether all probes were answered rightly.

    Args:
        url: the address of the server.
        pid: its process.
        names: the attacks.
        seconds: time of each.
        source: the address of the probes.
        replicas: the processes of replicas, if the server is in front of any.
    """
    attacker, is_right = Client(url, source=ATTACKER), True
    attacks = ATTACKS | {STOPPED: Attack(functools.partial(stopped, replicas[:1]))}
    prefixes = [f"/replicas/{i}" for i in range(len(replicas))] or [""]
    probes = Probes(Client(url, source=source))
    for _ in range(5):
        await probes.ask_small()
    print("attack: median / largest time of /health and of a small request; statuses; resident MB")
    for name in names:
        probes.health, probes.small = [], []
        statuses: Statuses = Counter()
        end = time.monotonic() + seconds
        await asyncio.gather(
            probes.watch(probes.ask_health, end),
            probes.watch(probes.ask_small, end),
            *([] if name == "nothing" else [repeat(attacks[name], attacker, statuses, end)]),
        )
        times = ", ".join((_times("/health", probes.health), _times("small request", probes.small)))
        counts = dict(sorted(statuses.items(), key=str))
        print(f"{name}: {times}; {counts}; {resident_mb(pid):.0f}", flush=True)
        if name == STOPPED:  # its clients get an error; others wait until it is seen to be stopped
            for status in (502, 503):
                del probes.problems[f"small: {status}"]
        is_right &= not probes.problems and 500 not in statuses
        for problem, count in probes.problems.items():
            print(f"  {count} times {problem}")
        probes.problems.clear()
        for prefix in prefixes:
            await settle(attacker, prefix)
    return is_right


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ATTACKS))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--same", action="store_true", help="probe from the attacker's address")
    options = parser.parse_args()
    flags = (*FLAGS, "--replicas", str(options.replicas)) if options.replicas > 1 else FLAGS
    more = [STOPPED] if options.replicas > 1 else []
    names = options.names or ["nothing", *ATTACKS, *more]
    source = ATTACKER if options.same else OTHER
    with (
        tempfile.TemporaryDirectory() as folder,
        run_server(model(Path(folder)), *flags) as server,
    ):
        pid = server.process.pid
        replicas = [process_of(server, i) for i in range(options.replicas)] if more else []
        ran = run(server.url, pid, names, options.seconds, source, replicas)
        is_right = asyncio.run(ran)
        has_ended = server.process.poll() is not None
        if has_ended or not is_right:
            print("the server's log:", *server.log[-20:], sep="\n  ")
        assert has_ended or server.stop() == 0
    return int(has_ended or not is_right)


if __name__ == "__main__":
    sys.exit(main())
