"""An engine with an artificial model, and access to the scheduler's preemptions."""

import itertools
import random
from collections import deque
from dataclasses import dataclass
from typing import Any

from helpers.sequences import state_of
from llama.engine.core import EngineCore
from llama.engine.pages import PagePool
from llama.engine.rows import Reader, Scheduled, Tokens
from llama.engine.scheduler import Scheduler
from llama.engine.sequence import SequenceState
from llama.engine.step import Step, StepResults
from llama.options.speculation.drafter import Drafter, DraftState
from llama.options.stages import Pipeline, StageStepper
from llama.ranks.parallel import Parallel

VOCAB = 7  # small, so that prefixes often coincide


def next_token(tokens: list[int]) -> int:
    """Return the next token of an artificial model: a function of all earlier tokens alone."""
    return sum((i + 1) * (t + 3) for i, t in enumerate(tokens)) * 2654435761 % 1009 % VOCAB


def prefix_hashes(tokens: list[int]) -> list[int]:
    """Return the hash of each token with all tokens before it."""
    return [*itertools.accumulate(tokens, lambda before, token: hash((before, token)))]


@dataclass
class FakeStep:
    """A running step of a runner that has no model."""

    read: Reader[StepResults]
    needs_tokens: bool = False

    def compute_rows(self) -> Reader[StepResults]:
        return self.read


class FakeRunner:
    """A runner that stores what was written in each slot, as the KV cache would, and checks each
    read. A slot stores the hash of the tokens up to its own.

    Like a device, it has the last sampled token of each sequence, whether the host has read it or
    not.
    """

    def __init__(self, page_size: int, *, async_scheduling: bool = False) -> None:
        self.page_size = page_size
        self.async_scheduling = async_scheduling
        self.last: dict[SequenceState, int] = {}
        self.slots: dict[int, int] = {}
        self.computed = 0
        self.budgets: list[int] = []

    def start(self, step: Step) -> FakeStep:
        self.budgets.append(sum(item.count for item in step.items))
        counts = [item.count for item in step.items]
        assert counts == sorted(counts, key=lambda c: c > 1), "single tokens come first"
        prefixes = [prefix_hashes(self.known(item)) for item in step.items]
        for item, hashes in zip(step.items, prefixes, strict=True):
            for p in range(item.start, item.start + item.count):
                self.slots[self.slot(item.sequence, p)] = hashes[p]
                self.computed += 1
        # after all writes, so that a page shared by mistake is detected
        for item, hashes in zip(step.items, prefixes, strict=True):
            for p in range(item.start + item.count):
                assert self.slots[self.slot(item.sequence, p)] == hashes[p], "foreign page"
        results: StepResults = {}
        last: dict[SequenceState, int] = {}
        for kind, rows in step.rows.items():
            results[kind] = Tokens()
            for item, offsets in zip(rows.items, rows.offsets, strict=True):
                known = self.known(item)
                ids = [next_token(known[: item.start + i + 1]) for i in offsets]
                last[item.sequence] = ids[0]
                results[kind].ids += ids
        self.last = last
        return FakeStep(lambda: results)

    def known(self, item: Scheduled) -> list[int]:
        """Return the tokens; a pending one is replaced by what the previous step sampled."""
        seq = item.sequence
        return [*seq.tokens, *([self.last[seq]] if seq.num_pending else []), *item.drafts]

    def close(self) -> None:
        pass

    def slot(self, seq: SequenceState, p: int) -> int:
        return seq.pages[p // self.page_size] * self.page_size + p % self.page_size


class RandomDrafts(Drafter):
    """A drafter of random length whose drafts are partly right."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(9, Parallel(), [])
        self.rng = rng

    def _begin(self, seq: SequenceState) -> DraftState:
        return DraftState(seq, [])

    def _draft(self, states: list[DraftState], seconds: float) -> list[list[int]]:
        return [self.draft_of(list(x.seq.tokens)) for x in states]

    def draft_of(self, tokens: list[int]) -> list[int]:
        known = len(tokens)
        for _ in range(self.rng.choice((0, 0, 1, 5, 9))):
            is_right = self.rng.random() < 0.8
            tokens.append(next_token(tokens) if is_right else self.rng.randrange(VOCAB))
        return tokens[known:]


class FakePipeline(Pipeline):
    """The steps in flight on the first stage, which runs each step when it is started."""

    def __init__(self, runner: FakeRunner, stages: int) -> None:
        self.runner, self._max_steps = runner, stages
        self.steps: deque[tuple[Step, FakeStep]] = deque()

    def __len__(self) -> int:
        return len(self.steps)

    def start(self, step: Step) -> None:
        scheduled = {item.sequence for item in step.items}
        for other, _ in self.steps:
            awaited = {item.sequence for rows in other.rows.values() for item in rows.items}
            assert not awaited & scheduled, "a sequence runs before its results are read"
        self.steps.append((step, self.runner.start(step)))

    def settle(self) -> tuple[Step, StepResults]:
        step, running = self.steps.popleft()
        return step, running.read()

    def flush(self) -> None:
        pass

    def clear(self) -> None:
        self.steps.clear()


class FakeEngine(EngineCore):
    runner: Any  # a FakeRunner


def never_found(pool: PagePool) -> None:
    """Disable reuse: no page is found by its hash, so that all tokens are computed."""
    pool.cache = lambda page, content: None  # type: ignore[method-assign]


def engine(
    num_pages=8,
    page_size=4,
    max_batch_size=4,
    budget=8,
    reuse=True,
    async_scheduling=False,
    stages=1,
) -> FakeEngine:
    pool = PagePool(num_pages, page_size)
    if not reuse:
        never_found(pool)
    scheduler = Scheduler(
        pool, max_batch_size=max_batch_size, token_budget=budget, num_stages=stages
    )
    runner: Any = FakeRunner(page_size, async_scheduling=async_scheduling)
    stepper = StageStepper(FakePipeline(runner, stages)) if stages > 1 else None
    return FakeEngine(runner, scheduler, stepper)


def sequence(
    prompt: list[int],
    count: int,
    stop_ids: frozenset[int] = frozenset(),
    call: int = 0,
    prefix_root: bytes = b"",
    sender: bytes = b"",
) -> SequenceState:
    max_len = len(prompt) + count
    return state_of(
        prompt, max_len, 1, call=call, sender=sender, stop_ids=stop_ids, prefix_root=prefix_root
    )


def watch_releases(scheduler: Scheduler, monkeypatch) -> list[bool]:
    """Return a list that records, for each release of pages, whether the sequence had finished."""
    finished: list[bool] = []
    release = scheduler._release

    def watched(seq: SequenceState) -> None:
        finished.append(seq.finished)
        release(seq)

    monkeypatch.setattr(scheduler, "_release", watched)
    return finished
