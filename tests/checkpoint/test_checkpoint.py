"""Weights on disk: any shard count to any group, both layouts, and every file that is not right.

The expectations come from elsewhere: `checkpoints.py` cuts shards on its own, `transformers` writes
and reads its layout, and Meta's Transformer says what the logits are.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers import meta as oracle
from helpers.checkpoints import ffn_dim, random_state, shard_of, write_meta
from llama.args import ModelArgs
from llama.checkpoint import convert
from llama.checkpoint import huggingface as hf
from llama.checkpoint import weights as checkpoint
from llama.checkpoint.find import Checkpoint, find
from llama.checkpoint.tensor_files import offsets, open_tensors, read_into
from llama.checkpoint.verify import verify
from llama.checkpoint.weights import bytes_of, is_tied, load
from llama.layers import Linear
from llama.model import Transformer
from llama.parallel import ModelParallel

REPO = Path(__file__).resolve().parent.parent.parent
SIZES = (1, 2, 4, 8, 16)
PARAMS = {
    "dim": 64, "n_layers": 2, "n_heads": 16, "n_kv_heads": 4, "vocab_size": 128,
    "multiple_of": 32, "ffn_dim_multiplier": 1.3, "norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip
WIDE_HEADS = PARAMS | {"n_heads": 4, "n_kv_heads": 2}  # head size 16: slow enough to be stretched
STATE = random_state(PARAMS)


def loaded(
    found: Checkpoint, rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32
) -> Transformer:
    parallel = ModelParallel(rank=rank, size=size)
    model = Transformer(found.params, parallel=parallel, dtype=dtype)
    for slot in model.named_shards().values():
        slot.fill_(float("nan"))
    load(found, model)
    return model


def expect_share(model: Transformer, state: dict[str, Tensor], params: dict) -> None:
    """Every slot holds, bit for bit, what the test's own sharding gives its rank."""
    rank, size = model.parallel.rank, model.parallel.size
    slots = model.named_shards()
    assert slots.keys() == state.keys()
    for name, slot in slots.items():
        share = shard_of(name, state[name], params, rank, size).to(slot.dtype)
        assert torch.equal(slot, share), (name, rank, size)


def expect_files(folder: Path, state: dict[str, Tensor], params: dict, count: int) -> None:
    """The folder holds exactly the shards that the test's own sharding gives."""
    paths = sorted(folder.glob("*.pth"))
    assert [path.name for path in paths] == [f"consolidated.{i:02d}.pth" for i in range(count)]
    for i, path in enumerate(paths):
        shard = torch.load(path, weights_only=True)
        assert shard.keys() == state.keys()
        for name, tensor in shard.items():
            share = shard_of(name, state[name], params, i, count)
            assert tensor.dtype == share.dtype and torch.equal(tensor, share), (name, i)


def hf_model(**changes) -> transformers.LlamaForCausalLM:
    config: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    } | changes  # fmt: skip
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()


def stretched(factor: float) -> dict:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor}
    return {"rope_parameters": rope | hf._STRETCH}


