"""Response bodies and stream lines of Ollama's API: the engine's outputs in, objects out.

A stream has one JSON object per line. This file knows no network and runs no model.
"""

import contextlib
import json
import time
from abc import abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from llama.prompts.dialog_format import DialogFormat
from llama.server.blocks import Block, BlockAnswer, Events
from llama.server.encoding import JSON_LINES
from llama.server.endings import ending_of
from llama.server.errors import ApiError
from llama.server.openai.answers import ResponseMeta
from llama.server.request import ApiRequest


def timestamp(seconds: float) -> str:
    """Return a time, in seconds since 1970, as RFC 3339 writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class OllamaAnswer(BlockAnswer):
    """An answer, whole or as the lines of a stream.

    A call is a line of its own, once its arguments are complete.
    """

    stream_format = JSON_LINES

    def __init__(
        self, request: ApiRequest, dialog_format: DialogFormat, meta: ResponseMeta
    ) -> None:
        super().__init__(request, dialog_format, meta)
        self._start = time.monotonic()

    @property
    def idle_event(self) -> dict[str, Any]:
        """The line that is sent while nothing else comes: clients read each line as JSON."""
        return self._line("")

    @abstractmethod
    def line_content(
        self, text: str, calls: Sequence[dict[str, Any]], thinking: str
    ) -> dict[str, Any]:
        """Return the fields of a line for text, for calls, or for thinking."""

    def body(self) -> dict[str, Any]:
        """Return the response to a finished request."""
        texts = [block for block in self.blocks if not block.is_call]
        text = "".join(block.text for block in texts if not block.is_reasoning)
        thinking = "".join(block.text for block in texts if block.is_reasoning)
        calls = [_call(block) for block in self.blocks if _is_complete_call(block)]
        return {**self._line(text, calls, thinking), **self._end()}

    def first_events(self) -> Events:
        """Yield nothing: the first line has text or a call."""
        yield from ()

    def block_start(self, block: Block) -> Events:
        """Yield nothing: a block has no beginning of its own."""
        yield from ()

    def block_delta(self, block: Block, text: str) -> Events:
        """Yield a line with new text, or new thinking."""
        if not block.is_call:
            yield self.text_event(block, *self.event_values(), text)

    def text_event(self, block: Block, *values: Any) -> dict[str, Any]:
        """Return the line of new text, or of new thinking."""
        created_at, text = values
        line = self._line("", thinking=text) if block.is_reasoning else self._line(text)
        return {**line, "created_at": created_at}

    def event_values(self) -> tuple[Any, ...]:
        """Return the time of a line."""
        return (timestamp(time.time()),)

    def block_stop(self, block: Block) -> Events:
        """Yield a line with a call."""
        if _is_complete_call(block):
            yield self._line("", [_call(block)])

    def last_events(self) -> Events:
        """Yield the line with the reason of the end, the counts and the durations."""
        yield {**self._line(""), **self._end()}

    def error_event(self, error: ApiError) -> dict[str, Any]:
        """Return the line of a stream that ends with an error."""
        return error.ollama_body()

    def loaded_body(self, *, unloads: bool) -> dict[str, Any]:
        """Return the response to a request that only loads, or unloads, the model."""
        reason = "unload" if unloads else "load"
        return {**self._line(""), "done": True, "done_reason": reason}

    def _line(
        self, text: str, calls: Sequence[dict[str, Any]] = (), thinking: str = ""
    ) -> dict[str, Any]:
        created_at = timestamp(time.time())
        head = {"model": self.meta.model, "created_at": created_at}
        return {**head, **self.line_content(text, calls, thinking), "done": False}

    def _end(self) -> dict[str, Any]:
        """Return the fields of the last line; durations are in nanoseconds.

        The model is loaded before the first request. What comes before the first token, also the
        time in the queue, counts as that of the prompt.
        """
        (answer,) = self.output.outputs
        usage = self.output.usage
        total = int((time.monotonic() - self._start) * 1e9)
        decoding = min(int(answer.decode_s * 1e9), total)
        return {
            "done": True,
            "done_reason": ending_of(self.finish_reason).done_reason,
            "total_duration": total,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": total - decoding,
            "eval_count": usage.completion_tokens,
            "eval_duration": decoding,
        }


class ChatAnswer(OllamaAnswer):
    """The answer of /api/chat, which is a message."""

    def line_content(
        self, text: str, calls: Sequence[dict[str, Any]], thinking: str
    ) -> dict[str, Any]:
        """Return the message."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = list(calls)
        return {"message": message}


class GenerateAnswer(OllamaAnswer):
    """The answer of /api/generate, which is a text."""

    def line_content(
        self, text: str, calls: Sequence[dict[str, Any]], thinking: str
    ) -> dict[str, Any]:
        """Return the text; there are no calls."""
        return {"response": text, "thinking": thinking} if thinking else {"response": text}


def _call(block: Block) -> dict[str, Any]:
    function = {"index": block.index, "name": block.name, "arguments": block.arguments}
    return {"id": block.call_id, "function": function}


def _is_complete_call(block: Block) -> bool:
    """Return whether a block is a call that a client can run.

    Arguments are objects in this API, so that a client could not see that some are missing.
    """
    if not block.is_call:
        return False
    if not block.is_cut:
        return True
    with contextlib.suppress(ValueError):
        json.loads(block.text)
        return True
    return False
