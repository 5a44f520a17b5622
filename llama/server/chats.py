"""What the routes of all chat APIs have in common: from a checked body to the answer.

In: what reads an `OpenAIRequest` of a body, and what writes an answer. Out: the response, or the
engine's request; or an ApiError that names the body's own field.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from llama.checks import FieldError
from llama.requests.request import Request as EngineRequest
from llama.requests.request import RequestOutput
from llama.sampling_params import SamplingParams
from llama.server.asgi import unless_client_leaves
from llama.server.encoding import COMMENT, EventStream
from llama.server.errors import ApiError, first_name
from llama.server.exchange import encode_stream, json_off_loop, last_outputs, sse_events
from llama.server.openai.answers import ResponseMeta
from llama.server.openai.request import OpenAIRequest
from llama.server.service import Service
from llama.tokenizer import Tokenizer

# A chat's answer may be as long as the context.
CHAT_DEFAULTS = SamplingParams(max_tokens=None, skip_special_tokens=True)


async def read_request(
    read: Callable[[SamplingParams], OpenAIRequest], defaults: SamplingParams = CHAT_DEFAULTS
) -> OpenAIRequest:
    """The request of a body; ApiError 400 where its fields do not go together."""
    try:
        return await asyncio.to_thread(read, defaults)
    except FieldError as e:
        raise ApiError(400, str(e), param=first_name(e.field)) from None


async def chat_ids(service: Service, chat: OpenAIRequest) -> list[int]:
    """The ids of a dialog; ApiError 400 names a field of the body."""
    tokenizer = service.loaded().tokenizer
    try:
        return await asyncio.to_thread(chat.chat_ids, tokenizer, service.tool_format)
    except (TypeError, ValueError) as e:
        raise chat.fields.refusal(e) from None


async def prepare_chat(
    service: Service, chat: OpenAIRequest, *, ends_with_context: bool = False
) -> EngineRequest:
    """The engine's request for a dialog; ApiError 400 names a field of the body."""
    ids = await chat_ids(service, chat)
    try:
        params = chat.chat_params(service.tool_format)
    except (TypeError, ValueError) as e:
        raise chat.fields.refusal(e) from None
    return await service.prepare(ids, params, chat.fields, ends_with_context=ends_with_context)


class ChatEvents(Protocol):
    """An answer in the words of one API: whole, or as events while it comes."""

    def whole(self, output: RequestOutput) -> dict[str, Any]: ...
    def of(self, output: RequestOutput) -> Iterable[dict[str, Any]]: ...
    def last(self) -> Iterable[dict[str, Any]]: ...
    def failed(self, error: ApiError) -> dict[str, Any]: ...


async def answer(
    service: Service,
    http: Request,
    read: Callable[[SamplingParams], OpenAIRequest],
    make: Callable[[OpenAIRequest, Tokenizer, ResponseMeta], ChatEvents],
    *,
    keep_alive: bytes = COMMENT,
) -> Response:
    """Answer a dialog of another chat API. There is no [DONE]: the last event says that it is.

    Those APIs say how an answer ends that has reached the end of the context, so their limit of
    tokens may be larger than what is left of it: agents ask for 32,000 whatever the model is.
    """
    chat = await read_request(read)
    request = await prepare_chat(service, chat, ends_with_context=True)
    request_id = http.state.request_id
    meta = ResponseMeta(request_id, service.model_name, service.now())
    events = make(chat, service.loaded().tokenizer, meta)
    outputs = service.outputs([request], request_id)
    if not chat.stream:
        (last,) = await unless_client_leaves(last_outputs(outputs), http.receive)
        return await json_off_loop(lambda: events.whole(last))
    stream = encode_stream(
        outputs, lambda output: sse_events(events.of(output)), lambda: sse_events(events.last())
    )

    def failed(error: ApiError) -> bytes:
        return b"".join(sse_events([events.failed(error)]))

    return EventStream(stream, failed, keep_alive=keep_alive)
