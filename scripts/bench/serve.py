"""Measure servers under load, and what HTTP, JSON and scheduling add to the engine's work.

In: a model and numbers of clients, or rates of arrival. Out: a row for each server and case, and
one for the same requests through the engine in this process. Servers are asked in turn; all of them
stay loaded meanwhile.
"""

import asyncio
import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench.engines.ours import our_llama
from bench.engines.vllm import vllm_environment
from bench.load import MODEL, ask, closed_loop, figures, open_loop
from bench.report import Column
from bench.run import Bench, Row, whole
from llama import SamplingParams

_COLUMNS: list[Column] = [
    ("server", "engine", ""), ("clients", "clients", ""), ("per s", "rate", ".1f"),
    ("tokens/s", "tokens_per_s", ".1f"), ("requests/s", "requests_per_s", ".2f"),
    ("first p50 ms", "first_p50", ".0f"), ("p99", "first_p99", ".0f"),
    ("between p50 ms", "between_p50", ".1f"), ("p99", "between_p99", ".1f"),
    ("over engine", "over_engine", ".1%"),
]  # fmt: skip
_SCRIPTS = Path(__file__).resolve().parent.parent


def serve(
    clients: tuple[int, ...] = (1, 8, 32),
    rates: tuple[float, ...] = (),
    requests: int = 64,
    context: tuple[int, ...] = (64,),
    steps: int = 64,
    repeats: int = 1,
    url: str | None = None,
    **flags: Any,
) -> None:
    """Measure throughput, time to the first token and time between tokens of OpenAI servers.

    With `clients`, each client sends its next request when it has an answer (closed loop). With
    `rates`, requests per second arrive as a Poisson process (open loop). A request has `context`
    prompt tokens and `steps` tokens of answer. "in process" is the same number of requests through
    the engine without a server, and "over engine" says how much longer the server took.
    --vs vllm:VENV starts vLLM's server on the same weights; --url uses a running server.
    """
    bench = Bench(**flags)
    if bench.pythons.keys() - {"ours", "vllm"}:
        raise ValueError(f"vs={bench.vs!r}: of the peers, vllm has a server; see also --url")
    tokens = whole("context", context[0])
    batch = max(*clients, 32)
    cases: list[Row] = [{"clients": whole("clients", n)} for n in clients]
    cases += [{"rate": float(rate)} for rate in rates]
    job = {"longest": tokens + whole("steps", steps) + 1, "batch": batch}
    rows: list[Row] = []
    with bench.folders("load") as folders, contextlib.ExitStack() as running:
        urls = {"ours": running.enter_context(_ours(bench, {**job, **folders}))}
        if "vllm" in bench.pythons:
            urls["vllm"] = running.enter_context(_vllm(bench, {**job, **folders}))
        if url is not None:
            urls["url"] = url
        engine = _Engine(bench, {**job, **folders})
        for case in [case for case in cases for _ in range(whole("repeats", repeats))]:
            prompts = _prompts(bench, requests, tokens)
            own = engine.run(prompts, steps, case["clients"]) if "clients" in case else None
            if own is not None:
                rows.append({"engine": "in process", **case, **own})
            for name, address in urls.items():
                print(f"... {name} {case}", file=sys.stderr, flush=True)
                send = partial(_send, address, prompts, steps)
                row = {"engine": name, **case, **asyncio.run(_case(send, case, requests, steps))}
                if own is not None:
                    row["over_engine"] = row["seconds"] / own["seconds"] - 1
                rows.append(row)
    bench.report(_COLUMNS, rows, None)


async def _send(url: str, prompts: list[list[int]], steps: int, number: int) -> Any:
    return await ask(url, MODEL, prompts[number], steps)


async def _case(send: Any, case: Row, requests: int, steps: int) -> Row:
    if "rate" in case:
        return figures(await open_loop(send, requests, case["rate"], seed=0), steps)
    return figures(await closed_loop(send, requests, case["clients"]), steps)


def _prompts(bench: Bench, count: int, tokens: int) -> list[list[int]]:
    """Return new prompts of ordinary ids, so that no prefix cache of an earlier case helps."""
    bench.seed += 1
    draw = random.Random(bench.seed)
    vocab_size = bench.params["vocab_size"] - 256
    return [[draw.randrange(vocab_size) for _ in range(tokens)] for _ in range(count)]


class _Engine:
    """The engine in this process, with the same requests and the same concurrency."""

    def __init__(self, bench: Bench, job: Row) -> None:
        sizes = {"max_seq_len": job["longest"], "max_batch_size": job["batch"]}
        self._engine = our_llama({**bench.ours(), "folder": job["folder"]}, sizes).llm_engine
        self.run([[1, 2, 3]], 4, 1)

    def run(self, prompts: list[list[int]], steps: int, at_once: int) -> Row:
        params = SamplingParams(max_tokens=steps, temperature=0, ignore_eos=True)
        began = time.perf_counter()
        waiting = iter(enumerate(prompts))
        running = 0
        while True:
            while running < at_once and (each := next(waiting, None)) is not None:
                self._engine.add_request(f"{began}-{each[0]}", each[1], params)
                running += 1
            if not running:
                break
            running -= sum(output.finished for output in self._engine.step())
        seconds = time.perf_counter() - began
        count = len(prompts)
        rates = {"tokens_per_s": steps * count / seconds, "requests_per_s": count / seconds}
        return {"seconds": seconds, **rates}


@contextlib.contextmanager
def _ours(bench: Bench, job: Row) -> Iterator[str]:
    command = [
        sys.executable, "-m", "llama", "serve", job["folder"], "--port", "0",
        "--served_model_name", MODEL, "--dtype", bench.dtype, "--device", bench.device_used.type,
        "--max_seq_len", str(job["longest"]), "--max_batch_size", str(job["batch"]),
    ]  # fmt: skip
    with _running(command, bench, {}) as (process, log):
        end = time.monotonic() + bench.limit_s
        while not (found := re.search(r"ready: \S+ at (\S+)/v1", "".join(log))):
            _check(process, log, end)
        yield found[1]


@contextlib.contextmanager
def _vllm(bench: Bench, job: Row) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    python = bench.pythons["vllm"]
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", job["hf"],
        "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port),
        "--dtype", str(bench.stored).replace("bf16", "bfloat16").replace("fp32", "float32"),
        "--max-model-len", str(job["longest"]), "--max-num-seqs", str(job["batch"]),
        "--no-enable-prefix-caching",
    ]  # fmt: skip
    extra = vllm_environment(Path(python).parent.parent) | {"VLLM_CPU_KVCACHE_SPACE": "2"}
    url = f"http://127.0.0.1:{port}"
    with _running(command, bench, extra) as (process, log):
        end = time.monotonic() + bench.limit_s
        while not _is_healthy(url):
            _check(process, log, end)
        yield url


@contextlib.contextmanager
def _running(
    command: list[str], bench: Bench, extra: dict[str, str]
) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Yield the process and its output so far; the process ends with the block."""
    import torch

    paths = [str(_SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        **extra,
    }
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    log: list[str] = []
    assert process.stdout is not None
    threading.Thread(target=log.extend, args=(process.stdout,), daemon=True).start()
    try:
        yield process, log
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _check(process: subprocess.Popen[str], log: list[str], end: float) -> None:
    if process.poll() is not None or time.monotonic() > end:
        raise RuntimeError(f"a server did not start: {''.join(log)[-2000:]}")
    time.sleep(0.1)


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False
