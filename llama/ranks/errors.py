"""What goes wrong between ranks, and how it is said. It must not know how they talk."""

import contextlib
import os


class RankError(RuntimeError):
    """Another rank failed: its message is passed on, so that every rank stops alike."""


class NotMetError(RankError):
    """The ranks did not come together. One rank of each torchrun raises it; the others just end."""


def say(text: str) -> None:
    """To stderr in one write, so that what other ranks say does not come between."""
    with contextlib.suppress(OSError):
        os.write(2, (text + "\n").encode(errors="backslashreplace"))
