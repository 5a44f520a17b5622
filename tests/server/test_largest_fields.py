"""No field of a request holds others up, whatever its size, and no answer grows beyond a limit."""

import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from helpers.beside import cost_beside, running_server
from helpers.largest_fields import CHAT, COUNT, TEXT, body_fields, cases
from llama import Llama, SamplingParams
from llama.options.speculation import texts
from llama.server import respond
from llama.server.encoding import ContinuedList, SharedItems, json_pieces, to_json
from llama.server.openai.scores import TextScores
from llama.server.process import Server

CONTEXT = 4096
DIVISOR = 3  # of the largest sizes
LIMIT_S = 1 / DIVISOR**2  # processor time of the event loop; whole fields may take a second
MAX_STEP_S = 2.5  # processor time of the steps; an index of 2.3 MB for 64 answers takes 8 s
HOST_PATHS = ["/count_token", "/worker_generate"]


@pytest.fixture(scope="module")
def llama(long_demo_dir) -> Llama:
    return Llama.build(
        long_demo_dir, max_seq_len=CONTEXT, max_batch_size=32, device="cpu", speculate="lookup"
    )


@pytest.fixture(scope="module")
def server(llama) -> Iterator[Server]:
    with running_server(llama) as running:
        yield running


@pytest.fixture
def client(server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=120) as client:
        yield client


# A count reads the same fields as a message, in the same way; the program measures it as well.
@pytest.mark.parametrize("path", [*sorted(body_fields().keys() - {COUNT}), *HOST_PATHS])
def test_a_small_request_passes_a_large_one(server, path):
    """During each field of a third of its largest size, a small request is answered soon.

    The time is that of the processor. Until the small request is answered, the thread of the event
    loop may compute for less than a second alongside a whole field, and so for a ninth of that
    here, if the cost grows with the square of the size.
    """
    for name, case_path, body in cases(divisor=DIVISOR):
        if case_path != path:
            continue
        cost = cost_beside(server, path, json.dumps(body).encode())
        assert cost.status in (200, 400, 413), (name, cost)
        assert cost.loop_s < LIMIT_S, (name, cost)
        assert cost.step_s < MAX_STEP_S, (name, cost)


def test_a_prediction_is_cut_and_counted_once(llama, client, monkeypatch):
    """A prediction is cut to the context before the rest is encoded, and indexed once.

    Its accepted and rejected tokens are counted for all answers, whole and streamed.
    """
    text = "a cat sat " * 700_000
    encoded: list[str] = []
    indexed: list[int] = []
    encode = llama.tokenizer.model.encode
    index = texts.Lookup._index

    def noted_encode(part: str, **options: Any) -> list[int]:
        encoded.append(part)
        return encode(part, **options)

    def noted_index(self: texts.Lookup, tokens: list[int]) -> None:
        indexed.append(len(tokens))
        index(self, tokens)

    monkeypatch.setattr(llama.tokenizer.model, "encode", noted_encode)
    monkeypatch.setattr(texts.Lookup, "_index", noted_index)
    spec = llama.llm_engine.prepare("", [7], SamplingParams(prediction=text)).answers[0]
    given = spec.sequence.spec.prediction
    assert sum(map(len, encoded)) < 500_000
    assert list(given) == llama.tokenizer.encode(text[:100_000], bos=False, eos=False)[:CONTEXT]
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "prediction": {"type": "content", "content": text},
        "max_tokens": 4,
        "n": 8,
    }
    whole = client.post(CHAT, json=body).json()["usage"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = client.post(CHAT, json={**body, **options}).text
    last = json.loads(streamed.removesuffix("\n\ndata: [DONE]\n\n").rpartition("data: ")[2])
    for usage in (whole, last["usage"]):
        details = usage["completion_tokens_details"]
        assert sum(details.values()) == 8 * CONTEXT
    # For each request, one index for the drafts of all answers and one for their counts.
    assert len(indexed) == 4 and max(indexed) < 2 * CONTEXT


def test_counts_of_several_answers_are_their_sum():
    prediction = [1, 2, 3, 4, 5, 6]
    outputs = [[1, 2, 3], [4, 5], [1, 9, 2, 3, 4], []]
    each = [texts.count_predicted(prediction, [output]) for output in outputs]
    assert [accepted for accepted, _ in each] == [3, 1, 3, 0]
    assert texts.count_predicted(prediction, outputs) == (7, 17)


def test_an_answer_that_could_be_too_large_is_refused(server, client):
    """An answer that could be too large is refused before any work is done for it.

    The prompt's log-probabilities count for each answer, and so do those of tokens that a request
    may generate.
    """
    echo = {"prompt": [7] * 4000, "echo": True, "logprobs": 20, "n": 64, "max_tokens": 1}
    open_end = {"prompt": "a", "max_tokens": 4000, "logprobs": 100, "best_of": 64}
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "n": 64}
    engine = server.service.default.engine
    assert engine is not None
    steps = engine.engine.core.stats.steps
    for path, body, field in (
        (TEXT, echo, "logprobs"),
        (TEXT, {**echo, "stream": True}, "logprobs"),
        (TEXT, open_end, "logprobs"),
        (CHAT, {**chat, "top_logprobs": 100}, "top_logprobs"),
    ):
        response = client.post(path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, field), error
        assert "at most 512" in error["message"] and "--max_answer_mb" in error["message"]
    assert engine.engine.core.stats.steps == steps
    assert client.post(TEXT, json={**echo, "n": 2, "logprobs": 1}).status_code == 200


