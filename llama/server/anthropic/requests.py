"""Request bodies of Anthropic's Messages API: a JSON object in, a chat of OpenAI's form out.

Source: https://docs.anthropic.com/en/api/messages. Every field of a body is used, or is an error
that names it; labels and hints are checked and change nothing. It knows no network, and runs
nothing.
"""

from dataclasses import replace
from typing import Any

from llama.sampling_params import SamplingParams
from llama.server.anthropic.messages import read_messages
from llama.server.openai.dialog import Translated, translate
from llama.server.openai.json_types import object_at, of_type, only, refuse_fields

MESSAGES_URL, COUNT_URL = "/v1/messages", "/v1/messages/count_tokens"
# Of a prompt, and of the answer. Prefixes are always cached, so cache_control changes nothing.
COUNT_FIELDS = {
    "model", "messages", "system", "tools", "tool_choice", "thinking", "output_config",
    "cache_control", "speed", "context_management",
}  # fmt: skip
FIELDS = COUNT_FIELDS | {
    "max_tokens", "stop_sequences", "temperature", "top_p", "top_k", "stream", "metadata",
    "service_tier",
}  # fmt: skip
_SAME = {"model", "max_tokens", "temperature", "top_p", "top_k", "stream"}
_TYPES: dict[str, type] = {
    "model": str, "cache_control": dict, "metadata": dict,
    "stop_sequences": list, "messages": list, "stream": bool,
}  # fmt: skip
ONLY: dict[str, tuple[str, ...]] = {
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}
_TOOL_FIELDS = {
    "name", "description", "input_schema", "strict", "type", "cache_control", "defer_loading",
    "allowed_callers", "eager_input_streaming",
}  # fmt: skip
_TOOL_ONLY = {
    "type": ("custom",), "defer_loading": (False,), "allowed_callers": (["direct"],),
    "eager_input_streaming": (True,),
}  # fmt: skip
# Thinking, which Llama does not: "adaptive" leaves it to the model.
EFFORTS = ("high",)  # Anthropic's default: what leaving it out means
_THINKING = {"type", "budget_tokens", "display"}
CLEAR_THINKING = "clear_thinking_20251015"  # of earlier turns: the prompt never has it
_CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": "tool"}
# In Anthropic's words, which agents look for: they shorten the dialog then.
_TOO_LONG = r"messages: prompt is too long: \1 tokens > \2 maximum"
# The names of a chat's fields, and of this API's.
_WORDS = {
    r"^stop\b": "stop_sequences",
    r"\.function\.parameters\b": ".input_schema",
    r"\.function\b": "",
    r"^response_format(\.json_schema)?": "output_config.format",
    r"\bresponse_format\b": "output_config",
    r"^prompt \d+ has (\d+) tokens, but max_seq_len is (\d+).*": _TOO_LONG,
}


def parse_messages_body(body: Any, defaults: SamplingParams, *, counts: bool = False) -> Translated:
    """The request in a body; counts: only its prompt is counted, so max_tokens is not needed.

    TypeError or ValueError names the field that is wrong or unknown.
    """
    given = {k: v for k, v in of_type(body, dict, "body").items() if v is not None}
    refuse_fields(given.keys() - (COUNT_FIELDS if counts else FIELDS), "a request for messages")
    for name, kind in _TYPES.items():
        if name in given:
            of_type(given[name], kind, name)
    only(given, ONLY)
    _check_thinking(given)
    if not counts and "max_tokens" not in given:
        raise ValueError("max_tokens is needed: the most tokens that the answer may have")
    chat = {name: given[name] for name in _SAME & given.keys()}
    if "stop_sequences" in given:
        chat["stop"] = given["stop_sequences"]
    chat |= _tools(given) | _form(given.get("output_config"))
    dialog, continues = read_messages(given.get("messages"), given.get("system"))
    form_field = "output_config" if "response_format" in chat else "tools"
    asked = translate(chat, dialog, defaults, _WORDS, form_field, continues=continues)
    return _continued(asked) if continues else asked


