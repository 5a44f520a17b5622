"""The routes of the APIs: those of OpenAI, Anthropic and Ollama.

In: bodies, from which the model of each API makes the same kind of request. Out: JSON objects, or
their events. What a body may contain is known to the models alone.
"""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from llama.api import Request as EngineRequest
from llama.sampling_params import SamplingParams
from llama.server.anthropic.answers import MessageAnswer
from llama.server.anthropic.models import COUNT_URL, MESSAGES_URL, CountBody, MessagesBody
from llama.server.encoding import JsonResponse, unless_client_leaves
from llama.server.errors import ApiError
from llama.server.exchange import Exchange, beside_if_large, body_router, chat_ids, prepare_chat
from llama.server.openai.answers import Completion
from llama.server.openai.models import CHAT_URL, TEXT_URL, ChatBody, CompletionBody
from llama.server.request import ApiRequest
from llama.server.respond import respond
from llama.server.responses.answers import ResponseAnswer
from llama.server.responses.models import RESPONSES_URL, ResponsesBody
from llama.server.workers import PREPARE_S

# Without defaults of the model. A completion has OpenAI's own limit; the answer of a chat may be
# as long as the context.
_TEXT_DEFAULTS = SamplingParams(max_tokens=16, skip_special_tokens=True)
_CHAT_DEFAULTS = SamplingParams(max_tokens=None, skip_special_tokens=True)


def routes() -> APIRouter:
    """Return the routes of all APIs."""
    router = body_router()

    async def count(body: ResponsesBody | CountBody, http: Exchange) -> int:
        chat = await beside_if_large(http, body.request, _CHAT_DEFAULTS)
        return len(await chat_ids(http, chat))

    async def answer(
        body: ChatBody | ResponsesBody | MessagesBody, http: Exchange, make_answer: Any
    ) -> Response:
        defaults = replace(_CHAT_DEFAULTS, **http.serving.sampling_defaults)
        chat = await beside_if_large(http, body.request, defaults)
        # Agents ask for 32,000 tokens of any model. In the APIs that they use, an answer may
        # therefore end with the context, before its limit.
        must_fit = isinstance(body, ChatBody)
        prepared = await prepare_chat(http, chat, must_fit=must_fit)
        return await respond(http, chat, [prepared], make_answer)

    @router.post(TEXT_URL)
    async def completions(body: CompletionBody, http: Exchange) -> Response:
        """Continue each prompt (https://platform.openai.com/docs/api-reference/completions)."""
        defaults = replace(_TEXT_DEFAULTS, **http.serving.sampling_defaults)
        request = await beside_if_large(http, body.request, defaults)
        prepared = await _prepare_prompts(http, request)
        return await respond(http, request, prepared, Completion)

    @router.post(CHAT_URL)
    async def chat_completions(body: ChatBody, http: Exchange) -> Response:
        """Answer a dialog (https://platform.openai.com/docs/api-reference/chat)."""
        return await answer(body, http, Completion)

    @router.post(RESPONSES_URL)
    async def responses(body: ResponsesBody, http: Exchange) -> Response:
        """Answer an input (https://platform.openai.com/docs/api-reference/responses)."""
        return await answer(body, http, partial(ResponseAnswer, body))

    @router.post(f"{RESPONSES_URL}/input_tokens")
    async def input_tokens(body: ResponsesBody, http: Exchange) -> Response:
        """Count the tokens of the prompt that /v1/responses would make of the body."""
        return JsonResponse(
            {"object": "response.input_tokens", "input_tokens": await count(body, http)}
        )

    @router.post(MESSAGES_URL)
    async def messages(body: MessagesBody, http: Exchange) -> Response:
        """Answer a dialog (https://docs.anthropic.com/en/api/messages)."""
        return await answer(body, http, MessageAnswer)

    @router.post(COUNT_URL)
    async def count_tokens(body: CountBody, http: Exchange) -> Response:
        """Count the tokens of the prompt that /v1/messages would make of the body."""
        return JsonResponse({"input_tokens": await count(body, http)})

    return router


async def _prepare_prompts(http: Exchange, request: ApiRequest) -> list[EngineRequest]:
    """Return the engine's request for each prompt of a completion."""
    serving = http.serving
    num_prompts = len(request.prompts)
    max_prompts = serving.limits.max_prompts
    if num_prompts > max_prompts:
        message = f"prompt has {num_prompts} entries: this server takes at most {max_prompts}"
        raise ApiError(400, message, param="prompt")
    field = "prompt" if num_prompts > 1 else "n"
    serving.check_capacity(request.num_answers, http.state.sender, field)

    async def prepare() -> list[EngineRequest]:
        prepared = []
        for i, prompt in enumerate(request.prompts):
            tenant = http.state.tenant
            made = await serving.prepare(
                prompt,
                request.params,
                request.fields,
                tenant=tenant,
                sender=http.state.sender,
                index=i,
                model=request.model,
                parse_special=request.parse_special,
            )
            prepared.append(made)
            await asyncio.sleep(0)  # Hundreds of prompts would delay the events of other requests.
        return prepared

    # Each prompt has a limit of its own, and is encoded with the same bad words. A single one must
    # not be at fault where the event loop had no processor meanwhile.
    limit_s = PREPARE_S if num_prompts > 1 else None
    with serving.workers.in_time(request.fields.prompt):
        async with asyncio.timeout(limit_s):
            return await unless_client_leaves(prepare(), http.receive)
