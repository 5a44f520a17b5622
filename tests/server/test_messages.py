"""Anthropic's Messages API, with Anthropic's own client, which takes long to import.

Most tests use real sockets and the demo model; tool calls use the real app with a scripted model.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import jsonschema
import pytest

from helpers.scripted import ScriptedServer
from helpers.web import web
from llama.engine.step import Step
from llama.prompts import ToolFormat, encode_chat
from llama.server import pushed
from llama.server.anthropic.answers import MessageAnswer
from llama.server.errors import ApiError
from llama.server.serving import Serving

STORY: Any = [{"role": "user", "content": "Tell me a story about a cat"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"name": "weather", "input_schema": SCHEMA}
OPENAI_WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
QUESTION: Any = [{"role": "user", "content": "How is it in Zürich?"}]
CALL = '{"name": "weather", "parameters": {"city": "Zürich 🌧"}}'
ZURICH = {"city": "Zürich 🌧"}


def raw_events(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Yield the events of a stream, after checking that the name of each is its type."""
    data = web.post(f"{url}/v1/messages", json={**body, "stream": True}, timeout=60).text
    events = []
    for each in filter(None, data.split("\n\n")):
        name, content = each.split("\n")
        events.append(json.loads(content.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def content_of(events: list[Any]) -> list[Any]:
    """Return the blocks that the events join to, after checking the order of events."""
    first, *middle, delta, stop = [e for e in events if e["type"] != "ping"]
    assert (first["type"], delta["type"]) == ("message_start", "message_delta")
    assert stop == {"type": "message_stop"} and first["message"]["content"] == []
    blocks: list[Any] = []
    parts: list[str] | None = None
    for event in middle:
        if event["type"] == "content_block_start":
            assert parts is None and event["index"] == len(blocks)
            blocks.append(event["content_block"])
            parts = []
            continue
        assert parts is not None and event["index"] == len(blocks) - 1
        is_text = blocks[-1]["type"] == "text"
        if event["type"] == "content_block_delta":
            assert event["delta"]["type"] == ("text_delta" if is_text else "input_json_delta")
            parts.append(event["delta"]["text" if is_text else "partial_json"])
        else:
            assert event["type"] == "content_block_stop"
            blocks[-1] |= {"text": "".join(parts)} if is_text else {"input": "".join(parts)}
            parts = None
    assert parts is None
    return blocks


REQUESTS: list[dict[str, Any]] = [
    {"messages": STORY, "max_tokens": 30, "temperature": 0},
    {
        "messages": STORY,
        "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
        "max_tokens": 60,
        "temperature": 0,
        "top_k": 5,
        "stop_sequences": [" a "],
    },
    {"messages": STORY, "max_tokens": 40, "temperature": 1.9, "top_k": 1, "top_p": 0.9},
    {"messages": STORY, "max_tokens": 0},
]


@pytest.mark.parametrize("body", REQUESTS)
def test_a_stream_is_the_message_that_does_not_stream(server, demo, body):
    """A stream joins to the message without streaming, which is the chat's answer to the dialog."""
    whole = web.post(f"{server.url}/v1/messages", json=body, timeout=60).json()
    events = raw_events(server.url, body)
    assert content_of(events) == whole["content"]
    delta = events[-2]
    reason = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    assert delta["delta"] == reason
    assert delta["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    system = [{"role": "system", "content": "x"}] if "system" in body else []
    chat = {key: body[key] for key in body.keys() - {"system", "stop_sequences", "messages"}}
    chat |= {"messages": system + STORY, "stop": body.get("stop_sequences")}
    wanted = web.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60).json()
    choice, usage = wanted["choices"][0], wanted["usage"]
    assert "".join(block["text"] for block in whole["content"]) == choice["message"]["content"]
    if choice["finish_reason"] == "length":
        assert reason == {"stop_reason": "max_tokens", "stop_sequence": None}
    elif choice["stop_reason"] in body.get("stop_sequences", []):
        assert reason == {"stop_reason": "stop_sequence", "stop_sequence": choice["stop_reason"]}
    else:
        assert reason == {"stop_reason": "end_turn", "stop_sequence": None}
    for given in (whole["usage"], delta["usage"]):
        read = given["cache_read_input_tokens"]
        assert given["input_tokens"] + read == usage["prompt_tokens"]
    counted = {key: body[key] for key in ("messages", "system") if key in body}
    counted = web.post(f"{server.url}/v1/messages/count_tokens", json=counted).json()
    assert counted == {"input_tokens": usage["prompt_tokens"]}


def test_the_client_sync_and_async(server):
    import anthropic

    asked: Any = {"model": "demo", "messages": STORY, "max_tokens": 20}
    greedy: Any = {"extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        whole: Any = client.messages.create(**asked, **greedy)
        with client.messages.stream(**asked, **greedy) as stream:
            text = "".join(stream.text_stream)
            final: Any = stream.get_final_message()
        assert (whole.type, whole.role, whole.model) == ("message", "assistant", "demo")
        assert final.content[0].text == text == whole.content[0].text
        assert final.stop_reason == whole.stop_reason == "max_tokens"
        assert client.messages.count_tokens(model="demo", messages=STORY).input_tokens > 10
        with pytest.raises(anthropic.BadRequestError, match="'container' cannot be used") as error:
            client.beta.messages.create(**asked, container="x")
        assert error.value.type == "invalid_request_error"

    async def ask() -> tuple[str, str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as client:
            whole: Any = await client.messages.create(**asked, **greedy)
            async with client.messages.stream(**asked, **greedy) as stream:
                return whole.content[0].text, await stream.get_final_text()

    assert asyncio.run(ask()) == (text, text)


def test_what_coding_agents_send(server):
    """Extras of coding agents do not change the answer, which is that of the plain dialog.

    They are a max_tokens beyond the context, hints for caching and thinking, a query in the
    address, and beta headers.
    """
    system = ["You are a storyteller.", "Be kind."]
    cached: Any = {"type": "ephemeral", "ttl": "1h"}
    thought = {"type": "thinking", "thinking": "Hm <|eot_id|>", "signature": "abc"}
    dialog: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": cached}]},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "Hello!"}]},
        *STORY,
    ]
    plain: Any = [
        {"role": "system", "content": "\n".join(system)},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        *STORY,
    ]
    chat = {"messages": plain, "temperature": 0}
    wanted = web.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60).json()
    (choice,), counts = wanted["choices"], wanted["usage"]
    assert choice["finish_reason"] == "stop"
    asked: Any = {
        "model": "demo",
        "system": [{"type": "text", "text": text, "cache_control": cached} for text in system],
        "messages": dialog,
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14"],
    }
    more: Any = {
        "max_tokens": 32000,
        "metadata": {"user_id": "user_1_account__session_2"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "extra_body": {"temperature": 1, "top_k": 1},
    }
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        messages = client.beta.messages
        assert messages.count_tokens(**asked).input_tokens == counts["prompt_tokens"]
        with messages.stream(**asked, **more) as stream:
            streamed: Any = stream.get_final_message()
        whole: Any = messages.create(**asked, **more, timeout=60)
        short: Any = messages.create(**{**asked, **more, "max_tokens": 3})
    for message in (streamed, whole):
        assert message.content[0].text == choice["message"]["content"]
        assert message.stop_reason == "end_turn"
        assert message.usage.output_tokens == counts["completion_tokens"]
    assert short.stop_reason == "max_tokens" and short.usage.output_tokens == 3


def test_an_answer_that_is_begun_and_one_of_a_given_form(server, demo):
    """A started answer is continued, and an answer follows a given format.

    The last message of the assistant is the start of the answer.
    """
    begun = [*STORY, {"role": "assistant", "content": "Once upon"}]
    body = {"messages": begun, "max_tokens": 10, "temperature": 0}
    found = web.post(f"{server.url}/v1/messages", json=body).json()
    ids = encode_chat(
        demo.tokenizer, begun, add_generation_prompt=False, continue_final_message=True
    )
    plain = {"prompt": ids, "max_tokens": 10, "temperature": 0}
    wanted = web.post(f"{server.url}/v1/completions", json=plain).json()
    assert found["content"][0]["text"] == wanted["choices"][0]["text"]
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}},
        "required": ["name"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "schema": schema}}
    body = {"messages": STORY, "max_tokens": 100, "output_config": form}
    found = web.post(f"{server.url}/v1/messages", json=body).json()
    assert found["stop_reason"] == "end_turn"
    jsonschema.validate(json.loads(found["content"][0]["text"]), schema)


