"""Quantized checkpoints: what the files contain, checked by independent rules."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from safetensors import safe_open

from helpers.checkpoints import random_state, write_byte_tokenizer, write_meta
from helpers.kernels import KERNELS_RUN
from helpers.weights import change_json, expect_shards, loaded, metas_state
from llama import Llama, Tokenizer
from llama.checkpoint.find import find
from llama.checkpoint.hf.quantized import activations_of
from llama.checkpoint.verify import verify
from llama.checkpoint.write import convert as module
from llama.checkpoint.write import quantize
from llama.checkpoint.write.convert import convert, pack
from llama.checkpoint.write.quantize import quantization_config, quantized_tensors
from llama.ops import rounded
from llama.weights import choice

needs_kernels = pytest.mark.skipif(not KERNELS_RUN, reason="needs x86-64 with AVX2, and g++")
TOKENS = torch.arange(60).remainder(250)[None] + 3
PARAMS = {
    "dim": 128, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 512,
    "multiple_of": 32, "norm_eps": 1e-5, "rope_theta": 500000.0, "use_scaled_rope": True,
}  # fmt: skip
STATE = {name: x.bfloat16().float() for name, x in random_state(PARAMS).items()}
for i, factor in enumerate([0, 2**-90, 4]):  # groups of zeros, of almost zero and of larger values
    STATE["layers.0.attention.wq.weight"][i, :32] *= factor
MATRICES = [name for name in STATE if name.startswith("layers.") and "norm" not in name]


@pytest.fixture
def folder(tmp_path):
    write_byte_tokenizer(write_meta(tmp_path / "meta", PARAMS, STATE, 2, torch.bfloat16))
    return tmp_path / "meta"


@pytest.mark.parametrize(
    ("name", "activations"),
    [("int8", None), ("int8", "int8_token"), ("fp8", None), ("fp8", "fp8"), ("int4", None)],
)
def test_a_folder_has_the_numbers_that_quantize_gives_at_load(
    folder, tmp_path, monkeypatch, name, activations
):
    """A written folder has the same values that `quantize` gives at load.

    int8 and fp8 are equal bit for bit; int4 values are the nearest that the scales allow.
    """
    monkeypatch.setattr(module, "_FILE_BYTES", 60_000)
    monkeypatch.setattr(quantize, "_CHUNK_ELEMENTS", 128 * 48)
    lines = convert(folder, tmp_path / "out", quantize=name, activations=activations)
    assert find(tmp_path / "out").activations == activations
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1, lines
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    for tensor, title in index["weight_map"].items():
        with safe_open(tmp_path / "out" / title, "pt") as file:
            assert tensor in file.keys()  # noqa: SIM118
    model = loaded(find(tmp_path / "out"))
    expected = dict(STATE)
    for matrix in MATRICES:
        held, plain = model.named_shards()[matrix], STATE[matrix]
        if name == "int4":
            expected[matrix] = held
            q4_0 = GGMLQuantizationType.Q4_0
            blocks = gguf.quants.quantize(plain.numpy(), q4_0)
            of_ggml = torch.tensor(gguf.quants.dequantize(blocks, q4_0))
            error, others = ((x - plain).square().sum() for x in (held, of_ggml))
            assert error < 0.95 * others, matrix
            assert all(len(group.unique()) <= 16 for group in held.view(-1, 32))
        else:
            expected[matrix] = choice.QUANTIZED[name].pack(plain.bfloat16()).exact()
    expect_shards(model, expected, PARAMS)
    assert verify(tmp_path / "out")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    theirs(torch.tensor([[3]]))  # values are computed from the codes on demand
    expect_shards(model, metas_state(theirs), PARAMS)


def test_a_w8a8_matrix_is_the_one_that_compressed_tensors_writes():
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig.model_validate(quantization_config("int8", "int8_token"))
    plain = STATE["layers.0.attention.wq.weight"].bfloat16()
    tensors = quantized_tensors("q_proj.weight", plain, "int8", "int8_token")
    library = BaseCompressor.get_value_from_registry(config.format)
    scale = tensors["q_proj.weight_scale"]
    theirs = library.compress(
        {"weight": plain.float(), "weight_scale": scale}, config.config_groups["group_0"]
    )
    assert torch.equal(tensors["q_proj.weight"], theirs["weight"])
    assert tensors["q_proj.weight"].dtype is torch.int8 is theirs["weight"].dtype
    assert torch.equal(scale[3:], plain[3:].float().abs().amax(1, keepdim=True) / 127)


@pytest.mark.parametrize(
    ("out", "name", "activations", "message"),
    [
        ("out", "int8", "int8", "activations='int8': give fp8, int8_token for a folder OUT"),
        ("out", "int8", "fp8", "whose matrices have as many bits: give quantize='fp8'"),
        ("out", "int4", "int8_token", "whose matrices have as many bits: give quantize='int8'"),
        ("out.gguf", "q8_0", "int8_token", "whose matrices have as many bits: give"),
    ],
)
def test_activations_that_no_folder_asks_for_are_refused(
    folder, tmp_path, out, name, activations, message
):
    with pytest.raises(ValueError, match=message):
        convert(folder, tmp_path / out, quantize=name, activations=activations)
    assert not (tmp_path / out).exists()


@pytest.mark.parametrize("name", ["q8_0", "q4_0", None])
def test_a_gguf_file_is_the_one_that_llama_cpp_writes(folder, tmp_path, name):
    path = tmp_path / "out.GGUF"
    path.mkdir()  # an empty folder is no obstacle
    lines = convert(folder, path, quantize=name)
    assert lines == [f"{path}: {path.stat().st_size:,} bytes written"]
    file, expected = gguf.GGUFReader(path), dict(STATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    metas = {names.get_name(name, try_suffixes=(".weight",)): name for name in STATE}
    for tensor in file.tensors:
        if tensor.name == "rope_freqs.weight":
            assert tensor.data[-1] == 8 and tensor.data[0] == 1
            continue
        plain, kind = STATE[metas.pop(tensor.name)], tensor.tensor_type
        data = gguf.quants.quantize(plain.numpy(), kind)
        assert np.array_equal(tensor.data, data), tensor.name
        numbers = torch.tensor(gguf.quants.dequantize(data, kind))
        expected[names.get_name(tensor.name) or tensor.name] = numbers
    assert not metas
    kinds = {tensor.name: tensor.tensor_type.name for tensor in file.tensors}
    assert kinds["output_norm.weight"] == "F32"
    assert kinds["blk.0.ffn_up.weight"] == (name or "bf16").upper()
    assert kinds["output.weight"] == ("Q8_0" if name else "BF16")
    found = find(path)
    assert found.file_type == (name or "bf16").upper()
    for key in ("dim", "n_layers", "ffn_dim", "kv_heads", "norm_eps", "rope_theta", "rope_factor"):
        assert getattr(found.params, key) == getattr(find(folder).params, key), key
    one, other = Tokenizer(path), Tokenizer(folder / "tokenizer.model")
    text = "Once upon a time, größer 12345 <|eot_id|>"
    assert one.encode(text, bos=True, eos=True) == other.encode(text, bos=True, eos=True)
    assert one.special_tokens == other.special_tokens
    assert verify(path)


@pytest.mark.parametrize(
    ("out", "name", "message"),
    [
        ("out", "q8_0", r"quantize='q8_0': give one of int8, fp8, int4 for .*folder"),
        ("out.gguf", "int8", r"quantize='int8': give one of q8_0, q4_0 for .*\.gguf"),
        ("out", "int4", r"layers\.0\.mlp\.down_proj\.weight has a number that is not finite"),
        ("out.gguf", "q4_0", r"layers\.0\.feed_forward\.w2\.weight has a number that is not fin"),
        ("alone/out.gguf", "q4_0", "no tokenizer: looked for"),
    ],
)
def test_what_cannot_be_written_is_named_and_nothing_is_left(tmp_path, out, name, message):
    state = STATE | {"layers.0.feed_forward.w2.weight": torch.full((128, 352), torch.inf)}
    folder = write_meta(tmp_path / "meta", PARAMS, state)
    (tmp_path / "alone").mkdir()
    if "alone" not in out:
        write_byte_tokenizer(folder)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        convert(folder, tmp_path / out, quantize=name)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_gguf_file_without_its_package_names_the_extra(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "llama.checkpoint.gguf.writing", raising=False)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"out\.gguf: .* needs gguf, .* pip install .*\[gguf\]"):
        convert(folder, tmp_path / "out.gguf", quantize="q8_0")
    assert sorted(tmp_path.rglob("*")) == before
    assert convert(folder, tmp_path / "out")


@pytest.fixture(scope="module")
def outlying(tmp_path_factory) -> Path:
    """Return a model in which one large element of each norm makes a row's scale large."""
    state = random_state(PARAMS, 31)
    for name in state:
        if name.startswith("layers.") and name.endswith("norm.weight"):
            state[name][5] = 60
    folder = tmp_path_factory.mktemp("outlying")
    write_byte_tokenizer(write_meta(folder / "meta", PARAMS, state))
    return folder / "meta"


