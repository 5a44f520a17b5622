"""vLLM's pooling calls of `LLM`: embed, classify, score, reward and encode, with its outputs.

These functions translate vLLM's arguments and outputs; `llama.requests` computes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from llama.api import EmbeddingOptions, Llama, Request, RequestOutput
from llama.common.checks import brief
from llama.compat.vllm.vllm_params import refuse

_Output = TypeVar("_Output")
_TASKS = ("embed", "classify")
_PROMPT_FIELDS = {"prompt", "prompt_token_ids", "type"}


@dataclass
class PoolingParams:
    """Parameters of a pooling request.

    Attributes:
        dimensions: The number of leading elements of an embedding.
        use_activation: Whether an embedding is normalised, or logits become probabilities.
        normalize: The older name of the same for embeddings.
        truncate_prompt_tokens: The number of leading tokens that are kept; -1 for the context.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None


@dataclass
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The number of elements."""
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """The probability of each label."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """The number of labels."""
        return len(self.probs)


@dataclass
class ScoringOutput:
    """The score of a pair of texts."""

    score: float


@dataclass
class PoolingOutput:
    """The vector that the pooling of a prompt gave."""

    data: torch.Tensor


@dataclass
class PoolingRequestOutput(Generic[_Output]):
    """The output of a pooling request.

    Attributes:
        request_id: The name of the request.
        outputs: Its result.
        prompt_token_ids: The ids of the prompt.
        num_cached_tokens: The tokens of the prompt that the prefix cache had.
        finished: Always true.
    """

    request_id: str
    outputs: _Output
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The output of `LLM.embed`."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The output of `LLM.classify`."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The output of `LLM.score`."""


