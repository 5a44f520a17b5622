"""A draft model: a small model that proposes tokens for a large one, over the same pages.

In: sequences all of whose tokens are known. Out: for each, the ids that the small model samples
next with the seed, positions and parameters of the sequence. Both models sample the same token
where both find it likely. The number of drafts follows from the cost of a pass and from how many
drafts were right.

The small model has a KV cache of its own, with the same pages and slots as the large model's. It
computes a text when it first drafts for it, and later only new tokens. A page that is found by its
hash is computed again only if the small model has not computed it before. It sees no image: in the
place of one it has the last id of its vocabulary, and drafts are right less often.

On a GPU the passes of a draft overlap with the host as steps do: each takes its tokens from the one
before on the device, and all are read after the last one. With graphs each pass is a replay. One
graph of all passes would save what lies between two replays: a launch, a copy of inputs and three
small kernels, by calculation 20 to 25 us of the 1,050 that a pass of a 1B takes on an H100. It
would need positions, slots and the parameters of sampling that advance on the device, and a graph
for each number of passes.
"""

import time
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate

from llama.engine.rows import SAMPLE, VERIFY, Reader, Scheduled
from llama.engine.runner import ModelRunner
from llama.engine.scheduler import Scheduler
from llama.engine.sequence import SequenceState
from llama.engine.step import Step
from llama.options.speculation.drafter import Drafter, DraftState

_FIRST_RATE = 0.7  # share of right drafts before any measurement
_MAX_DRAFT_PASS = 16  # new tokens in the first pass that drafts; more are computed before it
_MAX_CATCH_UP = 2048  # tokens computed per pass that catches up with a text
_RETRY_STEPS = 64  # steps without drafts after which drafts are tried again at any cost


@dataclass
class SequenceDraft(DraftState):
    """The state of one sequence in the draft model; the kind of a draft token is its depth.

    Attributes:
        pages: The list of pages that `num_computed` refers to. The sequence has another list after
            it was preempted.
        num_computed: The number of leading tokens whose keys and values are in the cache.
        num_shared: The number of leading pages whose hashes are known, so that other sequences can
            use them.
        view: The sequence as the model reads it, with the draft so far.
    """

    pages: object = None
    num_computed: int = 0
    num_shared: int = 0
    view: SequenceState = field(init=False)


