"""One request on its way in: what every route with a body does before its answer.

In: the body of a request, and the model of its route that reads it. Out: a request for the engine,
or an `ApiError` that names the body's own field. It knows no fields itself.
"""

import asyncio
import inspect
import json
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.responses import Response

from llama.api import Request as EngineRequest
from llama.common.checks import FieldError, brief
from llama.prompts.fields import read_as
from llama.prompts.pictures import Picture
from llama.server.encoding import unless_client_leaves
from llama.server.errors import ApiError
from llama.server.images import read_images
from llama.server.memory import Holding, SharedMemory
from llama.server.refusals import refusals
from llama.server.request import ApiRequest
from llama.server.service import Service
from llama.server.serving import Serving

_T = TypeVar("_T")
log = logging.getLogger("llama.server")
IGNORED = "X-Ignored-Fields"  # header of a response, in which a lenient server names dropped fields
_MAX_IGNORED = 16  # fields that the header names
_SMALL_BODY = 16 * 1024  # bytes of a body that is read in the event loop, and not counted
# Reading JSON holds Python's lock: 100,000 lists or fields of objects take as long as a million
# numbers, 0.1 s. These characters are counted inside strings, too, where they are rare.
_MAX_CHARACTERS = {b"[": 100_000, b"{": 100_000, b":": 100_000, b",": 1_000_000}
# The end of an error for a body that a lenient server would read.
_LENIENT_HINT = "; a server that is started with --lenient ignores such fields"
_BROWSER_HEADERS = frozenset({"origin", "referer", "sec-fetch-site"})
_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "a field is wrong, or the body is too large"},
    503: {"description": "the server cannot take the request now"},
}


class Exchange(Request):
    """A request of HTTP whose body has been read.

    Attributes:
        serving: the model that the body asks for.
    """

    serving: Serving


class BodyRoute(APIRoute):
    """A route that reads its parameter `body` by the type of that parameter, which is published.

    It finds the model that the body asks for. FastAPI's own reading would hold up the event loop,
    and its errors have other fields.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the function that answers a request."""
        parameters = inspect.signature(self.endpoint).parameters
        if "body" not in parameters:
            return super().get_route_handler()
        body_type: Any = parameters["body"].annotation
        adapter: TypeAdapter[Any] = TypeAdapter(body_type)

        async def respond(http: Request) -> Response:
            _check_encoding(http)
            self.check_content_type(http)
            ignored: list[str] | None = [] if http.app.state.lenient else None
            http.state.ignored = ignored  # A route may add fields that this model cannot use.
            exchange = Exchange(http.scope, http.receive)
            body = await _read_body(exchange, adapter, ignored)
            exchange.serving = _serving_of(http.app.state.service, body)
            response: Response = await self.endpoint(body, exchange)
            answer: Holding = exchange.state.answer
            if not answer.num_bytes:  # An answer of the engine holds its largest size.
                answer.grow_to(len(getattr(response, "body", b"")))  # Streams have none.
            if ignored:
                _name_ignored(http, response, sorted(ignored))
            return response

        return respond

    def check_content_type(self, http: Request) -> None:
        """Raise an ApiError 400 for a body that is not declared as JSON."""
        # A browser sends bodies of other types to this machine for any page that is open, without
        # asking the server first (https://fetch.spec.whatwg.org, simple requests).
        content_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise ApiError(400, "the Content-Type header must be application/json")


class UndeclaredBodyRoute(BodyRoute):
    """A route of an API whose clients do not declare JSON, such as litellm's for Ollama."""

    def check_content_type(self, http: Request) -> None:
        """Raise an ApiError 400 for a body that a browser sends and does not declare as JSON."""
        # A browser names the origin of a page in each POST.
        if not _BROWSER_HEADERS.isdisjoint(http.headers.keys()):
            super().check_content_type(http)


def _check_encoding(http: Request) -> None:
    """Raise an ApiError 415 for a body that is compressed."""
    encoding = http.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        message = f"Content-Encoding {brief(encoding)} is not read here: send the body as it is"
        raise ApiError(415, message)


async def _read_body(http: Request, adapter: TypeAdapter[Any], ignored: list[str] | None) -> Any:
    """Receive a body, and read it in the event loop or, if it is large, in a thread."""
    memory: SharedMemory = http.app.state.bodies
    max_bytes: int = http.app.state.service.max_body_bytes
    length = http.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    data = bytearray()
    with memory.held(http.state.sender) as held:
        async with memory.arriving(held):
            async for part in http.stream():  # `BoundedProtocol` ends a request that is too slow.
                if len(data) + len(part) > max_bytes:
                    raise _too_large(max_bytes)
                held.grow_to(len(data) + len(part))
                data += part
        http.state.has_large_body = len(data) > _SMALL_BODY
        service: Service = http.app.state.service
        return await beside_if_large(http, _parse, data, adapter, ignored, service)


def _serving_of(service: Service, body: Any) -> Serving:
    """Return the model that a body asks for; without the field `model` it is the default."""
    model = body.get("model") if isinstance(body, dict) else getattr(body, "model", None)
    return service.of(model if isinstance(model, str) else None)


async def beside_if_large(http: Request, work: Callable[..., _T], *args: Any) -> _T:
    """Call a function in the event loop or, if the request's body is large, in a thread.

    Its cost must not grow faster than the body. Small requests need no thread, so that they do not
    wait while large ones occupy all of them.
    """
    if http.state.has_large_body:
        return await asyncio.to_thread(work, *args)
    return work(*args)


