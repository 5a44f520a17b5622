"""Vision checkpoints that are written: converted, resharded, quantized, packed, merged.

The tensors are those of Meta's own modules. Files in Hugging Face's layout are read by transformers
and PEFT.
"""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers import vision
from helpers.chat_templates import LLAMA_3_2_VISION
from helpers.kernels import KERNELS_RUN
from helpers.vision import IMAGE_ID, picture
from llama import Llama, Transformer
from llama.checkpoint import packed
from llama.checkpoint.find import find
from llama.checkpoint.hf.vision import grids_of, newer_name
from llama.checkpoint.loader import load
from llama.checkpoint.verify import verify
from llama.checkpoint.write.convert import convert, pack, reshard
from llama.cli import main
from llama.model.layers import Matrix
from llama.prompts.pictures import PictureReader
from llama.prompts.template_format import TemplateFormat
from llama.ranks.parallel import Parallel
from llama.ranks.placement import Placement
from llama.vision.encoder import normalized
from llama.vision.parts import with_image_parts

IMAGE = picture(56, 28, seed=3)
TEXT = list(b"An image, and a text.")
FORMATS = ["int8", "int4", "fp8"]
# What ranks and Meta's shards divide, by the ends of names: rows, then columns.
ROWS = (
    "tok_embeddings.weight", "output.weight", "learnable_embedding.weight", "wq.weight",
    "wk.weight", "wv.weight", "w1.weight", "w3.weight", "conv1._linear.weight", "c_fc.weight",
    "c_fc.bias", "vision_projection.weight", "vision_projection.bias",
)  # fmt: skip
COLUMNS = ("wo.weight", "w2.weight", "c_proj.weight")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Iterator[tuple[Path, dict[str, Tensor], Tensor]]:
    """A folder in Meta's layout, its tensors, and Meta's logits after an image and a text.

    Places of tiles that no grid has are zeros: no other layout has them.
    """
    folder = tmp_path_factory.mktemp("source")
    with vision.metas_modules() as module:
        model = vision.MetasVision(module)
        for name, table in model.model.named_parameters():
            if name.endswith(("tile_pos_embed.embedding", "gated_positional_embedding")):
                for row in range(4):
                    table.data[row, 4 // (row + 1) :] = 0
        logits, _ = model.run([IMAGE_ID, *TEXT], [IMAGE], 1)
        yield vision.write_metas(folder, model.state()), model.state(), logits


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "hf"
    lines = convert(source[0], folder)
    assert not any("left out" in line for line in lines)
    return folder


def shards_of(folder: Path) -> list[dict[str, Tensor]]:
    paths = sorted(folder.glob("*.pth"))
    return [torch.load(path, weights_only=True) for path in paths]


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_a_conversion_there_and_back_gives_equal_files(source, converted, tmp_path):
    convert(converted, tmp_path / "back")
    (back,) = shards_of(tmp_path / "back")
    check_equal(back, source[1])
    kept = [find(folder).with_images().params.vision for folder in (source[0], tmp_path / "back")]
    assert kept[0] is not None and kept[0] == kept[1]
    assert (tmp_path / "back" / "tokenizer.model").exists()
    convert(tmp_path / "back", tmp_path / "again")
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (converted / name).read_bytes()
    last = verify(tmp_path / "back")[-1]
    assert "a vision model with 2 cross-attention layers: it reads images" in last


def test_transformers_computes_metas_logits_of_a_converted_folder(source, converted):
    """With the image first, and what it takes of the encoder named one block earlier."""
    config = transformers.AutoConfig.from_pretrained(converted)
    config.vision_config.intermediate_layers_indices = [0, 1]
    theirs: Any = transformers.MllamaForConditionalGeneration
    model, report = theirs.from_pretrained(
        converted, config=config, output_loading_info=True, dtype=torch.float32
    )
    assert not any(report.values()), report
    tokenizer = transformers.AutoTokenizer.from_pretrained(converted)
    assert tokenizer.convert_tokens_to_ids("<|image|>") == IMAGE_ID
    read = PictureReader(28, 4).tiles(IMAGE)
    tiles = torch.zeros(1, 1, 4, 3, 28, 28)
    tiles[0, 0, : len(read.pixels)] = normalized(torch.from_numpy(read.pixels))
    is_tile = (torch.arange(4) < len(read.pixels)).long()
    ids = [IMAGE_ID, *TEXT]
    grid = grids_of(4).index((read.rows, read.columns)) + 1
    with torch.inference_mode():
        found = model(
            input_ids=torch.tensor([ids]), pixel_values=tiles,
            aspect_ratio_ids=torch.tensor([[grid]]), aspect_ratio_mask=is_tile[None, None],
            cross_attention_mask=is_tile.expand(1, len(ids), 1, 4),
        ).logits[0]  # fmt: skip
    torch.testing.assert_close(found, source[2], atol=1e-3, rtol=1e-4)


def test_the_images_of_a_dialog_stand_in_a_converted_template(converted):
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(converted)
    parts = [{"type": "image"}, {"type": "text", "text": " What is this?"}]
    dialog: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": parts},
    ]
    ids = tokenizer.apply_chat_template(dialog, add_generation_prompt=True)["input_ids"]
    asked = [
        dialog[0],
        {"role": "user", "content": [{"type": "image", "image": IMAGE}, parts[1]]},
    ]
    with build(converted) as llama:
        prompt: Any = next(llama._prompts.dialogs([asked], chat_options()))
    assert prompt.ids == ids


