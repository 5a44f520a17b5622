"""One answer on its way out: what every route does between the engine and HTTP.

In: a request for the engine. Out: the response, whole or as a stream, or an `ApiError` if it could
become too large. The parts of large answers are encoded off the event loop. It knows no fields
of any API.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial

from starlette.responses import Response

from llama.api import Request as EngineRequest
from llama.api import RequestOutput
from llama.prompts.dialog_format import DialogFormat
from llama.server.answer_size import MAX_IN_LOOP, num_items, num_logprobs
from llama.server.blocks import BlockAnswer
from llama.server.encoding import (
    PIECE_BYTES,
    PieceResponse,
    beside_loop,
    json_pieces,
    unless_client_leaves,
)
from llama.server.errors import ApiError
from llama.server.exchange import Exchange
from llama.server.memory import Holding, SharedMemory
from llama.server.openai.answers import Completion, ResponseMeta
from llama.server.pushed import PushedStream
from llama.server.request import ApiRequest

# What a token of an answer takes in JSON, and what a log-probability takes in memory (in JSON it
# takes 30 bytes, or 80 in a chat).
_TOKEN_BYTES = 8
_LOGPROB_BYTES = 128
_SMALL_ANSWER = 64 * 1024  # bytes of an answer that are not counted among those of all answers


async def respond(
    http: Exchange,
    request: ApiRequest,
    prepared: list[EngineRequest],
    make_answer: Callable[[ApiRequest, DialogFormat, ResponseMeta], Completion | BlockAnswer],
) -> Response:
    """Return the response to a request, whole or as a stream.

    Args:
        http: the request of HTTP, which knows its model.
        request: what its body asks for.
        prepared: the engine's request for each prompt.
        make_answer: makes the answer of the API.

    Raises:
        ApiError: 400 if the answer could become too large, 503 if all answers together could.
    """
    serving = http.serving
    hold_answer(http, request, prepared)
    model = serving.name if request.model is None else request.model
    meta = ResponseMeta(http.state.request_id, model, int(time.time()), serving.reasoning_field)
    answer = make_answer(request, serving.dialog_format, meta)
    if request.stream:
        running = partial(serving.pushing, prepared, meta.id, http.state.sender, request.fields)
        max_wait_s = serving.limits.max_wait_s
        return PushedStream(running, max_wait_s, prepared, request, answer)
    outputs = serving.outputs(prepared, meta.id, http.state.sender, request.fields)
    last = await unless_client_leaves(_last_outputs(outputs), http.receive)
    return await _whole_response(request, last, answer)


async def _whole_response(
    request: ApiRequest, last: list[RequestOutput], answer: Completion | BlockAnswer
) -> Response:
    """Return the response to a finished request; a large one is made off the event loop."""

    def pieces() -> Iterator[bytes]:
        yield from json_pieces(answer.content(last))

    remaining = pieces()
    num_all = len(request.params.prediction) + sum(num_items(request, x) for x in last)
    # Looking for calls takes 7 us for each character of an answer.
    is_small = num_all <= MAX_IN_LOOP and request.tools is None
    first = next(remaining) if is_small else await asyncio.to_thread(next, remaining)
    if len(first) < PIECE_BYTES:  # There are no more.
        return Response(first, media_type="application/json")
    return PieceResponse(first, beside_loop(remaining))


async def _last_outputs(outputs: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    """Return the last output of each prompt, in the order of the prompts."""
    latest: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            latest[output.index] = output
    return [latest[index] for index in sorted(latest)]


def answer_memory(max_answer_mb: int, num_processes: int = 1) -> SharedMemory:
    """Return the memory of all answers of a process, which has room for the largest one.

    In the processes of a server together, one of the largest size leaves three quarters.
    """
    refusal = "too many large answers are being made or read at once: try again"
    max_mb = max(max_answer_mb, 4 * max_answer_mb // num_processes)
    return SharedMemory(max_mb * 2**20, _SMALL_ANSWER, refusal)


def hold_answer(http: Exchange, request: ApiRequest, prepared: list[EngineRequest]) -> None:
    """Hold the largest size that an answer can have, before any work for it begins.

    It is given back once the client has read the last byte, or has left.

    Each token counts as 8 bytes, and each log-probability as 128. The tokens are those of all
    answers at their largest length and, with echo, those of the prompt before each answer.

    Args:
        http: the request of HTTP, which knows its model.
        request: what the body asks for.
        prepared: the engine's request for each prompt.

    Raises:
        ApiError: 400 if the answer could be larger than one may be, 503 if all answers together
            could take too much.
    """
    max_answer_mb = http.serving.limits.max_answer_mb
    token_bytes = _TOKEN_BYTES + num_logprobs(request.params) * _LOGPROB_BYTES
    num_tokens = 0
    for part in prepared:
        spec = part.answers[0].sequence.spec
        num_tokens += len(part.answers) * (spec.max_len - len(spec.tokens))
        if request.echo:
            num_tokens += part.params.n * len(spec.tokens)
    size_mb = num_tokens * token_bytes / 2**20
    if size_mb > max_answer_mb:
        message = (
            f"the answer could take {size_mb:.0f} MiB, and this server makes at most "
            f"{max_answer_mb}: ask for fewer tokens (max_tokens), answers, logprobs or prompts, or "
            "start the server with a larger --max_answer_mb"
        )
        raise ApiError(400, message, param=_largest_field(request))
    answer: Holding = http.state.answer
    answer.grow_to(answer.num_bytes + num_tokens * token_bytes)  # It may hold images.


def _largest_field(request: ApiRequest) -> str:
    """Return the field of a body that makes its answer large."""
    name = "max_tokens" if request.params.logprobs is None else "logprobs"
    return request.fields.names.get(name, "echo" if request.echo else name)
