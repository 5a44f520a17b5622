"""The client's side of OpenAI's bodies: what a request says, and what an answer said.

In: what a person or a line of a file wants; a server's JSON. Out: a request's body; plain values.
The server may be any that speaks OpenAI's API, so nothing here is sure to be there. This file
knows no network.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from llama.sampling_params import SamplingParams

_DEFAULTS = SamplingParams()
_MAX_QUOTED = 500  # characters of an error that is not in OpenAI's form


def filled(
    body: Mapping[str, Any], defaults: SamplingParams, *, model: str, seed: int
) -> dict[str, Any]:
    """The body with values for what it leaves out or has as null. `defaults` brings temperature,
    top_p and, unless it is None, max_tokens."""
    given = {name: value for name, value in body.items() if value is not None}
    wanted = {"model": model, "temperature": defaults.temperature, "top_p": defaults.top_p}
    wanted["seed"] = seed
    if defaults.max_tokens is not None and "max_completion_tokens" not in given:
        wanted["max_tokens"] = defaults.max_tokens
    return wanted | given


def chat_body(
    messages: Sequence[Mapping[str, Any]], params: SamplingParams, *, model: str
) -> dict[str, Any]:
    """The body of a chat that streams and ends with its usage. Only what differs from OpenAI's
    defaults is said, as some servers know few fields."""
    changed = {
        field.name: getattr(params, field.name)
        for field in fields(SamplingParams)
        if getattr(params, field.name) != getattr(_DEFAULTS, field.name)
    }
    return {
        "model": model,
        "messages": [dict(message) for message in messages],
        **{k: list(v) if isinstance(v, tuple) else v for k, v in changed.items()},
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@dataclass(frozen=True)
class ModelCard:
    """A server's model. context: the most tokens of prompt and answer, where the server says."""

    name: str
    context: int | None


def model_card(listing: Any, name: str | None) -> ModelCard:
    """Of the answer of /v1/models the model of that name, or the first. ValueError if none."""
    data = listing.get("data") if isinstance(listing, dict) else None
    cards = [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []
    names = [str(card.get("id")) for card in cards]
    if not names:
        raise ValueError("it lists no models at /v1/models: is it a server of OpenAI's API?")
    if name is not None and name not in names:
        raise ValueError(f"it has no model {name}: it has {', '.join(names[:20])}")
    card = cards[0 if name is None else names.index(name)]
    context = card.get("max_model_len")
    return ModelCard(str(card["id"]), context if type(context) is int else None)


def error_message(body: Any, raw: bytes) -> str:
    """What an error's body says: in OpenAI's form, or else its beginning."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    if isinstance(message, str) and message:
        return message
    return raw[:_MAX_QUOTED].decode(errors="replace").strip() or "no message"


@dataclass(frozen=True)
class Delta:
    """What one chunk of a chat brings. counts: prompt, cached and generated tokens, if it says."""

    text: str = ""
    finish_reason: str | None = None
    counts: tuple[int, int, int] | None = None
    error: str | None = None


def delta_of(chunk: Any) -> Delta:
    """A chunk of a stream with one choice. Tool calls and reasoning are not text."""
    if not isinstance(chunk, dict):
        return Delta(error="the server sent a chunk that is no object")
    usage, choices = chunk.get("usage"), chunk.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    delta = choice.get("delta") if isinstance(choice, dict) else None
    text = delta.get("content") if isinstance(delta, dict) else None
    return Delta(
        text=text if isinstance(text, str) else "",
        finish_reason=choice.get("finish_reason") if isinstance(choice, dict) else None,
        counts=counts_of(usage),
    )


def counts_of(usage: Any) -> tuple[int, int, int] | None:
    """Prompt, cached and generated tokens of a usage object; None if it is none."""
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    numbers = (usage.get("prompt_tokens"), cached, usage.get("completion_tokens"))
    prompt, cached, generated = (n if type(n) is int else 0 for n in numbers)
    return prompt, cached, generated
