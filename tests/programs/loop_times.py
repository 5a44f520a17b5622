"""How long single requests block the event loop of the server: wall and CPU time of its thread.

Input: nothing, or parts of the names of cases; "table" for all bad requests of the table. With
--real first, a random model with Llama 3's own vocabulary and a context of 131,072 tokens replaces
the demo model. Output: a line of JSON for each case, {"name", "status", "wall_ms", "cpu_ms"}: the
longest time without a turn of the loop, and the maximal CPU time of its thread between two turns,
which does not depend on other work on the machine.
"""

import asyncio
import http.client
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn

from helpers.bad_requests import BAD_REQUESTS, KEY
from helpers.checkpoints import random_state, write_meta
from helpers.launch import DEMO
from helpers.services import service_of
from llama import Llama
from llama.prompts import ToolFormat
from llama.server.process import Server

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
    """Return name -> path and body, an object or bytes."""
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" * 20_000}}]
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": _WIDE}}
    return {
        "prompt of 100,000 characters": (_TEXT, {"prompt": "One day a cat " * 7150}),
        "prompt of 100,000 letters": (_TEXT, {"prompt": "a" * 100_000}),
        "message of 100,000 characters": (_CHAT, {"messages": user("One day a cat " * 7150)}),
        "3,000 messages": (_CHAT, {"messages": user("a cat") * 3000}),
        "256 prompts of 9,900 characters": (_TEXT, {"prompt": ["a cat sat " * 990] * 256}),
        "256 prompts of 400 characters": (
            _TEXT, {"prompt": ["a cat sat " * 40] * 256, "max_tokens": 1}
        ),
        "256 prompts of 400 ids": (_TEXT, {"prompt": [[7] * 400] * 256, "max_tokens": 1}),
        "256 answers": (_TEXT, {"prompt": ["a"] * 4, "n": 64, "max_tokens": 16, "logprobs": 5}),
        "7 MB of text": (_TEXT, {"prompt": "a cat " * 1_300_000}),
        "7 MB of ids": (_TEXT, {"prompt": [7] * 2_170_000}),
        "7 MB of an unknown field": (_TEXT, {"prompt": "a", "x": [[]] * 1_700_000}),
        "7 MB of messages": (_CHAT, {"messages": user("a") * 170_000}),
        "7 MB of brackets": (_TEXT, b"[" * 7_000_000),
        "100,000 fields": (_TEXT, {"prompt": "a"} | {f"x{i}": 1 for i in range(99_000)}),
        "600,000 escapes": (_TEXT, b'{"prompt": "' + rb"\u00e9" * 600_000 + b'"}'),
        "999,000 ids": (_TEXT, {"prompt": [7] * 999_000}),
        "99,000 lists": (_TEXT, {"prompt": "a", "x": [[]] * 99_000}),
        "99,000 messages": (_CHAT, {"messages": user("a") * 99_000}),
        "7 MB to tokenize": (_TOKENS, {"prompt": "a cat " * 1_300_000}),
        "2 MB of ids to detokenize": ("/detokenize", {"tokens": [7] * 700_000}),
        "schema of 400 properties": (_CHAT, {"messages": user("a"), "response_format": form}),
        "schema of 90,000 characters": (
            _TEXT, {"prompt": "a", "structured_outputs": {"json": {"enum": ["ab cd"] * 9_000}}}
        ),
        "schema bomb": (_TEXT, {"prompt": "a", "structured_outputs": {"json": _bomb(6)}}),
        "long grammar": (
            _TEXT, {"prompt": "a", "structured_outputs": {"grammar": _grammar(4_000)}}
        ),
        "prompt of 500,000 characters": (_TEXT, {"prompt": "One day a cat " * 35_700}),
        "dialog of 900,000 characters to tokenize": (
            _TOKENS, {"messages": user("One day a cat " * 64_000)}
        ),
        "deep schema": (_TEXT, {"prompt": "a", "structured_outputs": {"json": _deep(400)}}),
        "long regex": (_TEXT, {"prompt": "a", "structured_outputs": {"regex": "(ab?c*|d)" * 999}}),
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


def _bomb(depth: int) -> dict[str, Any]:
    """Return nested definitions, each with ten of the next: a million paths."""
    last = {f"d{depth}": {"type": "string"}}
    several = {
        f"d{i}": {"type": "object",
                  "properties": {f"p{k}": {"$ref": f"#/$defs/d{i + 1}"} for k in range(10)}}
        for i in range(depth)
    }  # fmt: skip
    return {"$ref": "#/$defs/d0", "$defs": several | last}


def _grammar(count: int) -> str:
    rules = [f'r{i}: "{i}" r{i + 1} | "x" r{i + 1}' for i in range(count)]
    return "\n".join(["start: r0", *rules, f'r{count}: "end"'])


def real_checkpoint(folder: Path) -> str:
    """Write a tiny random model of the type Llama 3.1 with the real vocabulary."""
    from llama_models.llama3 import tokenizer

    params = {
        "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 128_256,
        "multiple_of": 16, "norm_eps": 1e-5, "rope_theta": 500_000.0, "use_scaled_rope": True,
    }  # fmt: skip
    model = Path(tokenizer.__file__).with_name("tokenizer.model")
    return str(write_meta(folder, params, random_state(params), tokenizer=model))


def table() -> dict[str, tuple[str, Any]]:
    """Return the bad requests that have a body and need no headers."""
    return {
        f"table {i}: {case.name}": (case.path, case.body)
        for i, case in enumerate(BAD_REQUESTS)
        if case.method == "POST" and not case.headers and case.has_tools
    }


def main(words: list[str]) -> None:
    is_real = words[:1] == ["--real"]
    words = words[is_real:]
    with tempfile.TemporaryDirectory() as folder:
        path = real_checkpoint(Path(folder) / "model") if is_real else str(DEMO)
        max_seq_len = 131_072 if is_real else 512
        llama = Llama.build(
            path, max_seq_len=max_seq_len, max_batch_size=32, dtype="fp32", device="cpu"
        )
        chosen = {
            name: case
            for name, case in (cases() | table()).items()
            if any(word in name for word in words or [""])
        }
        measure(llama, chosen)


def measure(llama: Llama, chosen: dict[str, tuple[str, Any]]) -> None:
    times = LoopTimes()
    serve = uvicorn.Server.serve

    async def watched(self: uvicorn.Server, sockets: Any = None) -> None:
        watching = asyncio.create_task(times.watch())
        await serve(self, sockets)
        watching.cancel()

    uvicorn.Server.serve = watched  # type: ignore[method-assign]
    service = service_of(given_format=ToolFormat("llama3.1"))
    server = Server(service, host="127.0.0.1", port=0, api_keys=["k"])
    server.start()
    is_done = threading.Event()
    server.open(llama)
    thread = threading.Thread(target=server.serve, args=(5.0, is_done.is_set))
    thread.start()
    try:
        for name, (path, body) in chosen.items():
            _measure(server.port, times, name, path, body)
    finally:
        is_done.set()
        thread.join()


def _measure(port: int, times: LoopTimes, name: str, path: str, body: Any) -> None:
    if path == _CHAT and isinstance(body, dict):
        body = {"max_tokens": 16} | body  # a chat's own default is the context
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    time.sleep(2 * _TICK_S)
    times.reset()
    connection.request("POST", path, data, {"Content-Type": "application/json"} | KEY)
    response = connection.getresponse()
    answer = response.read()
    if response.status >= 500:
        print(answer.decode(), file=sys.stderr)
    time.sleep(4 * _TICK_S)
    found = {"name": name, "status": response.status}
    found |= {"wall_ms": round(times.wall_s * 1e3), "cpu_ms": round(times.cpu_s * 1e3)}
    print(json.dumps(found), flush=True)
    connection.close()


if __name__ == "__main__":
    main(sys.argv[1:])
