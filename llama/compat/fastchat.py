"""The program `python -m llama.compat.fastchat`: a model worker for FastChat's controller.

In: a command line, with FastChat's names for what it names. Out: a server on one port until Ctrl-C
or SIGTERM, and heartbeats to the controller. The protocol itself is in `fastchat_app.py`. Under
torchrun all ranks are one worker, which rank 0 leads.
"""

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama.cli import ranks
from llama.cli.flags import Command, UsageError, extra, read
from llama.cli.model import BUILD_FLAGS, demo_dir, load

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
_INTERVAL_VARIABLE = "FASTCHAT_WORKER_HEART_BEAT_INTERVAL"
_DEMO_CONTEXT = 512  # the demo model was trained on 512 tokens


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
    with extra("fastchat", "the worker"):
        from llama.compat.fastchat_app import FastChatWorker, serve
    from llama.requests.async_engine import AsyncLLMEngine

    def work() -> int:
        worker = FastChatWorker(
            AsyncLLMEngine(llama),
            names,
            conv_template=options.conv_template,
            limit_concurrency=options.limit_worker_concurrency,
            stream_interval=options.stream_interval,
        )
        controller = None if options.no_register else options.controller_address
        address = options.worker_address or _url(options.host, listener.getsockname()[1])
        interval_s = _heartbeat_interval_s()
        return asyncio.run(
            serve(worker, listener, address, controller=controller, interval_s=interval_s)
        )

    with _listen(options.host, options.port) as listener:
        llama = _load(options)
        return llama.lead(work) or 0


def _load(options: argparse.Namespace) -> Any:
    llama = load(options)
    remedy = "and start a worker for each group; the controller shares requests out"
    ranks.check_one_group(llama.model.parallel.data_size, "a FastChat worker is one group", remedy)
    return llama


def _check(options: argparse.Namespace) -> None:
    """UsageError for what cannot be used, before anything is loaded."""
    _heartbeat_interval_s()
    if options.ckpt_dir and options.model_path:
        raise UsageError("--ckpt_dir and --model_path are the same: give one of them")
    options.ckpt_dir = options.ckpt_dir or options.model_path
    if options.conv_template not in _TEMPLATE_NAMES:
        names = " or ".join(_TEMPLATE_NAMES)
        raise UsageError(f"--conv_template={options.conv_template!r} must be {names}")
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


def _listen(host: str, port: int) -> socket.socket:
    """A socket on the port, before minutes of loading; OSError names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as e:
        raise OSError(f"cannot listen on {host} port {port}: {e.strerror or e}") from None


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


if __name__ == "__main__":
    sys.exit(main())
