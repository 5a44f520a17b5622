"""Read the flags of a command line, and LLAMA_* variables, as checked values.

The input is a `Command`, which names its flags, and the arguments after its name. The output is an
`argparse.Namespace` with a value for each flag. One table holds the type and the meaning of every
flag of the commands and of Meta's scripts, and makes this file longer than 400 lines. This module
must know neither models nor torch, so that a wrong flag is reported at once.
"""

import argparse
import contextlib
import functools
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, get_args

from llama.build_args import BuildArgs, FlagArgument
from llama.common.checks import FieldError, nearest
from llama.common.extras import install_hint

REQUIRED = object()  # the default of a flag that must be given

# The flags of sampling, with their defaults. `SAMPLING_FIELDS` has their fields in SamplingParams
# where these have other names.
SAMPLING_FLAGS: dict[str, Any] = {"temperature": 0.6, "top_p": 0.9, "max_gen_len": None}
SAMPLING_FIELDS = {"max_gen_len": "max_tokens"}

_NAME = re.compile(r"--[a-zA-Z][\w-]*(=.*)?", re.DOTALL)
_KEPT_BYTES = re.compile(r"[\udc80-\udcff]")  # bytes that os.fsdecode could not decode
_BOOLS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_KINDS: dict[Any, str] = {int: "a whole number", float: "a number"}


class UsageError(ValueError):
    """The command line cannot be used. Nothing was loaded or written."""


class HelpWanted(Exception):
    """Only a text was asked for, such as that of `--help`. The argument is the text."""


@contextlib.contextmanager
def extra(name: str, user: str) -> Iterator[None]:
    """Report a package that is missing within the block.

    Args:
        name: The extra of this package that installs it.
        user: The flag or command that needs it.

    Raises:
        UsageError: A module was not found; the message names the extra.
    """
    try:
        yield
    except ModuleNotFoundError as e:
        hint = install_hint(name)
        raise UsageError(f"{user} needs {e.name}, which is not installed: {hint}") from None


@contextlib.contextmanager
def usage_errors(names: Collection[str]) -> Iterator[None]:
    """Turn the error of a value that a flag has given into a UsageError.

    Args:
        names: The flags. An error that names another field is raised as it is.
    """
    try:
        yield
    except FieldError as e:
        if e.field not in names:
            raise
        raise UsageError(str(e)) from e


@dataclass(frozen=True)
class Flag:
    """The type and the meaning of a flag.

    Attributes:
        kind: str, int, float or bool; or a function that reads a text, and raises ValueError with
            the reason if it cannot.
        metavar: The name of the value in `--help`.
        meaning: The text of `--help`.
        absent: The meaning of None. A number with such a meaning may be given as "none".
        choices: Values that shells complete; others may be valid, too.
    """

    kind: Callable[[str], Any]
    metavar: str
    meaning: str
    absent: str = ""
    choices: tuple[str, ...] = ()


def within(low: int, high: int) -> Callable[[str], int]:
    """Return the kind of a whole number from `low` to `high`, both included."""

    def read_number(text: str) -> int:
        value = int(text) if text.strip().isdecimal() else low - 1
        if not low <= value <= high:
            raise ValueError(f"{text!r} is not a whole number from {low} to {high}")
        return value

    return read_number


def min_number(low: float) -> Callable[[str], float]:
    """Return the kind of a finite number from `low` upwards."""

    def read_number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value < math.inf:
            raise ValueError(f"{text!r} is not a number from {low:g} upwards")
        return value

    return read_number


