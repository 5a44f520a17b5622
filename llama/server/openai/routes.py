"""The routes of OpenAI's completion APIs: /v1/completions and /v1/chat/completions.

In: a request's body. Out: one JSON object, or a stream of chunks with the same content.
"""

import asyncio
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from llama.requests.request import Request as EngineRequest
from llama.sampling_params import SamplingParams
from llama.server.asgi import unless_client_leaves
from llama.server.dialogs import CHAT_DEFAULTS, prepare_chat
from llama.server.encoding import (
    DONE,
    EventStream,
    event,
)
from llama.server.errors import ApiError
from llama.server.exchange import answered, described, last_outputs, parts, read_json
from llama.server.openai.requests import (
    CHAT_URL,
    TEXT_URL,
    OpenAIRequest,
    field_of,
    parse_body,
)
from llama.server.openai.responses import Chunks, Heading, response_body
from llama.server.openai.schema import body_schema
from llama.server.service import Service

# OpenAI's own default.
_TEXT_DEFAULTS = SamplingParams(max_tokens=16, skip_special_tokens=True)


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(TEXT_URL, openapi_extra=described(body_schema(chat=False)))
    async def completions(http: Request) -> Response:
        """Continue each prompt (https://platform.openai.com/docs/api-reference/completions)."""
        return await _answer(service, http, chat=False)

    @router.post(CHAT_URL, openapi_extra=described(body_schema(chat=True)))
    async def chat_completions(http: Request) -> Response:
        """Answer a dialog (https://platform.openai.com/docs/api-reference/chat)."""
        return await _answer(service, http, chat=True)

    return router


async def _answer(service: Service, http: Request, *, chat: bool) -> Response:
    body = await read_json(http)
    service.loaded()
    try:
        request = parse_body(body, CHAT_DEFAULTS if chat else _TEXT_DEFAULTS, chat=chat)
    except (TypeError, ValueError) as e:
        raise ApiError(400, str(e), param=field_of(e, body)) from None
    try:
        requests = await _prepare(service, request, body)
    except ApiError as e:
        if e.param == "max_tokens" and "max_completion_tokens" in body:
            e.param = "max_completion_tokens"  # the newer name of the same
        raise
    heading = Heading(http.state.request_id, service.model_name, service.now())
    outputs = service.outputs(requests, http.state.request_id)
    tokenizer = service.loaded().tokenizer
    if request.stream:
        chunks = Chunks(request, tokenizer, heading)
        events = parts(
            outputs,
            lambda output: map(event, chunks.of(output)),
            lambda: [*map(event, chunks.last()), DONE],
        )
        return EventStream(events, _error_events)
    last = await unless_client_leaves(last_outputs(outputs), http.receive)
    return await answered(lambda: response_body(request, last, tokenizer, heading))


async def _prepare(service: Service, request: OpenAIRequest, body: Any) -> list[EngineRequest]:
    """The engine's request for each prompt, or for the dialog."""
    if not request.chat:
        if len(request.prompts) > service.limits.max_prompts:
            raise ApiError(
                400,
                f"prompt has {len(request.prompts)} entries: this server takes at most "
                f"{service.limits.max_prompts}",
                param="prompt",
            )
        prepare = partial(service.prepare, params=request.params, form_field=request.form_field)
        requests = []
        for i, prompt in enumerate(request.prompts):
            requests.append(await prepare(prompt, index=i))
            await asyncio.sleep(0)  # hundreds of prompts would hold the others' events up
        return requests
    return [await prepare_chat(service, request, body, request.form_field or "tools")]


def _error_events(error: ApiError) -> bytes:
    return event(error.body()) + DONE
