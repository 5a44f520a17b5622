"""What it costs to prepare a body is paid off the event loop, within limits, for one client.

A body may make the server encode more bytes than it has: a prompt with each input, a query with
each document, bad words with each prompt. Every encoding is counted with its thread here.
"""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import transformers

from helpers.embedders import pooling_files, write_model
from helpers.services import service_of
from llama import Llama
from llama.server import routes, workers
from llama.server.app import make_app
from llama.tokenizer import Tokenizer

MAX_IN_LOOP = 30_000  # bytes of one body that may be encoded in the event loop
WORDS = "a cat and a ball " * 300  # 5,100 characters
BODIES = [
    ("/v1/embeddings", {"prompt": WORDS, "input": ["x"] * 64, "truncate_prompt_tokens": 8}),
    ("/v1/embeddings", {"prompt": WORDS, "input": ["x"] * 40}),
    ("/v1/embeddings", {"input": ["one word"] * 2048}),
    ("/v1/embeddings", {"input": [WORDS] * 9, "truncate_prompt_tokens": -1}),
    ("/score", {"text_1": WORDS, "text_2": ["x"] * 64, "truncate_prompt_tokens": 8}),
    ("/score", {"text_1": ["y"] * 2000, "text_2": ["x"] * 2000}),
    ("/rerank", {"query": WORDS, "documents": ["x", {"text": "z"}] * 40}),
    ("/v2/rerank", {"query": "x", "documents": [WORDS] * 20, "truncate_prompt_tokens": 4}),
    ("/classify", {"input": ["a cat"] * 1000}),
    ("/classify", {"input": [WORDS] * 9, "truncate_prompt_tokens": 5}),
]


@dataclass
class Encoded:
    """What was encoded: bytes in each thread, and the number of texts."""

    num_bytes: dict[int, int] = field(default_factory=dict)
    num_texts: int = 0
    pause_s: float = 0.0


@pytest.fixture
def encoded(monkeypatch) -> Encoded:
    """Count what every tokenizer encodes."""
    found = Encoded()
    encode = Tokenizer.encode

    def counted(self: Tokenizer, s: str, **options: Any) -> list[int]:
        thread = threading.get_ident()
        found.num_bytes[thread] = found.num_bytes.get(thread, 0) + len(s)
        found.num_texts += 1
        time.sleep(found.pause_s)
        return encode(self, s, **options)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    return found


