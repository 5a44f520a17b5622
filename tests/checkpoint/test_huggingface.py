"""Hugging Face's layout: transformers writes it, and its logits show that it was read correctly."""

import json
import os
import shutil
from typing import Any

import pytest
import torch

from helpers.weights import (
    LLAMA3_SCALING,
    change_json,
    change_safetensors,
    expect_shards,
    from_hf,
    hf_logits,
    hf_model,
    loaded,
    metas_state,
    scaled_rope,
    tokens_of,
)
from llama.checkpoint.find import find
from llama.checkpoint.hf import config as hf
from llama.checkpoint.write.convert import convert
from llama.model.args import ModelArgs

YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 2.0}
OLD_LINEAR = {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 20000.0}
HF_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "scaled by 8": scaled_rope(8.0),
    "scaled by 32, tied": scaled_rope(32.0) | {"tie_word_embeddings": True},
    "linear": scaled_rope(4.0, rope_type="linear"),
    "linear, transformers 4": {"rope_parameters": None} | OLD_LINEAR,
    "dynamic": scaled_rope(2.0, rope_type="dynamic"),
    "of another context": scaled_rope(8.0, original_max_position_embeddings=64),
    "of other turns": scaled_rope(
        8.0, low_freq_factor=0.5, high_freq_factor=16.0, original_max_position_embeddings=64
    ),
    "yarn": scaled_rope(4.0, rope_type="yarn", original_max_position_embeddings=512),
    "yarn, all parameters": scaled_rope(
        16.0,
        rope_type="yarn",
        original_max_position_embeddings=64,
        beta_fast=8.0,
        beta_slow=2.0,
        mscale=1.5,
        mscale_all_dim=0.5,
        truncate=False,
    ),
    "yarn, blended pairs": scaled_rope(
        16.0,
        rope_type="yarn",
        original_max_position_embeddings=4096,
        beta_fast=16.0,
        beta_slow=2.0,
        truncate=False,
    ),
    "yarn, own attention factor": scaled_rope(
        2.5, rope_type="yarn", attention_factor=0.7, original_max_position_embeddings=64
    ),
    "yarn of a factor of 1": scaled_rope(1.0, rope_type="yarn", attention_factor=1.3),
    "yarn, factor from the context": {
        "rope_parameters": YARN | {"factor": None, "original_max_position_embeddings": 1024},
    },
    "yarn, original context outside": {
        "original_max_position_embeddings": 128,
        "rope_parameters": YARN | {"original_max_position_embeddings": 4096},
    },
    "wide heads": {"head_dim": 48},
    "narrow heads": {"head_dim": 8, "num_key_value_heads": 1} | scaled_rope(8.0),
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


def test_an_original_context_outside_of_the_scaling_comes_first(tmp_path):
    """transformers writes one context in both places, and reads the outer one of other files."""
    hf_model(rope_parameters=YARN | {"original_max_position_embeddings": 4096}).save_pretrained(
        tmp_path
    )
    change_json(tmp_path / "config.json", original_max_position_embeddings=128)
    expected = hf_logits(from_hf(tmp_path), tokens_of())
    torch.testing.assert_close(loaded(find(tmp_path))(tokens_of(), 0), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("head_dim", [None, 24])
@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_gets_its_heads_of_several_safetensors(tmp_path, size, head_dim):
    theirs = hf_model(head_dim=head_dim)
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
    rope = {"type": "llama3", "factor": 32.0, **LLAMA3_SCALING}
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
        ({"head_dim": 7}, r"head_size=7 must be even"),
        ({"head_dim": "16"}, r"head_dim='16' must be a whole number"),
        ({"hidden_size": "64"}, r"hidden_size='64' must be a whole number"),
        ({"intermediate_size": None}, r"'intermediate_size' is missing"),
        ({"rms_norm_eps": None}, r"'rms_norm_eps' is missing"),
        ({"rope_parameters": None}, r"'rope_theta' is missing"),
        ({"rope_parameters": YARN | {"short_factor": [1.0]}}, r"'yarn'"),
        ({"rope_parameters": YARN | {"factor": "2"}}, r"factor='2' must be a number"),
        ({"rope_parameters": YARN | {"beta_slow": 40.0}}, r"beta_slow=40\.0: YaRN needs"),
        ({"rope_parameters": YARN | {"rope_theta": 1.0}}, r"rope_theta=1\.0, .*: YaRN needs"),
        ({"rope_parameters": YARN | {"truncate": "no"}}, r"rope_truncate='no' must be true"),
        ({"rope_scaling": {"type": "longrope", "factor": 2}, "rope_theta": 1e4}, r"'longrope'"),
        ({"rope_scaling": {"type": "linear"}, "rope_theta": 1e4}, r"'linear'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, r"0\.5"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5: .* needs 1"),
        ({"logits_scaling": 8.0}, r"logits_scaling is 8\.0"),
        ({"logit_scale": 0.06}, r"logit_scale is 0\.06"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping is 30\.0: .* null"),
        ({"residual_multiplier": 0.2}, r"residual_multiplier is 0\.2"),
        ({"sliding_window": 4096}, r"sliding_window is 4096: .*=131072"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, r"needs full_attention"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0,
                                 **LLAMA3_SCALING, "high_freq_factor": 1.0}},
            r"low_freq_factor=1\.0 must be below high_freq_factor=1\.0",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0,
                                 "low_freq_factor": 1.0}},
            r"'llama3' with a factor, low_freq_factor, high_freq_factor",
        ),
    ],
)  # fmt: skip
def test_a_config_of_other_mathematics_is_refused(hugging, changes, message):
    change_json(hugging / "config.json", **changes)
    with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
        find(hugging)


