"""Ollama's API, with Ollama's own client where it is installed.

Most tests use real sockets and the demo model; tool calls use the real app with a scripted model.
"""

import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import httpx
import pytest

from helpers.scripted import ScriptedServer
from helpers.web import web
from llama.prompts import encode_chat
from llama.server.blocks import Block
from llama.server.ollama import models
from llama.server.ollama.answers import _is_complete_call
from llama.server.ollama.catalog import _abbreviated, _num_parameters, tagged
from llama.server.ollama.models import ChatBody

STORY: Any = [{"role": "user", "content": "Tell me a story about a cat"}]
GREEDY: Any = {"temperature": 0, "num_predict": 30}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
QUESTION: Any = [{"role": "user", "content": "How is it in Zürich?"}]
ZURICH = {"city": "Zürich 🌧"}
CALL = '{"name": "weather", "parameters": {"city": "Zürich 🌧"}}'
USAGE = ("prompt_eval_count", "eval_count", "done_reason")
PATHS = ("/api/chat", "/api/generate")


def post(server: Any, path: str, body: dict[str, Any]) -> httpx.Response:
    return web.post(server.url + path, json={"model": "demo", "stream": False, **body})


def lines(server: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of a stream, which is the default of this API."""
    answer = web.post(server.url + path, json={"model": "demo", **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def openai_chat(server: Any, **body: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_tokens": 30}
    answer = web.post(f"{server.url}/v1/chat/completions", json=sampling | body).json()
    return {**answer["choices"][0], "usage": answer["usage"]}


def test_a_chat_is_the_answer_of_the_other_apis(server):
    body = {"messages": STORY, "options": GREEDY}
    wanted = openai_chat(server, messages=STORY)
    whole = post(server, "/api/chat", body).json()
    assert whole["message"] == {"role": "assistant", "content": wanted["message"]["content"]}
    assert whole["prompt_eval_count"] == wanted["usage"]["prompt_tokens"]
    assert whole["eval_count"] == wanted["usage"]["completion_tokens"] == 30
    assert (whole["model"], whole["done"], whole["done_reason"]) == ("demo", True, "length")
    assert whole["total_duration"] == whole["prompt_eval_duration"] + whole["eval_duration"]
    assert whole["eval_duration"] > 0 and whole["load_duration"] == 0
    *parts, last = lines(server, "/api/chat", body)
    assert len(parts) > 2 and not any(part["done"] for part in parts)
    assert "".join(part["message"]["content"] for part in parts) == whole["message"]["content"]
    assert last["done"] and {key: last[key] for key in USAGE} == {key: whole[key] for key in USAGE}


def test_generate_is_a_chat_of_one_question_or_a_text(server):
    prompt = STORY[0]["content"]
    system = {"role": "system", "content": "You are brief."}
    body = {"prompt": prompt, "system": system["content"], "options": GREEDY}
    wanted = openai_chat(server, messages=[system, *STORY])
    whole = post(server, "/api/generate", body).json()
    assert whole["response"] == wanted["message"]["content"]
    parts = lines(server, "/api/generate", body)
    assert "".join(part["response"] for part in parts) == whole["response"]
    text = {"prompt": prompt, "temperature": 0, "max_tokens": 30}
    continued = web.post(f"{server.url}/v1/completions", json=text).json()["choices"][0]["text"]
    for raw in ({"raw": True}, {"template": "{{ .Prompt }}"}):
        found = post(server, "/api/generate", {"prompt": prompt, "options": GREEDY, **raw}).json()
        assert found["response"] == continued
    # No text of a request becomes a special token.
    special = post(server, "/api/generate", {"prompt": "<|eot_id|>", "raw": True}).json()
    assert special["prompt_eval_count"] > 2


def test_options_are_those_of_the_other_apis(server):
    """Each option has its effect, and Ollama's defaults are those of its documentation."""
    options = {
        "temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "seed": 7, "stop": [" the "],
        "repeat_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4,
        "repeat_last_n": -1, "num_predict": 40, "num_gpu": 1, "num_thread": 8, "use_mmap": True,
        "num_keep": 5, "num_batch": 512, "mirostat": 0, "typical_p": 1.0, "num_ctx": 300,
    }  # fmt: skip
    same = ("temperature", "top_k", "top_p", "min_p", "seed", "stop")
    sampling: dict[str, Any] = {key: options[key] for key in same}
    penalties = {"presence_penalty": 0.3, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
    wanted = openai_chat(server, messages=STORY, max_tokens=40, **sampling, **penalties)
    found = post(server, "/api/chat", {"messages": STORY, "options": options, "keep_alive": "5m"})
    assert found.json()["message"]["content"] == wanted["message"]["content"]
    off = {**options, "repeat_last_n": 0}
    wanted = openai_chat(server, messages=STORY, max_tokens=40, **sampling)
    found = post(server, "/api/chat", {"messages": STORY, "options": off, "think": False})
    assert found.json()["message"]["content"] == wanted["message"]["content"]
    sampling = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 3}
    wanted = openai_chat(server, messages=STORY, max_tokens=25, **sampling)
    found = post(
        server,
        "/api/chat",
        {"messages": STORY, "options": {"seed": 3, "num_predict": 25, "repeat_last_n": 64}},
    )
    assert found.json()["message"]["content"] == wanted["message"]["content"]
    for free in (-1, -2, 0):
        body = {"messages": STORY, "options": {"num_predict": free, "num_ctx": 60, "seed": -1}}
        found = post(server, "/api/chat", body).json()
        total = found["prompt_eval_count"] + found["eval_count"]
        assert total == 60 or found["done_reason"] == "stop"


def test_a_prompt_is_never_cut(server):
    """A prompt beyond the context, or beyond num_ctx, is an error; a larger num_ctx is not."""
    long = [{"role": "user", "content": "word " * 1000}]
    for path, field in (
        ("/api/chat", {"messages": long}),
        ("/api/generate", {"prompt": "x " * 999}),
    ):
        for raw in ({}, {"raw": True})[: 1 + (path == "/api/generate")]:
            found = post(server, path, {**field, **raw})
            assert found.status_code == 400 and found.json().keys() == {"error"}
            assert "the context 512: shorten the dialog" in found.json()["error"]
    short: Any = {"messages": STORY, "options": {"num_ctx": 8}}
    found = post(server, "/api/chat", short)
    assert found.status_code == 400 and "the context 8:" in found.json()["error"]
    text: Any = {"prompt": STORY[0]["content"], "raw": True, "options": {"num_ctx": 3}}
    assert "the context 3:" in post(server, "/api/generate", text).json()["error"]
    body = {"messages": STORY, "options": {**GREEDY, "num_ctx": 8192}}
    wanted = openai_chat(server, messages=STORY)["message"]["content"]
    assert post(server, "/api/chat", body).json()["message"]["content"] == wanted


def test_a_last_message_of_the_assistant_is_continued(server):
    dialog = [*STORY, {"role": "assistant", "content": "There was "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    wanted = openai_chat(server, messages=dialog, **options)["message"]["content"]
    body = {"messages": dialog, "options": GREEDY}
    assert post(server, "/api/chat", body).json()["message"]["content"] == wanted
    assert "format cannot" in post(server, "/api/chat", {**body, "format": "json"}).json()["error"]


@pytest.mark.parametrize("path", PATHS)
def test_a_format_constrains_the_answer(server, path):
    asked: Any = {"messages": STORY} if path == "/api/chat" else {"prompt": "Which city?"}
    numbers = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"],
               "additionalProperties": False}  # fmt: skip
    found = post(server, path, {**asked, "format": numbers, "options": {"seed": 1}}).json()
    text = found["message"]["content"] if path == "/api/chat" else found["response"]
    assert json.loads(text) == {"n": 7} and found["done_reason"] == "stop"
    text = "".join(
        part["message"]["content"] if path == "/api/chat" else part["response"]
        for part in lines(server, path, {**asked, "format": "json", "options": GREEDY})
    )
    assert text.lstrip().startswith("{")


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/api/chat", {"messages": STORY, "options": {"temperature": -1}}, "options.temperature=-1"),
    ("/api/chat", {"messages": STORY, "options": {"num_ctx": 0}}, "options.num_ctx=0"),
    ("/api/chat", {"messages": STORY, "options": {"topk": 1}}, "'topk' cannot be used"),
    ("/api/chat", {"messages": STORY, "options": {"mirostat": 2}}, "options.mirostat"),
    ("/api/chat", {"messages": STORY, "options": {"repeat_last_n": 64, "repeat_penalty": 1.1}},
     "options.repeat_last_n must be -1 or 0"),
    ("/api/chat", {"messages": STORY, "max_tokens": 5}, "'max_tokens' cannot be used in /api/chat"),
    ("/api/chat", {"messages": STORY, "think": True}, "does not support thinking"),
    ("/api/chat", {"messages": STORY, "think": "high"}, "does not support thinking"),
    ("/api/chat", {"messages": STORY, "format": "xml"}, "format must be 'json' or a JSON schema"),
    ("/api/chat", {"messages": STORY, "format": {"type": 7}}, "format"),
    ("/api/chat", {"messages": [{**STORY[0], "images": ["aGk="]}]}, "the model reads text alone"),
    ("/api/chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ("/api/chat", {"messages": [{**STORY[0], "tool_calls": [{"function": {
        "name": "f", "arguments": {}}}]}]}, "need the role assistant"),
    ("/api/chat", {"messages": STORY, "tools": [WEATHER]}, "tools cannot be used with this model"),
    ("/api/generate", {"prompt": "x", "images": ["aGk="]}, "the model reads text alone"),
    ("/api/generate", {"prompt": "x", "suffix": "y"}, "does not support insertion"),
    ("/api/generate", {"prompt": "x", "context": [1, 2]}, "send the dialog to /api/chat"),
    ("/api/generate", {"prompt": "x", "template": "{{ .System }}"}, "template: the model's own"),
    ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, "system cannot be used with"),
    ("/api/chat", {"model": "m" * 1025, "messages": STORY}, "model must have at most 1024"),
    ("/api/generate", {"prompt": 7}, "prompt must be a string"),
    ("/api/show", {"model": None}, "model is needed"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "words"), BAD)
