"""Requests for the hidden states of whole prompts, as the routes of embeddings and scores run them.

In: inputs, and a function that makes the engine's request for each. Out: the outputs in the order
of the inputs, or an `ApiError`. It knows no fields of any API.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from starlette.responses import Response

from llama.api import Request as EngineRequest
from llama.api import RequestOutput
from llama.server.encoding import (
    PIECE_BYTES,
    PieceResponse,
    beside_loop,
    json_pieces,
    unless_client_leaves,
)
from llama.server.errors import ErrorFields
from llama.server.exchange import Exchange

_MAX_IN_LOOP = 10_000  # characters and ids of a body's inputs that are encoded in the event loop
_PER_INPUT = 100  # characters that take as long as the rest of what is done for an input
_MAX_VALUES = 1000  # elements of vectors that are encoded as JSON in the event loop

MakeRequest = Callable[..., EngineRequest]  # arguments: an input, `index=` and `tenant=`


async def pooled_outputs(
    http: Exchange,
    inputs: Sequence[Any],
    make: MakeRequest,
    fields: ErrorFields,
    num_shared: int = 0,
) -> list[RequestOutput]:
    """Return the output of each input, in their order.

    The inputs are run in groups, so that one body does not fill the queue of all.

    Args:
        http: the request of HTTP, which knows its model.
        inputs: texts or lists of token ids.
        make: makes the engine's request for one input.
        fields: the body's own names, which an error uses.
        num_shared: characters that are encoded again with each input.

    Raises:
        ApiError: 400 names the field that is wrong; 500 and 503 are those of `Serving.outputs`.
    """
    http.serving.loaded()
    outputs: list[RequestOutput] = []
    prepared = await _prepared(http, inputs, make, fields, num_shared)
    group_size = http.serving.limits.max_prompts
    for start in range(0, len(prepared), group_size):
        group = prepared[start : start + group_size]
        work = _run(http, group, fields)
        outputs += await unless_client_leaves(work, http.receive)
    return outputs


async def _prepared(
    http: Exchange,
    inputs: Sequence[Any],
    make: MakeRequest,
    fields: ErrorFields,
    num_shared: int,
) -> list[EngineRequest]:
    """Return the engine's request for each input; all are checked before any is run."""
    tenant = http.state.tenant
    requests = (make(item, index=i, tenant=tenant) for i, item in enumerate(inputs))
    cost = sum(_PER_INPUT + num_shared + _num_encoded(item) for item in inputs)
    with http.serving.refusals(fields):
        if cost <= _MAX_IN_LOOP:
            return list(requests)
        work = http.serving.workers.collect(requests, fields.prompt)
        return await unless_client_leaves(work, http.receive)


def _num_encoded(item: Any) -> int:
    """Return how many characters or ids of an input are encoded or checked."""
    if isinstance(item, tuple):  # a pair of texts, or a text with its options
        return sum(len(part) for part in item if isinstance(part, str))
    is_dialog = isinstance(item, list) and bool(item) and not isinstance(item[0], int)
    # A chat template may take long for few characters.
    return _MAX_IN_LOOP if is_dialog else len(item)


async def _run(
    http: Exchange, group: list[EngineRequest], fields: ErrorFields
) -> list[RequestOutput]:
    """Return the outputs of requests in their order."""
    found: dict[int, RequestOutput] = {}
    outputs = http.serving.outputs(group, http.state.request_id, fields)
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            found[output.index] = output
    return [found[index] for index in sorted(found)]


async def json_response(http: Exchange, content: dict[str, Any], num_values: int) -> Response:
    """Return a response whose JSON is made beside the event loop if it may be large.

    Args:
        http: the request of HTTP, whose texts `content` may quote.
        content: the object; an iterator in it is encoded as a list.
        num_values: the number of elements of vectors in it.
    """
    pieces: Iterator[bytes] = json_pieces(content)
    if num_values > _MAX_VALUES or http.state.has_large_body:
        first = await asyncio.to_thread(next, pieces)
    else:
        first = next(pieces)
    if len(first) < PIECE_BYTES:  # There are no more.
        return Response(first, media_type="application/json")
    return PieceResponse(first, beside_loop(pieces))
