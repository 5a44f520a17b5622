"""Requests whose fields have their largest legal size, for every route with a body.

`cases` yields them. `LONG` has the largest values of each field that can be long; labels and hints,
which are only stored, fill a body together. `SHORT` lists the fields that cannot be long. A field
of a body that is in none of them is a KeyError, so that a new field must be added here.
"""

from collections.abc import Iterator
from typing import Any

from llama.prompts.fields import Fields
from llama.server.anthropic.models import CountBody, MessagesBody
from llama.server.ollama import models as ollama
from llama.server.openai.models import ChatBody, CompletionBody
from llama.server.responses.models import ResponsesBody
from llama.server.tokens import DetokenizeBody, TokenizeChat, TokenizeText

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
OLLAMA_CHAT = ollama.CHAT_URL
OLLAMA_TEXT = ollama.GENERATE_URL

# Slightly less than the limits of the server for one body (`Limits` and `exchange`).
_CHARACTERS = 8_300_000
_BRACKETS = 99_000
_NUMBERS = 999_000

_LONG = "a cat sat " * (_CHARACTERS // 10)
_LETTERS = "a" * _CHARACTERS  # encoded in half the time
# Values that are cheap at any size that they can have: numbers, flags, and one of a few words.
SHORT = frozenset(
    """
    add_generation_prompt add_special_tokens background best_of cache_prompt context
    continue_final_message conversation documents early_stopping echo frequency_penalty
    functions id_slot ignore_eos images include_reasoning include_stop_str_in_output
    length_penalty logprobs max_completion_tokens max_output_tokens max_tokens mcp_servers min_p
    min_tokens mirostat modalities n no_stop_trim parallel_tool_calls presence_penalty
    previous_response_id return_hidden_states separate_reasoning stream_reasoning
    priority raw repetition_penalty return_token_ids return_token_strs
    return_tokens_as_token_ids seed service_tier skip_special_tokens speed store stream
    stream_options suffix temperature think thinking_budget_tokens thinking_token_budget thread
    timings_per_token top_k top_logprobs top_p truncation typical_p use_beam_search
    """.split()
)
_LABELS = frozenset(
    """
    user safety_identifier prompt_cache_key prompt_cache_retention request_id reasoning_effort
    verbosity guided_decoding_backend
    """.split()
)
_OBJECTS = frozenset(
    "metadata client_metadata cache_control reasoning thinking context_management".split()
)


def _user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def _wide(count: int, size: int = 1) -> dict[str, Any]:
    """Return the schema of an object with `count` properties."""
    properties = {f"p{i}": {"type": "string", "title": "t" * size} for i in range(count)}
    return {"type": "object", "properties": properties}


def _functions(**changes: Any) -> list[dict[str, Any]]:
    """Return 128 functions of a chat, which fill the body."""
    return [
        {"name": f"f{i}", "parameters": _wide(100, 500), "description": "d" * 4000, **changes}
        for i in range(128)
    ]


def _chat_tools(**changes: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": each} for each in _functions(**changes)]


_GRAMMAR = "\n".join(["start: r0", *[f"r{i}: r{i + 1}" for i in range(6600)], 'r6600: "e"'])
_SCHEMA = _wide(1500, 20)
_FORMATS: dict[str, Any] = {
    "schema": {"json": _SCHEMA},
    "regex": {"regex": "(ab?c*|d)" * 11_000},
    "choice": {"choice": [f"{i:05}" * 16 for i in range(1000)]},
    "grammar": {"grammar": _GRAMMAR},
}

# Field -> name -> value. The values suit every body that has the field.
LONG: dict[str, dict[str, Any]] = {
    "model": {"": _LONG},
    "include": {"": ["reasoning.encrypted_content"] * 250_000},
    "stop": {"": [f"{i:02}" + "a" * 254 for i in range(32)], "stop": "a" * 256},
    "stop_sequences": {"": [f"{i:02}" + "a" * 254 for i in range(32)]},
    "stop_token_ids": {"": list(range(256))},
    "bad_words": {"": [f"{i:03}" + "a b" * 84 for i in range(256)]},
    "logit_bias": {"": {str(i): 1 for i in range(1024)}},
    "cache_salt": {"": "s" * 256},
    "structured_outputs": _FORMATS,
    "guided_json": {"": _SCHEMA},
    "guided_regex": {"": "(ab?c*|d)" * 11_000},
    "guided_choice": {"": [f"{i:05}" * 16 for i in range(1000)]},
    "guided_grammar": {"": _GRAMMAR},
    "response_format": {
        "": {"type": "json_schema", "json_schema": {"name": _LONG[:7_000_000], "schema": _SCHEMA}}
    },
    "prediction": {
        "": {"type": "content", "content": _LONG},
        "of letters": {"type": "content", "content": _LETTERS},
        "of parts": {"type": "content", "content": [{"type": "text", "text": "ab"}] * 45_000},
    },
    "tool_choice": {"": {"type": "function", "function": {"name": _LONG}}},
    "text": {"": {"format": {"type": "json_schema", "name": _LONG[:7_000_000], "schema": _SCHEMA}}},
    "output_config": {
        "": {"effort": _LONG[:7_000_000], "format": {"type": "json_schema", "schema": _SCHEMA}}
    },
    "chat_template_kwargs": {
        "": {"date_string": _LETTERS},
        "of many": {f"v{i}": 1 for i in range(90_000)},
    },
    "instructions": {"": _LETTERS},
    "system": {"": _LETTERS, "of blocks": [{"type": "text", "text": "a"}] * 45_000},
    "prompt": {
        "": _LONG,
        "of letters": _LETTERS,
        "of ids": [7] * _NUMBERS,
        "of many ids": [[7] * 400] * 256,
        "of texts": ["a cat sat " * 400] * 256,
        "of short texts": ["a"] * 256,
    },
    "messages": {
        "of long text": _user(_LETTERS),
        "of short texts": _user("a") * 33_000,
        "of parts": _user([{"type": "text", "text": "a"}] * 45_000),
    },
    "input": {
        "": _LETTERS,
        "of messages": _user("a") * 33_000,
        "of calls": [
            *_user("a"),
            *[{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * 20_000,
        ],
    },
    "tokens": {"": [7] * _NUMBERS},
    "format": {"": _SCHEMA},
    "keep_alive": {"": _LONG},
    "template": {"": "{{ .Prompt }}" + " " * (_CHARACTERS - 20)},
    "options": {"": {"stop": [f"{i:02}" + "a" * 254 for i in range(32)], "num_predict": 8}},
}
_TOOLS: dict[str, dict[str, Any]] = {
    CHAT: {
        "": {"tools": _chat_tools()},
        "strict": {"tools": _chat_tools(strict=True), "tool_choice": "required"},
    },
    TOKENIZE: {"": {"tools": _chat_tools()}},
    RESPONSES: {
        "required": {
            "tools": [{"type": "function", **each} for each in _functions()],
            "tool_choice": "required",
        },
    },
    MESSAGES: {
        "": {
            "tools": [
                {"name": f"f{i}", "input_schema": _wide(100, 500), "description": "d" * 4000}
                for i in range(128)
            ]
        }
    },
}
_TOOLS[COUNT] = _TOOLS[MESSAGES]
_TOOLS[OLLAMA_CHAT] = {"": {"tools": _chat_tools()}}
BASES: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "a", "max_tokens": 8},
    CHAT: {"messages": _user("a"), "max_tokens": 8},
    RESPONSES: {"input": "a", "max_output_tokens": 8},
    MESSAGES: {"messages": _user("a"), "max_tokens": 8},
    COUNT: {"messages": _user("a")},
    TOKENIZE: {"prompt": "a"},
    DETOKENIZE: {"tokens": [7]},
    OLLAMA_CHAT: {"messages": _user("a"), "options": {"num_predict": 8}},
    OLLAMA_TEXT: {"prompt": "a", "options": {"num_predict": 8}},
}
# Fields of /tokenize that a dialog has.
_OF_DIALOG = {"messages", "tool_choice", "chat_template_kwargs"}
_DIALOG = {"messages": _user("a")}


def _streamed(stream: bool) -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}} if stream else {}


