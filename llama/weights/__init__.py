"""The matrices of a model in their formats: one file a format, and here which one is taken.

In: a plain matrix, and what the user asked for. Out: a `Weight`. To add a format, write its file
and name it here.

Shapes: N outputs, K inputs.
"""

import torch
from torch import Tensor

from llama.device import dtype_name
from llama.weights.blocks import BlockedWeight
from llama.weights.int8 import Int8Weight
from llama.weights.plain import PlainWeight
from llama.weights.weight import Weight

__all__ = ["QUANTIZED", "PlainWeight", "Weight", "bytes_of", "check_quantize", "packed"]

QUANTIZED: dict[str, type[Weight]] = {"int8": Int8Weight}  # by the name that `quantize=` takes


def check_quantize(name: object, dtype: torch.dtype, device: torch.device) -> str | None:
    """What `quantize=` asks for; ValueError where there is no such format, or not for this."""
    if name is None:
        return None
    if not isinstance(name, str) or name not in QUANTIZED:
        raise ValueError(f"quantize={name!r}: give one of {', '.join(QUANTIZED)}, or None")
    if device.type != "cpu":
        raise ValueError(
            f"quantize={name!r} is for device='cpu', not {device.type}: use dtype='bf16'"
        )
    if dtype not in QUANTIZED[name].dtypes:
        raise ValueError(
            f"quantize={name!r} is for dtype='bf16', not {dtype_name(dtype)}: leave dtype out"
        )
    return name


def packed(plain: Tensor, quantize: str | None = None) -> Weight:
    """A matrix (N, K) in the format that was asked for, or else in this machine's fastest.

    What does not fit a format stays as it is. `plain` must not be used afterwards.
    """
    wanted = (BlockedWeight,) if quantize is None else (QUANTIZED[quantize], BlockedWeight)
    kind = next((kind for kind in wanted if kind.fits(plain)), PlainWeight)
    return kind.pack(plain)


def bytes_of(shape: tuple[int, ...], dtype: torch.dtype, quantize: str | None) -> int:
    """Bytes of a tensor of the model; a vector is not quantized."""
    if len(shape) != 2:
        return torch.Size(shape).numel() * dtype.itemsize
    return (QUANTIZED[quantize] if quantize else PlainWeight).num_bytes(*shape, dtype)
