"""Request bodies of OpenAI's Responses API: a JSON object in, a chat of OpenAI's form out.

Source: https://platform.openai.com/docs/api-reference/responses. There is no stored state: a body
has its whole dialog. Every field is used, or is an error that names it; labels are checked and
change nothing. It knows no network, and runs nothing.
"""

from typing import Any

from llama.sampling_params import SamplingParams
from llama.server.openai.dialog import Translated, translate
from llama.server.openai.json_types import object_at, of_type, only, refuse_fields
from llama.server.responses.items import read_input

RESPONSES_URL = "/v1/responses"
LABELS: dict[str, type] = {
    "metadata": dict, "user": str, "safety_identifier": str, "prompt_cache_key": str,
}  # fmt: skip
_SAME = {"model", "temperature", "top_p", "parallel_tool_calls", "stream"}
# These ask for nothing that the answer would not have anyway.
ONLY: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "background": (False,),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
    "include": ([], ["reasoning.encrypted_content"]),
    "reasoning": ({}, {"effort": "none"}),
    "stream_options": ({}, {"include_obfuscation": False}),
}
FIELDS = {
    "input", "instructions", "max_output_tokens", "text", "tools", "tool_choice",
    *_SAME, *LABELS, *ONLY,
}  # fmt: skip
_STORED = {"previous_response_id", "conversation", "prompt"}
_TOOL_FIELDS = {"type", "name", "description", "parameters", "strict"}
# The names of a chat's fields, and of this API's.
_WORDS = {
    r"\bmax_tokens\b": "max_output_tokens",
    r"^messages\b": "input",
    r"^(tools\[\d+\])\.function\b": r"\1",
    r"^response_format(\.json_schema)?": "text.format",
    r"\bresponse_format\b": "text",
}


def parse_responses_body(body: Any, defaults: SamplingParams) -> Translated:
    """The request in a body. TypeError or ValueError names the field that is wrong or unknown."""
    given = {k: v for k, v in of_type(body, dict, "body").items() if v is not None}
    _check_state(given)
    refuse_fields(given.keys() - FIELDS, "a request for a response")
    for name, kind in LABELS.items():
        if name in given:
            of_type(given[name], kind, name)
    only(given, ONLY)
    instructions = given.get("instructions")
    if instructions is not None:
        of_type(instructions, str, "instructions")
    chat = {name: given[name] for name in _SAME & given.keys()}
    if "max_output_tokens" in given:
        chat["max_tokens"] = given["max_output_tokens"]
    chat |= _tools(given) | _form(given.get("text"))
    dialog = read_input(given.get("input"), instructions)
    form_field = "text" if "response_format" in chat else "tools"
    return translate(chat, dialog, defaults, _WORDS, form_field)


def _check_state(given: dict[str, Any]) -> None:
    for name in sorted(_STORED & given.keys()):
        raise ValueError(f"{name} cannot be used: there is no stored state, so send the dialog")
    if given.get("store") is True:
        raise ValueError("store must be false: there is no stored state")
    if given.get("background") is True:
        raise ValueError("background must be false: there is no stored state")


def _tools(given: dict[str, Any]) -> dict[str, Any]:
    """tools and tool_choice of a chat, where a function stands one level below."""
    fields: dict[str, Any] = {}
    if "tools" in given:
        tools = of_type(given["tools"], list, "tools")
        fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    choice = given.get("tool_choice")
    if isinstance(choice, dict):
        if choice.keys() != {"type", "name"} or choice["type"] != "function":
            raise ValueError("tool_choice must be {'type': 'function', 'name': ...}")
        choice = {"type": "function", "function": {"name": choice["name"]}}
    if choice is not None:
        fields["tool_choice"] = choice
    return fields


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if of_type(tool, dict, where).get("type") != "function":
        raise ValueError(f"{where}.type must be 'function': other kinds of tools cannot be used")
    function = object_at(tool, _TOOL_FIELDS, where)
    del function["type"]
    return {"type": "function", "function": function}


def _form(text: Any) -> dict[str, Any]:
    """response_format of a chat."""
    if text is None:
        return {}
    given = object_at(text, {"format", "verbosity"}, "text")
    only(given, {"verbosity": ("medium",)}, "text.")
    if "format" not in given:
        return {}
    known = {"type", "name", "description", "schema", "strict"}
    wanted = object_at(given["format"], known, "text.format")
    if wanted.get("type") != "json_schema":
        if wanted.keys() != {"type"}:
            raise ValueError("text.format must have only its type, unless it is 'json_schema'")
        return {"response_format": wanted}
    for name, kind in (("name", str), ("description", str), ("strict", bool), ("schema", dict)):
        if name in wanted:
            of_type(wanted[name], kind, f"text.format.{name}")
    if "schema" not in wanted:
        raise ValueError("text.format.schema is needed with the type 'json_schema'")
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": wanted["schema"]}}}
