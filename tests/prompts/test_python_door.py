"""Tools, content parts and response formats of `Llama.chat_completion` give the server's answers.

The checkpoint and the engine are real; only the sampled ids come from a script.
"""

import json
from typing import Any

import jsonschema
import openai
import pytest

from helpers.scripted import ScriptedServer
from llama import Llama
from llama.generation import ChatPrediction, TextDelta
from llama.prompts import encode_chat

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CODE: Any = {"type": "function", "function": {"name": "code_interpreter"}}
QUESTION: Any = [{"role": "user", "content": "How is it in Zürich?"}]
CALL = '{"name": "weather", "parameters": {"city": "Zürich 🌧"}}'


@pytest.fixture(scope="module")
def server(make_checkpoint) -> ScriptedServer:
    folder, _, _ = make_checkpoint(use_scaled_rope=True)
    return ScriptedServer(
        Llama.build(str(folder), max_seq_len=2048, max_batch_size=4, device="cpu")
    )


def served(server: ScriptedServer, **body: Any) -> Any:
    async def ask(client: openai.AsyncOpenAI) -> Any:
        return await client.chat.completions.create(model="tiny", **body)

    return server.call(ask).choices[0]


def asked(llama: Llama, dialog: Any, **options: Any) -> ChatPrediction:
    """Return the answer, after checking that the stream joins to it."""
    (answer,) = llama.chat_completion([dialog], **options)
    deltas = list(llama.stream_chat([dialog], **options))
    message: Any = answer["generation"]
    assert "".join(delta.text for delta in deltas) == (message["content"] or "")
    calls: dict[int, Any] = {}
    for part in [part for delta in deltas for part in delta.tool_calls]:
        if "id" in part:
            calls[part["index"]] = [part["id"], part["function"]["name"], ""]
        calls[part["index"]][2] += part["function"]["arguments"]
    wanted = [
        [call["id"], call["function"]["name"], call["function"]["arguments"]]
        for call in message.get("tool_calls", [])
    ]
    assert list(calls.values()) == wanted
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    return answer


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f"I will look. {CALL}",
        "It is sunny.",
        "<|python_tag|>print('ü')<|eom_id|>",
        '[weather(city="Bern"), weather(city="Basel")] Well.',
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {"tools": [WEATHER]},
        {"tools": [WEATHER, CODE]},
        {"tools": [WEATHER], "parallel_tool_calls": False},
        {"tools": [WEATHER], "tool_choice": "none"},
        {},
    ],
)
def test_an_answer_is_the_servers(server, text, options):
    server.says(text)
    choice = served(server, messages=QUESTION, **options)
    message: Any = asked(server.llama, QUESTION, **options)["generation"]
    calls = [
        (call.function.name, call.function.arguments) for call in choice.message.tool_calls or []
    ]
    found = message.get("tool_calls", [])
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in found] == calls
    if options.get("tools") and options.get("tool_choice") != "none":
        assert message["content"] == choice.message.content
        (last,) = [d for d in server.llama.stream_chat([QUESTION], **options) if d.finish_reason]
        assert last.finish_reason == choice.finish_reason
    else:  # Meta's calls show the special tokens
        special = text.startswith("<|python_tag|>")
        assert message == {
            "role": "assistant",
            "content": "<|python_tag|>" * special + choice.message.content,
        }


def test_a_dialog_goes_on_with_the_results(server):
    """A dialog continues with the results.

    The answer's own message is sent back, with the result of its call, in parts or as JSON.
    """
    server.says(CALL)
    message = asked(server.llama, QUESTION, tools=[WEATHER])["generation"]
    call: Any = message["tool_calls"][0]
    part = {"type": "text", "text": "22 °C"}
    for content in ("22 °C", [part], {"warm": True}):
        result = {"role": "tool", "tool_call_id": call["id"], "content": content}
        parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
        server.says("It is warm.")
        prompts: list[list[int]] = []
        prepare = server.llama.llm_engine.prepare

        def seen(name: str, prompt: Any, params: Any, **options: Any) -> Any:
            prompts.append(prompt)  # noqa: B023
            return prepare(name, prompt, params, **options)  # noqa: B023

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.llama.llm_engine, "prepare", seen)
            answer = asked(server.llama, [*parts, message, result], tools=[WEATHER])
        assert answer["generation"] == {"role": "assistant", "content": "It is warm."}
        wanted = encode_chat(server.llama.tokenizer, [*QUESTION, message, result], [WEATHER])
        assert prompts == [wanted] * 2