@pytest.fixture(scope="module")
def w8a8(outlying, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("w8a8") / "out"
    convert(outlying, folder, quantize="int8", activations="int8_token")
    return folder


@pytest.fixture(scope="module")
def fp8_dynamic(outlying, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fp8_dynamic") / "out"
    convert(outlying, folder, quantize="fp8", activations="fp8")
    return folder


def build(folder: Path, **options) -> Llama:
    return Llama.build(str(folder), None, 128, 8, device="cpu", **options)


def logits_of(llama: Llama) -> torch.Tensor:
    return llama.model(TOKENS, 0)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).square().mean() / expected.square().mean()).item()


@needs_kernels
def test_a_w8a8_folder_runs_as_its_files_ask(w8a8, tmp_path, capsys):
    """transformers computes the same, but for another divisor (127.5) and the bf16 in between."""
    llama = build(w8a8)
    assert "compressed-tensors, activations=int8_token, model_par" in capsys.readouterr().out
    weight = llama.model.blocks()[0].feed_forward.w2.weight
    assert weight.activations == weight.shape[1]
    found = logits_of(llama)
    plain = logits_of(build(w8a8, activations="bf16"))
    assert "activations" not in capsys.readouterr().out
    theirs = transformers.LlamaForCausalLM.from_pretrained(w8a8, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(TOKENS).logits
    assert distance(found, expected) < 2e-3 < distance(plain, expected)
    pack(w8a8, tmp_path / "packed")
    assert torch.equal(logits_of(build(tmp_path / "packed")), found)
    assert torch.equal(logits_of(build(tmp_path / "packed", activations="bf16")), plain)


@pytest.mark.parametrize(
    "changes",
    [
        {"dynamic": False, "strategy": "tensor"},
        {"symmetric": False},
        {"strategy": "group", "group_size": 32},
        {"num_bits": 4},
        {"type": "float"},
        {"weights": {"num_bits": 4}},
        {"weights": {"strategy": "group", "group_size": 32}},
        None,
    ],
)
def test_other_activations_of_files_stay_in_bf16(w8a8, tmp_path, changes):
    folder = tmp_path / "other"
    folder.mkdir()
    for path in w8a8.iterdir():
        (folder / path.name).symlink_to(path)
    config = find(w8a8).quantization or {}
    groups = {"group_0": dict(config["config_groups"]["group_0"]), "group_1": {"targets": ["x"]}}
    groups["group_1"]["weights"] = groups["group_0"]["weights"]
    groups["group_1"]["input_activations"] = groups["group_0"]["input_activations"]
    if changes is None:
        del groups["group_0"]["input_activations"]
    elif "weights" in changes:
        groups["group_0"]["weights"] = groups["group_0"]["weights"] | changes["weights"]
    else:
        groups["group_0"]["input_activations"] = groups["group_1"]["input_activations"] | changes
    (folder / "config.json").unlink()
    (folder / "config.json").write_text((w8a8 / "config.json").read_text())
    change_json(folder / "config.json", quantization_config=config | {"config_groups": groups})
    assert find(folder).activations is None
    change_json(folder / "config.json", quantization_config=config | {"config_groups": {}})
    assert find(folder).activations is None
    groups["group_0"] = groups["group_1"]
    change_json(folder / "config.json", quantization_config=config | {"config_groups": groups})
    assert find(folder).activations == "int8_token"


def test_codes_per_token_are_those_of_compressed_tensors():
    """With the same scales they are equal, but for the one tie that the two may compute apart.

    compressed-tensors divides by the scale, and we multiply by its inverse. Of bf16, 127 x / max|x|
    is a tie at max|x| / 2 alone (63.5), or where max|x| is 127 times a power of two, which is exact
    in both. Nothing else is so near to a tie that float32 could decide otherwise.
    """
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize

    x = torch.randn(200, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    x *= torch.logspace(-3, 3, 200)[:, None].bfloat16()
    x[::5, 7] = 1000
    x[3, :4] = torch.tensor([127, 0.5, 1.5, -2.5]).bfloat16()
    ours = rounded.round_rows(x, 256)
    args = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)
    zero = torch.zeros(())
    theirs = quantize(x.float(), ours.scales, zero, args)
    largest = x.float().abs().amax(-1, keepdim=True)
    is_decided = (2 * x.float().abs() != largest) | (largest % 127 == 0)
    assert is_decided.float().mean() > 0.99 and theirs.abs().max() == 127
    assert torch.equal(ours.codes[is_decided], theirs[is_decided])
    assert ours.scales.dtype is torch.float32


@needs_kernels
def test_an_fp8_dynamic_folder_has_the_products_of_transformers(fp8_dynamic, tmp_path, capsys):
    """A CPU rounds where it is asked to; a GPU from 8.9 on by default.

    The products are compared one by one: a difference in the last bit moves elements of the next
    rounding to another code, and after four of them nothing is left to compare.
    """
    assert find(fp8_dynamic).activations == "fp8"
    build(fp8_dynamic)
    assert "activations" not in capsys.readouterr().out
    llama = build(fp8_dynamic, activations="fp8")
    assert "compressed-tensors, activations=fp8, model_par" in capsys.readouterr().out
    theirs = transformers.LlamaForCausalLM.from_pretrained(fp8_dynamic, dtype=torch.float32)
    layer, their_layer = llama.model.blocks()[0], theirs.model.layers[0]
    pairs: list[tuple[Any, list[Any]]] = [
        (layer.attention.wo.weight, [their_layer.self_attn.o_proj]),
        (layer.feed_forward.w13.weight, [their_layer.mlp.gate_proj, their_layer.mlp.up_proj]),
        (layer.feed_forward.w2.weight, [their_layer.mlp.down_proj]),
    ]
    seen = {}
    for their_product in itertools.chain(*(products for _, products in pairs)):
        their_product.register_forward_hook(lambda *call: seen.update({call[0]: call[1:]}))
    with torch.no_grad():
        theirs(TOKENS)
    for weight, products in pairs:
        (x,), _ = seen[products[0]]
        expected = torch.cat([seen[product][1] for product in products], -1)
        exact = weight.exact().T
        bound = x.abs() @ exact.abs() * (x.shape[-1] * 2**-23)
        assert ((weight.linear(x) - expected).abs() <= bound).all()
        assert ((x @ exact - expected).abs() > 10 * bound).any(), "they round"
    pack(fp8_dynamic, tmp_path / "packed")
    packed = build(tmp_path / "packed", activations="fp8")
    assert torch.equal(logits_of(packed), logits_of(llama))


@pytest.mark.parametrize(
    ("config", "activations"),
    [
        ({"activation_scheme": "dynamic"}, "fp8"),
        ({"activation_scheme": "static"}, None),
        ({"activation_scheme": "dynamic", "weight_block_size": [128, 128]}, None),
        ({}, None),
    ],
)
def test_autofp8_rounds_where_its_scales_are_of_rows_and_found_at_run_time(config, activations):
    assert activations_of({"quant_method": "fp8", **config}) == activations


@pytest.mark.parametrize("is_on_cpu", [False, True])
def test_products_in_e4m3_are_those_of_compressed_tensors(is_on_cpu):
    """The library decompresses the weight, and rounds the rows with a scale for each token."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    config = QuantizationConfig.model_validate(quantization_config("fp8", "fp8"))
    scheme = config.config_groups["group_0"]
    plain = STATE["layers.0.attention.wq.weight"].bfloat16()
    tensors = quantized_tensors("q_proj.weight", plain, "fp8", "fp8")
    library = BaseCompressor.get_value_from_registry(config.format)
    parts = {name.removeprefix("q_proj."): x for name, x in tensors.items()}
    weight = library.decompress(parts, scheme)["weight"].float()
    x = torch.randn(1, 40, plain.shape[1], generator=torch.Generator().manual_seed(3)).bfloat16()
    x[0, ::7, 5] = 300
    args = scheme.input_activations
    scale, zero = compute_dynamic_scales_and_zp(x.float(), args, torch.nn.Module())
    rounded_x = fake_quantize(x.float(), scale, zero, args)
    packed = choice.packed(plain.clone(), "fp8") if is_on_cpu else choice.on_gpu(plain, "fp8")
    assert packed.round_to_e4m3()
    found = packed.linear(x, torch.float32)
    bound = rounded_x.abs() @ weight.abs().T * (plain.shape[1] * 2**-23)
    assert ((found - rounded_x @ weight.T).abs() <= bound).all()
    assert not torch.allclose(found, x.float() @ weight.T, rtol=0.01)


@needs_kernels
def test_a_gpu_and_dequantized_matrices_do_not_round(w8a8, capsys):
    assert choice.default_activations("int8_token", torch.device("cpu")) == "int8_token"
    assert choice.default_activations("int8_token", torch.device("cuda")) is None
    build(w8a8, dtype="bf16")
    assert "cpu, bf16 from compressed-tensors, model_par" in capsys.readouterr().out
