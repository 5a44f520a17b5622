"""The error that a client gets when its request cannot be answered: a status and an object.

In: exceptions of the packages below. Out: `ApiError`, and its object in each API. No path of the
machine, no trace and no long quotation of the request reaches a client.
"""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from llama.common.checks import FieldError, brief

log = logging.getLogger("llama.server")
# Limits in bytes of JSON: a message may quote what the client sent, and the name of a field may be
# of the client's own making.
_MAX_MESSAGE_BYTES = 2000
_MAX_PARAM_BYTES = 500
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
_RETRY_S = 5  # value of Retry-After with status 503
MAX_HEADER_BYTES = 64 * 1024
_ANTHROPIC_PATH = "/v1/messages"
_OLLAMA_PREFIX = "/api/"
_TOOL_SCHEMA = re.compile(r"tools\[(\d+)\]\.function\.parameters")
_MESSAGE_FIELD = re.compile(r"messages\[(\d+)\]")


@dataclass(eq=False)
class ApiError(Exception):
    """An error for the client of an API.

    Attributes:
        status: status of HTTP.
        message: what is wrong, and what to do about it; it is cut if it is long.
        param: the field of the body that is at fault.
        code: a name of the error that programs may compare.
        is_logged: whether the request already has its line in the log.
    """

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
        """OpenAI's type of the error."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        return _ERROR_TYPES.get(self.status, default)

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def body_for(self, path: str) -> dict[str, Any]:
        """Return the error object of the API that a path belongs to."""
        if path.startswith(_OLLAMA_PREFIX):
            return self.ollama_body()
        is_anthropic = path == _ANTHROPIC_PATH or path.startswith(_ANTHROPIC_PATH + "/")
        return self.anthropic_body() if is_anthropic else self.body()

    def anthropic_body(self) -> dict[str, Any]:
        """Return Anthropic's error object (https://docs.anthropic.com/en/api/errors)."""
        kind = "api_error" if self.kind == "server_error" else self.kind
        error: dict[str, Any] = {"type": kind, "message": self.message}
        if self.param == "thread":
            # With these details Anthropic's clients send the whole dialog instead.
            error["details"] = {"error_code": "thread_unsupported_request", "unsupported": []}
        return {"type": "error", "error": error}

    def ollama_body(self) -> dict[str, Any]:
        """Return Ollama's error object."""
        return {"error": self.message}

    def headers(self) -> dict[str, str]:
        """Return the headers that belong to the status."""
        if self.status == 503:
            return {"Retry-After": str(_RETRY_S)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


@dataclass(frozen=True)
class ErrorFields:
    """The names that a body has for what an error is about after its fields were read.

    Attributes:
        prompt: the field of the prompt.
        names: names of the body, by the names of SamplingParams.
        answer_format: path of the field that gave the format of the answer.
        message_paths: paths of the messages of a chat that was made from a body of another API.
        tool_paths: paths of the schemas of tools that came from a body of another API.
        too_long: message about a prompt beyond the context, with {count} and {max_count}; None for
            the engine's own message.
    """

    prompt: str = "prompt"
    names: Mapping[str, str] = field(default_factory=dict)
    answer_format: str = "structured_output"
    message_paths: Sequence[str] = ()
    too_long: str | None = None
    tool_paths: Sequence[str] = ()

    def refusal(self, error: TypeError | ValueError) -> ApiError:
        """Return an error with status 400 that names a field of the body."""
        if not isinstance(error, FieldError):
            return ApiError(400, str(error), param=self.prompt)
        error = self._renamed(error)
        return ApiError(400, str(error), param=first_name(error.field))

    def _renamed(self, error: FieldError) -> FieldError:
        """Return an error about the body's own field."""
        name = first_name(error.field)
        if name == "structured_output":
            return error.at(self.answer_format)
        if name in self.names:
            return error.at(self.names[name] + error.field.removeprefix(name))
        match = _MESSAGE_FIELD.match(error.field)
        if self.message_paths and match:
            path = self.message_paths[int(match[1])]
            return FieldError(path, path + error.message.removeprefix(f"message {match[1]}"))
        match = _TOOL_SCHEMA.match(error.field)
        if self.tool_paths and match:
            return error.at(self.tool_paths[int(match[1])] + error.field[match.end() :])
        return error


def first_name(field: str) -> str:
    """Return the first name in the path of a field, which is a field of the body itself."""
    return re.split(r"[.\[ ]", field, maxsplit=1)[0]


def _cut(text: str, max_bytes: int) -> str:
    """Return the beginning of a text that takes at most `max_bytes` bytes of JSON."""
    while True:
        size = len(json.dumps(text, ensure_ascii=False).encode(errors="replace")) - 2
        if size <= max_bytes:
            return text
        text = text[: len(text) * max_bytes // size]


def unknown_model(model: str, names: Iterable[str]) -> ApiError:
    """Return the error of a request for a model that the server does not have."""
    message = f"there is no model {brief(model)}: this server has {', '.join(map(repr, names))}"
    return ApiError(404, message, param="model", code="model_not_found")


def broken() -> ApiError:
    """Return the error of all requests of a step that failed; the log has the reason."""
    return ApiError(500, "the model failed in this step, and the server ends: see its log")


def shutting_down() -> ApiError:
    """Return the error of requests that come while the server shuts down."""
    return ApiError(503, "the server is shutting down: send the request again")


def too_late(max_wait_s: float) -> ApiError:
    """Return the error of a request whose first token takes too long."""
    return ApiError(503, f"no token came within {max_wait_s:.0f} s: try again later")


def headers_too_large() -> ApiError:
    """Return the error of a request with too many bytes of headers."""
    return ApiError(431, f"the headers have more than {MAX_HEADER_BYTES} bytes: send fewer")


def log_refusal(request_id: str, method: str, path: str, error: ApiError) -> None:
    """Write the line of a request that did not reach the engine.

    The message is left out, because it may quote the prompt.
    """
    param = "" if error.param is None else f", for {error.param!r:.100}"
    log.info("%s: %d%s, %s %.100r", request_id, error.status, param, method, path)
