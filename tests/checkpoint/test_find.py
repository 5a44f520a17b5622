"""The files of a folder that are the model, and the errors for a folder without one."""

from __future__ import (
    annotations,
)  # transformers imports its models lazily, when these names are first used

import itertools
import json
import math
import os
import shutil
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from helpers.checkpoints import random_state, write_byte_tokenizer, write_meta
from helpers.embedders import write_model
from helpers.kernels import HAS_KERNELS
from helpers.weights import (
    PARAMS,
    STATE,
    change_json,
    change_safetensors,
    expect_shards,
    loaded,
)
from llama import Llama
from llama.checkpoint.find import find
from llama.checkpoint.reader import CheckpointReader, find_not_finite
from llama.checkpoint.verify import verify
from llama.loading import weights
from llama.ranks.collectives import ModelParallel
from llama.storage.downloads import check_download
from llama.tokenizer import Tokenizer


def test_the_layout_follows_from_the_files(meta, hugging):
    """The layout follows from the files, whatever their names.

    Meta's files in `original/`, where Hugging Face puts them, are those of a folder without others.
    """
    assert find(str(hugging)).layout == "hf"
    shutil.move(meta, hugging / "original")
    assert (find(hugging).layout, find(hugging).folder) == ("hf", hugging)
    (hugging / "model.safetensors").unlink()
    found = find(hugging)
    assert (found.layout, found.folder) == ("meta", hugging / "original")


def test_shards_go_by_number_not_by_name(tmp_path):
    """Shards are ordered by number, not by name.

    sorted(glob("*.pth")), as in the reference, puts shard 10 before shard 9 here.
    """
    params = PARAMS | {"n_heads": 16, "n_kv_heads": 16}
    folder = write_meta(tmp_path, params, random_state(params), 16)
    for i in range(10):
        (folder / f"consolidated.{i:02d}.pth").rename(folder / f"consolidated.{i}.pth")
    (folder / "optimizer.pth").write_bytes(b"not ours")
    found = find(folder)
    assert [path.name for path in found.shards[8:11]] == [
        "consolidated.8.pth", "consolidated.9.pth", "consolidated.10.pth",
    ]  # fmt: skip
    expect_shards(loaded(found), random_state(params), params)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_one_matrix_stored_under_two_names_is_held_once(tmp_path, num_shards):
    """A matrix stored under two names is loaded once.

    Meta's files of 3.2 1B and 3B are like this, and their params.json does not mention it.
    """
    state = STATE | {"output.weight": STATE["tok_embeddings.weight"]}
    untied = find(write_meta(tmp_path / "untied", PARAMS, state, num_shards))
    folder = write_meta(tmp_path / "tied", PARAMS, state, num_shards)
    for file in sorted(folder.glob("*.pth")):
        shard = torch.load(file, weights_only=True)
        torch.save(shard | {"output.weight": shard["tok_embeddings.weight"]}, file)
    tied = find(folder)
    assert (tied.params.tied_output, untied.params.tied_output) == (True, False)
    models = [loaded(found) for found in (tied, untied)]
    assert models[0].output.weight is models[0].tok_embeddings.weight
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in models]
    assert sizes[1] - sizes[0] == state["output.weight"].numel()
    tokens = torch.tensor([[3, 1, 2]])
    torch.testing.assert_close(*(model(tokens, 0) for model in models))
    # nothing is deduplicated here, so both names are present
    assert len(verify(folder)) == num_shards + 1
    change_json(untied.params_path, tied_output=True)
    with pytest.raises(ValueError, match=r"'output\.weight' has no place .* output is not tied"):
        loaded(find(untied.folder))


def test_the_tokenizer_is_looked_for_beside_the_weights(meta, hugging):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.model.*give tokenizer_path"):
        find(meta).tokenizer_path()
    (meta.parent / "tokenizer.model").touch()
    assert find(meta).tokenizer_path() == meta.parent / "tokenizer.model"
    (meta / "tokenizer.model").touch()
    assert find(meta).tokenizer_path() == meta / "tokenizer.model"
    (hugging / "original").mkdir()
    (hugging / "original" / "tokenizer.model").touch()
    assert find(hugging).tokenizer_path() == hugging / "original" / "tokenizer.model"
    (hugging / "tokenizer.json").touch()
    assert find(hugging).tokenizer_path() == hugging / "tokenizer.json"


