"""The command `llama`, also `python -m llama`: the words of a shell in, an exit code out.

Only flags are read here; what a command needs, torch above all, is imported once they are right, so
that `--help` and a wrong flag answer at once.
"""

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama
from llama.checks import nearest
from llama.cli import commands, ranks
from llama.cli.download import download
from llama.cli.flags import FLAGS, REQUIRED, Command, Flag, HelpWanted, UsageError, read
from llama.cli.model import BUILD_FLAGS, SAMPLING_FLAGS
from llama.cli.serve import NETWORK_FLAGS, serve

_CLIENT_FLAGS = {"resident": False, "url": None, "api_key": None, "model": None}  # of a server

COMMANDS = {
    "chat": Command(
        "Talk with a model in the terminal; in a pipe, one question per line.",
        {
            **BUILD_FLAGS, "ranks": 1, "max_batch_size": 1, **SAMPLING_FLAGS, "system": None,
            **_CLIENT_FLAGS,
        },
        ["ckpt_dir"],
        commands.chat,
        [
            "llama chat",
            'llama chat Meta-Llama-3-8B-Instruct --system "Answer briefly."',
            "llama chat Meta-Llama-3-70B-Instruct --ranks 8",
            "llama chat --url http://localhost:8000",
            "llama chat Meta-Llama-3-8B-Instruct --resident",
        ],
    ),
    "complete": Command(
        "Continue a text; the continuation streams to standard output.",
        {
            **BUILD_FLAGS, "ranks": 1, "max_batch_size": 1, **SAMPLING_FLAGS,
            "prompt": None, "prompt_file": None, "resident": False,
        },
        ["ckpt_dir"],
        commands.complete,
        [
            'llama complete --prompt "Once upon a time"',
            "llama complete Meta-Llama-3-8B --prompt_file story.txt --max_gen_len 200",
            'echo "The capital of France is" | llama complete --temperature 0',
        ],
    ),
    "batch": Command(
        "Answer each line of a file into another file; flags are for lines that do not say.",
        {
            "in_file": REQUIRED, "out_file": REQUIRED, "resume": False,
            **BUILD_FLAGS, "ranks": 1, **SAMPLING_FLAGS,
            **_CLIENT_FLAGS, "concurrency": 16, "retry_s": 600.0,
        },
        ["in_file", "out_file"],
        commands.batch,
        [
            "llama batch prompts.jsonl results.jsonl --ckpt_dir Meta-Llama-3-8B-Instruct",
            "llama batch prompts.jsonl results.jsonl --resume",
            "llama batch prompts.jsonl results.jsonl --url http://localhost:8000",
        ],
        error_code=2,
    ),
    "serve": Command(
        "Serve OpenAI's API over HTTP, until SIGTERM or Ctrl-C.",
        {
            **NETWORK_FLAGS, "served_model_name": None, "max_queue": 1024,
            "max_wait_s": 600.0, "max_connections": 4096, "drain_s": 20.0,
            "tool_format": None, "lenient": False,
            **BUILD_FLAGS, "ranks": 1, "background": False, "idle_minutes": 10,
        },
        ["ckpt_dir"],
        serve,
        [
            "llama serve",
            "llama serve Meta-Llama-3-8B-Instruct --port 8080",
            "llama serve Meta-Llama-3-70B-Instruct --ranks 8",
            "llama serve Meta-Llama-3-8B-Instruct --background --idle_minutes 60",
        ],
    ),
    "download": Command(
        "Fetch a model from Hugging Face's hub; other commands take its name for a folder.",
        {"name": REQUIRED, "file": None},
        ["name"],
        download,
        [
            "HF_TOKEN=hf_... llama download Llama-3.2-1B-Instruct",
            "llama download ORG/NAME --file NAME-Q4_K_M.gguf",
        ],
    ),
    "verify": Command(
        "Check the files of a checkpoint: checksums, names, shapes, that no shard is missing.",
        {"ckpt_dir": REQUIRED},
        ["ckpt_dir"],
        commands.verify,
        ["llama verify Meta-Llama-3-8B"],
    ),
    "reshard": Command(
        "Write Meta's consolidated.NN.pth in another number of shards, into a new folder.",
        {"ckpt_dir": REQUIRED, "out_dir": REQUIRED, "model_parallel_size": REQUIRED},
        ["ckpt_dir", "out_dir"],
        commands.reshard,
        ["llama reshard Meta-Llama-3-70B one-shard --model_parallel_size 1"],
    ),
    "convert": Command(
        "Write Hugging Face's layout from Meta's or GGUF, or the other way, or GGUF; or quantized.",
        {"ckpt_dir": REQUIRED, "out_dir": REQUIRED, "packed": False, "quantize": None},
        ["ckpt_dir", "out_dir"],
        commands.convert,
        [
            "llama convert Meta-Llama-3-8B Meta-Llama-3-8B-hf",
            "llama convert Llama-3.2-1B Llama-3.2-1B-FP8 --quantize fp8",
            "llama convert Llama-3.2-1B Llama-3.2-1B-Q4_0.gguf --quantize q4_0",
            "llama convert Meta-Llama-3-8B Meta-Llama-3-8B-packed --packed",
        ],
        has_variables=False,  # LLAMA_QUANTIZE is of loading
    ),
    "doctor": Command(
        "Show what this machine offers and what stands in the way; 1 if something does.",
        {"ckpt_dir": None, "device": None, "ranks": 1},
        ["ckpt_dir"],
        commands.doctor,
        [
            "llama doctor",
            "llama doctor Meta-Llama-3-8B",
            "llama doctor Meta-Llama-3-8B --ranks 2",
        ],
    ),
}  # fmt: skip

