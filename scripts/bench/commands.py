"""Measure the speed of the runtime alongside the machine's roofline and alongside other engines.

    python scripts/bench latency --model 1b --batches 1,8,32 --context 512,512,64
    python scripts/bench latency --model 1b --vs transformers,llama_models --plot latency.svg
    python scripts/bench prefill|offline|load|startup --model demo
    python scripts/bench soak --minutes 20
    torchrun --nproc_per_node 2 scripts/bench ranks --model 1b --threads 1
    python scripts/bench serve --model 1b --clients 1,8,32 --rates 1,4 --vs vllm:VENV
    python scripts/bench linear --model 1b --rows 1,8,32,512
    python scripts/bench quality --model DIR --formats int8,int4
    python scripts/bench host --batches 1,256
    python scripts/bench streams --clients 1,64 --against ../before
    python scripts/bench speculate --model DIR --speculate lookup
    python scripts/bench restart --model 1b --tokens 2000 --vs llama_cpp:VENV
    python scripts/bench images --model 8b --tiles 1,4 --layers 4 --vs llama_models

Flags in, a table and one line of JSON, the last, out. A model is a shape (demo, 1b, 3b, 8b) with
random weights, or a folder with weights. `python scripts/bench COMMAND --help` lists the flags.
"""

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.engines.ours import HOST_STEPS
from bench.expected import expected
from bench.flags import command_of
from bench.host import host
from bench.images import images
from bench.linear import linear
from bench.quality import quality
from bench.ranks import ranks as ranks_command
from bench.report import Column
from bench.report import plot as draw
from bench.restart import restart
from bench.run import Bench, Limits, Row, whole
from bench.serve import serve
from bench.shapes import random_lengths
from bench.soak import soak
from bench.speculate import speculate
from bench.streams import streams
from llama.cli import ranks
from llama.cli.flags import UsageError
from llama.cli.parser import read
from llama.common.checks import nearest
from llama.model.cost import (
    attention_flop,
    decode_bytes,
    offline_roofline,
    prefill_flop,
    step_roofline,
)

_TO_OURS: Column = ("to ours", "to_ours", ".2f")  # times the seconds of our engine
_WHO: list[Column] = [("engine", "engine", ""), ("dtype", "dtype", "")]
_LATENCY: list[Column] = [
    *_WHO, ("batch", "batch", ""), ("context", "context", ""),
    ("first ms", "first_ms", ".1f"), ("step ms", "step_ms", ".2f"), ("least", "step_ms_min", ".2f"),
    ("host ms", "host_ms", ".2f"), ("tokens/s", "tokens_per_s", ".1f"),
    ("GB/s", "gb_per_s", ".1f"),
    ("roofline ms", "roofline_ms", ".2f"), ("of roofline", "roofline_fraction", ".0%"),
    _TO_OURS,
]  # fmt: skip
_BESIDE: list[Column] = [("busy", "busy", ""), ("to quiet", "to_quiet", ".2f")]
_PREFILL: list[Column] = [
    *_WHO, ("tokens", "tokens", ""), ("ms", "ms", ".1f"),
    ("least", "ms_min", ".1f"), ("tokens/s", "tokens_per_s", ".1f"),
    ("TFLOP/s", "tflop_per_s", ".3f"), ("roofline ms", "roofline_ms", ".1f"),
    ("of roofline", "roofline_fraction", ".0%"),
    _TO_OURS,
]  # fmt: skip
_OFFLINE: list[Column] = [
    *_WHO, ("requests", "requests", ""), ("in", "tokens_in", ""),
    ("out", "tokens_out", ""), ("seconds", "seconds", ".2f"), ("tokens/s", "tokens_per_s", ".1f"),
    ("out/s", "out_per_s", ".1f"), ("roofline s", "roofline_s", ".2f"),
    ("of roofline", "roofline_fraction", ".0%"),
    _TO_OURS,
]  # fmt: skip
_LOAD: list[Column] = [
    *_WHO, ("import s", "imports", ".2f"), ("load s", "load", ".2f"),
    ("private GB", "private_gb", ".2f"), ("resident GB", "resident_gb", ".2f"),
    ("device GB", "device_gb", ".2f"),
]  # fmt: skip
_STARTUP: list[Column] = [
    *_WHO, ("first token s", "seconds", ".2f"), ("import s", "imports", ".2f"),
    ("load s", "load", ".2f"), ("tokenizer", "tokenizer", ".2f"), ("read", "read", ".2f"),
    ("pack", "pack", ".2f"), ("first pass", "first", ".2f"), _TO_OURS,
]  # fmt: skip