def _built(folder: Any, model_class: Any, **config: Any) -> Llama:
    write_model(folder, model_class, **config)
    return Llama.build(str(folder), None, 64, 4, device="cpu", dtype="fp32", verbose=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Iterator[dict[str, Llama]]:
    """A model for the routes of scores, and one for embeddings."""
    folder = tmp_path_factory.mktemp("models")
    reranker = _built(folder / "r", transformers.LlamaForSequenceClassification, num_labels=1)
    embedder = _built(
        folder / "e", transformers.LlamaModel, sentence_transformers=pooling_files("mean_tokens")
    )
    with reranker, embedder:
        yield {"/v1/embeddings": embedder, "other": reranker}


async def _post(app: Any, path: str, body: Any, leaves: asyncio.Event | None = None) -> int:
    """Post a body, leave when the event is set, and return the status."""
    data = json.dumps(body).encode()
    headers = {"content-type": "application/json", "host": "localhost"}
    status = 0
    sent: list[Any] = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> Any:
        if sent:
            return sent.pop()
        await (leaves or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
        "query_string": b"", "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
        "server": ("localhost", 80), "client": ("127.0.0.1", 1), "scheme": "http",
        "http_version": "1.1", "root_path": "",
    }  # fmt: skip
    await app(scope, receive, send)
    return status


def _app_for(llama: Llama) -> Any:
    service = service_of()
    service.start(llama)
    return service, make_app(service)


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_no_cost_that_grows_with_a_body_is_paid_in_the_event_loop(models, encoded, path, body):
    service, app = _app_for(models.get(path, models["other"]))
    status = asyncio.run(_post(app, path, body))
    service.close()
    assert status in (200, 400) and encoded.num_texts > 0
    assert encoded.num_bytes.get(threading.get_ident(), 0) <= MAX_IN_LOOP


def test_bad_words_are_counted_with_each_prompt(demo, encoded):
    words = [f"{i} cats and {i} balls and {'a cat ' * 10}" for i in range(256)]
    service, app = _app_for(demo)
    body = {"prompt": ["x"] * 4, "bad_words": words, "max_tokens": 1}
    status = asyncio.run(_post(app, "/v1/completions", body))
    service.close()
    assert status == 200 and encoded.num_texts >= 4 * 2 * len(words)
    assert encoded.num_bytes.get(threading.get_ident(), 0) <= MAX_IN_LOOP


@pytest.mark.parametrize(("prompt", "status"), [("x", 200), (["x"], 200), (["x", "x"], 400)])
def test_a_busy_event_loop_is_not_the_fault_of_a_short_prompt(demo, monkeypatch, prompt, status):
    """The limit for all prompts has passed once the loop runs again."""
    monkeypatch.setattr(routes, "PREPARE_S", 0.0)
    service, app = _app_for(demo)
    found = asyncio.run(_post(app, "/v1/completions", {"prompt": prompt, "max_tokens": 1}))
    service.close()
    assert found == status


@pytest.mark.parametrize(("path", "body"), [BODIES[2], BODIES[4], BODIES[5], BODIES[8]])
def test_work_ends_when_the_client_leaves(models, encoded, path, body):
    encoded.pause_s = 0.02  # All texts together would take a second and more.
    service, app = _app_for(models.get(path, models["other"]))

    async def run() -> None:
        leaves = asyncio.Event()
        asked = asyncio.create_task(_post(app, path, body, leaves))
        while encoded.num_texts < 3:
            assert not asked.done(), asked
            await asyncio.sleep(0.01)
        leaves.set()
        await asked

    asyncio.run(run())
    num_at_the_end = encoded.num_texts
    time.sleep(0.5)
    service.close()
    assert encoded.num_texts <= num_at_the_end + 2 < 40


@pytest.mark.parametrize(("path", "body"), [BODIES[0], BODIES[8]])
def test_work_ends_at_the_time_limit(models, encoded, monkeypatch, path, body):
    monkeypatch.setattr(workers, "PREPARE_S", 0.2)
    encoded.pause_s = 0.02
    service, app = _app_for(models.get(path, models["other"]))
    status = asyncio.run(_post(app, path, body))
    num_at_the_end = encoded.num_texts
    time.sleep(0.5)
    service.close()
    assert status == 400
    assert encoded.num_texts <= num_at_the_end + 2 < 40


def test_a_query_is_encoded_once_for_all_documents(models, encoded):
    classifier = models["other"].classifier
    scorer = classifier.pair_scorer(["where is the ball?"], ["a", "b c", "d"])
    first = [scorer.request(item, index=i) for i, item in enumerate(scorer.inputs)]
    assert encoded.num_texts == 4
    alone = [classifier.pair_scorer(["where is the ball?"], [x]) for x in ("a", "b c", "d")]
    for request, each in zip(first, alone, strict=True):
        (answer,) = request.answers
        (other,) = each.request(each.inputs[0], index=0).answers
        assert answer.sequence.spec.tokens == other.sequence.spec.tokens


@pytest.mark.parametrize("num_characters", [399_990, 400_000, 400_020, 900_000])
def test_the_start_of_a_long_text_has_the_ids_of_the_whole(demo, num_characters):
    text = ("a cat and a ball " * (num_characters // 17 + 1))[:num_characters]
    whole = demo.tokenizer.encode(text, bos=False, eos=False)
    for num in (0, 1, 7, len(whole) - 1, len(whole), len(whole) + 1):
        assert demo.tokenizer.encode_start(text, num) == whole[:num]
