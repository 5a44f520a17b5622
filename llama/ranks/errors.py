"""The error of ranks that do not meet, and how a rank reports an error.

It must not know how ranks communicate.
"""

import contextlib
import os

from llama.ranks.parallel import RankError


class NotMetError(RankError):
    """The ranks did not meet.

    One rank of each torchrun raises this error, and the others end silently.
    """


def say(text: str) -> None:
    """Write a line to stderr in one call, so that lines of other ranks do not mix with it."""
    with contextlib.suppress(OSError):
        os.write(2, (text + "\n").encode(errors="backslashreplace"))
