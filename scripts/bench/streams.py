"""Measure the processor time of a streamed token, with a device that does nothing.

In: numbers of clients, and perhaps another tree of this project. Out: a row for each tree and
number of clients, with microseconds of processor time for each token, by thread. Each tree has a
server of its own (`streams_server.py`); they are measured in turns, and the one that waits does
nothing.
"""

import contextlib
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.machine import require_triton
from bench.report import Column
from bench.run import Bench, Row, whole

_COLUMNS: list[Column] = [
    ("tree", "tree", ""), ("clients", "clients", ""), ("us a token", "us", ".1f"),
    ("least", "us_min", ".1f"), ("engine", "engine", ".1f"), ("loop", "loop", ".1f"),
    ("API", "api", ".1f"),
    ("to this", "to_this", ".2f"), ("tokens/s", "tokens_per_s", ".0f"),
    ("first p50 ms", "first_p50", ".2f"), ("p99", "first_p99", ".2f"),
    ("between p50 ms", "between_p50", ".2f"), ("p99", "between_p99", ".2f"),
]  # fmt: skip
_ROOT = Path(__file__).resolve().parent.parent.parent
_PROMPT = 32  # characters
_MORE = 2000  # tokens of an answer beyond the timed ones, while the other streams begin and end
_FEW = 4  # reads of a stream before it is timed: the head, and the first tokens
_LIMIT_S = 60.0
_URLS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "ollama": "/api/chat",
}


def streams(
    clients: tuple[int, ...] = (1, 64),
    steps: int = 200,
    step_ms: float = 25.0,
    rounds: int = 3,
    against: str | None = None,
    api: str = "chat",
    api_processes: tuple[int, ...] = (0,),
    **flags: Any,
) -> None:
    """Measure the processor time of a streamed token, with a device that does nothing.

    Each client streams a chat; a step of the model takes `step_ms`, in which the server sleeps. "us
    a token" is the processor time of the server's process for `steps` steps, as the median and the
    least of the rounds, "engine" and "loop" are the parts of its two threads, and "API" is that of
    its API processes, of which there are as many as --api_processes says. The times to the
    first token and between tokens are those of the client. --against measures the server of another
    tree of this project in turns with this one, with the first number of API processes alone.
    """
    require_triton("streams")
    bench = Bench(**flags)
    if api not in _URLS:
        raise ValueError(f"api={api!r}: give one of {', '.join(_URLS)}")
    counts = [whole("clients", n) for n in clients]
    length = whole("steps", steps)
    sizes = [max(counts), 4 * _PROMPT + length + _MORE, step_ms / 1e3]
    processes = [whole("api_processes", n, 0) for n in api_processes]
    trees = {"this": _ROOT} | ({} if against is None else {against: Path(against).resolve()})
    found: dict[tuple[str, int], list[Row]] = {}
    with contextlib.ExitStack() as running:
        servers = {
            name if n == processes[0] else f"{name} +{n}": running.enter_context(
                _server(tree, [*sizes, n])
            )
            for name, tree in trees.items()
            for n in (processes if name == "this" else processes[:1])
        }
        for _ in range(whole("rounds", rounds)):
            for count in counts:
                for name, server in servers.items():
                    print(f"... {name} {count}", file=sys.stderr, flush=True)
                    measured = server.measure(api, count, length)
                    found.setdefault((name, count), []).append(measured)
    rows = [_row(name, count, measured) for (name, count), measured in found.items()]
    own = {row["clients"]: row["us"] for row in rows if row["tree"] == "this"}
    for row in rows:
        row["to_this"] = row["us"] / own[row["clients"]]
    bench.report(_COLUMNS, rows, None)


def _row(name: str, count: int, rounds: list[Row]) -> Row:
    """Return the medians of several rounds."""
    gaps = sorted(gap for each in rounds for gap in each["gaps"])
    firsts = sorted(first for each in rounds for first in each["firsts"])
    names = ("us", "engine", "loop", "api", "tokens_per_s")
    return {
        "tree": name, "clients": count,
        **{key: statistics.median(each[key] for each in rounds) for key in names},
        "us_min": min(each["us"] for each in rounds),
        "first_p50": 1e3 * statistics.median(firsts),
        "first_p99": 1e3 * firsts[int(0.99 * len(firsts))],
        "between_p50": 1e3 * statistics.median(gaps),
        "between_p99": 1e3 * gaps[int(0.99 * len(gaps))],
    }  # fmt: skip