def test_what_cannot_be_honoured_is_an_error(server, path, body, words):
    common = {} if path == "/api/show" else {"model": "demo"}
    found = web.post(server.url + path, json={**common, **body})
    assert found.status_code == 400 and found.json().keys() == {"error"}, found.text
    assert words in found.json()["error"]


def test_what_would_change_the_models_is_refused(server):
    """Each route of Ollama that this server lacks says why, before it reads a body."""
    for method, path, words in [
        ("POST", "pull", "llama download"),
        ("POST", "push", "cannot be published"),
        ("POST", "create", "start it with another one"),
        ("POST", "copy", "--served_model_name"),
        ("DELETE", "delete", "cannot be deleted"),
        ("POST", "blobs/sha256:00", "start it with another one"),
    ]:
        found = web.request(method, f"{server.url}/api/{path}", json={"model": "x"})
        assert (found.status_code, found.json().keys()) == (501, {"error"}), path
        assert words in found.json()["error"]
    assert web.post(f"{server.url}/api/nowhere", json={}).json().keys() == {"error"}
    assert web.head(server.url).status_code == 200


def test_the_model_is_described(server, demo):
    (entry,) = web.get(f"{server.url}/api/tags").json()["models"]
    params = demo.model.params
    count = sum(weight.numel() for weight in demo.model.parameters())
    assert _num_parameters(params) == count
    assert entry["name"] == entry["model"] == "demo:latest"
    assert entry["size"] == 4 * count and len(entry["digest"]) == 64
    assert entry["details"]["quantization_level"] == "F32"
    (running,) = web.get(f"{server.url}/api/ps").json()["models"]
    assert running["context_length"] == 512 and running["size_vram"] == 0
    assert running["digest"] == entry["digest"] and running["details"] == entry["details"]
    for name in ({"model": entry["model"]}, {"name": "demo"}):
        shown = web.post(f"{server.url}/api/show", json=name).json()
        assert shown["model_info"]["llama.context_length"] == 512
        assert shown["model_info"]["general.parameter_count"] == count
        assert shown["capabilities"] == ["completion"] and shown["details"] == entry["details"]
    other = web.post(f"{server.url}/api/show", json={"model": "mistral"})
    assert other.status_code == 404 and "this server has 'demo'" in other.json()["error"]
    version = web.get(f"{server.url}/api/version").json()["version"]
    assert [part.isdecimal() for part in version.split(".")] == [True] * 3
    assert (tagged("a/b:7"), tagged("h:1/b")) == ("a/b:7", "h:1/b:latest")
    assert [_abbreviated(n) for n in (999, 8_030_261_248)] == ["999", "8.0B"]


