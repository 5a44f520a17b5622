"""Response bodies and events of Anthropic's Messages API: the engine's outputs in, objects out.

It knows no network, and runs nothing.
"""

import json
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from llama.requests.request import RequestOutput
from llama.server.errors import ApiError, anthropic_body
from llama.server.openai.answers import ResponseMeta
from llama.server.openai.blocks import Block, Blocks, Step
from llama.server.openai.request import OpenAIRequest
from llama.tokenizer import Tokenizer

PING = {"type": "ping"}
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageEvents:
    """A message, or the events of one that streams, for outputs as they come. Each is named by its
    type. The client's own accumulation of them is the whole message."""

    def __init__(self, request: OpenAIRequest, tokenizer: Tokenizer, meta: ResponseMeta) -> None:
        self._request = request
        self._meta = meta
        self._blocks = Blocks(request, tokenizer, meta.id)
        self._has_begun = False

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The message of a finished request."""
        for _ in self._blocks.push(output, whole=True):
            pass
        return {
            **_head(self._request, self._meta),
            "content": [_content(block) for block in self._blocks.blocks],
            **_end(self._request, self._blocks, output),
            "usage": _usage(output),
        }

    def of(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The events that an output brings: none, where the answer has nothing new."""
        if not self._has_begun:
            self._has_begun = True
            message = {
                **_head(self._request, self._meta),
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {**_usage(output), "output_tokens": 0},
            }
            yield {"type": "message_start", "message": message}
        for step, block, text in self._blocks.push(output):
            yield _block_event(step, block, text)

    def last(self) -> Iterator[dict[str, Any]]:
        """After all outputs: why it ended, and the counts of tokens."""
        output = self._blocks.output
        assert output is not None
        delta = _end(self._request, self._blocks, output)
        yield {"type": "message_delta", "delta": delta, "usage": _usage(output)}
        yield {"type": "message_stop"}

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The last event where the answer ends by an error."""
        return anthropic_body(error)


def _block_event(step: Step, block: Block, text: str) -> dict[str, Any]:
    if step is Step.START:
        empty = _content(Block(block.index, block.call_id, block.name))
        return {"type": "content_block_start", "index": block.index, "content_block": empty}
    if step is Step.STOP:
        return {"type": "content_block_stop", "index": block.index}
    delta = {"type": "text_delta", "text": text}
    if block.is_call:
        delta = {"type": "input_json_delta", "partial_json": text}
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


def _head(request: OpenAIRequest, meta: ResponseMeta) -> dict[str, Any]:
    return {
        "id": f"msg_{meta.id}",
        "type": "message",
        "role": "assistant",
        "model": meta.model if request.model is None else request.model,
    }


def _content(block: Block) -> dict[str, Any]:
    if not block.is_call:
        return {"type": "text", "text": block.text}
    call_id = block.call_id.replace("call_", "toolu_", 1)  # as Anthropic's begin
    return {"type": "tool_use", "id": call_id, "name": block.name, "input": _input(block.text)}


def _input(arguments: str) -> dict[str, Any]:
    """Arguments that were cut off, as far as they are whole; the client reads a stream so too."""
    try:
        found = from_json(arguments or "{}", allow_partial=True)
        json.dumps(found, allow_nan=False)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _end(request: OpenAIRequest, blocks: Blocks, output: RequestOutput) -> dict[str, Any]:
    """stop_reason and stop_sequence. The model's own stop tokens are ids, and no sequences."""
    (answer,) = output.outputs
    if isinstance(answer.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
    reason = _REASONS.get(blocks.finish_reason or "", "end_turn")
    most = request.params.max_tokens
    if reason == "max_tokens" and most is not None and output.usage.completion_tokens < most:
        reason = "model_context_window_exceeded"  # Anthropic's word for the end of the context
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(output: RequestOutput) -> dict[str, Any]:
    """input_tokens are those that were computed: Anthropic's clients add those of the cache."""
    usage = output.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
