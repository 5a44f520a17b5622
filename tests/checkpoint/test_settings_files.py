"""Conversions keep a fine-tune's chat templates and settings, as other programs read them."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers

from helpers.checkpoints import random_state, write_byte_tokenizer, write_meta
from helpers.fine_tunes import KINDS, make_model, ranks_of
from helpers.gguf_files import PARAMS, write_gguf
from helpers.kernels import KERNELS_RUN
from helpers.weights import change_json, hf_model
from llama.checkpoint.chat_templates import find_chat_templates
from llama.checkpoint.find import find
from llama.checkpoint.hf.tokenizer import tokenizer_config, tokenizer_json
from llama.checkpoint.tokenizer_files import load_tokenizer
from llama.checkpoint.write.convert import convert, pack, reshard
from llama.tokenizer import Tokenizer

TEXT = "<s>{{ messages[0].content }}\n"
TOOLS = "tools: {{ tools | tojson }}"
BOTH = {"default": TEXT, "tool_use": TOOLS}
GENERATION = {
    "eos_token_id": [257, 265],
    "temperature": 0.15,
    "top_p": 0.75,
    "top_k": 12,
    "repetition_penalty": 1.25,
    "do_sample": True,
    "max_length": 99,
    "transformers_version": "4.40.0",
}
# The places where a folder of Hugging Face's layout may have its chat templates.
PLACES: dict[str, dict[str, Any]] = {
    "jinja": {"chat_template.jinja": TEXT, "additional_chat_templates/tool_use.jinja": TOOLS},
    "json": {"chat_template.json": {"chat_template": TEXT}},
    "text": {"tokenizer_config.json": TEXT},
    "list": {"tokenizer_config.json": [{"name": x, "template": text} for x, text in BOTH.items()]},
}


def fine_tune(folder: Path, place: str) -> dict[str, str]:
    """Write a fine-tune in Hugging Face's layout; return its chat templates."""
    model = hf_model(
        hidden_size=128, intermediate_size=128, num_hidden_layers=1, vocab_size=512,
        bos_token_id=256, eos_token_id=264, pad_token_id=300, attention_dropout=0.25,
    )  # fmt: skip
    model.save_pretrained(folder)
    write_byte_tokenizer(folder)
    tokenizer = Tokenizer(folder / "tokenizer.model", llama_3_0=True)
    (folder / "tokenizer.model").unlink()
    config = tokenizer_config(tokenizer, find(folder).params) | {"padding_side": "left"}
    del config["chat_template"]
    files = {
        "tokenizer.json": tokenizer_json(tokenizer),
        "tokenizer_config.json": config,
        "special_tokens_map.json": {"pad_token": "<|reserved_special_token_9|>"},
        "generation_config.json": GENERATION,
    }
    templates = PLACES.get(place, {})
    for name, content in templates.items():
        if name == "tokenizer_config.json":
            config["chat_template"] = content
        else:
            files[name] = content
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text)
    return {} if not templates else BOTH if place in ("jinja", "list") else {"default": TEXT}


