"""The routes of Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens.

In: a request's body. Out: one message, or the events of one. Between the two it is a chat like any
other.
"""

import asyncio
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from llama.server.anthropic.requests import COUNT_URL, FIELDS, MESSAGES_URL, parse_messages_body
from llama.server.anthropic.responses import PING, MessageEvents, message_body
from llama.server.anthropic.schema import messages_schema
from llama.server.asgi import unless_client_leaves
from llama.server.dialogs import read_as_chat, start
from llama.server.encoding import (
    EventStream,
    JsonResponse,
    event,
)
from llama.server.errors import ApiError, anthropic_body
from llama.server.exchange import answered, described, last_outputs, named, parts, read_json
from llama.server.openai.chat_prompt import chat_prompt
from llama.server.service import Service

_PING = event(PING, PING["type"])


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(MESSAGES_URL, openapi_extra=described(messages_schema(counts=False)))
    async def messages(http: Request) -> Response:
        """Answer a dialog (https://docs.anthropic.com/en/api/messages)."""
        return await _answer(service, http)

    @router.post(COUNT_URL, openapi_extra=described(messages_schema(counts=True)))
    async def count_tokens(http: Request) -> Response:
        """The tokens of the prompt that /v1/messages would make of the body."""
        body = await read_json(http)
        tokenizer = service.loaded().tokenizer
        asked = read_as_chat(body, FIELDS, partial(parse_messages_body, counts=True))
        try:
            ids = await asyncio.to_thread(
                chat_prompt, asked.chat, tokenizer, service.tool_format, continues=asked.continues
            )
        except (TypeError, ValueError) as e:
            raise ApiError(400, asked.wording.of(str(e))) from None
        return JsonResponse({"input_tokens": len(ids)})

    return router


async def _answer(service: Service, http: Request) -> Response:
    started = await start(service, http, FIELDS, parse_messages_body)
    chat, tokenizer, heading = started.chat, started.tokenizer, started.heading
    if chat.stream:
        events = MessageEvents(chat, tokenizer, heading)
        stream = parts(
            started.outputs, lambda output: named(events.of(output)), lambda: named(events.last())
        )
        return EventStream(stream, _error_event, keep_alive=_PING)
    (last,) = await unless_client_leaves(last_outputs(started.outputs), http.receive)
    return await answered(lambda: message_body(chat, last, tokenizer, heading))


def _error_event(error: ApiError) -> bytes:
    return event(anthropic_body(error), "error")
