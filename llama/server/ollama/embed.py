"""The routes /api/embed and /api/embeddings of Ollama's API, with their bodies.

In: texts. Out: a vector for each, of length 1 in the newer route. On a model that was not made for
embeddings, the server must say how a text becomes a vector.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from llama.api import EmbeddingOptions, RequestOutput
from llama.prompts.fields import UNUSED, Fields
from llama.server.accepted import ModelName
from llama.server.errors import ErrorFields
from llama.server.exchange import Exchange
from llama.server.openai.models import MAX_PROMPTS
from llama.server.pooled import pooled_response
from llama.server.refusals import refusals
from llama.server.request import PooledRequest

Vectors = Iterator[list[float]]


class _Body(Fields):
    """The fields that both bodies share; options of the machine and keep_alive have no effect."""

    model: ModelName | None = None
    options: Annotated[dict[str, Any] | None, UNUSED] = None
    keep_alive: float | str | None = None


class EmbedBody(_Body):
    """The body of /api/embed.

    Attributes:
        truncate: whether an input beyond the context is cut, which is the default, or an error.
    """

    unknown_message: ClassVar[str] = "{names} cannot be used in /api/embed: leave it out"

    input: str | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**20)] | None = None


class EmbeddingsBody(_Body):
    """The body of /api/embeddings, which has one text."""

    unknown_message: ClassVar[str] = "{names} cannot be used in /api/embeddings: leave it out"

    prompt: str


def add_routes(router: APIRouter) -> None:
    """Add the routes of embeddings."""

    @router.post("/api/embed")
    async def embed(body: EmbedBody, http: Exchange) -> Response:
        """Embed each text."""
        begin = time.perf_counter_ns()
        texts = [body.input] if isinstance(body.input, str) else body.input
        max_seq_len = http.serving.loaded().card.max_seq_len
        truncate = None if body.truncate is False else max_seq_len
        options = EmbeddingOptions(dimensions=body.dimensions, truncate=truncate)

        def content(vectors: Vectors, outputs: list[RequestOutput]) -> dict[str, Any]:
            return {
                "model": body.model or http.serving.name,
                "embeddings": vectors,
                "total_duration": time.perf_counter_ns() - begin,
                "load_duration": 0,
                "prompt_eval_count": sum(output.usage.prompt_tokens for output in outputs),
            }

        return await _embedded(http, body, texts, options, "input", content)

    @router.post("/api/embeddings")
    async def embeddings(body: EmbeddingsBody, http: Exchange) -> Response:
        """Embed one text; its vector is as long as the model makes it."""
        max_seq_len = http.serving.loaded().card.max_seq_len
        options = EmbeddingOptions(normalize=False, truncate=max_seq_len)

        def content(vectors: Vectors, _: list[RequestOutput]) -> dict[str, Any]:
            return {"embedding": next(vectors)}

        return await _embedded(http, body, [body.prompt], options, "prompt", content)


async def _embedded(
    http: Exchange,
    body: _Body,
    texts: list[str],
    options: EmbeddingOptions,
    field: str,
    content: Callable[[Vectors, list[RequestOutput]], dict[str, Any]],
) -> Response:
    """Return the response to a body.

    Args:
        http: the request of HTTP, which knows its model.
        body: its body.
        texts: what is embedded.
        options: how texts become vectors.
        field: the field of the body that has the texts, for errors.
        content: makes the object of the response, of the vectors and the outputs.
    """
    pooler = http.serving.loaded().pooler
    fields = ErrorFields(field, {"truncate": "truncate"})
    with refusals(fields):
        checked = pooler.checked(options)

    def content_of(outputs: list[RequestOutput]) -> dict[str, Any]:
        return content((checked.vector(output).tolist() for output in outputs), outputs)

    request = PooledRequest(
        inputs=texts,
        make=functools.partial(
            pooler.request, options=checked, adapter=http.serving.adapter_of(body.model)
        ),
        content=content_of,
        values_per_input=pooler.dim,
        num_shared=len(checked.prompt or ""),
    )
    return await pooled_response(http, request, fields)
