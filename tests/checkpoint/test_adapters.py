"""LoRA adapters are merged into the weights of every layout, and bad ones are refused by name."""

from __future__ import (
    annotations,
)  # transformers imports its models lazily, when these names are first used

import json
import math
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from helpers.adapters import (
    CONFIG,
    DOWN,
    EMBEDDING,
    HEAD,
    PREFIX,
    QUERY,
    merged_state,
    update_of,
    weight_of,
    write_adapter,
)
from helpers.checkpoints import shard_of, write_byte_tokenizer, write_meta
from helpers.kernels import HAS_KERNELS
from helpers.launch import torchrun
from helpers.weights import from_hf, hf_logits, hf_model, loaded, metas_state, tokens_of
from llama import Llama, Tokenizer
from llama.build_args import lora_paths
from llama.checkpoint import reader
from llama.checkpoint.find import find
from llama.checkpoint.hf.tokenizer import tokenizer_json
from llama.checkpoint.lora import config as adapter_config
from llama.checkpoint.tokenizer_files import load_tokenizer
from llama.checkpoint.verify import verify
from llama.checkpoint.write.convert import convert, pack
from llama.cli import main
from llama.model import Transformer

ALL = [
    f"model.layers.{i}.{name}"
    for i in range(2)
    for name in (
        *(f"self_attn.{part}_proj" for part in "qkvo"),
        *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    )
]
PARAMS = {
    "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 512,
    "multiple_of": 160, "norm_eps": 1e-5, "rope_theta": 500000.0, "context_length": 131072,
}  # fmt: skip
PARAMS |= {"ffn_dim_multiplier": 160 / 170}


@pytest.fixture(scope="module")
def model() -> transformers.LlamaForCausalLM:
    """A model whose weights are numbers of bf16, so that every layout can hold them."""
    return hf_model(vocab_size=512).bfloat16().float()


@pytest.fixture(scope="module")
def bases(model, tmp_path_factory) -> dict[str, Path]:
    """The model in the layouts that `find` knows, all with a tokenizer."""
    root = tmp_path_factory.mktemp("bases")
    model.save_pretrained(root / "hf")
    write_byte_tokenizer(root / "hf")
    for shards in (1, 2):
        folder = write_meta(root / f"meta{shards}", PARAMS, metas_state(model), shards)
        write_byte_tokenizer(folder)
    convert(root / "hf", root / "base.gguf")
    convert(root / "hf", root / "bits8.gguf", quantize="q8_0")
    return {path.stem: path for path in root.iterdir()}


@pytest.fixture
def adapter(model, tmp_path) -> Path:
    """An adapter of two matrices."""
    return write_adapter(tmp_path / "adapter", update_of(model, QUERY, DOWN))


def expect_merged(model: Transformer, state: dict[str, Tensor], params: dict) -> None:
    """Check that each weight is the expected one in float64, rounded once."""
    shards = model.named_shards()
    rank, size = model.parallel.rank, model.parallel.size
    for name, shard in shards.items():
        expected = shard_of(name, state[name], params, rank, size).to(shard.dtype)
        assert torch.equal(shard, expected), (name, rank, size)


