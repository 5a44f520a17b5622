"""Unsupported fields: status 400, or dropped and named where the server is lenient.

The tests use the real routes, with a model that follows a script.
"""

import logging
from typing import Any

import httpx
import pytest

from helpers.scripted import ScriptedServer
from llama.prompts.fields import IMAGE_TEXT

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT, TOKENIZE = "/v1/messages", "/v1/messages/count_tokens", "/tokenize"
SAID: Any = [{"role": "user", "content": "How is it?"}]
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION: Any = {"name": "weather", "parameters": SCHEMA}
TOOL: Any = {"type": "function", "function": FUNCTION}
INPUT: Any = {"name": "weather", "input_schema": SCHEMA}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
FORM = {"type": "json_object"}

# Path, body with unsupported fields, their names, and the body without them.
CASES: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    (TEXT, {"prompt": "x", "suffix": "y", "topK": 1, "no": None}, "suffix, topK", {"prompt": "x"}),
    (TEXT, {"prompt": "x", "a\n\u20ac": 1}, "a\\n\\u20ac", {"prompt": "x"}),
    (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "x", "cache_control": {}}]},
                {**SAID[0], "audio": 1, "tool_calls": []},
            ],
            "tools": [{"type": "custom", "custom": {"name": "g"}}, {**TOOL, "x": 1}],
            "store": True,
            "reasoning_effort": "high",
        },
        "messages[1].audio, store, "
        "tools[0], tools[1].x",
        {"messages": [{"role": "system", "content": "x"}, *SAID], "tools": [TOOL]},
    ),
    (
        RESPONSES,
        {
            "input": [{"role": "user", "content": "How is it?", "color": "red"}],
            "tools": [{"type": "web_search"}, {"type": "function", **FUNCTION, "later": 1}],
            "previous_response_id": "resp_1",
            "truncation": "auto",
            "text": {"verbosity": "low", "tone": "kind"},
            "max_tool_calls": 3,
        },
        "input[0].color, max_tool_calls, previous_response_id, text.tone, tools[0], "
        "tools[1].later, truncation",
        {"input": "How is it?", "tools": [{"type": "function", **FUNCTION}]},
    ),
    (
        MESSAGES,
        {
            "messages": [{"role": "user", "content": [
                {"type": "text", "text": "How is it?", "citations": [{"a": 1}]}]}],
            "max_tokens": 300,
            "tools": [{**INPUT, "allowed_callers": ["code"]}, SEARCH],
            "container": "c",
            "n": 2,
        },
        "container, messages[0].content[0].citations, n, "
        "tools[0].allowed_callers, tools[1]",
        {"messages": SAID, "max_tokens": 300, "tools": [INPUT]},
    ),
    (
        CHAT,
        {"messages": [
            {"role": "system", "content": "x"},
            *SAID,
            {"role": "assistant", "content": "Fine."},
            {"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}},
                {"type": "text", "text": "And this?"},
                {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}]}]},
        "messages[3].content[0], messages[3].content[2]",
        {"messages": [
            {"role": "system", "content": "x"},
            *SAID,
            {"role": "assistant", "content": "Fine."},
            {"role": "user", "content": f"{IMAGE_TEXT}\nAnd this?\n{IMAGE_TEXT}"}]},
    ),
    (
        RESPONSES,
        {"input": [
            {"role": "user", "content": "How is it?"},
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": [
                {"type": "input_image", "image_url": "data:image/png;base64,iVBO"}]}]},
        "input[2].output[0]",
        {"input": [
            {"role": "user", "content": "How is it?"},
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": IMAGE_TEXT}]},
    ),
    (
        MESSAGES,
        {"max_tokens": 300, "messages": [
            *SAID,
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "a", "name": "weather", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [
                {"type": "text", "text": "see"},
                {"type": "image", "source": {"type": "base64", "data": "iVBO"}}]}],
                "color": "red"}]},
        "messages[2].color, messages[2].content[0].content[1]",
        {"max_tokens": 300, "messages": [
            *SAID,
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "a", "name": "weather", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": f"see\n{IMAGE_TEXT}"}]}]},
    ),
    (COUNT, {"messages": SAID, "max_tokens": 5}, "max_tokens", {"messages": SAID}),
    (TOKENIZE, {"prompt": "x", "Other": 7}, "Other", {"prompt": "x"}),
]  # fmt: skip

# Wrong values of supported fields stay errors; the lenient server does not hide them.
BAD: list[tuple[str, dict[str, Any], str]] = [
    (TEXT, {"prompt": "x", "temperature": -1, "topK": 1}, "temperature=-1"),
    (TEXT, {"topK": 1}, "prompt is needed"),
    (CHAT, {"messages": SAID, "tools": [7], "x": 1}, "tools[0] must be an object"),
    (CHAT, {"messages": SAID, "tools": [{"function": FUNCTION}]}, "tools[0].type is needed"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text alone"),
    (CHAT, {"messages": SAID, "tools": [TOOL], "tool_choice": "sometimes"}, "'none', 'auto'"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "a"}]}, "input[0] must be"),
    (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"},
     "there are no tools to call"),
    (MESSAGES, {"messages": SAID, "max_tokens": 5, "tools": [{"name": "f"}]}, "input_schema is"),
    (MESSAGES, {"messages": SAID, "max_tokens": 5, "stream": 1, "x": 1}, "stream must be"),
    (MESSAGES, {"messages": SAID, "max_tokens": 5, "thread": {"type": "create"}}, "no stored"),
]  # fmt: skip


