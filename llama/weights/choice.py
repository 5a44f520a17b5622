"""The formats of a model's matrices: one file per format, and the choice between them.

In: a plain or a quantized matrix, and the format that the user asked for. Out: a `Weight`. To add a
format, write its file and name it here. Files and models must not be known here.

Shapes: N outputs, K inputs.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from llama.common.checks import FieldError
from llama.common.device import dtype_name, missing_bf16
from llama.kernels.cpu import native
from llama.kernels.cpu.constants import ScaleFormat
from llama.ops import rounded
from llama.ops.formats import ElementFormat
from llama.weights.blocks import BlockedWeight
from llama.weights.bytes import E4M3, BytesWeight, Fp8Weight
from llama.weights.coded import Coded, CodedRows
from llama.weights.groups import GroupedWeight, QuantKey
from llama.weights.nibbles import NibblesWeight, SixBitsWeight
from llama.weights.plain import PlainWeight
from llama.weights.weight import Weight


class ActivationFormat(NamedTuple):
    """A way to round the rows that matrices multiply.

    Attributes:
        per_token: Whether a row has one scale.
        is_e4m3: Whether it rounds to e4m3, on CPUs and GPUs; otherwise to whole numbers, on CPUs.
        in_files: The `input_activations` by which compressed-tensors describes it; None if no
            description means exactly this.
        with_lm_head: Whether the rows that lm_head multiplies are rounded, too. The largest logits
            are then computed again without rounding.
    """

    per_token: bool
    is_e4m3: bool = False
    in_files: Mapping[str, object] | None = None
    with_lm_head: bool = False


# The formats by the names that `quantize=` takes.
QUANTIZED: dict[str, type[BytesWeight | NibblesWeight]] = {
    "int8": BytesWeight,
    "fp8": Fp8Weight,
    "int4": NibblesWeight,
}
# The formats by their names in files of packed weights.
FORMATS: dict[str, type[Weight]] = {
    "plain": PlainWeight,
    "bf16": BlockedWeight,
    "six_bits": SixBitsWeight,
    **QUANTIZED,
}
_PER_TOKEN = {"num_bits": 8, "symmetric": True, "dynamic": True, "strategy": "token"}
# The values of `activations=` that round.
ROUNDED_ACTIVATIONS = {
    "fp8": ActivationFormat(per_token=True, is_e4m3=True, in_files=_PER_TOKEN | {"type": "float"}),
    "int8": ActivationFormat(per_token=False),
    "int8_lm_head": ActivationFormat(per_token=False, with_lm_head=True),
    "int8_token": ActivationFormat(per_token=True, in_files=_PER_TOKEN | {"type": "int"}),
}
# How llama.cpp rounds for the block formats of GGUF, for which it has no other products.
GGUF_ACTIVATIONS = "int8_lm_head"
LM_HEAD = "output.weight"
_Matrix = Tensor | Coded | CodedRows
_CPU = torch.device("cpu")
_Formats = tuple[type[GroupedWeight], ...]  # the smallest first
_CPU_FORMATS: _Formats = (NibblesWeight, SixBitsWeight, BytesWeight, Fp8Weight)
_GPU_FORMATS: _Formats = (NibblesWeight, BytesWeight, Fp8Weight)


def check_quantize(name: object, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return the format that `quantize=` asks for.

    Args:
        name: The value that the user gave.
        dtype: The type of the model.
        device: The device of the model.

    Raises:
        ValueError: There is no such format, or not for this type, device or CPU.
    """
    if name is None:
        return None
    if not isinstance(name, str) or name not in QUANTIZED:
        text = f"={name!r}: give one of {', '.join(QUANTIZED)}, or None"
        raise FieldError.of("quantize", text)
    if device.type not in ("cpu", "cuda"):
        raise FieldError.of("quantize", f"={name!r} is not for {device.type}: use dtype='bf16'")
    if name == "int4" and native.kernels() is None:
        raise FieldError.of(
            "quantize",
            f"={name!r} needs this project's CPU kernels, which do not run here "
            "(`llama doctor` tells why): use int8",
        )
    if dtype not in QUANTIZED[name].dtypes:
        if (reason := missing_bf16(device)) is not None:
            raise FieldError.of(
                "quantize", f"={name!r} needs bf16, but {reason}: leave quantize out"
            )
        raise FieldError.of(
            "quantize",
            f"={name!r} is for dtype='bf16', not {dtype_name(dtype)}: leave dtype out",
        )
    return name


