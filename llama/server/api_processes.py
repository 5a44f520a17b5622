"""The API processes of a server, as the process of its engine sees them.

In: what each of them is told at its start. Out: processes with a stream of messages and a socket
that connections are handed over at. This file knows no requests and no model.
"""

import array
import asyncio
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from llama.api import EngineSide
from llama.server.connections import TAKEN

# Variables by which a process would take itself for a rank, or for another kind of server.
_OF_RANKS = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_.*|GROUP_.*|ROLE_.*|MASTER_.*|TORCHELASTIC_.*|LLAMA_LAUNCHER|LLAMA_.*_FD)"
)


class ApiProcess:
    """One API process.

    Attributes:
        process: the process.
        side: the stream of messages to it.
        addresses: the number of its open connections by their addresses.
        is_ready: whether it answers requests.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        handlers: Mapping[str, Callable[..., Any]],
        ended: Callable[["ApiProcess"], None],
    ) -> None:
        """Start the process.

        Args:
            loop: the event loop that its messages are read in.
            handlers: what it may ask for, by name; each gets the process first.
            ended: called when it is gone or does not read any more.
        """
        own, other = socket.socketpair()
        self._connections, taken = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ends = (other.fileno(), taken.fileno())
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llama.server.api_process", *map(str, ends)],
            stdin=subprocess.DEVNULL,
            env=_environment(),
            pass_fds=ends,
            process_group=0,  # A terminal sends Ctrl-C to this process alone.
        )
        other.close()
        taken.close()
        self._connections.setblocking(False)
        self.addresses: Counter[str] = Counter()
        self.is_ready = False
        own_handlers = {name: _bound(handler, self) for name, handler in handlers.items()}
        self.side = EngineSide(own, loop, own_handlers, lambda: ended(self))

    def hand_over(self, connection: socket.socket, refusal: str) -> bool:
        """Give a connection to the process, which refuses it if there is a reason to.

        Returns:
            Whether the process can take one now.
        """
        message = (refusal or TAKEN).encode()
        rights = array.array("i", [connection.fileno()])
        try:
            self._connections.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        except OSError:  # it is gone, or takes none any more
            return False
        return True

    def kill(self) -> None:
        """End the process at once, and wait for its end."""
        self.side.close()
        self._connections.close()
        self.process.kill()
        self.process.wait()


def _bound(handler: Callable[..., Any], process: ApiProcess) -> Callable[..., Any]:
    async def call(**values: Any) -> Any:
        return await handler(process, **values)

    return call


def _environment() -> dict[str, str]:
    """Return the environment of a process that is no rank and uses no GPU."""
    kept = {name: value for name, value in os.environ.items() if not _OF_RANKS.fullmatch(name)}
    return {**kept, "CUDA_VISIBLE_DEVICES": ""}
