"""The schema of each route in /openapi.json is that of the model that reads its bodies.

The app has no weights loaded, so a body that is read gets 503, and a bad one 400.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from helpers.bad_requests import BAD_REQUESTS
from helpers.launch import REPO
from helpers.services import service_of
from llama.server import markdown, pooled, routes, tokens
from llama.server.accepted import AcceptedFields, LabelFields
from llama.server.anthropic.models import CountBody, MessagesBody
from llama.server.app import make_app
from llama.server.exchange import BodyRoute
from llama.server.ollama import routes as ollama
from llama.server.openai.models import ChatBody, CompletionBody
from llama.server.responses.models import ResponsesBody

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ASKED: Any = {"role": "user", "content": "Hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"b": 1}'}}
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}}}
NAMED = {"name": "f", "description": "x", "parameters": SCHEMA, "strict": True}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "1"}]}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}, "caller": {"type": "direct"}}
HINT = {"type": "ephemeral"}
TOOL = {"name": "f", "input_schema": SCHEMA, "defer_loading": False, "allowed_callers": ["direct"]}

# Bodies that clients and agents send. A past fault: parsers read those with parts, results and
# thinking, while the published schemas refused them.
GOOD: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": "x", "max_tokens": 5, "logit_bias": {"7": -100}, "stop": "a", "echo": True}),
    (TEXT, {"prompt": [[1, 2], [3]], "stop": ["a", "b"], "temperature": 1, "best_of": 2, "n": 2}),
    (TEXT, {"prompt": ["x"], "stream": True, "stream_options": {"include_usage": True}}),
    (TEXT, {"prompt": [1], "structured_outputs": {"choice": ["a", "b"]}, "unknown": None}),
    (TEXT, {"prompt": "x", "guided_regex": "a+", "guided_decoding_backend": "outlines"}),
    (CHAT, {"messages": [ASKED], "guided_json": SCHEMA, "guided_choice": None}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}),
    (CHAT, {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                         {"role": "tool", "tool_call_id": "a", "content": "1"}]}),
    (CHAT, {"messages": [{"role": "developer", "content": "x"}, ASKED], "logprobs": True,
            "top_logprobs": 2, "max_completion_tokens": 9}),
    (CHAT, {"messages": [ASKED], "tools": [{"type": "function", "function": NAMED}],
            "tool_choice": {"type": "function", "function": {"name": "f"}}}),
    (CHAT, {"messages": [ASKED], "response_format": {
        "type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}}),
    (RESPONSES, {"input": "x", "temperature": None, "store": False, "metadata": {"a": "b"}}),
    (RESPONSES, {"input": [
        {"role": "developer", "content": "x"},
        {"type": "message", "id": "m", "role": "assistant", "phase": "final", "content": [
            {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "id": None},
        {"type": "function_call_output", "call_id": "a",
         "output": [{"type": "input_text", "text": "1"}]}]}),
    (RESPONSES, {"input": "x", "tools": [{"type": "function", **NAMED}], "tool_choice": "auto",
                 "reasoning": {"effort": None, "summary": None}, "include": []}),
    (MESSAGES, {"messages": [ASKED], "max_tokens": 5, "stop_sequences": ["a"], "stream": False,
                "thinking": {"type": "adaptive", "display": "summarized"}}),
    (MESSAGES, {"messages": [ASKED, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "x", "signature": "y"}, USE]},
        {"role": "user", "content": [RESULT]}], "max_tokens": 5, "tools": [TOOL]}),
    (MESSAGES, {"messages": [ASKED], "max_tokens": 5, "context_management": {
        "edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "system": [{"type": "text", "text": "x", "cache_control": HINT}]}),
    (COUNT, {"messages": [ASKED], "tools": [TOOL], "tool_choice": {"type": "any"}}),
    ("/tokenize", {"prompt": "x", "add_special_tokens": False}),
    ("/tokenize", {"messages": [ASKED], "tools": [{"type": "function", "function": NAMED}]}),
    ("/detokenize", {"tokens": [1, 2]}),
    (EMBEDDINGS, {"input": ["x", "y"], "model": "m", "encoding_format": "base64", "user": "u"}),
    (EMBEDDINGS, {"input": [[1], [2, 3]], "dimensions": 5, "truncate_prompt_tokens": -1}),
    ("/classify", {"input": ["x"], "use_activation": False, "user": "u"}),
    ("/classify", {"messages": [ASKED], "truncate_prompt_tokens": 5}),
    ("/score", {"text_1": "a", "text_2": ["b", "c"], "model": "m"}),
    ("/v2/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1,
                    "return_documents": True, "max_tokens_per_doc": 4096}),
    (EMBEDDINGS, {"input": [1, 2], "pooling": "mean", "prompt_name": "query", "normalize": False}),
    ("/api/chat", {"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [
        {"id": "a", "function": {"index": 0, "name": "f", "arguments": {"b": 1}}}]},
        {"role": "tool", "tool_name": "f", "content": "1"}], "tools": [], "keep_alive": -1,
        "format": SCHEMA, "options": {"num_ctx": 4096, "stop": ["a"], "use_mmap": None}}),
    ("/api/generate", {"prompt": "x", "suffix": "", "system": "", "context": [], "images": [],
                       "format": "", "think": False, "options": {}, "raw": False}),
    ("/api/show", {"model": "demo", "name": "", "verbose": False, "system": ""}),
]  # fmt: skip


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    app = make_app(service_of())
    with TestClient(app, base_url="http://localhost") as client:
        yield client


@pytest.fixture(scope="module")
def document(client) -> dict[str, Any]:
    return client.get("/openapi.json").json()


def schema_of(document: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the schema of the body of a route, with everything that it references."""
    (content,) = document["paths"][path]["post"]["requestBody"]["content"].values()
    return {**content["schema"], "components": document["components"]}


