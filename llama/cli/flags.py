"""From the words of a command line, and LLAMA_* variables, to checked values.

In: a `Command`, which names its flags, and the words after it. Out: an `argparse.Namespace` with a
value for each flag. One table holds the type and the meaning of every flag of the commands and of
Meta's scripts. Nothing here knows models or torch, so that a wrong flag is found at once.
"""

import argparse
import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, NoReturn, get_args

from llama.build_args import BuildArgs
from llama.checks import nearest

REQUIRED = object()  # the default of a flag that must be given

_NAME = re.compile(r"--[a-zA-Z][\w-]*(=.*)?", re.DOTALL)
_BOOLS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_KINDS: dict[Any, str] = {int: "a whole number", float: "a number"}


class UsageError(ValueError):
    """The command line cannot be used: nothing was loaded or written."""


class HelpWanted(Exception):
    """The text, such as that of `--help`, is all that was asked for."""


@contextlib.contextmanager
def extra(name: str, user: str) -> Iterator[None]:
    """UsageError that names the extra of this package that `user` needs, where it is missing."""
    try:
        yield
    except ModuleNotFoundError as e:
        raise UsageError(
            f"{user} needs {e.name}, which is not installed: pip install 'llama[{name}]', or "
            f"in a checkout pip install -e '.[{name}]'"
        ) from None


@dataclass(frozen=True)
class Flag:
    """The type of a flag's value, how `--help` writes the value, and what it means."""

    kind: Callable[[str], Any]  # str, int, float or bool; or what raises a ValueError that says why
    metavar: str
    meaning: str
    absent: str = ""  # what None stands for; a number that has it may be given as "none"


def within(low: int, high: int) -> Callable[[str], int]:
    """The kind of a whole number, both limits included."""

    def read_number(text: str) -> int:
        value = int(text) if text.strip().isdecimal() else low - 1
        if not low <= value <= high:
            raise ValueError(f"{text!r} is not a whole number from {low} to {high}")
        return value

    return read_number


def _build_flag(argument: Field[Any]) -> Flag:
    types = (argument.type, *get_args(argument.type))
    kind = next((kind for kind in (bool, int, float) if kind in types), str)
    return Flag(kind, *argument.metadata["flag"])


FLAGS = {
    **{each.name: _build_flag(each) for each in fields(BuildArgs) if each.metadata},
    "ckpt_dir": Flag(str, "DIR", "folder of the weights, or a GGUF file", "the demo model"),
    "in_file": Flag(str, "IN", "prompts or OpenAI batch requests, one per line"),
    "out_file": Flag(str, "OUT", "results, one JSON record per line"),
    "name": Flag(str, "NAME", "a model: ORG/NAME, or one of Meta's alone: Llama-3.2-1B"),
    "file": Flag(str, "FILE", "of a model's files this GGUF file alone", "its safetensors"),
    "out_dir": Flag(
        str, "OUT", "folder, or of convert a .gguf file, to write; it must not exist yet"
    ),
    "packed": Flag(bool, "", "write what a CPU maps and runs at once, on any number of ranks"),
    "prompt": Flag(str, "TEXT", "text to continue", "that of prompt_file"),
    "prompt_file": Flag(str, "FILE", "file of the text to continue", "standard input, as with -"),
    "system": Flag(str, "TEXT", "system message of the chat", "none"),
    "temperature": Flag(float, "X", "0 takes the likeliest token; higher values vary more"),
    "top_p": Flag(float, "P", "sample from the likeliest tokens that hold this probability"),
    "max_gen_len": Flag(int, "N", "most tokens of one answer", "what max_seq_len leaves"),
    "ranks": Flag(within(1, 1024), "N", "processes of this machine that share the work"),
    "url": Flag(str, "URL", "server of OpenAI's API that answers; no model is loaded", "none"),
    "resident": Flag(bool, "", "let a server of this model answer that stays; start it if need be"),
    "background": Flag(bool, "", "stay, at a socket of this user; --resident finds it there"),
    "idle_minutes": Flag(
        within(0, 10**6), "N", "such a server ends so long after its last client; 0: never"
    ),
    "model": Flag(str, "NAME", "of the server's models, this one", "its first"),
    "concurrency": Flag(int, "N", "requests under way at the server at once"),
    "retry_s": Flag(float, "S", "seconds that a failed request to the server is tried again"),
    "resume": Flag(bool, "", "add the results that OUT does not have yet"),
    "fastchat_controller": Flag(str, "URL", "FastChat's controller, to be its worker", "none"),
    "worker_address": Flag(str, "URL", "where that controller finds this server", "host and port"),
    "host": Flag(str, "HOST", "address to listen on"),
    "port": Flag(within(0, 65_535), "N", "port to listen on; 0 takes a free one"),
    "api_key": Flag(
        str, "KEY", "what clients send to a server; needed to serve on another host", "none"
    ),
    "api_key_file": Flag(str, "FILE", "file with such keys, one in each line", "none"),
    "allow_origin": Flag(
        str, "URL", "web pages that may ask, such as http://localhost:3000; A,B; * for all", "none"
    ),
    "served_model_name": Flag(str, "NAME", "name of the model", "the name of the folder"),
    "max_queue": Flag(int, "N", "sequences that wait; more are refused with status 503"),
    "max_connections": Flag(int, "N", "connections at once; more are refused with status 503"),
    "max_per_address": Flag(int, "N", "connections from one address", "three quarters of those"),
    "max_wait_s": Flag(float, "S", "seconds that a request waits for its first token"),
    "tool_format": Flag(
        str, "NAME", "of tool calls: llama3.1, llama3.2 or none", "that of the generation"
    ),
    "lenient": Flag(bool, "", "leave out fields that cannot be honoured, and say so in a header"),
    "drain_s": Flag(float, "S", "seconds that running requests get after a signal"),
}


