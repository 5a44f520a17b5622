"""Requests whose fields have their largest legal size, for every route with a body.

`cases` yields them; its divisor makes the long ones shorter. `_long_values` has the values of each
field that can be long; labels and hints, which are only stored, fill a body together. `SHORT` lists
the fields that cannot be long. A field of a body that is in none of them is a KeyError, so that a
new field must be added here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Sizes:
    """The sizes of long values: the largest ones, divided by a number."""

    divisor: int

    def of(self, largest: int) -> int:
        return largest // self.divisor

    def words(self, largest: int = _CHARACTERS) -> str:
        return "a cat sat " * self.of(largest // 10)

    def letters(self) -> str:
        """Return a text that is encoded in half the time."""
        return "a" * self.of(_CHARACTERS)


# Values that are cheap at any size that they can have: numbers, flags, and one of a few words.
SHORT = frozenset(
    """
    add_generation_prompt add_special_tokens background best_of cache_prompt context
    continue_final_message conversation documents early_stopping echo frequency_penalty
    functions id_slot ignore_eos images include_reasoning include_stop_str_in_output
    length_penalty logprobs max_completion_tokens max_output_tokens max_tokens mcp_servers min_p
    min_tokens mirostat modalities n no_stop_trim parallel_tool_calls presence_penalty
    previous_response_id return_hidden_states separate_reasoning stream_reasoning
    parse_special priority prompt_cache_retention raw repetition_penalty return_token_ids
    return_token_strs return_tokens_as_token_ids seed service_tier shift skip_special_tokens speed
    store stream stream_options suffix temperature think thinking_budget_tokens
    thinking_token_budget thread timings_per_token top_k top_logprobs top_p truncate
    truncation typical_p use_beam_search
    """.split()
)
_LABELS = frozenset(
    """
    user safety_identifier prompt_cache_key request_id reasoning_effort
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


def _functions(sizes: Sizes, **changes: Any) -> list[dict[str, Any]]:
    """Return 128 functions of a chat, which fill a body of the largest size."""
    parameters = _wide(sizes.of(100), 500)
    description = "d" * sizes.of(4000)
    return [
        {"name": f"f{i}", "parameters": parameters, "description": description, **changes}
        for i in range(128)
    ]


