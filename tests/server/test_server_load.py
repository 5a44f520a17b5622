"""Many clients at once, in numbers that a test can wait for; programs/server_load.py has them all.

Also what single requests may do to the event loop, as CPU time: the machine may be busy.
"""

import asyncio
import gc
import json
import sys
import weakref
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from helpers import warm
from helpers.launch import PROGRAMS, environment
from helpers.server import run_server
from llama.server.encoding import EventStream
from llama.server.errors import broken

sys.path.insert(0, str(PROGRAMS))
import server_load

MOST_GROWTH_MB = 40.0  # of a process of 300: its allocator keeps some of what came and went


@pytest.fixture(scope="module")
def small_server():
    """8 places and a queue of 16."""
    flags = ("--max_seq_len", "512", "--dtype", "fp32", "--max_batch_size", "8")
    with run_server(*flags, "--max_queue", "16") as running:
        yield running


def test_a_crowd_is_served_and_leaves_nothing(small_server):
    """More clients than the queue takes: all get their answer in the end, and 503 is all that they
    see else. Then clients that leave, and some that do not read: each page comes back."""
    client = server_load.Client(small_server.url)
    pid = small_server.process.pid
    asyncio.run(server_load.flood(client, 24, 8))
    before = server_load.resident_mb(pid)
    statuses = asyncio.run(server_load.flood(client, 48, 8))
    assert statuses[200] == 48 and statuses.keys() == {200, 503}, statuses
    asyncio.run(server_load.settle(client))
    asyncio.run(server_load.disconnects(client, 24, 16))
    asyncio.run(server_load.settle(client))
    asyncio.run(server_load.slow_readers(client, 4, 5, 150))
    assert server_load.resident_mb(pid) - before < MOST_GROWTH_MB


@pytest.mark.parametrize("end", ["whole", "left", "failed"])
def test_a_stream_that_ended_is_freed_at_once(end):
    """Not by the collector, which may come 50,000 objects later. uvicorn's `receive` tells that the
    client has left where it was sent all, too."""
    has_left, sent = asyncio.Event(), list[dict[str, Any]]()

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 1"
        if end == "left":
            has_left.set()
            await asyncio.sleep(60)
        if end == "failed":
            raise broken()

    async def receive() -> dict[str, Any]:
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            has_left.set()

    async def run() -> weakref.ref:
        stream = EventStream(events(), lambda error: b"data: failed")
        await stream({"type": "http"}, receive, send)
        return weakref.ref(stream)

    gc.disable()
    try:
        assert asyncio.run(run())() is None
    finally:
        gc.enable()
    bodies = [message["body"] for message in sent[1:]]
    assert bodies == [b"data: 1", *[b"data: failed"] * (end == "failed"), *[b""] * (end != "left")]


def test_no_request_holds_the_event_loop_up():
    """Long texts, large bodies, many prompts, schemas: the loop's thread computes for less than a
    second between two turns. (The bar is 0.2 s; the program says what each took.)"""
    words = ["letters", "MB of", "prompts of 400 ch", "schema", "20,000", "99,000 lists"]
    command = [sys.executable, str(PROGRAMS / "loop_times.py"), *words]
    env = environment(PYTHONPATH=f"{PROGRAMS.parent}:{PROGRAMS.parent.parent}")
    done = warm.run(command, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) >= 10
    for case in found:
        assert case["cpu_ms"] < 1000 and case["status"] in (200, 400, 413), case