class ModelDrafter(Drafter):
    """A drafter that samples drafts from a model.

    The runner of the model has a cache for all pages of the scheduler, which reserves the slots of
    drafts. On several ranks each has its share of the model.
    """

    def __init__(self, max_drafts: int, runner: ModelRunner, scheduler: Scheduler) -> None:
        first_rates = [_FIRST_RATE] * max_drafts
        super().__init__(max_drafts, runner.model.parallel, first_rates)
        assert runner.num_pages >= scheduler.pool.num_pages
        self._runner = runner
        self._reserve = scheduler.reserve
        self._hashes: dict[int, bytes] = {}  # hashes of the pages this model has filled, by page
        self._num_idle = 0  # steps since the last draft

    def close(self) -> None:
        """Forget all sequences, and free the KV cache and the graphs of the draft model."""
        super().close()
        self._runner.close()

    def _draft(self, states: list[SequenceDraft], seconds: float) -> list[list[int]]:
        for state in states:
            # Tokens computed for drafts that were wrong are computed again.
            num_before = state.num_known
            num_valid = num_before + self.note(state)
            state.num_computed = min(state.num_computed, num_valid)
            state.ids = []
        rates = [_usable_rates(state) for state in states]
        min_drafts = 2 if self._num_idle >= _RETRY_STEPS else 0
        chosen = self.choose(rates, seconds, min_drafts)
        lengths = self.from_rank_zero(chosen)
        self._num_idle = 0 if any(lengths) else self._num_idle + 1
        sequences = [state.seq for state in states]
        reserved = [*map(self._reserve, sequences, lengths)]
        self._sample_drafts(states, reserved)
        constrained = [state for state in states if state.seq.spec.is_constrained and state.ids]
        if constrained:
            self._apply_constraints(constrained)
        return [state.ids for state in states]

    def _begin(self, seq: SequenceState) -> SequenceDraft:
        for ended in [known for known in self._states if known.finished]:
            del self._states[ended]
        rates = [*self.rates]
        kinds = range(self.max_drafts)
        state = SequenceDraft(seq, rates, kinds=kinds)
        self._states[seq] = state
        return state

    def _apply_constraints(self, states: list[SequenceDraft]) -> None:
        """Replace drafts by what the constraints make of them; these may be on rank 0 only."""
        allowed = [self._allowed(state) for state in states]
        allowed = self.from_rank_zero(allowed)
        for state, ids in zip(states, allowed, strict=True):
            state.num_computed = min(state.num_computed, state.num_known)
            state.ids = ids

    def _allowed(self, state: SequenceDraft) -> list[int]:
        """Return the draft that a constraint makes of a sampled one."""
        constraint = state.seq.constraint
        if constraint is None:
            return state.ids
        output = state.seq.output
        ids, _ = constraint.draft(output, state.ids)
        return ids[: self.max_drafts]

    def _sample_drafts(self, states: list[SequenceDraft], lengths: list[int]) -> None:
        """Sample a draft of the given length for each state, and measure the cost of a pass.

        On a GPU a pass takes its tokens from the one before on the device, and all are read after
        the last one, unless the host must know them to sample.
        """
        drafting = [state for state, length in zip(states, lengths, strict=True) if length]
        for state in drafting:
            self._catch_up(state)
        start = time.perf_counter()
        num_passes = max(lengths)
        reads_each = not self._runner.async_scheduling or any(map(_needs_host, drafting))
        unread: list[tuple[list[SequenceDraft], Reader[list[int]]]] = []
        for depth in range(num_passes):
            active = []
            for state, length in zip(states, lengths, strict=True):
                if length > depth:
                    active.append(state)
            active.sort(key=lambda state: _num_new(state) > 1)  # single tokens come first
            unread.append((active, self._start(active)))
            if reads_each:
                _take(*unread.pop())
        for started, read in unread:
            _take(started, read)
        if num_passes:
            cost = self._last_cost
            total_seconds = time.perf_counter() - start
            seconds = total_seconds / num_passes
            weight = 0.1 if cost.pass_seconds else 1
            change = seconds - cost.pass_seconds
            cost.pass_seconds += change * weight

    def _catch_up(self, state: SequenceDraft) -> None:
        """Find the tokens of a sequence that are in the cache, and compute all but the last few."""
        seq = state.seq
        page_size = self._runner.page_size
        if state.pages is not seq.pages:  # a new sequence, or one that was preempted
            state.num_shared = self._num_filled_pages(seq)
            state.pages = seq.pages
            state.num_computed = state.num_shared * page_size
        max_computed = len(seq.tokens) - 1
        state.num_computed = min(state.num_computed, max_computed)
        while len(seq.tokens) - state.num_computed > _MAX_DRAFT_PASS:
            end = min(state.num_computed + _MAX_CATCH_UP, max_computed)
            state.view = self._view(seq, end)
            self._start([state])()
        state.view = self._view(seq, len(seq.tokens))
        num_full = state.num_computed // page_size
        num_full = min(num_full, len(seq.page_hashes))
        for i in range(state.num_shared, num_full):
            page = seq.pages[i]
            self._hashes[page] = seq.page_hashes[i]
            state.num_shared = i + 1

    def _view(self, seq: SequenceState, end: int) -> SequenceState:
        """Return a sequence as the model reads it, up to position `end`."""
        view = copy(seq)
        view.tokens = seq.tokens[:end]
        for image in seq.spec.images:  # the model reads text alone, and has no such row
            if image.position < end:
                view.tokens[image.position] = self._runner.model.vocab_size - 1
        view.constraint = None  # its state follows the sequence, and not the drafts
        return view

    def _num_filled_pages(self, seq: SequenceState) -> int:
        """Return how many leading pages of a sequence hold keys and values of this model."""
        num_filled = 0
        for page, page_hash in zip(seq.pages, seq.page_hashes, strict=False):
            if self._hashes.get(page) != page_hash:
                break
            num_filled += 1
        return num_filled

    def _start(self, states: list[SequenceDraft]) -> Reader[list[int]]:
        """Begin a pass over the tokens of the views that the cache lacks.

        States with a single such token come first. With graphs each token is a row, as when drafts
        are verified, unless a text has more than `_MAX_DRAFT_PASS` of them.

        Returns:
            What waits for the token that the model samples after each view. Until it is taken, it
            is pending.
        """
        items = [self._scheduled(state) for state in states]
        is_short = all(item.count <= _MAX_DRAFT_PASS for item in items)
        kind = VERIFY if self._runner.replayer and is_short else SAMPLE
        if kind is VERIFY:
            for item in items:
                tokens = item.sequence.tokens
                first_end = item.start + 1
                item.drafts = tokens[first_end:]
                del tokens[first_end:]
        rows = kind.rows(items)
        step = Step(items, {kind: rows})
        read_results = self._runner.start(step).compute_rows()
        for item in items:
            item.sequence.tokens += item.drafts
            item.sequence.num_pending += 1
        row_ends = list(accumulate(map(len, rows.offsets)))

        def read() -> list[int]:
            ids = read_results()[kind].ids
            return [max(ids[row_end - 1], 0) for row_end in row_ends]

        return read

    def _scheduled(self, state: SequenceDraft) -> Scheduled:
        """Return the tokens of one view that `_start` computes, and count them as computed."""
        start = state.num_computed
        num_tokens = state.view.num_known
        self._forget_pages(state.seq, start, num_tokens)
        state.num_computed = num_tokens
        return Scheduled(state.view, start, num_tokens - start)

    def _forget_pages(self, seq: SequenceState, start: int, end: int) -> None:
        """Forget the hashes of the pages of these positions, which are about to be overwritten."""
        page_size = self._runner.page_size
        first_page = start // page_size
        end_page = -(-end // page_size)
        for page in seq.pages[first_page:end_page]:
            self._hashes.pop(page, None)


def _usable_rates(state: SequenceDraft) -> list[float]:
    """Return the rates of as many drafts as fit before the sequence reaches its maximum length."""
    seq = state.seq
    max_drafts = seq.spec.max_len - len(seq.tokens) - 1
    return state.rates[: max(max_drafts, 0)]


def _num_new(state: SequenceDraft) -> int:
    """Return how many tokens of the text and its draft are not in the cache."""
    return state.view.num_known - state.num_computed


def _needs_host(state: SequenceDraft) -> bool:
    """Return whether the host must know each token of a draft to sample the next one."""
    spec = state.seq.spec
    return spec.needs_tokens or spec.has_penalties


def _take(states: list[SequenceDraft], read: Reader[list[int]]) -> None:
    """Wait for the tokens of a pass, and append them to the drafts."""
    for state, token in zip(states, read(), strict=True):
        state.ids.append(token)
        state.view.tokens.append(token)
        state.view.num_pending -= 1
