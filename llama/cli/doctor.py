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
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

import llama
from llama.checkpoint.find import Checkpoint, find
from llama.cli.environment_checks import Fact, environment_facts, thread_facts
from llama.cli.ranks import global_rank

_PACKAGE = Path(__file__).resolve().parent.parent
_INSTRUCTION_SETS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16")


def doctor(options: argparse.Namespace) -> int:
    """Print the facts; 1 if there is a problem among them. Rank 0 prints those of all ranks."""
    own: list[Fact] = []
    code = 0
    for fact in _facts(options.ckpt_dir, options.device):
        own.append(fact)
        code |= _show(fact)
    if _num_started() > 1:
        from llama.cli import rank_report

        device = _device_or_cpu(options.device)
        for fact in rank_report.report(own, device, options.model_parallel_size):
            code |= _show(fact)
    return 0 if global_rank() else code


def _show(fact: Fact) -> bool:
    if global_rank() == 0:
        print(f"{fact.name:<12} {'PROBLEM: ' * fact.problem}{fact.text}", flush=True)
    return fact.problem


def _num_started() -> int:
    """How many ranks were started; 1 too where the variables are wrong, which is told."""
    from llama.ranks.groups import started_processes

    try:
        return started_processes()
    except ValueError:
        return 1


def _facts(ckpt_dir: str | None, device: str | None) -> Iterator[Fact]:
    yield Fact("llama", f"{llama.__version__} in {_PACKAGE}")
    yield from _shadows(Path.cwd())
    yield Fact("python", f"{platform.python_version()} in {sys.prefix}")
    yield Fact("torch", f"{torch.__version__}")
    yield from _ranks()
    yield from _device(device)
    yield from _cpu()
    yield from environment_facts(os.environ, gpus=torch.cuda.device_count())
    if ckpt_dir is not None:
        yield from _checkpoint(ckpt_dir, _device_or_cpu(device))


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
    from llama.ranks.groups import started_processes

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
    title = torch.cuda.get_device_name(device) if device.type == "cuda" else "torch"
    others = torch.cuda.device_count()
    yield Fact("device", f"{device} ({title}); CUDA devices: {others}")
    yield Fact("memory", f"{free_bytes(device) / 2**30:.1f} GiB free for a process on {device}")
    if device.type == "cuda":
        yield from _gpu_kernels(device)


def _gpu_kernels(device: torch.device) -> Iterator[Fact]:
    """What the self-check has found on such a GPU, for each model and type that was built."""
    from llama.ops.triton import selfcheck_cache

    if reason := selfcheck_cache.not_for(device):
        yield Fact("gpu kernels", f"torch's: this project's are not used, as {reason}")
        return
    name = selfcheck_cache.gpu_name(device)
    found = [(k, result) for k, result in selfcheck_cache.known_results() if k["gpu"] == name]
    if not found:
        yield Fact("gpu kernels", "not checked yet: the first build on this GPU does it")
    for key, result in found:
        current = "" if selfcheck_cache.is_current(key, device) else ", of an older version"
        what = f"{key['dtype']}, dim {key['dim']}, {key['n_heads']} heads{current}"
        yield Fact("gpu kernels", f"{what}: {', '.join(result.passed) or 'none'}")
        for name, why in result.failed.items():
            yield Fact("gpu kernels", f"{what}: torch runs in place of {name}: {why}",
                       problem=not current)  # fmt: skip


def _device_or_cpu(name: str | None) -> torch.device:
    """The device to measure; the CPU where `_device` has a problem to tell."""
    from llama.device import pick_device

    try:
        return pick_device(name)
    except ValueError:
        return torch.device("cpu")


def _cpu() -> Iterator[Fact]:
    from llama.device import available_cores, machine_cores, set_num_threads
    from llama.ops.cpu import native

    set_num_threads()  # as build does
    chosen = os.environ.get("OMP_NUM_THREADS")
    yield Fact(
        "cores",
        f"{available_cores()} of {os.cpu_count()} may be used; torch has {torch.get_num_threads()} "
        f"threads; OMP_NUM_THREADS is {chosen or 'not set'}",
    )
    yield from thread_facts(os.environ, machine_cores())
    present = [name for name in _INSTRUCTION_SETS if name in native.cpu_flags()]
    yield Fact("cpu", f"{platform.machine()} with {', '.join(present) or 'no AVX2'}")
    yield Fact("g++", shutil.which("g++") or shutil.which("c++") or "not found")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        library = native.kernels()
    if library is not None:
        yield Fact("kernels", f"this project's, for bf16 and quantized weights: {library._name}")
    else:
        none = "they are turned off" if native.VARIABLE in os.environ else "none is for this CPU"
        why = str(caught[0].message) if caught else none
        yield Fact("kernels", f"torch's: {why}", problem=bool(caught))


def _checkpoint(ckpt_dir: str, device: torch.device) -> Iterator[Fact]:
    """What `find` says of a folder: its files are not read, but for the JSON."""
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
    yield from _fits(found, device)


def _fits(found: Checkpoint, device: torch.device) -> Iterator[Fact]:
    """A row for each number of ranks: weights of one rank, and tokens of KV cache beside them."""
    from llama.device import free_bytes

    on_cpu = device.type == "cpu"
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if on_cpu else 1
    machines = max(1, _num_started() // num_local) if on_cpu else 1
    free = free_bytes(device) * num_local  # of the machine, or of each rank's GPU
    whose = "this machine for its ranks" if on_cpu else "each rank's GPU, as on this one"
    yield Fact("fits", f"{free / 2**30:.1f} GiB free on {whose}; of one rank:")
    rows = [
        (ranks, _row(found, ranks, device, free // -(-ranks // machines) if on_cpu else free))
        for ranks in sorted({1, 2, 4, 8, _num_started()})
    ]
    for ranks, (text, _) in rows:
        yield Fact("fits", f"{ranks:>3} rank{'s' if ranks > 1 else ' '}  {text}")
    if not any(fits for _, (_, fits) in rows):
        more = "" if on_cpu else " for the 1, 2, 4 or 8 ranks above"
        yield Fact("fits", f"the weights and a KV cache have no room{more}: a larger machine, or "
                   "several (torchrun --nnodes), or a smaller model", problem=True)  # fmt: skip


def _row(found: Checkpoint, ranks: int, device: torch.device, free: int) -> tuple[str, bool]:
    """The text of one row, and whether any type fits."""
    from llama.checkpoint.reader import bytes_of
    from llama.loading import kv_tokens
    from llama.weights import QUANTIZED

    try:
        found.params.check_ranks(ranks)
    except ValueError as e:
        return str(e).partition(":")[0], False
    cells, fits = [], False
    for quantize in (None, *QUANTIZED) if device.type == "cpu" else (None,):
        weights = bytes_of(found, ranks, torch.bfloat16, quantize)
        tokens = kv_tokens(found, ranks, device, torch.bfloat16, quantize, free)
        cache = f"KV cache {tokens:>11,} tokens" if tokens else "does not fit".rjust(27)
        size = f"{weights / 2**30:.2f} GiB" if weights >= 2**30 else f"{weights / 2**20:.1f} MiB"
        cells.append(f"{quantize or 'bf16'} {size:>10}, {cache}")
        fits |= tokens > 0
    return "   ".join(cells), fits
