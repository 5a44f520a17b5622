"""Response bodies of OpenAI's completion APIs: the engine's outputs in, JSON objects out.

A server or a batch file sends them. This file knows no network and runs no model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama.api import CompletionOutput, RequestOutput
from llama.prompts.answer import AnswerDeltas
from llama.prompts.dialog_format import DialogFormat
from llama.prompts.reasoning import REASONING_FIELDS
from llama.server.encoding import (
    DONE,
    HOLE,
    SERVER_SENT_EVENTS,
    ContinuedList,
    EventTemplate,
    SharedItems,
)
from llama.server.errors import ApiError
from llama.server.openai.scores import Scores, TextScores, chat_scores
from llama.server.request import ApiRequest
from llama.tokenizer import Tokenizer


@dataclass(frozen=True)
class ResponseMeta:
    """The fields that every body of one response contains.

    Attributes:
        id: id of the response, without the prefix of its API.
        model: name of the model.
        created: seconds since 1970.
        reasoning_field: name of the field of a chat's message that has the reasoning.
    """

    id: str
    model: str
    created: int
    reasoning_field: str = REASONING_FIELDS[0]


def _usage(request: ApiRequest, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return the usage object of a request, from the outputs of its prompts.

    It counts the reasoning of a model that reasons.
    """
    counts = [output.usage.counts for output in outputs]
    usage: dict[str, Any] = {name: sum(each[name] for each in counts) for name in counts[0]}
    num_cached = sum(output.usage.cached_tokens for output in outputs)
    usage["prompt_tokens_details"] = {"cached_tokens": num_cached}
    details = {}
    if any(output.has_reasoning for output in outputs):
        details["reasoning_tokens"] = sum(output.usage.reasoning_tokens for output in outputs)
    if request.params.prediction:
        details |= _prediction_details(outputs)
    if details:
        usage["completion_tokens_details"] = details
    return usage


