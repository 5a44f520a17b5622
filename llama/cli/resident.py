"""A server that stays in the background: found, or started, at a Unix socket of this user.

In: the flags of a model. Out: the URL of its server, once that is ready. A folder that is this
user's alone has for each model, by a key:

    KEY.log    what the server writes. It holds a lock on it until its end, whatever that is: who
               gets the lock knows that none lives, and starts one, which inherits the lock.
    KEY.sock   where it listens; without that lock the socket is stale, and is replaced.
    KEY.users  each client shares a lock on it. A server ends for being idle where it gets the lock
               alone, and so never while somebody comes.

No torch is imported.
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
from pathlib import Path
from typing import Any, BinaryIO

import llama
from llama.checkpoint.downloads import model_folder
from llama.cli.flags import FLAGS, extra, variable
from llama.cli.model import demo_dir
from llama.cli.ranks import say

KEYED = ("device", "dtype", "quantize")  # each value of these flags has a server of its own
LISTENER_FD = "LLAMA_LISTENER_FD"  # a variable of the server: the socket that it inherits
_START_S = 1800.0  # for a model to be loaded
_NOTE_S = 3.0  # then a person is told what is waited for
_POLL_S = 0.05


@contextlib.contextmanager
def resident_server(
    options: argparse.Namespace, flags: dict[str, Any], *, is_new: bool = False
) -> Iterator[str]:
    """The URL of a model's server, which does not end for being idle within the block. flags: of
    `llama serve`, to start one. is_new: ValueError where one lives. OSError: it cannot start."""
    with extra("client", "a resident server"):
        from llama.cli.client import Client, ServerError
    stem, process, began = _stem(options), None, time.monotonic()
    url, note_at = f"unix:{stem}.sock", began + _NOTE_S
    with _opened(f"{stem}.users") as users, contextlib.closing(Client(url)) as client:
        while True:
            is_held = _try_lock(users, fcntl.LOCK_SH)
            if is_held and process is None:
                os.utime(users.fileno())
                process = _start(stem, flags)
                if is_new and process is None:
                    raise ValueError(f"{_described(stem)} serves this model already: end it first")
            with contextlib.suppress(ServerError):  # it is not there yet, or loads the model
                if is_held:
                    client.run(client.model(None))
                    break
            if process is not None and process.poll() is not None:
                lines = stem.with_suffix(".log").read_text(errors="replace").splitlines()
                errors = [x.removeprefix("error: ") for x in lines if x.startswith("error: ")]
                raise OSError(f"the server ended: {[*lines, *errors][-1]}")
            if time.monotonic() > began + _START_S:
                raise TimeoutError(f"{_described(stem)} was not ready within {_START_S:g} s")
            if time.monotonic() > note_at:
                say(f"waiting for {_described(stem)}")
                note_at = float("inf")
            time.sleep(_POLL_S)
        if process is not None:
            say(f"{_described(stem)} holds the model in memory; see llama serve --idle_minutes")
        yield url


class InheritedSocket:
    """The server's side: its listening socket, and whether it has been idle for too long."""

    def __init__(self, idle_minutes: int) -> None:
        self.socket = socket.socket(fileno=int(os.environ.pop(LISTENER_FD)))
        path: str = self.socket.getsockname()
        self.url = f"unix:{path}"
        self._limit_s = 60 * idle_minutes if idle_minutes else float("inf")
        self._users = _opened(path.removesuffix("sock") + "users")

    def is_idle(self) -> bool:
        """Whether nobody has come for so long; then nobody can, until this process is gone."""
        if time.time() - os.fstat(self._users.fileno()).st_mtime < self._limit_s:
            return False
        if _try_lock(self._users, fcntl.LOCK_EX):
            return True
        os.utime(self._users.fileno())  # somebody is here
        return False


def _start(stem: Path, flags: dict[str, Any]) -> "subprocess.Popen[bytes] | None":
    """A server that begins to listen; None where one lives."""
    with _opened(f"{stem}.log") as log:
        if not _try_lock(log, fcntl.LOCK_EX):
            return None
        log.truncate(0)
        path = stem.with_suffix(".sock")
        path.unlink(missing_ok=True)
        words = [f"--{name}={x}" if x is not True else f"--{name}" for name, x in flags.items()]
        own = {variable(name) for name in FLAGS}
        variables = {name: value for name, value in os.environ.items() if name not in own}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(2048)
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "llama", "serve", "--background", *words],
                env=variables | {LISTENER_FD: str(listener.fileno())},
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the client
            )
        log.write(b"process %d\n" % process.pid)
        return process


def _stem(options: argparse.Namespace) -> Path:
    """The path of a model's files, without its ending."""
    model = model_folder(options.ckpt_dir or demo_dir()).resolve()
    given = [model, llama.__version__, llama.__file__, *(getattr(options, x) for x in KEYED)]
    return _folder() / hashlib.sha256(repr(given).encode()).hexdigest()[:16]


def _folder() -> Path:
    """The folder, made if it is missing. OSError where it is not this user's alone."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    fallback = Path(tempfile.gettempdir(), f"llama-{os.getuid()}")
    folder = Path(base, "llama") if os.path.isdir(base) else fallback
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} must be a folder that is yours and that nobody else can enter: remove it, "
            "or set XDG_RUNTIME_DIR"
        )
    if len(os.fsencode(folder)) > 85:  # bytes; with the name of a socket 107, see unix(7)
        raise OSError(f"{folder} is too long a path for a socket: set XDG_RUNTIME_DIR to a shorter")
    return folder


def _opened(path: str) -> BinaryIO:
    """A file to append to, which is this user's alone."""
    return open(path, "ab", 0, opener=lambda name, how: os.open(name, how | os.O_NOFOLLOW, 0o600))


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
