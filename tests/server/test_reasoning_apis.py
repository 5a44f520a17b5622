"""Reasoning in Responses, Anthropic's Messages and Ollama's API, with the official clients."""

import json
from typing import Any

import httpx2
import ollama
import openai
import pytest

from helpers.reasoning import QUESTION, ReasoningServer

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '{"name": "weather", "parameters": {"city": "Bern"}}'
TEXT = "I look at\n\nBern 🌧. </thin\n"
REASONING = TEXT.strip()
SAID = f"{TEXT}</think>\n\nIt rains."


@pytest.fixture
def server(reasoning_over_both_ports) -> ReasoningServer:
    reasoning_over_both_ports.says(SAID)
    return reasoning_over_both_ports


@pytest.fixture
def local(reasoning_server) -> ReasoningServer:
    """The server for tests that see what its format is given."""
    reasoning_server.says(SAID)
    return reasoning_server


class Responses:
    """OpenAI's Responses: a whole response, and the events of a stream of the same request."""

    def __init__(self, server: ReasoningServer, **body: Any) -> None:
        async def both(client: openai.AsyncOpenAI) -> tuple[Any, list[Any]]:
            common: Any = {"model": "tiny", "input": "How is it?", **body}
            whole = await client.responses.create(**common)
            async with client.responses.stream(**common) as stream:
                return whole, [event async for event in stream]

        self.whole, self.events = server.call(both)
        self.final = self.events[-1].response

    def texts(self, event: str) -> str:
        return "".join(x.delta for x in self.events if x.type == f"response.{event}.delta")


def test_responses_have_an_item_of_reasoning(server):
    found = Responses(server)
    for response in (found.whole, found.final):
        reasoning, message = response.output
        assert (reasoning.type, reasoning.status) == ("reasoning", "completed")
        assert reasoning.summary == []
        assert [part.to_dict() for part in reasoning.content] == [
            {"type": "reasoning_text", "text": REASONING}
        ]
        assert (message.content[0].text, response.status) == ("It rains.", "completed")
        assert response.usage.output_tokens_details.reasoning_tokens > 5
    assert found.texts("reasoning_text") == REASONING
    assert found.texts("output_text") == "It rains."
    kinds = [event.type.removeprefix("response.") for event in found.events]
    assert kinds.index("reasoning_text.done") < kinds.index("output_text.delta")
    assert [kinds.count(k) for k in ("output_item.added", "content_part.added")] == [2, 2]
    (done,) = [event for event in found.events if event.type == "response.reasoning_text.done"]
    assert (done.text, done.output_index, done.content_index) == (REASONING, 0, 0)


def test_responses_take_reasoning_back_and_read_the_effort(local):
    found = Responses(local, reasoning={"effort": "none", "summary": "auto"})
    assert local.format.seen.enable_thinking is False
    assert found.whole.reasoning.effort == "none"
    items = [item.to_dict() for item in found.whole.output]
    dialog: Any = [{"role": "user", "content": "a"}, *items, {"role": "user", "content": "b"}]
    Responses(local, input=dialog)
    turns = local.format.messages
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]
    assert turns[1]["reasoning_content"] == REASONING
    assert turns[1]["content"] == "It rains."
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "1"}
    Responses(local, input=[dialog[0], items[0], call, result, items[0], dialog[-1]])
    turns = local.format.messages
    assert [turn.get("reasoning_content") for turn in turns] == [None, REASONING, None, None]
    with pytest.raises(openai.BadRequestError, match=r"reasoning\.effort=3 must be a text"):
        Responses(local, reasoning={"effort": 3})


def test_responses_that_end_in_the_reasoning(server):
    found = Responses(server, max_output_tokens=4)
    for response in (found.whole, found.final):
        (reasoning,) = response.output
        assert (reasoning.status, response.status) == ("incomplete", "incomplete")


def messages(server: ReasoningServer, **body: Any) -> tuple[Any, Any, list[Any]]:
    """Return a whole message, what Anthropic's client makes of a stream, and its raw events."""
    import anthropic

    def connect(connection: Any) -> Any:
        return anthropic.AsyncAnthropic(
            base_url="http://localhost", api_key="k", http_client=connection, max_retries=0
        )

    async def both(client: Any) -> tuple[Any, Any, list[Any]]:
        common: Any = {"model": "tiny", "max_tokens": 300, "messages": QUESTION, **body}
        whole = await client.messages.create(**common)
        async with client.messages.stream(**common) as stream:
            events = [event async for event in stream]
            return whole, await stream.get_final_message(), events

    return server.call(both, connect=connect, http=httpx2)


