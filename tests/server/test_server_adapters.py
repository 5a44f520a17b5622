"""Adapters of a server: chosen by `model`, listed, loaded and dropped by vLLM's routes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from helpers.adapters import write_demo_adapter
from helpers.launch import DEMO
from helpers.server import RunningServer, run_server
from helpers.web import web
from llama import Llama
from llama.server.adapters import path_in
from llama.server.errors import ApiError

TEXT = "Once upon a time"
LIMITS = ("--max_seq_len", "256", "--max_loras", "3", "--dtype", "fp32")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A folder with adapters, and one alongside it that clients must not reach."""
    top = tmp_path_factory.mktemp("served")
    for seed, name in enumerate(["open/one", "open/two", "beside", "start"]):
        write_demo_adapter(top / name, seed)
    write_demo_adapter(top / "open/linked", 9)
    weights = top / "open/linked/adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(top / "beside/adapter_model.safetensors")
    (top / "open/way").symlink_to(top / "beside")
    (top / "open/bad").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (top / "open/bad" / name).write_text("{")
    return top


@pytest.fixture(scope="module")
def expected(root) -> dict[str, str]:
    """The answers of merged models, by the name of the adapter."""
    found = {}
    for name, folder in {"": None, "one": "open/one", "two": "open/two", "start": "start"}.items():
        lora = None if folder is None else root / folder
        llama = Llama.build(str(DEMO), dtype="fp32", device="cpu", lora=lora, verbose=False)
        found[name] = llama.text_completion([TEXT], 0.0, max_gen_len=12)[0]["generation"]
        llama.close()
    assert len({*found.values()}) == 4
    return found


@pytest.fixture(scope="module", params=["0", "2"])
def adapted(root, request) -> Iterator[RunningServer]:
    flags = ("--lora_modules", f"start={root / 'start'}", "--lora_folder", str(root / "open"))
    with run_server(*flags, *LIMITS, "--api_processes", request.param) as running:
        yield running


def load(server: RunningServer, name: str, path: str, **more: Any) -> Any:
    body = {"lora_name": name, "lora_path": path, **more}
    return web.post(f"{server.url}/v1/load_lora_adapter", json=body)


def unload(server: RunningServer, name: str) -> Any:
    return web.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": name})


def complete(server: RunningServer, model: str) -> str:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    answer = client.completions.create(model=model, prompt=TEXT, max_tokens=12, temperature=0)
    assert answer.model == model
    return answer.choices[0].text


def test_adapters_come_and_go(adapted, root, expected):
    """Loaded at the start, loaded from the folder, listed, used and dropped."""
    assert complete(adapted, "demo") == expected[""]
    assert complete(adapted, "start") == expected["start"]
    assert load(adapted, "one", "one").text == "Success: LoRA adapter 'one' added successfully."
    assert load(adapted, "two", str(root / "open/two")).status_code == 200
    assert complete(adapted, "one") == expected["one"]
    assert complete(adapted, "two") == expected["two"]
    listed = web.get(f"{adapted.url}/v1/models").json()["data"]
    assert [(x["id"], x.get("parent")) for x in listed] == [
        ("demo", None), ("start", "demo"), ("one", "demo"), ("two", "demo")
    ]  # fmt: skip
    assert web.get(f"{adapted.url}/v1/models/two").json()["root"] == "two"
    full = load(adapted, "four", "one")
    assert full.status_code == 400 and "the limit of --max_loras" in full.text
    assert load(adapted, "two", "one").status_code == 400  # the name is in use
    assert load(adapted, "two", "one", load_inplace=True).status_code == 200
    assert complete(adapted, "two") == expected["one"]
    for name in ("one", "two"):
        assert unload(adapted, name).text.startswith("Success")
    assert unload(adapted, "one").status_code == 404
    with pytest.raises(openai.NotFoundError, match="there is no model 'one'") as error:
        complete(adapted, "one")
    assert error.value.code == "model_not_found"


def test_every_api_chooses_by_the_model(adapted):
    """Chats of OpenAI, Anthropic and Ollama, and embeddings, differ from those of the model."""
    messages: Any = [{"role": "user", "content": "Hi"}]
    sdk = openai.OpenAI(base_url=f"{adapted.url}/v1", api_key="x", max_retries=0)
    claude = anthropic.Anthropic(base_url=adapted.url, api_key="x", max_retries=0)

    def answers(model: str) -> list[Any]:
        chat = sdk.chat.completions.create(
            model=model, messages=messages, max_tokens=8, temperature=0
        )
        greedy = {"temperature": 0}
        message = claude.messages.create(
            model=model, messages=messages, max_tokens=8, extra_body=greedy
        )
        options = {"temperature": 0, "num_predict": 8}
        body = {"model": model, "messages": messages, "stream": False, "options": options}
        ollama = web.post(f"{adapted.url}/api/chat", json=body).json()
        more = {"pooling": "mean"}
        vector = sdk.embeddings.create(model=model, input="Hi", extra_body=more).data[0].embedding
        content: Any = message.content[0]
        return [chat.choices[0].message.content, content.text, ollama["message"], vector]

    pairs = zip(answers("demo"), answers("start"), strict=True)
    assert all(base != adapter for base, adapter in pairs)


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("../beside", 400, "leads out of the folder"),
        ("/etc", 400, "leads out of the folder"),
        ("linked", 400, "leads out of the folder"),
        ("way", 400, "leads out of the folder"),
        ("absent", 404, "has no adapter_config.json"),
        ("one\0", 400, "lora_path"),
        ("bad", 400, "adapter_config.json"),
    ],
)
def test_a_path_of_a_client_stays_in_the_folder(adapted, expected, path, status, message):
    refused = load(adapted, "new", path)
    assert refused.status_code == status and message in refused.text
    assert complete(adapted, "demo") == expected[""]


def test_an_adapter_in_use_is_not_dropped(adapted):
    body = {"model": "start", "prompt": TEXT, "max_tokens": 200, "stream": True, "ignore_eos": True}
    with web.stream("POST", f"{adapted.url}/v1/completions", json=body) as stream:
        events = stream.iter_lines()
        assert json.loads(next(events).removeprefix("data: "))["model"] == "start"
        busy = unload(adapted, "start")
        assert busy.status_code == 409 and "is in use by 1 unfinished" in busy.text
    assert complete(adapted, "start")


def test_a_server_without_adapters_takes_any_name(server):
    """As before: the name is a label, and there are no routes that load."""
    body = {"model": "whatever", "prompt": TEXT, "max_tokens": 1}
    assert web.post(f"{server.url}/v1/completions", json=body).status_code == 200
    assert load(server, "one", "one").status_code in (404, 405)


@pytest.mark.parametrize("path", ["a" * 300, "x/" + "é" * 200, "a\0b", "a/" * 2000, "b" * 4096])
def test_a_path_that_the_system_refuses_is_an_error_of_the_client(tmp_path, path):
    with pytest.raises(ApiError) as caught:
        path_in(tmp_path, path)
    assert caught.value.status in (400, 404) and caught.value.param == "lora_path"
