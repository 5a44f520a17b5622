"""The memory of the ranks: what weights and steps need, and the KV cache that fits beside them.

In: the files of the models and the memory that is free. Out: `RunSizes`, the same on every rank, or
an error that says what would fit. Nothing is allocated here.
"""

from dataclasses import dataclass

from llama.build_args import BuildArgs
from llama.checkpoint import memory, packed
from llama.device import free_bytes
from llama.loading.files import Files
from llama.model.plan import LayerPlan
from llama.ops.kv_cache import AS_COMPUTED, KVFormat
from llama.ranks.collectives import ModelParallel
from llama.shares import tightest_memory
from llama.sizes import (
    CUDA_RESERVE,
    Memory,
    choose_sizes,
    default_batch_size,
    max_cache_tokens,
    step_bytes,
)


@dataclass(frozen=True)
class RunSizes:
    """The sizes of a run, which are the same on every rank.

    Attributes:
        max_seq_len: The maximum number of tokens of a sequence.
        max_batch_size: The number of sequences that run at once.
        num_pages: The pages of the KV cache.
    """

    max_seq_len: int
    max_batch_size: int
    num_pages: int


def fit_memory(
    args: BuildArgs, models: list[Files], parallel: ModelParallel, kv_format: KVFormat
) -> RunSizes:
    """Return the sizes that fit into the memory of every rank.

    Args:
        args: The sizes that the user asked for, as far as they are given.
        models: The files of the model and of its draft model, if there is one.
        parallel: The rank among its peers.
        kv_format: The format of the KV cache.

    Raises:
        ValueError: Not one sequence fits, or less than the user asked for.
    """
    device = models[0].device
    batch_size = args.max_batch_size or default_batch_size(device)
    with parallel.agree("the memory of the ranks", world=True):
        free = free_bytes(device, models[0].placement.shares)
        needs = [estimate_memory(each, free, batch_size, kv_format) for each in models]
    tightest = tightest_memory(Memory.of_all(needs), parallel, args.kv_cache_memory_bytes)
    longest = min(each.checkpoint.params.longest_context for each in models)
    with parallel.agree("the memory of the ranks", world=True):
        seq_len, num_pages = choose_sizes(
            tightest, args.max_seq_len, batch_size, args.kv_cache_memory_bytes, longest
        )
    return RunSizes(seq_len, batch_size, num_pages)


def estimate_memory(
    files: Files, free: int, batch_size: int, kv_format: KVFormat = AS_COMPUTED
) -> Memory:
    """Return what a rank needs of `free` bytes. Where weights stay in codes, some are read."""
    checkpoint = files.checkpoint
    plan = LayerPlan.of(checkpoint.params, files.placement, kv_format)
    if checkpoint.packed is not None:
        weight_bytes = packed.bytes_of(checkpoint, files.placement)
    else:
        weight_bytes = memory.bytes_of(
            checkpoint, files.placement, files.dtype, files.quantize, files.device
        )
    reserve = step_bytes(checkpoint.params, plan, files.dtype, batch_size)
    if files.device.type == "cuda":
        reserve += CUDA_RESERVE
    per_token = plan.kv_bytes_per_token(files.dtype)
    max_tokens = max_cache_tokens(files.device, per_token)
    return Memory(free, weight_bytes, reserve, per_token, max_tokens)
