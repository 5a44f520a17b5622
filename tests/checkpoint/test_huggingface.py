"""Hugging Face's layout: transformers writes it, and its logits show that it was read correctly."""

import os
import shutil

import pytest
import torch

from helpers.weights import (
    change_json,
    change_safetensors,
    expect_shards,
    hf_logits,
    hf_model,
    loaded,
    metas_state,
    scaled_rope,
    tokens_of,
)
from llama.checkpoint.find import find
from llama.checkpoint.hf import config as hf
from llama.model.args import ModelArgs

HF_CASES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "scaled by 8": scaled_rope(8.0),
    "scaled by 32, tied": scaled_rope(32.0) | {"tie_word_embeddings": True},
    "narrow ffn": {"intermediate_size": 48},
    "as many kv heads as heads": {"num_key_value_heads": 4},
}


@pytest.mark.parametrize("case", HF_CASES)
def test_what_transformers_saved_gives_its_logits(tmp_path, case):
    theirs = hf_model(**HF_CASES[case])
    theirs.save_pretrained(tmp_path)
    found = find(tmp_path)
    assert found.layout == "hf"
    assert found.params.ffn_dim == theirs.config.intermediate_size
    ours, state = loaded(found), metas_state(theirs)
    if found.params.tied_output:
        assert ours.output.weight is ours.tok_embeddings.weight
        del state["output.weight"]
    expect_shards(ours, state, {"n_heads": 4, "n_kv_heads": theirs.config.num_key_value_heads})
    torch.testing.assert_close(
        ours(tokens_of(), 0), hf_logits(theirs, tokens_of()), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_gets_its_heads_of_several_safetensors(tmp_path, size):
    theirs = hf_model()
    theirs.save_pretrained(tmp_path, max_shard_size="60KB")
    found = find(tmp_path)
    assert len(found.shards) > 3
    for rank in range(size):
        expect_shards(
            loaded(found, rank, size), metas_state(theirs), {"n_heads": 4, "n_kv_heads": 2}
        )
    change_json(tmp_path / "model.safetensors.index.json", weight_map={"a": "../b.safetensors"})
    with pytest.raises(ValueError, match=r"index\.json: weight_map"):
        find(tmp_path)


def test_the_config_of_transformers_4_is_read_alike(hugging):
    """The config of transformers 4 is read alike.

    rope_theta and rope_scaling are at the top level, and the oldest files have "type" for
    "rope_type".
    """
    rope = {"type": "llama3", "factor": 32.0, **hf.ROPE_SCALING}
    change_json(
        hugging / "config.json", rope_parameters=None, rope_scaling=rope, rope_theta=400000.0
    )
    params = find(hugging).params
    assert (params.rope_factor, params.rope_theta) == (32.0, 400000.0)
    assert params.longest_context == 131072


def test_any_ffn_size_is_said_in_metas_terms():
    draw = torch.Generator().manual_seed(0)
    for dim, ffn in torch.randint(1, 30000, (2000, 2), generator=draw).tolist():
        assert ModelArgs(dim=dim, **hf._ffn_params(dim, ffn)).ffn_dim == ffn


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, r"'mistral': this is a model of another family.*give the"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'.*'silu'"),
        ({"attention_bias": True}, r"attention_bias is True"),
        ({"mlp_bias": True}, r"mlp_bias is True"),
        ({"head_dim": 8}, r"head_dim is 8"),
        ({"hidden_size": "64"}, r"hidden_size='64' must be a whole number"),
        ({"intermediate_size": None}, r"'intermediate_size' is missing"),
        ({"rms_norm_eps": None}, r"'rms_norm_eps' is missing"),
        ({"rope_parameters": None}, r"'rope_theta' is missing"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2}}, r"'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 1e4}, r"'linear'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}, "rope_theta": 1e4}, r"'dynamic'"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0,
                                 **hf.ROPE_SCALING, "high_freq_factor": 2.0}},
            r"high_freq_factor 4",
        ),
    ],
)  # fmt: skip
def test_a_config_of_other_mathematics_is_refused(hugging, changes, message):
    change_json(hugging / "config.json", **changes)
    with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
        find(hugging)


def test_a_tied_config_with_an_output_of_its_own_is_refused(hugging):
    change_json(hugging / "config.json", tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"'lm_head\.weight' has no place.*output is not tied"):
        loaded(find(hugging))


@pytest.mark.parametrize(
    ("spoil", "kind", "message"),
    [
        (lambda d: (d / "config.json").unlink(), FileNotFoundError, r"config\.json is missing"),
        (lambda d: (d / "model.safetensors").write_bytes(b""), ValueError, "is empty"),
        (lambda d: os.truncate(d / "model.safetensors", 9000), ValueError,
         r"model\.safetensors \(9,000 bytes\) is cut short.*download it again"),
        (lambda d: (d / "model.safetensors").write_bytes(b"<!DOCTYPE html>" * 30), ValueError,
         "is a web page"),
        (lambda d: shutil.copy((d / "model.safetensors").rename(d / "a.safetensors"),
                               d / "b.safetensors"),
         ValueError, r"b\.safetensors and a\.safetensors both hold"),
        (lambda d: (d / "model.safetensors").rename(d / "model.safetensors.index.json").write_text(
            '{"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}'),
         FileNotFoundError, r"names model-00002-of-00002\.safetensors, which is missing"),
        (lambda d: change_safetensors(d, "model.norm.weight", None), ValueError,
         r"hugging: model\.norm\.weight is missing"),
        (lambda d: change_safetensors(d, "model.norm.weight", torch.ones(64).char()), ValueError,
         r"model\.norm\.weight has type torch\.int8.*quantized"),
        (lambda d: change_safetensors(d, "model.norm.bias", torch.ones(64)), ValueError,
         r"'model\.norm\.bias' has no place"),
        (lambda d: change_safetensors(d, "norm.weight", torch.ones(64)), ValueError,
         r"safetensors: 'norm\.weight' has no place"),
    ],
)  # fmt: skip
def test_a_hugging_face_folder_that_is_not_whole(hugging, spoil, kind, message):
    spoil(hugging)
    with pytest.raises(kind, match=message):
        loaded(find(hugging))
