"""Who runs in the next step, and for how many tokens: sequences in, `Scheduled` items out.

Continuous batching (Yu et al., 2022, Orca) without a prefill phase and a decode phase. A sequence
has tokens known and tokens computed; each step hands out a budget of tokens so that computed
catches up with known. Chunked prefill, prefix reuse and preemption all follow from that: a
preempted sequence gives up its pages, and has its tokens to compute again. Ints in lists; no torch.
Only the order of arrival and the calls decide, so all ranks decide alike.
"""

from collections import Counter, deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain

from llama.engine.pages import PagePool, page_hash
from llama.engine.sequence import RowResults, Sequence, no_pages


@dataclass(slots=True)
class Scheduled:
    """`count` tokens of a sequence from `start` on, the first that were not computed. The last of
    them sample: its last known one, and the drafts behind it. scores: the offsets of those behind
    which a token of the prompt is, whose log-probability is wanted."""

    sequence: Sequence
    start: int
    count: int
    num_samples: int = 1
    scores: range = range(0)
    drafts: Seq[int] = ()  # guesses that the step verifies; after it, those that were right


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

    def schedule(self) -> list[Scheduled]:
        """Running sequences first, oldest first; then the queue, while budget and pages last. The
        items have the single tokens in front, as `Batch` wants them. Their tokens count as computed
        from now on: steps run in the order in which they are scheduled."""
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
        return sorted(chosen, key=lambda item: item.count > 1)

    def reserve(self, seq: Sequence, count: int) -> int:
        """Room in its pages for up to `count` more tokens, and in pages that nobody waits for."""
        room = len(seq.pages) * self.pool.page_size - seq.num_computed
        while room < count and self.pool.num_free and not self.waiting:
            seq.pages.append(self.pool.allocate())
            room += self.pool.page_size
        return min(count, room)

    def add_drafts(self, scheduled: list[Scheduled], drafts: list[list[int]]) -> None:
        """Have the step verify guesses of what comes next, one list for each of the items, which
        have a single token each. They take no page from any sequence, and are cut to what fits, and
        before what would end the sequence."""
        budget = self.token_budget - len(scheduled)
        for item, draft in zip(scheduled, drafts, strict=True):
            seq = item.sequence
            stop = next((i for i, token in enumerate(draft) if token in seq.stop_ids), len(draft))
            draft = draft[: min(stop, budget, seq.max_len - len(seq.tokens) - 1)]
            if draft := draft[: self.reserve(seq, len(draft))]:
                item.drafts, item.count = draft, 1 + len(draft)
                item.num_samples = item.count
                seq.num_computed += len(draft)
                budget -= len(draft)
        scheduled.sort(key=lambda item: item.count > 1)

    def update(self, scheduled: list[Scheduled], results: RowResults) -> None:
        """After a step: each sequence takes its results, but for those that ended meanwhile. The
        pages of what has ended are let go at once, even where the step after it has begun: what is
        written there next is written by a later step."""
        num_sampled = num_scored = 0
        for item in scheduled:
            seq, samples, scores = item.sequence, item.num_samples, len(item.scores)
            num_sampled, num_scored = num_sampled + samples, num_scored + scores
            if seq.finished:
                continue
            if scores:
                seq.take_scored(results.scored, range(num_scored - scores, num_scored))
            rows = range(num_sampled - samples, num_sampled)
            if item.drafts:
                rows = self._verified(item, results.sampled.ids, rows)
            seq.take_sampled(results.sampled, rows)
            if item.drafts:
                self._offer(seq)
            if item.start + item.count == seq.max_len and not samples:
                seq.finish_reason = "length"  # the prompt filled it: it was only scored
            if seq.finished:
                self.remove(seq)

    def _verified(self, item: Scheduled, ids: list[int], rows: range) -> range:
        """The rows whose tokens count: the first, and the one behind each draft that was chosen
        itself. What was computed behind the last of these drafts is computed again."""
        seq, drafts, right = item.sequence, item.drafts, 0
        while right < len(drafts) and ids[rows[right]] == drafts[right]:
            right += 1
        seq.num_drafted += len(drafts)
        seq.num_accepted += right
        seq.num_pending -= len(drafts) - right
        seq.num_computed -= len(drafts) - right
        item.drafts = drafts[:right]
        return rows[: right + 1]

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
        rows = seq.rows_of(start, count)
        seq.num_computed += count
        if (seq.num_offered + 1) * self.pool.page_size <= seq.num_computed:
            self._offer(seq)
        return Scheduled(seq, start, count, *rows)

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
        if seq.params.prompt_logprobs is not None:
            return []  # scoring a prompt needs every position's logits
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
