"""A draft model: a small model that guesses what a large one will choose, over the same pages.

In: sequences whose tokens are all known. Out: for each the ids that the small model chooses next,
with the sequence's own seed, positions and parameters: where both models find a token likely, both
choose it. How many follows from what a pass costs and from how many were right.

Its keys and values lie in a cache of its own, of the same pages and slots as the large model's. It
computes a text when it first guesses for it, then what was added; a page that is found by its hash
is computed again only if the small model has not had it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from llama.device import current
from llama.engine.sampler import sample
from llama.engine.sequence import Sequence
from llama.engine.speculative import Counts, StepCost, told_by_rank_zero
from llama.model.transformer import Transformer
from llama.ops.batch import Batch

_FIRST_RATE = 0.7  # of guesses that are right, before any was seen
_NEAR = 16  # tokens that the first pass computes beside the last one; more come before it
_AT_ONCE = 2048  # tokens of one pass
_TRY_EVERY = 64  # steps, where guesses do not pay


@dataclass
class SequenceDraft:
    """Of one sequence: how many of its tokens are in the cache, in which pages, and the guesses
    that came behind them (`fed`). guess: what was last handed out, when it had `num_known` tokens.
    """

    pages: object = None
    num_computed: int = 0
    num_kept: int = 0  # pages that others can use
    fed: list[int] = field(default_factory=list)
    guess: list[int] = field(default_factory=list)
    num_known: int = 0
    counts: Counts = field(default_factory=lambda: Counts(0, [0], 64))


class DraftLengths:
    """How many tokens are worth a guess, from measured times and from what was right."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._counts = Counts(8, [8 * _FIRST_RATE] * most, 1024)  # by depth
        self._costs: dict[int, StepCost] = {}  # by the binary digits of the number of sequences
        self._passes: dict[int, float] = {}  # seconds of one pass, likewise
        self._last = (StepCost(), 0)
        self._seconds = self._spent = 0.0
        self._num_idle = 0

    def note_verified(self, seq: Sequence, draft: SequenceDraft) -> None:
        """The tokens that came say which guesses were right."""
        for depth, (guess, token) in enumerate(
            zip(draft.guess[: self.most], seq.tokens[draft.num_known :], strict=False)
        ):
            self._counts.note(depth, guess == token)
            draft.counts.note(0, guess == token)
            if guess != token:
                break

    def note_passes(
        self, num_sequences: int, num_passes: int, seconds: float, spent: float
    ) -> None:
        """What the guesses of this step took: `seconds` for passes that follow one another, and
        `spent` with all that came before them."""
        self._spent = spent
        if num_passes:
            key, each = num_sequences.bit_length(), seconds / num_passes
            self._passes[key] = self._passes.get(key, each) * 0.9 + each * 0.1

    def choose(
        self, sequences: list[Sequence], drafts: list[SequenceDraft], seconds: float
    ) -> list[int]:
        """For each sequence; a guess is worth a row, and all of one depth a pass, where that gives
        more tokens for the time than the step does without it (Dinkelbach, 1967)."""
        cost, num_drafts = self._last
        if seconds > self._seconds:
            cost.note(max(seconds - self._seconds - self._spent, 1e-9), num_drafts)
        self._seconds, self._spent = seconds, 0.0
        key, lengths = len(sequences).bit_length(), [0] * len(sequences)
        cost = self._costs.setdefault(key, StepCost())
        if cost.plain:
            self._fill(lengths, sequences, drafts, cost, self._passes.get(key, cost.plain / 4))
            self._num_idle = 0 if any(lengths) else self._num_idle + 1
            if self._num_idle == _TRY_EVERY:
                self._num_idle, lengths = 0, [min(2, self.most)] * len(lengths)
        room = [max(seq.max_len - len(seq.tokens) - 1, 0) for seq in sequences]
        lengths = list(map(min, lengths, room))
        self._last = cost, sum(lengths)
        return lengths

    def _fill(
        self,
        lengths: list[int],
        sequences: list[Sequence],
        drafts: list[SequenceDraft],
        cost: StepCost,
        a_pass: float,
    ) -> None:
        of_row, tokens, spent = cost.of_draft(len(sequences)), float(len(sequences)), cost.plain
        rate, chances = cost.rate or tokens / cost.plain, [1.0] * len(sequences)
        for depth in range(self.most):
            usual = self._counts.right[depth] / self._counts.tried[depth]
            for i, draft in enumerate(drafts):
                own = draft.counts
                chances[i] *= (own.right[0] + 8 * usual) / (own.tried[0] + 8)
            rows = [i for i, n in enumerate(lengths) if n == depth and chances[i] > rate * of_row]
            if sum(chances[i] - rate * of_row for i in rows) <= rate * a_pass:
                break
            for i in rows:
                lengths[i] += 1
                tokens += chances[i]
            spent += a_pass + len(rows) * of_row
        cost.rate = tokens / spent


