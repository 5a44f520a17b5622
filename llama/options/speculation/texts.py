"""Texts of token ids that find earlier occurrences of their ends.

In: token ids. Out: where the end of a text occurred before, and what followed there. Nothing here
knows a sequence or a step.
"""

import copy
from collections.abc import Iterable, Sequence

_MAX_CANDIDATES = 16  # latest occurrences that are compared with the end of a text
MAX_MATCH = 16  # tokens compared per occurrence
_PREDICTION_MATCH = 8  # a prediction begins like the continuation of a match of this length


class Text:
    """Token ids to which more can be appended, indexed by runs of `run` tokens.

    The index finds the positions at which a run ended, the latest one first.
    """

    def __init__(self, run: int) -> None:
        self.ids: list[int] = []
        self._run = run
        # The position where a run ended last, by its hash; and for each position, the one before it
        # where the same run ended.
        self._last: dict[int, int] = {}
        self._before: list[int] = []

    def append(self, token: int) -> None:
        """Append a token, and index the run that ends with it."""
        self.ids.append(token)
        run = self._last_run(self.ids)
        self._before.append(self._last.get(run, -1))
        self._last[run] = len(self.ids) - 1

    def _last_run(self, text: list[int]) -> int:
        """Return the key of the run that a text ends with."""
        return text[-1] if self._run == 1 else hash(tuple(text[-self._run :]))

    def find(self, text: list[int]) -> tuple[int, int]:
        """Find the longest match with the end of a text, which may be `ids` itself.

        Only the latest occurrences are compared.

        Returns:
            The position after the match, and the length of the match, which is 0 if there is none.
        """
        ids = self.ids
        source = -1
        match_length = 0
        end = self._before[-1] if text is ids else self._last.get(self._last_run(text), -1)
        for _ in range(_MAX_CANDIDATES):
            if end < 0 or match_length == MAX_MATCH:
                break
            length = 0
            max_length = min(MAX_MATCH, end + 1, len(text))
            while length < max_length and ids[end - length] == text[-1 - length]:
                length += 1
            if length > match_length:
                source = end + 1
                match_length = length
            end = self._before[end]
        return source, match_length


class Lookup(Text):
    """A text that finds an earlier occurrence of its end, in itself or in other texts.

    As long as new tokens are those that follow the occurrence, the next draft continues there.

    Attributes:
        source: The position of the token that is expected next, or -1 if no occurrence is known.
        length: The number of tokens before `source` that equal the end of this text.
    """

    def __init__(
        self,
        prompt: Sequence[int] = (),
        prediction: Sequence[int] = (),
        others: Sequence[Text] = (),
    ) -> None:
        super().__init__(1)
        self.length = 0
        self.source = -1
        self._source_ids = self.ids  # the ids of the text that `source` is a position of
        self._others = others
        self._index([*prompt, *prediction])
        self._search()
        if prediction:
            self._source_ids = self.ids
            self.source = len(prompt)
            self.length = _PREDICTION_MATCH

    def _index(self, tokens: list[int]) -> None:
        """Append all tokens, in a fifth of the time that `append` would take for each of them."""
        last = self._last
        for position, token in enumerate(tokens, len(self.ids)):
            self._before.append(last.get(token, -1))
            last[token] = position
        self.ids += tokens

    def fork(self) -> "Lookup":
        """Return a copy that can be extended independently; that is faster than another index."""
        twin = copy.copy(self)
        twin.ids = self.ids.copy()
        twin._last = self._last.copy()
        twin._before = self._before.copy()
        if self._source_ids is self.ids:
            twin._source_ids = twin.ids
        return twin

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens, and find an occurrence of their end if they were not the expected ones."""
        for token in tokens:
            if self.source >= 0 and self._source_ids[self.source] == token:
                self.source += 1
                self.length += 1
            else:
                self.source = -1
                self.length = 0
            self.append(token)
        self._search()

    def _search(self) -> None:
        """Find an occurrence of the end of the text, unless one is known."""
        if self.source >= 0 or not self.ids:
            return
        for text in (self, *self._others):
            source, length = text.find(self.ids)
            if length > self.length:
                self._source_ids = text.ids
                self.source = source
                self.length = length

    def draft(self, max_tokens: int) -> list[int]:
        """Return the tokens that followed the occurrence.

        A draft that reaches the end of the text repeats itself; one from another request's text
        ends where that text ended, which -1 marks.
        """
        if self.source < 0:
            return []
        followed = self._source_ids[self.source : self.source + max_tokens]
        draft = (followed * max_tokens)[:max_tokens]
        if -1 in draft:
            return draft[: draft.index(-1)]
        return draft


def count_predicted(prediction: Sequence[int], outputs: Iterable[list[int]]) -> tuple[int, int]:
    """Count the tokens of a prediction that look-up expected and an output had, and the others.

    Args:
        prediction: The prediction, which is indexed once.
        outputs: The outputs that have this prediction.

    Returns:
        The two numbers, each summed over all outputs.
    """
    indexed = Lookup(prediction=prediction)
    num_accepted = 0
    num_rejected = 0
    for output in outputs:
        lookup = indexed.fork()
        predicted = set[int]()
        for token in output:
            source = lookup.source
            if 0 <= source < len(prediction) and lookup.ids[source] == token:
                predicted.add(source)
            lookup.extend([token])
        num_accepted += len(predicted)
        num_rejected += len(prediction) - len(predicted)
    return num_accepted, num_rejected
