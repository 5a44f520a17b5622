"""One server process: it listens at once, loads the model, serves, and shuts down in order.

In: the options of `llama serve`. Out: an exit code. The event loop runs in a thread of its own,
because the main thread loads the model and then leads the other ranks. On SIGTERM or Ctrl-C new
requests are rejected, running ones get `drain_s` seconds, and the process ends; a second signal
ends it at once.
"""

import errno
import functools
import gc
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import APIRouter

from llama.api import Llama, Watch, stop_requested
from llama.common.checks import FieldError
from llama.server.app import make_app
from llama.server.auth import is_loopback
from llama.server.connections import BoundedProtocol, Connections
from llama.server.service import Service

_POLL_S = 0.05
# Seconds after which a thread that computes in Python lets another one run. The event loop asks for
# Python's lock after every system call: with Python's default of 5 ms, a small request beside a
# busy thread takes tens of milliseconds longer.
_SWITCH_S = 0.0005
_BROKEN_S = 1.0  # time for the last responses after a failed step, and for a load balancer to see
_FLUSH_S = 2.0  # time for responses that are being sent when the server ends


class Server:
    """The HTTP side of one server process."""

    def __init__(
        self,
        service: Service,
        *,
        host: str,
        port: int,
        api_keys: list[str],
        host_routes: Callable[[Service, int], APIRouter] | None = None,
        listener: socket.socket | None = None,
        **app_options: Any,
    ) -> None:
        """Listen; requests are answered from `start` on.

        Args:
            service: the service, whose model is not loaded yet.
            host: address to listen on.
            port: port to listen on; 0 takes a free one.
            api_keys: the keys that are accepted.
            host_routes: makes more routes, of the service and the port.
            listener: a socket that listens already, in place of one at host and port.
            app_options: other arguments of `make_app`.

        Raises:
            ValueError: other machines could connect, and no key is given.
            FieldError: the address cannot be listened on.
        """
        loopback = is_loopback(host)
        if not loopback and not api_keys:
            raise FieldError(
                "host",
                f"--host {host} lets other machines connect, so a key is needed: give --api_key or "
                "LLAMA_API_KEY, or leave --host out",
            )
        self.service = service
        self._socket = listener or _listen(host, port)
        self.port: int = port if listener else self._socket.getsockname()[1]
        app_options["host_routes"] = host_routes and host_routes(service, self.port)
        limits = service.limits
        connections = Connections(limits.max_connections, limits.max_per_address)
        protocol: Any = functools.partial(BoundedProtocol, connections)
        config = uvicorn.Config(
            make_app(service, api_keys=api_keys, loopback=loopback, **app_options),
            http=protocol,
            ws="none",  # There is no WebSocket route. See `BoundedProtocol`.
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=int(_FLUSH_S),
        )
        self._uvicorn = uvicorn.Server(config)
        self._usual_switch_s = sys.getswitchinterval()
        self._thread = threading.Thread(
            target=self._uvicorn.run, args=([self._socket],), name="llama-http", daemon=True
        )

    def start(self) -> None:
        """Start the thread of the event loop; requests get 503 until `open`."""
        sys.setswitchinterval(_SWITCH_S)
        self._thread.start()

    def open(self, llama: Llama) -> None:
        """Begin to answer requests with a loaded model."""
        llama.llm_engine.grammars.warm_up()
        gc.collect()
        # A full collection would look at every imported object, and pause all requests meanwhile.
        gc.freeze()
        # A full collection comes once the new objects are a quarter of those that the last one
        # kept. This one keeps almost none, so that the next ones come early and are short.
        gc.collect()
        self.service.start(llama)
        watch = Watch.of_process()
        if watch is not None:
            watch.before_end.append(lambda: self._break_off(is_failure=watch.is_ending))

    def serve(self, drain_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Serve until a signal comes, and then shut down.

        Args:
            drain_s: seconds that running requests get.
            is_over: asked while no request is active; true ends the server as a signal does.

        Raises:
            RuntimeError: a step of the model failed.
        """
        service = self.service
        try:
            has_failed = self._run_and_drain(drain_s, is_over)
            if has_failed:
                self._break_off()
                time.sleep(_BROKEN_S)
            service.close()
            self.stop()
        except SystemExit:  # a second signal: what still runs gets an error
            self._break_off(is_failure=False)
            raise
        if has_failed:  # All clients may have left, so that nothing else reports the reason.
            cause = service.failure
            raise RuntimeError("a step of the model failed, so the server ends") from cause

    def _run_and_drain(self, drain_s: float, is_over: Callable[[], bool]) -> bool:
        """Wait for a signal or a failure, then for requests; return whether a step failed."""
        service = self.service
        while not (stop_requested() or service.has_failed):
            if not service.is_busy and is_over():
                break
            time.sleep(_POLL_S)
        service.drain()
        end = time.monotonic() + drain_s
        while service.is_busy and time.monotonic() < end and not service.has_failed:
            time.sleep(_POLL_S)
        return service.has_failed

    def _break_off(self, *, is_failure: bool = True) -> None:
        """End all requests with 500, or with 503 after a second signal, as far as time allows.

        The watch of the ranks calls this, too, when the main thread may never leave its step.
        """
        self.service.break_off(is_failure=is_failure)
        end = time.monotonic() + _BROKEN_S
        while self.service.is_busy and time.monotonic() < end:
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Finish sending responses, and end the thread of the event loop."""
        self._uvicorn.should_exit = True
        if self._thread.is_alive():
            self._thread.join(2 * _FLUSH_S)
        sys.setswitchinterval(self._usual_switch_s)


def _listen(host: str, port: int) -> socket.socket:
    """Listen at an address.

    Raises:
        FieldError: The address cannot be had; the error names host or port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            remedy = "give another port, or 0 for a free one"
            text = f"--port {port}: another program listens there: {remedy}"
            raise FieldError("port", text) from None
        reason = e.strerror.partition(" (")[0].lower() if e.strerror else str(e)
        raise FieldError("host", f"--host {host} --port {port}: {reason}") from None
