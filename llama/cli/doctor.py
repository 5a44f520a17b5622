"""`llama doctor`: what this machine offers, and what stands in the way. Prints; changes nothing.

Each check gives lines of (name, fact) and says by `problem` that something must be mended. The
kernels may be compiled for this, as they would be by the first model. Under torchrun rank 0 prints,
for as many ranks as there are. What stops ranks is in environment_checks.py.
"""

import argparse
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import torch

import llama.device
from llama.checkpoint.find import Checkpoint, find
from llama.cli.environment_checks import Fact, environment_facts, problem, thread_facts
from llama.cli.ranks import global_rank
from llama.loading import Memory, default_batch_size, stays_in_codes
from llama.ops.cpu import native
from llama.ops.triton import selfcheck_cache
from llama.ranks.groups import started_processes
from llama.weights import QUANTIZED

_PACKAGE = Path(__file__).resolve().parent.parent
_INSTRUCTION_SETS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16")

_T = TypeVar("_T")


def doctor(options: argparse.Namespace) -> int:
    """Print the facts; 1 if there is a problem among them."""
    code = 0
    num_ranks, of_ranks = _tried("ranks", started_processes, 1)
    device, of_device = _tried(
        "device", lambda: llama.device.pick_device(options.device), torch.device("cpu")
    )

    def facts() -> Iterator[Fact]:
        yield Fact("llama", f"{llama.__version__} in {_PACKAGE}")
        yield from _shadows(Path.cwd())
        yield Fact("python", f"{platform.python_version()} in {sys.prefix}")
        yield Fact("torch", f"{torch.__version__}")
        yield of_ranks or Fact("ranks", str(num_ranks))
        yield from [of_device] if of_device else _device(device)
        yield from _cpu()
        yield from environment_facts(os.environ, gpus=torch.cuda.device_count())
        if options.ckpt_dir is not None:
            yield from _checkpoint(options.ckpt_dir, device, num_ranks)

    for fact in facts():
        if global_rank() == 0:
            print(f"{fact.name:<12} {'PROBLEM: ' * fact.problem}{fact.text}", flush=True)
            code |= fact.problem
    return code


def _tried(name: str, find_out: Callable[[], _T], otherwise: _T) -> tuple[_T, Fact | None]:
    """What is found; where that cannot be, what to go on with, and the problem."""
    try:
        return find_out(), None
    except ValueError as e:
        return otherwise, problem(name, str(e))


def _shadows(folder: Path) -> Iterator[Fact]:
    """A `llama/` in the current folder, as in Meta's clone, is what Python imports from there.

    Meta's own distribution, installed from such a clone, has the same files as this one.
    """
    other = folder / "llama"
    if other.is_dir() and any(other.glob("*.py")) and other.resolve() != _PACKAGE:
        yield problem(
            "import",
            f"{other} hides this package from the scripts beside it, which then stop with "
            '"environment variable RANK expected, but not set": start them with '
            "PYTHONSAFEPATH=1, as in PYTHONSAFEPATH=1 torchrun SCRIPT, or rename that folder",
        )
    for name in metadata.packages_distributions().get("llama", []):
        if name != "llama":
            yield problem(
                "import",
                f"the package {name} is installed too, and writes to the same folder: "
                f"pip uninstall {name}, then install this one again",
            )


def _device(device: torch.device) -> Iterator[Fact]:
    title = torch.cuda.get_device_name(device) if device.type == "cuda" else "torch"
    yield Fact("device", f"{device} ({title}); CUDA devices: {torch.cuda.device_count()}")
    free = llama.device.free_bytes(device) / 2**30
    yield Fact("memory", f"{free:.1f} GiB free for a process on {device}")
    if device.type == "cuda":
        yield from _gpu_kernels(device)


