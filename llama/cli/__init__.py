"""The command `llama`, also `python -m llama`: it takes the arguments of a shell.

This module only reads flags, and returns an exit code. What a command needs, above all torch, is
imported once its flags are known to be right, so that `--help` and a wrong flag answer at once. The
file has over 400 lines because the commands are one table.
"""

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

import llama
from llama.cli import ranks
from llama.cli.completion import COMPLETE_VARIABLE, complete_line
from llama.cli.flags import (
    BUILD_FLAGS,
    COMPARE_KERNELS,
    FLAGS,
    NETWORK_FLAGS,
    SAMPLING_FLAGS,
    Flag,
    UsageError,
    usage_errors,
)
from llama.cli.parser import (
    REQUIRED,
    WIDTH,
    Command,
    help_option,
    misspelt_variables,
    read,
    reported,
    text_option,
)

_QUANTIZE = replace(
    FLAGS["quantize"],
    meaning=f"{FLAGS['quantize'].meaning}; for an OUT that ends in .gguf q8_0 or q4_0",
    choices=(*FLAGS["quantize"].choices, "q8_0", "q4_0"),
)
_ACTIVATIONS = replace(
    FLAGS["activations"],
    meaning=f"{FLAGS['activations'].meaning}; convert writes the latter, a W8A8 folder",
    absent="in bf16",
    choices=FLAGS["activations"].choices[-1:],
)
# The flags of a command that a server can answer, with their defaults.
_CLIENT_FLAGS = {"resident": False, "url": None, "api_key": None, "model": None}


