"""Ranks of this machine without torchrun: one process each, which start and end together.

In: a Python command line, and how many ranks shall run it. Out: the exit code of the work. The
ranks get torchrun's variables, and meet at a port of loopback that is open before they start, so
that no other process can take it. They stay in this process group, and so have its terminal; rank 0
alone has standard input. (torch's own agent gives each rank a session without the terminal.)
"""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Sequence

from llama.ranks.errors import say
from llama.ranks.processes import describe_end

LAUNCHER = "LLAMA_LAUNCHER"  # a variable of ranks: the process that started them by `launch`
STORE_FD = "LLAMA_STORE_FD"  # the open port, where rank 0 is to make torch's store
_FOLLOW_S = 10  # for ranks to end after one that failed; and then, after SIGTERM


def agent() -> int:
    """The process that started this machine's ranks, and waits for them; 0 if there is none."""
    launcher = int(os.environ.get(LAUNCHER, "0"))
    return launcher or (os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0)


def launch(command: Sequence[str], num_ranks: int) -> int:
    """Run the command on every rank. The exit code: 0, or that of the first rank that failed, 128 +
    n for a signal. Signals are passed on; of SIGKILL the ranks see that this is gone, and end."""
    mode = termios.tcgetattr(0) if os.isatty(0) else None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        started = [_start(command, rank, num_ranks, listener) for rank in range(num_ranks)]
    running = {process.pid: rank for rank, process in enumerate(started)}
    orders = itertools.chain([signal.SIGTERM], itertools.repeat(signal.SIGKILL))
    result, cause = 0, ""

    def tell(number: int, _frame: object = None) -> None:
        for pid in reversed(list(running)):  # rank 0 last: where it ends, the others' store does
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end_all(alarm: int = 0, _frame: object = None) -> None:
        order = next(orders)
        if alarm and order == signal.SIGTERM:
            say(f"error: {cause}; others had not ended {_FOLLOW_S} s later")
        tell(order)
        signal.alarm(_FOLLOW_S)

    signal.signal(signal.SIGALRM, end_all)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, tell)
    while running:
        pid, status = os.wait()
        rank = running.pop(pid, None)  # None: a child of the program that this process was before
        if rank is not None and status:
            code = os.waitstatus_to_exitcode(status)
            result = result or (code if code > 0 else 128 - code)
            cause = cause or f"rank {rank} {describe_end(status)}"
            signal.alarm(_FOLLOW_S)
            if rank == 0 and code > 0:  # it has said why, or another has
                end_all()
    signal.alarm(0)
    with contextlib.suppress(OSError, termios.error):
        if mode and os.tcgetpgrp(0) == os.getpgrp():  # a rank that was killed did not put it right
            termios.tcsetattr(0, termios.TCSANOW, mode)
    return result


def _start(
    command: Sequence[str], rank: int, num_ranks: int, listener: socket.socket
) -> "subprocess.Popen[bytes]":
    (address, port), fd = listener.getsockname(), listener.fileno()
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # no stacks of C++ where the store ends with rank 0
    variables = quiet | os.environ | {
        "RANK": str(rank), "WORLD_SIZE": str(num_ranks), LAUNCHER: str(os.getpid()),
        "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks), STORE_FD: str(fd),
        "MASTER_ADDR": address, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False",
    }  # fmt: skip
    words, stdin = [sys.executable, *command], subprocess.DEVNULL if rank else None
    return subprocess.Popen(words, env=variables, stdin=stdin, pass_fds=() if rank else (fd,))