def _gpu_kernels(device: torch.device) -> Iterator[Fact]:
    """What the self-check has found on such a GPU, for each model and type that was built."""
    if reason := selfcheck_cache.not_for(device):
        yield Fact("gpu kernels", f"torch's: this project's are not used, as {reason}")
        return
    found = selfcheck_cache.results_for(device)
    if not found:
        yield Fact("gpu kernels", "not checked yet: the first build on this GPU does it")
    for key, result, is_current in found:
        what = f"{key['dtype']}, dim {key['dim']}, {key['n_heads']} heads"
        what += "" if is_current else ", of an older version"
        yield Fact("gpu kernels", f"{what}: {', '.join(result.passed) or 'none'}")
        for kernel, why in result.failed.items():
            text = f"{what}: torch runs in place of {kernel}: {why}"
            yield Fact("gpu kernels", text, problem=is_current)


def _cpu() -> Iterator[Fact]:
    llama.device.set_num_threads()  # as build does
    cores, chosen = llama.device.available_cores(), os.environ.get("OMP_NUM_THREADS")
    yield Fact(
        "cores",
        f"{cores} of {os.cpu_count()} may be used; torch has {torch.get_num_threads()} "
        f"threads; OMP_NUM_THREADS is {chosen or 'not set'}",
    )
    yield from thread_facts(os.environ, llama.device.machine_cores())
    present = [name for name in _INSTRUCTION_SETS if name in native.cpu_flags()]
    yield Fact("cpu", f"{platform.machine()} with {', '.join(present) or 'no AVX2'}")
    yield Fact("g++", shutil.which("g++") or shutil.which("c++") or "not found")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        library = native.kernels()
    if library is not None:
        yield Fact("kernels", f"this project's, for bf16 and quantized weights: {library._name}")
    else:
        why = str(caught[0].message) if caught else "this project has none for this CPU"
        yield Fact("kernels", f"torch's: {why}", problem=bool(caught))


def _checkpoint(ckpt_dir: str, device: torch.device, num_ranks: int) -> Iterator[Fact]:
    """What `find` says of a folder: its files are not read, but for the JSON."""
    try:
        found = find(ckpt_dir)
        tokenizer = found.tokenizer_path()
    except (OSError, ValueError) as e:
        yield problem("checkpoint", str(e))
        return
    args = found.params
    size = sum(path.stat().st_size for path in found.shards)
    layout = {"meta": "Meta's", "hf": "Hugging Face's", "gguf": "GGUF's"}.get(
        found.layout, "packed"
    )
    yield Fact(
        "checkpoint",
        f"{found.weights_path}: {layout} layout, {len(found.shards)} file(s), {size:,} B",
    )
    yield Fact(
        "model",
        f"dim {args.dim}, {args.n_layers} layers, {args.n_heads} heads over {args.kv_heads} "
        f"key-value heads, vocabulary {args.vocab_size}, context {args.longest_context}",
    )
    yield Fact("tokenizer", str(tokenizer))
    yield from _fits(found, device, num_ranks)


def _fits(found: Checkpoint, device: torch.device, num_ranks: int = 1) -> Iterator[Fact]:
    """For so many ranks: the weights of one, and the KV cache that has room beside them."""
    try:
        found.params.check_ranks(num_ranks)
    except ValueError as e:
        yield problem("fits", str(e))
        return
    free = llama.device.free_bytes(device)  # of a rank
    formats = [None, *QUANTIZED] if device.type != "mps" else [None]
    ways = {name or "bf16": (found, name) for name in formats}
    if found.packed is not None:
        ways = {found.file_type or "bf16": (found, None)}
    elif stays_in_codes(found, device):
        ways = {found.file_type or "": (replace(found, in_codes=True), None), **ways}
    needs = {
        name: Memory.of(
            files, num_ranks, device, torch.bfloat16, quantize, free, default_batch_size(device)
        )
        for name, (files, quantize) in ways.items()
    }
    for name, memory in needs.items():
        room = f"KV cache {memory.kv_tokens:,} tokens" if memory.kv_tokens else "does not fit"
        yield Fact("fits", f"{name:<6} {memory.weights / 2**30:6.2f} GiB a rank, {room}")
    if not any(memory.kv_tokens for memory in needs.values()):
        yield problem(
            "fits",
            f"the weights and a KV cache have no room in {free / 2**30:.1f} GiB a rank: take more "
            "ranks or machines (torchrun --nnodes), or a smaller model",
        )
