"""The route of OpenAI's Responses API, without stored state: /v1/responses.

In: a request's body. Out: one response, or the events of one. Between the two it is a chat like any
other.
"""

from fastapi import APIRouter, Request
from starlette.responses import Response

from llama.server.asgi import unless_client_leaves
from llama.server.chats import read_request, start
from llama.server.encoding import EventStream
from llama.server.errors import ApiError
from llama.server.exchange import (
    body_router,
    encode_stream,
    json_off_loop,
    last_outputs,
    sse_events,
)
from llama.server.responses.answers import ResponseEvents, whole_response
from llama.server.responses.models import RESPONSES_URL, ResponsesBody
from llama.server.service import Service


def routes(service: Service) -> APIRouter:
    router = body_router()

    @router.post(RESPONSES_URL)
    async def responses(body: ResponsesBody, http: Request) -> Response:
        """Answer an input (https://platform.openai.com/docs/api-reference/responses)."""
        started = await start(service, http, await read_request(body.request))
        chat, tokenizer, meta = started.chat, started.tokenizer, started.meta
        if not chat.stream:
            (last,) = await unless_client_leaves(last_outputs(started.outputs), http.receive)
            return await json_off_loop(lambda: whole_response(body, chat, last, tokenizer, meta))
        events = ResponseEvents(body, chat, tokenizer, meta)

        def failed(error: ApiError) -> bytes:
            return b"".join(sse_events([events.failed(error.message, error.kind, error.param)]))

        # There is no [DONE]: the last event says that it is the last.
        stream = encode_stream(
            started.outputs,
            lambda output: sse_events(events.of(output)),
            lambda: sse_events(events.last()),
        )
        return EventStream(stream, failed)

    return router