COMMANDS = {
    "chat": Command(
        "Chat with a model in the terminal; in a pipe, each line is a question.",
        defaults={
            **BUILD_FLAGS,
            "ranks": 1,
            "max_batch_size": 1,
            **SAMPLING_FLAGS,
            "system": None,
            "no_history": False,
            **_CLIENT_FLAGS,
        },
        positional=["ckpt_dir"],
        function="commands:chat",
        examples=[
            "llama chat",
            'llama chat Meta-Llama-3-8B-Instruct --system "Answer briefly."',
            "llama chat Meta-Llama-3-70B-Instruct --ranks 8",
            "llama chat --url http://localhost:8000",
            "llama chat Meta-Llama-3-8B-Instruct --resident",
        ],
    ),
    "complete": Command(
        "Continue a text; the continuation is streamed to standard output.",
        defaults={
            **BUILD_FLAGS,
            "ranks": 1,
            "max_batch_size": 1,
            **SAMPLING_FLAGS,
            "prompt": None,
            "prompt_file": None,
            "resident": False,
        },
        positional=["ckpt_dir"],
        function="commands:complete",
        examples=[
            'llama complete --prompt "Once upon a time"',
            "llama complete Meta-Llama-3-8B --prompt_file story.txt --max_gen_len 200",
            'echo "The capital of France is" | llama complete --temperature 0',
        ],
    ),
    "batch": Command(
        "Answer each line of a file into another file; a line's own fields override the flags.",
        defaults={
            "in_file": REQUIRED,
            "out_file": REQUIRED,
            "images": None,
            "resume": False,
            **BUILD_FLAGS,
            "ranks": 1,
            **SAMPLING_FLAGS,
            **_CLIENT_FLAGS,
            "concurrency": 16,
            "retry_s": 600.0,
        },
        positional=["in_file", "out_file"],
        function="commands:batch",
        examples=[
            "llama batch prompts.jsonl results.jsonl --ckpt_dir Meta-Llama-3-8B-Instruct",
            "llama batch prompts.jsonl results.jsonl --resume",
            "llama batch prompts.jsonl results.jsonl --url http://localhost:8000",
        ],
        error_code=2,
    ),
    "serve": Command(
        "Serve the APIs of OpenAI, Anthropic and Ollama over HTTP until SIGTERM or Ctrl-C.",
        defaults={
            **NETWORK_FLAGS,
            "api_processes": None,
            "served_model_name": None,
            "lora_modules": None,
            "lora_folder": None,
            "max_loras": 16,
            "max_queue": 1024,
            "max_wait_s": 600.0,
            "max_answer_mb": 512,
            "max_images": 16,
            "image_hosts": None,
            "max_connections": 4096,
            "drain_s": 20.0,
            "generation_config": "auto",
            "tool_format": None,
            "reasoning_field": "reasoning_content",
            "lenient": False,
            "shared_prefix": None,
            **BUILD_FLAGS,
            "text_only": False,
            "ranks": 1,
            "replicas": 1,
            "background": False,
            "idle_minutes": 10,
        },
        positional=["ckpt_dir"],
        function="serve:serve",
        examples=[
            "llama serve",
            "llama serve Meta-Llama-3-8B-Instruct --port 8080",
            "llama serve Meta-Llama-3-70B-Instruct --ranks 8",
            "llama serve Meta-Llama-3-8B-Instruct --replicas 8",
            "llama serve Meta-Llama-3-8B-Instruct --background --idle_minutes 60",
        ],
    ),
    "download": Command(
        "Fetch a model from Hugging Face's hub; other commands take its name for a folder.",
        defaults={"name": REQUIRED, "file": None},
        positional=["name"],
        function="download:download",
        examples=[
            "HF_TOKEN=hf_... llama download Llama-3.2-1B-Instruct",
            "llama download ORG/NAME --file NAME-Q4_K_M.gguf",
        ],
    ),
    "list": Command(
        "List the servers in the background, and the models in the cache with their sizes.",
        defaults={},
        function="servers:list_models",
        examples=["llama list"],
    ),
    "stop": Command(
        "End a server in the background (`serve --background`, `--resident`) by its model.",
        defaults={"name": REQUIRED},
        positional=["name"],
        function="servers:stop",
        examples=["llama stop Llama-3.2-1B-Instruct"],
    ),
    "kv": Command(
        "List the KV pages of prompts that are kept on disk, or remove them.",
        defaults={
            "kv_cache_dir": None,
            "clear": False,
            "model": None,
            "tenant": None,
            "older_than": None,
        },
        positional=["kv_cache_dir"],
        function="kv:kv",
        flags=FLAGS
        | {
            "kv_cache_dir": replace(FLAGS["kv_cache_dir"], absent="~/.cache/llama/kv"),
            "model": replace(FLAGS["model"], meaning="Remove those of this model", absent="all"),
        },
        examples=["llama kv", "llama kv --clear", "llama kv DIR --clear --older_than 1"],
    ),
    "verify": Command(
        "Check a checkpoint: checksums, names and shapes of tensors, and missing shards. Or check "
        "the answers of the engine: against a reference of 500 lines, on the same weights.",
        defaults={
            "ckpt_dir": REQUIRED,
            "answers": False,
            "original": None,
            "ranks": 1,
            "device": None,
            "dtype": None,
        },
        positional=["ckpt_dir"],
        function="commands:verify",
        examples=[
            "llama verify Meta-Llama-3-8B",
            "llama verify Meta-Llama-3-8B --answers",
            "llama verify Meta-Llama-3-70B --answers --ranks 8",
            "llama verify Llama-3.2-1B-hf --answers --original Llama-3.2-1B",
        ],
    ),
    "reshard": Command(
        "Write Meta's consolidated.NN.pth in another number of shards, into a new folder.",
        defaults={"ckpt_dir": REQUIRED, "out_dir": REQUIRED, "model_parallel_size": REQUIRED},
        positional=["ckpt_dir", "out_dir"],
        function="commands:reshard",
        examples=["llama reshard Meta-Llama-3-70B one-shard --model_parallel_size 1"],
    ),
    "convert": Command(
        "Convert between Meta's, Hugging Face's and GGUF layouts, quantize, or merge adapters.",
        defaults={
            "ckpt_dir": REQUIRED,
            "out_dir": REQUIRED,
            "packed": False,
            "text_only": False,
            "quantize": None,
            "activations": None,
            "lora": None,
        },
        positional=["ckpt_dir", "out_dir"],
        function="commands:convert",
        examples=[
            "llama convert Meta-Llama-3-8B Meta-Llama-3-8B-hf",
            "llama convert Llama-3.2-1B Llama-3.2-1B-FP8 --quantize fp8",
            "llama convert Llama-3.2-1B Llama-3.2-1B-Q4_0.gguf --quantize q4_0",
            "llama convert Meta-Llama-3-8B Meta-Llama-3-8B-packed --packed",
            "llama convert Meta-Llama-3-8B Merged --lora Adapter",
        ],
        flags=FLAGS | {"quantize": _QUANTIZE, "activations": _ACTIVATIONS},
        has_variables=False,  # LLAMA_QUANTIZE applies to loading.
    ),
    "doctor": Command(
        "Show what this machine offers, and its problems; the exit code is 1 if there are any.",
        defaults={
            "ckpt_dir": None,
            "device": None,
            "ranks": 1,
            "shares": None,
            "ffn_shares": None,
            "pipeline_parallel_size": 1,
            "pipeline_layers": None,
            "gpu": False,
        },
        positional=["ckpt_dir"],
        function="commands:doctor",
        flags=FLAGS | {"gpu": COMPARE_KERNELS},
        examples=[
            "llama doctor",
            "llama doctor Meta-Llama-3-8B",
            "llama doctor Meta-Llama-3-8B --ranks 3",
            "llama doctor Meta-Llama-3-70B --pipeline_parallel_size 2",
        ],
    ),
    "plan": Command(
        "Show how a model fits into GPUs that may be elsewhere, and the speed to expect of them.",
        defaults={
            "shape": REQUIRED,
            "gpu": REQUIRED,
            "gpus": 1,
            "machines": 1,
            "memory_gb": None,
            "context": None,
            "batch": None,
            **{name: BUILD_FLAGS[name] for name in ("dtype", "quantize", "kv_cache_dtype")},
            "json": False,
        },
        positional=["shape"],
        function="commands:plan",
        examples=[
            "llama plan 70b --gpu h100 --gpus 8",
            "llama plan 405b --gpu h100 --gpus 8 --machines 2 --context 4096",
            "llama plan Meta-Llama-3-8B-Instruct --gpu 4090 --quantize fp8 --batch 1 --json",
        ],
    ),
    "completion": Command(
        "Print a script with which a shell completes commands, flags and file names.",
        defaults={"shell": REQUIRED},
        positional=["shell"],
        function="completion:completion",
        examples=[
            "llama completion bash",
            "llama completion zsh",
            "llama completion fish",
        ],
        has_variables=False,
    ),
}

