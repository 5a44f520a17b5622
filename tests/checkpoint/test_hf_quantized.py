"""Hugging Face's quantized weights, written by the formats' own libraries where they are installed,
else by packers of this file, whose words are compared with known ones."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
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
    hf_model,
    loaded,
    metas_state,
)
from llama.checkpoint.convert import convert
from llama.checkpoint.find import find
from llama.checkpoint.reader import CheckpointReader, bytes_of, load
from llama.model import Transformer
from llama.model.layers import Matrix
from llama.ranks.collectives import ModelParallel

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
PARAMS = {"dim": 256, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 128}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ's: the neighbour that each four bits hold
NF4 = torch.linspace(-1, 1, 16) ** 3  # some table: the file has it
Tensors = dict[str, Tensor]


def words(codes: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """(M, L) codes -> (M, L * bits / 32) int32, the first in the lowest bits."""
    each = 32 // bits
    some = codes.long().unflatten(1, (-1, each))[..., order or list(range(each))]
    return (some << torch.arange(each) * bits).sum(-1).to(torch.int32)


def draw(shape: Sequence[int], low: int, high: int) -> Tensor:
    return torch.randint(low, high, tuple(shape))


def scales(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.rand(shape) / 100 + 0.001).to(dtype)


def fp8(weight: Tensor, blocks: tuple[int, int]) -> tuple[Tensors, Tensor]:
    """blocks: how many scales along N and K."""
    codes = (weight * 100).to(torch.float8_e4m3fn)
    unit = scales(*blocks)
    n, k = (size // count for size, count in zip(weight.shape, blocks, strict=True))
    whole = unit.float().repeat_interleave(n, 0).repeat_interleave(k, 1)
    shown = unit.view(1) if blocks == (1, 1) else unit
    tensors = {"weight": codes, "weight_scale": shown, "input_scale": torch.ones(1)}
    return tensors, codes.float() * whole


def int8(weight: Tensor) -> tuple[Tensors, Tensor]:
    q, unit = draw(weight.shape, -128, 128), scales(len(weight), 1)
    return {"weight": q.to(torch.int8), "weight_scale": unit}, q * unit.float()


def bnb_int8(weight: Tensor) -> tuple[Tensors, Tensor]:
    q, unit = draw(weight.shape, -128, 128), scales(len(weight), dtype=torch.float32)
    tensors = {
        "weight": q.to(torch.int8),
        "SCB": unit,
        "weight_format": torch.zeros((), dtype=torch.uint8),
    }
    return tensors, q * (unit / 127)[:, None]


def packed(
    weight: Tensor, bits: int, group: int, *, symmetric: bool = True, shuffled: bool = False
) -> tuple[Tensors, Tensor]:
    (n, k), half = weight.shape, 1 << bits - 1
    q, unit = draw((n, k), -half, half), scales(n, k // group)
    tensors = {
        "weight_packed": words(q + half, bits),
        "weight_scale": unit,
        "weight_shape": torch.tensor([n, k]),
    }
    zero, group_of = torch.zeros(n, k // group), torch.arange(k) // group
    if not symmetric:
        zero = draw((n, k // group), -half, half)
        tensors["weight_zero_point"] = words((zero + half).t(), bits).t()
    if shuffled:
        group_of = group_of[torch.randperm(k)]
        tensors["weight_g_idx"] = group_of.int()
    return tensors, (q - zero[:, group_of]) * unit.float()[:, group_of]


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
    if kind != "v2":  # GPTQ's own way: one is taken from each, over the whole word
        stored = stored - sum(1 << i for i in range(0, 32, bits))
    tensors = {
        "qweight": words(q.t().reshape(k, n).t(), bits).t(),
        "qzeros": stored,
        "scales": unit,
        "g_idx": group_of.int(),
    }
    return tensors, (q - zero[:, group_of]) * unit.float().t()[:, group_of]


def nf4(weight: Tensor, *, nested: bool) -> tuple[Tensors, Tensor]:
    (n, k), table, absmax = (
        weight.shape,
        NF4.clone(),
        scales(weight.numel() // 64, dtype=torch.float32),
    )
    q, state = draw((n, k), 0, 16), {"quant_type": "nf4", "blocksize": 64, "shape": [n, k]}
    tensors = {
        "weight": (q[:, ::2] << 4 | q[:, 1::2]).byte().view(-1, 1),
        "weight.absmax": absmax,
        "weight.quant_map": table,
    }
    if nested:
        state |= {"nested_blocksize": 256, "nested_offset": 0.25}
        codes, numbers = draw((len(absmax),), 0, 256), torch.randn(256)
        unit = scales(-(-len(absmax) // 256), dtype=torch.float32)
        absmax = numbers[codes] * unit.repeat_interleave(256)[: len(codes)] + 0.25
        tensors |= {
            "weight.absmax": codes.byte(),
            "weight.nested_quant_map": numbers,
            "weight.nested_absmax": unit,
        }
    state_bytes = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors["weight.quant_state.bitsandbytes__nf4"] = state_bytes
    return tensors, table[q] * absmax.repeat_interleave(64).view(n, k)


def nf4_of_the_library(weight: Tensor) -> tuple[Tensors, Tensor]:
    library = pytest.importorskip("bitsandbytes").functional
    codes, state = library.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    extra = {f"weight.{key}": x for key, x in state.as_dict(packed=True).items()}
    return {"weight": codes, **extra}, library.dequantize_4bit(codes, state)


def compressed(bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "group_size": 64}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
    }


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "fp8 of a tensor": (lambda w: fp8(w, (1, 1)), {"quant_method": "modelopt"}),
    "fp8 of rows": (lambda w: fp8(w, (len(w), 1)), {"quant_method": "fbgemm_fp8"}),
    "fp8 of blocks": (lambda w: fp8(w, (len(w) // 64, w.shape[1] // 64)), compressed(8)),
    "w8a8": (int8, compressed(8)),
    "bnb int8": (bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "w4a16": (lambda w: packed(w, 4, 64), compressed(4)),
    "w8a16": (lambda w: packed(w, 8, w.shape[1]), compressed(8)),
    "w4a16 asym": (lambda w: packed(w, 4, 64, symmetric=False), compressed(4)),
    "w4a16 act-order": (lambda w: packed(w, 4, 64, shuffled=True), compressed(4)),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4}),
    "gptq sym": (lambda w: gptq(w, kind="sym"), {"quant_method": "gptq", "bits": 4, "sym": True}),
    "gptq 8 bits": (lambda w: gptq(w, 8), {"quant_method": "gptq", "bits": 8}),
    "gptq v2 act-order": (
        lambda w: gptq(w, kind="v2", shuffled=True),
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    ),
    "nf4": (lambda w: nf4(w, nested=False), {"quant_method": "bitsandbytes"}),
    "nf4 nested": (lambda w: nf4(w, nested=True), {"quant_method": "bitsandbytes"}),
    "nf4 of bitsandbytes": (nf4_of_the_library, {"quant_method": "bitsandbytes"}),
}
EIGHT_BITS = {
    "fp8 of a tensor",
    "fp8 of rows",
    "fp8 of blocks",
    "w8a8",
    "bnb int8",
    "w8a16",
    "gptq 8 bits",
}
IN_FLOATS = {"w4a16 act-order", "gptq v2 act-order"}  # their groups are not neighbours


def write(folder: Path, case: str) -> Tensors:
    """A model in a quantized format; the numbers that it stands for, under Meta's names."""
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
    half = torch.full((1, 8), 8)  # GPTQ's zero of a symmetric file
    assert hex(words(half, 4) - 0x11111111 & 0xFFFFFFFF) == "0x77777777"


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_those_of_compressed_tensors(bits):
    library = pytest.importorskip("compressed_tensors.compressors")
    half = 1 << bits - 1
    q = draw((16, 64), -half, half)
    for dim, codes in ((1, words(q + half, bits)), (0, words((q + half).t(), bits).t())):
        assert torch.equal(library.pack_to_int32(q.to(torch.int8), bits, packed_dim=dim), codes)


