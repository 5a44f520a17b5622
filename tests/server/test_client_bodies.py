"""Bodies of the makers' clients and of frameworks are read on every route that has the field.

A body is read by its model, and its prompt or parameters are those of a plain body.
"""

from typing import Any

import pytest
from pydantic import TypeAdapter

from llama import SamplingParams
from llama.common.checks import FieldError
from llama.prompts import ToolFormat
from llama.prompts.dialog_format import MetaFormat
from llama.prompts.fields import read_as
from llama.prompts.tools import Tools
from llama.requests.grammar import GrammarCompiler
from llama.sampling_params import StructuredOutput
from llama.server.anthropic.models import MessagesBody
from llama.server.errors import ApiError
from llama.server.ollama.models import ChatBody as OllamaBody
from llama.server.openai.models import ChatBody, CompletionBody
from llama.server.request import ApiRequest
from llama.server.responses.models import ResponsesBody

SAID: Any = {"role": "user", "content": "Hello"}
# The labels that langchain 1.x, LiteLLM and agents write into text parts.
LABELS: list[dict[str, Any]] = [
    {"id": "lc_1f", "index": 0, "annotations": []},
    {"cache_control": {"type": "ephemeral"}, "extras": {"a": 1}},
    {"id": None, "index": "lc_txt_0", "annotations": [{"type": "citation"}]},
]


def body_of(model: Any, **fields: Any) -> ApiRequest:
    """Return a read body, with a question where it gives none."""
    question: dict[str, Any] = (
        {"input": "Hello"} if model is ResponsesBody else {"messages": [SAID]}
    )
    if model is CompletionBody:
        question = {"prompt": "Hello"}
    if model is MessagesBody:
        question["max_tokens"] = 5
    read = read_as(TypeAdapter(model), question | fields)
    request: ApiRequest
    request = read.request() if model is OllamaBody else read.request(SamplingParams())
    return request


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize(
    ("model", "field", "kind"),
    [
        (ChatBody, "messages", "text"),
        (ResponsesBody, "input", "input_text"),
        (MessagesBody, "messages", "text"),
    ],
)
def test_labels_of_text_parts_change_no_prompt(demo, model, field, kind, labels):
    def ids(**more: Any) -> list[int]:
        dialog = [{"role": "user", "content": [{"type": kind, "text": "Hello", **more}]}]
        return body_of(model, **{field: dialog}).chat_ids(MetaFormat(demo.tokenizer))

    assert ids(**labels) == ids()


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "refusal": "I cannot."},
        {"role": "assistant", "content": None, "refusal": "I cannot.", "tool_calls": []},
        {"role": "assistant", "content": "", "refusal": "I cannot."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot.", "id": "a"}]},
    ],
)
def test_a_refusal_is_the_text_of_its_message(demo, message):
    plain = {"role": "assistant", "content": "I cannot."}
    dialog_format = MetaFormat(demo.tokenizer)
    wanted = body_of(ChatBody, messages=[SAID, plain, SAID]).chat_ids(dialog_format)
    assert body_of(ChatBody, messages=[SAID, message, SAID]).chat_ids(dialog_format) == wanted
    if isinstance(message.get("content"), list):
        responded = body_of(ResponsesBody, input=[SAID, message, SAID])
        assert responded.chat_ids(dialog_format) == wanted


def test_a_refusal_follows_the_words_before_it_and_is_no_user_s(demo):
    parts = [{"type": "text", "text": "Well."}, {"type": "text", "text": "No."}]
    dialog_format = MetaFormat(demo.tokenizer)
    wanted = dialog_format.encode([SAID, {"role": "assistant", "content": parts}])
    both = {"role": "assistant", "content": "Well.", "refusal": "No."}
    assert body_of(ChatBody, messages=[SAID, both]).chat_ids(dialog_format) == wanted
    with pytest.raises(FieldError, match="refusal needs the role assistant"):
        body_of(ChatBody, messages=[{**SAID, "refusal": "No."}])


