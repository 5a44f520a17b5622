"""The connections of clients, which are accepted in one place and handed over to API processes.

In: a socket that listens, and the API processes. Out: each connection in the process that has
fewest, or one that it refuses because there are too many. Limits are thus those of the server.
"""

import socket
from collections.abc import Callable, Collection

from llama.server.api_processes import ApiProcess
from llama.server.connections import Connections

_MAX_AT_ONCE = 64  # connections that are accepted before other work


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
            processes: returns the API processes.
        """
        self._listener = listener
        self._connections = connections
        self._processes = processes

    def accept(self) -> None:
        """Accept the connections that wait, and hand them over."""
        for _ in range(_MAX_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except OSError:  # there is none, or it is gone already
                return
            with connection:
                self._hand_over(connection, address[0] if isinstance(address, tuple) else "")

    def _hand_over(self, connection: socket.socket, address: str) -> None:
        """Give a connection to the process with the fewest; the client may try again otherwise."""
        refusal = self._connections.open(address)
        if not self._connections.is_crowded:
            for process in sorted(self._processes(), key=_load_of):
                if process.hand_over(connection, "" if refusal is None else refusal.message):
                    process.addresses[address] += 1
                    return
        self._connections.close(address)

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


def _load_of(process: ApiProcess) -> tuple[bool, int]:
    """Return the key of the order in which processes are chosen for a connection."""
    return not process.is_ready, process.addresses.total()
