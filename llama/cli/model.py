"""From flags to a loaded `Llama`, for commands and scripts, and the line of figures at their end.

It knows the demo model, which answers where no folder is given. torch is imported with the model.
"""

import argparse
import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from llama.build_args import BuildArgs
from llama.checkpoint.downloads import model_folder, read_ahead
from llama.cli.flags import UsageError

BUILD_FLAGS: dict[str, Any] = {  # the arguments of Llama.build, with their defaults
    "ckpt_dir": None,
    **{each.name: each.default for each in fields(BuildArgs) if each.metadata},
}
SAMPLING_FLAGS: dict[str, Any] = {"temperature": 0.6, "top_p": 0.9, "max_gen_len": None}

_PACKAGE = Path(__file__).resolve().parent.parent
DEMO_DIRS = (_PACKAGE / "data" / "demo", _PACKAGE.parent / "checkpoints" / "demo")


def demo_dir() -> str:
    """The folder of the demo model, in the package (a wheel) or the checkout; FileNotFoundError."""
    for folder in DEMO_DIRS:
        if (folder / "params.json").is_file():
            return str(folder)
    raise FileNotFoundError(
        f"this installation has no demo model (looked for {' and '.join(map(str, DEMO_DIRS))}): "
        "give the folder of other weights, or fetch a model: llama download NAME"
    )


def check_sampling(options: argparse.Namespace) -> None:
    """UsageError for a flag that `SamplingParams` refuses: before minutes of loading."""
    given = {name: getattr(options, name) for name in ("seed", *SAMPLING_FLAGS)}
    if given.items() <= {**BUILD_FLAGS, **SAMPLING_FLAGS}.items():
        return  # the defaults, which need no check and no import of pydantic
    from llama.sampling_params import SamplingParams

    try:
        SamplingParams(max_tokens=given.pop("max_gen_len"), **given)
    except (TypeError, ValueError) as e:
        raise UsageError(str(e).replace("max_tokens", "max_gen_len")) from e


def check_client(options: argparse.Namespace, how: str, *allowed: str) -> None:
    """UsageError for what cannot stand beside `how`, but the flags of a model that are allowed."""
    own = {**BUILD_FLAGS, "seed": options.seed}
    if options.max_batch_size == 1:  # the default of a chat
        own["max_batch_size"] = 1
    for name, default in own.items():
        if name not in allowed and getattr(options, name) != default:
            raise UsageError(
                f"{name} is of a model that is loaded here, and with {how} the server's answers: "
                f"leave out --{name} and LLAMA_{name.upper()}, or {how}"
            )
    check_alone(how)


def check_alone(how: str) -> None:
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError(f"with {how} one process is enough: start it without torchrun")


def load(options: argparse.Namespace) -> Any:
    """The `Llama` that the flags describe; what `Llama.build` prints goes to stderr."""
    given = {name: getattr(options, name) for name in BUILD_FLAGS}
    given["ckpt_dir"] = options.ckpt_dir or demo_dir()
    read_ahead(model_folder(given["ckpt_dir"]))
    with quick_imports():
        from llama.generation import Llama
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for answers
        return Llama.build(**{name: x for name, x in given.items() if x is not None})


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Python's collector looks for no garbage among what is imported, which is a third of the time,
    nor later, which would be tenths of a second in the middle of an answer."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def figures(llama: Any) -> str:
    """One line on a `Llama`: seconds to load, tokens per second, ranks and dtype."""
    stats, parallel = llama.engine.stats, llama.model.parallel
    dtype = str(llama.model.norm.weight.dtype).removeprefix("torch.")
    prompt = _rate(stats.prompt_tokens, stats.prompt_seconds)
    generated = _rate(stats.generated_tokens, stats.generate_seconds)
    ranks = parallel.size * parallel.data_size
    drafted = f" | {stats.accepted_tokens} of {stats.draft_tokens} guessed" * bool(stats.drafts)
    return (
        f"load {llama.load_seconds:.2f} s | prompt {prompt} | generated {generated}{drafted} "
        f"| ranks {ranks} | {dtype}"
    )


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens} tokens, {tokens / seconds:.0f} tokens/s" if seconds else f"{tokens} tokens"