@pytest.mark.parametrize("base", ["hf", "meta1", "meta2", "base"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_each_rank_of_each_layout_holds_its_share_of_the_merged_weights(
    base, dora, model, bases, tmp_path, monkeypatch
):
    """The bits are those of a merge of whole matrices in float64, rounded once, on any rank."""
    monkeypatch.setattr(reader, "_CHUNK_ELEMENTS", 1 << 12)  # several chunks of each matrix
    tensors = update_of(model, *ALL, EMBEDDING, HEAD, dora=dora)
    folder = write_adapter(tmp_path / "adapter", tensors, use_dora=dora)
    merged = find(bases[base]).merged_with(folder)
    state = merged_state(model, tensors)
    for size in (1, 2, 3, 4):
        for rank in range(size):
            dtype = torch.float32 if size == 1 else torch.bfloat16
            expect_merged(loaded(merged, rank, size, dtype), state, PARAMS)


def test_weights_that_were_trained_whole_take_the_place_of_the_base_s(model, bases, tmp_path):
    names = ("lm_head", "model.embed_tokens", "model.norm", "model.layers.1.input_layernorm")
    tensors = {
        f"{PREFIX}{name}.weight": torch.randn_like(model.get_submodule(name).weight)
        for name in names
    }
    tensors |= update_of(model, QUERY)
    saved = ["lm_head", "embed_tokens", "norm", "input_layernorm"]
    folder = write_adapter(tmp_path / "adapter", tensors, modules_to_save=saved)
    state = merged_state(model, tensors)
    for rank in range(2):
        expect_merged(loaded(find(bases["hf"]).merged_with(folder), rank, 2), state, PARAMS)


def test_a_weight_in_the_file_is_replaced_before_the_product_is_added(model, bases, tmp_path):
    """PEFT stores the embedding itself alongside its update, in case rows were added to it."""
    weight = torch.randn(512, 64)
    tensors = update_of(model, EMBEDDING)
    stored = {f"{PREFIX}{EMBEDDING}.base_layer.weight": weight}
    folder = write_adapter(tmp_path / "adapter", tensors | stored, target_modules=["embed_tokens"])
    a, b = (tensors[f"{PREFIX}{EMBEDDING}.lora_embedding_{part}"].double() for part in "AB")
    merged = loaded(find(bases["hf"]).merged_with(folder)).named_shards()
    expected = weight.double() + 2 * (b @ a).T
    assert torch.equal(merged["tok_embeddings.weight"], expected.float())


def test_several_adapters_are_merged_in_order_and_rounded_once(model, bases, tmp_path):
    first = update_of(model, QUERY, DOWN)
    second = update_of(model, QUERY, rank=2, dora=True)
    one = write_adapter(tmp_path / "one", first)
    two = write_adapter(tmp_path / "two", second, r=2, lora_alpha=3.0, use_dora=True)
    between = transformers.LlamaForCausalLM(model.config).double()
    between.load_state_dict({name: x.double() for name, x in model.state_dict().items()})
    for name in (QUERY, DOWN):
        a, b = (first[f"{PREFIX}{name}.lora_{part}.weight"].double() for part in "AB")
        weight_of(between, name).data += 2 * b @ a
    state = merged_state(between, second, 1.5)
    loras: list[Any] = [f"{one},{two}", [one, str(two)]]
    for lora in loras:
        expect_merged(loaded(find(bases["hf"]).merged_with(lora)), state, PARAMS)


def test_ranks_and_alphas_by_pattern(model, bases, tmp_path):
    """The first pattern that matches the end of a name counts, as in PEFT."""
    tensors = update_of(model, QUERY, rank=2) | update_of(model, DOWN, rank=4)
    config: dict[str, Any] = {
        "rank_pattern": {"layers.0.self_attn.q_proj": 2, ".*q_proj": 7},
        "alpha_pattern": {r"model\.layers\.\d+\.mlp\.down_proj": 3, "proj": 99},
    }
    folder = write_adapter(tmp_path / "adapter", tensors, use_rslora=True, **config)
    merged = find(bases["hf"]).merged_with(folder)
    updates = merged.adapters[0].updates
    scales = {name: x.low_rank.scale for name, x in updates.items() if x.low_rank}
    assert scales == {
        "layers.0.attention.wq.weight": 8 / math.sqrt(2),
        "layers.1.feed_forward.w2.weight": 3 / math.sqrt(4),
    }
    for name, title in (("wq", QUERY), ("w2", DOWN)):
        full = next(key for key in scales if name in key)
        one = {key: x for key, x in tensors.items() if title in key}
        expected = merged_state(model, one, scales[full])[full]
        assert torch.equal(loaded(merged).named_shards()[full], expected.float())


def test_a_file_of_torch_and_names_without_the_inner_model(model, bases, tmp_path):
    tensors = update_of(model, QUERY)
    state = merged_state(model, tensors)
    shorter = {name.replace("model.model.", "model."): x for name, x in tensors.items()}
    assert shorter.keys() == {f"{PREFIX}layers.0.self_attn.q_proj.lora_{x}.weight" for x in "AB"}
    folder = write_adapter(tmp_path / "adapter", shorter, suffix="bin")
    expect_merged(loaded(find(bases["meta1"]).merged_with(folder)), state, PARAMS)


@pytest.fixture
def tied(tmp_path) -> tuple[transformers.LlamaForCausalLM, Path]:
    model = hf_model(vocab_size=512, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "tied")
    write_byte_tokenizer(tmp_path / "tied")
    return model, tmp_path / "tied"


@pytest.mark.parametrize("layout", ["hf", "meta"])
@pytest.mark.parametrize("end", [EMBEDDING, HEAD])
def test_an_update_of_one_end_unties_a_tied_model(end, layout, tied, tmp_path):
    model, base = tied
    if layout == "meta":
        convert(base, tmp_path / "meta")
        base = tmp_path / "meta"
    tensors = update_of(model, end)
    folder = write_adapter(tmp_path / "adapter", tensors)
    merged = find(base).merged_with(folder)
    assert not merged.params.tied_output and find(base).params.tied_output
    expect_merged(loaded(merged), merged_state(model, tensors), PARAMS)
    convert(base, tmp_path / "out", lora=folder)
    assert not from_hf(tmp_path / "out").config.tie_word_embeddings
    expect_merged(loaded(find(tmp_path / "out")), merged_state(model, tensors), PARAMS)


def test_an_update_of_layers_leaves_a_model_tied(tied, tmp_path):
    model, base = tied
    folder = write_adapter(tmp_path / "adapter", update_of(model, QUERY))
    merged = find(base).merged_with(folder)
    assert merged.params.tied_output
    convert(base, tmp_path / "out", lora=folder)
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_convert_writes_the_merged_weights_in_every_format(model, bases, tmp_path):
    tensors = update_of(model, *ALL, HEAD, dora=True)
    folder = write_adapter(tmp_path / "adapter", tensors, use_dora=True)
    state = merged_state(model, tensors)
    for base in ("hf", "meta1", "base"):
        out = tmp_path / f"hf of {base}"
        convert(bases[base], out, lora=folder)
        dtype = torch.bfloat16 if base == "base" else torch.float32
        expect_merged(loaded(find(out), dtype=dtype), state, PARAMS)
        (entry,) = json.loads((out / "lora.json").read_text())["merged"]
        assert entry["name"] == "adapter" and len(entry["sha256"]) == 64
    convert(tmp_path / "hf of hf", tmp_path / "meta")
    expect_merged(loaded(find(tmp_path / "meta")), state, PARAMS)
    convert(bases["meta2"], tmp_path / "out.gguf", lora=folder)
    expect_merged(loaded(find(tmp_path / "out.gguf"), dtype=torch.bfloat16), state, PARAMS)
    convert(bases["meta1"], tmp_path / "int8", lora=folder, quantize="int8")
    convert(tmp_path / "hf of meta1", tmp_path / "int8 later", quantize="int8")
    written = [load_file(tmp_path / x / "model.safetensors") for x in ("int8", "int8 later")]
    assert written[0].keys() == written[1].keys()
    assert all(torch.equal(written[0][name], written[1][name]) for name in written[0])


@pytest.mark.skipif(not HAS_KERNELS, reason="packed weights are for the CPU kernels")
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_packed_weights_are_those_of_a_merged_folder(quantize, adapter, bases, tmp_path):
    pack(bases["hf"], tmp_path / "packed", lora=adapter, quantize=quantize)
    convert(bases["hf"], tmp_path / "merged", lora=adapter)
    pack(tmp_path / "merged", tmp_path / "later", quantize=quantize)
    once, twice = (load_file(tmp_path / x / "packed.safetensors") for x in ("packed", "later"))
    assert once.keys() == twice.keys() and all(torch.equal(once[x], twice[x]) for x in once)
    assert (tmp_path / "packed" / "lora.json").exists()
    with pytest.raises(ValueError, match=r"packed weights, .* llama convert .* --packed --lora"):
        Llama.build(str(tmp_path / "packed"), lora=adapter, device="cpu")
    with pytest.raises(ValueError, match="holds packed weights"):
        find(tmp_path / "packed").merged_with(adapter)


@pytest.mark.skipif(not HAS_KERNELS, reason="codes stay codes for the CPU kernels")
def test_codes_take_no_adapter_unless_they_are_dequantized(model, adapter, bases, tmp_path):
    base = bases["bits8"]
    with pytest.raises(ValueError, match=r"codes of Q8_0, .* build with dtype='bf16'"):
        Llama.build(str(base), lora=adapter, device="cpu")
    with pytest.raises(ValueError, match=r"codes of Q8_0 when it is packed, .* give --quantize"):
        pack(base, tmp_path / "packed", lora=adapter)
    llama = Llama.build(str(base), lora=adapter, dtype="bf16", device="cpu", max_seq_len=64)
    assert llama.model.norm.weight.dtype == torch.bfloat16
    plain = loaded(find(base)).named_shards()  # of float32, in which codes of Q8_0 are exact
    tensors = update_of(model, QUERY, DOWN)
    merged = loaded(find(base).merged_with(adapter), dtype=torch.bfloat16).named_shards()
    down = "layers.1.feed_forward.w2.weight"
    a, b = (tensors[f"{PREFIX}{DOWN}.lora_{part}.weight"].double() for part in "AB")
    assert torch.equal(merged[down], (plain[down].double() + 2 * b @ a).bfloat16())


def test_a_build_merges_and_says_so(model, adapter, bases, capsys):
    base = bases["hf"]
    args: dict[str, Any] = {"max_seq_len": 64, "dtype": "fp32", "device": "cpu"}
    llama = Llama.build(str(base), lora=adapter, **args)
    assert "fp32 with adapter," in capsys.readouterr().out
    state = merged_state(model, update_of(model, QUERY, DOWN))
    expect_merged(llama.model, state, PARAMS)
    drafted = Llama.build(str(base), lora=str(adapter), speculate=str(base), **args)
    assert drafted.generate([[256, 65, 66]], 8, 0)[0] == llama.generate([[256, 65, 66]], 8, 0)[0]


def test_the_command_merges(adapter, bases, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["convert", str(bases["hf"]), str(out), "--lora", str(adapter)]) == 0
    assert verify(out)
    written = find(out)
    merged = loaded(find(bases["hf"]).merged_with(adapter)).named_shards()
    for name, shard in loaded(written).named_shards().items():
        assert torch.equal(shard, merged[name])
    arguments = ["convert", str(bases["hf"]), str(tmp_path / "x"), "--lora", f"{adapter},"]
    assert main(arguments) != 0
    assert "has an empty path" in capsys.readouterr().err


def test_paths_of_adapters():
    assert lora_paths(None) == () and lora_paths("a,b") == ("a", "b")
    assert lora_paths(Path("a,b")) == ("a,b",) and lora_paths(["a,b", Path("c")]) == ("a,b", "c")
    for wrong in (3, [3], b"a", "a,,b", "", [""]):
        with pytest.raises(ValueError, match="lora="):
            lora_paths(wrong)  # type: ignore[arg-type]


def test_two_ranks_generate_what_one_does(model, adapter, bases, tmp_path):
    other = write_adapter(tmp_path / "other", update_of(model, QUERY))
    broken = write_adapter(tmp_path / "broken", update_of(model, QUERY, rank=3))
    build = {"do": "build_merged", "folder": str(bases["meta1"]), "prompt": [256, 65, 66]}
    jobs: list[dict] = [
        {**build, "lora": [str(adapter), str(other)]},
        {**build, "lora": [str(adapter), str(broken)]},
        {**build, "lora": [str(adapter), None]},
        {**build, "lora": [str(adapter), str(shutil.copytree(adapter, tmp_path / "copy"))]},
    ]
    ranks = torchrun(2, jobs, tmp_path, num_builds=1)
    alone = Llama.build(
        str(bases["meta1"]), max_seq_len=64, dtype="fp32", device="cpu", lora=adapter
    )
    expected = alone.generate([[256, 65, 66]], 8, 0)[0]
    for rank, (differ, one_bad, one_none, same) in enumerate(ranks):
        assert "lora: SHA-256" in differ["error"]
        assert ("lora_A" if rank else "rank 1") in one_bad["error"] or "shape" in one_bad["error"]
        assert "error" in one_none
        assert same["result"] == expected


def config_with(**config: Any) -> Callable[[dict[str, Tensor], Path], None]:
    return lambda tensors, folder: void(write_adapter(folder, tensors, **config))


def tensors_with(**changes: Any) -> Callable[[dict[str, Tensor], Path], None]:
    """Return a damage: "__" in a keyword stands for "."; None removes a tensor."""
    named = {name.replace("__", "."): tensor for name, tensor in changes.items()}

    def damage(tensors: dict[str, Tensor], folder: Path) -> None:
        changed = tensors | {f"{PREFIX}{name}": tensor for name, tensor in named.items()}
        write_adapter(folder, {name: x for name, x in changed.items() if x is not None})

    return damage


def rows_with(ids: Any, **rows: Tensor) -> Callable[[dict[str, Tensor], Path], None]:
    """Return a damage: rows of tokens of the embedding or lm_head, and the ids of the tokens."""

    def damage(tensors: dict[str, Tensor], folder: Path) -> None:
        titles = {"embed_tokens": EMBEDDING, "lm_head": HEAD, "query": QUERY}
        for name, values in rows.items():
            end = "token_adapter.trainable_tokens_delta"
            tensors[f"{PREFIX}{titles[name]}.{end}"] = values
        write_adapter(folder, tensors, trainable_token_indices=ids)

    return damage


def void(_: object) -> None:
    return None


Q = QUERY.replace(".", "__")
DAMAGES = {
    "another method": (config_with(peft_type="IA3"), "peft_type is 'IA3'"),
    "a bias": (config_with(bias="lora_only"), "bias is 'lora_only'"),
    "pissa": (config_with(init_lora_weights="pissa_niter_4"), "'pissa_niter_4', which changes"),
    "olora": (config_with(init_lora_weights="olora"), "changes the base model"),
    "another start": (config_with(init_lora_weights="mica"), "'mica', which this runtime does not"),
    "a new key": (config_with(use_magic=True), "'use_magic' is True"),
    "a lost token": (
        config_with(trainable_token_indices=[1]),
        "trainable_token_indices of adapter_config.json names 'embed_tokens', of which",
    ),
    "a token twice": (
        config_with(trainable_token_indices={"lm_head": [4, 4]}), "a list of different tokens"
    ),
    "a token in words": (
        config_with(trainable_token_indices=["a"]), "trainable_token_indices='a' must be a whole"
    ),
    "fewer rows than tokens": (
        rows_with([4, 5, 6], embed_tokens=torch.ones(2, 64)),
        "tokens has shape (2, 64), but .* (3, 64)",
    ),
    "rows that no key names": (
        rows_with({"lm_head": [4]}, embed_tokens=torch.ones(1, 64), lm_head=torch.ones(1, 64)),
        "tokens has shape (1, 64), but .* (0, 64)",
    ),
    "a gap after the vocabulary": (
        rows_with([511, 514], embed_tokens=torch.ones(2, 64)),
        "names token 514, and the base model has 512: the rows between are in neither",
    ),
    "a product and rows of tokens": (
        rows_with({QUERY: [1]}, query=torch.ones(1, 64)),
        "has a low-rank update and rows of tokens: merge it with",
    ),
    "an embedding without its lm_head": (
        rows_with([512, 513], embed_tokens=torch.ones(2, 64)),
        "embed_tokens has shape (514, 64), and lm_head (512, 64): .* of another vocabulary",
    ),
    "two saved weights": (
        tensors_with(
            lm_head__weight=torch.ones(512, 64),
            lm_head__modules_to_save__weight=torch.zeros(512, 64),
        ),
        "lm_head.weight and lm_head.modules_to_save.weight differ",
    ),
    "layers twice": (config_with(layer_replication=[[0, 2]]), "'layer_replication' is"),
    "blocks": (config_with(use_bdlora={"nblocks": 2}), "'use_bdlora' is"),
    "activated": (config_with(alora_invocation_tokens=[1]), "'alora_invocation_tokens' is"),
    "a bias of B": (config_with(lora_bias=True), "'lora_bias' is True"),
    "transposed": (config_with(fan_in_fan_out=True), "'fan_in_fan_out' is True"),
    "no rank": (config_with(r=None), "r=None must be a whole number"),
    "rank 0": (config_with(r=0), "r=0 must be a whole number from 1"),
    "a rank in words": (config_with(r="four"), "r='four' must be"),
    "another rank": (config_with(r=5), r"A has shape (4, 64), but the rank .* (5, 64)"),
    "alpha nan": (config_with(lora_alpha=math.nan), "lora_alpha=nan must be a number"),
    "no alpha": (config_with(lora_alpha=None), "lora_alpha=None must be a number"),
    "a flag in words": (config_with(use_dora="yes"), "use_dora is 'yes'"),
    "patterns in a list": (config_with(rank_pattern=[1]), "rank_pattern is [1], and must be"),
    "a rank of a pattern": (config_with(rank_pattern={"q": 0}), "rank_pattern['q']=0 must be"),
    "a bad pattern": (config_with(rank_pattern={"(": 4}), "'(' is no regular expression"),
    "dora without magnitudes": (config_with(use_dora=True), "has no tensor lora_magnitude"),
    "a lost target": (
        config_with(target_modules=["q_proj", "down_proj", "k_proj"]),
        "target_modules of adapter_config.json names 'k_proj', of which",
    ),
    "no target": (config_with(target_modules=["down_proj"]), "q_proj has a low-rank update, but"),
    "targets of numbers": (config_with(target_modules=[1]), "target_modules is [1], and must be"),
    "no layer": (config_with(layers_to_transform=[0]), "down_proj has a low-rank update, but"),
    "a lost module": (
        config_with(modules_to_save=["score", "lm_head"]),
        "modules_to_save of adapter_config.json names 'lm_head', of which",
    ),
    "no B": (tensors_with(**{f"{Q}__lora_B__weight": None}), "q_proj has no tensor lora_B"),
    "magnitudes without dora": (
        tensors_with(**{f"{Q}__lora_magnitude_vector": torch.ones(64)}),
        "has a tensor lora_magnitude, which",
    ),
    "another width": (
        tensors_with(**{f"{Q}__lora_A__weight": torch.ones(4, 65)}),
        "A has shape (4, 65), but the rank .* (4, 64)",
    ),
    "three dimensions": (
        tensors_with(**{f"{Q}__lora_B__weight": torch.ones(64, 4, 1)}),
        "B has shape (64, 4, 1)",
    ),
    "an infinity": (
        tensors_with(**{f"{Q}__lora_B__weight": torch.full((64, 4), math.inf)}),
        "q_proj.lora_B.weight' holds NaN or infinity",
    ),
    "integers": (
        tensors_with(**{f"{Q}__lora_B__weight": torch.ones(64, 4, dtype=torch.int8)}),
        "B has type torch.int8",
    ),
    "another layer": (
        tensors_with(model__layers__2__mlp__up_proj__lora_A__weight=torch.ones(4, 64)),
        "layers.2.mlp.up_proj.lora_A.weight' is a tensor that cannot be merged",
    ),
    "a head of scores": (
        tensors_with(score__weight=torch.ones(2, 64)), "score.weight' is a tensor that cannot be"
    ),
    "a bias of a module": (tensors_with(**{f"{Q}__bias": torch.ones(64)}), "q_proj.bias' is a"),
    "an embedding of a matrix": (
        tensors_with(**{f"{Q}__lora_embedding_A": torch.ones(4, 64)}), "but it is none"
    ),
    "a norm of low rank": (
        tensors_with(model__norm__lora_A__weight=torch.ones(4, 64)), "but it is no matrix"
    ),
    "a module twice": (
        tensors_with(layers__0__self_attn__q_proj__lora_A__weight=torch.ones(4, 64)),
        "is the second A of layers.0.attention.wq.weight",
    ),
    "added tokens": (
        tensors_with(model__embed_tokens__weight=torch.ones(513, 64)),
        "embed_tokens has shape (513, 64), and lm_head (512, 64): .* of another vocabulary",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_an_adapter_that_cannot_be_merged_is_refused_by_name(
    case, model, bases, tmp_path, monkeypatch
):
    """The message has the folder and the reason, and the weights of the model are not read."""
    damage, message = DAMAGES[case]
    damage(update_of(model, QUERY, DOWN), tmp_path / "adapter")
    monkeypatch.setattr(reader, "open_shards", lambda _: pytest.fail("the weights were opened"))
    pattern = ".*".join(map(_escaped, message.split(" .* ")))
    with pytest.raises(ValueError, match=pattern) as error:
        find(bases["hf"]).merged_with(tmp_path / "adapter")
    assert str(tmp_path / "adapter") in str(error.value) or "adapter_config.json" in message
    with pytest.raises(ValueError, match=pattern):
        Llama.build(str(bases["hf"]), lora=tmp_path / "adapter", device="cpu")


def _escaped(text: str) -> str:
    return "".join(f"\\{x}" if x in "()[]'.*" else x for x in text)


def test_a_pattern_that_takes_too_long_is_refused(model, bases, tmp_path, monkeypatch):
    monkeypatch.setattr(adapter_config, "_MATCH_S", 1e-3)
    slow = r"(\w|\w\w|\.)+(\w|\w\w|\.)+(\w|\w\w|\.)+[^\w]"
    folder = write_adapter(tmp_path / "adapter", update_of(model, QUERY), rank_pattern={slow: 4})
    with pytest.raises(ValueError, match=f"takes too long to match {QUERY}"):
        find(bases["hf"]).merged_with(folder)


STRANGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1.5,
    10**30,
    math.inf,
    "",
    "x",
    "(",
    [],
    [1],
    ["q_proj"],
    {},
    {"q": 4},
)
KEYS = [*CONFIG, "rank_pattern", "alpha_pattern", "use_dora", "use_rslora", "modules_to_save"]
KEYS += ["layers_to_transform", "exclude_modules", "init_lora_weights", "ensure_weight_tying"]
KEYS += [
    "trainable_token_indices",
    "fan_in_fan_out",
    "layer_replication",
    "loftq_config",
    "a key of next year",
]


@pytest.mark.parametrize("key", KEYS)
def test_any_value_of_a_key_merges_or_is_refused(key, model, bases, tmp_path):
    base = find(bases["hf"])
    folder = write_adapter(tmp_path / "adapter", update_of(model, QUERY, DOWN))
    for value in STRANGE:
        (folder / "adapter_config.json").write_text(json.dumps(CONFIG | {key: value}))
        try:
            loaded(base.merged_with(folder))
        except ValueError as e:
            assert str(folder) in str(e), (value, e)


def test_a_byte_that_changed_merges_or_is_refused(model, bases, tmp_path):
    base = find(bases["hf"])
    folder = write_adapter(tmp_path / "adapter", update_of(model, QUERY))
    path = folder / "adapter_model.safetensors"
    content = path.read_bytes()
    draw = random.Random(1)
    for _ in range(200):
        at = draw.randrange(400)
        path.write_bytes(content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :])
        try:
            base.merged_with(folder)
        except ValueError as e:
            assert str(folder) in str(e), e


def test_a_tie_that_must_be_kept_is_refused(tied, tmp_path):
    model, base = tied
    config: dict[str, Any] = {"ensure_weight_tying": True}
    folder = write_adapter(tmp_path / "ends", update_of(model, EMBEDDING), **config)
    with pytest.raises(ValueError, match="ensure_weight_tying is true, and the adapter changes"):
        find(base).merged_with(folder)
    folder = write_adapter(tmp_path / "layers", update_of(model, QUERY), **config)
    assert find(base).merged_with(folder).params.tied_output


class Harmful:
    """An object that writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_a_pickle_is_not_run(model, bases, tmp_path):
    folder = write_adapter(tmp_path / "adapter", {"x": torch.ones(1)}, suffix="bin")
    torch.save({"x": Harmful(tmp_path / "ran")}, folder / "adapter_model.bin")
    with pytest.raises(ValueError, match="holds something other than tensors, and was not run"):
        find(bases["hf"]).merged_with(folder)
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Harmful(tmp_path / "ran")))
    with pytest.raises(ValueError, match=r"adapter_model\.bin .* is not a file of torch\.save"):
        find(bases["hf"]).merged_with(folder)
    assert not (tmp_path / "ran").exists()


def test_files_that_are_missing_or_damaged_are_named(adapter, bases, tmp_path):
    base = find(bases["hf"])
    with pytest.raises(FileNotFoundError, match=r"gone is not a folder: give the folder of an ad"):
        base.merged_with(tmp_path / "gone")
    weights = adapter / "adapter_model.safetensors"
    content = weights.read_bytes()
    for size in (0, 7, 100, len(content) - 1):
        weights.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"adapter_model\.safetensors .* download it again"):
            base.merged_with(adapter)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="holds no tensors: neither adapter_model"):
        base.merged_with(adapter)
    for text in ("", "[]", "{", '{"peft_type": "LORA"'):
        (adapter / "adapter_config.json").write_text(text)
        with pytest.raises(ValueError, match=r"adapter_config\.json"):
            base.merged_with(adapter)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json is missing"):
        base.merged_with(adapter)


PEFT_CASES: dict[str, dict[str, Any]] = {
    "q and v": {"target_modules": ["q_proj", "v_proj"]},
    "a regular expression": {"target_modules": r"model\.layers\.\d+\.mlp\.(up|down)_proj"},
    "all with rslora": {"target_modules": "all-linear", "use_rslora": True},
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "dora of the ends": {"target_modules": ["embed_tokens", "lm_head", "k_proj"], "use_dora": True},
    "patterns": {
        "target_modules": ["q_proj", "k_proj", "o_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "k_proj": 6},
        "alpha_pattern": {"^model.layers.0.self_attn.o_proj": 3, "q_proj": 11},
    },
    "layers": {"target_modules": ["gate_proj", "o_proj"], "layers_to_transform": [1]},
    "saved modules": {
        "target_modules": ["k_proj"],
        "modules_to_save": ["lm_head", "embed_tokens", "norm"],
    },
    "the ends": {"target_modules": ["embed_tokens", "lm_head"]},
    "exclusions": {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["k_proj"]},
    "tokens": {"target_modules": ["v_proj"], "trainable_token_indices": [400, 3, 77]},
    "tokens of both ends": {
        "target_modules": ["v_proj"],
        "trainable_token_indices": {"lm_head": [5, 511], "model.embed_tokens": [9]},
    },
}


@pytest.mark.parametrize("case", PEFT_CASES)
def test_the_weights_are_those_of_peft(case, bases, tmp_path):
    """Our merged weights are those of PEFT's merge_and_unload in float32, for files of PEFT."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    base = from_hf(bases["hf"])
    config = peft.LoraConfig(r=4, lora_alpha=9, task_type="CAUSAL_LM", **PEFT_CASES[case])
    model = peft.get_peft_model(base, config)
    draw = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    model.save_pretrained(tmp_path / "adapter")
    merged = loaded(find(bases["hf"]).merged_with(tmp_path / "adapter")).named_shards()
    expected = metas_state(model.merge_and_unload())
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-6, rtol=2e-6, msg=name)
    before = loaded(find(bases["hf"])).named_shards()
    assert not all(torch.equal(before[name], merged[name]) for name in merged)


def test_a_tied_model_answers_as_peft_does_before_its_merge(tied, tmp_path):
    """PEFT's merge writes into the one matrix of both ends; its unmerged model is the reference."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    base, folder = tied
    config = peft.LoraConfig(r=4, lora_alpha=9, target_modules=["embed_tokens", "v_proj"])
    model = peft.get_peft_model(base, config)
    draw = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    model.eval()
    model.save_pretrained(tmp_path / "adapter")
    merged = loaded(find(folder).merged_with(tmp_path / "adapter"))
    torch.testing.assert_close(
        merged(tokens_of(), 0), hf_logits(model, tokens_of()), atol=1e-4, rtol=1e-4
    )


TOKENS = list(range(512, 520))  # that are added
# Whether the base model is tied, its rows after tokens were added, the configuration, and whether
# the adapter is saved with save_embedding_layers=True.
END_CASES: dict[str, tuple[bool, int, dict[str, Any], bool]] = {
    "copies": (False, 512, {}, True),
    "copies of one matrix": (True, 512, {}, True),
    "saved twice": (False, 512, {"modules_to_save": ["embed_tokens", "lm_head"]}, True),
    "an lm_head saved twice": (False, 512, {"modules_to_save": ["lm_head"]}, True),
    "a tie that is kept": (
        True, 512, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, False
    ),
    "more rows": (False, 520, {}, True),
    "more rows of one matrix": (True, 520, {}, True),
    "more rows, trained": (False, 514, {"modules_to_save": ["embed_tokens", "lm_head"]}, False),
    "more rows of low rank": (False, 520, {"target_modules": ["embed_tokens", "lm_head"]}, True),
    "tokens of one matrix": (True, 512, {"trainable_token_indices": [7, 3, 500]}, False),
    "tokens of one matrix, saved": (True, 512, {"trainable_token_indices": [7, 3]}, True),
    "tokens of one end of two": (True, 512, {"trainable_token_indices": {"lm_head": [4]}}, False),
    "unlike tokens of one matrix": (
        True, 512, {"trainable_token_indices": {"embed_tokens": [4, 9], "lm_head": [4]}}, False
    ),
    "added tokens": (
        False, 520, {"trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": TOKENS}}, False
    ),
    "added tokens of one matrix": (True, 520, {"trainable_token_indices": [2, *TOKENS]}, False),
    "added tokens, saved": (False, 520, {"trainable_token_indices": TOKENS}, True),
}  # fmt: skip


def saved_by_peft(
    base: transformers.LlamaForCausalLM, case: tuple[bool, int, dict[str, Any], bool], folder: Path
) -> Any:
    """Return PEFT's model with an adapter of random numbers, which is saved to a folder."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    _, num_rows, settings, saves_ends = case
    torch.manual_seed(1)
    base.resize_token_embeddings(num_rows, mean_resizing=False)
    given = {"target_modules": ["v_proj"], **settings}
    config = peft.LoraConfig(r=4, lora_alpha=9, task_type="CAUSAL_LM", **given)
    model = peft.get_peft_model(base, config)
    draw = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    model.save_pretrained(folder, save_embedding_layers=saves_ends)
    if num_rows > 512:
        write_byte_tokenizer(folder)
        content = tokenizer_json(Tokenizer(folder / "tokenizer.model"))
        (folder / "tokenizer.json").write_text(json.dumps(content))
        (folder / "tokenizer.model").unlink()
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json")
        )
        tokenizer.add_tokens([f"<added {i}>" for i in range(512, num_rows)], special_tokens=True)
        tokenizer.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("layout", ["hf", "meta2"])
