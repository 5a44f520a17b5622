"""The work of one line of a batch file: requests for the engine, and the record of their outputs.

In: the fields of a line. Out: requests for the engine, and the record made of their outputs. The
models of the server read the bodies. This module must not know files.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from llama.api import Llama, Request, RequestOutput, ServedModel, derived_seed
from llama.cli.batch.lines import error_record, response_record, target
from llama.prompts.fields import read_as
from llama.prompts.pictures import Picture, PictureReader
from llama.sampling_params import SamplingParams
from llama.server.errors import ErrorFields
from llama.server.openai.answers import Completion, ResponseMeta
from llama.server.openai.embeddings import EmbeddingBody
from llama.server.openai.models import (
    CHAT_URL,
    EMBEDDINGS_URL,
    RERANK_URLS,
    SCORE_URLS,
    TEXT_URL,
    ChatBody,
    CompletionBody,
)
from llama.server.request import ApiRequest
from llama.server.responses.answers import ResponseAnswer
from llama.server.responses.models import RESPONSES_URL, ResponsesBody
from llama.server.scoring import RerankBody, ScoreBody

_POOLED: dict[str, TypeAdapter[Any]] = {
    EMBEDDINGS_URL: TypeAdapter(EmbeddingBody),
    **dict.fromkeys(SCORE_URLS, TypeAdapter(ScoreBody)),
    **dict.fromkeys(RERANK_URLS, TypeAdapter(RerankBody)),
}
_GENERATING: dict[str, TypeAdapter[Any]] = {
    CHAT_URL: TypeAdapter(ChatBody),
    TEXT_URL: TypeAdapter(CompletionBody),
    RESPONSES_URL: TypeAdapter(ResponsesBody),
}

MakeBody = Callable[[list[RequestOutput]], dict[str, Any]]


@dataclass(frozen=True)
class LineWork:
    """The work of one line.

    Attributes:
        number: The line number.
        custom_id: The custom_id of the line.
        requests: The requests for the engine.
        body: Makes the body of the response of the last output of each request, in their order.
    """

    number: int
    custom_id: str
    requests: list[Request]
    body: MakeBody

    def record(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the record of the line.

        It is an error record if the engine ended a request with an error.

        Args:
            outputs: The last output of each request, in any order.
        """
        for output in outputs:
            if output.error is not None:
                code = "server_error" if output.error_field is None else "invalid_request"
                return error_record(self.custom_id, self.number, code, output.error)
        body = self.body(sorted(outputs, key=lambda output: output.index))
        return response_record(self.custom_id, _name(self.number), body)


def _name(number: int) -> str:
    return f"line-{number}"


def prepare_line(
    llama: Llama,
    number: int,
    custom_id: str,
    fields: dict[str, Any],
    defaults: SamplingParams,
    model: str,
) -> LineWork:
    """Return what a line asks of the engine.

    Without a seed it has the one of its line number, as if all lines were the prompts of one call:
    neither resuming a job nor another process changes an answer.

    Args:
        llama: The model.
        number: The line number.
        custom_id: The custom_id of the line.
        fields: The fields of the line.
        defaults: Parameters of lines that do not give their own.
        model: The name of the model in the records of lines that name none.

    Raises:
        TypeError, ValueError: A field is wrong or unknown; the message names it.
    """
    url, given = target(fields)
    # A fixed time of creation makes the records of two equal jobs equal.
    meta = ResponseMeta(_name(number), given.get("model") or model, created=0)
    if url in _POOLED:
        return LineWork(number, custom_id, *_pooled(llama, read_as(_POOLED[url], given), meta))
    takes_images = llama.llm_engine.images is not None
    body = read_as(_GENERATING[url], given, takes_images=takes_images)
    requests, content = _generating(llama, body, defaults, meta)
    for request in requests:
        if request.seed is None:
            request.set_seed(derived_seed(llama.seed, number - 1))
    return LineWork(number, custom_id, requests, content)


def _generating(
    llama: Llama,
    body: ChatBody | CompletionBody | ResponsesBody,
    defaults: SamplingParams,
    meta: ResponseMeta,
) -> tuple[list[Request], MakeBody]:
    """Return the request of a completion, a chat or a response, and what makes its body."""
    llama.llm_engine.check_generates()
    asked = body.request(defaults)
    if len(asked.prompts) > 1:
        count = len(asked.prompts)
        raise ValueError(f"prompt has {count} entries: write each entry on a line of its own")
    dialog_format = llama.dialog_format
    prepare = llama.llm_engine.prepare
    with _naming(asked.fields):
        if asked.chat:
            ids = asked.chat_ids(dialog_format)
            params = asked.chat_params(dialog_format)
            request = prepare(meta.id, ids, params, pictures=_pictures(llama, asked))
        else:
            (prompt,) = asked.prompts
            request = prepare(meta.id, prompt, asked.params, parse_special=asked.parse_special)
    if isinstance(body, ResponsesBody):
        return [request], ResponseAnswer(body, asked, dialog_format, meta).content
    return [request], Completion(asked, dialog_format, meta).response


def _pictures(llama: Llama, asked: ApiRequest) -> list[Picture]:
    """Return the images of a chat, whose file is the user's own.

    Raises:
        ValueError: One cannot be read; the message names it.
    """
    sizes = llama.llm_engine.images
    found = []
    for image in asked.images:
        assert sizes is not None, "the model reads text alone"
        reader = PictureReader(sizes.chunk_size, 1 if image.is_small else sizes.max_tiles)
        try:
            found.append(reader.read(image.url))
        except ValueError as error:
            raise ValueError(f"{image.path}: {error}") from None
    return found


def _pooled(
    llama: Llama, body: EmbeddingBody | ScoreBody | RerankBody, meta: ResponseMeta
) -> tuple[list[Request], MakeBody]:
    """Return the requests for vectors or scores, and what makes the body of their response."""
    with _naming(body.error_fields):
        asked = body.request(ServedModel.of(llama), meta)
        requests = [asked.make(item, index=i) for i, item in enumerate(asked.inputs)]
    for request in requests:
        request.request_id = f"{meta.id}-{request.index}"

    def content(outputs: list[RequestOutput]) -> dict[str, Any]:
        found = asked.content(outputs)
        return {k: list(v) if isinstance(v, Iterator) else v for k, v in found.items()}

    return requests, content


@contextmanager
def _naming(fields: ErrorFields) -> Iterator[None]:
    """Give errors the names that a body has for what they are about.

    Raises:
        ValueError: In place of any TypeError or ValueError.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(str(fields.refusal(error))) from None