def become_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


def test_a_gguf_file_that_cannot_be_read_is_not_called_another_one(tmp_path, monkeypatch):
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ValueError, match=r"m\.gguf \(0 bytes\) is empty"):
        find(tmp_path / "m.gguf")
    monkeypatch.setattr(Path, "open", lambda path, *_: os.open(path / "below", os.O_RDONLY))
    with pytest.raises(OSError, match=r"m\.gguf"):
        find(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("spoil", "kind", "message"),
    [
        (shutil.rmtree, FileNotFoundError, "model does not exist: give the folder"),
        (become_a_file, NotADirectoryError, "model is a file"),
        (lambda d: [p.unlink() for p in d.iterdir()], FileNotFoundError, "holds no weights"),
        (lambda d: (d / "consolidated.00.pth").unlink(), FileNotFoundError,
         r"consolidated\.00\.pth is missing: download"),
        (lambda d: (d / "consolidated.01.pth").rename(d / "consolidated.99999999999.pth"),
         FileNotFoundError, r"consolidated\.01\.pth, .*consolidated\.02\.pth"),
        (lambda d: (d / "consolidated.00.pth").rename(d / "consolidated.zero.pth"), ValueError,
         r"consolidated\.zero\.pth: there is no shard number"),
        (lambda d: shutil.copy(d / "consolidated.00.pth", d / "consolidated.0.pth"), ValueError,
         "are the same shard"),
        (lambda d: (d / "params.json").unlink(), FileNotFoundError, r"params\.json is missing"),
        (lambda d: (d / "params.json").write_text("{"), ValueError,
         r"params\.json \(1 bytes\) is cut short: it is not JSON.*download it again"),
        (lambda d: (d / "params.json").write_text("<!DOCTYPE html><p>Sign in"), ValueError,
         r"params\.json .*is a web page"),
        (lambda d: (d / "params.json").write_text("[]"), ValueError, "must hold a JSON object"),
        (lambda d: change_json(d / "params.json", moe=True), ValueError,
         r"params\.json: unknown key 'moe'"),
        (lambda d: change_json(d / "params.json", dim=None), ValueError,
         r"params\.json: the key 'dim' is missing"),
    ],
)  # fmt: skip
def test_a_folder_that_is_no_checkpoint(meta, spoil, kind, message):
    spoil(meta)
    with pytest.raises(kind, match=message):
        find(meta)


@pytest.mark.parametrize(
    "name",
    [
        "params.json",
        "config.json",
        "model.safetensors.index.json",
        "checklist.chk",
        "tokenizer.model",
    ],
)
def test_a_small_file_that_is_huge_is_not_read(meta, hugging, name):
    """A small compressed file with huge contents is not read in full.

    A past fault: 3 GB of zeros took 25 s to be refused as invalid JSON. The file here is barely
    over the limit.
    """
    folder = hugging if name in ("config.json", "model.safetensors.index.json") else meta
    if name == "model.safetensors.index.json":  # which is not read where there is a single file
        (hugging / "model.safetensors").rename(hugging / "model-00001-of-00001.safetensors")
    with (folder / name).open("wb") as file:
        file.write(b"7" * 512)
        file.truncate(65 << 20)
    with pytest.raises(ValueError, match=rf"{name} is larger than .*, so it is another file"):
        Tokenizer(folder / name) if name == "tokenizer.model" else verify(folder)


