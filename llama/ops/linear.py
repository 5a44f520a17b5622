"""Rows times a weight: x (M, K), weight -> (M, N), bf16 with float32 sums.

A weight is (N, K) as in the checkpoint, or packed by `pack` into blocks (N/32, K/2, 32, 2) in the
same memory, or by `pack_int8` at half the size, with one scale per row. `pack_if_supported` packs
where there are kernels, linear.cpp: for x86-64 CPUs with AVX2, AVX-512, avx512_bf16 or AMX. The
tiles of AMX are compared with a plain loop at first use, and not used if they differ or if Linux
does not grant them. Elsewhere weights stay as they are and torch does the product. A row of x gives
the same bytes alone as in any batch, on any number of threads. For a few rows on a GPU there are
kernels in triton/linear.py, which run where they were found to be faster.

Shapes: M rows, in any leading dimensions; N outputs, K inputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.device import use_huge_pages
from llama.ops.cpu import native
from llama.ops.triton.kernels import TORCH_ONLY, KernelSet

N_BLOCK = 32  # rows of a weight that are packed together, as in packed_weight.h


def can_pack(weight: Tensor) -> bool:
    """Whether a weight can be packed: (N, K) bf16 in one piece, N a multiple of 32, K even."""
    return (
        weight.dim() == 2
        and weight.dtype is torch.bfloat16
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and weight.numel() > 0
        and weight.storage_offset() % 2 == 0  # pairs of numbers are moved as one
        and weight.shape[0] % N_BLOCK == 0
        and weight.shape[1] % 2 == 0
    )


def pack_if_supported(weight: Tensor) -> Tensor:
    """`weight`, packed in place where there are kernels to use it so."""
    if not can_pack(weight) or native.kernels() is None:
        return weight
    return pack(weight)


def pack(weight: Tensor) -> Tensor:
    """(N, K) -> (N/32, K/2, 32, 2): the same bytes in the same memory, in another order.

    `weight` itself must not be used after this.
    """
    assert can_pack(weight), (weight.shape, weight.dtype, weight.device)
    n, k = weight.shape
    if native.kernels() is not None:
        workspace = _workspace("pack_workspace", 2 * k, torch.get_num_threads())
        native.call("pack_bf16", weight, workspace, n, k)
    else:
        weight.copy_(weight.view(-1, N_BLOCK, k // 2, 2).transpose(1, 2).reshape(n, k))
    return weight.view(n // N_BLOCK, k // 2, N_BLOCK, 2)


def _workspace(function: str, *sizes: int) -> Tensor:
    """Memory that a kernel works in, as large as it says."""
    return torch.empty(native.call(function, *sizes), dtype=torch.uint8)


def unpack(weight: Tensor, scales: Tensor | None = None) -> Tensor:
    """A packed weight -> a copy of it as it was, (N, K); of int8, the float32 it stands for."""
    blocks, pairs = weight.shape[:2]
    plain = weight.transpose(1, 2).reshape(blocks * N_BLOCK, pairs * 2)
    return plain if scales is None else plain * scales[:, None]


def embedding(ids: Tensor, weight: Tensor, scales: Tensor | None = None) -> Tensor:
    """ids (...) -> rows (..., K) of a weight in any layout: it may be tied to the output's."""
    if weight.dim() == 2:
        return F.embedding(ids, weight)
    # A pair is moved as one number: (..., K/2, 1), then (..., K).
    whole = weight.view(torch.int16 if weight.dtype is torch.int8 else torch.int32)
    rows = whole[ids // N_BLOCK, :, ids % N_BLOCK].view(weight.dtype).flatten(-2)
    return rows if scales is None else (rows * scales[ids].unsqueeze(-1)).bfloat16()


def pack_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(N, K) bf16 -> values (N/32, K/2, 32, 2) int8, and scales (N) float32.

    The largest number of a row becomes 127; the error is at most half of the row's scale.
    """
    assert can_pack(weight), (weight.shape, weight.dtype, weight.device)
    n, k = weight.shape
    values = torch.empty(n // N_BLOCK, k // 2, N_BLOCK, 2, dtype=torch.int8)
    use_huge_pages(values)
    scales = torch.empty(n)
    if native.kernels() is not None:
        workspace = _workspace("pack_workspace", k, torch.get_num_threads())
        native.call("pack_int8", weight, values, scales, workspace, n, k)
        return values, scales
    torch.div(weight.abs().amax(1).float(), 127, out=scales)
    units = scales.masked_fill(scales == 0, 1)
    whole_numbers = (weight.float() / units[:, None]).round()
    values.copy_(whole_numbers.view(-1, N_BLOCK, k // 2, 2).transpose(1, 2))
    return values, scales


def linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    kernels: KernelSet = TORCH_ONLY,
) -> Tensor:
    """x (..., K), weight (N, K) in any layout -> (..., N) in `dtype`, by default x's.

    A packed weight needs bf16 rows and gives bf16 or float32, which are the sums before rounding.
    """
    dtype = dtype or x.dtype
    if weight.dim() == 2:
        return _plain(x, weight, dtype, kernels)
    assert x.dtype is torch.bfloat16 and dtype in (torch.bfloat16, torch.float32), (x.dtype, dtype)
    if native.kernels() is None:
        plain = unpack(weight, scales)
        return F.linear(x.to(plain.dtype), plain).to(dtype)
    x = x.contiguous()
    n, k = weight.shape[0] * N_BLOCK, weight.shape[1] * 2
    assert x.shape[-1] == k, (x.shape, n, k)
    out = torch.empty(*x.shape[:-1], n, dtype=dtype)
    m = out.numel() // n
    workspace = _workspace("linear_workspace", m, k, torch.get_num_threads())
    sizes = m, n, k, dtype is torch.float32
    if scales is None:
        native.call("linear_bf16", x, weight, out, workspace, *sizes)
    else:
        native.call("linear_int8", x, weight, scales, out, workspace, *sizes)
    return out


def _plain(x: Tensor, weight: Tensor, dtype: torch.dtype, kernels: KernelSet) -> Tensor:
    n, k = weight.shape
    if kernels.has("linear", x, weight):
        tile = kernels.tile_for(n, k, x.numel() // k)
        if tile is not None:
            from llama.ops.triton import linear as gpu

            return gpu.run(x, weight, tile, dtype)
    if x.is_cuda and dtype is torch.float32 and x.dtype in (torch.bfloat16, torch.float16):
        # The sums as they are: rounded to 16 bits, 3 % of rows of logits tie at the top.
        sums = torch.mm(x.reshape(-1, k), weight.t(), out_dtype=dtype)
        return sums.view(*x.shape[:-1], n)
    out = F.linear(x, weight)
    return out if out.dtype is dtype else out.to(dtype)
