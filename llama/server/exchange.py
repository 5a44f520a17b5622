"""One request and its answer: what every route does between HTTP and the engine.

In: a request's body; later, the engine's outputs. Out: the body's JSON; the last outputs, or one
part of a stream for each output. It knows the fields of no API.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

from fastapi import Request

from llama.requests.request import RequestOutput
from llama.server.encoding import JsonResponse, event
from llama.server.errors import ApiError


def described(schema: dict[str, Any]) -> dict[str, Any]:
    """What /openapi.json says of a route: the schema of its body, and the errors that it gives."""
    errors = {
        str(status): {"description": what}
        for status, what in {400: "a field is wrong", 413: "too large", 503: "not now"}.items()
    }
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}, "responses": errors}


async def read_json(http: Request) -> Any:
    """The JSON of the body; ApiError 400.

    It must be declared as JSON: a browser sends any other kind to this machine for whatever page
    is open, without asking the server first (https://fetch.spec.whatwg.org, simple requests).
    """
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(400, "the Content-Type header must be application/json")
    try:
        return json.loads(await http.body(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as e:
        raise ApiError(400, f"the body is not JSON: {e}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


async def last_outputs(outputs: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    """The last output of each prompt, in their order."""
    latest: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            latest[output.index] = output
    return [latest[index] for index in sorted(latest)]


async def answered(body: Callable[[], Any]) -> JsonResponse:
    """The response with this body, made beside the event loop: to look for calls in an answer takes
    7 us for each of its characters, and a grammar can make them a million."""
    return JsonResponse(await asyncio.to_thread(body))


async def parts(
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


def named(events: Iterable[dict[str, Any]]) -> Iterable[bytes]:
    """Server-sent events that have their type as their name, too."""
    return (event(each, each["type"]) for each in events)
