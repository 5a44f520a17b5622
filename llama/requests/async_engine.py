"""Requests from asyncio code: one async iterator per request, and one engine behind all of them.

In: prompts and sampling parameters. Out: outputs as they come; a slow reader gets several steps in
one output. The model runs in one thread of its own.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llama.requests.book import RequestBook
from llama.requests.loop_calls import LoopCalls
from llama.requests.request import Request, RequestOutput
from llama.sampling_params import SamplingParams

# Characters and token ids of one request; preparing more of them would block the event loop.
_MAX_IN_LOOP = 10_000


class AsyncLLMEngine:
    """An asyncio interface to a `Llama` or its `LLMEngine`, which others may use as well."""

    def __init__(self, llama: Any) -> None:
        self.engine: RequestBook = getattr(llama, "llm_engine", llama)
        self.engine.port.check_shared()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llama-engine")
        self._open: set[Request] = set()
        self._calls: dict[asyncio.AbstractEventLoop, LoopCalls] = {}
        self._is_closed = False
        self.failure: BaseException | None = None  # the first exception of a step

    async def generate(
        self, prompt: str | list[int], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        """Yield the request's outputs, each with all of its text so far; the last has `finished`.

        Leaving the loop or cancelling the task aborts the request. An exception of a step is raised
        for all requests that were in it.

        Raises:
            ValueError: The request is not valid, or its id is in use.
            TypeError: A value of the request has a wrong type.
            RuntimeError: The engine is closed.
        """
        request = await self.prepare(prompt, params, request_id)
        async with contextlib.aclosing(self.stream([request])) as outputs:
            async for output in outputs:
                yield output

    async def prepare(
        self, prompt: str | list[int], params: SamplingParams, request_id: str, **more: Any
    ) -> Request:
        """Return a checked request for `stream`; see `Preparer`.

        Large requests, and those with structured output, are prepared in a thread.
        """
        if self._is_closed:
            raise RuntimeError("this AsyncLLMEngine is closed: make another one")
        prepare = functools.partial(self.engine.prepare, request_id, prompt, params, **more)
        is_large = _num_prepared(prompt, params) > _MAX_IN_LOOP
        if is_large or params.structured_output is not None:
            return await asyncio.to_thread(prepare)
        return prepare()

    async def stream(self, requests: list[Request]) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of prepared requests as they come; see `generate`."""
        changed = asyncio.Event()
        unfinished = list(requests)
        with self.pushing(requests, lambda _: changed.set()):
            while unfinished:
                await changed.wait()
                changed.clear()
                for request in [request for request in unfinished if request.has_output]:
                    output = self.engine.take_output(request)
                    if output.finished:
                        unfinished.remove(request)
                    yield output

    @contextlib.contextmanager
    def pushing(self, requests: list[Request], push: Callable[[Request], None]) -> Iterator[None]:
        """Run prepared requests within a block, which aborts those that are unfinished at its end.

        Args:
            requests: The requests.
            push: Called in the event loop with each request that may have an output, which
                `engine.take_output` returns. It must not raise.
        """
        calls = self._calls_of(asyncio.get_running_loop())
        for request in requests:
            request.listener = functools.partial(calls.add, functools.partial(push, request))
        unfinished = list(requests)
        try:
            self._open.update(requests)
            self.engine.submit(requests)
            self._thread.submit(self._run_until_finished, unfinished)
            yield
        finally:
            unfinished.clear()
            self._open.difference_update(requests)
            self.engine.discard(requests)
            for request in requests:
                request.listener = None  # It may refer to what refers to the request.

    def _calls_of(self, loop: asyncio.AbstractEventLoop) -> LoopCalls:
        """Return the calls that wait for an event loop, and forget those of closed ones."""
        calls = self._calls.get(loop)
        if calls is None:
            calls = LoopCalls(loop)
            open_loops = {x: waiting for x, waiting in self._calls.items() if not x.is_closed()}
            self._calls = {**open_loops, loop: calls}
        return calls

    def _run_until_finished(self, unfinished: list[Request]) -> None:
        """Step the engine until all of these requests have ended.

        It may begin long after they ended, so the caller empties the list, which then keeps none of
        them in memory.
        """
        try:
            self.engine.port.wait_until(lambda: all(x.finished for x in tuple(unfinished)))
        except BaseException as error:
            self.failure = self.failure or error
            raise

    async def abort(self, request_id: str) -> None:
        """End a request: its iterator gets a last output with finish_reason "abort"."""
        request = self.engine.find(request_id)
        if request is not None:
            self.engine.abort(request)

    def close(self) -> None:
        """Abort unfinished requests, and end the thread after its current step."""
        self._is_closed = True
        for request in list(self._open):
            self.engine.abort(request)
        self._thread.shutdown()


def _num_prepared(prompt: object, params: SamplingParams) -> int:
    """Return how many characters and token ids the preparation of a request reads or copies."""
    num_prompt = len(prompt) if isinstance(prompt, str | list | tuple) else 0
    num_texts = len(params.prediction) + sum(map(len, params.bad_words))
    return num_prompt * (params.best_of or params.n) + num_texts
