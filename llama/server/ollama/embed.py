"""The routes /api/embed and /api/embeddings of Ollama's API, with their bodies.

In: texts. Out: a vector for each, of length 1 in the newer route. On a model that was not made for
embeddings, the server must say how a text becomes a vector.
"""

import functools
import time
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
from llama.server.pooled import json_response, pooled_outputs


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
        llama = http.serving.loaded()
        truncate = None if body.truncate is False else llama.model.params.max_seq_len
        options = EmbeddingOptions(dimensions=body.dimensions, truncate=truncate)
        options, outputs = await _embedded(http, texts, options, "input", body.model)
        content = {
            "model": body.model or http.serving.name,
            "embeddings": (options.vector(output).tolist() for output in outputs),
            "total_duration": time.perf_counter_ns() - begin,
            "load_duration": 0,
            "prompt_eval_count": sum(output.usage.prompt_tokens for output in outputs),
        }
        return await json_response(http, content, len(outputs) * llama.pooler.dim)

    @router.post("/api/embeddings")
    async def embeddings(body: EmbeddingsBody, http: Exchange) -> Response:
        """Embed one text; its vector is as long as the model makes it."""
        max_seq_len = http.serving.loaded().model.params.max_seq_len
        options = EmbeddingOptions(normalize=False, truncate=max_seq_len)
        options, (output,) = await _embedded(http, [body.prompt], options, "prompt", body.model)
        vector = options.vector(output).tolist()
        return await json_response(http, {"embedding": vector}, len(vector))


async def _embedded(
    http: Exchange, texts: list[str], options: EmbeddingOptions, field: str, model: str | None
) -> tuple[EmbeddingOptions, list[RequestOutput]]:
    """Return the outputs of texts, and the options that make their vectors."""
    pooler = http.serving.loaded().pooler
    fields = ErrorFields(field, {"truncate": "truncate"})
    with http.serving.refusals(fields):
        checked = pooler.checked(options)
    adapter = http.serving.adapter_of(model)
    make = functools.partial(pooler.request, options=checked, adapter=adapter)
    return checked, await pooled_outputs(http, texts, make, fields, len(checked.prompt or ""))
