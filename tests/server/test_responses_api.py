"""OpenAI's Responses API, with OpenAI's own client.

Most tests use real sockets and the demo model; tool calls use the real app with a scripted model.
"""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from helpers.scripted import ScriptedServer
from helpers.web import web
from llama.prompts import ToolFormat, encode_chat
from llama.server.errors import ApiError
from llama.server.pushed import PushedStream

STORY = "Tell me a story about a cat"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": None}
CHAT_WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
QUESTION = "How is it in Zürich?"
CALL = '{"name": "weather", "parameters": {"city": "Zürich 🌧"}}'
ZURICH = {"city": "Zürich 🌧"}
CHANGES = ("id", "created_at", "call_id", "item_id", "cached_tokens")


def raw_events(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Yield the events of a stream, after checking that the name of each is its type."""
    data = web.post(f"{url}/v1/responses", json={**body, "stream": True}, timeout=60).text
    events = []
    for each in filter(None, data.split("\n\n")):
        name, content = each.split("\n")
        events.append(json.loads(content.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def without_ids(value: Any) -> Any:
    """Return what is equal in two answers to one request."""
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in CHANGES}
    return value


def check_events(events: list[Any], whole: dict[str, Any]) -> None:
    """Check the order of events, and that they join to the response without streaming."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, in_progress, *middle, last = events
    assert created["type"] == "response.created" and created["response"]["output"] == []
    assert in_progress["type"] == "response.in_progress"
    assert last["type"] == f"response.{whole['status']}"
    assert without_ids(last["response"]) == without_ids(whole)
    for index, item in enumerate(last["response"]["output"]):
        own = [event for event in middle if event["output_index"] == index]
        assert [event.pop("item_id", item["id"]) for event in own] == [item["id"]] * len(own)
        names = [event["type"].removeprefix("response.") for event in own]
        deltas = [event["delta"] for event in own if "delta" in event]
        if item["type"] == "message":
            (part,) = item["content"]
            head = ["output_item.added", "content_part.added"]
            name, tail = "output_text", ["content_part.done"]
            assert "".join(deltas) == part["text"] == own[-3]["text"]
            assert own[0]["item"]["content"] == [] and own[1]["part"]["text"] == ""
            assert own[-2]["part"] == part
        else:
            head, name, tail = ["output_item.added"], "function_call_arguments", []
            assert "".join(deltas) == item["arguments"] == own[-2]["arguments"]
            assert own[0]["item"]["arguments"] == ""
        parts = [f"{name}.delta"] * len(deltas)
        assert names == [*head, *parts, f"{name}.done", *tail, "output_item.done"]
        assert own[0]["item"]["status"] == "in_progress" and own[-1]["item"] == item


SYSTEM = {"role": "system", "content": "x"}
USER = {"role": "user", "content": STORY}
REQUESTS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"input": STORY, "max_output_tokens": 30, "temperature": 0}, [USER]),
    ({"input": STORY, "instructions": "x", "temperature": 0}, [SYSTEM, USER]),
    (
        {
            "input": [
                {"role": "developer", "content": "x"},
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": STORY}],
                },
            ],
            "max_output_tokens": 12,
            "temperature": 0,
            "store": False,
        },
        [SYSTEM, USER],
    ),
]


@pytest.mark.parametrize(("body", "messages"), REQUESTS)
def test_a_stream_is_the_response_that_does_not_stream(server, body, messages):
    """A stream joins to the response without streaming, which equals the chat's answer."""
    whole = web.post(f"{server.url}/v1/responses", json=body, timeout=60).json()
    check_events(raw_events(server.url, body), whole)
    chat = {"messages": messages, "temperature": 0, "max_tokens": body.get("max_output_tokens")}
    wanted = web.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60).json()
    (item,) = whole["output"]
    assert item["content"][0]["text"] == wanted["choices"][0]["message"]["content"]
    assert whole["usage"]["input_tokens"] == wanted["usage"]["prompt_tokens"]
    assert whole["usage"]["output_tokens"] == wanted["usage"]["completion_tokens"]
    is_cut = wanted["choices"][0]["finish_reason"] == "length"
    assert whole["status"] == item["status"] == ("incomplete" if is_cut else "completed")
    reason = {"reason": "max_output_tokens"} if is_cut else None
    assert whole["incomplete_details"] == reason


class Person(BaseModel, extra="forbid"):
    name: Literal["Tom", "Kitty"]
    is_cat: bool


def test_the_client_sync_and_async(server):
    asked: Any = {"model": "demo", "input": STORY, "temperature": 0}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
            final = stream.get_final_response()
        assert (whole.status, whole.model, whole.object) == ("completed", "demo", "response")
        assert whole.output_text == final.output_text == text != ""
        again: Any = [
            {"role": "user", "content": STORY},
            *whole.output,
            {"role": "user", "content": "More"},
        ]
        more = client.responses.create(**asked | {"input": again, "max_output_tokens": 5})
        assert whole.usage is not None and more.usage is not None
        assert more.usage.input_tokens > whole.usage.total_tokens
        assert more.usage.input_tokens_details.cached_tokens > 0
        counted = client.responses.input_tokens.count(model="demo", input=again)
        assert counted.input_tokens == more.usage.input_tokens
        assert counted.object == "response.input_tokens"
        for stored in ({"store": True}, {"previous_response_id": "resp_1"}):
            with pytest.raises(openai.BadRequestError, match="no stored state") as error:
                client.responses.create(**asked, **stored)
            assert error.value.param == next(iter(stored))

    async def ask() -> tuple[str, str]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            whole = await client.responses.create(**asked)
            async with client.responses.stream(**asked) as stream:
                return whole.output_text, (await stream.get_final_response()).output_text

    assert asyncio.run(ask()) == (text, text)