@pytest.mark.parametrize("case", CASES)
def test_each_rank_holds_its_slices_of_what_the_files_stand_for(tmp_path, case):
    """In float32, exactly; and on the CPU in their codes."""
    state = write(tmp_path, case)
    found = find(tmp_path)
    for rank, size in ((0, 1), (1, 2), (3, 4)):
        expect_shards(loaded(found, rank, size), state, PARAMS)
    if not HAS_KERNELS:
        return
    found = replace(found, in_codes=True)
    for rank, size in ((0, 1), (1, 2)):
        parallel = ModelParallel(rank=rank, size=size)
        model = Transformer(found.params, parallel=parallel, dtype=torch.bfloat16)
        load(found, model, filled=model.pack)
        held = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
        assert held == bytes_of(found, size, torch.bfloat16, None, torch.device("cpu"))
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
        assert kinds <= ({"BlockedWeight"} if case in IN_FLOATS else expected)


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
        ("scales", torch.ones(0, 256).half(), "cannot be read as 'gptq': 'integer modulo by zero"),
        ("qzeros", torch.ones(3, 3, dtype=torch.int32), "its tensors do not fit one another"),
        ("g_idx", torch.full((512,), 99, dtype=torch.int32), "its tensors do not fit one another"),
        (
            "bias",
            torch.zeros(256),
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
        ("bnb int8", [{"weight_format": torch.tensor(2, dtype=torch.uint8)}]),  # of a GPU's tiles
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
                {"checkpoint_format": "marlin"},
            ],
        ),
    ],
)
def test_numbers_of_another_kind_are_refused_and_not_taken_for_those_that_are_known(
    tmp_path, case, changes
):
    state = write(tmp_path, case)
    config, content = CASES[case][1], (tmp_path / "model.safetensors").read_bytes()
    for change in changes:
        for own, tensor in change.items():
            if own == "checkpoint_format":
                change_json(tmp_path / "config.json", quantization_config=config | change)
            else:
                change_safetensors(tmp_path, f"model.layers.0.mlp.up_proj.{own}", tensor)
        with pytest.raises(ValueError, match=r"model\.safetensors: model\..*_proj has .*cannot be"):
            CheckpointReader(find(tmp_path))
        (tmp_path / "model.safetensors").write_bytes(content)
    if case == "gptq":  # said to be of no version, it is of the first
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
