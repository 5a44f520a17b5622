"""The entry point to the engine: requests with text in, their outputs out, from any thread.

`run` waits for all of its requests, `stream` yields their outputs as they are computed, and
`add_request` and `step` follow vLLM. The engine has no thread of its own: one of the waiting
threads runs the model for all requests, and the others sleep until their outputs are ready. (A
dedicated engine thread would cost two thread switches per streamed token, measured as 4 to 15 % of
the demo model's processor time.) Requests are added and removed between two steps, and Ctrl-C takes
effect there.

Under torchrun there are two modes. Either every rank makes the same calls in the same order from
one thread: then requests are compared across the ranks when they are submitted, but not in each
step. Or rank 0 leads (`lead`): then only rank 0 is called, from any thread.

This module knows nothing of HTTP, chat templates, or how the core schedules and computes a step.
The file has over 400 lines because one lock protects all of this state: what must happen under the
lock is easier to check in one class.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from llama.checks import FieldError, brief
from llama.engine.core import EngineCore
from llama.engine.interrupts import DeferredInterrupt
from llama.engine.sequence import SequenceState
from llama.requests.adapters import AdapterInfo, AdapterInUseError, AdapterNames
from llama.requests.answer import Answer
from llama.requests.grammar import GrammarCompiler
from llama.requests.prepare import Preparer
from llama.requests.rank_calls import RankCalls
from llama.requests.request import Request, RequestOutput, derived_seed
from llama.sampling_params import SamplingParams
from llama.tokenizer import Tokenizer

_T = TypeVar("_T")
_MAX_SLEEP_S = 1.0  # after which a thread checks whether another one still runs the model


@dataclass(eq=False)
class LLMEngine:
    """The requests of one model, which an `EngineCore` computes."""

    core: EngineCore
    tokenizer: Tokenizer
    max_seq_len: int  # largest number of tokens of a sequence, prompt and answer together
    seed: int  # seed that the seeds of requests without one are derived from
    why_silent: str = ""  # why the model cannot generate; empty if it can

    def __post_init__(self) -> None:
        self.parallel = self.core.runner.model.parallel
        self.grammars = GrammarCompiler(self.tokenizer)
        self.adapters = AdapterNames()
        preparer = Preparer(
            self.tokenizer, self.max_seq_len, self.grammars, self.adapters, self.why_silent
        )
        self.prepare = preparer.prepare
        self.check_generates = preparer.check_generates
        self._ranks = RankCalls(self.core, self.parallel, self.has_unfinished_requests)
        self.agree = self._ranks.agree
        # Protects all fields below; it is released while the model runs. It is reentrant because
        # the garbage collector may close an abandoned stream while this thread owns the lock.
        self._lock = threading.RLock()
        self._changes_adapters = threading.Lock()  # owned while adapters are loaded or dropped
        self._requests: dict[Request, None] = {}  # kept until the last output is taken
        self._names: dict[str, Request] = {}
        self._due: dict[Request, None] = {}  # requests that `step` reports next
        # The request and the answer of each sequence that is queued or in the core.
        self._owner: dict[SequenceState, tuple[Request, Answer]] = {}
        self._added: dict[SequenceState, None] = {}  # sequences to add at the next step
        self._removed: list[SequenceState] = []  # sequences to remove at the next step
        self._dropped: list[bytes] = []  # hashes of adapters to free when no step is running
        self._num_calls = 0  # calls that have queued requests
        # For each sleeping thread, the lock that wakes it and the condition that it waits for.
        self._waiters: dict[threading.Lock, Callable[[], bool]] = {}
        self._stepper: int | None = None  # identifier of the thread that runs the model
        self._num_steps = 0
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
        for request in compared:
            if request.listener is None:
                request.listener = functools.partial(self._due.setdefault, request)
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
        first_step = self._num_steps

        def is_ready() -> bool:
            return self._num_steps > first_step or not self._requests or bool(self._due)

        try:
            self.wait_until(is_ready)
        finally:
            with self._lock:
                failed = [request for request in self._due if request.exception is not None]
                for request in failed:
                    self._forget(request)
        with self._lock:
            return [self.take_output(request) for request in failed or list(self._due)]

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Run the model, or sleep while another thread runs it, until `is_ready()` is true.

        `is_ready` is called under the engine's lock: it must be fast and must not call the engine.
        """
        bell = threading.Lock()
        try:
            while not self._run_model(is_ready, bell):
                if bell in self._waiters:
                    bell.acquire(timeout=_MAX_SLEEP_S)
        finally:
            with self._lock:
                self._waiters.pop(bell, None)
                if self._stepper is None and self._waiters:
                    # This thread leaves: another one must run the model now.
                    self._ring(list(self._waiters)[:1])

    def take_output(self, request: Request) -> RequestOutput:
        """Return the current output of a request; a finished request is removed."""
        with self._lock:
            self._due.pop(request, None)
            if request.finished:
                self._forget(request)
            return request.take_output()

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request, free its pages and return its last output.

        Returns:
            None if there is no unfinished request with this id.
        """
        request = self._names.get(request_id)
        if request is None:
            return None
        self.abort(request)
        return self.take_output(request)

    def abort(self, request: Request) -> None:
        """End a request between two steps; unfinished answers get finish_reason "abort"."""
        with DeferredInterrupt(), self._lock:
            if not request.finished:
                request.end("abort")
            for answer in request.answers:
                self._release(answer.sequence)
            if self._stepper is None:
                self._apply_removed()
            self._wake_ready()

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
        with self._ranks.one_caller(), self._changes_adapters:
            with self.agree("the adapter") as must_match:
                self.adapters.check_new(name, replace=replace)
                replaced = self.adapters.get(name)
                if replaced is not None:
                    self._check_unused(replaced)
                if not self.is_led:
                    adapter = self.core.read_adapter(path)
                    must_match += [name, adapter.digest]
            if self.is_led:
                adapter = self._ranks.load_adapter(path)
            else:
                self.core.add_adapter(adapter)
            info = AdapterInfo(
                name,
                path,
                adapter.digest,
                adapter.rank,
                adapter.base_model,
                adapter.weights.nbytes,
            )
            if replaced is not None and replaced.digest != adapter.digest:
                try:
                    self._forget_adapter(replaced)
                except AdapterInUseError:
                    self._drop_unnamed(adapter.digest)
                    raise
            with self._lock:
                self.adapters.set(info)
        return info

    def drop_adapter(self, name: str) -> None:
        """Free an adapter; where another name has the same content, forget the name only.

        Without `lead`, every rank makes this call.

        Raises:
            ValueError: No adapter has this name.
            AdapterInUseError: Requests are using it.
        """
        with self._ranks.one_caller(), self._changes_adapters:
            with self.agree("the adapter") as must_match:
                info = self.adapters.check_known(name)
                must_match.append(name)
                self._check_unused(info)
            self._forget_adapter(info)

    def _check_unused(self, info: AdapterInfo) -> None:
        """Raise AdapterInUseError if requests are using an adapter that no other name keeps."""
        with self._lock:
            if self.adapters.is_shared(info):
                return
            users = [seq for seq in self._owner if seq.spec.adapter == info.digest]
            if users:
                raise AdapterInUseError(
                    f"the adapter {info.name!r} is in use by {len(users)} unfinished sequences: "
                    "abort them, or wait until they have ended"
                )

    def _forget_adapter(self, info: AdapterInfo) -> None:
        """Forget a name, then the adapter itself unless another name has it.

        No request can be queued between the check of its users and the end of its name.
        """
        with self._lock:
            self._check_unused(info)
            self.adapters.remove(info.name)
        self._drop_unnamed(info.digest)

    def _drop_unnamed(self, digest: bytes) -> None:
        """Free an adapter that no name has any more.

        A running step may still compute a sequence that was aborted: then it is freed afterwards.
        While rank 0 leads, the message waits for the step itself.
        """
        if self.is_led:
            if not self.adapters.has_digest(digest):
                self._ranks.drop_adapter(digest)
            return
        with self._lock:
            self._dropped.append(digest)
            if self._stepper is None:
                self._apply_dropped()

    def _apply_dropped(self) -> None:
        """Free the adapters that no name has any more, while no step is running."""
        for digest in self._dropped:
            if not self.adapters.has_digest(digest):
                self._ranks.drop_adapter(digest)
        self._dropped.clear()

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
        return self._names.get(request_id)

    def has_unfinished_requests(self) -> bool:
        """Return whether a request is unfinished or its last output has not been taken."""
        return bool(self._requests)

    @property
    def num_unfinished_requests(self) -> int:
        """Return the number of requests whose last output has not been taken."""
        return len(self._requests)

    def close(self) -> None:
        """Abort all requests; submitting another one raises a RuntimeError."""
        self._is_closed = True
        with DeferredInterrupt(), self._lock:
            for request in list(self._requests):
                self.abort(request)

    def discard_all(self) -> None:
        """Abort and remove all requests."""
        self.discard(list(self._requests))

    def discard(self, requests: Iterable[Request]) -> None:
        """Abort the unfinished requests, and remove all of them."""
        with DeferredInterrupt(), self._lock:
            for request in requests:
                self.abort(request)
                self._forget(request)

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
            named = [request.request_id for request in requests if request.request_id]
            for name in named:
                if name in self._names or named.count(name) > 1:
                    raise ValueError(
                        f"request_id={brief(name)} is in use by a request not yet finished: choose "
                        "another id"
                    )
            for request in requests:
                digest = request.answers[0].sequence.spec.adapter
                if digest and not self.adapters.has_digest(digest):
                    raise FieldError("adapter", "the adapter of a request has been dropped")
            self._names |= {
                request.request_id: request for request in requests if request.request_id
            }
            self._requests |= dict.fromkeys(requests)
            self._num_calls += 1
            for request in requests:
                request.set_call(self._num_calls)
                for answer in request.answers:
                    self._owner[answer.sequence] = request, answer
                    self._added[answer.sequence] = None

    def _forget(self, request: Request) -> None:
        """Remove a request that has ended."""
        self._requests.pop(request, None)
        self._due.pop(request, None)
        if self._names.get(request.request_id) is request:
            del self._names[request.request_id]

    def _release(self, seq: SequenceState) -> None:
        """Remove a sequence from the core as soon as no step is running."""
        if self._owner.pop(seq, None) is None:
            return
        if seq in self._added:
            del self._added[seq]
        else:
            self._removed.append(seq)

    def _run_model(self, is_ready: Callable[[], bool], bell: threading.Lock) -> bool:
        """Run the model until `is_ready()`, unless another thread runs it.

        Returns:
            True if `is_ready()`. False if another thread runs the model: then `bell` is released
            when this thread is ready or has to run the model. Also False after an interrupt.
        """
        with DeferredInterrupt() as interrupts:
            while not interrupts:
                with self._lock:
                    if is_ready():
                        return True
                    if self._stepper not in (None, threading.get_ident()):
                        # The lock may have been released since the last sleep.
                        bell.acquire(blocking=False)
                        self._waiters[bell] = is_ready
                        return False
                    self._stepper = threading.get_ident()
                self._step()
        return False

    def _step(self) -> None:
        """Run the model once for all requests; the lock is released while it runs."""
        try:
            with self._lock:
                added, removed = self._take_pending()
            changed = self._ranks.step(added, removed)
            with self._lock:
                for seq in changed:
                    self._read(seq)
        except BaseException as error:
            with self._lock:
                self._fail(error)
            raise
        finally:
            with self._lock:
                self._stepper = None
                self._num_steps += 1
                self._apply_removed()
                self._apply_dropped()
                self._wake_ready()

    def _take_pending(self) -> tuple[list[SequenceState], list[SequenceState]]:
        """Return the sequences that were queued and removed since the last step."""
        added = list(self._added)
        removed = self._removed
        self._added = {}
        self._removed = []
        return added, removed

    def _apply_removed(self) -> None:
        """Free the pages of removed sequences.

        While rank 0 leads, nothing is done here: the next step frees them on every rank.
        """
        if not self.is_led:
            for seq in self._removed:
                self.core.finish(seq, "abort")
            self._removed.clear()

    def _read(self, seq: SequenceState) -> None:
        """Decode the new tokens of a sequence and announce the output of its request."""
        if seq not in self._owner:  # aborted during the step
            return
        request, answer = self._owner[seq]
        answer.read()
        if answer.finish_reason is not None:
            self._release(seq)
        request.note_output()

    def _fail(self, error: BaseException) -> None:
        """End the requests of a failed step with its exception.

        Requests whose sequences have not started yet stay queued, except while rank 0 leads: then
        no step can follow, and all requests end.
        """
        if self.is_led:
            self.core.clear("error")
            self._removed.clear()
        else:
            self.core.break_off("error")
        waiting = {*self.core.scheduler.live(), *self._added}
        failed = {request: None for seq, (request, _) in self._owner.items() if seq not in waiting}
        if not isinstance(error, Exception):  # SystemExit, for example, must not end other threads
            error = RuntimeError(f"the step was ended by {type(error).__name__}: {error}")
        for request in failed:
            for answer in request.answers:
                self._owner.pop(answer.sequence, None)
                self._added.pop(answer.sequence, None)
                if answer.sequence in waiting:
                    self.core.finish(answer.sequence, "error")
            request.exception = error
            request.end("error")

    def _wake_ready(self) -> None:
        """Wake the sleeping threads whose condition is true."""
        self._ring([bell for bell, is_ready in self._waiters.items() if is_ready()])

    def _ring(self, bells: list[threading.Lock]) -> None:
        """Wake the threads that sleep on these locks."""
        for bell in bells:
            del self._waiters[bell]
            bell.release()
