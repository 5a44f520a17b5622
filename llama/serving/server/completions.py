"""The routes of OpenAI's completion APIs: /v1/completions and /v1/chat/completions.

In: a request's body. Out: one JSON object, or a stream of chunks with the same content.
"""

import contextlib
import json
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from llama.requests.request import Request as EngineRequest
from llama.requests.request import RequestOutput
from llama.sampling_params import SamplingParams
from llama.serving.asgi import unless_client_leaves
from llama.serving.openai.requests import (
    CHAT_URL,
    TEXT_URL,
    OpenAIRequest,
    field_of,
    parse_body,
)
from llama.serving.openai.responses import Chunks, Heading, response_body
from llama.serving.openai.schema import body_schema
from llama.serving.server.dialogs import CHAT_DEFAULTS, prepare_chat
from llama.serving.server.errors import ApiError
from llama.serving.server.responses import (
    DONE,
    EventStream,
    JsonResponse,
    event,
)
from llama.serving.server.service import Service

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


def described(schema: dict[str, Any]) -> dict[str, Any]:
    """What /openapi.json says of a route: the schema of its body, and the errors that it gives."""
    errors = {
        str(status): {"description": what}
        for status, what in {400: "a field is wrong", 413: "too large", 503: "not now"}.items()
    }
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}, "responses": errors}


async def read_json(http: Request) -> Any:
    """The JSON of the body; ApiError 400."""
    try:
        return json.loads(await http.body(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as e:
        raise ApiError(400, f"the body is not JSON: {e}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


async def _answer(service: Service, http: Request, *, chat: bool) -> Response:
    body = await read_json(http)
    service.loaded()
    try:
        request = parse_body(body, CHAT_DEFAULTS if chat else _TEXT_DEFAULTS, chat=chat)
    except (TypeError, ValueError) as e:
        raise ApiError(400, str(e), param=field_of(e, body)) from None
    requests = await _prepare(service, request, body)
    heading = Heading(http.state.request_id, service.model_name, service.now())
    outputs = service.outputs(requests, http.state.request_id)
    tokenizer = service.loaded().tokenizer
    if request.stream:
        return EventStream(_events(outputs, Chunks(request, tokenizer, heading)), _error_events)
    last = await unless_client_leaves(last_outputs(outputs), http.receive)
    return JsonResponse(response_body(request, last, tokenizer, heading))


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
        return [await prepare(prompt, index=i) for i, prompt in enumerate(request.prompts)]
    return [await prepare_chat(service, request, body, request.form_field or "tools")]


async def last_outputs(outputs: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    """The last output of each prompt, in their order."""
    latest: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            latest[output.index] = output
    return [latest[index] for index in sorted(latest)]


async def _events(
    outputs: AsyncGenerator[RequestOutput, None], chunks: Chunks
) -> AsyncGenerator[bytes, None]:
    """Chunks as events, then [DONE]."""
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            parts = [event(chunk) for chunk in chunks.of(output)]
            if parts:
                yield b"".join(parts)
    for chunk in chunks.last():
        yield event(chunk)
    yield DONE


def _error_events(error: ApiError) -> bytes:
    return event(error.body()) + DONE
