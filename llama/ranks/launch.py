"""Starts the ranks of one machine without torchrun.

In: a Python command line, and the number of ranks that run it. Out: the exit code of the job. The
ranks get torchrun's variables, and meet at a port of loopback that is open before they start, so
that no other process can take it. They stay in this process group and thus have its terminal; only
rank 0 has standard input. (torch's agent gives each rank a session without the terminal.) Ranks
that have met end together; the launcher ends those that do not, such as ranks that still import
their libraries. It must not know what the ranks compute.
"""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Sequence

from llama.ranks.errors import say
from llama.ranks.processes import child_status, describe_end, is_suspended

LAUNCHER = "LLAMA_LAUNCHER"  # variable of the ranks: id of the process that started them here
STORE_FD = "LLAMA_STORE_FD"  # variable of rank 0: the open port for torch's store
_TICK_S = 0.1  # interval of the looks at the ranks
_REPORTED_S = 3  # time for ranks to end after one that has reported a cause
_FOLLOW_S = 6  # time for ranks to end after one was killed or stopped, and again after SIGTERM


def agent() -> int:
    """Return the id of the process that started this machine's ranks, or 0 if there is none."""
    launcher = int(os.environ.get(LAUNCHER, "0"))
    return launcher or (os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0)


def launch(command: Sequence[str], num_ranks: int) -> int:
    """Run the command on every rank, and wait for all of them.

    Signals are passed on to the ranks. If this process is killed by SIGKILL, the ranks notice that
    it is gone, and end.

    Returns:
        the exit code: 0, or that of the first rank that failed, which is 128 + n for a signal n.
    """
    mode = termios.tcgetattr(0) if os.isatty(0) else None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        started = [_start(command, rank, num_ranks, listener) for rank in range(num_ranks)]
    ranks = _Ranks(started)
    ranks.install_handlers()
    code = ranks.wait()
    with contextlib.suppress(OSError, termios.error):
        if mode and os.tcgetpgrp(0) == os.getpgrp():  # a killed rank did not restore the terminal
            termios.tcsetattr(0, termios.TCSANOW, mode)
    return code


class _Ranks:
    """The running ranks, and the end of the others after the first failure."""

    def __init__(self, started: Sequence["subprocess.Popen[bytes]"]) -> None:
        self._running = {process.pid: rank for rank, process in enumerate(started)}
        self._orders = itertools.chain([signal.SIGTERM], itertools.repeat(signal.SIGKILL))
        self._stopped_s = dict.fromkeys(self._running, 0.0)
        self._host = socket.gethostname()
        self._code = 0  # exit code of the first failed rank
        self._cause = ""

    def install_handlers(self) -> None:
        """Pass signals on to the ranks, and end ranks that outlive a failed one for too long."""
        signal.signal(signal.SIGALRM, self._end_all)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._send)

    def wait(self) -> int:
        """Wait for all ranks; return the exit code of the job."""
        while self._running:
            time.sleep(_TICK_S)
            for pid, rank in list(self._running.items()):
                status = child_status(pid)
                if status is None:
                    continue
                del self._running[pid]
                if status:
                    self._note_failure(rank, status)
            self._look_for_stopped()
        signal.alarm(0)
        return self._code

    def _look_for_stopped(self) -> None:
        """End the job if a rank alone is stopped; the others end earlier, if they have met."""
        for pid, rank in self._running.items():
            # Only ticks of this process count, so that Ctrl-Z of the whole job does not.
            self._stopped_s[pid] = self._stopped_s[pid] + _TICK_S if is_suspended(pid) else 0.0
            if self._stopped_s[pid] > _FOLLOW_S and not self._code:
                self._code = 1
                name = f"rank {rank} on {self._host}"
                say(f"error: {name} was stopped (by SIGSTOP or Ctrl-Z) for {_FOLLOW_S} s")
                os.kill(pid, signal.SIGKILL)
                self._end_all()

    def _note_failure(self, rank: int, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        if not self._code:
            self._code = code if code > 0 else 128 - code
            self._cause = f"rank {rank} on {self._host} {describe_end(status)}"
        has_reported = 0 < code < 128  # or another rank has
        signal.alarm(_REPORTED_S if has_reported else _FOLLOW_S)
        if rank == 0 and code > 0:
            self._end_all()

    def _send(self, number: int, _frame: object = None) -> None:
        # Rank 0 is the last, as the store of the others ends with it.
        for pid in reversed(list(self._running)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _end_all(self, alarm: int = 0, _frame: object = None) -> None:
        order = next(self._orders)
        if alarm and order == signal.SIGTERM and self._code >= 128:
            say(f"error: {self._cause}; others had not ended {_FOLLOW_S} s later")
        self._send(order)
        signal.alarm(_FOLLOW_S)


def _start(
    command: Sequence[str], rank: int, num_ranks: int, listener: socket.socket
) -> "subprocess.Popen[bytes]":
    address, port = listener.getsockname()
    fd = listener.fileno()
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # no C++ stacks when the store ends with rank 0
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        LAUNCHER: str(os.getpid()),
        STORE_FD: str(fd),
    }
    return subprocess.Popen(
        [sys.executable, *command],
        env=quiet | os.environ | variables,
        stdin=subprocess.DEVNULL if rank else None,
        pass_fds=() if rank else (fd,),
    )
