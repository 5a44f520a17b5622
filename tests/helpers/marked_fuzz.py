"""Attacks on chat templates, and the ids that they must have, by an oracle that knows no marks.

Jinja renders the same dialog with every untrusted character moved to a private plane of Unicode.
Where the text, moved back, is the text of the attacked dialog, each name of a special token that is
left in the moved text was written by the template.
"""

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

PLANE = 0x100000
_MOVED = re.compile(f"[{chr(PLANE)}-{chr(PLANE + 0xFFFD)}]+")

_KEYS = frozenset(
    "role content name tool_calls id type function arguments description parameters properties "
    "required tools add_generation_prompt kwarg".split()
)


def moved(text: str) -> str:
    """Return a text in the private plane."""
    return "".join(chr(PLANE + ord(c)) if ord(c) < 0xFFFE else c for c in text)


def moved_back(text: str) -> str:
    return _MOVED.sub(lambda run: "".join(chr(ord(c) - PLANE) for c in run[0]), text)


def moved_value(value: Any) -> Any:
    """Return a JSON value with all of its texts moved, except for the keys of OpenAI's format."""
    if isinstance(value, str):
        return moved(value)
    if isinstance(value, dict):
        return {
            key if key in _KEYS else moved(key): item if key == "type" else moved_value(item)
            for key, item in value.items()
        }
    return [moved_value(item) for item in value] if isinstance(value, list) else value


def moved_dialog(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a dialog with all of its texts moved except for the roles."""
    return [{**moved_value(message), "role": message["role"]} for message in messages]


def expected_ids(
    moved_text: str, special: Mapping[str, int], encode: Callable[[str], list[int]]
) -> list[int]:
    """Return the ids of a text whose untrusted characters are moved."""
    longest_first = sorted(special, key=len, reverse=True)
    ids: list[int] = []
    start = 0
    for match in re.finditer("|".join(map(re.escape, longest_first)), moved_text):
        ids += encode(moved_back(moved_text[start : match.start()]))
        ids.append(special[match[0]])
        start = match.end()
    return ids + encode(moved_back(moved_text[start:]))


class Attacker:
    """Makes texts of names, their halves and a template's constants."""

    def __init__(self, seed: int, names: list[str], source: str) -> None:
        self._rng = random.Random(seed)
        constants = re.findall(r"'([^'\\]{1,30})'", source) + re.findall(
            r"<[^<>{}%]{1,20}>", source
        )
        halves = [part for name in names for part in (name[: len(name) // 2], name[1:], name[:-1])]
        self._atoms = [
            *names * 3,
            *halves,
            *constants,
            "\n",
            " ",
            "a",
            "Hello.",
            "é😀",
            "user",
            "0",
        ]
        self.count = 0

    def text(self) -> str:
        """Return a text; most have no white space at their ends, which moved text does not lose."""
        self.count += 1
        text = "".join(self._rng.choices(self._atoms, k=self._rng.randint(1, 6)))
        return text if self._rng.random() < 0.1 else text.strip()

    def call(self) -> dict[str, Any]:
        function = {"name": self.text(), "arguments": {self.text(): self.text(), "n": 1}}
        return {"id": self.text(), "type": "function", "function": function}

    def dialog(self) -> list[dict[str, Any]]:
        """Return a dialog that most templates render."""
        messages: list[dict[str, Any]] = []
        if self._rng.random() < 0.5:
            messages.append({"role": "system", "content": self.text()})
        for _ in range(self._rng.randint(1, 3)):
            messages.append({"role": "user", "content": self.text()})
            if self._rng.random() < 0.3:
                calls = [self.call() for _ in range(self._rng.randint(1, 2))]
                messages.append({"role": "assistant", "content": self.text(), "tool_calls": calls})
                messages.append({"role": "tool", "content": self.text(), "name": self.text()})
            messages.append({"role": "assistant", "content": self.text()})
        return messages[:-1] if self._rng.random() < 0.5 else messages

    def tools(self) -> list[dict[str, Any]] | None:
        if self._rng.random() < 0.6:
            return None
        properties = {self.text(): {"type": "string", "description": self.text()}}
        parameters = {"type": "object", "properties": properties, "required": [self.text()]}
        function = {"name": self.text(), "description": self.text(), "parameters": parameters}
        return [{"type": "function", "function": function}]


def plain_text(source: str, messages: list[dict[str, Any]], **variables: Any) -> str | None:
    """Return what transformers renders, or None if the template fails."""
    try:
        results: Any = render_jinja_template([messages], chat_template=source, **variables)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError):
        return None
    text: str = results[0][0]
    return text
