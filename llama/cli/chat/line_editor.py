"""Editing of a line at the prompt: pasted text, completion by Tab, and a history in a file.

The input is what a user types at a terminal; the result is a line, which has several lines of text
if it was pasted. The editing itself is done by GNU readline or libedit. This module must not know
what a line means.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

_MAX_HISTORY_BYTES = 1 << 20  # a larger file is cut to half of this, from its beginning
_MAX_ENTRY_CHARS = 1 << 16  # longer entries are recalled in this chat, but not stored

Completer = Callable[[str], list[str]]  # a line up to the cursor -> what it can be completed to


def history_path() -> Path:
    """Return the file that keeps the lines of earlier chats, in the XDG state folder."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # The specification says to ignore a relative path.
        state = os.path.expanduser("~/.local/state")
    return Path(state, "llama", "chat_history")


class LineEditor:
    """Reads lines from the terminal of this process; there can be one at a time."""

    def __init__(self, readline: ModuleType, completer: Completer, history: Path | None) -> None:
        """Set readline up.

        Args:
            readline: The module `readline`.
            completer: Says what Tab does.
            history: The file of the history; None: the history lasts as long as this editor.

        Raises:
            OSError: The history cannot be read or written. The editor is usable without it.
        """
        self._readline = readline
        self._completer = completer
        self._candidates: list[str] = []
        self._history: _HistoryFile | None = None
        readline.set_auto_history(False)
        readline.set_completer_delims(" ")
        readline.set_completer(self._complete)
        if "libedit" in (readline.__doc__ or ""):
            readline.parse_and_bind("bind ^I rl_complete")
        else:
            readline.parse_and_bind("tab: complete")
            # Python turns this off. A paste is then inserted whole, without running its lines.
            readline.parse_and_bind("set enable-bracketed-paste on")
            # If Ctrl-C is not a signal: empty the line, insert the Ctrl-C itself, press Enter.
            readline.parse_and_bind(r'"\C-c": "\C-a\C-k\C-v\C-c\C-m"')
        if history is not None:
            file = _HistoryFile(history)
            for entry in file.read():
                readline.add_history(entry)
            self._history = file

    def read_line(self, prompt: str) -> str:
        """Show a prompt and return a line."""
        return input(prompt)

    def remember(self, line: str) -> None:
        """Add a line to the history, unless it is the same as the last one.

        Raises:
            OSError: The line could not be stored; nothing will be stored after it.
        """
        last = self._readline.get_current_history_length()
        if last and self._readline.get_history_item(last) == line:
            return
        self._readline.add_history(line)
        if self._history is not None and len(line) <= _MAX_ENTRY_CHARS:
            file = self._history
            self._history = None
            file.append(line)
            self._history = file

    def _complete(self, word: str, index: int) -> str | None:
        """Return completion number `index` of the word before the cursor, as readline asks."""
        if index == 0:
            begin = self._readline.get_begidx()
            line = self._readline.get_line_buffer()[: self._readline.get_endidx()]
            self._candidates = [candidate[begin:] for candidate in self._completer(line)]
        return self._candidates[index] if index < len(self._candidates) else None


class _HistoryFile:
    """A file of lines that only its user can read. Each line of the file is a JSON string."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[str]:
        """Return the entries, oldest first, and cut a file that has become too large."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CREAT | os.O_NONBLOCK, 0o600)
        with open(descriptor, "rb") as file:
            os.fchmod(descriptor, 0o600)  # An older file, or the umask, may differ.
            size = os.fstat(descriptor).st_size
            file.seek(max(0, size - _MAX_HISTORY_BYTES // 2) if size > _MAX_HISTORY_BYTES else 0)
            content = file.read(_MAX_HISTORY_BYTES)
        if size > _MAX_HISTORY_BYTES:
            content = content.partition(b"\n")[2]  # The first line is incomplete.
            self._replace(content)
        entries = []
        for line in content.split(b"\n"):
            with contextlib.suppress(ValueError, RecursionError):
                entry = json.loads(line)
                if isinstance(entry, str) and "\0" not in entry:
                    entries.append(entry)
        return entries

    def _replace(self, content: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=self._path.parent, delete=False) as part:
            part.write(content)  # The mode of a temporary file is 0600.
        os.replace(part.name, self._path)

    def append(self, entry: str) -> None:
        """Store an entry, with one write, so that chats at the same time do not mix."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(descriptor, "wb", buffering=0) as file:
            file.write(json.dumps(entry).encode() + b"\n")
