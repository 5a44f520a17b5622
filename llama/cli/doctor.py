"""`llama doctor`: what this machine offers, and what stands in the way. Prints; changes nothing.

Each check gives lines of (name, fact) and says by `problem` that something must be mended. The
kernels may be compiled for this, as they would be by the first model. Under torchrun each rank
makes the checks of its own; rank_report.py has what concerns several ranks,
environment_checks.py what concerns the machine.
"""

import argparse
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import torch

import llama.device
from llama.checkpoint.find import Checkpoint, find
from llama.cli import rank_report
from llama.cli.environment_checks import Fact, environment_facts, problem, thread_facts
from llama.cli.ranks import global_rank
from llama.loading import Memory, default_batch_size
from llama.ops.cpu import native
from llama.ops.triton import selfcheck_cache
from llama.ranks.groups import started_processes
from llama.weights import QUANTIZED

_PACKAGE = Path(__file__).resolve().parent.parent
_INSTRUCTION_SETS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16")

_T = TypeVar("_T")


def doctor(options: argparse.Namespace) -> int:
    """Print the facts; 1 if there is a problem among them. Rank 0 prints those of all ranks."""
    own: list[Fact] = []
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
        own.append(fact)
        code |= _show(fact)
    if num_ranks > 1:
        for fact in rank_report.report(own, device, options.model_parallel_size):
            code |= _show(fact)
    return 0 if global_rank() else code


def _show(fact: Fact) -> bool:
    if global_rank() == 0:
        print(f"{fact.name:<12} {'PROBLEM: ' * fact.problem}{fact.text}", flush=True)
    return fact.problem


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
    layout = {"meta": "Meta's layout", "hf": "Hugging Face's layout"}[found.layout]
    yield Fact("checkpoint", f"{found.folder}: {layout}, {len(found.shards)} file(s), {size:,} B")
    yield Fact(
        "model",
        f"dim {args.dim}, {args.n_layers} layers, {args.n_heads} heads over {args.kv_heads} "
        f"key-value heads, vocabulary {args.vocab_size}, context {args.longest_context}",
    )
    yield Fact("tokenizer", str(tokenizer))
    yield from _fits(found, device, num_ranks)


def _fits(found: Checkpoint, device: torch.device, num_ranks: int = 1) -> Iterator[Fact]:
    """A row for each number of ranks: weights of one rank, and tokens of KV cache beside them."""
    on_cpu = device.type == "cpu"
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if on_cpu else 1
    machines = max(1, num_ranks // num_local) if on_cpu else 1
    free = llama.device.free_bytes(device) * num_local  # of the machine, or of each rank's GPU
    whose = "this machine for its ranks" if on_cpu else "each rank's GPU, as on this one"
    yield Fact("fits", f"{free / 2**30:.1f} GiB free on {whose}; of one rank:")
    any_fits = False
    for ranks in sorted({1, 2, 4, 8, num_ranks}):
        own = free // -(-ranks // machines) if on_cpu else free
        text, fits = _row(found, ranks, device, own)
        any_fits |= fits
        yield Fact("fits", f"{ranks:>3} rank{'s' if ranks > 1 else ' '}  {text}")
    if not any_fits:
        more = "" if on_cpu else " for the 1, 2, 4 or 8 ranks above"
        yield problem(
            "fits",
            f"the weights and a KV cache have no room{more}: a larger machine, or several "
            "(torchrun --nnodes), or a smaller model",
        )


def _row(found: Checkpoint, ranks: int, device: torch.device, free: int) -> tuple[str, bool]:
    """The text of one row, and whether any type fits."""
    try:
        found.params.check_ranks(ranks)
    except ValueError as e:
        return str(e).partition(":")[0], False
    cells, fits, batch_size = [], False, default_batch_size(device)
    for quantize in (None, *QUANTIZED) if device.type == "cpu" else (None,):
        memory = Memory.of(found, ranks, device, torch.bfloat16, quantize, free, batch_size)
        weights, tokens = memory.weights, memory.kv_tokens
        cache = f"KV cache {tokens:>11,} tokens" if tokens else "does not fit".rjust(27)
        size = f"{weights / 2**30:.2f} GiB" if weights >= 2**30 else f"{weights / 2**20:.1f} MiB"
        cells.append(f"{quantize or 'bf16'} {size:>10}, {cache}")
        fits |= tokens > 0
    return "   ".join(cells), fits
