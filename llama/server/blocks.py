"""An answer as blocks, each of words or of one call: the engine's outputs in, an API's events out.

Anthropic's Messages and OpenAI's Responses have answers of this form, as events or whole.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic_core import from_json

from llama.prompts.answer import AnswerDeltas
from llama.requests.request import CompletionOutput, RequestOutput
from llama.server.errors import ApiError
from llama.server.openai.answers import ResponseMeta
from llama.server.openai.request import OpenAIRequest
from llama.tokenizer import Tokenizer

Events = Iterator[dict[str, Any]]


@dataclass
class Block:
    """text: words, or a call's arguments as JSON, maybe cut off. call_id, name: empty for words."""

    index: int  # its place in the answer
    call_id: str = ""
    name: str = ""
    text: str = ""
    is_cut: bool = False  # the answer ended by its length in this block

    @property
    def is_call(self) -> bool:
        return bool(self.call_id)

    @property
    def arguments(self) -> dict[str, Any]:
        """Of a call; where they were cut off, as far as they are whole."""
        try:
            found = from_json(self.text or "{}", allow_partial=True)
            json.dumps(found, allow_nan=False)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


class BlockAnswer(ABC):
    """One answer in the words of an API: its body, and its events. begins, last: those before all
    blocks, and after all outputs. failed: the last event where it ends by an error."""

    end = b""  # follows the last event of a stream
    idle_event: ClassVar[dict[str, Any] | None] = None  # sent while nothing else comes
    output: RequestOutput  # the latest
    _deltas: AnswerDeltas

    def __init__(self, request: OpenAIRequest, tokenizer: Tokenizer, meta: ResponseMeta) -> None:
        self.request, self.tokenizer, self.meta = request, tokenizer, meta
        self.blocks: list[Block] = []
        self.has_begun = False

    @abstractmethod
    def body(self) -> dict[str, Any]: ...
    @abstractmethod
    def begins(self) -> Events: ...
    @abstractmethod
    def last(self) -> Events: ...
    @abstractmethod
    def failed(self, error: ApiError) -> dict[str, Any]: ...
    @abstractmethod
    def starts(self, block: Block) -> Events: ...
    @abstractmethod
    def grows(self, block: Block, text: str) -> Events: ...
    @abstractmethod
    def stops(self, block: Block) -> Events: ...

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The body of the response to a finished request."""
        answer = self._take(outputs[0])
        for _ in self._events(answer, self._deltas.push(answer, whole=True)):
            pass
        return self.body()

    def of(self, output: RequestOutput) -> Events:
        """The events that an output brings: none, where the answer has nothing new."""
        is_first = not self.has_begun
        answer = self._take(output)
        if is_first:
            yield from self.begins()
        yield from self._events(answer, self._deltas.push(answer))

    @property
    def finish_reason(self) -> str | None:
        """As a chat has it: "stop", "length" or "tool_calls"; None while the answer goes on."""
        return self._deltas.finish_reason(self.output.outputs[0].finish_reason)

    def _take(self, output: RequestOutput) -> CompletionOutput:
        self.output = output
        (answer,) = output.outputs
        if not self.has_begun:
            self.has_begun = True
            self._deltas = self.request.deltas(self.tokenizer, self.meta.id, output, answer)
        return answer

    def _events(self, answer: CompletionOutput, deltas: list[dict[str, Any]]) -> Events:
        for delta in deltas:
            if "content" in delta:
                if not self.blocks or self.blocks[-1].is_call:
                    yield from self._start(Block(len(self.blocks)))
                yield from self._grow(delta["content"])
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    name = call["function"]["name"]
                    yield from self._start(Block(len(self.blocks), call["id"], name))
                if call["function"]["arguments"]:
                    yield from self._grow(call["function"]["arguments"])
        if answer.finish_reason is not None and self.blocks:
            self.blocks[-1].is_cut = answer.finish_reason == "length"
            yield from self.stops(self.blocks[-1])

    def _start(self, block: Block) -> Events:
        if self.blocks:
            yield from self.stops(self.blocks[-1])
        self.blocks.append(block)
        yield from self.starts(block)

    def _grow(self, text: str) -> Events:
        self.blocks[-1].text += text
        yield from self.grows(self.blocks[-1], text)
