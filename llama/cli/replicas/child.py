"""A process that another one starts, reads, and starts again after its end.

In: a command line. Out: a process that ends with its parent, however that ends, and the lines that
it writes. It must not know what the process does, nor when it is to be started.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

_PR_SET_PDEATHSIG = 1  # prctl(2)
_MAX_READ = 1 << 16
_MAX_LINE = 1 << 14  # bytes after which a line without an end is passed on


@dataclass
class Child:
    """A process, and how to start it.

    Attributes:
        name: Its name in messages.
        command: Its command line.
        end_signal: The signal that asks it to finish; the kernel sends it when the parent ends.
        variables: Environment variables besides those of the parent.
        cores: The CPUs that it may use; None for all.
        descriptors: File descriptors that it inherits.
        is_ready: Whether it has reported that it can work.
        num_failures: Its ends since it was last ready.
        start_at: When to start it, by `time.monotonic`.
        error: The last error that it has written, which was not shown yet.
        is_closed: Whether its output has ended.
    """

    name: str
    command: Sequence[str]
    end_signal: signal.Signals
    variables: Mapping[str, str] = field(default_factory=dict)
    cores: Collection[int] | None = None
    descriptors: Sequence[int] = ()
    is_ready: bool = False
    num_failures: int = 0
    start_at: float = 0.0
    error: str = ""
    is_closed: bool = False
    _process: "subprocess.Popen[bytes] | None" = None
    _unread: bytes = b""

    @property
    def is_running(self) -> bool:
        """Whether the process was started, and its end was not read yet."""
        return self._process is not None

    @property
    def output(self) -> int:
        """The file descriptor from which `read_lines` reads."""
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout.fileno()

    def start(self) -> None:
        """Start the process, in a session of its own: Ctrl-C is meant for the parent only.

        The calling process must have one thread, because code runs between fork and exec.
        """
        self.error = ""
        self.is_closed = False
        self._unread = b""
        # The death of the thread that forks is the one that the kernel reports.
        tie = _Tie(self.end_signal, self.cores)
        self._process = subprocess.Popen(
            self.command,
            env=os.environ | self.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            pass_fds=self.descriptors,
            start_new_session=True,
            preexec_fn=tie,
        )
        os.set_blocking(self.output, False)

    def read_lines(self) -> list[str]:
        """Return the complete lines that the process has written since the last call.

        The last line is returned without its end once nobody can write any more, or once the
        process has ended.
        """
        data = self._unread
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.output, _MAX_READ):
                data += part
            self.is_closed = True
        lines = data.split(b"\n")
        self._unread = lines.pop()
        if self._unread and (self.is_closed or self.has_ended or len(self._unread) > _MAX_LINE):
            lines.append(self._unread)
            self._unread = b""
        return [line.decode(errors="replace") for line in lines]

    def send(self, number: int) -> None:
        """Send a signal to the process, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process and all that it has started in its session."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended; it stays a zombie, and keeps its id, until `reap`."""
        assert self._process is not None
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, options) is not None

    def reap(self) -> int:
        """Return the wait status (wait(2)) of a process that has ended, and close its output.

        What it has started, such as the ranks of a launcher, is killed: it may hold memory that the
        next start needs.
        """
        process = self._process
        assert process is not None and process.stdout is not None
        self.kill()
        code = process.wait()
        process.stdout.close()
        self._process = None
        return -code if code < 0 else code << 8


class _Tie:
    """Called between fork and exec: it ties the process to its parent, and to its cores."""

    def __init__(self, end_signal: int, cores: Collection[int] | None) -> None:
        self._end_signal = end_signal
        self._cores = cores
        self._parent = os.getpid()
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def __call__(self) -> None:
        if self._libc is not None:
            self._libc.prctl(_PR_SET_PDEATHSIG, self._end_signal)
        if os.getppid() != self._parent:  # The parent ended before the call above.
            os._exit(1)
        if self._cores is not None and sys.platform == "linux":
            os.sched_setaffinity(0, self._cores)