def is_valid(document: dict[str, Any], path: str, body: Any) -> bool:
    return jsonschema.Draft202012Validator(schema_of(document, path)).is_valid(body)


def resolved(schema: Any, root: Any) -> Any:
    """Return the schema with its references resolved, whatever their names.

    As in FastAPI's output, null is not a default, and numbers are floats.
    """
    if isinstance(schema, list):
        return [resolved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return float(schema) if type(schema) is int else schema
    if "$ref" in schema and isinstance(schema["$ref"], str):
        found = root
        for name in schema["$ref"].removeprefix("#/").split("/"):
            found = found[name]
        return resolved(found, root)
    left_out = {"mapping", "$defs"} | ({"default"} if schema.get("default") is None else set())
    return {k: resolved(v, root) for k, v in schema.items() if k not in left_out}


def test_the_schema_of_each_route_is_that_of_its_parameter(document):
    """The schema of each route is that of its parameter, which reads the body."""
    routers = [api.routes() for api in (routes, pooled, markdown)]
    routers += [api.routes(service_of()) for api in (tokens, ollama)]
    made = [route for router in routers for route in router.routes]
    posts = [each for each in made if isinstance(each, BodyRoute) and each.methods == {"POST"}]
    assert len(posts) == sum("post" in each for each in document["paths"].values()) == 21
    for route in posts:
        own = TypeAdapter(route.endpoint.__annotations__["body"]).json_schema()
        published = schema_of(document, route.path)
        own, published = resolved(own, own), resolved(published, published)
        for each in (own, published):  # titles of whole schemas, which FastAPI adds
            each.pop("title", None), each.pop("components", None)
        assert published == own, route.path
        assert "additionalProperties" in json.dumps(own)


@pytest.mark.parametrize(("path", "body"), GOOD)
def test_what_is_read_is_valid(client, document, path, body):
    found = client.post(path, json=body)
    assert found.status_code == 503, found.text
    assert is_valid(document, path, body)
    found = client.post(path, json={**body, "no_such_field": 1})
    assert found.status_code == 400 and "no_such_field" in found.text
    assert not is_valid(document, path, {**body, "no_such_field": 1})


def test_what_is_not_valid_is_refused(client, document):
    """Invalid bodies are refused.

    The schema refuses most of the table of bad bodies, and the route then refuses them too.
    """
    refused = 0
    for case in BAD_REQUESTS:
        if case.status != 400 or case.headers or not isinstance(case.body, dict):
            continue
        if not is_valid(document, case.path, case.body):
            refused += 1
            data = json.dumps(case.body)
            headers = {"Content-Type": "application/json"}
            assert client.post(case.path, content=data, headers=headers).status_code == 400
    assert refused > 150


BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    TEXT: (CompletionBody, {"prompt": "x"}),
    CHAT: (ChatBody, {"messages": [ASKED]}),
    RESPONSES: (ResponsesBody, {"input": "x"}),
    MESSAGES: (MessagesBody, {"messages": [ASKED], "max_tokens": 5}),
    COUNT: (CountBody, {"messages": [ASKED]}),
}
OTHERS: list[Any] = ["other", True, 7, -0.5, ["other"], {"other": 1}]
NO_STATE = {  # fields that are named only to be refused
    RESPONSES: {"previous_response_id", "conversation", "prompt"},
    MESSAGES: {"thread"},
}


