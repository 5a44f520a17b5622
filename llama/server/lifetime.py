"""The life of a server's main process: it listens at once, serves until a signal, and drains.

In: something that answers requests. Out: an orderly end. On SIGTERM or Ctrl-C new requests are
rejected, running ones get `drain_s` seconds, and the process ends; a second signal ends it at once.
"""

import errno
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from llama.api import Llama, Watch, stop_requested
from llama.common.checks import FieldError
from llama.common.garbage import freeze_loaded
from llama.server.auth import is_loopback

_POLL_S = 0.05
# Seconds after which a thread that computes in Python lets another one run. The event loop asks for
# Python's lock after every system call: with Python's default of 5 ms, a small request alongside a
# busy thread takes tens of milliseconds longer.
_SWITCH_S = 0.0005
_BROKEN_S = 1.0  # time for the last responses after a failed step, and for a load balancer to see


class Work(Protocol):
    """The part of a server that answers requests; any thread may use it."""

    @property
    def has_failed(self) -> bool:
        """Whether a step of the model failed."""

    @property
    def failure(self) -> BaseException | None:
        """The exception of the first step that failed."""

    @property
    def is_busy(self) -> bool:
        """Whether any request is being answered."""

    def drain(self) -> None:
        """Reject new requests from now on."""

    def break_off(self, *, is_failure: bool = True) -> None:
        """End all requests with an error, without waiting for anything."""

    def close(self) -> None:
        """End all requests and the engine's threads."""


class ServerProcess(ABC):
    """A server process; `start`, `open`, `serve` and `stop` are called in this order.

    Attributes:
        port: the port that it listens on.
        work: what answers its requests.
    """

    work: Work

    def __init__(
        self, host: str, port: int, api_keys: list[str], listener: socket.socket | None
    ) -> None:
        """Listen.

        Args:
            host: address to listen on.
            port: port to listen on; 0 takes a free one.
            api_keys: the keys that are accepted.
            listener: a socket that listens already, in place of one at host and port.

        Raises:
            FieldError: other machines could connect, and no key is given; or the address cannot be
                listened on.
        """
        self.is_loopback = is_loopback(host)
        if not self.is_loopback and not api_keys:
            raise FieldError(
                "host",
                f"--host {host} lets other machines connect, so a key is needed: give --api_key or "
                "LLAMA_API_KEY, or leave --host out",
            )
        self._socket = listener or _listen(host, port)
        self.port: int = port if listener else self._socket.getsockname()[1]
        self._usual_switch_s = sys.getswitchinterval()

    @abstractmethod
    def start(self) -> None:
        """Answer requests with 503 until `open`."""
        sys.setswitchinterval(_SWITCH_S)

    def open(self, llama: Llama) -> None:
        """Begin to answer requests with a loaded model."""
        llama.llm_engine.grammars.warm_up()
        freeze_loaded()
        self._begin(llama)
        watch = Watch.of_process()
        if watch is not None:
            watch.before_end.append(lambda: self._break_off(is_failure=watch.is_ending))

    @abstractmethod
    def _begin(self, llama: Llama) -> None:
        """Answer requests with a loaded model from now on."""

    def serve(self, drain_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Serve until a signal comes, and then shut down.

        Args:
            drain_s: seconds that running requests get.
            is_over: asked while no request is active; true ends the server as a signal does.

        Raises:
            RuntimeError: a step of the model failed.
        """
        work = self.work
        try:
            has_failed = self._run_and_drain(drain_s, is_over)
            if has_failed:
                self._break_off()
                time.sleep(_BROKEN_S)
            work.close()
            self.stop()
        except SystemExit:  # a second signal: what still runs gets an error
            self._break_off(is_failure=False)
            raise
        if has_failed:  # All clients may have left, so that nothing else reports the reason.
            raise RuntimeError("a step of the model failed, so the server ends") from work.failure

    def _run_and_drain(self, drain_s: float, is_over: Callable[[], bool]) -> bool:
        """Wait for a signal or a failure, then for requests; return whether a step failed."""
        work = self.work
        while not (stop_requested() or work.has_failed):
            if not work.is_busy and is_over():
                break
            time.sleep(_POLL_S)
        work.drain()
        end = time.monotonic() + drain_s
        while work.is_busy and time.monotonic() < end and not work.has_failed:
            time.sleep(_POLL_S)
        return work.has_failed

    def _break_off(self, *, is_failure: bool = True) -> None:
        """End all requests with 500, or with 503 after a second signal, as far as time allows.

        The watch of the ranks calls this, too, when the main thread may never leave its step.
        """
        self.work.break_off(is_failure=is_failure)
        end = time.monotonic() + _BROKEN_S
        while self.work.is_busy and time.monotonic() < end:
            time.sleep(_POLL_S)

    @abstractmethod
    def stop(self) -> None:
        """Finish sending responses, and end the threads."""
        sys.setswitchinterval(self._usual_switch_s)


def _listen(host: str, port: int) -> socket.socket:
    """Listen at an address.

    Raises:
        FieldError: The address cannot be had; the error names host or port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            remedy = "give another port, or 0 for a free one"
            text = f"--port {port}: another program listens there: {remedy}"
            raise FieldError("port", text) from None
        reason = e.strerror.partition(" (")[0].lower() if e.strerror else str(e)
        raise FieldError("host", f"--host {host} --port {port}: {reason}") from None
