"""The route /v1/embeddings, with OpenAI's body and some of vLLM's further fields.

In: texts or token ids. Out: a vector for each, as a list of numbers or in base64. On a model that
was not made for embeddings, the server or the request must say how a text becomes a vector.
"""

import base64
import functools
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from llama.api import EmbeddingOptions
from llama.server.accepted import LabelFields
from llama.server.errors import ErrorFields
from llama.server.exchange import Exchange, body_router
from llama.server.openai.models import PromptField
from llama.server.pooled import json_response, pooled_outputs

EMBEDDINGS_URL = "/v1/embeddings"
# The default context length stands for -1, as in vLLM.
Truncation = Annotated[int, Field(ge=-1, le=2**31 - 1)]


class EmbeddingBody(LabelFields):
    """The body of /v1/embeddings."""

    unknown_message: ClassVar[str] = "{names} cannot be used in /v1/embeddings: leave it out"

    input: PromptField
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**20)] | None = None
    normalize: bool | None = None
    pooling: Literal["last", "mean"] | None = None
    prompt: str | None = None
    prompt_name: str | None = None
    include_prompt: bool | None = None
    truncate_prompt_tokens: Truncation | None = None

    def options(self, max_seq_len: int) -> EmbeddingOptions:
        """Return how inputs become vectors, as far as the body says it."""
        truncate = self.truncate_prompt_tokens
        return EmbeddingOptions(
            pooling=self.pooling,
            normalize=self.normalize is not False,
            dimensions=self.dimensions,
            prompt_name=self.prompt_name,
            prompt=self.prompt,
            include_prompt=self.include_prompt,
            truncate=max_seq_len if truncate == -1 else truncate,
        )


def inputs_of(value: Any) -> list[Any]:
    """Return the inputs of a body as a list of texts or of lists of token ids."""
    is_list = isinstance(value, list) and not isinstance(value[0], int)
    return value if is_list else [value]


def routes() -> APIRouter:
    """Return the route of embeddings."""
    router = body_router()

    @router.post(EMBEDDINGS_URL)
    async def embeddings(body: EmbeddingBody, http: Exchange) -> Response:
        """Embed each input (https://platform.openai.com/docs/api-reference/embeddings)."""
        serving = http.serving
        llama = serving.loaded()
        pooler = llama.pooler
        fields = ErrorFields("input", {"truncate": "truncate_prompt_tokens"})
        with serving.refusals(fields):
            options = pooler.checked(body.options(llama.model.params.max_seq_len))
        adapter = serving.adapter_of(body.model)
        make = functools.partial(pooler.request, options=options, adapter=adapter)
        num_shared = len(options.prompt or "")
        outputs = await pooled_outputs(http, inputs_of(body.input), make, fields, num_shared)
        is_encoded = body.encoding_format == "base64"

        def data() -> Iterator[dict[str, Any]]:
            for index, output in enumerate(outputs):
                vector = options.vector(output)
                embedding = _in_base64(vector) if is_encoded else vector.tolist()
                yield {"object": "embedding", "index": index, "embedding": embedding}

        num_tokens = sum(output.usage.prompt_tokens for output in outputs)
        content = {
            "object": "list",
            "data": data(),
            "model": body.model or serving.name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        return await json_response(http, content, len(outputs) * pooler.dim)

    return router


def _in_base64(vector: np.ndarray) -> str:
    """Return a vector as the base64 of its float32 elements, the least significant byte first."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
