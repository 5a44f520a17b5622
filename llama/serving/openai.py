"""OpenAI's completion API as data: request bodies in, response bodies out.

In: the JSON object of a request body, whether a server or a batch file brought it. Out: a checked
`OpenAIRequest`; later, from the engine's output, the response body. Every field of a body is used,
or is an error that names it. This file knows no files, no network, and runs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from llama.requests.detokenizer import Detokenizer
from llama.requests.request import CompletionOutput, RequestOutput, Usage
from llama.sampling_params import SamplingParams
from llama.tokenizer import Tokenizer

CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"
_LABELS = {"model", "user", "metadata"}  # for bookkeeping: they do not change the answer
# These have the same name in SamplingParams. OpenAI has no field for the one that is left out.
_SAMPLING = {f.name for f in fields(SamplingParams)} - {"prompt_logprobs"}
_ALIASES = {"max_completion_tokens"}
_MIN_LOGPROB = -9999.0  # what OpenAI writes for minus infinity, which JSON does not have


@dataclass(frozen=True)
class OpenAIRequest:
    """prompt: text or token ids; of a chat, the messages. Whoever encodes it checks its content."""

    chat: bool
    prompt: Any
    params: SamplingParams
    model: str | None


def parse_body(body: Any, defaults: SamplingParams, *, chat: bool) -> OpenAIRequest:
    """The request in a body; `defaults` are the parameters that the body does not give.

    TypeError or ValueError names the field that is wrong or unknown.
    """
    if not isinstance(body, dict):
        raise TypeError(f"body must be an object, got {json_type(body)}")
    # Clients write null for a field that is not given, and "stream": false, which asks for nothing.
    no_stream = body.get("stream") is False
    given = {k: v for k, v in body.items() if v is not None and not (k == "stream" and no_stream)}
    prompt_name = "messages" if chat else "prompt"
    known = {prompt_name} | _SAMPLING | _ALIASES | _LABELS | ({"top_logprobs"} if chat else set())
    refuse_fields(given.keys() - known, "a chat request" if chat else "a completion request")
    prompt = given.get(prompt_name)
    if not isinstance(prompt, list if chat else list | str):
        allowed = "a list" if chat else "a string or a list of token ids"
        raise TypeError(f"{prompt_name} must be {allowed}, got {json_type(prompt)}")
    model = given.get("model")
    if model is not None and not isinstance(model, str):
        raise TypeError(f"model must be a string, got {json_type(model)}")
    return OpenAIRequest(chat, prompt, _params(given, chat, defaults), model)


def _params(body: dict[str, Any], chat: bool, defaults: SamplingParams) -> SamplingParams:
    changes = {name: body[name] for name in _SAMPLING & body.keys()}
    if "max_completion_tokens" in body:
        if "max_tokens" in body:
            raise ValueError("max_tokens and max_completion_tokens are the same: give one")
        changes["max_tokens"] = body["max_completion_tokens"]
    if "logit_bias" in body:
        changes["logit_bias"] = _logit_bias(body["logit_bias"])
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
    return 0 if top is None else top


def _logit_bias(value: object) -> dict[int, Any]:
    """Token id -> bias. The keys of JSON are strings; SamplingParams checks the values."""
    if not isinstance(value, dict):
        raise TypeError(f"logit_bias must be an object, got {json_type(value)}")
    wrong = [key for key in value if not (key.isascii() and key.isdigit() and len(key) < 20)]
    if wrong:
        raise ValueError(f"logit_bias has the key {wrong[0]!r}: keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


def refuse_fields(unknown: set[str], place: str) -> None:
    """ValueError that names the fields, if there are any."""
    if unknown:
        names = ", ".join(map(repr, sorted(unknown)))
        raise ValueError(f"{names} cannot be used in {place}: leave it out")


def json_type(value: object) -> str:
    """The type of a value from JSON, in JSON's words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def response_body(
    request: OpenAIRequest, output: RequestOutput, tokenizer: Tokenizer, model: str, created: int
) -> dict[str, Any]:
    """The response to a finished request. `model`: the label, if the request has none.

    created: the time of the response, in seconds since 1970.
    """
    return {
        "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{output.request_id}",
        "object": "chat.completion" if request.chat else "text_completion",
        "created": created,
        "model": model if request.model is None else request.model,
        "choices": [_choice(answer, request, tokenizer) for answer in output.outputs],
        "usage": _usage(output.usage),
    }


def _choice(
    answer: CompletionOutput, request: OpenAIRequest, tokenizer: Tokenizer
) -> dict[str, Any]:
    content: dict[str, Any] = {"text": answer.text}
    if request.chat:
        content = {"message": {"role": "assistant", "content": answer.text}}
    logprobs = None
    if answer.logprobs is not None:
        scores = list(zip(answer.token_ids, answer.logprobs, strict=True))
        if request.chat:
            logprobs = _chat_scores(scores, request.params.logprobs or 0, tokenizer)
        else:
            logprobs = text_scores(scores, tokenizer)
    return {
        "index": answer.index,
        **content,
        "logprobs": logprobs,
        "finish_reason": answer.finish_reason,
    }


_Scores = list[tuple[int, dict[int, float]]]  # per position: the token, and logprobs by token
# As _Scores; the first token of an echoed prompt has none.
_PromptScores = Sequence[tuple[int, dict[int, float] | None]]


def _chat_scores(scores: _Scores, num_top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.decode_bytes([token])
        return {
            "token": raw.decode(errors="replace"),
            "logprob": max(logprob, _MIN_LOGPROB),
            "bytes": list(raw),
        }

    content = []
    for token, logprobs in scores:
        top = [entry(*pair) for pair in _best_first(logprobs)[:num_top]]
        content.append({**entry(token, logprobs[token]), "top_logprobs": top})
    return {"content": content}


def text_scores(
    scores: _PromptScores, tokenizer: Tokenizer, *, skip_special_tokens: bool = False
) -> dict[str, Any]:
    """The logprobs of a completion: tokens, token_logprobs, top_logprobs and text_offset.

    skip_special_tokens: as in the text that the offsets are of.
    """
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    offsets, length = [], 0
    for token, _ in scores:
        offsets.append(length)
        length += len(detokenizer.push([token]))
    return {
        "tokens": [tokenizer.decode([token]) for token, _ in scores],
        "token_logprobs": [
            None if logprobs is None else max(logprobs[token], _MIN_LOGPROB)
            for token, logprobs in scores
        ],
        "top_logprobs": [
            None
            if logprobs is None
            else {
                tokenizer.decode([t]): max(value, _MIN_LOGPROB)
                for t, value in _best_first(logprobs)
            }
            for _, logprobs in scores
        ],
        "text_offset": offsets,
    }


def _best_first(logprobs: dict[int, float]) -> list[tuple[int, float]]:
    return sorted(logprobs.items(), key=lambda pair: -pair[1])


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
