"""What a model uses on its GPU: the kernels of this project, and graphs, that passed their checks.

In: a rank's device, type and sizes, then its model. Out: its `KernelSet` and a recorder of graphs,
on every rank alike, with at most one warning for each that names what was dropped and why.
`llama.ops.triton.stamp` has them checked, in other processes, and keeps the result.

LLAMA_GPU_KERNELS=none turns all of them off, and a list such as attention,graph all others.
"""

import os
import warnings

import torch

from llama.device import DTYPES, current
from llama.engine import graph_check
from llama.engine.graphs import CudaRecorder, Recorder
from llama.model.args import ModelArgs
from llama.model.transformer import Transformer
from llama.ops.triton import kernels
from llama.ops.triton.cases import Sizes
from llama.ops.triton.kernels import TORCH_ONLY, KernelSet
from llama.ranks.collectives import ModelParallel

VARIABLE = "LLAMA_GPU_KERNELS"
_NAMES = (*kernels.NAMES, graph_check.NAME)


def asked_for() -> frozenset[str]:
    """What the user allows. ValueError if LLAMA_GPU_KERNELS names something that there is not."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return frozenset(_NAMES)
    names = frozenset() if text == "none" else frozenset(text.replace(" ", "").split(","))
    if unknown := sorted(names - set(_NAMES)):
        raise ValueError(f"{VARIABLE} names {unknown}: give 'none', or some of {', '.join(_NAMES)}")
    return names


def kernels_for(
    params: ModelArgs,
    parallel: ModelParallel,
    device: torch.device,
    dtype: torch.dtype,
    page_size: int,
    allowed: frozenset[str],
) -> KernelSet:
    """The kernels that pass their check on all ranks, or have passed it before.

    None off CUDA. The first time on a machine it takes ten seconds or more.
    """
    if device.type != "cuda":
        return TORCH_ONLY
    from llama.ops.triton import stamp

    name = next(name for name, value in DTYPES.items() if value is dtype)
    verdict = stamp.Verdict({}, [])
    if allowed and stamp.not_for(device) is None:
        sizes = sizes_of(params, parallel.size, page_size)
        verdict = stamp.settle(stamp.Job(str(device), name, sizes, stamp.names_for(name)))
    own = allowed & set(verdict.passed)
    if "attention" in own:
        try:
            compile_ahead(params, parallel.size, device, dtype)
        except Exception as e:  # of a compiler or the driver: torch has an attention of its own
            own -= {"attention"}
            verdict.reasons["attention"] = f"not compiled: {e}".partition("\n")[0][:300]
    everywhere = [x for x in kernels.NAMES if parallel.all_reduce_min(int(x in own))]
    dropped = dict.fromkeys(own - set(everywhere), "another rank dropped it")
    dropped |= {x: reason for x, reason in verdict.dropped.items() if x in allowed}
    if dropped and parallel.global_rank == 0:
        reasons = "; ".join(f"{name}: {dropped[name]}" for name in sorted(dropped))
        warnings.warn(f"torch runs in place of kernels for the GPU: {reasons}", stacklevel=2)
    return stamp.kernel_set(dtype, verdict, everywhere)


def compile_ahead(params: ModelArgs, ranks: int, device: torch.device, dtype: torch.dtype) -> None:
    """Compile the kernels of which there are several, so that no step waits for a compiler: decode
    attention has one for each number of parts that keys are divided into."""
    from llama.ops.triton import attention

    n_heads, n_kv_heads = params.n_heads // ranks, max(1, params.kv_heads // ranks)
    cache = torch.zeros(2, 1, 16, n_kv_heads, params.head_dim, dtype=dtype, device=device)
    with current(device):
        for n in attention.decode_variants(n_kv_heads):
            queries = torch.zeros(n, n_heads, params.head_dim, dtype=dtype, device=device)
            table = torch.zeros(n, 1, dtype=torch.int64, device=device)
            starts = torch.arange(n + 1, device=device)
            lens = torch.ones(n, dtype=torch.int64, device=device)
            attention.paged_attention(queries, cache, table, starts, lens, n)


def recorder_for(model: Transformer, page_size: int) -> Recorder | None:
    """The recorder of a model's decode steps; None off CUDA, and where graphs did not pass.

    All ranks of the model call it.
    """
    device, parallel = model.norm.weight.device, model.parallel
    if device.type != "cuda":
        return None
    is_allowed = graph_check.NAME in asked_for()
    reason = _why_no_graphs(model, page_size) if is_allowed else f"{VARIABLE} leaves them out"
    if parallel.size > 1 and not reason:
        is_on_nccl = parallel.is_on_nccl
        reason = graph_check.try_collectives(model) if is_on_nccl else "the ranks are not on nccl"
    if parallel.all_reduce_min(int(not reason)):
        return CudaRecorder(device)
    if is_allowed and parallel.global_rank == 0:
        reason = reason or "another rank dropped them"
        warnings.warn(f"steps run without CUDA graphs: {reason}", stacklevel=2)
    return None


def _why_no_graphs(model: Transformer, page_size: int) -> str | None:
    """None where they passed, with the kernels that are in use."""
    from llama.ops.triton import stamp

    device, dtype = model.norm.weight.device, model.norm.weight.dtype
    name = next(name for name, value in DTYPES.items() if value is dtype)
    sizes = sizes_of(model.params, model.parallel.size, page_size)
    in_use = tuple(sorted(model.kernels.names))
    job = stamp.Job(str(device), name, sizes, (graph_check.NAME,), in_use)
    verdict = stamp.settle(job, graph_check.CHILD)
    return verdict.reasons.get(graph_check.NAME, "they were not checked")


def sizes_of(params: ModelArgs, ranks: int, page_size: int) -> Sizes:
    """What one of `ranks` ranks computes with."""
    return Sizes(
        dim=params.dim,
        n_heads=params.n_heads // ranks,
        n_kv_heads=max(1, params.kv_heads // ranks),
        head_dim=params.head_dim,
        ffn_dim=params.ffn_dim // ranks,
        vocab_size=params.vocab_size,
        vocab_rows=params.vocab_size // ranks,
        page_size=page_size,
        eps=params.norm_eps,
    )


def describe(model: Transformer) -> str:
    """The kernels that a model on a GPU runs, for the line that a build prints."""
    if model.norm.weight.device.type != "cuda":
        return ""
    names = [name for name in kernels.NAMES if name in model.kernels.names]
    return f", kernels {'+'.join(names)}" if names else ", torch's kernels"
