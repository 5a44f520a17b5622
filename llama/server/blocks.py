"""An answer as blocks of reasoning, text and tool calls: the engine's outputs in, events out.

Anthropic's Messages and OpenAI's Responses have answers of this structure, as events or whole. This
file knows the structure and none of the two APIs.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

from pydantic_core import from_json

from llama.api import CompletionOutput, RequestOutput
from llama.prompts.answer import AnswerDeltas
from llama.prompts.dialog_format import DialogFormat
from llama.server.encoding import HOLE, SERVER_SENT_EVENTS, EventTemplate, StreamFormat
from llama.server.endings import ending_of
from llama.server.errors import ApiError
from llama.server.openai.answers import ResponseMeta
from llama.server.request import ApiRequest

Events = Iterator[dict[str, Any]]


@dataclass
class Block:
    """A part of an answer: the reasoning, text, or one call of a tool.

    Attributes:
        index: position of the block in the answer.
        is_reasoning: whether the text is the reasoning, which precedes all other blocks.
        call_id: id of the call; empty for text.
        name: name of the called tool; empty for text.
        text: the text, or the arguments of the call as JSON, which may be cut off.
        is_cut: whether the answer ended in this block before it was complete.
        logprobs: the log-probabilities of a text, where an API has them.
    """

    index: int
    _: KW_ONLY
    is_reasoning: bool = False
    call_id: str = ""
    name: str = ""
    text: str = ""
    is_cut: bool = False
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_call(self) -> bool:
        """Whether the block is a call of a tool."""
        return bool(self.call_id)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call; where they are cut off, those that are complete."""
        try:
            arguments = from_json(self.text or "{}", allow_partial=True)
            json.dumps(arguments, allow_nan=False)
        except ValueError:
            return {}
        return arguments if isinstance(arguments, dict) else {}


class BlockAnswer(ABC):
    """One answer of an API, as the body of a response or as the events of a stream.

    Attributes:
        end: bytes that follow the last event of a stream.
        stream_format: how the events of a stream are written.
        blocks: the blocks so far.
        output: the latest output of the engine.
        has_begun: whether there was an output.
    """

    end = b""
    stream_format: ClassVar[StreamFormat] = SERVER_SENT_EVENTS
    output: RequestOutput
    _deltas: AnswerDeltas

    def __init__(
        self, request: ApiRequest, dialog_format: DialogFormat, meta: ResponseMeta
    ) -> None:
        self.request = request
        self.dialog_format = dialog_format
        self.meta = meta
        self.blocks: list[Block] = []
        self.has_begun = False
        # The latest block with text, and the bytes of its events around the text.
        self._template: tuple[Block, EventTemplate] | None = None

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Return the body of the response to a finished request."""

    @abstractmethod
    def first_events(self) -> Events:
        """Yield the events that come before all blocks."""

    @abstractmethod
    def last_events(self) -> Events:
        """Yield the events that come after the last output."""

    @abstractmethod
    def error_event(self, error: ApiError) -> dict[str, Any]:
        """Return the last event of a stream that ends with an error."""

    @abstractmethod
    def block_start(self, block: Block) -> Events:
        """Yield the events that open a block."""

    @abstractmethod
    def block_delta(self, block: Block, text: str) -> Events:
        """Yield the events of new text in a block."""

    @abstractmethod
    def text_event(self, block: Block, *values: Any) -> dict[str, Any]:
        """Return the event of new text in a block that is no call.

        Args:
            block: the block.
            values: those of `event_values`, and the text.
        """

    def event_values(self) -> tuple[Any, ...]:
        """Return what differs between the events of a text, before the text itself."""
        return ()

    @abstractmethod
    def block_stop(self, block: Block) -> Events:
        """Yield the events that close a block."""

    @property
    def idle_event(self) -> dict[str, Any] | None:
        """The event that is sent while nothing else comes; None for a comment."""
        return None

    def content(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Return the body of the response to a request, from its last output."""
        answer = self._take(outputs[0])
        for _ in self._block_events(answer, self._deltas.push(answer, whole=True)):
            pass
        return self.body()

    def events(self, output: RequestOutput) -> Events:
        """Yield the events of an output; there are none where the answer has nothing new."""
        is_first = not self.has_begun
        answer = self._take(output)
        if is_first:
            yield from self.first_events()
        yield from self._block_events(answer, self._deltas.push(answer))

    def next_event(self, output: RequestOutput) -> bytes | None:
        """Return the bytes of `events` for an output that only adds text; None for any other."""
        (answer,) = output.outputs
        if not self.blocks or answer.finish_reason is not None:
            return None
        if self.request.tools is not None or self.request.params.logprobs is not None:
            return None
        block = self.blocks[-1]
        text = answer.new_text
        other = answer.new_reasoning if output.has_reasoning else ""
        if block.is_reasoning:
            text, other = other, text
        if other:  # It belongs to another block.
            return None
        self.output = output
        if not text:
            return b""
        block.text += text
        values = (*self.event_values(), text)
        if self._template is None or self._template[0] is not block:
            event = self.text_event(block, *[HOLE] * len(values))
            self._template = block, self.stream_format.template(event)
        return self._template[1].fill(*values)

    @property
    def finish_reason(self) -> str | None:
        """The reason as a chat has it: "stop", "length" or "tool_calls"; None before the end."""
        return self._deltas.finish_reason(self.output.outputs[0].finish_reason)

    def _take(self, output: RequestOutput) -> CompletionOutput:
        self.output = output
        (answer,) = output.outputs
        if not self.has_begun:
            self.has_begun = True
            self._deltas = self.request.deltas(self.dialog_format, self.meta.id, output, answer)
        return answer

    def _block_events(self, answer: CompletionOutput, deltas: list[dict[str, Any]]) -> Events:
        for delta in deltas:
            if "reasoning_content" in delta:
                yield from self._take_text(delta["reasoning_content"], is_reasoning=True)
            if "content" in delta:
                yield from self._take_text(delta["content"])
            for call in delta.get("tool_calls", []):
                yield from self._take_call(call)
        if answer.finish_reason is not None and self.blocks:
            self.blocks[-1].is_cut = ending_of(answer.finish_reason).incomplete is not None
            yield from self.block_stop(self.blocks[-1])

    def _take_text(self, text: str, *, is_reasoning: bool = False) -> Events:
        last = self.blocks[-1] if self.blocks else None
        if last is None or last.is_call or last.is_reasoning != is_reasoning:
            yield from self._open(Block(len(self.blocks), is_reasoning=is_reasoning))
        yield from self._extend(text)

    def _take_call(self, call: dict[str, Any]) -> Events:
        function = call["function"]
        if "id" in call:
            block = Block(len(self.blocks), call_id=call["id"], name=function["name"])
            yield from self._open(block)
        if function["arguments"]:
            yield from self._extend(function["arguments"])

    def _open(self, block: Block) -> Events:
        if self.blocks:
            yield from self.block_stop(self.blocks[-1])
        self.blocks.append(block)
        yield from self.block_start(block)

    def _extend(self, text: str) -> Events:
        self.blocks[-1].text += text
        yield from self.block_delta(self.blocks[-1], text)
