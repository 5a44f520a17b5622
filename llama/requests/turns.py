"""Whose sequences are next: the calls that wait take turns, so that none waits for another's end.

In: the sequences of each call, in order. Out: as many as there are free places, one of each call
after the other. The core gets a sequence when it has a place for it; what it preempts goes first.
The order depends on nothing but the calls, so all ranks decide alike.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import count

from llama.engine.sequence import Sequence
from llama.requests.request import Answer, Request

Owner = tuple[Request, Answer]  # of a sequence


class Turns:
    """What the core does not have yet. A call is the requests that are queued together. Ctrl-C may
    end `add` and `discard` between any two statements: `discard` and `take` go on from there."""

    def __init__(self) -> None:
        self._numbers = count()
        self._calls: OrderedDict[int, OrderedDict[Sequence, Owner]] = OrderedDict()
        self._call_of: dict[Request, int] = {}  # of what has sequences that wait

    def add(self, requests: Iterable[Request]) -> None:
        """A call, which comes behind those that wait."""
        number = next(self._numbers)
        waiting = OrderedDict((a.sequence, (r, a)) for r in requests for a in r.answers)
        self._call_of |= {request: number for request, _ in waiting.values()}
        self._calls[number] = waiting

    def discard(self, request: Request) -> None:
        """What waits of it is wanted no longer."""
        if waiting := self._calls.get(self._call_of.get(request, -1)):
            for answer in request.answers:
                waiting.pop(answer.sequence, None)
        self._call_of.pop(request, None)

    def take(self, most: int) -> dict[Sequence, Owner]:
        """The next sequences, at most so many."""
        taken: dict[Sequence, Owner] = {}
        while self._calls and len(taken) < most:
            number, waiting = self._calls.popitem(last=False)
            if waiting:
                seq, owner = waiting.popitem(last=False)
                taken[seq] = owner
                request, answer = owner
                if answer is request.answers[-1]:
                    self._call_of.pop(request, None)
            if waiting:
                self._calls[number] = waiting
        return taken
