"""The part of a chat that the model is sent: its system message and the last turns.

The input is all messages of a chat; the result is those that fit the context of the model. This
module must know neither the model nor the commands.
"""

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llama.prompts.messages import HEADER_ROLES

Dialog = tuple[Mapping[str, Any], ...]


def num_system(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of system messages at the beginning: 0 or 1."""
    return int(bool(messages) and HEADER_ROLES[messages[0]["role"]] == "system")


class ContextWindow:
    """The turns that are sent, and the number of older ones that are left out.

    Once the prompt leaves less than a quarter of the context to the answer, or less than the length
    of an answer if that is more, the oldest turns are left out until half of the context is free.
    Later prompts then begin with the same messages for several turns, so that these stay in the
    prefix cache.
    """

    def __init__(self, context: int | None) -> None:
        """Begin with no turns.

        Args:
            context: The maximum number of tokens of prompt and answer; None if it is unknown.
        """
        self.context = context
        self.num_left_out = 0  # turns that the last prompt left out
        self._num_skipped = 0  # messages of these turns

    def reset(self) -> None:
        """Send all turns again, because earlier ones have changed."""
        self.num_left_out = 0
        self._num_skipped = 0

    def of(self, messages: Sequence[Mapping[str, Any]]) -> Dialog:
        """Return the messages without those that the last prompt left out."""
        first = num_system(messages)
        return (*messages[:first], *messages[first + self._num_skipped :])

    def fit(
        self,
        dialog: Sequence[Mapping[str, Any]],
        answer_tokens: int,
        count: Callable[[Dialog], int],
    ) -> Dialog:
        """Return the messages of a dialog that the model is sent.

        Args:
            dialog: The messages, the last of which is a question or a result of a tool.
            answer_tokens: The length of an answer, or 0 if it has no limit.
            count: Counts the tokens of a prompt.
        """
        first = num_system(dialog)
        turns = [i for i in range(first, len(dialog)) if dialog[i]["role"] == "user"]
        turns[:1] = [first]  # What precedes the first question belongs to its turn.
        starts = [i for i in turns if i >= first + self._num_skipped] or turns[-1:]

        def tokens_from(start: int) -> int:
            return count((*dialog[:first], *dialog[start:]))

        start = starts[0]
        if self.context is not None:
            half = self.context // 2
            reserve = min(max(self.context // 4, answer_tokens), half)
            if tokens_from(start) > self.context - reserve:
                index = bisect.bisect_left(starts, True, key=lambda i: tokens_from(i) <= half)
                start = starts[min(index, len(starts) - 1)]
        self._num_skipped = start - first
        self.num_left_out = turns.index(start)
        return self.of(dialog)
