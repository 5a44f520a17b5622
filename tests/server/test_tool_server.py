"""Tool calls through the real routes, with OpenAI's own client and a model that follows a script.

The checkpoint, the engine and the app are real; only the sampled ids come from a script.
"""

import asyncio
import contextlib
import functools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from helpers.scripted import ScriptedServer
from llama.prompts import ToolFormat, encode_chat

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
SEARCH: Any = {"type": "function", "function": {"name": "brave_search"}}
CODE: Any = {"type": "function", "function": {"name": "code_interpreter"}}
QUESTION: Any = [{"role": "user", "content": "How is it in Zürich?"}]
CALL = '{"name": "weather", "parameters": {"city": "Zürich 🌧"}}'
ZURICH = {"city": "Zürich 🌧"}


class ChatServer(ScriptedServer):
    def chat(self, tool_format: ToolFormat | None = None, **body: Any) -> Any:
        """Return the whole answer, after checking that the chunks of a stream join to it."""
        return self.chats(tool_format, [body])[0]

    def chats(self, tool_format: ToolFormat | None, bodies: list[dict[str, Any]]) -> list[Any]:
        """Return the answers of several requests that run at once, checked in the same way."""

        async def both(client: openai.AsyncOpenAI, **body: Any) -> tuple[Any, list[Any]]:
            async def chunks() -> list[Any]:
                stream = await client.chat.completions.create(**body, stream=True)
                return [chunk async for chunk in stream]

            return await asyncio.gather(client.chat.completions.create(**body), chunks())

        async def all_of_them(client: openai.AsyncOpenAI) -> list[Any]:
            common: Any = {"model": "tiny", "messages": QUESTION, "tools": [WEATHER]}
            return await asyncio.gather(*(both(client, **common | body) for body in bodies))

        answers = self.call(all_of_them, tool_format)
        for whole, chunks in answers:
            for choice in whole.choices:
                parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
                check_stream(choice, parts)
        return [whole for whole, _ in answers]


def check_stream(choice: Any, parts: list[Any]) -> None:
    reasons = [part.finish_reason for part in parts]
    assert reasons == [None] * (len(parts) - 1) + [choice.finish_reason]
    content = "".join(part.delta.content or "" for part in parts)
    assert content == (choice.message.content or "")
    calls: dict[int, Any] = {}
    for call in [call for part in parts for call in part.delta.tool_calls or []]:
        if call.index not in calls:
            assert call.id and call.type == "function" and call.function.arguments == ""
            calls[call.index] = [call.id, call.function.name, ""]
        else:
            assert call.id is call.type is call.function.name is None
            calls[call.index][2] += call.function.arguments
    assert list(calls) == list(range(len(calls)))
    # The ids of a response are unique.
    wanted = [[c.function.name, c.function.arguments] for c in choice.message.tool_calls or []]
    assert [each[1:] for each in calls.values()] == wanted


@pytest.fixture(scope="module")
def server(llama_for_tools, apis_of_tools) -> Iterator[ChatServer]:
    with contextlib.closing(ChatServer(llama_for_tools, apis_of_tools)) as made:
        yield made


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    found = choice.message.tool_calls or []
    return [(call.function.name, json.loads(call.function.arguments)) for call in found]


def test_a_call_and_the_words_before_it(server):
    server.says(f"I will look. {CALL}")
    (choice,) = server.chat().choices
    assert (choice.message.content, choice.finish_reason) == ("I will look. ", "tool_calls")
    assert calls_of(choice) == [("weather", ZURICH)]
    server.says(CALL)
    answer = server.chat(n=2, temperature=0.5)
    assert [calls_of(choice) for choice in answer.choices] == [[("weather", ZURICH)]] * 2
    assert answer.choices[0].message.content is None
    ids = {choice.message.tool_calls[0].id for choice in answer.choices}
    assert len(ids) == 2


def test_several_python_calls(server):
    server.says("[weather(city='Zürich 🌧'), weather(city=\"Bern\")]")
    answer = server.chat(ToolFormat.LLAMA_3_2)
    (choice,) = answer.choices
    assert calls_of(choice) == [("weather", ZURICH), ("weather", {"city": "Bern"})]
    ids = encode_chat(server.llama.tokenizer, QUESTION, [WEATHER], tool_format=ToolFormat.LLAMA_3_2)
    assert answer.usage.prompt_tokens == len(ids)
    (choice,) = server.chat(ToolFormat.LLAMA_3_2, parallel_tool_calls=False).choices
    assert calls_of(choice) == [("weather", ZURICH)]


def test_code_after_its_token(server):
    """Code follows its special token.

    The token is not text, so its id marks the code; eom_id ends the answer.
    """
    server.says("<|python_tag|>print('ü')<|eom_id|>")
    (choice,) = server.chat(tools=[WEATHER, CODE]).choices
    assert calls_of(choice) == [("code_interpreter", {"code": "print('ü')"})]
    assert choice.finish_reason == "tool_calls"
    (choice,) = server.chat().choices
    assert (choice.message.content, choice.finish_reason) == ("print('ü')", "stop")
    (choice,) = server.chat(extra_body={"skip_special_tokens": False}).choices
    assert choice.message.content == "<|python_tag|>print('ü')"