def settings(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return a folder's chat templates and settings of generation, as transformers reads them."""
    template = transformers.AutoTokenizer.from_pretrained(folder).chat_template
    generation = transformers.GenerationConfig.from_pretrained(folder).to_dict()
    del generation["transformers_version"]
    return {"default": template} if isinstance(template, str) else template or {}, generation


@pytest.mark.parametrize("place", [*PLACES, "none"])
def test_hugging_face_to_meta_and_back(tmp_path, place):
    expected = fine_tune(tmp_path / "hf", place)
    lines = convert(tmp_path / "hf", tmp_path / "meta")
    assert find(tmp_path / "meta").layout == "meta"
    assert find_chat_templates(find(tmp_path / "meta")) == expected
    note = "config.json: keys left out, as the new files have no place for them: "
    assert lines[0].startswith(note) and "attention_dropout" in lines[0]
    reshard(tmp_path / "meta", tmp_path / "shards", 2)
    convert(tmp_path / "shards", tmp_path / "back")
    before, generation = settings(tmp_path / "hf")
    after, kept = settings(tmp_path / "back")
    assert after == before
    if place != "json":  # transformers reads that file for processors only
        assert after == expected
    # config.json, which Meta's layout has not, names another token that ends an answer.
    assert kept == generation | {
        "eos_token_id": [257, 264, 265],
        "bos_token_id": 256,
        "pad_token_id": 300,
    }
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


@pytest.mark.parametrize("place", [*PLACES, "none"])
def test_a_quantized_folder_has_the_files_of_its_source(tmp_path, place):
    fine_tune(tmp_path / "hf", place)
    change_json(tmp_path / "hf" / "config.json", auto_map={"AutoModel": "code.Model"})
    lines = convert(tmp_path / "hf", tmp_path / "out", quantize="int8")
    assert (
        lines[0] == "config.json: keys left out, as the new files have no place for them: auto_map"
    )
    computed = {"config.json", "model.safetensors"}
    names = {path.relative_to(tmp_path / "hf") for path in (tmp_path / "hf").rglob("*.j*")}
    assert len(names) >= 5
    for name in names - {Path("config.json")}:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    written = {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*.*")}
    assert written == names | {Path(name) for name in computed}
    before = transformers.AutoConfig.from_pretrained(tmp_path / "hf").to_dict()
    after = transformers.AutoConfig.from_pretrained(tmp_path / "out").to_dict()
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert changed <= {"dtype", "quantization_config", "auto_map", "_name_or_path"}
    assert after["attention_dropout"] == 0.25


@pytest.mark.parametrize("place", [*PLACES, "none"])
def test_hugging_face_to_gguf_and_back(tmp_path, place):
    expected = fine_tune(tmp_path / "hf", place)
    lines = convert(tmp_path / "hf", tmp_path / "m.gguf")
    assert (
        "generation_config.json: keys left out, as the new files have no place for them: max_length"
        in (lines)
    )
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    values = {key: field.contents() for key, field in fields.items()}
    templates = {key: value for key, value in values.items() if key.startswith("tokenizer.chat")}
    wanted: dict[str, Any] = {}
    if expected:
        wanted["tokenizer.chat_template"] = TEXT
    if "tool_use" in expected:
        wanted["tokenizer.chat_template.tool_use"] = TOOLS
        wanted["tokenizer.chat_templates"] = ["tool_use"]
    assert templates == wanted
    sampling = {key: x for key, x in values.items() if key.startswith("general.sampling.")}
    assert sampling == pytest.approx(
        {
            "general.sampling.temp": 0.15,
            "general.sampling.top_p": 0.75,
            "general.sampling.top_k": 12,
            "general.sampling.penalty_repeat": 1.25,
        }
    )
    convert(tmp_path / "m.gguf", tmp_path / "back")
    after, kept = settings(tmp_path / "back")
    assert after == expected
    names = ("temperature", "top_p", "top_k", "repetition_penalty", "do_sample")
    assert {name: kept[name] for name in names} == {name: GENERATION[name] for name in names}


@pytest.mark.skipif(not KERNELS_RUN, reason="needs x86-64 with AVX2, and g++")
@pytest.mark.parametrize("source", ["hf", "m.gguf"])
def test_packed_weights_keep_them(tmp_path, source):
    fine_tune(tmp_path / "hf", "list")
    if source == "m.gguf":
        convert(tmp_path / "hf", tmp_path / "m.gguf")
    lines = pack(tmp_path / source, tmp_path / "packed")
    assert find(tmp_path / "packed").source_layout == find(tmp_path / source).layout
    assert find_chat_templates(find(tmp_path / "packed")) == BOTH
    generation = json.loads((tmp_path / "packed" / "generation_config.json").read_text())
    assert generation["temperature"] == 0.15
    if source == "hf":
        assert generation["eos_token_id"] == [257, 264, 265]
        assert "attention_dropout" in lines[0]
    names = {path.name for path in (tmp_path / "packed").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json"} <= names


@pytest.mark.parametrize("kind", KINDS)
def test_a_fine_tunes_tokens_and_stops_survive(tmp_path, kind):
    """Names, ids and ends of answers are the same in every folder that a conversion writes."""
    make_model(tmp_path / "hf", kind, hidden_size=128, intermediate_size=128)
    of_config = len(ranks_of()) + 20  # a token that config.json alone names
    change_json(tmp_path / "hf" / "config.json", eos_token_id=of_config)
    expected = load_tokenizer(find(tmp_path / "hf"))
    assert of_config in expected.stop_tokens
    convert(tmp_path / "hf", tmp_path / "meta")
    convert(tmp_path / "meta", tmp_path / "back")
    convert(tmp_path / "hf", tmp_path / "int8", quantize="int8")
    if KERNELS_RUN:
        pack(tmp_path / "hf", tmp_path / "packed")
    for folder in set(tmp_path.iterdir()) - {tmp_path / "hf"}:
        found = load_tokenizer(find(folder))
        for name in ("special_tokens", "hidden_ids", "stop_tokens", "bos_id", "eos_id", "n_words"):
            assert getattr(found, name) == getattr(expected, name), (folder.name, name)


def test_a_template_above_metas_weights_is_kept(tmp_path):
    """A repository of Hugging Face's hub may have Meta's weights in original/."""
    write_meta(tmp_path / "repo" / "original", PARAMS, random_state(PARAMS))
    (tmp_path / "repo" / "chat_template.jinja").write_text(TEXT)
    (tmp_path / "repo" / "generation_config.json").write_text(json.dumps(GENERATION))
    reshard(tmp_path / "repo", tmp_path / "two", 2)
    assert (tmp_path / "two" / "chat_template.jinja").read_text() == TEXT
    assert json.loads((tmp_path / "two" / "generation_config.json").read_text()) == GENERATION


def test_metas_files_get_the_template_of_their_format(tmp_path):
    """A Meta folder without a template gets that of its format; another keeps its own."""
    folder = write_meta(tmp_path / "meta", PARAMS, random_state(PARAMS))
    write_byte_tokenizer(folder)
    convert(folder, tmp_path / "plain")
    assert "start_header_id" in settings(tmp_path / "plain")[0]["default"]
    (folder / "chat_template.jinja").write_text(TEXT)
    convert(folder, tmp_path / "own")
    convert(folder, tmp_path / "own.gguf")
    assert settings(tmp_path / "own")[0] == {"default": TEXT}
    assert find_chat_templates(find(tmp_path / "own.gguf")) == {"default": TEXT}


def test_a_damaged_file_is_found_before_anything_is_written(tmp_path):
    fine_tune(tmp_path / "hf", "text")
    (tmp_path / "hf" / "generation_config.json").write_text("{")
    for write in (convert, pack) if KERNELS_RUN else (convert,):
        with pytest.raises(ValueError, match=r"generation_config\.json .* is not JSON"):
            write(tmp_path / "hf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_the_name_of_a_template_cannot_leave_the_folder(tmp_path):
    metadata = {
        "tokenizer.chat_template": TEXT,
        "tokenizer.chat_template.../../x": TOOLS,
        "general.license": "llama3",
    }
    write_byte_tokenizer(tmp_path)
    tokenizer = tmp_path / "tokenizer.model"
    write_gguf(tmp_path / "m.gguf", PARAMS, metadata=metadata, tokenizer=tokenizer)
    lines = convert(tmp_path / "m.gguf", tmp_path / "out")
    assert any(line.endswith("for them: general.license") for line in lines)
    kept = find_chat_templates(find(tmp_path / "out"))
    assert kept == {"default": TEXT, "______x": TOOLS}
