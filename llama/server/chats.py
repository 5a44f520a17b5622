"""What the routes of all chat APIs have in common: from a checked request to the engine's.

In: an `OpenAIRequest` with a dialog. Out: the engine's request, or an ApiError that names the
body's own field.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from fastapi import Request

from llama.checks import FieldError
from llama.requests.request import Request as EngineRequest
from llama.requests.request import RequestOutput
from llama.sampling_params import SamplingParams
from llama.server.errors import ApiError, first_name
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


@dataclass(frozen=True)
class Started:
    """A dialog that is on its way through the engine; what its answer is made of."""

    chat: OpenAIRequest
    tokenizer: Tokenizer
    meta: ResponseMeta
    outputs: AsyncGenerator[RequestOutput, None]


async def start(service: Service, http: Request, chat: OpenAIRequest) -> Started:
    """Give the dialog of another chat API to the engine.

    Those APIs say how an answer ends that has reached the end of the context, so their limit of
    tokens may be larger than what is left of it: agents ask for 32,000 whatever the model is.
    """
    request = await prepare_chat(service, chat, ends_with_context=True)
    request_id = http.state.request_id
    meta = ResponseMeta(request_id, service.model_name, service.now())
    return Started(chat, service.loaded().tokenizer, meta, service.outputs([request], request_id))
