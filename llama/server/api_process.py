"""An API process of a server: HTTP, JSON, text and tools, for an engine in another process.

In: the ends of two sockets: one for messages, and one at which the connections of clients are
handed over. Out: answers. It has the tokenizer and the format of dialogs, but no model and no
torch. It ends when the process of the engine says so, or is gone.
"""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from llama.api import ServedModel, TextSide
from llama.common.garbage import freeze_loaded
from llama.server.api_options import ApiOptions
from llama.server.app import make_app
from llama.server.connections import BoundedProtocol, HandedOver, http_config
from llama.server.limits import State
from llama.server.log import log_to_stderr
from llama.server.remote_desk import RemoteDesk
from llama.server.service import Service
from llama.server.summed_metrics import samples_of

_POLL_S = 0.05
_SAMPLES_S = 1.0  # interval at which changed metrics are sent
_BROKEN_S = 1.0  # time for the last responses after the engine's process has ended
_MAX_MESSAGE = 4096  # bytes of a reason for which a connection is refused


class _HttpServer(uvicorn.Server):
    """uvicorn's server without handlers of signals: those are for the engine's process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the handlers of signals as they are."""
        yield


class ApiServer:
    """The server of one API process, in one event loop."""

    def __init__(self, messages: socket.socket, connections: socket.socket) -> None:
        """Hold the ends of two sockets.

        Args:
            messages: the end of the stream of messages.
            connections: the end at which connections are handed over.
        """
        self._messages = messages
        self._connections = connections
        self._code = 0
        self._sent: list[Any] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Serve until the engine's process says that it ends, or is gone; return an exit code."""
        self._loop = asyncio.get_running_loop()
        self._has_begun = asyncio.Event()
        self._is_over = asyncio.Event()
        handlers: dict[str, Callable[..., Any]] = {
            "hello": self._begin,
            "model": self._open,
            "adapters": self._set_adapters,
            "samples": self._samples,
            "ping": self._ping,
            "drain": self._drain,
            "break_off": self._break_off,
            "end": self._end,
        }
        self._side = TextSide(self._messages, self._loop, handlers, self._lost)
        sending = self._loop.create_task(self._send_samples())
        await self._is_over.wait()
        sending.cancel()
        if self._has_begun.is_set():
            self._http.should_exit = True
            await self._serving
            if self._code == 0:
                self._side.tell("samples", samples=samples_of(self._service.metrics))
        return self._code

    async def _begin(
        self, *, options: dict[str, Any], num_processes: int, is_loopback: bool
    ) -> None:
        """Answer requests with 503 until the model is known."""
        given = ApiOptions.from_json(options)
        self._service = Service(given.limits)
        self._service.add(
            given.name,
            created=given.created,
            given_format=given.given_format,
            reasoning_field=given.reasoning_field,
            sampling_defaults=given.sampling_defaults,
            lora_folder=given.lora_folder,
            public_text=given.public_text,
        )
        app = make_app(
            self._service,
            loopback=is_loopback,
            secret=bytes.fromhex(given.secret),
            num_processes=num_processes,
            api_keys=given.api_keys,
            metrics_keys=given.metrics_keys,
            allowed_origins=given.allowed_origins,
            lenient=given.lenient,
        )
        self._config = http_config(app, BoundedProtocol)
        self._http = _HttpServer(self._config)
        self._serving = self._loop.create_task(self._http.serve(sockets=[]))
        while not self._http.started:
            await asyncio.sleep(0)
        self._has_begun.set()
        self._connections.setblocking(False)
        self._loop.add_reader(self._connections, self._take_connections)

    def _take_connections(self) -> None:
        """Take the connections that are handed over."""
        with contextlib.suppress(BlockingIOError):
            while True:
                message, descriptors, _, _ = socket.recv_fds(self._connections, _MAX_MESSAGE, 1)
                if not descriptors:
                    self._loop.remove_reader(self._connections)
                    return
                connection = socket.socket(fileno=descriptors[0])
                connection.setblocking(False)
                task = self._loop.create_task(self._connect(connection, message.decode()))
                self._tasks.add(task)  # The loop keeps a weak reference alone.
                task.add_done_callback(self._tasks.discard)

    async def _connect(self, connection: socket.socket, message: str) -> None:
        closed = functools.partial(self._side.tell, "closed")
        handed_over = HandedOver(message, lambda address: closed(address=address))
        make: Any = functools.partial(
            BoundedProtocol,
            handed_over,
            config=self._config,
            server_state=self._http.server_state,
            app_state=self._http.lifespan.state,
        )
        await self._loop.connect_accepted_socket(make, connection)

    async def _open(self, *, description: str, adapters: list[dict[str, Any]]) -> None:
        """Answer requests with the model from now on."""
        await self._has_begun.wait()
        model = await asyncio.to_thread(ServedModel.described, description, self._side.port)
        model.set_adapters(adapters)
        freeze_loaded()
        if self._service.state is State.LOADING:
            self._service.default.start(model, RemoteDesk(self._side), admits=False)

    async def _set_adapters(self, *, table: list[dict[str, Any]]) -> None:
        model = self._service.default.llama
        if model is not None:
            model.set_adapters(table)

    async def _samples(self) -> list[Any]:
        return samples_of(self._service.metrics)

    async def _ping(self) -> None:
        pass

    async def _drain(self) -> None:
        """Reject new requests, and return once the running ones have ended."""
        await self._has_begun.wait()
        self._service.drain()
        await self._until_idle()

    async def _break_off(self, *, is_failure: bool) -> None:
        """End all requests with an error, and return once the clients have it."""
        await self._has_begun.wait()
        self._service.break_off(is_failure=is_failure)
        await self._until_idle()

    async def _until_idle(self) -> None:
        while self._service.is_busy:
            await asyncio.sleep(_POLL_S)

    async def _end(self) -> None:
        if self._has_begun.is_set():
            self._service.close()
        self._is_over.set()

    def _lost(self) -> None:
        """End all requests with an error, because the engine's process is gone."""
        self._code = 1
        self._side.port.fail(ConnectionError("the process of the engine is gone"))
        if self._has_begun.is_set():
            self._service.break_off()
            self._loop.call_later(_BROKEN_S, self._is_over.set)
        else:
            self._is_over.set()

    async def _send_samples(self) -> None:
        """Send the metrics whenever they have changed, so that they outlive this process."""
        await self._has_begun.wait()
        while True:
            samples = samples_of(self._service.metrics)
            if samples != self._sent:
                self._side.tell("samples", samples=samples)
                self._sent = samples
            await asyncio.sleep(_SAMPLES_S)


def main() -> None:
    """Serve with the sockets whose descriptors are the arguments, and end the process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # The engine's process gets them, and says what ends.
    log_to_stderr()
    messages, connections = (socket.socket(fileno=int(text)) for text in sys.argv[1:])
    loop_factory = uvicorn.Config(None, loop="auto").get_loop_factory()  # type: ignore[arg-type]
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        code = runner.run(ApiServer(messages, connections).run())
        logging.shutdown()
        os._exit(code)  # A thread that still works for a client would hold up an orderly end.


if __name__ == "__main__":
    main()