DEEP = "[" * 100_000
HUGE = "k" * 10_000_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DEEP, "is nested too deeply"),
        ('{"dim": ' + DEEP, "is nested too deeply"),
        (json.dumps(PARAMS | {"dim": 10**9}), "dim=1000000000 must be .* to 1048576"),
        (json.dumps(PARAMS | {"n_layers": 10**7}), "n_layers=10000000 must be .* to 8192"),
        (json.dumps(PARAMS | {"n_heads": True}), "n_heads=True must be a whole number"),
        (json.dumps(PARAMS | {"n_kv_heads": 0}), "n_kv_heads=0 must be .* or None"),
        (json.dumps(PARAMS | {"norm_eps": "1e-5"}), "norm_eps='1e-5' must be a number above 0"),
        (json.dumps(PARAMS | {"rope_theta": float("nan")}), "rope_theta=nan must be a number"),
        (json.dumps(PARAMS | {"use_scaled_rope": 1}), "use_scaled_rope=1 must be true or false"),
        (json.dumps(PARAMS | {"n_heads": 3}), r"dim=64 / n_heads=3 must be an even whole number"),
        (json.dumps(PARAMS | {"n_kv_heads": 3}), r"n_kv_heads=3 does not divide n_heads=16"),
        (json.dumps(PARAMS | {HUGE: 1}), "unknown key 'kkk"),
        (json.dumps(PARAMS | {"dim": HUGE}), "dim='kkk"),
        (json.dumps(PARAMS)[:-1] + ', "dim": 1' + "0" * 9000 + "}", "is not JSON"),
    ],
    ids=range(14),
)
def test_absurd_params_are_one_short_error(meta, text, message):
    """Absurd params give one short error.

    A past fault: they gave a RecursionError, a RuntimeError, a minute of work, or a message of 10
    MB.
    """
    (meta / "params.json").write_text(text)
    with pytest.raises(ValueError, match=rf"params\.json.*{message}") as error:
        find(meta)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("name", ["params.json", "consolidated.00.pth"])
@pytest.mark.timeout(60)  # opening a pipe waits for a writer
def test_a_pipe_is_not_waited_for(meta, name):
    (meta / name).unlink()
    os.mkfifo(meta / name)
    with pytest.raises(OSError, match=rf"{name} is a pipe"):
        find(meta)


def test_a_program_of_executorch_is_refused_with_what_to_take(tmp_path):
    (tmp_path / "m.pte").touch()
    for path in (tmp_path / "m.pte", tmp_path):
        with pytest.raises(
            ValueError, match=r"m\.pte is a program of Exec.*take Meta's \.pth files"
        ):
            find(path)


def test_a_link_to_nothing_is_a_missing_file(meta):
    """A dangling link, which a cleared download cache leaves, is reported as a missing file."""
    (meta / "consolidated.00.pth").unlink()
    (meta / "consolidated.00.pth").symlink_to(meta / "gone")
    with pytest.raises(FileNotFoundError, match=r"consolidated\.00\.pth is missing: download it"):
        find(meta)


def test_a_path_that_is_not_utf8_is_refused_in_words_that_travel(tmp_path, metas_world):
    """A path that is not UTF-8 is refused with a message that can be encoded.

    torch cannot open such a file, and a past fault was that its error could not be sent to other
    ranks.
    """
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    write_meta(tmp_path / "model", PARAMS, STATE).rename(folder)
    with pytest.raises(ValueError, match=r"caf\\udce9 is not UTF-8: rename the folder") as error:
        find(folder)
    str(error.value).encode()
    with pytest.raises(FileNotFoundError, match=r"caf\\udce9"):
        check_download(folder / "nothing")
    raw = FileNotFoundError(f"{folder} is missing")  # in the form of Python's own errors
    parallel = ModelParallel(world=torch.distributed.group.WORLD)
    with pytest.raises(FileNotFoundError), parallel.agree("the checkpoint", world=True):
        raise raw


def test_what_was_found_cannot_be_changed(meta):
    """A located checkpoint cannot be modified.

    A past fault: a build that wrote its sizes into the checkpoint affected the next build from it.
    """
    params = find(meta).params
    with pytest.raises(FrozenInstanceError):
        params.max_seq_len = 7  # type: ignore[misc]


STRANGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0.5,
    10**30,
    math.inf,
    "x",
    [],
    [1],
    [[]],
    {},
    {"a": []},
)
KEYS = ["architectures", "hidden_act", "mlp_bias", "layer_types", "sliding_window", "pooling"]
KEYS += ["rope_parameters", "rope_scaling", "head_dim", "id2label", "quantization_config"]
KEYS += ["hidden_size", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "is_causal"]
KEYS += ["tie_word_embeddings", "text_config", "model_type", "original_max_position_embeddings"]


