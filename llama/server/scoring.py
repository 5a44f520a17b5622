"""The bodies of /classify, /score and /rerank, as vLLM, Jina and Cohere have them.

In: texts, pairs of texts, or a query with documents. Out: a `PooledRequest`, whose response has
labels or scores. This file knows no network.
"""

import functools
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from llama.api import ClassificationHead, RequestOutput, ServedModel, ranked
from llama.common.checks import FieldError
from llama.prompts.fields import UNUSED, Fields, chosen_by
from llama.prompts.messages import Dialog
from llama.sampling_params import Retention
from llama.server.accepted import LabelFields
from llama.server.errors import ErrorFields
from llama.server.openai.answers import ResponseMeta
from llama.server.openai.embeddings import Truncation, inputs_of
from llama.server.openai.models import MAX_PROMPTS, PromptField
from llama.server.request import PooledRequest

_NAMES = {"truncate": "truncate_prompt_tokens"}
_PER_LABEL = 10  # values of a vector that take as long as the label of an input
# vLLM's names of the two fields of /score.
_PAIRS = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)
_SCORED = sorted({name for pair in _PAIRS for name in pair})
_TEXTS = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)


def _texts_tag(value: Any) -> str:
    return "list" if isinstance(value, list) else "one"


_Texts = Annotated[
    Annotated[str, Tag("one")] | Annotated[list[str], _TEXTS, Tag("list")],
    chosen_by(_texts_tag, " must be a string or a list of strings"),
]


class DocumentText(Fields):
    """A document as an object, as Jina and Cohere have it."""

    text: str


def _document_tag(value: Any) -> str:
    return "object" if isinstance(value, dict) else "text"


_Document = Annotated[
    Annotated[str, Tag("text")] | Annotated[DocumentText, Tag("object")],
    chosen_by(_document_tag, " must be a string or an object with a text"),
]


class ScoringBody(LabelFields):
    """The fields that all of these bodies share."""

    truncate_prompt_tokens: Truncation | None = None
    prompt_cache_retention: Annotated[Retention | None, UNUSED] = None

    def truncate(self, llama: ServedModel) -> int | None:
        """Return the number of leading tokens that an input is cut to; None: all are needed."""
        limit = self.truncate_prompt_tokens
        return llama.card.max_seq_len if limit == -1 else limit

    def why_unable(self, llama: ServedModel) -> str:
        """Return why the model cannot do what the body is for; empty if it can."""
        return llama.classifier.why_unscored()


class ClassifyBody(ScoringBody):
    """The body of /classify: texts, token ids or a conversation."""

    unknown_message: ClassVar[str] = "{names} cannot be used in /classify: leave it out"

    input: PromptField | None = None
    messages: Dialog | None = None
    use_activation: bool | None = None

    @property
    def error_fields(self) -> ErrorFields:
        """The names of the body, for errors."""
        return ErrorFields("input" if self.messages is None else "messages", _NAMES)

    def why_unable(self, llama: ServedModel) -> str:
        """Return why the model has no labels; empty if it has."""
        try:
            llama.classifier.head()
        except ValueError as error:
            return str(error)
        return ""

    def request(self, llama: ServedModel, meta: ResponseMeta) -> PooledRequest:
        """Return what the body asks for.

        Raises:
            FieldError: not one of input and messages is given.
        """
        if (self.input is None) == (self.messages is None):
            raise FieldError("input", "give either input or messages")
        head = llama.classifier.head()
        return PooledRequest(
            inputs=inputs_of(self.input) if self.messages is None else [self.messages],
            make=functools.partial(llama.classifier.request, truncate=self.truncate(llama)),
            content=functools.partial(self._content, head, meta),
            values_per_input=head.num_labels + _PER_LABEL,
        )

    def _content(
        self, head: ClassificationHead, meta: ResponseMeta, outputs: list[RequestOutput]
    ) -> dict[str, Any]:
        """Return the response's object, with an iterator of its labels."""

        def labels() -> Iterator[dict[str, Any]]:
            for index, output in enumerate(outputs):
                found = head.classify(output)
                probs = found.logits if self.use_activation is False else found.probs
                yield {
                    "index": index,
                    "label": found.label,
                    "probs": probs,
                    "num_classes": head.num_labels,
                }

        return {**_head_of("classify", meta), "data": labels(), "usage": _usage(outputs)}


