"""The tensors of a checkpoint into which its adapters are merged, computed in chunks of rows.

In: what reads the base model, and the updates of a tensor. Out: a filled tensor. How rows are
updated is in merging.py; how the files hold the base model is not known here.

Shapes: N outputs (rows), K inputs (columns).
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llama.checkpoint.hf import config as hf
from llama.checkpoint.lora.merging import Merge, Update, work_dtype
from llama.checkpoint.table import Size, as_slice, is_rotated, share
from llama.model.args import ModelArgs
from llama.ranks.placement import Placement


class BaseReader(Protocol):
    """A reader of the matrices of the base model.

    Attributes:
        params: The model's sizes.
        shapes: The shapes of the whole tensors, by Meta's names.
    """

    params: ModelArgs
    shapes: dict[str, Size]

    def row_chunks(self, name: str, rows: range) -> Iterator[range]:
        """Yield rows of a matrix, some whole heads at a time."""
        ...

    def num_rows_in_files(self, name: str) -> int:
        """Return the rows of a matrix in the files, which may be fewer than adapters make it."""
        ...

    def read_base(self, name: str, rows: range, columns: range, layout: str, into: Tensor) -> None:
        """Fill a tensor of a wide float type with rows and columns of a matrix of the files."""
        ...


def copy_merged(
    base: BaseReader,
    name: str,
    updates: list[Update],
    into: Tensor,
    placement: Placement,
    layout: str,
) -> None:
    """Fill a tensor of any float type with what a rank holds of a merged tensor.

    Args:
        base: Reads the base model.
        name: Meta's name of the tensor.
        updates: What the adapters do to it, in their order.
        into: The tensor that is filled.
        placement: The rank.
        layout: The layout whose order the rows get, "meta" or "hf".
    """
    dim, wanted = share(base.params, name, placement)
    merge = Merge(updates, functools.partial(_in_order, base.params, name, layout))
    replacement = merge.updates[merge.first].replacement
    if into.dim() == 1 and replacement is not None:  # a norm, which no rank divides
        into.copy_(replacement)
        return
    n, k = base.shapes[name]
    rows = range(n) if dim else wanted
    columns = wanted if dim else range(k)
    matrix = _MergedMatrix(base, name, layout, into.device, merge)
    for index in merge.indices_with_column_norms():
        squares = torch.zeros(k, dtype=work_dtype(into.device), device=into.device)
        for chunk in base.row_chunks(name, range(n)):
            squares += matrix.read(chunk, range(k), index).square().sum(0)
        merge.column_norms[index] = squares.sqrt()
    for chunk in base.row_chunks(name, rows):
        begin = chunk.start - rows.start
        into[begin : begin + len(chunk)] = matrix.read(chunk, columns)


def _in_order(params: ModelArgs, name: str, layout: str, rows: Tensor) -> Tensor:
    """Return rows of an adapter, which has Hugging Face's order, in the order of a layout."""
    if layout == "hf" or not is_rotated(name):
        return rows
    ordered = torch.empty_like(rows, memory_format=torch.contiguous_format)
    hf.copy_rows(ordered, rows.contiguous(), params.head_dim, to=layout)
    return ordered


@dataclass(frozen=True)
class _MergedMatrix:
    """A matrix into which adapters are merged, read in chunks of rows.

    Attributes:
        base: Reads the matrix of the base model.
        name: Meta's name of the matrix.
        layout: The layout whose order the rows get.
        device: Where the rows lie.
        merge: The updates.
    """

    base: BaseReader
    name: str
    layout: str
    device: torch.device
    merge: Merge

    def read(self, rows: range, columns: range, unscaled: int | None = None) -> Tensor:
        """Return rows and columns of the merged matrix, or as `Merge.apply` leaves them.

        Args:
            rows: The rows of a chunk.
            columns: The columns.
            unscaled: As for `Merge.apply`.
        """
        needed = columns
        if self.merge.needs_whole_rows:
            needed = range(self.base.shapes[self.name][1])
        dtype = work_dtype(self.device)
        work = torch.empty(len(rows), len(needed), dtype=dtype, device=self.device)
        held = range(rows.start, min(rows.stop, self.base.num_rows_in_files(self.name)))
        if self.merge.needs_base and held:
            self.base.read_base(self.name, held, needed, self.layout, work[: len(held)])
        self.merge.apply(work, as_slice(rows), as_slice(needed), unscaled)
        begin = columns.start - needed.start
        return work[:, begin : begin + len(columns)]
