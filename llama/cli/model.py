"""Load a `Llama` from flags, for commands and scripts, and summarize its statistics in one line.

This module knows the demo model, which answers if no folder of weights is given. torch is imported
only when a model is loaded.
"""

import argparse
import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llama.api import address_space_limit
from llama.cli.flags import BUILD_FLAGS, SAMPLING_FIELDS, SAMPLING_FLAGS, UsageError
from llama.storage.hub import model_folder
from llama.storage.page_cache import read_ahead

_PACKAGE = Path(__file__).resolve().parent.parent
# The demo model is inside the package in a wheel, and alongside it in a checkout.
DEMO_DIRS = (_PACKAGE / "data" / "demo", _PACKAGE.parent / "checkpoints" / "demo")

_MIN_ADDRESS_SPACE = 3 << 28  # bytes; the demo model runs with slightly more on two cores


def demo_dir() -> str:
    """Return the folder of the demo model.

    Raises:
        FileNotFoundError: This installation has no demo model.
    """
    for folder in DEMO_DIRS:
        if (folder / "params.json").is_file():
            return str(folder)
    raise FileNotFoundError(
        f"this installation has no demo model (looked for {' and '.join(map(str, DEMO_DIRS))}): "
        "give the folder of other weights, or fetch a model with llama download NAME"
    )


def check_sampling(options: argparse.Namespace) -> None:
    """Check the sampling flags before a model is loaded, which can take minutes.

    Raises:
        UsageError: `SamplingParams` refuses the value of a flag.
    """
    given = {name: getattr(options, name) for name in ("seed", *SAMPLING_FLAGS)}
    if given.items() <= {**BUILD_FLAGS, **SAMPLING_FLAGS}.items():
        return  # the defaults, which need no check and no import of pydantic
    try:
        sampling_params(**given)
    except (TypeError, ValueError) as e:
        message = str(e)
        for flag, field in SAMPLING_FIELDS.items():
            message = message.replace(field, flag)
        raise UsageError(message) from e


def sampling_params(**flags: Any) -> Any:
    """Return the `SamplingParams` of sampling flags and of `seed`.

    A flag that is not given has its default; without `seed` the engine chooses one.

    Raises:
        TypeError, ValueError: A value is not allowed.
    """
    from llama.sampling_params import SamplingParams  # It imports pydantic, which takes time.

    values = {**SAMPLING_FLAGS, **flags}
    return SamplingParams(**{SAMPLING_FIELDS.get(name, name): x for name, x in values.items()})


def check_client(options: argparse.Namespace, flag: str, *allowed: str) -> None:
    """Check that no flag of a model is given together with a flag that makes a server answer.

    Args:
        options: The flags.
        flag: The flag that makes a server answer, such as --url.
        allowed: Names of flags of a model that may be given all the same.

    Raises:
        UsageError: A flag does not go with `flag`, or torchrun started several processes.
    """
    defaults = {**BUILD_FLAGS, "seed": options.seed}
    if options.max_batch_size == 1:  # the default of a chat
        defaults["max_batch_size"] = 1
    for name, default in defaults.items():
        if name not in allowed and getattr(options, name) != default:
            raise UsageError(
                f"--{name} applies to a model that is loaded here, but with {flag} a server "
                f"answers: leave out --{name} and LLAMA_{name.upper()}, or {flag}"
            )
    check_alone(flag)


def check_alone(flag: str) -> None:
    """Check that torchrun did not start several processes.

    Raises:
        UsageError: It did; the message names `flag`.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError(f"{flag} needs only one process: start it without torchrun")


def load(options: argparse.Namespace, *, images: bool = False) -> Any:
    """Return the `Llama` that the flags describe. What `Llama.build` prints goes to stderr.

    Args:
        options: The flags.
        images: Whether the parts of a vision model that read images are loaded.
    """
    given = {name: getattr(options, name) for name in BUILD_FLAGS}
    given["ckpt_dir"] = options.ckpt_dir or demo_dir()
    _check_address_space()
    read_ahead(model_folder(given["ckpt_dir"]))
    with quick_imports():
        from llama import Llama
    with contextlib.redirect_stdout(sys.stderr):  # stdout is reserved for answers.
        given = {name: x for name, x in given.items() if x is not None}
        return Llama.build(**given, images=images)


def _check_address_space() -> None:
    """Check that the libraries can be loaded: some of them end the process where they cannot.

    Raises:
        UsageError: `ulimit -v` is too low.
    """
    limit = address_space_limit()
    if limit is not None and limit < _MIN_ADDRESS_SPACE:
        raise UsageError(
            f"`ulimit -v` limits the address space to {limit >> 10:,} KiB, and PyTorch alone takes "
            f"more than {_MIN_ADDRESS_SPACE >> 10:,}: raise the limit, or set it to unlimited"
        )


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Keep Python's garbage collector away from the objects that imports create.

    Collecting during the imports takes a third of their time. Afterwards the objects are frozen,
    because examining them takes tenths of a second, in the middle of an answer.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def figures(llama: Any) -> str:
    """Return one line about a `Llama`: seconds to load, tokens per second, ranks and dtype.

    Every rank makes this call. The tokens are those of all replicas, and the seconds those of the
    replica that took longest.
    """
    stats = llama.engine.stats
    parallel = llama.model.parallel
    counts = (
        stats.prompt_tokens,
        stats.generated_tokens,
        stats.accepted_tokens,
        stats.draft_tokens,
    )
    replicas = parallel.gather_replicas([*counts, stats.prompt_seconds, stats.generate_seconds])
    totals = [int(sum(values)) for values in zip(*replicas, strict=True)]
    prompt_tokens, generated_tokens, accepted_tokens, draft_tokens = totals[: len(counts)]
    prompt_seconds = max(values[-2] for values in replicas)
    generate_seconds = max(values[-1] for values in replicas)
    parts = [
        f"load {llama.load_seconds:.2f} s",
        f"prompt {_rate(prompt_tokens, prompt_seconds)}",
        f"generated {_rate(generated_tokens, generate_seconds)}",
    ]
    if draft_tokens:
        parts.append(f"{accepted_tokens} of {draft_tokens} drafted tokens accepted")
    parts.append(f"ranks {parallel.world_size}")
    parts.append(str(llama.model.norm.weight.dtype).removeprefix("torch."))
    return " | ".join(parts)


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens} tokens, {tokens / seconds:.0f} tokens/s" if seconds else f"{tokens} tokens"