def test_an_answer_of_a_given_form(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        parsed = client.responses.parse(
            model="demo", input=STORY, text_format=Person, temperature=0.1, max_output_tokens=200
        )
        assert parsed.status == "completed"
        jsonschema.validate(json.loads(parsed.output_text), Person.model_json_schema())
        assert isinstance(parsed.output_parsed, Person)
        schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
                  "additionalProperties": False}  # fmt: skip
        form: Any = {"type": "json_schema", "name": "x", "schema": schema}
        answer = client.responses.create(model="demo", input=STORY, text={"format": form})
        jsonschema.validate(json.loads(answer.output_text), schema)
        form = {"type": "json_object"}
        answer = client.responses.create(
            model="demo", input=STORY, text={"format": form}, max_output_tokens=5
        )
        assert answer.output_text.startswith("{") and answer.text is not None
        assert answer.text.format is not None and answer.text.format.type == "json_object"


class ResponsesServer(ScriptedServer):
    def respond(self, tool_format: ToolFormat | None = None, **body: Any) -> Any:
        """Return the whole response, after checking that the events join to it."""
        body = {"model": "tiny", "input": QUESTION, "tools": [WEATHER], **body}

        async def both(client: openai.AsyncOpenAI) -> tuple[Any, list[Any]]:
            async def streamed() -> list[Any]:
                stream = await client.responses.create(**body, stream=True)
                return [event.to_dict() async for event in stream]

            whole, events = await asyncio.gather(client.responses.create(**body), streamed())
            return whole, events

        whole, events = self.call(both, tool_format)
        check_events(events, whole.to_dict())
        return whole


@pytest.fixture(scope="module")
def scripted(llama_for_tools, apis_of_tools) -> Iterator[ResponsesServer]:
    with contextlib.closing(ResponsesServer(llama_for_tools, apis_of_tools)) as made:
        yield made


@pytest.fixture
def local(llama_for_tools) -> Iterator[ResponsesServer]:
    """A server for tests that change its code."""
    with contextlib.closing(ResponsesServer(llama_for_tools)) as made:
        yield made


def items_of(response: Any) -> list[Any]:
    return [
        (item.name, json.loads(item.arguments))
        if item.type == "function_call"
        else item.content[0].text
        for item in response.output
    ]


def test_calls_and_words(scripted):
    scripted.says(f"I will look. {CALL}")
    response = scripted.respond()
    assert items_of(response) == ["I will look. ", ("weather", ZURICH)]
    assert response.status == "completed"
    none = scripted.respond(tool_choice="none")
    assert items_of(none) == [f"I will look. {CALL}"]
    scripted.says("[weather(city='Zürich 🌧'), weather()]")
    response = scripted.respond(ToolFormat.LLAMA_3_2)
    assert items_of(response) == [("weather", ZURICH), ("weather", {})]
    response = scripted.respond(ToolFormat.LLAMA_3_2, parallel_tool_calls=False)
    assert items_of(response) == [("weather", ZURICH)]
    scripted.says(CALL)
    response = scripted.respond(max_output_tokens=45)
    (call,) = response.output
    assert (response.status, call.status) == ("incomplete", "incomplete")
    assert json.dumps(ZURICH, ensure_ascii=False).startswith(call.arguments)


def test_an_answer_ends_with_the_context(scripted):
    """An answer ends with the context, although max_output_tokens is larger."""
    scripted.says("and on " * 1200)
    response = scripted.respond(max_output_tokens=32000)
    assert response.usage.total_tokens == 2048 and response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"


def test_the_dialog_goes_back_in(scripted):
    """The dialog is sent back: with the answer's items and the call's result, the ids are the
    chat's.
    """
    scripted.says(f"I will look. {CALL}")
    first = scripted.respond()
    question = {"role": "user", "content": QUESTION}
    dialog = [
        {"role": "developer", "content": "In German."},
        question,
        *[item.to_dict() for item in first.output],
        {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "22 °C"},
    ]
    function = {"name": "weather", "arguments": json.dumps(ZURICH)}
    calls = [{"id": "a", "function": function}]
    chat: list[Any] = [
        {"role": "system", "content": "Be short.\nIn German."},
        question,
        {"role": "assistant", "content": "I will look. ", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "22 °C"},
    ]
    wanted = len(encode_chat(scripted.llama.tokenizer, chat, [CHAT_WEATHER]))
    scripted.says("It is warm.")
    second = scripted.respond(input=dialog, instructions="Be short.")
    assert items_of(second) == ["It is warm."] and second.usage.input_tokens == wanted


def test_a_forced_call_fits_its_schema(scripted):
    schema = {"type": "object", "properties": {"city": {"enum": ["Zürich", "Bern"]}},
              "required": ["city"], "additionalProperties": False}  # fmt: skip
    tool = {**WEATHER, "parameters": schema}
    with scripted.random_model():
        for choice in ("required", {"type": "function", "name": "weather"}):
            response = scripted.respond(
                tools=[tool], tool_choice=choice, temperature=0, max_output_tokens=300
            )
            name, arguments = items_of(response)[0]
            assert name == "weather"
            jsonschema.validate(arguments, schema)


def test_an_error_in_the_stream(local, monkeypatch):
    """An error in the stream is reported by its last event, as the status was sent already."""

    async def broken(self: PushedStream) -> bytes:
        raise ApiError(500, "the model failed in this step")

    monkeypatch.setattr(PushedStream, "_last_part", broken)
    local.says("It is warm.")

    async def ask(client: openai.AsyncOpenAI) -> list[Any]:
        stream = await client.responses.create(model="tiny", input=QUESTION, stream=True)
        return [event async for event in stream]

    last = local.call(ask)[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.message == "the model failed in this step"
