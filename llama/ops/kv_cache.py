"""How the KV cache keeps keys and values: as they are, or in 8 bits.

In: D numbers of a token and head, in the model's type. Out: bytes of a page, and the numbers again.
A cache is one tensor (L, 2, P, S, K, W), whose type tells how a plane (P, S, K, W), the keys or the
values of a layer, holds them; kernels.h has this for the CPU's kernels, which write the same bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llama.ops.cpu import native
from llama.ops.cpu.constants import MAX_HEAD_DIM, KvFormat

LEAST_UNIT = 2.0**-100  # also of a row of zeros
NATIVE = {torch.bfloat16: KvFormat.BF16.value, torch.int8: KvFormat.INT8.value}


@dataclass(frozen=True)
class KVFormat:
    """A plane holds rows of D numbers in the model's type."""

    name: str | None = None  # that `kv_cache_dtype=` takes

    def row(self, head_dim: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """W and the type of a row, where the model has heads of D numbers in `dtype`."""
        return head_dim, dtype

    def store(self, plane: Tensor, slots: Tensor, x: Tensor) -> None:
        """x (T, K, D) -> slots (T) of a plane, page * S + offset."""
        plane.flatten(0, 1).index_copy_(0, slots, x)

    def load(self, plane: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """slots (...) of a plane -> (..., K, D) in the model's type."""
        return plane.flatten(0, 1)[slots]


class Int8Format(KVFormat):
    """Whole numbers from -127 to 127, and for each token and head the unit that they count, a bf16.

    The unit is the largest magnitude over 127, so that the bytes of a token depend on that token
    alone. Of each page all numbers (S, K, D) come first, then the units (K, S): rows are read 16
    and more bytes at a time, from places that these divide.
    """

    def row(self, head_dim: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return head_dim + 2, torch.int8

    def store(self, plane: Tensor, slots: Tensor, x: Tensor) -> None:
        numbers, units = _parts(plane)
        at = slots // plane.shape[1], slots % plane.shape[1]
        numbers[at], units[at] = counted(x)

    def load(self, plane: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        at = slots // plane.shape[1], slots % plane.shape[1]
        numbers, units = (part[at] for part in _parts(plane))
        return (numbers * units.float()).to(dtype)


def counted(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., D) -> whole numbers (..., D) int8, and their units (..., 1) bf16."""
    x = x.float()
    units = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=LEAST_UNIT).bfloat16()
    return (x / units).round().to(torch.int8), units


def _parts(plane: Tensor) -> tuple[Tensor, Tensor]:
    """Views (P, S, K, D) int8 and (P, S, K, 1) bf16 of a plane in 8 bits."""
    _, s, k, w = plane.shape
    numbers, units = plane.flatten(1).split([s * k * (w - 2), s * k * 2], 1)
    units = units.view(torch.bfloat16).unflatten(1, (k, s, 1))
    return numbers.unflatten(1, (s, k, w - 2)), units.transpose(1, 2)


AS_COMPUTED = KVFormat()
FORMATS = {None: AS_COMPUTED, "int8": Int8Format("int8")}


def pick_kv_format(name: object, device: torch.device) -> KVFormat:
    """What `kv_cache_dtype=` asks for; ValueError where there is no such format, or not for this
    device."""
    if name is None or name == "auto":
        return AS_COMPUTED
    if name != "int8":
        raise ValueError(f"kv_cache_dtype={name!r}: give int8, auto, or None")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"kv_cache_dtype={name!r} is not for {device.type}: leave it out there")
    return FORMATS[name]


def format_of(kv_cache: Tensor) -> KVFormat:
    return FORMATS["int8" if kv_cache.dtype is torch.int8 else None]


def views_of(kv_cache: Tensor) -> tuple[Tensor, Tensor | None]:
    """What a GPU's kernels read: the cache, and of one in 8 bits its units, as words."""
    return kv_cache, kv_cache.view(torch.int16) if kv_cache.dtype is torch.int8 else None


def suits_gpu(heads: Tensor, kv_cache: Tensor) -> bool:
    """Whether sizes and types are those of triton/attention.py: its tiles are powers of two."""
    head_dim, is_8_bits = heads.shape[-1], kv_cache.dtype is torch.int8
    has_size = 16 <= head_dim <= 256 and not head_dim & (head_dim - 1) and kv_cache.is_contiguous()
    return has_size and (is_8_bits or kv_cache.dtype is heads.dtype)


def native_format(heads: Tensor, kv_cache: Tensor) -> int | None:
    """What the CPU's kernels call the format of a cache; None where they do not take it, or heads
    (T, H, D)."""
    takes = native.has_kernel(heads) and heads.shape[-1] <= MAX_HEAD_DIM
    is_there = kv_cache.device.type == "cpu" and kv_cache.is_contiguous()
    return NATIVE.get(kv_cache.dtype) if takes and is_there else None
