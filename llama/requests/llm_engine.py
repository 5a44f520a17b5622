"""The entry point to the engine: requests with text in, their outputs out, from any thread.

`run` waits for all of its requests, `stream` yields their outputs as they are computed, and
`add_request` and `step` follow vLLM. The engine has no thread of its own: one of the waiting
threads runs the model for all requests, and the others sleep until their outputs are ready
(`threads.py`). Requests are added and removed between two steps (`registry.py`), and Ctrl-C takes
effect there.

Under torchrun there are two modes. Either every rank makes the same calls in the same order from
one thread: then requests are compared across the ranks when they are submitted, but not in each
step. Or rank 0 leads (`lead`): then only rank 0 is called, from any thread.

This module knows nothing of HTTP, chat templates, or how the core schedules and computes a step.
"""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from llama.engine.core import EngineCore
from llama.options.adapters import AdapterStore
from llama.requests.adapter_loading import AdapterLoader
from llama.requests.adapters import AdapterInfo, AdapterNames
from llama.requests.grammar import GrammarCompiler
from llama.requests.interrupts import DeferredInterrupt
from llama.requests.mask_budget import MaskBudget
from llama.requests.prepare import Preparer
from llama.requests.rank_calls import RankCalls
from llama.requests.registry import RequestRegistry
from llama.requests.request import Request, RequestOutput, derived_seed
from llama.requests.threads import StepThreads
from llama.sampling_params import SamplingParams
from llama.tokenizer import Tokenizer

_T = TypeVar("_T")


