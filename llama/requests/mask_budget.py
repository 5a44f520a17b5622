"""Turns for slow token masks, which take at most half of the time while others have requests.

In: requests with constraints. Out: the sequences that sit out the next step, because their masks
are slow and it is not their turn. The constraints of a request end it where they have taken too
long as a whole. Only the rank that takes requests measures; the others learn which sequences sit
out with each step. This file knows no grammar and no HTTP.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from llama.engine.request import Constraint
from llama.engine.sequence import SequenceState
from llama.engine.waiting import WaitingQueue
from llama.requests.port import Group

_SLOW_S = 0.005  # time from which on a mask is slow; ordinary ones take 0.05 to 0.3 ms
_STEP_S = 0.05  # time of slow masks in a step, beyond which no other one begins
_REQUEST_S = 30.0  # time of the masks of a request, if they are slow


@dataclass(eq=False)
class _Cost:
    """The processor time of the masks of one request, in seconds.

    Attributes:
        mask_s: The mean time of a mask in the latest step that had any; at first it counts as slow.
        step_s: The time of the current step.
        num_in_step: The number of masks in the current step.
        total_s: The time of all steps before.
        num_masks: The number of masks in all of them.
    """

    mask_s: float = _SLOW_S
    step_s: float = 0.0
    num_in_step: int = 0
    total_s: float = 0.0
    num_masks: int = 0

    @property
    def is_slow(self) -> bool:
        """Whether its masks take turns with other slow ones."""
        return self.mask_s >= _SLOW_S

    def end_step(self) -> float:
        """Begin another step, and return the time that slow masks took in this one."""
        seconds = self.step_s
        if self.num_in_step:
            self.mask_s = seconds / self.num_in_step
        self.total_s += seconds
        self.num_masks += self.num_in_step
        self.step_s = 0.0
        self.num_in_step = 0
        return seconds if self.is_slow else 0.0


class TimedConstraint:
    """A constraint whose processor time is counted, and which fails once its request is too slow.

    The step thread and the thread of the masks call it in turn, never at once.
    """

    def __init__(self, constraint: Constraint, cost: _Cost, clock: Callable[[], float]) -> None:
        """Wrap a constraint at its beginning.

        Args:
            constraint: The constraint of one sequence.
            cost: The cost of its request.
            clock: Returns the processor time of the calling thread in seconds.
        """
        self._constraint = constraint
        self._cost = cost
        self._clock = clock
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:
        """Why the rule can be followed no longer."""
        return self._failure or self._constraint.failure

    def fill_allowed(
        self, tokens: list[int], first: int, drafts: list[int], bits: np.ndarray
    ) -> None:
        """Set the bits of the tokens that may follow; see `Constraint.fill_allowed`."""
        cost = self._cost
        if cost.total_s > _REQUEST_S and cost.total_s > _SLOW_S * cost.num_masks:
            mean_ms = 1000 * cost.total_s / cost.num_masks
            self._failure = (
                f"its masks have taken {_REQUEST_S:.0f} s of processor time, {mean_ms:.0f} ms each"
            )
            bits.fill(0)
            return
        with self._timed():
            self._constraint.fill_allowed(tokens, first, drafts, bits)
        cost.num_in_step += len(bits)

    def draft(self, output: list[int], draft: list[int]) -> tuple[list[int], bool]:
        """Return tokens that must or may follow; see `Constraint.draft`."""
        with self._timed():
            return self._constraint.draft(output, draft)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the processor time of a block."""
        began = self._clock()
        try:
            yield
        finally:
            self._cost.step_s += self._clock() - began


class MaskBudget:
    """The turns of slow masks in an engine; every method is called with the engine's lock.

    Senders take turns, and the requests of a sender, for about 50 ms of a step. After a step that
    had slow masks, none are made for as long as they took, so that steps take at most twice as long
    on average. Where all sequences have slow masks, nobody waits for them, and some run in each
    step. Sequences whose masks are not slow never sit out.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.thread_time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without sequences.

        Args:
            clock: Returns the processor time of the calling thread in seconds.
            now: Returns the time in seconds.
        """
        self._clock = clock
        self._now = now
        self._due = 0.0  # the time from which on slow masks are made again
        self._costs: dict[SequenceState, _Cost] = {}
        self._turns = WaitingQueue()

    def watch(self, groups: Iterable[Group]) -> None:
        """Count the time of the constraints of requests from now on."""
        for group in groups:
            cost = _Cost()
            for seq in group.sequences:
                if seq.constraint is not None:
                    seq.constraint = TimedConstraint(seq.constraint, cost, self._clock)
                    self._costs[seq] = cost
                    self._turns.add(seq)

    def resting(self, live: Collection[SequenceState]) -> list[SequenceState]:
        """Return the sequences that sit out the next step.

        Args:
            live: All sequences that are queued or run.
        """
        slow_s = sum(cost.end_step() for cost in set(self._costs.values()))
        if slow_s:
            self._due = self._now() + slow_s
        for seq in self._costs.keys() - live:
            del self._costs[seq]
            self._turns.remove(seq)
        waiting = {seq for seq, cost in self._costs.items() if cost.is_slow}
        left_s = _STEP_S if self._now() >= self._due or len(waiting) == len(live) else 0.0
        others = self._costs.keys() - waiting
        while waiting and left_s > 0:
            first = self._turns.peek(others)
            assert first is not None, "each sequence of `waiting` has its turn"
            self._turns.pop(first)
            self._turns.add(first)  # it is the last one in the next step
            waiting.remove(first)
            others.add(first)
            left_s -= self._costs[first].mask_s
        return [seq for seq in self._costs if seq in waiting]