def check_activations(name: object, device: torch.device, *, is_plain: bool) -> str | None:
    """Return how `activations=` asks for activations to be rounded; None where they are not.

    Args:
        name: The value that the user gave.
        device: The device of the model.
        is_plain: Whether no matrix is quantized.

    Raises:
        ValueError: There is no such rounding, or not for these matrices, this device or CPU.
    """
    if name is None or name == "bf16":
        return None
    if not isinstance(name, str) or name not in ROUNDED_ACTIVATIONS:
        names = ", ".join(["bf16", *ROUNDED_ACTIVATIONS])
        raise FieldError.of("activations", f"={name!r}: give one of {names}, or None")
    is_e4m3 = ROUNDED_ACTIVATIONS[name].is_e4m3
    if device.type != "cpu" and not (is_e4m3 and device.type == "cuda"):
        allowed = "CPUs and NVIDIA GPUs" if is_e4m3 else "the CPU"
        raise FieldError.of(
            "activations",
            f"={name!r} is for {allowed}, not for {device.type}: leave activations out",
        )
    if is_e4m3:
        if (reason := _missing_e4m3(device)) is not None:
            raise FieldError.of(
                "activations",
                f"={name!r} needs products in e4m3, but {reason}: leave activations out",
            )
        if is_plain:
            raise _no_e4m3(name)
        return name
    if _has_amx() and not ROUNDED_ACTIVATIONS[name].per_token:
        raise FieldError.of(
            "activations",
            f"={name!r} is slower than bf16 on this CPU, which has AMX: leave "
            "activations out, or give 'int8_token' for matrices in int8",
        )
    if is_plain:
        raise _no_integers(name)
    return name


def default_activations(name: str | None, device: torch.device) -> str | None:
    """Return how activations are rounded where the user does not say it.

    Args:
        name: What the files of the model ask for, None where they ask for nothing.
        device: The device of the model. Activations stay as they are where nothing rounds exactly
            so, or where products would be slower so.
    """
    if name is None:
        return None
    if ROUNDED_ACTIVATIONS[name].is_e4m3:
        return name if device.type == "cuda" and _missing_e4m3(device) is None else None
    if device.type != "cpu":
        return None
    is_slower = _has_amx() and not ROUNDED_ACTIVATIONS[name].per_token
    return None if is_slower else name


def _missing_e4m3(device: torch.device) -> str | None:
    """Return why a GPU cannot multiply e4m3 by e4m3; None where it can, and for a CPU."""
    if device.type == "cpu":
        return None
    if torch.version.hip is not None:
        return "AMD's GPUs are not supported"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return f"this GPU has none (compute capability {major}.{minor})"
    return None


def _has_amx() -> bool:
    """Return whether the kernels run in AMX tiles."""
    allowed = native.allowed_instruction_sets()
    return bool(allowed) and allowed[0].name == "amx"


def round_activations(
    matrices: Mapping[str, Weight], name: str, where_possible: bool = False
) -> None:
    """Round the rows that these matrices multiply, where their elements are of the same kind.

    Args:
        matrices: The matrices of the layers by name, as a rank holds them, and lm_head where it
            is to be rounded.
        name: What `check_activations` or `default_activations` returned.
        where_possible: Whether the rows of matrices that do not fit stay as they are.

    Raises:
        ValueError: No matrix has such elements, or lm_head does not; or a rank's part of one has
            columns that do not fill a group.
    """
    if ROUNDED_ACTIVATIONS[name].is_e4m3:
        results = [weight.round_to_e4m3() for weight in matrices.values()]
        if not (any(results) or where_possible):
            raise _no_e4m3(name)
        return
    per_token = ROUNDED_ACTIVATIONS[name].per_token
    has_amx = _has_amx()
    is_any = False
    for matrix, weight in matrices.items():
        if has_amx and not _fits_tiles(weight):
            continue
        if weight.round_activations(per_token, exact_top=matrix == LM_HEAD):
            is_any = True
        elif where_possible:
            continue
        elif weight.has_integers() and weight.shape[1] % rounded.PIECE:
            raise no_pieces(name, matrix, weight.shape[1])
        elif matrix == LM_HEAD:
            raise FieldError.of(
                "activations",
                f"={name!r} needs an lm_head whose elements are whole numbers: give "
                "quantize='int8' or 'int4' too, or activations='int8'",
            )
    if is_any or where_possible:
        return
    if has_amx:
        raise FieldError.of(
            "activations",
            f"={name!r} is slower than bf16 on this CPU, which has AMX, unless matrices are in "
            "int8 with one scale per row: give quantize='int8' too, or leave activations out",
        )
    raise _no_integers(name)


def _fits_tiles(weight: Weight) -> bool:
    """Return whether AMX multiplies rounded rows by a weight faster than rows in bf16."""
    return weight.kind == ElementFormat.INT8 and getattr(weight, "groups", 0) == 1


def has_integers(quantize: str) -> bool:
    """Return whether the elements of a format of `quantize=` are whole numbers."""
    number_type, _ = QUANTIZED[quantize].in_files
    return number_type == "int"


def no_pieces(name: str, matrix: str, num_columns: int) -> FieldError:
    """Return the error for a matrix whose columns on a rank do not fill pieces.

    Args:
        name: A value of `activations=` that rounds.
        matrix: The matrix.
        num_columns: Its columns on a rank.
    """
    return FieldError.of(
        "activations",
        f"={name!r}: {matrix} has {num_columns} columns on a rank, which is no multiple of "
        f"{rounded.PIECE}: use another number of ranks, or give activations='bf16'",
    )


