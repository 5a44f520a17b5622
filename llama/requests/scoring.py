"""Labels of texts by a classification head, and scores of pairs of texts.

In: texts, token ids or conversations, and the outputs of their requests. Out: logits and
probabilities of labels, or how relevant documents are to queries. Pairs are scored by a head with
one label, which reads query and document together (a cross-encoder), or by the dot product of two
embeddings (a bi-encoder).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from llama.checkpoint.pooling import HeadSettings
from llama.common.checks import FieldError, FieldTypeError, brief
from llama.prompts.dialog_format import DialogFormat, PromptOptions
from llama.requests.pooling import EmbeddingOptions, Pooler
from llama.requests.request import Request, RequestOutput

NO_HEAD = (
    "this model has no classification head (score.weight): use a model for sequence classification"
)
_WHOLE = PromptOptions(add_generation_prompt=False)  # a conversation with its answer
# Names of prompts that sentence-transformers uses for the documents of a search, in this order.
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")


@dataclass(frozen=True)
class Classification:
    """The result of a classification head for one input.

    Attributes:
        label: The name of the label with the largest logit; LABEL_ and its index where the model's
            files name none.
        probs: The probability of each label: the softmax of the logits, or the sigmoid of each
            where there is one label or an input may have several.
        logits: The logit of each label. That of a reward model is the reward.
    """

    label: str
    probs: list[float] = field(default_factory=list)
    logits: list[float] = field(default_factory=list)


class ClassificationHead:
    """The head of a model: the matrix whose product with a pooled state are logits."""

    def __init__(self, weight: np.ndarray, settings: HeadSettings) -> None:
        """Keep a head, (labels, E) float32, and its labels."""
        self.settings = settings
        self.num_labels = len(weight)
        self.weight = weight
        self._weight = weight.astype(np.float64)

    def logits(self, output: RequestOutput) -> np.ndarray:
        """Return the logits of a finished output, (labels) float32."""
        pooled = output.pooled
        assert pooled is not None
        logits: np.ndarray = (self._weight @ pooled.astype(np.float64)).astype(np.float32)
        return logits

    def classify(self, output: RequestOutput) -> Classification:
        """Return the labels of a finished output."""
        logits = self.logits(output)
        names = self.settings.labels
        best = int(logits.argmax())
        return Classification(
            label=names[best] if names else f"LABEL_{best}",
            probs=self._probabilities(logits).tolist(),
            logits=logits.tolist(),
        )

    def _probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Return the probabilities, (labels) float32, which are computed in float64."""
        if self.num_labels == 1 or self.settings.is_multi_label:
            return _sigmoid(logits)
        powers = np.exp(logits.astype(np.float64) - logits.max())
        probabilities: np.ndarray = (powers / powers.sum()).astype(np.float32)
        return probabilities

    def score(self, output: RequestOutput) -> float:
        """Return the score of a pair, by the one label."""
        (logit,) = self.logits(output)
        if not self.settings.has_activation:
            return float(logit)
        return float(_sigmoid(logit))


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    """Return the sigmoid of each logit in float32, which is computed in float64."""
    wide: np.ndarray = np.exp(-np.logaddexp(0.0, -np.asarray(logits, np.float64)))
    probabilities: np.ndarray = wide.astype(np.float32)
    return probabilities


class PairScorer(ABC):
    """The inputs that are run to score pairs of texts, and the scores.

    Attributes:
        inputs: The inputs of `request`, in the order of their outputs.
    """

    inputs: Sequence[Any]

    @abstractmethod
    def request(self, item: Any, **options: Any) -> Request:
        """Return the request for one of the inputs; the options are those of `Pooler.request`."""

    @abstractmethod
    def scores(self, outputs: Sequence[RequestOutput]) -> list[float]:
        """Return the score of each pair."""


@dataclass(frozen=True)
class _CrossEncoder(PairScorer):
    """Pairs that a head reads together; the inputs are the ids of each pair."""

    classifier: "Classifier"
    inputs: Sequence[tuple[str, str]]
    options: EmbeddingOptions
    encode: Callable[[str, str], list[int]]

    def request(self, item: tuple[str, str], **options: Any) -> Request:
        return self.classifier.pooler.request(self.encode(*item), self.options, **options)

    def scores(self, outputs: Sequence[RequestOutput]) -> list[float]:
        head = self.classifier.head()
        return [head.score(output) for output in outputs]


