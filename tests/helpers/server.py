"""A server in a separate process: `llama serve` on a free port of this machine."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from helpers.launch import environment
from helpers.waiting import wait_until
from helpers.web import web

START_S = 120.0  # several processes may import torch at once


@dataclass
class RunningServer:
    """A running server: `log` is its stderr so far, `url` its address without a path."""

    process: subprocess.Popen
    log: list[str]
    url: str
    reader: threading.Thread

    def ended(self) -> tuple[int, str]:
        """Wait for the server to exit; return the exit code and everything that it wrote."""
        code = self.process.wait(60)
        self.reader.join(60)
        return code, "".join(self.log)

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextlib.contextmanager
def run_server(
    *flags: str,
    launcher: tuple[str, ...] = (),
    program: tuple[str, ...] = ("-m", "llama"),
    **popen,
) -> Iterator[RunningServer]:
    """Start a server and wait until it is ready; at the end kill it if it still runs.

    It has one thread, unless `env` says otherwise: the demo model runs faster on one than on two. A
    launcher of ranks or replicas is asked to end them first.
    """
    command = [sys.executable, *launcher, *program, "serve", "--port", "0", *flags]
    options: dict[str, Any] = {
        "env": environment(),
        "stderr": subprocess.PIPE,
        "text": True,
    } | popen
    process = subprocess.Popen(command, **options)
    log: list[str] = []
    assert process.stderr is not None
    reader = threading.Thread(target=_read, args=(process.stderr, log), daemon=True)
    reader.start()
    try:
        url = _wait_for(log, process, r"listening on (\S+);")
        server = RunningServer(process, log, url, reader)
        _wait_for(log, process, "(ready): ")
        yield server
    finally:
        if launcher or {"--ranks", "--replicas"} & set(flags):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        process.kill()
        process.wait()
        reader.join(5)


def _read(pipe: IO[str], log: list[str]) -> None:
    log.extend(pipe)


def _wait_for(log: list[str], process: subprocess.Popen, pattern: str) -> str:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        found = re.search(pattern, "".join(log))
        if found:
            return found[1]
        assert process.poll() is None, "".join(log)
        time.sleep(0.05)
    raise AssertionError(f"the server did not start: {''.join(log)}")


def post_and_leave(url: str, body: dict, has_begun: Callable[[], bool]) -> None:
    """Post a request, wait until it has begun, and close the connection without an answer."""
    host, port, path = re.fullmatch(r"http://(.+):(\d+)(/.*)", url).groups()  # type: ignore[union-attr]
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode() + data)
        wait_until(has_begun)


def raw_events(url: str, body: dict) -> list[str]:
    """Return the data of each server-sent event of a POST, in order."""
    with web.stream("POST", url, json=body, timeout=60) as response:
        assert response.status_code == 200, response.read()
        data = b"".join(response.iter_bytes()).decode()
    events = [event for event in data.split("\n\n") if event]
    return [event.removeprefix("data: ") for event in events if not event.startswith(":")]
