"""bf16 in the order in which the CPU's kernels read it: the same bytes in the same memory.

Blocks of 32 rows, and in a block pairs of columns: (N/32, K/2, 32, 2), see packed_weight.h. The
product is linear.cpp's, for x86-64 CPUs with AVX2, AVX-512, avx512_bf16 or AMX. The tiles of AMX
are compared with a plain loop at first use, and not used if they differ or if Linux does not grant
them. A row of x gives the same bytes alone as in any batch, on any number of threads.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.ops.batch import DEFAULT_CONTEXT, ForwardContext
from llama.ops.cpu import native
from llama.ops.cpu.constants import N_BLOCK
from llama.weights.weight import Weight

INFINITY = 0x7F80  # in bf16


def can_pack(plain: Tensor) -> bool:
    """Whether a matrix can be cut into blocks: bf16 in one piece, N a multiple of 32, K even."""
    return (
        plain.dim() == 2
        and plain.dtype is torch.bfloat16
        and plain.device.type == "cpu"
        and plain.is_contiguous()
        and plain.numel() > 0
        and plain.storage_offset() % 2 == 0  # pairs of numbers are moved as one
        and plain.shape[0] % N_BLOCK == 0
        and plain.shape[1] % 2 == 0
    )


class BlockedWeight(Weight):
    """values: (N/32, K/2, 32, 2) bf16. A format of other numbers in such blocks is a subclass."""

    dtypes = (torch.bfloat16,)
    # Of the values: their type, how many k lie together, and how these lie.
    layout: ClassVar[tuple[torch.dtype, int, tuple[int, ...]]] = (torch.bfloat16, 2, (N_BLOCK, 2))
    gaps: Sequence[int] = ()  # before which blocks others lie, and how many; as Matrix in kernels.h

    @classmethod
    def fits(cls, plain: Tensor) -> bool:
        return can_pack(plain) and native.kernels() is not None

    @classmethod
    def pack(cls, plain: Tensor) -> Self:
        assert can_pack(plain), (plain.shape, plain.dtype, plain.device)
        (n, k), largest, threads = plain.shape, 0, torch.get_num_threads()
        if native.kernels() is not None:
            room = workspace("pack_workspace", 2 * k, threads)
            largest = native.call("pack_bf16", plain, room, n, k, threads)
        else:
            plain.copy_(in_blocks(plain).reshape(n, k))
        held = cls((n, k), plain.view(n // N_BLOCK, k // 2, N_BLOCK, 2))
        held.is_finite, held.has_empty_row = largest % 2**16 < INFINITY, largest >= 2**16
        return held

    def linear(
        self,
        x: Tensor,
        dtype: torch.dtype | None = None,
        context: ForwardContext = DEFAULT_CONTEXT,
    ) -> Tensor:
        """x is bf16, the result in bf16 or float32."""
        dtype = dtype or x.dtype
        if native.kernels() is None:
            return F.linear(x.float(), self.exact()).to(dtype)
        assert x.dtype is torch.bfloat16, x.dtype
        assert dtype in (torch.bfloat16, torch.float32), dtype
        (n, k), x = self.shape, x.contiguous()
        assert x.shape[-1] == k, (x.shape, n, k)
        out = torch.empty(*x.shape[:-1], n, dtype=dtype)
        m = out.numel() // n
        room = workspace("linear_workspace", m, k, torch.get_num_threads())
        matrix = torch.tensor(self.native_matrix())
        native.call("linear_packed", x, matrix, out, room, m, n, k, dtype is torch.float32)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """ids (...) -> (..., K) bf16. IndexError where there is no such row."""
        if native.kernels() is None or self.values.is_cuda:
            return self.packed_rows(self.placed(ids))
        out = torch.empty(*ids.shape, self.shape[1], dtype=torch.bfloat16)
        sizes = ids.numel(), *self.shape, torch.get_num_threads()
        matrix = torch.tensor(self.native_matrix())
        if not native.call("weight_rows", ids.contiguous(), matrix, out, *sizes):
            raise IndexError(f"no rows {ids.min()} to {ids.max()} in a weight of {self.shape[0]}")
        return out

    def placed(self, ids: Tensor) -> Tensor:
        """Where rows lie in the values."""
        for first, blocks in reversed([*zip(self.gaps[::2], self.gaps[1::2], strict=True)]):
            ids = ids + (ids >= first * N_BLOCK) * (blocks * N_BLOCK)
        return ids

    def packed_rows(self, ids: Tensor) -> Tensor:
        """Rows of the values."""
        # A pair is moved as one number: (..., K/2, 1), then (..., K).
        pairs = self.values.view(torch.int32 if self.values.itemsize == 2 else torch.int16)
        return pairs[ids // N_BLOCK, :, ids % N_BLOCK].view(self.values.dtype).flatten(-2)

    def exact(self) -> Tensor:
        """The float32 numbers (N, K) that it stands for."""
        return self.plain().float()

    def plain(self) -> Tensor:
        if self.gaps:
            return self.rows(torch.arange(self.shape[0]))
        return self.values.data.transpose(1, 2).reshape(self.shape)

    def is_whole(self) -> bool:
        (n, k), (dtype, step, tail) = self.shape, self.layout
        fits = n % N_BLOCK == 0 and k % step == 0 and self.values.dtype is dtype
        return fits and self.values.shape == (n // N_BLOCK, k // step, *tail)

    def part(self, rows: list[slice], columns: slice, **more: Tensor) -> Weight | None:
        step, ends = self.layout[1], [x for each in rows for x in (each.start, each.stop)]
        if any(x % N_BLOCK for x in ends) or columns.start % step or columns.stop % step:
            return None
        blocks = self.values.data[ends[0] // N_BLOCK : ends[-1] // N_BLOCK]
        shape = sum(x.stop - x.start for x in rows), columns.stop - columns.start
        held = type(self)(shape, blocks[:, columns.start // step : columns.stop // step], **more)
        for i, (one, other) in enumerate(pairwise(rows), 1):
            above = sum(x.stop - x.start for x in rows[:i])
            held.gaps = [*held.gaps, above // N_BLOCK, (other.start - one.stop) // N_BLOCK]
        return held

    def native_matrix(self) -> list[int]:
        stride, gaps = self.values.stride(0) * self.values.itemsize, [*self.gaps, 0, 0, 0, 0][:4]
        return [self.values.data_ptr(), *[0] * 5, self.shape[1], 0, 0, 0, stride, *gaps]


def in_blocks(plain: Tensor) -> Tensor:
    """(N, K) -> (N/32, K/2, 32, 2), a view."""
    return plain.view(-1, N_BLOCK, plain.shape[1] // 2, 2).transpose(1, 2)


def workspace(function: str, *sizes: int) -> Tensor:
    """Memory that a kernel works in, as large as it says."""
    return torch.empty(native.call(function, *sizes), dtype=torch.uint8)
