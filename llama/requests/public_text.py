"""A text that is no secret, and how far prompts begin with it.

In: the text of a system prompt, and how the model writes chats. Out: the number of leading tokens
of a prompt that the text alone decides. Their pages are shared by requests that share nothing else.
"""

import datetime

from llama.prompts.dialog_format import DialogFormat
from llama.tokenizer import Tokenizer


class PublicText:
    """A text with which prompts of any tenant may begin: a chat's system message, or a text."""

    def __init__(self, text: str, tokenizer: Tokenizer, dialog_format: DialogFormat) -> None:
        """Encode the text.

        Args:
            text: The text.
            tokenizer: The tokenizer of the model.
            dialog_format: The format of its dialogs.
        """
        self._text = text
        self._tokenizer = tokenizer
        self._format = dialog_format
        self._made = (datetime.date.today(), self._beginnings())

    def count(self, ids: list[int]) -> int:
        """Return how many leading ids are those of a prompt that begins with the text."""
        today = datetime.date.today()
        if self._made[0] != today:  # Templates may write the date of the day.
            self._made = (today, self._beginnings())
        return max(_num_common(ids, beginning) for beginning in self._made[1])

    @property
    def num_tokens(self) -> int:
        """The largest number that `count` returns."""
        return max(map(len, self._made[1]))

    def _beginnings(self) -> list[list[int]]:
        """Return what prompts begin with: a completed text, and a chat with a system message."""
        completed = self._tokenizer.encode(self._text, bos=True, eos=False)
        first, second = (self._chat(question) for question in ("a", "b"))
        return [completed, first[: _num_common(first, second)]]

    def _chat(self, question: str) -> list[int]:
        """Return the ids of a chat that has the text; none where the model has no such chats."""
        roles = {"system": self._text, "user": question}
        try:
            return self._format.encode([{"role": x, "content": text} for x, text in roles.items()])
        except ValueError:
            return []


def _num_common(first: list[int], second: list[int]) -> int:
    """Return how many leading ids two lists have in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
