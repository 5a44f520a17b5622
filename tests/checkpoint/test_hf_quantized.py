"""Hugging Face's quantized weights of several libraries.

compressed-tensors and bitsandbytes write theirs. Those of AWQ, GPTQ, modelopt and fbgemm come from
packers in this file, whose packed words are compared with known ones.
"""

import functools
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
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
from llama.checkpoint.find import find
from llama.checkpoint.hf import formats as hf_formats
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
    count = {
        "group": (n, k // 64),
        "channel": (n, 1),
        "tensor": (1, 1),
        "block": (n // 64, k // 64),
    }
    rows, columns = count[asked["strategy"]]
    groups = weight.view(rows, n // rows, columns, k // columns)
    scale, zero = calculate_qparams(groups.amin((1, 3)), groups.amax((1, 3)), args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    library = BaseCompressor.get_value_from_registry(form)
    scale = scale.bfloat16().float()  # the type in files, so that each product is exact
    plain = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    tensors = library.compress(plain, scheme)
    numbers = library.decompress(tensors, scheme)["weight"]
    return {**tensors, "input_scale": torch.ones(1)}, numbers


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
    if kind != "v2":  # GPTQ v1 stores zero points minus one, subtracted over the whole word
        stored = stored - sum(1 << i for i in range(0, 32, bits))
    tensors = {
        "qweight": words(q.t().reshape(k, n).t(), bits).t(),
        "qzeros": stored,
        "scales": unit,
        "g_idx": group_of.int(),
    }
    return tensors, (q - zero[:, group_of]) * unit.float().t()[:, group_of]


def nf4(weight: Tensor, *, nested: bool) -> tuple[Tensors, Tensor]:
    from bitsandbytes import functional as library

    codes, state = library.quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
    extra = {f"weight.{key}": x for key, x in state.as_dict(packed=True).items()}
    return {"weight": codes, **extra}, library.dequantize_4bit(codes, state)


COMPRESSED = {"quant_method": "compressed-tensors"}
PACKED = {"form": "pack-quantized", "num_bits": 4, "strategy": "group", "group_size": 64}
FLOAT = {"form": "float-quantized", "num_bits": 8, "type": "float"}
BY_COMPRESSED_TENSORS: dict[str, dict[str, Any]] = {
    "fp8": FLOAT | {"strategy": "tensor"},
    "fp8 of rows": FLOAT | {"strategy": "channel"},
    "fp8 of blocks": FLOAT | {"strategy": "block", "block_structure": [64, 64]},
    "w8a8": {"form": "int-quantized", "num_bits": 8, "strategy": "channel"},
    "w8a16": {"form": "pack-quantized", "num_bits": 8, "strategy": "channel"},
    "w4a16": PACKED,
    "w4a16 asym": PACKED | {"symmetric": False},
}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    **{
        case: (functools.partial(by_compressed_tensors, **asked), COMPRESSED)
        for case, asked in BY_COMPRESSED_TENSORS.items()
    },
    "fp8 of a tensor": (lambda w: fp8(w, (1, 1)), {"quant_method": "modelopt"}),
    "fp8 of fbgemm": (lambda w: fp8(w, (len(w), 1)), {"quant_method": "fbgemm_fp8"}),
    "bnb int8": (by_bitsandbytes, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "w4a16 act-order": (lambda w: in_another_order(w, 4, 64), COMPRESSED),
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
}
EIGHT_BITS = {x for x in CASES if x.startswith(("fp8", "w8"))} | {"bnb int8", "gptq 8 bits"}
IN_FLOATS = {"w4a16 act-order", "gptq v2 act-order"}  # act-order groups are not contiguous


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
                {"checkpoint_format": "marlin"},
            ],
        ),
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
            if own == "checkpoint_format":
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
    ("case", "changes", "message"),
    [
        ("gptq", {"bits": 3}, "it has 3 bits, and 2, 4 and 8 are read"),
        ("awq", {"version": "gemv"}, "it is 'gemv' of 4 bits, not gemm of 4"),
    ],
)
def test_another_variant_is_named_with_what_to_take(tmp_path, case, changes, message):
    write(tmp_path, case)
    change_json(tmp_path / "config.json", quantization_config=CASES[case][1] | changes)
    with pytest.raises(ValueError, match=rf"{message}.*; take the model in .* or GGUF"):
        CheckpointReader(find(tmp_path))


def test_what_files_say_of_the_cache_and_of_single_modules_is_read(tmp_path):
    """Settings for the KV cache and for single modules are read.

    Scales of the KV cache stand beside the matrices, and the number of bits may differ between
    modules.
    """
    state, names = write(tmp_path, "w4a16"), ("q_scale", "k_scale", "v_scale", "k_zero_point")
    for own in names:
        change_safetensors(tmp_path, f"model.layers.0.self_attn.{own}", torch.ones(1))
    asked = BY_COMPRESSED_TENSORS["w8a16"]
    parts, numbers = by_compressed_tensors(torch.randn(256, 512), **asked)
    for own, tensor in parts.items():
        change_safetensors(tmp_path, f"model.layers.1.mlp.down_proj.{own}", tensor)
    state["layers.1.feed_forward.w2.weight"] = numbers
    expect_shards(loaded(find(tmp_path)), state, PARAMS)


@pytest.mark.parametrize("case", ["w4a16 asym", "awq", "gptq", "nf4 nested"])
def test_a_rank_unpacks_its_share_alone(tmp_path, case, monkeypatch):
    write(tmp_path, case)
    seen, read = [0], hf_formats.CodedMatrix.read

    def read_and_count(of: Any, rows: slice, columns: slice, device: torch.device) -> Coded:
        coded = read(of, rows, columns, device)
        seen[0] += coded.codes.numel()
        return coded

    monkeypatch.setattr(hf_formats.CodedMatrix, "read", read_and_count)
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