@pytest.mark.parametrize("key", KEYS)
def test_any_value_in_a_config_is_read_or_refused(hugging, key):
    path = hugging / "config.json"
    content = json.loads(path.read_text())
    for value in STRANGE:
        path.write_text(json.dumps(content | {key: value}))
        try:
            CheckpointReader(find(hugging))
        except ValueError as e:
            assert str(hugging) in str(e), (value, e)


SIDE_FILES: dict[str, Any] = {
    "1_Pooling/config.json": {"pooling_mode_mean_tokens": True, "include_prompt": True},
    "sentence_bert_config.json": {"max_seq_length": 10, "do_lower_case": False},
    "modules.json": [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}],
    "config_sentence_transformers.json": {"prompts": {"q": "q: "}, "default_prompt_name": "q"},
}


@pytest.mark.parametrize("name", SIDE_FILES)
def test_any_value_in_a_side_file_is_read_or_refused(tmp_path, name):
    """The error names the file and what is wrong there, whatever type the value has."""
    write_model(tmp_path, transformers.LlamaModel, sentence_transformers=SIDE_FILES)
    path = tmp_path / name
    content = json.loads(path.read_text())
    inner = content[0] if isinstance(content, list) else content
    for key, value in itertools.product([*inner], STRANGE):
        changed = inner | {key: value}
        path.write_text(json.dumps([changed] if isinstance(content, list) else changed))
        try:
            find(tmp_path)
        except ValueError as e:
            assert str(path) in str(e) and "cannot be read" not in str(e), (key, value, e)


@pytest.mark.parametrize("name", ["params.json", "consolidated.00.pth"])
@pytest.mark.parametrize("error", [KeyError("k"), AttributeError("a"), OverflowError("o")])
def test_an_error_that_no_reader_expects_names_the_file(meta, monkeypatch, name, error):
    """Whatever a file holds; here a reader fails in a way that none does."""

    def fail(*_: object) -> None:
        raise error

    target = "llama.checkpoint.find.split_params"
    if name.endswith(".pth"):
        target = "llama.checkpoint.files._open_pth"
    monkeypatch.setattr(target, fail)
    with pytest.raises(ValueError, match=rf"{name} cannot be read, .*{type(error).__name__}"):
        find(meta)


@pytest.mark.parametrize("layers", [3, 8000])
def test_layers_that_are_not_there_are_told_before_a_model_is_made(hugging, monkeypatch, layers):
    """A model of 8,000 layers took half a minute to make."""
    write_byte_tokenizer(hugging)
    change_json(hugging / "config.json", num_hidden_layers=layers, vocab_size=512)
    change_safetensors(hugging, "model.embed_tokens.weight", torch.ones(512, 64))
    change_safetensors(hugging, "lm_head.weight", torch.ones(512, 64))
    monkeypatch.setattr(weights, "Transformer", lambda *_, **__: pytest.fail("a model was made"))
    with pytest.raises(ValueError, match=r"layers\.2\.self_attn\.q_proj\.weight and .* missing"):
        Llama.build(str(hugging), None, 64, 1, device="cpu")


@pytest.mark.skipif(not HAS_KERNELS, reason="the CPU kernels look for NaN as they pack")
@pytest.mark.parametrize("name", ["embed_tokens.weight", "layers.1.mlp.up_proj.weight"])
def test_a_number_that_is_none_in_a_model_without_lm_head_is_named(tmp_path, name):
    theirs = write_model(tmp_path, transformers.LlamaModel)
    broken = theirs.get_parameter(name).detach().clone()
    broken[1, 1] = math.nan
    change_safetensors(tmp_path, name, broken)
    with pytest.warns(UserWarning, match=rf"model\.safetensors holds NaN .*{name}"):
        Llama.build(str(tmp_path), None, 64, 1, device="cpu", dtype="bf16").close()
    names = ["tok_embeddings.weight", "layers.1.feed_forward.w3.weight", "output.weight"]
    ((file, found),) = find_not_finite(find(tmp_path), names).items()
    assert file == tmp_path / "model.safetensors" and len(found) == 1 and found[0].endswith(name)