class MessagesServer(ScriptedServer):
    def ask(self, work: Any, tool_format: ToolFormat | None = None) -> Any:
        """Return the result of `work(client)`, where `client` is an anthropic.AsyncAnthropic."""
        import anthropic

        def connect(connection: Any) -> Any:
            return anthropic.AsyncAnthropic(
                base_url="http://localhost", api_key="k", http_client=connection, max_retries=0
            )

        return self.call(work, tool_format, connect=connect, http=httpx2)

    def message(self, tool_format: ToolFormat | None = None, **body: Any) -> Any:
        """Return the whole message, after checking that the events join to it."""
        body = {"model": "tiny", "messages": QUESTION, "tools": [WEATHER], **body}
        body.setdefault("max_tokens", 300)

        async def both(client: Any) -> tuple[Any, Any, list[Any]]:
            async def streamed() -> list[Any]:
                stream = await client.messages.create(**body, stream=True)
                return [event.to_dict() async for event in stream]

            async def managed() -> Any:
                async with client.messages.stream(**body) as stream:
                    return await stream.get_final_message()

            return await asyncio.gather(client.messages.create(**body), managed(), streamed())

        whole, joined, events = self.ask(both, tool_format)
        content_of(events)
        without_ids = [
            [block.to_dict() | {"id": ""} for block in each.content] for each in (whole, joined)
        ]
        assert without_ids[0] == without_ids[1]
        assert (whole.stop_reason, whole.stop_sequence) == (joined.stop_reason, None)
        return whole


