"""Python programs that start at once: forks of a process that has imported torch and the package.

In: what subprocess.Popen takes. Out: a Popen of a process of one's own, with the files, folder,
environment and arguments that were asked for; torchrun starts its ranks so, too, and a program with
WARM_CHILDREN in its environment what it starts. What differs from a fresh start: the modules are
there already, and all forks have one hash seed. What is not imitated (`-c`, flags of Python, other
commands, other systems than Linux) starts as ever. It must not know what the programs do.

A fork's parent would be the process that forks. So that forks twice, the one between ends, and its
child falls to this process, which is the nearest "subreaper" for that moment (prctl(2)).
"""

import contextlib
import ctypes
import fcntl
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent.parent
_AGENT = ["-m", "torch.distributed.run"]
_PR_SET_CHILD_SUBREAPER = 36
_start = threading.Lock()  # one start at a time: `subreaper` is of the whole process


class Popen(subprocess.Popen):
    """subprocess.Popen, with a quicker start where the command is this Python's."""

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
    ) -> None:
        words = [os.fspath(word) for word in args] if not isinstance(args, str) else [args]
        program = words[2:] if words[1:2] == ["-u"] else words[1:]
        is_ours = words[0] == sys.executable and program[:1] and sys.platform == "linux"
        if not is_ours or preexec_fn or pass_fds or (program[0][0] == "-" and program[0] != "-m"):
            return super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
            )
        ends = rest[3:9]  # two of each of stdin, stdout and stderr; -1 where there is no pipe
        asked = {
            "words": program,
            "cwd": os.fspath(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
            "session": rest[14],
        }
        files = [0 if ends[0] == -1 else ends[0], 1 if ends[3] == -1 else ends[3]]
        files.append(2 if ends[5] == -1 else ends[5])
        self.pid = _forked(asked, files)
        self._child_created = True
        self._close_pipe_fds(*ends)  # type: ignore[attr-defined]


def run(
    words: list[Any],
    *,
    input: str | None = None,
    timeout: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """subprocess.run, of text that is captured."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    if input is not None:
        pipes["stdin"] = subprocess.PIPE
    with Popen(words, **(pipes | options)) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)


class _Server:
    """The process that forks; it ends when its standard input does."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-start-")
        self.path = os.path.join(self._folder.name, "socket")
        self._process = subprocess.Popen(
            [sys.executable, __file__, self.path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,  # without Ctrl-C
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def close(self) -> None:
        self._process.communicate()
        self._folder.cleanup()


_server = functools.cache(_Server)


def close() -> None:
    """End the process that forks, if there is one."""
    if _server.cache_info().currsize:
        _server().close()
        _server.cache_clear()


def _forked(asked: dict[str, Any], files: list[int]) -> int:
    """The pid of a child of this process that does what is asked, with three open files."""
    prctl = ctypes.CDLL(None).prctl
    with _start, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ.get("LLAMA_WARM_SOCKET") or _server().path)
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(connection, [b"."], files)
            connection.sendall(json.dumps(asked).encode())
            connection.shutdown(socket.SHUT_WR)
            pid = b"".join(iter(functools.partial(connection.recv, 4096), b""))
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    return int(pid)


def _serve(listener: socket.socket, parent: int) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each that asks, until `parent` is at its end. In a fork: what is asked of it."""
    while True:
        if parent in select.select([listener.fileno(), parent], [], [])[0]:
            return None
        connection, _ = listener.accept()
        if between := os.fork():
            os.waitpid(between, 0)
            connection.close()  # only now: its child has its new parent
            continue
        _, files, _, _ = socket.recv_fds(connection, 1, 3)
        text = b"".join(iter(functools.partial(connection.recv, 65536), b""))
        between = os.getpid()
        if pid := os.fork():
            connection.sendall(str(pid).encode())
            os._exit(0)
        while os.getppid() == between:  # it ends at once; a rank notes who its torchrun is
            time.sleep(0.001)
        connection.close()
        listener.close()
        os.close(parent)
        return json.loads(text), files


def _become(asked: dict[str, Any], files: list[int]) -> None:
    """Run a program as Python would: its files, folder, environment, threads, path and words."""
    import torch

    for number, opened in enumerate(files):
        os.dup2(opened, number)
        os.close(opened)
    if asked["session"]:
        os.setsid()
        with contextlib.suppress(OSError):  # it is no terminal, or another's
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        file: Any = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115
        if number:
            file.reconfigure(
                line_buffering=number == 2 or os.isatty(number),
                write_through="PYTHONUNBUFFERED" in os.environ,
            )
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    words = asked["words"]
    if words[:2] == _AGENT or "WARM_CHILDREN" in os.environ:
        _start_children_so()
    if words[0] == "-m":
        sys.path[:] = [asked["cwd"], *added, *sys.path]
        sys.argv[:] = words[1:]
        sys.modules.pop(words[1], None)  # runpy would warn
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[:] = [os.path.dirname(os.path.abspath(words[0])), *added, *sys.path]
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")


def _start_children_so() -> None:
    """Its children are this process's own, so it needs a process of its own that forks."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    folder = tempfile.mkdtemp(prefix="warm-start-")
    path = os.path.join(folder, "socket")
    listener = _listening(path)
    parent, own = os.pipe()
    if os.fork() == 0:
        os.setsid()  # Ctrl-C is not for it
        os.close(own)
        asked = _serve(listener, parent)
        if asked is None:
            os.unlink(path)
            os.rmdir(folder)
            os._exit(0)
        os.environ.pop("LLAMA_WARM_SOCKET", None)
        _become(*asked)
        sys.exit()
    os.close(parent)
    listener.close()
    os.environ["LLAMA_WARM_SOCKET"] = path
    subprocess.Popen = subprocess_handler.Popen = Popen  # type: ignore[misc]


def _listening(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    return listener


def _main(path: str) -> None:
    listener = _listening(path)
    sys.path[:] = sys.path[1:]  # without this file's folder
    sys.path.insert(0, str(REPO))

    import llama.cli.serve
    import llama.generation
    import llama.ranks
    import llama.server.process  # noqa: F401

    sys.path.remove(str(REPO))
    gc.freeze()  # or each collection would copy the pages of all these objects
    print("ready", flush=True)
    asked = _serve(listener, 0)
    if asked is not None:
        _become(*asked)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _main(sys.argv[1])