def test_a_forced_call_and_a_response_format_hold_whatever_the_weights(server):
    named = {"type": "function", "function": {"name": "weather"}}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    with server.random_model():
        for choice in ("required", named):
            options: Any = {
                "tools": [WEATHER],
                "tool_choice": choice,
                "max_gen_len": 150,
                "seed": 3,
            }
            answer: Any = asked(server.llama, QUESTION, **options)["generation"]
            assert [c["function"]["name"] for c in answer["tool_calls"]] == ["weather"]
        (answer,) = server.llama.chat_completion(
            [QUESTION], max_gen_len=200, response_format=form, seed=4
        )
        text = answer["generation"]["content"]
        deltas = list(
            server.llama.stream_chat([QUESTION], max_gen_len=200, response_format=form, seed=4)
        )
        assert "".join(delta.text for delta in deltas) == text
        if deltas[-1].finish_reason == "stop":
            jsonschema.validate(json.loads(text), SCHEMA)
        assert text.startswith("{")


def test_logprobs_come_with_calls(server):
    server.says(CALL)
    (answer,) = server.llama.chat_completion([QUESTION], tools=[WEATHER])
    assert list(answer) == ["generation"]
    with server.random_model():
        (answer,) = server.llama.chat_completion(
            [QUESTION], max_gen_len=5, tools=[WEATHER], logprobs=True
        )
    assert len(answer["tokens"]) == len(answer["logprobs"]) > 0


BAD: list[tuple[Any, dict[str, Any], str]] = [
    ([QUESTION, [*QUESTION, {"role": "king", "content": "x"}]], {},
     "dialog 1, message 1.role must be one of"),
    ([QUESTION, [7]], {}, "dialog 1, message 0 must be an object, got a number"),
    ([[{"role": "user", "content": [{"type": "image_url"}]}]], {},
     r"dialog 0, message 0: content\[0\] is an image, and the model reads text alone"),
    ([[{"role": "user", "content": "x", "a": 1}]], {}, r"message 0 has unknown keys \['a'\]"),
    ([[{"role": "assistant", "tool_calls": [{"function": {}}]}]], {}, "a tool call must be"),
    ([QUESTION], {"tools": 7}, "tools must be a list"),
    ([QUESTION], {"tools": [{"type": "function", "function": {"name": "a b"}}]},
     r"tools\[0\].function.name must be 1 to 128"),
    ([QUESTION], {"tools": [WEATHER, WEATHER]}, r"tools\[1\] has the name 'weather'"),
    ([QUESTION], {"tools": [WEATHER], "tool_choice": "any"}, "tool_choice must be 'none', 'auto'"),
    ([QUESTION], {"tool_choice": "required"}, "there are no tools to call"),
    ([QUESTION], {"tools": [WEATHER], "parallel_tool_calls": 1}, "parallel_tool_calls must be"),
    ([[{"role": "system", "content": "x"}]], {"tools": [WEATHER]}, "a first message of the user"),
    ([QUESTION], {"response_format": "json"}, "response_format.* must have the type"),
    ([QUESTION], {"response_format": {"type": "json_schema"}}, "an object with a schema"),
    ([QUESTION], {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
     "response_format.json_schema.schema=3"),
]  # fmt: skip


@pytest.mark.parametrize(("dialogs", "options", "message"), BAD)
def test_an_error_names_the_place_before_any_work(server, dialogs, options, message):
    steps = server.llama.engine.stats.steps
    for ask in (server.llama.chat_completion, server.llama.stream_chat):
        with pytest.raises((TypeError, ValueError), match=message):
            ask(dialogs, **options)
    assert server.llama.engine.stats.steps == steps


def test_a_model_without_tools_says_so(demo):
    assert not demo.dialog_format.has_tools
    with pytest.raises(ValueError, match="tools cannot be used with this model"):
        demo.chat_completion([QUESTION], tools=[WEATHER])


def test_a_delta_without_tools_is_as_before():
    assert TextDelta(0, "x", None) == TextDelta(0, "x", None, ())