def test_messages_have_a_block_of_thinking(server):
    whole, final, events = messages(server)
    for message in (whole, final):
        thinking, text = message.content
        assert thinking.to_dict() == {"type": "thinking", "thinking": REASONING, "signature": ""}
        assert (text.text, message.stop_reason) == ("It rains.", "end_turn")
    assert "".join(event.thinking for event in events if event.type == "thinking") == REASONING
    kinds = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert kinds.count("signature_delta") == 1
    assert kinds.index("signature_delta") < kinds.index("text_delta")
    server.script.ids = server.ids_of(f"Hm</think>{CALL}<|eot_id|>")
    whole, final, _ = messages(server, tools=[{"name": "weather", "input_schema": SCHEMA}])
    for message in (whole, final):
        assert [block.type for block in message.content] == ["thinking", "tool_use"]
        assert message.content[1].input == {"city": "Bern"}
    whole, final, _ = messages(server, max_tokens=1)
    for message in (whole, final):
        assert [block.type for block in message.content] == ["thinking"]
        assert message.stop_reason == "max_tokens"


def test_messages_take_thinking_back(local):
    redacted = {"type": "redacted_thinking", "data": "x"}
    whole, _, _ = messages(local)
    said = [redacted, *(block.to_dict() for block in whole.content)]
    dialog = [*QUESTION, {"role": "assistant", "content": said}, *QUESTION]
    messages(local, messages=dialog)
    turn = local.format.messages[1]
    assert (turn["reasoning_content"], turn["content"]) == (REASONING, "It rains.")
    call = {"type": "tool_use", "id": "c", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "1"}
    dialog[1]["content"] = [said[1], call]
    messages(local, messages=[*dialog[:2], {"role": "user", "content": [result]}])
    turn = local.format.messages[1]
    assert (turn["reasoning_content"], len(turn["tool_calls"])) == (REASONING, 1)


def test_messages_switch_and_bound_the_thinking(local):
    import anthropic

    messages(local, thinking={"type": "disabled"})
    assert local.format.seen.enable_thinking is False
    messages(local, thinking={"type": "enabled", "budget_tokens": 200})
    seen = local.format.seen
    assert (seen.enable_thinking, seen.thinking_budget) == (True, 200)
    effort: Any = {"effort": "low"}
    messages(local, thinking={"type": "adaptive"}, output_config=effort)
    seen = local.format.seen
    assert (seen.enable_thinking, seen.reasoning_effort) == (None, "low")
    with pytest.raises(anthropic.BadRequestError, match="budget_tokens=-1 must be a number"):
        messages(local, thinking={"type": "enabled", "budget_tokens": -1})


def chats(server: ReasoningServer, **body: Any) -> tuple[Any, list[Any]]:
    """Return a whole answer of Ollama's /api/chat, and the parts of a stream."""

    def connect(connection: Any) -> Any:
        return ollama.AsyncClient("http://localhost", transport=connection._transport)

    async def both(client: ollama.AsyncClient) -> tuple[Any, list[Any]]:
        common: Any = {"model": "tiny", "messages": QUESTION, **body}
        whole = await client.chat(**common)
        stream: Any = await client.chat(**common, stream=True)
        return whole, [part async for part in stream]

    return server.call(both, connect=connect)


def test_ollama_s_messages_have_their_thinking(server):
    whole, parts = chats(server, think=True)
    assert (whole.message.thinking, whole.message.content) == (REASONING, "It rains.")
    assert "".join(part.message.thinking or "" for part in parts) == REASONING
    assert "".join(part.message.content or "" for part in parts) == "It rains."


def test_ollama_s_messages_switch_the_thinking_and_take_it_back(local):
    whole, _ = chats(local, think=True)
    assert local.format.seen.enable_thinking is True
    chats(local, think="low", messages=[*QUESTION, whole.message, *QUESTION])
    assert local.format.seen.reasoning_effort == "low"
    assert local.format.messages[1]["reasoning_content"] == REASONING
    chats(local, think=False)
    assert local.format.seen.enable_thinking is False


def test_ollama_s_generate_and_show(server):
    async def ask(client: Any) -> tuple[Any, Any]:
        body = {"model": "tiny", "prompt": "How is it?", "stream": False}
        answer = await client.post("/api/generate", content=json.dumps(body))
        shown = await client.post("/api/show", content=json.dumps({"model": "tiny"}))
        return answer.json(), shown.json()

    def connect(connection: Any) -> Any:
        connection.base_url = "http://localhost"
        return connection

    answer, shown = server.call(ask, connect=connect)
    assert (answer["thinking"], answer["response"]) == (REASONING, "It rains.")
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
