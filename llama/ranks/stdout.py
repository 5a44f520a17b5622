"""Mutes the standard output of all ranks but rank 0, so that one script prints once.

Meta's build does the same, permanently and for all but the first rank of each machine. stderr is
never changed.
"""

import io
import os
import sys
from typing import TextIO


class MutedStdout(io.TextIOWrapper):
    """A replacement of `sys.stdout` that drops all text, until its last holder releases it.

    Each call of `hold` needs a call of `release`.
    """

    def __init__(self, before: TextIO) -> None:
        encoding = getattr(before, "encoding", None) or "utf-8"
        nowhere = open(os.devnull, "wb")  # noqa: SIM115  open as long as this object
        super().__init__(nowhere, encoding=encoding, errors="replace")
        self._before = before
        self._holders = 0

    @classmethod
    def hold(cls) -> "MutedStdout":
        """Mute `sys.stdout`, or add a holder if it is muted already."""
        muted = sys.stdout
        if not isinstance(muted, cls):
            muted = cls(sys.stdout)
            sys.stdout = muted
        muted._holders += 1
        return muted

    def release(self) -> None:
        """Remove a holder; the last one restores `sys.stdout`, unless it has been replaced."""
        self._holders -= 1
        if not self._holders and sys.stdout is self:
            sys.stdout = self._before