@pytest.fixture(scope="module")
def with_template(converted, tmp_path_factory) -> Path:
    """A folder whose chat template writes images, and another text than Meta's format."""
    folder = tmp_path_factory.mktemp("template") / "hf"
    shutil.copytree(converted, folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"chat_template": LLAMA_3_2_VISION}
    path.write_text(json.dumps(config))
    for other in folder.glob("chat_template*"):
        other.unlink()
    return folder


def test_a_chat_template_writes_the_images_of_a_dialog(with_template):
    """The ids are those of transformers, except where a text names the token of images."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(with_template)
    texts = [{"type": "text", "text": "Look: "}, {"type": "text", "text": " What is this?"}]
    read = {"type": "image", "image": IMAGE}
    dialog = [
        {"role": "user", "content": [texts[0], {"type": "image"}, texts[1], {"type": "image"}]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "And its colour?"},
    ]
    asked = [{"role": "user", "content": [texts[0], read, texts[1], read]}, *dialog[1:]]
    fake = {"role": "user", "content": [{"type": "text", "text": "<|image|>"}, read]}
    ids = tokenizer.apply_chat_template(dialog, add_generation_prompt=True)["input_ids"]
    with build(with_template) as llama:
        assert isinstance(llama.dialog_format, TemplateFormat)
        prompts: list[Any] = list(llama._prompts.dialogs([asked, [fake]], chat_options()))
        assert prompts[0].ids == ids and len(prompts[0].pictures) == 2
        assert prompts[1].ids.count(IMAGE_ID) == 1
        refused = [{"role": "system", "content": "S"}, fake]
        with pytest.raises(ValueError, match=r"no system message with images.*llama3"):
            list(llama._prompts.dialogs([refused], chat_options()))


def chat_options() -> Any:
    from llama.prompts.chat import ChatOptions

    return ChatOptions()


def build(folder: Path, dtype: str = "fp32", **more: Any) -> Llama:
    return Llama.build(str(folder), None, 64, 2, device="cpu", dtype=dtype, verbose=False, **more)


def part_of(name: str, tensor: Tensor, rank: int, size: int) -> Tensor:
    dim = 0 if name.endswith(ROWS) else 1 if name.endswith(COLUMNS) else None
    return tensor if dim is None else tensor.chunk(size, dim)[rank]


def model_of(folder: Path, rank: int = 0, size: int = 1, *, is_packed: bool = False) -> Any:
    """Load what a rank holds."""
    found = find(folder).with_images()
    parallel = Parallel(Placement(rank=rank, size=size))
    dtype = torch.bfloat16 if is_packed else torch.float32
    model = with_image_parts(Transformer(found.params, parallel=parallel, dtype=dtype))
    if is_packed:
        packed.attach(found, model)
    else:
        load(found, model)
    return model


def test_shards_are_those_of_metas_ranks(source, tmp_path):
    """In two shards, which one, two and three ranks read; and back in one."""
    folder, state, _ = source
    reshard(folder, tmp_path / "two", 2)
    shards = shards_of(tmp_path / "two")
    assert len(shards) == 2
    for rank, shard in enumerate(shards):
        check_equal(shard, {name: part_of(name, x, rank, 2) for name, x in state.items()})
    reshard(tmp_path / "two", tmp_path / "one", 1)
    check_equal(shards_of(tmp_path / "one")[0], state)
    for rank, size in ((0, 1), (1, 2), (2, 3)):
        found = model_of(tmp_path / "two", rank, size).named_shards()
        check_equal(found, model_of(folder, rank, size).named_shards())


def test_more_shards_than_further_embeddings_have_all_of_them(source, tmp_path):
    """Meta's code knows no such shards."""
    from llama.checkpoint import vision as names

    rows = source[1]["text_model.learnable_embedding.weight"]
    for count, expected in ((3, rows), (16, rows), (8, rows[:1])):
        found = names.shard_of("learnable_embedding.weight", rows, Placement(size=count))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("quantize", FORMATS)