def section() -> str:
    page = (REPO / "docs" / "reference" / "routes.md").read_text()
    return page.partition("## The fields of a request\n")[2].partition("\n## ")[0]


def documented() -> dict[str, list[Any] | None]:
    """Return the fields of the page's table and their values; None stands for any value."""
    found: dict[str, list[Any] | None] = {}
    for names, values in re.findall(r"^\| (`.*?) \| (.*) \|$", section(), re.MULTILINE):
        literals = re.findall("`(.*?)`", values.partition(";")[0])
        for name in re.findall("`(.*?)`", names):
            found[name] = [json.loads(each) for each in literals] or None
    return found


def test_the_page_has_the_table_of_the_code():
    table = documented()
    labels = LabelFields.model_fields.keys()
    assert {name for name, values in table.items() if values is None} == labels
    assert table.keys() == AcceptedFields.model_fields.keys()
    for name in AcceptedFields.model_fields.keys() - labels:
        schema, null = AcceptedFields.model_json_schema()["properties"][name]["anyOf"]
        assert null == {"type": "null"}
        allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        assert allowed is None or sorted(allowed) == sorted(table[name] or []), name


def honours(model: Any, name: str) -> bool:
    accepted = AcceptedFields.model_fields.get(name)
    return accepted is None or model.model_fields[name].annotation != accepted.annotation


def test_the_page_lists_what_each_api_honours():
    lists = re.findall(r"^- (each path|`/v1/.*?`): ((?:.|\n  )*)", section(), re.MULTILINE)
    for path, (model, _) in BODIES.items():
        if path != COUNT:
            own = {name for name in model.known_names if honours(model, name)}
            listed = [
                names for heads, names in lists if heads == "each path" or f"`{path}`" in heads
            ]
            named = set(re.findall("`(.*?)`", "".join(listed)))
            assert named == own - NO_STATE.get(path, set())


@pytest.mark.parametrize("path", BODIES)
def test_the_apis_agree_on_what_changes_nothing(client, document, path):
    model, body = BODIES[path]
    for name, values in documented().items():
        num_read = 0
        for value in values or [{"a": 1}, "x", False]:  # a label is of one of these types
            found = client.post(path, json={**body, name: value})
            num_read += found.status_code == 503
            assert is_valid(document, path, {**body, name: value}) == (found.status_code == 503)
        assert num_read == (1 if values is None else len(values)), name
        for other in [*OTHERS, *([0, 0.0] if values and values[0] is False else [])]:
            if values is not None and not honours(model, name):
                found = client.post(path, json={**body, name: other})
                assert found.status_code == 400 and name in found.json()["error"]["message"]
