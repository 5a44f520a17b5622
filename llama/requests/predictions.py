"""The predictions of Meta's API and the deltas of its streams, made out of outputs of the engine.

In: the outputs of requests, in the order of their prompts. Out: what `text_completion`,
`chat_completion` and the streams return. The types of all predictions are here.
"""

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from llama.prompts.answer import AnswerDeltas
from llama.prompts.chat import ChatOptions
from llama.prompts.dialog_format import DialogFormat
from llama.requests.prompts import CallOptions
from llama.requests.request import RequestOutput
from llama.tokenizer import Message, Tokenizer

_NO_OPTIONS = ChatOptions()  # the options of a call without tools


class _Scored(TypedDict, total=False):
    """The fields of a prediction with logprobs=True."""

    tokens: list[str]
    logprobs: list[float]


class CompletionPrediction(_Scored):
    """The continuation of a text."""

    generation: str


class AnswerMessage(Message, total=False):
    """An answer, with tool calls in OpenAI's format; content is None if there is no other text."""

    reasoning_content: str
    tool_calls: list[dict[str, Any]]


class ChatPrediction(_Scored):
    """The answer to a dialog."""

    generation: AnswerMessage


class BeamPrediction(TypedDict):
    """A continuation, and its score: sum of log-probabilities / length ** length_penalty."""

    generation: str
    score: float


@dataclass(frozen=True)
class TextDelta:
    """A piece of the answer to one prompt.

    Attributes:
        index: index of the prompt.
        text: the new text.
        finish_reason: "stop", "length" or "tool_calls" in the last piece, else None.
        tool_calls: pieces of tool calls in OpenAI's format; see `Llama.stream_chat`.
        reasoning: the new text of the reasoning, which precedes the answer.
    """

    index: int
    text: str
    finish_reason: str | None
    tool_calls: tuple[dict[str, Any], ...] = ()
    reasoning: str = ""


@dataclass(frozen=True)
class Predictor:
    """Makes predictions out of outputs.

    Attributes:
        tokenizer: The tokenizer of the model.
        dialog_format: The format of its dialogs.
    """

    tokenizer: Tokenizer
    dialog_format: DialogFormat

    def completions(
        self, outputs: Sequence[RequestOutput], options: CallOptions
    ) -> list[CompletionPrediction]:
        """Return the predictions of `text_completion`."""
        texts = [self.tokenizer.decode(tokens_of(output, options.echo)) for output in outputs]
        scored = [self._scored(output, options) for output in outputs]
        return [{"generation": text, **x} for text, x in zip(texts, scored, strict=True)]

    def chats(self, outputs: Sequence[RequestOutput], options: CallOptions) -> list[ChatPrediction]:
        """Return the predictions of `chat_completion`."""
        chat = options.chat or _NO_OPTIONS
        answers: list[Any] = [self._reader(x, chat).message(x.outputs[0]) for x in outputs]
        scored = [self._scored(output, options) for output in outputs]
        return [{"generation": answer, **x} for answer, x in zip(answers, scored, strict=True)]

    def deltas(
        self, outputs: Generator[RequestOutput, None, None], options: CallOptions
    ) -> Generator[TextDelta, None, None]:
        """Yield the pieces of the answers; closing this generator closes the engine's at once."""
        chat = options.chat or _NO_OPTIONS
        readers: dict[int, AnswerDeltas] = {}
        with contextlib.closing(outputs):
            for output in outputs:
                checked(output)
                (answer,) = output.outputs
                index = output.index
                if index not in readers:
                    readers[index] = self._reader(output, chat)
                deltas = readers[index].push(answer) or [{}] * output.finished
                for i, delta in enumerate(deltas, start=1):
                    ends = output.finished and i == len(deltas)
                    reason = readers[index].finish_reason(answer.finish_reason) if ends else None
                    calls = tuple(delta.get("tool_calls", ()))
                    reasoning = delta.get("reasoning_content", "")
                    yield TextDelta(index, delta.get("content", ""), reason, calls, reasoning)

    def _reader(self, output: RequestOutput, chat: ChatOptions) -> AnswerDeltas:
        """Return a parser of the tool calls in an answer."""
        key = ("", output.prompt_token_ids, output.index, 0)
        return AnswerDeltas(self.dialog_format, chat.tool_request, key)

    def _scored(self, output: RequestOutput, options: CallOptions) -> _Scored:
        """Return the tokens of an answer and their log-probabilities, if they are wanted."""
        if not options.logprobs:
            return {}
        pieces = [self.tokenizer.decode([token]) for token in tokens_of(output, options.echo)]
        return {"tokens": pieces, "logprobs": scores_of(output, options.echo)}


def tokens_of(output: RequestOutput, echo: bool) -> list[int]:
    """Return the tokens of an answer, after those of its prompt with `echo`."""
    tokens = output.outputs[0].token_ids
    return output.prompt_token_ids + tokens if echo else tokens


def scores_of(output: RequestOutput, echo: bool) -> list[float]:
    """Return the log-probability of each token; the first token of a prompt has 0.0."""
    entries: list[dict[int, float] | None] = []
    if echo:
        entries += output.prompt_logprobs or []
    entries += output.outputs[0].logprobs or []
    return [
        0.0 if entry is None else entry[token]
        for token, entry in zip(tokens_of(output, echo), entries, strict=True)
    ]


def checked(output: RequestOutput) -> RequestOutput:
    """Return an output.

    Raises:
        ValueError: The output has an error; the message names its prompt.
    """
    if output.error is not None:
        raise ValueError(f"prompt {output.index}: {output.error}")
    return output
