"""A budget of processor time for the token masks of each sender: per step, and per request.

In: requests with constraints. Out: the sequences that sit out the next step, because the masks of
their sender would take longer than its budget. The constraints of a request end it where they have
taken too long as a whole. Only the rank that takes requests measures; the others learn which
sequences sit out with each step. This file knows no grammar and no HTTP.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from llama.engine.request import Constraint
from llama.engine.sequence import SequenceState
from llama.requests.request import Request

STEP_S = 0.05  # default time of a sender in a step; ordinary masks take 0.05 to 0.3 ms each
REQUEST_S = 30.0  # default time of a request
_SLOW_MASK_S = 0.005  # mean time from which on a request may end
_QUICK_S = 0.001  # time below which no sequence sits out
_UNKNOWN_S = 0.005  # time that the first step of a request is expected to take
_WEIGHT = 0.25  # weight of the latest step in the expected time of the next one


@dataclass
class _Sender:
    """The budget of one sender.

    Attributes:
        balance_s: The time that its masks may take in the next step; negative after a long one.
    """

    balance_s: float


@dataclass
class _Cost:
    """The time that the masks of one request have taken so far.

    Attributes:
        expected_s: The time of one step of one of its sequences.
        total_s: The time of all.
        num_masks: The number of all.
    """

    expected_s: float = _UNKNOWN_S
    total_s: float = 0.0
    num_masks: int = 0

    @property
    def is_quick(self) -> bool:
        """Whether its masks take so little time that none sits out for it."""
        return self.expected_s < _QUICK_S


class TimedConstraint:
    """A constraint whose processor time is counted, and which fails once its request is too slow.

    The step thread and the thread of the masks call it in turn, never at once.
    """

    def __init__(
        self,
        constraint: Constraint,
        cost: _Cost,
        sender: _Sender,
        max_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Wrap a constraint at its beginning.

        Args:
            constraint: The constraint of one sequence.
            cost: The cost of its request.
            sender: The budget of its sender.
            max_s: The processor time that the request may take, where its masks are slow.
            clock: Returns the processor time of the calling thread in seconds.
        """
        self._constraint = constraint
        self._sender = sender
        self._max_s = max_s
        self._clock = clock
        self._failure: str | None = None
        self._step_s = 0.0  # the time since the last masks
        self.cost = cost

    @property
    def failure(self) -> str | None:
        """Why the rule can be followed no longer."""
        return self._failure or self._constraint.failure

    def fill_allowed(
        self, tokens: list[int], first: int, drafts: list[int], bits: np.ndarray
    ) -> None:
        """Set the bits of the tokens that may follow; see `Constraint.fill_allowed`."""
        cost = self.cost
        if cost.total_s > self._max_s and cost.total_s > _SLOW_MASK_S * cost.num_masks:
            mean_ms = 1000 * cost.total_s / cost.num_masks
            self._failure = (
                f"its masks have taken {self._max_s:.0f} s of processor time, {mean_ms:.0f} ms each"
            )
            bits.fill(0)
            return
        with self._timed():
            self._constraint.fill_allowed(tokens, first, drafts, bits)
        cost.num_masks += len(bits)
        cost.expected_s += _WEIGHT * (self._step_s - cost.expected_s)
        self._step_s = 0.0

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
            seconds = self._clock() - began
            self._step_s += seconds
            self.cost.total_s += seconds
            self._sender.balance_s -= seconds


class MaskBudget:
    """The budgets of all senders of an engine; every method is called with the engine's lock.

    In each step the masks of a sender may take `step_s`. Its sequences beyond that sit out the step
    and come first in the next one, except those whose masks take less than a millisecond. What a
    step took beyond the budget is made good by the steps after it, except where the sender has all
    sequences: then nobody waits for them.
    """

    def __init__(
        self,
        step_s: float = STEP_S,
        request_s: float = REQUEST_S,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Begin without debts.

        Args:
            step_s: The processor time of a sender's masks in a step, in seconds.
            request_s: The processor time of a request's masks, if they take over 5 ms each.
            clock: Returns the processor time of the calling thread in seconds.
        """
        self._step_s = step_s
        self._request_s = request_s
        self._clock = clock
        self._senders: dict[bytes, _Sender] = {}
        # The constraints of live sequences, those that sat out for longest first.
        self._watched: dict[SequenceState, TimedConstraint] = {}

    def watch(self, requests: Iterable[Request]) -> None:
        """Count the time of the constraints of requests from now on."""
        for request in requests:
            cost = _Cost()
            for answer in request.answers:
                seq = answer.sequence
                if seq.constraint is None:
                    continue
                sender = self._senders.setdefault(seq.spec.sender, _Sender(self._step_s))
                timed = TimedConstraint(seq.constraint, cost, sender, self._request_s, self._clock)
                seq.constraint = timed
                self._watched[seq] = timed

    def resting(self, live: Collection[SequenceState]) -> list[SequenceState]:
        """Return the sequences that sit out the next step, and pay for the step before.

        Args:
            live: All sequences that are queued or run.
        """
        self._watched = {seq: timed for seq, timed in self._watched.items() if seq in live}
        groups: defaultdict[bytes, list[SequenceState]] = defaultdict(list)
        for seq in self._watched:
            groups[seq.spec.sender].append(seq)
        for name, sender in list(self._senders.items()):
            is_alone = name in groups and len(groups[name]) == len(live)
            paid_s = self._step_s if is_alone else sender.balance_s + self._step_s
            sender.balance_s = min(self._step_s, paid_s)
            if name not in groups and sender.balance_s == self._step_s:
                del self._senders[name]
        return [seq for name in groups for seq in self._beyond(name, groups[name])]

    def _beyond(self, name: bytes, sequences: list[SequenceState]) -> list[SequenceState]:
        """Return which sequences of a sender do not fit its budget in the next step."""
        costs = {seq: self._watched[seq].cost for seq in sequences}
        left_s = self._senders[name].balance_s
        left_s -= sum(cost.expected_s for cost in costs.values() if cost.is_quick)
        slow = [seq for seq in sequences if not costs[seq].is_quick]
        resting = []
        # Requests of which nothing is known come first: most of them are quick.
        for seq in sorted(slow, key=lambda seq: costs[seq].num_masks > 0):
            if left_s <= 0:
                resting.append(seq)
                continue
            left_s -= costs[seq].expected_s
            self._watched[seq] = self._watched.pop(seq)  # the others come first in the next step
        return resting