@dataclass(frozen=True)
class _BiEncoder(PairScorer):
    """Pairs of embeddings; the inputs are each text once, with the options of its role.

    Attributes:
        pooler: Makes the requests.
        inputs: The texts.
        pairs: The indices of the two texts of each pair.
    """

    pooler: Pooler
    inputs: Sequence[tuple[str, EmbeddingOptions]]
    pairs: Sequence[tuple[int, int]]

    def request(self, item: tuple[str, EmbeddingOptions], **options: Any) -> Request:
        text, embedding_options = item
        return self.pooler.request(text, embedding_options, **options)

    def scores(self, outputs: Sequence[RequestOutput]) -> list[float]:
        vectors = [
            options.vector(output).astype(np.float64)
            for (_, options), output in zip(self.inputs, outputs, strict=True)
        ]
        return [float(vectors[i] @ vectors[j]) for i, j in self.pairs]


@dataclass(frozen=True)
class Classifier:
    """Labels and scores by one model.

    Attributes:
        pooler: The requests for hidden states.
        dialog_format: The format of conversations.
        known_head: The classification head; None: the model has none.
    """

    pooler: Pooler
    dialog_format: DialogFormat
    known_head: ClassificationHead | None

    def head(self) -> ClassificationHead:
        """Return the classification head.

        Raises:
            ValueError: The model has none.
        """
        if self.known_head is None:
            raise ValueError(NO_HEAD)
        return self.known_head

    def why_unscored(self) -> str:
        """Return why pairs cannot be scored; empty if they can."""
        head = self.known_head
        if head is not None and head.num_labels != 1:
            return f"the head of this model has {head.num_labels} labels: pairs need one"
        if head is None and self.pooler.settings.kind is None:
            return (
                "this model has neither a classification head nor a pooling for embeddings, which "
                "score pairs of texts: use a reranker or a model for embeddings"
            )
        return ""

    def request(self, item: Any, truncate: int | None = None, **options: Any) -> Request:
        """Return the request for the labels of a text, token ids, or a conversation.

        Args:
            item: The input; a conversation is a list of messages.
            truncate: The number of leading tokens that an input is cut to.
            **options: Further arguments of `Pooler.request`.
        """
        self.head()
        if isinstance(item, list | tuple) and item and isinstance(item[0], Mapping):
            item = self.dialog_format.encode(item, None, _WHOLE)
        return self.pooler.request(item, self._options(truncate), **options)

    def _options(self, truncate: int | None) -> EmbeddingOptions:
        # A classification head sees all tokens: the prompts of embeddings are not for it.
        return self.pooler.checked(EmbeddingOptions(normalize=False, prompt="", truncate=truncate))

    def pair_scorer(
        self, queries: Sequence[str], documents: Sequence[str], truncate: int | None = None
    ) -> PairScorer:
        """Return what scores pairs of texts.

        Args:
            queries: One query for all documents, or one for each.
            documents: The documents.
            truncate: The number of leading tokens that an input is cut to.

        Raises:
            FieldTypeError: Something is no text.
            FieldError: The numbers of texts do not match, or the model cannot score pairs.
        """
        reason = self.why_unscored()
        if reason:
            raise FieldError("queries", reason)
        for name, texts in (("queries", queries), ("documents", documents)):
            for i, text in enumerate(texts):
                if not isinstance(text, str):
                    raise FieldTypeError(name, f"{name}[{i}]={brief(text)} must be a text")
        if len(queries) not in (1, len(documents)) or not documents:
            raise FieldError(
                "documents",
                f"documents has {len(documents)} texts and queries {len(queries)}: give one query, "
                "or one for each document",
            )
        if self.known_head is not None:
            all_queries = list(queries) * (len(documents) // len(queries))
            pairs = list(zip(all_queries, documents, strict=True))
            options = self._options(truncate)
            encode = self.pooler.pair_encoder(options.truncate)
            return _CrossEncoder(self, pairs, options, encode)
        return self._bi_encoder(queries, documents, truncate)

    def _bi_encoder(
        self, queries: Sequence[str], documents: Sequence[str], truncate: int | None
    ) -> _BiEncoder:
        prompts = self.pooler.settings.prompts
        query_name = "query" if "query" in prompts else None
        document_name = next((name for name in _DOCUMENT_PROMPTS if name in prompts), None)
        options = EmbeddingOptions(truncate=truncate)
        query_options = self.pooler.checked(replace(options, prompt_name=query_name))
        document_options = self.pooler.checked(replace(options, prompt_name=document_name))
        inputs = [(text, query_options) for text in queries]
        inputs += [(text, document_options) for text in documents]
        first = len(queries)
        pairs = [(i if first > 1 else 0, first + i) for i in range(len(documents))]
        return _BiEncoder(self.pooler, inputs, pairs)


def ranked(scores: Sequence[float], top_n: int | None = None) -> list[int]:
    """Return the indices of the largest scores, the largest first; equal ones keep their order."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return order[:top_n]