def test_the_text_of_a_vision_model_is_quantized(source, quantize, tmp_path):
    """Self- and cross-attention layers are; the encoder keeps its type. Others can read it.

    In float32 as well, FP8 changes the log-probabilities of these few tokens by 0.204.
    """
    convert(source[0], tmp_path / "hf", quantize=quantize)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    scaled = {name for name in tensors if name.endswith("weight_scale")}
    assert len(scaled) == 6 * 7
    assert not any("vision_model" in name or "projector" in name for name in scaled)
    theirs: Any = transformers.MllamaForConditionalGeneration
    _, report = theirs.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values()), report
    with build(tmp_path / "hf", "bf16") as llama, build(source[0], "bf16") as plain:
        found, expected = (
            each.text_completion([[IMAGE, " a text"]], 0.0, max_gen_len=0, logprobs=True, echo=True)
            for each in (llama, plain)
        )
    difference = torch.tensor(found[0]["logprobs"]) - torch.tensor(expected[0]["logprobs"])
    assert 0 < difference.square().mean().sqrt() < (1.0 if quantize == "int4" else 0.3)


TOWER = ["vision_model", "multi_modal_projector"]
BITSANDBYTES: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4, plain tower": {
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
        "llm_int8_skip_modules": ["lm_head", *(f"model.{name}" for name in TOWER)],
    },
    "int8": {"load_in_8bit": True},
}  # fmt: skip


@pytest.mark.parametrize("case", BITSANDBYTES)
def test_files_of_bitsandbytes_are_their_dequantized_tensors(converted, case, tmp_path):
    """transformers writes them, with the matrices of the encoder as codes or not."""
    library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    theirs: Any = transformers.MllamaForConditionalGeneration
    config = transformers.BitsAndBytesConfig(**BITSANDBYTES[case])
    model = theirs.from_pretrained(converted, quantization_config=config, dtype=torch.float32)
    coded, plain = tmp_path / "coded", tmp_path / "plain"
    for folder in (coded, plain):
        shutil.copytree(converted, folder)
    model.save_pretrained(coded)
    tensors = load_file(plain / "model.safetensors")
    modules = dict(model.named_modules())
    was_coded = set()
    for name in tensors:
        weight = getattr(modules.get(newer_name(name).removesuffix(".weight")), "weight", None)
        if isinstance(weight, library.nn.Params4bit):
            state = copy.copy(weight.quant_state)
            # Its code for CPUs errs where a row has no whole number of blocks.
            state.shape = (weight.numel() * 2 // state.blocksize, state.blocksize)
            numbers = library.functional.dequantize_4bit(weight.data, state)
            tensors[name] = numbers.view_as(tensors[name])
        elif isinstance(weight, library.nn.Int8Params):
            tensors[name] = weight.CB.float() * weight.SCB[:, None] / 127
        else:
            continue
        was_coded.add(name)
    save_file(tensors, plain / "model.safetensors")
    assert any(name.startswith(tuple(TOWER)) for name in was_coded) == (case != "nf4, plain tower")
    assert len(was_coded) >= 6 * 7  # layers of text and of cross-attention
    found, expected = (model_of(folder, 1, 2).named_shards() for folder in (coded, plain))
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-6)
    with build(coded) as llama, build(plain) as other:
        answers = [
            each.text_completion([[IMAGE, " a text"]], 0.0, max_gen_len=0, logprobs=True, echo=True)
            for each in (llama, other)
        ]
    assert answers[0][0]["logprobs"] == pytest.approx(answers[1][0]["logprobs"], abs=1e-4)