@dataclass(eq=False)
class LLMEngine:
    """The requests of one model, which an `EngineCore` computes."""

    core: EngineCore
    adapter_store: AdapterStore
    tokenizer: Tokenizer
    max_seq_len: int  # largest number of tokens of a sequence, prompt and answer together
    seed: int  # seed that the seeds of requests without one are derived from
    why_silent: str = ""  # why the model cannot generate; empty if it can
    mask_budget: MaskBudget | None = None  # set where rank 0 alone takes requests

    def __post_init__(self) -> None:
        self.parallel = self.core.runner.model.parallel
        self.grammars = GrammarCompiler(self.tokenizer)
        self.adapters = AdapterNames()
        preparer = Preparer(
            self.tokenizer, self.max_seq_len, self.grammars, self.adapters, self.why_silent
        )
        self.prepare = preparer.prepare
        self.check_generates = preparer.check_generates
        self._ranks = RankCalls(
            self.core, self.adapter_store, self.parallel, self.has_unfinished_requests
        )
        self.agree = self._ranks.agree
        self._threads = StepThreads(self._step, self._settle)
        self._lock = self._threads.lock  # protects the registry; released while the model runs
        self._registry = RequestRegistry(self.adapters)
        self._adapter_loader = AdapterLoader(
            self.adapters, self._registry, self._ranks, self._threads
        )
        self._is_closed = False

    def add_request(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
    ) -> None:
        """Queue a request; `step` returns its outputs.

        Args:
            request_id: A name that no unfinished request has.
            prompt: Text or token ids.
            params: The sampling parameters; None for the defaults.
            adapter: The name of a loaded LoRA adapter; None for the base model.

        Raises:
            ValueError: The id is in use, a value cannot be used, or the requests of the ranks
                differ. Nothing has been queued.
            TypeError: A value has the wrong type. Nothing has been queued.
        """

        def prepared() -> Iterator[Request]:
            if request_id == "":
                raise ValueError("request_id is empty: give each request a name")
            params_or_default = params or SamplingParams()
            yield self.prepare(request_id, prompt, params_or_default, adapter=adapter)

        self.submit(prepared())

    def submit(self, requests: Iterable[Request]) -> list[Request]:
        """Compare the requests across the ranks and queue them.

        `step` returns the outputs of the requests that have no listener.
        """
        compared = self._compare(requests)
        self._registry.listen(compared)
        try:
            self._queue(compared)
        except BaseException:  # an id in use or an interrupt: no request may stay queued
            self.discard(compared)
            raise
        return compared

    def run(self, requests: Iterable[Request]) -> list[RequestOutput]:
        """Return the last output of each request, in their order; an exception aborts them all."""
        compared = self._compare(requests)
        with self._discarding(compared):
            self._queue(compared)
            self.wait_until(lambda: all(request.finished for request in compared))
            return [self.take_output(request) for request in compared]

    def stream(self, requests: Iterable[Request]) -> Generator[RequestOutput, None, None]:
        """Yield the outputs of the requests as they are computed.

        The requests are compared across the ranks in this call, and queued when the first output is
        requested. Closing the generator aborts the unfinished requests.
        """
        return self._stream(self._compare(requests))

    def step(self) -> list[RequestOutput]:
        """Return new outputs of the added requests; if there are none, run the model once first.

        A request with best_of > n has only its last output. If the model fails, its exception is
        raised and the requests that it was computing end.
        """
        threads = self._threads
        registry = self._registry
        first_step = threads.num_steps

        def is_ready() -> bool:
            is_new = threads.num_steps > first_step
            return is_new or not registry.requests or bool(registry.due)

        try:
            self.wait_until(is_ready)
        finally:
            with self._lock:
                failed = [request for request in registry.due if request.exception is not None]
                for request in failed:
                    registry.forget(request)
        with self._lock:
            return [self.take_output(request) for request in failed or list(registry.due)]

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Run the model, or sleep while another thread runs it, until `is_ready()` is true.

        `is_ready` is called under the engine's lock: it must be fast and must not call the engine.
        """
        self._threads.wait_until(is_ready)

    def take_output(self, request: Request) -> RequestOutput:
        """Return the current output of a request; a finished request is removed."""
        with self._lock:
            self._registry.due.pop(request, None)
            if request.finished:
                self._registry.forget(request)
            return request.take_output()

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request, free its pages and return its last output.

        Returns:
            None if there is no unfinished request with this id.
        """
        request = self.find(request_id)
        if request is None:
            return None
        self.abort(request)
        return self.take_output(request)

    def abort(self, request: Request) -> None:
        """End a request between two steps; unfinished answers get finish_reason "abort"."""
        with DeferredInterrupt(), self._lock:
            self._registry.end(request)
            if not self._threads.is_stepping:
                self._apply_removed()
            self._threads.wake_ready()

    def load_adapter(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        """Load a LoRA adapter, which requests can choose by its name from now on.

        Requests are answered meanwhile, except on several ranks, where steps wait until every rank
        has read its file. Without `lead`, every rank makes this call.

        Args:
            name: The name.
            path: The folder of the adapter, or the name of a download.
            replace: Whether an adapter of this name may be replaced.

        Raises:
            OSError: A file is missing or cannot be read, on this rank. Nothing has been loaded.
            ValueError: The name is in use, the adapter cannot be used, or the ranks' files differ.
                Nothing has been loaded.
            AdapterInUseError: Requests are using the adapter that would be replaced.
        """
        return self._adapter_loader.load(name, path, replace=replace)

    def drop_adapter(self, name: str) -> None:
        """Free an adapter; where another name has the same content, forget the name only.

        Without `lead`, every rank makes this call.

        Raises:
            ValueError: No adapter has this name.
            AdapterInUseError: Requests are using it.
        """
        self._adapter_loader.drop(name)

    def lead(self, work: Callable[[], _T]) -> _T | None:
        """Call `work` on rank 0 while the other ranks repeat its steps.

        Every rank makes this call. Within `work`, rank 0 may call the engine from any number of
        threads and from an asyncio event loop. When the work ends, unfinished requests are aborted.
        An exception of the work is raised on rank 0 and as a RankError on the other ranks; an
        interrupt or an exit is raised there as an interrupt.

        Args:
            work: A function without arguments.

        Returns:
            The result of the work on rank 0, None on the other ranks.

        Raises:
            RuntimeError: Requests are unfinished.
            RankError: A rank would compute another step than rank 0; the message names the rank.
        """
        if self.parallel.is_alone or self.is_led:
            return work()
        return self._ranks.lead(work, self.discard_all)

    @property
    def is_led(self) -> bool:
        """Return whether rank 0 takes all requests and the other ranks follow."""
        return self._ranks.is_led

    def find(self, request_id: str) -> Request | None:
        """Return the unfinished request with this id, or None."""
        return self._registry.find(request_id)

    def has_unfinished_requests(self) -> bool:
        """Return whether a request is unfinished or its last output has not been taken."""
        return bool(self._registry.requests)

    @property
    def num_unfinished_requests(self) -> int:
        """Return the number of requests whose last output has not been taken."""
        return len(self._registry.requests)

    def close(self) -> None:
        """Abort all requests; submitting another one raises a RuntimeError."""
        self._is_closed = True
        with DeferredInterrupt(), self._lock:
            for request in list(self._registry.requests):
                self.abort(request)

    def discard_all(self) -> None:
        """Abort and remove all requests."""
        self.discard(list(self._registry.requests))

    def discard(self, requests: Iterable[Request]) -> None:
        """Abort the unfinished requests, and remove all of them."""
        with DeferredInterrupt(), self._lock:
            for request in requests:
                self.abort(request)
                self._registry.forget(request)

    @contextlib.contextmanager
    def _discarding(self, requests: list[Request]) -> Iterator[None]:
        """Remove the requests at the end of the block, even if an exception ends it."""
        try:
            yield
        finally:
            try:
                self.discard(requests)
            except KeyboardInterrupt:
                self.discard(requests)
                raise

    def _stream(self, requests: list[Request]) -> Generator[RequestOutput, None, None]:
        unfinished = dict.fromkeys(requests)
        with self._discarding(requests):
            self._queue(requests)
            while unfinished:
                self.wait_until(lambda: any(request.has_output for request in unfinished))
                for request in [request for request in unfinished if request.has_output]:
                    output = self.take_output(request)
                    if output.finished:
                        del unfinished[request]
                    yield output

    def _compare(self, requests: Iterable[Request]) -> list[Request]:
        """Compare the requests across the ranks and return them with seeds.

        If they differ, an error is raised on every rank, and the count of calls without a seed does
        not change.
        """
        with self._ranks.one_caller(), self.agree("the prompts or parameters") as must_match:
            if self._is_closed:
                raise RuntimeError("this engine is closed: build another one")
            compared = list(requests)
            must_match += [request.fingerprint() for request in compared]
        if any(request.seed is None for request in compared):
            seed = derived_seed(self.seed, self._ranks.take_number(), of="call")
            for index, request in enumerate(compared):
                if request.seed is None:
                    request.set_seed(derived_seed(seed, index))
        return compared

    def _queue(self, requests: list[Request]) -> None:
        """Add the requests to the engine; their sequences enter the core at the next step."""
        with DeferredInterrupt(), self._lock:
            self._registry.queue(requests)
            if self.mask_budget is not None:
                self.mask_budget.watch(requests)

    def _step(self) -> None:
        """Run the model once for all requests; the lock is released while it runs."""
        registry = self._registry
        try:
            with self._lock:
                added = registry.take_added()
                removed = registry.take_removed()
                resting = self.mask_budget.resting(registry.sequences) if self.mask_budget else []
            changed = self._ranks.step(added, removed, resting)
            with self._lock:
                for seq in changed:
                    registry.read(seq)
        except BaseException as error:
            with self._lock:
                self._fail(error)
            raise

    def _settle(self) -> None:
        """Do what was asked for while the step was running."""
        self._apply_removed()
        self._adapter_loader.apply_dropped()

    def _apply_removed(self) -> None:
        """Free the pages of removed sequences.

        While rank 0 leads, nothing is done here: the next step frees them on every rank.
        """
        if not self.is_led:
            for seq in self._registry.take_removed():
                self.core.finish(seq, "abort")

    def _fail(self, error: BaseException) -> None:
        """End the requests of a failed step with its exception.

        Requests whose sequences have not started yet stay queued, except while rank 0 leads: then
        no step can follow, and all requests end.
        """
        if self.is_led:
            self.core.clear("error")
            self._registry.take_removed()
        else:
            self.core.break_off("error")
        if not isinstance(error, Exception):  # SystemExit, for example, must not end other threads
            error = RuntimeError(f"the step was ended by {type(error).__name__}: {error}")
        for request, sequences in self._registry.take_failed(self.core.scheduler.live()):
            for seq in sequences:
                self.core.finish(seq, "error")
            request.exception = error
            request.end("error")