@pytest.fixture(scope="module")
def scripted(llama_for_tools) -> ScriptedServer:
    server = ScriptedServer(llama_for_tools)
    server.says('It is fine. {"name": "weather", "parameters": {"city": "Bern"}}')
    return server


def ask(scripted: ScriptedServer, path: str, *bodies: Any, lenient: bool = True) -> list[Any]:
    async def work(client: httpx.AsyncClient) -> list[Any]:
        return [await client.post(f"http://localhost{path}", json=body) for body in bodies]

    return scripted.call(work, connect=lambda client: client, lenient=lenient)


def without_ids(found: Any) -> Any:
    """Return what is equal when an answer is repeated."""
    if isinstance(found, list):
        return [without_ids(each) for each in found]
    changes = (
        "id", "created", "created_at", "call_id", "cached_tokens", "prompt_tokens_details",
        "cache_read_input_tokens",
    )  # fmt: skip
    if isinstance(found, dict):
        if "cache_read_input_tokens" in found:  # Anthropic's counts: one of both is the prompt.
            cached = found["cache_read_input_tokens"]
            found = {**found, "input_tokens": found["input_tokens"] + cached}
        return {k: without_ids(v) for k, v in found.items() if k not in changes}
    return found


@pytest.mark.parametrize(("path", "body", "names", "plain"), CASES)
def test_what_cannot_be_honoured_is_left_out_and_named(scripted, caplog, path, body, names, plain):
    (refused,) = ask(scripted, path, body, lenient=False)
    assert refused.status_code == 400 and "x-ignored-fields" not in refused.headers
    assert "a server that is started with --lenient ignores such fields" in refused.text
    caplog.set_level(logging.INFO, "llama.server")
    found, wanted = ask(scripted, path, body, plain)
    assert found.status_code == wanted.status_code == 200, found.text
    assert found.headers["x-ignored-fields"] == names
    assert "x-ignored-fields" not in wanted.headers
    lines = [line for line in caplog.messages if "X-Ignored-Fields" in line]
    assert lines == [f"{found.headers['x-request-id']}: X-Ignored-Fields: {names}"]
    # fields of the request that the response repeats
    kept = ("tools", "text") if path == RESPONSES else ()
    answers = [{k: v for k, v in each.json().items() if k not in kept} for each in (found, wanted)]
    assert without_ids(answers[0]) == without_ids(answers[1])
    if path in (CHAT, TEXT, RESPONSES, MESSAGES):
        (found,) = ask(scripted, path, {**body, "stream": True})
        assert found.headers["content-type"].startswith("text/event-stream")
        assert found.headers["x-ignored-fields"] == names and found.text.count("data: ") > 1


@pytest.mark.parametrize(("path", "body", "words"), BAD)
def test_a_bad_value_of_a_field_that_is_honoured_stays_an_error(scripted, path, body, words):
    (refused,) = ask(scripted, path, body, lenient=False)
    has_hint = "--lenient" in refused.text
    assert refused.status_code == 400 and not (has_hint and words in refused.text)
    (found,) = ask(scripted, path, body)
    assert found.status_code == 400 and words in found.json()["error"]["message"], found.text
    assert "x-ignored-fields" not in found.headers


@pytest.mark.parametrize("images", [["iVBO"], ["iVBO", "/9j/"]])
def test_later_images_of_ollamas_chats_become_texts(scripted, images):
    asked = {"role": "user", "content": "And this?"}
    plain = {**asked, "content": "\n".join([asked["content"], *[IMAGE_TEXT] * len(images)])}
    bodies = [
        {"stream": False, "messages": [*SAID, {"role": "assistant", "content": "a"}, message]}
        for message in ({**asked, "images": images}, plain)
    ]
    first = {"stream": False, "messages": [{**asked, "images": images}]}
    found, wanted, refused = ask(scripted, "/api/chat", *bodies, first)
    assert found.headers["x-ignored-fields"] == "messages[2].images"
    counts = [each.json()["prompt_eval_count"] for each in (found, wanted)]
    assert found.json()["message"] == wanted.json()["message"] and counts[0] == counts[1]
    assert refused.status_code == 400 and "images" in refused.json()["error"]


def test_an_image_of_the_first_question_stays_an_error(scripted):
    """Its answer would be about nothing."""
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}
    system = {"role": "system", "content": "x"}
    for content in ([part], [{"type": "text", "text": "What is it?"}, part]):
        messages = [system, {"role": "user", "content": content}]
        (found,) = ask(scripted, CHAT, {"messages": messages})
        assert found.status_code == 400 and "text alone" in found.text
        (found,) = ask(scripted, TOKENIZE, {"messages": [*messages[:1], *SAID, messages[1]]})
        assert found.status_code == 200


def test_the_header_is_short(scripted):
    """The header is bounded, however many names there are, and however long."""
    body = {"prompt": "x"} | {f"{i:02}{'y' * 5000}": i for i in range(40)}
    (found,) = ask(scripted, TEXT, body)
    names = found.headers["x-ignored-fields"].split(", ")
    assert len(names) == 17 and names[-1] == "..." and {len(each) for each in names[:-1]} == {100}
    (found,) = ask(scripted, TEXT, {"prompt": "x"} | {f"n{i}": 1 for i in range(16)})
    assert found.headers["x-ignored-fields"].count(",") == 15