def hf_logits(model: transformers.LlamaForCausalLM, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(tokens).logits.float()


def from_hf(folder: Path) -> transformers.LlamaForCausalLM:
    """As transformers reads it; a tensor that it had to make up is an error."""
    read: Any = transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, report = read
    assert not any(report.values()), report
    return model.eval()


def tokens_of(length: int = 100) -> Tensor:
    return torch.randint(128, (1, length), generator=torch.Generator().manual_seed(7))


@pytest.fixture
def meta(tmp_path) -> Path:
    """A good checkpoint of two shards, to break."""
    return write_meta(tmp_path / "model", PARAMS, STATE, 2)


@pytest.fixture
def hugging(tmp_path) -> Path:
    hf_model().save_pretrained(tmp_path / "hugging")
    return tmp_path / "hugging"


@pytest.fixture
def metas_world() -> Iterator[None]:
    oracle.join_a_world_of_one()
    yield
    oracle.leave_the_world()


def change_json(path: Path, **changes) -> None:
    """Rewrite a JSON file; a value of None takes the key out."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def change_shard(path: Path, **changes: Tensor | None) -> None:
    """Rewrite a .pth; "__" in a keyword stands for "."; None takes the tensor out."""
    shard = torch.load(path, weights_only=True)
    shard |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    torch.save({name: tensor for name, tensor in shard.items() if tensor is not None}, path)


# Any shards to any ranks


@pytest.mark.parametrize("num_shards", SIZES)
def test_any_number_of_shards_loads_on_any_number_of_ranks(tmp_path, num_shards):
    """The reference needs as many ranks as shards, and with 4 kv heads no more than 4 of either."""
    found = find(write_meta(tmp_path, PARAMS, STATE, num_shards))
    assert len(found.shards) == num_shards and found.layout == "meta"
    for size in SIZES:
        for rank in range(size):
            expect_share(loaded(found, rank, size), STATE, PARAMS)


def test_kv_heads_are_replicated_in_order(tmp_path):
    """llama-models hands heads 0..3, 0..3 to eight ranks, whose queries want 0, 0, 1, 1, ..."""
    found = find(write_meta(tmp_path, PARAMS, STATE))
    heads = STATE["layers.1.attention.wk.weight"].chunk(4)
    for rank in range(8):
        slot = loaded(found, rank, 8).named_shards()["layers.1.attention.wk.weight"]
        assert torch.equal(slot, heads[rank // 2])


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_types_are_converted(tmp_path, stored):
    found = find(write_meta(tmp_path, PARAMS, STATE, 2, stored))
    state = {name: tensor.to(stored) for name, tensor in STATE.items()}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = loaded(found, 1, 4, dtype)
        assert model.norm.weight.dtype == dtype
        expect_share(model, state, PARAMS)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_one_matrix_stored_under_two_names_is_held_once(tmp_path, num_shards, monkeypatch):
    """As in Meta's files of 3.2 1B and 3B, whose params.json does not tell."""
    state = STATE | {"output.weight": STATE["tok_embeddings.weight"]}
    untied = find(write_meta(tmp_path / "untied", PARAMS, state, num_shards))
    folder = write_meta(tmp_path / "tied", PARAMS, state, num_shards)
    for file in sorted(folder.glob("*.pth")):
        shard = torch.load(file, weights_only=True)
        torch.save(shard | {"output.weight": shard["tok_embeddings.weight"]}, file)
    tied = find(folder)
    assert (is_tied(tied), is_tied(untied)) == (True, False)
    tied.params.tied_output = True
    models = [loaded(found) for found in (tied, untied)]
    assert models[0].output.weight is models[0].tok_embeddings.weight
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in models]
    assert sizes[1] - sizes[0] == state["output.weight"].numel()
    tokens = torch.tensor([[3, 1, 2]])
    assert torch.equal(*(model(tokens, 0) for model in models))
    assert len(verify(folder)) == num_shards + 1  # where nothing is held, both names are there
    untied.params.tied_output = True
    with pytest.raises(ValueError, match=r"output\.weight has no place .* output is not tied"):
        loaded(untied)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells")
@pytest.mark.parametrize("layout", ["meta", "hf"])
def test_mapped_tensors_are_found_in_their_file(tmp_path, layout):
    write_meta(tmp_path / "meta", PARAMS, STATE)
    convert.convert(tmp_path / "meta", tmp_path / "hf")
    for file in find(tmp_path / layout).shards:
        tensors, content = open_tensors(file), file.read_bytes()
        for tensor, offset in zip(tensors.values(), offsets(file, tensors.values()), strict=True):
            assert offset is not None
            assert content[offset:][: tensor.nbytes] == tensor.numpy().tobytes()
            read = torch.empty_like(tensor)
            read_into(read, file, offset)
            assert torch.equal(read, tensor)
        file.rename(tmp_path / "moved")
        file.write_bytes(content)
        assert not any(offsets(file, tensors.values()))  # another file by now


