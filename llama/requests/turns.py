"""Whose sequences are next: the calls that wait take turns, so that none waits for another's end.

In: the sequences of each call, in order. Out: as many as there are free places, one of each call
after the other, and for a call that has none in the core the place of one that has several. What
the core preempts goes first. Nothing but the calls decides the order: all ranks decide alike.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable

from llama.engine.sequence import Sequence
from llama.requests.request import Answer, Request

Owner = tuple[Request, Answer]  # of a sequence


class Turns:
    """What the core does not have yet. A call is the requests that are queued together. Ctrl-C may
    end `discard` between any two statements: the next one goes on from there."""

    def __init__(self) -> None:
        self._calls: deque[OrderedDict[Sequence, Owner]] = deque()  # the next one first
        self._num_calls = 0

    def add(self, requests: Iterable[Request]) -> None:
        """A call, which comes behind those that wait."""
        call = OrderedDict((a.sequence, (r, a)) for r in requests for a in r.answers)
        self._num_calls += 1
        for seq in call:
            seq.call = self._num_calls
        self._calls.append(call)

    def discard(self, request: Request) -> None:
        """What waits of it is wanted no longer."""
        for waiting in self._calls:
            for answer in request.answers:
                waiting.pop(answer.sequence, None)

    def take(self, most: int) -> dict[Sequence, Owner]:
        """The next sequences, at most so many."""
        taken: dict[Sequence, Owner] = {}
        while self._calls and len(taken) < most:
            waiting = self._calls.popleft()
            if waiting:
                seq, taken[seq] = waiting.popitem(last=False)
            if waiting:
                self._calls.append(waiting)
        return taken

    def take_new(self, most: int, calls: set[int]) -> dict[Sequence, Owner]:
        """The first sequence of each call that is not one of `calls`, at most so many."""
        new = [x for x in self._calls if x and next(iter(x)).call not in calls][:most]
        return dict(waiting.popitem(last=False) for waiting in new)
