"""One answer as blocks, each of words or of one call: the engine's outputs in, their parts out.

Anthropic's Messages and OpenAI's Responses have answers of this form. The same code makes the parts
of a stream and the whole answer. It knows no network, and no API's names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from llama.prompts.answer import AnswerDeltas
from llama.requests.request import RequestOutput
from llama.server.openai.request import OpenAIRequest
from llama.tokenizer import Tokenizer


@dataclass
class Block:
    """index: its place in the answer. text: words, or the arguments of the call as JSON, which may
    be cut off. call_id, name: of a call; of words they are empty."""

    index: int
    call_id: str = ""
    name: str = ""
    text: str = ""
    is_cut: bool = False  # the answer ended by its length in this block

    @property
    def is_call(self) -> bool:
        return bool(self.call_id)


class Step(Enum):
    START = "start"
    TEXT = "text"
    STOP = "stop"


class Blocks:
    """The blocks of a request's one answer, while its outputs come."""

    def __init__(self, request: OpenAIRequest, tokenizer: Tokenizer, response_id: str) -> None:
        self._request, self._tokenizer, self._id = request, tokenizer, response_id
        self._deltas: AnswerDeltas | None = None  # of a chat that may call tools
        self.blocks: list[Block] = []
        self.output: RequestOutput | None = None  # the latest

    def push(
        self, output: RequestOutput, *, whole: bool = False
    ) -> Iterator[tuple[Step, Block, str]]:
        """The parts that an output brings: a block begins, gets text, ends.

        whole: the output is the only one, and brings the answer's whole text.
        """
        (answer,) = output.outputs
        if self.output is None:
            self._deltas = self._request.deltas(self._tokenizer, self._id, output, answer)
        self.output = output
        text = answer.text if whole else answer.new_text
        deltas: list[dict[str, Any]] = [{"content": text}] if text else []
        if self._deltas is not None:
            is_last = answer.finish_reason is not None
            deltas = self._deltas.push(answer.token_ids, text, is_last=is_last)
        for delta in deltas:
            if "content" in delta:
                yield from self._words(delta["content"])
            for call in delta.get("tool_calls", []):
                yield from self._call(call)
        if answer.finish_reason is not None and self.blocks:
            self.blocks[-1].is_cut = answer.finish_reason == "length"
            yield Step.STOP, self.blocks[-1], ""

    @property
    def finish_reason(self) -> str | None:
        """As a chat has it: "stop", "length" or "tool_calls"; None while the answer goes on."""
        reason = None if self.output is None else self.output.outputs[0].finish_reason
        return reason if self._deltas is None else self._deltas.finish_reason(reason)

    def _words(self, text: str) -> Iterator[tuple[Step, Block, str]]:
        if not self.blocks or self.blocks[-1].is_call:
            yield from self._begin(Block(len(self.blocks)))
        yield self._grow(text)

    def _call(self, call: dict[str, Any]) -> Iterator[tuple[Step, Block, str]]:
        function = call["function"]
        if "id" in call:
            yield from self._begin(Block(len(self.blocks), call["id"], function["name"]))
        if function["arguments"]:
            yield self._grow(function["arguments"])

    def _begin(self, block: Block) -> Iterator[tuple[Step, Block, str]]:
        if self.blocks:
            yield Step.STOP, self.blocks[-1], ""
        self.blocks.append(block)
        yield Step.START, block, ""

    def _grow(self, text: str) -> tuple[Step, Block, str]:
        block = self.blocks[-1]
        block.text += text
        return Step.TEXT, block, text
