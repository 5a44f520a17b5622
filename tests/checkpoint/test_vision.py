"""The text model in a vision checkpoint, against transformers' Mllama and Meta's llama-models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.checkpoints import random_state, write_byte_tokenizer, write_meta
from helpers.kernels import KERNELS_RUN
from helpers.vision import metas_modules
from helpers.weights import expect_shards
from llama import Llama, Transformer
from llama.checkpoint.find import find
from llama.checkpoint.hf.vision import grids_of
from llama.checkpoint.loader import load
from llama.checkpoint.table import num_elements, whole_shapes
from llama.checkpoint.write.convert import convert, pack
from llama.cli import main
from llama.model.args import ModelArgs
from llama.model.shapes import args_of
from llama.prompts.pictures import Picture
from llama.ranks.parallel import Parallel
from llama.ranks.placement import Placement
from llama.sampling_params import SamplingParams
from llama.vision.encoder import normalized

TEXT: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "cross_attention_layers": [1, 4],
    "max_position_embeddings": 512, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 260,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2,
    "intermediate_size": 64, "image_size": 28, "patch_size": 14, "vision_output_dim": 64,
    "intermediate_layers_indices": [0],
}  # fmt: skip
# What params.json of such a model has besides the keys of a text model, with other numbers.
KEYS = {
    "vision_chunk_size": 560,
    "vision_max_num_chunks": 4,
    "vision_num_cross_attention_layers": 2,
}
PARAMS = {
    "dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 512,
    "multiple_of": 32, "norm_eps": 1e-5, "rope_theta": 500000.0, "use_scaled_rope": True,
}  # fmt: skip
TOKENS = torch.randint(0, 512, (2, 20), generator=torch.Generator().manual_seed(1))
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


@pytest.fixture(scope="module")
def mllama(tmp_path_factory) -> tuple[Path, Tensor]:
    """A folder of transformers' vision model, and its logits without an image."""
    folder = tmp_path_factory.mktemp("mllama")
    torch.manual_seed(3)
    config = transformers.MllamaConfig(
        text_config=TEXT, vision_config=VISION, image_token_index=512
    )
    model = transformers.MllamaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "gate" in name:
                weight.fill_(1.0)  # the cross-attention layers would change what they reach
    model.save_pretrained(folder)
    write_byte_tokenizer(folder)
    with torch.inference_mode():
        return folder, model(TOKENS).logits


def loaded(folder: Path, rank: int = 0, size: int = 1) -> Transformer:
    parallel = Parallel(Placement(rank=rank, size=size))
    found = find(folder)
    model = Transformer(found.params, parallel=parallel)
    load(found, model)
    return model


def check_logits(folder: Path, expected: Tensor) -> None:
    torch.testing.assert_close(loaded(folder).forward(TOKENS, 0), expected, atol=1e-5, rtol=1e-4)


def renamed(source: Path, folder: Path, prefixes: dict[str, str]) -> Path:
    """Write a folder again with other prefixes of names."""
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        tensors[prefixes.get(prefix, "") + name.removeprefix(prefix)] = tensor
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_the_text_model_of_a_vision_model_is_loaded(mllama, tmp_path):
    """The logits are those of the whole model without an image.

    The names are those of the files on the hub, and those that transformers has in memory.
    """
    folder, expected = mllama
    found = find(folder)
    assert found.vision is not None and found.vision.num_cross_layers == 2
    assert found.params.n_layers == 4 and found.params.vocab_size == 512
    check_logits(folder, expected)
    own_names = {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
        "vision_model.": "model.vision_model.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    }
    check_logits(renamed(folder, tmp_path / "own", own_names), expected)


def test_a_text_model_that_was_saved_alone_is_loaded(mllama, tmp_path):
    model = transformers.MllamaForCausalLM.from_pretrained(mllama[0]).eval()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "mllama_text_model"
    check_logits(tmp_path, mllama[1])


def test_a_llama_of_the_same_tensors_is_written(mllama, tmp_path):
    """Convert writes plain text checkpoints, which transformers and this runtime read."""
    folder, expected = mllama
    lines = convert(folder, tmp_path / "meta", images=False)
    assert any("keys left out" in line and "vision_config" in line for line in lines)
    written = find(tmp_path / "meta")
    assert written.layout == "meta" and written.vision is None and written.params.n_layers == 4
    check_logits(tmp_path / "meta", expected)
    convert(tmp_path / "meta", tmp_path / "hf")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.inference_mode():
        torch.testing.assert_close(theirs(TOKENS).logits, expected, atol=1e-5, rtol=1e-4)
    convert(folder, tmp_path / "model.gguf")
    gguf = find(tmp_path / "model.gguf")
    assert gguf.params.n_layers == 4 and gguf.params.vocab_size == 512
    if KERNELS_RUN:
        pack(folder, tmp_path / "packed", images=False)
        assert find(tmp_path / "packed").params.n_layers == 4


def test_an_image_in_a_request_is_refused(mllama):
    llama = Llama.build(
        str(mllama[0]), None, 64, 1, device="cpu", dtype="fp32", chat_template="llama3",
        images=False,
    )  # fmt: skip
    dialog = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, IMAGE]}]
    with pytest.raises(ValueError, match=r"content\[1\] is an image, and the model reads text"):
        llama.chat_completion([dialog])
    (answer,) = llama.text_completion(["Hi"], max_gen_len=3, temperature=0.0)
    assert isinstance(answer["generation"], str)


