"""One line of a batch file: what it asks for, and the record of what came of it.

A line is in OpenAI's batch form, a plain JSON object, or bare text; a record is in OpenAI's form.
"""

import codecs
import json
from typing import Any

from llama.checks import brief
from llama.requests.request import RequestOutput
from llama.sampling_params import SamplingParams
from llama.server.openai.answers import Completion, ResponseMeta
from llama.server.openai.models import CHAT_URL, TEXT_URL, parse_body
from llama.server.openai.request import OpenAIRequest
from llama.tokenizer import Tokenizer
from llama.validation import json_type

MAX_LINE = 10_000_000  # bytes
_ENVELOPE = {"custom_id", "method", "url", "body"}
_MAX_MESSAGE = 1000  # characters of an error message: it may quote the line


def check_encoding(name: str, data: bytes) -> None:
    """ValueError if the beginning of a file shows that it is not UTF-8."""
    if b"\0" in data or data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        remedy = f"convert it with iconv -f UTF-16 -t UTF-8 {name} > NEW_FILE"
        raise ValueError(f"{name} is not UTF-8: where it is UTF-16, {remedy}")


def parse_line(data: bytes, *, jsonl: bool) -> dict[str, Any]:
    """The fields of a line; a line of a text file is the prompt. ValueError for a bad line."""
    if len(data) > MAX_LINE:
        raise ValueError(f"the line has more than {MAX_LINE} bytes: shorten it")
    try:
        text = data.decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"the line is not UTF-8 at byte {e.start + 1}: {e.reason}") from None
    if not jsonl:
        return {"prompt": text}
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as e:
        raise ValueError(f"the line is not JSON: {e.msg} at character {e.pos + 1}") from None
    except RecursionError:
        raise ValueError("the line's JSON is nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError("the line must be a JSON object, as the first line of the file is")
    return fields


def custom_id_of(fields: dict[str, Any], default: str) -> str:
    """The line's custom_id. It need not be unique: the id of a record holds the line's number."""
    custom_id = fields.get("custom_id")
    if custom_id is None:
        return default
    if not isinstance(custom_id, str):
        raise TypeError(f"custom_id must be a string, got {json_type(custom_id)}")
    return custom_id


def read_request(fields: dict[str, Any], defaults: SamplingParams) -> OpenAIRequest:
    """What a line asks for. TypeError or ValueError names the field that is wrong or unknown."""
    url, body = target(fields)
    request = parse_body(body, defaults, chat=url == CHAT_URL)
    if len(request.prompts) > 1:
        raise ValueError(f"prompt has {len(request.prompts)} entries: give each a line of its own")
    return request


def target(fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The path and the body of a line's request; most fields of the body are not checked yet.
    TypeError or ValueError."""
    if fields.keys() & {"url", "body", "method"}:
        if unknown := sorted(fields.keys() - _ENVELOPE):
            raise ValueError(f"{brief(unknown[0])} cannot be used in the line, beside its body")
        url, body = fields.get("url"), fields.get("body")
        if fields.get("method", "POST") != "POST":
            raise ValueError(f"method={fields['method']!r} must be POST")
        if url not in (CHAT_URL, TEXT_URL):
            raise ValueError(f"url={url!r} must be {CHAT_URL} or {TEXT_URL}")
    else:
        body = {name: value for name, value in fields.items() if name != "custom_id"}
        url = CHAT_URL if "messages" in body else TEXT_URL
        if ("messages" in body) == ("prompt" in body):
            raise ValueError("the line must have a prompt, messages, or a url and a body")
    if not isinstance(body, dict):
        raise TypeError(f"body must be an object, got {json_type(body)}")
    if body.get("stream"):
        raise ValueError("stream must be false: a line gets one record")
    return url, body


def error_record(custom_id: str, number: int, code: str, message: str) -> dict[str, Any]:
    """The record of line `number`, which has no answer. `code` is a word of OpenAI's API."""
    error = {"code": code, "message": message[:_MAX_MESSAGE], "line": number}
    return {"custom_id": custom_id, "response": None, "error": error}


def answer_record(
    custom_id: str,
    number: int,
    request: OpenAIRequest,
    output: RequestOutput,
    tokenizer: Tokenizer,
    model: str,
) -> dict[str, Any]:
    """The record of a finished request; an error record if the engine ended it with an error."""
    if output.error is not None:
        code = "server_error" if output.error_field is None else "invalid_request"
        return error_record(custom_id, number, code, output.error)
    name = model if request.model is None else request.model
    meta = ResponseMeta(output.request_id, name, created=0)  # the same record from the same job
    body = Completion(request, tokenizer, meta).whole([output])
    return response_record(custom_id, output.request_id, body)


def response_record(custom_id: str, request_id: str, body: Any) -> dict[str, Any]:
    """The record of a line that was answered: `body` is that of the response."""
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return {"custom_id": custom_id, "response": response, "error": None}
