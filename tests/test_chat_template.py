"""Which chat format a model gets: its files' template, a given one, Meta's, or none."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.fine_tunes import make_model
from helpers.services import service_of
from llama import Llama
from llama.build_args import BuildArgs
from llama.checkpoint.find import find
from llama.checkpoint.tokenizer_files import load_tokenizer
from llama.common.checks import FieldError
from llama.loading.dialog_format import find_dialog_format
from llama.prompts.call_format import CALL_PARSERS
from llama.prompts.dialog_format import DialogFormat, MetaFormat, MissingFormat
from llama.prompts.reasoning import PARSERS
from llama.prompts.tools import Tools
from llama.server.app import make_app

SIZES: dict[str, Any] = {"max_seq_len": 128, "max_batch_size": 1, "device": "cpu"}
QUESTION = {"role": "user", "content": "Hi"}
TULU = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def write_template(folder: Path, text: str = TULU) -> str:
    path = folder / "given.jinja"
    path.write_text(text)
    return str(path)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A folder in Hugging Face's layout without a chat template."""
    return make_model(tmp_path_factory.mktemp("base"), "meta")


def test_a_model_without_a_template_refuses_chats_and_completes_texts(base):
    with Llama.build(str(base), **SIZES) as llama:
        assert isinstance(llama.dialog_format, MissingFormat)
        for ask in (llama.chat_completion, llama.stream_chat):
            with pytest.raises(ValueError, match=r"dialog 0, .* no chat template, .*llama3"):
                list(ask([[QUESTION]]))
        assert llama.text_completion(["Once"], max_gen_len=4, temperature=0.0)


def test_meta_s_format_or_a_file_can_be_given(base, tmp_path):
    with Llama.build(str(base), chat_template="llama3", **SIZES) as llama:
        wanted = llama.formatter.encode_dialog_prompt([{"role": "user", "content": "Hi"}])
        assert llama.dialog_format.encode([QUESTION]) == wanted
        assert llama.chat_completion([[QUESTION]], max_gen_len=4, temperature=0.0)
    given = write_template(tmp_path)
    with Llama.build(str(base), chat_template=given, **SIZES) as llama:
        ids = llama.dialog_format.encode([QUESTION])
        assert llama.tokenizer.decode(ids) == "<|user|>\nHi\n<|assistant|>\n"


def test_a_given_template_precedes_that_of_the_files(base, tmp_path):
    folder = make_model(tmp_path / "model", "meta")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    checkpoint = find(folder)
    tokenizer = load_tokenizer(checkpoint)

    def text(chat_template: str | None) -> str:
        dialog_format = find_dialog_format(checkpoint, tokenizer, chat_template=chat_template)
        return tokenizer.decode(dialog_format.encode([QUESTION]))

    assert text(None) == "Hi"
    assert text(write_template(tmp_path)).startswith("<|user|>")
    assert text("llama3").startswith("<|begin_of_text|><|start_header_id|>user")


def test_a_wrong_template_is_named_before_weights_are_read(base, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing.jinja is no file: give"):
        Llama.build(str(base), chat_template=str(tmp_path / "nothing.jinja"), **SIZES)
    with pytest.raises(ValueError, match=r"cannot be used: .*: give another one: --chat_template"):
        Llama.build(str(base), chat_template=write_template(tmp_path, "{% if %}"), **SIZES)
    with pytest.raises(TypeError, match="chat_template"):
        Llama.build(str(base), chat_template=3.1, **SIZES)  # type: ignore[arg-type]


def test_a_format_of_calls_can_be_named(base, tmp_path):
    given = write_template(tmp_path, TULU + "{{ tools }}")
    checkpoint = find(base)

    def format_with(parser: str) -> DialogFormat:
        return find_dialog_format(
            checkpoint, load_tokenizer(checkpoint), chat_template=given, tool_call_parser=parser
        )

    tools = Tools(({"name": "now"},), must_call=True)
    assert "<tool_call>" in format_with("hermes").call_grammar(tools)
    with pytest.raises(ValueError, match="cannot be forced"):
        format_with("auto").call_grammar(tools)
    for parser in CALL_PARSERS:
        format_with(parser)
    with pytest.raises(FieldError, match="tool_call_parser='qwen' must be one of auto, hermes"):
        Llama.build(str(base), tool_call_parser="qwen", **SIZES)
    flags = BuildArgs.flags()
    assert set(flags["tool_call_parser"].flag.choices) == set(CALL_PARSERS)
    assert set(flags["reasoning_parser"].flag.choices) == set(PARSERS)


def test_meta_s_own_files_have_meta_s_format(demo):
    assert isinstance(demo.dialog_format, MetaFormat)


def test_a_server_of_a_base_model_completes_and_refuses_chats(base, caplog):
    chat = {"messages": [QUESTION], "max_tokens": 2, "model": "m"}
    text = {"prompt": "Once", "max_tokens": 2}

    async def ask(llama: Llama) -> list[httpx.Response]:
        service = service_of("base")
        service.start(llama)
        transport = httpx.ASGITransport(make_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answers = [
                await client.post("/v1/chat/completions", json=chat),
                await client.post("/v1/messages", json=chat),
                await client.post("/v1/completions", json=text),
            ]
        service.close()
        return answers

    caplog.set_level("INFO", "llama.server")
    with Llama.build(str(base), **SIZES) as llama:
        chat_answer, message_answer, completion = asyncio.run(ask(llama))
    for answer in (chat_answer, message_answer):
        assert answer.status_code == 400
        assert "no chat template" in answer.text and "--chat_template llama3" in answer.text
    assert completion.status_code == 200
    assert "base: no chat template: completions only" in caplog.text