def _chat_tools(sizes: Sizes, **changes: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": each} for each in _functions(sizes, **changes)]


_GRAMMAR = "\n".join(["start: r0", *[f"r{i}: r{i + 1}" for i in range(6600)], 'r6600: "e"'])
_SCHEMA = _wide(1500, 20)
_FORMATS: dict[str, Any] = {
    "schema": {"json": _SCHEMA},
    "regex": {"regex": "(ab?c*|d)" * 11_000},
    "choice": {"choice": [f"{i:05}" * 16 for i in range(1000)]},
    "grammar": {"grammar": _GRAMMAR},
}


def _long_values(sizes: Sizes) -> dict[str, dict[str, Any]]:
    """Return, for each field that can be long, values by name; they suit every body that has it."""
    return {
        "model": {"": sizes.words()},
        "include": {"": ["reasoning.encrypted_content"] * sizes.of(250_000)},
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
            "": {
                "type": "json_schema",
                "json_schema": {"name": sizes.words(7_000_000), "schema": _SCHEMA},
            }
        },
        "prediction": {
            "": {"type": "content", "content": sizes.words()},
            "of letters": {"type": "content", "content": sizes.letters()},
            "of parts": {
                "type": "content",
                "content": [{"type": "text", "text": "ab"}] * sizes.of(45_000),
            },
        },
        "tool_choice": {"": {"type": "function", "function": {"name": sizes.words()}}},
        "text": {
            "": {
                "format": {"type": "json_schema", "name": sizes.words(7_000_000), "schema": _SCHEMA}
            }
        },
        "output_config": {
            "": {
                "effort": sizes.words(7_000_000),
                "format": {"type": "json_schema", "schema": _SCHEMA},
            }
        },
        "chat_template_kwargs": {
            "": {"date_string": sizes.letters()},
            "of many": {f"v{i}": 1 for i in range(sizes.of(90_000))},
        },
        "instructions": {"": sizes.letters()},
        "system": {
            "": sizes.letters(),
            "of blocks": [{"type": "text", "text": "a"}] * sizes.of(45_000),
        },
        "prompt": {
            "": sizes.words(),
            "of letters": sizes.letters(),
            "of ids": [7] * sizes.of(_NUMBERS),
            "of many ids": [[7] * sizes.of(400)] * 256,
            "of texts": ["a cat sat " * sizes.of(400)] * 256,
            "of short texts": ["a"] * 256,
        },
        "messages": {
            "of long text": _user(sizes.letters()),
            "of short texts": _user("a") * sizes.of(33_000),
            "of parts": _user([{"type": "text", "text": "a"}] * sizes.of(45_000)),
        },
        "input": {
            "": sizes.letters(),
            "of messages": _user("a") * sizes.of(33_000),
            "of calls": [
                *_user("a"),
                *[{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]
                * sizes.of(20_000),
            ],
        },
        "tokens": {"": [7] * sizes.of(_NUMBERS)},
        "format": {"": _SCHEMA},
        "keep_alive": {"": sizes.words()},
        "template": {"": "{{ .Prompt }}" + " " * sizes.of(_CHARACTERS - 20)},
        "options": {"": {"stop": [f"{i:02}" + "a" * 254 for i in range(32)], "num_predict": 8}},
    }


def _tools(sizes: Sizes) -> dict[str, dict[str, Any]]:
    """Return fields with tools for each path, by name."""
    messages = {
        "tools": [
            {
                "name": each["name"],
                "input_schema": each["parameters"],
                "description": each["description"],
            }
            for each in _functions(sizes)
        ]
    }
    responses = [{"type": "function", **each} for each in _functions(sizes)]
    return {
        CHAT: {
            "": {"tools": _chat_tools(sizes)},
            "strict": {"tools": _chat_tools(sizes, strict=True), "tool_choice": "required"},
        },
        TOKENIZE: {"": {"tools": _chat_tools(sizes)}},
        RESPONSES: {"required": {"tools": responses, "tool_choice": "required"}},
        MESSAGES: {"": messages},
        COUNT: {"": messages},
        OLLAMA_CHAT: {"": {"tools": _chat_tools(sizes)}},
    }


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


def _combined(sizes: Sizes) -> list[tuple[str, str, dict[str, Any]]]:
    """Return values that are expensive together: names, paths and bodies."""
    long = _long_values(sizes)
    ids = [7] * sizes.of(2000)
    return [
        *[
            (f"{name} of 64 answers{', streamed' if stream else ''}", CHAT,
             {"messages": _user("a"), **_MANY, **_streamed(stream), **fields})
            for stream in (False, True)
            for name, fields in {
                "prediction": {"prediction": long["prediction"][""]},
                "stop": {"stop": long["stop"][""]},
                "bad_words": {"bad_words": long["bad_words"][""]},
                "logit_bias": {"logit_bias": long["logit_bias"][""]},
                "model": {"model": sizes.words()},
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
                "echo of 64 answers with logprobs": {"prompt": ids, "logprobs": 20, "n": 64},
                "echo with logprobs": {"prompt": ids, "logprobs": 100, "n": 8},
                "echo of 64 answers": {"prompt": ids, "n": 64},
                "echo of many prompts": {"prompt": [ids] * 4, "logprobs": 5, "n": 16},
            }.items()
        ],
        ("prompt", "/count_token", {"prompt": sizes.letters()}),
        ("prompt", "/worker_generate", {"prompt": sizes.letters()}),
        (
            "echo with logprobs",
            "/worker_generate",
            {"prompt": "a cat sat " * sizes.of(700), "logprobs": 100, "max_new_tokens": 8},
        ),
        (
            "strings of tokens",
            TOKENIZE,
            {"prompt": "ab " * sizes.of(333_000), "return_token_strs": True},
        ),
    ]  # fmt: skip


def cases(divisor: int = 1) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the name, the path and the body of each request; `divisor` divides the sizes."""
    sizes = Sizes(divisor)
    long = _long_values(sizes)
    tools = _tools(sizes)
    for path, names in body_fields().items():
        base = BASES[path]
        for name, fields in _grouped(names, sizes):
            yield f"{path} {name}", path, {**base, **fields}
        for field in sorted(names - SHORT - _LABELS - _OBJECTS - {"tools"}):
            if (path, field) == (RESPONSES, "prompt"):  # the id of a stored prompt: must be null
                continue
            for name, value in long[field].items():
                is_dialog = path == TOKENIZE and field in _OF_DIALOG
                body = {**(_DIALOG if is_dialog else base), field: value}
                yield f"{path} {field} {name}".strip(), path, body
        for name, fields in tools[path].items() if "tools" in names else ():
            dialog = _DIALOG if path == TOKENIZE else base
            yield f"{path} tools {name}".strip(), path, {**dialog, **fields}
    for name, path, body in _combined(sizes):
        yield f"{path} {name}", path, body


def _grouped(names: set[str], sizes: Sizes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield bodies that labels and hints fill, each with an equal part."""
    labels = names & _LABELS
    objects = names & _OBJECTS
    if labels:
        yield "labels", {name: sizes.words(_CHARACTERS // len(labels)) for name in labels}
    if objects:
        text = sizes.words(_CHARACTERS // len(objects))
        count = sizes.of(_BRACKETS) // len(objects) - 10
        yield "objects of text", {name: {"type": "a", "x": text} for name in objects}
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
