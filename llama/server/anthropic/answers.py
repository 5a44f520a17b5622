"""Response bodies and events of Anthropic's Messages API: the engine's outputs in, objects out.

This file knows no network and runs no model.
"""

from typing import Any

from llama.server.blocks import Block, BlockAnswer, Events
from llama.server.endings import ending_of
from llama.server.errors import ApiError


class MessageAnswer(BlockAnswer):
    """A message, or its events, each named by its type."""

    @property
    def idle_event(self) -> dict[str, Any]:
        """The event that is sent while nothing else comes."""
        return {"type": "ping"}

    def body(self) -> dict[str, Any]:
        """Return the message of a finished request."""
        content = [_content(block) for block in self.blocks]
        return {**self._head(), "content": content, **self._end(), "usage": self._usage()}

    def first_events(self) -> Events:
        """Yield the event with the message before its content."""
        usage = {**self._usage(), "output_tokens": 0}
        message = {
            **self._head(),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        yield {"type": "message_start", "message": message}

    def block_start(self, block: Block) -> Events:
        """Yield the event that opens a content block."""
        content = _content(block)
        yield {"type": "content_block_start", "index": block.index, "content_block": content}

    def block_delta(self, block: Block, text: str) -> Events:
        """Yield the event of new text, or of new JSON of a call."""
        if block.is_call:
            yield _delta(block, {"type": "input_json_delta", "partial_json": text})
        else:
            yield self.text_event(block, text)

    def text_event(self, block: Block, *values: Any) -> dict[str, Any]:
        """Return the event of new text."""
        (text,) = values
        if block.is_reasoning:
            return _delta(block, {"type": "thinking_delta", "thinking": text})
        return _delta(block, {"type": "text_delta", "text": text})

    def block_stop(self, block: Block) -> Events:
        """Yield the event that closes a content block.

        Clients expect a signature after the thinking; it is empty, as in the whole message.
        """
        if block.is_reasoning:
            yield _delta(block, {"type": "signature_delta", "signature": ""})
        yield {"type": "content_block_stop", "index": block.index}

    def last_events(self) -> Events:
        """Yield the events that end the message."""
        yield {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
        yield {"type": "message_stop"}

    def error_event(self, error: ApiError) -> dict[str, Any]:
        """Return the event of a stream that ends with an error."""
        return error.anthropic_body()

    def _head(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self.meta.id}",
            "type": "message",
            "role": "assistant",
            "model": self.meta.model,
        }

    def _end(self) -> dict[str, Any]:
        """Return why the message ended.

        The model's own stop tokens are ids and not sequences, so they end the turn.
        """
        (answer,) = self.output.outputs
        if isinstance(answer.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
        reason = ending_of(self.finish_reason).stop_reason
        max_tokens = self.request.params.max_tokens
        num_tokens = self.output.usage.completion_tokens
        if reason == "max_tokens" and max_tokens is not None and num_tokens < max_tokens:
            reason = "model_context_window_exceeded"  # The context ended before the limit.
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Return the usage; clients add cached tokens to input_tokens, so it has only the rest."""
        usage = self.output.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


def _delta(block: Block, delta: dict[str, Any]) -> dict[str, Any]:
    """Return the event of something new in a content block."""
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


def _content(block: Block) -> dict[str, Any]:
    """Return the content block of the API."""
    if block.is_reasoning:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if not block.is_call:
        return {"type": "text", "text": block.text}
    call_id = block.call_id.replace("call_", "toolu_", 1)  # the prefix of Anthropic's ids
    return {"type": "tool_use", "id": call_id, "name": block.name, "input": block.arguments}
