"""How the KV cache keeps keys and values: as they are, or in 8 bits.

In: D numbers of a token and head, in the model's type. Out: bytes of a page, and the numbers again.
A cache is one tensor (L, 2, P, S, K, W), whose type tells how a plane (P, S, K, W), the keys or the
values of a layer, holds them; kernels.h has this for the CPU's kernels, which write the same bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llama.ops.cpu import native

MAX_HEAD_DIM = 256  # of the CPU's kernels, which keep a block of rows on their stack
LEAST_UNIT = 2.0**-100  # also of a row of zeros
NATIVE = {torch.bfloat16: 0, torch.int8: 1}  # KvFormat in kernels.h


@dataclass(frozen=True)
class KVFormat:
    """A plane holds rows of D numbers in the model's type."""

    name: str | None = None  # that `kv_cache_dtype=` takes

    def row(self, head_dim: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """W and the type of a row, where the model has heads of D numbers in `dtype`."""
        return head_dim, dtype

    def store(self, plane: Tensor, slots: Tensor, x: Tensor) -> None:
        """x (T, K, D) -> slots (T) of a plane, page * S + offset."""
        plane.flatten(0, 1).index_copy_(0, slots, self.pack(x))

    def load(self, plane: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """slots (...) of a plane -> (..., K, D)."""
        return self.unpack(plane.flatten(0, 1)[slots], dtype)

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
        unit = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=LEAST_UNIT).bfloat16()
        return torch.cat([(x / unit).round().to(torch.int8), unit.view(torch.int8)], -1)

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        unit = rows[..., -2:].contiguous().view(torch.bfloat16)
        return (rows[..., :-2] * unit.float()).to(dtype)


class Int8PagesFormat(Int8Format):
    """The same numbers, but of each page all (S, K, D) come first, then the units (K, S): a GPU
    reads 16 bytes at a time, from places that 16 divides."""

    def row(self, head_dim: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return head_dim + 2, torch.uint8

    def store(self, plane: Tensor, slots: Tensor, x: Tensor) -> None:
        at, rows = self._at(plane, slots), self.pack(x)
        numbers, units = self._parts(plane)
        numbers[at], units[at] = rows[..., :-2], rows[..., -2:]

    def load(self, plane: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        at = self._at(plane, slots)
        return self.unpack(torch.cat([part[at] for part in self._parts(plane)], -1), dtype)

    def _at(self, plane: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        return slots // plane.shape[1], slots % plane.shape[1]

    def _parts(self, plane: Tensor) -> tuple[Tensor, Tensor]:
        """Views (P, S, K, D) and (P, S, K, 2) of a plane."""
        _, s, k, w = plane.shape
        numbers, units = plane.view(torch.int8).flatten(1).split([s * k * (w - 2), s * k * 2], 1)
        return numbers.unflatten(1, (s, k, w - 2)), units.unflatten(1, (k, s, 2)).transpose(1, 2)


AS_COMPUTED = KVFormat()
FORMATS = {"int8": Int8Format("int8")}
ON_GPU = {None: AS_COMPUTED, "int8": Int8PagesFormat("int8")}
_BY_TYPE = {torch.int8: FORMATS["int8"], torch.uint8: ON_GPU["int8"]}


def pick_kv_format(name: object, device: torch.device) -> KVFormat:
    """What `kv_cache_dtype=` asks for; ValueError where there is no such format, or not for this
    device."""
    if name is None or name == "auto":
        return AS_COMPUTED
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"kv_cache_dtype={name!r}: give {', '.join(FORMATS)}, auto, or None")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"kv_cache_dtype={name!r} is not for {device.type}: leave it out there")
    return ON_GPU[name] if device.type == "cuda" else FORMATS[name]


def format_of(kv_cache: Tensor) -> KVFormat:
    return _BY_TYPE.get(kv_cache.dtype, AS_COMPUTED)


def views_of(kv_cache: Tensor) -> tuple[Tensor, Tensor | None]:
    """What a GPU's kernels read: the cache, and of one in 8 bits its units, as words."""
    in_8_bits = kv_cache.dtype is torch.uint8
    return (
        (kv_cache.view(torch.int8), kv_cache.view(torch.int16)) if in_8_bits else (kv_cache, None)
    )


def suits_gpu(heads: Tensor, kv_cache: Tensor) -> bool:
    """Whether sizes and types are those of triton/attention.py: its tiles are powers of two."""
    head_dim, is_8_bits = heads.shape[-1], kv_cache.dtype is torch.uint8
    has_size = 16 <= head_dim <= 256 and not head_dim & (head_dim - 1) and kv_cache.is_contiguous()
    return has_size and (is_8_bits or kv_cache.dtype is heads.dtype)


def native_format(heads: Tensor, kv_cache: Tensor) -> int | None:
    """What the CPU's kernels call the format of a cache; None where they do not take it, or heads
    (T, H, D)."""
    takes = native.has_kernel(heads) and heads.shape[-1] <= MAX_HEAD_DIM
    is_there = kv_cache.device.type == "cpu" and kv_cache.is_contiguous()
    return NATIVE.get(kv_cache.dtype) if takes and is_there else None