def _check_thinking(given: dict[str, Any]) -> None:
    """Thinking that is left to the model is never done, so there is none to clear either."""
    thinking = object_at(given.get("thinking", {"type": "disabled"}), _THINKING, "thinking")
    if thinking.get("type") not in ("disabled", "adaptive"):
        raise ValueError(
            "thinking must have the type 'disabled' or 'adaptive': this model has no thinking"
        )
    management = object_at(given.get("context_management", {}), {"edits"}, "context_management")
    edits = of_type(management.get("edits", []), list, "context_management.edits")
    for i, edit in enumerate(edits):
        place = f"context_management.edits[{i}]"
        if object_at(edit, {"type", "keep"}, place).get("type") != CLEAR_THINKING:
            raise ValueError(f"{place} must have the type {CLEAR_THINKING!r}: shorten the dialog "
                             "on your side")  # fmt: skip


def _continued(asked: Translated) -> Translated:
    """A beginning that the client wrote is not part of a grammar, and no call begins after it."""
    tools = asked.chat.tools
    if asked.chat.params.structured_output is not None:
        raise ValueError("output_config cannot be used where the last message is the assistant's")
    if tools is not None and tools.needs_grammar:
        field = "tool_choice" if tools.must_call else "tools"
        raise ValueError(
            f"{field}: a call that is forced, or strict, cannot have a last message of the "
            "assistant before it"
        )
    return replace(asked, continues=True)


def _tools(given: dict[str, Any]) -> dict[str, Any]:
    """tools, tool_choice and parallel_tool_calls of a chat."""
    fields: dict[str, Any] = {}
    if "tools" in given:
        tools = of_type(given["tools"], list, "tools")
        fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    if "tool_choice" not in given:
        return fields
    choice = object_at(
        given["tool_choice"], {"type", "name", "disable_parallel_tool_use"}, "tool_choice"
    )
    kind = _CHOICES.get(str(choice.get("type")))
    if kind is None:
        raise ValueError("tool_choice.type must be 'auto', 'any', 'tool' or 'none'")
    if (kind == "tool") != ("name" in choice):
        raise ValueError("tool_choice.name is needed with the type 'tool', and only with it")
    if kind in ("required", "tool") and not fields.get("tools"):
        raise ValueError("tool_choice asks for a call, and there are no tools to call")
    is_single = of_type(choice.get("disable_parallel_tool_use", False), bool,
                        "tool_choice.disable_parallel_tool_use")  # fmt: skip
    fields["parallel_tool_calls"] = not is_single
    named = {"type": "function", "function": {"name": choice.get("name")}}
    fields["tool_choice"] = named if kind == "tool" else kind
    return fields


def _tool(tool: Any, where: str) -> dict[str, Any]:
    given = object_at(tool, _TOOL_FIELDS, where)
    only(given, _TOOL_ONLY, f"{where}.")
    _check_hint(given, where)
    if "input_schema" not in given:
        raise ValueError(f"{where}.input_schema is needed: the JSON schema of the tool's input")
    function: dict[str, Any] = {
        key: given[key] for key in ("name", "description", "strict") if key in given
    }
    function["parameters"] = of_type(given["input_schema"], dict, f"{where}.input_schema")
    return {"type": "function", "function": function}


def _check_hint(given: dict[str, Any], where: str) -> None:
    of_type(given.get("cache_control", {}), dict, f"{where}.cache_control")


def _form(config: Any) -> dict[str, Any]:
    """response_format of a chat."""
    if config is None:
        return {}
    given = object_at(config, {"format", "effort"}, "output_config")
    only(given, {"effort": EFFORTS}, "output_config.")
    wanted = given.get("format")
    if wanted is None:
        return {}
    given = object_at(wanted, {"type", "schema"}, "output_config.format")
    if given.get("type") != "json_schema" or "schema" not in given:
        raise ValueError("output_config.format must have the type 'json_schema' and a schema")
    schema = of_type(given["schema"], dict, "output_config.format.schema")
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
