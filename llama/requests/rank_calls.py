"""The calls of several ranks: the same on each, from one thread; or rank 0's alone, which leads.

In: the core of a rank, and its peers. Out: a step that all ranks make; an error where a second
thread of a rank would bring their orders apart; and `lead`. It knows nothing of requests.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from llama.engine.core import EngineCore
from llama.engine.leader import Follower, Leader
from llama.engine.sequence import SequenceState
from llama.ranks.collectives import ModelParallel

_T = TypeVar("_T")
_END = "the work that rank 0 leads"


class RankCalls:
    """How the ranks of one model call their engines. One process alone is always in step."""

    def __init__(
        self, core: EngineCore, parallel: ModelParallel, has_requests: Callable[[], bool]
    ) -> None:
        self.core, self.parallel, self._has_requests = core, parallel, has_requests
        self.is_led = False  # rank 0 takes all requests; the other ranks follow
        self._leader: Leader | None = None  # on rank 0, while it leads
        self._num_calls = 0  # of those that gave no seed: equal on all ranks
        self._lock = threading.Lock()
        self._caller: int | None = None  # a thread
        self._is_calling = False

    def step(self, added: list[SequenceState], removed: list[SequenceState]) -> list[SequenceState]:
        """`EngineCore.step`, made by every rank."""
        with self.parallel.step():
            return (self._leader or self.core).step(added, removed)

    def agree(self, what: str) -> contextlib.AbstractContextManager[list[object]]:
        """`ModelParallel.agree` where every rank makes the call; nothing where rank 0 leads."""
        return contextlib.nullcontext([]) if self.is_led else self.parallel.agree(what)

    def take_number(self) -> int:
        """That of a call without a seed."""
        with self._lock:
            number, self._num_calls = self._num_calls, self._num_calls + 1
            return number

    @contextlib.contextmanager
    def one_caller(self) -> Iterator[None]:
        """One thread of each rank makes all calls, unless rank 0 leads: RuntimeError in others."""
        if self.parallel.is_alone or self.is_led:
            yield
            return
        with self._lock:
            if not self._has_requests() and not self._is_calling:
                self._caller = threading.get_ident()
            if self._caller != threading.get_ident():
                remedy = f"with model_parallel_size={self.parallel.size}, make all calls from one "
                remedy += "thread, or within `lead`"
                raise RuntimeError(f"another thread of this rank has unfinished requests: {remedy}")
            self._is_calling = True
        try:
            yield
        finally:
            self._is_calling = False

    def lead(self, work: Callable[[], _T], discard_all: Callable[[], None]) -> _T | None:
        """`LLMEngine.lead`, for more than one rank."""
        with self.parallel.agree("the ranks that call lead"):
            if self._has_requests():
                raise RuntimeError("finish or abort all requests before rank 0 leads")
        self.is_led = True
        try:
            if self.parallel.is_leader:
                self._leader = Leader(self.core, self.parallel)
                return self._lead(self._leader, work, discard_all)
            self._num_calls = Follower(self.core, self.parallel).follow()
        finally:
            self._leader, self.is_led = None, False
        with self.parallel.agree(_END):
            return None

    def _lead(self, leader: Leader, work: Callable[[], _T], discard_all: Callable[[], None]) -> _T:
        """The result of the work; what ends it is told to the other ranks, unless a step failed."""
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            failure = error
        discard_all()
        is_interrupt = failure is not None and not isinstance(failure, Exception)
        leader.close(self._num_calls, interrupted=is_interrupt)
        if failure is not None and leader.has_failed:
            raise failure
        with self.parallel.agree(_END):
            if failure is not None:
                raise failure
            return result
