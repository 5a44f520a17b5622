"""Llama Guard is recognized by the files alongside its weights."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from llama import Llama
from llama.checkpoint.find import Checkpoint
from llama.model.args import ModelArgs

TEMPLATE = "{{ bos_token }}Task: ...\\n<BEGIN UNSAFE CONTENT CATEGORIES>\\nS1: Violent Crimes.\\n"


def is_guard(folder: Path) -> bool:
    return Checkpoint(folder, ModelArgs(), [], "meta").is_guard


@pytest.mark.parametrize(
    ("folder", "files", "answer"),
    [
        ("Llama-Guard-3-8B", {}, True),
        ("llama_guard", {}, True),
        ("Llama-Guard-3-1B/original", {}, True),
        ("models--meta-llama--Llama-Guard-3-8B/snapshots/0c2a/original", {}, True),
        ("models--meta-llama--Llama-Guard-3-8B/snapshots/0c2a", {}, True),
        ("a", {"tokenizer_config.json": {"chat_template": TEMPLATE}}, True),
        ("a", {"tokenizer_config.json": {"chat_template": [{"template": TEMPLATE}]}}, True),
        ("a", {"chat_template.jinja": TEMPLATE}, True),
        ("a", {"config.json": {"_name_or_path": "meta-llama/Llama-Guard-3-1B"}}, True),
        ("Llama-3.1-8B-Instruct", {}, False),
        ("llama-guard-or-not/Llama-3.1-8B-Instruct", {}, False),
        ("Guardian/original", {}, False),
        ("a", {"tokenizer_config.json": {"chat_template": "{{ tools }}"}}, False),
        ("a", {"config.json": {"_name_or_path": None}}, False),
        ("a", {"config.json": ["Llama-Guard"]}, False),
        ("a", {"config.json": "[" * 100_000}, False),
        ("absent", None, False),
    ],
)
def test_guard_is_told_by_template_and_names(tmp_path, folder, files, answer):
    path: Path = tmp_path / folder
    if files is not None:
        path.mkdir(parents=True)
    for name, content in (files or {}).items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name).write_text(text)
    assert is_guard(path) is answer


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    assert not is_guard(tmp_path)


def test_a_guard_that_is_loaded_has_no_tools(make_checkpoint):
    folder, _, _ = make_checkpoint(use_scaled_rope=True)
    sizes: dict[str, Any] = {"max_seq_len": 64, "max_batch_size": 1, "device": "cpu"}
    with Llama.build(str(folder), **sizes) as llama:
        assert llama.dialog_format.describe() == "Meta's chat format, tool calls as in llama3.1"
    guard = folder.rename(folder.with_name("Llama-Guard-3-8B"))
    with Llama.build(str(guard), **sizes) as llama:
        assert llama.dialog_format.describe() == "Meta's chat format, no tools"
    (guard / "chat_template.jinja").write_text(TEMPLATE)
    with Llama.build(str(guard), **sizes) as llama:
        assert not llama.dialog_format.has_tools
        ids = llama.dialog_format.encode([{"role": "user", "content": "Hi"}])
        assert "S1: Violent Crimes." in llama.tokenizer.decode(ids)
