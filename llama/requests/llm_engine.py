"""The one door to the engine: requests with text in, their outputs out, for any number of threads.

`run` waits for all of its requests, `stream` yields their outputs as they come; `add_request` and
`step` are for those who know vLLM. There is no thread of its own: of the threads that wait, one
runs the model for all, and the others sleep until they have what they wait for. (A thread that owns
the engine would cost each token of a stream two changes of threads: 4 to 15 % of the demo model's
processor time.) Requests come and go between two steps, and Ctrl-C takes effect there.

Under torchrun there are two ways. Every rank makes the same calls in the same order, from one
thread: requests are compared across the ranks when they are submitted, and never in a step. Or
rank 0 leads (`lead`): it alone is called, from any thread.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from llama.checks import brief
from llama.engine.core import EngineCore
from llama.engine.interrupts import DeferredInterrupt
from llama.engine.sequence import SequenceState
from llama.requests.grammar import GrammarCompiler
from llama.requests.prepare import Preparer
from llama.requests.rank_calls import RankCalls
from llama.requests.request import Answer, Request, RequestOutput, derived_seed
from llama.sampling_params import SamplingParams
from llama.tokenizer import Tokenizer

_T = TypeVar("_T")
_LONGEST_SLEEP_S = 1.0  # then a thread looks whether anybody still runs the model


@dataclass(eq=False)
class LLMEngine:
    """Requests of one model; `core` computes them. seed: from which those of calls follow."""

    core: EngineCore
    tokenizer: Tokenizer
    max_seq_len: int
    seed: int

    def __post_init__(self) -> None:
        self.parallel = self.core.runner.model.parallel
        self.grammars = GrammarCompiler(self.tokenizer)
        self.prepare = Preparer(self.tokenizer, self.max_seq_len, self.grammars).prepare
        self._ranks = RankCalls(self.core, self.parallel, self.has_unfinished_requests)
        self.agree = self._ranks.agree
        # For all below; not held while the model runs. One thread may take it again: a stream that
        # nobody reads any more is closed wherever Python finds it.
        self._lock = threading.RLock()
        self._requests: dict[Request, None] = {}  # until their last output is taken
        self._names: dict[str, Request] = {}
        self._due: dict[Request, None] = {}  # what `step` will report
        # By the sequences that are queued or in the core.
        self._owner: dict[SequenceState, tuple[Request, Answer]] = {}
        self._added: dict[SequenceState, None] = {}  # for the core, at the next step
        self._removed: list[SequenceState] = []
        self._num_calls = 0  # calls that have queued requests
        self._waiters: dict[threading.Lock, Callable[[], bool]] = {}  # a bell, and when it rings
        self._stepper: int | None = None  # the thread that runs the model now
        self._num_steps = 0
        self._is_closed = False

    def add_request(
        self, request_id: str, prompt: str | list[int], params: SamplingParams | None = None
    ) -> None:
        """Queue a prompt, as text or ids; `step` returns its outputs. ValueError or TypeError,
        before anything is queued: an id in use, a bad prompt, ranks with different requests."""

        def prepared() -> Iterator[Request]:
            if request_id == "":
                raise ValueError("request_id is empty: give each request a name")
            yield self.prepare(request_id, prompt, params or SamplingParams())

        self.submit(prepared())

    def submit(self, requests: Iterable[Request]) -> list[Request]:
        """Compare the requests across the ranks, and queue them; `step` returns their outputs."""
        compared = self._compare(requests)
        for request in compared:
            if request.listener is None:
                request.listener = functools.partial(self._due.setdefault, request)
        try:
            self._queue(compared)
        except BaseException:  # an id in use, or an interrupt: nothing stays half queued
            self.discard(compared)
            raise
        return compared

    def run(self, requests: Iterable[Request]) -> list[RequestOutput]:
        """The last output of each request, in their order; whatever ends this early aborts them."""
        compared = self._compare(requests)
        with self._discarding(compared):
            self._queue(compared)
            self.wait_until(lambda: all(request.finished for request in compared))
            return [self.take_output(request) for request in compared]

    def stream(self, requests: Iterable[Request]) -> Generator[RequestOutput, None, None]:
        """The outputs of the requests as they come. Leaving the loop aborts what is not finished.
        The requests are compared now, and queued when the first output is asked for."""
        return self._stream(self._compare(requests))

    def step(self) -> list[RequestOutput]:
        """New outputs of the added requests; if there are none, run the model once first. With
        best_of > n, only the last. If the model fails, what was in it ends, and its exception is
        raised."""
        began = self._num_steps
        try:
            self.wait_until(
                lambda: self._num_steps > began or not self._requests or bool(self._due)
            )
        finally:
            with self._lock:
                failed = [request for request in self._due if request.exception is not None]
                for request in failed:
                    self._forget(request)
        with self._lock:
            return [self.take_output(request) for request in failed or list(self._due)]

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Run the model, or sleep while another thread runs it, until `is_ready()`, which is called
        within the engine's lock: it must be quick and must not call the engine."""
        bell = threading.Lock()
        try:
            while not self._run_model(is_ready, bell):
                if bell in self._waiters:
                    bell.acquire(timeout=_LONGEST_SLEEP_S)
        finally:
            with self._lock:
                self._waiters.pop(bell, None)
                if self._stepper is None and self._waiters:  # this thread leaves: it hands over
                    self._ring(list(self._waiters)[:1])

    def take_output(self, request: Request) -> RequestOutput:
        """The output now due. That of a finished request is the last: it is forgotten then."""
        with self._lock:
            self._due.pop(request, None)
            if request.finished:
                self._forget(request)
            return request.take_output()

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request, free its pages, and return what it came to; None if there is none."""
        request = self._names.get(request_id)
        if request is None:
            return None
        self.abort(request)
        return self.take_output(request)

    def abort(self, request: Request) -> None:
        """End a request, between two steps: finish_reason "abort", where it had not finished."""
        with DeferredInterrupt(), self._lock:
            if not request.finished:
                request.end("abort")
            for answer in request.answers:
                self._release(answer.sequence)
            if self._stepper is None:
                self._apply_removed()
            self._wake_ready()

    def lead(self, work: Callable[[], _T]) -> _T | None:
        """Rank 0 does the work, and its result is returned there; the other ranks follow its steps.

        Every rank makes this call. Within the work, rank 0 may call from any number of threads, and
        an asyncio loop. The others return None when it has ended, and keep nothing of it:
        unfinished requests are aborted. An exception of the work is a RankError on the others; an
        interrupt, or an exit, is an interrupt there. RuntimeError where requests are unfinished.
        RankError, on the rank that it names, where one would compute something else.
        """
        if self.parallel.is_alone or self.is_led:
            return work()
        return self._ranks.lead(work, self.discard_all)

    @property
    def is_led(self) -> bool:
        """Whether rank 0 takes all requests, and the other ranks follow."""
        return self._ranks.is_led

    def find(self, request_id: str) -> Request | None:
        """The unfinished request of that name."""
        return self._names.get(request_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._requests)

    def close(self) -> None:
        """Abort all requests; what is submitted afterwards is a RuntimeError."""
        self._is_closed = True
        with DeferredInterrupt(), self._lock:
            for request in list(self._requests):
                self.abort(request)

    def discard_all(self) -> None:
        self.discard(list(self._requests))

    def discard(self, requests: Iterable[Request]) -> None:
        """Abort what is not finished, and keep nothing of the rest."""
        with DeferredInterrupt(), self._lock:
            for request in requests:
                self.abort(request)
                self._forget(request)

    @contextlib.contextmanager
    def _discarding(self, requests: list[Request]) -> Iterator[None]:
        """Whatever ends the block, the engine keeps none of the requests after it."""
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
        """The requests, with seeds; an error on every rank, and no number taken, if they differ."""
        with self._ranks.one_caller(), self.agree("the prompts or parameters") as must_match:
            if self._is_closed:
                raise RuntimeError("this engine is closed: build another one")
            compared = list(requests)
            must_match += [request.fingerprint() for request in compared]
        if any(request.seed is None for request in compared):
            seed = derived_seed(self.seed, self._ranks.take_number(), of="call")
            for place, request in enumerate(compared):
                if request.seed is None:
                    request.set_seed(derived_seed(seed, place))
        return compared

    def _queue(self, requests: list[Request]) -> None:
        with DeferredInterrupt(), self._lock:
            named = [request.request_id for request in requests if request.request_id]
            for name in named:
                if name in self._names or named.count(name) > 1:
                    words = "is in use by a request not yet finished"
                    raise ValueError(f"request_id={brief(name)} {words}")
            self._names |= {r.request_id: r for r in requests if r.request_id}
            self._requests |= dict.fromkeys(requests)
            self._num_calls += 1
            for request in requests:
                request.set_call(self._num_calls)
                for answer in request.answers:
                    self._owner[answer.sequence] = request, answer
                    self._added[answer.sequence] = None

    def _forget(self, request: Request) -> None:
        self._requests.pop(request, None)
        self._due.pop(request, None)
        if self._names.get(request.request_id) is request:
            del self._names[request.request_id]

    def _release(self, seq: SequenceState) -> None:
        """Take a sequence from the core, at the next moment when no step runs."""
        if self._owner.pop(seq, None) is None:
            return
        if seq in self._added:
            del self._added[seq]
        else:
            self._removed.append(seq)

    def _run_model(self, is_ready: Callable[[], bool], bell: threading.Lock) -> bool:
        """Run the model until ready: true. False where another thread runs it: then `bell` rings
        when this one is ready, or has to run it; or after an interrupt that raised nothing."""
        with DeferredInterrupt() as interrupts:
            while not interrupts:
                with self._lock:
                    if is_ready():
                        return True
                    if self._stepper not in (None, threading.get_ident()):
                        bell.acquire(blocking=False)  # it may have rung since the last sleep
                        self._waiters[bell] = is_ready
                        return False
                    self._stepper = threading.get_ident()
                self._step()
        return False

    def _step(self) -> None:
        """Run the model once for all requests. The lock is not held while it runs."""
        try:
            with self._lock:
                added, removed = self._take_pending()
            moved = self._ranks.step(added, removed)
            with self._lock:
                for seq in moved:
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
                self._wake_ready()

    def _take_pending(self) -> tuple[list[SequenceState], list[SequenceState]]:
        """Return what was queued and what was removed since the last step."""
        added = list(self._added)
        removed = self._removed
        self._added = {}
        self._removed = []
        return added, removed

    def _apply_removed(self) -> None:
        """Free the pages of what ended; where rank 0 leads, the next step does, on every rank."""
        if not self.is_led:
            for seq in self._removed:
                self.core.finish(seq, "abort")
            self._removed.clear()

    def _read(self, seq: SequenceState) -> None:
        """Make text of a sequence's new tokens; one that was aborted meanwhile has no owner."""
        if seq in self._owner:
            request, answer = self._owner[seq]
            answer.read()
            if answer.finish_reason is not None:
                self._release(seq)
            request.note_output()

    def _fail(self, error: BaseException) -> None:
        """End the requests that were in a step which failed, with its exception.

        Requests whose sequences have all never run go on waiting. Where rank 0 leads, no step can
        follow, and all requests end.
        """
        if self.is_led:
            self.core.clear("error")
            self._removed.clear()
        else:
            self.core.break_off("error")
        waiting = {*self.core.scheduler.live(), *self._added}
        failed = {request: None for seq, (request, _) in self._owner.items() if seq not in waiting}
        if not isinstance(error, Exception):  # SystemExit, say: it must not end those who wait
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
        self._ring([bell for bell, is_ready in self._waiters.items() if is_ready()])

    def _ring(self, bells: list[threading.Lock]) -> None:
        for bell in bells:
            del self._waiters[bell]
            bell.release()
