"""Python programs that start at once: forks of a process that has imported torch and the package.

Input: the arguments of subprocess.Popen. Output: a Popen of a separate process with the files,
folder, environment and arguments that were asked for. torchrun starts its ranks in this way too,
and so does a program with WARM_CHILDREN in its environment. A fork differs from a fresh start in
this: the modules are already imported, and all forks have one hash seed; at exit the modules are
not torn down, which would take 0.25 s in each fork, unless the program has WARM_END in its
environment. What is not imitated (`-c`, flags of Python, commands other than `ip netns exec`,
systems other than Linux) starts as usual. This module must not know what the programs do.

The parent of a fork would be the process that forks. Therefore that process forks twice, the
process in between exits, and its child is adopted by this process, which is the nearest "subreaper"
for that moment (prctl(2)).
"""

import atexit
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
import weakref
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent.parent
_AGENT = ["-m", "torch.distributed.run"]
_IN_SPACE = ["ip", "netns", "exec"]  # a network namespace
_PR_SET_CHILD_SUBREAPER, _CLONE_NEWNET = 36, 0x40000000
_Fresh = subprocess.Popen  # kept here because a test may replace it by the class below
_start = threading.Lock()  # one start at a time: `subreaper` applies to the whole process


class Popen(subprocess.Popen):
    """A subprocess.Popen that starts faster where the command is this Python."""

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
    ) -> None:
        arguments = [os.fspath(word) for word in args] if not isinstance(args, str) else [args]
        space, arguments = (
            (arguments[3], arguments[4:]) if arguments[:3] == _IN_SPACE else ("", arguments)
        )
        program = arguments[2:] if arguments[1:2] == ["-u"] else arguments[1:]
        is_ours = arguments[0] == sys.executable and program[:1] and sys.platform == "linux"
        if not is_ours or preexec_fn or (program[0][0] == "-" and program[0] != "-m"):
            return super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
            )
        ends = rest[3:9]  # two each of stdin, stdout and stderr; -1 where there is no pipe
        asked = {
            "arguments": program,
            "cwd": os.fspath(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
            "session": rest[14],
            "space": space,
            "pass_fds": list(pass_fds),
        }
        files = [0 if ends[0] == -1 else ends[0], 1 if ends[3] == -1 else ends[3]]
        files += [2 if ends[5] == -1 else ends[5], *pass_fds]
        self.pid = _forked(asked, files)
        self._child_created = True
        self._close_pipe_fds(*ends)  # type: ignore[attr-defined]


def run(
    arguments: list[Any],
    *,
    input: str | None = None,
    timeout: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Return the result of subprocess.run, with its output captured as text."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    if input is not None:
        pipes["stdin"] = subprocess.PIPE
    with Popen(arguments, **(pipes | options)) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


class _Server:
    """The process that forks; it exits when its standard input is closed."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-start-")
        self.path = os.path.join(self._folder.name, "socket")
        self._process = _Fresh(
            [sys.executable, __file__, self.path],
            # Ctrl-C does not reach it
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
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
    """Return the pid of a child of this process that runs the request with these open files."""
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
    """Fork for each request until `parent` is closed; in a fork, return the request."""
    while True:
        if parent in select.select([listener.fileno(), parent], [], [])[0]:
            return None
        connection, _ = listener.accept()
        if between := os.fork():
            os.waitpid(between, 0)
            connection.close()  # only now: the child has its new parent
            continue
        _, files, _, _ = socket.recv_fds(connection, 1, 8)
        text = b"".join(iter(functools.partial(connection.recv, 65536), b""))
        between = os.getpid()
        if pid := os.fork():
            connection.sendall(str(pid).encode())
            os._exit(0)
        while os.getppid() == between:  # exits at once; a rank records the pid of its torchrun
            time.sleep(0.001)
        connection.close()
        listener.close()
        os.close(parent)
        return json.loads(text), files


def _become(asked: dict[str, Any], files: list[int]) -> None:
    """Run a program as Python would: its files, folder, environment, threads, arguments."""
    import torch

    # numbers above the wanted ones
    apart = [fcntl.fcntl(opened, fcntl.F_DUPFD, 100) for opened in files]
    for opened in files:
        os.close(opened)
    for opened, number in zip(apart, [0, 1, 2, *asked["pass_fds"]], strict=True):
        os.dup2(opened, number)
        os.close(opened)
    if asked["session"]:
        os.setsid()
        with contextlib.suppress(OSError):  # it is not a terminal, or belongs to another process
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    if asked["space"]:
        with open(f"/run/netns/{asked['space']}") as space:
            assert ctypes.CDLL(None).setns(space.fileno(), _CLONE_NEWNET) == 0
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
    arguments = asked["arguments"]
    sys.path[:0] = added
    with contextlib.suppress(ModuleNotFoundError):
        import sitecustomize  # noqa: F401
    sys.orig_argv[:] = [sys.executable, *arguments]
    if arguments[:2] == _AGENT or "--ranks" in arguments or "WARM_CHILDREN" in os.environ:
        _start_children_so()
    if arguments[0] == "-m":
        sys.path.insert(0, asked["cwd"])
        sys.argv[:] = arguments[1:]
        if not hasattr(sys.modules.get(arguments[1]), "__path__"):
            sys.modules.pop(arguments[1], None)  # runpy would warn about it
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        sys.argv[:] = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def _run(asked: dict[str, Any], files: list[int]) -> None:
    """Run a program and exit as Python does: join threads, run exit handlers, flush files.

    The rest of Python's finalization is skipped, unless there was an error or a file cannot be
    written.
    """
    code = 0
    try:
        _become(asked, files)
    except SystemExit as stop:
        if not isinstance(stop.code, int | None):
            raise
        code = stop.code or 0
    if "WARM_END" not in os.environ:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        gc.collect()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code & 0xFF)
    sys.exit(code)


def _start_children_so() -> None:
    """Let this process start its children in the same way, with a forking process of its own."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    folder = tempfile.mkdtemp(prefix="warm-start-")
    path = os.path.join(folder, "socket")
    listener = _listening(path)
    parent, own = os.pipe()
    if os.fork() == 0:
        os.setsid()  # Ctrl-C must not reach it
        os.close(own)
        asked = _serve(listener, parent)
        if asked is None:
            os.unlink(path)
            os.rmdir(folder)
            os._exit(0)
        os.environ.pop("LLAMA_WARM_SOCKET", None)
        _run(*asked)
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
    gc.disable()  # imports leave no garbage
    sys.path[:] = sys.path[1:]  # remove the folder of this file
    sys.path.insert(0, str(REPO))

    import torch.distributed.run  # noqa: F401
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    import llama.cli.client
    import llama.cli.serve
    import llama.generation
    import llama.ranks
    import llama.server.process  # noqa: F401

    # For its log, torchrun finds a caller's name by inspect.stack(), which reads every module.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    sys.path.remove(str(REPO))
    for library in weakref.finalize._registry:  # type: ignore[attr-defined]
        library.atexit = False  # torch would tear down its operators in each fork
    gc.freeze()  # otherwise each collection would copy the pages of all these objects
    gc.enable()
    print("ready", flush=True)
    asked = _serve(listener, 0)
    if asked is not None:
        _run(*asked)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _main(sys.argv[1])
