"""The table of all flags of the commands and of Meta's scripts: types, meanings and groups.

parser.py makes options of click of them. The arguments of `Llama.build` bring their own flags. This
module must know neither models nor torch, so that `--help` and a wrong flag answer at once.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

import click

from llama.build_args import RANKS, SAMPLING, BuildArgs, FlagArgument
from llama.common.checks import FieldError

# The flags of sampling, with their defaults. `SAMPLING_FIELDS` has their fields in SamplingParams
# where these have other names.
SAMPLING_FLAGS: dict[str, Any] = {"temperature": 0.6, "top_p": 0.9, "max_gen_len": None}
SAMPLING_FIELDS = {"max_gen_len": "max_tokens"}


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
        from llama.common.extras import install_hint  # It imports importlib.metadata.

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
        kind: str, int, float, bool or a type of click; or a function that reads a text, and raises
            ValueError with the reason if it cannot.
        metavar: The name of the value in `--help`.
        meaning: The text of `--help`.
        absent: The meaning of None. A number with such a meaning may be given as "none".
        choices: Values that shells complete; others may be valid, too.
        group: The heading of the flag in `--help`; empty for flags of one command.
    """

    kind: "Callable[[str], Any] | click.ParamType[Any]"
    metavar: str
    meaning: str
    absent: str = ""
    choices: tuple[str, ...] = ()
    group: str = ""


def _build_flag(argument: FlagArgument) -> Flag:
    types = (argument.kind, *get_args(argument.kind))
    kind: Any = next((kind for kind in (bool, int, float) if kind in types), str)
    if kind is int and argument.limits is not None:
        kind = click.IntRange(int(argument.limits.low), int(argument.limits.high))
    flag = argument.flag
    return Flag(kind, flag.metavar, flag.meaning, flag.absent, flag.choices, flag.group)


_SHELLS = ("bash", "zsh", "fish")
# `llama.model` has these tables, and imports torch.
SHAPE_NAMES = ("1b", "3b", "8b", "70b", "405b", "11b-vision", "90b-vision")
GPU_NAMES = ("h100", "h200", "b200", "a100", "4090", "cpu")

