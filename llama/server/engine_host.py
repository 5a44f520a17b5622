"""The engine's part of a server whose requests are answered by API processes.

In: connections of clients, which are handed over to the API processes, and the sequences that
these ask for. Out: steps of the model, with one report for each process that has a sequence in it.
What holds for the server as a whole is decided here: connections, the queue, grammars, adapters,
metrics. An API process that ends loses its own requests alone, and another one is started.
"""

import asyncio
import base64
import contextlib
import functools
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

from llama.api import EngineSide, Llama, MaskBudget, ServedModel
from llama.common.checks import FieldError
from llama.server.acceptor import Acceptor
from llama.server.admission import Admission
from llama.server.api_options import ApiOptions
from llama.server.api_processes import ApiProcess
from llama.server.connections import Connections
from llama.server.engine_metrics import EngineMetrics
from llama.server.errors import ApiError
from llama.server.local_desk import LocalDesk
from llama.server.summed_metrics import SummedMetrics
from llama.server.worker_pool import PoolBusyError, WorkerPool
from llama.server.workers import NUM_THREADS, PREPARE_S

log = logging.getLogger("llama.server")
_START_S = 120.0  # time for an API process to start, and then to read the tokenizer
_PING_S = 5.0  # interval of the questions whether an API process still works
_MAX_DEATHS = 5  # processes that may end before they are ready, while none is
_MAX_BACKOFF_S = 60.0
_SHARE_S = 2.0  # time for all processes to learn of an adapter, and to send their metrics
_END_S = 5.0  # time for an API process to send its last responses and to end


