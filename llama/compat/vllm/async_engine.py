"""vLLM's AsyncLLMEngine: an async iterator per request.

In: vLLM's calls, in the forms of 0.4 to today. Out: vLLM's outputs as they come. It translates; the
AsyncLLMEngine of `llama.requests` serves, and beam searches run in threads beside it.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, cast

from llama.checks import brief
from llama.compat.vllm.jobs import Job, ModelConfig, Served, one_of, one_prompt
from llama.compat.vllm.outputs import RequestOutput
from llama.compat.vllm.params import LABELS, EngineArgs, SamplingParams, refuse
from llama.generation import Llama
from llama.requests import async_engine
from llama.requests.llm_engine import LLMEngine
from llama.requests.request import Request

_LONG_PROMPT = 10_000  # characters; to encode more would hold the event loop up


class AsyncLLMEngine(Served):
    """vLLM's engine for asyncio: an iterator per request, any number at once, in one process."""

    def __init__(self, llama: Llama, args: EngineArgs | None = None) -> None:
        super().__init__(llama, args)
        self._requests = async_engine.AsyncLLMEngine(llama)
        self._rounds: dict[str, _Rounds] = {}
        self.is_running = True

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: Any) -> "AsyncLLMEngine":
        refuse(
            "AsyncLLMEngine.from_engine_args",
            {k: v for k, v in others.items() if k not in LABELS},
        )
        return cls(engine_args.build(), engine_args)

    async def generate(
        self,
        prompt: Any = None,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        prompt_token_ids: list[int] | None = None,
        *,
        inputs: Any = None,
        **others: Any,
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of a request as they come; leaving the loop aborts it.

        A beam search has one output, its last. Errors come with the first output that is asked for.
        """
        refuse("generate", others, {"priority": (0,)})
        prompt = one_prompt(one_of("prompt", prompt, "inputs", inputs), prompt_token_ids)
        if not isinstance(request_id, str) or not request_id:
            raise TypeError(f"request_id={brief(request_id)} must be a string that is not empty")
        if isinstance(prompt, str) and len(prompt) > _LONG_PROMPT:
            job = await asyncio.to_thread(self.make_job, request_id, prompt, sampling_params)
        else:
            job = self.make_job(request_id, prompt, sampling_params)
        if job.asked.use_beam_search:
            yield await self._search_beams(job)
            return
        outputs = self._requests.generate(job.ids, job.params, request_id)
        async with contextlib.aclosing(cast(Any, outputs)):
            async for ours in outputs:
                report = job.reporter.report(ours)
                if report is not None:
                    yield report

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests: their iterators get a last output with finish_reason "abort"."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            if name in self._rounds:
                self._rounds[name].is_aborted.set()
            await self._requests.abort(name)

    async def get_model_config(self) -> ModelConfig:
        return self.model_config

    async def check_health(self) -> None:
        if not self.is_running:
            raise RuntimeError("this AsyncLLMEngine was shut down: make another one")

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    @property
    def errored(self) -> bool:
        """Always False: an error of the model ends the requests in that step, and no more."""
        return False

    @property
    def engine(self) -> "AsyncLLMEngine":
        """For clients that read `engine.engine.model_config`."""
        return self

    def shutdown(self) -> None:
        """Abort what is not finished; what is asked for later is a RuntimeError."""
        self.is_running = False
        for rounds in list(self._rounds.values()):
            rounds.is_aborted.set()
        self._requests.close()

    shutdown_background_loop = shutdown

    async def _search_beams(self, job: Job) -> RequestOutput:
        await self.check_health()
        name = job.reporter.request_id
        if name in self._rounds:
            raise ValueError(f"request_id={brief(name)} is in use by an unfinished request")
        rounds = self._rounds[name] = _Rounds(self.llama_engine)
        try:
            engine = cast(LLMEngine, rounds)
            (output,) = await asyncio.to_thread(self.search, [job], engine)
            return output
        except _Aborted:
            return job.reporter.report_beams(job.ids, [])
        finally:
            rounds.is_aborted.set()  # of a task that was cancelled, the thread goes on until here
            del self._rounds[name]


class _Aborted(Exception):
    pass


class _Rounds:
    """The engine as `beam_search` calls it, until the search is aborted."""

    def __init__(self, engine: LLMEngine) -> None:
        self.is_aborted = threading.Event()
        self.prepare = engine.prepare
        self._engine = engine

    def run(self, requests: Iterator[Request]) -> Any:
        if self.is_aborted.is_set():
            raise _Aborted
        return self._engine.run(requests)