def test_loading_needs_no_answer(server):
    """Without messages or a prompt a request only loads the model, or unloads it in Ollama."""
    loaded = post(server, "/api/chat", {"messages": []}).json()
    assert loaded["message"] == {"role": "assistant", "content": ""}
    assert (loaded["done"], loaded["done_reason"]) == (True, "load")
    unloaded = post(server, "/api/generate", {"keep_alive": 0, "stream": True}).json()
    assert (unloaded["response"], unloaded["done_reason"]) == ("", "unload")


@pytest.fixture(scope="module")
def scripted(llama_for_tools) -> ScriptedServer:
    return ScriptedServer(llama_for_tools)


def ask(scripted: ScriptedServer, **body: Any) -> Any:
    async def work(client: httpx.AsyncClient) -> Any:
        answer = await client.post("http://localhost/api/chat", json=body)
        assert answer.status_code == 200, answer.text
        return [json.loads(line) for line in answer.text.splitlines()]

    return scripted.call(work, connect=lambda client: client)


def functions(message: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = message.get("tool_calls", [])
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def test_a_call_is_one_line(scripted):
    scripted.says(f"I will look. {CALL}")
    body: Any = {"messages": QUESTION, "tools": [WEATHER]}
    (whole,) = ask(scripted, **body, stream=False)
    assert whole["message"]["content"] == "I will look. "
    assert functions(whole["message"]) == [("weather", ZURICH)]
    assert (whole["done"], whole["done_reason"]) == (True, "stop")
    *parts, last = ask(scripted, **body)
    assert "".join(part["message"]["content"] for part in parts) == "I will look. "
    with_calls = [part["message"] for part in parts if "tool_calls" in part["message"]]
    assert [functions(message) for message in with_calls] == [[("weather", ZURICH)]]
    assert last["done_reason"] == "stop" and "tool_calls" not in last["message"]
    # A client could not see that arguments were cut off.
    (cut,) = ask(scripted, **body, stream=False, options={"num_predict": 45})
    assert functions(cut["message"]) == [] and cut["done_reason"] == "length"
    whole_call = Block(0, call_id="call_1", name="weather", text="{}", is_cut=True)
    assert _is_complete_call(whole_call)


def test_results_belong_to_their_calls():
    """A result finds its call by the id, by the name, or by its position."""
    called = [
        {"id": f"id_{name}", "function": {"name": name, "arguments": {"city": "x"}}}
        for name in "abc"
    ]
    results: list[Any] = [
        {"tool_call_id": "id_c", "tool_name": "a"},
        {"tool_name": "b"},
        {},
        {"tool_name": "d"},
    ]
    calls = {"role": "assistant", "tool_calls": called, "thinking": "x"}
    results = [{"role": "tool", "content": "7", **result} for result in results]
    body = ChatBody.model_validate({"messages": [*QUESTION, calls, *results]})
    _, turn, *found = body.request().messages
    assert [call["id"] for call in turn["tool_calls"]] == ["id_a", "id_b", "id_c"]
    assert [result.get("tool_call_id") for result in found] == ["id_c", "id_b", "id_a", None]


def instructions_of(function: Callable[[], object], file: str) -> int:
    """Return how many of Python's instructions a call executes in the code of a file."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != file:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("naming", ["by id", "by name", "in order"])
def test_the_work_for_results_grows_with_their_number(naming):
    """Twice as many calls and results take twice the work; the last call has the first result."""

    def work(count: int) -> int:
        functions = [{"name": f"f{i % 3}", "arguments": {}} for i in range(count)]
        calls = [{"id": f"id_{i}", "function": each} for i, each in enumerate(functions)]
        results: list[Any] = [{"role": "tool", "content": "7"} for _ in range(count)]
        for i, result in enumerate(results):
            if naming == "by id":
                result["tool_call_id"] = f"id_{count - 1 - i}"
            elif naming == "by name":
                result["tool_name"] = "f2"
        turn = {"role": "assistant", "tool_calls": calls}
        body = ChatBody.model_validate({"messages": [*QUESTION, turn, *results]})
        return instructions_of(body.request, models.__file__)

    assert work(400) < 2.2 * work(200)


def test_a_dialog_with_calls_is_that_of_the_other_apis(scripted):
    """Calls without ids, as Ollama's older versions make them, are the same prompt."""
    scripted.says("Fine.")
    call: Any = {"function": {"name": "weather", "arguments": ZURICH}}
    turn: Any = {"role": "assistant", "content": "", "tool_calls": [call]}
    result: Any = {"role": "tool", "content": "sunny", "tool_name": "weather"}
    body: Any = {"messages": [*QUESTION, turn, result], "tools": [WEATHER], "stream": False}
    (whole,) = ask(scripted, **body)
    assert whole["message"]["content"] == "Fine."
    openai_turn = {**turn, "tool_calls": [{**call, "id": "a", "type": "function"}]}
    openai_result = {"role": "tool", "content": "sunny", "tool_call_id": "a"}
    dialog = [*QUESTION, openai_turn, openai_result]
    wanted = encode_chat(scripted.llama.tokenizer, dialog, [WEATHER])
    assert whole["prompt_eval_count"] == len(wanted)


def test_a_lenient_server_drops_what_has_no_effect(scripted):
    options = {"mirostat": 2, "topk": 1, "num_predict": 5}
    body = {"messages": QUESTION, "options": options, "think": True, "x": 1, "stream": False}
    scripted.says("Fine.")

    async def work(client: httpx.AsyncClient) -> Any:
        return await client.post("http://localhost/api/chat", json=body)

    found = scripted.call(work, connect=lambda client: client, lenient=True)
    assert found.json()["message"]["content"] == "Fine."
    assert found.headers["x-ignored-fields"] == "options.mirostat, options.topk, think, x"


def test_no_page_of_a_browser_can_send_a_body(server):
    """Bodies need no Content-Type, as in Ollama, unless a browser sends them for some page."""
    data = json.dumps({"messages": []}).encode()
    undeclared: Any = [{}, {"Content-Type": "application/x-www-form-urlencoded"}]
    for headers in undeclared:
        assert web.post(f"{server.url}/api/chat", content=data, headers=headers).status_code == 200
        for name in ("Origin", "Sec-Fetch-Site", "Referer"):
            sent = {**headers, name: "https://evil.example"}
            found = web.post(f"{server.url}/api/chat", content=data, headers=sent)
            assert found.status_code == 400 and "Content-Type" in found.json()["error"]


def client_of(server: Any) -> Any:
    ollama = pytest.importorskip("ollama", reason="Ollama's client is not installed")
    return ollama.Client(server.url)


def test_ollamas_client(server):
    """Ollama's own client reads every answer."""
    client = client_of(server)
    (entry,) = client.list().models
    assert client.ps().models[0].context_length == 512
    assert client.show(entry.model).modelinfo["general.architecture"] == "llama"
    wanted = openai_chat(server, messages=STORY)["message"]["content"]
    asked = {"model": entry.model, "messages": STORY, "options": GREEDY}
    whole = client.chat(**asked)
    assert whole.message.content == wanted and whole.done_reason == "length"
    parts = list(client.chat(**asked, stream=True))
    assert "".join(part.message.content for part in parts) == wanted
    assert parts[-1].eval_count == whole.eval_count == 30
    text = {"model": entry.model, "prompt": STORY[0]["content"], "options": GREEDY}
    assert client.generate(**text).response == wanted
    assert "".join(part.response for part in client.generate(**text, stream=True)) == wanted
    for ask_for in (client.pull, client.delete):
        with pytest.raises(Exception, match=r"this server has.*status code: 501"):
            ask_for("x")
    with pytest.raises(Exception, match=r"never cut.*status code: 400"):
        list(client.chat("x", [{"role": "user", "content": "x " * 2000}], stream=True))
