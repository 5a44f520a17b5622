"""How the KV cache keeps a key, or a value, of one token and head: as it is, or in 8 bits.

In: D numbers in the model's type. Out: a row of a page, and the numbers again. A cache is one
tensor (L, 2, P, S, K, W), whose type tells what its rows are; kernels.h has them for the CPU's
kernels, which write the same bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llama.ops.cpu import native

MAX_HEAD_DIM = 256  # of the CPU's kernels, which keep a block of rows on their stack
_LEAST_UNIT = 2.0**-100  # also of a row of zeros
NATIVE = {torch.bfloat16: 0, torch.int8: 1}  # KvFormat in kernels.h


@dataclass(frozen=True)
class KVFormat:
    """Rows of D numbers in the model's type."""

    name: str | None = None  # that `kv_cache_dtype=` takes

    def row(self, head_dim: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """W and the type of a row, where the model has heads of D numbers in `dtype`."""
        return head_dim, dtype

    def pack(self, x: Tensor) -> Tensor:
        """x (..., D) -> rows (..., W)."""
        return x

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """rows (..., W) -> (..., D) in the model's type."""
        return rows


class Int8Format(KVFormat):
    """Rows of D whole numbers from -127 to 127, then the unit that they count, a bf16 in 2 bytes.

    The unit is the largest magnitude over 127. Each row has its own, so that the bytes of a token
    depend on that token alone.
    """

    def row(self, head_dim: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return head_dim + 2, torch.int8

    def pack(self, x: Tensor) -> Tensor:
        x = x.float()
        unit = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=_LEAST_UNIT).bfloat16()
        return torch.cat([(x / unit).round().to(torch.int8), unit.view(torch.int8)], -1)

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        unit = rows[..., -2:].contiguous().view(torch.bfloat16)
        return (rows[..., :-2] * unit.float()).to(dtype)


AS_COMPUTED = KVFormat()
FORMATS = {"int8": Int8Format("int8")}


def pick_kv_format(name: object, device: torch.device) -> KVFormat:
    """What `kv_cache_dtype=` asks for; ValueError where there is no such format, or not for this
    device."""
    if name is None or name == "auto":
        return AS_COMPUTED
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"kv_cache_dtype={name!r}: give {', '.join(FORMATS)}, auto, or None")
    if device.type != "cpu":
        raise ValueError(
            f"kv_cache_dtype={name!r} is for device='cpu', not {device.type}: leave it out there"
        )
    return FORMATS[name]


def format_of(kv_cache: Tensor) -> KVFormat:
    return FORMATS["int8"] if kv_cache.dtype is torch.int8 else AS_COMPUTED


def native_format(heads: Tensor, kv_cache: Tensor) -> int | None:
    """What the CPU's kernels call the format of a cache; None where they do not take it, or heads
    (T, H, D)."""
    takes = native.has_kernel(heads) and heads.shape[-1] <= MAX_HEAD_DIM
    is_there = kv_cache.device.type == "cpu" and kv_cache.is_contiguous()
    return NATIVE.get(kv_cache.dtype) if takes and is_there else None
