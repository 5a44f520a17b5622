"""Matrices in bf16, quantized as compressed-tensors stores them.

In: a matrix. Out: its tensors by name. A format of `llama.weights` says itself how it is stored.
No file is written here. The blocks of GGUF are made by the package `gguf`.

Shapes: N outputs (rows), K inputs (columns).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from llama.common.checks import FieldError
from llama.weights.choice import QUANTIZED, ROUNDED_ACTIVATIONS

GROUP = 32  # neighbours along K that share a scale, in int4 and in the blocks of GGUF
GGUF_FORMATS = ("q8_0", "q4_0")  # the formats of GGUF files that are written
_CHUNK_ELEMENTS = 1 << 22  # elements quantized at a time

# Patterns of the modules of a vision model that are not quantized, whatever comes before them.
_IGNORED_WITH_IMAGES = ["re:.*lm_head", "re:.*vision_model.*", "re:.*multi_modal_projector.*"]
# The activations that a folder can ask for, and their description.
ACTIVATIONS = {
    name: dict(x.in_files) for name, x in ROUNDED_ACTIVATIONS.items() if x.in_files is not None
}


def check_activations(name: object, quantize: str | None) -> None:
    """Raise ValueError unless a folder can ask for such activations.

    Args:
        name: The value of `activations=`; None asks for nothing.
        quantize: The format of the matrices.
    """
    if name is None:
        return
    if not isinstance(name, str) or name not in ACTIVATIONS:
        text = f"={name!r}: give {', '.join(ACTIVATIONS)} for a folder OUT, or leave it out"
        raise FieldError.of("activations", text)
    kind = (ACTIVATIONS[name]["type"], ACTIVATIONS[name]["num_bits"])
    fitting = [
        known for known, weight_format in QUANTIZED.items() if weight_format.in_files == kind
    ]
    if quantize not in fitting:
        raise FieldError.of(
            "activations",
            f"={name!r} is for a folder OUT whose matrices have as many bits: give "
            f"quantize={fitting[0]!r}",
        )


def quantization_config(
    name: str, activations: str | None = None, *, has_images: bool = False
) -> dict[str, Any]:
    """Return the quantization_config of a folder whose layers are in a format of `build`.

    The embedding and lm_head are not quantized there, nor an encoder of images.

    Args:
        name: The format.
        activations: One of ACTIVATIONS, or None for activations that stay as they are.
        has_images: Whether the model has an encoder.
    """
    number_type, bits = QUANTIZED[name].in_files
    weights: dict[str, Any] = {
        "type": number_type,
        "num_bits": bits,
        "symmetric": True,
        "dynamic": False,
        "strategy": "channel",
    }
    if bits == 4:
        weights |= {"strategy": "group", "group_size": GROUP}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": weights}
    file_format = "float-quantized" if number_type == "float" else "pack-quantized"
    if activations is not None:
        group["input_activations"] = ACTIVATIONS[activations]
        file_format = f"{number_type}-quantized"
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": file_format,
        "config_groups": {"group_0": group},
        "ignore": _IGNORED_WITH_IMAGES if has_images else ["lm_head"],
    }


def quantized_tensors(
    name: str, plain: Tensor, quantize: str, activations: str | None = None
) -> dict[str, Tensor]:
    """Return the tensors that store a matrix (N, K) in a folder, by their names.

    Args:
        name: The name of the matrix in the folder, which ends in "weight".
        plain: The matrix in bf16.
        quantize: A format of `build`.
        activations: As for `quantization_config`.

    Raises:
        ValueError: An element is not finite.
    """
    weight_format = QUANTIZED[quantize]
    number_type, bits = weight_format.in_files
    stem = name.removesuffix("weight")
    chunks = [weight_format.rounded(rows) for rows in finite_rows(name, plain)]
    codes = torch.cat([chunk.codes for chunk in chunks])
    scale = torch.cat([chunk.scale for chunk in chunks])
    if number_type == "float":
        return {name: codes.view(torch.float8_e4m3fn), f"{stem}weight_scale": scale}
    if activations is not None:
        elements = (codes ^ 128).view(weight_format.layout.dtype)  # code 128 stands for 0
        return {name: elements, f"{stem}weight_scale": scale}
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
        scale = scale.bfloat16()
    return {
        f"{stem}weight_packed": codes.view(torch.int32),
        f"{stem}weight_scale": scale,
        f"{stem}weight_shape": torch.tensor(plain.shape),
    }


def finite_rows(name: str, plain: Tensor) -> Iterator[Tensor]:
    """Yield the rows of a tensor in chunks; ValueError where an element is not finite."""
    rows_per_chunk = max(_CHUNK_ELEMENTS // plain[0].numel(), 1)
    for start in range(0, len(plain), rows_per_chunk):
        rows = plain[start : start + rows_per_chunk]
        if not rows.isfinite().all():
            raise ValueError(
                f"{name} has a number that is not finite, which no format holds: `llama verify` "
                "says whether the files are damaged"
            )
        yield rows
