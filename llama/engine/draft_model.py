"""A draft model: a small model that guesses what a large one will choose, over the same pages.

In: sequences whose tokens are all known. Out: for each the ids that the small model chooses next,
with the sequence's own seed, positions and parameters: where both models find a token likely, both
choose it. How many follows from what a pass costs and from how many were right.

Its keys and values lie in a cache of its own, of the same pages and slots as the large model's. It
computes a text when it first guesses for it, then what was added; a page that is found by its hash
is computed again only if the small model has not had it.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, chain, takewhile

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
    """What the small model knows of a sequence: how many tokens of it are in the cache, and in
    which pages; what it chose after the first `num_known`, and what of it was handed out."""

    seq: Sequence
    pages: object = None
    num_computed: int = 0
    num_kept: int = 0  # pages that other sequences can use
    num_known: int = 0
    chosen: list[int] = field(default_factory=list)
    guess: list[int] = field(default_factory=list)
    counts: Counts = field(default_factory=lambda: Counts(0, [0], 64))

    def forget_wrong(self) -> None:
        """After a step: what was computed of tokens that did not come will be computed again."""
        known = self.num_known
        for chosen, token in zip(self.chosen, self.seq.tokens[known:], strict=False):
            if chosen != token:
                break
            known += 1
        self.num_computed, self.chosen = min(self.num_computed, known), []


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

    def note_verified(self, draft: SequenceDraft) -> None:
        """The tokens that came say which guesses were right."""
        came = draft.seq.tokens[draft.num_known :]
        for depth, (guess, token) in enumerate(zip(draft.guess, came, strict=False)):
            self._counts.note(depth, guess == token)
            draft.counts.note(0, guess == token)
            if guess != token:
                break

    def note_passes(self, num: int, num_passes: int, seconds: float, spent: float) -> None:
        """For so many sequences, `seconds` went into passes that follow one another, and `spent` in
        all, with what came before them."""
        self._spent = spent
        if num_passes:
            key, each = num.bit_length(), seconds / num_passes
            self._passes[key] = self._passes.get(key, each) * 0.9 + each * 0.1

    def choose(self, drafts: list[SequenceDraft], seconds: float) -> list[int]:
        """For each sequence; a guess is worth a row, and all of one depth a pass, where that gives
        more tokens for the time than the step does without it (Dinkelbach, 1967)."""
        last, num_drafts = self._last
        if seconds > self._seconds:
            last.note(max(seconds - self._seconds - self._spent, 1e-9), num_drafts)
        self._seconds, self._spent = seconds, 0.0
        key, num = len(drafts).bit_length(), len(drafts)
        cost = self._costs.setdefault(key, StepCost())
        a_pass, of_row = self._passes.get(key, cost.plain / 4), cost.of_draft(num)
        rate = cost.rate or num / (cost.plain or math.inf)
        room = [min(x.seq.max_len - len(x.seq.tokens) - 1, self.most) for x in drafts]
        lengths, chances, tokens, spent = [0] * num, [1.0] * num, float(num), cost.plain
        for depth in range(self.most if cost.plain else 0):
            usual = 8 * self._counts.right[depth] / self._counts.tried[depth]
            chances = [
                chance * (x.counts.right[0] + usual) / (x.counts.tried[0] + 8)
                for chance, x in zip(chances, drafts, strict=True)
            ]
            rows = [i for i in range(num) if lengths[i] == depth < room[i]]
            rows = [i for i in rows if chances[i] > rate * of_row]
            if sum(chances[i] - rate * of_row for i in rows) <= rate * a_pass:
                break
            for i in rows:
                lengths[i], tokens = depth + 1, tokens + chances[i]
            spent += a_pass + len(rows) * of_row
        if cost.plain:
            cost.rate = tokens / spent
            self._num_idle = 0 if any(lengths) else self._num_idle + 1
        if self._num_idle == _TRY_EVERY:
            self._num_idle, lengths = 0, [min(max(most, 0), 2) for most in room]
        self._last = cost, sum(lengths)
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
        if len(self._drafts) > 2 * len(sequences) + 8:
            self._drafts = {seq: x for seq, x in self._drafts.items() if not seq.finished}
        drafts = [self._drafts.setdefault(seq, SequenceDraft(seq)) for seq in sequences]
        for draft in drafts:
            self._lengths.note_verified(draft)
            draft.forget_wrong()
        if parallel.rank == 0:
            lengths = self._lengths.choose(drafts, seconds)
        lengths = told_by_rank_zero(parallel, lengths)
        lengths = [self._reserve(*pair) for pair in zip(sequences, lengths, strict=True)]
        with torch.inference_mode(), current(self._cache.device):
            self._guess(drafts, lengths, began)
        guesses = [
            self._allowed(draft) if n else [] for draft, n in zip(drafts, lengths, strict=True)
        ]
        if any(seq.is_constrained for seq in sequences):  # the constraint may be rank 0's alone
            guesses = told_by_rank_zero(parallel, guesses)
        for draft, guess in zip(drafts, guesses, strict=True):
            draft.guess, draft.num_known = guess, len(draft.seq.tokens)
        return guesses

    def _allowed(self, draft: SequenceDraft) -> list[int]:
        """What was chosen before a stop id, or what a constraint makes of it."""
        seq, guess = draft.seq, draft.chosen
        is_stop = [token in seq.stop_ids for token in guess]
        guess = guess[: is_stop.index(True)] if any(is_stop) else guess[:]
        if seq.constraint is not None:
            guess = seq.constraint.draft(seq.output, guess)[0][: self._lengths.most]
        return guess

    def _guess(self, drafts: list[SequenceDraft], lengths: list[int], began: float) -> None:
        """Choose so many ids for each."""
        for draft, length in zip(drafts, lengths, strict=True):
            if length:
                self._catch_up(draft)
        ready, model = time.perf_counter(), self._model
        for depth in range(max(lengths)):
            asked = [x for x, length in zip(drafts, lengths, strict=True) if length > depth]
            asked.sort(key=lambda x: len(x.seq.tokens) + depth - x.num_computed > 1)
            views = [x.seq.ahead(x.chosen) for x in asked]
            hidden = self._run(asked, [view.tokens for view in views])
            ids = sample(model.logits(hidden), views).ids.clamp(min=0)
            if not model.parallel.shares_memory_of(ids):
                ids = model.parallel.broadcast(ids)  # unlike machines round in other ways
            for draft, token in zip(asked, ids.tolist(), strict=True):
                draft.chosen.append(token)
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
