"""Embeddings by Ollama's API and client, and what its other clients send."""

from collections.abc import Iterator
from typing import Any

import ollama
import pytest
import transformers
from starlette.testclient import TestClient

from helpers.embedders import pooling_files, write_model
from helpers.server import RunningServer
from helpers.services import service_of
from helpers.web import web
from llama import Llama
from llama.server.app import make_app
from llama.server.ollama.models import ChatBody, Message, _openai_messages

TEXTS = ["the cat sleeps", "where is the ball?", "a " * 200]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory) -> Iterator[tuple[Llama, TestClient]]:
    folder = tmp_path_factory.mktemp("embed") / "m"
    write_model(
        folder,
        transformers.LlamaModel,
        is_causal=False,
        changes={"model_type": "llama_bidirec", "architectures": ["LlamaBidirectionalModel"]},
        sentence_transformers=pooling_files("mean_tokens", query="query: ", passage="passage: "),
    )
    llama = Llama.build(str(folder), None, 64, 4, device="cpu", dtype="fp32", verbose=False)
    service = service_of("tiny")
    service.start(llama)
    with TestClient(make_app(service), base_url="http://localhost") as client:
        yield llama, client


def by_client(client: TestClient) -> ollama.Client:
    made = ollama.Client(host="http://localhost")
    made._client = client
    return made


def test_the_client_s_vectors_are_those_of_embed(embedder):
    llama, http = embedder
    wanted = llama.embed(TEXTS, truncate=64)
    found = by_client(http).embed("tiny", TEXTS)
    assert [list(vector) for vector in found.embeddings] == [
        pytest.approx(vector.tolist(), abs=1e-5) for vector in wanted
    ]
    assert found.model == "tiny" and (found.prompt_eval_count or 0) > 64
    (one,) = by_client(http).embed("tiny", TEXTS[0], dimensions=8).embeddings
    (cut,) = llama.embed(TEXTS[:1], dimensions=8)
    assert list(one) == pytest.approx(cut.tolist(), abs=1e-5)
    (plain,) = llama.embed(TEXTS[1:2], normalize=False)
    old = by_client(http).embeddings("tiny", TEXTS[1])
    assert list(old.embedding) == pytest.approx(plain.tolist(), abs=1e-5)


def test_an_input_beyond_the_context_is_cut_unless_truncate_is_false(embedder):
    body = {"model": "tiny", "input": TEXTS, "truncate": False}
    answer = embedder[1].post("/api/embed", json=body)
    assert answer.status_code == 400
    assert "context length is 64 tokens. However, input[2] has" in answer.json()["error"]


def test_the_capabilities_say_what_a_server_can_do(embedder, server):
    assert by_client(embedder[1]).show("tiny").capabilities == ["embedding"]
    shown = web.post(f"{server.url}/api/show", json={"model": "demo"}).json()
    assert shown["capabilities"][0] == "completion" and "embedding" not in shown["capabilities"]


def test_a_model_that_generates_says_what_is_missing(server: RunningServer):
    answer = web.post(f"{server.url}/api/embed", json={"model": "demo", "input": "a"})
    assert answer.status_code == 400 and "--pooling" in answer.json()["error"]


@pytest.mark.parametrize("path", ["/api/tags", "/api/version", "/"])
def test_clients_look_for_a_server_by_head(server: RunningServer, path):
    assert web.head(server.url + path).status_code == 200


@pytest.mark.parametrize(
    "options",
    [
        {"num_predict": 40.0, "top_k": 5.0, "seed": 7.0, "temperature": 1.0, "num_ctx": 128.0},
        {"num_predict": 40, "top_k": 5, "seed": 7, "temperature": 1, "num_ctx": 128},
    ],
)
def test_whole_numbers_may_be_floats(options):
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "options": options}
    request = ChatBody.model_validate({**body, "truncate": False, "shift": True}).request()
    params = request.params
    assert (params.max_tokens, params.top_k, params.seed) == (40, 5, 7)
    assert request.max_context == 128
    with pytest.raises(ValueError, match="num_predict"):
        ChatBody.model_validate({**body, "options": {"num_predict": 4.5}})


def test_a_result_may_have_the_name_of_its_tool_as_openai_has_it():
    called: Any = [{"function": {"name": name, "arguments": {}}, "id": name} for name in ("f", "g")]
    dialog = [
        {"role": "assistant", "tool_calls": called},
        {"role": "tool", "content": "of g", "name": "g"},
        {"role": "tool", "content": "of f", "tool_name": "f"},
    ]
    turns = _openai_messages([Message.model_validate(each) for each in dialog])
    assert [turn["tool_call_id"] for turn in turns[1:]] == ["g", "f"]