class ScoreBody(ScoringBody):
    """The body of /score: pairs of texts."""

    unknown_message: ClassVar[str] = "{names} cannot be used in /score: leave it out"

    text_1: _Texts | None = None
    text_2: _Texts | None = None
    queries: _Texts | None = None
    documents: _Texts | None = None
    items: _Texts | None = None
    data_1: _Texts | None = None
    data_2: _Texts | None = None

    def _pair(self) -> tuple[str, str]:
        """Return the names of the two fields that are given.

        Raises:
            FieldError: no such two fields are given.
        """
        given = {name for name in _SCORED if getattr(self, name) is not None}
        found = [pair for pair in _PAIRS if given == set(pair)]
        if not found:
            raise FieldError("text_1", "give text_1 and text_2, or queries and documents")
        return found[0]

    @property
    def error_fields(self) -> ErrorFields:
        """The names of the body, for errors."""
        left, right = self._pair()
        return ErrorFields(right, _NAMES | {"queries": left, "documents": right})

    def request(self, llama: ServedModel, meta: ResponseMeta) -> PooledRequest:
        """Return what the body asks for.

        Raises:
            FieldError: the texts cannot be scored, or not by this model.
        """
        first, second = (_as_list(getattr(self, name)) for name in self._pair())
        scorer = llama.classifier.pair_scorer(first, second, self.truncate(llama))

        def content(outputs: list[RequestOutput]) -> dict[str, Any]:
            data = [
                {"index": i, "object": "score", "score": value}
                for i, value in enumerate(scorer.scores(outputs))
            ]
            return {**_head_of("score", meta), "data": data, "usage": _usage(outputs)}

        return PooledRequest(scorer.inputs, scorer.request, content)


class RerankBody(ScoringBody):
    """The body of /rerank: a query and documents."""

    unknown_message: ClassVar[str] = "{names} cannot be used in /rerank: leave it out"

    query: str
    documents: Annotated[list[_Document], _TEXTS]
    top_n: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Literal[4096] | None = None  # the value that Cohere's client sends

    @property
    def error_fields(self) -> ErrorFields:
        """The names of the body, for errors."""
        return ErrorFields("documents", _NAMES | {"queries": "query"})

    def request(self, llama: ServedModel, meta: ResponseMeta) -> PooledRequest:
        """Return what the body asks for: the most relevant documents come first.

        Raises:
            FieldError: the texts cannot be scored by this model.
        """
        documents = [each if isinstance(each, str) else each.text for each in self.documents]
        scorer = llama.classifier.pair_scorer([self.query], documents, self.truncate(llama))

        def content(outputs: list[RequestOutput]) -> dict[str, Any]:
            scores = scorer.scores(outputs)
            results = []
            for index in ranked(scores, self.top_n or None):
                result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
                if self.return_documents is not False:
                    result["document"] = {"text": documents[index]}
                results.append(result)
            head = {"id": f"rerank-{meta.id}", "model": meta.model}
            return {**head, "results": results, "usage": _usage(outputs)}

        return PooledRequest(scorer.inputs, scorer.request, content)


def _head_of(kind: str, meta: ResponseMeta) -> dict[str, Any]:
    """Return the fields that begin a response."""
    return {
        "id": f"{kind}-{meta.id}",
        "object": "list",
        "created": meta.created,
        "model": meta.model,
    }


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _usage(outputs: list[RequestOutput]) -> dict[str, int]:
    num_tokens = sum(output.usage.prompt_tokens for output in outputs)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
