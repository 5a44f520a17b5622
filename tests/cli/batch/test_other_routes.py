"""Batch lines for /v1/responses, /v1/embeddings, /score and /rerank, on the engine and on a server.

The oracles are the same bodies sent to the routes of a server, and the types of OpenAI's package.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai.types as types
import pytest
import transformers
from openai.types.responses import Response
from starlette.testclient import TestClient

from helpers.batch import answers, written
from helpers.embedders import pooling_files, write_model
from helpers.server import run_server
from helpers.services import service_of
from llama import Llama
from llama.cli.batch.server_job import run_server_batch
from llama.cli.model import sampling_params
from llama.server.app import make_app

Served = tuple[Llama, TestClient]
DOCUMENTS = ["The cat sleeps.", {"text": "Where is the ball?"}, "a", "b " * 30]
VARYING = ("id", "created", "created_at", "usage")

EMBEDDINGS: list[dict[str, Any]] = [
    {"input": "The cat sleeps."},
    {"input": ["a", "Where is the ball?", "b " * 30], "model": "mine"},
    {"input": [[5, 6, 7], [8]], "encoding_format": "base64"},
    {"input": ["one", "two"], "dimensions": 8, "normalize": False, "prompt_name": "query"},
]
SCORES: list[tuple[str, dict[str, Any]]] = [
    ("/rerank", {"query": "the cat", "documents": DOCUMENTS}),
    ("/v1/rerank", {"query": "a", "documents": ["x"], "return_documents": False, "model": "r"}),
    ("/v2/rerank", {"query": "ball", "documents": DOCUMENTS, "top_n": 2}),
    ("/score", {"text_1": "the cat", "text_2": ["a", "the ball"]}),
    ("/v1/score", {"queries": ["a", "b"], "documents": ["c", "d e f"]}),
]
RESPONSES: list[dict[str, Any]] = [
    {"input": "What is the capital of France?", "max_output_tokens": 12},
    {"input": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"},
               {"role": "user", "content": "Tell me a story."}],
     "instructions": "Be brief.", "max_output_tokens": 9, "model": "mine"},
    {"input": "x", "text": {"format": {"type": "json_object"}}, "top_logprobs": 2,
     "max_output_tokens": 8},
]  # fmt: skip


def line(url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": url, "method": "POST", "url": url, "body": body}


def served(llama: Llama) -> Served:
    service = service_of("llama")
    service.start(llama)
    return llama, TestClient(make_app(service), base_url="http://localhost")


def tiny(folder: Path, model_class: Any, **config: Any) -> Served:
    write_model(folder, model_class, **config)
    sizes: dict[str, Any] = {"max_seq_len": 64, "max_batch_size": 4}
    return served(Llama.build(str(folder), **sizes, device="cpu", dtype="fp32", verbose=False))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory) -> Served:
    return tiny(
        tmp_path_factory.mktemp("embed") / "m",
        transformers.LlamaModel,
        is_causal=False,
        changes={"model_type": "llama_bidirec", "architectures": ["LlamaBidirectionalModel"]},
        sentence_transformers=pooling_files("mean_tokens", query="query: ", passage="passage: "),
    )


@pytest.fixture(scope="module")
def reranker(tmp_path_factory) -> Served:
    model_class = transformers.LlamaForSequenceClassification
    return tiny(tmp_path_factory.mktemp("rerank") / "m", model_class, num_labels=1)


def assert_near(found: Any, other: Any) -> None:
    """Compare JSON values but for what varies and the rounding of sums, which the batch decides."""
    if isinstance(other, dict):
        assert found.keys() == other.keys()
        for name in found.keys() - set(VARYING):
            assert_near(found[name], other[name])
    elif isinstance(other, list):
        assert len(found) == len(other)
        for one, another in zip(found, other, strict=True):
            assert_near(one, another)
    elif isinstance(other, float):
        assert found == pytest.approx(other, abs=1e-5)
    elif isinstance(other, str) and len(other) > 400:  # vectors in base64
        one, another = (np.frombuffer(base64.b64decode(text), "<f4") for text in (found, other))
        assert np.allclose(one, another, atol=1e-5)
    else:
        assert found == other


def check(model: Served, folder: Path, asked: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Return the bodies of the records, which are those of the server."""
    llama, client = model
    records = answers(llama, folder, [line(*each) for each in asked])
    for (url, body), record in zip(asked, records, strict=True):
        found = client.post(url, json=body)
        assert found.status_code == 200, found.text
        assert record["error"] is None and record["custom_id"] == url
        assert_near(record["response"]["body"], found.json())
    return [record["response"]["body"] for record in records]