def test_weights_of_the_model_s_type_are_read_and_not_faulted_in(tmp_path, monkeypatch):
    found, read = find(write_meta(tmp_path, PARAMS, STATE, 2)), []

    def counted(tensor: Tensor, file: Path, offset: int) -> None:
        read.append(tensor.nbytes)
        read_into(tensor, file, offset)

    monkeypatch.setattr(checkpoint, "read_into", counted)
    expect_share(loaded(found), STATE, PARAMS)
    by_column = ("wo.weight", "w2.weight")  # of two shards: their rows are in two files
    assert sum(read) == sum(t.nbytes for n, t in STATE.items() if not n.endswith(by_column))
    read.clear()
    loaded(found, dtype=torch.bfloat16)
    assert not read


def test_a_file_cut_while_it_is_read_is_named(tmp_path):
    file = tmp_path / "weights.pth"
    file.write_bytes(b"12345678")
    tensor = torch.zeros(3)
    with pytest.raises(ValueError, match=r"weights\.pth \(8 bytes\) became shorter"):
        read_into(tensor, file, 0)


@pytest.mark.parametrize(("size", "dtype"), [(1, torch.float32), (8, torch.bfloat16)])
def test_bytes_of_one_rank_are_told_before_loading(tmp_path, size, dtype):
    found = find(write_meta(tmp_path, PARAMS, STATE, 2))
    shares = [shard_of(name, t, PARAMS, 0, size).to(dtype) for name, t in STATE.items()]
    assert bytes_of(found, size, dtype) == sum(t.nbytes for t in shares)


def test_bytes_of_int8_are_what_packing_leaves(tmp_path):
    """Norms and the embedding stay in bf16; a part is packed before the next one is read."""
    params = PARAMS | {"dim": 128, "vocab_size": 256}
    found = find(write_meta(tmp_path, params, random_state(params), 2))
    model = Transformer(found.params, dtype=torch.bfloat16)
    whole = model.named_shards()
    for slot in whole.values():
        slot.zero_()
    seen = []

    def filled(part: torch.nn.Module) -> None:
        seen.append([name for name, slot in whole.items() if slot.any()])
        model.pack(part, int8=True)

    load(found, model, filled=filled)
    counts = [len(names) for names in seen]
    assert counts == sorted(counts) and len(set(counts)) == len(counts) == 5  # 2 layers
    assert seen[-1] == list(whole)
    held = [w.nbytes for w in model.parameters()]
    held += [
        m.scales.nbytes for m in model.modules() if isinstance(m, Linear) and m.scales is not None
    ]
    assert bytes_of(found, 1, torch.int8) == sum(held)


