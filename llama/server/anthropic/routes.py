"""The routes of Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens.

In: a request's body. Out: one message, or the events of one. Between the two it is a chat like any
other.
"""

from fastapi import APIRouter, Request
from starlette.responses import Response

from llama.server.anthropic.answers import PING, MessageEvents
from llama.server.anthropic.models import COUNT_URL, MESSAGES_URL, CountBody, MessagesBody
from llama.server.chats import answer, chat_ids, read_request
from llama.server.encoding import JsonResponse, event
from llama.server.exchange import body_router
from llama.server.service import Service

_PING = event(PING, PING["type"])


def routes(service: Service) -> APIRouter:
    router = body_router()

    @router.post(MESSAGES_URL)
    async def messages(body: MessagesBody, http: Request) -> Response:
        """Answer a dialog (https://docs.anthropic.com/en/api/messages)."""
        return await answer(service, http, body.request, MessageEvents, keep_alive=_PING)

    @router.post(COUNT_URL)
    async def count_tokens(body: CountBody, http: Request) -> Response:
        """The tokens of the prompt that /v1/messages would make of the body."""
        ids = await chat_ids(service, await read_request(body.request))
        return JsonResponse({"input_tokens": len(ids)})

    return router
