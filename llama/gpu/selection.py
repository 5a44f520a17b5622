"""What a model uses on its GPU: the kernels of this project, and graphs, that passed their checks.

In: a rank's device, type and sizes, then its model. Out: its `KernelSet` and a recorder of graphs,
on every rank alike, with at most one warning for each that names what was dropped and why.
LLAMA_GPU_KERNELS=none turns all of them off, and a list such as attention,graph all others.
"""

import os
import warnings
from collections.abc import Iterable
from dataclasses import replace

import torch

from llama.device import dtype_name
from llama.engine.core import PAGE_SIZE
from llama.engine.graphs import CudaRecorder, Recorder
from llama.gpu import graph_check, selfcheck_cache
from llama.gpu.job import CheckResult, Formats, Job
from llama.model.args import ModelArgs
from llama.model.plan import LayerPlan
from llama.model.transformer import Transformer
from llama.ops.kv_cache import AS_COMPUTED, KVFormat
from llama.ops.triton.kernels import GRAPH, NAMES, TORCH_ONLY, KernelSet
from llama.ranks.collectives import ModelParallel
from llama.weights import QUANTIZED

VARIABLE = "LLAMA_GPU_KERNELS"
_ALL = (*NAMES, GRAPH)


def asked_for() -> frozenset[str]:
    """What the user allows. ValueError if LLAMA_GPU_KERNELS names something that there is not."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return frozenset(_ALL)
    names = frozenset() if text == "none" else frozenset(text.replace(" ", "").split(","))
    if unknown := sorted(names - set(_ALL)):
        raise ValueError(f"{VARIABLE} names {unknown}: give 'none', or some of {', '.join(_ALL)}")
    return names


def kernels_for(
    params: ModelArgs,
    parallel: ModelParallel,
    device: torch.device,
    dtype: torch.dtype,
    allowed: frozenset[str],
    formats: Formats = (None,),
    kv_format: KVFormat = AS_COMPUTED,
) -> KernelSet:
    """The kernels that pass their check on all ranks, or have passed it before.

    None off CUDA. The first time on a machine kernels are compiled: a minute of one core's time.
    """
    if device.type != "cuda":
        return TORCH_ONLY
    plan = LayerPlan.of(params, parallel.placement, kv_format)
    job = job_for(params, plan, device, dtype, formats)
    result = CheckResult()
    if allowed and selfcheck_cache.not_for(device) is None:
        result = selfcheck_cache.load_or_check(job)
    own = allowed & set(result.passed)
    everywhere = [x for x in NAMES if parallel.all_reduce_min(int(x in own))]
    if GRAPH in allowed:  # while no model is there: the GPU may take one process only
        held = formats if "linear" in everywhere else (None,)  # else the weights are plain
        result |= check_graphs(replace(job, formats=held), everywhere)
        if not parallel.is_alone and not parallel.is_on_nccl:
            result |= CheckResult({GRAPH: "the ranks are not on nccl"})
        everywhere += [GRAPH] * parallel.all_reduce_min(int(GRAPH in result.passed))
    dropped = [
        f"{x}: {reason or 'another rank dropped it'}"
        for x, reason in sorted(result.reasons.items())
        if x in allowed and x not in everywhere
    ]
    if dropped and parallel.global_rank == 0:
        warnings.warn(
            f"torch runs in place of these on the GPU: {'; '.join(dropped)}", stacklevel=2
        )
    return result.kernels(job.dtype, everywhere)


def recorder_for(model: Transformer) -> Recorder | None:
    """The recorder of a model's decode steps; None off CUDA, and where graphs did not pass. All
    ranks of the model call it."""
    device, parallel = model.norm.weight.device, model.parallel
    if device.type != "cuda" or GRAPH not in model.kernels.names:
        return None
    reason = graph_check.try_collectives(model) if not parallel.is_alone else None
    if parallel.all_reduce_min(int(not reason)):
        return CudaRecorder(device)
    if parallel.global_rank == 0:
        reason = reason or "another rank dropped them"
        warnings.warn(f"steps run without CUDA graphs: {reason}", stacklevel=2)
    return None


def check_graphs(job: Job, in_use: Iterable[str]) -> CheckResult:
    """Of a model of the job's sizes that runs these kernels."""
    formats = tuple(QUANTIZED)[-1:] if any(job.formats) else (None,)
    job = replace(job, names=(GRAPH,), in_use=tuple(sorted(in_use)), formats=formats)
    return selfcheck_cache.load_or_check(job, graph_check.PROGRAM)


def job_for(
    params: ModelArgs, plan: LayerPlan, device: torch.device, dtype: torch.dtype,
    formats: Formats = (None,),
) -> Job:  # fmt: skip
    """The check of what a rank computes with, whose share `plan` has."""
    names = ("sample",) if dtype is torch.float32 else NAMES  # products of float32 stay with torch
    return Job(
        str(device), dtype_name(dtype), names, plan.dim, plan.n_heads,
        plan.n_kv_heads, plan.head_dim, plan.ffn_dim, vocab_size=params.vocab_size,
        vocab_rows=len(plan.share.vocab), page_size=PAGE_SIZE, formats=formats,
        kv_format=plan.kv_format.name,
    )  # fmt: skip


def describe(model: Transformer) -> str:
    """The kernels that a model on a GPU runs, for the line that a build prints."""
    if model.norm.weight.device.type != "cuda":
        return ""
    names = [name for name in NAMES if name in model.kernels.names]
    return f", kernels {'+'.join(names)}" if names else ", torch's kernels"
