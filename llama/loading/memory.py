"""The memory of the ranks: what weights and steps need, and the KV cache that fits alongside them.

In: the files of the models and the memory that is free. Out: `RunSizes`, the same on every rank, or
an error that says what would fit. Nothing is allocated here.
"""

from collections.abc import Callable
from dataclasses import dataclass

from llama.build_args import BuildArgs, read_counts
from llama.checkpoint import memory, packed
from llama.common.checks import FieldError
from llama.common.device import free_bytes
from llama.engine.core import PAGE_SIZE
from llama.loading.files import Files
from llama.loading.shares import ColumnSpace, fill_columns, tightest_memory
from llama.loading.sizes import (
    CUDA_RESERVE,
    USUAL_SEQ_LEN,
    Memory,
    choose_sizes,
    default_batch_size,
    default_budget,
    image_pages,
    is_large_gpu,
    max_cache_tokens,
    pages_for,
    step_bytes,
)
from llama.model.plan import LayerPlan
from llama.ops.kv_cache import AS_COMPUTED, KVFormat
from llama.ranks.parallel import Parallel


@dataclass(frozen=True)
class RunSizes:
    """The sizes of a run, which are the same on every rank.

    Attributes:
        max_seq_len: The maximum number of tokens of a sequence.
        max_batch_size: The number of sequences that run at once.
        num_pages: The pages of the KV cache.
        token_budget: The maximum number of tokens in a step.
    """

    max_seq_len: int
    max_batch_size: int
    num_pages: int
    token_budget: int


