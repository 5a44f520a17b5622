"""The kernels and the graph recorder that a model uses on its GPU.

In: a rank's device, dtype and sizes, then its model. Out: its table of kernels and a recorder of
CUDA graphs, the same on every rank, with at most one warning for each that names what was dropped
and why. LLAMA_GPU_KERNELS=none turns all of them off, and a list such as attention,graph turns all
others off. Without CUDA there are none.
"""

import os
import warnings
from collections.abc import Iterable
from dataclasses import replace

import torch

from llama.common.device import dtype_name
from llama.engine.core import PAGE_SIZE
from llama.gpu import graph_check, selfcheck_cache
from llama.gpu.job import CheckResult, Formats, Job
from llama.kernels.cuda.table import GRAPH, NAMES, ROUND_ROWS
from llama.model.args import ModelArgs
from llama.model.plan import LayerPlan
from llama.model.transformer import Transformer
from llama.ops.kernels import NO_KERNELS, Kernels
from llama.ops.kv_cache import AS_COMPUTED, KVFormat
from llama.options.graphs.recorder import CudaRecorder, Recorder
from llama.ranks.parallel import Parallel
from llama.ranks.placement import WHOLE, Placement
from llama.weights.choice import QUANTIZED

VARIABLE = "LLAMA_GPU_KERNELS"
_ALL = (*NAMES, ROUND_ROWS, GRAPH)


def allowed_kernels() -> frozenset[str]:
    """Return the kernels that the user allows, and `GRAPH` if graphs are allowed.

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


def kernels_for(
    params: ModelArgs,
    parallel: Parallel,
    device: torch.device,
    dtype: torch.dtype,
    allowed: frozenset[str],
    formats: Formats = (None,),
    kv_format: KVFormat = AS_COMPUTED,
    activations: str | None = None,
) -> Kernels:
    """Return the kernels that pass their check on all ranks, now or earlier on this machine.

    The first check on a machine compiles the kernels, which takes a minute of one core. All ranks
    call it, before a model is on the GPU: the GPU may allow one process only.

    Args:
        params: The model.
        parallel: Its ranks.
        device: This rank's device.
        dtype: The model's dtype.
        allowed: What `allowed_kernels` returned.
        formats: The formats of the model's weights.
        kv_format: The format of its KV cache.
        activations: How its products round their inputs, None where they do not.
    """
    if device.type != "cuda":
        return NO_KERNELS
    plan = LayerPlan.of(params, parallel.placement, kv_format)
    job = replace(job_for(params, plan, device, dtype, formats), activations=activations)
    if activations == "fp8" and "linear" in job.names:
        job = replace(job, names=(*job.names, ROUND_ROWS))
    result = CheckResult()
    if allowed and selfcheck_cache.unsupported_reason(device) is None:
        result = selfcheck_cache.load_or_check(job)
    passed = allowed & set(result.passed)
    in_use = [name for name in job.names if parallel.all_reduce_min(int(name in passed))]
    if GRAPH in allowed:
        # Without the kernel for products the weights are plain.
        formats_in_use: Formats = formats if "linear" in in_use else (None,)
        job = replace(job, formats=formats_in_use)
        result |= check_graphs(job, in_use, parallel.placement)
        if parallel.size > 1 and not parallel.is_on_nccl:
            result |= CheckResult({GRAPH: "the ranks are not on nccl"})
        if parallel.all_reduce_min(int(GRAPH in result.passed)):
            in_use.append(GRAPH)
    if parallel.global_rank == 0:
        _warn_of_dropped(result, allowed - set(in_use))
    return result.kernels(job.dtype, in_use)


def _warn_of_dropped(result: CheckResult, dropped: frozenset[str]) -> None:
    """Warn once of all allowed kernels that were checked and are not used, with the reasons."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in sorted(result.reasons.items()):
        if name in dropped:
            names_by_reason.setdefault(reason or "another rank dropped it", []).append(name)
    if names_by_reason:
        reasons = [f"{', '.join(names)}: {reason}" for reason, names in names_by_reason.items()]
        warnings.warn(
            f"torch runs in place of these on the GPU: {'; '.join(reasons)}", stacklevel=3
        )


def recorder_for(model: Transformer) -> Recorder | None:
    """Return the recorder of a model's decode steps; None where they must not be CUDA graphs.

    All ranks of the model call it.
    """
    device = model.norm.weight.device
    parallel = model.parallel
    if device.type != "cuda" or GRAPH not in model.kernels.names:
        return None
    reason = graph_check.try_collectives(model) if parallel.size > 1 else None
    if parallel.all_reduce_min(int(not reason)):
        return CudaRecorder(device)
    if parallel.global_rank == 0:
        reason = reason or "another rank dropped them"
        warnings.warn(f"steps run without CUDA graphs: {reason}", stacklevel=2)
    return None


def check_graphs(job: Job, in_use: Iterable[str], placement: Placement = WHOLE) -> CheckResult:
    """Check CUDA graphs of a model of the job's sizes, or of its stage, that runs these kernels."""
    formats: Formats = (None,)
    if any(job.formats):
        formats = tuple(QUANTIZED)[-1:]
    sorted_in_use = tuple(sorted(in_use))
    graph_job = replace(job, names=(GRAPH,), in_use=sorted_in_use, formats=formats)
    # All stages between the first and the last compute alike, and are checked once.
    stages = min(placement.stages, 3)
    stage = stages - 1 if placement.is_last else min(placement.stage, 1)
    graph_job = replace(graph_job, stage=stage, stages=stages)
    return selfcheck_cache.load_or_check(graph_job, graph_check.PROGRAM)


def job_for(
    params: ModelArgs,
    plan: LayerPlan,
    device: torch.device,
    dtype: torch.dtype,
    formats: Formats = (None,),
) -> Job:
    """Return the check of what a rank computes, whose share of the model `plan` describes."""
    # Products of float32 stay with torch: the kernels would round them to TF32.
    names = ("sample",) if dtype is torch.float32 else NAMES
    return Job(
        device=str(device),
        dtype=dtype_name(dtype),
        names=names,
        dim=plan.dim,
        n_heads=plan.n_heads,
        n_kv_heads=plan.n_kv_heads,
        head_dim=plan.head_dim,
        ffn_dim=plan.ffn_dim,
        vocab_size=params.vocab_size,
        vocab_rows=len(plan.share.vocab),
        page_size=PAGE_SIZE,
        formats=formats,
        kv_format=plan.kv_format.name,
    )


def describe(model: Transformer) -> str:
    """Return the kernels that a model on a GPU runs, for the line that a build prints."""
    if model.norm.weight.device.type != "cuda":
        return ""
    names = [name for name in (*NAMES, ROUND_ROWS) if name in model.kernels.names]
    return f", kernels {'+'.join(names)}" if names else ", torch's kernels"
