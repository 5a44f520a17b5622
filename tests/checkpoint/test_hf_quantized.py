"""Hugging Face's quantized weights of several libraries.

compressed-tensors, bitsandbytes and transformers write theirs. Those of AWQ, GPTQ, AutoRound,
Marlin, AutoFP8, modelopt and fbgemm come from packers in this file, whose packed words are compared
with those that the programs have written.
"""

import functools
import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from helpers.checkpoints import shard_of
from helpers.kernels import HAS_KERNELS
from helpers.weights import (
    change_json,
    change_safetensors,
    expect_shards,
    from_hf,
    hf_model,
    loaded,
    metas_state,
)
from llama.checkpoint.find import find
from llama.checkpoint.hf import formats as hf_formats
from llama.checkpoint.hf.coded_matrix import CodedMatrix
from llama.checkpoint.hf.fp4 import fp4, is_fp4
from llama.checkpoint.hf.marlin import marlin as read_marlin
from llama.checkpoint.loader import load
from llama.checkpoint.memory import bytes_of
from llama.checkpoint.packing import pack_model
from llama.checkpoint.reader import CheckpointReader
from llama.checkpoint.verify import verify
from llama.checkpoint.write.convert import convert
from llama.model import Transformer
from llama.model.layers import Matrix
from llama.ranks.parallel import Parallel
from llama.ranks.placement import Placement
from llama.weights.coded import Coded

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
PARAMS = {"dim": 256, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 128}
# AutoAWQ's order: the column offset that each group of four bits stores
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
Tensors = dict[str, Tensor]


