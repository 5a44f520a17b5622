"""Prompts that a program has rendered: their special tokens are read where `parse_special` asks.

The oracle is transformers' tokenizer of the same files.
"""

import logging
from typing import Any

import pytest
import transformers
from starlette.testclient import TestClient

from helpers.batch import answers
from helpers.fine_tunes import make_model
from helpers.services import service_of
from llama import Llama
from llama.requests import prepare
from llama.server.app import make_app

PROMPTS = {
    "chatml": "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n",
    "r1": "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>\n",
    "hermes": "<|begin_of_text|><|im_start|>tool\n<tool_call>1</tool_call><|im_end|>",
    "meta": "Once <|eot_id|> upon<|start_header_id|>a<|end_header_id|>\n\n <|nothing|> time",
}


@pytest.fixture(params=PROMPTS)
def model(request, tmp_path) -> tuple[str, Llama, Any]:
    """The text of a prompt, a tiny model, and transformers' tokenizer."""
    folder = make_model(tmp_path / "model", request.param)
    llama = Llama.build(str(folder), max_seq_len=128, max_batch_size=4, device="cpu", verbose=False)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    return PROMPTS[request.param], llama, theirs


def client_of(llama: Llama) -> TestClient:
    service = service_of()
    service.start(llama)
    return TestClient(make_app(service), base_url="http://localhost")


def wanted_ids(text: str, llama: Llama, theirs: Any) -> list[int]:
    ids = theirs(text, add_special_tokens=False).input_ids
    return ids if ids[0] == llama.tokenizer.bos_id else [llama.tokenizer.bos_id, *ids]


def test_special_tokens_are_read_where_the_body_asks(model, tmp_path):
    text, llama, theirs = model
    ids = wanted_ids(text, llama, theirs)
    client = client_of(llama)
    common: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "skip_special_tokens": False}

    def asked(**body: Any) -> dict[str, Any]:
        found = client.post("/v1/completions", json={**common, **body})
        assert found.status_code == 200, found.text
        return found.json()

    of_ids = asked(prompt=ids)
    parsed = asked(prompt=text, parse_special=True)
    assert parsed["usage"]["prompt_tokens"] == len(ids)
    assert parsed["choices"] == of_ids["choices"]
    plain = llama.tokenizer.encode(text.removeprefix(theirs.bos_token), bos=True, eos=False)
    assert len(plain) > len(ids)
    for body in ({}, {"parse_special": False}):
        assert asked(prompt=text, **body)["usage"]["prompt_tokens"] == len(plain)
    both = asked(prompt=[text, "x"], parse_special=True, echo=True)["choices"]
    assert both[0]["text"].startswith(text.removeprefix(theirs.bos_token))
    (record,) = answers(llama, tmp_path, [{"prompt": text, "parse_special": True, **common}])
    assert record["response"]["body"]["choices"][0]["text"] == parsed["choices"][0]["text"]
    assert record["response"]["body"]["usage"]["prompt_tokens"] == len(ids)


def test_a_rendered_prompt_is_named_once_in_the_log(model, caplog):
    text, llama, theirs = model
    is_rendered = not text.startswith("Once")
    client = client_of(llama)
    prepare._warn_of_rendered_prompt.cache_clear()
    ignored: list[dict[str, Any]] = [
        {"prompt": "Once upon"},
        {"prompt": f"{theirs.bos_token}Once upon"},
        {"prompt": f"Once {text}"},
        {"prompt": text, "parse_special": True},
        {"prompt": theirs(text).input_ids},
    ]
    with caplog.at_level(logging.WARNING, "llama"):
        for body in ignored:
            client.post("/v1/completions", json={**body, "max_tokens": 1})
        assert "special token" not in caplog.text
        for _ in range(3):
            client.post("/v1/completions", json={"prompt": [text, text], "max_tokens": 1})
        lines = [line for line in caplog.messages if "special token" in line]
    assert len(lines) == is_rendered
    assert all("parse_special" in line and text[:12] not in line for line in lines)
