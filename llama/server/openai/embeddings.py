"""The body of /v1/embeddings, which is OpenAI's with some of vLLM's further fields.

In: texts or token ids. Out: a `PooledRequest`, whose response has a vector for each input, as a
list of numbers or in base64. On a model that was not made for embeddings, the server or the body
must say how a text becomes a vector. This file knows no network.
"""

import base64
import functools
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from llama.api import EmbeddingOptions, RequestOutput, ServedModel
from llama.prompts.fields import UNUSED
from llama.sampling_params import Retention
from llama.server.accepted import LabelFields
from llama.server.errors import ErrorFields
from llama.server.openai.answers import ResponseMeta
from llama.server.openai.models import PromptField
from llama.server.request import PooledRequest

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
    prompt_cache_retention: Annotated[Retention | None, UNUSED] = None

    @property
    def error_fields(self) -> ErrorFields:
        """The names of the body, for errors."""
        return ErrorFields("input", {"truncate": "truncate_prompt_tokens"})

    def request(
        self, llama: ServedModel, meta: ResponseMeta, adapter: str | None = None
    ) -> PooledRequest:
        """Return what the body asks for.

        Args:
            llama: the model.
            meta: the fields of the response.
            adapter: the name of a loaded adapter; None: the base model.

        Raises:
            FieldError: a field cannot be used with this model.
        """
        pooler = llama.pooler
        options = pooler.checked(self._options(llama.card.max_seq_len))
        return PooledRequest(
            inputs=inputs_of(self.input),
            make=functools.partial(pooler.request, options=options, adapter=adapter),
            content=functools.partial(self._content, meta.model, options),
            values_per_input=pooler.dim,
            num_shared=len(options.prompt or ""),
        )

    def _options(self, max_seq_len: int) -> EmbeddingOptions:
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

    def _content(
        self, model: str, options: EmbeddingOptions, outputs: list[RequestOutput]
    ) -> dict[str, Any]:
        """Return the response's object, with an iterator of its vectors."""
        is_encoded = self.encoding_format == "base64"

        def data() -> Iterator[dict[str, Any]]:
            for index, output in enumerate(outputs):
                vector = options.vector(output)
                embedding = _in_base64(vector) if is_encoded else vector.tolist()
                yield {"object": "embedding", "index": index, "embedding": embedding}

        num_tokens = sum(output.usage.prompt_tokens for output in outputs)
        return {
            "object": "list",
            "data": data(),
            "model": model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }


def inputs_of(value: Any) -> list[Any]:
    """Return the inputs of a body as a list of texts or of lists of token ids."""
    is_list = isinstance(value, list) and not isinstance(value[0], int)
    return value if is_list else [value]


def _in_base64(vector: np.ndarray) -> str:
    """Return a vector as the base64 of its float32 elements, the least significant byte first."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
