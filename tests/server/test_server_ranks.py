"""Servers on two and four ranks give the bytes of one process, whatever a request asks for."""

import json
import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from helpers.launch import environment
from helpers.server import RunningServer, run_server
from helpers.web import web

# The demo model does not define tools.
FLAGS = ["--max_seq_len", "1024", "--dtype", "fp32", "--device", "cpu"]
FLAGS += ["--tool_format", "llama3.2"]
STORY: Any = [{"role": "user", "content": "Tell me a story about a cat"}]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"

SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Zürich", "Bern"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORECAST: Any = {"type": "function", "function": {"name": "forecast", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "forecast"}}
FORM = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
GREEDY = {"max_tokens": 12, "temperature": 0}
FORCED: dict[str, Any] = {"messages": STORY, "tools": [FORECAST], "max_tokens": 120}
SCORED = {"max_tokens": 8, "temperature": 0, "echo": True, "logprobs": 2}

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": ["Once upon a time", "The dog"], **GREEDY}),
    (TEXT, {"prompt": "Once", "max_tokens": 12, "seed": 7, "n": 2}),
    (TEXT, {"prompt": "One day", "max_tokens": 16, "seed": 2, "n": 2, "stream": True}),
    (TEXT, {"prompt": "The", **GREEDY, "structured_outputs": {"regex": "[0-9]{5,40}x"}}),
    (TEXT, {"prompt": "The", "max_tokens": 9, "temperature": 0, "echo": True, "logprobs": 2}),
    (CHAT, {"messages": STORY, **GREEDY}),
    (CHAT, {"messages": STORY, **GREEDY, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": STORY, "max_tokens": 16, "seed": 5, "logprobs": True, "stream": True}),
    (CHAT, {"messages": STORY, "max_tokens": 90, "seed": 6, "response_format": FORM}),
    (CHAT, {**FORCED, "tool_choice": NAMED, "temperature": 0}),
    (CHAT, {**FORCED, "tool_choice": "required", "seed": 3}),
    (CHAT, {**FORCED, "tool_choice": "required", "seed": 4, "stream": True}),
    (MESSAGES, {"messages": STORY, **GREEDY}),
    (MESSAGES, {"messages": STORY, **GREEDY, "system": "x", "stream": True}),
    (RESPONSES, {"input": "The dog", "max_output_tokens": 12, "temperature": 0}),
    (RESPONSES, {"input": "A cat", "max_output_tokens": 12, "temperature": 0, "stream": True}),
]
ALONE = [REQUESTS[0], REQUESTS[3]]
LONG = {"prompt": "Once", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
# What differs between answers: names, times, and how much of the prompt was cached.
_OWN = {"id", "created", "created_at", "call_id", "item_id", "input_tokens", "sequence_number"}
_OWN |= {"prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens"}
_LABELS = {"type", "object", "model", "role"}  # fields that every chunk of a stream may repeat


def answers(url: str, requests: list[tuple[str, dict[str, Any]]] = REQUESTS) -> list[Any]:
    """Return the answers to the requests, sent all at once and then the greedy ones alone.

    At first rows with and without a grammar, greedy and sampled, share steps. In steps without
    sampled rows, ranks exchange their top ids only.
    """
    with ThreadPoolExecutor(len(requests)) as pool:
        found = list(pool.map(lambda request: _answer(url, *request), requests))
    return found + [_answer(url, *request) for request in ALONE]


def _answer(url: str, path: str, body: dict[str, Any]) -> Any:
    found = web.post(url + path, json=body, timeout=60)
    assert found.status_code == 200, found.text
    if not body.get("stream"):
        return found.json()
    events = [line[6:] for line in found.text.splitlines() if line.startswith("data: {")]
    assert len(events) > 5, "it streams"
    joined: dict[str, Any] = defaultdict(str)
    for event in events:
        _join(json.loads(event), "", joined)
    return joined


def _join(value: Any, place: str, joined: dict[str, Any]) -> None:
    """Add each string and number of a chunk to the one at the same path.

    How many tokens a chunk has depends on timing.
    """
    if isinstance(value, dict):
        place += f"[{value.get('index', '')}]"
        for key in value.keys() - _OWN - _LABELS:
            _join(value[key], f"{place}.{key}", joined)
    elif isinstance(value, list):
        for each in value:
            _join(each, place, joined)
    elif isinstance(value, str):
        joined[place] += value
    elif isinstance(value, float):
        joined[f"{place} (numbers)"] = [*joined[f"{place} (numbers)"], value]


def assert_same(found: Any, wanted: Any) -> None:
    """Check equality; log probabilities may differ, as ranks add partial sums."""
    if isinstance(wanted, float):
        assert found == pytest.approx(wanted, abs=1e-4)
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted.keys() - _OWN:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for pair in zip(found, wanted, strict=True):
            assert_same(*pair)
    else:
        assert found == wanted


@pytest.fixture(scope="module")
def of_one_process(long_demo_dir) -> tuple[list[Any], Any]:
    with run_server(long_demo_dir, *FLAGS) as server:
        wanted, long = answers(server.url), _answer(server.url, TEXT, LONG)
    forms = [wanted[index] for index, (_, body) in enumerate(REQUESTS) if "tools" in body]
    assert "forecast" in str(forms[0]) and "forecast" in str(forms[1])
    return wanted, long["choices"][0]


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 4])
def test_several_ranks_answer_as_one_and_end_in_order(of_one_process, size, long_demo_dir):
    """Several ranks answer as one process and end in order.

    Rank 0 leads, and the texts are those of one process. After SIGTERM, running requests are
    answered, no rank complains and nothing else is printed; the exit code is 0, while torchrun's is
    1 in any case. Four ranks get every second request, of each API and each kind of step. Two ranks
    use speculative decoding, which must show in no answer: tools, formats, streams, and requests
    that run at the signal.
    """
    every = slice(0, len(REQUESTS), size // 2)
    of_one, long = of_one_process
    alone = [*of_one[every], *of_one[len(REQUESTS) :]]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4")
    how: Any = {"launcher": launcher} if size == 4 else {}
    flags = FLAGS if size == 4 else [*FLAGS, "--ranks", "2", "--speculate", "lookup"]
    with run_server(long_demo_dir, *flags, **how, env=environment()) as ranks:
        for found, wanted in zip(answers(ranks.url, REQUESTS[every]), alone, strict=True):
            assert_same(found, wanted)
        _separates_salts(ranks.url)
        _ends_in_order(ranks, long, guesses=size == 2)
        assert ranks.process.returncode == (size == 4)
        if size == 2:
            said = [line for line in ranks.log if not re.match(r"\d{4}-\d\d-\d\d .* INFO ", line)]
            told = ["listening on ", "Loaded in ", "ready: ", "SIGTERM: "]
            assert [line[: len(x)] for line, x in zip(said, told, strict=True)] == told


def _separates_salts(url: str) -> None:
    """Check that the ranks share pages between equal salts, and only between these."""
    cached = []
    for salt in ("a", "b", "a", "b"):
        body = {"prompt": "x y z " * 20, "max_tokens": 1, "cache_salt": salt}
        usage = web.post(url + TEXT, json=body, timeout=60).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[:2] == [0, 0] and min(cached[2:]) >= 16


def _ends_in_order(ranks: RunningServer, wanted: Any, *, guesses: bool) -> None:
    metrics = web.get(f"{ranks.url}/metrics").text
    counted = re.findall(r"_num_(?:draft|accepted)_tokens_total (\d+)", metrics)
    assert [int(count) > 20 for count in counted] == [guesses] * 2
    with web.stream("POST", ranks.url + TEXT, json=LONG | {"stream": True}, timeout=60) as response:
        parts = response.iter_text()
        first = next(parts)
        ranks.process.terminate()
        events = first + "".join(parts)
    *pieces, done = [line[6:] for line in events.splitlines() if line]
    choices = [json.loads(piece)["choices"][0] for piece in pieces]
    assert done == "[DONE]" and wanted["finish_reason"] == choices[-1]["finish_reason"] == "length"
    assert "".join(choice["text"] for choice in choices) == wanted["text"]
    ranks.process.wait(60)
    assert "error:" not in "".join(ranks.log), "".join(ranks.log)
