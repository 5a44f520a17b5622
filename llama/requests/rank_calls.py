"""Coordination of the calls of several ranks.

There are two modes. Either every rank makes the same calls in the same order from one thread, or
rank 0 leads and the other ranks repeat its steps.

In: the core of a rank, and its peers. Out: a step that all ranks make, `lead`, and an error if a
second thread of a rank could change the order of its calls. This module knows nothing of requests.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from llama.checkpoint.lora.unmerged import LoadedAdapter
from llama.engine.core import EngineCore
from llama.engine.sequence import SequenceState
from llama.options.adapters import AdapterStore
from llama.ranks.parallel import Parallel
from llama.requests.leader import Follower, Leader

_T = TypeVar("_T")
_END_OF_WORK = "the work that rank 0 leads"  # what the ranks agree on at the end of `lead`


class RankCalls:
    """The order in which the ranks of one model call their engines.

    A process without peers needs no coordination: then every method does only its local part.
    """

    def __init__(
        self,
        core: EngineCore,
        adapters: AdapterStore,
        parallel: Parallel,
        has_requests: Callable[[], bool],
    ) -> None:
        """Prepare the coordination of one rank.

        Args:
            core: The engine core of this rank.
            adapters: The adapters that its sequences can choose.
            parallel: The group of ranks that share the model.
            has_requests: Returns whether the engine has unfinished requests.
        """
        self.core = core
        self.adapters = adapters
        self.parallel = parallel
        self._has_requests = has_requests
        self.is_led = False  # rank 0 takes all requests; the other ranks follow
        self._leader: Leader | None = None  # on rank 0, while it leads
        self._num_calls = 0  # calls without a seed so far; equal on all ranks
        self._lock = threading.Lock()
        self._caller: int | None = None  # identifier of the thread that makes the calls
        self._is_calling = False

    def step(
        self,
        added: list[SequenceState],
        removed: list[SequenceState],
        resting: list[SequenceState],
    ) -> list[SequenceState]:
        """Run `EngineCore.step` on every rank, and return the sequences that changed."""
        with self.parallel.step():
            if self._leader is not None:
                return self._leader.step(added, removed, resting)
            return self.core.step(added, removed, None, resting)

    def load_adapter(self, path: str) -> LoadedAdapter:
        """Load an adapter on every rank, between two steps, while rank 0 leads."""
        assert self._leader is not None, "only rank 0 has requests while it leads"
        return self._leader.load_adapter(path)

    def drop_adapter(self, digest: bytes) -> None:
        """Forget an adapter: on every rank while rank 0 leads, else on this one."""
        if self._leader is None:
            self.adapters.drop(digest)
        else:
            self._leader.drop_adapter(digest)

    def agree(self, what: str) -> contextlib.AbstractContextManager[list[object]]:
        """Return `Parallel.agree(what)`, or a context without effect while rank 0 leads."""
        if self.is_led:
            return contextlib.nullcontext([])
        return self.parallel.agree(what)

    def take_number(self) -> int:
        """Return the number of the next call without a seed; its seeds are derived from it."""
        with self._lock:
            number = self._num_calls
            self._num_calls += 1
            return number

    @contextlib.contextmanager
    def one_caller(self) -> Iterator[None]:
        """Ensure that one thread of each rank makes all calls, unless rank 0 leads.

        Raises:
            RuntimeError: Another thread of this rank has unfinished requests.
        """
        if self.parallel.is_alone or self.is_led:
            yield
            return
        with self._lock:
            if not self._has_requests() and not self._is_calling:
                self._caller = threading.get_ident()
            if self._caller != threading.get_ident():
                raise RuntimeError(
                    "another thread of this rank has unfinished requests: with "
                    f"{self.parallel.num_ranks} ranks of one model, make all calls from one "
                    "thread, or within `lead`"
                )
            self._is_calling = True
        try:
            yield
        finally:
            self._is_calling = False

    def lead(self, work: Callable[[], _T], discard_all: Callable[[], None]) -> _T | None:
        """Run the work on rank 0 while the other ranks follow; see `LLMEngine.lead`.

        Args:
            work: The function that rank 0 calls.
            discard_all: Aborts and forgets every request of rank 0 when the work has ended.
        """
        with self.parallel.agree("the ranks that call lead"):
            if self._has_requests():
                raise RuntimeError("finish or abort all requests before rank 0 leads")
        self.is_led = True
        try:
            if self.parallel.is_leader:
                self._leader = Leader(self.core, self.adapters, self.parallel)
                return self._lead(self._leader, work, discard_all)
            self._num_calls = Follower(self.core, self.adapters, self.parallel).follow()
        finally:
            self._leader = None
            self.is_led = False
        with self.parallel.agree(_END_OF_WORK):
            return None

    def _lead(self, leader: Leader, work: Callable[[], _T], discard_all: Callable[[], None]) -> _T:
        """Return the result of the work, and raise its exception on every rank.

        If a step has failed, the other ranks have failed with it and are not informed again.
        """
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
        with self.parallel.agree(_END_OF_WORK):
            if failure is not None:
                raise failure
            return result
