"""/classify, /score and /rerank on tiny models, in the shapes of vLLM, Jina and Cohere."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers
from starlette.testclient import TestClient

from helpers.embedders import pooling_files, write_model
from helpers.scripted import apis_of
from helpers.services import service_of
from llama import Llama
from llama.server.app import make_app

TEXTS = ["the cat sleeps", "where is the ball?", "a"]
Served = tuple[Llama, httpx.Client]


@contextlib.contextmanager
def serve(
    folder: Path, num_api_processes: int, model_class: Any, **config: Any
) -> Iterator[Served]:
    """Yield a model, and a client of a server with it."""
    write_model(folder, model_class, **config)
    llama = Llama.build(str(folder), None, 64, 4, device="cpu", dtype="fp32", verbose=False)
    with apis_of(llama, num_api_processes) as apis:
        if apis is None:
            service = service_of("tiny")
            service.start(llama)
            client: Any = TestClient(make_app(service), base_url="http://localhost")
        else:
            transport = httpx.HTTPTransport(uds=apis.socket())
            client = httpx.Client(transport=transport, base_url="http://localhost", timeout=60)
        with client:
            yield llama, client


@pytest.fixture(scope="module")
def classifier(tmp_path_factory, num_api_processes) -> Iterator[Served]:
    labels: dict[str, Any] = {"id2label": {0: "bad", 1: "good", 2: "none"}}
    model_class = transformers.LlamaForSequenceClassification
    folder = tmp_path_factory.mktemp("labels") / "m"
    with serve(folder, num_api_processes, model_class, **labels) as served:
        yield served


@pytest.fixture(scope="module")
def reranker(tmp_path_factory, num_api_processes) -> Iterator[Served]:
    model_class = transformers.LlamaForSequenceClassification
    folder = tmp_path_factory.mktemp("rerank") / "m"
    with serve(folder, num_api_processes, model_class, num_labels=1) as served:
        yield served


@pytest.fixture(scope="module")
def embedder(tmp_path_factory, num_api_processes) -> Iterator[Served]:
    files = pooling_files("mean_tokens", query="query: ", passage="passage: ")
    with serve(
        tmp_path_factory.mktemp("embed") / "m",
        num_api_processes,
        transformers.LlamaModel,
        is_causal=False,
        changes={"model_type": "llama_bidirec", "architectures": ["LlamaBidirectionalModel"]},
        sentence_transformers=files,
    ) as served:
        yield served


def posted(client: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    found = client.post(path, json=body)
    assert found.status_code == status, found.text
    return found.json()


def test_labels(classifier):
    llama, client = classifier
    wanted = llama.classify(TEXTS)
    found = posted(client, "/classify", input=TEXTS, model="m")
    assert (found["object"], found["model"]) == ("list", "m")
    for i, (item, result) in enumerate(zip(found["data"], wanted, strict=True)):
        assert (item["index"], item["label"], item["num_classes"]) == (i, result.label, 3)
        assert item["probs"] == pytest.approx(result.probs, abs=1e-6)
    ids = llama.pooler.encode(TEXTS[0])
    raw = posted(client, "/classify", input=ids, use_activation=False)["data"][0]["probs"]
    assert raw == pytest.approx(wanted[0].logits, abs=1e-5)
    assert found["usage"]["prompt_tokens"] == sum(len(llama.pooler.encode(x)) for x in TEXTS)


def test_what_a_model_cannot_do_is_404_with_the_reason(classifier, embedder, reranker):
    unable: list[tuple[httpx.Client, str, dict[str, Any], str]] = [
        (classifier[1], "/score", {"text_1": "a", "text_2": "b"}, "has 3 labels"),
        (classifier[1], "/v1/rerank", {"query": "a", "documents": ["b"]}, "has 3 labels"),
        (embedder[1], "/classify", {"input": "a"}, "no classification head"),
    ]
    for client, path, body, message in unable:
        assert message in posted(client, path, 404, **body)["error"]["message"]
    ask = {"messages": [{"role": "user", "content": "Hi"}]}
    generating: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", ask),
    ]
    for path, body in generating:
        for client in (embedder[1], reranker[1]):
            assert "cannot generate" in posted(client, path, 400, **body)["error"]["message"]
    faults: list[tuple[str, dict[str, Any], str]] = [
        ("/classify", {}, "input"),
        ("/classify", {"input": "x", "messages": ask["messages"]}, "input"),
        ("/classify", {"messages": ask["messages"]}, "messages"),  # there is no template
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_2"),
        ("/score", {"text_1": [], "text_2": "c"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": "x" * 500}, "text_2"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": [{"txt": "b"}]}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["x"]}, "rank_fields"),
    ]
    for path, fields, param in faults:
        assert posted(reranker[1], path, 400, **fields)["error"]["param"] == param, fields


@pytest.mark.parametrize("kind", ["reranker", "embedder"])
def test_scores_and_ranks(kind, reranker, embedder):
    """Both kinds of models score, a head by the pair and embeddings by their cosine."""
    llama, client = {"reranker": reranker, "embedder": embedder}[kind]
    wanted = llama.score("ball", TEXTS)
    for path in ("/score", "/v1/score"):
        found = posted(client, path, text_1="ball", text_2=TEXTS)
        assert [x["score"] for x in found["data"]] == pytest.approx(wanted, abs=1e-6)
        assert [(x["index"], x["object"]) for x in found["data"]] == [
            (i, "score") for i in range(3)
        ]
    pairs = posted(client, "/score", text_1=["ball"] * 3, text_2=TEXTS)
    assert [x["score"] for x in pairs["data"]] == pytest.approx(wanted, abs=1e-6)
    order = sorted(range(3), key=lambda i: -wanted[i])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
        found = posted(client, path, query="ball", documents=documents)
        assert [x["index"] for x in found["results"]] == order
        for item in found["results"]:
            assert item["document"] == {"text": TEXTS[item["index"]]}
            assert item["relevance_score"] == pytest.approx(wanted[item["index"]], abs=1e-6)
    (best,) = posted(
        client, "/rerank", query="ball", documents=TEXTS, top_n=1, return_documents=False
    )["results"]
    assert best.keys() == {"index", "relevance_score"} and best["index"] == order[0]
    cut = posted(client, "/score", text_1="ball", text_2="x" * 500, truncate_prompt_tokens=-1)
    (score,) = llama.score("ball", ["x" * 500], truncate=64)
    assert cut["data"][0]["score"] == pytest.approx(score, abs=1e-6)


def test_the_names_of_the_two_texts_of_a_score(reranker):
    """The fields have had several names in vLLM."""
    _, client = reranker
    wanted = posted(client, "/score", text_1=TEXTS[0], text_2=TEXTS[1:])["data"]
    for left, right in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        given: Any = {left: TEXTS[0], right: TEXTS[1:]}
        assert posted(client, "/score", **given)["data"] == wanted
    for given in ({"text_1": "a"}, {"queries": "a", "text_2": "b"}, {"text_1": "a", "items": "b"}):
        error = posted(client, "/score", 400, **given)["error"]
        assert error["message"].startswith("give text_1 and text_2, or queries and documents")


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/rerank", {"query": "a", "documents": ["a", "word " * 90]}, "documents[1]"),
        ("/score", {"text_1": "word " * 90, "text_2": "a"}, "text_2"),
        ("/score", {"queries": "a", "documents": ["a", "b", "word " * 90]}, "documents[2]"),
    ],
)
def test_pairs_that_exceed_the_context(reranker, path, body, name):
    """Clients recognize the code, and the words of OpenAI's message."""
    _, client = reranker
    error = posted(client, path, 400, **body)["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 64 tokens. How")
    assert f"{name} has " in error["message"]
    assert not re.search(r"prompt \d|prompt has", error["message"]), "the engine's own name"