def test_the_scores_of_a_prompt_are_made_and_encoded_once(server, client, monkeypatch):
    """Prompt scores are made and encoded once for all answers, and sent in pieces.

    The answers are the same as those of a request of their own, whole and streamed.
    """
    made: list[int] = []
    push = TextScores.push

    def noted_push(self: TextScores, scores: Any) -> dict[str, Any]:
        made.append(len(scores))
        return push(self, scores)

    monkeypatch.setattr(TextScores, "push", noted_push)
    body = {"prompt": [7, 8, 9] * 500, "echo": True, "logprobs": 3, "max_tokens": 3, "seed": 5}
    body["temperature"] = 0
    one = client.post(TEXT, json=body).json()
    made.clear()
    response = client.post(TEXT, json={**body, "n": 8})
    assert "content-length" not in response.headers
    assert made.count(1500) == 1 and sum(made) == 1500 + 8 * 3
    assert len(response.content) > respond.PIECE_BYTES
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(8))
    for choice in choices:
        assert {**choice, "index": 0} == one["choices"][0]
    made.clear()
    lines = client.post(TEXT, json={**body, "n": 8, "stream": True}).text.split("\n\n")
    assert made.count(1500) == 1
    joined = _joined([json.loads(line.removeprefix("data: ")) for line in lines[:-2]])
    for choice in joined.values():
        assert choice == {name: one["choices"][0][name] for name in ("text", "logprobs")}


def _joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the text and the logprobs of each choice of a stream."""
    joined: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        (part,) = chunk["choices"]
        choice = joined.setdefault(part["index"], {"text": "", "logprobs": {}})
        choice["text"] += part["text"]
        for name, values in (part["logprobs"] or {}).items():
            choice["logprobs"].setdefault(name, []).extend(values)
    return joined


def test_the_cost_of_an_event_does_not_grow_with_the_answer(client, monkeypatch):
    """Each chunk of a stream with logprobs reads the new tokens alone."""
    sizes: list[int] = []

    def note(tokens: list[int], logprobs: list[float], tops: list[Any]) -> Iterator[Any]:
        sizes.append(max(len(tokens), len(logprobs), len(tops)))
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True):
            yield {token: logprob, **dict(top)}

    monkeypatch.setattr("llama.requests.request._dicts", note)
    body = {"prompt": "a", "max_tokens": 100, "logprobs": 2, "ignore_eos": True, "stream": True}
    assert client.post(TEXT, json=body).status_code == 200
    assert sum(sizes) == 100


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"a": [], "b": {}, "c": None, "d": "\ud800ü\n", "e": [[], [{}], 1.5, True]},
        {"a": list(range(1000)), "b": [{"c": [str(i)] * 100, "d": None} for i in range(300)]},
        [{"x": "a" * 300_000}] * 3,
    ],
)
def test_pieces_are_the_json_of_the_whole(content):
    assert b"".join(json_pieces(content)) == to_json(content)
    if isinstance(content, dict):
        lazy = {**content, "z": iter([content, content])}
        assert b"".join(json_pieces(lazy)) == to_json({**content, "z": [content, content]})


@pytest.mark.parametrize(("num_shared", "num_more"), [(0, 0), (0, 5), (5, 0), (70, 0), (200, 300)])
def test_shared_items_are_encoded_once(num_shared, num_more):
    shared = SharedItems([{"a": i} for i in range(num_shared)])
    lists = [ContinuedList(shared, list(range(num_more + i))) for i in range(2)]
    for items in lists:
        assert b"".join(json_pieces({"x": items})) == to_json({"x": list(items)})


def test_a_small_request_needs_no_thread(server, client):
    """A small request is answered while large ones occupy every thread of the event loop."""
    is_released = threading.Event()
    loop = server._uvicorn.servers[0].get_loop()
    for _ in range(100):
        loop.call_soon_threadsafe(loop.run_in_executor, None, is_released.wait)
    try:
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        for path, body in (
            (TEXT, {"prompt": "a", "max_tokens": 2}),
            (TEXT, {"prompt": "a", "max_tokens": 2, "echo": True, "logprobs": 2, "stream": True}),
            (CHAT, chat),
            ("/v1/messages", chat),
            ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
            ("/tokenize", {"prompt": "a", "return_token_strs": True}),
            ("/detokenize", {"tokens": [7]}),
            ("/api/generate", {"prompt": "a", "options": {"num_predict": 2}}),
        ):
            assert client.post(path, json=body).status_code == 200, path
    finally:
        is_released.set()


def test_threads_take_short_turns_while_a_server_runs(llama):
    usual = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    try:
        with running_server(llama):
            assert sys.getswitchinterval() < 0.001
        assert sys.getswitchinterval() == pytest.approx(0.004)
    finally:
        sys.setswitchinterval(usual)
