"""The routes of Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens.

In: a request's body. Out: one message, or the events of one. Between the two it is a chat like any
other.
"""

from fastapi import APIRouter, Request
from starlette.responses import Response

from llama.server.anthropic.answers import PING, MessageEvents, message_body
from llama.server.anthropic.models import COUNT_URL, MESSAGES_URL, CountBody, MessagesBody
from llama.server.asgi import unless_client_leaves
from llama.server.chats import chat_ids, read_request, start
from llama.server.encoding import EventStream, JsonResponse, event
from llama.server.errors import ApiError, anthropic_body
from llama.server.exchange import (
    body_router,
    encode_stream,
    json_off_loop,
    last_outputs,
    sse_events,
)
from llama.server.service import Service

_PING = event(PING, PING["type"])


def routes(service: Service) -> APIRouter:
    router = body_router()

    @router.post(MESSAGES_URL)
    async def messages(body: MessagesBody, http: Request) -> Response:
        """Answer a dialog (https://docs.anthropic.com/en/api/messages)."""
        started = await start(service, http, await read_request(body.request))
        chat, tokenizer, meta = started.chat, started.tokenizer, started.meta
        if not chat.stream:
            (last,) = await unless_client_leaves(last_outputs(started.outputs), http.receive)
            return await json_off_loop(lambda: message_body(chat, last, tokenizer, meta))
        events = MessageEvents(chat, tokenizer, meta)
        stream = encode_stream(
            started.outputs,
            lambda output: sse_events(events.of(output)),
            lambda: sse_events(events.last()),
        )
        return EventStream(stream, _error_event, keep_alive=_PING)

    @router.post(COUNT_URL)
    async def count_tokens(body: CountBody, http: Request) -> Response:
        """The tokens of the prompt that /v1/messages would make of the body."""
        ids = await chat_ids(service, await read_request(body.request))
        return JsonResponse({"input_tokens": len(ids)})

    return router


def _error_event(error: ApiError) -> bytes:
    return event(anthropic_body(error), "error")
