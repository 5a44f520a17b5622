"""One answer of a chat as OpenAI's message.

In: the text of an answer, while it is generated. Out: the deltas of a stream; the whole message is
made of the same deltas. The reasoning and the content are apart already. It knows no engine.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llama.prompts.dialog_format import DialogFormat
from llama.prompts.parser import CallStart, Content, Event, ToolCallParser
from llama.prompts.tools import Tools


class AnswerSoFar(Protocol):
    """An answer that may still grow."""

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended, or None if it has not ended."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """All token ids up to now."""
        ...

    @property
    def text(self) -> str:
        """The whole text up to now, without the reasoning."""
        ...

    @property
    def new_text(self) -> str:
        """The text since the last output."""
        ...

    @property
    def reasoning(self) -> str:
        """The whole reasoning up to now."""
        ...

    @property
    def new_reasoning(self) -> str:
        """The reasoning since the last output."""
        ...

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of tokens of the reasoning, with its marks."""
        ...


@dataclass
class AnswerDeltas:
    """The deltas of one answer, which OpenAI's client merges into a message.

    Attributes:
        dialog_format: the format of the model's dialogs.
        tools: the tools of the request; without tools the whole text is content.
        key: values that the ids of the calls are derived from. It contains the prompt, so that ids
            differ between the turns of a dialog.
        shows_special: whether the text contains the special tokens.
        shows_reasoning: whether the deltas have the reasoning.
    """

    dialog_format: DialogFormat
    tools: Tools | None
    key: tuple[Any, ...]
    shows_special: bool = False
    shows_reasoning: bool = True
    _parser: ToolCallParser | None = None

    def push(self, answer: AnswerSoFar, *, whole: bool = False) -> list[dict[str, Any]]:
        """Return the deltas of the new text, or at once of the `whole` text.

        Each of them has the key "reasoning_content", "content" or "tool_calls". Reasoning comes
        first.
        """
        reasoning = answer.reasoning if whole else answer.new_reasoning
        deltas = self._push_content(answer, whole=whole)
        if reasoning and self.shows_reasoning:
            deltas.insert(0, {"reasoning_content": reasoning})
        return deltas

    def _push_content(self, answer: AnswerSoFar, *, whole: bool) -> list[dict[str, Any]]:
        """Return the deltas of what follows the reasoning."""
        text = answer.text if whole else answer.new_text
        is_last = whole or answer.finish_reason is not None
        if self.tools is None:
            return [{"content": text}] if text else []
        if not text and not is_last:
            return []
        if self._parser is None:
            first = answer.num_reasoning_tokens
            python_tag_id = self.dialog_format.tokenizer.python_tag_id
            has_tag = answer.token_ids[first : first + 1] == [python_tag_id]
            is_tagged = has_tag and not self.shows_special
            self._parser = self.dialog_format.call_parser(self.tools, is_tagged=is_tagged)
        events = self._parser.push(text)
        if is_last:
            events += self._parser.flush()
        return [self._delta(event) for event in events]

    def message(self, answer: AnswerSoFar) -> dict[str, Any]:
        """Return the message that a client makes of all deltas."""
        content = ""
        message: dict[str, Any] = {"role": "assistant"}
        calls: list[dict[str, Any]] = []
        for delta in self.push(answer, whole=True):
            if "reasoning_content" in delta:
                message |= delta
            content += delta.get("content", "")
            for part in delta.get("tool_calls", []):
                if part["index"] == len(calls):
                    calls.append({key: part[key] for key in ("id", "type", "function")})
                else:
                    calls[-1]["function"]["arguments"] += part["function"]["arguments"]
        if not calls:
            return {**message, "content": content}
        return {**message, "content": content or None, "tool_calls": calls}

    def finish_reason(self, reason: str | None) -> str | None:
        """Return "tool_calls" for an answer that ended by itself and has a call."""
        has_calls = self._parser is not None and self._parser.has_calls
        return "tool_calls" if reason == "stop" and has_calls else reason

    def _delta(self, event: Event) -> dict[str, Any]:
        if isinstance(event, Content):
            return {"content": event.text}
        if not isinstance(event, CallStart):
            call: dict[str, Any] = {"function": {"arguments": event.text}}
        else:
            digest = hashlib.sha256(repr((*self.key, event.index)).encode()).hexdigest()
            function = {"name": event.name, "arguments": ""}
            call = {"id": f"call_{digest[:24]}", "type": "function", "function": function}
        return {"tool_calls": [{"index": event.index, **call}]}
