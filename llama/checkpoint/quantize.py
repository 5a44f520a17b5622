"""Matrices in bf16, rounded as files hold them: compressed-tensors' tensors, the blocks of GGUF.

Those of compressed-tensors are what a format of `llama.weights` says of itself.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from llama.weights import QUANTIZED

GROUP = 32
_NUMBERS = 1 << 22  # that are rounded at a time


def quantization_config(name: str) -> dict[str, Any]:
    """What config.json says of a folder: weights are rounded, but for the output's."""
    numbers, bits = QUANTIZED[name].in_files
    group = {"strategy": "group", "group_size": GROUP} if bits == 4 else {"strategy": "channel"}
    weights = {"type": numbers, "num_bits": bits, "symmetric": True, "dynamic": False, **group}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "float-quantized" if numbers == "float" else "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def encoded(name: str, plain: Tensor, quantize: str) -> dict[str, Tensor]:
    """A matrix (N, K) -> its tensors in a folder, by their names."""
    kind, stem = QUANTIZED[quantize], name.removesuffix("weight")
    each = [kind.rounded(rows) for rows in finite_rows(name, plain)]
    codes, scale = (torch.cat([getattr(x, part) for x in each]) for part in ("codes", "scale"))
    if kind.in_files[0] == "float":
        return {name: codes.view(torch.float8_e4m3fn), f"{stem}weight_scale": scale}
    if kind.in_files[1] == 4:
        codes, scale = codes[:, ::2] | codes[:, 1::2] << 4, scale.bfloat16()
    return {
        f"{stem}weight_packed": codes.view(torch.int32),
        f"{stem}weight_scale": scale,
        f"{stem}weight_shape": torch.tensor(plain.shape),
    }


def finite_rows(name: str, plain: Tensor) -> Iterator[Tensor]:
    """Some rows of a tensor at a time; ValueError where a number is not finite."""
    for rows in plain.split(max(_NUMBERS // plain[0].numel(), 1)):
        if not rows.isfinite().all():
            raise ValueError(f"{name} has a number that is not finite: download the weights again")
        yield rows


def _q8_0(rows: Tensor) -> Tensor:
    """The largest of 32 becomes 127; a half goes away from 0."""
    x = rows.float().view(-1, GROUP)
    scale = x.abs().amax(1, keepdim=True) / 127
    codes = x * torch.where(scale == 0, 0, 1 / scale)
    codes = codes.sign() * (codes.abs() + 0.5).floor()
    return _blocks(rows, scale, codes.remainder(256).byte())


def _q4_0(rows: Tensor) -> Tensor:
    """The largest of 32 becomes -8."""
    x = rows.float().view(-1, GROUP)
    scale = x.gather(1, x.abs().argmax(1, keepdim=True)) / -8
    codes = (x * torch.where(scale == 0, 0, 1 / scale) + 8.5).clamp(0, 15).byte()
    return _blocks(rows, scale, codes[:, :16] | codes[:, 16:] << 4)


def _blocks(rows: Tensor, scale: Tensor, codes: Tensor) -> Tensor:
    return torch.cat([scale.half().view(torch.uint8), codes], 1).view(len(rows), -1)


BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {  # of GGUF: rows (n, K) -> (n, bytes of a row)
    "q8_0": _q8_0,
    "q4_0": _q4_0,
}
