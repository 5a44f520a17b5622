"""Functions that wait for what another process or thread does."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

LIMIT_S = 120.0  # generous for a busy machine: it ends a test that would never end
T = TypeVar("T")


def wait_until(is_so: Callable[[], T], what: object = "it never came true") -> T:
    """Return the first true value of `is_so()`; raise AssertionError with `what` after LIMIT_S."""
    end = time.monotonic() + LIMIT_S
    pause_s = 0.0001  # a thread needs less than a process
    while not (found := is_so()):
        assert time.monotonic() < end, what() if callable(what) else what
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.005)
    return found


def num_lines(path: Path) -> int:
    """Return the number of lines that a job has written so far."""
    return path.read_bytes().count(b"\n") if path.exists() else 0
