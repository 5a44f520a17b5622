"""What a client is told when its request cannot be answered: a status and an error object.

No path, no trace and no long quotation of the request reaches a client.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from llama.checks import FieldError

log = logging.getLogger("llama.server")
# A message may quote what the client sent, and the field may be of the client's own making.
_MAX_MESSAGE_BYTES, _MAX_PARAM_BYTES = 2000, 500  # of JSON
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
_RETRY_S = 5  # when a client that got 503 may ask again
MAX_HEADER_BYTES = 64 * 1024
_ANTHROPIC_PATH = "/v1/messages"


@dataclass(eq=False)
class ApiError(Exception):
    """status: of HTTP. param: the field that is at fault. is_logged: the request has its line."""

    status: int
    message: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    is_logged: bool = False

    def __post_init__(self) -> None:
        self.message = _cut(self.message, _MAX_MESSAGE_BYTES)
        self.param = self.param and _cut(self.param, _MAX_PARAM_BYTES)

    def __str__(self) -> str:
        return self.message

    @property
    def kind(self) -> str:
        others = "server_error" if self.status >= 500 else "invalid_request_error"
        return _TYPES.get(self.status, others)

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def body_for(self, path: str) -> dict[str, Any]:
        """The error object of the API that the path belongs to."""
        is_anthropic = path == _ANTHROPIC_PATH or path.startswith(_ANTHROPIC_PATH + "/")
        return self.anthropic_body() if is_anthropic else self.body()

    def anthropic_body(self) -> dict[str, Any]:
        """Anthropic's error object (https://docs.anthropic.com/en/api/errors), without param. By
        the details, its clients go on without a thread."""
        kind = "api_error" if self.kind == "server_error" else self.kind
        told: dict[str, Any] = {"type": kind, "message": self.message}
        if self.param == "thread":
            told["details"] = {"error_code": "thread_unsupported_request", "unsupported": []}
        return {"type": "error", "error": told}

    def headers(self) -> dict[str, str]:
        if self.status == 503:
            return {"Retry-After": str(_RETRY_S)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


@dataclass(frozen=True)
class ErrorFields:
    """What a body calls that which an error is about that comes after its fields were checked."""

    prompt: str = "prompt"
    names: Mapping[str, str] = field(default_factory=dict)  # by those of SamplingParams
    form: str = "structured_output"  # the place that gave the form of the answer
    places: Sequence[str] = ()  # of the messages of a chat that was made from another body
    too_long: str | None = None  # said of a prompt without room, with {count} and {most}

    def refusal(self, error: TypeError | ValueError) -> ApiError:
        """400 that names a field of the body."""
        if not isinstance(error, FieldError):
            return ApiError(400, str(error), param=self.prompt)
        name = first_name(error.field)
        if name == "structured_output":
            error = error.at(self.form)
        elif name in self.names:
            error = error.at(self.names[name] + error.field.removeprefix(name))
        elif self.places and (number := _MESSAGE.match(error.field)):
            words = error.message.removeprefix(f"message {number[1]}")
            error = FieldError(self.places[int(number[1])], self.places[int(number[1])] + words)
        return ApiError(400, str(error), param=first_name(error.field))


_MESSAGE = re.compile(r"messages\[(\d+)\]")


def first_name(field: str) -> str:
    """Of the path of a field, the name that the body itself has."""
    return re.split(r"[.\[ ]", field, maxsplit=1)[0]


def _cut(text: str, most_bytes: int) -> str:
    """A beginning of the text, of at most so many bytes in JSON."""
    while True:
        size = len(json.dumps(text, ensure_ascii=False).encode(errors="replace")) - 2
        if size <= most_bytes:
            return text
        text = text[: len(text) * most_bytes // size]


def broken() -> ApiError:
    """For every request of a step that failed: the reason is in the server's log."""
    return ApiError(500, "the model failed in this step, and the server ends: see its log")


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down: send the request again")


def headers_too_large() -> ApiError:
    return ApiError(431, f"the headers have more than {MAX_HEADER_BYTES} bytes: send fewer")


def log_refusal(request_id: str, method: str, path: str, error: ApiError) -> None:
    """The line of a request that did not reach the engine; its message could quote the prompt."""
    field = "" if error.param is None else f", for {error.param!r:.100}"
    log.info("%s: %d%s, %s %.100r", request_id, error.status, field, method, path)
