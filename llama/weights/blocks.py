"""bf16 in the order in which the CPU's kernels read it: the same bytes in the same memory.

Blocks of 32 rows, and in a block pairs of columns: (N/32, K/2, 32, 2), see packed_weight.h. The
product is linear.cpp's, for x86-64 CPUs with AVX2, AVX-512, avx512_bf16 or AMX. The tiles of AMX
are compared with a plain loop at first use, and not used if they differ or if Linux does not grant
them. A row of x gives the same bytes alone as in any batch, on any number of threads.
"""

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.ops.cpu import native
from llama.ops.triton.kernels import TORCH_ONLY, KernelSet
from llama.weights.weight import Weight

N_BLOCK = 32  # rows of a weight that are packed together, as in packed_weight.h


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


def in_blocks(plain: Tensor) -> Tensor:
    """(N, K) -> (N/32, K/2, 32, 2), a view."""
    return plain.view(-1, N_BLOCK, plain.shape[1] // 2, 2).transpose(1, 2)


def from_blocks(values: Tensor) -> Tensor:
    """(N/32, K/2, 32, 2) -> (N, K), a copy."""
    blocks, pairs = values.shape[:2]
    return values.transpose(1, 2).reshape(blocks * N_BLOCK, pairs * 2)


def workspace(function: str, *sizes: int) -> Tensor:
    """Memory that a kernel works in, as large as it says."""
    return torch.empty(native.call(function, *sizes), dtype=torch.uint8)


class BlockedWeight(Weight):
    """values: (N/32, K/2, 32, 2) bf16."""

    dtypes = (torch.bfloat16,)

    @classmethod
    def num_bytes(cls, n: int, k: int, dtype: torch.dtype) -> int:
        return 2 * n * k

    @classmethod
    def fits(cls, plain: Tensor) -> bool:
        return can_pack(plain) and native.kernels() is not None

    @classmethod
    def pack(cls, plain: Tensor) -> Self:
        assert can_pack(plain), (plain.shape, plain.dtype, plain.device)
        n, k = plain.shape
        if native.kernels() is not None:
            room = workspace("pack_workspace", 2 * k, torch.get_num_threads())
            native.call("pack_bf16", plain, room, n, k)
        else:
            plain.copy_(in_blocks(plain).reshape(n, k))
        return cls((n, k), plain.view(n // N_BLOCK, k // 2, N_BLOCK, 2))

    def linear(
        self, x: Tensor, dtype: torch.dtype | None = None, kernels: KernelSet = TORCH_ONLY
    ) -> Tensor:
        dtype = dtype or x.dtype
        if native.kernels() is None:
            return F.linear(x, self.plain()).to(dtype)
        return native_product(self, x, dtype, "linear_bf16", self.values)

    def rows(self, ids: Tensor) -> Tensor:
        return rows_of_blocks(self.values, ids, pair=torch.int32)

    def plain(self) -> Tensor:
        return from_blocks(self.values.data)

    def native_addresses(self) -> tuple[int, int] | None:
        return self.values.data_ptr(), 0


def native_product(
    weight: Weight, x: Tensor, dtype: torch.dtype, function: str, *tensors: Tensor
) -> Tensor:
    """x (M, K) bf16 times a weight in blocks -> (M, N) in bf16 or float32, by a kernel that reads
    `tensors`."""
    assert x.dtype is torch.bfloat16 and dtype in (torch.bfloat16, torch.float32), (x.dtype, dtype)
    (n, k), x = weight.shape, x.contiguous()
    assert x.shape[-1] == k, (x.shape, n, k)
    out = torch.empty(*x.shape[:-1], n, dtype=dtype)
    m = out.numel() // n
    room = workspace("linear_workspace", m, k, torch.get_num_threads())
    native.call(function, x, *tensors, out, room, m, n, k, dtype is torch.float32)
    return out


def rows_of_blocks(values: Tensor, ids: Tensor, pair: torch.dtype) -> Tensor:
    """ids (...) -> (..., K) of values in blocks; `pair`: a whole number as large as two of them."""
    # A pair is moved as one number: (..., K/2, 1), then (..., K).
    whole = values.view(pair)
    return whole[ids // N_BLOCK, :, ids % N_BLOCK].view(values.dtype).flatten(-2)