@pytest.fixture(scope="module")
def metas() -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of Meta's text model with cross-attention layers, and its logits without images.

    They are computed twice: without the cross-attention layers, and with them where no row of text
    sees an image.
    """
    from llama_models.llama3.args import ModelArgs as MetasArgs

    text = random_state(PARAMS, seed=5)
    with metas_modules() as module, torch.inference_mode():
        args = MetasArgs(**PARAMS, **KEYS, max_seq_len=32, max_batch_size=2)
        model = module.CrossAttentionTransformerText(args)
        model.setup_cache(2, torch.device("cpu"), dtype=torch.float32)
        for weight in model.parameters():
            torch.nn.init.normal_(weight)
        missing = model.load_state_dict(text, strict=False)
        assert not missing.unexpected_keys and any("cross" in x for x in missing.missing_keys)
        positions = torch.arange(TOKENS.shape[1])
        embedded = model.tok_embeddings(TOKENS)
        unseen = torch.zeros(2, 1, len(positions), 1)
        images = torch.randn(2, 2, 2, 4, 3, 16)  # layers, keys and values, B, heads, tokens, D
        mask = torch.zeros(2, 1, len(positions), 3)
        logits = [
            model(positions, embedded, mask, unseen, images, text_only_inference=is_text_only)
            for is_text_only in (True, False)
        ]
        assert torch.equal(*logits)
        return dict(model.state_dict()), logits[0]


def write_vision(folder: Path, state: dict[str, Tensor], count: int, **keys: Any) -> Path:
    """Write Meta's layout of a vision model in `count` shards."""
    text = {name: state[name] for name in random_state(PARAMS)}
    write_meta(folder, PARAMS | KEYS | keys, text, count)
    for path in folder.glob("*.pth"):
        shard = {f"text_model.{name}": x for name, x in torch.load(path, weights_only=True).items()}
        others = {name: x for name, x in state.items() if name not in text}
        shard |= {f"text_model.{name}": x for name, x in others.items() if "cross" in name}
        shard["text_model.learnable_embedding.weight"] = torch.ones(8 // count, 64)
        shard["vision_model.vision_encoder.class_embedding"] = torch.ones(32)
        torch.save(shard, path)
    write_byte_tokenizer(folder)
    return folder


@pytest.mark.parametrize("count", [1, 2])
def test_metas_layout_is_loaded_on_one_and_on_two_ranks(metas, count, tmp_path):
    state, expected = metas
    text = {name: state[name] for name in random_state(PARAMS)}
    folder = write_vision(tmp_path / "vision", state, count)
    check_logits(folder, expected)
    for rank, size in ((1, 2), (3, 4)):
        expect_shards(loaded(folder, rank, size), text, PARAMS)
    convert(folder, tmp_path / "hf", images=False)
    check_logits(tmp_path / "hf", expected)


def test_a_file_without_a_number_and_older_keys_are_read(metas, tmp_path):
    """Hugging Face's repositories of the 11B have such a file in original/."""
    folder = write_vision(tmp_path / "original", metas[0], 1)
    (folder / "consolidated.00.pth").rename(folder / "consolidated.pth")
    older = {"vision_model": {"cross_attention_adapter": {"num_layers": 2}}}
    (folder / "params.json").write_text(json.dumps(PARAMS | older))
    check_logits(tmp_path, metas[1])
    (folder / "params.json").write_text(json.dumps(PARAMS | dict.fromkeys(KEYS, -1)))
    with pytest.raises(ValueError, match="missing from the tensors"):
        loaded(folder)  # these are the values of a text model
    (folder / "consolidated.00.pth").touch()
    with pytest.raises(ValueError, match=r"consolidated\.pth .*the same shard: move one away"):
        find(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"cross_attention_layers": None}, "cross_attention_layers is None"),
        ({"cross_attention_layers": [1, 6]}, "below num_hidden_layers=6"),
        ({"cross_attention_layers": [1, True]}, "cross_attention_layers is"),
        ({"num_hidden_layers": "6"}, "num_hidden_layers"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"cross_attention_layers": [1]}, "missing from the tensors"),
        ({"num_hidden_layers": 5}, r"model\.layers\.5\..* has no place"),
        ({"vocab_size": 500}, "has shape"),
    ],
)
def test_what_does_not_fit_is_named(changes, named, mllama, tmp_path):
    folder = renamed(mllama[0], tmp_path / "changed", {})
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=named):
        loaded(folder)


