"""Ports of this machine for programs that are told their port before they start."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port that no other program gets while the context is open.

    The socket has the port but does not listen, so that connections are refused. A server that sets
    SO_REUSEADDR, as servers do, can listen there nevertheless, and so can the next one after it. It
    has the port on all addresses, as a server may listen on all of them, for which a connection
    from another address of loopback is in the way.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("0.0.0.0", 0))
        yield holder.getsockname()[1]
