"""Who runs in the next step, and for how many tokens: sequences in, a `Step` out.

Continuous batching (Yu et al., 2022, Orca) without a prefill phase and a decode phase. A sequence
has tokens known and tokens computed; each step hands out a budget of tokens so that computed
catches up with known. Chunked prefill, prefix reuse and preemption all follow from that: a
preempted sequence gives up its pages, and has its tokens to compute again. Ints in lists; no torch.
Only the order of arrival and the calls decide, so all ranks decide alike.
"""

from collections import Counter, deque
from collections.abc import Iterator
from itertools import chain

from llama.engine.pages import PagePool, page_hash
from llama.engine.rows import KINDS, Scheduled, Step, StepResults
from llama.engine.sequence import Sequence, no_pages


class Scheduler:
    """At most `max_batch_size` sequences and `token_budget` tokens per step, on a page pool."""

    def __init__(self, pool: PagePool, *, max_batch_size: int, token_budget: int) -> None:
        assert token_budget >= max_batch_size, "a step may have a token of each sequence"
        self.pool = pool
        self.max_batch_size = max_batch_size
        self.token_budget = token_budget
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def schedule(self) -> Step:
        """Choose the tokens of the next step.

        Running sequences come first, the oldest before the others, then the queue, while budget
        and pages last. The tokens of the step count as computed from now on: steps run in the order
        in which they are scheduled.
        """
        budget = self.token_budget
        chosen: list[Scheduled] = []
        self._make_room()
        row = 0
        while row < len(self.running) and budget > 0:
            seq = self.running[row]
            count = 0 if seq.ends_with_pending else min(seq.num_new, budget)
            if not self._grow(seq, count):
                continue  # it was preempted: the next one is at its row
            if count:
                chosen.append(self._schedule(seq, count))
                budget -= count
            row += 1
        while budget > 0 and self.waiting and len(self.running) < self.max_batch_size:
            seq = self.waiting[0]
            if not self._admit(seq):
                break
            count = min(seq.num_new, budget)
            chosen.append(self._schedule(seq, count))
            budget -= count
        chosen.sort(key=lambda item: item.count > 1)  # single tokens first, see `Step`
        return Step.of(chosen)

    def reserve(self, seq: Sequence, count: int) -> int:
        """Room in its pages for up to `count` more tokens, and in pages that nobody waits for."""
        room = len(seq.pages) * self.pool.page_size - seq.num_computed
        while room < count and self.pool.num_free and not self.waiting:
            seq.pages.append(self.pool.allocate())
            room += self.pool.page_size
        return min(count, room)

    def add_drafts(self, step: Step, drafts: list[list[int]]) -> None:
        """Let a decode step verify drafts, one list for each of its items.

        Drafts take no page from any sequence. They are cut to what fits, and end before a token
        that would end the sequence.
        """
        budget = self.token_budget - len(step.items)
        has_drafts = False
        for item, draft in zip(step.items, drafts, strict=True):
            seq = item.sequence
            stop = next((i for i, token in enumerate(draft) if token in seq.stop_ids), len(draft))
            draft = draft[: min(stop, budget, seq.max_len - len(seq.tokens) - 1)]
            if draft := draft[: self.reserve(seq, len(draft))]:
                item.drafts = draft
                item.count = 1 + len(draft)
                seq.num_computed += len(draft)
                budget -= len(draft)
                has_drafts = True
        if has_drafts:
            step.verify_drafts()

    def update(self, step: Step, results: StepResults) -> list[Sequence]:
        """Give the sequences of a step its results.

        Sequences that ended while it ran get none. The pages of those that end now are released at
        once, even where the next step has begun: what is written there later belongs to a step that
        runs after it.

        Returns:
            The sequences that got a token or ended.
        """
        ended = {item.sequence for item in step.items if item.sequence.finish_reason is not None}
        for kind, rows in step.rows.items():
            kind.distribute(rows, results[kind], ended)
        sampled = {item.sequence for item in step.sampling_items()}
        moved = []
        for item in step.items:
            seq = item.sequence
            if seq in ended:
                continue
            if item.drafts:
                self._offer(seq)
            if item.start + item.count == seq.max_len:
                seq.finish_reason = "length"  # its prompt fills it: no token can be sampled
            if seq.finish_reason is not None:
                self.remove(seq)
                moved.append(seq)
            elif seq in sampled:
                moved.append(seq)
        return moved

    def clear(self) -> None:
        """Forget every sequence and every page, as after a step that broke off."""
        self.pool.reset()
        self.running.clear()
        self.waiting.clear()

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence, wherever it is, and free its pages."""
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        self._release(seq)

    def live(self) -> Iterator[Sequence]:
        return chain(self.running, self.waiting)

    def check(self) -> None:
        """Assert that every page is held by a live sequence or free, and lengths are in order."""
        self.pool.check(seq.pages for seq in self.live())
        for seq in self.live():
            assert 0 <= seq.num_computed <= seq.num_known <= seq.max_len, vars(seq)
            assert seq.num_computed <= len(seq.pages) * self.pool.page_size, vars(seq)
            assert seq.num_offered * self.pool.page_size <= seq.num_computed, vars(seq)

    def _schedule(self, seq: Sequence, count: int) -> Scheduled:
        """Its pages that this step fills can be found from now on, by what is admitted after it:
        each layer stores the keys and values of all tokens before any token attends. So prompts
        that arrive together share what they have in common. A page that a pending token fills has
        no hash yet: the next step looks at it again."""
        start = seq.num_computed
        seq.num_computed += count
        if (seq.num_offered + 1) * self.pool.page_size <= seq.num_computed:
            self._offer(seq)
        return Scheduled(seq, start, count)

    def _offer(self, seq: Sequence) -> None:
        """Let its full pages be found, of tokens that are known and computed."""
        full = min(seq.num_computed, len(seq.tokens)) // self.pool.page_size
        for i in range(seq.num_offered, full):
            self.pool.cache(seq.pages[i], self._hashes(seq, full)[i])
        seq.num_offered = full

    def _admit(self, seq: Sequence) -> bool:
        """Move the head of the queue to running, if all its known tokens have room now. One that
        was preempted while a token of it was pending waits for that token."""
        found = self._found(seq)
        if seq.num_pending or found is None:
            return False
        self.pool.incref(found)
        seq.pages.extend(found)
        seq.num_computed = len(found) * self.pool.page_size
        seq.num_offered = len(found)
        has_room = self._grow(seq, seq.num_new)
        assert has_room, "admitted without room"
        if not seq.num_output:
            seq.num_cached = seq.num_computed
        self.running.append(self.waiting.popleft())
        return True

    def _found(self, seq: Sequence) -> list[int] | None:
        """The pages that hold its first tokens already; None where the others have no room."""
        found = self.pool.match_prefix(self._reusable_hashes(seq))
        wanted = self.pool.pages_for(len(seq.tokens)) - len(found)
        return found if wanted <= self.pool.num_free_without(found) else None

    def _reusable_hashes(self, seq: Sequence) -> list[bytes]:
        """Hashes of its full pages, short of the last token, which must be computed to sample."""
        if any(kind.needs_all_rows(seq) for kind in KINDS):
            return []
        full = (len(seq.tokens) - 1) // self.pool.page_size
        return self._hashes(seq, full)[:full]

    def _hashes(self, seq: Sequence, full: int) -> list[bytes]:
        """The chain of hashes of its first `full` pages, kept with the sequence as it grows."""
        size, hashes = self.pool.page_size, seq.page_hashes
        for i in range(len(hashes), full):
            parent = hashes[-1] if hashes else b""
            hashes.append(page_hash(parent, seq.tokens[i * size : (i + 1) * size]))
        return hashes

    def _grow(self, seq: Sequence, count: int) -> bool:
        """Allocate pages for `count` more tokens, by preemption if need be; False if of `seq`."""
        if seq.num_computed + count <= len(seq.pages) * self.pool.page_size:
            return True
        wanted = self.pool.pages_for(seq.num_computed + count)
        while len(seq.pages) < wanted:
            if self.pool.num_free:
                seq.pages.append(self.pool.allocate())
                continue
            victim = self._newest(self.running[self.running.index(seq) :])
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _make_room(self) -> None:
        """Of each call that waits and has none running, one sequence is next. For these, sequences
        of the call that has most running give up place and pages, but not its last one."""
        calls, first = {seq.call for seq in self.running}, list[Sequence]()
        for seq in self.waiting:
            if seq.call not in calls:
                calls.add(seq.call)
                first.append(seq)
        while first and len(self.running) + len(first) > len(calls):
            has_place = len(self.running) + len(first) <= self.max_batch_size
            if has_place and self._found(first[0]) is not None:
                break
            self._preempt(self._newest(self.running))
        for seq in reversed(first):
            self.waiting.remove(seq)
            self.waiting.appendleft(seq)

    def _newest(self, rows: list[Sequence]) -> Sequence:
        """The newest of these, which run, of the call that has most running."""
        count = Counter(seq.call for seq in self.running)
        return max(reversed(rows), key=lambda seq: count[seq.call])

    def _preempt(self, seq: Sequence) -> None:
        """It gives up its place and its pages, and is the next to get one."""
        self.running.remove(seq)
        self._release(seq)
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def _release(self, seq: Sequence) -> None:
        self.pool.release(seq.pages)
        seq.pages = no_pages()
        seq.num_computed = seq.num_offered = 0
