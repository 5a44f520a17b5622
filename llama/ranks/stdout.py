"""Where several ranks run one script, only rank 0's prints are seen.

Meta's build does the same, for good and by the rank on each machine. stderr is never touched.
"""

import io
import os
import sys
from typing import TextIO


class MutedStdout(io.TextIOWrapper):
    """`sys.stdout` while at least one holder is left; `held` and `release` come in pairs."""

    def __init__(self, before: TextIO) -> None:
        encoding = getattr(before, "encoding", None) or "utf-8"
        nowhere = open(os.devnull, "wb")  # noqa: SIM115  it is open as long as this object
        super().__init__(nowhere, encoding=encoding, errors="replace")
        self._before = before
        self._holders = 0

    @classmethod
    def held(cls) -> "MutedStdout":
        """Mute `sys.stdout`, or hold on to the stand-in that mutes it already."""
        muted = sys.stdout
        if not isinstance(muted, cls):
            muted = cls(sys.stdout)
            sys.stdout = muted
        muted._holders += 1
        return muted

    def release(self) -> None:
        """The last holder brings the real one back, unless somebody has replaced it meanwhile."""
        self._holders -= 1
        if not self._holders and sys.stdout is self:
            sys.stdout = self._before