# Commands of other programs, and what to do instead.
_ELSEWHERE = {
    "run": "`llama chat DIR` chats with a model, `llama serve DIR` serves it",
    "pull": "`llama download NAME` fetches a model, and `llama chat NAME` chats with it",
}

_ABOUT = """\
Without a folder of weights, chat, complete, batch and serve use the demo model. A flag may also be
given as an environment variable, such as LLAMA_TEMPERATURE=0 for --temperature 0; a flag on the
command line takes precedence. With --ranks 8, or under torchrun --nproc_per_node 8 -m llama, only
rank 0 reads and prints.

\b
Exit codes:
  0    success; for batch: each line has a record, which may be an error
  1    failure, with an error message; for verify: the files or the answers are wrong
  2    the command line cannot be used; for batch: the same for its files or its model
  130  Ctrl-C
"""


class _Commands(click.Group):
    """The command `llama` with the commands of the table, in its order."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return a command by its name, or say what to use in place of another program's."""
        if args[0] in _ELSEWHERE:
            raise UsageError(f"there is no command {args[0]}: {_ELSEWHERE[args[0]]}")
        return super().resolve_command(ctx, args)


LLAMA = _Commands(
    "llama",
    commands={**COMMANDS},
    help="Llama 3 models: chat, batches of prompts, and a server. `llama COMMAND --help` lists the "
    "flags of a command.",
    epilog=_ABOUT,
    params=[
        help_option(),
        text_option(["--version"], "Show the version.", lambda _: f"llama {llama.__version__}"),
    ],
    add_help_option=False,
    context_settings={"max_content_width": WIDTH},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        arguments: The arguments; by default those of this process.
    """
    if COMPLETE_VARIABLE in os.environ:  # A shell asks what may come next.
        return complete_line(LLAMA)
    given = sys.argv[1:] if arguments is None else list(arguments)
    command = COMMANDS.get(given[0]) if given else None
    return ranks.run(lambda: _run_command(given), command.error_code if command else 1)


def run_script(
    function: Callable[..., None],
    flags: Mapping[str, Flag] = FLAGS,
    *,
    check: Callable[[argparse.Namespace], None] = lambda options: None,
    demo_defaults: Mapping[str, Any] | None = None,
) -> None:
    """Call a script's function with the flags that its signature names, and exit.

    Args:
        function: The function. The defaults of its parameters are those of the flags.
        flags: The table of flags.
        check: Raises an error for values that cannot be used.
        demo_defaults: Defaults that apply if no ckpt_dir is given.
    """
    parameters = inspect.signature(function).parameters.values()
    defaults = {p.name: REQUIRED if p.default is p.empty else p.default for p in parameters}
    script = Command(inspect.getdoc(function) or "", defaults, flags=flags)
    program = os.path.basename(sys.argv[0])

    def work() -> None:
        options = read(program, script, sys.argv[1:])
        if demo_defaults and not options.ckpt_dir:
            for_demo = Command(script.summary, defaults | dict(demo_defaults), flags=flags)
            options = read(program, for_demo, sys.argv[1:])
        check(options)
        ranks.finish_on_signal()
        with usage_errors(BUILD_FLAGS):
            function(**vars(options))

    sys.exit(ranks.run(work))


def _run_command(arguments: Sequence[str]) -> int | None:
    _check_package()
    for text in misspelt_variables():
        ranks.say(f"warning: {text}")
    with reported(), LLAMA.make_context("llama", list(arguments) or ["--help"]) as ctx:
        code: int | None = LLAMA.invoke(ctx)
        return code


def _check_package() -> None:
    """Check that the package `llama` is this one.

    In a clone of Meta's repository, `python -m llama` imports the package of the clone. If this one
    is installed from a checkout, its import hook then adds these commands to that package.
    """
    imported = Path(llama.__file__ or "").resolve().parent
    if Path(__file__).resolve().parent.parent != imported:
        raise UsageError(
            f"{imported} is another package, which hides this one here: set PYTHONSAFEPATH=1, use "
            "the command llama, or rename that folder"
        )
