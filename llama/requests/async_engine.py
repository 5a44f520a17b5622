"""Many requests at once from asyncio code: an async iterator a request, one engine behind them.

In: `generate` calls from any number of tasks. Out: each one's RequestOutputs as they come. The
model runs in one thread of its own; requests are added and aborted between its steps.
"""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from llama.generation import Llama
from llama.requests.llm_engine import Request, RequestOutput
from llama.sampling_params import SamplingParams

_Queue = asyncio.Queue[RequestOutput | BaseException]


class AsyncLLMEngine:
    """Serves a `Llama` to one event loop; while it runs, use the Llama through it alone."""

    def __init__(self, llama: Llama) -> None:
        if llama.model.parallel.size > 1:
            # Ranks must see the same requests in the same order; each event loop has its own.
            raise ValueError(
                f"AsyncLLMEngine serves one process, not model_parallel_size="
                f"{llama.model.parallel.size}: use LLMEngine, with the same calls on every rank"
            )
        self.llama = llama
        self._engine = llama.llm_engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llama-engine")
        self._queues: dict[str, _Queue] = {}
        self._arrived: list[Request] = []
        self._left: list[str] = []
        self._task: asyncio.Task[None] | None = None

    async def generate(
        self, prompt: str | list[int], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        """The request's outputs, each with all of its text so far; the last has `finished`.

        Leaving the loop, or cancelling the task, aborts the request and frees its pages.
        ValueError or TypeError for a bad request or an id in use; others go on.
        """
        request = self._engine.prepare(request_id, prompt, params)
        if request_id in self._queues:
            raise ValueError(f"request_id={request_id!r} is in use by a request not yet finished")
        queue = self._queues[request_id] = asyncio.Queue()
        self._arrived.append(request)
        finished = False
        try:
            while not finished:
                self._wake()
                output = await queue.get()
                if isinstance(output, BaseException):
                    raise output
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._leave(request)

    async def abort(self, request_id: str) -> None:
        """End a request: its iterator gets a last output with finish_reason "abort"."""
        if request_id in self._queues:
            self._left.append(request_id)
            self._wake()

    async def idle(self) -> None:
        """Wait until nothing is running or queued."""
        while self._task is not None:
            await asyncio.wait([self._task])

    def close(self) -> None:
        """End the engine's thread; a step under way is waited for."""
        self._thread.shutdown()

    def _leave(self, request: Request) -> None:
        self._queues.pop(request.request_id, None)
        if request in self._arrived:
            self._arrived.remove(request)
        else:
            self._left.append(request.request_id)
            self._wake()

    def _wake(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """Step while there is anything to do; between steps, let requests come and go."""
        loop = asyncio.get_running_loop()
        try:
            while self._admit() or self._engine.has_unfinished_requests():
                try:
                    outputs = await loop.run_in_executor(self._thread, self._engine.step)
                except Exception as e:  # the engine is empty again: tell everyone who waits
                    self._tell_all(e)
                    continue
                for output in outputs:
                    self._tell(output)
                await asyncio.sleep(0)  # readers run, and may leave, before the next step
        finally:
            self._task = None

    def _admit(self) -> bool:
        """Apply what came and went since the last step; false if the engine may rest."""
        for request_id in self._left:
            output = self._engine.abort_request(request_id)
            if output is not None:
                self._tell(output)
        self._left.clear()
        for request in self._arrived:
            self._engine.submit(request)
        self._arrived.clear()
        return self._engine.has_unfinished_requests()

    def _tell(self, output: RequestOutput) -> None:
        request_id = output.request_id
        queue = (
            self._queues.pop(request_id, None) if output.finished else self._queues.get(request_id)
        )
        if queue is not None:
            queue.put_nowait(output)

    def _tell_all(self, error: Exception) -> None:
        for queue in self._queues.values():
            queue.put_nowait(error)
        self._queues.clear()