@pytest.fixture(scope="module")
def scripted(llama_for_tools, apis_of_tools) -> Iterator[MessagesServer]:
    with contextlib.closing(MessagesServer(llama_for_tools, apis_of_tools)) as made:
        yield made


@pytest.fixture
def local(llama_for_tools) -> Iterator[MessagesServer]:
    """A server for tests that change its code."""
    with contextlib.closing(MessagesServer(llama_for_tools)) as made:
        yield made


def blocks_of(message: Any) -> list[Any]:
    return [
        block.text if block.type == "text" else (block.name, block.input)
        for block in message.content
    ]


def test_calls_and_words(scripted):
    scripted.says(f"I will look. {CALL}")
    message = scripted.message()
    assert blocks_of(message) == ["I will look. ", ("weather", ZURICH)]
    assert message.stop_reason == "tool_use" and message.content[1].id.startswith("toolu_")
    none = scripted.message(tool_choice={"type": "none"})
    assert (blocks_of(none), none.stop_reason) == ([f"I will look. {CALL}"], "end_turn")
    scripted.says("[weather(city='Zürich 🌧'), weather()]")
    message = scripted.message(ToolFormat.LLAMA_3_2)
    assert blocks_of(message) == [("weather", ZURICH), ("weather", {})]
    single: Any = {"type": "auto", "disable_parallel_tool_use": True}
    message = scripted.message(ToolFormat.LLAMA_3_2, tool_choice=single)
    assert blocks_of(message) == [("weather", ZURICH)]
    scripted.says('{"name": "weather", "parameters": {"city": "Bern", "more": "and on"}}')
    message = scripted.message(max_tokens=60)
    assert message.stop_reason == "max_tokens"
    assert blocks_of(message) == [("weather", {"city": "Bern"})], "what is whole of what was cut"


def test_an_answer_ends_with_the_context(scripted):
    """An answer ends with the context if a client asks for more; the stop reason says so."""
    scripted.says("and on " * 1200)
    for most, reason in ((32000, "model_context_window_exceeded"), (9, "max_tokens")):
        message = scripted.message(max_tokens=most, timeout=60)
        usage = message.usage
        assert message.stop_reason == reason
        total = usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens
        assert total == 2048 if most == 32000 else usage.output_tokens == most


