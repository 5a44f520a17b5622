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

_MAX_IN_LOOP = 10_000  # characters or ids of an input that are encoded in the event loop
_MAX_VALUES = 1000  # elements of vectors that are encoded as JSON in the event loop

MakeRequest = Callable[..., EngineRequest]  # arguments: an input, `index=` and `tenant=`


async def pooled_outputs(
    http: Exchange,
    inputs: Sequence[Any],
    make: MakeRequest,
    fields: ErrorFields,
) -> list[RequestOutput]:
    """Return the output of each input, in their order.

    The inputs are run in groups, so that one body does not fill the queue of all.

    Args:
        http: the request of HTTP, which knows its model.
        inputs: texts or lists of token ids.
        make: makes the engine's request for one input.
        fields: the body's own names, which an error uses.

    Raises:
        ApiError: 400 names the field that is wrong; 500 and 503 are those of `Serving.outputs`.
    """
    http.serving.loaded()
    outputs: list[RequestOutput] = []
    prepared = await _prepared(http, inputs, make, fields)
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
) -> list[EngineRequest]:
    """Return the engine's request for each input; all are checked before any is run."""
    prepared = []
    with http.serving.refusals(fields):
        for i, item in enumerate(inputs):
            options = {"index": i, "tenant": http.state.tenant}
            is_large = isinstance(item, str | list) and len(item) > _MAX_IN_LOOP
            is_dialog = isinstance(item, list) and bool(item) and not isinstance(item[0], int)
            if is_large or is_dialog:
                prepared.append(await asyncio.to_thread(make, item, **options))
            else:
                prepared.append(make(item, **options))
                await asyncio.sleep(0)  # Many inputs would delay the events of other requests.
    return prepared


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


async def json_response(content: dict[str, Any], num_values: int) -> Response:
    """Return a response whose JSON is made beside the event loop if it has many elements.

    Args:
        content: the object; an iterator in it is encoded as a list.
        num_values: the number of elements of vectors in it.
    """
    pieces: Iterator[bytes] = json_pieces(content)
    if num_values > _MAX_VALUES:
        first = await asyncio.to_thread(next, pieces)
    else:
        first = next(pieces)
    if len(first) < PIECE_BYTES:  # There are no more.
        return Response(first, media_type="application/json")
    return PieceResponse(first, beside_loop(pieces))
