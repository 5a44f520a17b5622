"""Quantized checkpoints: what the files contain, checked by independent rules."""

import json

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from safetensors import safe_open

from helpers.checkpoints import random_state, write_byte_tokenizer, write_meta
from helpers.weights import expect_shards, loaded, metas_state
from llama import Tokenizer, weights
from llama.checkpoint import convert as module
from llama.checkpoint import quantize
from llama.checkpoint.convert import convert
from llama.checkpoint.find import find
from llama.checkpoint.verify import verify

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


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_a_folder_has_the_numbers_that_quantize_gives_at_load(folder, tmp_path, monkeypatch, name):
    """A written folder has the same values that `quantize` gives at load.

    int8 and fp8 are equal bit for bit; int4 values are the nearest that the scales allow.
    """
    monkeypatch.setattr(module, "_FILE_BYTES", 60_000)
    monkeypatch.setattr(quantize, "_CHUNK_ELEMENTS", 128 * 48)
    lines = convert(folder, tmp_path / "out", quantize=name)
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
            expected[matrix] = weights.QUANTIZED[name].pack(plain.bfloat16()).exact()
    expect_shards(model, expected, PARAMS)
    assert verify(tmp_path / "out")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    theirs(torch.tensor([[3]]))  # values are computed from the codes on demand
    expect_shards(model, metas_state(theirs), PARAMS)


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
