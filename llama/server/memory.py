"""Memory that senders share: a limit for all of them together, and half of it for each.

In: how many bytes a body has so far, or an answer may have at most. Out: an `ApiError` 503 where
there are too many. What arrives too slowly gives way where others need its bytes. This file knows
no HTTP.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator

from llama.server.errors import ApiError

SLOW_S = 2.0  # time by which something may be late until it counts as slow
MIN_RATE = 128 * 1024  # bytes per second; at this rate the largest body arrives within its time


class SharedMemory:
    """The bytes that requests hold. All methods are called in one event loop.

    The first bytes of each request do not count, so that small requests always come through.

    Attributes:
        max_bytes: bytes of all requests together; the requests of one sender have at most half.
        num_free: bytes of each request that do not count.
        refusal: the message for a request that is refused.
        used: bytes that count now.
        used_by: bytes that count now, by their sender.
    """

    def __init__(self, max_bytes: int, num_free: int, refusal: str) -> None:
        """Begin with nothing held."""
        self.max_bytes = max_bytes
        self.num_free = num_free
        self.refusal = refusal
        self.used = 0
        self.used_by: Counter[bytes] = Counter()
        self._arriving: dict[Holding, asyncio.Timeout] = {}

    @contextlib.contextmanager
    def held(self, sender: bytes) -> Iterator["Holding"]:
        """Yield what a request holds, which is nothing at first; the context gives it back.

        Args:
            sender: whoever sends the request, see `AuthAndLimits`; the share of senders that are
                not known is not limited.
        """
        holding = Holding(self, sender)
        try:
            yield holding
        finally:
            holding.give_back()

    @contextlib.asynccontextmanager
    async def arriving(self, holding: "Holding") -> AsyncIterator[None]:
        """Let something arrive within the context, which ends if it is slow and others need it.

        Raises:
            ApiError: 503 if it has given way to another request.
        """
        try:
            async with asyncio.timeout(None) as limit:
                self._arriving[holding] = limit
                yield
        except TimeoutError:
            message = "the body came slowly, and others needed its memory: send it again"
            raise ApiError(503, message) from None
        finally:
            self._arriving.pop(holding, None)

    def count(self, sender: bytes, num_bytes: int) -> None:
        """Count more bytes, or fewer if the number is negative."""
        self.used += num_bytes
        self.used_by[sender] += num_bytes
        if not self.used_by[sender]:
            del self.used_by[sender]

    def check(self, holding: "Holding", num_more: int) -> None:
        """Check that a request may hold so many more bytes that count.

        Raises:
            ApiError: 503 if all requests or those of its sender would hold too many.
        """
        if num_more <= 0:
            return
        while self.used + num_more > self.max_bytes:
            self._end_slowest([other for other in self._arriving if other is not holding])
        # One request alone may have all bytes where the limits are so small.
        while (
            holding.sender
            and self.used_by[holding.sender] > holding.num_counted
            and self.used_by[holding.sender] + num_more > self.max_bytes // 2
        ):
            others = [other for other in self._arriving if other is not holding]
            self._end_slowest([other for other in others if other.sender == holding.sender])

    def _end_slowest(self, holdings: list["Holding"]) -> None:
        """Take the bytes of the slowest of some requests, which then ends with an error.

        Raises:
            ApiError: 503 if none of them is slow.
        """
        slow = [holding for holding in holdings if holding.late_s > 0 and holding.num_counted]
        if not slow:
            raise ApiError(503, self.refusal)
        slowest = max(slow, key=lambda holding: holding.late_s)
        slowest.give_back()
        self._arriving.pop(slowest).reschedule(0.0)


class Holding:
    """The bytes that one request holds.

    Attributes:
        sender: whoever sends the request.
        num_bytes: its bytes, with those that do not count.
    """

    def __init__(self, memory: SharedMemory, sender: bytes) -> None:
        """Begin without bytes."""
        self.sender = sender
        self.num_bytes = 0
        self._memory = memory
        self._due = time.monotonic() + SLOW_S  # when more bytes must have come

    @property
    def num_counted(self) -> int:
        """The number of its bytes that count."""
        return max(0, self.num_bytes - self._memory.num_free)

    @property
    def late_s(self) -> float:
        """How many seconds ago more bytes should have come; negative if it is in time."""
        return time.monotonic() - self._due

    def grow_to(self, num_bytes: int) -> None:
        """Hold at least so many bytes from now on.

        Raises:
            ApiError: 503 if there are too many; as many as before are held then.
        """
        num_more = max(0, num_bytes - self._memory.num_free) - self.num_counted
        self._memory.check(self, num_more)
        if num_bytes > self.num_bytes:
            self._memory.count(self.sender, max(0, num_more))
            latest = time.monotonic() + SLOW_S
            self._due = min(latest, self._due + (num_bytes - self.num_bytes) / MIN_RATE)
            self.num_bytes = num_bytes

    def give_back(self) -> None:
        """Hold nothing any more."""
        self._memory.count(self.sender, -self.num_counted)
        self.num_bytes = 0
