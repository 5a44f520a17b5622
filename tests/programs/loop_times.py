"""How long single requests hold up the event loop of the server: wall and CPU time of its thread.

In: nothing, or words of the names of cases. Out: a line of JSON for each case, {"name", "status",
"wall_ms", "cpu_ms"}: the longest time that the loop did not turn, and the most that its thread
computed between two turns, which other work on the machine does not add to.
"""

import asyncio
import http.client
import json
import sys
import threading
import time
from typing import Any

import uvicorn

from helpers.launch import DEMO
from llama import Llama
from llama.serving.server.process import Server
from llama.serving.server.service import Limits
from llama.serving.tools import ToolFormat

_TICK_S = 0.005
_WIDE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(400)}}
_CHAT, _TEXT, _TOKENS = "/v1/chat/completions", "/v1/completions", "/tokenize"
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


class LoopTimes:
    """The longest turns of an event loop since `reset`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    async def watch(self) -> None:
        while True:
            wall, cpu = time.monotonic(), time.thread_time()
            await asyncio.sleep(_TICK_S)
            self.wall_s = max(self.wall_s, time.monotonic() - wall - _TICK_S)
            self.cpu_s = max(self.cpu_s, time.thread_time() - cpu)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def cases() -> dict[str, tuple[str, Any]]:
    """Name: path and body, an object or bytes."""
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" * 20_000}}]
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": _WIDE}}
    return {
        "prompt of 100,000 characters": (_TEXT, {"prompt": "One day a cat " * 7150}),
        "prompt of 100,000 letters": (_TEXT, {"prompt": "a" * 100_000}),
        "message of 100,000 characters": (_CHAT, {"messages": user("One day a cat " * 7150)}),
        "3,000 messages": (_CHAT, {"messages": user("a cat") * 3000}),
        "256 prompts of 9,900 characters": (_TEXT, {"prompt": ["a cat sat " * 990] * 256}),
        "256 prompts of 400 characters": (_TEXT, {"prompt": ["a cat sat " * 40] * 256}),
        "256 prompts of 400 ids": (_TEXT, {"prompt": [[7] * 400] * 256, "max_tokens": 1}),
        "256 answers": (_TEXT, {"prompt": ["a"] * 4, "n": 64, "max_tokens": 16, "logprobs": 5}),
        "7 MB of text": (_TEXT, {"prompt": "a cat " * 1_300_000}),
        "7 MB of ids": (_TEXT, {"prompt": [7] * 2_170_000}),
        "7 MB of an unknown field": (_TEXT, {"prompt": "a", "x": [[]] * 1_700_000}),
        "7 MB of messages": (_CHAT, {"messages": user("a") * 170_000}),
        "7 MB of brackets": (_TEXT, b"[" * 7_000_000),
        "999,000 ids": (_TEXT, {"prompt": [7] * 999_000}),
        "99,000 lists": (_TEXT, {"prompt": "a", "x": [[]] * 99_000}),
        "99,000 messages": (_CHAT, {"messages": user("a") * 99_000}),
        "7 MB to tokenize": (_TOKENS, {"prompt": "a cat " * 1_300_000}),
        "2 MB of ids to detokenize": ("/detokenize", {"tokens": [7] * 700_000}),
        "schema of 400 properties": (_CHAT, {"messages": user("a"), "response_format": form}),
        "deep schema": (_TEXT, {"prompt": "a", "structured_outputs": {"json": _deep(400)}}),
        "regex": (_TEXT, {"prompt": "a", "structured_outputs": {"regex": "(a|b)*a(a|b){300}"}}),
        "choice": (
            _TEXT, {"prompt": "a", "structured_outputs": {"choice": [f"x{i}" for i in range(9999)]}}
        ),
        "arguments of 20,000 brackets": (
            _CHAT, {"messages": [*user("a"), turn, *user("a")], "tools": [_TOOL]}
        ),
        "128 tools": (
            _CHAT,
            {
                "messages": user("a"), "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": f"f{i}", "parameters": _WIDE}}
                          for i in range(128)],
            },
        ),
        "logit_bias": (_TEXT, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(2047)}}),
        "32 long stop strings": (
            _TEXT, {"prompt": "a", "stop": ["a" * 900 + str(i) for i in range(32)],
                    "max_tokens": 400, "ignore_eos": True}
        ),
    }  # fmt: skip


def _deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def main(words: list[str]) -> None:
    times = LoopTimes()
    serve = uvicorn.Server.serve

    async def watched(self: uvicorn.Server, sockets: Any = None) -> None:
        watching = asyncio.create_task(times.watch())
        await serve(self, sockets)
        watching.cancel()

    uvicorn.Server.serve = watched  # type: ignore[method-assign]
    server = Server(
        "demo", host="127.0.0.1", port=0, api_keys=[], limits=Limits(),
        tool_format=ToolFormat("llama3.1"),
    )  # fmt: skip
    llama = Llama.build(str(DEMO), max_seq_len=512, max_batch_size=32, dtype="fp32", device="cpu")
    server.start()
    is_done = threading.Event()
    server.open(llama)
    thread = threading.Thread(target=server.serve, args=(5.0, is_done.is_set))
    thread.start()
    try:
        for name, (path, body) in cases().items():
            if not words or any(word in name for word in words):
                _measure(server.port, times, name, path, body)
    finally:
        is_done.set()
        thread.join()


def _measure(port: int, times: LoopTimes, name: str, path: str, body: Any) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    time.sleep(2 * _TICK_S)
    times.reset()
    connection.request("POST", path, data, {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.read()
    time.sleep(4 * _TICK_S)
    found = {"name": name, "status": response.status}
    found |= {"wall_ms": round(times.wall_s * 1e3), "cpu_ms": round(times.cpu_s * 1e3)}
    print(json.dumps(found), flush=True)
    connection.close()


if __name__ == "__main__":
    main(sys.argv[1:])
