"""Whose sequences are next: the calls that wait take turns, so that none waits for another's end.

In: the sequences of each call, in order. Out: as many as there are free places, one of each call
after the other. The core gets a sequence when it has a place for it; what it preempts goes first.
The order depends on nothing but the calls, so all ranks decide alike.
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

    def add(self, requests: Iterable[Request]) -> None:
        """A call, which comes behind those that wait."""
        self._calls.append(OrderedDict((a.sequence, (r, a)) for r in requests for a in r.answers))

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
