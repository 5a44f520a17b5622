"""The queue of sequences that wait to run, in which calls take turns.

Without turns, a call of two sequences would wait until a call of a thousand has ended. The order
depends only on the order of arrival and on the calls, so that it is the same on all ranks. The
queue does not know which sequences run.
"""

from collections import OrderedDict, deque
from collections.abc import Container, Iterator
from itertools import chain

from llama.engine.sequence import SequenceState


class WaitingQueue:
    """Waiting sequences: first those at the front, then one of each call in turn.

    The scheduler moves a sequence to the front when it is preempted, or when its call has no
    running sequence.

    Attributes:
        front: The sequences that come before all others, in order.
    """

    def __init__(self) -> None:
        self.front: deque[SequenceState] = deque()
        # Queues by the number of their call, in the order of their turns. No queue is empty.
        self._calls: OrderedDict[int, OrderedDict[SequenceState, None]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self.front or self._calls)

    def __len__(self) -> int:
        num_in_calls = sum(map(len, self._calls.values()))
        return len(self.front) + num_in_calls

    def __iter__(self) -> Iterator[SequenceState]:
        return chain(self.front, *self._calls.values())

    def add(self, seq: SequenceState) -> None:
        """Append a new sequence to its call; a new call comes after those that wait."""
        queue = self._calls.setdefault(seq.spec.call, OrderedDict())
        queue[seq] = None

    def peek(self) -> SequenceState:
        """Return the sequence that is next."""
        if self.front:
            return self.front[0]
        queue = next(iter(self._calls.values()))
        return next(iter(queue))

    def pop(self) -> SequenceState:
        """Remove and return the sequence that is next, which ends the turn of its call."""
        seq = self.peek()
        if not self.front:
            self._calls.move_to_end(seq.spec.call)
        self.remove(seq)
        return seq

    def firsts(self, calls: Container[int], limit: int) -> list[SequenceState]:
        """Return the first sequence of each call that is not one of `calls`, at most `limit`."""
        firsts: dict[int, SequenceState] = {}
        heads = (next(iter(queue)) for queue in self._calls.values())
        for seq in chain(self.front, heads):
            if len(firsts) >= limit:
                break
            call = seq.spec.call
            if call not in calls:
                firsts.setdefault(call, seq)
        return list(firsts.values())

    def move_to_front(self, sequences: list[SequenceState]) -> None:
        """Move waiting sequences before all others, in this order; calls keep their turns."""
        for seq in sequences:
            self.remove(seq)
        self.front.extendleft(reversed(sequences))

    def remove(self, seq: SequenceState) -> None:
        """Remove a sequence, if it waits."""
        call = seq.spec.call
        queue = self._calls.get(call, OrderedDict())
        if seq in queue:
            del queue[seq]
            if not queue:
                del self._calls[call]
        elif seq in self.front:
            self.front.remove(seq)

    def clear(self) -> None:
        """Remove all sequences."""
        self.front.clear()
        self._calls.clear()