def test_the_bar_is_drawn_only_where_it_is_asked_for(meta, capsys):
    model = loaded(find(meta))
    assert capsys.readouterr() == ("", "")
    load(find(meta), model, progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "Loading" in err


def test_rope_freqs_are_passed_over(meta):
    """Meta's conversion of the first Llamas left this buffer in the files."""
    change_shard(meta / "consolidated.01.pth", rope__freqs=torch.ones(2))
    expect_share(loaded(find(meta)), STATE, PARAMS)


MEASURE = """
import sys, threading, time
import torch
from llama.checkpoint.weights import bytes_of, load
from llama.checkpoint.find import find
from llama.checkpoint.convert import convert, reshard
from llama.model import Transformer
from llama.parallel import ModelParallel

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) << 10

def sample():
    while not done:
        peaks.append(anonymous())
        time.sleep(0.0005)

what, folder, out = sys.argv[1:]
found, done, peaks, own = find(folder), False, [], 0
bytes_of(found, 1, torch.float32)  # the first tensor on the meta device imports 32 MB of torch
before = anonymous()
thread = threading.Thread(target=sample)
thread.start()
if what == "load":
    model = Transformer(found.params, parallel=ModelParallel(rank=1, size=2), dtype=torch.float32)
    load(found, model)
    own = sum(slot.nbytes for slot in model.named_shards().values())
    assert all(bool(slot.count_nonzero()) for slot in model.named_shards().values())
else:
    reshard(folder, out, 2) if what == "reshard" else convert(folder, out)
done = True
thread.join()
print(own, max(peaks) - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """185 MB in one float32 shard, in Meta's layout, and the same in Hugging Face's beside it."""
    params = PARAMS | {
        "dim": 1024, "n_heads": 8, "vocab_size": 8192, "multiple_of": 4096,
        "ffn_dim_multiplier": None,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("large")
    shapes = shapes_of(params)
    write_meta(folder / "meta", params, {name: torch.ones(s) for name, s in shapes.items()})
    convert.convert(folder / "meta", folder / "hf")
    return folder


def shapes_of(params: dict) -> dict[str, torch.Size]:
    return {
        n: t.shape for n, t in checkpoint.shard_shapes(ModelArgs.from_params(params, ""), 1).items()
    }


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is Linux's")
@pytest.mark.parametrize("what", ["load meta", "load hf", "reshard meta", "convert meta"])
def test_private_memory_is_the_rank_s_own_weights_and_one_tensor(large, tmp_path, what):
    """torch.load without mmap takes the file's size on every rank: 8 x 141 GB for a 70B."""
    action, layout = what.split()
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, action, str(large / layout), str(tmp_path / "out")],
        cwd=REPO, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    own, peak = map(int, run.stdout.split())
    largest, slack = 8192 * 1024 * 4, 8 << 20
    assert 0 < peak <= own + largest + slack
    print(f"{what}: own {own / 1e6:.1f} MB, peak {peak / 1e6:.1f} MB")


# Hugging Face's layout


HF_CASES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "stretched by 8": stretched(8.0),
    "stretched by 32, tied": stretched(32.0) | {"tie_word_embeddings": True},
    "narrow ffn": {"intermediate_size": 48},
    "as many kv heads as heads": {"num_key_value_heads": 4},
}


def metas_state(model: transformers.LlamaForCausalLM) -> dict[str, Tensor]:
    """The weights under Meta's names and in Meta's row order, worked out from the model itself."""
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    state = {"tok_embeddings.weight": model.model.embed_tokens.weight}
    for i, layer in enumerate(model.model.layers):
        q, k = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
        state |= {
            f"layers.{i}.attention.wq.weight": interleaved(q, head_dim),
            f"layers.{i}.attention.wk.weight": interleaved(k, head_dim),
            f"layers.{i}.attention.wv.weight": layer.self_attn.v_proj.weight,
            f"layers.{i}.attention.wo.weight": layer.self_attn.o_proj.weight,
            f"layers.{i}.feed_forward.w1.weight": layer.mlp.gate_proj.weight,
            f"layers.{i}.feed_forward.w2.weight": layer.mlp.down_proj.weight,
            f"layers.{i}.feed_forward.w3.weight": layer.mlp.up_proj.weight,
            f"layers.{i}.attention_norm.weight": layer.input_layernorm.weight,
            f"layers.{i}.ffn_norm.weight": layer.post_attention_layernorm.weight,
        }
    state |= {"norm.weight": model.model.norm.weight, "output.weight": model.lm_head.weight}
    return {name: tensor.detach() for name, tensor in state.items()}


def interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """Row by row: element i of the first half goes to 2i, of the second half to 2i + 1."""
    out = torch.empty_like(rows)
    for row in range(len(rows)):
        head, at = divmod(row, head_dim)
        second, i = divmod(at, head_dim // 2)
        out[head * head_dim + 2 * i + second] = rows[row]
    return out


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
    expect_share(ours, state, {"n_heads": 4, "n_kv_heads": theirs.config.num_key_value_heads})
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
        expect_share(
            loaded(found, rank, size), metas_state(theirs), {"n_heads": 4, "n_kv_heads": 2}
        )
    change_json(tmp_path / "model.safetensors.index.json", weight_map={"a": "../b.safetensors"})
    with pytest.raises(ValueError, match=r"index\.json: weight_map"):
        find(tmp_path)


def test_the_config_of_transformers_4_is_read_alike(hugging):
    """rope_theta and rope_scaling at the top level, and "type" for "rope_type" in the oldest."""
    rope = {"type": "llama3", "factor": 32.0, **hf._STRETCH}
    change_json(
        hugging / "config.json", rope_parameters=None, rope_scaling=rope, rope_theta=400000.0
    )
    params = find(hugging).params
    assert (params.rope_factor, params.rope_theta) == (32.0, 400000.0)
    assert params.longest_context == 131072


def test_any_ffn_size_is_said_in_metas_terms():
    draw = torch.Generator().manual_seed(0)
    for dim, ffn in torch.randint(1, 30000, (2000, 2), generator=draw).tolist():
        assert ModelArgs(dim=dim, **hf._ffn_rule(dim, ffn)).ffn_dim == ffn


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, r"model_type is 'mistral'"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'.*'silu'"),
        ({"attention_bias": True}, r"attention_bias is True"),
        ({"mlp_bias": True}, r"mlp_bias is True"),
        ({"head_dim": 8}, r"head_dim is 8"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config.*get the model's bfloat16"),
        ({"hidden_size": "64"}, r"hidden_size must be a whole number"),
        ({"intermediate_size": None}, r"'intermediate_size' is missing"),
        ({"rms_norm_eps": None}, r"'rms_norm_eps' is missing"),
        ({"rope_parameters": None}, r"'rope_theta' is missing"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2}}, r"'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 1e4}, r"'linear'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}, "rope_theta": 1e4}, r"'dynamic'"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0,
                                 **hf._STRETCH, "high_freq_factor": 2.0}},
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
    with pytest.raises(ValueError, match=r"lm_head\.weight has no place.*output is not tied"):
        loaded(find(hugging))


# Written anew


@pytest.mark.parametrize("use_scaled_rope", [False, True])
@pytest.mark.parametrize("num_shards", [1, 4])  # 4 shards of 2 kv heads: each head twice
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
    assert (apart > 1e-2) == use_scaled_rope, "these prompts tell a stretched model from a plain"


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


def test_llama_3_s_own_stop_tokens_are_written(tmp_path):
    params = PARAMS | {"vocab_size": 128256, "use_scaled_rope": True}
    state = {name: torch.zeros(shape) for name, shape in shapes_of(params).items()}
    convert.convert(write_meta(tmp_path / "meta", params, state), tmp_path / "hf")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    assert config.bos_token_id == 128000
    assert config.eos_token_id == [128001, 128008, 128009]
    assert config.tie_word_embeddings, "equal matrices are stored once"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hugging_face_to_meta_and_back(tmp_path, metas_world, tied, dtype):
    theirs = hf_model(tie_word_embeddings=tied, **stretched(8.0)).to(dtype)
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
    convert.convert(tmp_path / "meta", tmp_path / "back")
    before = load_file(tmp_path / "hf" / "model.safetensors")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name])
    read = from_hf(tmp_path / "back")
    assert (read.config.tie_word_embeddings, read.dtype) == (tied, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_reshard_there_and_back_is_the_identity(tmp_path, count, dtype):
    """Eight shards of four kv heads hold each head twice, and params.json stays as it is."""
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
    ("size", "message"), [(3, "does not divide"), (0, "whole number"), ("2", "whole number")]
)
def test_reshard_to_a_size_that_cannot_be(meta, tmp_path, size, message):
    with pytest.raises(ValueError, match=message):
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
    convert.reshard(meta, out, 4)  # an empty folder is as good as none
    assert verify(out)