@dataclass(frozen=True)
class Command:
    """A command: its flags with their defaults, and what runs it."""

    summary: str
    defaults: Mapping[str, Any]
    positional: Sequence[str] = ()  # flags that may also be given by position
    function: Callable[[argparse.Namespace], int] | None = None
    examples: Sequence[str] = field(default=())
    error_code: int = 1  # the exit code where it fails with an error
    flags: Mapping[str, Flag] = field(default_factory=lambda: FLAGS)
    has_variables: bool = True  # whether LLAMA_* variables stand for flags


def variable(name: str) -> str:
    """The environment variable that stands for a flag."""
    return f"LLAMA_{name.upper()}"


def read(
    program: str, command: Command, words: Sequence[str], environ: Mapping[str, str]
) -> argparse.Namespace:
    """The value of every flag: from the command line, else its variable, else its default.
    UsageError names the flag or variable that is wrong. HelpWanted holds the text for `--help`."""
    texts = _given(program, command, words)
    options = argparse.Namespace()
    for name, default in command.defaults.items():
        if command.has_variables and (text := environ.get(variable(name))):
            texts.setdefault(name, (variable(name), text))
        if name in texts:
            default = _value(command.flags[name], *texts[name])
        if default is REQUIRED:
            shown = command.flags[name].metavar if name in command.positional else f"--{name}"
            raise UsageError(f"{shown} is missing; {_remedy(command)}")
        setattr(options, name, default)
    return options


def _given(program: str, command: Command, words: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Flag -> what it is called there, and its text. Other words go to the positional names."""
    at = words.index("--") if "--" in words else len(words)
    flags = [_with_underscores(word) for word in words[:at]]
    found, left = _make_parser(program, command).parse_known_args(flags)
    for word in left:
        if word.startswith("-") and word != "-":
            name = word.partition("=")[0]
            likely = nearest(name, [f"--{flag}" for flag in command.defaults])
            raise UsageError(f"there is no flag {name}{likely or '; --help lists the flags'}")
    texts = {name: (f"--{name}", text) for name, text in vars(found).items()}
    placed, names = [*left, *words[at + 1 :]], command.positional
    if len(placed) > len(names):
        raise UsageError(f"{placed[len(names)]!r} is one word too many; {_remedy(command)}")
    for name, word in zip(names, placed, strict=False):
        shown = command.flags[name].metavar
        if name in texts:
            raise UsageError(f"{shown} is given twice: {word!r} and --{name}")
        texts[name] = shown, word
    return texts


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message.replace("argument --", "--", 1))

    def print_help(self, file: object = None) -> NoReturn:
        raise HelpWanted(self.format_help())


def _make_parser(program: str, command: Command) -> _Parser:
    """A parser of the flags alone, to their texts."""
    shown = [
        command.flags[name].metavar
        if command.defaults[name] is REQUIRED
        else f"[{command.flags[name].metavar}]"
        for name in command.positional
    ]
    parser = _Parser(
        prog=program,
        usage=" ".join([program, *shown, "[flags]"]),
        description=command.summary,
        epilog="\n  ".join(["examples:", *command.examples]) if command.examples else None,
        formatter_class=functools.partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=30
        ),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for name, default in command.defaults.items():
        flag = command.flags[name]
        known = [_default(flag, default), *[variable(name)] * command.has_variables]
        meaning = f"{flag.meaning} ({'; '.join(known)})".replace("%", "%%")
        if flag.kind is bool:
            parser.add_argument(f"--{name}", action="store_const", const="true", help=meaning)
        else:
            parser.add_argument(f"--{name}", metavar=flag.metavar, help=meaning)
    return parser


def _default(flag: Flag, default: Any) -> str:
    if default is REQUIRED:
        return "required"
    if default is None:
        return f"default: {flag.absent}"
    if flag.kind is bool:
        return f"default: {str(default).lower()}"
    if isinstance(default, tuple):
        return f"default: {','.join(map(str, default))}"
    return f"default: {default}" + (f", none: {flag.absent}" if flag.absent else "")


def _value(flag: Flag, shown: str, text: str) -> Any:
    """From the text of a value to the value. UsageError says what is wrong; `shown`: with what."""
    if flag.kind is str:
        if not text and flag.metavar != "TEXT":  # "$UNSET" must not mean the demo model
            raise UsageError(f"{shown}: '' names nothing: leave it out, or give a value")
        return text  # "42" and "3.1" stay texts
    if flag.kind is bool:
        if text.lower() not in _BOOLS:
            raise UsageError(f"{shown}: {text!r} is neither true nor false")
        return _BOOLS[text.lower()]
    if text.lower() == "none" and flag.absent:
        return None
    try:
        return flag.kind(text)
    except ValueError as e:
        why = f"{text!r} is not {_KINDS[flag.kind]}" if flag.kind in _KINDS else e
        raise UsageError(f"{shown}: {why}") from None


def _with_underscores(word: str) -> str:
    """`--ckpt-dir=a-b` -> `--ckpt_dir=a-b`."""
    if not _NAME.fullmatch(word):
        return word
    name, equals, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}"


def _remedy(command: Command) -> str:
    return "--help shows an example" if command.examples else "--help lists the flags"
