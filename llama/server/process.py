"""A server with its model and its APIs in one process.

In: the options of `llama serve`. Out: an exit code. The event loop runs in a thread of its own,
because the main thread loads the model and then leads the other ranks.
"""

import functools
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import APIRouter

from llama.api import Llama
from llama.server.app import make_app
from llama.server.connections import FLUSH_S, BoundedProtocol, Connections, http_config
from llama.server.lifetime import ServerProcess
from llama.server.service import Service


class Server(ServerProcess):
    """The one process of a server."""

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
            FieldError: see `ServerProcess`.
        """
        super().__init__(host, port, api_keys, listener)
        self.service = self.work = service
        app_options["host_routes"] = host_routes and host_routes(service, self.port)
        limits = service.limits
        connections = Connections(limits.max_connections, limits.max_per_address)
        app = make_app(service, api_keys=api_keys, loopback=self.is_loopback, **app_options)
        protocol = functools.partial(BoundedProtocol, connections)
        self._uvicorn = uvicorn.Server(http_config(app, protocol))
        self._thread = threading.Thread(
            target=self._uvicorn.run, args=([self._socket],), name="llama-http", daemon=True
        )

    def start(self) -> None:
        """Start the thread of the event loop; requests get 503 until `open`."""
        super().start()
        self._thread.start()

    def _begin(self, llama: Llama) -> None:
        """Answer requests with a loaded model from now on."""
        self.service.start(llama)

    def stop(self) -> None:
        """Finish sending responses, and end the thread of the event loop."""
        self._uvicorn.should_exit = True
        if self._thread.is_alive():
            self._thread.join(2 * FLUSH_S)
        super().stop()
