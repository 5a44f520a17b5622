"""A draft model: a small model that guesses what a large one will choose, over the same pages.

In: sequences whose tokens are all known. Out: for each the ids that the small model chooses next,
with the sequence's own seed, positions and parameters: where both models find a token likely, both
choose it. How many follows from what a pass costs and from how many were right.

Its keys and values lie in a cache of its own, of the same pages and slots as the large model's. It
computes a text when it first guesses for it, then what was added; a page that is found by its hash
is computed again only if the small model has not had it.
"""

import time
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, takewhile

from llama.engine.rows import SAMPLE, VERIFY, Scheduled, Step
from llama.engine.runner import ModelRunner
from llama.engine.scheduler import Scheduler
from llama.engine.sequence import SequenceState
from llama.engine.speculative import Drafter, Guess

_FIRST_RATE = 0.7  # of guesses that are right, before any was seen
_NEAR = 16  # tokens that the first pass computes beside the last one; more come before it
_AT_ONCE = 2048  # tokens of one pass
_TRY_EVERY = 64  # steps, where guesses do not pay


@dataclass
class SequenceDraft(Guess):
    """What the small model knows of a sequence: how many tokens of it are in the cache, and in
    which pages. The kind of a guess is its depth."""

    pages: object = None
    num_computed: int = 0
    num_kept: int = 0  # pages that other sequences can use


class ModelDrafter(Drafter):
    """Drafts of a model, whose runner has a cache of the scheduler's pages, in which it finds room.
    On several ranks each has its share of the model."""

    def __init__(self, most: int, runner: ModelRunner, scheduler: Scheduler) -> None:
        super().__init__(most, runner.model.parallel, [_FIRST_RATE] * most)
        assert runner.num_pages >= scheduler.pool.num_pages
        runner.async_scheduling = False  # a guess follows the one before it
        self._runner, self._reserve = runner, scheduler.reserve
        self._hashes: dict[int, bytes] = {}  # of pages that this model has computed whole
        self._num_idle = 0  # steps in which nothing was guessed

    def _draft(self, guesses: list[SequenceDraft], seconds: float) -> list[list[int]]:
        for draft in guesses:  # what was computed of tokens that did not come is computed again
            right = draft.num_known + self.note(draft)
            draft.num_computed, draft.ids = min(draft.num_computed, right), []
        rates = [x.rates[: max(x.seq.spec.max_len - len(x.seq.tokens) - 1, 0)] for x in guesses]
        least = 2 if self._num_idle >= _TRY_EVERY else 0
        lengths = self.told_by_rank_zero(self.choose(rates, seconds, least))
        self._num_idle = 0 if any(lengths) else self._num_idle + 1
        lengths = [self._reserve(x.seq, n) for x, n in zip(guesses, lengths, strict=True)]
        self._guess(guesses, lengths)
        ruled = [x for x in guesses if x.seq.spec.is_constrained and x.ids]
        if ruled:  # the constraint may be rank 0's alone
            allowed = self.told_by_rank_zero([self._allowed(x.seq, x.ids) for x in ruled])
            for draft, ids in zip(ruled, allowed, strict=True):
                draft.num_computed, draft.ids = min(draft.num_computed, draft.num_known), ids
        return [draft.ids for draft in guesses]

    def _begin(self, seq: SequenceState) -> SequenceDraft:
        self._guesses = {seq: x for seq, x in self._guesses.items() if not seq.finished}
        self._guesses[seq] = draft = SequenceDraft(seq, [*self.rates], kinds=range(self.most))
        return draft

    def _allowed(self, seq: SequenceState, ids: list[int]) -> list[int]:
        """What a constraint makes of ids that were chosen."""
        rule = seq.constraint
        return ids if rule is None else rule.draft(seq.output, ids)[0][: self.most]

    def _guess(self, drafts: list[SequenceDraft], lengths: list[int]) -> None:
        """Choose so many ids for each."""
        for draft, length in zip(drafts, lengths, strict=True):
            if length:
                self._catch_up(draft)
        ready = time.perf_counter()
        for depth in range(max(lengths)):
            asked = [x for x, length in zip(drafts, lengths, strict=True) if length > depth]
            asked.sort(key=lambda x: len(x.seq.tokens) + depth - x.num_computed > 1)
            for draft, token in zip(asked, self._run(asked), strict=True):
                draft.ids.append(token)
        if any(lengths):
            cost, seconds = self._last[0], (time.perf_counter() - ready) / max(lengths)
            cost.a_pass += (seconds - cost.a_pass) * (0.1 if cost.a_pass else 1)

    def _catch_up(self, draft: SequenceDraft) -> None:
        """Find out what of a sequence is in the cache, and compute the rest but for its end."""
        seq, size = draft.seq, self._runner.page_size
        if draft.pages is not seq.pages:  # new, or preempted since
            held = (self._hashes.get(page) for page in seq.pages)
            pairs = zip(held, seq.page_hashes, strict=False)
            draft.num_kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            draft.pages, draft.num_computed = seq.pages, draft.num_kept * size
        draft.num_computed = min(draft.num_computed, len(seq.tokens) - 1)
        while len(seq.tokens) - draft.num_computed > _NEAR:
            end = min(draft.num_computed + _AT_ONCE, len(seq.tokens) - 1)
            self._run([draft], end)
        for i in range(draft.num_kept, min(draft.num_computed // size, len(seq.page_hashes))):
            self._hashes[seq.pages[i]] = seq.page_hashes[i]
            draft.num_kept = i + 1

    def _run(self, drafts: list[SequenceDraft], end: int | None = None) -> list[int]:
        """Compute the tokens of texts and drafts that the cache lacks, up to position `end`.

        Those with a single token come first. With graphs each token is a row, as where drafts are
        verified; only longer texts are not.

        Returns:
            The token that the model samples behind each.
        """
        items = list[Scheduled]()
        has_rows = self._runner.has_graphs
        for draft in drafts:
            text = [*draft.seq.tokens, *draft.ids][:end]
            start = draft.num_computed
            self._forget_pages(draft.seq, start, len(text))
            draft.num_computed = len(text)
            view = copy(draft.seq)
            view.tokens = text
            view.constraint = None  # it is where the sequence is, and not the drafts
            items.append(Scheduled(view, start, len(text) - start))
            has_rows = has_rows and len(text) - start <= _NEAR
        if has_rows:
            for item in items:
                tokens = item.sequence.tokens
                item.sequence.tokens = tokens[: item.start + 1]
                item.drafts = tokens[item.start + 1 :]
        kind = VERIFY if has_rows else SAMPLE
        rows = kind.rows(items)
        ids = self._runner.run(Step(items, {kind: rows}))[kind].ids
        return [max(ids[end - 1], 0) for end in accumulate(map(len, rows.offsets))]

    def _forget_pages(self, seq: SequenceState, start: int, end: int) -> None:
        """Forget what the pages of these positions hold, which is about to be overwritten."""
        size = self._runner.page_size
        for page in seq.pages[start // size : -(-end // size)]:
            self._hashes.pop(page, None)