def words(codes: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """Pack codes (M, L) into int32 words (M, L * bits / 32), the first code in the lowest bits."""
    if 32 % bits:
        from compressed_tensors.compressors import pack_to_int32

        return pack_to_int32((codes - (1 << bits - 1)).to(torch.int8), bits)
    each = 32 // bits
    some = codes.long().unflatten(1, (-1, each))[..., order or list(range(each))]
    return (some << torch.arange(each) * bits).sum(-1).to(torch.int32)


def draw(shape: Sequence[int], low: int, high: int) -> Tensor:
    return torch.randint(low, high, tuple(shape))


def scales(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.rand(shape) / 100 + 0.001).to(dtype)


def fp8(weight: Tensor, blocks: tuple[int, int]) -> tuple[Tensors, Tensor]:
    """Quantize to fp8, with `blocks` scales along N and K."""
    codes = (weight * 100).to(torch.float8_e4m3fn)
    unit = scales(*blocks)
    n, k = (size // count for size, count in zip(weight.shape, blocks, strict=True))
    whole = unit.float().repeat_interleave(n, 0).repeat_interleave(k, 1)
    shown = unit.view(1) if blocks == (1, 1) else unit
    tensors = {"weight": codes, "weight_scale": shown, "input_scale": torch.ones(1)}
    return tensors, codes.float() * whole


def by_bitsandbytes(weight: Tensor) -> tuple[Tensors, Tensor]:
    from bitsandbytes import functional as library

    q, unit, _ = library.int8_vectorwise_quant(weight.half())
    numbers = q * (unit / 127)[:, None]
    torch.testing.assert_close(numbers, library.int8_vectorwise_dequant(q, unit))
    return {"weight": q, "SCB": unit, "weight_format": torch.zeros((), dtype=torch.uint8)}, numbers


def by_compressed_tensors(weight: Tensor, form: str, **asked: Any) -> tuple[Tensors, Tensor]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args, (n, k) = QuantizationArgs(**asked), weight.shape
    height, width = asked.get("block_structure", (64, 64))
    size = {"group": (1, 64), "channel": (1, k), "tensor": (n, k), "block": (height, width)}
    height, width = size[asked["strategy"]]
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -n % height))
    groups = padded.view(-1, height, k // width, width)
    scale, zero = calculate_qparams(groups.amin((1, 3)), groups.amax((1, 3)), args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    library = BaseCompressor.get_value_from_registry(form)
    scale = scale.bfloat16().float()  # the type in files, so that each product is exact
    plain = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    tensors = library.compress(plain, scheme)
    numbers = library.decompress(tensors, scheme)["weight"]
    return {**tensors, "input_scale": torch.ones(1)}, numbers


def in_fp4(
    weight: Tensor, form: str, of_all: float = 512.0, **asked: Any
) -> tuple[Tensors, Tensor]:
    """Quantize to NVFP4 or MXFP4 as compressed-tensors does.

    Where the scale of all is a power of two, elements are exact in the library's bf16.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(num_bits=4, type="float", symmetric=True, **asked)
    divisor = torch.tensor([of_all]) if form.startswith("nv") else None
    groups = weight.unflatten(1, (-1, asked["group_size"]))
    scale, _ = calculate_qparams(groups.amin(2), groups.amax(2), args, global_scale=divisor)
    plain = {"weight": weight, "weight_scale": scale}
    if divisor is not None:
        plain["weight_global_scale"] = divisor
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    library = BaseCompressor.get_value_from_registry(form)
    tensors = library.compress(plain, scheme)
    numbers = library.decompress(tensors, scheme)["weight"].float()
    return {**tensors, "input_global_scale": torch.ones(1)}, numbers


def in_another_order(weight: Tensor, bits: int, group: int) -> tuple[Tensors, Tensor]:
    (n, k), half = weight.shape, 1 << bits - 1
    q, unit = draw((n, k), -half, half), scales(n, k // group)
    group_of = (torch.arange(k) // group)[torch.randperm(k)]
    tensors = {
        "weight_packed": words(q + half, bits),
        "weight_scale": unit,
        "weight_shape": torch.tensor([n, k]),
        "weight_g_idx": group_of.int(),
    }
    return tensors, q * unit.float()[:, group_of]


def awq(weight: Tensor, group: int = 64) -> tuple[Tensors, Tensor]:
    n, k = weight.shape
    q, zero = draw((n, k), 0, 16), draw((n, k // group), 0, 16)
    unit = scales(k // group, n, dtype=torch.float16)
    tensors = {
        "qweight": words(q.t(), 4, AWQ_ORDER),
        "qzeros": words(zero.t(), 4, AWQ_ORDER),
        "scales": unit,
    }
    groups = torch.arange(k) // group
    return tensors, (q - zero[:, groups]) * unit.float().t()[:, groups]


def awq_gemv(weight: Tensor, group: int) -> tuple[Tensors, Tensor]:
    """Quantize as version gemv, whose rows of scales are padded."""
    n, k = weight.shape
    q, zero = draw((n, k), 0, 16), draw((n, k // group), 0, 16)
    unit = scales(n, k // group, dtype=torch.float16)
    padded = (0, -(k // group) % {128: 8, 64: 16, 32: 32}[group])
    tensors = {
        "qweight": words(q, 4),
        "qzeros": words(torch.nn.functional.pad(zero, padded), 4),
        "scales": torch.nn.functional.pad(unit, padded),
    }
    groups = torch.arange(k) // group
    return tensors, (q - zero[:, groups]) * unit.float()[:, groups]


def gptq(
    weight: Tensor, bits: int = 4, group: int = 64, *, kind: str = "v1", shuffled: bool = False
) -> tuple[Tensors, Tensor]:
    n, k = weight.shape
    q, zero = draw((n, k), 0, 1 << bits), draw((n, k // group), 0, 1 << bits)
    if kind == "sym":
        zero = torch.full_like(zero, 1 << bits - 1)
    unit = scales(k // group, n, dtype=torch.float16)
    group_of = torch.arange(k) // group
    group_of = group_of[torch.randperm(k)] if shuffled else group_of
    stored = words(zero.t(), bits)
    if kind != "v2" and bits == 3:  # GPTQ v1 stores zero points minus one
        stored = words((zero.t() - 1) % 8, bits)
    elif kind != "v2":  # subtracted over the whole word
        stored = stored - sum(1 << i for i in range(0, 32, bits))
    tensors = {
        "qweight": words(q.t().reshape(k, n).t(), bits).t(),
        "qzeros": stored,
        "scales": unit,
        "g_idx": group_of.int(),
    }
    return tensors, (q - zero[:, group_of]) * unit.float().t()[:, group_of]


def nf4(
    weight: Tensor, *, nested: bool, kind: str = "nf4", storage: torch.dtype = torch.uint8
) -> tuple[Tensors, Tensor]:
    from bitsandbytes import functional as library

    codes, state = library.quantize_4bit(
        weight, quant_type=kind, compress_statistics=nested, quant_storage=storage
    )
    extra = {f"weight.{key}": x for key, x in state.as_dict(packed=True).items()}
    return {"weight": codes, **extra}, library.dequantize_4bit(codes, state)


def by_transformers(weight: Tensor, **asked: Any) -> tuple[Tensors, Tensor]:
    """Quantize as FineGrainedFP8 does."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    quantizer = SimpleNamespace(quantization_config=FineGrainedFP8Config(**asked))
    quantize: Any = Fp8Quantize(quantizer)
    dequantize: Any = Fp8Dequantize(quantizer)
    tensors = quantize.convert({"weight": weight})
    numbers = dequantize.convert({name: [tensor] for name, tensor in tensors.items()})["weight"]
    return tensors, numbers.float()


def in_uneven_blocks(weight: Tensor, rows: int, columns: int) -> tuple[Tensors, Tensor]:
    """Return a matrix in FP8 whose last blocks are smaller, as FineGrainedFP8 computes it."""
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    n, k = weight.shape
    unit = scales(-(-n // rows), -(-k // columns), dtype=torch.float32)
    codes = (weight * 100).to(torch.float8_e4m3fn)
    numbers = _dequantize_fp8_weight(codes, unit, [rows, columns], torch.float32)
    return {"weight": codes, "weight_scale_inv": unit}, numbers


def by_gptqmodel(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Quantize to FP8 as GPTQModel does, which stores the inverse of a scale for each row."""
    inverse = 2.0 ** torch.randint(2, 7, (len(weight),))
    codes = (weight * inverse[:, None]).to(torch.float8_e4m3fn)
    numbers = codes.float() / inverse[:, None]
    return {"weight": codes, "weight_scale_inv": inverse}, numbers


def dynamic(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Quantize modules of several shapes in other bits and groups, as GPTQModel's rules ask."""
    bits, group = {512: (8, 32), 256: (4, 64), 128: (2, 128)}[len(weight)]
    return gptq(weight, bits, group)


def in_uneven_groups(weight: Tensor, *, named: bool) -> tuple[Tensors, Tensor]:
    """Return a matrix of GPTQ in groups of 96 columns; the last group is smaller."""
    n, k = weight.shape
    count = -(-k // 96)
    q, zero = draw((n, k), 0, 16), draw((n, count), 0, 16)
    unit = scales(count, n, dtype=torch.float16)
    group_of = torch.arange(k) // 96
    tensors = {
        "qweight": words(q, 4).t(),
        "qzeros": words(zero.t(), 4) - 0x11111111,
        "scales": unit,
        "g_idx": group_of.int(),
    }
    if named:
        del tensors["g_idx"]
    return tensors, (q - zero[:, group_of]) * unit.float().t()[:, group_of]


def by_auto_round(weight: Tensor, kind: str) -> tuple[Tensors, Tensor]:
    tensors, numbers = gptq(weight, kind=kind)
    del tensors["g_idx"]
    return tensors, numbers


def in_tiles(q: Tensor, unit: Tensor) -> Tensors:
    """Pack codes (N, K) from -8 to 7 and scales (N, G) in Marlin's layout."""
    n, k = torch.arange(len(q))[:, None], torch.arange(q.shape[1])
    word = n // 64 * 128 + n % 8 * 16 + k // 2 % 4 * 4 + n // 16 % 4
    shift = k % 2 * 16 + n // 8 % 2 * 8 + k // 8 % 2 * 4
    packed = torch.zeros(q.shape[1] // 16, 2 * len(q), dtype=torch.int64)
    packed.view(-1).index_add_(
        0, (k // 16 * packed.shape[1] + word).flatten(), (q + 8 << shift).flatten()
    )
    place = torch.arange(len(q))
    if unit.shape[1] > 1:
        place = place // 64 * 64 + place % 8 * 8 + place // 8 % 8
    else:
        place = place // 32 * 32 + place // 2 % 4 * 8 + place // 8 % 4 * 2 + place % 2
    stored = torch.empty_like(unit)
    stored[place] = unit
    return {"B": packed.to(torch.int32), "s": stored.t().contiguous()}


def marlin(weight: Tensor, group: int) -> tuple[Tensors, Tensor]:
    n, k = weight.shape
    q, unit = draw((n, k), -8, 8), scales(n, -(-k // group), dtype=torch.float16)
    numbers = q * unit.float()[:, torch.arange(k) // group]
    return {**in_tiles(q, unit), "workspace": torch.zeros(16, dtype=torch.int32)}, numbers


COMPRESSED = {"quant_method": "compressed-tensors"}
FINE_GRAINED = {"quant_method": "fp8", "activation_scheme": "dynamic"}
PACKED = {"form": "pack-quantized", "num_bits": 4, "strategy": "group", "group_size": 64}
NVFP4: dict[str, Any] = {
    "form": "nvfp4-pack-quantized",
    "strategy": "tensor_group",
    "group_size": 16,
}
FLOAT = {"form": "float-quantized", "num_bits": 8, "type": "float"}
BY_COMPRESSED_TENSORS: dict[str, dict[str, Any]] = {
    "fp8": FLOAT | {"strategy": "tensor"},
    "fp8 of rows": FLOAT | {"strategy": "channel"},
    "fp8 of blocks": FLOAT | {"strategy": "block", "block_structure": [64, 64]},
    "fp8 of uneven blocks": FLOAT | {"strategy": "block", "block_structure": [96, 64]},
    "w8a8": {"form": "int-quantized", "num_bits": 8, "strategy": "channel"},
    "w8a16": {"form": "pack-quantized", "num_bits": 8, "strategy": "channel"},
    "w8a8 asym": {
        "form": "int-quantized",
        "num_bits": 8,
        "strategy": "channel",
        "symmetric": False,
    },
    "w8a8 asym of groups": PACKED | {"form": "int-quantized", "num_bits": 8, "symmetric": False},
    "w8a16 asym": {
        "form": "pack-quantized",
        "num_bits": 8,
        "strategy": "channel",
        "symmetric": False,
    },
    "w8a16 asym of groups": PACKED | {"num_bits": 8, "symmetric": False},
    "w4a16": PACKED,
    "w4a16 asym": PACKED | {"symmetric": False},
    **{f"w{bits}a16": PACKED | {"num_bits": bits} for bits in (2, 3, 5, 6, 7)},
    "w3a16 asym": PACKED | {"num_bits": 3, "symmetric": False},
}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    **{
        case: (
            functools.partial(by_compressed_tensors, **asked),
            COMPRESSED | {"config_groups": {"group_0": {"weights": asked}}},
        )
        for case, asked in BY_COMPRESSED_TENSORS.items()
    },
    "nvfp4": (functools.partial(in_fp4, **NVFP4), COMPRESSED),
    "mxfp4": (
        functools.partial(in_fp4, form="mxfp4-pack-quantized", strategy="group", group_size=32),
        COMPRESSED,
    ),
    "fp8 of a tensor": (lambda w: fp8(w, (1, 1)), {"quant_method": "modelopt"}),
    "fp8 of AutoFP8": (
        lambda w: with_scalar(*fp8(w, (1, 1))),
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    ),
    "fp8 of AutoFP8 by rows": (lambda w: fp8(w, (len(w), 1)), FINE_GRAINED),
    "fp8 of transformers": (by_transformers, FINE_GRAINED | {"weight_block_size": [128, 128]}),
    "fp8 of transformers, a tensor": (
        lambda w: by_transformers(w, weight_block_size=None),
        FINE_GRAINED | {"weight_block_size": None},
    ),
    "fp8 of transformers, powers of two": (
        lambda w: by_transformers(w, scale_fmt="ue8m0"),
        FINE_GRAINED | {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    ),
    "fp8 of transformers, bytes": (
        lambda w: in_bytes(*by_transformers(w, scale_fmt="ue8m0")),
        FINE_GRAINED | {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    ),
    "fp8 of transformers, uneven": (
        lambda w: in_uneven_blocks(w, 96, 160),
        FINE_GRAINED | {"weight_block_size": [96, 160]},
    ),
    "fp8 of GPTQModel": (
        by_gptqmodel,
        {"quant_method": "fp8", "weight_scale_method": "row", "weight_scale_semantics": "inverse"},
    ),
    "fp8 of fbgemm": (lambda w: fp8(w, (len(w), 1)), {"quant_method": "fbgemm_fp8"}),
    "bnb int8": (by_bitsandbytes, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "w4a16 act-order": (lambda w: in_another_order(w, 4, 64), COMPRESSED),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    **{
        f"awq gemv of {group}": (
            functools.partial(awq_gemv, group=group),
            {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemv"},
        )
        for group in (32, 64, 128)
    },
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4}),
    "gptq 3 bits": (lambda w: gptq(w, 3), {"quant_method": "gptq", "bits": 3}),
    "gptq 3 bits v2": (
        lambda w: gptq(w, 3, kind="v2"),
        {"quant_method": "gptq", "bits": 3, "checkpoint_format": "gptq_v2"},
    ),
    "gptq sym": (lambda w: gptq(w, kind="sym"), {"quant_method": "gptq", "bits": 4, "sym": True}),
    "gptq 8 bits": (lambda w: gptq(w, 8), {"quant_method": "gptq", "bits": 8}),
    "gptq v2 act-order": (
        lambda w: gptq(w, kind="v2", shuffled=True),
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    ),
    "nf4": (lambda w: nf4(w, nested=False), {"quant_method": "bitsandbytes"}),
    "nf4 nested": (lambda w: nf4(w, nested=True), {"quant_method": "bitsandbytes"}),
    **{
        f"{kind} in {storage}": (
            functools.partial(nf4, nested=nested, kind=kind, storage=storage),
            {"load_in_4bit": True},  # as older versions write it
        )
        for kind, nested, storage in (
            ("nf4", True, torch.bfloat16),
            ("nf4", False, torch.float32),
            ("fp4", True, torch.float16),
            ("fp4", False, torch.uint8),
            ("fp4", False, torch.int8),
        )
    },
    "gptq dynamic": (
        dynamic,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 64,
            "dynamic": {
                r"+:.*\.(gate|up)_proj": {"bits": 8, "group_size": 32},
                r".*\.[kv]_proj": {"bits": 2, "group_size": 128},
                r"-:lm_head": {},
            },
        },
    ),
    "gptq in uneven groups": (
        lambda w: in_uneven_groups(w, named=False),
        {"quant_method": "gptq", "bits": 4, "group_size": 96},
    ),
    "gptq in uneven groups, named": (
        lambda w: in_uneven_groups(w, named=True),
        {"quant_method": "gptq", "bits": 4, "group_size": 96},
    ),
    "auto-round": (
        lambda w: by_auto_round(w, "v1"),
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4},
    ),
    "auto-round, whole zero points": (
        lambda w: by_auto_round(w, "v2"),
        {"quant_method": "auto-round", "packing_format": "auto_round", "bits": 4},
    ),
    "auto-round, by its older name": (
        lambda w: by_auto_round(w, "v1"),
        {"quant_method": "intel/auto-round", "backend": "auto_round:gptq:exllamav2", "bits": 4},
    ),
    "auto-round, whole zero points by its older name": (
        lambda w: by_auto_round(w, "v2"),
        {"quant_method": "intel/auto-round", "backend": "auto_round:exllamav2", "bits": 4},
    ),
    "auto-round awq": (
        awq,
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4},
    ),
    "marlin": (
        lambda w: marlin(w, 128),
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
    ),
    "marlin, a scale for each row": (
        lambda w: marlin(w, 4096),
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "is_marlin_format": True},
    ),
}
EIGHT_BITS = {x for x in CASES if x.startswith(("fp8", "w8", "w7"))} | {
    "bnb int8",
    "gptq 8 bits",
    "gptq dynamic",
}
IN_FLOATS = {"w4a16 act-order", "gptq v2 act-order"}  # act-order groups are not contiguous


def with_scalar(tensors: Tensors, numbers: Tensor) -> tuple[Tensors, Tensor]:
    return {name: x if name == "weight" else x.view(()) for name, x in tensors.items()}, numbers


def in_bytes(tensors: Tensors, numbers: Tensor) -> tuple[Tensors, Tensor]:
    unit = tensors["weight_scale_inv"].view(torch.uint8)
    return tensors | {"weight_scale_inv": unit}, numbers


def write(folder: Path, case: str) -> Tensors:
    """Write a model in a quantized format; return its values under Meta's names."""
    quantize, config = CASES[case]
    model, tensors = hf_model(**SIZES), {}
    for name, weight in model.state_dict().items():
        module = name.removesuffix(".weight")
        tensors[name] = weight
        if module.endswith("_proj"):
            del tensors[name]
            parts, numbers = quantize(weight)
            tensors |= {f"{module}.{own}": x.contiguous() for own, x in parts.items()}
            weight.copy_(numbers)
    model.config.save_pretrained(folder)
    change_json(folder / "config.json", quantization_config=config)
    save_file(tensors, folder / "model.safetensors")
    return metas_state(model)


def test_words_are_those_that_the_libraries_write():
    codes = torch.arange(8)[None]
    assert [hex(words(codes, 4, order)) for order in (None, AWQ_ORDER)] == [
        "0x76543210",
        "0x75316420",
    ]
    half = torch.full((1, 8), 8)  # the zero point of GPTQ's symmetric files
    assert hex(words(half, 4) - 0x11111111 & 0xFFFFFFFF) == "0x77777777"


def int32(rows: str) -> Tensor:
    """Parse words of eight hexadecimal digits, one row per line."""
    words = [[int(word, 16) for word in row.split()] for row in rows.splitlines()]
    return torch.tensor(words).to(torch.int32)


def test_words_that_autoawq_has_packed():
    """The AWQ packer writes the words of AutoAWQ 0.2.9, which needs another version of torch.

    The codes are (5 n + 3 k) % 16 and the zero points (7 n + 2 g) % 16.
    """
    n, k = torch.arange(8)[:, None], torch.arange(4)
    parts = {
        "qweight": int32("39f5e4a0\n6c2817d3\n9f5b4a06\nc28e7d39"),
        "qzeros": int32("1357ace0\n3579ce02"),
        "scales": torch.full((2, 8), 0.5).half(),
    }
    of = hf_formats.awq(parts, {"bits": 4, "version": "gemm"})
    numbers = of.read(slice(0, 8), slice(0, 4), torch.device("cpu")).plain()
    assert torch.equal(numbers, ((5 * n + 3 * k) % 16 - (7 * n + 2 * (k // 2)) % 16) * 0.5)


@pytest.mark.parametrize(
    ("bits", "qweight", "v1", "v2"),
    [
        (
            4,
            "52fc9630 a741eb85 fc9630da 41eb852f 9630da74 eb852fc9 30da741e 852fc963\n"
            "da741eb8 2fc9630d 741eb852 c9630da7 1eb852fc 630da741 b852fc96 0da741eb",
            "4c5d6e70\n6e708192",
            "5d6e7f81\n7f8192a3",
        ),
        (
            8,
            "09060300 0e0b0805 13100d0a 1815120f\n15120f0c 1a171411 1f1c1916 24211e1b",
            "150e0700\n17100902",
            "160f0801\n18110a03",
        ),
    ],
)
def test_words_that_gptqmodel_has_packed(bits, qweight, v1, v2):
    """The GPTQ packer writes the words of GPTQModel 7.7.0.

    The codes are (5 n + 3 k) % 2**bits and the zero points 1 + (7 n + 2 g) % (2**bits - 1).
    """
    each, most = 32 // bits, 2**bits
    n, k = torch.arange(each)[:, None], torch.arange(2 * each)
    zero = 1 + (7 * n + 2 * (k // each)) % (most - 1)
    for version, qzeros in (("gptq", v1), ("gptq_v2", v2)):
        parts = {
            "qweight": int32(qweight),
            "qzeros": int32(qzeros),
            "scales": torch.full((2, each), 0.5).half(),
        }
        of = hf_formats.gptq(parts, {"bits": bits, "checkpoint_format": version})
        numbers = of.read(slice(0, each), slice(0, 2 * each), torch.device("cpu")).plain()
        assert torch.equal(numbers, ((5 * n + 3 * k) % most - zero) * 0.5)


@pytest.mark.parametrize(
    ("version", "qzeros"),
    [
        ("gptq", "57873157 31578731 87315787\ne1cc55e1 55e1cc55 cc55e1cc"),
        ("gptq_v2", "98abc398 c398abc3 abc398ab\n2af0e62a e62af0e6 f0e62af0"),
    ],
)
def test_words_that_gptqmodel_has_packed_in_three_bits(version, qzeros):
    """The packer writes the words of GPTQModel 7.7.0, by the SHA-256 of the codes.

    The codes are (5 n + 3 k) % 8 and the zero points (3 n + 2 g) % 8.
    """
    n, k = torch.arange(32)[:, None], torch.arange(64)
    codes, zero = (5 * n + 3 * k) % 8, (3 * n + 2 * (k // 32)) % 8
    qweight = words(codes, 3).t().contiguous()
    digest = hashlib.sha256(qweight.numpy().tobytes()).hexdigest()
    assert digest == "c330cd4c9e6f67c9d1f71c217b1e4ac1653817a90c8a65fb5b2dd8f0bb2df48e"
    parts = {
        "qweight": qweight,
        "qzeros": int32(qzeros),
        "scales": torch.full((2, 32), 0.5).half(),
    }
    of = hf_formats.gptq(parts, {"bits": 3, "checkpoint_format": version})
    numbers = of.read(slice(0, 32), slice(0, 64), torch.device("cpu")).plain()
    assert torch.equal(numbers, (codes - zero) * 0.5)


def test_words_that_autoawq_has_packed_for_gemv():
    """AutoAWQ 0.2.9's words, with codes and zero points as in the test of gemm, in groups of 32."""
    n, k = torch.arange(8)[:, None], torch.arange(64)
    rows = "52fc9630 da741eb8\na741eb85 2fc9630d\nfc9630da 741eb852\n41eb852f c9630da7\n"
    rows += "9630da74 1eb852fc\neb852fc9 630da741\n30da741e b852fc96\n852fc963 0da741eb"
    parts = {
        "qweight": int32(rows).repeat(1, 4),
        "qzeros": torch.nn.functional.pad(int32("20\n97\ne\n75\nec\n53\nca\n31"), (0, 3)),
        "scales": torch.nn.functional.pad(torch.full((8, 2), 0.5), (0, 30)).half(),
    }
    of = hf_formats.awq_gemv(parts, {"version": "gemv", "group_size": 32})
    numbers = of.read(slice(0, 8), slice(0, 64), torch.device("cpu")).plain()
    assert torch.equal(numbers, ((5 * n + 3 * k) % 16 - (7 * n + 2 * (k // 32)) % 16) * 0.5)


@pytest.mark.parametrize(
    ("packing_format", "qzeros"),
    [
        (
            "auto_round:auto_gptq",
            "4c5d6e70 08192a3b b4c5d6e7 708192a3\n6e708192 2a3b4c5d d6e70819 92a3b4c5",
        ),
        ("auto_round", "5d6e7f81 192a3b4c c5d6e7f8 8192a3b4\n7f8192a3 3b4c5d6e e7f8192a a3b4c5d6"),
    ],
)
def test_words_that_autoround_has_packed(packing_format, qzeros):
    """The packers write the words of AutoRound 0.16.1, of which one keeps zero points whole.

    Codes and zero points are those of the test of GPTQModel, in 32 rows and columns.
    """
    n, k = torch.arange(32)[:, None], torch.arange(32)
    codes = (5 * n + 3 * k) % 16
    zero = 1 + (7 * n + 2 * (k // 16)) % 15
    packed = words(codes, 4).t()
    assert torch.equal(packed[:, :2], int32("52fc9630 a741eb85\nda741eb8 2fc9630d").repeat(2, 1))
    parts = {"qweight": packed, "qzeros": int32(qzeros), "scales": torch.full((2, 32), 0.5).half()}
    config = {"quant_method": "auto-round", "packing_format": packing_format}
    numbers = hf_formats.gptq(parts, config).read(slice(0, 32), slice(0, 32), torch.device("cpu"))
    assert torch.equal(numbers.plain(), (codes - zero) * 0.5)


@pytest.mark.parametrize(
    ("groups", "of_scales"),
    [
        (1, "f1946a0692ecc0faf5d509c22d66d79fc32b323c87f10deb59d249ec32e72690"),
        (2, "66ec792f5431784766d8bc4fdcf55b65230d3e04729cde042fa16c8b12e97f11"),
    ],
)
def test_bytes_that_autogptq_has_packed_for_marlin(groups, of_scales):
    """The packer writes the bytes of AutoGPTQ 0.7.1, by their SHA-256."""
    n, k = torch.arange(128)[:, None], torch.arange(32)
    codes = (5 * n + 3 * k + n // 16 + 7 * (k // 8)) % 16 - 8
    unit = ((1 + n + 2 * torch.arange(groups)) / 4).half()
    parts = in_tiles(codes, unit)
    digests = [hashlib.sha256(parts[name].numpy().tobytes()).hexdigest() for name in ("B", "s")]
    assert digests == [
        "c40f022d071b72f29fa6b843eac7384e23cd766b46fdedd6467af4dc8bcac888",
        of_scales,
    ]
    matrix = read_marlin(parts, {"group_size": 32 // groups})
    numbers = matrix.read(slice(0, 128), slice(0, 32), torch.device("cpu")).plain()
    assert torch.equal(numbers, codes * unit.float().repeat_interleave(32 // groups, 1))


def test_bytes_of_fp8_that_gptqmodel_has_packed():
    """GPTQModel 7.7.0 calls the stored factor the inverse of the scale, and divides by it."""
    n, k = torch.arange(4)[:, None], torch.arange(8)
    packed = [
        [254, 249, 238, 102, 118, 124, 250, 242],
        [244, 0, 116, 124, 254, 248, 232, 112],
        [110, 121, 254, 249, 238, 102, 118, 124],
        [126, 252, 244, 0, 116, 124, 254, 248],
    ]
    parts = {
        "weight": torch.tensor(packed, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "weight_scale_inv": torch.tensor([56.0, 32.0, 56 / 3, 16.0]),
    }
    config = {"quant_method": "fp8", "weight_scale_semantics": "inverse"}
    numbers = hf_formats.eight_bits(parts, config).read(
        slice(0, 4), slice(0, 8), torch.device("cpu")
    )
    expected = ((5 * n + 3 * k) % 16 - 8) * (1.0 + n)
    torch.testing.assert_close(numbers.plain(), expected, rtol=2**-4, atol=0)


def test_elements_of_nvfp4_are_those_of_compressed_tensors():
    """The scale of all is any number: the products are equal once they are rounded to bf16."""
    parts, numbers = in_fp4(torch.randn(64, 256), of_all=1234.5, **NVFP4)
    del parts["input_global_scale"]
    read = fp4(parts, {}).read(slice(0, 64), slice(0, 256), torch.device("cpu"))
    assert torch.equal(read.plain().bfloat16().float(), numbers)


def test_bytes_of_nvfp4_that_modelopt_has_packed():
    """ModelOpt 0.47.0 multiplies by the scale of all. The elements are (5 n + 3 k) % 16."""
    packed = [
        [48, 150, 252, 82, 176, 30, 116, 218],
        [5, 235, 65, 167, 13, 99, 201, 47],
    ]
    parts = {
        "weight": torch.tensor(packed, dtype=torch.uint8),
        "weight_scale": torch.tensor([[126], [112]], dtype=torch.uint8).view(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(2.0**-8),
    }
    assert is_fp4(parts)
    elements = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([elements, -elements])
    n, k = torch.arange(2)[:, None], torch.arange(16)
    read = fp4(parts, {}).read(slice(0, 2), slice(0, 16), torch.device("cpu"))
    assert torch.equal(read.plain(), table[(5 * n + 3 * k) % 16] * torch.tensor([[1.75], [0.5]]))


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_those_of_compressed_tensors(bits):
    from compressed_tensors.compressors import pack_to_int32

    half = 1 << bits - 1
    q = draw((16, 64), -half, half)
    for dim, codes in ((1, words(q + half, bits)), (0, words((q + half).t(), bits).t())):
        assert torch.equal(pack_to_int32(q.to(torch.int8), bits, packed_dim=dim), codes)


@pytest.mark.parametrize("case", CASES)
def test_each_rank_holds_its_slices_of_what_the_files_stand_for(tmp_path, case):
    """Each rank loads its slices of the matrices: exactly in float32, and as codes on the CPU."""
    state = write(tmp_path, case)
    found = find(tmp_path)
    for rank, size in ((0, 1), (1, 2), (3, 4), (2, 3)):
        expect_shards(loaded(found, rank, size), state, PARAMS)
    assert verify(tmp_path)
    if not HAS_KERNELS:
        return
    found = replace(found, in_codes=True)
    for rank, size in ((0, 1), (1, 2), (2, 3)):
        parallel = Parallel(Placement(rank=rank, size=size))
        model = Transformer(found.params, parallel=parallel, dtype=torch.bfloat16)
        load(found, model, filled=partial(pack_model, model))
        held = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
        assert held == bytes_of(
            found, parallel.placement, torch.bfloat16, None, torch.device("cpu")
        )
        kinds = set()
        for layer in model.blocks():
            for module in layer.modules():
                if isinstance(module, Matrix):
                    shares = [shard_of(x, state[x], PARAMS, rank, size) for x in module.names]
                    numbers = torch.cat(shares)
                    torch.testing.assert_close(
                        module.weight.plain(), numbers.bfloat16(), rtol=2**-7, atol=0
                    )
                    kinds.add(type(module.weight).__name__)
        expected = {"Fp8Weight", "BytesWeight"} if case in EIGHT_BITS else {"NibblesWeight"}
        if case.startswith(("w5", "w6")):
            expected = {"SixBitsWeight"}
        if case == "gptq dynamic":  # q with k and v: 4 and 2 bits, joined
            expected |= {"SixBitsWeight", "NibblesWeight"}
        assert kinds <= ({"BlockedWeight"} if case in IN_FLOATS else expected)


def test_the_file_of_modelopt_stands_for_the_key_of_config_json(tmp_path):
    state = write(tmp_path, "fp8 of a tensor")
    change_json(tmp_path / "config.json", quantization_config=None)
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    expect_shards(loaded(find(tmp_path)), state, PARAMS)


def test_a_quantized_folder_is_converted(tmp_path):
    state = write(tmp_path / "hf", "awq")
    convert(tmp_path / "hf", tmp_path / "meta")
    rounded = {
        name: x.bfloat16() if re.search(r"\.w[qkvo123]\.", name) else x for name, x in state.items()
    }
    expect_shards(loaded(find(tmp_path / "meta")), rounded, PARAMS)


@pytest.mark.parametrize(
    ("own", "tensor", "message"),
    [
        ("qzeros", None, r"layers\.1\.mlp\.down_proj has g_idx, qweight, scales, which cannot be"),
        ("scales", torch.ones(8, 3).half(), "cannot be read as 'gptq': 'its tensors do not fit"),
        ("scales", torch.ones(0, 256).half(), "cannot be read as 'gptq': 'its tensors do not fit"),
        ("qzeros", torch.ones(3, 3, dtype=torch.int32), "its tensors do not fit one another"),
        ("g_idx", torch.full((512,), 99, dtype=torch.int32), "its tensors do not fit one another"),
        (
            "bias",
            torch.eye(256)[3],
            "has bias, g_idx, qweight, qzeros, scales, which cannot be read",
        ),
        ("scales", torch.full((8, 256), torch.nan).half(), r"of layers\.1\.feed.*w2.* not finite"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, own, tensor, message):
    write(tmp_path, "gptq")
    change_safetensors(tmp_path, f"model.layers.1.mlp.down_proj.{own}", tensor)
    with pytest.raises(ValueError, match=rf"model\.safetensors.*{message}"):
        loaded(find(tmp_path))


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        (
            "fp8 of rows",
            [
                {"weight": torch.ones(512, 256).to(torch.float8_e5m2)},
                {"weight": torch.ones(512, 256, dtype=torch.uint8)},
                {"weight_scale": torch.full((512, 8), 127, dtype=torch.uint8)},  # MXFP8
            ],
        ),
        ("fp8 of transformers, bytes", [{"scale_fmt": "e5m3"}, {"scale_fmt": None}]),
        # a tile layout for GPUs
        ("bnb int8", [{"weight_format": torch.tensor(2, dtype=torch.uint8)}]),
        (
            "nf4 nested",
            [
                {"weight.quant_map": torch.ones(8)},
                {"weight.nested_quant_map": torch.ones(16)},
                {"weight.nested_absmax": torch.ones(7)},
                {"weight.nested_absmax": None},
            ],
        ),
        (
            "gptq",
            [
                {"qzeros": torch.ones(4, 64).half()},
                {"qweight": torch.ones(32, 512).half()},
                {"g_idx": torch.zeros(256, dtype=torch.bool)},
                {"checkpoint_format": "gptq_p"},
            ],
        ),
        ("nvfp4", [{"weight_global_scale": None}, {"weight_global_scale": torch.ones(2)}]),
        ("w4a16", [{"weight_shape": torch.tensor([512, 255])}, {"weight_shape": None}]),
    ],
)
def test_numbers_of_another_kind_are_refused_and_not_taken_for_those_that_are_known(
    tmp_path, case, changes
):
    state = write(tmp_path, case)
    config, content = CASES[case][1], (tmp_path / "model.safetensors").read_bytes()
    for change in changes:
        for own, tensor in change.items():
            if own in ("checkpoint_format", "scale_fmt"):
                change_json(tmp_path / "config.json", quantization_config=config | change)
            else:
                change_safetensors(tmp_path, f"model.layers.0.mlp.up_proj.{own}", tensor)
        with pytest.raises(ValueError, match=r"model\.safetensors: model\..*_proj has .*cannot be"):
            CheckpointReader(find(tmp_path))
        (tmp_path / "model.safetensors").write_bytes(content)
    if case == "gptq":  # a file without a version is taken as version 1
        config = config | {"checkpoint_format": None}
        change_json(tmp_path / "config.json", quantization_config=config)
        expect_shards(loaded(find(tmp_path)), state, PARAMS)


def test_a_code_of_fp8_that_is_no_number_is_named(tmp_path):
    write(tmp_path, "fp8 of rows")
    name = "model.layers.0.mlp.up_proj.weight"
    weight = torch.ones(512, 256).to(torch.float8_e4m3fn)
    weight[511, 255] = torch.nan
    change_safetensors(tmp_path, name, weight)
    with pytest.raises(ValueError, match=r"w3\.weight that is not finite"):
        loaded(find(tmp_path))


@pytest.mark.parametrize("config", [{"quant_method": "quip"}, {"bits": 4}, "awq", []])
def test_other_methods_are_refused_by_name(tmp_path, config):
    hf_model().save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", quantization_config=config)
    with pytest.raises(ValueError, match=r"config\.json: quantization_config is of .*, and .* awq"):
        find(tmp_path)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("gptq", {"rotation": "hadamard"}),
        ("gptq", {"adapter": {"name": "lora", "path": "eora", "rank": 8}}),
        ("auto-round", {"rotation_config": {"hadamard_type": "random_hadamard"}}),
        ("auto-round", {"spinquant_config": {"r1": True}}),
        ("w4a16", {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}),
        ("w4a16", {"sparsity_config": {"format": "sparse-24-bitmask"}}),
        ("fp8 of GPTQModel", {"weight_scale_semantics": "direct"}),
    ],
)
def test_a_key_that_changes_the_model_is_an_error(tmp_path, case, changes):
    write(tmp_path, case)
    change_json(tmp_path / "config.json", quantization_config=CASES[case][1] | changes)
    (key,) = changes
    with pytest.raises(ValueError, match=rf"config\.json: quantization_config: {key} .*: get the"):
        find(tmp_path)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("gptq", {"rotation": None, "adapter": {}, "sym": True, "damp_percent": 0.1}),
        ("auto-round", {"rotation_config": {}, "iters": 200, "extra_config": {}}),
        ("w4a16", {"transform_config": {"config_groups": {}}, "sparsity_config": {}}),
        ("w4a16", {"sparsity_config": {"format": "dense", "global_sparsity": 0.1}}),
        ("fp8 of transformers", {"fmt": "e4m3fn", "scale_fmt": "float", "dequantize": False}),
    ],
)
def test_neutral_values_of_such_keys_are_no_error(tmp_path, case, changes):
    state = write(tmp_path, case)
    change_json(tmp_path / "config.json", quantization_config=CASES[case][1] | changes)
    expect_shards(loaded(find(tmp_path)), state, PARAMS)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("gptq", {"checkpoint_format": "gptq_p"}, "is 'gptq_p', and gptq, gptq_v2 are.*gptqmodel:"),
        ("awq", {"version": "gemv_fast"}, "it is 'gemv_fast', and gemm and gemv of 4 bits"),
        ("awq", {"backend": "llm-awq"}, "it is 'llm-awq', and gemm and gemv of 4 bits are read"),
        (
            "auto-round",
            {"packing_format": "auto_round:llm_compressor"},
            "packing_format is 'auto_round:llm_compressor', and auto_round:auto_gptq",
        ),
    ],
)
def test_another_variant_is_named_with_what_to_take(tmp_path, case, changes, message):
    write(tmp_path, case)
    change_json(tmp_path / "config.json", quantization_config=CASES[case][1] | changes)
    with pytest.raises(ValueError, match=message) as raised:
        CheckpointReader(find(tmp_path))
    assert re.search("; take the model in .* or GGUF", str(raised.value))


def test_gptq_in_five_bits_is_named_with_what_to_take(tmp_path):
    write(tmp_path, "gptq")
    name = "model.layers.1.mlp.down_proj"
    for own, shape in {"qweight": (80, 256), "qzeros": (8, 40)}.items():
        change_safetensors(tmp_path, f"{name}.{own}", draw(shape, 0, 99).int())
    message = r"it has 5 bits, and 2, 3, 4 and 8 are read; take .* or GGUF, or dequantize it with"
    with pytest.raises(ValueError, match=message):
        CheckpointReader(find(tmp_path))


def test_what_files_say_of_the_cache_and_of_single_modules_is_read(tmp_path):
    """Settings for the KV cache and for single modules are read.

    Scales of the KV cache stand alongside the matrices, and the number of bits may differ between
    modules.
    """
    state, names = write(tmp_path, "w4a16"), ("q_scale", "kv_scale", "v_scale", "k_zero_point")
    for own in names:
        change_safetensors(tmp_path, f"model.layers.0.self_attn.{own}", torch.ones(1))
    asked = BY_COMPRESSED_TENSORS["w8a16"]
    parts, numbers = by_compressed_tensors(torch.randn(256, 512), **asked)
    for own, tensor in parts.items():
        change_safetensors(tmp_path, f"model.layers.1.mlp.down_proj.{own}", tensor)
    state["layers.1.feed_forward.w2.weight"] = numbers
    expect_shards(loaded(find(tmp_path)), state, PARAMS)


def test_a_bias_of_zeros_changes_nothing(tmp_path):
    state = write(tmp_path, "gptq")
    change_safetensors(tmp_path, "model.layers.1.mlp.down_proj.bias", torch.zeros(256).half())
    expect_shards(loaded(find(tmp_path)), state, PARAMS)


def test_another_order_of_columns_needs_its_tensor(tmp_path):
    write(tmp_path, "auto-round")
    config = CASES["auto-round"][1] | {"desc_act": True}
    change_json(tmp_path / "config.json", quantization_config=config)
    with pytest.raises(ValueError, match=r"has qweight, qzeros, scales, which .* do not fit"):
        CheckpointReader(find(tmp_path))


def test_a_quantized_embedding_may_be_the_lm_head(tmp_path):
    write(tmp_path, "fp8 of transformers")
    tensors, numbers = fp8(torch.randn(128, 256), (1, 1))
    change_json(tmp_path / "config.json", tie_word_embeddings=True)
    for own in ("weight", "weight_scale"):
        change_safetensors(tmp_path, f"model.embed_tokens.{own}", tensors[own])
    change_safetensors(tmp_path, "lm_head.weight", None)
    found = find(tmp_path)
    assert found.params.tied_output
    for rank, size in ((0, 1), (1, 2)):
        model = loaded(found, rank, size)
        shard = shard_of("output.weight", numbers, PARAMS, rank, size)
        assert torch.equal(model.output.weight.plain(), shard)


def test_modules_that_are_not_quantized_stay_as_they_are(tmp_path):
    """The tensors tell it, whatever the lists of names and rules say."""
    state = write(tmp_path, "gptq dynamic")
    name = "model.layers.1.mlp.up_proj"
    for own in ("qweight", "qzeros", "scales", "g_idx"):
        change_safetensors(tmp_path, f"{name}.{own}", None)
    plain = torch.randn(512, 256)
    change_safetensors(tmp_path, f"{name}.weight", plain)
    state["layers.1.feed_forward.w3.weight"] = plain
    for rank, size in ((0, 1), (1, 2)):
        expect_shards(loaded(find(tmp_path), rank, size), state, PARAMS)


@pytest.mark.parametrize("name", ["model.embed_tokens", "lm_head"])
def test_both_ends_of_the_model_may_be_quantized(tmp_path, name):
    state = write(tmp_path, "fp8 of transformers, a tensor")
    tensors, numbers = fp8(torch.randn(128, 256), (1, 1))
    for own in ("weight", "weight_scale"):
        change_safetensors(tmp_path, f"{name}.{own}", tensors[own])
    meta = "output.weight" if name == "lm_head" else "tok_embeddings.weight"
    state[meta] = numbers
    for rank, size in ((0, 1), (1, 2)):
        expect_shards(loaded(find(tmp_path), rank, size), state, PARAMS)


@pytest.mark.parametrize("case", ["fp8 of transformers", "fp8 of transformers, powers of two"])
def test_folders_are_what_transformers_loads(tmp_path, case):
    write(tmp_path, case)
    change_json(tmp_path / "config.json", torch_dtype="float32")
    expected = metas_state(from_hf(tmp_path))
    for rank, size in ((0, 1), (2, 3)):
        expect_shards(loaded(find(tmp_path), rank, size), expected, PARAMS)


@pytest.mark.parametrize("case", ["w4a16 asym", "awq", "gptq", "nf4 nested"])
def test_a_rank_unpacks_its_share_alone(tmp_path, case, monkeypatch):
    write(tmp_path, case)
    seen, read = [0], CodedMatrix.read

    def read_and_count(of: Any, rows: slice, columns: slice, device: torch.device) -> Coded:
        coded = read(of, rows, columns, device)
        seen[0] += coded.codes.numel()
        return coded

    monkeypatch.setattr(CodedMatrix, "read", read_and_count)
    loaded(find(tmp_path))
    whole, seen[0] = seen[0], 0
    loaded(find(tmp_path), 1, 2)
    assert seen[0] == whole // 2


def test_whatever_a_header_says_is_read_or_refused_with_the_files_name(tmp_path):
    """A damaged header is read or refused with an error that names the file.

    Some bytes are changed, among them those of shapes, dtypes and offsets.
    """
    write(tmp_path, "nf4 nested")
    path, draw, refused = tmp_path / "model.safetensors", random.Random(0), 0
    good = path.read_bytes()
    length = 8 + int.from_bytes(good[:8], "little")
    for _ in range(120):
        data = bytearray(good[:length])
        for _ in range(draw.choice((1, 2, 8))):
            data[draw.randrange(length)] = draw.choice((0, 0x7F, 0xFF, *b"0123456789[]{},:"))
        path.write_bytes(data + good[length:])
        try:
            CheckpointReader(find(tmp_path))
        except (ValueError, OSError) as e:
            refused += 1
            assert str(tmp_path) in str(e) and len(str(e)) < 2000, e
    assert refused > 60
