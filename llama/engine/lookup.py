"""Look-up: where the end of a text occurred before, what followed there is guessed to follow again.

In: sequences. Out: drafts, which cost no pass of any model (Saxena, 2023, prompt look-up decoding;
Oliaro et al., 2024, suffix decoding, for what other requests had). So do the tokens that a
constraint forces.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llama.engine.sequence import SequenceState
from llama.engine.speculative import Drafter, Guess
from llama.ranks.collectives import ModelParallel

_PLACES = 16  # where a token occurred, the latest ones, that are compared
_LONGEST = 16  # tokens of them that are compared
_SHARED = 4  # tokens by which texts of other requests are found
_KEPT = 1 << 16  # tokens of such texts, twice: 30 MB
_PREDICTED = 8  # a prediction begins as what follows a match of so many
_FORCED = 6  # of a constraint; 1 to 5 are matches of 1, 2, 4, 8 and 16 tokens
_FIRST_RATES = (0.0, 0.2, 0.35, 0.5, 0.7, 0.8, 0.9)  # of each kind, before any was seen


class Text:
    """Ids, of which more can come, and where each run of so many tokens in it ended, the latest
    place first."""

    def __init__(self, run: int) -> None:
        self.ids: list[int] = []
        self._run = run
        self._last: dict[int, int] = {}  # by the hash of a run
        self._before: list[int] = []

    def append(self, token: int) -> None:
        self.ids.append(token)
        run = hash(tuple(self.ids[-self._run :]))
        self._before.append(self._last.get(run, -1))
        self._last[run] = len(self.ids) - 1

    def find(self, text: list[int]) -> tuple[int, int]:
        """The place behind the longest match with the end of a text, which may be this one, and how
        long that is; 0 if there is none. Only the latest places are compared."""
        ids, found, longest = self.ids, -1, 0
        run = hash(tuple(text[-self._run :]))
        place = self._before[-1] if text is ids else self._last.get(run, -1)
        for _ in range(_PLACES):
            if place < 0 or longest == _LONGEST:
                break
            length, most = 0, min(_LONGEST, place + 1, len(text))
            while length < most and ids[place - length] == text[-1 - length]:
                length += 1
            if length > longest:
                found, longest = place + 1, length
            place = self._before[place]
        return found, longest


class Lookup(Text):
    """A prompt and what came behind it, and where the end of that occurred in it before, or in
    others. As long as the guess of the place that was found comes true, the next guess is what
    follows there. prediction: what will come, as far as one can tell."""

    def __init__(
        self,
        prompt: Sequence[int] = (),
        prediction: Sequence[int] = (),
        others: Sequence[Text] = (),
    ) -> None:
        super().__init__(1)
        self.length = 0  # tokens before the source that are those at the end of the text
        self.source = -1  # the place of the token that is expected next; -1: there is none
        self._among, self._others = self.ids, others  # _among: where that place is
        self.extend([*prompt, *prediction])
        if prediction:
            self._among, self.source, self.length = self.ids, len(prompt), _PREDICTED

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens, and find where their end occurred."""
        for token in tokens:
            is_right = self.source >= 0 and self._among[self.source] == token
            self.source, self.length = (self.source + 1, self.length + 1) if is_right else (-1, 0)
            self.append(token)
        for text in (self, *self._others) if self.source < 0 and self.ids else ():
            source, length = text.find(self.ids)
            if length > self.length:
                self._among, self.source, self.length = text.ids, source, length

    def guess(self, most: int) -> list[int]:
        """What followed; where that reaches the end of the text, it repeats itself."""
        if self.source < 0:
            return []
        guess = (self._among[self.source : self.source + most] * most)[:most]
        return guess[: guess.index(-1)] if -1 in guess else guess  # where another text ended


def count_predicted(prediction: Sequence[int], output: list[int]) -> tuple[int, int]:
    """How many tokens of a prediction an output had where look-up expected them; and the rest."""
    lookup, came = Lookup(prediction=prediction), set[int]()
    for token in output:
        place = lookup.source
        if 0 <= place < len(prediction) and lookup.ids[place] == token:
            came.add(place)
        lookup.extend([token])
    return len(came), len(prediction) - len(came)


@dataclass
class _State(Guess):
    """lookup: made when it can gain. num_idle: steps in which the sequence got no draft."""

    lookup: Lookup | None = None
    num_idle: int = 0


class Speculator(Drafter):
    """Drafts from what a sequence has, and what its constraint forces.

    is_shared: what requests had that have ended is looked up, too; of that two texts are kept, and
    where one is full, the older one goes.
    """

    def __init__(self, most: int, parallel: ModelParallel, *, is_shared: bool = False) -> None:
        super().__init__(most, parallel, _FIRST_RATES)
        self._ended = [Text(_SHARED), Text(_SHARED)] if is_shared else []

    def _draft(self, guesses: list[_State], seconds: float) -> list[list[int]]:
        drafts = list[list[int]]()
        if self.parallel.is_leader:
            rates = [self._look(state) for state in guesses]
            for state, length in zip(guesses, self.choose(rates, seconds), strict=True):
                state.num_idle = 0 if length else state.num_idle + 1
                drafts.append(state.ids[:length])
        return self.told_by_rank_zero(drafts)

    def _begin(self, seq: SequenceState) -> _State:
        """Of those that have ended, the texts may be kept."""
        for ended in [x for x in self._guesses if x.finished]:
            del self._guesses[ended]
            if self._ended and len(self._ended[0].ids) > _KEPT:
                self._ended[:] = Text(_SHARED), self._ended[0]
            for token in [*ended.tokens[-_KEPT:], -1] if self._ended else ():
                self._ended[0].append(token)
        self._guesses[seq] = state = _State(seq, [*self.rates], seq.num_prompt)
        return state

    def _look(self, state: _State) -> list[float]:
        """Guess what comes next -> how likely each token of it is right."""
        seq, new = state.seq, state.seq.tokens[state.num_known :]
        is_idle = len(new) < min(state.num_idle // 8, 8) and seq.constraint is None
        if is_idle or len(seq.tokens) + 1 >= seq.spec.max_len:
            return []
        if (lookup := state.lookup) is None:
            prompt = seq.tokens[: seq.num_prompt]
            lookup = state.lookup = Lookup(prompt, seq.spec.prediction, self._ended)
        self.note(state)
        lookup.extend(new)
        ids, length, is_forced = lookup.guess(self.most), lookup.length, False
        if seq.constraint is not None:
            ids, is_forced = seq.constraint.draft(seq.output, ids)
        state.ids = ids[: self.most]
        lengths = [min(length + depth, _LONGEST) for depth in range(len(state.ids))]
        state.kinds = [_FORCED if is_forced else x.bit_length() for x in lengths]
        return [state.rates[kind] for kind in state.kinds]
