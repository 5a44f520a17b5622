"""One answer on its way out: what every route does between the engine and HTTP.

In: a request for the engine. Out: the response, whole or as a stream, or an `ApiError` if it could
become too large. The parts of large answers are encoded beside the event loop. It knows no fields
of any API.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator

from starlette.responses import Response

from llama.api import Request as EngineRequest
from llama.api import RequestOutput
from llama.prompts.dialog_format import DialogFormat
from llama.sampling_params import SamplingParams
from llama.server.blocks import BlockAnswer
from llama.server.encoding import (
    COMMENT,
    PIECE_BYTES,
    EventStream,
    PieceResponse,
    beside_loop,
    json_pieces,
    unless_client_leaves,
)
from llama.server.errors import ApiError
from llama.server.exchange import Exchange
from llama.server.memory import SharedMemory
from llama.server.openai.answers import Completion, ResponseMeta
from llama.server.request import ApiRequest

# Tokens, log-probabilities and tokens of a prediction that are encoded in the event loop at a time;
# 1,000 take 2 to 6 ms.
MAX_IN_LOOP = 1000
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
    outputs = serving.outputs(prepared, meta.id, http.state.sender, request.fields)
    if request.stream:
        encode = answer.stream_format.encode
        keep_alive = COMMENT if answer.idle_event is None else encode(answer.idle_event)

        def error_events(error: ApiError) -> bytes:
            return encode(answer.error_event(error)) + answer.end

        parts = _encoded(request, outputs, answer)
        return EventStream(parts, error_events, keep_alive, answer.stream_format.media_type)
    last = await unless_client_leaves(_last_outputs(outputs), http.receive)
    return await _whole_response(request, last, answer)


async def _whole_response(
    request: ApiRequest, last: list[RequestOutput], answer: Completion | BlockAnswer
) -> Response:
    """Return the response to a finished request; a large one is made beside the event loop."""

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


async def _encoded(
    request: ApiRequest,
    outputs: AsyncGenerator[RequestOutput, None],
    answer: Completion | BlockAnswer,
) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of a stream: those of each output that has any, then the last ones.

    The events of a large output are made beside the event loop, and sent in pieces.
    """
    stream_format = answer.stream_format
    latest: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            num_new = num_items(request, output, latest.get(output.index))
            latest[output.index] = output
            if num_new <= MAX_IN_LOOP:
                if part := b"".join(map(stream_format.encode, answer.events(output))):
                    yield part
                continue
            pieces = beside_loop(stream_format.pieces(answer.events(output)))
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    if piece:
                        yield piece

    def last_part() -> bytes:
        return b"".join(map(stream_format.encode, answer.last_events())) + answer.end

    # The last events may have all of the text, or count the tokens of the prediction.
    num_tokens = sum(output.usage.completion_tokens for output in latest.values())
    is_small = num_tokens + len(request.params.prediction) <= MAX_IN_LOOP
    yield last_part() if is_small else await asyncio.to_thread(last_part)


def num_items(
    request: ApiRequest, output: RequestOutput, earlier: RequestOutput | None = None
) -> int:
    """Return how many tokens and log-probabilities an output has that an earlier one has not."""
    num_tokens = output.usage.completion_tokens
    if earlier is not None:
        num_tokens -= earlier.usage.completion_tokens
    elif request.echo:
        num_tokens += output.usage.prompt_tokens * len(output.outputs)
    return num_tokens * (1 + _num_logprobs(request.params))


def _num_logprobs(params: SamplingParams) -> int:
    """Return how many log-probabilities an answer has for each of its tokens."""
    return 0 if params.logprobs is None else 1 + params.logprobs


def answer_memory(max_answer_mb: int) -> SharedMemory:
    """Return the memory of all answers, of which one of the largest size leaves three quarters."""
    refusal = "too many large answers are being made or read at once: try again"
    return SharedMemory(4 * max_answer_mb * 2**20, _SMALL_ANSWER, refusal)


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
    token_bytes = _TOKEN_BYTES + _num_logprobs(request.params) * _LOGPROB_BYTES
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
    http.state.answer.grow_to(num_tokens * token_bytes)


def _largest_field(request: ApiRequest) -> str:
    """Return the field of a body that makes its answer large."""
    name = "max_tokens" if request.params.logprobs is None else "logprobs"
    return request.fields.names.get(name, "echo" if request.echo else name)
