"""`llama doctor`: what this machine offers, and what stands in the way. Prints; changes nothing.

Each check gives facts, of which the problems say the remedy. The kernels may be compiled for this,
as they would be by the first model. Under torchrun rank 0 prints, for as many ranks as there are.
"""

import argparse
import os
import platform
import shutil
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

import llama.device
from llama.checkpoint.find import Checkpoint, find
from llama.cli.ranks import global_rank
from llama.gpu import selfcheck_cache
from llama.loading import Files, default_batch_size, stays_in_codes
from llama.ops.cpu import native
from llama.ranks.groups import check_interfaces, started_processes
from llama.ranks.placement import Placement
from llama.weights import QUANTIZED

_PACKAGE = Path(__file__).resolve().parent.parent
_INSTRUCTION_SETS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16")
_MIB = 2**20
_MIN_SHM = 64 * _MIB  # Docker's default, of which nothing is in use
_MIN_SHM_GPUS = 512 * _MIB  # NCCL takes some MiB for each pair of GPUs of a machine

_T = TypeVar("_T")


class Fact(NamedTuple):
    """One line of the report."""

    name: str
    text: str
    problem: bool = False


def problem(name: str, text: str) -> Fact:
    """What must be mended; the text has the remedy."""
    return Fact(name, text, True)


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
    Meta's own distribution, installed from such a clone, has the same files as this one."""
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
    layouts = {"meta": "Meta's", "hf": "Hugging Face's", "gguf": "GGUF's"}
    layout = layouts.get(found.layout, "packed")
    files = f"{layout} layout, {len(found.shards)} file(s), {size:,} B"
    yield Fact("checkpoint", f"{found.weights_path}: {files}")
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
    placement = Placement(size=num_ranks)
    held = {name: Files(x, torch.bfloat16, y, placement, device) for name, (x, y) in ways.items()}
    needs = {name: x.memory(free, default_batch_size(device)) for name, x in held.items()}
    for name, memory in needs.items():
        room = f"KV cache {memory.kv_tokens:,} tokens" if memory.kv_tokens else "does not fit"
        yield Fact("fits", f"{name:<6} {memory.weights / 2**30:6.2f} GiB a rank, {room}")
    if not any(memory.kv_tokens for memory in needs.values()):
        yield problem(
            "fits",
            f"the weights and a KV cache have no room in {free / 2**30:.1f} GiB a rank: take more "
            "ranks or machines (torchrun --nnodes), or a smaller model",
        )


def environment_facts(environ: Mapping[str, str], *, gpus: int = 0) -> Iterator[Fact]:
    """The facts of this machine, for the ranks that `environ`'s variables describe."""
    num_local = _number(environ, "LOCAL_WORLD_SIZE")
    is_launched = {"WORLD_SIZE", "LOCAL_WORLD_SIZE"} <= environ.keys()
    is_several = is_launched and _number(environ, "WORLD_SIZE") >= 2 * max(1, num_local)
    yield from _shared_memory(Path("/dev/shm"), num_local, gpus)
    yield _host_name(matters=is_several and "GLOO_SOCKET_IFNAME" not in environ)
    try:
        check_interfaces(environ.get("GLOO_SOCKET_IFNAME"))
    except ValueError as e:
        yield problem("interface", str(e))


def thread_facts(environ: Mapping[str, str], cores: int) -> Iterator[Fact]:
    """`cores`: what the processes of this machine may use, by affinity and CPU quota together."""
    num_local = _number(environ, "LOCAL_WORLD_SIZE")
    installed = os.cpu_count() or 1
    if cores == 1 and installed > 1:
        yield problem(
            "cores",
            f"the quota or affinity of this process is one core of {installed}: raise the CPU "
            "limit of the container or job, as every thread of every rank shares that core",
        )
    elif cores < num_local:
        yield problem(
            "cores",
            f"{num_local} ranks share {cores} cores: a rank that waits for a core holds up all "
            "others; start no more ranks than cores",
        )
    chosen = environ.get("OMP_NUM_THREADS", "1")
    if not chosen.isdecimal() or not int(chosen):
        yield problem("threads", f"OMP_NUM_THREADS={chosen!r} is not a number from 1 on")
    elif int(chosen) > 1 and int(chosen) * num_local > cores:
        yield problem(
            "threads",
            f"OMP_NUM_THREADS={chosen} for {num_local} rank{'s' * (num_local > 1)} on {cores} "
            f"cores: threads wait for one another; unset it, or give {max(1, cores // num_local)}",
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "1")
    return int(text) if text.isdecimal() else 1  # `started_processes` tells of a wrong one


def _shared_memory(folder: Path, num_local: int, gpus: int) -> Iterator[Fact]:
    """Ranks of one machine exchange tensors here, and so do NCCL's."""
    if not folder.is_dir():
        return
    needed = _MIN_SHM_GPUS if gpus > 1 and num_local > 1 else _MIN_SHM
    free = shutil.disk_usage(folder).free
    text = f"{folder} has {free / _MIB:,.0f} MiB free"
    if free < needed:
        text += (
            f", and ranks of one machine want {needed // _MIB}: docker run --shm-size 1g, in "
            "Kubernetes an emptyDir with medium Memory there, else mount -o remount,size=1g "
            f"{folder}"
        )
    yield Fact("shm", text, problem=free < needed)


def _host_name(*, matters: bool) -> Fact:
    """gloo listens on the address of the host's name, unless an interface is named."""
    name = socket.gethostname()
    try:
        found = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
        text = f"{name} resolves to {', '.join(found)}"
        is_wrong = all(address.startswith(("127.", "::1")) for address in found)
        wrong = ", which no other machine can reach"
    except OSError as e:
        text, is_wrong, wrong = f"{name} does not resolve ({e.strerror or e})", True, ""
    if not (matters and is_wrong):
        return Fact("host", text)
    return problem(
        "host",
        f"{text}{wrong}: set GLOO_SOCKET_IFNAME to the interface that the machines share, or "
        "mend /etc/hosts",
    )
