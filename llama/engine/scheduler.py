"""The scheduler: which sequences run in the next step, and how many tokens of each.

In: waiting and running sequences. Out: a `Step`. It knows no torch: state is ints in lists.

Continuous batching (Yu et al., 2022, Orca) without a prefill phase and a decode phase. A sequence
has known tokens and computed tokens; each step hands out a budget of tokens so that the computed
ones catch up with the known ones. Chunked prefill, prefix reuse and preemption all follow from
that: a preempted sequence gives up its pages, and has its tokens to compute again.

Scheduling is fair across senders, and across the calls of a sender. Waiting ones are admitted
round-robin, a call with nothing running takes a slot from whoever has the most, and the prompt
tokens of a step are shared equally among the senders that have prompts. Only the order of arrival,
the senders and the calls decide, so that all ranks decide alike.

The file has over 400 lines because admission, growth and preemption share the counts of a step.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Protocol

from llama.engine.pages import PagePool, page_hash
from llama.engine.rows import PROMPT_KINDS, Scheduled
from llama.engine.sequence import SequenceState, no_pages
from llama.engine.step import Step, StepResults
from llama.engine.waiting import Places, PromptShares, WaitingQueue

_PROMPT_STEPS = 4  # steps of each stage of a pipeline among which waiting prompts are divided


class SidePages(Protocol):
    """Pages that sequences have besides those of their tokens, such as the ones of images."""

    def pages_of(self, seq: SequenceState) -> int:
        """Return how many of these pages a sequence can have at most."""

    def used(self) -> Iterator[Sequence[int]]:
        """Return the pages of all sequences."""

    def wanted(self, seq: SequenceState, start: int) -> tuple[list[int], int]:
        """Return what a sequence needs whose tokens before `start` are computed.

        Returns:
            The pages that have their content already, and how many more it needs.
        """

    def admit(self, seq: SequenceState, start: int) -> None:
        """Take the pages that `wanted` names."""

    def fitting(self, seq: SequenceState, count: int, budget: int, *, is_first: bool) -> int:
        """Return how many of the next `count` tokens a step may compute.

        They and what the step then fills must fit its budget. What alone is beyond a whole budget
        is filled by a step that does nothing else but continue answers, so that it is not put off
        for ever.

        Args:
            seq: A running sequence.
            count: The number of tokens.
            budget: The tokens that are left of the step.
            is_first: Whether the step has no tokens of prompts yet and fills nothing.
        """

    def schedule(self, seq: SequenceState, start: int, count: int) -> int:
        """Let the next step fill what these tokens need; return its cost in tokens of text."""

    def release(self, seq: SequenceState) -> None:
        """Give up the pages of a sequence."""

    def reset(self) -> None:
        """Forget the pages of all sequences."""


class Scheduler:
    """At most `max_batch_size` sequences and `token_budget` tokens per step, on a page pool.

    With a pipeline, `num_stages` steps are in flight. A sequence whose results are in flight is not
    scheduled, and the others are spread evenly over the steps. The tokens of prompts are spread,
    too, as the stages work at once only on steps of their own. Chunks of one prompt follow one
    another without waiting; a step has at least `min_prompt_tokens` of prompts, if there are any.

    With `has_whole_prompts` all tokens of a sequence are computed in one step, and none is taken
    from the prefix cache, as bidirectional attention needs it. At most `max_captured` tokens of a
    step have all their hidden states captured, which take memory; None: any number.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_batch_size: int,
        token_budget: int,
        num_stages: int = 1,
        min_prompt_tokens: int = 32,
        has_whole_prompts: bool = False,
        max_captured: int | None = None,
    ) -> None:
        assert token_budget >= max_batch_size, "a step may have a token of each sequence"
        self.pool = pool
        self.max_batch_size = max_batch_size
        self.token_budget = token_budget
        self.num_stages = num_stages
        self.min_prompt_tokens = min_prompt_tokens
        self.has_whole_prompts = has_whole_prompts
        self.max_captured = max_captured
        self.waiting = WaitingQueue()
        self.running: list[SequenceState] = []
        self.num_preemptions = 0
        self._num_steps = 0  # steps of a pipeline so far
        self.has_adapters = False  # whether sequences can have adapters
        self.side: SidePages | None = None  # further pages of sequences

    def schedule(self, resting: frozenset[SequenceState] = frozenset()) -> Step:
        """Choose the tokens of the next step.

        Running sequences come first, the oldest before the others, then waiting ones, while budget
        and pages last. Prompts leave one token to each sequence that generates. The tokens of the
        step count as computed from now on: steps run in the order in which they are scheduled.

        Args:
            resting: Sequences that sit out this step; those that run keep their places.
        """
        budget = self.token_budget
        chosen: list[Scheduled] = []
        if self.waiting:
            self._favour_new_calls(resting)
        has_stages = self.num_stages > 1
        left_out = self._left_out() | resting if has_stages else resting
        shares: PromptShares | None = None
        is_first = True  # no prompt has a token in the step, and it fills no further pages
        row = 0
        while row < len(self.running) and budget > 0:
            seq = self.running[row]
            is_ready = seq not in left_out and not seq.ends_with_pending
            num_new = seq.num_new
            count = min(num_new, budget) if is_ready else 0
            count = min(count, self._most_tokens(seq, chosen))
            if count > 1:
                shares = shares or self._prompt_shares(budget, row, left_out)
                count = min(count, shares.left_of(seq.spec.sender))
            if count and self.side is not None:
                count = self.side.fitting(seq, count, budget, is_first=is_first)
            if not self._grow(seq, count):
                continue  # it was preempted: the next one is at its row
            if count:
                num_loaded = self._load(seq, count) if count > 1 else 0
                chosen.append(self._schedule(seq, count - num_loaded))
                cost = self._side_cost(chosen[-1])
                budget -= count + cost
                if num_new > 1 or cost:
                    is_first = False
                    if shares is not None:
                        shares.take(seq.spec.sender, count + cost)
            row += 1
        while self.waiting and len(self.running) < self.max_batch_size:
            shares = shares or self._prompt_shares(budget, row, left_out)
            if shares.left <= 0:
                break
            first = self.waiting.peek(resting, shares.used_up)
            if first is None or (self.has_whole_prompts and len(first.tokens) > budget):
                break
            most = self._most_tokens(first, chosen)
            if not most or not self._admit(first):
                break
            left = shares.left_of(first.spec.sender)
            count = min(first.num_new, budget if self.has_whole_prompts else left, most)
            if self.side is not None:
                count = self.side.fitting(first, count, shares.left, is_first=is_first)
            if not count:
                continue
            is_first = False
            num_loaded = self._load(first, count)
            chosen.append(self._schedule(first, count - num_loaded))
            cost = self._side_cost(chosen[-1])
            shares.take(first.spec.sender, count + cost)
            budget -= count + cost
        chosen.sort(key=lambda item: item.count > 1)  # single tokens first, see `Step`
        if self.has_adapters:  # the rows of an adapter lie together
            chosen.sort(key=lambda item: (item.count > 1, item.sequence.spec.adapter))
        return Step.of(chosen)

    def _most_tokens(self, seq: SequenceState, chosen: list[Scheduled]) -> int:
        """Return how many tokens of a sequence a step may have, by the states that it captures."""
        capture = seq.spec.capture
        if self.max_captured is None or capture is None or capture.last_only:
            return self.token_budget
        if self.has_whole_prompts:
            return self.token_budget
        used = [item.count for item in chosen if item.sequence.spec.capture is not None]
        return max(0, self.max_captured - sum(used))

    def _side_cost(self, item: Scheduled) -> int:
        """Return what the further pages of an item cost the step, in tokens."""
        if self.side is None:
            return 0
        return self.side.schedule(item.sequence, item.start, item.count)

    def max_pages(self, seq: SequenceState) -> int:
        """Return how many pages a sequence can have at most."""
        num_pages = self.pool.pages_for(seq.spec.max_len)
        return num_pages if self.side is None else num_pages + self.side.pages_of(seq)

    def _left_out(self) -> frozenset[SequenceState]:
        """Return the running sequences that have no token in the next step of a pipeline.

        These are the ones that wait for results, and those for which a later step is better: each
        of the steps in flight has an equal part of the sequences that have one new token each.
        Those that have not run for longest come first.
        """
        self._num_steps += 1
        waiting = [seq for seq in self.running if seq.awaits_results]
        ready = [seq for seq in self.running if not seq.awaits_results and seq.num_new == 1]
        num_decoding = len(ready) + sum(seq.num_new <= 1 for seq in waiting)
        max_decodes = -(-num_decoding // self.num_stages)
        ready.sort(key=lambda seq: seq.last_step)
        return frozenset(chain(waiting, ready[max_decodes:]))

    def _prompt_shares(
        self, budget: int, row: int, left_out: frozenset[SequenceState]
    ) -> PromptShares:
        """Return the prompt tokens of the next step, shared among the senders that have prompts.

        Whole prompts are not shared: the turns of waiting sequences are fair enough.

        Args:
            budget: The tokens that are left of the step.
            row: The first running sequence that has none of them yet.
            left_out: Sequences that get none.
        """
        wanted: Counter[bytes] = Counter()
        for seq in self.running[row:]:
            if seq in left_out or seq.ends_with_pending:
                continue
            if seq.num_new > 1:
                wanted[seq.spec.sender] += seq.num_new
            else:
                budget -= seq.num_new
        if self.num_stages > 1:
            budget = min(budget, self._prompt_budget())
        num_free = self.max_batch_size - len(self.running)
        for sender in self.waiting.senders()[:num_free]:
            for seq in self.waiting.firsts(sender, (), num_free, left_out):
                wanted[sender] += seq.num_new
        return PromptShares(budget, {} if self.has_whole_prompts else wanted)

    def _prompt_budget(self) -> int:
        """Return the maximum number of tokens of prompts in the next step of a pipeline.

        Prompts that wait at the same time are divided among several steps for each stage. In a
        single step, one stage after the other would compute them, while all others wait. The budget
        shrinks while the last prompts are computed, except for a prompt alone.
        """
        num_free = self.max_batch_size - len(self.running)
        prompts = [seq for seq in self.running if seq.num_new > 1]
        prompts.extend(islice(self.waiting, num_free))
        total = sum(len(seq.tokens) for seq in prompts)
        num_steps = _PROMPT_STEPS * self.num_stages
        return max(self.min_prompt_tokens, -(-total // num_steps))

    def has_ready(self) -> bool:
        """Return whether a sequence may run before more results of a pipeline are read."""
        if self.waiting and len(self.running) < self.max_batch_size:
            return True
        return any(not seq.awaits_results for seq in self.running)

    def reserve(self, seq: SequenceState, count: int) -> int:
        """Return for how many of `count` more tokens a sequence has slots.

        It gets free pages for them, unless other sequences wait for pages.
        """
        num_slots = len(seq.pages) * self.pool.page_size - seq.num_computed
        while num_slots < count and self.pool.num_free and not self.waiting:
            seq.pages.append(self.pool.allocate())
            num_slots += self.pool.page_size
        return min(count, num_slots)

    def add_drafts(self, step: Step, drafts: list[list[int]]) -> None:
        """Let a decode step verify drafts, one list for each of its items.

        Drafts take no page from any sequence. They are cut to what fits, and end before a token
        that would end the sequence.
        """
        budget = self.token_budget - len(step.items)
        has_drafts = False
        for item, draft in zip(step.items, drafts, strict=True):
            seq = item.sequence
            stop_ids = seq.spec.stop_ids
            for image in seq.spec.images[:1]:  # its id is none that the model can write
                stop_ids |= {seq.tokens[image.position]}
            num_usable = _num_before_stop(draft, stop_ids)
            longest = seq.spec.max_len - len(seq.tokens) - 1
            num_wanted = min(num_usable, budget, longest)
            num_drafts = self.reserve(seq, num_wanted)
            if num_drafts > 0:
                item.drafts = draft[:num_drafts]
                item.count = 1 + num_drafts
                seq.num_computed += num_drafts
                budget -= num_drafts
                has_drafts = True
        if has_drafts:
            step.verify_drafts()

    def update(self, step: Step, results: StepResults) -> list[SequenceState]:
        """Give the sequences of a step its results.

        Sequences that ended while it ran get none. Those that end now keep their pages until
        `remove` releases them, which may be where the next step has begun: what is written there
        later belongs to a step that runs after it.

        Returns:
            The sequences that got a token or ended.
        """
        ended = {item.sequence for item in step.items if item.sequence.finish_reason is not None}
        if self.num_stages > 1:
            for rows in step.rows.values():
                for item in rows.items:
                    item.sequence.awaits_results = False
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
            if item.start + item.count == seq.spec.max_len and seq.finish_reason is None:
                # Its prompt fills it: no token can be sampled.
                seq.finish_reason = "stop" if seq.spec.is_only_read else "length"
            if seq.finish_reason is not None or seq in sampled:
                moved.append(seq)
        return moved

    def filled(self, step: Step) -> Iterator[tuple[SequenceState, range]]:
        """Yield the sequences of which a step has filled pages, each with their indices.

        Their content has hashes. A sequence that was preempted while the step ran has none.
        """
        size = self.pool.page_size
        for item in step.items:
            seq = item.sequence
            end = min((item.start + item.count) // size, seq.num_offered)
            if end > item.start // size:
                yield seq, range(item.start // size, end)

    def clear(self) -> None:
        """Forget every sequence and every page."""
        self.clear_started()
        self.waiting.clear()

    def started(self) -> Iterator[SequenceState]:
        """Return the sequences that run, have run, or are the next of their call."""
        return chain(self.running, self.waiting.front)

    def clear_started(self) -> None:
        """Forget every page, as after a step that broke off, and what `started` returns."""
        self.pool.reset()
        if self.side is not None:
            self.side.reset()
        self.running.clear()
        self.waiting.front.clear()

    def remove(self, seq: SequenceState) -> None:
        """Forget a sequence, wherever it is, and free its pages."""
        if seq in self.running:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
        self._release(seq)

    def live(self) -> Iterator[SequenceState]:
        """Return all sequences, running and waiting."""
        return chain(self.running, self.waiting)

    def check(self) -> None:
        """Assert that each page is free or belongs to a live sequence, and lengths are in order."""
        further = () if self.side is None else self.side.used()
        self.pool.check(chain((seq.pages for seq in self.live()), further))
        for seq in self.live():
            assert 0 <= seq.num_computed <= seq.spec.max_len, vars(seq)
            # A pipeline may have drafts in flight, which are not known to be right.
            assert seq.num_computed <= seq.num_known <= seq.spec.max_len or seq.awaits_results
            num_slots = len(seq.pages) * self.pool.page_size
            num_offered = seq.num_offered * self.pool.page_size
            assert num_offered <= seq.num_computed <= num_slots, vars(seq)

    def _schedule(self, seq: SequenceState, count: int) -> Scheduled:
        """Return the next `count` tokens of a sequence as an item of the step.

        Its pages that this step fills can be found from now on, by what is admitted after it: each
        layer stores the keys and values of all tokens before any token attends. So prompts that
        arrive together share what they have in common. A page that a pending token fills has no
        hash yet: the next step looks at it again.
        """
        start = seq.num_computed
        seq.num_computed += count
        seq.last_step = self._num_steps
        next_offer = (seq.num_offered + 1) * self.pool.page_size
        if next_offer <= seq.num_computed:
            self._offer(seq)
        return Scheduled(seq, start, count)

    def _load(self, seq: SequenceState, count: int) -> int:
        """Let the second tier fill pages of a sequence that the next step would compute.

        The last of the tokens is left to compute, so that the sequence has an item in the step.

        Args:
            seq: The sequence, which has pages for its next tokens.
            count: The tokens that the step may compute. What is loaded counts among them, so that
                the wait of other sequences is bounded alike.

        Returns:
            The number of tokens that need not be computed.
        """
        size = self.pool.page_size
        tier = self.pool.tier
        if tier is None or count <= size:
            return 0
        first = seq.num_computed // size  # its first tokens may have been computed already
        end = (seq.num_computed + count - 1) // size
        contents = self._reusable_hashes(seq)[first:end]
        num_pages = tier.load(seq.pages[first : first + len(contents)], contents)
        num_loaded = max((first + num_pages) * size - seq.num_computed, 0)
        seq.num_computed += num_loaded
        if not seq.num_output:
            seq.num_cached += num_loaded
        return num_loaded

    def _offer(self, seq: SequenceState) -> None:
        """Let the full pages of a sequence be found, if their tokens are known and computed."""
        num_final = min(seq.num_computed, len(seq.tokens))
        full = num_final // self.pool.page_size
        hashes = self._hashes(seq, full)
        for i in range(seq.num_offered, full):
            self.pool.cache(seq.pages[i], hashes[i])
        seq.num_offered = full

    def _admit(self, seq: SequenceState) -> bool:
        """Let the next waiting sequence run, if all its known tokens fit the pages now.

        One that was preempted while results of it were in flight waits for them.
        """
        cached = self._cached_pages(seq)
        if seq.num_pending or seq.awaits_results or cached is None:
            return False
        self.pool.incref(cached)
        seq.pages.extend(cached)
        seq.num_computed = len(cached) * self.pool.page_size
        seq.num_offered = len(cached)
        if self.side is not None:
            self.side.admit(seq, seq.num_computed)
        fits = self._grow(seq, seq.num_new)
        assert fits, "admitted without enough pages"
        if not seq.num_output:
            seq.num_cached = seq.num_computed
        self.waiting.pop(seq)
        self.running.append(seq)
        return True

    def _cached_pages(self, seq: SequenceState) -> list[int] | None:
        """Return the pages that hold its first tokens; None where the other tokens do not fit."""
        cached = self.pool.match_prefix(self._reusable_hashes(seq))
        num_pages = self.pool.pages_for(len(seq.tokens))
        num_missing = num_pages - len(cached)
        taken = cached
        if self.side is not None:
            found, num_further = self.side.wanted(seq, len(cached) * self.pool.page_size)
            num_missing += num_further
            taken = cached + found
        return cached if num_missing <= self.pool.num_free_without(taken) else None

    def _reusable_hashes(self, seq: SequenceState) -> list[bytes]:
        """Return the hashes of the full pages that a sequence can take from the prefix cache.

        They end before its last token, which must be computed to sample the next one.
        """
        if self.has_whole_prompts:
            return []
        if seq.spec.reads_prompt and any(kind.needs_all_rows(seq) for kind in PROMPT_KINDS):
            return []
        max_computed = len(seq.tokens) - 1
        full = max_computed // self.pool.page_size
        return self._hashes(seq, full)[:full]

    def _hashes(self, seq: SequenceState, full: int) -> list[bytes]:
        """Return the chain of hashes of its first `full` pages, which grows with the sequence.

        The root is mixed into that of the first page that is not public.
        """
        size = self.pool.page_size
        num_public = seq.spec.num_public // size
        hashes = seq.page_hashes
        for i in range(len(hashes), full):
            parent = hashes[-1] if hashes else seq.spec.adapter
            if i == num_public:
                parent += seq.spec.prefix_root
            start = i * size
            tokens = seq.tokens[start : start + size]
            for image in seq.spec.images:
                if start <= image.position < start + size:
                    parent += image.digest
            hashes.append(page_hash(parent, tokens))
        return hashes

    def _grow(self, seq: SequenceState, count: int) -> bool:
        """Allocate the pages of `count` more tokens, and preempt sequences if there are too few.

        Returns:
            Whether `seq` has them; it has not if it was preempted itself.
        """
        num_tokens = seq.num_computed + count
        num_slots = len(seq.pages) * self.pool.page_size
        if num_tokens <= num_slots:
            return True
        wanted = self.pool.pages_for(num_tokens)
        while len(seq.pages) < wanted:
            if self.pool.num_free:
                seq.pages.append(self.pool.allocate())
                continue
            row = self.running.index(seq)
            victim = Places(self.running).newest(self.running[row:])
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _favour_new_calls(self, resting: frozenset[SequenceState]) -> None:
        """Let each call that waits and has none running be next, with one sequence.

        It takes slot and pages from a sender that has more than its own, or from a call of its own
        sender that has several, the one that has most before the others.
        """
        places = Places(self.running)
        firsts: list[SequenceState] = []
        for sender in self.waiting.senders():
            if len(self.running) + len(firsts) >= self.max_batch_size and not places.has_several:
                break
            max_firsts = self.max_batch_size - places.num_calls(sender)
            for seq in self.waiting.firsts(sender, places.calls, max_firsts, resting):
                self._make_place(seq, places, firsts)
                if len(self.running) + len(firsts) >= self.max_batch_size:
                    break  # its sender has its share
                firsts.append(seq)
                places.add(seq)
        self.waiting.move_to_front(firsts)

    def _make_place(self, seq: SequenceState, places: Places, firsts: list[SequenceState]) -> None:
        """Preempt what must give way until a waiting sequence fits after those before it."""
        while True:
            has_slot = len(self.running) + len(firsts) < self.max_batch_size
            if has_slot and (firsts or self._cached_pages(seq) is not None):
                return
            rows = [other for other in self.running if places.gives_way(other, seq)]
            if not rows:
                return
            victim = places.newest(rows)
            places.remove(victim)
            self._preempt(victim)

    def _preempt(self, seq: SequenceState) -> None:
        """Take slot and pages from a sequence, which is the next to be admitted again."""
        self.running.remove(seq)
        self._release(seq)
        self.waiting.front.appendleft(seq)
        self.num_preemptions += 1

    def _release(self, seq: SequenceState) -> None:
        self.pool.release(seq.pages)
        if self.side is not None:  # these are evicted later than the text that they precede
            self.side.release(seq)
        seq.pages = no_pages()
        seq.num_computed = 0
        seq.num_offered = 0


def _num_before_stop(draft: list[int], stop_ids: frozenset[int]) -> int:
    """Return the number of tokens of a draft before one that would end the sequence."""
    for i, token in enumerate(draft):
        if token in stop_ids:
            return i
    return len(draft)
