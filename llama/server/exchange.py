"""One request and its answer: what every route does between HTTP and the engine.

In: a request's body, and the model that its route has for it; later, the engine's outputs. Out: the
checked body; the last outputs, or one part of a stream for each output. It knows the fields of no
API.
"""

import asyncio
import contextlib
import inspect
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.responses import Response

from llama.checks import FieldError
from llama.prompts.fields import read_as
from llama.requests.request import RequestOutput
from llama.server.encoding import JsonResponse, event
from llama.server.errors import ApiError, first_name

_SMALL = 16 * 1024  # bytes of a body that is checked before anyone could notice
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "a field is wrong, or the body is too large"},
    503: {"description": "not now"},
}


class BodyRoute(APIRoute):
    """A route with a parameter `body`, whose type is the schema of the body and reads it.

    FastAPI makes /openapi.json of the same parameter. Its own reading of bodies is not used: it
    would hold the event loop up, and its errors are of another form.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        parameters = inspect.signature(self.endpoint).parameters
        body = parameters["body"].annotation if "body" in parameters else None
        if body is None:
            return super().get_route_handler()
        adapter: TypeAdapter[Any] = TypeAdapter(body)

        async def answer(http: Request) -> Response:
            return await self.endpoint(await _read_body(http, adapter), http)

        return answer


def body_router() -> APIRouter:
    """A router whose routes have bodies."""
    return APIRouter(route_class=BodyRoute, responses=_ERRORS)


async def _read_body(http: Request, adapter: TypeAdapter[Any]) -> Any:
    """The checked body; ApiError 400 names the field that is wrong.

    It must be declared as JSON: a browser sends any other kind to this machine for whatever page
    is open, without asking the server first (https://fetch.spec.whatwg.org, simple requests).
    """
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(400, "the Content-Type header must be application/json")
    data = await http.body()
    if len(data) <= _SMALL:
        return _checked(data, adapter)
    return await asyncio.to_thread(_checked, data, adapter)


def _checked(data: bytes, adapter: TypeAdapter[Any]) -> Any:
    try:
        body = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as e:
        raise ApiError(400, f"the body is not JSON: {e}") from None
    try:
        return read_as(adapter, body)
    except FieldError as e:
        is_name = isinstance(body, dict) and e.field in body  # which may be any text
        param = e.field if is_name else first_name(e.field)
        raise ApiError(400, str(e), param=param or None) from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


async def last_outputs(outputs: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    """The last output of each prompt, in their order."""
    latest: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            latest[output.index] = output
    return [latest[index] for index in sorted(latest)]


async def json_off_loop(body: Callable[[], Any]) -> JsonResponse:
    """The response with this body, made beside the event loop: to look for calls in an answer takes
    7 us for each of its characters, and a grammar can make them a million."""
    return JsonResponse(await asyncio.to_thread(body))


async def encode_stream(
    outputs: AsyncGenerator[RequestOutput, None],
    of: Callable[[RequestOutput], Iterable[bytes]],
    last: Callable[[], Iterable[bytes]],
) -> AsyncGenerator[bytes, None]:
    """The bytes of a stream: those of each output, where it has any, then the last ones."""
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            if part := b"".join(of(output)):
                yield part
    yield b"".join(last())


def sse_events(events: Iterable[dict[str, Any]]) -> Iterable[bytes]:
    """Server-sent events that have their type as their name, too."""
    return (event(each, each["type"]) for each in events)
