"""Folders with the weights of several models: those that transformers loads are taken."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed.checkpoint as distributed_checkpoint
from safetensors.torch import save_file

from helpers.checkpoints import random_state, write_meta
from helpers.gguf_files import PARAMS as GGUF_PARAMS
from helpers.gguf_files import write_gguf
from helpers.weights import (
    PARAMS,
    STATE,
    change_json,
    change_safetensors,
    expect_shards,
    from_hf,
    hf_logits,
    hf_model,
    loaded,
    tokens_of,
)
from llama.build_args import BuildArgs
from llama.checkpoint.find import find
from llama.checkpoint.verify import verify
from llama.checkpoint.weight_files import INDEX
from llama.loading.files import find_files
from llama.ranks.placement import WHOLE

OTHER_STATE = random_state(PARAMS, seed=9)


def write_others(folder: Path, name: str) -> None:
    """Write a file of weights of another model, in the form that its name says."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    other = {key: tensor * 2 for key, tensor in hf_model().state_dict().items()}
    if path.suffix == ".pth":
        write_meta(path.parent, PARAMS, OTHER_STATE)
    elif path.suffix == ".gguf":
        write_gguf(path, GGUF_PARAMS)
    elif path.suffix == ".bin":
        torch.save(other, path)
    elif name == "packed.safetensors":
        write_meta(folder, PARAMS, {})
        (folder / "consolidated.00.pth").unlink()
        save_file(other, path, metadata={"format": "llama-packed/2"})
    elif name == "consolidated.safetensors":
        (folder / "params.json").write_text(json.dumps(PARAMS))
        save_file(OTHER_STATE, path)
    else:
        save_file(other, path, metadata={"format": "pt"})


OTHERS = [
    "original/consolidated.00.pth",
    "consolidated.00.pth",
    "packed.safetensors",
    "model-Q8_0.gguf",
    "consolidated.safetensors",
    "adapter_model.safetensors",
    "model.fp16.safetensors",
    "model.ema.safetensors",
    "model-00001-of-00002.safetensors",
    "more.safetensors",
    "pytorch_model.bin",
]


@pytest.mark.parametrize("max_shard_size", ["1GB", "60KB"])
@pytest.mark.parametrize("name", OTHERS)
def test_the_weights_that_transformers_loads_are_taken(tmp_path, name, max_shard_size):
    write_others(tmp_path, name)
    hf_model().save_pretrained(tmp_path, max_shard_size=max_shard_size)
    found = find(tmp_path)
    logits = loaded(found)(tokens_of(), 0)
    expected = hf_logits(from_hf(tmp_path), tokens_of())
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    if (tmp_path / name).exists():  # transformers has removed what looks like its own shards
        assert found.left == (tmp_path / name,)
        assert found.choice.endswith(f"taken, and {name} is left")
        assert found.choice in verify(tmp_path)


def test_a_single_file_comes_before_an_index_of_earlier_shards(tmp_path):
    hf_model(tie_word_embeddings=False).save_pretrained(tmp_path, max_shard_size="60KB")
    earlier = {path: path.read_bytes() for path in tmp_path.glob("model*")}
    hf_model(initializer_range=0.3).save_pretrained(tmp_path)
    for path, content in earlier.items():
        path.write_bytes(content)
    expected = hf_logits(from_hf(tmp_path), tokens_of())
    found = find(tmp_path)
    logits = loaded(found)(tokens_of(), 0)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert f"model.safetensors is taken, and model-00001-of-{len(found.left):05d}" in found.choice


@pytest.mark.parametrize("max_shard_size", ["1GB", "60KB"])
@pytest.mark.parametrize("stem", ["consolidated", "other"])
def test_the_weights_that_config_json_names_are_taken(tmp_path, stem, max_shard_size):
    hf_model(initializer_range=0.3).save_pretrained(tmp_path, max_shard_size=max_shard_size)
    named = f"{stem}.safetensors"
    if max_shard_size == "1GB":
        (tmp_path / "model.safetensors").rename(tmp_path / named)
    else:
        named = f"{stem}.safetensors.index.json"
        (tmp_path / INDEX).rename(tmp_path / named)
    hf_model().save_pretrained(tmp_path / "later")
    (tmp_path / "later" / "model.safetensors").rename(tmp_path / "model.safetensors")
    change_json(tmp_path / "config.json", transformers_weights=named)
    found = find(tmp_path)
    logits = loaded(found)(tokens_of(), 0)
    expected = hf_logits(from_hf(tmp_path), tokens_of())
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert found.left == (tmp_path / "model.safetensors",)


@pytest.mark.parametrize(
    ("named", "error", "message"),
    [
        ("../model.safetensors", ValueError, r"'\.\./model.*must name a file of this folder"),
        ("adapter_model.bin", ValueError, "must name a file of this folder that ends in"),
        (7, ValueError, "is 7: it must name a file"),
        ("gone.safetensors", FileNotFoundError, r"names gone\.safetensors in transformers_weights"),
        ("gone.safetensors.index.json", FileNotFoundError, r"gone\.safetensors\.index\.json"),
    ],
)
def test_a_name_in_config_json_that_is_no_file_of_the_folder_is_an_error(
    tmp_path, named, error, message
):
    hf_model().save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", transformers_weights=named)
    with pytest.raises(error, match=message):
        find(tmp_path)