class ModelDrafter:
    """A `Drafter` that has a model, with a cache of `num_pages` pages of `page_size` slots.

    most: guesses of a sequence in a step. reserve: finds room for so many more tokens in the pages
    of a sequence, and says for how many it did. On several ranks each has its share of the model,
    and rank 0 says how much is guessed, by its clock.
    """

    def __init__(
        self,
        model: Transformer,
        num_pages: int,
        page_size: int,
        most: int,
        reserve: Callable[[Sequence, int], int],
    ) -> None:
        self._model, self._page_size, self._reserve = model, page_size, reserve
        self._cache = model.new_kv_cache(num_pages, page_size)
        self._lengths = DraftLengths(most)
        self._drafts: dict[Sequence, SequenceDraft] = {}
        self._hashes: dict[int, bytes] = {}  # of pages that this model has computed whole

    def draft(self, sequences: list[Sequence], seconds: float) -> list[list[int]]:
        """See `Drafter`."""
        began, parallel = time.perf_counter(), self._model.parallel
        if len(self._drafts) > 2 * len(sequences) + 8:
            self._drafts = {seq: x for seq, x in self._drafts.items() if not seq.finished}
        drafts = [self._drafts.setdefault(seq, SequenceDraft()) for seq in sequences]
        for seq, draft in zip(sequences, drafts, strict=True):
            self._lengths.note_verified(seq, draft)
        lengths = self._lengths.choose(sequences, drafts, seconds) if parallel.rank == 0 else []
        lengths = told_by_rank_zero(parallel, lengths)
        lengths = [self._reserve(*pair) for pair in zip(sequences, lengths, strict=True)]
        with torch.inference_mode(), current(self._cache.device):
            guesses = self._guess(sequences, drafts, lengths, began)
        for i, seq in enumerate(sequences):
            is_stop = [token in seq.stop_ids for token in guesses[i]]
            guesses[i] = guesses[i][: is_stop.index(True) if any(is_stop) else None]
            if seq.constraint is not None:
                guesses[i] = seq.constraint.draft(seq.output, guesses[i])[0][: self._lengths.most]
        if any(seq.is_constrained for seq in sequences):  # the constraint may be rank 0's alone
            guesses = told_by_rank_zero(parallel, guesses)
        for seq, draft, guess in zip(sequences, drafts, guesses, strict=True):
            draft.guess, draft.num_known = guess, len(seq.tokens)
        return guesses

    def _guess(
        self,
        sequences: list[Sequence],
        drafts: list[SequenceDraft],
        lengths: list[int],
        began: float,
    ) -> list[list[int]]:
        """So many ids for each."""
        guesses: list[list[int]] = [[] for _ in sequences]
        num_passes = max(lengths)
        for seq, draft, length in zip(sequences, drafts, lengths, strict=True):
            if length:
                self._catch_up(seq, draft)
        ready = time.perf_counter()
        for depth in range(num_passes):
            rows = [i for i, length in enumerate(lengths) if length > depth]
            pieces = [
                (
                    sequences[i],
                    drafts[i].num_computed,
                    sequences[i].tokens[drafts[i].num_computed :],
                )
                if depth == 0
                else (sequences[i], len(sequences[i].tokens) + depth - 1, guesses[i][-1:])
                for i in rows
            ]
            order = sorted(range(len(rows)), key=lambda at: len(pieces[at][2]) > 1)
            rows, hidden = [rows[at] for at in order], self._run([pieces[at] for at in order])
            views = [sequences[i].ahead(guesses[i]) for i in rows]
            for i, token in zip(rows, self._ids(hidden, views), strict=True):
                guesses[i].append(token)
        for seq, draft, guess in zip(sequences, drafts, guesses, strict=True):
            if guess:
                draft.num_computed, draft.fed = len(seq.tokens), guess[:-1]
        ended = time.perf_counter()
        self._lengths.note_passes(len(sequences), num_passes, ended - ready, ended - began)
        return guesses

    def _ids(self, hidden: Tensor, views: list[Sequence]) -> list[int]:
        """The same on every rank, also between unlike machines."""
        ids, parallel = (
            sample(self._model.logits(hidden), views).ids.clamp(min=0),
            self._model.parallel,
        )
        return (ids if parallel.shares_memory_of(ids) else parallel.broadcast(ids)).tolist()

    def _catch_up(self, seq: Sequence, draft: SequenceDraft) -> None:
        """Find out what of a sequence is in the cache, and compute the rest but for its end."""
        size = self._page_size
        if draft.pages is not seq.pages:  # new, or preempted since
            draft.pages, draft.num_computed, draft.fed = seq.pages, 0, []
            for page, value in zip(seq.pages, seq.page_hashes, strict=False):
                if self._hashes.get(page) != value:
                    break
                draft.num_computed += size
            draft.num_computed = min(draft.num_computed, len(seq.tokens) - 1)
            draft.num_kept = draft.num_computed // size
        for guess, token in zip(draft.fed, seq.tokens[draft.num_computed :], strict=False):
            if guess != token:
                break
            draft.num_computed += 1
        draft.num_computed = min(draft.num_computed, len(seq.tokens) - 1)
        while len(seq.tokens) - draft.num_computed > _NEAR:
            start = draft.num_computed
            piece = seq.tokens[start : min(start + _AT_ONCE, len(seq.tokens) - 1)]
            self._run([(seq, start, piece)])
            draft.num_computed += len(piece)
        whole = min(draft.num_computed // size, len(seq.page_hashes))
        for i in range(draft.num_kept, whole):
            self._hashes[seq.pages[i]] = seq.page_hashes[i]
        draft.num_kept = max(draft.num_kept, whole)

    def _run(self, pieces: list[tuple[Sequence, int, list[int]]]) -> Tensor:
        """The hidden states (B, E) behind tokens of sequences, each with the place of its first;
        single tokens come first."""
        for seq, start, tokens in pieces:
            for at in range(
                start // self._page_size, (start + len(tokens) - 1) // self._page_size + 1
            ):
                self._hashes.pop(seq.pages[at], None)
        counts = [len(tokens) for _, _, tokens in pieces]
        ids, batch = Batch.pack(
            [token for _, _, tokens in pieces for token in tokens],
            [start for _, start, _ in pieces],
            counts,
            [seq.pages for seq, _, _ in pieces],
            self._page_size,
            [end - 1 for end in accumulate(counts)],
            self._cache.device,
        )
        return self._model.hidden_states(ids, batch, self._cache)