_ELSEWHERE = {  # what other programs call it -> what to do here
    "run": "`llama chat DIR` talks with a model, `llama serve DIR` serves it",
    "pull": "`llama download NAME` fetches a model, and `llama chat NAME` talks with it",
}

_ABOUT = """\
usage: llama COMMAND [flags]

commands (llama COMMAND --help lists the flags of one):
{commands}

Without a folder of weights, chat, complete and batch use the demo model. A flag may also be given
as a variable: LLAMA_TEMPERATURE=0 for --temperature 0; a flag on the command line wins. With
--ranks 8, or under torchrun --nproc_per_node 8 -m llama, rank 0 alone reads and prints.

exit codes:
  0    done; batch: each line has its record, which may be an error
  1    it failed, and the error says why; verify: not whole
  2    the command line cannot be used; batch: nor its files or its model
  130  Ctrl-C
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run a command; the exit code. Without `words`, those of the command line."""
    name, *rest = (sys.argv[1:] if words is None else words) or ["--help"]
    error_code = COMMANDS[name].error_code if name in COMMANDS else 1
    return ranks.run(lambda: _run_command(name, rest), error_code)


def run_script(
    function: Callable[..., None],
    flags: Mapping[str, Flag] = FLAGS,
    *,
    check: Callable[[argparse.Namespace], None] = lambda options: None,
    demo_defaults: Mapping[str, Any] | None = None,
) -> None:
    """Call a script's function with the flags that its signature names, and exit. demo_defaults:
    where no ckpt_dir is given. check: raises for values that cannot be used."""
    parameters = inspect.signature(function).parameters.values()
    defaults = {p.name: REQUIRED if p.default is p.empty else p.default for p in parameters}
    script = Command(inspect.getdoc(function) or "", defaults, flags=flags)
    program = os.path.basename(sys.argv[0])

    def work() -> None:
        options = read(program, script, sys.argv[1:], os.environ)
        if demo_defaults and not options.ckpt_dir:
            for_demo = replace(script, defaults=defaults | dict(demo_defaults))
            options = read(program, for_demo, sys.argv[1:], os.environ)
        check(options)
        ranks.finish_on_signal()
        function(**vars(options))

    sys.exit(ranks.run(work))


def _run_command(name: str, words: Sequence[str]) -> int:
    # `python -m llama` in a clone of Meta's repository imports the clone's; where this one is
    # installed from a checkout, its finder then adds these commands.
    imported = Path(llama.__file__ or "").resolve().parent
    if Path(__file__).resolve().parent.parent != imported:
        raise UsageError(
            f"{imported} is another package, which hides this one here: set PYTHONSAFEPATH=1, use "
            "the command llama, or rename that folder"
        )
    if name == "--version":
        raise HelpWanted(f"llama {llama.__version__}\n")
    if name in ("-h", "--help"):
        lines = [f"  {name:<10} {command.summary}" for name, command in COMMANDS.items()]
        raise HelpWanted(_ABOUT.format(commands="\n".join(lines)))
    if name in _ELSEWHERE:
        raise UsageError(f"there is no command {name}: {_ELSEWHERE[name]}")
    if name not in COMMANDS:
        likely = nearest(name, list(COMMANDS)) or f"; there are {', '.join(COMMANDS)}"
        raise UsageError(f"there is no command {name}{likely}")
    command = COMMANDS[name]
    assert command.function is not None
    options = read(f"llama {name}", command, words, os.environ)
    code = None if name == "convert" else ranks.start_ranks(options)  # there they are of files
    return command.function(options) if code is None else code
