"""A server with its model in this process and its APIs in others.

In: the options of `llama serve`. Out: an exit code. The main thread loads the model and then leads
the other ranks; a thread accepts connections and talks to the API processes; another one runs the
steps of the model.
"""

import socket
import threading

from llama.api import Llama
from llama.server.api_options import ApiOptions
from llama.server.engine_host import EngineHost
from llama.server.lifetime import ServerProcess

_JOIN_S = 10.0


class SplitServer(ServerProcess):
    """The process of the engine of a server."""

    def __init__(
        self,
        options: ApiOptions,
        num_processes: int,
        *,
        host: str,
        port: int,
        listener: socket.socket | None = None,
    ) -> None:
        """Listen; requests are answered from `start` on.

        Args:
            options: the options of all API processes.
            num_processes: the number of API processes.
            host: address to listen on.
            port: port to listen on; 0 takes a free one.
            listener: a socket that listens already, in place of one at host and port.

        Raises:
            FieldError: see `ServerProcess`.
        """
        super().__init__(host, port, options.api_keys, listener)
        self.host = self.work = EngineHost(
            self._socket, options, num_processes, is_loopback=self.is_loopback
        )
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