@pytest.mark.parametrize("name", END_CASES)
def test_embeddings_of_peft_give_its_logits(name, layout, tmp_path):
    """The model of PEFT before its merge, which writes into the one matrix of a tied model."""
    is_tied, num_rows, _, _ = case = END_CASES[name]
    base = hf_model(vocab_size=512, tie_word_embeddings=is_tied)
    base.save_pretrained(tmp_path / "hf")
    write_byte_tokenizer(tmp_path / "hf")
    folder = tmp_path / "hf"
    if layout == "meta2":
        folder = tmp_path / "meta2"
        state = metas_state(base)
        if is_tied:
            del state["output.weight"]
        write_meta(folder, PARAMS | {"tied_output": is_tied}, state, 2)
        write_byte_tokenizer(folder)
    theirs = saved_by_peft(base, case, tmp_path / "adapter")
    tokens = torch.randint(num_rows, (1, 100), generator=torch.Generator().manual_seed(7))
    tokens[0, -8:] = torch.arange(num_rows - 8, num_rows)
    found = find(folder).merged_with(tmp_path / "adapter")
    assert found.params.vocab_size == load_tokenizer(found).n_words == num_rows
    assert (num_rows == 512) == ("<added 513>" not in load_tokenizer(found).special_tokens)
    expected = hf_logits(theirs, tokens)
    ours = loaded(found)
    torch.testing.assert_close(ours(tokens, 0), expected, atol=1e-4, rtol=1e-4)
    whole = ours.named_shards()["tok_embeddings.weight"]
    parts = [loaded(found, rank, 2).named_shards()["tok_embeddings.weight"] for rank in range(2)]
    assert torch.equal(torch.cat(parts), whole)
    if layout == "hf":
        convert(folder, tmp_path / "merged", lora=tmp_path / "adapter")
        again = from_hf(tmp_path / "merged")
        torch.testing.assert_close(hf_logits(again, tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["copies of one matrix", "tokens of one matrix", "more rows of one matrix"]
)
def test_one_matrix_stays_one(name, tmp_path):
    """And an adapter after it that separates the two finds what it did to both."""
    base = hf_model(vocab_size=512, tie_word_embeddings=True)
    base.save_pretrained(tmp_path / "hf")
    theirs = saved_by_peft(base, END_CASES[name], tmp_path / "adapter")
    found = find(tmp_path / "hf").merged_with(tmp_path / "adapter")
    assert found.params.tied_output
    one = loaded(found).named_shards()["tok_embeddings.weight"]
    second = write_adapter(tmp_path / "second", update_of(theirs.merge_and_unload(), HEAD))
    both = loaded(find(tmp_path / "hf").merged_with([tmp_path / "adapter", second])).named_shards()
    assert torch.equal(both["tok_embeddings.weight"], one)
    up, down = (
        load_file(second / "adapter_model.safetensors")[f"{PREFIX}{HEAD}.lora_{x}.weight"].double()
        for x in "BA"
    )
    torch.testing.assert_close(both["output.weight"], (one.double() + 2 * up @ down).float())
