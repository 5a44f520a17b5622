"""The route of OpenAI's Responses API, without stored state: /v1/responses.

In: a request's body. Out: one response, or the events of one. Between the two it is a chat like any
other.
"""

import contextlib
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from starlette.responses import Response

from llama.requests.request import RequestOutput
from llama.serving.asgi import unless_client_leaves
from llama.serving.openai.responses import Heading
from llama.serving.openai.responses_api.events import ResponseEvents, whole_response
from llama.serving.openai.responses_api.requests import (
    FIELDS,
    RESPONSES_URL,
    parse_responses_body,
)
from llama.serving.openai.responses_api.schema import responses_schema
from llama.serving.server.completions import described, last_outputs, read_json
from llama.serving.server.dialogs import prepare_translated, read_as_chat
from llama.serving.server.errors import ApiError
from llama.serving.server.responses import (
    EventStream,
    JsonResponse,
    event,
)
from llama.serving.server.service import Service


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(RESPONSES_URL, openapi_extra=described(responses_schema()))
    async def responses(http: Request) -> Response:
        """Answer an input (https://platform.openai.com/docs/api-reference/responses)."""
        return await _answer(service, http)

    return router


async def _answer(service: Service, http: Request) -> Response:
    body = await read_json(http)
    tokenizer = service.loaded().tokenizer
    asked = read_as_chat(body, FIELDS, parse_responses_body)
    request = await prepare_translated(service, asked, FIELDS)
    heading = Heading(http.state.request_id, service.model_name, service.now())
    outputs = service.outputs([request], http.state.request_id)
    if asked.chat.stream:
        events = ResponseEvents(body, asked.chat, tokenizer, heading)

        def failed(error: ApiError) -> bytes:
            last = events.failed(error.message, error.kind, error.param)
            return event(last, last["type"])

        return EventStream(_events(outputs, events), failed)
    (last,) = await unless_client_leaves(last_outputs(outputs), http.receive)
    return JsonResponse(whole_response(body, asked.chat, last, tokenizer, heading))


async def _events(
    outputs: AsyncGenerator[RequestOutput, None], events: ResponseEvents
) -> AsyncGenerator[bytes, None]:
    """There is no [DONE]: the last event says that it is the last."""
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            parts = [event(each, each["type"]) for each in events.of(output)]
            if parts:
                yield b"".join(parts)
    yield b"".join(event(each, each["type"]) for each in events.last())