def _prediction_details(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    """Return how many tokens of the request's prediction were accepted and rejected."""
    counts = [output.num_predicted() for output in outputs]
    return {
        "accepted_prediction_tokens": sum(accepted for accepted, _ in counts),
        "rejected_prediction_tokens": sum(rejected for _, rejected in counts),
    }


class Completion:
    """The response to a request, whole or as the chunks of a stream.

    The first chunk of a choice of a chat has the role, and its last chunk the finish_reason.

    Attributes:
        end: bytes that follow the last event of a stream.
        idle_event: event that is sent while nothing else comes; None for a comment.
        stream_format: how the events of a stream are written.
    """

    end = DONE
    idle_event = None
    stream_format = SERVER_SENT_EVENTS

    def __init__(
        self, request: ApiRequest, dialog_format: DialogFormat, meta: ResponseMeta
    ) -> None:
        self._request = request
        self._dialog_format = dialog_format
        self._id = meta.id
        self._reasoning_field = meta.reasoning_field
        self._kind = "chat.completion" if request.chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{meta.id}",
            "object": f"{self._kind}.chunk" if request.chat else self._kind,
            "created": meta.created,
            "model": meta.model,
        }
        self._echoes: dict[int, _Echo] = {}  # keyed by the index of the prompt
        self._choices: dict[int, _Choice] = {}
        self._latest: dict[int, RequestOutput] = {}  # keyed by the index of the prompt

    def response(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the response to a finished request, from the last output of each prompt."""
        content = self.content(outputs)
        return {**content, "choices": list(content["choices"])}

    def content(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the response with an iterator of its choices, which are made one by one."""
        return {
            **self._head,
            "object": self._kind,
            "choices": (
                self._complete_choice(output, answer)
                for output in outputs
                for answer in output.outputs
            ),
            "usage": _usage(self._request, outputs),
        }

    def events(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Yield the chunks of an output; there are none where no choice has anything new."""
        self._latest[output.index] = output
        for answer in output.outputs:
            choice = self._choice(output, answer)
            if not choice.has_begun:
                choice.has_begun = True
                yield from self._first_chunk(choice)
            if not choice.is_finished:
                yield from self._next_chunks(choice, answer)

    def next_event(self, output: RequestOutput) -> bytes | None:
        """Return the bytes of `events` for an output that only adds text; None for any other."""
        request = self._request
        if request.tools is not None or request.params.logprobs is not None:
            return None
        if request.has_running_usage:
            return None
        parts = []
        for answer in output.outputs:
            choice = self._choices.get(output.index * request.params.n + answer.index)
            if choice is None or (answer.finish_reason is not None and not choice.is_finished):
                return None
            text = answer.new_text
            reasoning = answer.new_reasoning if output.has_reasoning else ""
            if reasoning and (text or not request.shows_reasoning):
                return None
            if reasoning:
                parts.append(self._template(choice, self._reasoning_field).fill(reasoning))
            elif text:
                parts.append(self._template(choice, "content").fill(text))
        self._latest[output.index] = output
        return b"".join(parts)

    def _template(self, choice: "_Choice", field: str) -> EventTemplate:
        """Return the bytes around the text, or the reasoning, of a choice's chunks."""
        template = choice.templates.get(field)
        if template is None:
            content = {"delta": {field: HOLE}} if self._request.chat else {"text": HOLE}
            template = self.stream_format.template(self._chunk(choice, content))
            choice.templates[field] = template
        return template

    def last_events(self) -> Iterator[dict[str, Any]]:
        """Yield the chunk after all outputs: the usage and the speed, if they were asked for."""
        if not self._request.has_usage:
            return
        outputs = list(self._latest.values())
        chunk = {**self._head, "choices": [], "usage": _usage(self._request, outputs)}
        if self._request.num_answers == 1:
            chunk["timings"] = _timings(outputs[0].outputs[0])
        yield chunk

    def error_event(self, error: ApiError) -> dict[str, Any]:
        """Return the event of a stream that ends with an error."""
        return error.body()

    def _choice(self, output: RequestOutput, answer: CompletionOutput) -> "_Choice":
        """Return the choice of an answer, which is made at its first output."""
        index = output.index * self._request.params.n + answer.index
        if index not in self._choices:
            deltas = self._request.deltas(self._dialog_format, self._id, output, answer)
            self._choices[index] = _Choice(index, deltas, self._request, self._echo(output))
        return self._choices[index]

    def _echo(self, output: RequestOutput) -> "_Echo | None":
        """Return the prompt of an output, if the request wants it before each answer."""
        if not self._request.echo:
            return None
        if output.index not in self._echoes:
            skips_special = self._request.params.skip_special_tokens
            tokenizer = self._dialog_format.tokenizer
            self._echoes[output.index] = _Echo(output, tokenizer, skip_special_tokens=skips_special)
        return self._echoes[output.index]

    def _complete_choice(self, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        choice = self._choice(output, answer)
        scores = choice.new_scores(answer)
        if self._request.chat:
            message = self._renamed(choice.deltas.message(answer))
            content: dict[str, Any] = {"message": message}
        else:
            echoed = "" if choice.echo is None else choice.echo.text
            content = {"text": echoed + answer.text}
        return {
            "index": choice.index,
            **content,
            "logprobs": choice.all_logprobs(scores),
            "finish_reason": choice.deltas.finish_reason(answer.finish_reason),
            "stop_reason": answer.stop_reason,
        }

    def _first_chunk(self, choice: "_Choice") -> Iterator[dict[str, Any]]:
        if self._request.chat:
            yield self._chunk(choice, {"delta": {"role": "assistant", "content": ""}})
        elif choice.echo is not None:
            yield self._chunk(choice, {"text": choice.echo.text}, choice.echo.logprobs)

    def _next_chunks(self, choice: "_Choice", answer: CompletionOutput) -> Iterator[dict[str, Any]]:
        scores = choice.new_scores(answer)
        deltas = choice.deltas.push(answer)
        choice.is_finished = answer.finish_reason is not None
        if not deltas and (scores or choice.is_finished):
            deltas = [{"content": ""}] if scores or not self._request.chat else [{}]
        for delta in deltas:
            if self._request.chat:
                content = {"delta": self._renamed(delta)}
            else:
                content = {"text": delta["content"]}
            chunk = self._chunk(choice, content, choice.logprobs(scores) if scores else None)
            if choice.is_finished and delta is deltas[-1]:
                reason = choice.deltas.finish_reason(answer.finish_reason)
                chunk["choices"][0] |= {"finish_reason": reason, "stop_reason": answer.stop_reason}
            yield chunk
            scores = []  # The first chunk has the scores of all new tokens.

    def _renamed(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message or a delta with the server's name of the field for reasoning."""
        names = {REASONING_FIELDS[0]: self._reasoning_field}
        return {names.get(name, name): value for name, value in message.items()}

    def _chunk(
        self,
        choice: "_Choice",
        content: Mapping[str, Any],
        logprobs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        part = {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": None}
        chunk = {**self._head, "choices": [part]}
        if self._request.has_running_usage:
            chunk["usage"] = _usage(self._request, list(self._latest.values()))
        elif self._request.has_usage:
            chunk["usage"] = None
        return chunk


def _timings(answer: CompletionOutput) -> dict[str, Any]:
    """Return the speed of an answer in the fields of llama.cpp's server.

    The first token ends the reading of the prompt, and does not count as predicted.
    """
    num_tokens = len(answer.token_ids)
    seconds = answer.decode_s
    return {
        "predicted_n": num_tokens,
        "predicted_ms": 1000 * seconds,
        "predicted_per_second": (num_tokens - 1) / seconds if seconds else None,
    }


class _Echo:
    """The prompt of a completion, which each of its answers begins with.

    Attributes:
        text: text of the prompt.
        logprobs: the logprobs object of the prompt; None if the request asks for none.
        text_scores: makes the logprobs objects of what follows the prompt, in a copy for each
            answer.
    """

    def __init__(
        self, output: RequestOutput, tokenizer: Tokenizer, *, skip_special_tokens: bool
    ) -> None:
        """Make the text and the logprobs of the prompt, once for all answers."""
        ids = output.prompt_token_ids
        self.text = (
            tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
            if output.prompt is None
            else output.prompt
        )
        self.text_scores = TextScores(tokenizer, skip_special_tokens=skip_special_tokens)
        self.logprobs: dict[str, ContinuedList] | None = None
        self._shared: dict[str, SharedItems] = {}
        prompt_logprobs = output.prompt_logprobs
        if prompt_logprobs is not None:
            logprobs = self.text_scores.push(list(zip(ids, prompt_logprobs, strict=True)))
            self._shared = {name: SharedItems(items) for name, items in logprobs.items()}
            self.logprobs = self.continued({name: [] for name in logprobs})

    def continued(self, logprobs: dict[str, list[Any]]) -> dict[str, ContinuedList]:
        """Return a logprobs object with that of the prompt before it."""
        return {name: ContinuedList(self._shared[name], items) for name, items in logprobs.items()}


class _Choice:
    """One answer to one prompt; with echo, the prompt and its scores come before it.

    Attributes:
        index: position of the choice in the response.
        deltas: reads the calls in the answer.
        echo: the prompt, if it is echoed.
        has_begun: whether its first chunk was made.
        is_finished: whether its last chunk was made.
        templates: the bytes of its chunks around their text, by the field of the text.
    """

    def __init__(
        self, index: int, deltas: AnswerDeltas, request: ApiRequest, echo: _Echo | None
    ) -> None:
        self.index = index
        self.deltas = deltas
        self.echo = echo
        self.has_begun = False
        self.is_finished = False
        self.templates: dict[str, EventTemplate] = {}
        self._num_top = request.params.logprobs
        self._num_scored = 0  # tokens whose logprobs were read
        self._text_scores: TextScores | None = None
        if echo is not None:
            self._text_scores = echo.text_scores.fork()
        elif not request.chat:
            skips_special = request.params.skip_special_tokens
            self._text_scores = TextScores(
                deltas.dialog_format.tokenizer, skip_special_tokens=skips_special
            )

    def new_scores(self, answer: CompletionOutput) -> Scores:
        """Return the scores of the tokens since the last call, if logprobs are asked for."""
        if self._num_top is None:
            return []
        scores = answer.new_scores(self._num_scored)
        self._num_scored += len(scores)
        return scores

    def logprobs(self, scores: Scores) -> dict[str, Any]:
        """Return the logprobs object of these tokens."""
        if self._text_scores is None:
            return chat_scores(scores, self._num_top or 0, self.deltas.dialog_format.tokenizer)
        return self._text_scores.push(scores)

    def all_logprobs(self, scores: Scores) -> dict[str, Any] | None:
        """Return the logprobs object of the prompt, if it is echoed, and of these tokens."""
        if self._num_top is None:
            return None
        logprobs = self.logprobs(scores)
        if self.echo is None or self.echo.logprobs is None:
            return logprobs
        return self.echo.continued(logprobs)
