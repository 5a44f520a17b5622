"""The shares of the ranks of a group: how they are chosen, and the memory that all then have.

In: what the user asked for, files and devices. Out: the relative share of each rank, the steps of
their parts, and the sizes of the rank with the smallest KV cache. What a rank holds by its share is
decided in `llama.ranks.placement` and `llama.model.shares`.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from llama.checkpoint.column_blocks import columns_per_block
from llama.checkpoint.find import Checkpoint
from llama.common.checks import FieldError
from llama.common.device import free_bytes
from llama.engine.core import PAGE_SIZE
from llama.loading.sizes import MEMORY_FRACTION, Memory
from llama.model.args import ModelArgs
from llama.ops.formats import N_BLOCK
from llama.ops.rounded import PIECE
from llama.ranks.parallel import Parallel
from llama.ranks.placement import Placement

_MEASURED_STEPS = 16  # Shares that are measured are rounded to so many parts of the largest.
_PROBE_BYTES = 256 << 20  # more than caches hold
_PROBE_S = 0.2
_GPU_COLUMNS = 128  # columns that the products of a GPU take at a time


def check_shares(
    shares: str | Sequence[int] | None, size: int, name: Literal["shares", "ffn_shares"] = "shares"
) -> None:
    """Raise a ValueError if an argument, as `BuildArgs.checked` has it, is not for `size` ranks."""
    if isinstance(shares, tuple) and len(shares) != size:
        raise FieldError.of(
            name,
            f"={','.join(map(str, shares))} has {len(shares)} numbers, and the model is divided "
            f"among {size} rank{'s' * (size > 1)}: give a number for each",
        )


def resolve_shares(
    shares: str | Sequence[int] | None, parallel: Parallel, device: torch.device
) -> tuple[int, ...]:
    """Return the relative share of each rank of a group; empty if all are equal.

    All ranks call it: shares that are to be measured are measured at the same time on each. Every
    group has the same shares, so that the slowest copy of a rank counts.

    Args:
        shares: As `BuildArgs.checked` has it, for as many ranks as a group has.
        parallel: The ranks.
        device: The device of this rank.
    """
    if shares is None or parallel.is_alone:
        return ()
    if isinstance(shares, str):
        value = free_bytes(device) if shares == "memory" else _read_rate(device)
        values = [value for (value,) in parallel.gather_integers([value])]
        slowest = [min(values[rank :: parallel.size]) for rank in range(parallel.size)]
        scale = _MEASURED_STEPS / max(1, *slowest)
        shares = [max(1, round(value * scale)) for value in slowest]
    return tuple(shares) if len(set(shares)) > 1 else ()


def _read_rate(device: torch.device) -> int:
    """Measure how many bytes per second this process reads from a device's memory."""
    x = torch.ones(_PROBE_BYTES // 4, device=device)
    x.sum().item()  # sync; the first run allocates, or compiles
    count = 0
    began = time.perf_counter()
    while (seconds := time.perf_counter() - began) < _PROBE_S or count == 0:
        x.sum().item()  # sync
        count += 1
    return int(count * x.nbytes / seconds)


class ColumnSpace(NamedTuple):
    """The memory of a rank that feed-forward columns and the KV cache divide.

    Two limits hold: that of weights and KV cache alone, and that of a step, which needs a workspace
    alongside them. Columns need more of that, too.

    Attributes:
        per_token: Bytes of the keys and values of one token.
        num_bytes: Bytes that no other weights take.
        per_block: Bytes of the weights of a block of columns, over all layers of the rank.
        step_bytes: Bytes that neither other weights take nor a step.
        step_per_block: Bytes of the weights and of the workspace of a block.
    """

    per_token: int
    num_bytes: int
    per_block: int
    step_bytes: int
    step_per_block: int

    @classmethod
    def between(cls, low: Memory, high: Memory, num_blocks: int) -> "ColumnSpace":
        """Return the space of a rank of which two sizes are known.

        Args:
            low: What the rank needs with one block.
            high: What it needs with `num_blocks`, which are more.
            num_blocks: The blocks of `high`.
        """
        more = num_blocks - 1
        per_block = _rounded_up(high.weights - low.weights, more)
        workspace = _rounded_up(high.reserve - low.reserve, more)
        others = low.weights - per_block
        return cls(
            per_token=low.per_token,
            num_bytes=int(low.free * MEMORY_FRACTION) - others,
            per_block=per_block,
            step_bytes=low.free - (low.reserve - workspace) - others,
            step_per_block=per_block + workspace,
        )

    def num_blocks(self, num_tokens: int) -> int:
        """Return the blocks of columns that fit alongside the keys and values of so many tokens."""
        kv_bytes = num_tokens * self.per_token
        return min(
            (self.num_bytes - kv_bytes) // self.per_block,
            (self.step_bytes - kv_bytes) // self.step_per_block,
        )


def _rounded_up(value: int, divisor: int) -> int:
    return -(-value // divisor)


def fill_columns(
    ranks: Sequence[Sequence[ColumnSpace]], num_blocks: int, max_tokens: int
) -> tuple[int, ...]:
    """Deal blocks of columns to ranks so that the KV cache of all has as many tokens as possible.

    Of the deals with as many tokens, the most even one is taken, as a step takes as long as the
    rank with most columns.

    Args:
        ranks: For each rank of a group, its space in each group.
        num_blocks: The blocks of the whole model, at least one for each rank.
        max_tokens: The tokens beyond which the KV cache need not grow.

    Returns:
        The blocks of each rank; empty if they do not fit even without a KV cache.
    """

    def limits(num_tokens: int) -> list[int]:
        """Return the maximum number of blocks of each rank alongside so many tokens."""
        return [min(space.num_blocks(num_tokens) for space in copies) for copies in ranks]

    def fits(num_tokens: int) -> bool:
        fitting = limits(num_tokens)
        return min(fitting) >= 1 and sum(fitting) >= num_blocks

    if not fits(0):
        return ()
    # The most pages that fit: the first number that does not, less one.
    pages = range(1, max_tokens // PAGE_SIZE + 1)
    num_pages = bisect_left(pages, True, key=lambda count: not fits(count * PAGE_SIZE))
    fitting = limits(num_pages * PAGE_SIZE)
    counts = [1] * len(fitting)
    for _ in range(num_blocks - len(fitting)):
        open_ranks = (rank for rank, limit in enumerate(fitting) if counts[rank] < limit)
        counts[min(open_ranks, key=counts.__getitem__)] += 1
    return tuple(counts)


def tightest_memory(memory: Memory, parallel: Parallel, kv_bytes: int | None) -> Memory:
    """Return the memory of the rank of the world that leaves least to the KV cache.

    All ranks call it, and all use the returned sizes, so that they have the same number of pages.

    Args:
        memory: What this rank needs.
        parallel: The ranks.
        kv_bytes: The bytes of the KV cache that the user asked for, if any.
    """
    ranks = [Memory.of_integers(row) for row in parallel.gather_integers(memory.as_integers())]
    rank = Memory.tightest(ranks, kv_bytes)
    if len({(each.weights, each.per_token) for each in ranks}) == 1:
        return ranks[rank]
    return replace(ranks[rank], rank=rank)


def shares_in_pieces(params: ModelArgs, placement: Placement) -> tuple[int, ...]:
    """Return shares of feed-forward columns that fill the pieces in which rounded rows are summed.

    Returns:
        A number of blocks for each rank. Empty where equal parts fill pieces already, where parts
        are unequal, which then begin at blocks, or where there are too few blocks.
    """
    count = params.ffn_dim
    even, rest = divmod(count, placement.size)
    if not placement.is_even or rest or even % PIECE == 0:
        return ()
    num_blocks = placement.num_ffn_blocks(count)
    if count // num_blocks % PIECE:
        return ()
    ranks = Placement(size=placement.size).peers()
    return tuple(len(rank.span(num_blocks)) for rank in ranks)


def column_step(checkpoint: Checkpoint, device: torch.device) -> int:
    """Return the step of unequal parts of feed-forward columns that suits files and device."""
    keeps_blocks = checkpoint.in_codes or checkpoint.packed is not None
    file_step = columns_per_block(checkpoint) if keeps_blocks else 1
    return math.lcm(file_step, _GPU_COLUMNS if device.type == "cuda" else N_BLOCK)
