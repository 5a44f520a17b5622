"""A server with its model in this process and its APIs in others.

In: the options of `llama serve`. Out: an exit code. The main thread loads the model and then leads
the other ranks; a thread accepts connections and talks to the API processes; another one runs the
steps of the model.
"""

import secrets
import socket
import threading
import time
from dataclasses import asdict
from typing import Any

from llama.api import Llama
from llama.server.engine_host import EngineHost
from llama.server.lifetime import ServerProcess
from llama.server.limits import Limits

_JOIN_S = 10.0


class SplitServer(ServerProcess):
    """The process of the engine of a server."""

    def __init__(
        self,
        limits: Limits,
        num_processes: int,
        *,
        host: str,
        port: int,
        api_keys: list[str],
        listener: socket.socket | None = None,
        secret: bytes | None = None,
        **options: Any,
    ) -> None:
        """Listen; requests are answered from `start` on.

        Args:
            limits: the limits of the server.
            num_processes: the number of API processes.
            host: address to listen on.
            port: port to listen on; 0 takes a free one.
            api_keys: the keys that are accepted.
            listener: a socket that listens already, in place of one at host and port.
            secret: the secret of the roots of tenants, 32 bytes; None: a new one.
            options: what API processes make their app and their model's `Serving` of; see
                `api_process.Options`.

        Raises:
            FieldError: see `ServerProcess`.
        """
        super().__init__(host, port, api_keys, listener)
        hello = {
            "limits": asdict(limits),
            "num_processes": num_processes,
            "api_keys": api_keys,
            "is_loopback": self.is_loopback,
            "created": int(time.time()),
            "secret": (secret or secrets.token_bytes(32)).hex(),
            **options,
        }
        self.host = self.work = EngineHost(self._socket, limits, hello, num_processes)
        self._has_begun = threading.Event()
        self._thread = threading.Thread(
            target=self.host.run, args=(self._has_begun.set,), name="llama-accept", daemon=True
        )

    def start(self) -> None:
        """Start the API processes, which answer requests with 503 until `open`."""
        super().start()
        self._thread.start()
        self._has_begun.wait()
        if self.host.failure is not None:
            raise RuntimeError("the API processes cannot be started") from self.host.failure

    def _begin(self, llama: Llama) -> None:
        """Answer requests with a loaded model from now on."""
        self.host.open(llama)

    def stop(self) -> None:
        """End the API processes and the threads."""
        if self._thread.is_alive():
            self.host.close()
            self._thread.join(_JOIN_S)
        super().stop()
