"""The sequences that wait to run, in the order in which they are next: calls take turns.

Without turns, a call of two sequences would wait for the end of one with a thousand. Only the order
of arrival and the calls decide, so that all ranks decide alike.
"""

from collections import OrderedDict, deque
from collections.abc import Container, Iterator
from itertools import chain

from llama.engine.sequence import SequenceState


class WaitingQueue:
    """Waiting sequences: those at the front, then one of each call in turn.

    A sequence comes to the front when it is preempted, or when its call has none running.
    """

    def __init__(self) -> None:
        self.front: deque[SequenceState] = deque()
        # By the number of the call, the one whose turn it is first. No call is empty.
        self._calls: OrderedDict[int, OrderedDict[SequenceState, None]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self.front or self._calls)

    def __len__(self) -> int:
        return len(self.front) + sum(map(len, self._calls.values()))

    def __iter__(self) -> Iterator[SequenceState]:
        return chain(self.front, *self._calls.values())

    def add(self, seq: SequenceState) -> None:
        """Append a new sequence to its call; a new call comes behind those that wait."""
        self._calls.setdefault(seq.spec.call, OrderedDict())[seq] = None

    def peek(self) -> SequenceState:
        """Return the sequence that is next."""
        if self.front:
            return self.front[0]
        return next(iter(next(iter(self._calls.values()))))

    def pop(self) -> SequenceState:
        """Remove and return the sequence that is next; the turn of its call is over then."""
        seq = self.peek()
        if not self.front:
            self._calls.move_to_end(seq.spec.call)
        self.remove(seq)
        return seq

    def firsts(self, calls: Container[int], limit: int) -> list[SequenceState]:
        """Return the first sequence of each call that is not one of `calls`, at most `limit`."""
        found: dict[int, SequenceState] = {}
        firsts = chain(self.front, (next(iter(queue)) for queue in self._calls.values()))
        for seq in firsts:
            if len(found) >= limit:
                break
            if seq.spec.call not in calls:
                found.setdefault(seq.spec.call, seq)
        return list(found.values())

    def move_to_front(self, sequences: list[SequenceState]) -> None:
        """Put waiting sequences before all others, in this order. Their calls keep their turns."""
        for seq in sequences:
            self.remove(seq)
        self.front.extendleft(reversed(sequences))

    def remove(self, seq: SequenceState) -> None:
        """Remove a sequence; nothing happens if it does not wait."""
        queue = self._calls.get(seq.spec.call, OrderedDict())
        if seq in queue:
            del queue[seq]
            if not queue:
                del self._calls[seq.spec.call]
        elif seq in self.front:
            self.front.remove(seq)

    def clear(self) -> None:
        """Remove all sequences."""
        self.front.clear()
        self._calls.clear()