class EngineHost:
    """The engine of a server and its API processes.

    Everything runs in the event loop of one thread, `run`, but what `Work` names, and steps, which
    a thread of their own runs.

    Attributes:
        silence_s: seconds of an API process without an answer after which it is ended; see
            `until_done`.
        failure: why the server cannot go on.
    """

    silence_s = 20.0

    def __init__(
        self,
        listener: socket.socket,
        options: ApiOptions,
        num_processes: int,
        *,
        is_loopback: bool,
    ) -> None:
        """Prepare to run.

        Args:
            listener: the socket that the server listens on.
            options: the options of all API processes.
            num_processes: the number of API processes.
            is_loopback: whether the server listens on this machine alone.
        """
        self.failure: BaseException | None = None
        limits = self._limits = options.limits
        self._num_processes = num_processes
        self._hello = {  # what each API process is told first
            "options": options.to_json(),
            "num_processes": num_processes,
            "is_loopback": is_loopback,
        }
        connections = Connections(limits.max_connections, limits.max_per_address)
        self._processes: list[ApiProcess] = []
        self._acceptor = Acceptor(listener, connections, self._takers)
        self._busy: set[ApiProcess] = set()  # processes that have not drained yet
        self._num_deaths = 0
        self._is_ending = False
        self._admission: Admission[Any] = Admission(limits.max_queue)
        self._pool = WorkerPool("llama-grammar", NUM_THREADS, limits.max_queue)
        self._metrics = SummedMetrics()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._llama: Llama | None = None
        self._has_opened = False
        self._has_work = threading.Event()
        self._thread: threading.Thread | None = None

    # What the main thread calls.

    def run(self, has_begun: Callable[[], None]) -> None:
        """Run the event loop until `close`; `has_begun` is called once it runs, or cannot."""
        try:
            asyncio.run(self._run(has_begun))
        except BaseException as error:
            log.exception("the thread that accepts connections ended")
            self.failure = self.failure or error
        finally:
            has_begun()

    def open(self, llama: Llama) -> None:
        """Answer requests with a loaded model, once every API process can."""
        future = asyncio.run_coroutine_threadsafe(self._open(llama), self._loop)
        future.result(2 * _START_S)

    @property
    def has_failed(self) -> bool:
        """Whether a step of the model failed, or API processes do not start."""
        return self.failure is not None

    @property
    def is_busy(self) -> bool:
        """Whether sequences run or wait, or an API process that was told to end has not yet."""
        return bool(self._busy) or self._num_unfinished() > 0

    def drain(self) -> None:
        """Let the API processes reject new requests from now on."""
        self._let_finish("drain")

    def break_off(self, *, is_failure: bool = True) -> None:
        """Let the API processes end all requests with an error."""
        self._let_finish("break_off", is_failure=is_failure)

    def close(self) -> None:
        """End the API processes, the thread of the steps and the event loop."""
        if self._is_ending:
            return
        self._is_ending = True
        future = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        with contextlib.suppress(TimeoutError):
            future.result(2 * _END_S)
        self._has_work.set()
        if self._thread is not None:
            self._thread.join()

    def _let_finish(self, name: str, **values: Any) -> None:
        self._busy = set(self._processes)
        self._loop.call_soon_threadsafe(self._ask_to_finish, name, values)

    # What the event loop calls.

    async def _run(self, has_begun: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_over = asyncio.Event()
        for _ in range(self._num_processes):
            self._start_process()
        self._acceptor.start(self._loop)
        has_begun()
        await self._is_over.wait()

    async def _open(self, llama: Llama) -> None:
        port = llama.llm_engine.port
        port.mask_budget = MaskBudget()
        self._metrics.registry.register(EngineMetrics(llama, self._num_unfinished))
        self._desk = LocalDesk(
            llama, self._limits.max_loras, self._num_unfinished, self._metrics.text
        )
        self._served = ServedModel.of(llama)
        self._description = self._served.describe()
        self._llama = llama
        self._thread = threading.Thread(target=self._run_steps, name="llama-engine", daemon=True)
        self._thread.start()
        await asyncio.gather(*(self._describe(process) for process in list(self._processes)))
        self._has_opened = True

    async def _close(self) -> None:
        self._acceptor.stop()
        for process in self._processes:
            process.side.tell("end")
        waits = (asyncio.to_thread(_wait_for_end, process) for process in self._processes)
        await asyncio.gather(*waits)
        for process in self._processes:
            process.kill()
        if self._llama is not None:
            self._llama.llm_engine.port.wake()
        self._is_over.set()

    def _takers(self) -> list[ApiProcess]:
        """Return the processes that may get connections: once the model is loaded, ready ones."""
        return [each for each in self._processes if each.is_ready or not self._has_opened]

    def _start_process(self) -> None:
        handlers: dict[str, Callable[..., Any]] = {
            "closed": self._note_closed,
            "load_adapter": self._load_adapter,
            "drop_adapter": self._drop_adapter,
            "num_unfinished": self._answer_num_unfinished,
            "ranks_alive": self._answer_ranks_alive,
            "metrics": self._answer_metrics,
            "samples": self._take_samples,
        }
        process = ApiProcess(self._loop, handlers, self._ended)
        self._processes.append(process)
        self._metrics.begin(process)
        process.side.tell("hello", **self._hello)
        if self._llama is not None:
            self._spawn(self._describe_again(process))
        self._spawn(self._watch(process))

    async def _describe_again(self, process: ApiProcess) -> None:
        """Describe the model to a process that was started later; end it where that fails."""
        try:
            await self._describe(process)
        except Exception:
            log.exception("API process %d cannot answer requests", process.process.pid)
            process.process.kill()

    async def _describe(self, process: ApiProcess) -> None:
        """Let a process answer requests with the model."""
        assert self._llama is not None
        process.side.serve(self._llama.llm_engine.port, self._admit)
        values = {"description": self._description, "adapters": self._served.adapter_table()}
        try:
            await process.side.ask("model", _START_S, **values)
        except ConnectionError:  # `_ended` starts another one
            return
        process.is_ready = True
        self._num_deaths = 0

    async def _watch(self, process: ApiProcess) -> None:
        """End a process that does not answer although it could."""
        try:
            await process.until_answer(_START_S)
            while True:
                await asyncio.sleep(min(_PING_S, self.silence_s))
                await process.until_answer(self.silence_s)
        except TimeoutError:
            log.error("API process %d does not answer: it is ended", process.process.pid)
            process.process.kill()
        except ConnectionError:
            pass

    def _ended(self, process: ApiProcess) -> None:
        """Abort the requests of a process that has ended, and start another one."""
        if process not in self._processes:
            return
        self._processes.remove(process)
        self._busy.discard(process)
        self._acceptor.note_end(process)
        self._metrics.end(process)
        process.kill()
        if self._is_ending:
            return
        log.error(
            "API process %d ended with code %s: its requests are aborted, and another one starts",
            process.process.pid,
            process.process.returncode,
        )
        self._num_deaths += not process.is_ready
        if self._num_deaths >= _MAX_DEATHS and not any(each.is_ready for each in self._processes):
            log.error("%d API processes ended before they were ready: the server ends", _MAX_DEATHS)
            self.failure = self.failure or RuntimeError("API processes do not start")
            return
        backoff_s = min(_MAX_BACKOFF_S, float(2**self._num_deaths - 1))
        self._loop.call_later(backoff_s, self._restart)

    def _restart(self) -> None:
        if not self._is_ending:
            self._start_process()

    def _ask_to_finish(self, name: str, values: dict[str, Any]) -> None:
        for process in list(self._busy):
            self._spawn(self._finish(process, name, values))

    async def _finish(self, process: ApiProcess, name: str, values: dict[str, Any]) -> None:
        """Ask a process to end its requests, and note when it has."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            await process.side.ask(name, 24 * 3600.0, **values)
        self._busy.discard(process)

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # The loop keeps a weak reference alone.
        task.add_done_callback(self._tasks.discard)

    # Sequences.

    def _num_unfinished(self) -> int:
        return self._admission.num_unfinished()

    def _admit(self, side: EngineSide, call: Any) -> None:
        """Take the sequences of a call, or refuse them; others may give way to them."""
        assert self._llama is not None
        admission = self._admission
        with self._llama.llm_engine.port.lock:
            for other in [each for each in admission if not each.num_unfinished]:
                admission.remove(other)
            max_running = self._served.card.max_batch_size
            try:
                giving_way = admission.giving_way(call.num_unfinished, call.sender, max_running)
            except ApiError:
                call.owner.refuse(call, "queue")
                return
            for other in giving_way:
                other.owner.refuse(other, "gave way")
            admission.add(call)
        if any(call.formats):
            self._spawn(self._compile(call))
        else:
            self._start(call)

    async def _compile(self, call: Any) -> None:
        """Compile the grammars of a call, and start it."""
        assert self._llama is not None
        work = functools.partial(call.compile, self._llama.llm_engine.constraints)
        try:
            await self._pool.run(work, PREPARE_S, call.sender)
        except PoolBusyError:
            call.owner.refuse(call, "busy")
        except TimeoutError:
            call.owner.refuse(call, "slow")
        except FieldError as error:
            call.owner.refuse(call, "field", error.field, error.message)
        except Exception as error:
            log.exception("a grammar could not be compiled")
            call.owner.refuse(call, "failed", text=str(error))
        else:
            self._start(call)

    def _start(self, call: Any) -> None:
        try:
            call.owner.start(call)
        except FieldError as error:
            call.owner.refuse(call, "field", error.field, error.message)
        self._has_work.set()

    def _run_steps(self) -> None:
        """Run steps while there are sequences."""
        assert self._llama is not None
        port = self._llama.llm_engine.port
        try:
            while not self._is_ending:
                self._has_work.wait()
                self._has_work.clear()
                port.wait_until(lambda: self._is_ending or not port.has_sequences)
        except BaseException as error:
            log.exception("a step failed: the server ends")
            self.failure = self.failure or error

    # Questions of the API processes.

    async def _note_closed(self, process: ApiProcess, address: str) -> None:
        self._acceptor.note_closed(process, address)

    async def _load_adapter(
        self, process: ApiProcess, name: str, path: str, *, replace: bool
    ) -> None:
        await self._desk.load_adapter(name, path, replace=replace)
        await self._share_adapters()

    async def _drop_adapter(self, process: ApiProcess, name: str) -> None:
        await self._desk.drop_adapter(name)
        await self._share_adapters()

    async def _share_adapters(self) -> None:
        """Let every process know the adapters that are loaded."""
        await self._ask_all("adapters", table=self._served.adapter_table())

    async def _answer_num_unfinished(self, process: ApiProcess) -> int:
        return self._num_unfinished()

    async def _answer_ranks_alive(self, process: ApiProcess) -> bool:
        return await self._desk.ranks_alive()

    async def _take_samples(self, process: ApiProcess, samples: list[Any]) -> None:
        self._metrics.set(process, samples)

    async def _answer_metrics(self, process: ApiProcess) -> str:
        for each, samples in (await self._ask_all("samples")).items():
            self._metrics.set(each, samples)
        return base64.b64encode(self._metrics.text()).decode()

    async def _ask_all(self, name: str, **values: Any) -> dict[ApiProcess, Any]:
        """Return the answers of the processes that give one in time."""
        processes = [each for each in self._processes if each.is_ready]
        asked = (each.side.ask(name, _SHARE_S, **values) for each in processes)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return {
            each: answer
            for each, answer in zip(processes, answers, strict=True)
            if not isinstance(answer, BaseException)
        }


def _wait_for_end(process: ApiProcess) -> None:
    with contextlib.suppress(Exception):
        process.process.wait(_END_S)
