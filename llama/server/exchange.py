"""One request and its answer: what every route with a body does between HTTP and the engine.

In: a request's body, and the model that its route has for it. Out: what it asks of the engine, and
then the response, or an ApiError that names the body's own field.
"""

import asyncio
import contextlib
import inspect
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.responses import Response

from llama.checks import FieldError
from llama.prompts.fields import read_as
from llama.requests.request import Request as EngineRequest
from llama.requests.request import RequestOutput
from llama.server.blocks import BlockAnswer
from llama.server.encoding import COMMENT, EventStream, JsonResponse, event, unless_client_leaves
from llama.server.errors import ApiError
from llama.server.openai.answers import Completion, ResponseMeta
from llama.server.openai.request import OpenAIRequest
from llama.server.service import Service
from llama.tokenizer import Tokenizer

log = logging.getLogger("llama.server")
IGNORED = "X-Ignored-Fields"  # of a response, where a lenient server left fields out
_MOST_IGNORED = 16  # that it names
_SMALL = 16 * 1024  # bytes of a body that is checked before anyone could notice
# To read JSON holds every thread up: 100,000 lists or fields of objects take as long as a million
# numbers, 0.1 s. The signs are counted in texts, too, which have them rarely.
_MOST_SIGNS = {b"[": 100_000, b"{": 100_000, b":": 100_000, b",": 1_000_000}
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "a field is wrong, or the body is too large"},
    503: {"description": "not now"},
}


class BodyRoute(APIRoute):
    """A route whose parameter `body` has the type that reads the body, and that FastAPI publishes.
    FastAPI's own reading would hold the event loop up, and has other errors."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        parameters = inspect.signature(self.endpoint).parameters
        if "body" not in parameters:
            return super().get_route_handler()
        body: Any = parameters["body"].annotation
        adapter: TypeAdapter[Any] = TypeAdapter(body)

        async def answer(http: Request) -> Response:
            # A browser sends any other kind to this machine for whatever page is open, without
            # asking the server first (https://fetch.spec.whatwg.org, simple requests).
            kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise ApiError(400, "the Content-Type header must be application/json")
            ignored: list[str] | None = [] if http.app.state.lenient else None
            memory: BodyMemory = http.app.state.bodies
            length = http.headers.get("content-length", "0")
            if length.isdecimal() and int(length) > memory.most:
                raise memory.too_large()
            with memory.of_one() as data:
                async for part in http.stream():  # `BoundedProtocol` ends what is too slow
                    memory.add(data, part)
                if len(data) <= _SMALL:
                    body = _checked(data, adapter, ignored)
                else:
                    body = await asyncio.to_thread(_checked, data, adapter, ignored)
            response: Response = await self.endpoint(body, http)
            if ignored:
                names = [ascii(name)[1:-1][:100] for name in ignored[:_MOST_IGNORED]]
                response.headers[IGNORED] = ", ".join(names + ["..."][: len(ignored) - len(names)])
                log.info("%s: %s: %s", http.state.request_id, IGNORED, response.headers[IGNORED])
            return response

        return answer


def body_router(lifespan: Any = None) -> APIRouter:
    """A router whose routes have bodies. lifespan: FastAPI's."""
    return APIRouter(route_class=BodyRoute, responses=_ERRORS, lifespan=lifespan)


@dataclass
class BodyMemory:
    """Of bodies being read and checked. most: bytes of one. most_of_all: bytes of all together,
    beside the first `_SMALL` of each, so that small requests come through."""

    most: int
    most_of_all: int
    used: int = 0

    @contextlib.contextmanager
    def of_one(self) -> Iterator[bytearray]:
        """An empty body, which `add` fills."""
        data = bytearray()
        try:
            yield data
        finally:
            self.used -= _counted(len(data))

    def add(self, data: bytearray, part: bytes) -> None:
        """ApiError 413 or 503 where there is no room for it."""
        if len(data) + len(part) > self.most:
            raise self.too_large()
        more = _counted(len(data) + len(part)) - _counted(len(data))
        if self.used + more > self.most_of_all:
            words = "too many large requests are being sent at once: send this one again"
            raise ApiError(503, words)
        data += part
        self.used += more

    def too_large(self) -> ApiError:
        return ApiError(413, f"the request has more than {self.most} bytes: send less at once")


def _counted(num_bytes: int) -> int:
    return max(0, num_bytes - _SMALL)


def _checked(data: bytearray, adapter: TypeAdapter[Any], ignored: list[str] | None) -> Any:
    """The body; ApiError 400 names the field that is wrong. ignored: see `read_as`."""
    for sign, most in _MOST_SIGNS.items():
        if data.count(sign) > most:
            words = f"the request has more than {most} times {sign.decode()!r}: send less at once"
            raise ApiError(413, words)
    try:
        body = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as e:
        raise ApiError(400, f"the body is not JSON: {e}") from None
    try:
        return read_as(adapter, body, ignored=ignored)
    except FieldError as e:
        if isinstance(body, dict) and e.field in body:  # a name, which may be any text
            raise ApiError(400, str(e), param=e.field) from None
        raise


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


async def chat_ids(service: Service, chat: OpenAIRequest) -> list[int]:
    """The ids of a dialog; ApiError 400 names a field of the body."""
    tokenizer = service.loaded().tokenizer
    try:
        return await asyncio.to_thread(chat.chat_ids, tokenizer, service.tool_format)
    except (TypeError, ValueError) as e:
        raise chat.fields.refusal(e) from None


async def prepare_chat(service: Service, chat: OpenAIRequest, *, must_fit: bool) -> EngineRequest:
    """The engine's request for a dialog; ApiError 400 names a field of the body."""
    service.check_room(chat.num_answers, chat.fields.names.get("n", "n"))
    ids = await chat_ids(service, chat)
    try:
        params = chat.chat_params(service.tool_format)
    except (TypeError, ValueError) as e:
        raise chat.fields.refusal(e) from None
    return await service.prepare(ids, params, chat.fields, must_fit=must_fit)


async def respond(
    service: Service,
    http: Request,
    request: OpenAIRequest,
    prepared: list[EngineRequest],
    make_answer: Callable[[OpenAIRequest, Tokenizer, ResponseMeta], Completion | BlockAnswer],
) -> Response:
    """The response to a request."""
    model = service.model_name if request.model is None else request.model
    meta = ResponseMeta(http.state.request_id, model, int(time.time()))
    answer = make_answer(request, service.loaded().tokenizer, meta)
    outputs = service.outputs(prepared, meta.id, request.fields)
    if request.stream:
        keep_alive = COMMENT if answer.idle_event is None else event(answer.idle_event)
        events = _encoded(outputs, answer)
        return EventStream(events, lambda e: event(answer.failed(e)) + answer.end, keep_alive)
    last = await unless_client_leaves(_last_outputs(outputs), http.receive)
    # Beside the event loop: to look for calls in an answer takes 7 us for each of its characters,
    # and a grammar can make them a million.
    return JsonResponse(await asyncio.to_thread(answer.whole, last))


async def _last_outputs(outputs: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    """The last output of each prompt, in their order."""
    latest: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            latest[output.index] = output
    return [latest[index] for index in sorted(latest)]


async def _encoded(
    outputs: AsyncGenerator[RequestOutput, None], answer: Completion | BlockAnswer
) -> AsyncGenerator[bytes, None]:
    """The bytes of a stream: those of each output, where it has any, then the last ones."""
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            if part := b"".join(map(event, answer.of(output))):
                yield part
    yield b"".join(map(event, answer.last())) + answer.end
