"""The kernels and the graph recorder that a model uses on its GPU.

In: a rank's device, dtype and sizes, then its model. Out: its table of kernels and a recorder of
CUDA graphs, the same on every rank, with at most one warning for each that names what was dropped
and why. LLAMA_GPU_KERNELS=none turns all of them off, and a list such as attention,graph turns all
others off.
"""

import os
import warnings

from llama.common.device import nccl_version
from llama.gpu.cases import Cases, Computed
from llama.gpu.check import Checked, check_kernels, unsupported_reason
from llama.kernels.cuda.table import GRAPH, NAMES, SCALED_NAMES, table
from llama.model.transformer import Transformer
from llama.ops.kernels import Kernels
from llama.options.graphs.recorder import CudaRecorder, Recorder
from llama.options.graphs.trial import try_collectives
from llama.ranks.parallel import Parallel

VARIABLE = "LLAMA_GPU_KERNELS"
ONE_SHOT = "one_shot"  # sums between the GPUs of a machine, see `llama.ranks.one_shot`
_ALL = (*NAMES, *SCALED_NAMES, GRAPH, ONE_SHOT)
# Before it, captured sums between machines hang in the first requests (vLLM's issue 52504).
MIN_NCCL = (2, 30, 4)


def allowed_kernels() -> frozenset[str]:
    """Return the kernels that the user allows, and `GRAPH` and `ONE_SHOT` if these are allowed.

    Raises:
        ValueError: LLAMA_GPU_KERNELS has a name that is not known.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return frozenset(_ALL)
    if text == "none":
        return frozenset()
    names = frozenset(text.replace(" ", "").split(","))
    if unknown := sorted(names - set(_ALL)):
        raise ValueError(f"{VARIABLE} names {unknown}: give 'none', or some of {', '.join(_ALL)}")
    return names


def kernels_for(computed: Computed, parallel: Parallel, allowed: frozenset[str]) -> Kernels:
    """Return the kernels that agree with their ops on all ranks, and `GRAPH` if it may be.

    All ranks call it. The first check on a machine compiles the kernels, which takes up to a minute
    of one core; Triton's cache keeps them. The comparisons themselves are made at each build.

    Args:
        computed: What this rank computes.
        parallel: Its ranks.
        allowed: What `allowed_kernels` returned.

    Raises:
        RuntimeError: A kernel has ended CUDA in this process; RankError on the other ranks.
    """
    checked = Checked({}, {})
    with parallel.agree("the kernels of the GPU", world=True):
        names = [name for name in computed.names if name in allowed]
        if names and unsupported_reason(computed.device) is None:
            checked = check_kernels(Cases(computed), names)
    reasons = dict(checked.reasons)
    passed = {name for name, reason in reasons.items() if reason is None}
    in_use = [name for name in computed.names if parallel.all_reduce_min(int(name in passed))]
    if GRAPH in allowed:
        reasons[GRAPH] = _graph_problem(parallel)
        if parallel.all_reduce_min(int(reasons[GRAPH] is None)):
            in_use.append(GRAPH)
    if parallel.global_rank == 0:
        _warn_of_dropped({name: reasons[name] for name in reasons if name not in in_use})
    return table(in_use, {computed.dtype}, checked.tiles).dropping_failed()


def _graph_problem(parallel: Parallel) -> str | None:
    """Return why sums of this rank's group cannot be part of a graph; None where they may be."""
    if parallel.size == 1:
        return None
    if not parallel.is_on_nccl:
        return "the ranks are not on nccl"
    version = nccl_version()
    if parallel.spans_machines and version is not None and version < MIN_NCCL:
        return (
            f"sums between machines hang in graphs before NCCL {version_text(MIN_NCCL)}, and this "
            f"is {version_text(version)}"
        )
    return None


def version_text(version: tuple[int, ...]) -> str:
    """Return a version as people write it."""
    return ".".join(map(str, version))


def _warn_of_dropped(reasons: dict[str, str | None]) -> None:
    """Warn once of all kernels that were checked and are not used, with the reasons."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in sorted(reasons.items()):
        names_by_reason.setdefault(reason or "another rank dropped it", []).append(name)
    if names_by_reason:
        texts = [f"{', '.join(names)}: {reason}" for reason, names in names_by_reason.items()]
        warnings.warn(f"torch runs in place of these on the GPU: {'; '.join(texts)}", stacklevel=3)


def recorder_for(model: Transformer) -> Recorder | None:
    """Return the recorder of a model's steps; None where they must not be CUDA graphs.

    All ranks of the model call it.
    """
    device = model.norm.weight.device
    parallel = model.parallel
    if device.type != "cuda" or GRAPH not in model.kernels.names:
        return None
    reason = try_collectives(model) if parallel.size > 1 else None
    if parallel.all_reduce_min(int(not reason)):
        return CudaRecorder(device)
    if parallel.global_rank == 0:
        reason = reason or "another rank dropped them"
        warnings.warn(f"steps run without CUDA graphs: {reason}", stacklevel=2)
    return None


def describe(model: Transformer) -> str:
    """Return the kernels that a model on a GPU runs, for the line that a build prints."""
    if model.norm.weight.device.type != "cuda":
        return ""
    names = [name for name in (*NAMES, *SCALED_NAMES) if name in model.kernels.names]
    return f", kernels {'+'.join(names)}" if names else ", torch's kernels"
