"""Drafts by look-up: what followed an earlier occurrence of a text's end is proposed again.

In: sequences. Out: drafts, which need no pass of any model (Saxena, 2023, prompt look-up decoding;
Oliaro et al., 2024, suffix decoding, for the texts of other requests). The tokens that a constraint
forces are drafts as well.
"""

from collections import OrderedDict
from dataclasses import dataclass

from llama.engine.request import SequenceSpec
from llama.engine.sequence import SequenceState
from llama.options.speculation.drafter import Drafter, DraftState
from llama.options.speculation.texts import MAX_MATCH, Lookup, Text
from llama.ranks.parallel import Parallel

_SHARED_RUN = 4  # tokens by which occurrences in texts of other requests are indexed
_MAX_STORED = 1 << 16  # tokens after which a text of other requests is full; two need 30 MB
_MAX_TOTAL = 4 * _MAX_STORED  # tokens of all roots after which the texts of one root are dropped
_MAX_ROOTS = 256  # roots whose texts are stored
# Kinds of draft tokens: 1 to 5 follow matches of 1, 2, 4, 8 and 16 tokens.
_FORCED = 6  # the kind of tokens that a constraint forces
_FIRST_RATES = (0.0, 0.2, 0.35, 0.5, 0.7, 0.8, 0.9)  # rates of each kind before any measurement


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
            matches = [min(lookup.length + depth, MAX_MATCH) for depth in depths]
            state.kinds = [match.bit_length() for match in matches]
        return [state.rates[kind] for kind in state.kinds]
