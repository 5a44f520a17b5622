"""The requests that a model works on: how many it takes, and which give way where it has too many.

In: requests, with the number of their sequences and their sender. Out: which others end so that one
is taken, or an `ApiError`. This file knows no engine and no HTTP.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from llama.server.errors import ApiError


class Admitted(Protocol):
    """A request that a model works on."""

    @property
    def sender(self) -> bytes:
        """Whoever sent it."""

    @property
    def num_unfinished(self) -> int:
        """The number of its sequences that run or wait."""

    @property
    def has_waiting(self) -> bool:
        """Whether any of its sequences has no token yet."""


_T = TypeVar("_T", bound=Admitted)


class Admission(Generic[_T]):
    """The requests that a model works on, in the order in which they came.

    Attributes:
        max_queue: sequences that may wait, besides those that run.
    """

    def __init__(self, max_queue: int) -> None:
        """Begin without requests."""
        self.max_queue = max_queue
        self._active: dict[_T, int] = {}  # and how many sequences each of them began with
        self._num_begun = 0  # their sum

    def __iter__(self) -> Iterator[_T]:
        """Iterate over a copy, as other threads count what there is."""
        return iter(list(self._active))

    def __bool__(self) -> bool:
        return bool(self._active)

    def num_unfinished(self) -> int:
        """Return the number of sequences that run or wait."""
        return sum(active.num_unfinished for active in self)

    def add(self, active: _T) -> None:
        """Count a request from now on."""
        num_begun = active.num_unfinished
        self._active[active] = num_begun
        self._num_begun += num_begun

    def remove(self, active: _T) -> None:
        """Count a request no longer."""
        self._num_begun -= self._active.pop(active)

    def check_size(self, num_sequences: int, max_running: int, field: str) -> None:
        """Check that a request may be taken at all.

        It may take the whole batch and half of the queue, so that others get in alongside it.

        Args:
            num_sequences: sequences of the request.
            max_running: sequences that may run.
            field: the field of the body that asks for them.

        Raises:
            ApiError: 400 if the queue never has that much capacity.
        """
        max_sequences = max_running + self.max_queue // 2
        if num_sequences > max_sequences:
            message = (
                f"the request asks for {num_sequences} answers (prompts times n or best_of): this "
                f"server takes at most {max_sequences} at once; send several requests, or start it "
                "with a larger --max_queue"
            )
            raise ApiError(400, message, param=field)

    def giving_way(self, num_sequences: int, sender: bytes, max_running: int) -> list[_T]:
        """Return the requests that must end so that another one is taken.

        These are the newest ones of the sender with the most sequences, whose sequences wait, as
        long as that sender keeps at least as many as the newcomer's.

        Args:
            num_sequences: sequences of the new request.
            sender: whoever sends it.
            max_running: sequences that may run.

        Raises:
            ApiError: 503 if the queue has no capacity for it now, and nobody gives way.
        """
        capacity = max_running + self.max_queue - num_sequences
        if self._num_begun <= capacity:  # To count those that have not ended takes 1 us for each.
            return []
        num_over = self.num_unfinished() - capacity
        if num_over <= 0:
            return []
        held: Counter[bytes] = Counter()
        held[sender] = num_sequences
        for active in self:
            held[active.sender] += active.num_unfinished
        found: list[_T] = []
        while num_over > 0:
            able = [
                active
                for active in reversed(self._active)
                if active not in found
                and held[active.sender] - active.num_unfinished >= held[sender]
                and active.has_waiting
            ]
            if not able:
                raise queue_is_full()
            found.append(max(able, key=lambda active: held[active.sender]))
            held[found[-1].sender] -= found[-1].num_unfinished
            num_over -= found[-1].num_unfinished
        return found


def queue_is_full() -> ApiError:
    """Return the error of a request that is refused or ended because there are too many."""
    return ApiError(503, "the queue is full: too many sequences run or wait; try again")
