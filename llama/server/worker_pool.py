"""A bounded pool of threads for work that may outlast the request that asked for it.

In: a function that may run for seconds, and who asks for it. Out: its result, or an exception that
says whether the function was too slow or never began. It knows no HTTP and no model.
"""

import asyncio
import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakValueDictionary

_T = TypeVar("_T")


class PoolBusyError(Exception):
    """The work was refused because no thread was free in time; it never began."""


class WorkerPool:
    """A fixed number of threads, and a bounded number of callers that wait for one of them.

    A thread cannot be interrupted: work that exceeds its time limit occupies its thread until it
    ends. It therefore runs here and not in the event loop's default executor, where it would delay
    whatever else the server does in threads. The work of one sender occupies at most half of the
    threads; the rest of it waits. All methods are called in one event loop.
    """

    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        """Create a pool; its threads start when they are first needed.

        Args:
            name: prefix of the names of the threads.
            num_threads: calls that run at the same time.
            max_waiting: calls that may wait for a thread.
        """
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._free_threads = asyncio.Semaphore(num_threads)
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._share = max(1, num_threads // 2)
        # The shares of the senders that have work here.
        self._shares: WeakValueDictionary[bytes, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, work: Callable[[], _T], limit_s: float, sender: bytes = b"") -> _T:
        """Return what `work` returns.

        Args:
            work: the function that a thread calls.
            limit_s: seconds to wait for a free thread, and then seconds that the work may take.
            sender: whoever asks for the work; empty where nobody is known, who has no share.

        Raises:
            PoolBusyError: no thread was free within `limit_s`, or too many calls wait already.
            TimeoutError: the work took longer than `limit_s`; its thread goes on until it ends.
        """
        taken = [self._free_threads]
        if sender:
            share = self._shares.setdefault(sender, asyncio.Semaphore(self._share))
            taken.insert(0, share)
        await self._take_thread(taken, limit_s)
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        future.add_done_callback(functools.partial(_free_thread, taken))
        async with asyncio.timeout(limit_s):
            # Without the shield, a time-out would mark the future as done, and so the thread as
            # free, while the work still runs.
            return await asyncio.shield(future)

    async def collect(self, items: Iterator[_T], limit_s: float, sender: bytes = b"") -> list[_T]:
        """Return the items of an iterator, which a thread takes from it.

        After the time limit, or once the caller is cancelled, no further item is made.

        Args:
            items: the iterator.
            limit_s: as in `run`.
            sender: as in `run`.

        Raises:
            PoolBusyError, TimeoutError: as in `run`.
        """
        has_ended = threading.Event()

        def work() -> list[_T]:
            return list(itertools.takewhile(lambda _: not has_ended.is_set(), items))

        try:
            return await self.run(work, limit_s, sender)
        finally:
            has_ended.set()

    async def _take_thread(self, wanted: list[asyncio.Semaphore], limit_s: float) -> None:
        """Wait until the sender has a share and a thread is free, and count both as taken."""
        must_wait = any(semaphore.locked() for semaphore in wanted)
        if must_wait and self._num_waiting >= self._max_waiting:
            raise PoolBusyError
        self._num_waiting += 1
        try:
            async with asyncio.timeout(limit_s), contextlib.AsyncExitStack() as stack:
                for semaphore in wanted:
                    await semaphore.acquire()
                    stack.callback(semaphore.release)
                stack.pop_all()
        except TimeoutError:
            raise PoolBusyError from None
        finally:
            self._num_waiting -= 1


def _free_thread(taken: list[asyncio.Semaphore], future: asyncio.Future[Any]) -> None:
    """Count the thread of a call that has ended as free."""
    for semaphore in taken:
        semaphore.release()
    if not future.cancelled():
        # If nobody waits any more, asyncio would log an error that nobody retrieves.
        future.exception()
