"""The routes of embeddings, labels and scores, which hidden states of whole prompts give.

In: bodies of OpenAI, vLLM, Jina and Cohere. Out: responses, or an `ApiError`, where a model that
cannot do what a route is for has status 404 and the reason. What a body may contain is known to the
models alone.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from llama.api import Request as EngineRequest
from llama.api import RequestOutput
from llama.common.checks import brief
from llama.server.encoding import (
    PIECE_BYTES,
    PieceResponse,
    beside_loop,
    json_pieces,
    unless_client_leaves,
)
from llama.server.errors import ApiError, ErrorFields
from llama.server.exchange import Exchange, body_router
from llama.server.openai.answers import ResponseMeta
from llama.server.openai.embeddings import EmbeddingBody
from llama.server.openai.models import EMBEDDINGS_URL, RERANK_URLS, SCORE_URLS
from llama.server.refusals import refusals
from llama.server.request import PooledRequest
from llama.server.scoring import ClassifyBody, RerankBody, ScoreBody, ScoringBody

_MAX_IN_LOOP = 10_000  # characters and ids of a body's inputs that are encoded in the event loop
_PER_INPUT = 100  # characters that take as long as the rest of what is done for an input
_VALUE_BYTES = 8  # bytes of an element of a vector, as a number and as a part of the JSON
_MAX_VALUES = 1000  # elements of vectors that are encoded as JSON in the event loop


def routes() -> APIRouter:
    """Return the routes of embeddings, labels and scores."""
    router = body_router()

    @router.post(EMBEDDINGS_URL)
    async def embeddings(body: EmbeddingBody, http: Exchange) -> Response:
        """Embed each input (https://platform.openai.com/docs/api-reference/embeddings)."""
        serving = http.serving
        llama = serving.loaded()
        with refusals(body.error_fields):
            request = body.request(llama, _meta(http, body), serving.adapter_of(body.model))
        return await pooled_response(http, request, body.error_fields)

    @router.post("/classify")
    async def classify(body: ClassifyBody, http: Exchange) -> Response:
        """Return the label of each input, with the probability of every label."""
        return await _scored(body, http)

    async def score(body: ScoreBody, http: Exchange) -> Response:
        """Return the score of each pair of texts."""
        return await _scored(body, http)

    async def rerank(body: RerankBody, http: Exchange) -> Response:
        """Return the documents in the order of their relevance, the most relevant first."""
        return await _scored(body, http)

    for urls, answer in ((SCORE_URLS, score), (RERANK_URLS, rerank)):
        for url in urls:
            router.post(url)(answer)
    return router


def _meta(http: Exchange, body: EmbeddingBody | ScoringBody) -> ResponseMeta:
    """Return the fields of the response to a body."""
    model = body.model or http.serving.name
    return ResponseMeta(http.state.request_id, model, int(time.time()))


async def _scored(body: ClassifyBody | ScoreBody | RerankBody, http: Exchange) -> Response:
    """Return the response to a body for labels or scores."""
    fields = body.error_fields
    llama = http.serving.loaded()
    reason = body.why_unable(llama)
    if reason:
        raise ApiError(404, reason)
    if http.serving.adapter_of(body.model) is not None:
        message = f"model={brief(body.model)} is an adapter, and scores are those of the base model"
        raise ApiError(400, message, param="model")
    with refusals(fields):
        request = body.request(llama, _meta(http, body))
    return await pooled_response(http, request, fields)


async def pooled_response(http: Exchange, request: PooledRequest, fields: ErrorFields) -> Response:
    """Return the response to a request.

    The inputs are run in groups, so that one body does not fill the queue of all.

    Args:
        http: the request of HTTP, which knows its model.
        request: what its body asks for.
        fields: the body's own names, which an error uses.

    Raises:
        ApiError: 400 names the field that is wrong; 500 and 503 are those of `Serving.outputs`.
    """
    outputs: list[RequestOutput] = []
    http.state.answer.grow_to(len(request.inputs) * request.values_per_input * _VALUE_BYTES)
    prepared = await _prepared(http, request, fields)
    group_size = http.serving.limits.max_prompts
    for start in range(0, len(prepared), group_size):
        group = prepared[start : start + group_size]
        work = _run(http, group, fields)
        outputs += await unless_client_leaves(work, http.receive)
    content = await asyncio.to_thread(request.content, outputs)
    return await _json_response(http, content, len(outputs) * request.values_per_input)


async def _prepared(
    http: Exchange, request: PooledRequest, fields: ErrorFields
) -> list[EngineRequest]:
    """Return the engine's request for each input; all are checked before any is run."""
    tenant = http.state.tenant
    inputs = request.inputs
    requests = (request.make(item, index=i, tenant=tenant) for i, item in enumerate(inputs))
    cost = sum(_PER_INPUT + request.num_shared + _num_encoded(item) for item in inputs)
    with refusals(fields):
        if cost <= _MAX_IN_LOOP:
            return list(requests)
        sender = http.state.sender
        work = http.serving.workers.collect(sender, requests, fields.prompt)
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
    state = http.state
    outputs = http.serving.outputs(group, state.request_id, state.sender, fields)
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            found[output.index] = output
    return [found[index] for index in sorted(found)]


async def _json_response(http: Exchange, content: dict[str, Any], num_values: int) -> Response:
    """Return a response whose JSON is made off the event loop if it may be large.

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
