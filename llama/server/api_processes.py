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
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from llama.api import EngineSide
from llama.server.connections import TAKEN

_FOREVER_S = 24 * 3600.0
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

    async def until_answer(self, limit_s: float) -> None:
        """Return once the process answers; see `until_done`.

        Raises:
            TimeoutError: it is stopped or hangs.
            ConnectionError: it is gone.
        """
        ping = self.side.ask("ping", _FOREVER_S)
        await until_done(ping, lambda: processor_s(self.process.pid), limit_s)

    def kill(self) -> None:
        """End the process at once, and wait for its end."""
        self.side.close()
        self._connections.close()
        self.process.kill()
        self.process.wait()


def processor_s(pid: int) -> float:
    """Return the processor time of a process in seconds; 0 if it has ended, or without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    ticks = sum(map(int, fields[11:13]))  # in user mode and in the kernel, by all its threads
    return ticks / os.sysconf("SC_CLK_TCK")


async def until_done(
    ping: Coroutine[Any, Any, None], worked_s: Callable[[], float], limit_s: float
) -> None:
    """Return once a process has answered.

    A process that is late because others have the processors works meanwhile: it is waited for
    until it has had `limit_s` of their time.

    Args:
        ping: returns with the answer.
        worked_s: returns the processor time of the process, in seconds.
        limit_s: seconds.

    Raises:
        TimeoutError: the process does not work for so long, or works for so long without an answer.
    """
    answer = asyncio.ensure_future(ping)
    began = last = worked_s()
    num_idle = 0
    try:
        while not (await asyncio.wait([answer], timeout=limit_s / 2))[0]:
            now = worked_s()
            # Twice in a row: once, this process may have been stopped, and not the other one.
            num_idle = num_idle + 1 if now == last else 0
            if num_idle == 2 or now - began > limit_s:
                raise TimeoutError
            last = now
        await answer
    finally:
        answer.cancel()


def _bound(handler: Callable[..., Any], process: ApiProcess) -> Callable[..., Any]:
    async def call(**values: Any) -> Any:
        return await handler(process, **values)

    return call


def _environment() -> dict[str, str]:
    """Return the environment of a process that is no rank and uses no GPU."""
    kept = {name: value for name, value in os.environ.items() if not _OF_RANKS.fullmatch(name)}
    return {**kept, "CUDA_VISIBLE_DEVICES": ""}