_MANY = {"n": 64, "max_tokens": 8, "ignore_eos": True}
_IDS = [7] * 2000
# Values that are expensive together.
_COMBINED: list[tuple[str, str, dict[str, Any]]] = [
    *[
        (f"{name} of 64 answers{', streamed' if stream else ''}", CHAT,
         {"messages": _user("a"), **_MANY, **_streamed(stream), **fields})
        for stream in (False, True)
        for name, fields in {
            "prediction": {"prediction": LONG["prediction"][""]},
            "stop": {"stop": LONG["stop"][""]},
            "bad_words": {"bad_words": LONG["bad_words"][""]},
            "logit_bias": {"logit_bias": LONG["logit_bias"][""]},
            "model": {"model": _LONG},
            "top_logprobs": {"logprobs": True, "top_logprobs": 100},
        }.items()
    ],
    *[
        (
            f"{name}{', streamed' if stream else ''}",
            TEXT,
            {"max_tokens": 4, "ignore_eos": True, **_streamed(stream), "echo": True, **fields},
        )
        for stream in (False, True)
        for name, fields in {
            "echo of 64 answers with logprobs": {"prompt": _IDS, "logprobs": 20, "n": 64},
            "echo with logprobs": {"prompt": _IDS, "logprobs": 100, "n": 8},
            "echo of 64 answers": {"prompt": _IDS, "n": 64},
            "echo of many prompts": {"prompt": [_IDS] * 4, "logprobs": 5, "n": 16},
        }.items()
    ],
    ("prompt", "/count_token", {"prompt": _LETTERS}),
    ("prompt", "/worker_generate", {"prompt": _LETTERS}),
    (
        "echo with logprobs",
        "/worker_generate",
        {"prompt": "a cat sat " * 700, "logprobs": 100, "max_new_tokens": 8},
    ),
    ("strings of tokens", TOKENIZE, {"prompt": "ab " * 333_000, "return_token_strs": True}),
]  # fmt: skip


def cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the name, the path and the body of each request."""
    for path, names in body_fields().items():
        base = BASES[path]
        for name, fields in _grouped(names):
            yield f"{path} {name}", path, {**base, **fields}
        for field in sorted(names - SHORT - _LABELS - _OBJECTS - {"tools"}):
            if (path, field) == (RESPONSES, "prompt"):  # the id of a stored prompt: must be null
                continue
            for name, value in LONG[field].items():
                is_dialog = path == TOKENIZE and field in _OF_DIALOG
                body = {**(_DIALOG if is_dialog else base), field: value}
                yield f"{path} {field} {name}".strip(), path, body
        for name, fields in _TOOLS[path].items() if "tools" in names else ():
            dialog = _DIALOG if path == TOKENIZE else base
            yield f"{path} tools {name}".strip(), path, {**dialog, **fields}
    for name, path, body in _COMBINED:
        yield f"{path} {name}", path, body


def _grouped(names: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield bodies that labels and hints fill, each with an equal part."""
    labels = names & _LABELS
    objects = names & _OBJECTS
    if labels:
        yield "labels", {name: _LONG[: _CHARACTERS // len(labels)] for name in labels}
    if objects:
        size = _CHARACTERS // len(objects)
        count = _BRACKETS // len(objects) - 10
        yield "objects of text", {name: {"type": "a", "x": _LONG[:size]} for name in objects}
        many = {f"x{i}": 1 for i in range(count)}
        yield "objects of fields", {name: {"type": "a", **many} for name in objects}


def body_fields() -> dict[str, set[str]]:
    """Return the names of the fields that the body of each path may have."""
    bodies: dict[str, list[type[Fields]]] = {
        TEXT: [CompletionBody],
        CHAT: [ChatBody],
        RESPONSES: [ResponsesBody],
        MESSAGES: [MessagesBody],
        COUNT: [CountBody],
        TOKENIZE: [TokenizeText, TokenizeChat],
        DETOKENIZE: [DetokenizeBody],
        OLLAMA_CHAT: [ollama.ChatBody],
        OLLAMA_TEXT: [ollama.GenerateBody],
    }
    return {
        path: {name for model in models for name in model.known_names}
        for path, models in bodies.items()
    }
