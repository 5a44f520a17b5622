"""`llama doctor`: what this machine offers, and its problems. It prints and changes nothing.

Each check yields facts; a problem says how to solve it. The CPU kernels may be compiled for this,
as they would be by the first model. Under torchrun rank 0 prints, for as many ranks as there are.
The file has over 400 lines because each check is short and knows nothing of the others.
"""

import argparse
import contextlib
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

import llama.common.device
from llama.build_args import read_counts, read_shares
from llama.checkpoint.chat_templates import find_chat_templates
from llama.checkpoint.find import Checkpoint, find
from llama.checkpoint.shards import open_shards
from llama.checkpoint.table import part_of
from llama.checkpoint.tokenizer_files import load_tokenizer
from llama.cli.plan.report import images_text, summary
from llama.cli.ranks import global_rank
from llama.common.checks import FieldError, whole_number
from llama.common.device import nccl_version
from llama.common.extras import install_hint
from llama.gpu.cases import Cases, Computed, Formats
from llama.gpu.check import check_kernels, unsupported_reason
from llama.gpu.selection import MIN_NCCL, version_text
from llama.kernels.cpu import build, native
from llama.loading.dialog_format import find_dialog_format
from llama.loading.files import Files, check_stages, layer_counts, stays_in_codes
from llama.loading.memory import usual_memory
from llama.loading.shares import check_shares, column_step
from llama.loading.sizes import Memory, default_batch_size
from llama.model.args import ModelArgs
from llama.model.plan import LayerPlan
from llama.model.shapes import SHAPES
from llama.model.shares import RankShare, distinct_ranks
from llama.ranks.placement import WHOLE, Placement
from llama.ranks.world import check_interfaces, started_processes
from llama.weights.choice import QUANTIZED, default_activations

_PACKAGE = Path(__file__).resolve().parent.parent
_OWN_NAMES = ("llama-runtime", "llama")  # distribution names; the second was used before 0.5.0
_LAYOUTS = {"meta": "Meta's", "hf": "Hugging Face's", "gguf": "GGUF's"}
_MIB = 2**20
_GIB = 2**30
_MIN_SHM = 64 * _MIB  # Docker's default, while nothing else uses it
_MIN_SHM_GPUS = 512 * _MIB  # NCCL takes some MiB for each pair of GPUs of a machine.

_MPS = "PyTorch computes the operators; quantize, kv_cache_dtype and ranks are not supported"
_ROCM = "the kernels compile for gfx90a, gfx942 and gfx1100, and the first build checks them"
_NOT_RUN = "no such GPU has run this project yet"
# What has run this project: the GPU, and the versions of torch and Triton. A test compares them
# with the files of scripts/bench/results.
RAN_ON = (("NVIDIA H100 80GB HBM3", "2.11.0", "3.6.0"),)
_ARM = "; on ARM they have been compared with PyTorch in QEMU, and no such CPU has timed them"

_T = TypeVar("_T")


class Fact(NamedTuple):
    """One line of the report."""

    name: str
    text: str
    problem: bool = False


def problem(name: str, text: str) -> Fact:
    """Return a fact that is a problem. The text says how to solve it."""
    return Fact(name, text, True)


def doctor(options: argparse.Namespace) -> int:
    """Print the facts, and return 1 if one of them is a problem."""
    code = 0
    for fact in _facts(options):
        if global_rank() == 0:
            print(f"{fact.name:<12} {'PROBLEM: ' * fact.problem}{fact.text}", flush=True)
            code |= fact.problem
    return code


def _facts(options: argparse.Namespace) -> Iterator[Fact]:
    cpu = torch.device("cpu")
    num_ranks, ranks_problem = _tried("ranks", started_processes, 1)
    device, device_problem = _tried(
        "device", lambda: llama.common.device.pick_device(options.device), cpu
    )
    yield Fact("llama", f"{llama.__version__} in {_PACKAGE}")
    yield from _import_problems(Path.cwd())
    yield Fact("python", f"{platform.python_version()} in {sys.prefix}")
    yield Fact("torch", f"{torch.__version__}")
    yield ranks_problem or Fact("ranks", str(num_ranks))
    if device_problem is None:
        yield from _device(device)
    else:
        yield device_problem
    yield from _cpu()
    yield from environment_facts(os.environ, gpus=torch.cuda.device_count())
    placement = Placement(size=num_ranks)
    if options.ckpt_dir is not None:
        try:
            placement = _placement(options, num_ranks)
        except FieldError as e:
            yield problem("ranks" if e.field == "pipeline_parallel_size" else e.field, str(e))
        yield from _checkpoint(options.ckpt_dir, device, placement, options.pipeline_layers)
    if options.gpu:
        yield from compared_kernels(device, options.ckpt_dir, placement)


