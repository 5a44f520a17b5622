"""The flags of the benchmark's commands, their types and their meaning.

In: a command's function. Out: a `Command` that reads its arguments, as `llama` reads those of its
own commands; every command also takes the flags of `run.Bench`. No LLAMA_* variable stands for a
flag here: the line that a report quotes is the whole of what was asked for.
"""

import dataclasses
import inspect
from collections.abc import Callable

from bench.run import Bench
from llama.cli.flags import Flag
from llama.cli.parser import Command


def parse_ints(text: str) -> tuple[int, ...]:
    """Parse a flag with several values: "1,8" -> (1, 8)."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not a list of integers separated by commas") from None


def parse_floats(text: str) -> tuple[float, ...]:
    """Parse a flag with several values: "0.5,8" -> (0.5, 8.0)."""
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not a list of numbers separated by commas") from None


FLAGS = {
    "batches": Flag(parse_ints, "N,N", "Batch sizes"),
    "context": Flag(parse_ints, "N,N", "Prompt tokens: one number, or one per batch"),
    "steps": Flag(int, "N", "Steps that are timed"),
    "warmup": Flag(int, "N", "Warm-up steps before the timed ones"),
    "busy": Flag(int, "N", "Measure again alongside N processes that compute all the time"),
    "plot": Flag(str, "FILE", "SVG to draw", "none"),
    "tokens": Flag(int, "N", "Tokens of the prompt"),
    "tiles": Flag(parse_ints, "N,N", "Tiles of images, 1 to 4"),
    "layers": Flag(int, "N", "Layers of the text model"),
    "temperature": Flag(float, "X", "Sampling temperature"),
    "texts": Flag(str, "NAMES", "Some of edit, quote, chat, json, random"),
    "speculate": Flag(str, "NAME", "Speculative decoding: lookup, or the folder of a draft model"),
    "rounds": Flag(int, "N", "Turns that all engines take while they stay loaded"),
    "repeats": Flag(int, "N", "Runs, whose median is reported"),
    "requests": Flag(int, "N", "Requests of mixed lengths"),
    "clients": Flag(parse_ints, "N,N", "Concurrent clients"),
    "rates": Flag(parse_floats, "X,X", "Requests per second", "none"),
    "step_ms": Flag(float, "X", "Milliseconds of a step of the model"),
    "against": Flag(str, "DIR", "Another tree of this project, measured in turns", "none"),
    "api": Flag(str, "NAME", "API of the streams: chat, messages, responses or ollama"),
    "api_processes": Flag(parse_ints, "N,N", "Processes that answer HTTP besides the model's"),
    "url": Flag(str, "URL", "Running server, without /v1; its model is called bench", "none"),
    "shortest": Flag(int, "N", "Tokens of the shortest prompt or answer"),
    "longest": Flag(int, "N", "Tokens of the longest prompt or answer"),
    "max_batch_size": Flag(int, "N", "Maximum number of sequences per step"),
    "max_seq_len": Flag(int, "N", "Maximum tokens of a sequence"),
    "minutes": Flag(float, "X", "Duration of the run"),
    "sample_s": Flag(float, "S", "Seconds between two samples of memory and pages"),
    "growth_mb": Flag(float, "X", "Permitted growth of memory after the warm-up"),
    "rows": Flag(parse_ints, "N,N", "Rows (M) of the product"),
    "formats": Flag(str, "NAMES", "Weight formats, separated by commas"),
    "reference": Flag(str, "NAME", "Format that the others are compared with"),
    "text": Flag(str, "FILE", "Text to evaluate"),
    "window": Flag(int, "N", "Tokens of a window"),
    "tokenizer": Flag(str, "FILE", "tokenizer.model, for a GGUF file without a vocabulary"),
    "windows": Flag(int, "N", "Number of windows"),
    "model": Flag(
        str, "NAME", "Model: demo, 1b, 3b or 8b with random weights, a folder, or a GGUF file"
    ),
    "dtype": Flag(
        str,
        "NAME",
        "Data type: bf16, fp16, fp32; or int8, fp8, int4 for our weights alongside bf16 peers",
    ),
    "device": Flag(str, "NAME", "Device: cuda, mps or cpu", "the first available"),
    "threads": Flag(int, "N", "Threads of every engine", "torch's choice"),
    "vs": Flag(str, "NAMES", "Peers separated by commas, each NAME or NAME:VENV", "none"),
    "work_dir": Flag(str, "DIR", "Folder that keeps the checkpoints", "a temporary folder"),
    "limit_s": Flag(int, "S", "Seconds after which an engine is stopped"),
    "out": Flag(str, "FILE", "File for the whole output", "none"),
    "seed": Flag(int, "N", "Seed of weights, prompts and lengths"),
}


def command_of(function: Callable[..., None]) -> Command:
    """Return a command with the flags of a function's signature and those of every command."""
    own = inspect.signature(function).parameters.values()
    defaults = {p.name: p.default for p in own if p.kind is not p.VAR_KEYWORD}
    shared = {f.name: f.default for f in dataclasses.fields(Bench) if f.init}
    return Command(
        inspect.getdoc(function) or "", defaults | shared, flags=FLAGS, has_variables=False
    )