def latency(
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32),
    context: tuple[int, ...] = (512,),
    steps: int = 32,
    warmup: int = 4,
    rounds: int = 1,
    busy: int = 0,
    plot: str | None = None,
    **flags: Any,
) -> None:
    """Measure the time to the first token, and of each step after it, by batch size.

    The step is the median; "host ms" is the part of it outside the model's forward. The roofline is
    the longer of two times: to read all weights and the KV cache once, and to do the operations of
    all tokens. With batches above 1, the first token is that of the last prompt. With --rounds all
    engines stay loaded and take turns of so many steps, and "to ours" is the median of the rounds.
    With --busy each case is measured twice, quiet and then alongside busy processes, and "to quiet"
    is the second step over the first.
    """
    bench = Bench(**flags)
    sizes = [whole("batches", batch) for batch in batches]
    contexts = [whole("context", length) for length in context]
    if len(contexts) not in (1, len(sizes)):
        raise ValueError(
            f"context={context}: give one number, or one for each of batches={batches}"
        )
    turns = whole("rounds", rounds) * (whole("steps", steps) + whole("warmup", warmup, 0))
    cases = [
        # The prompts of a batch may be read over several steps, in which the first ones go on.
        {
            "batch": b,
            "context": c,
            "steps": steps,
            "warmup": warmup,
            "rounds": rounds,
            "longest": c + turns + HOST_STEPS + b + 1,
        }
        for b, c in zip(sizes, contexts * (len(sizes) if len(contexts) == 1 else 1), strict=True)
    ]
    if whole("busy", busy, 0):
        cases = [{**case, "busy": count} for case in cases for count in (0, busy)]

    def row_of(case: Row, measured: Row, limits: Limits) -> Row:
        step = statistics.median(measured["steps"])
        contexts = [case["context"] + (turns + warmup) // 2] * case["batch"]
        storage = bench.storage(case)
        read = decode_bytes(bench.args, contexts=contexts, **storage)
        roofline = step_roofline(
            bench.args, contexts=contexts, bandwidth=limits.read, flops=limits.flops, **storage
        )
        host = measured.get("host")
        return {
            "first_ms": measured["first"] * 1e3,
            "step_ms": step * 1e3,
            "step_ms_min": min(measured["steps"]) * 1e3,
            "host_ms": None if host is None else host * 1e3,
            "tokens_per_s": case["batch"] / step,
            "gb_per_s": read / step / 1e9,
            "roofline_ms": roofline * 1e3,
            "roofline_fraction": roofline / step,
        }

    columns = [*_LATENCY, *_BESIDE] if busy else _LATENCY
    rows = bench.run("latency", cases, columns, row_of, "step_ms", finish=_compare_with_quiet)
    if plot is not None:
        Path(plot).write_text(draw([row for row in rows if not row.get("busy")]))


def _compare_with_quiet(rows: list[Row]) -> None:
    """Add "to_quiet" to each row alongside busy processes whose case was also measured without."""
    quiet = {(r["engine"], r["batch"], r["context"]): r for r in rows if r.get("busy") == 0}
    for row in rows:
        same = quiet.get((row["engine"], row["batch"], row["context"]))
        if row.get("busy") and same:
            row["to_quiet"] = row["step_ms"] / same["step_ms"]


def prefill(tokens: int = 512, repeats: int = 3, rounds: int = 1, **flags: Any) -> None:
    """Measure the tokens per second of one prompt, up to its first token.

    The figure is the median of `repeats`. With --rounds all engines stay loaded and take turns, and
    "to ours" is the median of the rounds.
    """
    bench = Bench(**flags)
    whole("repeats", repeats)
    longest = whole("tokens", tokens) + 2
    case = {"batch": 1, "context": tokens, "repeats": repeats, "longest": longest}
    case["rounds"] = whole("rounds", rounds)
    operations = prefill_flop(bench.args, tokens) + attention_flop(bench.args, tokens)

    def row_of(case: Row, measured: Row, limits: Limits) -> Row:
        seconds = statistics.median(measured["prefills"])
        return {
            "tokens": tokens,
            "ms": seconds * 1e3,
            "ms_min": min(measured["prefills"]) * 1e3,
            "tokens_per_s": tokens / seconds,
            "tflop_per_s": operations / seconds / 1e12,
            "roofline_ms": operations / limits.flops * 1e3,
            "roofline_fraction": operations / limits.flops / seconds,
        }

    bench.run("prefill", [case], _PREFILL, row_of, "ms")


def offline(
    requests: int = 32,
    shortest: int = 16,
    longest: int = 256,
    max_batch_size: int = 32,
    **flags: Any,
) -> None:
    """Answer a fixed set of requests, whose prompts and answers have mixed lengths.

    The lengths of prompts and answers are drawn between `shortest` and `longest` with the seed.
    """
    bench = Bench(**flags)
    whole("max_batch_size", max_batch_size)
    whole("longest", longest, whole("shortest", shortest))
    lengths = random_lengths(whole("requests", requests), shortest, longest, bench.seed)
    tokens_in, tokens_out = sum(p for p, _ in lengths), sum(n for _, n in lengths)
    case = {"batch": max_batch_size, "lengths": lengths, "longest": 2 * longest}

    def row_of(case: Row, measured: Row, limits: Limits) -> Row:
        seconds = measured["seconds"]
        roofline = offline_roofline(
            bench.args,
            lengths=lengths,
            bandwidth=limits.read,
            flops=limits.flops,
            **bench.storage(case),
        )
        return {
            "requests": requests,
            "tokens_in": tokens_in,
            "tokens_out": tokens_out,
            "tokens_per_s": (tokens_in + tokens_out) / seconds,
            "out_per_s": tokens_out / seconds,
            "roofline_s": roofline,
            "roofline_fraction": roofline / seconds,
        }

    bench.run("offline", [case], _OFFLINE, row_of)


def load(max_seq_len: int = 512, max_batch_size: int = 1, **flags: Any) -> None:
    """Measure the time to load a checkpoint from the page cache, and the peak memory.

    Private memory is what the process has of its own (RssAnon, sampled), resident memory counts the
    pages of mapped files too (VmHWM), and device memory is that of CUDA.
    """
    bench = Bench(**flags)
    sizes = {
        "longest": whole("max_seq_len", max_seq_len),
        "batch": whole("max_batch_size", max_batch_size),
    }

    def row_of(case: Row, measured: Row, limits: Limits) -> Row:
        return {
            "private_gb": measured["peak_private"] / 1e9,
            "resident_gb": measured["peak_resident"] / 1e9,
            "device_gb": measured["peak_device"] / 1e9,
        }

    bench.run("load", [sizes], _LOAD, row_of)


def startup(max_seq_len: int = 512, **flags: Any) -> None:
    """Measure the seconds from the command to the first token of a short prompt, and their parts.

    The parts are imports, load (in it tokenizer, reading and packing, some of which may run side by
    side), and the first pass.
    """
    bench = Bench(**flags)
    case = {"batch": 1, "longest": whole("max_seq_len", max_seq_len, 16)}

    bench.run("startup", [case], _STARTUP, lambda case, measured, limits: {})


_COMMANDS: dict[str, Callable[..., None]] = {
    command.__name__: command
    for command in (
        latency,
        prefill,
        offline,
        load,
        startup,
        soak,
        linear,
        quality,
        serve,
        host,
        streams,
        expected,
        speculate,
        restart,
        images,
    )
} | {"ranks": ranks_command}  # `ranks` is a module here


def main() -> int:
    """Run the command that sys.argv names and return its exit code.

    The code is 0, 1 where the command failed, and 2 where the command line is wrong.
    """
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(f"{__doc__}\ncommands: {', '.join(_COMMANDS)}")
        return 0
    return ranks.run(lambda: _run(name, arguments))


def _run(name: str, arguments: list[str]) -> None:
    if name not in _COMMANDS:
        likely = nearest(name, list(_COMMANDS)) or f"; there are {', '.join(_COMMANDS)}"
        raise UsageError(f"there is no command {name}{likely}")
    given = read(f"bench {name}", command_of(_COMMANDS[name]), arguments)
    try:
        _COMMANDS[name](**vars(given))
    except (TypeError, ImportError) as e:
        # A number in the folder's files has the wrong type, or a package is missing.
        raise ValueError(str(e)) from e
