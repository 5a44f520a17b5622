"""A child process that computes for this one within limits of processor time, memory and time.

In: a module of this package that calls `answer_requests`, and requests as JSON. Out: its answers,
or a `LimitError`. Requests and answers are lines of JSON on two pipes, so that neither side can
make the other run anything. Only what is limited belongs here, not what it is.
"""

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

_MAX_ANSWER = 64 << 20  # bytes of one answer
_PIECE = 1 << 16
_ALL: "weakref.WeakSet[Confined]" = weakref.WeakSet()


class LimitError(Exception):
    """A request took too much processor time, memory or time; its process has ended."""


class ConfinedError(Exception):
    """A request failed: the message says how."""


class Confined:
    """A child process that answers one request at a time.

    It starts with the first request, starts again after one that exceeded a limit, and ends with
    this object or with this process. A fork of this process gets a child process of its own.
    """

    def __init__(self, module: str, *, cpu_s: float, memory_mb: int, wait_s: float) -> None:
        """Set the limits; nothing is started.

        Args:
            module: the module that the child runs.
            cpu_s: seconds of processor time for one request.
            memory_mb: MiB that the child may take beyond what its imports take.
            wait_s: seconds until an answer, for a child that waits instead of computing.
        """
        self._command = [sys.executable, "-P", "-m", module, str(cpu_s), str(memory_mb)]
        self._cpu_s = cpu_s
        self._memory_mb = memory_mb
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None
        _ALL.add(self)

    def call(self, request: Any) -> Any:
        """Return the answer to a request.

        Raises:
            LimitError: the request exceeded a limit; the message says which.
            ConfinedError: the function of the child raised an exception.
        """
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                self.close()
                process = self._start()
            try:
                reply = json.loads(self._exchange(process, line))
            except BaseException:  # a limit or an interrupt: the next answer would be this one's
                self.close()
                raise
        if "limit" in reply:
            raise LimitError(f"it takes more than {self._memory_mb} MiB of memory")
        if "error" in reply:
            raise ConfinedError(reply["error"])
        return reply["answer"]

    def close(self) -> None:
        """End the child process, if there is one."""
        if self._end is not None:
            self._end()
        self._process = None

    def _start(self) -> "subprocess.Popen[bytes]":
        # The child imports from where this process does, and not from its working directory.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(
            self._command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._process = process
        self._end = weakref.finalize(self, _end, process)
        return process

    def _leave(self) -> None:
        """Leave the child process to the process that this one was forked from."""
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.close()
            self._process.stdout.close()
            self._process.returncode = 0  # It is no child of this process.
        if self._end is not None:
            self._end.detach()
        self._lock = threading.Lock()
        self._process = None
        self._end = None

    def _exchange(self, process: "subprocess.Popen[bytes]", line: bytes) -> bytes:
        """Send a line, and return the line that answers it."""
        assert process.stdin is not None and process.stdout is not None
        requests, answers = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(requests, False)
        unsent = memoryview(line)
        received = bytearray()
        end = time.monotonic() + self._wait_s
        while not received.endswith(b"\n"):
            writing = [requests] if unsent else []
            readable, writable, _ = select.select(
                [answers], writing, [], max(0.0, end - time.monotonic())
            )
            if not (readable or writable):
                raise LimitError(f"it takes more than {self._wait_s:.0f} s")
            if readable:
                received += self._received(process, answers)
            elif writable:
                with contextlib.suppress(BrokenPipeError):  # reading says how it has ended
                    unsent = unsent[os.write(requests, unsent[:_PIECE]) :]
            if len(received) > _MAX_ANSWER:
                raise LimitError(f"its result has more than {_MAX_ANSWER >> 20} MiB")
        return bytes(received)

    def _received(self, process: "subprocess.Popen[bytes]", answers: int) -> bytes:
        """Return bytes that have come; raise a LimitError if the child has ended instead."""
        data = os.read(answers, _PIECE)
        if data:
            return data
        code = process.wait(self._wait_s)
        if code == -signal.SIGPROF:
            raise LimitError(f"it takes more than {self._cpu_s:g} s of processor time")
        raise LimitError(f"its process ended with code {code}")


class ConfinedPool:
    """Child processes of one kind, so that a slow request holds up no others.

    Each starts when the ones before it are busy.
    """

    def __init__(self, module: str, count: int, **limits: Any) -> None:
        """Set the limits of each, which are those of `Confined`; nothing is started.

        Args:
            module: the module that the children run.
            count: the number of children at most; further calls wait for the first one.
            limits: the other arguments of `Confined`.
        """
        self._processes = [Confined(module, **limits) for _ in range(count)]
        self._idle = deque(reversed(self._processes))  # Its methods need no lock, also in a fork.

    def call(self, request: Any) -> Any:
        """Return the answer of a child that has nothing to do; see `Confined.call`."""
        try:
            process = self._idle.pop()
        except IndexError:
            return self._processes[0].call(request)
        try:
            return process.call(request)
        finally:
            self._idle.append(process)

    def close(self) -> None:
        """End the child processes."""
        for process in self._processes:
            process.close()


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    with process:  # closes the pipes and waits
        pass


def _leave_all() -> None:
    for each in list(_ALL):
        each._leave()


os.register_at_fork(after_in_child=_leave_all)


def answer_requests(answer: Callable[[Any], Any]) -> None:
    """Answer the requests of the parent process, until it ends. A child calls this as its main.

    Args:
        answer: from a request to its answer, both JSON values.
    """
    cpu_s, memory_mb = float(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Whatever prints does not disturb the answers.
    _limit_memory(memory_mb << 20)
    for line in sys.stdin.buffer:
        # The default action of its signal ends the process, in whatever function it is.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            data = json.dumps({"answer": answer(json.loads(line))}).encode()
        except MemoryError:
            data = b'{"limit": "memory"}'
        except Exception as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            data = json.dumps({"error": f"{kind}{error}"[:1000]}).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(data + b"\n")
        replies.flush()


def _limit_memory(num_bytes: int) -> None:
    """Limit the address space to what is in use now and so many bytes more, on Linux."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, used + num_bytes))
