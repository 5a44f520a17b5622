"""One answer of a chat with tools as the parts of OpenAI's message: text in, deltas out.

The same code makes the parts of a stream and, joined, the whole message. It knows no network.
"""

import hashlib
from typing import Any

from llama.prompts import CallStart, Content, Event, ToolCallParser
from llama.requests.request import CompletionOutput, RequestOutput
from llama.server.openai.requests import OpenAIRequest
from llama.tokenizer import Tokenizer


class ToolDeltas:
    """Deltas of one choice: {"content"} or {"tool_calls"}, as the openai client merges them."""

    def __init__(self, request: OpenAIRequest, tokenizer: Tokenizer, response_id: str) -> None:
        assert request.tools is not None
        self._tools = request.tools
        self._shows_tag = not request.params.skip_special_tokens
        self._python_tag_id = tokenizer.python_tag_id
        self._response_id = response_id
        self._parser: ToolCallParser | None = None

    def of(
        self, output: RequestOutput, answer: CompletionOutput, text: str
    ) -> list[dict[str, Any]]:
        """The deltas of the text that came since the last call."""
        if not text and answer.finish_reason is None:
            return []
        if self._parser is None:
            self._parser = self._begin(answer)
        events = self._parser.push(text)
        if answer.finish_reason is not None:
            events += self._parser.flush()
        return [self._delta(event, output, answer) for event in events]

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's word for an answer that ended by itself and has a call."""
        has_calls = self._parser is not None and self._parser.has_calls
        return "tool_calls" if reason == "stop" and has_calls else reason

    def _begin(self, answer: CompletionOutput) -> ToolCallParser:
        begins_with_tag = answer.token_ids[:1] == [self._python_tag_id]
        return ToolCallParser(
            self._tools.callable_tools(),
            parallel=self._tools.several,
            is_tagged=begins_with_tag and not self._shows_tag,
            only_at_start=self._tools.needs_grammar,
        )

    def _delta(
        self, event: Event, output: RequestOutput, answer: CompletionOutput
    ) -> dict[str, Any]:
        if isinstance(event, Content):
            return {"content": event.text}
        if not isinstance(event, CallStart):
            call: dict[str, Any] = {"function": {"arguments": event.text}}
        else:
            call = {
                "id": self._call_id(output, answer.index, event.index),
                "type": "function",
                "function": {"name": event.name, "arguments": ""},
            }
        return {"tool_calls": [{"index": event.index, **call}]}

    def _call_id(self, output: RequestOutput, choice: int, index: int) -> str:
        """Another one in each turn of a dialog, whatever request ids the client gives, and the same
        one when a batch job is run again."""
        parts = repr((self._response_id, output.prompt_token_ids, output.index, choice, index))
        return f"call_{hashlib.sha256(parts.encode()).hexdigest()[:24]}"


def joined(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the deltas."""
    content = "".join(delta["content"] for delta in deltas if "content" in delta)
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for part in delta.get("tool_calls", []):
            if part["index"] == len(calls):
                calls.append({key: part[key] for key in ("id", "type")})
                calls[-1]["function"] = dict(part["function"])
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    if not calls:
        return {"role": "assistant", "content": content}
    return {"role": "assistant", "content": content or None, "tool_calls": calls}