def test_params_that_do_not_fit_are_named(metas, tmp_path):
    for keys, named in (
        ({"vision_num_cross_attention_layers": 0}, "vision_num_cross_attention_layers"),
        ({"vision_something": 1}, "unknown key 'vision_something'"),
    ):
        folder = write_vision(tmp_path / named[:9], metas[0], 1, **keys)
        with pytest.raises(ValueError, match=named):
            find(folder)


def test_the_published_sizes(tmp_path):
    """The configuration of the 11B is that of Llama 3.1 8B, with RoPE's factor of 8."""
    sizes: dict[str, Any] = {
        "dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256,
        "ffn_dim_multiplier": 1.3, "multiple_of": 1024, "norm_eps": 1e-5, "rope_theta": 500000.0,
        "use_scaled_rope": True,
    }  # fmt: skip
    (tmp_path / "params.json").write_text(json.dumps(sizes | KEYS))
    torch.save({}, tmp_path / "consolidated.00.pth")
    params = find(tmp_path).params
    assert params == ModelArgs(**sizes) and params.rope_factor == 8


@pytest.fixture(scope="module")
def mllama_with_images(tmp_path_factory) -> tuple[Path, Any]:
    """A folder of transformers' vision model, and the model.

    transformers takes the results of the blocks that its configuration names, where Meta and the
    published models take their inputs: so the folder names the blocks after them. The tables of
    places agree among grids, as those of converted models do.
    """
    folder = tmp_path_factory.mktemp("mllama_images")
    torch.manual_seed(4)
    sizes = VISION | {
        "num_hidden_layers": 3, "intermediate_layers_indices": [0, 1], "vision_output_dim": 96,
    }  # fmt: skip
    config = transformers.MllamaConfig(text_config=TEXT, vision_config=sizes, image_token_index=512)
    model = transformers.MllamaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "tile" in name and weight.dim() == 2:
                places = torch.randn(4, 4, weight.shape[1] // 4)
                weight.zero_()
                for number, (rows, columns) in enumerate(grids_of(4), 1):
                    values = places[:rows, :columns].reshape(-1)
                    weight[number, : len(values)] = values
            elif "gate" in name and weight.dim() == 1:
                weight.fill_(0.7)
            elif weight.dim() > 1:
                torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    config_path = folder / "config.json"
    written = json.loads(config_path.read_text())
    written["vision_config"]["intermediate_layers_indices"] = [1, 2]
    config_path.write_text(json.dumps(written))
    write_byte_tokenizer(folder)
    return folder, model


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 1), (2, 2), (1, 3)])
def test_images_are_read_as_by_transformers(mllama_with_images, rows, columns):
    """With the image as the first token: transformers lets rows before an image see it."""
    folder, model = mllama_with_images
    built = Llama.build(str(folder), None, 64, 1, device="cpu", dtype="fp32", verbose=False,
                        chat_template="llama3")  # fmt: skip
    draw = torch.Generator().manual_seed(rows * 4 + columns)
    pixels = torch.randint(0, 256, (rows * columns, 28, 28, 3), generator=draw, dtype=torch.uint8)
    ids = [512, *TOKENS[0, :9].tolist()]
    tiles = torch.zeros(1, 1, 4, 3, 28, 28)
    tiles[0, 0, : len(pixels)] = normalized(pixels)
    is_tile = (torch.arange(4) < len(pixels)).long()
    with torch.inference_mode():
        expected = model(
            input_ids=torch.tensor([ids]), pixel_values=tiles,
            aspect_ratio_ids=torch.tensor([[grids_of(4).index((rows, columns)) + 1]]),
            aspect_ratio_mask=is_tile[None, None],
            cross_attention_mask=is_tile.expand(1, len(ids), 1, 4),
        ).logits[0].log_softmax(-1)  # fmt: skip
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    picture = Picture(pixels.numpy(), rows, columns)
    request = built.llm_engine.prepare("", ids, params, pictures=[picture])
    (output,) = built.run_prompts([request])
    assert output.prompt_logprobs is not None
    for position, (token, found) in enumerate(zip(ids, output.prompt_logprobs, strict=True)):
        if position:
            assert found is not None
            assert found[token] == pytest.approx(float(expected[position - 1, token]), abs=1e-4)


