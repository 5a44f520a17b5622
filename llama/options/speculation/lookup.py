"""Drafts by look-up: what followed an earlier occurrence of a text's end is proposed again.

In: sequences. Out: drafts, which need no pass of any model (Saxena, 2023, prompt look-up decoding;
Oliaro et al., 2024, suffix decoding, for the texts of other requests). The tokens that a constraint
forces are drafts as well.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llama.engine.request import SequenceSpec
from llama.engine.sequence import SequenceState
from llama.options.speculation.drafter import Drafter, DraftState
from llama.ranks.parallel import Parallel

_MAX_CANDIDATES = 16  # latest occurrences that are compared with the end of a text
_MAX_MATCH = 16  # tokens compared per occurrence
_SHARED_RUN = 4  # tokens by which occurrences in texts of other requests are indexed
_MAX_STORED = 1 << 16  # tokens after which a text of other requests is full; two need 30 MB
_MAX_TOTAL = 4 * _MAX_STORED  # tokens of all roots after which the texts of one root are dropped
_MAX_ROOTS = 256  # roots whose texts are stored
_PREDICTION_MATCH = 8  # a prediction begins like the continuation of a match of this length
# Kinds of draft tokens: 1 to 5 follow matches of 1, 2, 4, 8 and 16 tokens.
_FORCED = 6  # the kind of tokens that a constraint forces
_FIRST_RATES = (0.0, 0.2, 0.35, 0.5, 0.7, 0.8, 0.9)  # rates of each kind before any measurement


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
            The position behind the match, and the length of the match, which is 0 if there is none.
        """
        ids = self.ids
        source = -1
        match_length = 0
        end = self._before[-1] if text is ids else self._last.get(self._last_run(text), -1)
        for _ in range(_MAX_CANDIDATES):
            if end < 0 or match_length == _MAX_MATCH:
                break
            length = 0
            max_length = min(_MAX_MATCH, end + 1, len(text))
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


class EndedTexts:
    """The texts of finished sequences, by the root of their prefix hashes.

    A sequence is drafted for from the texts of its own root alone, so that response times reveal
    nothing about other tenants. Each root has two texts; when the newer one is full, the older one
    is dropped. The roots that were used least recently are dropped with their texts.
    """

    def __init__(self) -> None:
        self._by_root: OrderedDict[bytes, list[Text]] = OrderedDict()

    def of(self, root: bytes) -> list[Text]:
        """Return the texts of a root, the newer one first; later texts appear in the same list."""
        if root not in self._by_root:
            self._by_root[root] = [Text(_SHARED_RUN), Text(_SHARED_RUN)]
        self._by_root.move_to_end(root)
        while len(self._by_root) > 1 and self._is_full():
            self._by_root.popitem(last=False)
        return self._by_root[root]

    def store(self, ended: SequenceState) -> None:
        """Append the tokens of a finished sequence to the newer text of its root."""
        texts = self.of(ended.spec.prefix_root)
        if len(texts[0].ids) > _MAX_STORED:
            # The list is changed in place: the look-ups of running sequences refer to it.
            texts[:] = [Text(_SHARED_RUN), texts[0]]
        for token in [*ended.tokens[-_MAX_STORED:], -1]:
            texts[0].append(token)

    def _is_full(self) -> bool:
        """Return whether there are more roots, or more tokens of them, than are stored."""
        num_tokens = sum(len(text.ids) for texts in self._by_root.values() for text in texts)
        return len(self._by_root) > _MAX_ROOTS or num_tokens > _MAX_TOTAL


@dataclass
class _LookupState(DraftState):
    """The state of one sequence.

    Attributes:
        lookup: The text of the sequence, made at the first step that may use it.
        num_idle: The number of steps since the sequence last got a draft.
    """

    lookup: Lookup | None = None
    num_idle: int = 0


class Speculator(Drafter):
    """A drafter that looks drafts up in a sequence, and proposes what its constraint forces.

    With `is_shared`, finished sequences with the same prefix root are searched as well.
    """

    def __init__(self, max_drafts: int, parallel: Parallel, is_shared: bool = False) -> None:
        super().__init__(max_drafts, parallel, _FIRST_RATES)
        self._ended_texts = EndedTexts() if is_shared else None
        # The last text that was indexed, and the request that it belongs to. The answers of a
        # request have the same prompt and prediction, which are indexed once for all of them.
        self._indexed: tuple[SequenceSpec, Lookup] | None = None

    def _draft(self, states: list[_LookupState], seconds: float) -> list[list[int]]:
        drafts = list[list[int]]()
        if self.parallel.is_leader:
            rates = [self._look_up(state) for state in states]
            lengths = self.choose(rates, seconds)
            for state, length in zip(states, lengths, strict=True):
                state.num_idle = 0 if length else state.num_idle + 1
                drafts.append(state.ids[:length])
        return self.from_rank_zero(drafts)

    def _begin(self, seq: SequenceState) -> _LookupState:
        for ended in [known for known in self._states if known.finished]:
            del self._states[ended]
            if self._ended_texts is not None:
                self._ended_texts.store(ended)
        state = _LookupState(seq, [*self.rates], seq.num_prompt)
        self._states[seq] = state
        return state

    def _lookup_of(self, spec: SequenceSpec) -> Lookup:
        """Return the text of a sequence at its beginning: its prompt and its prediction."""
        if self._indexed is not None:
            indexed, lookup = self._indexed
            if indexed.tokens is spec.tokens and indexed.prediction is spec.prediction:
                return lookup.fork()
        ended = self._ended_texts
        others = [] if ended is None else ended.of(spec.prefix_root)
        lookup = Lookup(spec.tokens, spec.prediction, others)
        self._indexed = spec, lookup
        return lookup.fork()

    def _look_up(self, state: _LookupState) -> list[float]:
        """Set the draft of a sequence, and return the rate of each of its tokens.

        A sequence that got no draft for long is looked at only after several new tokens.
        """
        seq = state.seq
        new_tokens = seq.tokens[state.num_known :]
        is_idle = len(new_tokens) < min(state.num_idle // 8, 8) and seq.constraint is None
        if is_idle or len(seq.tokens) + 1 >= seq.spec.max_len:
            return []
        lookup = state.lookup
        if lookup is None:
            lookup = self._lookup_of(seq.spec)
            state.lookup = lookup
        self.note(state)
        lookup.extend(new_tokens)
        ids = lookup.draft(self.max_drafts)
        is_forced = False
        if seq.constraint is not None:
            ids, is_forced = seq.constraint.draft(seq.output, ids)
        state.ids = ids[: self.max_drafts]
        depths = range(len(state.ids))
        if is_forced:
            state.kinds = [_FORCED for _ in depths]
        else:
            matches = [min(lookup.length + depth, _MAX_MATCH) for depth in depths]
            state.kinds = [match.bit_length() for match in matches]
        return [state.rates[kind] for kind in state.kinds]
