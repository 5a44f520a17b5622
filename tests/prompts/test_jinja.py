"""The Jinja template of converted folders against `encode_chat`: the same ids, or errors of both.

The oracle is transformers' `apply_chat_template`, with Llama 3's real vocabulary.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from jinja2 import TemplateError
from llama_models.llama3 import tokenizer as oracle_module

from llama.checkpoint.hf.tokenizer import tokenizer_config, tokenizer_json
from llama.model.args import ModelArgs
from llama.prompts import ToolFormat, encode_chat
from llama.prompts.messages import HEADER_ROLES
from llama.prompts.template import jinja_template
from llama.tokenizer import ChatFormat, Message, Tokenizer

FORMATS = list(ToolFormat)


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "string"}}, "x": [1]}
SEARCH, CODE = function("brave_search"), {"name": "code_interpreter"}
F = function("f", description="In “Zürich” <b>'s", parameters=SCHEMA)
G = function("g", parameters={})
TOOLS: list[list[dict[str, Any]]] = [
    [], [F], [F, G], [SEARCH], [CODE], [CODE, SEARCH, function("wolfram_alpha")], [SEARCH, F],
    [CODE, F], [{"name": "bare", "description": "no type", "parameters": {"properties": {}}}],
]  # fmt: skip


def said(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def call(name: str, arguments: Any, number: str = "1") -> dict[str, Any]:
    return {
        "id": number,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


VALUES: dict[str, Any] = {
    "a": True,
    "b": None,
    "c": {"k": [1.5, -2, 'x"y é'], "e": {}},
    "d_.$-": [],
    "f": False,
}
PARTS = [{"type": "text", "text": " Two"}, {"type": "text", "text": "parts "}]
ONE = said("assistant", None, tool_calls=[call("f", VALUES)])
TWO = said("assistant", " I look.\n", tool_calls=[call("f", {"a": 1}, "p"), call("g", {}, "q")])
RESULT = said("tool", 'sunny, "22 °C"\n', tool_call_id="1")
QUESTION = said("user", "  How is it? ")
DIALOGS: list[list[dict[str, Any]]] = [
    *[[said(role, " Hi\n")] for role in HEADER_ROLES],
    [said("developer", "Be brief."), QUESTION],
    [said("system", ""), QUESTION],
    [said("system", PARTS), said("user", PARTS), said("assistant", PARTS), QUESTION],
    [QUESTION, ONE, RESULT],
    [said("system", " Be brief. "), QUESTION, ONE, RESULT, said("assistant", "Well."), QUESTION],
    [QUESTION, ONE, said("tool", PARTS, tool_call_id="1")],
    [QUESTION, ONE, said("tool", {"warm": [True, None]}, tool_call_id="1")],
    [QUESTION, ONE, {"role": "tool", "tool_call_id": "1"}, QUESTION],
    [QUESTION, TWO, said("tool", "P", tool_call_id="p"), said("tool", "Q", tool_call_id="q")],
    [QUESTION, TWO, said("tool", "Q", tool_call_id="q"), said("tool", "P", tool_call_id="p"), ONE],
    [QUESTION, TWO, said("tool", "?"), said("ipython", "P", tool_call_id="p"), QUESTION],
    [QUESTION, TWO, said("tool", "P", tool_call_id="p")],
    [QUESTION, TWO],
    [QUESTION, said("assistant", None, tool_calls=[call("g", {"a b": 1, "": "x"})]), RESULT],
    [QUESTION, said("assistant", "x", tool_calls=[call("brave_search", {"query": 'a "b"'})]),
     RESULT],
    [QUESTION, said("assistant", None, tool_calls=[call("code_interpreter", {"code": "1\n"})]),
     RESULT, QUESTION],
    [QUESTION, said("assistant", None, tool_calls=[call("brave_search", {"query": "a"}, "p"),
                                                   call("f", {}, "q")]), RESULT, RESULT],
    # Tokens that span the border between content and call: ".[" in 3.2, ' {"' in 3.1.
    *[[QUESTION, said("assistant", content, tool_calls=[call("f", {})]), RESULT]
      for content in ("Let me look.", "A call: ", "$")],
    [QUESTION, said("user", "x", tool_calls=[call("f", {})])],
    [QUESTION, said("king", "x")],
    [said("user", None)],
    [said("user", [{"type": "image_url", "image_url": {}}])],
]  # fmt: skip


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer(Path(oracle_module.__file__).with_name("tokenizer.model"))


@pytest.fixture(scope="module")
def theirs(ours, tmp_path_factory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(ours)))
    config = tokenizer_config(ours, ModelArgs(dim=4096, use_scaled_rope=True))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return transformers.AutoTokenizer.from_pretrained(folder)


def prompt_of(encode: Any, *args: Any, **options: Any) -> Any:
    try:
        return encode(*args, **options)
    except (TypeError, ValueError, TemplateError):
        return "an error"


@pytest.mark.parametrize("tool_format", FORMATS)
@pytest.mark.parametrize("has_header", [True, False])
def test_each_dialog_has_the_same_ids(ours, theirs, tool_format, has_header):
    template, num_prompts = jinja_template(tool_format), 0
    options: Any = {"add_generation_prompt": has_header}
    for dialog, tools in itertools.product(DIALOGS, TOOLS):
        wanted = prompt_of(encode_chat, ours, dialog, tools, tool_format=tool_format, **options)
        found = prompt_of(
            theirs.apply_chat_template, dialog, tools or None, chat_template=template, **options
        )
        found = found if isinstance(found, str) else found["input_ids"]
        if isinstance(wanted, list) and isinstance(found, list):
            assert theirs.decode(found) == ours.decode(wanted), (dialog, tools)
        assert found == wanted, (dialog, tools)
        num_prompts += isinstance(wanted, list)
    # A model without tools has prompts only for dialogs without them.
    assert num_prompts > (7 if tool_format is ToolFormat.NONE else 100)


@pytest.mark.parametrize("role", HEADER_ROLES)
def test_each_role_has_the_header_of_its_table(ours, role):
    written: Message = {"role": HEADER_ROLES[role], "content": "Hi"}
    prompt = [ours.bos_id, *ChatFormat(ours).encode_message(written)]
    assert encode_chat(ours, [said(role, "Hi")], add_generation_prompt=False) == prompt


def test_a_date_may_be_given(ours, theirs):
    ids = encode_chat(ours, [QUESTION], [F], date="1 Jan 2025")
    found = theirs.apply_chat_template(
        [QUESTION], [F], add_generation_prompt=True, date_string="1 Jan 2025"
    )
    assert found["input_ids"] == ids


def test_the_template_is_of_the_models_generation(ours):
    for params, is_guard, tool_format in [
        (ModelArgs(dim=4096), False, ToolFormat.NONE),
        (ModelArgs(dim=4096, use_scaled_rope=True), False, ToolFormat.LLAMA_3_1),
        (ModelArgs(dim=2048, use_scaled_rope=True), False, ToolFormat.LLAMA_3_2),
        (ModelArgs(dim=4096, use_scaled_rope=True), True, ToolFormat.NONE),
    ]:
        config = tokenizer_config(ours, params, is_guard=is_guard)
        assert config["chat_template"] == jinja_template(tool_format)