def test_a_failed_run_leaves_nothing(meta, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("disk on fire")

    monkeypatch.setattr(convert.torch, "save", fail)
    with pytest.raises(OSError, match="disk on fire"):
        convert.reshard(meta, tmp_path / "out", 4)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_full_disk_is_told_before_writing(meta, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: usage)
    for write in (convert.convert, lambda a, b: convert.reshard(a, b, 4)):
        with pytest.raises(OSError, match=r"0\.0 GB free, and writing takes"):
            write(meta, tmp_path / "out")


# What is there: find


def test_the_layout_follows_from_the_files(meta, hugging):
    """Meta's files in `original/`, as Hugging Face ships them, go first; names do not matter."""
    assert find(str(hugging)).layout == "hf"
    shutil.move(meta, hugging / "original")
    found = find(hugging)
    assert (found.layout, found.folder) == ("meta", hugging / "original")


def test_shards_go_by_number_not_by_name(tmp_path):
    """sorted(glob("*.pth")), as in the reference, puts shard 10 before shard 9 here."""
    params = PARAMS | {"n_heads": 16, "n_kv_heads": 16}
    folder = write_meta(tmp_path, params, random_state(params), 16)
    for i in range(10):
        (folder / f"consolidated.{i:02d}.pth").rename(folder / f"consolidated.{i}.pth")
    (folder / "optimizer.pth").write_bytes(b"not ours")
    found = find(folder)
    assert [path.name for path in found.shards[8:11]] == [
        "consolidated.8.pth", "consolidated.9.pth", "consolidated.10.pth",
    ]  # fmt: skip
    expect_share(loaded(found), random_state(params), params)


def test_the_tokenizer_is_looked_for_beside_the_weights(meta, hugging):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.model.*give tokenizer_path"):
        find(meta).tokenizer_path()
    (meta.parent / "tokenizer.model").touch()
    assert find(meta).tokenizer_path() == meta.parent / "tokenizer.model"
    (meta / "tokenizer.model").touch()
    assert find(meta).tokenizer_path() == meta / "tokenizer.model"
    (hugging / "tokenizer.json").touch()
    assert find(hugging).tokenizer_path() == hugging / "tokenizer.json"
    (hugging / "original").mkdir()
    (hugging / "original" / "tokenizer.model").touch()
    assert find(hugging).tokenizer_path() == hugging / "original" / "tokenizer.model"


def become_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


@pytest.mark.parametrize(
    ("spoil", "kind", "message"),
    [
        (shutil.rmtree, FileNotFoundError, "model does not exist: give the folder"),
        (become_a_file, NotADirectoryError, "model is a file"),
        (lambda d: [p.unlink() for p in d.iterdir()], FileNotFoundError, "holds no weights"),
        (lambda d: (d / "consolidated.00.pth").unlink(), FileNotFoundError,
         r"consolidated\.00\.pth missing: download"),
        (lambda d: (d / "consolidated.01.pth").rename(d / "consolidated.99999999999.pth"),
         FileNotFoundError, r"consolidated\.01\.pth, .*consolidated\.02\.pth"),
        (lambda d: (d / "consolidated.00.pth").rename(d / "consolidated.zero.pth"), ValueError,
         r"consolidated\.zero\.pth: no shard number"),
        (lambda d: shutil.copy(d / "consolidated.00.pth", d / "consolidated.0.pth"), ValueError,
         "are the same shard"),
        (lambda d: (d / "params.json").unlink(), FileNotFoundError, r"params\.json is missing"),
        (lambda d: (d / "params.json").write_text("{"), ValueError,
         r"params\.json \(1 bytes\) is not JSON.*download it again"),
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
    ("spoil", "kind", "message"),
    [
        (lambda d: (d / "config.json").unlink(), FileNotFoundError, r"config\.json is missing"),
        (lambda d: (d / "model.safetensors").write_bytes(b""), ValueError, "is empty"),
        (lambda d: os.truncate(d / "model.safetensors", 9000), ValueError,
         r"model\.safetensors \(9,000 bytes\) is cut short.*download it again"),
        (lambda d: (d / "model.safetensors").write_bytes(b"<!DOCTYPE html>" * 30), ValueError,
         "is a web page"),
        (lambda d: shutil.copy(d / "model.safetensors", d / "more.safetensors"), ValueError,
         r"more\.safetensors and model\.safetensors both hold"),
        (lambda d: (d / "model.safetensors.index.json").write_text(
            '{"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}'),
         FileNotFoundError, r"names model-00002-of-00002\.safetensors, not there"),
        (lambda d: change_safetensors(d, "model.norm.weight", None), ValueError,
         r"hugging: model\.norm\.weight missing"),
        (lambda d: change_safetensors(d, "model.norm.weight", torch.ones(64).char()), ValueError,
         r"model\.norm\.weight has type torch\.int8.*quantized"),
        (lambda d: change_safetensors(d, "model.norm.bias", torch.ones(64)), ValueError,
         r"model\.norm\.bias has no place"),
        (lambda d: change_safetensors(d, "norm.weight", torch.ones(64)), ValueError,
         r"safetensors: norm\.weight has no place"),
    ],
)  # fmt: skip
def test_a_hugging_face_folder_that_is_not_whole(hugging, spoil, kind, message):
    spoil(hugging)
    with pytest.raises(kind, match=message):
        loaded(find(hugging))


def change_safetensors(folder: Path, name: str, tensor: Tensor | None) -> None:
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as content:
        tensors = {key: content.get_tensor(key).clone() for key in content.keys()}  # noqa: SIM118
    tensors |= {name: tensor}
    kept = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, metadata={"format": "pt"})


# What is in the files: every name and shape, before anything is copied


NORM = "layers__1__ffn_norm__weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({NORM: None}, r"01\.pth: layers\.1\.ffn_norm\.weight missing"),
        ({NORM: None, "norm__weight": None}, r"01\.pth: layers\.1\.ffn_norm\.weight and 1 more"),
        (
            {NORM: torch.ones(63)},
            r"01\.pth: layers\.1\.ffn_norm\.weight has shape \(63,\).*\(64,\)",
        ),
        (
            {NORM: torch.ones(64).char()},
            r"01\.pth: layers\.1\.ffn_norm\.weight has type torch\.int8",
        ),
        ({NORM: torch.ones(64).to(torch.float8_e4m3fn)}, r"float8_e4m3fn: it looks quantized"),
        (
            {"layers__2__ffn_norm__weight": torch.ones(64)},
            r"layers\.2\.ffn_norm\.weight has no place",
        ),
        ({"lora__weight": torch.ones(2)}, r"01\.pth: lora\.weight has no place"),
        ({"step": 7}, r"01\.pth: the entry 'step' is no tensor"),
    ],
)
def test_every_shard_is_checked_before_anything_is_copied(meta, changes, message):
    change_shard(meta / "consolidated.01.pth", **changes)
    found = find(meta)
    model = Transformer(found.params)
    for slot in model.named_shards().values():
        slot.fill_(7.0)
    with pytest.raises(ValueError, match=message):
        load(found, model)
    assert all(bool((slot == 7.0).all()) for slot in model.named_shards().values())


