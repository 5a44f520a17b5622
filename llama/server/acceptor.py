"""The connections of clients, which are accepted in one place and handed over to API processes.

In: a socket that listens, and the API processes. Out: each connection in the process that has
fewest, or one that it refuses because there are too many. Limits are thus those of the server.
While no process can take a connection, clients wait.
"""

import asyncio
import socket
from collections.abc import Callable, Collection
from typing import NamedTuple

from llama.server.api_processes import ApiProcess
from llama.server.connections import Connections

_MAX_AT_ONCE = 64  # connections that are accepted before other work
_PAUSE_S = 0.02  # seconds until processes are asked again after none could take a connection


class _Accepted(NamedTuple):
    """A connection that has been counted, and why it is refused; "" if it is not."""

    socket: socket.socket
    address: str
    refusal: str


class Acceptor:
    """The connections of a server with API processes, in one event loop."""

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        processes: Callable[[], Collection[ApiProcess]],
    ) -> None:
        """Accept nothing yet.

        Args:
            listener: the socket that the server listens on.
            connections: counts the connections.
            processes: returns the API processes that may get connections.
        """
        self._listener = listener
        self._connections = connections
        self._processes = processes
        self._waiting: _Accepted | None = None  # no process could take it yet
        self._pause: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Accept connections from now on."""
        self._loop = loop
        self._listener.setblocking(False)
        self._resume()

    def stop(self) -> None:
        """Accept no more connections, and close the socket."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        if self._waiting is not None:
            self._waiting.socket.close()

    def note_closed(self, process: ApiProcess, address: str) -> None:
        """Count a connection of a process as closed."""
        self._connections.close(address)
        process.addresses[address] -= 1

    def note_end(self, process: ApiProcess) -> None:
        """Count all connections of a process as closed."""
        for address, count in process.addresses.items():
            for _ in range(count):
                self._connections.close(address)
        process.addresses.clear()

    def _resume(self) -> None:
        self._loop.add_reader(self._listener, self._accept)
        self._accept()

    def _accept(self) -> None:
        """Hand over the connections that wait, until no process can take one."""
        for _ in range(_MAX_AT_ONCE):
            accepted = self._waiting or self._next()
            if accepted is None:
                return
            self._waiting = None
            if not self._hand_over(accepted):
                self._waiting = accepted
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(_PAUSE_S, self._resume)
                return
            accepted.socket.close()

    def _next(self) -> _Accepted | None:
        """Accept the next connection; None if there is none, or it is gone already."""
        try:
            connection, peer = self._listener.accept()
        except OSError:
            return None
        address = peer[0] if isinstance(peer, tuple) else ""
        refusal = self._connections.open(address)
        return _Accepted(connection, address, "" if refusal is None else refusal.message)

    def _hand_over(self, accepted: _Accepted) -> bool:
        """Give a connection to the process with the fewest; return whether it is settled."""
        if self._connections.is_crowded:
            self._connections.close(accepted.address)
            return True
        for process in sorted(self._processes(), key=lambda each: each.addresses.total()):
            if process.hand_over(accepted.socket, accepted.refusal):
                process.addresses[accepted.address] += 1
                return True
        return False