class _Stream:
    """A client: its socket, and the times of what it received."""

    def __init__(self, port: int, url: str, num_tokens: int) -> None:
        body = {
            "model": "bench", "messages": [{"role": "user", "content": "a" * _PROMPT}],
            "max_tokens": num_tokens, "temperature": 0, "stream": True,
        }  # fmt: skip
        if url == _URLS["responses"]:
            body["input"] = body.pop("messages")
            body["max_output_tokens"] = body.pop("max_tokens")
        if url == _URLS["ollama"]:
            body["options"] = {"num_predict": body.pop("max_tokens")}
        data = json.dumps(body).encode()
        head = (
            f"POST {url} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.began = time.perf_counter()
        self.socket.sendall(head.encode() + data)
        self.times: list[float] = []

    def read(self) -> None:
        """Note the time of new bytes."""
        data = self.socket.recv(1 << 16)
        if not data or (not self.times and b" 200 " not in data[:20]):
            raise RuntimeError(f"a stream ended: {data[:500].decode(errors='replace')}")
        self.times.append(time.perf_counter())


class _Server:
    """A server of one tree, in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._port = int(self._line())
        self._next_poll = 0.0

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the server ended: its error is above")
        return line

    def _has_reached(self, tokens: int) -> bool:
        """Return whether so many tokens have been generated; it asks ten times a second."""
        if time.perf_counter() < self._next_poll:
            return False
        self._next_poll = time.perf_counter() + 0.1
        return self.report()["tokens"] >= tokens

    def report(self) -> Row:
        """Return the server's own counts."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return json.loads(self._line())

    def measure(self, api: str, count: int, steps: int) -> Row:
        """Return the processor time of a token while `count` clients stream."""
        with contextlib.ExitStack() as opened, selectors.DefaultSelector() as selector:
            streams = []
            for _ in range(count):
                streams.append(_Stream(self._port, _URLS[api], steps + _MORE))
                selector.register(opened.enter_context(streams[-1].socket), 1, streams[-1])
            _read(selector, lambda: all(len(each.times) >= _FEW for each in streams))
            marks = [len(each.times) for each in streams]
            before, began = self.report(), time.perf_counter()
            wanted = before["tokens"] + steps * count

            def is_measured() -> bool:
                """Return whether the server has made the tokens, and each client timed a gap."""
                has_gaps = all(
                    len(each.times) > mark + 1 for mark, each in zip(marks, streams, strict=True)
                )
                return has_gaps and self._has_reached(wanted)

            _read(selector, is_measured)
            after, seconds = self.report(), time.perf_counter() - began
        tokens = after["tokens"] - before["tokens"]
        spent = {
            key: 1e6 * (after["seconds"][key] - before["seconds"][key]) / tokens
            for key in before["seconds"]
        }
        time.sleep(0.5)  # in which the server drops the requests whose clients have left
        return {
            "us": spent["all"], "engine": spent["engine"], "loop": spent["loop"],
            "api": spent["api"],
            "tokens_per_s": tokens / seconds,
            "firsts": [each.times[0] - each.began for each in streams],
            "gaps": [
                late - soon
                for mark, each in zip(marks, streams, strict=True)
                for soon, late in zip(each.times[mark:], each.times[mark + 1 :], strict=False)
            ],
        }  # fmt: skip


def _read(selector: selectors.BaseSelector, is_over: Callable[[], bool]) -> None:
    """Read all streams until `is_over()`."""
    end = time.perf_counter() + _LIMIT_S
    while not is_over():
        for key, _ in selector.select(1.0):
            key.data.read()
        if time.perf_counter() > end:
            raise RuntimeError(f"the streams took longer than {_LIMIT_S:.0f} s")


@contextlib.contextmanager
def _server(tree: Path, sizes: list[Any]) -> Iterator[_Server]:
    """Yield a server of a tree; it ends with the block."""
    command = [sys.executable, "-P", "-m", "bench.streams_server", *map(str, sizes)]
    paths = os.pathsep.join([str(tree), str(_ROOT / "scripts")])
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield _Server(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
