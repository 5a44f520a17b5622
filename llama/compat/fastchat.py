"""The program `python -m llama.compat.fastchat`: a model worker for FastChat's controller.

In: a command line, with FastChat's names for what it names. Out: a server on one port until Ctrl-C
or SIGTERM, and heartbeats to the controller. The protocol itself is in `fastchat_app.py`. Under
torchrun all ranks are one worker, which rank 0 leads.
"""

import argparse
import asyncio
import contextlib
import http.client
import importlib
import json
import os
import signal
import socket
import sys
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama.cli import ranks
from llama.cli.flags import Command, UsageError, read
from llama.cli.model import BUILD_FLAGS, demo_dir, load

if TYPE_CHECKING:
    from llama.compat.fastchat_app import FastChatApp
    from llama.generation import Llama
    from llama.requests.async_engine import AsyncLLMEngine

_PROGRAM = "python -m llama.compat.fastchat"
_COMMAND = Command(
    "Serve a model to FastChat: its controller, API server and web pages.",
    {
        **BUILD_FLAGS,
        "model_path": None, "model_names": None, "controller_address": "http://localhost:21001",
        "worker_address": None, "host": "127.0.0.1", "port": 21002, "no_register": False,
        "limit_worker_concurrency": 1024, "stream_interval": 2, "conv_template": "llama-3",
    },
    ["ckpt_dir"],
    examples=[
        f"{_PROGRAM} --model-names demo",
        f"{_PROGRAM} Meta-Llama-3-8B-Instruct --controller-address http://10.0.0.1:21001 "
        "--host 0.0.0.0 --worker-address http://10.0.0.2:21002",
        f"torchrun --nproc_per_node 8 {_PROGRAM.removeprefix('python ')} "
        "Meta-Llama-3-70B-Instruct",
    ],
)  # fmt: skip
_TEMPLATE_NAMES = ("llama-3", "raw")
_LIMITS = {
    "port": (0, 65_535),
    "limit_worker_concurrency": (1, 1_000_000),
    "stream_interval": (1, 1_000_000),
}
_INTERVAL_VARIABLE = "FASTCHAT_WORKER_HEART_BEAT_INTERVAL"
_DEMO_CONTEXT = 512  # the demo model was trained on 512 tokens
_CONTROLLER_TIMEOUT_S, _RETRY_S, _SHUTDOWN_S = 5.0, 5.0, 10


def main(words: Sequence[str] | None = None) -> int:
    """Serve until a signal comes; the exit code: 0 after SIGTERM, 130 after Ctrl-C."""
    chosen = sys.argv[1:] if words is None else list(words)
    return ranks.run(lambda: _run(chosen))


def _run(words: Sequence[str]) -> int:
    """Rank 0 alone has the port and talks to the controller; the others follow its steps."""
    options = read(_PROGRAM, _COMMAND, words, os.environ)
    _check(options)
    names = _model_names(options)
    if not options.ckpt_dir:
        options.max_seq_len = options.max_seq_len or _DEMO_CONTEXT
    if ranks.global_rank():
        llama = _load(options)
        # torchrun sends SIGTERM to every rank at once: rank 0 ends its streams first, with the
        # others in its last steps. Whatever else ends rank 0 ends them too.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return llama.lead(lambda: 0) or 0
    uvicorn = _import_uvicorn()
    with _listen(options.host, options.port) as listener:
        options.port = listener.getsockname()[1]
        llama = _load(options)
        return llama.lead(lambda: _work(llama, names, uvicorn, listener, options)) or 0


def _load(options: argparse.Namespace) -> "Llama":
    llama = load(options)
    if llama.model.parallel.data_size > 1:
        raise ValueError(
            f"a FastChat worker is one model-parallel group, and there are "
            f"{llama.model.parallel.data_size}: leave model_parallel_size out, and start a worker "
            "for each group; the controller shares requests out"
        )
    return llama


def _work(
    llama: "Llama",
    names: list[str],
    uvicorn: Any,
    listener: socket.socket,
    options: argparse.Namespace,
) -> int:
    """Serve until a signal comes, on rank 0; the exit code."""
    from llama.compat.fastchat_app import FastChatApp
    from llama.requests.async_engine import AsyncLLMEngine

    engine = AsyncLLMEngine(llama)
    app = FastChatApp(
        engine,
        names,
        conv_template=options.conv_template,
        limit_concurrency=options.limit_worker_concurrency,
        stream_interval=options.stream_interval,
    )
    config = uvicorn.Config(
        app, lifespan="off", log_level="warning", timeout_graceful_shutdown=_SHUTDOWN_S
    )
    return asyncio.run(_serve(uvicorn.Server(config), listener, app, engine, options))


