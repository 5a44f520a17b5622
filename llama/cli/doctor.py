"""`llama doctor`: what this machine offers, and what stands in the way. Prints; changes nothing.

Each check gives lines of (name, fact) and says by `problem` that something must be mended. The
kernels may be compiled for this, as they would be by the first model.
"""

import argparse
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import llama
from llama.cli.ranks import global_rank

_PACKAGE = Path(__file__).resolve().parent.parent
_INSTRUCTION_SETS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16")


class Fact(NamedTuple):
    """One line of the report."""

    name: str
    text: str
    problem: bool = False


def doctor(options: argparse.Namespace) -> int:
    """Print the facts; 1 if there is a problem among them."""
    if global_rank():
        return 0
    code = 0
    for fact in _facts(options.ckpt_dir, options.device):
        print(f"{fact.name:<12} {'PROBLEM: ' * fact.problem}{fact.text}", flush=True)
        code |= fact.problem
    return code


def _facts(ckpt_dir: str | None, device: str | None) -> Iterator[Fact]:
    import torch

    yield Fact("llama", f"{llama.__version__} in {_PACKAGE}")
    yield from _shadows(Path.cwd())
    yield Fact("python", f"{platform.python_version()} in {sys.prefix}")
    yield Fact("torch", f"{torch.__version__}")
    yield from _ranks()
    yield from _device(device)
    yield from _cpu()
    if ckpt_dir is not None:
        yield from _checkpoint(ckpt_dir)


def _shadows(folder: Path) -> Iterator[Fact]:
    """A `llama/` in the current folder, as in Meta's clone, is what Python imports from there.

    Meta's own distribution, installed from such a clone, has the same files as this one.
    """
    other = folder / "llama"
    if other.is_dir() and any(other.glob("*.py")) and other.resolve() != _PACKAGE:
        yield Fact(
            "import",
            f"{other} hides this package from the scripts beside it, which then stop with "
            '"environment variable RANK expected, but not set": start them with '
            "PYTHONSAFEPATH=1, as in PYTHONSAFEPATH=1 torchrun SCRIPT, or rename that folder",
            problem=True,
        )
    for name in metadata.packages_distributions().get("llama", []):
        if name != "llama":
            yield Fact(
                "import",
                f"the package {name} is installed too, and writes to the same folder: "
                f"pip uninstall {name}, then install this one again",
                problem=True,
            )


def _ranks() -> Iterator[Fact]:
    """The processes that torchrun has started, or that left-over variables pretend."""
    from llama.parallel import started_processes

    try:
        yield Fact("ranks", str(started_processes()))
    except ValueError as e:
        yield Fact("ranks", str(e), problem=True)


def _device(name: str | None) -> Iterator[Fact]:
    from llama.device import free_bytes, pick_device

    try:
        device = pick_device(name)
    except ValueError as e:
        yield Fact("device", str(e), problem=True)
        return
    import torch

    title = torch.cuda.get_device_name(device) if device.type == "cuda" else "torch"
    others = torch.cuda.device_count()
    yield Fact("device", f"{device} ({title}); CUDA devices: {others}")
    yield Fact("memory", f"{free_bytes(device) / 2**30:.1f} GiB free for a process on {device}")


def _cpu() -> Iterator[Fact]:
    import torch

    from llama.device import available_cores
    from llama.ops.cpu import native

    chosen = os.environ.get("OMP_NUM_THREADS")
    yield Fact(
        "cores",
        f"{available_cores()} of {os.cpu_count()} may be used; torch has {torch.get_num_threads()} "
        f"threads; OMP_NUM_THREADS is {chosen or 'not set'}",
    )
    present = [name for name in _INSTRUCTION_SETS if name in native.cpu_flags()]
    yield Fact("cpu", f"{platform.machine()} with {', '.join(present) or 'no AVX2'}")
    yield Fact("g++", shutil.which("g++") or shutil.which("c++") or "not found")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        library = native.kernels()
    if library is not None:
        yield Fact("kernels", f"this project's, for bf16 and int8 on the CPU: {library._name}")
    else:
        why = str(caught[0].message) if caught else "this project has none for this CPU"
        yield Fact("kernels", f"torch's: {why}", problem=bool(caught))


def _checkpoint(ckpt_dir: str) -> Iterator[Fact]:
    """What `find` says of a folder: its files are not read, but for the JSON."""
    from llama.checkpoint.find import find

    try:
        found = find(ckpt_dir)
        tokenizer = found.tokenizer_path()
    except (OSError, ValueError) as e:
        yield Fact("checkpoint", str(e), problem=True)
        return
    args = found.params
    size = sum(path.stat().st_size for path in found.shards)
    layout = {"meta": "Meta's layout", "hf": "Hugging Face's layout"}[found.layout]
    yield Fact("checkpoint", f"{found.folder}: {layout}, {len(found.shards)} file(s), {size:,} B")
    yield Fact(
        "model",
        f"dim {args.dim}, {args.n_layers} layers, {args.n_heads} heads over {args.kv_heads} "
        f"key-value heads, vocabulary {args.vocab_size}, context {args.longest_context}",
    )
    yield Fact("tokenizer", str(tokenizer))
