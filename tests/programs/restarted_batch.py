"""`llama batch`, whose rank 1 is killed when it writes its tenth result, at the first start.

test_machines.py runs it on every rank with --max-restarts. The arguments are the command's.
"""

import os
import signal
import sys
import time
from typing import Any

from llama.cli import main
from llama.cli.batch.files import Results

append, written = Results.append, 0


def append_and_die(self: Results, *args: Any) -> None:
    global written
    append(self, *args)
    written += 1
    if written == 10:
        os.kill(os.getpid(), signal.SIGKILL)


def append_slowly(self: Results, *args: Any) -> None:
    """Append slowly, so that the other rank gets its part, however busy the machine is."""
    append(self, *args)
    time.sleep(0.05)


if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    is_faulty = os.environ["RANK"] == "1"
    Results.append = append_and_die if is_faulty else append_slowly  # type: ignore[assignment]
sys.exit(main(["batch", *sys.argv[1:]]))