def _check(options: argparse.Namespace) -> None:
    """UsageError for what cannot be used, before anything is loaded."""
    _heartbeat_interval_s()
    if options.ckpt_dir and options.model_path:
        raise UsageError("--ckpt_dir and --model_path are the same: give one of them")
    options.ckpt_dir = options.ckpt_dir or options.model_path
    if options.conv_template not in _TEMPLATE_NAMES:
        names = " or ".join(_TEMPLATE_NAMES)
        raise UsageError(f"--conv_template={options.conv_template!r} must be {names}")
    for name, (low, high) in _LIMITS.items():
        if not low <= getattr(options, name) <= high:
            value = getattr(options, name)
            raise UsageError(f"--{name}={value} must be from {low} to {high}")
    for name in ("controller_address", "worker_address"):
        url = getattr(options, name)
        if url is not None and not url.startswith(("http://", "https://")):
            raise UsageError(f"--{name}={url!r} must begin with http:// or https://")
        setattr(options, name, url.rstrip("/") if url else url)
    if options.host in ("", "0.0.0.0", "::") and not (
        options.worker_address or options.no_register
    ):
        raise UsageError(
            f"--host={options.host!r} is every address of this machine: give the one that other "
            "machines reach it by, as in --worker-address http://10.0.0.2:21002"
        )


def _heartbeat_interval_s() -> int:
    """Seconds between heartbeats: FastChat's own variable and default, as for its own workers."""
    text = os.environ.get(_INTERVAL_VARIABLE, "45")
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{_INTERVAL_VARIABLE}={text!r} must be a whole number of seconds")
    return int(text)


def _model_names(options: argparse.Namespace) -> list[str]:
    """The names in --model_names, or else the folder's."""
    folder = Path(options.ckpt_dir or demo_dir())
    names = [name.strip() for name in (options.model_names or folder.resolve().name).split(",")]
    if not all(names):
        raise UsageError(f"--model_names={options.model_names!r} has an empty name")
    return names


def _import_uvicorn() -> Any:
    try:
        return importlib.import_module("uvicorn")
    except ImportError as e:
        raise UsageError(f"the worker needs uvicorn ({e}): pip install 'llama[fastchat]'") from None


def _listen(host: str, port: int) -> socket.socket:
    """A socket on the port, before minutes of loading; OSError names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as e:
        raise OSError(f"cannot listen on {host} port {port}: {e.strerror or e}") from None


async def _serve(
    server: Any,
    listener: socket.socket,
    app: "FastChatApp",
    engine: "AsyncLLMEngine",
    options: argparse.Namespace,
) -> int:
    """Answer requests until SIGINT or SIGTERM, and then end what is not finished."""
    exit_codes = {signal.SIGINT: ranks.INTERRUPTED, signal.SIGTERM: 0}
    loop, tasks, received = asyncio.get_running_loop(), set(), []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        server.should_exit = True
        # Its open streams end with an error each. In a thread: it waits for the step to end.
        tasks.add(loop.create_task(asyncio.to_thread(engine.close)))

    for number in exit_codes:
        loop.add_signal_handler(number, stop, number)
    server.capture_signals = contextlib.nullcontext  # uvicorn's own would end the process
    address = options.worker_address or f"http://{_in_url(options.host)}:{options.port}"
    ranks.say(f"worker for {', '.join(app.model_names)} at {address}; Ctrl-C ends it")
    beat = None
    if not options.no_register:
        beat = asyncio.create_task(
            stay_registered(
                options.controller_address, address, app.status, _heartbeat_interval_s()
            )
        )
    await server.serve(sockets=[listener])
    if beat is not None:
        beat.cancel()
    await asyncio.gather(*tasks)
    return exit_codes[received[0]]


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def stay_registered(
    controller: str, worker: str, status: Callable[[], dict[str, Any]], interval_s: float
) -> None:
    """Register with the controller and send it heartbeats, until cancelled.

    A controller that is away is tried again; one that has forgotten the worker hears of it again.
    """
    is_known, trouble = False, ""
    while True:
        try:
            if is_known:
                beat = {"worker_name": worker, "queue_length": status()["queue_length"]}
                answer = await asyncio.to_thread(_post, controller + "/receive_heart_beat", beat)
                is_known = answer["exist"]
            if not is_known:
                card = {
                    "worker_name": worker, "check_heart_beat": True,
                    "worker_status": status(), "multimodal": False,
                }  # fmt: skip
                await asyncio.to_thread(_post, controller + "/register_worker", card)
                is_known, trouble = True, ""
                ranks.say(f"registered with the controller at {controller}")
            wait = interval_s
        except (OSError, http.client.HTTPException, ValueError, TypeError, KeyError) as e:
            if str(e) != trouble:  # once, not at each attempt
                ranks.say(f"no answer from the controller at {controller} ({e}); trying again")
            trouble, wait = str(e), min(interval_s, _RETRY_S)
        await asyncio.sleep(wait)


def _post(url: str, body: dict[str, Any]) -> Any:
    """POST a JSON object, and the JSON that comes back. A proxy would not know the controller."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_CONTROLLER_TIMEOUT_S) as response:
        return json.load(response)


if __name__ == "__main__":
    sys.exit(main())