async def beside_if_confined(http: Exchange, work: Callable[..., _T], *args: Any) -> _T:
    """Call a function that encodes a dialog, where it does not hold up the event loop.

    Raises:
        ApiError: it takes too long, as a chat template may; see `Workers.encode_dialog`.
    """
    if http.serving.dialog_format.is_confined:
        return await http.serving.workers.encode_dialog(http.state.sender, work, *args)
    return await beside_if_large(http, work, *args)


def _name_ignored(http: Request, response: Response, ignored: list[str]) -> None:
    """Name the fields that were dropped, in a header and in the log."""
    names = [ascii(name)[1:-1][:100] for name in ignored[:_MAX_IGNORED]]
    if len(ignored) > len(names):
        names.append("...")
    response.headers[IGNORED] = ", ".join(names)
    log.info("%s: %s: %s", http.state.request_id, IGNORED, response.headers[IGNORED])


def body_router(lifespan: Any = None, route_class: type[BodyRoute] = BodyRoute) -> APIRouter:
    """Return a router whose routes read bodies; `lifespan` is FastAPI's."""
    return APIRouter(route_class=route_class, responses=_RESPONSES, lifespan=lifespan)


def body_memory(max_bytes: int) -> SharedMemory:
    """Return the memory of the bodies that are being received and read."""
    refusal = "too many large requests are being sent at once: send this one again"
    return SharedMemory(max_bytes, _SMALL_BODY, refusal)


def _too_large(max_bytes: int) -> ApiError:
    """Return the error of a body that is too large."""
    return ApiError(413, f"the request has more than {max_bytes} bytes: send less at once")


def _parse(
    data: bytearray, adapter: TypeAdapter[Any], ignored: list[str] | None, service: Service
) -> Any:
    """Return the body that is in the bytes.

    Args:
        data: the body as JSON.
        adapter: reads the object.
        ignored: gets the paths of the fields that a lenient server drops; None otherwise.
        service: has the model that the body asks for.

    Raises:
        ApiError: 413 if reading would take too long, 400 if the bytes are not JSON.
        FieldError: a field is wrong.
    """
    for character, max_count in _MAX_CHARACTERS.items():
        if data.count(character) > max_count:
            shown = repr(character.decode())
            message = f"the request has more than {max_count} times {shown}: send less at once"
            raise ApiError(413, message)
    try:
        body = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    takes_images = _takes_images(service, body)
    try:
        return read_as(adapter, body, ignored=ignored, takes_images=takes_images)
    except FieldError as error:
        kind, field, message = type(error), error.field, error.message
    # Not while the error is handled: those of a second reading would refer to it, see `_nested`.
    if ignored is None and _is_readable(adapter, body, takes_images=takes_images):
        message += _LENIENT_HINT
    # The whole name of an unknown field, which may be any text and is no path.
    if isinstance(body, dict) and field in body:
        raise ApiError(400, message, param=field)
    raise kind(field, message)


def _takes_images(service: Service, body: Any) -> bool:
    """Return whether the model that a body asks for reads images."""
    try:
        return _serving_of(service, body).takes_images
    except ApiError:  # There is no such model, which the body's other faults precede.
        return False


def _is_readable(adapter: TypeAdapter[Any], body: Any, *, takes_images: bool) -> bool:
    """Return whether a lenient server would read the body."""
    try:
        read_as(adapter, body, ignored=[], takes_images=takes_images)
    except FieldError:
        return False
    return True


def _refuse_constant(name: str) -> None:
    """Refuse NaN and Infinity, which Python would read."""
    raise ValueError(f"JSON has no {name}")


async def chat_ids(http: Exchange, chat: ApiRequest) -> list[int]:
    """Return the token ids of a dialog.

    Raises:
        ApiError: 400 names a field of the body.
    """
    try:
        return await beside_if_confined(http, chat.chat_ids, http.serving.dialog_format)
    except (TypeError, ValueError) as error:
        raise chat.fields.refusal(error) from None


async def prepare_chat(http: Exchange, chat: ApiRequest, *, must_fit: bool) -> EngineRequest:
    """Return the engine's request for a dialog.

    Args:
        http: the request of HTTP, which knows its tenant and its model.
        chat: the dialog and its parameters.
        must_fit: whether `max_tokens` beyond the context is an error.

    Raises:
        ApiError: 400 names a field of the body; 503 says that the server is busy.
    """
    serving = http.serving
    with refusals(chat.fields):
        serving.loaded().book.check_generates()
    field = chat.fields.names.get("n", "n")
    serving.check_capacity(chat.num_answers, http.state.sender, field)
    ids = await chat_ids(http, chat)
    try:
        params = await beside_if_large(http, chat.chat_params, serving.dialog_format)
    except (TypeError, ValueError) as error:
        raise chat.fields.refusal(error) from None
    pictures: list[Picture] = []
    if chat.images:
        reading = read_images(serving, chat.images, http.state.sender, http.state.answer)
        pictures = await unless_client_leaves(reading, http.receive)
    return await serving.prepare(
        ids,
        params,
        chat.fields,
        tenant=http.state.tenant,
        must_fit=must_fit,
        max_context=chat.max_context,
        model=chat.model,
        sender=http.state.sender,
        pictures=pictures,
    )
