"""What all routes share: the model, whether it can be asked, and who may ask now.

In: prepared requests of the routes. Out: their outputs, or an `ApiError`. Beyond `max_queue`
sequences that wait, a request is refused at once; the others wait in the engine.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from llama.checks import FieldError
from llama.generation import Llama
from llama.prompts import ToolFormat
from llama.requests.async_engine import AsyncLLMEngine
from llama.requests.prepare import ContextLengthError
from llama.requests.request import Request, RequestOutput
from llama.sampling_params import SamplingParams
from llama.server.errors import ApiError, ErrorFields, broken, shutting_down
from llama.server.metrics import ActiveRequest, EngineMetrics, Metrics
from llama.server.worker_pool import PoolBusyError, WorkerPool

_PREPARE_S = 5.0  # limit for encoding a prompt, and for compiling a grammar
_GRAMMAR_THREADS = 4  # grammars compiled at the same time
_TOO_SLOW = (
    f"the request took more than {_PREPARE_S:.0f} s to prepare: send less at once, or ask for a "
    "simpler form"
)
_POOL_BUSY = "the server is compiling the grammars of other requests: try again"
log = logging.getLogger("llama.server")


class State(Enum):
    LOADING = "loading"  # there is no model yet
    READY = "ready"
    DRAINING = "draining"  # what runs is finished, and nothing new begins
    BROKEN = "broken"  # a step failed; the process ends


@dataclass(frozen=True)
class Limits:
    max_queue: int = 1024  # sequences that may wait beside those that run
    max_wait_s: float = 600.0  # until the first token
    max_body_bytes: int = 8 * 2**20  # of a request
    max_bodies_bytes: int = 64 * 2**20  # of all that are read, but the first 16 KiB of each
    max_prompts: int = 256  # of one body
    max_connections: int = 4096  # these two: see `Connections`
    max_per_address: int | None = None


@dataclass(eq=False)
class Service:
    """The state of one server. All of it is used in the server's event loop, but `start`, `drain`,
    `has_failed`, `break_off` and `is_busy`, which other threads use."""

    model_name: str
    limits: Limits
    given_format: ToolFormat | None = None  # of tools; None: that of the checkpoint's generation
    state: State = State.LOADING
    created: int = field(default_factory=lambda: int(time.time()))
    metrics: Metrics = field(default_factory=Metrics)
    llama: Llama | None = None
    engine: AsyncLLMEngine | None = None
    _grammar_pool: WorkerPool = field(init=False)
    _active: set[ActiveRequest] = field(default_factory=set)
    _has_told: bool = False  # that a step failed

    def __post_init__(self) -> None:
        """Make the pool of threads that compile grammars."""
        max_waiting = self.limits.max_queue
        self._grammar_pool = WorkerPool("llama-grammar", _GRAMMAR_THREADS, max_waiting)

    def start(self, llama: Llama) -> None:
        """The model is loaded: requests may come."""
        self.llama, self.engine = llama, AsyncLLMEngine(llama)
        self.metrics.registry.register(EngineMetrics(llama, self.num_unfinished))
        self.state = State.READY

    def drain(self) -> None:
        """Nothing new begins."""
        if self.state is not State.BROKEN:
            self.state = State.DRAINING

    @property
    def has_failed(self) -> bool:
        """A step failed, though its clients may all have left."""
        failure = self.engine and self.engine.failure
        return self.state is State.BROKEN or failure is not None

    def break_off(self, *, is_failure: bool = True) -> None:
        """The model cannot go on: all that runs or waits is answered with 500, else with 503. This
        waits for nothing: a rank that is gone may have left this one in a step without end."""
        self.state = State.BROKEN if is_failure else State.DRAINING
        if self.engine is not None:
            self.engine.engine.close()

    @property
    def is_busy(self) -> bool:
        return bool(self._active)

    def num_unfinished(self) -> int:
        """Sequences that run or wait."""
        answers = [answer for active in list(self._active) for answer in active.answers]
        return sum(answer.finish_reason is None for answer in answers)

    def loaded(self) -> Llama:
        """The model; ApiError 503 while there is none, or when requests are no longer taken."""
        if self.state is State.LOADING:
            raise ApiError(503, "the model is being loaded: try again")
        if self.state is not State.READY or self.llama is None:
            raise shutting_down()
        return self.llama

    @property
    def tool_format(self) -> ToolFormat:
        return self.given_format or self.loaded().tool_format

    async def prepare(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        fields: ErrorFields,
        *,
        index: int = 0,
        must_fit: bool = True,
    ) -> Request:
        """Return a checked request for the engine.

        Args:
            prompt: text or token ids.
            params: parameters of all its answers.
            fields: the body's own names, which an error uses.
            index: position of the prompt in the body.
            must_fit: whether `max_tokens` beyond the context is an error.

        Raises:
            ApiError: 400 names the field of the body that is at fault, or that takes too long to
                prepare; 503 says that the server is busy or shutting down.
        """
        tokenizer = self.loaded().tokenizer
        if isinstance(prompt, str):
            # The engine adds begin_of_text; a client may have written its name as well.
            names = {token: name for name, token in tokenizer.special_tokens.items()}
            prompt = prompt.removeprefix(names[tokenizer.bos_id])
        try:
            return await self._prepare(prompt, params, index=index, must_fit=must_fit)
        except ContextLengthError as error:
            raise _context_error(error, fields) from None
        except (TypeError, ValueError) as error:
            raise fields.refusal(error) from None
        except PoolBusyError:
            self.metrics.refused.inc()
            raise ApiError(503, _POOL_BUSY) from None
        except TimeoutError:
            field = fields.prompt if params.structured_output is None else "structured_output"
            raise fields.refusal(FieldError(field, _TOO_SLOW)) from None
        except RuntimeError:
            raise shutting_down() from None

    async def _prepare(
        self, prompt: str | list[int], params: SamplingParams, **options: Any
    ) -> Request:
        """Prepare a request in the event loop or in a thread; the time is limited either way."""
        assert self.engine is not None
        if params.structured_output is None:
            async with asyncio.timeout(_PREPARE_S):
                return await self.engine.prepare(prompt, params, "", **options)
        prepare = functools.partial(self.engine.engine.prepare, "", prompt, params, **options)
        request = await self._grammar_pool.run(prepare, _PREPARE_S)
        self.loaded()  # The engine may have been closed meanwhile.
        return request

    def check_room(self, count: int, field: str = "prompt") -> None:
        """ApiError 503 where the queue has no room for so many sequences; 400, which names the
        field, where it never has: one request may take the batch and half of the queue."""
        max_running = self.loaded().model.params.max_batch_size
        most = max_running + self.limits.max_queue // 2
        if count > most:
            words = (
                f"the request asks for {count} answers (prompts times n or best_of): this server "
                f"takes at most {most} at once; send several requests, or start it with a larger "
                "--max_queue"
            )
            raise ApiError(400, words, param=field)
        unfinished = self.num_unfinished()
        if count > max_running + self.limits.max_queue - unfinished:
            self.metrics.refused.inc()
            words = f"the queue is full: {unfinished} sequences run or wait; try again"
            raise ApiError(503, words)

    @contextlib.contextmanager
    def _admitted(self, requests: list[Request], request_id: str) -> Iterator[ActiveRequest]:
        """While it is open, the requests count as unfinished; ApiError 503 for a full queue."""
        active = ActiveRequest(request_id, requests)
        self.check_room(len(active.answers))
        self._active.add(active)
        try:
            yield active
        except ApiError as e:
            active.status, e.is_logged = e.status, True
            raise
        finally:
            self._active.remove(active)
            self.metrics.finish(active)
            active.log()

    async def outputs(
        self, requests: list[Request], request_id: str, fields: ErrorFields
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one HTTP request, as they come. ApiError 500 where the step failed; 400
        where the form of an answer cannot be held any longer; 503 where the queue is full, the
        first output took too long, or the server ends."""
        assert self.engine is not None
        with self._admitted(requests, request_id) as active:
            try:
                async with contextlib.aclosing(self.engine.stream(requests)) as outputs:
                    yield self._checked(await self._first(outputs), active, fields)
                    async for output in outputs:
                        yield self._checked(output, active, fields)
            except ApiError:
                raise
            except Exception:
                is_of_step = self.state is not State.BROKEN or self.engine.failure is not None
                self.state = State.BROKEN  # the main thread may have seen it before
                if is_of_step and not self._has_told:
                    self._has_told = True
                    log.exception("a step failed: the server ends")
                raise broken() from None

    async def _first(self, outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
        try:
            async with asyncio.timeout(self.limits.max_wait_s):
                return await anext(outputs)
        except TimeoutError:
            words = f"no token came within {self.limits.max_wait_s:.0f} s: try again later"
            raise ApiError(503, words) from None

    def _checked(
        self, output: RequestOutput, active: ActiveRequest, fields: ErrorFields
    ) -> RequestOutput:
        self.metrics.token_came(active, output)
        if output.error is not None and output.error_field is not None:
            raise fields.refusal(FieldError(output.error_field, output.error))
        if output.error is not None:
            raise ApiError(500, output.error)
        if output.finished and any(a.finish_reason == "abort" for a in output.outputs):
            raise broken() if self.state is State.BROKEN else shutting_down()
        return output


def _context_error(error: ContextLengthError, fields: ErrorFields) -> ApiError:
    """Return the error of an API for a request that exceeds the context."""
    message = str(error)
    if error.field == "max_tokens":
        name = fields.names.get("max_tokens", "max_tokens")
        return ApiError(400, message, param=name, code="context_length_exceeded")
    if fields.too_long is None:
        return ApiError(400, message, param=fields.prompt)
    return ApiError(400, fields.too_long.format(count=error.count, most=error.most))
