"""A request of another chat API as a chat of OpenAI's: what Anthropic's Messages and OpenAI's
Responses have in common.

In: messages as their API has them, each with its place in the body. Out: the messages of a chat,
and errors that name the body's own fields. It knows no network, and runs nothing.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llama.sampling_params import SamplingParams
from llama.server.openai.requests import OpenAIRequest, parse_body


@dataclass
class Dialog:
    """The messages of a chat, and where in the body each of them came from."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def add(self, message: dict[str, Any], place: str) -> None:
        self.messages.append(message)
        self.places.append(place)

    def join_system(self) -> None:
        """Make the system messages at the beginning one: the format has one place for them."""
        count = 0
        while count < len(self.messages) and self.messages[count]["role"] == "system":
            count += 1
        if count > 1:
            parts = [part for m in self.messages[:count] for part in _parts(m["content"])]
            self.messages[:count] = [{"role": "system", "content": parts}]
            self.places[1:count] = []


def _parts(content: str | list[Any]) -> list[Any]:
    return text_parts([content]) if isinstance(content, str) else content


def text_parts(texts: Sequence[str]) -> list[dict[str, str]]:
    """Texts as the content of a message."""
    return [{"type": "text", "text": text} for text in texts]


@dataclass(frozen=True)
class Wording:
    """An API's own names in the errors of a chat request: patterns and what stands for them."""

    names: Mapping[str, str]
    places: Sequence[str] = ()  # of the messages

    def of(self, message: str) -> str:
        for pattern, name in self.names.items():
            message = re.sub(pattern, name, message)
        return re.sub(r"^message (\d+)", lambda found: self._place(int(found[1])), message)

    def _place(self, number: int) -> str:
        return self.places[number] if number < len(self.places) else f"message {number}"


@dataclass(frozen=True)
class Translated:
    """A request as a chat.

    wording: of errors that come later. form_field: of the body, that gave the form of the answer.
    continues: the last message is the beginning of the answer.
    """

    chat: OpenAIRequest
    wording: Wording
    form_field: str
    continues: bool = False


def translate(
    body: dict[str, Any],
    dialog: Dialog,
    defaults: SamplingParams,
    names: Mapping[str, str],
    form_field: str,
    *,
    continues: bool = False,
) -> Translated:
    """The chat of a body that has all but its messages. TypeError or ValueError uses `names`."""
    wording = Wording(names, dialog.places)
    try:
        chat = parse_body({**body, "messages": dialog.messages}, defaults, chat=True)
    except (TypeError, ValueError) as e:
        raise ValueError(wording.of(str(e))) from None
    return Translated(chat, wording, form_field, continues)
