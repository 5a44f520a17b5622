"""bf16 in the order in which the CPU kernels read it: the same bytes in the same memory.

In: a plain matrix. Out: products and rows of it. The elements lie in blocks of 32 rows, and within
a block in pairs of columns: (N/32, K/2, 32, 2), see packed_weight.h. Where N is not a multiple of
32, the last block repeats the last row as padding: N/32 is rounded up in all shapes of blocks. No
product and no row that is returned has any of it. Quantized formats are subclasses, which must not
be known here.

linear.cpp computes the product, on x86-64 CPUs from AVX2 on and on ARM. The tiles of AMX are
compared with a plain loop at their first use; they are not used if they differ, or if Linux does
not grant them. The product is batch-invariant: a row of x gives the same bytes alone as in any
batch, on any number of threads.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.kernels.cpu import native
from llama.kernels.cpu.adapters import product_segments
from llama.ops.adapters import ProductUpdates
from llama.ops.batch import DEFAULT_CONTEXT, ForwardContext
from llama.ops.formats import N_BLOCK, num_blocks
from llama.weights.weight import Weight

INFINITY = 0x7F80  # the bits of infinity in bf16
_EMPTY_ROW = 2**16  # added to the result of a packing function that has found a row of zeros
_MAX_GAPS = 2  # the gaps of `Matrix` in kernels.h


class Layout(NamedTuple):
    """How a block of 32 rows is stored: as (K / columns, *tail) words.

    Attributes:
        dtype: The type of the words.
        columns: The number of columns that one step of the first dimension holds.
        tail: The shape of one step, for 32 rows.
    """

    dtype: torch.dtype
    columns: int
    tail: tuple[int, ...]


def can_pack(plain: Tensor) -> bool:
    """Return whether a matrix can be cut into blocks.

    It must be bf16 in one piece on the CPU, with K even.
    """
    return (
        plain.dim() == 2
        and plain.dtype is torch.bfloat16
        and plain.device.type == "cpu"
        and plain.is_contiguous()
        and plain.numel() > 0
        and plain.storage_offset() % 2 == 0  # pairs of elements are moved as one
        and plain.shape[1] % 2 == 0
    )


class BlockedWeight(Weight):
    """A bf16 matrix whose `values` are (N/32, K/2, 32, 2). A quantized format is a subclass.

    Attributes:
        layout: How a block is stored.
        gaps: Where blocks of other ranks lie between those of this part: a block index and a number
            of blocks for each gap, as in `Matrix` of kernels.h.
    """

    dtypes = (torch.bfloat16,)
    layout: ClassVar[Layout] = Layout(
        dtype=torch.bfloat16,
        columns=2,
        tail=(N_BLOCK, 2),
    )
    gaps: Sequence[int] = ()

    @classmethod
    def fits(cls, plain: Tensor) -> bool:
        """Return whether a matrix can be cut into blocks, and the CPU kernels run."""
        return can_pack(plain) and native.kernels() is not None

    @classmethod
    def pack(cls, plain: Tensor) -> Self:
        """Return a matrix in blocks, which take its memory if it has whole blocks of rows."""
        return cls.pack_memory(in_whole_blocks(plain), len(plain))

    @classmethod
    def pack_memory(cls, plain: Tensor, n: int) -> Self:
        """Return the first n rows of a matrix in blocks, which take its memory.

        Args:
            plain: The matrix, with as many rows as n rows have in whole blocks.
            n: The number of rows that are not padding; the others need not be initialised.
        """
        assert can_pack(plain), (plain.shape, plain.dtype, plain.device)
        num_rows, k = plain.shape
        assert num_rows == num_blocks(n) * N_BLOCK, (num_rows, n)
        result = 0
        if native.kernels() is not None:
            threads = torch.get_num_threads()
            scratch = workspace("pack_workspace", 2 * k, threads)
            result = native.call("pack_bf16", plain, scratch, n, k, threads)
        else:
            plain[n:] = plain[n - 1]
            blocks = in_blocks(plain).reshape(num_rows, k)
            plain.copy_(blocks)
        values = plain.view(-1, k // 2, N_BLOCK, 2)
        weight = cls((n, k), values)
        weight.set_flags(result)
        return weight

    def set_flags(self, result: int) -> None:
        """Set `is_finite` and `has_empty_row`.

        Args:
            result: The result of a packing function in C++: the bits of the largest magnitude in
                bf16, and 2**16 more if there is a row of zeros.
        """
        self.is_finite = result % _EMPTY_ROW < INFINITY
        self.has_empty_row = result >= _EMPTY_ROW

    @property
    def num_stored_rows(self) -> int:
        """Return the number of rows with the padding of the last block."""
        return num_blocks(self.shape[0]) * N_BLOCK

    def linear(
        self,
        x: Tensor,
        dtype: torch.dtype | None = None,
        context: ForwardContext = DEFAULT_CONTEXT,
        updates: ProductUpdates | None = None,
    ) -> Tensor:
        """Return the product of bf16 rows and this weight, in bf16 or float32."""
        dtype = dtype or x.dtype
        if native.kernels() is None:
            product = F.linear(x.float(), self.exact())
            if updates is not None:
                updates.add_to(product, x)
            return product.to(dtype)
        assert x.dtype is torch.bfloat16, x.dtype
        assert dtype in (torch.bfloat16, torch.float32), dtype
        n, k = self.shape
        x = x.contiguous()
        assert x.shape[-1] == k, (x.shape, n, k)
        leading = x.shape[:-1]
        out = torch.empty(*leading, n, dtype=dtype)
        m = out.numel() // n
        threads = torch.get_num_threads()
        scratch = workspace("linear_workspace", m, k, threads)
        matrix = torch.tensor(self.native_matrix())
        is_float32 = dtype is torch.float32
        segments, middle = product_segments(updates)
        native.call(
            "linear_packed", x, matrix, out, scratch, segments, middle, len(segments), m, n, k,
            is_float32,
        )  # fmt: skip
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows (..., K) of ids (...) in bf16; IndexError where there is no such row."""
        if native.kernels() is None or self.values.is_cuda:
            return self.stored_rows(self.stored_ids(ids))
        n, k = self.shape
        out = torch.empty(*ids.shape, k, dtype=torch.bfloat16)
        num_ids = ids.numel()
        threads = torch.get_num_threads()
        matrix = torch.tensor(self.native_matrix())
        ids = ids.contiguous()
        is_valid = native.call("weight_rows", ids, matrix, out, num_ids, n, k, threads)
        if not is_valid:
            raise IndexError(f"no rows {ids.min()} to {ids.max()} in a weight of {n}")
        return out

    def stored_ids(self, ids: Tensor) -> Tensor:
        """Return the index in `values` of each row, which gaps move back."""
        first_blocks = self.gaps[::2]
        gap_sizes = self.gaps[1::2]
        gaps = list(zip(first_blocks, gap_sizes, strict=True))
        for first_block, gap_blocks in reversed(gaps):
            is_behind = ids >= first_block * N_BLOCK
            ids = ids + is_behind * (gap_blocks * N_BLOCK)
        return ids

    def stored_rows(self, ids: Tensor) -> Tensor:
        """Return rows (..., K) of `values` by their index there, as `stored_ids` gives it."""
        # A pair is moved as one integer: (..., K/2, 1), then (..., K).
        pair_dtype = torch.int32 if self.values.itemsize == 2 else torch.int16
        pairs = self.values.view(pair_dtype)
        block = ids // N_BLOCK
        row = ids % N_BLOCK
        rows = pairs[block, :, row]
        return rows.view(self.values.dtype).flatten(-2)

    def exact(self) -> Tensor:
        """Return the matrix (N, K) that it stands for, in float32."""
        return self.plain().float()

    def plain(self) -> Tensor:
        """Return the matrix (N, K) in bf16, a copy."""
        if self.gaps:
            return self.rows(torch.arange(self.shape[0]))
        n, k = self.shape
        rows = self.values.data.transpose(1, 2)
        return rows.reshape(-1, k)[:n]

    def is_whole(self) -> bool:
        """Return whether the values have the shape and type of such a matrix."""
        n, k = self.shape
        dtype, columns, tail = self.layout
        if k % columns or self.values.dtype is not dtype:
            return False
        num_steps = k // columns
        return self.values.shape == (num_blocks(n), num_steps, *tail)

    def part(self, rows: list[slice], columns: slice) -> Weight | None:
        """Return a part of the matrix in the same memory; None where it would cut a block."""
        return self._part_of_blocks(rows, columns)

    def _part_of_blocks(
        self, rows: list[slice], columns: slice, **other_tensors: Tensor
    ) -> Weight | None:
        """Return a part of the matrix in the same memory; None where it would cut a block.

        Args:
            rows: The rows, in ascending order.
            columns: The columns.
            other_tensors: The arguments of the format's constructor besides the values.
        """
        step = self.layout.columns
        if columns.start % step or columns.stop % step:
            return None
        for some in rows:
            if some.start % N_BLOCK or (some.stop % N_BLOCK and some.stop < self.shape[0]):
                return None
        first_block = rows[0].start // N_BLOCK
        end_block = num_blocks(rows[-1].stop)
        blocks = self.values.data[first_block:end_block]
        first_step = columns.start // step
        end_step = columns.stop // step
        values = blocks[:, first_step:end_step]
        num_rows = sum(some.stop - some.start for some in rows)
        num_columns = columns.stop - columns.start
        weight = type(self)((num_rows, num_columns), values, **other_tensors)
        gaps = []
        num_above = 0
        for some, following in pairwise(rows):
            num_above += some.stop - some.start
            gap = following.start - some.stop
            gaps += [num_above // N_BLOCK, gap // N_BLOCK]
        weight.gaps = gaps
        return weight

    def native_matrix(self) -> list[int] | None:
        """Return the fields of `Matrix` in kernels.h: the values alone are the weight."""
        stride = self.values.stride(0) * self.values.itemsize
        no_gaps = [0] * (2 * _MAX_GAPS)
        gaps = [*self.gaps, *no_gaps][: 2 * _MAX_GAPS]
        group = self.shape[1]
        return [
            self.values.data_ptr(),
            0,  # no scales
            0,  # no table
            0,  # the format of the elements: bf16
            0,  # no format of scales
            0,  # no scales per group
            group,
            0,  # not rotated
            0,  # x is not rounded
            0,  # no adapter
            0,  # and its rank
            stride,
            *gaps,
        ]


def in_whole_blocks(rows: Tensor) -> Tensor:
    """Return rows (N, ...) as they are if N is a multiple of 32, else a copy with padding."""
    n = len(rows)
    num_padding = num_blocks(n) * N_BLOCK - n
    if not num_padding:
        return rows
    return torch.cat([rows, rows[-1:].expand(num_padding, *rows.shape[1:])])


def in_blocks(plain: Tensor) -> Tensor:
    """Return a view (N/32, K/2, 32, 2) of a matrix (N, K), where N is a multiple of 32."""
    num_pairs = plain.shape[1] // 2
    rows = plain.view(-1, N_BLOCK, num_pairs, 2)
    return rows.transpose(1, 2)


def workspace(function: str, *sizes: int) -> Tensor:
    """Return memory for a kernel to work in.

    Args:
        function: The C++ function that gives its size in bytes.
        sizes: The arguments of that function.
    """
    num_bytes = native.call(function, *sizes)
    return torch.empty(num_bytes, dtype=torch.uint8)