def one_of(*names: str) -> Callable[[str], str]:
    """Return the kind of a text that must be one of these names."""

    def read_name(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return read_name


def _build_flag(argument: FlagArgument) -> Flag:
    types = (argument.kind, *get_args(argument.kind))
    kind: Any = next((kind for kind in (bool, int, float) if kind in types), str)
    if kind is int and argument.limits is not None:
        kind = within(int(argument.limits.low), int(argument.limits.high))
    flag = argument.flag
    return Flag(kind, flag.metavar, flag.meaning, flag.absent, flag.choices)


_SHELLS = ("bash", "zsh", "fish")
# `llama.model` has these tables, and imports torch.
SHAPE_NAMES = ("1b", "3b", "8b", "70b", "405b")
GPU_NAMES = ("h100", "h200", "b200", "a100", "4090", "cpu")

FLAGS = {
    **{name: _build_flag(argument) for name, argument in BuildArgs.flags().items()},
    "ckpt_dir": Flag(str, "DIR", "Folder of the weights, or a GGUF file", "the demo model"),
    "in_file": Flag(str, "IN", "File of prompts or OpenAI batch requests, one per line"),
    "out_file": Flag(str, "OUT", "File for the results, one JSON record per line"),
    "name": Flag(str, "NAME", "Model: ORG/NAME, or only the name for Meta's, such as Llama-3.2-1B"),
    "file": Flag(str, "FILE", "Fetch only this GGUF file of the model", "its safetensors files"),
    "out_dir": Flag(
        str, "OUT", "Folder to write, or for convert a .gguf file; it must not exist yet"
    ),
    "packed": Flag(
        bool, "", "Write a layout that a CPU maps and runs at once, on any number of ranks"
    ),
    "prompt": Flag(str, "TEXT", "Text to continue", "the content of prompt_file"),
    "prompt_file": Flag(
        str, "FILE", "File with the text to continue; - is standard input", "standard input"
    ),
    "system": Flag(str, "TEXT", "System message of the chat", "none"),
    "no_history": Flag(bool, "", "Do not keep the lines that are typed for the next chat"),
    "temperature": Flag(float, "X", "Sampling temperature; 0 always takes the most likely token"),
    "top_p": Flag(
        float, "P", "Sample from the most likely tokens that together have this probability"
    ),
    "max_gen_len": Flag(
        int, "N", "Maximum number of tokens of one answer", "what max_seq_len leaves"
    ),
    "ranks": Flag(within(1, 1024), "N", "Number of processes on this machine that share the work"),
    "replicas": Flag(
        within(1, 64),
        "N",
        "Number of servers, each with a copy of the model and --ranks processes, behind HAProxy",
    ),
    "url": Flag(
        str, "URL", "Server with OpenAI's API that answers, so that no model is loaded", "none"
    ),
    "resident": Flag(
        bool, "", "Let a server in the background answer; start it if it is not running"
    ),
    "background": Flag(
        bool, "", "Serve in the background, at a socket of this user, where --resident finds it"
    ),
    "idle_minutes": Flag(
        within(0, 10**6),
        "N",
        "Minutes without a client after which a server in the background ends; 0 for no limit",
    ),
    "model": Flag(str, "NAME", "Name of one of the server's models", "its first model"),
    "concurrency": Flag(within(1, 1024), "N", "Number of requests sent to the server at once"),
    "retry_s": Flag(min_number(0), "S", "Seconds during which a failed request is sent again"),
    "resume": Flag(bool, "", "Answer only the lines that have no result in OUT yet"),
    "fastchat_controller": Flag(
        str, "URL", "Controller of FastChat that registers this server as a worker", "none"
    ),
    "worker_address": Flag(
        str, "URL", "Address at which that controller reaches this server", "host and port"
    ),
    "host": Flag(str, "HOST", "Address to listen on"),
    "port": Flag(within(0, 65_535), "N", "Port to listen on; 0 chooses a free one"),
    "uds": Flag(
        str,
        "PATH",
        "Unix domain socket to listen on, in place of the port; --host still says who may ask",
        "none",
    ),
    "api_key": Flag(
        str, "KEY", "Key of the server; required to listen beyond this machine", "none"
    ),
    "api_key_file": Flag(
        str,
        "FILE",
        "File with further keys, one per line; with several keys, each is a tenant",
        "none",
    ),
    "metrics_key_file": Flag(
        str, "FILE", "File with keys that open /metrics and /load, and nothing else", "none"
    ),
    "allow_origin": Flag(
        str,
        "URL",
        "Web pages that may send requests, such as http://localhost:3000; separated by commas, "
        "or * for all",
        "none",
    ),
    "served_model_name": Flag(
        str, "NAME", "Name of the model in requests and answers", "the name of the folder"
    ),
    "lora_modules": Flag(
        str,
        "NAME=PATH",
        "LoRA adapters that requests choose by their names as model; separated by commas",
        "none",
    ),
    "lora_folder": Flag(
        str, "DIR", "Folder from which clients may load LoRA adapters, by vLLM's routes", "none"
    ),
    "max_loras": Flag(
        within(1, 2**16), "N", "Number of LoRA adapters that are loaded at once, by clients or not"
    ),
    "max_queue": Flag(
        within(0, 2**31), "N", "Number of sequences that may wait; more are refused with status 503"
    ),
    "max_answer_mb": Flag(
        within(1, 2**20),
        "MB",
        "MiB that one answer may take; a request that could exceed it is refused",
    ),
    "max_connections": Flag(
        within(1, 2**31), "N", "Number of connections at once; more are refused with status 503"
    ),
    "max_per_address": Flag(
        within(1, 2**31),
        "N",
        "Number of connections at once from one address",
        "three quarters of max_connections",
    ),
    "max_wait_s": Flag(min_number(0), "S", "Seconds that a request may wait for its first token"),
    "tool_format": Flag(
        str,
        "NAME",
        "Format of tool calls: llama3.1, llama3.2 or none",
        "that of the model",
        choices=("llama3.1", "llama3.2", "none"),
    ),
    "shell": Flag(one_of(*_SHELLS), "SHELL", f"Shell: {', '.join(_SHELLS)}", choices=_SHELLS),
    "reasoning_field": Flag(
        one_of("reasoning_content", "reasoning"),
        "NAME",
        "Field of a chat's message that has the reasoning: reasoning is vLLM's name",
        choices=("reasoning_content", "reasoning"),
    ),
    "shape": Flag(
        str,
        "MODEL",
        f"Folder, GGUF file, params.json or config.json, or a size: {', '.join(SHAPE_NAMES)}",
        choices=SHAPE_NAMES,
    ),
    "gpu": Flag(
        one_of(*GPU_NAMES), "NAME", f"Kind of device: {', '.join(GPU_NAMES)}", choices=GPU_NAMES
    ),
    "gpus": Flag(within(1, 16), "N", "Number of GPUs in each machine"),
    "machines": Flag(within(1, 64), "N", "Number of machines"),
    "memory_gb": Flag(
        within(1, 10**6), "GB", "Memory of each device, in GB", "that of the kind of device"
    ),
    "context": Flag(
        within(2, 2**31),
        "N",
        "Number of tokens of a prompt and its answer, half of them each",
        "the model's context, at most 8192",
    ),
    "batch": Flag(
        within(1, 2**20), "N", "Number of sequences that run at once on all devices", "what fits"
    ),
    "json": Flag(bool, "", "Print the report as JSON, with all layouts"),
    "lenient": Flag(
        bool, "", "Ignore fields that are not supported, and name them in a response header"
    ),
    "drain_s": Flag(
        min_number(0), "S", "Seconds that running requests get to finish after a signal"
    ),
}


@dataclass(frozen=True)
class Command:
    """A command of the command line.

    Attributes:
        summary: The first sentences of its `--help`.
        defaults: The names of its flags, with their defaults.
        positional: Names of the flags that may also be given by position.
        function: Runs the command, and returns the exit code.
        examples: Command lines for `--help`.
        error_code: The exit code after an error.
        flags: The table of flags.
        has_variables: Whether LLAMA_* variables stand for flags.
    """

    summary: str
    defaults: Mapping[str, Any]
    positional: Sequence[str] = ()
    function: Callable[[argparse.Namespace], int] | None = None
    examples: Sequence[str] = field(default=())
    error_code: int = 1
    flags: Mapping[str, Flag] = field(default_factory=lambda: FLAGS)
    has_variables: bool = True


def variable(name: str) -> str:
    """Return the environment variable that stands for a flag."""
    return f"LLAMA_{name.upper()}"


def read(
    program: str, command: Command, arguments: Sequence[str], environ: Mapping[str, str]
) -> argparse.Namespace:
    """Return the value of every flag: from the command line, else its variable, else its default.

    Args:
        program: The name of the program, for `--help`.
        command: The command.
        arguments: The arguments after the name of the command.
        environ: The environment variables.

    Raises:
        HelpWanted: `--help` is given.
        UsageError: An argument or a variable cannot be used; the message names it.
    """
    texts = _texts(program, command, arguments)
    options = argparse.Namespace()
    for name, default in command.defaults.items():
        value = default
        if command.has_variables and environ.get(variable(name)):
            texts.setdefault(name, (variable(name), environ[variable(name)]))
        if name in texts:
            source, text = texts[name]
            value = _value(command.flags[name], source, text)
        if value is REQUIRED:
            shown = command.flags[name].metavar if name in command.positional else f"--{name}"
            raise UsageError(f"{shown} is missing; {_remedy(command)}")
        setattr(options, name, value)
    return options


def _texts(program: str, command: Command, arguments: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return for each given flag what it is called on the command line, and the text of its value.

    Arguments without a flag belong to the positional flags, in their order.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = _make_parser(program, command)
    parsed, rest = parser.parse_known_args([_with_underscores(x) for x in arguments[:end]])
    for argument in rest:
        if argument.startswith("-") and argument != "-":
            name = argument.partition("=")[0]
            suggestion = nearest(name, [f"--{flag}" for flag in command.defaults])
            raise UsageError(f"there is no flag {name}{suggestion or '; --help lists the flags'}")
    texts = {name: (f"--{name}", text) for name, text in vars(parsed).items()}
    values = [*rest, *arguments[end + 1 :]]
    if len(values) > len(command.positional):
        unexpected = values[len(command.positional)]
        raise UsageError(f"unexpected argument {unexpected!r}; {_remedy(command)}")
    for name, value in zip(command.positional, values, strict=False):
        shown = command.flags[name].metavar
        if name in texts:
            raise UsageError(f"{shown} is given twice: {value!r} and --{name}")
        texts[name] = (shown, value)
    return texts


class _Parser(argparse.ArgumentParser):
    """A parser that raises exceptions instead of printing and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.replace("argument --", "--", 1))

    def print_help(self, file: object = None) -> NoReturn:
        raise HelpWanted(self.format_help())


def _make_parser(program: str, command: Command) -> _Parser:
    """Return a parser of the flags without the positional arguments. Values remain texts."""
    positional = []
    for name in command.positional:
        metavar = command.flags[name].metavar
        positional.append(metavar if command.defaults[name] is REQUIRED else f"[{metavar}]")
    parser = _Parser(
        prog=program,
        usage=" ".join([program, *positional, "[flags]"]),
        description=command.summary,
        epilog="\n  ".join(["examples:", *command.examples]) if command.examples else None,
        formatter_class=functools.partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=30
        ),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help="Show this help.")
    for name, default in command.defaults.items():
        flag = command.flags[name]
        notes = [_default(flag, default)]
        if command.has_variables:
            notes.append(variable(name))
        text = f"{flag.meaning} ({'; '.join(notes)}).".replace("%", "%%")
        if flag.kind is bool:
            parser.add_argument(f"--{name}", action="store_const", const="true", help=text)
        else:
            parser.add_argument(f"--{name}", metavar=flag.metavar, help=text)
    return parser


def _default(flag: Flag, default: Any) -> str:
    """Describe the default of a flag for `--help`."""
    if default is REQUIRED:
        return "required"
    if default is None:
        return f"default: {flag.absent}"
    if flag.kind is bool:
        return f"default: {str(default).lower()}"
    if isinstance(default, tuple):
        return f"default: {','.join(map(str, default))}"
    return f"default: {default}" + (f", none: {flag.absent}" if flag.absent else "")


def _value(flag: Flag, source: str, text: str) -> Any:
    """Read the value of a flag.

    Args:
        flag: The flag.
        source: The flag, variable or metavar that gave the value, for messages.
        text: The text of the value.

    Raises:
        UsageError: The text cannot be read; the message says why.
    """
    if flag.kind is str:
        if not text and flag.metavar != "TEXT":  # "$UNSET" must not mean the demo model.
            raise UsageError(f"{source}: '' is empty: leave it out, or give a value")
        return _utf8(source, text) if flag.metavar == "TEXT" else text  # "42" remains a text.
    if flag.kind is bool:
        if text.lower() not in _BOOLS:
            raise UsageError(f"{source}: {text!r} is neither true nor false")
        return _BOOLS[text.lower()]
    if text.lower() == "none" and flag.absent:
        return None
    try:
        return flag.kind(text)
    except ValueError as e:
        reason = f"{text!r} is not {_KINDS[flag.kind]}" if flag.kind in _KINDS else e
        raise UsageError(f"{source}: {reason}") from None


def _utf8(source: str, text: str) -> str:
    """Return a text of the command line, whose bytes Python keeps where the locale has no UTF-8.

    Raises:
        UsageError: The bytes are not UTF-8.
    """
    if not _KEPT_BYTES.search(text):
        return text
    try:
        return os.fsencode(text).decode()
    except UnicodeDecodeError:
        raise UsageError(f"{source} is not UTF-8: give a text in UTF-8") from None


def _with_underscores(argument: str) -> str:
    """Replace the dashes in the name of a flag: `--ckpt-dir=a-b` becomes `--ckpt_dir=a-b`."""
    if not _NAME.fullmatch(argument):
        return argument
    name, equals, value = argument.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}"


def _remedy(command: Command) -> str:
    return "--help shows an example" if command.examples else "--help lists the flags"
