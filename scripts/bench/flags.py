"""The flags of the benchmark's commands: their types, and what they mean.

In: a command's function. Out: a `Command` that reads its words, as `llama` reads those of its own
commands; every command also takes the flags of `run.Bench`. No LLAMA_* variable stands for a flag
here: the line that a report quotes is the whole of what was asked for.
"""

import dataclasses
import inspect
from collections.abc import Callable

from bench.run import Bench
from llama.cli.flags import Command, Flag


def whole_numbers(text: str) -> tuple[int, ...]:
    """A flag with several values: "1,8" -> (1, 8)."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not whole numbers with commas between them") from None


def numbers(text: str) -> tuple[float, ...]:
    """A flag with several values: "0.5,8" -> (0.5, 8.0)."""
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not numbers with commas between them") from None


FLAGS = {
    "batches": Flag(whole_numbers, "N,N", "batch sizes"),
    "context": Flag(whole_numbers, "N,N", "prompt tokens: one number, or one per batch"),
    "steps": Flag(int, "N", "steps that are timed"),
    "warmup": Flag(int, "N", "steps before these"),
    "busy": Flag(int, "N", "also beside N processes that compute all the time"),
    "plot": Flag(str, "FILE", "SVG to draw", "none"),
    "tokens": Flag(int, "N", "tokens of the prompt"),
    "temperature": Flag(float, "X", "of sampling"),
    "texts": Flag(str, "NAMES", "of edit, quote, chat, json, random"),
    "speculate": Flag(str, "NAME", "lookup, or the folder of a draft model"),
    "rounds": Flag(int, "N", "turns that all engines take, loaded all the while"),
    "repeats": Flag(int, "N", "runs; the median counts"),
    "requests": Flag(int, "N", "requests of mixed lengths"),
    "clients": Flag(whole_numbers, "N,N", "clients at a time"),
    "rates": Flag(numbers, "X,X", "requests per second", "none"),
    "url": Flag(str, "URL", "a server that runs, without /v1; its model is called bench", "none"),
    "shortest": Flag(int, "N", "tokens of the shortest prompt or answer"),
    "longest": Flag(int, "N", "tokens of the longest prompt or answer"),
    "max_batch_size": Flag(int, "N", "sequences that run at once"),
    "max_seq_len": Flag(int, "N", "most tokens of a sequence"),
    "minutes": Flag(float, "X", "how long it runs"),
    "sample_s": Flag(float, "S", "seconds between two looks at memory and pages"),
    "growth_mb": Flag(float, "X", "memory that may come once all is warm"),
    "rows": Flag(whole_numbers, "N,N", "rows (M) of the product"),
    "formats": Flag(str, "NAMES", "of weights, with commas between them"),
    "text": Flag(str, "FILE", "what is read"),
    "window": Flag(int, "N", "tokens that are read in one piece"),
    "windows": Flag(int, "N", "of these pieces"),
    "model": Flag(
        str, "NAME", "demo, 1b, 3b or 8b with random weights, a folder of weights, or a GGUF file"
    ),
    "dtype": Flag(
        str, "NAME", "bf16, fp16, fp32; int8, fp8, int4 are of our weights, peers have bf16"
    ),
    "device": Flag(str, "NAME", "cuda, mps or cpu", "the first of these that is there"),
    "threads": Flag(int, "N", "threads of every engine", "torch's choice"),
    "vs": Flag(str, "NAMES", "peers with commas between them, each NAME or NAME:VENV", "none"),
    "work_dir": Flag(str, "DIR", "where checkpoints are written and kept", "a folder that goes"),
    "limit_s": Flag(int, "S", "seconds after which an engine is ended"),
    "out": Flag(str, "FILE", "file for all that is printed", "none"),
    "seed": Flag(int, "N", "of weights, prompts and lengths"),
}


def command_of(function: Callable[..., None]) -> Command:
    """The flags of a function's signature, then those that every command takes."""
    own = inspect.signature(function).parameters.values()
    defaults = {p.name: p.default for p in own if p.kind is not p.VAR_KEYWORD}
    shared = {f.name: f.default for f in dataclasses.fields(Bench) if f.init}
    return Command(
        inspect.getdoc(function) or "", defaults | shared, flags=FLAGS, has_variables=False
    )