def test_a_tuned_table_of_places_is_named(mllama_with_images, tmp_path):
    folder = renamed(mllama_with_images[0], tmp_path / "tuned", {})
    tensors = load_file(folder / "model.safetensors")
    name = next(x for x in tensors if x.endswith("pre_tile_positional_embedding.embedding.weight"))
    tensors[name][2, 0] += 1
    save_file(tensors, folder / "model.safetensors")
    write_byte_tokenizer(folder)
    with pytest.raises(ValueError, match=r"the place \(0, 0\) has other elements"):
        Llama.build(str(folder), None, 64, 1, device="cpu", dtype="fp32")
    with Llama.build(str(folder), None, 64, 1, device="cpu", dtype="fp32", images=False,
                     chat_template="llama3") as built:  # fmt: skip
        assert built.model.image_parts is None


def test_doctor_and_plan_say_what_images_take(mllama_with_images, tmp_path, capsys):
    main(["doctor", str(mllama_with_images[0])])
    out = capsys.readouterr().out
    assert "a vision model with 2 cross-attention layers: it reads images" in out
    assert "up to 4 tiles of 28 x 28 pixels; the largest takes the KV cache of 16 tokens" in out
    main(["plan", "11b-vision", "--gpu", "h100"])
    out = capsys.readouterr().out
    assert "the largest takes the KV cache of 1,616 tokens; the speeds are those of text" in out
    assert f"weights {21_258_368_070 / 2**30:.2f} GiB in bf16" in out
    tuned = renamed(mllama_with_images[0], tmp_path / "other", {})
    config = json.loads((tuned / "config.json").read_text())
    config["vision_config"]["hidden_act"] = "relu"
    (tuned / "config.json").write_text(json.dumps(config))
    assert main(["doctor", str(tuned)]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM: " in out and "images=False loads the text model" in out


@pytest.mark.parametrize(
    ("name", "count"), [("11b-vision", 10_629_184_035), ("90b-vision", 88_552_318_523)]
)
def test_the_published_models_have_so_many_numbers(name, count):
    """The first is half of the bytes of Meta's file, and follows from its folder's size."""
    assert num_elements(whole_shapes(args_of(name))) == count


def test_an_image_beyond_the_kv_cache_is_an_error_of_the_build(mllama_with_images):
    """The cache has the pages of the longest sequence, and those of the largest image."""
    folder = str(mllama_with_images[0])
    sizes: dict[str, Any] = {
        "device": "cpu", "dtype": "fp32", "verbose": False, "chat_template": "llama3",
    }  # fmt: skip
    page = 4 * 2 * 16 * 2 * 16 * 4  # four layers, keys and values, 16 tokens, 2 heads of 16
    with pytest.raises(ValueError, match=r"max_seq_len=64 and an image takes .* images=False"):
        Llama.build(folder, None, 64, 1, kv_cache_memory_bytes=4 * page, **sizes)
    for number in (5, 4):
        kv_bytes = number * page
        sizes["images"] = number == 5
        with Llama.build(folder, None, 64, 1, kv_cache_memory_bytes=kv_bytes, **sizes) as built:
            assert built.engine.scheduler.pool.num_pages == number
    sizes["images"] = True
    with Llama.build(folder, None, 64, 1, **sizes) as built:
        assert built.engine.scheduler.pool.num_pages == 5