NEUTRAL: list[dict[str, Any]] = [
    {"hidden_act": "swish"},
    {"sliding_window": None, "logits_scaling": 1.0, "partial_rotary_factor": 1.0},
    {"sliding_window": 4096, "use_sliding_window": False},
    {"sliding_window": 131072, "layer_types": ["full_attention", "full_attention"]},
    {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 1.0}},
    {"rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", "factor": 1.0,
                         "attention_factor": None}},
    {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default", "partial_rotary_factor": 1.0,
                         "attention_factor": None, "factor": None}},
]  # fmt: skip


@pytest.mark.parametrize("changes", NEUTRAL)
def test_values_that_change_nothing_are_no_error(hugging, changes):
    path = hugging / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    expected = hf_logits(from_hf(hugging), tokens_of())
    torch.testing.assert_close(loaded(find(hugging))(tokens_of(), 0), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "scaling",
    [
        scaled_rope(3.0, rope_type="linear"),
        scaled_rope(8.0, original_max_position_embeddings=64),
        HF_CASES["of other turns"],
        HF_CASES["yarn, all parameters"],
        HF_CASES["yarn, blended pairs"],
        HF_CASES["yarn of a factor of 1"],
        HF_CASES["wide heads"],
        HF_CASES["narrow heads"],
    ],
)
def test_a_conversion_keeps_the_equations(tmp_path, scaling):
    """From Hugging Face's layout to Meta's, and from there to Hugging Face's again."""
    theirs = hf_model(**scaling)
    theirs.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "meta")
    convert(tmp_path / "meta", tmp_path / "again")
    expected = hf_logits(theirs, tokens_of())
    logits = loaded(find(tmp_path / "meta"))(tokens_of(), 0)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    again = hf_logits(from_hf(tmp_path / "again"), tokens_of())
    torch.testing.assert_close(again, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("max_shard_size", ["1GB", "60KB"])
@pytest.mark.parametrize("change", [None, 0.0, 3e-3])
def test_a_tied_config_with_an_lm_head(tmp_path, change, max_shard_size):
    """The file's lm_head counts if it differs; else one matrix is held, as without it."""
    theirs = hf_model(tie_word_embeddings=False)
    embedding = theirs.model.embed_tokens.weight.detach()
    if change is not None:
        theirs.lm_head.weight = torch.nn.Parameter(embedding.clone())
        theirs.lm_head.weight.data[77, 5] += change
    theirs.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    change_json(tmp_path / "config.json", tie_word_embeddings=True)
    found = find(tmp_path)
    assert found.params.tied_output == (change == 0.0)
    logits = loaded(found)(tokens_of(), 0)
    torch.testing.assert_close(logits, hf_logits(theirs, tokens_of()), atol=1e-4, rtol=1e-4)


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
