"""The routes /classify, /score and /rerank, with the bodies and answers of vLLM, Jina and Cohere.

In: texts, pairs of texts, or a query with documents. Out: labels and scores. A model that cannot do
what a route is for answers with status 404 and the reason.
"""

import asyncio
import functools
import time
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Field, Tag
from starlette.responses import Response

from llama.api import ClassificationHead, RequestOutput, ranked
from llama.common.checks import brief
from llama.prompts.fields import Fields, chosen_by
from llama.prompts.messages import Dialog
from llama.server.accepted import LabelFields
from llama.server.errors import ApiError, ErrorFields
from llama.server.exchange import Exchange, body_router
from llama.server.openai.embeddings import Truncation, inputs_of
from llama.server.openai.models import MAX_PROMPTS, PromptField
from llama.server.pooled import json_response, pooled_outputs

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


class _ScoringBody(LabelFields):
    """The fields that all of these bodies share."""

    truncate_prompt_tokens: Truncation | None = None

    def truncate(self, max_seq_len: int) -> int | None:
        """Return the number of leading tokens that an input is cut to; None: all are needed."""
        limit = self.truncate_prompt_tokens
        return max_seq_len if limit == -1 else limit


class ClassifyBody(_ScoringBody):
    """The body of /classify: texts, token ids or a conversation."""

    unknown_message: ClassVar[str] = "{names} cannot be used in /classify: leave it out"

    input: PromptField | None = None
    messages: Dialog | None = None
    use_activation: bool | None = None

    def inputs(self) -> list[Any]:
        """Return the inputs: one of the two fields must be given."""
        if (self.input is None) == (self.messages is None):
            raise ApiError(400, "give either input or messages", param="input")
        return inputs_of(self.input) if self.messages is None else [self.messages]


class ScoreBody(_ScoringBody):
    """The body of /score: pairs of texts."""

    unknown_message: ClassVar[str] = "{names} cannot be used in /score: leave it out"

    text_1: _Texts | None = None
    text_2: _Texts | None = None
    queries: _Texts | None = None
    documents: _Texts | None = None
    items: _Texts | None = None
    data_1: _Texts | None = None
    data_2: _Texts | None = None

    def pair(self) -> tuple[str, str]:
        """Return the names of the two fields that are given."""
        given = {name for name in _SCORED if getattr(self, name) is not None}
        found = [pair for pair in _PAIRS if given == set(pair)]
        if not found:
            raise ApiError(400, "give text_1 and text_2, or queries and documents", param="text_1")
        return found[0]


class RerankBody(_ScoringBody):
    """The body of /rerank: a query and documents."""

    unknown_message: ClassVar[str] = "{names} cannot be used in /rerank: leave it out"

    query: str
    documents: Annotated[list[_Document], _TEXTS]
    top_n: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Literal[4096] | None = None  # the value that Cohere's client sends


def routes() -> APIRouter:
    """Return the routes of labels and scores."""
    router = body_router()

    @router.post("/classify")
    async def classify(body: ClassifyBody, http: Exchange) -> Response:
        """Return the label of each input, with the probability of every label."""
        llama = http.serving.loaded()
        fields = ErrorFields("input" if body.messages is None else "messages", _NAMES)
        inputs = body.inputs()
        try:
            head = llama.classifier.head()
        except ValueError as error:
            raise ApiError(404, str(error)) from None
        truncate = body.truncate(llama.model.params.max_seq_len)
        make = functools.partial(llama.classifier.request, truncate=truncate)
        outputs = await pooled_outputs(http, inputs, make, fields)
        content = {
            **_head_of(http, "classify", body.model),
            "data": (_label_of(i, head, output, body) for i, output in enumerate(outputs)),
            "usage": _usage(outputs),
        }
        num_values = len(outputs) * (head.num_labels + _PER_LABEL)
        return await json_response(http, content, num_values)

    @router.post("/score")
    @router.post("/v1/score")
    async def score(body: ScoreBody, http: Exchange) -> Response:
        """Return the score of each pair of texts."""
        left, right = body.pair()
        first = _as_list(getattr(body, left))
        second = _as_list(getattr(body, right))
        fields = ErrorFields(right, _NAMES | {"queries": left, "documents": right})
        scores, outputs = await _scores_of(http, first, second, body, fields)
        data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores)]
        content = {
            **_head_of(http, "score", body.model),
            "data": data,
            "usage": _usage(outputs),
        }
        return await json_response(http, content, len(scores))

    @router.post("/rerank")
    @router.post("/v1/rerank")
    @router.post("/v2/rerank")
    async def rerank(body: RerankBody, http: Exchange) -> Response:
        """Return the documents in the order of their relevance, the most relevant first."""
        documents = [each if isinstance(each, str) else each.text for each in body.documents]
        fields = ErrorFields("documents", _NAMES | {"queries": "query"})
        scores, outputs = await _scores_of(http, [body.query], documents, body, fields)
        results = []
        for index in ranked(scores, body.top_n or None):
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if body.return_documents is not False:
                result["document"] = {"text": documents[index]}
            results.append(result)
        head = _head_of(http, "rerank", body.model)
        content = {"id": head["id"], "model": head["model"], "results": results}
        return await json_response(http, {**content, "usage": _usage(outputs)}, len(results))

    return router


def _label_of(
    index: int, head: ClassificationHead, output: RequestOutput, body: ClassifyBody
) -> dict[str, Any]:
    """Return the label of one input as /classify reports it."""
    found = head.classify(output)
    probs = found.logits if body.use_activation is False else found.probs
    return {"index": index, "label": found.label, "probs": probs, "num_classes": head.num_labels}


async def _scores_of(
    http: Exchange,
    queries: list[str],
    documents: list[str],
    body: ScoreBody | RerankBody,
    fields: ErrorFields,
) -> tuple[list[float], list[RequestOutput]]:
    """Return the score of each pair of a query and a document, and the outputs that gave them."""
    llama = http.serving.loaded()
    reason = llama.classifier.why_unscored()
    if reason:
        raise ApiError(404, reason)
    with http.serving.refusals(fields):
        truncate = body.truncate(llama.model.params.max_seq_len)
        scorer = llama.classifier.pair_scorer(queries, documents, truncate)
    outputs = await pooled_outputs(http, scorer.inputs, scorer.request, fields)
    return await asyncio.to_thread(scorer.scores, outputs), outputs


def _head_of(http: Exchange, kind: str, model: str | None) -> dict[str, Any]:
    """Return the fields that begin an answer; an adapter cannot be asked for."""
    if http.serving.adapter_of(model) is not None:
        message = f"model={brief(model)} is an adapter, and scores are those of the base model"
        raise ApiError(400, message, param="model")
    return {
        "id": f"{kind}-{http.state.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model or http.serving.name,
    }


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _usage(outputs: list[RequestOutput]) -> dict[str, int]:
    num_tokens = sum(output.usage.prompt_tokens for output in outputs)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
