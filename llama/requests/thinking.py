"""The constraint of an answer that begins with reasoning: a budget, and a format that comes later.

In: the marks of the reasoning as token ids, a budget in tokens, and the constraint of the content.
Out: the tokens that may come next. A grammar cannot do this, since the reasoning of a model is any
text, and the format of an answer begins only after it.
"""

from collections.abc import Iterable

import numpy as np

from llama.engine.request import Constraint
from llama.sampling_params import ReasoningRule

_ALL = np.int32(-1)  # 32 tokens that are all allowed


class ReasoningConstraint:
    """Lets a model reason within a budget, and constrains its content afterwards.

    An answer reasons from its first token on if its prompt ends with the start mark, or if it
    begins with the start mark. It ends with the end mark. Until then every token is allowed but
    those that end an answer; once the budget is used up, the end mark alone is. Tokens after the
    mark, and all tokens of an answer that does not reason, are content.
    """

    def __init__(
        self,
        rule: ReasoningRule,
        stop_ids: Iterable[int],
        content: Constraint | None,
        *,
        is_open: bool,
    ) -> None:
        """Begin an answer.

        Args:
            rule: The marks and the budget.
            stop_ids: The tokens that end an answer.
            content: The constraint of the content, if there is one.
            is_open: Whether the prompt ends with the start mark.
        """
        assert rule.end_id is not None  # `SamplingParams.constrains_reasoning` is false without it
        self._rule = rule
        self._end_id = rule.end_id
        self._stop_ids = tuple(stop_ids)
        self._content = content
        self._is_open = is_open
        self._content_index: int | None = None  # index of the first content token in the output
        self._num_examined = 0  # output tokens that were searched for the end mark

    @property
    def failure(self) -> str | None:
        """Why the content cannot go on."""
        return None if self._content is None else self._content.failure

    def fill_allowed(
        self, tokens: list[int], first: int, drafts: list[int], bits: np.ndarray
    ) -> None:
        """Set the bits of the tokens that may follow; see `Constraint.fill_allowed`."""
        output = tokens[first:]
        content_index = self._content_begins(output)
        if content_index is not None:
            self._fill_content(tokens, first + content_index, drafts, bits)
            return
        if not output and not self._is_open:
            self._fill_first(tokens, drafts, bits)
            return
        self._fill_reasoning(tokens, len(output), drafts, bits)

    def draft(self, output: list[int], draft: list[int]) -> tuple[list[int], bool]:
        """Return tokens that must or may follow; see `Constraint.draft`."""
        content_index = self._content_begins(output)
        if content_index is not None:
            if self._content is None:
                return draft, False
            return self._content.draft(output[content_index:], draft)
        if not output and not self._is_open:
            if self._content is None or draft[:1] == [self._rule.start_id]:
                return draft, False
            # The start mark may come as well, so nothing must follow.
            return self._content.draft([], draft)[0], False
        remaining = self._remaining(len(output))
        if remaining <= 0:
            return [self._end_id], True
        allowed: list[int] = []
        for token in draft[:remaining]:
            if token in self._stop_ids:
                break
            allowed.append(token)
            if token == self._end_id:
                break
        return allowed, False

    def _content_begins(self, output: list[int]) -> int | None:
        """Return the index in the output at which the content begins, or None until then."""
        if self._content_index is None:
            if not self._is_open and output and output[0] != self._rule.start_id:
                self._content_index = 0
            elif self._end_id in output[self._num_examined :]:
                self._content_index = output.index(self._end_id, self._num_examined) + 1
            self._num_examined = len(output)
        return self._content_index

    def _remaining(self, num_tokens: int) -> int:
        """Return how many tokens of the budget are left behind `num_tokens` of the output."""
        if self._rule.budget is None:
            return 2**31
        num_marks = 0 if self._is_open else 1
        return self._rule.budget - (num_tokens - num_marks)

    def _fill_first(self, tokens: list[int], drafts: list[int], bits: np.ndarray) -> None:
        """Fill the rows of an answer that has not begun and may begin with the start mark."""
        start_id = self._rule.start_id
        if start_id is None:
            self._fill_content(tokens, len(tokens), drafts, bits)
            return
        may_reason = self._rule.budget != 0
        if drafts[:1] != [start_id]:
            self._fill_content(tokens, len(tokens), drafts, bits)
        else:
            self._fill_content(tokens, len(tokens), [], bits[:1])
            if may_reason:
                self._fill_reasoning([*tokens, start_id], 1, drafts[1:], bits[1:])
            else:
                bits[1:].fill(0)
        _set(bits[0], [start_id], may_reason)

    def _fill_reasoning(
        self, tokens: list[int], num_tokens: int, drafts: list[int], bits: np.ndarray
    ) -> None:
        """Fill the rows of an answer that reasons, up to the end mark among its drafts."""
        for index, row in enumerate(bits):
            if self._remaining(num_tokens + index) > 0:
                row.fill(_ALL)
                _set(row, self._stop_ids, False)
            else:
                row.fill(0)
                _set(row, [self._end_id], True)
            if index == len(drafts):
                return
            token = drafts[index]
            if not row[token // 32] >> token % 32 & 1:
                bits[index + 1 :].fill(0)
                return
            if token == self._end_id:
                known = [*tokens, *drafts[: index + 1]]
                rest = drafts[index + 1 :]
                self._fill_content(known, len(known), rest, bits[index + 1 :])
                return

    def _fill_content(
        self, tokens: list[int], first: int, drafts: list[int], bits: np.ndarray
    ) -> None:
        """Fill the rows of content whose first token has the index `first`."""
        if self._content is None:
            bits.fill(_ALL)
        else:
            self._content.fill_allowed(tokens, first, drafts, bits)


def _set(row: np.ndarray, ids: Iterable[int], value: bool) -> None:
    """Set or clear the bits of tokens in a row of (ceil(V / 32),) int32."""
    masks = row.view(np.uint32)
    for token in ids:
        bit = np.uint32(1 << token % 32)
        if value:
            masks[token // 32] |= bit
        else:
            masks[token // 32] &= ~bit
