"""The formats of the KV cache: keys and values in the model's type, or in 8 bits.

In: D elements of a token and head, in the model's type. Out: bytes of a page, and the elements
again. A cache is one tensor (L, 2, P, S, K, W). Its type says how a plane (P, S, K, W), the keys or
the values of a layer, stores them. Kernels write the same bytes. Pages and their owners must not be
known here.

Shapes: L layers, P pages, S slots per page, K kv heads, D head dim, W elements of a stored row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llama.common.checks import FieldError

SCALED_DTYPE = torch.int8  # the type of a cache that has scales
MIN_SCALE = 2.0**-100  # also the scale of a row of zeros


@dataclass(frozen=True)
class KVFormat:
    """The plain format: a plane has rows of D elements in the model's type.

    Attributes:
        name: The value of `kv_cache_dtype=` that asks for the format.
    """

    name: str | None = None

    def row(self, head_dim: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Return W and the type of a row.

        Args:
            head_dim: D.
            dtype: The type of the model.
        """
        return head_dim, dtype

    def store(self, plane: Tensor, slots: Tensor, x: Tensor) -> None:
        """Write rows to a plane.

        Args:
            plane: The plane (P, S, K, W).
            slots: The slots (T), page * S + offset.
            x: The rows (T, K, D).
        """
        rows = plane.flatten(0, 1)
        rows.index_copy_(0, slots, x)

    def load(self, plane: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Read rows of a plane.

        Args:
            plane: The plane (P, S, K, W).
            slots: The slots (...), page * S + offset.
            dtype: The type of the model.

        Returns:
            The rows (..., K, D) in the type of the model.
        """
        rows = plane.flatten(0, 1)
        return rows[slots]

    def to_heads(self, pages: Tensor) -> Tensor:
        """Return the bytes of pages head by head, so that any range of heads is contiguous.

        Args:
            pages: n pages of a cache, (L, 2, n, S, K, W).

        Returns:
            (n, K, bytes) uint8: of each head all layers, of each keys, then values, slot by slot.
        """
        heads = pages.permute(2, 4, 0, 1, 3, 5).contiguous()
        return heads.view(torch.uint8).flatten(2)

    def from_heads(self, heads: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return pages as a cache has them, from the result of `to_heads`.

        Args:
            heads: (n, K, bytes) uint8.
            shape: The shape of the result, (L, 2, n, S, K, W).
            dtype: The type of the cache.
        """
        num_layers, _, _, s, _, w = shape
        rows: Tensor = heads.view(dtype).unflatten(2, (num_layers, 2, s, w))
        return rows.permute(2, 3, 0, 4, 1, 5)


class Int8Format(KVFormat):
    """int8 elements from -127 to 127, with one bf16 scale per token and head.

    The scale is the largest magnitude over 127, so that the bytes of a token depend on that token
    alone. A page has all elements (S, K, D) first, then the scales (K, S): kernels read rows 16 and
    more bytes at a time, from addresses that are multiples of these.
    """

    def row(self, head_dim: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Return W and the type of a row: D elements and two bytes of its scale."""
        return head_dim + 2, torch.int8

    def store(self, plane: Tensor, slots: Tensor, x: Tensor) -> None:
        """Quantize rows, and write them to a plane; see `KVFormat.store`."""
        elements, scales = _parts(plane)
        page_size = plane.shape[1]
        indices = (slots // page_size, slots % page_size)
        quantized, new_scales = quantize(x)
        elements[indices] = quantized
        scales[indices] = new_scales

    def load(self, plane: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Read rows of a plane; see `KVFormat.load`."""
        page_size = plane.shape[1]
        indices = (slots // page_size, slots % page_size)
        elements, scales = _parts(plane)
        rows = elements[indices] * scales[indices].float()
        return rows.to(dtype)

    def to_heads(self, pages: Tensor) -> Tensor:
        """Return the bytes of pages head by head: all elements, then all scales.

        See `KVFormat.to_heads`.
        """
        _, _, _, s, k, w = pages.shape
        elements, scales = pages.flatten(3).split_with_sizes((s * k * (w - 2), s * k * 2), 3)
        elements = elements.unflatten(3, (s, k, w - 2)).permute(2, 4, 0, 1, 3, 5)
        scales = scales.unflatten(3, (k, s * 2)).permute(2, 3, 0, 1, 4)
        heads = torch.cat([elements.flatten(2), scales.flatten(2)], 2)
        return heads.view(torch.uint8)

    def from_heads(self, heads: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return pages as a cache has them; see `KVFormat.from_heads`."""
        num_layers, _, _, s, _, w = shape
        sizes = (num_layers * 2 * s * (w - 2), num_layers * 2 * s * 2)
        elements, scales = heads.view(dtype).split_with_sizes(sizes, 2)
        elements = elements.unflatten(2, (num_layers, 2, s, w - 2)).permute(2, 3, 0, 4, 1, 5)
        scales = scales.unflatten(2, (num_layers, 2, s * 2)).permute(2, 3, 0, 1, 4)
        return torch.cat([elements.flatten(3), scales.flatten(3)], 3).view(shape)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in int8.

    Args:
        x: The rows (..., D).

    Returns:
        The elements (..., D) int8, and their scales (..., 1) bf16.
    """
    x = x.float()
    max_magnitude = x.abs().amax(-1, keepdim=True)
    scales = max_magnitude / 127
    scales = scales.clamp(min=MIN_SCALE).bfloat16()
    elements = (x / scales).round()
    return elements.to(torch.int8), scales


def _parts(plane: Tensor) -> tuple[Tensor, Tensor]:
    """Return views (P, S, K, D) int8 and (P, S, K, 1) bf16 of a plane in 8 bits."""
    _, s, k, w = plane.shape
    head_dim = w - 2
    pages = plane.flatten(1)
    sizes = (s * k * head_dim, s * k * 2)
    elements, scale_bytes = pages.split_with_sizes(sizes, 1)
    elements = torch.unflatten(elements, 1, (s, k, head_dim))
    scales = scale_bytes.view(torch.bfloat16)
    scales = torch.unflatten(scales, 1, (k, s, 1))
    return elements, scales.transpose(1, 2)


AS_COMPUTED = KVFormat()
FORMATS = {
    None: AS_COMPUTED,
    "int8": Int8Format("int8"),
}


def pick_kv_format(name: object, device: torch.device) -> KVFormat:
    """Return the format that `kv_cache_dtype=` asks for.

    Raises:
        ValueError: There is no such format, or not for this device.
    """
    if name is None or name == "auto":
        return AS_COMPUTED
    if name != "int8":
        raise FieldError.of("kv_cache_dtype", f"={name!r}: give int8, auto, or None")
    if device.type not in ("cpu", "cuda"):
        raise FieldError.of(
            "kv_cache_dtype",
            f"={name!r} is not for {device.type}: leave it out there",
        )
    return FORMATS[name]


def format_of(kv_cache: Tensor) -> KVFormat:
    """Return the format of a cache, or of a part of one."""
    return FORMATS["int8" if kv_cache.dtype is torch.int8 else None]
