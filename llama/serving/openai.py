"""What one line of a batch file asks for, and the record of what came of it.

In: a line's bytes, in OpenAI's batch form, as a plain JSON object, or as bare text. Out: a checked
`BatchRequest`; later, from the engine's output, a record in OpenAI's batch output form. Every field
is used, or is an error that names it. It knows no files and runs nothing.
"""

import json
from dataclasses import dataclass, fields, replace
from typing import Any

from llama.batch.files import MAX_LINE
from llama.requests.detokenizer import Detokenizer
from llama.requests.llm_engine import CompletionOutput, RequestOutput, Usage
from llama.sampling_params import SamplingParams
from llama.tokenizer import Tokenizer

CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"
_ENVELOPE = {"custom_id", "method", "url", "body"}
_LABELS = {"model", "user", "metadata"}  # of bookkeeping: nothing is generated otherwise for them
# Taken as SamplingParams has them; the two left out have no place in a record.
_SAMPLING = {f.name for f in fields(SamplingParams)} - {"prompt_logprobs"}
_ALIASES = {"max_completion_tokens"}
_LEAST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot say
_MOST_MESSAGE = 1000  # characters of an error's text: it may quote the line


@dataclass(frozen=True)
class BatchRequest:
    """prompt: text or ids; of a chat, the messages. They are checked by whoever encodes them."""

    chat: bool
    prompt: Any
    params: SamplingParams
    model: str | None


