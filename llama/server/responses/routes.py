"""The route of OpenAI's Responses API, without stored state: /v1/responses.

In: a request's body. Out: one response, or the events of one. Between the two it is a chat like any
other.
"""

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from llama.server.chats import answer
from llama.server.exchange import body_router
from llama.server.responses.answers import ResponseEvents
from llama.server.responses.models import RESPONSES_URL, ResponsesBody
from llama.server.service import Service


def routes(service: Service) -> APIRouter:
    router = body_router()

    @router.post(RESPONSES_URL)
    async def responses(body: ResponsesBody, http: Request) -> Response:
        """Answer an input (https://platform.openai.com/docs/api-reference/responses)."""
        return await answer(service, http, body.request, partial(ResponseEvents, body))

    return router
