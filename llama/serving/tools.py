"""Llama 3.1's tool calling: messages and tools in OpenAI's form to ids, an answer's text to a call.

In: messages, with "tool_calls" and the role "tool" among them, and the functions that the model may
call. Out: the ids of the prompt, as the chat template of Meta's Llama 3.1 to 3.3 Instruct models
gives them with these tools. Without tools it is `ChatFormat`'s prompt. It runs no tool.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama.tokenizer import ChatFormat, Message, Tokenizer

# What the models were trained on, word by word: without a space after the two full stops.
_SYSTEM = "Environment: ipython\nCutting Knowledge Date: December 2023\nToday Date: {date}\n\n"
_DATE = "26 Jul 2024"  # the template's, where the caller gives none
_INSTRUCTION = (
    "Given the following functions, please respond with a JSON for a function call with its proper "
    "arguments that best answers the given prompt.\n\n"
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and '
    "its value}.Do not use variables.\n\n"
)
_LABELS = {"tool_call_id", "name", "refusal"}  # of OpenAI's messages; the format has no place
_PYTHON_TAG = "<|python_tag|>"
_FUNCTION_TAG = re.compile(r"<function=([^>{}]+)>(\{.*\})", re.DOTALL)
_BUILT_IN = re.compile(r'(\w+)\.call\(query="([^"]*)"\)')


@dataclass(frozen=True)
class ToolCall:
    """The function that the model wants to be called."""

    name: str
    arguments: dict[str, Any]


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    date: str = _DATE,
) -> list[int]:
    """The ids of a dialog, from begin_of_text on.

    messages: {"role", "content"}; content may be a list of {"type": "text", "text"} parts. One of
    the assistant may have "tool_calls", with one call; the result comes with role "tool" or
    "ipython". tools: JSON objects that describe functions. They stand in the first user message.
    add_generation_prompt: a header for the assistant to go on from. continue_final_message: the
    last message stays open instead. TypeError or ValueError names the message that is wrong.
    """
    if continue_final_message and add_generation_prompt:
        raise ValueError("continue_final_message needs add_generation_prompt=False")
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError("messages must be a list of at least one message")
    dialog = [_plain(message, f"message {i}") for i, message in enumerate(messages)]
    if tools:
        dialog = _with_tools(dialog, tools, date)
    chat = ChatFormat(tokenizer)
    ids = [tokenizer.bos_id]
    for message in dialog:
        content = tokenizer.encode(message["content"], bos=False, eos=False)
        ids += [*chat.encode_header(message), *content, tokenizer.eot_id]
    if continue_final_message:
        return ids[:-1]
    if add_generation_prompt:
        ids += chat.encode_header({"role": "assistant", "content": ""})
    return ids


def parse_tool_call(text: str) -> ToolCall | None:
    """The call in an answer's text; None if it is an answer in words.

    Known forms, all of Llama 3.1: {"name": ..., "parameters": {...}}; <function=name>{...};
    name.call(query="..."); and code after <|python_tag|>, a call of "code_interpreter".
    """
    text = text.strip()
    body = text.removeprefix(_PYTHON_TAG).strip()
    found = _json_dict(body)
    if found is not None:
        name, arguments = found.get("name"), found.get("parameters", found.get("arguments"))
        if isinstance(name, str) and isinstance(arguments, dict):
            return ToolCall(name, arguments)
        return None
    if tagged := _FUNCTION_TAG.search(body):
        tagged_arguments = _json_dict(tagged[2])
        return None if tagged_arguments is None else ToolCall(tagged[1], tagged_arguments)
    if built_in := _BUILT_IN.fullmatch(body):
        return ToolCall(built_in[1], {"query": built_in[2]})
    return ToolCall("code_interpreter", {"code": body}) if body != text else None


def _json_dict(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _to_json(value: Any, indent: int | None = None) -> str:
    """As `tojson` in transformers' chat templates writes it."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _plain(message: Any, where: str) -> Message:
    """A message of OpenAI's form as a role and the text that the model sees."""
    if not isinstance(message, dict):
        raise TypeError(f"{where} must be a dict of role and content, got {type(message).__name__}")
    given = {key: value for key, value in message.items() if value is not None}
    unknown = sorted(given.keys() - {"role", "content", "tool_calls"} - _LABELS)
    if unknown:
        raise ValueError(f"{where} has unknown keys {unknown}: leave them out")
    role = given.get("role")
    if given.get("tool_calls"):
        if role != "assistant" or given.get("content"):
            raise ValueError(f"{where}: tool_calls need the role assistant and no content")
        return {"role": "assistant", "content": _call_text(given["tool_calls"], where)}
    if role in ("tool", "ipython"):
        content = given.get("content", "")
        parts = isinstance(content, list)
        return {"role": "ipython", "content": _to_json(_text(content, where) if parts else content)}
    return {"role": role, "content": _text(given.get("content"), where).strip()}  # type: ignore[typeddict-item]


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [None]
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "text" and "text" in part):
            raise TypeError(f"{where}: content must be a str, or a list of parts of type text")
    return "\n".join(part["text"] for part in parts)


def _call_text(calls: Any, where: str) -> str:
    if not isinstance(calls, list) or len(calls) != 1:
        raise ValueError(f"{where}: tool_calls must have one call: Llama's format has no more")
    try:
        function = calls[0]["function"]
        name, arguments = function["name"], function["arguments"]
        if isinstance(arguments, str):  # OpenAI's clients send them as JSON
            arguments = json.loads(arguments)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"{where}: a tool call must be {{'function': {{'name': ..., 'arguments': ...}}}}, with "
            f"arguments as a dict or as JSON ({type(error).__name__}: {error})"
        ) from None
    return f'{{"name": "{name}", "parameters": {_to_json(arguments)}}}'


def _with_tools(dialog: list[Message], tools: Sequence[Any], date: str) -> list[Message]:
    """The dialog with a system message that says "ipython", and the tools before the question."""
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise TypeError(f"tools[{i}] must be a dict, got {type(tool).__name__}")
    system = ""
    if dialog[0]["role"] == "system":
        system, dialog = dialog[0]["content"], dialog[1:]
    if not dialog or dialog[0]["role"] != "user":
        raise ValueError(
            "tools need a first message of the user, after the system's: there is none"
        )
    listed = "".join(_to_json(tool, indent=4) + "\n\n" for tool in tools)
    return [
        {"role": "system", "content": _SYSTEM.format(date=date) + system},
        {"role": "user", "content": _INSTRUCTION + listed + dialog[0]["content"]},
        *dialog[1:],
    ]
