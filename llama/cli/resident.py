"""A server that stays in the background, at a Unix domain socket of this user.

The input is the flags of a model; the output is the URL of its server, once that is ready. The
server is found if it is running, and is started otherwise. A folder that only this user can enter
has three files for each model, named by a key:

    KEY.log    The output of the server, which holds a lock on this file until its end, however it
               ends. A client that gets the lock knows that no server is running, and starts one,
               which inherits the lock.
    KEY.sock   The socket on which the server listens. If the lock is free, the socket is stale and
               is replaced.
    KEY.users  Every client holds a shared lock on this file. A server ends for being idle only if
               it gets an exclusive lock, and so never while a client is there.

torch is not imported.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import llama
from llama.build_args import lora_paths
from llama.cli.flags import FLAGS, extra
from llama.cli.model import demo_dir
from llama.cli.parser import variable
from llama.cli.ranks import say
from llama.storage.hub import model_folder
from llama.storage.kv_disk import default_folder

# Flags with a server of its own for each value.
KEYED = ("device", "dtype", "quantize", "activations", "lora")
# Flags of the KV pages on disk, which a server keeps from its start.
PAGES = ("kv_cache_dir", "kv_cache_disk_bytes", "kv_cache_reuse")
LISTENER_FD = "LLAMA_LISTENER_FD"  # environment variable with the socket that a server inherits
_START_S = 1800.0  # time limit of loading a model
_NOTE_S = 3.0  # delay of the note about what is waited for
_POLL_S = 0.05
_BACKLOG = 2048  # connections that may wait to be accepted
_MODEL_PREFIX = b"model "  # begins the second line of a log; the first one has the process
_STARTED_PREFIX = b"started "  # begins the third one
_MAX_FOLDER_BYTES = 85  # With the name of a socket that makes 107, the limit of unix(7).


@contextlib.contextmanager
def resident_server(
    options: argparse.Namespace, flags: dict[str, Any], *, is_new: bool = False
) -> Iterator[str]:
    """Yield the URL of a model's server, which does not end for being idle within the block.

    Args:
        options: The flags that identify the model.
        flags: The flags of `llama serve`, to start a server.
        is_new: Whether the server must be a new one.

    Raises:
        OSError: The server cannot start.
        ValueError: `is_new` is set and a server is running.
    """
    with extra("client", "a resident server"):
        from llama.cli.client import Client
    stem = _stem(options)
    url = f"unix:{stem}.sock"
    with _opened(f"{stem}.users") as users, contextlib.closing(Client(url)) as client:
        process = _wait_until_ready(stem, flags, users, client, is_new=is_new)
        if process is not None:
            folder = flags.get("kv_cache_dir") or default_folder()
            text = "" if folder == "none" else f", and keeps KV pages in {folder} (see llama kv)"
            say(
                f"{_described(stem)} holds the model in memory{text}; see llama serve "
                "--idle_minutes"
            )
        yield url


def _wait_until_ready(
    stem: Path, flags: dict[str, Any], users: BinaryIO, client: Any, *, is_new: bool
) -> "subprocess.Popen[bytes] | None":
    """Wait for a server that answers, and start one if there is none.

    Returns:
        The process, if this call started it. `users` is locked then and otherwise.
    """
    from llama.cli.client import ServerError

    process = None
    began = time.monotonic()
    note_at = began + _NOTE_S
    while True:
        is_locked = _try_lock(users, fcntl.LOCK_SH)
        if is_locked and process is None:
            os.utime(users.fileno())
            process = _start(stem, flags)
            if is_new and process is None:
                raise ValueError(
                    f"{_described(stem)} serves this model already: end it first, with `llama "
                    f"stop {_process_id(stem)}`"
                )
        with contextlib.suppress(ServerError):  # The server is not there yet or loads the model.
            if is_locked:
                client.run(client.model(None))
                return process
        if process is not None and process.poll() is not None:
            raise OSError(f"the server ended: {_last_error(stem)}")
        if time.monotonic() > began + _START_S:
            raise TimeoutError(f"{_described(stem)} was not ready within {_START_S:g} s")
        if time.monotonic() > note_at:
            say(f"waiting for {_described(stem)}")
            note_at = float("inf")
        time.sleep(_POLL_S)


class InheritedSocket:
    """The listening socket of a server in the background, and the check whether it is idle.

    Attributes:
        socket: The socket, which the client has opened.
        url: Its URL.
    """

    def __init__(self, idle_minutes: int) -> None:
        """Take the socket over.

        Args:
            idle_minutes: Minutes without a client after which the server ends; 0 for no limit.
        """
        self.socket = socket.socket(fileno=int(os.environ.pop(LISTENER_FD)))
        path: str = self.socket.getsockname()
        self.url = f"unix:{path}"
        self._limit_s = 60 * idle_minutes if idle_minutes else float("inf")
        self._users = _opened(path.removesuffix("sock") + "users")

    def is_idle(self) -> bool:
        """Return whether no client has come for so long that the server is to end.

        If so, no client can come any more until this process is gone.
        """
        if time.time() - os.fstat(self._users.fileno()).st_mtime < self._limit_s:
            return False
        if _try_lock(self._users, fcntl.LOCK_EX):
            return True
        os.utime(self._users.fileno())  # A client is there.
        return False


def _start(stem: Path, flags: dict[str, Any]) -> "subprocess.Popen[bytes] | None":
    """Start a server, which begins to listen. Return None if one is running."""
    with _opened(f"{stem}.log") as log:
        if not _try_lock(log, fcntl.LOCK_EX):
            return None
        log.truncate(0)
        path = stem.with_suffix(".sock")
        path.unlink(missing_ok=True)
        arguments = [
            f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()
        ]
        flag_variables = {variable(name) for name in FLAGS}
        environment = {k: v for k, v in os.environ.items() if k not in flag_variables}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(_BACKLOG)
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "llama", "serve", "--background", *arguments],
                env=environment | {LISTENER_FD: str(listener.fileno())},
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is meant for the client only.
            )
        model = model_folder(flags.get("ckpt_dir") or demo_dir()).resolve()
        started = started_at(process.pid).encode()
        lines = (b"process %d" % process.pid, _MODEL_PREFIX + os.fsencode(model))
        log.write(b"\n".join((*lines, _STARTED_PREFIX + started, b"")))
        return process


def started_at(process: int) -> str:
    """Return when a process started, in ticks since the system's start; "" if nothing says it.

    A process and its start time together name one process; the number alone is used again.
    """
    try:
        status = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return status.rpartition(")")[2].split()[19]  # proc(5), field 22; the name may have blanks


@dataclass(frozen=True)
class RunningServer:
    """A server in the background.

    Attributes:
        process: Its process id.
        model: The path of its model.
        started: When it started; see `started_at`.
        log: Its log, which it keeps locked until its end.
    """

    process: int
    model: str
    started: str
    log: Path

    @property
    def url(self) -> str:
        """Return the URL of its socket."""
        return f"unix:{self.log.with_suffix('.sock')}"

    def is_running(self) -> bool:
        """Return whether the server still holds the lock of its log."""
        with _opened(str(self.log)) as log:
            return not _try_lock(log, fcntl.LOCK_SH)


def running_servers() -> list[RunningServer]:
    """Return this user's servers in the background, those that are loading included."""
    servers = []
    for log in sorted(_folder().glob("*.log")):
        lines = log.read_bytes().split(b"\n", 3)
        if len(lines) < 4 or not lines[0].startswith(b"process "):
            continue  # A client is starting it, or it is not ours.
        process = int(lines[0].removeprefix(b"process "))
        model = os.fsdecode(lines[1].removeprefix(_MODEL_PREFIX))
        started = lines[2].removeprefix(_STARTED_PREFIX).decode(errors="replace")
        server = RunningServer(process, model, started, log)
        if server.is_running():
            servers.append(server)
    return servers