def parse_line(data: bytes, *, jsonl: bool) -> dict[str, Any]:
    """The line's fields; one of a text file is a prompt as it stands. ValueError for a bad one."""
    if len(data) > MAX_LINE:
        raise ValueError(f"the line has more than {MAX_LINE} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"the line is not UTF-8 at byte {e.start + 1}: {e.reason}") from None
    if not jsonl:
        return {"prompt": text}
    try:
        found = json.loads(text)
    except json.JSONDecodeError as e:
        raise ValueError(f"the line is not JSON: {e.msg} at character {e.pos + 1}") from None
    except RecursionError:
        raise ValueError("the line's JSON is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("the line is not a JSON object, as the file's first line is")
    return found


def custom_id_of(line: dict[str, Any], default: str) -> str:
    """The line's custom_id, which need not be unique: a record's id has the line's number."""
    custom_id = line.get("custom_id")
    if custom_id is None:
        return default
    if not isinstance(custom_id, str):
        raise TypeError(f"custom_id is {_kind(custom_id)}, where a string belongs")
    return custom_id


def read_request(line: dict[str, Any], defaults: SamplingParams) -> BatchRequest:
    """What a line asks for. TypeError or ValueError names the field that is wrong or unknown."""
    chat, body = _open_envelope(line)
    if body.get("stream") is False:  # asks for nothing, and clients write it
        body = {name: value for name, value in body.items() if name != "stream"}
    prompt_name = "messages" if chat else "prompt"
    known = {prompt_name} | _SAMPLING | _ALIASES | _LABELS | ({"top_logprobs"} if chat else set())
    _refuse(body.keys() - known, "a chat request" if chat else "a completion request")
    prompt = body.get(prompt_name)
    if not isinstance(prompt, list if chat else list | str):
        allowed = "a list" if chat else "a string or a list of token ids"
        raise TypeError(f"{prompt_name} is {_kind(prompt)}, where {allowed} belongs")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise TypeError(f"model is {_kind(model)}, where a string belongs")
    return BatchRequest(chat, prompt, _params(body, chat, defaults), model)


def _open_envelope(line: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
    """(chat?, body). A null is how clients write a field that is not given: it is left out."""
    if line.keys() & {"url", "body", "method"}:
        _refuse(line.keys() - _ENVELOPE, "the line, beside its body")
        url, body = line.get("url"), line.get("body")
        if line.get("method", "POST") != "POST":
            raise ValueError(f"method={line['method']!r} must be POST")
        if url not in (CHAT_URL, TEXT_URL):
            raise ValueError(f"url={url!r} must be {CHAT_URL} or {TEXT_URL}")
        if not isinstance(body, dict):
            raise TypeError(f"body is {_kind(body)}, where an object belongs")
        chat = url == CHAT_URL
    else:
        body = {name: value for name, value in line.items() if name != "custom_id"}
        chat = "messages" in body
        if chat == ("prompt" in body):
            raise ValueError("the line must have a prompt, messages, or a url and a body")
    return chat, {name: value for name, value in body.items() if value is not None}


def _params(body: dict[str, Any], chat: bool, defaults: SamplingParams) -> SamplingParams:
    changes = {name: body[name] for name in _SAMPLING & body.keys()}
    if "max_completion_tokens" in body:
        if "max_tokens" in body:
            raise ValueError("max_tokens and max_completion_tokens are the same: give one")
        changes["max_tokens"] = body["max_completion_tokens"]
    if "logit_bias" in body:
        changes["logit_bias"] = _bias(body["logit_bias"])
    if chat:
        changes["logprobs"] = _chat_logprobs(body)
    return replace(defaults, **changes)


def _chat_logprobs(body: dict[str, Any]) -> int | None:
    """A chat says with one field whether, and with another how many."""
    wanted, top = body.get("logprobs", False), body.get("top_logprobs")
    if not isinstance(wanted, bool):
        raise TypeError(f"logprobs={wanted!r} must be true or false in a chat: see top_logprobs")
    if not wanted and top is not None:
        raise ValueError("top_logprobs needs logprobs to be true")
    if not wanted:
        return None
    return 0 if top is None else top


def _bias(value: object) -> dict[int, Any]:
    """JSON's keys are strings; what the values may be is for SamplingParams to say."""
    if not isinstance(value, dict):
        raise TypeError(f"logit_bias is {_kind(value)}, where an object belongs")
    wrong = [key for key in value if not (key.isascii() and key.isdigit() and len(key) < 20)]
    if wrong:
        raise ValueError(f"logit_bias has the key {wrong[0]!r}, where a token id belongs")
    return {int(key): bias for key, bias in value.items()}


def _refuse(unknown: set[str], place: str) -> None:
    if unknown:
        names = ", ".join(map(repr, sorted(unknown)))
        raise ValueError(f"{names} cannot be used in {place}: leave it out")


def _kind(value: object) -> str:
    """What JSON calls it."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def error_record(custom_id: str, number: int, error: Exception) -> dict[str, object]:
    """The record of a line that could not be run."""
    told = {"code": "invalid_request", "message": str(error)[:_MOST_MESSAGE], "line": number}
    return {"custom_id": custom_id, "response": None, "error": told}


def answer_record(
    custom_id: str, request: BatchRequest, output: RequestOutput, tokenizer: Tokenizer, model: str
) -> dict[str, object]:
    """The record of a finished request. `created` is 0: the same job gives the same record."""
    body = {
        "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{output.request_id}",
        "object": "chat.completion" if request.chat else "text_completion",
        "created": 0,
        "model": model if request.model is None else request.model,
        "choices": [_choice(answer, request, tokenizer) for answer in output.outputs],
        "usage": _usage(output.usage),
    }
    response = {"status_code": 200, "request_id": output.request_id, "body": body}
    return {"custom_id": custom_id, "response": response, "error": None}


def _choice(
    answer: CompletionOutput, request: BatchRequest, tokenizer: Tokenizer
) -> dict[str, object]:
    said: dict[str, object] = {"text": answer.text}
    if request.chat:
        said = {"message": {"role": "assistant", "content": answer.text}}
    logprobs: dict[str, object] | None = None
    if answer.logprobs is not None:
        scores = list(zip(answer.token_ids, answer.logprobs, strict=True))
        if request.chat:
            logprobs = _chat_scores(scores, request.params.logprobs or 0, tokenizer)
        else:
            logprobs = _text_scores(scores, tokenizer)
    end = {"logprobs": logprobs, "finish_reason": answer.finish_reason}
    return {"index": answer.index, **said, **end}


_Scores = list[tuple[int, dict[int, float]]]  # a token, and the log-probabilities in its place


def _chat_scores(scores: _Scores, most: int, tokenizer: Tokenizer) -> dict[str, object]:
    def entry(token: int, score: float) -> dict[str, object]:
        raw = tokenizer.decode_bytes([token])
        return {
            "token": raw.decode(errors="replace"),
            "logprob": max(score, _LEAST_LOGPROB),
            "bytes": list(raw),
        }

    content = []
    for token, places in scores:
        tops = [entry(*pair) for pair in _by_score(places)[:most]]
        content.append({**entry(token, places[token]), "top_logprobs": tops})
    return {"content": content}


def _text_scores(scores: _Scores, tokenizer: Tokenizer) -> dict[str, object]:
    decoder = Detokenizer(tokenizer)
    offsets, length = [], 0
    for token, _ in scores:
        offsets.append(length)
        length += len(decoder.push([token]))
    return {
        "tokens": [tokenizer.decode([token]) for token, _ in scores],
        "token_logprobs": [max(places[token], _LEAST_LOGPROB) for token, places in scores],
        "top_logprobs": [
            {tokenizer.decode([t]): max(score, _LEAST_LOGPROB) for t, score in _by_score(places)}
            for _, places in scores
        ],
        "text_offset": offsets,
    }


def _by_score(places: dict[int, float]) -> list[tuple[int, float]]:
    return sorted(places.items(), key=lambda pair: -pair[1])


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
