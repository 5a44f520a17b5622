"""The routes of OpenAI's completion APIs: /v1/completions and /v1/chat/completions.

In: a request's body. Out: one JSON object, or a stream of chunks with the same content.
"""

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from llama.requests.request import Request as EngineRequest
from llama.sampling_params import SamplingParams
from llama.server.asgi import unless_client_leaves
from llama.server.chats import prepare_chat, read_request
from llama.server.encoding import DONE, EventStream, event
from llama.server.errors import ApiError
from llama.server.exchange import body_router, encode_stream, json_off_loop, last_outputs
from llama.server.openai.answers import Chunks, ResponseMeta, response_body
from llama.server.openai.models import CHAT_URL, TEXT_URL, ChatBody, CompletionBody
from llama.server.openai.request import OpenAIRequest
from llama.server.service import Service

# OpenAI's own default.
_TEXT_DEFAULTS = SamplingParams(max_tokens=16, skip_special_tokens=True)


def routes(service: Service) -> APIRouter:
    router = body_router()

    @router.post(TEXT_URL)
    async def completions(body: CompletionBody, http: Request) -> Response:
        """Continue each prompt (https://platform.openai.com/docs/api-reference/completions)."""
        request = await read_request(body.request, _TEXT_DEFAULTS)
        return await _answer(service, http, request, await _prepare_texts(service, request))

    @router.post(CHAT_URL)
    async def chat_completions(body: ChatBody, http: Request) -> Response:
        """Answer a dialog (https://platform.openai.com/docs/api-reference/chat)."""
        request = await read_request(body.request)
        return await _answer(service, http, request, [await prepare_chat(service, request)])

    return router


async def _prepare_texts(service: Service, request: OpenAIRequest) -> list[EngineRequest]:
    """The engine's request for each prompt."""
    count, most = len(request.prompts), service.limits.max_prompts
    if count > most:
        raise ApiError(
            400, f"prompt has {count} entries: this server takes at most {most}", param="prompt"
        )
    prepared = []
    for i, prompt in enumerate(request.prompts):
        prepared.append(await service.prepare(prompt, request.params, request.fields, index=i))
        await asyncio.sleep(0)  # hundreds of prompts would hold the others' events up
    return prepared


async def _answer(
    service: Service, http: Request, request: OpenAIRequest, prepared: list[EngineRequest]
) -> Response:
    meta = ResponseMeta(http.state.request_id, service.model_name, service.now())
    outputs = service.outputs(prepared, http.state.request_id)
    tokenizer = service.loaded().tokenizer
    if request.stream:
        chunks = Chunks(request, tokenizer, meta)
        events = encode_stream(
            outputs,
            lambda output: map(event, chunks.of(output)),
            lambda: [*map(event, chunks.last()), DONE],
        )
        return EventStream(events, _error_events)
    last = await unless_client_leaves(last_outputs(outputs), http.receive)
    return await json_off_loop(lambda: response_body(request, last, tokenizer, meta))


def _error_events(error: ApiError) -> bytes:
    return event(error.body()) + DONE