def test_words_and_calls_that_are_cut_off(server):
    server.says('It is {"name": "sunny"}.')
    (choice,) = server.chat().choices
    assert (choice.message.content, choice.finish_reason) == ('It is {"name": "sunny"}.', "stop")
    assert choice.message.tool_calls is None
    server.says(CALL)
    (choice,) = server.chat(tool_choice="none").choices
    assert (choice.message.content, choice.message.tool_calls) == (CALL, None)
    (choice,) = server.chat(max_tokens=45).choices
    assert choice.finish_reason == "length"
    arguments = choice.message.tool_calls[0].function.arguments
    assert json.dumps(ZURICH, ensure_ascii=False).startswith(arguments) and arguments


@pytest.mark.parametrize(
    ("tools", "text", "count"),
    [
        ([WEATHER], CALL, 45),
        ([WEATHER, SEARCH], '<|python_tag|>brave_search.call(query="Züri")', 27),
    ],
)
def test_a_call_that_was_cut_off_goes_back_in_as_its_text(server, tools, text, count):
    """A truncated call is sent back as its text.

    The prompt of the next turn has the tokens of the answer, as far as they came.
    """
    server.says(text)
    (choice,) = server.chat(max_tokens=count, tools=tools).choices
    assert choice.message.tool_calls and choice.finish_reason == "length"
    with pytest.raises(ValueError, match="Unterminated string"):
        json.loads(choice.message.tool_calls[0].function.arguments)
    dialog = [*QUESTION, choice.message.model_dump(exclude_none=True)]

    async def prompt_of(messages: Any, client: openai.AsyncOpenAI) -> Any:
        body = {"messages": messages, "tools": tools}
        return await client.post("http://localhost/tokenize", body=body, cast_to=object)

    before, after = (
        server.call(functools.partial(prompt_of, messages))["tokens"]
        for messages in (QUESTION, [*dialog, {"role": "user", "content": "Go on."}])
    )
    assert after[: len(before) + count] == before + server.script.ids[:count]
    assert after[len(before) + count] == server.llama.tokenizer.eot_id
    whole = server.chat(messages=dialog, tools=tools)  # the chat route accepts it
    assert whole.usage.prompt_tokens > len(before) + count


@pytest.mark.parametrize(
    ("calls", "wanted"),
    [
        (['{"city": "Zü'], '[weather(**{"city": "Zü<|eot_id|>'),
        (['{"city": "B"}', "{"], '[weather(city="B"), weather(**{<|eot_id|>'),
        (['{"city": "B"}', "{}"], '[weather(city="B"), weather()]<|eot_id|>'),
    ],
)
def test_a_python_call_that_was_cut_off_goes_back_in(llama_for_tools, calls, wanted):
    tokenizer = llama_for_tools.tokenizer
    given = [{"function": {"name": "weather", "arguments": each}} for each in calls]
    dialog = [*QUESTION, {"role": "assistant", "tool_calls": given}]
    ids = encode_chat(
        tokenizer,
        dialog,
        [WEATHER],
        tool_format=ToolFormat.LLAMA_3_2,
        add_generation_prompt=False,
    )
    assert tokenizer.decode(ids).endswith(f"<|end_header_id|>\n\n{wanted}")


def test_the_dialog_goes_back_in(server):
    """The dialog is sent back by the client.

    With the client's own message, its calls and their results, the ids are those of the format, and
    /tokenize agrees with the chat.
    """
    server.says(CALL)
    first = server.chat()
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "22 °C"}
    dialog = [*QUESTION, message.model_dump(exclude_none=True), result]
    wanted = encode_chat(server.llama.tokenizer, dialog, [WEATHER])
    server.says("It is warm.")
    second = server.chat(messages=dialog)
    assert second.choices[0].message.content == "It is warm."
    assert second.usage.prompt_tokens == len(wanted)

    async def tokenize(client: openai.AsyncOpenAI) -> Any:
        body = {"messages": dialog, "tools": [WEATHER]}
        return await client.post("http://localhost/tokenize", body=body, cast_to=object)

    assert server.call(tokenize)["tokens"] == wanted
    none = server.chat(tool_choice="none").usage.prompt_tokens
    assert none == len(encode_chat(server.llama.tokenizer, QUESTION))


FORECAST: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Zürich", "Bern"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "wind": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("tool_format", [None, ToolFormat.LLAMA_3_2])
def test_a_forced_call_fits_its_schema_whatever_the_weights(server, tool_format):
    """A forced call fits its schema whatever the weights.

    With random weights there is a call where one is required; where `strict` applies, it is a valid
    call or plain text.
    """
    function = {"name": "forecast", "parameters": FORECAST}
    tools = [{"type": "function", "function": function}, WEATHER]
    strict = [{"type": "function", "function": {**function, "strict": True}}]
    named = {"type": "function", "function": {"name": "forecast"}}
    bodies = [
        {"seed": seed, "max_tokens": 150, **asked}
        for seed in range(3)
        for asked in (
            {"tools": tools, "tool_choice": named},
            {"tools": tools, "tool_choice": "required"},
            {"tools": strict},
        )
    ]
    with server.random_model():
        answers = [answer.choices[0] for answer in server.chats(tool_format, bodies)]
    for one, any_ in zip(answers[::3], answers[1::3], strict=True):
        assert [name for name, _ in calls_of(one)] == ["forecast"]
        assert (one.message.content, one.finish_reason) == (None, "tool_calls")
        assert any_.message.tool_calls
        assert any_.message.content is None or any_.finish_reason == "length"
    for choice in answers:
        if choice.finish_reason == "tool_calls":
            for name, arguments in calls_of(choice):
                jsonschema.validate(arguments, FORECAST if name == "forecast" else SCHEMA)