def fit_memory(
    args: BuildArgs, models: list[Files], parallel: Parallel, kv_format: KVFormat
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

    def needs(budget: int) -> Memory:
        return Memory.of_all(
            [
                estimate_memory(each, free, batch_size, kv_format, token_budget=budget)
                for each in models
            ]
        )

    with parallel.agree("the memory of the ranks", world=True):
        free = free_bytes(device, models[0].placement.shares)
        budget = _token_budget(args, models[0], batch_size, needs)
    budget = parallel.all_reduce_min(budget)
    tightest = tightest_memory(needs(budget), parallel, args.kv_cache_memory_bytes)
    longest = min(each.checkpoint.params.longest_context for each in models)
    params = models[0].checkpoint.params
    plan = LayerPlan.of(params, models[0].placement, kv_format)
    with parallel.agree("the memory of the ranks", world=True):
        seq_len, num_pages = choose_sizes(
            tightest,
            args.max_seq_len,
            batch_size,
            args.kv_cache_memory_bytes,
            longest,
            image_pages(params, plan),
        )
    return RunSizes(seq_len, batch_size, num_pages, budget)


def _token_budget(
    args: BuildArgs, files: Files, batch_size: int, needs: Callable[[int], Memory]
) -> int:
    """Return the maximum number of tokens in a step.

    Args:
        args: The arguments of the build.
        files: The files of the model.
        batch_size: The sequences that run at once.
        needs: Returns what this rank needs with so many tokens in a step.

    Raises:
        FieldError: A step could not have a token of each sequence, or the whole prompt of a
            bidirectional model.
    """
    params = files.checkpoint.params
    given = args.max_num_batched_tokens
    if given is None:
        is_large = is_large_gpu(files.device)
        return default_budget(params, batch_size, files.placement.stages, is_large, needs)
    least = {"max_batch_size": batch_size}
    if not params.is_causal:
        least["max_seq_len"] = args.max_seq_len or params.longest_context
    for name, value in least.items():
        if given < value:
            text = f"={given} is less than {name}={value}: give at least that, or a smaller {name}"
            raise FieldError.of("max_num_batched_tokens", text)
    return given


def with_ffn_shares(
    args: BuildArgs, models: list[Files], parallel: Parallel, kv_format: KVFormat
) -> list[Files]:
    """Return the files with the share of feed-forward columns of each rank.

    Key-value heads are dealt whole, so that ranks with equal memory can have unequal parts of the
    KV cache. With shares="memory", those with more of it hold fewer columns. Where rows are rounded
    in pieces of columns, equal parts become unequal if they would not fill pieces. All ranks call
    this.

    Args:
        args: The arguments of the build.
        models: The files of the model and of its draft model, if there is one.
        parallel: The rank among its peers.
        kv_format: The format of the KV cache.
    """
    shares = models[0].placement.shares
    ffn_shares = read_counts("ffn_shares", args.ffn_shares) or ()
    if args.shares == "memory" and not ffn_shares and parallel.size > 1:
        ffn_shares = _measured_ffn_shares(args, models, parallel, kv_format)
    if len(set(shares)) <= 1 and len(set(ffn_shares)) <= 1:
        ffn_shares = ()
    with_shares = [each.with_shares(shares, ffn_shares) for each in models]
    return [each.in_pieces() for each in with_shares]


def _measured_ffn_shares(
    args: BuildArgs, models: list[Files], parallel: Parallel, kv_format: KVFormat
) -> tuple[int, ...]:
    """Return the blocks of feed-forward columns of each rank; empty if they follow the shares."""
    params = models[0].checkpoint.params
    placement = models[0].placement
    num_blocks = placement.num_ffn_blocks(params.ffn_dim)
    if num_blocks < 2 * placement.size:
        return ()
    device = models[0].device
    batch_size = args.max_batch_size or default_batch_size(device)

    def memory_with(blocks: int) -> Memory:
        """Return what this rank needs if it holds so many blocks."""
        each, more = divmod(num_blocks - blocks, placement.size - 1)
        counts = [each + (i < more) for i in range(placement.size - 1)]
        counts.insert(placement.rank, blocks)
        changed = [files.with_shares(placement.shares, tuple(counts)) for files in models]
        return Memory.of_all(
            [estimate_memory(files, free, batch_size, kv_format) for files in changed]
        )

    with parallel.agree("the memory of the ranks", world=True):
        free = free_bytes(device, placement.shares)
        even = num_blocks // placement.size
        space = ColumnSpace.between(memory_with(1), memory_with(even), even)
    spaces = [ColumnSpace(*row) for row in parallel.gather_integers(space)]
    longest = min(files.checkpoint.params.longest_context for files in models)
    num_pages = batch_size * pages_for(args.max_seq_len or min(longest, USUAL_SEQ_LEN))
    max_tokens = num_pages * PAGE_SIZE
    if args.kv_cache_memory_bytes is not None:
        max_tokens = min(
            max_tokens, args.kv_cache_memory_bytes // max(space.per_token for space in spaces)
        )
    of_ranks = [spaces[rank :: placement.size] for rank in range(placement.size)]
    counts = fill_columns(of_ranks, num_blocks, max_tokens)
    is_usual = not counts or (placement.is_even and max(counts) - min(counts) <= 1)
    return () if is_usual else counts


def estimate_memory(
    files: Files,
    free: int,
    batch_size: int,
    kv_format: KVFormat = AS_COMPUTED,
    *,
    token_budget: int | None = None,
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
    reserve = step_bytes(checkpoint.params, plan, files.dtype, batch_size, token_budget)
    if files.device.type == "cuda":
        reserve += CUDA_RESERVE
    per_token = plan.kv_bytes_per_token(files.dtype)
    max_tokens = max_cache_tokens(files.device, per_token)
    return Memory(free, weight_bytes, reserve, per_token, max_tokens)


def usual_memory(files: Files, free: int, batch_size: int) -> Memory:
    """Return what a rank needs of `free` bytes where the user gives no size of a step."""

    def needs(tokens: int) -> Memory:
        return estimate_memory(files, free, batch_size, token_budget=tokens)

    params, stages = files.checkpoint.params, files.placement.stages
    is_large = is_large_gpu(files.device)
    return needs(default_budget(params, batch_size, stages, is_large, needs))
