"""The queue of sequences that wait to run, in which senders and their calls take turns.

Without turns, a call of two sequences would wait until a call of a thousand has ended, and a sender
of one call until all calls of another have ended. The order depends only on the order of arrival,
on the senders and on the calls, so that it is the same on all ranks. The queue does not know which
sequences run; `Places` counts them.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import chain

from llama.engine.sequence import SequenceState

_NONE: frozenset[SequenceState] = frozenset()


class WaitingQueue:
    """Waiting sequences: first those at the front, then one of each sender in turn.

    The turns of a sender go to its calls in turn. The scheduler moves a sequence to the front when
    it is preempted, or when its call has no running sequence.

    Attributes:
        front: The sequences that come before all others, in order.
    """

    def __init__(self) -> None:
        self.front: deque[SequenceState] = deque()
        # For each sender, queues by the number of their call. Both are in the order of their turns,
        # and none is empty.
        self._senders: OrderedDict[bytes, OrderedDict[int, OrderedDict[SequenceState, None]]] = (
            OrderedDict()
        )

    def __bool__(self) -> bool:
        return bool(self.front or self._senders)

    def __len__(self) -> int:
        return len(self.front) + sum(map(len, self._queues()))

    def __iter__(self) -> Iterator[SequenceState]:
        return chain(self.front, *self._queues())

    def _queues(self) -> Iterator[OrderedDict[SequenceState, None]]:
        return chain.from_iterable(calls.values() for calls in self._senders.values())

    def add(self, seq: SequenceState) -> None:
        """Append a new sequence to its call; new senders and calls come after those that wait."""
        calls = self._senders.setdefault(seq.spec.sender, OrderedDict())
        calls.setdefault(seq.spec.call, OrderedDict())[seq] = None

    def peek(
        self, resting: Container[SequenceState] = _NONE, without: Container[bytes] = ()
    ) -> SequenceState | None:
        """Return the sequence that is next, if there is one.

        Args:
            resting: Sequences that are left out.
            without: Senders that are left out.
        """
        for sequences in chain([self.front], self._queues()):
            for seq in sequences:
                if seq not in resting and seq.spec.sender not in without:
                    return seq
        return None

    def pop(self, seq: SequenceState) -> None:
        """Remove the sequence that is next, which ends the turn of its sender and its call."""
        if seq not in self.front:
            self._senders[seq.spec.sender].move_to_end(seq.spec.call)
            self._senders.move_to_end(seq.spec.sender)
        self.remove(seq)

    def senders(self) -> list[bytes]:
        """Return all senders, in the order of their turns."""
        at_front = [seq.spec.sender for seq in self.front]
        return list(dict.fromkeys([*at_front, *self._senders]))

    def firsts(
        self,
        sender: bytes,
        calls: Container[int],
        limit: int,
        resting: Container[SequenceState] = _NONE,
    ) -> list[SequenceState]:
        """Return the first sequence of each call of a sender, without those that rest.

        Args:
            sender: The sender.
            calls: Calls that are left out.
            limit: The largest number of sequences.
            resting: Sequences that are left out.
        """
        at_front = [seq for seq in self.front if seq.spec.sender == sender]
        firsts: dict[int, SequenceState] = {}
        for queue in chain([at_front], self._senders.get(sender, OrderedDict()).values()):
            for seq in queue:
                if len(firsts) >= limit:
                    return list(firsts.values())
                if seq in resting:
                    continue
                if seq.spec.call not in calls:
                    firsts.setdefault(seq.spec.call, seq)
                if queue is not at_front:
                    break
        return list(firsts.values())

    def move_to_front(self, sequences: list[SequenceState]) -> None:
        """Move waiting sequences before all others, in this order; the turns stay as they are."""
        for seq in sequences:
            self.remove(seq)
        self.front.extendleft(reversed(sequences))

    def remove(self, seq: SequenceState) -> None:
        """Remove a sequence, if it waits."""
        calls = self._senders.get(seq.spec.sender, OrderedDict())
        queue = calls.get(seq.spec.call, OrderedDict())
        if seq in queue:
            del queue[seq]
            if not queue:
                del calls[seq.spec.call]
            if not calls:
                del self._senders[seq.spec.sender]
        elif seq in self.front:
            self.front.remove(seq)

    def clear(self) -> None:
        """Remove all sequences."""
        self.front.clear()
        self._senders.clear()


class Places:
    """The places of a batch that each sender and each call has.

    Attributes:
        calls: The number of places of each call.
    """

    def __init__(self, sequences: Iterable[SequenceState]) -> None:
        """Count the places of some sequences."""
        self.calls: Counter[int] = Counter()
        self._senders: Counter[bytes] = Counter()
        self._calls_of: Counter[bytes] = Counter()
        for seq in sequences:
            self.add(seq)

    def add(self, seq: SequenceState) -> None:
        """Count the place that a sequence gets."""
        self._calls_of[seq.spec.sender] += not self.calls[seq.spec.call]
        self._senders[seq.spec.sender] += 1
        self.calls[seq.spec.call] += 1

    def remove(self, seq: SequenceState) -> None:
        """Count the place that a sequence gives up."""
        self._senders[seq.spec.sender] -= 1
        self.calls[seq.spec.call] -= 1

    @property
    def has_several(self) -> bool:
        """Whether any sender has several places."""
        return max(self._senders.values(), default=0) > 1

    def num_calls(self, sender: bytes) -> int:
        """Return how many calls of a sender have a place, or had one before `remove`."""
        return self._calls_of[sender]

    def newest(self, rows: list[SequenceState]) -> SequenceState:
        """Return the newest of some sequences, of the sender and its call that have most places."""
        return max(
            reversed(rows),
            key=lambda seq: (self._senders[seq.spec.sender], self.calls[seq.spec.call]),
        )

    def gives_way(self, seq: SequenceState, newcomer: SequenceState) -> bool:
        """Return whether a running sequence gives its place to one of a call that has none.

        It does where its sender has more places, even after that, or where both have one sender and
        its call keeps a place.
        """
        if seq.spec.sender == newcomer.spec.sender:
            return self.calls[seq.spec.call] > 1
        return self._senders[seq.spec.sender] > self._senders[newcomer.spec.sender] + 1


class PromptShares:
    """The prompt tokens of a step, in equal shares for the senders that have prompts.

    What a sender does not want goes to the others.

    Attributes:
        left: The tokens that are left for all of them.
    """

    def __init__(self, num_tokens: int, wanted: Mapping[bytes, int]) -> None:
        """Divide the tokens of a step.

        Args:
            num_tokens: The number of them.
            wanted: How many each sender wants at least. The one that wants most, and those that are
                not named, have what the others leave.
        """
        self.left = num_tokens
        self._shares: dict[bytes, int] = {}
        num_rest = num_tokens
        by_count = sorted(wanted, key=wanted.__getitem__)
        for i, sender in enumerate(by_count[:-1]):
            equal = num_rest // (len(by_count) - i)
            share = min(wanted[sender], equal)
            self._shares[sender] = share
            num_rest -= share
        if len(by_count) > 1:
            self._shares[by_count[-1]] = num_rest

    def left_of(self, sender: bytes) -> int:
        """Return how many tokens are left for a sender."""
        return min(self.left, self._shares.get(sender, self.left))

    @property
    def used_up(self) -> list[bytes]:
        """The senders that have none left."""
        return [sender for sender, count in self._shares.items() if count <= 0]

    def take(self, sender: bytes, count: int) -> None:
        """Take so many tokens for a sender."""
        self.left -= count
        if sender in self._shares:
            self._shares[sender] -= count