@pytest.mark.parametrize(
    ("write", "layout"),
    [
        (lambda folder: write_meta(folder, PARAMS, STATE, 2), "meta"),
        (lambda folder: write_gguf(folder / "model.gguf", GGUF_PARAMS), "gguf"),
    ],
)
def test_own_files_of_any_layout_come_before_those_of_original(tmp_path, write: Callable, layout):
    write_meta(tmp_path / "original", PARAMS, OTHER_STATE, 2)
    alone = find(tmp_path)
    assert (alone.folder, alone.left, alone.choice) == (tmp_path / "original", (), "")
    write(tmp_path)
    found = find(tmp_path)
    assert (found.layout, found.folder) == (layout, tmp_path)
    assert "original/consolidated.00.pth with 1 more are left" in found.choice
    if layout == "meta":
        expect_shards(loaded(found), STATE, PARAMS)


def test_weights_without_their_sizes_come_after_those_that_are_whole(tmp_path):
    hf_model().save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    write_meta(tmp_path, PARAMS, STATE)
    found = find(tmp_path)
    assert (found.layout, found.left) == ("meta", (tmp_path / "model.safetensors",))
    (tmp_path / "params.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        find(tmp_path)


def test_part_of_a_download_is_not_passed_over_for_original(tmp_path):
    hf_model().save_pretrained(tmp_path, max_shard_size="60KB")
    write_meta(tmp_path / "original", PARAMS, STATE)
    last = sorted(tmp_path.glob("model-*"))[-1]
    last.unlink()
    with pytest.raises(FileNotFoundError, match=rf"names {last.name}, which is .*, or give .*orig"):
        find(tmp_path)


class Wrapped(torch.nn.Module):
    """A module around a model, as training scripts have."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model


def compile_part(model: Any) -> torch.nn.Module:
    model.model = torch.compile(model.model)
    return model


WRAPPERS: dict[str, Callable] = {
    "plain": lambda model: model,
    "torch.compile": torch.compile,
    "a compiled part": compile_part,
    "DataParallel": torch.nn.DataParallel,
    "another module": Wrapped,
    "both": lambda model: torch.nn.DataParallel(torch.compile(Wrapped(model))),
}


@pytest.mark.parametrize("suffix", [".bin", ".safetensors", "-sharded.bin"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_names_of_wrappers_and_bin_files_are_read(tmp_path, name, suffix):
    model = hf_model()
    expected = hf_logits(model, tokens_of())
    model.config.save_pretrained(tmp_path)
    state = WRAPPERS[name](model).state_dict()
    parts = [dict(list(state.items())[i::2]) for i in range(2)]
    if suffix == ".safetensors":
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    elif suffix == ".bin":
        torch.save({"model": state, "step": 3, "args": {}}, tmp_path / "pytorch_model.bin")
    else:
        files = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
        for file, part in zip(files, parts, strict=True):
            torch.save(part, tmp_path / file)
        named = [(key, file) for file, part in zip(files, parts, strict=True) for key in part]
        index = tmp_path / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": dict(named)}))
    logits = loaded(find(tmp_path))(tokens_of(), 0)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    verify(tmp_path)


def test_other_names_are_named_and_not_called_an_incomplete_download(tmp_path):
    model = hf_model()
    model.config.save_pretrained(tmp_path)
    state = {f"policy.{key}": tensor for key, tensor in model.state_dict().items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"'policy\.\S+' is there, which is no name") as caught:
        loaded(find(tmp_path))
    assert "download" not in str(caught.value)


FOREIGN = {
    "checkpoint-500/model.safetensors": r"a Trainer \(.*such as \S+/checkpoint-500",
    "checkpoint-20/pytorch_model.bin": r"a Trainer \(.*such as \S+/checkpoint-20",
    "pytorch_model_fsdp_0/__0_0.distcp": r"accelerate merge-weights \S+/pytorch_model_fsdp_0",
    "zero_to_fp32.py": r"DeepSpeed \(zero_to_fp32\.py\): convert it: python \S+zero_to_fp32\.py",
    "global_step9/mp_rank_00_model_states.pt": r"python -m deepspeed\.utils\.zero_to_fp32",
    "meta_model_0.pt": r"rename \S+meta_model_0\.pt to consolidated\.00\.pth",
    "hf_model_0001_0.pt": r"torchtune's files .* rename each to pytorch_model",
    "consolidated.safetensors": r"safetensors with Meta's names",
    "tf_model.h5": r"weights for TensorFlow \(tf_model\.h5\)",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_weights_of_another_form_are_named_with_what_converts_them(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    with pytest.raises(ValueError, match=FOREIGN[name]):
        find(tmp_path)


def test_what_torch_and_peft_write_is_named(tmp_path):
    model = hf_model()
    distributed_checkpoint.save(
        {"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True
    )
    with pytest.raises(ValueError, match=r"torch\.distributed\.checkpoint \(__0_0\.distcp\)"):
        find(tmp_path / "dcp")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(str(tmp_path / "lora"))
    with pytest.raises(ValueError, match=r"a LoRA adapter, and no model .*--lora \S+/lora"):
        find(tmp_path / "lora")


def test_loading_logs_which_weights_are_taken(tmp_path, caplog):
    hf_model().save_pretrained(tmp_path)
    args = BuildArgs(str(tmp_path), max_seq_len=128)
    find_files(args, WHOLE, torch.device("cpu"))
    assert not caplog.messages
    write_others(tmp_path, "original/consolidated.00.pth")
    change_safetensors(tmp_path, "model.norm.weight", torch.ones(64))
    find_files(args, WHOLE, torch.device("cpu"))
    assert caplog.messages == [
        f"llama: {tmp_path} holds several weights: model.safetensors is taken, and "
        "original/consolidated.00.pth is left"
    ]
