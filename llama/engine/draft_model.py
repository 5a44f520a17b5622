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
from dataclasses import dataclass
from itertools import accumulate, chain, takewhile

import torch
from torch import Tensor

from llama.device import current
from llama.engine.sampler import sample
from llama.engine.sequence import Sequence
from llama.engine.speculative import Guess, Lengths, told_by_rank_zero
from llama.model.transformer import Transformer
from llama.ops.batch import Batch

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


class DraftLengths(Lengths):
    """How many passes are worth their time, too."""

    def __init__(self, most: int) -> None:
        super().__init__([_FIRST_RATE] * most)
        self.most = most
        self._spent = 0.0
        self._num_idle = 0

    def note_passes(self, num: int, num_passes: int, seconds: float, spent: float) -> None:
        """For so many sequences, `seconds` went into passes that follow one another, and `spent` in
        all, with what came before them."""
        self._spent += spent
        if num_passes:
            cost = self._costs[num.bit_length()]
            cost.a_pass += (seconds / num_passes - cost.a_pass) * (0.1 if cost.a_pass else 1)

    def how_many(self, drafts: list[SequenceDraft], seconds: float) -> list[int]:
        """For each sequence, see `choose`; now and then some, also where they do not pay."""
        rates = [x.rates[: max(x.seq.max_len - len(x.seq.tokens) - 1, 0)] for x in drafts]
        lengths = self.choose(rates, seconds - self._spent)
        self._num_idle = 0 if any(lengths) else self._num_idle + 1
        if self._num_idle == _TRY_EVERY:
            self._num_idle, lengths = 0, [min(len(x), 2) for x in rates]
            self._last = self._last[0], sum(lengths)
        return lengths


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
        began, parallel, lengths = time.perf_counter(), self._model.parallel, list[int]()
        drafts = [self._drafts.get(seq) or self._begin(seq) for seq in sequences]
        for draft in drafts:  # what was computed of tokens that did not come is computed again
            right = draft.num_known + self._lengths.note(draft)
            draft.num_computed, draft.ids = min(draft.num_computed, right), []
        if parallel.rank == 0:
            lengths = self._lengths.how_many(drafts, seconds)
        lengths = told_by_rank_zero(parallel, lengths)
        lengths = [self._reserve(*pair) for pair in zip(sequences, lengths, strict=True)]
        with torch.inference_mode(), current(self._cache.device):
            self._guess(drafts, lengths, began)
        guesses = [self._allowed(draft) for draft in drafts]
        if any(seq.is_constrained for seq in sequences):  # the constraint may be rank 0's alone
            guesses = told_by_rank_zero(parallel, guesses)
        for draft, guess in zip(drafts, guesses, strict=True):
            if guess != draft.ids[: len(guess)]:
                draft.num_computed = min(draft.num_computed, draft.num_known)
            draft.ids = guess
        return guesses

    def _begin(self, seq: Sequence) -> SequenceDraft:
        """With a new sequence, those that have ended are forgotten."""
        self._drafts = {seq: x for seq, x in self._drafts.items() if not seq.finished}
        rates, kinds = [*self._lengths.rates], range(self._lengths.most)
        self._drafts[seq] = SequenceDraft(seq, rates, kinds=kinds)
        return self._drafts[seq]

    def _allowed(self, draft: SequenceDraft) -> list[int]:
        """What was chosen, or what a constraint makes of it."""
        seq, rule = draft.seq, draft.seq.constraint
        if rule is None or not draft.ids:
            return draft.ids
        return rule.draft(seq.output, draft.ids)[0][: self._lengths.most]

    def _guess(self, drafts: list[SequenceDraft], lengths: list[int], began: float) -> None:
        """Choose so many ids for each."""
        for draft, length in zip(drafts, lengths, strict=True):
            if length:
                self._catch_up(draft)
        ready, model = time.perf_counter(), self._model
        for depth in range(max(lengths)):
            asked = [x for x, length in zip(drafts, lengths, strict=True) if length > depth]
            asked.sort(key=lambda x: len(x.seq.tokens) + depth - x.num_computed > 1)
            views = [x.seq.ahead(x.ids) for x in asked]
            hidden = self._run(asked, [view.tokens for view in views])
            ids = sample(model.logits(hidden), views).ids.clamp(min=0)
            if not model.parallel.shares_memory_of(ids):
                ids = model.parallel.broadcast(ids)  # unlike machines round in other ways
            for draft, token in zip(asked, ids.tolist(), strict=True):
                draft.ids.append(token)
        ended = time.perf_counter()
        self._lengths.note_passes(len(drafts), max(lengths), ended - ready, ended - began)

    def _catch_up(self, draft: SequenceDraft) -> None:
        """Find out what of a sequence is in the cache, and compute the rest but for its end."""
        seq, size = draft.seq, self._page_size
        if draft.pages is not seq.pages:  # new, or preempted since
            held = (self._hashes.get(page) for page in seq.pages)
            pairs = zip(held, seq.page_hashes, strict=False)
            draft.num_kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            draft.pages, draft.num_computed = seq.pages, draft.num_kept * size
        draft.num_computed = min(draft.num_computed, len(seq.tokens) - 1)
        while len(seq.tokens) - draft.num_computed > _NEAR:
            end = min(draft.num_computed + _AT_ONCE, len(seq.tokens) - 1)
            self._run([draft], [seq.tokens[:end]])
        whole = min(draft.num_computed // size, len(seq.page_hashes))
        for i in range(draft.num_kept, whole):
            self._hashes[seq.pages[i]] = seq.page_hashes[i]
        draft.num_kept = max(draft.num_kept, whole)

    def _run(self, drafts: list[SequenceDraft], texts: list[list[int]]) -> Tensor:
        """Compute what the cache lacks of the texts, those with one token first -> the hidden
        states (B, E) behind them."""
        starts = [draft.num_computed for draft in drafts]
        pieces = [text[start:] for text, start in zip(texts, starts, strict=True)]
        counts = [len(piece) for piece in pieces]
        for draft, text in zip(drafts, texts, strict=True):
            first, last = draft.num_computed // self._page_size, (len(text) - 1) // self._page_size
            for page in draft.seq.pages[first : last + 1]:
                self._hashes.pop(page, None)
            draft.num_computed = len(text)
        ids, batch = Batch.pack(
            list(chain.from_iterable(pieces)),
            starts,
            counts,
            [draft.seq.pages for draft in drafts],
            self._page_size,
            [end - 1 for end in accumulate(counts)],
            self._cache.device,
        )
        return self._model.hidden_states(ids, batch, self._cache)