def _no_integers(name: str) -> FieldError:
    return FieldError.of(
        "activations",
        f"={name!r} needs matrices whose elements are whole numbers, and this model has "
        "none: give quantize='int8' or 'int4' too, or leave activations out",
    )


def _no_e4m3(name: str) -> FieldError:
    return FieldError.of(
        "activations",
        f"={name!r} needs matrices in e4m3 with one scale per row, and this model has "
        "none: give quantize='fp8' too, or leave activations out",
    )


def lm_head_format(quantize: str | None) -> str | None:
    """Return the format of lm_head, and of an embedding tied to it: the most accurate one."""
    return None if quantize is None else "int8"


def on_gpu(matrix: _Matrix, quantize: str | None = None, device: torch.device = _CPU) -> Weight:
    """Return a matrix in a format of a GPU's kernels.

    It is packed on the CPU, as `packed` does it, and put into fragment order on the GPU. A format
    that the kernels do not take becomes plain.

    Args:
        matrix: The matrix (N, K).
        quantize: The format of a plain matrix, if it is to be quantized.
        device: The GPU.
    """
    if not isinstance(matrix, Tensor) or quantize is not None:
        on_cpu = matrix.cpu() if isinstance(matrix, Tensor) else matrix
        weight = packed(on_cpu, quantize, formats=_GPU_FORMATS)
        if isinstance(weight, GroupedWeight) and weight.fits_gpu():
            return weight.to(device).in_fragments()
    plain = matrix if isinstance(matrix, Tensor) else matrix.plain(torch.bfloat16)
    return PlainWeight.pack(plain.to(device))


def random_weight(key: QuantKey, n: int, k: int, device: torch.device) -> Weight:
    """Return random elements in a format, on a GPU; plain ones where the sizes do not fit it.

    Args:
        key: The format.
        n: The number of outputs.
        k: The number of inputs.
        device: The GPU.
    """
    tables = {
        ElementFormat.INT8: torch.arange(-128.0, 128),
        ElementFormat.FP8: E4M3.float(),
        ElementFormat.NIBBLES: key.first + torch.arange(16.0),
    }
    table = tables[ElementFormat(key.kind)]
    group = key.group
    if group == 0 or k % group:
        group = k
    # Multiples of these steps are exact in that format of scales, and not in a smaller one.
    steps = {
        ScaleFormat.FLOAT32: 1 / 3,
        ScaleFormat.FLOAT16: 2**-6,
        ScaleFormat.EIGHTS: 1365 / 2**17,
    }
    step = steps[ScaleFormat(key.scale_type)]
    generator = torch.Generator().manual_seed(0)
    scale, offset = torch.randint(1, 64, (2, n, k // group), generator=generator) * step
    num_codes = min(len(table), 127)  # code 127 of e4m3 is a NaN
    codes = torch.randint(num_codes, (n, k), dtype=torch.uint8, generator=generator)
    has_offset = key.per_group > 1
    coded = Coded(codes, table, scale, offset if has_offset else None)
    return on_gpu(coded, None, device)


def packed(
    matrix: _Matrix,
    quantize: str | None = None,
    device: torch.device = _CPU,
    formats: _Formats = _CPU_FORMATS,
    memory: Tensor | None = None,
) -> Weight:
    """Return a matrix in the format that was asked for, or else in the fastest one of this machine.

    A matrix that does not fit a format stays as it is, and codes that fit none of `formats` become
    bf16.

    Args:
        matrix: The matrix (N, K). Its memory may be used: a plain one must not be used afterwards.
        quantize: The format of a plain matrix, if it is to be quantized.
        device: The device that will multiply.
        formats: The formats that may store codes, in order of preference.
        memory: A tensor that begins with the rows of a plain matrix, if that lies in one which has
            whole blocks of rows.
    """
    if device.type == "cuda":
        return on_gpu(matrix, quantize, device)
    if not isinstance(matrix, Tensor):
        first_rows = matrix.first if isinstance(matrix, CodedRows) else matrix
        for coded_format in formats:
            if not coded_format.takes(first_rows):
                continue
            if isinstance(matrix, CodedRows):
                return coded_format.of_rows(matrix)
            return coded_format.of(matrix)
        matrix = matrix.plain(torch.bfloat16)
    if quantize is not None and QUANTIZED[quantize].fits(matrix):
        return QUANTIZED[quantize].pack(matrix)
    if BlockedWeight.fits(matrix):
        if memory is not None:
            return BlockedWeight.pack_memory(memory, len(matrix))
        return BlockedWeight.pack(matrix)
    return PlainWeight.pack(matrix)


def bytes_of(shape: tuple[int, ...], dtype: torch.dtype, quantize: str | None) -> int:
    """Return the bytes of a tensor of the model; vectors are not quantized.

    Args:
        shape: The shape of the tensor.
        dtype: Its type where it is not quantized.
        quantize: The format of matrices, if they are quantized.
    """
    if len(shape) != 2 or quantize is None:
        return torch.Size(shape).numel() * dtype.itemsize
    return QUANTIZED[quantize].num_bytes(*shape)
