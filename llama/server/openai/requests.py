"""Request bodies of OpenAI's completion APIs: a JSON object in, a checked `OpenAIRequest` out.

A server or a batch file brings the body. Every field of it is used, or is an error that names it.
This file knows no files and no network, and runs nothing.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from llama.checks import FieldError, brief, whole_number
from llama.prompts.fields import json_type as json_type
from llama.prompts.tools import TOOL_FIELDS, ToolRequest, read_tools
from llama.sampling_params import WHOLE_NUMBERS, SamplingParams
from llama.server.openai.json_types import UnknownField
from llama.server.openai.json_types import refuse_fields as refuse_fields
from llama.structured_output import StructuredOutput

CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"
_LABELS = {"model", "user", "metadata"}  # for bookkeeping: they do not change the answer
# These have the same name in SamplingParams. The two that are left out have others.
_SAMPLING = {f.name for f in fields(SamplingParams)} - {"prompt_logprobs", "structured_output"}
_FORMS = {"response_format", "structured_outputs"}
_SHARED = {"max_completion_tokens", "stream", "stream_options"} | _SAMPLING | _LABELS | _FORMS
TEXT_FIELDS = {"prompt", "echo"} | _SHARED
_OPEN_END = {"add_generation_prompt", "continue_final_message"}  # vLLM's
CHAT_FIELDS = {"messages", "top_logprobs"} | set(TOOL_FIELDS) | _OPEN_END | _SHARED
MOST_PROMPTS = 2048  # of one body, as OpenAI has it


@dataclass(frozen=True)
class OpenAIRequest:
    """What a body asks for. Whoever encodes the prompts or the messages checks their content.

    prompts: texts or lists of ids; of a chat none. messages: of a chat. has_usage: a stream ends
    with the counts of tokens. user: a label for the log. tools: of a chat that may call some.
    add_generation_prompt: a chat's prompt ends with the header of an answer.
    continue_final_message: it ends inside its last message, which the answer goes on from.
    """

    chat: bool
    prompts: tuple[str | list[int], ...]
    messages: list[Any]
    params: SamplingParams
    model: str | None = None
    user: str | None = None
    echo: bool = False
    stream: bool = False
    has_usage: bool = False
    tools: ToolRequest | None = None
    form_field: str | None = None  # that gave the form of the answer
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def parse_body(body: Any, defaults: SamplingParams, *, chat: bool) -> OpenAIRequest:
    """The request in a body; `defaults` are the parameters that the body does not give.

    TypeError or ValueError names the field that is wrong or unknown; see `field_of`.
    """
    if not isinstance(body, dict):
        raise TypeError(f"body must be an object, got {json_type(body)}")
    # Clients write null for a field that is not given.
    given = {name: value for name, value in body.items() if value is not None}
    known = CHAT_FIELDS if chat else TEXT_FIELDS
    refuse_fields(given.keys() - known, "a chat request" if chat else "a completion request")
    echo = _boolean(given, "echo")
    params = _params(given, chat, defaults)
    has_header = _boolean(given, "add_generation_prompt", True)
    is_open = _boolean(given, "continue_final_message")
    if is_open and has_header:
        raise ValueError("continue_final_message needs add_generation_prompt to be false")
    if echo and params.logprobs is not None:
        params = replace(params, prompt_logprobs=params.logprobs)
    return OpenAIRequest(
        chat=chat,
        prompts=() if chat else _prompts(given.get("prompt")),
        messages=_messages(given.get("messages")) if chat else [],
        params=params,
        model=_string(given, "model"),
        user=_string(given, "user"),
        echo=echo,
        stream=_boolean(given, "stream"),
        has_usage=_has_usage(given),
        tools=read_tools(*(given.get(name) for name in TOOL_FIELDS)) if chat else None,
        form_field=next(iter(_FORMS & given.keys()), None),
        add_generation_prompt=has_header,
        continue_final_message=is_open,
    )


def field_of(error: Exception, body: Any) -> str | None:
    """The field of the body that an error of `parse_body` is about, if it is about one."""
    if isinstance(error, UnknownField) and error.field is not None:
        return error.field
    said = error.field if isinstance(error, FieldError) else str(error)
    found = re.match(r"'?([a-z_]+)", said)
    if found is None or not isinstance(body, dict):
        return None
    name = found[1]
    known = CHAT_FIELDS | TEXT_FIELDS | body.keys()
    return name if name in known else None


def _prompts(prompt: Any) -> tuple[str | list[int], ...]:
    """One text, or one list of ids, or a list of either; the entries of ids are checked later."""
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list):
        raise TypeError(
            f"prompt must be a string, a list of token ids, or a list of either, got "
            f"{json_type(prompt)}"
        )
    if not prompt:
        raise ValueError("prompt is an empty list: give a text or ids")
    if not isinstance(prompt[0], str | list):
        return (prompt,)
    if len(prompt) > MOST_PROMPTS:
        raise ValueError(f"prompt has {len(prompt)} entries: it must have at most {MOST_PROMPTS}")
    kind = type(prompt[0])
    for i, entry in enumerate(prompt):
        if not isinstance(entry, kind):
            raise TypeError(
                f"prompt[{i}] must be {json_type(prompt[0])}, as the first one, got "
                f"{json_type(entry)}"
            )
    return tuple(prompt)


def _messages(messages: Any) -> list[Any]:
    if not isinstance(messages, list):
        raise TypeError(f"messages must be a list, got {json_type(messages)}")
    return messages


def _string(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {json_type(value)}")
    return value


def _boolean(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be true or false, got {json_type(value)}")
    return value


def _has_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options", {})
    if not isinstance(options, dict):
        raise TypeError(f"stream_options must be an object, got {json_type(options)}")
    if options and not body.get("stream"):
        raise ValueError("stream_options needs stream to be true")
    unknown = sorted(options.keys() - {"include_usage"})
    if unknown:
        raise ValueError(f"stream_options has {unknown[0]!r}: only include_usage can be used")
    return _boolean({"stream_options.include_usage": options.get("include_usage") or False},
                    "stream_options.include_usage")  # fmt: skip


def _params(body: dict[str, Any], chat: bool, defaults: SamplingParams) -> SamplingParams:
    changes = {name: body[name] for name in _SAMPLING & body.keys()}
    if "max_completion_tokens" in body:
        if "max_tokens" in body:
            raise ValueError("max_tokens and max_completion_tokens are the same: give one")
        changes["max_tokens"] = whole_number(
            "max_completion_tokens", body["max_completion_tokens"], *WHOLE_NUMBERS["max_tokens"][:2]
        )
    if "logit_bias" in body:
        changes["logit_bias"] = _logit_bias(body["logit_bias"])
    if _FORMS & body.keys():
        changes["structured_output"] = _form(body)
    if chat:
        changes["logprobs"] = _chat_logprobs(body)
    return replace(defaults, **changes)


def _chat_logprobs(body: dict[str, Any]) -> int | None:
    """A chat body says in `logprobs` whether to return them, and in `top_logprobs` how many."""
    wanted, top = body.get("logprobs", False), body.get("top_logprobs")
    if not isinstance(wanted, bool):
        raise TypeError(f"logprobs={wanted!r} must be true or false in a chat: see top_logprobs")
    if not wanted and top is not None:
        raise ValueError("top_logprobs needs logprobs to be true")
    if not wanted:
        return None
    return 0 if top is None else whole_number("top_logprobs", top, *WHOLE_NUMBERS["logprobs"][:2])


def _logit_bias(value: object) -> dict[int, Any]:
    """Token id -> bias. The keys of JSON are strings; SamplingParams checks the values."""
    if not isinstance(value, dict):
        raise TypeError(f"logit_bias must be an object, got {json_type(value)}")
    wrong = [key for key in value if not (key.isascii() and key.isdigit() and len(key) < 20)]
    if wrong:
        raise ValueError(f"logit_bias has the key {wrong[0]!r}: keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


def _form(body: dict[str, Any]) -> StructuredOutput | None:
    """OpenAI's response_format, or vLLM's structured_outputs, which has more forms."""
    if "response_format" not in body:
        fields = body["structured_outputs"]
        if not isinstance(fields, dict):
            raise TypeError(f"structured_outputs must be an object, got {json_type(fields)}")
        with _named("structured_outputs"):
            return StructuredOutput(**{k: v for k, v in fields.items() if v is not None})
    if "structured_outputs" in body:
        raise ValueError("response_format and structured_outputs are both given: give one")
    wanted = body["response_format"]
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput(json_object=True)
    if kind != "json_schema":
        raise ValueError(
            f"response_format={brief(wanted)} must have the type text, json_object or json_schema"
        )
    named = wanted.get("json_schema")
    if not isinstance(named, dict) or "schema" not in named:
        raise ValueError("response_format.json_schema must be an object with a schema")
    with _named("response_format"):
        return StructuredOutput(json=named["schema"])


@contextlib.contextmanager
def _named(field: str) -> Iterator[None]:
    """An error of the block begins with the field of the body."""
    try:
        yield
    except (TypeError, ValueError) as e:
        message = str(e).removeprefix("StructuredOutput.__init__() ")
        raise ValueError(f"{field}: {message}") from None
