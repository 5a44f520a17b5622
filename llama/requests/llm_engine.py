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
from typing import TypeVar

from llama.engine.core import EngineCore
from llama.options.adapters import AdapterStore
from llama.options.image_sizes import ImageSizes
from llama.requests.adapters import AdapterInfo
from llama.requests.book import RequestBook
from llama.requests.formats import FormatCompiler
from llama.requests.local_port import LocalPort
from llama.requests.rank_calls import RankCalls
from llama.requests.request import Request, RequestOutput
from llama.requests.seeds import derived_seed
from llama.sampling_params import SamplingParams
from llama.tokenizer import Tokenizer

_T = TypeVar("_T")


class LLMEngine(RequestBook):
    """The requests of one model, which an `EngineCore` of this process computes.

    Attributes:
        core: The core.
        adapter_store: The adapters that its sequences can choose.
        parallel: The group of ranks that share the model.
        constraints: Makes what constrains answers.
        grammars: The grammars of structured output.
        seed: The seed that the seeds of requests without one are derived from.
    """

    port: LocalPort

    def __init__(
        self,
        core: EngineCore,
        adapter_store: AdapterStore,
        tokenizer: Tokenizer,
        max_seq_len: int,
        seed: int,
        why_silent: str = "",
        images: ImageSizes | None = None,
    ) -> None:
        """Begin without requests; see `RequestBook`."""
        self.core = core
        self.adapter_store = adapter_store
        self.parallel = core.runner.model.parallel
        self.seed = seed
        self._ranks = RankCalls(core, adapter_store, self.parallel, self.has_unfinished_requests)
        self.agree = self._ranks.agree
        self.constraints = FormatCompiler(tokenizer)
        self.grammars = self.constraints.grammars
        port = LocalPort(core, self._ranks, seed)
        super().__init__(port, tokenizer, self.constraints, max_seq_len, why_silent, images)

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
        return super().submit(compared)

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
        threads = self.port.threads
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
        self.port.wait_until(is_ready)

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
        return self.port.loader.load(name, path, replace=replace)

    def drop_adapter(self, name: str) -> None:
        """Free an adapter; where another name has the same content, forget the name only.

        Without `lead`, every rank makes this call.

        Raises:
            ValueError: No adapter has this name.
            AdapterInUseError: Requests are using it.
        """
        self.port.loader.drop(name)

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
            self._check_open()
            compared = list(requests)
            must_match += [request.fingerprint() for request in compared]
        if any(request.seed is None for request in compared):
            seed = self.port.next_seed()
            for index, request in enumerate(compared):
                if request.seed is None:
                    request.set_seed(derived_seed(seed, index))
        return compared