def test_llama_2_s_shards_are_refused(meta):
    """They cut the embedding along dim 1: read as Llama 3's, each row would be nonsense."""
    for i in range(2):
        half = STATE["tok_embeddings.weight"].chunk(2, dim=1)[i].clone()
        change_shard(meta / f"consolidated.{i:02d}.pth", tok_embeddings__weight=half)
    with pytest.raises(ValueError, match="dim 1, as Llama 2's"):
        loaded(find(meta))


def test_missing_last_shards_are_told_by_the_shapes(meta):
    (meta / "consolidated.01.pth").unlink()
    with pytest.raises(ValueError, match=r"is one of 2 shards .* but 1 are in .*download the rest"):
        loaded(find(meta))


def test_params_of_another_model_do_not_fit(meta):
    change_json(meta / "params.json", dim=128)
    with pytest.raises(ValueError, match=r"has shape .*params\.json .*do not belong together"):
        loaded(find(meta))
    change_json(meta / "params.json", dim=64, n_heads=1, n_kv_heads=1)
    with pytest.raises(ValueError, match=r"has 2 shards, which do not fit params\.json"):
        loaded(find(meta))


class Evil:
    """Unpickled, it makes a file: what an attacker's code would do is only longer."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("wrap", [lambda e: e, lambda e: {**STATE, "norm.weight": e}])
def test_a_malicious_pickle_is_refused_and_not_run(meta, tmp_path, wrap):
    torch.save(wrap(Evil(tmp_path / "owned")), meta / "consolidated.01.pth")
    with pytest.raises(ValueError, match=r"consolidated\.01\.pth .*was not run.*trust"):
        loaded(find(meta))
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: p.write_bytes(b""), r"\(0 bytes\) is empty; download it again"),
        (
            lambda p: p.write_text("\n<!DOCTYPE html><html>403</html>"),
            r"\(32 bytes\) is a web page",
        ),
        (lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\noid"), "git lfs pull"),
        (lambda p: p.write_bytes(bytes(range(1, 256))), r"is no file of torch\.save"),
        (lambda p: os.truncate(p, p.stat().st_size // 2), "is cut short or damaged.*download"),
        (lambda p: torch.save([torch.ones(2)], p), "holds list, where a dict of tensors belongs"),
        (lambda p: torch.save(STATE, p, _use_new_zipfile_serialization=False), "before 1.6"),
    ],
)
def test_a_file_that_is_no_shard(meta, spoil, message):
    path = meta / "consolidated.00.pth"
    spoil(path)
    with pytest.raises(ValueError, match=rf"consolidated\.00\.pth .*{message}"):
        loaded(find(meta))


# Commands


def write_checklist(folder: Path) -> None:
    lines = [
        f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.name}"
        for path in sorted(folder.iterdir())
    ]
    (folder / "checklist.chk").write_text("\n".join(lines) + "\n")


def test_verify_reports_each_file(meta):
    assert "no checksum" in verify(meta)[0]
    write_checklist(meta)
    shard0, shard1, params, whole = verify(meta)
    assert shard0.startswith("consolidated.00.pth: 21 tensors, ")
    assert shard1.startswith("consolidated.01.pth: ") and shard1.endswith("checksum matches")
    assert params == "params.json: checksum matches"
    assert whole.endswith(f"{sum(t.numel() for t in STATE.values()):,} parameters in 2 file(s)")


def test_verify_names_the_file_whose_checksum_differs(meta):
    """One flipped bit in a weight: nothing but the checksum can tell."""
    write_checklist(meta)
    norm = torch.load(meta / "consolidated.01.pth", weights_only=True)["norm.weight"]
    norm[3] += 1e-3
    change_shard(meta / "consolidated.01.pth", norm__weight=norm)
    loaded(find(meta))
    with pytest.raises(ValueError, match=r"consolidated\.01\.pth .*has md5 .*checklist\.chk says"):
        verify(meta)
    (meta / "checklist.chk").write_text("0" * 32 + "  tokenizer.model\n")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.model is missing"):
        verify(meta)
    (meta / "checklist.chk").write_text("0" * 32 + "  ../../secret\n")
    with pytest.raises(ValueError, match="is no md5 and file name"):
        verify(meta)


def test_verify_checks_hugging_face_s_layout_too(hugging):
    assert verify(hugging)[0].startswith("model.safetensors: 21 tensors")
    change_safetensors(hugging, "model.norm.weight", torch.ones(65))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(65,\)"):
        verify(hugging)
