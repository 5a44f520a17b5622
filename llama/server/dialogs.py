"""What the routes of all chat APIs have in common: from a request to the engine's.

In: a body, and the function that reads it as a chat. Out: the engine's request, or an ApiError that
names the body's own field.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from llama.requests.request import Request as EngineRequest
from llama.requests.request import RequestOutput
from llama.sampling_params import SamplingParams
from llama.server.errors import ApiError
from llama.server.exchange import read_json
from llama.server.openai.chat_prompt import chat_params, chat_prompt
from llama.server.openai.dialog import Translated
from llama.server.openai.json_types import UnknownField
from llama.server.openai.requests import OpenAIRequest, field_of
from llama.server.openai.responses import Heading
from llama.server.service import Service
from llama.tokenizer import Tokenizer

# A chat's answer may be as long as the context.
CHAT_DEFAULTS = SamplingParams(max_tokens=None, skip_special_tokens=True)


async def prepare_chat(
    service: Service,
    request: OpenAIRequest,
    body: Any,
    form_field: str,
    *,
    continues: bool = False,
    ends_with_context: bool = False,
) -> EngineRequest:
    """The engine's request for a dialog; ApiError 400 names a field of a chat."""
    tokenizer = service.loaded().tokenizer
    try:
        ids = await asyncio.to_thread(
            chat_prompt, request, tokenizer, service.tool_format, continues=continues
        )
        params = chat_params(request, service.tool_format)
    except (TypeError, ValueError) as e:
        raise ApiError(400, str(e), param=field_of(e, body) or "messages") from None
    return await service.prepare(
        ids,
        params,
        param="messages",
        form_field=form_field,
        ends_with_context=ends_with_context,
    )


def read_as_chat(
    body: Any, fields: Collection[str], parse: Callable[[Any, SamplingParams], Translated]
) -> Translated:
    """A body of another API, read by `parse`; ApiError 400 names one of its fields."""
    try:
        return parse(body, CHAT_DEFAULTS)
    except (TypeError, ValueError) as e:
        field = e.field if isinstance(e, UnknownField) else None
        param = field or _first_name(str(e), fields, body)
        raise ApiError(400, str(e), param=param) from None


async def prepare_translated(
    service: Service, asked: Translated, fields: Collection[str]
) -> EngineRequest:
    """The engine's request; ApiError 400 names a field of the body's own API.

    Both APIs say how an answer ends that has reached the end of the context, so their limit of
    tokens may be larger than what is left of it: agents ask for 32,000 whatever the model is.
    """
    names = dict.fromkeys(["messages", "tools", "tool_choice"])
    try:
        return await prepare_chat(
            service,
            asked.chat,
            names,
            asked.form_field,
            continues=asked.continues,
            ends_with_context=True,
        )
    except ApiError as e:
        message = re.sub(r"^structured_output\.\w+", asked.form_field, e.message)
        message = asked.wording.of(message)
        param = _first_name(message, fields, {}) or asked.wording.of(e.param or "").split(".")[0]
        raise ApiError(
            e.status, message, param=param or None, code=e.code, retry_after=e.retry_after
        ) from None


@dataclass(frozen=True)
class Started:
    """A dialog that is on its way through the engine; what its answer is made of."""

    body: Any
    chat: OpenAIRequest
    tokenizer: Tokenizer
    heading: Heading
    outputs: AsyncGenerator[RequestOutput, None]


async def start(
    service: Service,
    http: Request,
    fields: Collection[str],
    parse: Callable[[Any, SamplingParams], Translated],
) -> Started:
    """Read a request of another chat API, and give its dialog to the engine."""
    body = await read_json(http)
    tokenizer = service.loaded().tokenizer
    asked = read_as_chat(body, fields, parse)
    request = await prepare_translated(service, asked, fields)
    request_id = http.state.request_id
    heading = Heading(request_id, service.model_name, service.now())
    outputs = service.outputs([request], request_id)
    return Started(body, asked.chat, tokenizer, heading, outputs)


def _first_name(message: str, fields: Collection[str], body: Any) -> str | None:
    """The field that a message begins with."""
    found = re.match(r"'?([a-z_]+)", message)
    known = {*fields, *body} if isinstance(body, dict) else set(fields)
    return found[1] if found is not None and found[1] in known else None