@pytest.mark.skipif(not KERNELS_RUN, reason="packed weights are for the CPU's kernels")
@pytest.mark.parametrize("quantize", [None, *FORMATS])
def test_packed_weights_give_the_bits_of_their_source(source, quantize, tmp_path):
    pack(source[0], tmp_path / "packed", quantize=quantize)
    prompts: list[Any] = [[IMAGE, " a text"], "no image"]
    with (
        build(source[0], "bf16", quantize=quantize) as plain,
        build(tmp_path / "packed", "bf16") as llama,
        build(tmp_path / "packed", "bf16", images=False) as text,
    ):
        expected = plain.text_completion(prompts, 0.0, max_gen_len=8, logprobs=True)
        assert llama.text_completion(prompts, 0.0, max_gen_len=8, logprobs=True) == expected
        only = text.text_completion(prompts[1:], 0.0, max_gen_len=8, logprobs=True)
        assert only == expected[1:]
        assert len(list(text.model.parameters())) < len(list(llama.model.parameters()))


@pytest.mark.skipif(not KERNELS_RUN, reason="packed weights are for the CPU's kernels")
@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (2, 3)])
def test_ranks_take_their_parts_of_packed_weights(source, rank, size, tmp_path):
    pack(source[0], tmp_path / "packed")
    found = model_of(tmp_path / "packed", rank, size, is_packed=True)
    expected = model_of(source[0], rank, size)
    for (path, module), (_, other) in zip(
        found.named_modules(), expected.named_modules(), strict=False
    ):
        if isinstance(module, Matrix):
            assert torch.equal(module.weight.plain(), other.weight.plain().bfloat16()), path
    plain = dict(expected.image_parts.named_parameters())
    for name, parameter in found.image_parts.named_parameters():
        if not name.endswith("values"):
            assert torch.equal(parameter, plain[name].bfloat16()), name


def test_the_text_model_is_written_where_it_is_asked_for(source, tmp_path, capsys):
    assert main(["convert", str(source[0]), str(tmp_path / "hf"), "--text_only"]) == 0
    assert "the text model of a vision checkpoint" in capsys.readouterr().out
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "llama"
    transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    lines = convert(source[0], tmp_path / "model.gguf")
    assert "images are refused" in lines[0]


TARGETS = {
    "text and cross": ["q_proj", "down_proj"],
    "encoder": ["fc1", "multi_modal_projector"],
}


@pytest.mark.parametrize("case", list(TARGETS))
def test_merged_adapters_are_those_of_peft(converted, case, tmp_path):
    """In self- and cross-attention layers and in the encoder; requests choose the former alone."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    base = transformers.MllamaForConditionalGeneration.from_pretrained(
        converted, dtype=torch.float32
    )
    config = peft.LoraConfig(r=4, lora_alpha=9, target_modules=TARGETS[case])
    model = peft.get_peft_model(base, config)
    torch.manual_seed(2)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    convert(converted, tmp_path / "merged", lora=tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "theirs")
    found = load_file(tmp_path / "merged" / "model.safetensors")
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-6)
    with build(converted) as llama, pytest.raises(ValueError, match="of the layers only: merge it"):
        llama.load_adapter("one", tmp_path / "adapter")