def _placement(options: argparse.Namespace, num_ranks: int) -> Placement:
    """Return the first of the ranks that the flags describe.

    Shares that a build would measure are equal. A single process stands for one rank per stage,
    each on a machine like this one.

    Raises:
        FieldError: The flags are not for so many ranks; it names the flag.
    """
    name = "pipeline_parallel_size"
    stages = whole_number(name, options.pipeline_parallel_size, 1, 2**13)
    if num_ranks > 1 and num_ranks % stages:
        text = f"={stages} does not divide the {num_ranks} ranks: give a number that does"
        raise FieldError.of(name, text)
    size = max(1, num_ranks // stages)
    shares = read_shares(options.shares)
    ffn_shares = read_counts("ffn_shares", options.ffn_shares)
    check_shares(shares, size)
    check_shares(ffn_shares, size, "ffn_shares")
    return Placement(
        stages=stages,
        size=size,
        shares=shares if isinstance(shares, tuple) else (),
        ffn_shares=ffn_shares or (),
    )


def _tried(name: str, find_out: Callable[[], _T], fallback: _T) -> tuple[_T, Fact | None]:
    """Call a function.

    Returns:
        Its result and None; or `fallback` and the problem if the function raises ValueError.
    """
    try:
        return find_out(), None
    except ValueError as e:
        return fallback, problem(name, str(e))


def _import_problems(folder: Path) -> Iterator[Fact]:
    """Look for other packages that are called llama.

    A folder `llama/` in the current folder, as in Meta's clone, is what Python imports from there.
    Meta's own distribution, installed from such a clone, has files of the same names as this one.
    """
    other = folder / "llama"
    if other.resolve() == _PACKAGE:
        pass
    elif (other / "cli" / Path(__file__).name).exists():
        yield problem(
            "import",
            f"this folder is another checkout of this project: the command llama runs {_PACKAGE}, "
            "and python here imports the one in this folder; `. ./scripts/setup` in it makes and "
            "activates an environment of its own",
        )
    elif other.is_dir() and any(other.glob("*.py")):
        yield problem(
            "import",
            f"{other} hides this package from the scripts alongside it, which then stop with "
            '"environment variable RANK expected, but not set": start them with '
            "PYTHONSAFEPATH=1, as in PYTHONSAFEPATH=1 torchrun SCRIPT, or rename that folder",
        )
    for name in metadata.packages_distributions().get("llama", []):
        if name not in _OWN_NAMES:
            yield problem(
                "import",
                f"the package {name} is installed too, and writes to the same folder: "
                f"pip uninstall {name}, then install this one again",
            )


def _device(device: torch.device) -> Iterator[Fact]:
    title = torch.cuda.get_device_name(device) if device.type == "cuda" else "torch"
    yield Fact("device", f"{device} ({title}); CUDA devices: {torch.cuda.device_count()}")
    free = llama.common.device.free_bytes(device) / _GIB
    yield Fact("memory", f"{free:.1f} GiB free for a process on {device}")
    if device.type == "mps":
        yield Fact("support", f"{_MPS}; {_NOT_RUN}")
    elif torch.version.hip is not None:
        yield Fact("support", f"ROCm {torch.version.hip}: {_ROCM}; {_NOT_RUN}")
    if device.type == "cuda":
        yield _gpu_kernels(device)
        yield _versions()
        yield from _nccl()


def _versions() -> Fact:
    """Say with which versions this project has run on a GPU, and which ones are here."""
    ran = "; ".join(f"torch {torch} and Triton {triton} on {gpu}" for gpu, torch, triton in RAN_ON)
    here = f"torch {torch.__version__}"
    with contextlib.suppress(metadata.PackageNotFoundError):
        here += f" and Triton {metadata.version('triton')}"
    return Fact("versions", f"this project has run with {ran}; here is {here}")


def _nccl() -> Iterator[Fact]:
    version = nccl_version()
    if version is not None:
        text = version_text(version)
        if version < MIN_NCCL:
            text += (
                "; a group of ranks that spans machines runs without CUDA graphs before "
                f"{version_text(MIN_NCCL)}"
            )
        yield Fact("nccl", text)


def _gpu_kernels(device: torch.device) -> Fact:
    """Say whether this project's kernels can run on a GPU."""
    reason = unsupported_reason(device)
    if reason:
        text = (
            f"PyTorch computes the operators, because this project's kernels cannot run: {reason}"
        )
    else:
        text = (
            "each build compares them with PyTorch's operators; `llama doctor --gpu` does so in "
            "all cases, which takes minutes"
        )
    return Fact("gpu kernels", text)


def compared_kernels(
    device: torch.device, ckpt_dir: str | None, placement: Placement
) -> Iterator[Fact]:
    """Compare each kernel of a GPU with PyTorch's operator in all cases.

    Args:
        device: The GPU.
        ckpt_dir: The model whose sizes and formats are used; None: an 8B in each format.
        placement: The part of the model on one rank.
    """
    reason = unsupported_reason(device) if device.type == "cuda" else f"the device is {device}"
    if reason:
        yield problem("gpu kernels", f"--gpu compares the kernels of a GPU: {reason}")
        return
    yield from compared(Cases(_computed(device, ckpt_dir, placement), every=True))


def _computed(device: torch.device, ckpt_dir: str | None, placement: Placement) -> Computed:
    """Return what a rank computes, see `compared_kernels`."""
    params = ModelArgs(**SHAPES["8b"])
    formats: Formats = (None, *QUANTIZED)
    if ckpt_dir is not None:
        checkpoint = find(ckpt_dir)
        checkpoint = replace(checkpoint, in_codes=stays_in_codes(checkpoint, device))
        params = checkpoint.params
        formats = Files(checkpoint, torch.bfloat16, None, placement, device).formats()
    plan = LayerPlan.of(params, placement)
    return Computed(plan, params.vocab_size, device, torch.bfloat16, formats)


def compared(cases: Cases) -> Iterator[Fact]:
    """Yield for each kernel whether it agrees with its operator in these cases."""
    for name in cases.computed.names:
        failure = check_kernels(cases, [name]).reasons[name]
        if failure is None:
            yield Fact("gpu kernels", f"{name} agrees with PyTorch's operator")
        else:
            yield problem("gpu kernels", f"a build does without {name}: {failure}")


def _cpu() -> Iterator[Fact]:
    llama.common.device.set_num_threads()  # A build does the same.
    cores = llama.common.device.available_cores()
    chosen = os.environ.get("OMP_NUM_THREADS") or "not set"
    yield Fact(
        "cores",
        f"{cores} of {os.cpu_count()} are available; torch uses {torch.get_num_threads()} threads; "
        f"OMP_NUM_THREADS is {chosen}",
    )
    yield from thread_facts(os.environ, llama.common.device.machine_cores())
    present = [x.name for x in build.INSTRUCTION_SETS if native.cpu_flags() >= x.needs]
    names = ", ".join(present) or "no instructions that the kernels need"
    yield Fact("cpu", f"{platform.machine()} with {names}")
    yield Fact("g++", shutil.which("g++") or shutil.which("c++") or "not found")
    yield _cpu_kernels()


def _cpu_kernels() -> Fact:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        library = native.kernels()
    if library is not None:
        name = library._name
        state = _ARM if platform.machine() == "aarch64" else ""
        return Fact("kernels", f"this project's, for bf16 and quantized weights: {name}{state}")
    reason = str(caught[0].message) if caught else "this project has no kernels for this CPU"
    return Fact("kernels", f"PyTorch's: {reason}", problem=bool(caught))


def _checkpoint(
    ckpt_dir: str,
    device: torch.device,
    placement: Placement = WHOLE,
    pipeline_layers: str | None = None,
) -> Iterator[Fact]:
    """Describe a checkpoint. Its tokenizer is loaded; its weights are not read.

    Args:
        ckpt_dir: Its files.
        device: The device of each rank.
        placement: The first of the ranks.
        pipeline_layers: The flag.
    """
    try:
        checkpoint = find(ckpt_dir)
    except (OSError, ValueError) as e:
        yield problem("checkpoint", str(e))
        return
    try:
        checkpoint = checkpoint.with_images()
    except ValueError as e:
        yield problem("vision", f"{e}; images=False loads the text model")
    args = checkpoint.params
    size = sum(path.stat().st_size for path in checkpoint.shards)
    layout = _LAYOUTS.get(checkpoint.layout, "packed")
    files = f"{layout} layout, {len(checkpoint.shards)} file(s), {size:,} B"
    yield Fact("checkpoint", f"{checkpoint.weights_path}: {files}")
    yield Fact(
        "model",
        f"dim {args.dim}, {args.n_layers} layers, {args.n_heads} heads over {args.kv_heads} "
        f"key-value heads, vocabulary {args.vocab_size}, context {args.longest_context}",
    )
    if checkpoint.choice:
        yield Fact("choice", checkpoint.choice)
    if checkpoint.vision is not None:
        yield Fact("vision", checkpoint.vision.describe())
    if args.vision is not None:
        yield Fact("images", f"{images_text(args)}; {_pillow()}")
    if checkpoint.purpose:
        yield Fact("purpose", checkpoint.purpose)
    yield from _tokenizer(checkpoint)
    yield from _tensors(checkpoint)
    loaded = replace(checkpoint, in_codes=stays_in_codes(checkpoint, device))
    if loaded.in_codes or loaded.packed is not None:
        yield from _activations(loaded, device)
    try:
        args.check_ranks(placement.size)
        check_stages(args, placement.stages)
        as_loaded = Files(loaded, torch.bfloat16, None, placement, device)
        counts = layer_counts(pipeline_layers, None, as_loaded)
    except ValueError as e:
        yield problem("fits", str(e))
        return
    if pipeline_layers is not None:
        placement = replace(placement, layer_counts=counts)
    yield from _shares(args, replace(placement, column_step=column_step(loaded, device)))
    yield from _fits(checkpoint, device, placement)
    yield from _plan(checkpoint, device, placement)


def _pillow() -> str:
    """Return whether files of images can be read here."""
    try:
        return f"Pillow {metadata.version('pillow')} reads them"
    except metadata.PackageNotFoundError:
        return f"without Pillow none can be read: {install_hint('vision')}"


def _activations(checkpoint: Checkpoint, device: torch.device) -> Iterator[Fact]:
    """Yield how a build rounds the inputs of quantized matrices by default, if it does."""
    name = default_activations(checkpoint.activations, device)
    if name is not None:
        yield Fact("activations", f"{name}; --activations bf16 rounds none")


def _tensors(checkpoint: Checkpoint) -> Iterator[Fact]:
    """Yield a problem if a file is cut short, or does not hold the model's tensors."""
    try:
        if checkpoint.packed is None:  # `find` has opened packed weights
            open_shards(checkpoint)
    except (OSError, ValueError) as e:
        yield problem("weights", str(e))


def _shares(args: ModelArgs, placement: Placement) -> Iterator[Fact]:
    """Yield what each rank holds, unless all hold as much."""
    if len(distinct_ranks(args, placement)) == 1:
        return
    for rank, peer in enumerate(placement.peers()):
        share = RankShare.of(args, peer)
        yield Fact(
            "share",
            f"rank {rank}: heads {len(share.heads)}, key-value heads {len(share.kv_heads)}, "
            f"ffn columns {len(share.ffn):,}, vocabulary rows {len(share.vocab):,}; "
            f"{part_of(args, peer):.1%} of the weights",
        )


def _plan(checkpoint: Checkpoint, device: torch.device, placement: Placement) -> Iterator[Fact]:
    """Yield the speed that the cost model expects, if it knows the device and shares are equal."""
    if placement.is_even and placement.stages == 1 and not checkpoint.why_silent:
        free = llama.common.device.free_bytes(device)
        text = summary(checkpoint, device, free, placement.size)
        if text is not None:
            yield Fact("plan", text)


def _tokenizer(checkpoint: Checkpoint) -> Iterator[Fact]:
    """Load the tokenizer and the chat format, and encode a dialog of one message."""
    try:
        tokenizer = load_tokenizer(checkpoint)
    except (OSError, ValueError) as e:
        yield problem("tokenizer", str(e))
        return
    yield Fact("tokenizer", f"{checkpoint.tokenizer_path()}: {tokenizer.n_words} tokens")
    if checkpoint.why_silent and not find_chat_templates(checkpoint):
        return  # It answers no chats.
    # A base model in these layouts has no chat template, which is no fault of its files.
    may_lack_template = checkpoint.source_layout in ("hf", "gguf")
    try:
        may_lack_template &= not find_chat_templates(checkpoint)
        dialog_format = find_dialog_format(checkpoint, tokenizer)
        prompt = dialog_format.encode([{"role": "user", "content": "Hello"}])
    except (OSError, TypeError, ValueError) as e:
        yield Fact("chat", str(e), problem=not may_lack_template)
        return
    yield Fact("chat", f"{dialog_format.describe()}; 'Hello' is a prompt of {len(prompt)} tokens")


def _fits(
    checkpoint: Checkpoint, device: torch.device, placement: Placement = WHOLE
) -> Iterator[Fact]:
    """Yield for each format the weights of the largest rank, and the KV cache that fits.

    The KV cache has as many tokens on all ranks: those of the rank with the smallest one.
    """
    total = llama.common.device.free_bytes(device) * placement.size
    is_shared = device.type == "cpu"  # The ranks of a machine divide its memory by their shares.
    shares = placement.shares if is_shared and placement.shares else (1,) * placement.size
    free = [total * share // sum(shares) for share in shares]
    of_stages = [
        [
            _memory_by_format(checkpoint, device, replace(peer, stage=stage), free[peer.rank])
            for peer in placement.peers()
        ]
        for stage in range(placement.stages)
    ]
    if placement.stages > 1:
        yield from _stages(checkpoint, of_stages)
    needs = [need for ranks in of_stages for need in ranks]
    fitting = 0
    for name in needs[0]:
        weights = max(need[name].memory.weights for need in needs)
        tokens = min(need[name].memory.kv_tokens for need in needs)
        cache = f"KV cache {tokens:,} tokens" if tokens else "does not fit"
        yield Fact("fits", f"{name:<6} {weights / _GIB:6.2f} GiB per rank, {cache}")
        fitting += tokens
    if not fitting:
        yield problem(
            "fits",
            f"weights and KV cache do not fit into {min(free) / _GIB:.1f} GiB per rank: use more "
            "ranks or machines (torchrun --nnodes), or a smaller model",
        )


class _Need(NamedTuple):
    """The part of a model that a rank holds in one format, and the memory that it needs."""

    share: RankShare
    memory: Memory


def _stages(checkpoint: Checkpoint, of_stages: list[list[dict[str, _Need]]]) -> Iterator[Fact]:
    """Yield what each pipeline stage holds in the usual format, on a machine like this one."""
    name = next(iter(of_stages[0][0]))
    for stage, ranks in enumerate(of_stages):
        share = ranks[0][name].share
        ends = ["token embedding"] * share.has_embedding + ["lm_head"] * share.has_lm_head
        parts = ", ".join([f"layers {share.layers.start} to {share.layers.stop - 1}", *ends])
        weights = max(need[name].memory.weights for need in ranks)
        tokens = min(need[name].memory.kv_tokens for need in ranks)
        free = min(need[name].memory.free for need in ranks) / _GIB
        text = f"{stage}: {parts}; {name or 'weights'} {weights / _GIB:.2f} GiB per rank"
        if tokens:
            yield Fact("stage", f"{text}, KV cache {tokens:,} tokens")
        else:
            yield Fact("stage", f"{text}, which does not fit into {free:.1f} GiB")


def _memory_by_format(
    checkpoint: Checkpoint, device: torch.device, placement: Placement, free: int
) -> dict[str, _Need]:
    """Return what a rank needs of `free` bytes, for each format that the weights may have."""
    formats: dict[str, tuple[Checkpoint, str | None]] = {"bf16": (checkpoint, None)}
    if device.type != "mps" and llama.common.device.missing_bf16(device) is None:
        formats |= {name: (checkpoint, name) for name in QUANTIZED}
    if checkpoint.packed is not None:
        formats = {checkpoint.file_type or "bf16": (checkpoint, None)}
    elif stays_in_codes(checkpoint, device):
        in_codes = replace(checkpoint, in_codes=True)
        formats = {checkpoint.file_type or "": (in_codes, None), **formats}
    batch_size = default_batch_size(device)
    needs = {}
    for name, (source, quantize) in formats.items():
        own = replace(placement, column_step=column_step(source, device))
        files = Files(source, torch.bfloat16, quantize, own, device)
        if not own.layer_counts:
            own = replace(own, layer_counts=layer_counts(None, batch_size, files))
            files = replace(files, placement=own)
        share = RankShare.of(source.params, own)
        needs[name] = _Need(share, usual_memory(files, free, batch_size))
    return needs


def environment_facts(environ: Mapping[str, str], *, gpus: int = 0) -> Iterator[Fact]:
    """Yield the facts of this machine that concern ranks.

    Args:
        environ: Environment variables, which describe the ranks.
        gpus: Number of GPUs of the machine.
    """
    num_local = _number(environ, "LOCAL_WORLD_SIZE")
    is_launched = {"WORLD_SIZE", "LOCAL_WORLD_SIZE"} <= environ.keys()
    is_several = is_launched and _number(environ, "WORLD_SIZE") >= 2 * max(1, num_local)
    yield from _shared_memory(Path("/dev/shm"), num_local, gpus)
    yield _host_name(is_used=is_several and "GLOO_SOCKET_IFNAME" not in environ)
    try:
        check_interfaces(environ.get("GLOO_SOCKET_IFNAME"))
    except ValueError as e:
        yield problem("interface", str(e))


def thread_facts(environ: Mapping[str, str], cores: int) -> Iterator[Fact]:
    """Yield the problems of threads and cores.

    Args:
        environ: Environment variables, which describe the ranks.
        cores: Number of cores that the processes of this machine may use, by affinity and quota.
    """
    num_local = _number(environ, "LOCAL_WORLD_SIZE")
    installed = os.cpu_count() or 1
    if cores == 1 and installed > 1:
        yield problem(
            "cores",
            f"the quota or affinity of this process is one core of {installed}: raise the CPU "
            "limit of the container or job, because every thread of every rank shares that core",
        )
    elif cores < num_local:
        yield problem(
            "cores",
            f"{num_local} ranks share {cores} cores: a rank that waits for a core holds up all "
            "others; start no more ranks than cores",
        )
    chosen = environ.get("OMP_NUM_THREADS", "1")
    if not chosen.isdecimal() or not int(chosen):
        yield problem("threads", f"OMP_NUM_THREADS={chosen!r} must be a whole number from 1")
    elif int(chosen) > 1 and int(chosen) * num_local > cores:
        yield problem(
            "threads",
            f"OMP_NUM_THREADS={chosen} for {num_local} rank{'s' * (num_local > 1)} on {cores} "
            "cores makes threads wait for one another: unset it, or set it to "
            f"{max(1, cores // num_local)}",
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "1")
    return int(text) if text.isdecimal() else 1  # `started_processes` reports a wrong value.


def _shared_memory(folder: Path, num_local: int, gpus: int) -> Iterator[Fact]:
    """Look at the folder through which the ranks of one machine exchange tensors, as NCCL does."""
    if not folder.is_dir():
        return
    needed = _MIN_SHM_GPUS if gpus > 1 and num_local > 1 else _MIN_SHM
    free = shutil.disk_usage(folder).free
    text = f"{folder} has {free / _MIB:,.0f} MiB free"
    if free < needed:
        text += (
            f", but the ranks of one machine need {needed // _MIB}: use docker run --shm-size 1g, "
            "in Kubernetes an emptyDir with medium Memory there, or mount -o remount,size=1g "
            f"{folder}"
        )
    yield Fact("shm", text, problem=free < needed)


def _host_name(*, is_used: bool) -> Fact:
    """Look up the name of this host.

    Args:
        is_used: Whether gloo listens on the address of that name, which it does for ranks on
            several machines unless an interface is named.
    """
    name = socket.gethostname()
    try:
        infos = socket.getaddrinfo(name, None)
    except OSError as e:
        text = f"{name} does not resolve ({e.strerror or e})"
        is_unreachable = True
    else:
        addresses = sorted({str(info[4][0]) for info in infos})
        text = f"{name} resolves to {', '.join(addresses)}"
        is_unreachable = all(address.startswith(("127.", "::1")) for address in addresses)
        if is_unreachable and is_used:
            text += ", which no other machine can reach"
    if not (is_used and is_unreachable):
        return Fact("host", text)
    return problem(
        "host",
        f"{text}: set GLOO_SOCKET_IFNAME to the interface that the machines share, or correct "
        "/etc/hosts",
    )
