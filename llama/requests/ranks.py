"""The calls of several ranks: the same on each, from one thread; or rank 0's alone, which leads.

In: an `LLMEngine` on every rank. Out: an error where a second thread of a rank would bring the
ranks' orders apart; and `lead`, which makes the engines of the other ranks follow that of rank 0.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from llama.engine.lead import FollowingCore, LeadingCore

if TYPE_CHECKING:
    from llama.requests.llm_engine import LLMEngine

_T = TypeVar("_T")
_END = "the work that rank 0 leads"


class OneCaller:
    """Where every rank makes the same calls, one thread of each rank makes them."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        self._caller: int | None = None  # a thread
        self._is_calling = False

    @contextlib.contextmanager
    def calling(self, has_requests: Callable[[], object]) -> Iterator[None]:
        """RuntimeError while another thread calls, or has requests that are not finished."""
        with self._lock:
            if not has_requests() and not self._is_calling:
                self._caller = threading.get_ident()
            if self._caller != threading.get_ident():
                raise RuntimeError(
                    "another thread of this rank has unfinished requests: with "
                    f"model_parallel_size={self._num_ranks}, make all calls from one thread, or "
                    "within `lead`"
                )
            self._is_calling = True
        try:
            yield
        finally:
            self._is_calling = False


def lead(engine: "LLMEngine", work: Callable[[], _T]) -> _T | None:
    """`LLMEngine.lead`, for more than one rank."""
    parallel = engine.parallel
    with parallel.agree("the ranks that call lead"):
        if engine.has_unfinished_requests():
            raise RuntimeError("finish or abort all requests before rank 0 leads")
    core, engine.is_led = engine.core, True
    try:
        if parallel.rank:
            engine.num_calls = FollowingCore(core, parallel).follow()
        else:
            engine.core = leading = LeadingCore(core, parallel)
            return _work_as_leader(engine, leading, work)
    finally:
        engine.core, engine.is_led = core, False
    with parallel.agree(_END):
        return None


def _work_as_leader(engine: "LLMEngine", core: LeadingCore, work: Callable[[], _T]) -> _T:
    """The result of the work; what ends it is told to the other ranks, unless a step failed."""
    try:
        result = work()
    except BaseException as error:
        engine.drop_all()
        core.close(engine.num_calls, interrupted=not isinstance(error, Exception))
        if core.has_failed:
            raise
        with engine.parallel.agree(_END):
            raise
    engine.drop_all()
    core.close(engine.num_calls)
    with engine.parallel.agree(_END):
        return result
