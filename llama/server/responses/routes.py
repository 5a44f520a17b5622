"""The route of OpenAI's Responses API, without stored state: /v1/responses.

In: a request's body. Out: one response, or the events of one. Between the two it is a chat like any
other.
"""

from fastapi import APIRouter, Request
from starlette.responses import Response

from llama.server.asgi import unless_client_leaves
from llama.server.dialogs import start
from llama.server.encoding import (
    EventStream,
)
from llama.server.errors import ApiError
from llama.server.exchange import answered, described, last_outputs, named, parts
from llama.server.responses.events import ResponseEvents, whole_response
from llama.server.responses.requests import (
    FIELDS,
    RESPONSES_URL,
    parse_responses_body,
)
from llama.server.responses.schema import responses_schema
from llama.server.service import Service


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(RESPONSES_URL, openapi_extra=described(responses_schema()))
    async def responses(http: Request) -> Response:
        """Answer an input (https://platform.openai.com/docs/api-reference/responses)."""
        return await _answer(service, http)

    return router


async def _answer(service: Service, http: Request) -> Response:
    started = await start(service, http, FIELDS, parse_responses_body)
    body, chat = started.body, started.chat
    tokenizer, heading = started.tokenizer, started.heading
    if chat.stream:
        events = ResponseEvents(body, chat, tokenizer, heading)

        def failed(error: ApiError) -> bytes:
            return b"".join(named([events.failed(error.message, error.kind, error.param)]))

        # There is no [DONE]: the last event says that it is the last.
        stream = parts(
            started.outputs, lambda output: named(events.of(output)), lambda: named(events.last())
        )
        return EventStream(stream, failed)
    (last,) = await unless_client_leaves(last_outputs(started.outputs), http.receive)
    return await answered(lambda: whole_response(body, chat, last, tokenizer, heading))
