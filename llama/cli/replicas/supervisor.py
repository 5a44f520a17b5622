"""Keeps replicas and the HAProxy before them running, until a signal.

In: how to start each of them. Out: an exit code. One thread waits for signals, for lines and for
ends. A process that ends is started again, at once if it had been ready, and otherwise after
1, 2, 4 ... 60 seconds; only what fails before all replicas have been ready once ends the command. A
signal lets all of them finish. It must not know how HAProxy chooses a replica.
"""

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from llama.api import SIGNALS, describe_end, stop_requested
from llama.cli.flags import UsageError
from llama.cli.ranks import USAGE, say
from llama.cli.replicas.child import Child

LISTENING = "listening on "  # begins the line of a server that has a socket
READY = "ready: "  # begins the line of a server that answers requests
_ERROR = "error: "  # begins the last line of a command that failed
_MAX_WAIT_S = 60.0  # maximum time between an end and the next start
_MAX_FAILURES = (
    5  # failures in a row after which HAProxy, or all replicas together, end the command
)
_END_S = 15.0  # time beyond --drain_s until what still runs is killed
_BREAK_OFF_S = 10.0  # the same after a second signal or an error
_TICK_S = 1.0  # maximum time between two looks at the processes
_ADMIN_S = 2.0  # time limit of a command to HAProxy