def test_the_dialog_goes_back_in(scripted):
    """The dialog is sent back by the client.

    With the client's own message and its results the prompt is that of the same chat.
    """
    scripted.says(f"I will look. {CALL}")
    first = scripted.message()
    call = first.content[1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "22 °C"}
    more = {"type": "text", "text": "And tomorrow?"}
    arguments = json.dumps(ZURICH)
    for is_error, content in ((False, "22 °C"), (True, {"error": "22 °C"})):
        dialog = [
            *QUESTION,
            first.to_param(),
            {"role": "user", "content": [{**result, "is_error": is_error}, more]},
        ]
        function = {"name": "weather", "arguments": arguments}
        chat = [
            {"role": "system", "content": "Be short."},
            *QUESTION,
            {"role": "assistant", "content": "I will look. ",
             "tool_calls": [{"id": "a", "function": function}]},
            {"role": "tool", "tool_call_id": "a", "content": content},
            {"role": "user", "content": "And tomorrow?"},
        ]  # fmt: skip
        wanted = len(encode_chat(scripted.llama.tokenizer, chat, [OPENAI_WEATHER]))
        scripted.says("It is warm.")
        second = scripted.message(messages=dialog, system="Be short.")
        assert blocks_of(second) == ["It is warm."]
        usage = second.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == wanted


def test_several_calls_of_another_model_go_in(scripted):
    """Several calls of another model are accepted.

    Agents send back one message with two calls; the format has one call in each message.
    """
    uses = [
        {"type": "tool_use", "id": each, "name": "weather", "input": {"city": each}}
        for each in "ab"
    ]
    results = [{"type": "tool_result", "tool_use_id": each, "content": each} for each in "ba"]
    dialog = [
        *QUESTION,
        {"role": "assistant", "content": uses},
        {"role": "user", "content": results},
    ]
    chat: list[dict[str, Any]] = [*QUESTION]
    for each in "ab":
        function = {"name": "weather", "arguments": {"city": each}}
        chat.append({"role": "assistant", "tool_calls": [{"id": each, "function": function}]})
        chat.append({"role": "tool", "tool_call_id": each, "content": each})
    scripted.says("Both are warm.")
    usage = scripted.message(messages=dialog).usage
    wanted = len(encode_chat(scripted.llama.tokenizer, chat, [OPENAI_WEATHER]))
    assert usage.input_tokens + usage.cache_read_input_tokens == wanted


def test_a_forced_call_fits_its_schema(scripted):
    schema = {**SCHEMA, "properties": {"city": {"enum": ["Zürich", "Bern"]}}}
    tools = [{"name": "weather", "input_schema": {**schema, "additionalProperties": False}}]
    with scripted.random_model():
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
            message = scripted.message(tools=tools, tool_choice=choice, extra_body={"top_k": 1})
            (block, *_) = message.content
            assert block.name == "weather" and message.stop_reason in ("tool_use", "max_tokens")
            if message.stop_reason == "tool_use":
                jsonschema.validate(block.input, schema)


def test_an_error_in_the_stream_and_the_pings_before_it(local, monkeypatch):
    """Pings precede an error in a stream.

    The status was sent already, so the client raises the error that the last event reports.
    """

    def checked(self: Serving, output: Any, active: Any, fields: Any) -> Any:
        if active.last_output:
            raise ApiError(500, "the model failed in this step")
        return check(self, output, active, fields)

    def start(step: Step) -> Any:
        """Begin a step, the second one of a request after a ping."""
        num_outputs = [x.sequence.num_output for rows in step.rows.values() for x in rows.items]
        if 0 in num_outputs:
            has_pinged.clear()
        elif num_outputs:
            has_pinged.wait(60)
        return begin(step)

    def idle_event(self: MessageAnswer) -> dict[str, Any]:
        has_pinged.set()
        return {"type": "ping"}

    has_pinged = threading.Event()
    check, begin = Serving._checked, local.script.start
    monkeypatch.setattr(Serving, "_checked", checked)
    monkeypatch.setattr(local.script, "start", start)
    monkeypatch.setattr(MessageAnswer, "idle_event", property(idle_event))
    monkeypatch.setattr(pushed, "KEEP_ALIVE_S", 0.05)
    local.says("x")
    body: Any = {"model": "tiny", "messages": QUESTION, "max_tokens": 5}

    import anthropic

    async def ask(client: Any) -> None:
        with pytest.raises(anthropic.APIStatusError, match="the model failed") as error:
            async for _ in await client.messages.create(**body, stream=True):
                pass
        assert error.value.type == "api_error"
        raw = await client.post("/v1/messages", body={**body, "stream": True},
                                cast_to=httpx2.Response)  # fmt: skip
        assert 'event: ping\ndata: {"type":"ping"}\n\n' in raw.text
        assert raw.text.rstrip().split("\n\n")[-1].startswith("event: error\ndata: ")

    local.ask(ask)