_TABLE: dict[str, dict[str, Flag]] = {  # keys: headings in `--help`; "" is of a command alone
    "": {
        "in_file": Flag(str, "IN", "File of prompts or OpenAI batch requests, one per line"),
        "out_file": Flag(str, "OUT", "File for the results, one JSON record per line"),
        "images": Flag(str, "DIR", "Folder of the images whose file names stand in IN"),
        "resume": Flag(bool, "", "Answer only the lines that have no result in OUT yet"),
        "name": Flag(
            str, "NAME", "Model: ORG/NAME, or only the name for Meta's, such as Llama-3.2-1B"
        ),
        "file": Flag(
            str, "FILE", "Fetch only this GGUF file of the model", "its safetensors files"
        ),
        "out_dir": Flag(
            str, "OUT", "Folder to write, or for convert a .gguf file; it must not exist yet"
        ),
        "clear": Flag(bool, "", "Remove pages, in place of listing them"),
        "tenant": Flag(
            str,
            "NAME",
            "Remove those of this tenant, and pages of others in the same files",
            "all",
        ),
        "older_than": Flag(
            click.FloatRange(min=0), "DAYS", "Remove those alone that were not used so long", "0"
        ),
        "answers": Flag(
            bool,
            "",
            "Compare the engine's answers with the reference's, in place of checking files",
        ),
        "original": Flag(
            str, "DIR", "Weights that the reference runs, such as those DIR was made from", "DIR"
        ),
        "packed": Flag(
            bool, "", "Write a layout that a CPU maps and runs at once, on any number of ranks"
        ),
        "text_only": Flag(bool, "", "Take the text model of a vision model alone, as a Llama"),
        "prompt": Flag(str, "TEXT", "Text to continue", "the content of prompt_file"),
        "prompt_file": Flag(
            str, "FILE", "File with the text to continue; - is standard input", "standard input"
        ),
        "system": Flag(str, "TEXT", "System message of the chat", "none"),
        "no_history": Flag(bool, "", "Do not keep the lines that are typed for the next chat"),
        "shape": Flag(
            str,
            "MODEL",
            f"Folder, GGUF file, params.json or config.json, or a size: {', '.join(SHAPE_NAMES)}",
            choices=SHAPE_NAMES,
        ),
        "gpu": Flag(
            click.Choice(GPU_NAMES),
            "NAME",
            f"Kind of device: {', '.join(GPU_NAMES)}",
            choices=GPU_NAMES,
        ),
        "gpus": Flag(click.IntRange(1, 16), "N", "Number of GPUs in each machine"),
        "machines": Flag(click.IntRange(1, 64), "N", "Number of machines"),
        "memory_gb": Flag(
            click.IntRange(1, 10**6),
            "GB",
            "Memory of each device, in GB",
            "that of the kind of device",
        ),
        "context": Flag(
            click.IntRange(2, 2**31),
            "N",
            "Number of tokens of a prompt and its answer, half of them each",
            "the model's context, at most 8192",
        ),
        "batch": Flag(
            click.IntRange(1, 2**20),
            "N",
            "Number of sequences that run at once on all devices",
            "what fits",
        ),
        "json": Flag(bool, "", "Print the report as JSON, with all layouts"),
        "shell": Flag(
            click.Choice(_SHELLS), "SHELL", f"Shell: {', '.join(_SHELLS)}", choices=_SHELLS
        ),
    },
    "Model": {
        "ckpt_dir": Flag(str, "DIR", "Folder of the weights, or a GGUF file", "the demo model"),
    },
    SAMPLING: {
        "temperature": Flag(
            float, "X", "Sampling temperature; 0 always takes the most likely token"
        ),
        "top_p": Flag(
            float, "P", "Sample from the most likely tokens that together have this probability"
        ),
        "max_gen_len": Flag(
            int, "N", "Maximum number of tokens of one answer", "what max_seq_len leaves"
        ),
    },
    RANKS: {
        "ranks": Flag(
            click.IntRange(1, 1024), "N", "Number of processes on this machine that share the work"
        ),
        "replicas": Flag(
            click.IntRange(1, 64),
            "N",
            "Number of servers behind HAProxy, each with the model and --ranks processes",
        ),
        "api_processes": Flag(
            click.IntRange(0, 64),
            "N",
            "Number of processes that answer HTTP, besides the one of the model; 0: that one does",
            "0 on a CPU, 1 on a GPU",
        ),
    },
    "Server": {
        "url": Flag(
            str, "URL", "Server with OpenAI's API that answers, so that no model is loaded", "none"
        ),
        "resident": Flag(
            bool, "", "Let a server in the background answer; start it if it is not running"
        ),
        "model": Flag(str, "NAME", "Name of one of the server's models", "its first model"),
        "concurrency": Flag(
            click.IntRange(1, 1024), "N", "Number of requests sent to the server at once"
        ),
        "retry_s": Flag(
            click.FloatRange(min=0), "S", "Seconds during which a failed request is sent again"
        ),
        "host": Flag(str, "HOST", "Address to listen on"),
        "port": Flag(click.IntRange(0, 65_535), "N", "Port to listen on; 0 chooses a free one"),
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
        "shared_prefix": Flag(
            str,
            "FILE",
            "File with a system prompt that is no secret: tenants share its pages, and no others",
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
        "generation_config": Flag(
            click.Choice(("auto", "none")),
            "NAME",
            "Sampling defaults of requests: auto takes those of the model's generation_config.json "
            "or GGUF file, none those of each API",
            choices=("auto", "none"),
        ),
        "tool_format": Flag(
            str,
            "NAME",
            "Format of tool calls: llama3.1, llama3.2 or none",
            "that of the model",
            choices=("llama3.1", "llama3.2", "none"),
        ),
        "reasoning_field": Flag(
            click.Choice(("reasoning_content", "reasoning")),
            "NAME",
            "Field of a chat's message that has the reasoning: reasoning is vLLM's name",
            choices=("reasoning_content", "reasoning"),
        ),
        "lenient": Flag(
            bool, "", "Ignore fields that are not supported, and name them in a response header"
        ),
        "background": Flag(
            bool, "", "Serve in the background, at a socket of this user, where --resident finds it"
        ),
        "idle_minutes": Flag(
            click.IntRange(0, 10**6),
            "N",
            "Minutes without a client after which a server in the background ends; 0 for no limit",
        ),
        "fastchat_controller": Flag(
            str, "URL", "Controller of FastChat that registers this server as a worker", "none"
        ),
        "worker_address": Flag(
            str, "URL", "Address at which that controller reaches this server", "host and port"
        ),
    },
    "Adapters of requests": {
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
            click.IntRange(1, 2**16),
            "N",
            "Number of LoRA adapters that are loaded at once, by clients or not",
        ),
    },
    "Limits": {
        "max_queue": Flag(
            click.IntRange(0, 2**31),
            "N",
            "Number of sequences that may wait; more are refused with status 503",
        ),
        "max_wait_s": Flag(
            click.FloatRange(min=0), "S", "Seconds that a request may wait for its first token"
        ),
        "max_answer_mb": Flag(
            click.IntRange(1, 2**20),
            "MB",
            "MiB that one answer may take; a request that could exceed it is refused",
        ),
        "max_images": Flag(
            click.IntRange(0, 2**10), "N", "Number of images of a request, for a vision model"
        ),
        "image_hosts": Flag(
            str,
            "HOSTS",
            "Hosts from which images of requests are fetched, such as images.org; separated by "
            "commas",
            "none",
        ),
        "max_connections": Flag(
            click.IntRange(1, 2**31),
            "N",
            "Number of connections at once; more are refused with status 503",
        ),
        "max_per_address": Flag(
            click.IntRange(1, 2**31),
            "N",
            "Number of connections at once from one address",
            "three quarters of max_connections",
        ),
        "drain_s": Flag(
            click.FloatRange(min=0),
            "S",
            "Seconds that running requests get to finish after a signal",
        ),
    },
}

# The flag --gpu of `llama doctor`. That of `llama plan` has a value, and the variable LLAMA_GPU.
COMPARE_KERNELS = Flag(
    bool, "", "Compare each kernel of the GPU with PyTorch's operator in all cases; minutes"
)
FLAGS = {name: _build_flag(argument) for name, argument in BuildArgs.flags().items()} | {
    name: replace(flag, group=group)
    for group, flags in _TABLE.items()
    for name, flag in flags.items()
}

# The arguments of Llama.build that are flags, with their defaults.
BUILD_FLAGS: dict[str, Any] = {
    "ckpt_dir": None,
    **{name: argument.default for name, argument in BuildArgs.flags().items()},
}
# The flags of a server on the network, with their defaults.
NETWORK_FLAGS: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 8000,
    "uds": None,
    "api_key": None,
    "api_key_file": None,
    "metrics_key_file": None,
    "allow_origin": None,
    "max_per_address": None,
    "fastchat_controller": None,
    "worker_address": None,
}
