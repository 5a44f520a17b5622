"""Requests that give no sampling parameters get those of the model's own files.

The oracle of the files is transformers' GenerationConfig, that of the answers greedy decoding:
top_k=1 in the file makes every answer greedy, whatever its seed is.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from helpers.gguf_files import PARAMS, write_gguf
from helpers.launch import DEMO
from helpers.server import run_server
from helpers.web import web
from helpers.weights import hf_model
from llama.checkpoint.find import find
from llama.checkpoint.generation_config import sampling_defaults
from llama.cli import main

GIVEN: list[dict[str, Any]] = [
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 0.35, "top_k": 17, "repetition_penalty": 1.15},
    {"min_p": 0.05},
]
PROMPT = "Once upon a time"
QUESTION = [{"role": "user", "content": "Tell me a story."}]


def demo_with(folder: Path, **settings: Any) -> Path:
    """Copy the demo model, with a generation_config.json of these settings."""
    shutil.copytree(DEMO, folder)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: "+".join(given))
def test_a_folder_has_the_defaults_that_transformers_reads(given, tmp_path):
    model = hf_model()
    model.generation_config = transformers.GenerationConfig(do_sample=True, **given)
    model.save_pretrained(tmp_path)
    read = transformers.GenerationConfig.from_pretrained(tmp_path)
    found = sampling_defaults(find(tmp_path))
    assert found == {name: getattr(read, name) for name in found}
    assert found.items() >= given.items()


def test_a_gguf_file_has_them_in_its_metadata(tmp_path):
    keys = {"general.sampling.temp": 0.6, "general.sampling.top_k": 30}
    write_gguf(tmp_path / "model.gguf", PARAMS, metadata=keys)
    assert sampling_defaults(find(tmp_path / "model.gguf")) == {"temperature": 0.6, "top_k": 30}


def test_metas_files_and_greedy_ones_have_none(tmp_path):
    assert sampling_defaults(find(DEMO)) == {}
    greedy = demo_with(tmp_path / "greedy", do_sample=False, temperature=0.6)
    assert sampling_defaults(find(greedy)) == {}


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"temperature": "hot"}, "temperature='hot' must be a number"),
        ({"top_k": 1.5}, "top_k=1.5 must be a number"),
        ({"temperature": -1.0}, "temperature=-1.0 must be"),
    ],
)
def test_a_bad_default_is_named_before_the_weights_are_read(settings, error, tmp_path, capfd):
    folder = demo_with(tmp_path / "model", **settings)
    assert main(["serve", str(folder), "--port", "0"]) == 1
    said = capfd.readouterr().err
    assert error in said and "--generation_config none" in said and "listening" not in said


def answers(url: str, **fields: Any) -> list[str]:
    """Return the answers of all APIs that draw with the model's defaults."""
    common = {"model": "model", "max_tokens": 24, **fields}

    def post(path: str, body: dict[str, Any]) -> Any:
        response = web.post(url + path, json=body, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()

    text = post("/v1/completions", {**common, "prompt": PROMPT})["choices"][0]["text"]
    chat = post("/v1/chat/completions", {**common, "messages": QUESTION})
    message = post("/v1/messages", {**common, "messages": QUESTION})
    asked = {**common, "max_output_tokens": common["max_tokens"], "input": QUESTION}
    del asked["max_tokens"]
    response = post("/v1/responses", asked)
    return [
        text,
        chat["choices"][0]["message"]["content"],
        message["content"][0]["text"],
        response["output"][0]["content"][0]["text"],
    ]


def test_every_api_draws_with_the_defaults_of_the_files(tmp_path):
    folder = demo_with(tmp_path / "model", do_sample=True, top_k=1)
    with run_server(str(folder)) as server:
        greedy = answers(server.url, temperature=0)
        assert answers(server.url) == greedy == answers(server.url)
        assert "model: defaults of requests: top_k=1\n" in "".join(server.log)
        drawn = [
            web.post(
                f"{server.url}/v1/chat/completions",
                json={"messages": QUESTION, "max_tokens": 24, "top_k": 0, "seed": seed},
                timeout=60,
            ).json()["choices"][0]["message"]["content"]
            for seed in range(3)
        ]
        assert any(text != greedy[1] for text in drawn), "a request has the last word"
    with run_server(str(folder), "--generation_config", "none") as server:
        assert any(found != greedy for found in (answers(server.url) for _ in range(3)))