class PoolingMethods:
    """The pooling calls of `LLM`.

    Attributes:
        llama: The model.
        names: Names for the requests of whole batches.
    """

    llama: Llama
    names: Iterator[str]

    def embed(
        self, prompts: Any, *, pooling_params: PoolingParams | None = None, **others: Any
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt.

        Args:
            prompts: A text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list.
            pooling_params: The parameters of all prompts.
            others: Arguments of vLLM: `truncate_prompt_tokens`, and those without effect.

        Raises:
            TypeError, ValueError: An argument cannot be used; the message names it.
        """
        options, outputs = self._embedded(prompts, pooling_params, others, "LLM.embed")
        return [
            self._output(
                EmbeddingRequestOutput, EmbeddingOutput(options.vector(output).tolist()), output
            )
            for output in outputs
        ]

    def classify(
        self, prompts: Any, *, pooling_params: PoolingParams | None = None, **others: Any
    ) -> list[ClassificationRequestOutput]:
        """Return the probability of each label for each prompt; see `embed`."""
        params = _params(pooling_params, others, "LLM.classify")
        head = self.llama.classifier.head()
        found = []
        for output in self._classified(prompts, params):
            result = head.classify(output)
            probs = result.logits if params.use_activation is False else result.probs
            outputs = ClassificationOutput(probs)
            found.append(self._output(ClassificationRequestOutput, outputs, output))
        return found

    def reward(
        self, prompts: Any, *, pooling_params: PoolingParams | None = None, **others: Any
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the logits of the classification head for each prompt; see `embed`."""
        params = _params(pooling_params, others, "LLM.reward")
        head = self.llama.classifier.head()
        return [
            self._output(
                PoolingRequestOutput, PoolingOutput(torch.from_numpy(head.logits(output))), output
            )
            for output in self._classified(prompts, params)
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        **others: Any,
    ) -> list[ScoringRequestOutput]:
        """Return the score of each pair of texts; `data_1` may be one text for all of `data_2`."""
        params = _params(pooling_params, others, "LLM.score")
        queries = [data_1] if isinstance(data_1, str) else list(data_1)
        documents = [data_2] if isinstance(data_2, str) else list(data_2)
        truncate = self._limit(params)
        scores, outputs = self.llama.score_outputs(queries, documents, truncate)
        return [
            self._output(ScoringRequestOutput, ScoringOutput(score), output)
            for score, output in zip(scores, outputs[-len(scores) :], strict=True)
        ]

    def encode(
        self,
        prompts: Any,
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: str | None = None,
        **others: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the vector of each prompt, or the probabilities of its labels.

        Args:
            prompts: As for `embed`.
            pooling_params: The parameters of all prompts.
            pooling_task: "embed" or "classify"; by default what the model is for.
            others: As for `embed`.
        """
        has_head = self.llama.classifier.known_head is not None
        task = pooling_task or ("classify" if has_head else "embed")
        if task not in _TASKS:
            names = " or ".join(map(repr, _TASKS))
            raise ValueError(
                f"pooling_task={brief(task)} must be {names}: Llama.hidden_states returns the "
                "states of single tokens"
            )
        found: list[tuple[list[float], RequestOutput]] = []
        if task == "embed":
            options, outputs = self._embedded(prompts, pooling_params, others, "LLM.encode")
            found = [(options.vector(output).tolist(), output) for output in outputs]
        else:
            params = _params(pooling_params, others, "LLM.encode")
            head = self.llama.classifier.head()
            for output in self._classified(prompts, params):
                result = head.classify(output)
                is_raw = params.use_activation is False
                found.append((result.logits if is_raw else result.probs, output))
        return [
            self._output(PoolingRequestOutput, PoolingOutput(torch.tensor(data)), output)
            for data, output in found
        ]

    def _embedded(
        self,
        prompts: Any,
        pooling_params: PoolingParams | None,
        others: Mapping[str, Any],
        caller: str,
    ) -> tuple[EmbeddingOptions, list[RequestOutput]]:
        params = _params(pooling_params, others, caller)
        normalize = params.normalize if params.use_activation is None else params.use_activation
        options = EmbeddingOptions(
            normalize=normalize is not False,
            dimensions=params.dimensions,
            truncate=self._limit(params),
        )

        def requests() -> Iterator[Request]:
            pooler = self.llama.pooler
            yield from pooler.requests(_inputs(prompts), pooler.checked(options))

        return options, self.llama.run_prompts(requests())

    def _classified(self, prompts: Any, params: PoolingParams) -> list[RequestOutput]:
        def requests() -> Iterator[Request]:
            for i, item in enumerate(_inputs(prompts)):
                yield self.llama.classifier.request(item, self._limit(params), index=i)

        return self.llama.run_prompts(requests())

    def _limit(self, params: PoolingParams) -> int | None:
        """Return the number of tokens that prompts are cut to."""
        limit = params.truncate_prompt_tokens
        return self.llama.model.params.max_seq_len if limit == -1 else limit

    def _output(self, made: type[Any], outputs: Any, output: RequestOutput) -> Any:
        usage = output.usage
        return made(next(self.names), outputs, output.prompt_token_ids, usage.cached_tokens)


def _params(params: PoolingParams | None, others: Mapping[str, Any], caller: str) -> PoolingParams:
    """Return the parameters of a call, with those that it gives by name."""
    given = dict(others)
    given.pop("use_tqdm", None)
    truncate = given.pop("truncate_prompt_tokens", None)
    refuse(caller, given)
    if params is not None and not isinstance(params, PoolingParams):
        kind = type(params).__name__
        raise TypeError(f"pooling_params must be llama.compat.vllm's PoolingParams, got {kind}")
    params = params or PoolingParams()
    if truncate is not None:
        params = PoolingParams(params.dimensions, params.use_activation, params.normalize, truncate)
    return params


def _inputs(prompts: Any) -> Iterator[Any]:
    """Yield the texts or token ids of prompts in vLLM's formats."""
    is_one = isinstance(prompts, str | Mapping) or (
        isinstance(prompts, list | tuple) and bool(prompts) and isinstance(prompts[0], int)
    )
    for prompt in [prompts] if is_one else prompts:
        if not isinstance(prompt, Mapping):
            yield prompt
            continue
        unknown = {name: prompt[name] for name in prompt.keys() - _PROMPT_FIELDS}
        refuse("a prompt", unknown)
        ids = prompt.get("prompt_token_ids")
        yield prompt.get("prompt") if ids is None else ids