@pytest.mark.parametrize("name", ["3d_render", "-x", "mcp__github__" + "a" * 115, "007", "_"])
def test_names_of_tools(demo, name):
    """Names of MCP servers begin with digits, and have up to 128 characters."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    function = {"name": name, "parameters": parameters}
    for model, tool in (
        (ChatBody, {"type": "function", "function": function}),
        (ResponsesBody, {"type": "function", **function}),
        (MessagesBody, {"name": name, "input_schema": parameters}),
        (OllamaBody, {"type": "function", "function": function}),
    ):
        tools = body_of(model, tools=[tool]).tools
        assert tools is not None
        texts = {
            ToolFormat.LLAMA_3_1: f'{{"name": "{name}", "parameters": {{"a": 3}}}}',
            ToolFormat.LLAMA_3_2: f"[{name}(a=3)]",
        }
        for tool_format, text in texts.items():
            parser = MetaFormat(demo.tokenizer, tool_format).call_parser(tools)
            events = [each for piece in text for each in parser.push(piece)] + parser.flush()
            assert next(vars(event).get("name") for event in events) == name
            assert "".join(vars(event).get("text", "") for event in events) == '{"a": 3}'


@pytest.mark.parametrize(
    ("seed", "wanted"), [(-1, None), (-(2**63), 0), (-2, 2**63 - 2), (2**63 - 1, 2**63 - 1)]
)
def test_seeds_have_64_bits_and_a_sign(seed, wanted):
    for model in (ChatBody, CompletionBody, ResponsesBody, MessagesBody):
        assert body_of(model, seed=seed).params.seed == wanted
    assert body_of(OllamaBody, options={"seed": seed}).params.seed == wanted


TOOLS: Any = [{"type": "function", "function": {"name": name}} for name in ("a", "b", "c")]
FLAT: Any = [{"type": "function", "name": name} for name in ("a", "b", "c")]


@pytest.mark.parametrize(("mode", "must_call"), [("auto", False), ("required", True)])
def test_allowed_tools_are_the_only_ones(mode, must_call):
    allowed = {"mode": mode, "tools": [TOOLS[2], TOOLS[0]]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    flat = {"type": "allowed_tools", "mode": mode, "tools": [FLAT[0], FLAT[2]]}
    for model, tools, given in ((ChatBody, TOOLS, choice), (ResponsesBody, FLAT, flat)):
        found = body_of(model, tools=tools, tool_choice=given).tools
        assert found is not None
        assert (found.names, found.must_call) == ({"a", "c"}, must_call)
    unknown = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "d"}]}
    with pytest.raises(FieldError, match="tool_choice names 'd', which is not among the tools"):
        body_of(ResponsesBody, tools=FLAT, tool_choice=unknown)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"top_logprobs": 0}, None),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
        ({"logprobs": True}, 0),
    ],
)
def test_logprobs_of_a_chat(fields, wanted):
    assert body_of(ChatBody, **fields).params.logprobs == wanted


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 4}, 4),
        ({"include": ["reasoning.encrypted_content"]}, None),
        ({"top_logprobs": 0}, None),
    ],
)
def test_logprobs_of_a_response(fields, wanted):
    assert body_of(ResponsesBody, **fields).params.logprobs == wanted


def test_json_object_may_have_a_schema():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    for model in (ChatBody, CompletionBody):
        given = body_of(model, response_format={"type": "json_object", "schema": schema})
        assert given.params.structured_output == StructuredOutput(json=schema)
    with pytest.raises(FieldError, match="schema needs the type json_object"):
        body_of(ChatBody, response_format={"type": "text", "schema": schema})


@pytest.fixture(scope="module")
def compiler(demo) -> GrammarCompiler:
    return GrammarCompiler(demo.tokenizer)


def tool_with(name: str, value: Any, *, strict: bool, **more: Any) -> dict[str, Any]:
    properties = {"fine": {"type": "string"}, name: value}
    schema = {"type": "object", "properties": properties, **more}
    return {"name": "f", "parameters": schema, "strict": strict}


# What no grammar enforces, or what is no schema.
WISHES: list[tuple[str, Any, str]] = [
    ("word", {"type": "string", "pattern": "^(?!x)y"}, "look-around"),
    ("tags", {"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
    ("link", {"$ref": "#/$defs/absent"}, "does not exist"),
    ("any", {"type": "any"}, "Invalid type"),
    ("one", {"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
]


@pytest.mark.parametrize("tool_format", [ToolFormat.LLAMA_3_1, ToolFormat.LLAMA_3_2])
@pytest.mark.parametrize(("name", "value", "problem"), WISHES)
def test_the_schema_of_a_tool_that_is_not_strict_is_a_wish(
    compiler, demo, tool_format, name, value, problem
):
    """It is loosened where it cannot be enforced; a strict one is an error that names its place."""

    def compiled(model: Any, strict: bool) -> ApiError | None:
        function = tool_with(name, value, strict=strict)
        tool: Any = {"type": "function", **function}
        if model is ChatBody:
            tool = {"type": "function", "function": function}
        elif model is MessagesBody:
            tool = {"name": "f", "input_schema": function["parameters"], "strict": strict}
        choice = {"type": "any"} if model is MessagesBody else "required"
        chat = body_of(model, tools=[{**tool, **renamed(tool, model)}, tool], tool_choice=choice)
        try:
            params = chat.chat_params(MetaFormat(demo.tokenizer, tool_format))
            assert isinstance(params.structured_output, StructuredOutput)
            compiler.matcher(params.structured_output)
        except ValueError as error:
            return chat.fields.refusal(error)
        return None

    places = {
        ChatBody: "tools[0].function.parameters",
        ResponsesBody: "tools[0].parameters",
        MessagesBody: "tools[0].input_schema",
    }
    for model, place in places.items():
        assert compiled(model, False) is None
        error = compiled(model, True)
        assert error is not None and error.param == "tools"
        assert error.message.startswith(f"{place}.properties.{name} cannot be used: ")
        assert problem in error.message and "option" not in error.message


def renamed(tool: dict[str, Any], model: Any) -> dict[str, Any]:
    """Return the field of a tool that has its name, with another name."""
    if model is ChatBody:
        return {"function": {**tool["function"], "name": "first"}}
    return {"name": "first"}


@pytest.mark.parametrize("unknown", ["path", "password", "binary", "uri-reference"])
def test_an_unknown_format_is_an_annotation(compiler, demo, unknown):
    """So are the formats that pydantic writes for Path, SecretStr and bytes."""
    value = {"type": "string", "format": unknown}
    tools = Tools.of([{"function": tool_with("a", value, strict=True)}])
    calls = MetaFormat(demo.tokenizer).call_grammar(tools)
    compiler.matcher(StructuredOutput(calls=calls))
    schema = {"type": "object", "properties": {"format": value, "b": {"items": value}}}
    compiler.matcher(StructuredOutput(json=schema))
    with pytest.raises(FieldError, match="Invalid type"):
        compiler.matcher(StructuredOutput(json={"properties": {"format": {"type": unknown}}}))


def test_formats_that_are_enforced_stay(compiler, demo):
    def allows(schema: dict[str, Any], text: str) -> bool:
        matcher = compiler.matcher(StructuredOutput(json=schema))
        ids = demo.tokenizer.encode(text, bos=False, eos=False)
        return matcher._matcher.validate_tokens(ids) == len(ids)

    assert allows({"type": "string", "format": "date"}, '"2026-11-28"')
    assert not allows({"type": "string", "format": "date"}, '"a day"')
    assert allows({"enum": [{"format": "path"}, {"format": "b"}]}, '{"format":"path"}')
