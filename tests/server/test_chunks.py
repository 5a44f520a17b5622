"""Chunks of a stream that are filled into bytes made before: they equal the JSON of the objects.

The oracle is json's own encoding of each event, as Python's json module writes it.
"""

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter

from llama import Llama, SamplingParams
from llama.prompts.fields import read_as
from llama.requests.request import RequestOutput
from llama.server.anthropic.answers import MessageAnswer
from llama.server.anthropic.models import MessagesBody
from llama.server.encoding import HOLE
from llama.server.ollama import answers as ollama
from llama.server.ollama import models as ollama_models
from llama.server.openai.answers import Completion, ResponseMeta
from llama.server.openai.models import ChatBody, CompletionBody
from llama.server.responses.answers import ResponseAnswer
from llama.server.responses.models import ResponsesBody

DEFAULTS = SamplingParams(max_tokens=40, temperature=0, skip_special_tokens=True)
QUESTION = [{"role": "user", "content": "Tell me a story about a cat"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: dict[str, Any] = {"name": "weather", "parameters": SCHEMA}
CALL = '{"name": "weather", "parameters": {"city": "Zürich 🌧"}}'
TEXT = 'A "cat"\\ said\n\x01\x7f\u2028: Zürich 🌧️ 漢字, \U0001f469\u200d\U0001f469\u200d\U0001f466.'
CHAT: dict[str, Any] = {"messages": QUESTION}
RESPONSE: dict[str, Any] = {"input": "Tell me a story"}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
RUNNING = {
    "stream": True,
    "stream_options": {"continuous_usage_stats": True, "include_usage": True},
}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (ChatBody, CHAT),
    "chat with usage": (ChatBody, {**CHAT, **USAGE}),
    "chat with running usage": (ChatBody, {**CHAT, **RUNNING}),
    "chat with choices": (ChatBody, {**CHAT, "n": 3, "temperature": 1, "seed": 7, **USAGE}),
    "chat with tools": (ChatBody, {**CHAT, "tools": [{"type": "function", "function": FUNCTION}]}),
    "chat with logprobs": (ChatBody, {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "chat with a stop": (ChatBody, {**CHAT, "stop": [" said", "a"]}),
    "completion": (CompletionBody, {"prompt": "Once"}),
    "completion with prompts": (CompletionBody, {"prompt": ["Once", "The dog"], "n": 2, **USAGE}),
    "completion with echo": (CompletionBody, {"prompt": "Once", "echo": True}),
    "completion with logprobs": (CompletionBody, {"prompt": "Once", "logprobs": 2, "echo": True}),
    "completion of the best": (CompletionBody, {"prompt": "Once", "n": 1, "best_of": 2}),
    "response": (ResponsesBody, RESPONSE),
    "response with logprobs": (
        ResponsesBody, {**RESPONSE, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    ),
    "response with tools": (
        ResponsesBody, {**RESPONSE, "tools": [{"type": "function", **FUNCTION}]}
    ),
    "message": (MessagesBody, {**CHAT, "max_tokens": 40}),
    "message with tools": (
        MessagesBody,
        {**CHAT, "max_tokens": 40, "tools": [{"name": "weather", "input_schema": SCHEMA}]},
    ),
    "Ollama's chat": (ollama_models.ChatBody, CHAT),
    "Ollama's text": (ollama_models.GenerateBody, {"prompt": "Once"}),
}  # fmt: skip
PLAIN = {
    "chat", "chat with usage", "chat with choices", "completion", "completion with prompts",
    "completion with echo", "response", "message", "Ollama's chat", "Ollama's text",
}  # fmt: skip
SCRIPTED = [name for name in CASES if "logprobs" not in name and "best" not in name]
TEXTS = {
    "reasoning": f"<think>\nWhy? 🌧\n</think>\n\n{TEXT}",
    "call": CALL,
    "both": f"{TEXT} {CALL}",
}


def json_of(event: dict[str, Any], answer: Any) -> bytes:
    text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    name = f"event: {event['type']}\n" if "type" in event else ""
    is_lines = answer.stream_format.media_type == "application/x-ndjson"
    return (f"{text}\n" if is_lines else f"{name}data: {text}\n\n").encode()


def answer_of(body: Any, request: Any, llama: Llama) -> Any:
    """Return an answer of the body's API, for a model whose name looks like other parts."""
    meta = ResponseMeta("id\x01", 'hole "\x01" {"text":""}', 1_700_000_000)
    makers: dict[Any, Any] = {
        ChatBody: Completion,
        CompletionBody: Completion,
        ResponsesBody: partial(ResponseAnswer, body),
        MessagesBody: MessageAnswer,
        ollama_models.ChatBody: ollama.ChatAnswer,
        ollama_models.GenerateBody: ollama.GenerateAnswer,
    }
    return makers[type(body)](request, llama.dialog_format, meta)


def outputs_of(request: Any, llama: Llama) -> list[RequestOutput]:
    """Return the outputs of a request, one for each step and prompt."""
    engine = llama.llm_engine
    if request.chat:
        ids = request.chat_ids(llama.dialog_format)
        return list(
            engine.stream([engine.prepare("", ids, request.chat_params(llama.dialog_format))])
        )
    prepared = [
        engine.prepare("", prompt, request.params, index=i)
        for i, prompt in enumerate(request.prompts)
    ]
    return list(engine.stream(prepared))


def check(name: str, llama: Llama) -> bytes:
    """Compare each output's bytes with the JSON of its events, and return all bytes."""
    body_type, fields = CASES[name]
    body = read_as(TypeAdapter(body_type), fields)
    request = (
        body.request() if body_type.__module__ == ollama_models.__name__ else body.request(DEFAULTS)
    )
    whole, fast = answer_of(body, request, llama), answer_of(body, request, llama)
    num_filled = 0
    found = []
    for output in outputs_of(request, llama):
        expected = b"".join(json_of(event, whole) for event in whole.events(output))
        part = fast.next_event(output)
        num_filled += bool(part)
        if part is None:
            part = b"".join(map(fast.stream_format.encode, fast.events(output)))
        assert part == expected
        found.append(part)
    for event, other in zip(whole.last_events(), fast.last_events(), strict=True):
        assert json_of(event, whole) == fast.stream_format.encode(other)
    assert num_filled > 3 or name not in PLAIN
    joined = b"".join(found)
    assert HOLE.encode() not in joined
    return joined


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Stop the clock of Ollama's lines."""
    stopped = SimpleNamespace(time=lambda: 1_700_000_000.5, monotonic=lambda: 5.0)
    monkeypatch.setattr(ollama, "time", stopped)


@pytest.mark.parametrize("name", [name for name in CASES if "tools" not in name])
def test_chunks_equal_the_json_of_their_events(name, demo):
    check(name, demo)


@pytest.mark.parametrize("name", SCRIPTED)
@pytest.mark.parametrize("text", TEXTS)
def test_chunks_of_any_text_equal_the_json_of_their_events(name, text, reasoning_server):
    """Chunks of reasoning, of calls, of control characters and of cut characters are equal, too."""
    reasoning_server.says(TEXTS[text])
    reasoning_server.format.is_open = False
    check(name, reasoning_server.llama)
