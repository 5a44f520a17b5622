"""Completion by Tab at the prompt of a chat: commands, their arguments, and names of files.

The input is a line up to the cursor; the result is every line that it can become. This module must
not know the terminal, so that it can be tested line by line.
"""

import os
from collections.abc import Iterable, Iterator

from llama.cli.chat.conversation import COMMANDS, SETTINGS


def complete(line: str) -> list[str]:
    """Return the lines that a line can be completed to, sorted. A question has none."""
    if not line.startswith("/"):
        return []
    name, space, argument = line[1:].partition(" ")
    if not space:
        lines = (f"/{known} " if COMMANDS[known].argument else f"/{known}" for known in COMMANDS)
        return sorted(candidate for candidate in lines if candidate.startswith(line))
    if name not in COMMANDS:
        return []
    candidates = _arguments(COMMANDS[name].argument, argument)
    return sorted(f"/{name} {each}" for each in candidates if each.startswith(argument))


def _arguments(expected: str, argument: str) -> Iterable[str]:
    """Return possible arguments of a command.

    Args:
        expected: What the command takes, as its help says it.
        argument: The beginning of the argument.
    """
    if expected == "FILE":
        return _file_names(argument)
    if expected == "[NAME VALUE]":
        return (f"{setting} " for setting in SETTINGS)
    return [expected.strip("[]")] if expected == "[all]" else []


def _file_names(beginning: str) -> Iterator[str]:
    """Yield the files in the folder that a path begins with; the name of a folder ends in /."""
    folder, name = os.path.split(beginning)
    prefix = beginning.removesuffix(name)
    try:
        with os.scandir(os.path.expanduser(folder) or ".") as entries:
            for entry in entries:
                is_hidden = entry.name.startswith(".") and not name.startswith(".")
                if entry.name.isprintable() and not is_hidden:
                    yield prefix + entry.name + ("/" if entry.is_dir() else "")
    except OSError:
        return
