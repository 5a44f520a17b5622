"""Response bodies and events of Anthropic's Messages API: the engine's outputs in, objects out."""

from typing import Any, ClassVar

from llama.server.blocks import Block, BlockAnswer, Events
from llama.server.errors import ApiError

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageAnswer(BlockAnswer):
    """A message, or its events, each named by its type, of which clients make the same message."""

    idle_event: ClassVar[Any] = {"type": "ping"}

    def body(self) -> dict[str, Any]:
        content = [_content(block) for block in self.blocks]
        return {**self._head(), "content": content, **self._end(), "usage": self._usage()}

    def begins(self) -> Events:
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = {**self._usage(), "output_tokens": 0}
        yield {"type": "message_start", "message": {**self._head(), **empty, "usage": usage}}

    def starts(self, block: Block) -> Events:
        content = _content(block)
        yield {"type": "content_block_start", "index": block.index, "content_block": content}

    def grows(self, block: Block, text: str) -> Events:
        delta = {"type": "text_delta", "text": text}
        if block.is_call:
            delta = {"type": "input_json_delta", "partial_json": text}
        yield {"type": "content_block_delta", "index": block.index, "delta": delta}

    def stops(self, block: Block) -> Events:
        yield {"type": "content_block_stop", "index": block.index}

    def last(self) -> Events:
        yield {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
        yield {"type": "message_stop"}

    def failed(self, error: ApiError) -> dict[str, Any]:
        return error.anthropic_body()

    def _head(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self.meta.id}",
            "type": "message",
            "role": "assistant",
            "model": self.meta.model,
        }

    def _end(self) -> dict[str, Any]:
        """Why it ended. The model's own stop tokens are ids, and no sequences."""
        (answer,) = self.output.outputs
        if isinstance(answer.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
        reason = _REASONS.get(self.finish_reason or "", "end_turn")
        most, count = self.request.params.max_tokens, self.output.usage.completion_tokens
        if reason == "max_tokens" and most is not None and count < most:
            reason = "model_context_window_exceeded"  # Anthropic's word for the end of the context
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """input_tokens are those that were computed: Anthropic's clients add those of the cache."""
        usage = self.output.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


def _content(block: Block) -> dict[str, Any]:
    if not block.is_call:
        return {"type": "text", "text": block.text}
    call_id = block.call_id.replace("call_", "toolu_", 1)  # as Anthropic's begin
    return {"type": "tool_use", "id": call_id, "name": block.name, "input": block.arguments}
