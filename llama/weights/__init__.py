"""The matrices of a model in their formats: one file a format, and here which one is taken.

In: a plain matrix, and what the user asked for. Out: a `Weight`. To add a format, write its file
and name it here. Shapes: N outputs, K inputs.
"""

import torch
from torch import Tensor

from llama.device import dtype_name
from llama.ops.cpu import native
from llama.ops.cpu.constants import ElementFormat, ScaleFormat
from llama.weights.blocks import BlockedWeight
from llama.weights.bytes import E4M3, BytesWeight, Fp8Weight
from llama.weights.coded import Coded, CodedRows
from llama.weights.groups import Form, GroupedWeight
from llama.weights.nibbles import NibblesWeight, SixBitsWeight
from llama.weights.plain import PlainWeight
from llama.weights.weight import Weight

__all__ = [
    "FORMATS", "QUANTIZED", "Form", "PlainWeight", "Weight", "bytes_of", "check_quantize", "like",
    "of_output", "on_gpu", "packed",
]  # fmt: skip

QUANTIZED: dict[str, type[BytesWeight | NibblesWeight]] = {  # by the name that `quantize=` takes
    "int8": BytesWeight, "fp8": Fp8Weight, "int4": NibblesWeight,
}  # fmt: skip
FORMATS: dict[str, type[Weight]] = {  # by the name in files
    "plain": PlainWeight, "bf16": BlockedWeight, "six_bits": SixBitsWeight, **QUANTIZED,
}  # fmt: skip
_Matrix = Tensor | Coded | CodedRows
_CPU = torch.device("cpu")
_Kinds = tuple[type[GroupedWeight], ...]  # the smallest first
_ALL: _Kinds = NibblesWeight, SixBitsWeight, BytesWeight, Fp8Weight
_GPU: _Kinds = NibblesWeight, BytesWeight, Fp8Weight


def check_quantize(name: object, dtype: torch.dtype, device: torch.device) -> str | None:
    """What `quantize=` asks for; ValueError where there is no such format, or not for this."""
    if name is None:
        return None
    if not isinstance(name, str) or name not in QUANTIZED:
        raise ValueError(f"quantize={name!r}: give one of {', '.join(QUANTIZED)}, or None")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"quantize={name!r} is not for {device.type}: use dtype='bf16'")
    if name == "int4" and native.kernels() is None:
        raise ValueError(
            f"quantize={name!r} needs this project's CPU kernels, which do not run here "
            "(`llama doctor` tells why): use int8"
        )
    if dtype not in QUANTIZED[name].dtypes:
        raise ValueError(
            f"quantize={name!r} is for dtype='bf16', not {dtype_name(dtype)}: leave dtype out"
        )
    return name


def of_output(quantize: str | None) -> str | None:
    """What the output, and an embedding tied to it, are rounded to: the best of what there is."""
    return None if quantize is None else "int8"


def on_gpu(matrix: _Matrix, quantize: str | None = None, device: torch.device = _CPU) -> Weight:
    """As `packed`, on a GPU: quantized as on a CPU where its kernels take it so, else plain."""
    if not isinstance(matrix, Tensor) or quantize is not None:
        held = packed(matrix.cpu() if isinstance(matrix, Tensor) else matrix, quantize, codes=_GPU)
        if isinstance(held, GroupedWeight) and held.blocks() is not None:
            return held.to(device)
    plain = matrix if isinstance(matrix, Tensor) else matrix.plain(torch.bfloat16)
    return PlainWeight.pack(plain.to(device))


def like(form: Form, n: int, k: int, device: torch.device) -> Weight:
    """Random numbers in a form, on a GPU; plain ones where it is not for these sizes."""
    tables = {
        ElementFormat.INT8: torch.arange(-128.0, 128),
        ElementFormat.FP8: E4M3.float(),
        ElementFormat.NIBBLES: form.first + torch.arange(16.0),
    }
    table = tables[ElementFormat(form.kind)]
    group = form.group if form.group and k % form.group == 0 else k
    units = {  # such that scales need this format
        ScaleFormat.FLOAT32: 1 / 3,
        ScaleFormat.FLOAT16: 2**-6,
        ScaleFormat.EIGHTS: 1365 / 2**17,
    }
    unit = units[ScaleFormat(form.scale_type)]
    scale, offset = torch.randint(1, 64, (2, n, k // group)) * unit
    codes = torch.randint(min(len(table), 127), (n, k), dtype=torch.uint8)  # 127 is a NaN
    return on_gpu(Coded(codes, table, scale, offset if form.per_group > 1 else None), None, device)


def packed(
    matrix: _Matrix, quantize: str | None = None, device: torch.device = _CPU, codes: _Kinds = _ALL
) -> Weight:
    """A matrix (N, K) in the format that was asked for, or else in this machine's fastest.

    What does not fit a format stays as it is; codes that fit none of `codes` become bf16. A plain
    matrix must not be used afterwards. quantize: of such a one. device: where it will multiply.
    """
    if device.type == "cuda":
        return on_gpu(matrix, quantize, device)
    if not isinstance(matrix, Tensor):
        first = matrix.first if isinstance(matrix, CodedRows) else matrix
        if format := next((x for x in codes if x.takes(first)), None):
            return format.of_rows(matrix) if isinstance(matrix, CodedRows) else format.of(matrix)
        matrix = matrix.plain(torch.bfloat16)
    wanted = (BlockedWeight,) if quantize is None else (QUANTIZED[quantize], BlockedWeight)
    kind = next((kind for kind in wanted if kind.fits(matrix)), PlainWeight)
    return kind.pack(matrix)


def bytes_of(shape: tuple[int, ...], dtype: torch.dtype, quantize: str | None) -> int:
    """Bytes of a tensor of the model; a vector is not quantized."""
    if len(shape) != 2 or quantize is None:
        return torch.Size(shape).numel() * dtype.itemsize
    return QUANTIZED[quantize].num_bytes(*shape)
