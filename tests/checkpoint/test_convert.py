"""Checkpoints that were converted or resharded are read by transformers and Meta's Transformer."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from helpers import meta as oracle
from helpers.checkpoints import ffn_dim, random_state, write_meta
from helpers.weights import (
    PARAMS,
    STATE,
    WIDE_HEADS,
    expect_files,
    from_hf,
    hf_logits,
    hf_model,
    loaded,
    metas_state,
    scaled_rope,
    shapes_of,
    tokens_of,
)
from llama.checkpoint.find import find
from llama.checkpoint.verify import verify
from llama.checkpoint.write import convert


@pytest.mark.parametrize("use_scaled_rope", [False, True])
@pytest.mark.parametrize("num_shards", [1, 4])  # 4 shards of 2 kv heads: each head is stored twice
def test_meta_to_hugging_face_keeps_the_logits(
    tmp_path, metas_world, monkeypatch, use_scaled_rope, num_shards
):
    params, state = WIDE_HEADS | {"use_scaled_rope": use_scaled_rope}, random_state(WIDE_HEADS)
    folder = write_meta(tmp_path / "meta", params, state, num_shards)
    if num_shards > 1:
        monkeypatch.setattr(convert, "_FILE_BYTES", 60_000)
    convert.convert(folder, tmp_path / "hf")
    assert (num_shards > 1) == (tmp_path / "hf" / "model.safetensors.index.json").exists()
    theirs = from_hf(tmp_path / "hf")
    assert theirs.dtype == torch.float32
    expected = oracle.model(state, params).forward(tokens_of(), 0)
    torch.testing.assert_close(hf_logits(theirs, tokens_of()), expected, atol=1e-4, rtol=1e-4)
    plain = oracle.model(state, params | {"use_scaled_rope": False}).forward(tokens_of(), 0)
    apart = (expected - plain).abs().max().item()
    assert (apart > 1e-2) == use_scaled_rope, "these prompts show whether RoPE is scaled"


def test_files_stay_under_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "_FILE_BYTES", 60_000)
    convert.convert(write_meta(tmp_path / "meta", PARAMS, STATE), tmp_path / "hf")
    files = list((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 3
    for file in files:
        assert sum(tensor.nbytes for tensor in load_file(file).values()) <= 60_000


def test_a_factor_of_32_survives_the_conversion(tmp_path):
    params = WIDE_HEADS | {"use_scaled_rope": True, "rope_scale_factor": 32.0}
    folder = write_meta(tmp_path / "meta", params, random_state(params))
    convert.convert(folder, tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["rope_scaling"]["factor"] == 32.0
    ours, theirs = loaded(find(folder)), from_hf(tmp_path / "hf")
    torch.testing.assert_close(
        ours(tokens_of(), 0), hf_logits(theirs, tokens_of()), atol=1e-4, rtol=1e-4
    )
    convert.convert(tmp_path / "hf", tmp_path / "back")
    assert find(tmp_path / "back").params.rope_factor == 32.0


def test_weights_alone_get_llama_3_s_own_stop_tokens(tmp_path):
    params = PARAMS | {"dim": 8, "n_heads": 2, "n_kv_heads": 2, "vocab_size": 128256}
    params |= {"n_layers": 1, "use_scaled_rope": True}
    state = {name: torch.zeros(shape) for name, shape in shapes_of(params).items()}
    lines = convert.convert(write_meta(tmp_path / "meta", params, state), tmp_path / "hf")
    assert lines[0] == f"no tokenizer is in {tmp_path / 'meta'}: none was written"
    for read in (transformers.AutoConfig, transformers.GenerationConfig):
        config = read.from_pretrained(tmp_path / "hf")
        assert (config.bos_token_id, config.pad_token_id) == (128000, 128004)
        assert config.eos_token_id == [128001, 128008, 128009]
    config = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    assert config.tie_word_embeddings, "equal matrices are stored once"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hugging_face_to_meta_and_back(tmp_path, metas_world, tied, dtype):
    theirs = hf_model(tie_word_embeddings=tied, **scaled_rope(8.0)).to(dtype)
    theirs.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("words")
    convert.convert(tmp_path / "hf", tmp_path / "meta")
    assert find(tmp_path / "meta").tokenizer_path().read_text() == "words"
    expect_files(tmp_path / "meta", metas_state(theirs), WIDE_HEADS, 1)
    params = json.loads((tmp_path / "meta" / "params.json").read_text())
    assert ffn_dim(params) == 160
    known = {"dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of",
             "ffn_dim_multiplier", "norm_eps", "rope_theta", "use_scaled_rope"}  # fmt: skip
    assert params.keys() <= known, "Meta's package takes no other keys"
    if dtype == torch.float32:
        expected = oracle.model(metas_state(theirs), params).forward(tokens_of(), 0)
        torch.testing.assert_close(hf_logits(theirs, tokens_of()), expected, atol=1e-4, rtol=1e-4)
    (tmp_path / "meta" / "tokenizer.json").unlink()  # this conversion would read it
    convert.convert(tmp_path / "meta", tmp_path / "back")
    before = load_file(tmp_path / "hf" / "model.safetensors")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name])
    read = from_hf(tmp_path / "back")
    assert (read.config.tie_word_embeddings, read.dtype) == (tied, dtype)


@pytest.mark.parametrize(
    ("count", "dtype"),
    [(1, torch.bfloat16), (2, torch.float32), (8, torch.bfloat16), (8, torch.float32)],
)
def test_reshard_there_and_back_is_the_identity(tmp_path, count, dtype):
    """Resharding there and back is the identity.

    Eight shards of four kv heads hold each head twice, and params.json is unchanged.
    """
    source = write_meta(tmp_path / "a", PARAMS, STATE, count, dtype)
    (source / "tokenizer.model").write_bytes(b"words")
    state = {name: tensor.to(dtype) for name, tensor in STATE.items()}
    for size in (4, 16):
        there, back = tmp_path / f"there{size}", tmp_path / f"back{size}"
        convert.reshard(source, there, size)
        expect_files(there, state, PARAMS, size)
        convert.reshard(there, back, count)
        expect_files(back, state, PARAMS, count)
        for name in ("params.json", "tokenizer.model"):
            assert (back / name).read_bytes() == (source / name).read_bytes()
        assert len(list(there.iterdir())) == size + 2, "nothing is left lying about"


@pytest.mark.parametrize(
    ("size", "kind", "message"),
    [
        (3, ValueError, "does not divide"),
        (0, ValueError, "whole number from 1"),
        ("2", TypeError, "whole number"),
    ],
)
def test_reshard_to_a_size_that_cannot_be(meta, tmp_path, size, kind, message):
    with pytest.raises(kind, match=message):
        convert.reshard(meta, tmp_path / "out", size)
    assert not (tmp_path / "out").exists()


def test_reshard_sends_hugging_face_s_layout_to_convert(hugging, tmp_path):
    with pytest.raises(ValueError, match="convert it first"):
        convert.reshard(hugging, tmp_path / "out", 2)


def test_nothing_of_the_users_is_overwritten(meta, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("all of it")
    for write in (lambda: convert.reshard(meta, out, 4), lambda: convert.convert(meta, out)):
        with pytest.raises(FileExistsError, match="nothing is overwritten"):
            write()
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    (out / "thesis.txt").unlink()
    convert.reshard(meta, out, 4)  # an existing empty folder is accepted
    assert verify(out)


def test_a_failed_run_leaves_nothing(meta, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("disk on fire")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk on fire"):
        convert.reshard(meta, tmp_path / "out", 4)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_full_disk_is_told_before_writing(meta, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    for write in (convert.convert, lambda a, b: convert.reshard(a, b, 4)):
        with pytest.raises(OSError, match=r"has 0\.0001 GB free, and writing takes 0\.000\d+ GB"):
            write(meta, tmp_path / "out")


@pytest.mark.parametrize("layout", ["meta", "hf"])
def test_a_matrix_stored_once_is_written_once(tmp_path, layout):
    """A matrix stored once is written once: a tied model stays tied when it is resharded or
    converted.
    """
    if layout == "hf":
        hf_model(tie_word_embeddings=True).save_pretrained(tmp_path / "in")
        convert.convert(tmp_path / "in", tmp_path / "out")
    else:
        state = {name: t for name, t in STATE.items() if name != "output.weight"}
        folder = write_meta(tmp_path / "in", PARAMS, state)
        path = folder / "consolidated.00.pth"
        torch.save(state | {"output.weight": state["tok_embeddings.weight"]}, path)
        convert.reshard(folder, tmp_path / "out", 2)
    assert find(tmp_path / "in").params.tied_output and find(tmp_path / "out").params.tied_output
    for path in (tmp_path / "out").glob("*.pth"):
        shard = torch.load(path, weights_only=True)
        assert torch.equal(shard["output.weight"], shard["tok_embeddings.weight"])
        held = sum(t.nbytes for name, t in shard.items() if name != "output.weight")
        assert held < path.stat().st_size < held + shard["output.weight"].nbytes


def test_what_was_written_is_listed(meta, tmp_path):
    lines = convert.reshard(meta, tmp_path / "m4", np.int64(4))
    names = [path.name for path in sorted((tmp_path / "m4").iterdir())]
    assert [line.split(":")[0] for line in lines[:-1]] == names
    size = (tmp_path / "m4" / "params.json").stat().st_size
    assert f"params.json: {size} bytes" in lines
    assert lines[-1].startswith(f"{tmp_path / 'm4'}: 5 files, ")
    assert convert.convert(meta, tmp_path / "hf")[-1].endswith(" bytes written")


def test_a_folder_that_is_not_utf8_is_not_written(meta, tmp_path):
    with pytest.raises(ValueError, match="is not UTF-8"):
        convert.convert(meta, Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")))
