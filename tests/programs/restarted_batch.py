"""`llama batch`, of which rank 1 is killed as it writes its tenth result, at the first start.

What test_machines.py runs on every rank with --max-restarts. Arguments: those of the command.
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
    """The other rank is to have its part, however busy the machine is."""
    append(self, *args)
    time.sleep(0.05)


if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    is_faulty = os.environ["RANK"] == "1"
    Results.append = append_and_die if is_faulty else append_slowly  # type: ignore[assignment]
sys.exit(main(["batch", *sys.argv[1:]]))
