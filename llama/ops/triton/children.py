"""The self-check in processes of its own, as a wrong kernel can hang or end the one it runs in.

In: a job. Out: a verdict. A child that says nothing new for LIMIT_S seconds is killed, and the
kernel that it was at is out, as is the one at which a child died; another child goes on with the
rest. What was said before counts. This process itself runs no kernel.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from llama.ops.triton import check
from llama.ops.triton.check import Job
from llama.ops.triton.tiles import Choice

CHILD = ("-m", "llama.ops.triton.check")
START_S = 60.0  # until a child's first word, for which it loads torch
LIMIT_S = 60.0  # until its next one, for which it compiles and checks a part of a kernel
MAX_CHILDREN = 4
_PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Verdict:
    """Why each kernel that was checked must not be used, None where it may, and chosen tiles.

    is_final: a later check would say the same; not so where memory was short or no child ran.
    """

    reasons: dict[str, str | None]
    tiles: list[Choice]
    is_final: bool = True

    @property
    def passed(self) -> list[str]:
        return [name for name, reason in self.reasons.items() if reason is None]

    @property
    def dropped(self) -> dict[str, str]:
        return {name: reason for name, reason in self.reasons.items() if reason is not None}


def measure(job: Job, command: Sequence[str] = ()) -> Verdict:
    """Check the job's kernels in children, at most MAX_CHILDREN one after the other.

    command: what follows Python's name there, where it is not CHILD.
    """
    print(f"llama: checking the kernels of {job.device}, once on this machine ...", file=sys.stderr)
    reasons: dict[str, str | None] = {}
    choices: list[Choice] = []
    is_final = True
    for _ in range(MAX_CHILDREN):
        left = tuple(name for name in job.names if name not in reasons)
        if not left:
            break
        rest = replace(job, names=left)
        records, end = _run_child([sys.executable, *(command or CHILD), rest.to_json()])
        for record in records:
            if record.get("kernel") in left:
                reasons[record["kernel"]] = record["reason"]
                choices += record.get("tiles", [])
                is_final &= record.get("is_final", True)
        if not any(record.get("started") for record in records):
            reasons |= dict.fromkeys(left, end)  # the child itself cannot run
            is_final = False
        elif end and (at := next((name for name in left if name not in reasons), None)):
            reasons[at] = end
    for name in job.names:
        reasons.setdefault(name, f"not checked: {MAX_CHILDREN} checks have ended before it")
    return Verdict(reasons, choices, is_final)


def _run_child(command: list[str]) -> tuple[list[dict[str, Any]], str]:
    """What a child has printed, and how it ended, "" where another should go on or all is said."""
    paths = [str(_PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONSAFEPATH": "1",  # a folder named llama in the current one must not hide this package
    }
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment,
                start_new_session=True,
            )  # fmt: skip
        except OSError as e:
            return [], f"the check could not be started: {e}"
        try:
            in_time = _wait(child, out)
        finally:
            _end(child)
        return _records(out), _how_it_ended(child, in_time, err)


def _wait(child: "subprocess.Popen[bytes]", out: IO[bytes]) -> bool:
    """Until the child ends: True. False where it has printed nothing new for too long."""
    printed, since = 0, time.monotonic()
    while time.monotonic() - since < (LIMIT_S if printed else START_S):
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.1)
            return True
        size = os.fstat(out.fileno()).st_size
        if size > printed:
            printed, since = size, time.monotonic()
    return False


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Kill the child, if it lives, and the compilers that it has started."""
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it; it is left then
        child.wait(10)


def _records(out: IO[bytes]) -> list[dict[str, Any]]:
    """The whole lines of JSON that the child has printed."""
    out.seek(0)
    records = []
    for line in out.read().splitlines(keepends=True):
        with contextlib.suppress(ValueError):
            record = json.loads(line) if line.endswith(b"\n") else None
            if isinstance(record, dict):
                records.append(record)
    return records


def _how_it_ended(child: "subprocess.Popen[bytes]", in_time: bool, err: IO[bytes]) -> str:
    if not in_time:
        return f"the check of it did not end within {LIMIT_S:g} s"
    code = child.returncode
    if code in (0, check.LOST):
        return ""
    err.seek(0)
    last = err.read().decode(errors="replace").strip().splitlines()[-1:]
    if code < 0:
        return f"the check was ended by {signal.Signals(-code).name}"
    return f"the check ended with exit code {code}: {''.join(last)[:300]}"