class Supervisor:
    """The processes of one `llama serve --replicas`."""

    def __init__(
        self,
        replicas: Sequence[Child],
        proxy: Child,
        *,
        admin: Path,
        drain_s: float,
        close_listener: Callable[[], None],
        on_ready: Callable[[], None],
    ) -> None:
        """Start nothing yet.

        Args:
            replicas: The servers.
            proxy: HAProxy.
            admin: The socket of HAProxy that takes commands.
            drain_s: Seconds that running requests get after a signal.
            close_listener: Called once no new connection is to be accepted.
            on_ready: Called once all replicas are ready for the first time.
        """
        self._replicas = replicas
        self._proxy = proxy
        self._admin = admin
        self._drain_s = drain_s
        self._close_listener = close_listener
        self._on_ready = on_ready
        self._has_begun = False  # whether all replicas have been ready once
        self._is_ending = False
        self._selector = selectors.DefaultSelector()

    @property
    def _all(self) -> list[Child]:
        return [self._proxy, *self._replicas]

    def run(self) -> None:
        """Run until a signal, and return once all requests and processes have ended.

        Raises:
            UsageError, OSError: A replica cannot start, or HAProxy cannot, or all replicas fail.
            SystemExit: A second signal came.
        """
        with _woken() as wakeup, SIGNALS.taken_alone(signal.SIGTERM, signal.SIGINT):
            self._selector.register(wakeup, selectors.EVENT_READ)
            try:
                while not stop_requested():
                    self._start_due()
                    self._look()
                self._finish()
            finally:
                self._end_now()
                self._selector.close()

    def _start_due(self) -> None:
        """Start the processes whose time has come."""
        for child in self._all:
            if not child.is_running and time.monotonic() >= child.start_at:
                child.start()
                self._selector.register(child.output, selectors.EVENT_READ)

    def _look(self) -> None:
        """Wait for something to happen, for a short time, and react to it."""
        for key, _ in self._selector.select(_TICK_S):
            if isinstance(key.fileobj, socket.socket):
                with contextlib.suppress(BlockingIOError):
                    key.fileobj.recv(4096)
        for child in self._all:
            if child.is_running:
                self._look_at(child)

    def _look_at(self, child: Child) -> None:
        has_ended = child.has_ended
        was_open = not child.is_closed
        for line in child.read_lines():
            self._note_line(child, line)
        if was_open and (child.is_closed or has_ended):
            self._selector.unregister(child.output)
        if has_ended:
            status = child.reap()
            if not self._is_ending:
                self._note_end(child, status)

    def _note_line(self, child: Child, line: str) -> None:
        """Show a line of a process, or act on it."""
        if child is self._proxy:
            self._note_proxy_line(line)
        elif line.startswith(READY):
            self._note_ready(child)
        elif line.startswith(_ERROR) and not self._has_begun:
            child.error = line.removeprefix(_ERROR)  # It is raised once the process has ended.
        elif not line.startswith(LISTENING):
            say(f"{child.name}: {line}")

    def _note_proxy_line(self, line: str) -> None:
        """Show what HAProxy finds out about replicas.

        Three things are left out: what this process has reported to it, what concerns the backend
        of a single replica, and that replicas which load or end cannot be reached.
        """
        if not self._has_begun:
            self._proxy.error = line if "[ALERT]" in line else self._proxy.error
        elif not (self._is_ending or "from CLI" in line or "replica-" in line):
            say(f"{self._proxy.name}: {line}")

    def _note_ready(self, child: Child) -> None:
        child.is_ready = True
        child.num_failures = 0
        self._tell_proxy(child)
        if self._has_begun:
            say(f"{child.name} is ready again")
        elif all(each.is_ready for each in self._replicas):
            self._has_begun = True
            self._on_ready()

    def _tell_proxy(self, child: Child) -> None:
        """Tell HAProxy that a replica is ready, which it would find out a second later."""
        index = self._replicas.index(child)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ADMIN_S)
            connection.connect(str(self._admin))
            connection.sendall(f"set server replicas/{index} health up\n".encode())
            connection.recv(4096)

    def _note_end(self, child: Child, status: int) -> None:
        """Decide when to start a process again that has ended by itself.

        Raises:
            UsageError, OSError: It is not to be started again.
        """
        was_ready = child.is_ready
        child.is_ready = False
        child.num_failures += 1
        code = os.waitstatus_to_exitcode(status)
        end = f"ended with exit code {code}" if code >= 0 else describe_end(status)
        if child is self._proxy:
            if child.num_failures >= _MAX_FAILURES:
                raise OSError(f"{child.name} {end}, {child.num_failures} times: {child.error}")
        elif not self._has_begun:
            if code == USAGE:
                raise UsageError(child.error or end)  # All replicas have these flags.
            raise OSError(f"{child.name}: {child.error or end}")
        elif all(each.num_failures >= _MAX_FAILURES for each in self._replicas):
            raise OSError(f"all replicas failed {_MAX_FAILURES} times in a row; {child.name} {end}")
        wait_s = 0.0 if was_ready else min(_MAX_WAIT_S, 2.0 ** (child.num_failures - 1))
        child.start_at = time.monotonic() + wait_s
        when = f"in {wait_s:g} s" if wait_s else "now"
        say(f"{child.name} {end}; it is started again {when}")

    def _finish(self) -> None:
        """Accept no more connections, and let running requests finish."""
        self._is_ending = True
        self._close_listener()
        self._proxy.send(signal.SIGUSR1)  # HAProxy ends once its streams have.
        self._end_replicas(self._drain_s + _END_S)
        self._wait_for([self._proxy], _END_S)

    def _end_now(self) -> None:
        """End what still runs, after a second signal or an error."""
        self._is_ending = True
        self._close_listener()
        self._end_replicas(_BREAK_OFF_S)
        self._proxy.send(signal.SIGTERM)
        self._wait_for([self._proxy], _BREAK_OFF_S)
        for child in self._all:
            child.kill()
        self._wait_for(self._all, _BREAK_OFF_S)

    def _end_replicas(self, limit_s: float) -> None:
        """Ask the replicas to end, which lets them finish, and wait."""
        for child in self._replicas:
            child.send(signal.SIGTERM)
        self._wait_for(self._replicas, limit_s)

    def _wait_for(self, children: Sequence[Child], limit_s: float) -> None:
        """Wait until these processes have ended, or for so many seconds."""
        end = time.monotonic() + limit_s
        while any(child.is_running for child in children) and time.monotonic() < end:
            self._look()


@contextlib.contextmanager
def _woken() -> Iterator[socket.socket]:
    """Yield a socket that can be read after a signal, also after the end of a child."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    # Without a handler, the system would not report the end of a child.
    before = signal.signal(signal.SIGCHLD, lambda number, frame: None)
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGCHLD, before)
        reader.close()
        writer.close()
