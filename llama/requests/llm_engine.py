"""The one door to the engine: requests with text in, their outputs out, for any number of threads.

Everything that generates comes through here. `run` waits for all of its requests, `stream` yields
their outputs as they come; `add_request` and `step` are for those who know vLLM. There is no thread
of its own: of the threads that wait, one runs the model for all, and the others sleep until they
have what they wait for. Requests come and go between two steps.

Under torchrun there are two ways. Every rank makes the same calls in the same order, from one
thread: requests are compared across the ranks when they are submitted, and never in a step. Or
rank 0 leads (`lead`): it alone is called, from any thread.

It is longer than a file should be, as one lock guards all of its state: what threads add, what a
step moves and what an interrupt leaves half done are read together or not at all.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TypeVar

from llama.checks import brief
from llama.engine.core import EngineCore
from llama.engine.sequence import Sequence
from llama.ranks import ModelParallel
from llama.requests.grammar import GrammarCompiler
from llama.requests.prepare import prepare
from llama.requests.ranks import OneCaller, lead
from llama.requests.request import Answer, Request, RequestOutput, derived_seed
from llama.sampling_params import SamplingParams
from llama.tokenizer import Tokenizer

_T = TypeVar("_T")

_LONGEST_SLEEP_S = 1.0  # then a thread looks whether anybody still runs the model


class LLMEngine:
    """Requests of one model; `core` computes them, `parallel` are the ranks that do it together."""

    def __init__(
        self,
        core: EngineCore,
        tokenizer: Tokenizer,
        *,
        max_seq_len: int,
        seed: int,
        parallel: ModelParallel,
    ) -> None:
        self.core = core
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len
        self.seed = seed
        self.parallel = parallel
        self.grammars = GrammarCompiler(tokenizer)
        self.num_calls = 0  # of those that gave no seed
        self._lock = threading.Lock()  # for all below; not held while the model runs
        self._requests: dict[Request, None] = {}  # until their last output is taken
        self._names: dict[str, Request] = {}
        self._due: dict[Request, None] = {}  # what `step` will report
        self._owner: dict[Sequence, tuple[Request, Answer]] = {}  # of what the core computes
        self._arrived: list[Request] = []  # since the last step began
        self._left: list[Sequence] = []  # aborted since the last step began
        self._waiters: list[tuple[Callable[[], bool], threading.Condition]] = []
        self._stepper: int | None = None  # the thread that runs the model now
        self._is_intact = True  # false while the core changes: after that, it was interrupted
        self._one_caller = OneCaller(parallel.size)
        self._is_closed = False
        self.is_led = False  # rank 0 takes all requests; the other ranks follow

    def prepare(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        index: int | None = None,
    ) -> Request:
        """Check a request and make its sequences; nothing is queued, no state is touched.

        prompt: text (begin_of_text is put before it) or token ids, also as an array or a tensor.
        An empty request_id is a request without a name; its outputs have `index`, its place
        in the caller's list. A seed of params is that of the list's first prompt; those of the
        others are derived from it. A request without one gets its seed when it is submitted: from
        the engine's seed, the number of the call and its place there.
        TypeError or ValueError says what is wrong with the request.
        """
        return prepare(
            request_id,
            prompt,
            params,
            tokenizer=self.tokenizer,
            max_seq_len=self.max_seq_len,
            index=index,
            grammars=self.grammars,
        )

    def add_request(
        self, request_id: str, prompt: str | list[int], params: SamplingParams | None = None
    ) -> None:
        """Queue a prompt, as text or ids; `step` returns its outputs.

        ValueError or TypeError, before anything is queued: an id in use, an empty or too long
        prompt, an id beyond the vocabulary, ranks that were given different requests.
        """

        def prepared() -> Iterator[Request]:
            if request_id == "":
                raise ValueError("request_id is empty: give each request a name")
            yield self.prepare(request_id, prompt, params or SamplingParams())

        self.submit(prepared())

    def submit(self, requests: Iterable[Request]) -> list[Request]:
        """Compare the requests across the ranks, and queue them; `step` returns their outputs.

        The iterable is consumed inside the comparison: an error in preparing one on one rank is an
        error on every rank.
        """
        compared = self._compare(requests)
        try:
            self._queue(compared)
        except BaseException:  # an id in use, or an interrupt: nothing stays half queued
            self.drop(compared)
            raise
        return compared

    def run(self, requests: Iterable[Request]) -> list[RequestOutput]:
        """The last output of each request, in their order; whatever ends this early aborts them."""
        compared = self._compare(requests, is_claimed=True)
        with self._aborting(compared):
            self._queue(compared)
            self.wait_until(lambda: all(request.finished for request in compared))
            return [self.take_output(request) for request in compared]

    def stream(self, requests: Iterable[Request]) -> Generator[RequestOutput, None, None]:
        """The outputs of the requests as they come. Leaving the loop aborts what is not finished.

        The requests are compared now, and queued when the first output is asked for.
        """
        return self._stream(self._compare(requests, is_claimed=True))

    def step(self) -> list[RequestOutput]:
        """New outputs of the requests that were added; if there are none, run the model once first.

        With best_of > n, a request is reported only when it has finished. If the model fails, all
        requests end and its exception is raised.
        """
        is_first = True

        def is_ready() -> bool:
            nonlocal is_first
            is_first, was_first = False, is_first
            return not was_first or not self._requests or bool(self._due)

        try:
            self.wait_until(is_ready)
        finally:
            with self._lock:
                failed = [request for request in self._due if request.exception is not None]
                for request in failed:
                    self._forget(request)
        with self._lock:
            return [self._take(request) for request in failed or list(self._due)]

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Run the model, or sleep while another thread runs it, until `is_ready()`.

        It is called within the engine's lock: it must be quick and must not call the engine.
        """
        try:
            while not self._step_or_sleep(is_ready):
                pass
        finally:
            with self._lock:
                if self._stepper is None and self._waiters:
                    self._waiters[0][1].notify()  # this thread leaves: it hands over

    def take_output(self, request: Request) -> RequestOutput:
        """The output now due. That of a finished request is the last: it is forgotten then."""
        with self._lock:
            return self._take(request)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request, free its pages, and return what it came to; None if there is none."""
        request = self._names.get(request_id)
        if request is None:
            return None
        self.abort(request)
        return self.take_output(request)

    def abort(self, request: Request) -> None:
        """End a request; its last output has finish_reason "abort". Nothing, if it has finished."""
        with self._lock:
            self._end(request)

    def lead(self, work: Callable[[], _T]) -> _T | None:
        """Rank 0 does the work, and its result is returned there; the other ranks follow its steps.

        Every rank makes this call. Within the work, rank 0 may call from any number of threads, and
        an asyncio loop, whenever it likes. The others sleep until it does, return None when the
        work has ended, and keep nothing of it: unfinished requests are aborted. On one rank it is
        just `work()`. An exception of the work is a RankError on the others; an interrupt, or an
        exit, is an interrupt there. RuntimeError where requests are unfinished. RankError, on the
        rank that it names, where a rank would compute something else: the group must end then.
        """
        if self.parallel.size == 1 or self.is_led:
            return work()
        return lead(self, work)

    def find(self, request_id: str) -> Request | None:
        """The unfinished request of that name."""
        return self._names.get(request_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def _stream(self, requests: list[Request]) -> Generator[RequestOutput, None, None]:
        unfinished = dict.fromkeys(requests)
        with self._aborting(requests):
            self._queue(requests)
            while unfinished:
                self.wait_until(lambda: any(request.has_output for request in unfinished))
                for request in [request for request in unfinished if request.has_output]:
                    output = self.take_output(request)
                    if output.finished:
                        del unfinished[request]
                    yield output

    @contextlib.contextmanager
    def _aborting(self, requests: list[Request]) -> Iterator[None]:
        """Whatever ends the block, the engine keeps none of the requests after it."""
        try:
            yield
        finally:
            try:
                self.drop(requests)
            except KeyboardInterrupt:
                self.drop(requests)
                raise

    def close(self) -> None:
        """Abort all requests; what is submitted afterwards is a RuntimeError."""
        self._is_closed = True
        with self._lock:
            for request in list(self._requests):
                self._end(request)

    def drop_all(self) -> None:
        self.drop(list(self._requests))

    def drop(self, requests: Iterable[Request]) -> None:
        """Abort what is not finished, and keep nothing of the rest."""
        with self._lock:
            for request in requests:
                self._end(request)
                self._forget(request)

    def _compare(self, requests: Iterable[Request], *, is_claimed: bool = False) -> list[Request]:
        """The requests, if they are the same on every rank; else an error on every rank."""
        with self._calling(), self.agree("the prompts or parameters") as must_match:
            if self._is_closed:
                raise RuntimeError("this engine is closed: build another one")
            compared = list(requests)
            for request in compared:
                request.is_claimed = is_claimed or request.is_claimed
                must_match.append(request.fingerprint())
        self._number(compared)
        return compared

    def _calling(self) -> contextlib.AbstractContextManager[None]:
        """RuntimeError where two threads call, on many ranks: the ranks' orders would differ."""
        if self.parallel.size == 1 or self.is_led:
            return contextlib.nullcontext()
        return self._one_caller.calling(self.has_unfinished_requests)

    def agree(self, what: str) -> contextlib.AbstractContextManager[list[object]]:
        """`ModelParallel.agree` where every rank makes the call; nothing where rank 0 leads."""
        return contextlib.nullcontext([]) if self.is_led else self.parallel.agree(what)

    def _number(self, requests: list[Request]) -> None:
        """Give seeds to the requests that have none: from the call's number and their places.

        It follows the comparison, so that a refused call takes no number on any rank.
        """
        if any(request.seed is None for request in requests):
            with self._lock:
                call, self.num_calls = self.num_calls, self.num_calls + 1
            seed = derived_seed(self.seed, call, of="call")
            for place, request in enumerate(requests):
                if request.seed is None:
                    request.set_seed(derived_seed(seed, place))

    def _queue(self, requests: list[Request]) -> None:
        with self._lock:
            named = [request.request_id for request in requests if request.request_id]
            for name in named:
                if name in self._names or named.count(name) > 1:
                    raise ValueError(
                        f"request_id={brief(name)} is in use by a request not yet finished"
                    )
            for request in requests:
                if request.request_id:
                    self._names[request.request_id] = request
                if not request.is_claimed:
                    request.listener = functools.partial(self._due.setdefault, request)
                self._requests[request] = None
                self._arrived.append(request)

    def _take(self, request: Request) -> RequestOutput:
        self._due.pop(request, None)
        if request.finished:
            self._forget(request)
        return request.take_output()

    def _forget(self, request: Request) -> None:
        self._requests.pop(request, None)
        self._due.pop(request, None)
        if self._names.get(request.request_id) is request:
            del self._names[request.request_id]

    def _end(self, request: Request) -> None:
        """End a request: now, between two steps, or else when the present step ends."""
        if not request.finished:
            request.end("abort")
        if request in self._arrived:
            self._arrived.remove(request)
        for answer in request.answers:
            self._disown(answer.sequence)
        if self._stepper is None:
            self._let_go()
        self._wake_ready()

    def _disown(self, seq: Sequence) -> None:
        if seq in self._owner:
            self._left.append(seq)
            del self._owner[seq]

    def _step_or_sleep(self, is_ready: Callable[[], bool]) -> bool:
        """True if ready. Else run the model once, or sleep while another thread is at it."""
        with self._lock:
            if is_ready():
                return True
            if self._stepper not in (None, threading.get_ident()):
                self._sleep(is_ready)
                return False
            self._stepper = threading.get_ident()
        self._step()
        return False

    def _sleep(self, is_ready: Callable[[], bool]) -> None:
        waiter = is_ready, threading.Condition(self._lock)
        self._waiters.append(waiter)
        try:
            waiter[1].wait(_LONGEST_SLEEP_S)
        finally:
            self._waiters.remove(waiter)

    def _step(self) -> None:
        """Run the model once for all requests. The lock is not held while it runs."""
        try:
            with self._lock:
                self._admit()
            with self.parallel.step():
                moved = self.core.step()
            with self._lock:
                for seq in moved:
                    self._read(seq)
                self._is_intact = True
                self._let_go()
        except KeyboardInterrupt:  # of this thread alone: the requests of others go on
            raise
        except BaseException as error:
            with self._lock:
                self._fail(error)
            raise
        finally:
            self._stepper = None
            with self._lock:
                self._wake_ready()

    def _admit(self) -> None:
        """Before a step: queue what has arrived."""
        self._restart_if_interrupted()
        self._is_intact = False
        while self._arrived:
            request = self._arrived[0]
            self._owner |= {a.sequence: (request, a) for a in request.answers}
            del self._arrived[0]
            for answer in request.answers:
                self.core.add(answer.sequence)

    def _restart_if_interrupted(self) -> None:
        """An interrupt (Ctrl-C) broke a change of the core off: begin anew with what has an owner.

        It can come between any two statements, so no page and no count is trusted. Tokens are, and
        the next ones are drawn as if nothing had happened.
        """
        if self._is_intact:
            return
        self._left.clear()
        for request in self._arrived:
            for answer in request.answers:
                self._owner.pop(answer.sequence, None)
        self.core.restart(self._owner)
        self._is_intact = True
        for seq in list(self._owner):
            self._read(seq)

    def _read(self, seq: Sequence) -> None:
        """Make text of a sequence's new tokens; one that was aborted meanwhile has no owner."""
        if seq not in self._owner:
            return
        request, answer = self._owner[seq]
        answer.read()
        if answer.finish_reason is not None:
            self._disown(seq)
        request.note_output()

    def _let_go(self) -> None:
        """Between two steps: free the pages of what ended by its text, or was aborted."""
        self._restart_if_interrupted()
        self._is_intact = False
        for seq in self._left:
            self.core.finish(seq, "abort")
        self._left.clear()
        self._is_intact = True

    def _fail(self, error: BaseException) -> None:
        """A step failed: all that were in it end with its exception. The core is empty then."""
        failed = {request: None for request, _ in self._owner.values()}
        self._owner.clear()
        self._left.clear()
        self.core.clear("error")
        self._is_intact = True
        if not isinstance(error, Exception):  # SystemExit, say: it must not end those who wait
            error = RuntimeError(f"the step was ended by {type(error).__name__}: {error}")
        for request in failed:
            request.exception = error
            request.end("error")

    def _wake_ready(self) -> None:
        for is_ready, condition in self._waiters:
            if is_ready():
                condition.notify()