def test_vectors_are_those_of_the_server(embedder, tmp_path):
    asked = [("/v1/embeddings", body) for body in EMBEDDINGS]
    bodies = check(embedder, tmp_path, asked)
    for body in [bodies[0], bodies[1], bodies[3]]:  # The package decodes base64 by itself.
        found = types.CreateEmbeddingResponse.model_validate(body)
        assert [item.index for item in found.data] == list(range(len(found.data)))


@pytest.mark.parametrize("model", ["reranker", "embedder"])
def test_scores_are_those_of_the_server(request, tmp_path, model):
    bodies = check(request.getfixturevalue(model), tmp_path, SCORES)
    assert [len(body.get("results", body.get("data"))) for body in bodies] == [4, 1, 2, 2, 2]


def test_responses_are_those_of_the_server(demo, tmp_path):
    asked: list[Any] = [
        ("/v1/responses", body | {"temperature": 0, "top_p": 1}) for body in RESPONSES
    ]
    for body in check(served(demo), tmp_path, asked):
        found = Response.model_validate(body)
        assert found.usage is not None and found.usage.output_tokens > 0
        assert found.output_text and found.created_at == 0


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {"input": ["a", "x " * 200]}, "has 401 tokens"),
    ("/v1/embeddings", {"input": "a", "temperature": 0}, "'temperature' cannot be used in /v1/em"),
    ("/v1/embeddings", {"input": "a", "dimensions": 999}, "dimensions=999"),
    ("/v1/rerank", {"query": "a", "documents": []}, "documents must be a list of at least one"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2 has 3 texts"),
    ("/score", {"text_1": "a", "documents": "b"}, "give text_1 and text_2"),
    ("/v1/responses", {"input": "x", "stream": True}, "stream must be false"),
    ("/v1/responses", {"input": "x", "previous_response_id": "r"}, "there is no stored state"),
    ("/v1/responses", {"input": "x"}, "this model cannot generate"),
]


def test_bad_lines_are_records_and_the_lines_between_are_answered(embedder, tmp_path):
    llama, _ = embedder
    lines: list[Any] = []
    for url, body, _ in BAD:
        lines += [line(url, body), line("/v1/embeddings", {"input": ["x", "y"]})]
    found = answers(llama, tmp_path, lines)
    for (_, _, message), bad, good in zip(BAD, found[::2], found[1::2], strict=True):
        assert bad["response"] is None and message in bad["error"]["message"], bad
        assert_near(good["response"]["body"], found[1]["response"]["body"])


def test_a_model_that_generates_has_no_vectors_without_pooling(demo, tmp_path):
    lines = [line("/v1/embeddings", {"input": "a"}), line("/rerank", SCORES[0][1])]
    lines.append(line("/v1/embeddings", {"input": "a", "pooling": "mean"}))
    embedding, ranking, pooled = answers(demo, tmp_path, lines)
    assert "pooling is not given" in embedding["error"]["message"]
    assert "neither a classification head nor a pooling" in ranking["error"]["message"]
    assert pooled["error"] is None


def records_of(path: Path) -> list[dict[str, Any]]:
    records = [json.loads(text) for text in path.read_text().splitlines()]
    return sorted(records, key=lambda record: record["id"])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with run_server("--max_seq_len", "512", "--dtype", "fp32", "--pooling", "mean") as server:
        yield server.url


def test_a_server_answers_the_lines_as_the_engine_does(url, demo, tmp_path):
    """The job's own parameters go to the routes that generate, under the names of each."""
    bodies: list[Any] = [{"input": x} for x in ("What is the capital of France?", "Who are you?")]
    asked = [line("/v1/responses", body) for body in bodies]
    asked += [line("/v1/embeddings", body | {"pooling": "mean"}) for body in bodies]
    asked.append({"messages": [{"role": "user", "content": "Hi"}]})
    wanted = answers(demo, tmp_path, asked, temperature=1.0, max_gen_len=7)
    asked.append(line("/v1/rerank", SCORES[2][1]))
    (tmp_path / "in").write_bytes(written(asked))
    paths = str(tmp_path / "in"), str(tmp_path / "served")
    params = sampling_params(temperature=1.0, max_gen_len=7)
    report = run_server_batch(url, *paths, params, seed=demo.seed)
    assert report == (len(asked), 0), (tmp_path / "served").read_text()
    records = records_of(tmp_path / "served")
    for record, other in zip(records[:-1], wanted, strict=True):
        body, expected = record["response"]["body"], other["response"]["body"]
        if "output" in expected:
            assert body["output"][0]["content"] == expected["output"][0]["content"]
            assert (body["max_output_tokens"], body["usage"]["output_tokens"]) == (7, 7)
        elif "choices" in expected:
            assert body["choices"] == expected["choices"]
        else:
            vector, (data,) = body["data"][0]["embedding"], expected["data"]
            assert vector == pytest.approx(data["embedding"], abs=1e-5)
    assert len(records[-1]["response"]["body"]["results"]) == 2
