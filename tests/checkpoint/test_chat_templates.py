"""The chat templates of a checkpoint are those that transformers and gguf-py find."""

import json
from pathlib import Path

import pytest
import transformers

from helpers.checkpoints import write_byte_tokenizer
from helpers.gguf_files import PARAMS, write_gguf
from llama.checkpoint.chat_templates import find_chat_templates
from llama.checkpoint.find import find
from llama.checkpoint.hf.tokenizer import tokenizer_json
from llama.tokenizer import Tokenizer

TEXT = "<s>{{ messages[0].content }}"
NAMED = [{"name": "default", "template": TEXT}, {"name": "tool_use", "template": "tools"}]


def write_files(folder: Path, files: dict) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {}),
        ({"tokenizer_config.json": {}}, {}),
        ({"tokenizer_config.json": {"chat_template": TEXT}}, {"default": TEXT}),
        (
            {"tokenizer_config.json": {"chat_template": NAMED}},
            {"default": TEXT, "tool_use": "tools"},
        ),
        (
            {"chat_template.jinja": TEXT, "tokenizer_config.json": {"chat_template": NAMED}},
            {"default": TEXT},
        ),
        (
            {"chat_template.jinja": TEXT, "additional_chat_templates/tool_use.jinja": "tools"},
            {"default": TEXT, "tool_use": "tools"},
        ),
        (
            {
                "additional_chat_templates/rag.jinja": "documents",
                "tokenizer_config.json": {"chat_template": TEXT},
            },
            {"rag": "documents"},
        ),
    ],
)
def test_templates_are_those_of_transformers(hugging, tmp_path, files, expected):
    write_files(hugging, files)
    assert find_chat_templates(find(hugging)) == expected
    write_byte_tokenizer(tmp_path)
    content = tokenizer_json(Tokenizer(tmp_path / "tokenizer.model"))
    (hugging / "tokenizer.json").write_text(json.dumps(content))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(hugging).chat_template
    if isinstance(theirs, str):
        theirs = {"default": theirs}
    assert (theirs or {}) == expected


def test_a_json_file_of_a_processor(hugging):
    config = {"chat_template": "another"}
    write_files(hugging, {"chat_template.json": {"chat_template": TEXT}})
    write_files(hugging, {"tokenizer_config.json": config})
    assert find_chat_templates(find(hugging)) == {"default": TEXT}


def test_a_folder_of_metas_layout_may_have_one(meta):
    assert find_chat_templates(find(meta)) == {}
    write_files(meta, {"chat_template.jinja": TEXT})
    assert find_chat_templates(find(meta)) == {"default": TEXT}
    meta.rename(meta.with_name("original"))
    write_files(meta.parent, {"chat_template.jinja": "above"})
    assert find_chat_templates(find(meta.parent)) == {"default": "above"}


def test_templates_in_gguf_as_its_own_writer_writes_them(tmp_path):
    metadata = {
        "tokenizer.chat_template": TEXT,
        "tokenizer.chat_template.tool_use": "tools",
        "tokenizer.chat_templates": ["tool_use"],
    }
    write_gguf(tmp_path / "m.gguf", PARAMS, metadata=metadata)
    assert find_chat_templates(find(tmp_path / "m.gguf")) == {
        "default": TEXT,
        "tool_use": "tools",
    }


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", "{", r"tokenizer_config.json .* is not JSON"),
        ("tokenizer_config.json", {"chat_template": 3}, "must be a text, or a list of objects"),
        ("tokenizer_config.json", {"chat_template": [TEXT]}, "must be a text, or a list"),
        ("chat_template.jinja", "x" * (1 << 20) + "y", "larger than 1,048,576 bytes"),
        ("chat_template.jinja", b"caf\xe9", "is not UTF-8 at byte 4"),
    ],
)
def test_a_damaged_file_is_named(hugging, name, content, message):
    if isinstance(content, bytes):
        (hugging / name).write_bytes(content)
    else:
        write_files(hugging, {name: content})
    with pytest.raises(ValueError, match=message):
        find_chat_templates(find(hugging))
