"""One model of a server: its engine, its adapters, its limits, and whether it admits a request.

In: prepared requests of the routes. Out: their outputs, or an `ApiError`. Requests that wait do so
in the engine. This file knows no API, no HTTP and no other model of the server.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

from llama.api import AsyncLLMEngine, RefusedError, Request, RequestOutput, ServedModel
from llama.common.checks import FieldError
from llama.prompts import ToolFormat
from llama.prompts.dialog_format import DialogFormat
from llama.prompts.reasoning import REASONING_FIELDS
from llama.sampling_params import SamplingParams
from llama.server.admission import Admission, queue_is_full
from llama.server.desk import Desk
from llama.server.errors import (
    ApiError,
    ErrorFields,
    broken,
    first_name,
    shutting_down,
    too_late,
    unknown_model,
)
from llama.server.limits import Limits, State
from llama.server.metrics import ActiveRequest, Metrics
from llama.server.refusals import has_not_run, refusal_of, refusals
from llama.server.workers import PREPARE_S, Workers

log = logging.getLogger("llama.server")


@dataclass(eq=False)
class Serving:
    """A model that a server answers with.

    Everything is used in the event loop of the server, except `start`, `drain`, `has_failed`,
    `break_off` and `is_busy`, which other threads use.

    Attributes:
        name: name of the model, in answers and in /v1/models.
        limits: the limits of its requests.
        metrics: the metrics of the server.
        given_format: format of tool calls; None stands for that of the checkpoint's generation.
        reasoning_field: name of the field of OpenAI's chats that has the reasoning.
        sampling_defaults: sampling parameters of requests that give none, as the model's files have
            them. Ollama's API has its own.
        lora_folder: folder from which clients can load LoRA adapters; None if they cannot.
        public_text: text that is no secret, whose pages all tenants share; empty for none.
        state: whether requests are answered.
        created: time of the start, in seconds since 1970.
        llama: the model, once it is loaded.
        desk: what else its engine is asked.
        engine: the engine of the model.
        workers: the threads in which requests are prepared.
    """

    name: str
    limits: Limits
    metrics: Metrics
    given_format: ToolFormat | None = None
    reasoning_field: str = REASONING_FIELDS[0]
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    lora_folder: Path | None = None
    public_text: str = ""
    state: State = State.LOADING
    created: int = field(default_factory=lambda: int(time.time()))
    llama: ServedModel | None = None
    desk: Desk | None = None
    engine: AsyncLLMEngine | None = None
    workers: Workers = field(init=False)
    _admission: Admission[ActiveRequest] = field(init=False)
    _has_logged_failure: bool = False
    _admits: bool = True

    def __post_init__(self) -> None:
        self.workers = Workers(self.limits.max_queue, self.metrics)
        self._admission = Admission(self.limits.max_queue)

    def start(self, llama: ServedModel, desk: Desk, *, admits: bool = True) -> None:
        """Answer requests from now on, with a loaded model.

        Args:
            llama: the model.
            desk: what else its engine is asked.
            admits: whether this process admits requests and compiles grammars, not the engine's.
        """
        self.llama = llama
        self.desk = desk
        self.engine = AsyncLLMEngine(llama.book)
        self._admits = admits
        self.state = State.READY
        log.info("%s: %s", self.name, self.dialog_format.describe())
        defaults = ", ".join(f"{name}={x:g}" for name, x in self.sampling_defaults.items())
        log.info("%s: defaults of requests: %s", self.name, defaults or "those of each API")
        if self.public_text:
            count = llama.book.share(self.public_text, self.dialog_format)
            log.info("%s: tenants share up to %d tokens of prompts", self.name, count)

    def drain(self) -> None:
        """Reject new requests from now on."""
        if self.state is not State.BROKEN:
            self.state = State.DRAINING

    @property
    def has_failed(self) -> bool:
        """Whether a step failed, even if no client is left that waits for it."""
        failure = self.engine and self.engine.failure
        return self.state is State.BROKEN or failure is not None

    def break_off(self, *, is_failure: bool = True) -> None:
        """End all requests, because the model cannot go on.

        This does not wait for anything: a rank that is gone may have left this one in a step that
        never ends.

        Args:
            is_failure: whether the requests get 500, for a failure, or 503, for a shutdown.
        """
        self.state = State.BROKEN if is_failure else State.DRAINING
        if self.engine is not None:
            self.engine.engine.close()

    def close(self) -> None:
        """End all requests, and the thread of the engine after its current step."""
        if self.engine is not None:
            self.engine.close()
        self.workers.close()

    @property
    def is_busy(self) -> bool:
        """Whether any request is being answered."""
        return bool(self._admission)

    def num_unfinished(self) -> int:
        """Return the number of sequences that run or wait."""
        return self._admission.num_unfinished()

    def loaded(self) -> ServedModel:
        """Return the model.

        Raises:
            ApiError: 503 while the model is being loaded, and while the server shuts down.
        """
        if self.state is State.LOADING:
            raise ApiError(503, "the model is being loaded: try again")
        if self.state is not State.READY or self.llama is None:
            raise shutting_down()
        return self.llama

    @property
    def takes_images(self) -> bool:
        """Whether the model reads images, or may do so: it has not been loaded yet."""
        return self.llama is None or self.llama.card.images is not None

    @property
    def dialog_format(self) -> DialogFormat:
        """The format of dialogs: the model's, or Meta's with the given format of tool calls."""
        dialog_format = self.loaded().dialog_format
        if self.given_format is None:
            return dialog_format
        return dialog_format.with_tool_format(self.given_format)

    def answers_to(self, model: str) -> bool:
        """Return whether a body's `model` names this model or one of its adapters."""
        # Ollama's clients add a tag.
        is_base = model in (self.name, f"{self.name}:latest")
        return is_base or (self.llama is not None and model in self.llama.adapters)

    def adapter_of(self, model: str | None) -> str | None:
        """Return the name of the adapter that a body's `model` names; None for the base model.

        Without adapters, any name stands for the base model.

        Raises:
            ApiError: 404 if the server has adapters, and nothing has this name.
        """
        adapters = self.loaded().adapters
        if model is None or model in adapters:
            return model
        has_adapters = bool(adapters) or self.lora_folder is not None
        if not has_adapters or self.answers_to(model):
            return None
        raise unknown_model(model, [self.name, *adapters])

    async def prepare(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        fields: ErrorFields,
        *,
        tenant: bytes,
        sender: bytes,
        must_fit: bool = True,
        model: str | None = None,
        **options: Any,
    ) -> Request:
        """Return a checked request for the engine.

        Args:
            prompt: text or token ids.
            params: parameters of all its answers.
            fields: the body's own names, which an error uses.
            tenant: prefix root of whoever sends the request. See `ApiKeys`.
            sender: whoever sends it. See `AuthAndLimits`.
            must_fit: whether `max_tokens` beyond the context is an error.
            model: the body's `model`, which can be the name of an adapter.
            options: further arguments of `Preparer.prepare`.

        Raises:
            ApiError: 400 names the field of the body that is at fault, or that takes too long to
                prepare; 503 says that the server is busy or shutting down.
        """
        tokenizer = self.loaded().tokenizer
        adapter = self.adapter_of(model)
        if isinstance(prompt, str):
            # The engine adds begin_of_text; a client may have written its name as well.
            names = {token: name for name, token in tokenizer.special_tokens.items()}
            prompt = prompt.removeprefix(names[tokenizer.bos_id])
        field = fields.prompt if params.structured_output is None else fields.answer_format
        with self.workers.in_time(first_name(field)), refusals(fields):
            options |= {"tenant": tenant, "adapter": adapter, "must_fit": must_fit}
            return await self._prepare(prompt, params, sender, **options)

    async def _prepare(
        self, prompt: str | list[int], params: SamplingParams, sender: bytes, **options: Any
    ) -> Request:
        """Prepare a request in the event loop or in a thread; the time is limited either way."""
        assert self.engine is not None
        if params.structured_output is None or not self._admits:
            async with asyncio.timeout(PREPARE_S):
                return await self.engine.prepare(prompt, params, "", **options)
        prepare = functools.partial(self.engine.engine.prepare, "", prompt, params, **options)
        request = await self.workers.compile(sender, prepare)
        self.loaded()  # The engine may have been closed meanwhile.
        return request

    def check_capacity(
        self, num_sequences: int, sender: bytes, field: str = "prompt"
    ) -> list[ActiveRequest]:
        """Return the requests that would give way to one; see `Admission.giving_way`.

        Raises:
            ApiError: 400 or 503 if the queue has no capacity for it.
        """
        max_running = self.loaded().card.max_batch_size
        self._admission.check_size(num_sequences, max_running, field)
        if not self._admits:
            return []
        try:
            return self._admission.giving_way(num_sequences, sender, max_running)
        except ApiError as error:
            if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
                self.metrics.refused.inc()
            raise

    @contextlib.contextmanager
    def _admitted(
        self, requests: list[Request], request_id: str, sender: bytes, fields: ErrorFields
    ) -> Iterator[ActiveRequest]:
        """Count the requests as unfinished within a context; others may give way to them.

        Raises:
            ApiError: 500 if the step failed; 400 if an adapter was unloaded; 503 if the queue is
                full.
        """
        assert self.engine is not None
        for request in requests:
            request.set_sender(sender)
        active = ActiveRequest(request_id, requests, sender)
        for other in self.check_capacity(len(active.answers), sender):
            other.gave_way = True
            self.metrics.refused.inc()
            for request in other.requests:
                self.engine.engine.abort(request)
        self._admission.add(active)
        try:
            yield active
        except Exception as error:
            raise self._api_error(error, active, fields) from None
        finally:
            self._admission.remove(active)
            if not active.is_refused:
                self.metrics.observe_end(active)
                active.log()

    async def outputs(
        self, requests: list[Request], request_id: str, sender: bytes, fields: ErrorFields
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one HTTP request as they come.

        Args:
            requests: the engine's request for each prompt.
            request_id: the id of the HTTP request.
            sender: whoever sent it, see `AuthAndLimits`.
            fields: the body's own names, which an error uses.

        Raises:
            ApiError: 500 if the step failed; 400 if the grammar of an answer became too large; 503
                if the queue is full, if no token came in time, or if the server shuts down.
        """
        assert self.engine is not None
        with self._admitted(requests, request_id, sender, fields) as active:
            async with contextlib.aclosing(self.engine.stream(requests)) as outputs:
                try:
                    async with asyncio.timeout(self.limits.max_wait_s):
                        first = await anext(outputs)
                except TimeoutError:
                    raise too_late(self.limits.max_wait_s) from None
                yield self._checked(first, active, fields)
                async for output in outputs:
                    yield self._checked(output, active, fields)

    @contextlib.contextmanager
    def pushing(
        self,
        requests: list[Request],
        request_id: str,
        sender: bytes,
        fields: ErrorFields,
        push: Callable[[Request], None],
    ) -> Iterator[Callable[[Request], RequestOutput]]:
        """Run the requests of one HTTP request within a block, without a task for their outputs.

        Args:
            requests: the engine's request for each prompt.
            request_id: the id of the HTTP request.
            sender: whoever sent it, see `AuthAndLimits`.
            fields: the body's own names, which an error uses.
            push: called in the event loop with a request that may have an output. It must not
                raise.

        Returns:
            For the block, a function that returns the output of a request. Its errors are those of
            `outputs`, once the block raises them.
        """
        assert self.engine is not None
        take_output = self.engine.engine.take_output
        with (
            self._admitted(requests, request_id, sender, fields) as active,
            self.engine.pushing(requests, push),
        ):
            yield lambda request: self._checked(take_output(request), active, fields)

    def _api_error(self, error: Exception, active: ActiveRequest, fields: ErrorFields) -> ApiError:
        """Return the error of an API for an exception of a request, which gets its status."""
        refusal = refusal_of(error, fields)
        if refusal is None:
            self._note_failure()
            refusal = broken()
        elif isinstance(error, RefusedError) and refusal.status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.metrics.refused.inc()
        active.status = refusal.status
        active.is_refused = not self._admits and has_not_run(error)
        refusal.is_logged = not active.is_refused
        return refusal

    def _note_failure(self) -> None:
        """Set the state after an exception of the engine, and log it once if it is that of a step.

        The main thread may have set the state before.
        """
        assert self.engine is not None
        is_of_step = self.state is not State.BROKEN or self.engine.failure is not None
        self.state = State.BROKEN
        if is_of_step and self._admits and not self._has_logged_failure:
            self._has_logged_failure = True
            log.exception("a step failed: the server ends")

    def _checked(
        self, output: RequestOutput, active: ActiveRequest, fields: ErrorFields
    ) -> RequestOutput:
        """Count an output and return it, or raise an ApiError if it has an error."""
        self.metrics.observe_output(active, output)
        if output.error is not None and output.error_field is not None:
            raise fields.refusal(FieldError(output.error_field, output.error))
        if output.error is not None:
            raise ApiError(500, output.error)
        if output.finished and any(x.finish_reason == "abort" for x in output.outputs):
            if active.gave_way:
                raise queue_is_full()
            raise broken() if self.state is State.BROKEN else shutting_down()
        return output
