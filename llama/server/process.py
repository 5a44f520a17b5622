"""One server process: listens at once, loads the model, serves, and ends in order.

In: the flags of `llama serve`. Out: an exit code. The event loop runs in a thread of its own, since
the main thread loads the model and then leads the other ranks. SIGTERM or Ctrl-C: no new requests,
those that run are finished within `drain_s`, and the process ends; a second one ends it at once.
"""

import functools
import gc
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import APIRouter

from llama.generation import Llama
from llama.ranks.signals import stop_requested
from llama.server.app import make_app
from llama.server.auth import is_loopback
from llama.server.connections import BoundedProtocol, Connections
from llama.server.service import Service

_POLL_S = 0.05
_BROKEN_S = 1.0  # for everyone's 500 after a step that failed, and for a load balancer to see it
_LAST_WORDS_S = 2.0  # for responses that are being sent when the server ends


class Server:
    """The HTTP side of one process. ValueError or OSError where it cannot listen."""

    def __init__(
        self,
        service: Service,
        *,
        host: str,
        port: int,
        api_keys: list[str],
        host_routes: Callable[[Service, int], APIRouter] | None = None,
        listener: socket.socket | None = None,
        **of_app: Any,
    ) -> None:
        """listener: in place of one at host and port. of_app: what else `make_app` takes."""
        loopback = is_loopback(host)
        if not loopback and not api_keys:
            raise ValueError(
                f"--host {host} lets other machines in, so a key is needed: give --api_key or "
                "LLAMA_API_KEY, or leave --host out"
            )
        self.service, limits = service, service.limits
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = listener or socket.create_server((host, port), family=family, backlog=2048)
        self.port: int = port if listener else self._socket.getsockname()[1]
        of_app["host_routes"] = host_routes and host_routes(service, self.port)
        allowed = Connections(limits.max_connections, limits.max_per_address)
        protocol: Any = functools.partial(BoundedProtocol, allowed)
        config = uvicorn.Config(
            make_app(service, api_keys=api_keys, loopback=loopback, **of_app),
            http=protocol,
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=int(_LAST_WORDS_S),
        )
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._uvicorn.run, args=([self._socket],), name="llama-http", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def open(self, llama: Llama) -> None:
        llama.llm_engine.grammars.warm_up()
        gc.collect()
        gc.freeze()  # a full collection would look at all that was imported, and hold everyone up
        gc.collect()  # which leaves nothing: those to come wait for a quarter of what this one left
        self.service.start(llama)
        watch = llama.model.parallel.watch
        if watch is not None:
            watch.before_end.append(lambda: self._break_off(is_failure=watch.is_ending))

    def serve(self, drain_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Until a signal, or `is_over` while idle; RuntimeError after a step that failed."""
        service = self.service
        assert service.engine is not None
        try:
            while not (stop_requested() or service.has_failed):
                if not service.is_busy and is_over():
                    break
                time.sleep(_POLL_S)
            service.drain()
            end = time.monotonic() + drain_s
            while service.is_busy and time.monotonic() < end and not service.has_failed:
                time.sleep(_POLL_S)
            if failed := service.has_failed:
                self._break_off()
                time.sleep(_BROKEN_S)
            service.engine.close()
            self.stop()
        except SystemExit:  # of a second signal: what still runs is told
            self._break_off(is_failure=False)
            raise
        if failed:  # its clients may all have left: then nobody else says what it was
            cause = service.engine.failure
            raise RuntimeError("a step of the model failed, so the server ends") from cause

    def _break_off(self, *, is_failure: bool = True) -> None:
        """Everyone gets 500, or 503 after a second signal, if it can be sent soon. The watch of the
        ranks calls it, too, when the main thread may be in a step for ever."""
        self.service.break_off(is_failure=is_failure)
        end = time.monotonic() + _BROKEN_S
        while self.service.is_busy and time.monotonic() < end:
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Send what is being sent, and end the thread."""
        self._uvicorn.should_exit = True
        if self._thread.is_alive():
            self._thread.join(2 * _LAST_WORDS_S)


def log_to_stderr() -> None:
    """Lines of the server and of uvicorn, with the time."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("llama.server", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if name == "llama.server" else logging.WARNING)