def _last_error(stem: Path) -> str:
    """Return the last error in a server's log, or else its last line."""
    lines = stem.with_suffix(".log").read_text(errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else lines[-1]


def _stem(options: argparse.Namespace) -> Path:
    """Return the path of a model's files without its suffix."""
    model = model_folder(options.ckpt_dir or demo_dir()).resolve()
    flags = [getattr(options, name) for name in KEYED if name != "lora"]
    flags += [model_folder(path).resolve() for path in lora_paths(options.lora)]
    identity = [model, llama.__version__, llama.__file__, *flags]
    return _folder() / hashlib.sha256(repr(identity).encode()).hexdigest()[:16]


def _folder() -> Path:
    """Return the folder, which is made if it is missing.

    Raises:
        OSError: The folder can be entered by another user, or its path is too long.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    fallback = Path(tempfile.gettempdir(), f"llama-{os.getuid()}")
    folder = Path(base, "llama") if os.path.isdir(base) else fallback
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    is_private = status.st_uid == os.getuid() and not status.st_mode & 0o077
    if not (stat.S_ISDIR(status.st_mode) and is_private):
        raise PermissionError(
            f"{folder} must be a folder that is yours and that nobody else can enter: remove it, "
            "or set XDG_RUNTIME_DIR"
        )
    if len(os.fsencode(folder)) > _MAX_FOLDER_BYTES:
        raise OSError(
            f"{folder} is too long a path for a socket: set XDG_RUNTIME_DIR to a shorter one"
        )
    return folder


def _opened(path: str) -> BinaryIO:
    """Open a file for appending that only this user can read and write."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o600)

    return open(path, "ab", 0, opener=opener)


def _try_lock(file: BinaryIO, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _described(stem: Path) -> str:
    log = stem.with_suffix(".log")
    process = log.read_text(errors="replace").partition("\n")[0] or "a process that starts"
    return f"{process} (its log: {log})"


def _process_id(stem: Path) -> str:
    """Return the process id of a running server, as its log has it."""
    first_line = stem.with_suffix(".log").read_text(errors="replace").partition("\n")[0]
    return first_line.removeprefix("process ")
