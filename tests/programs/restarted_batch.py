"""`llama batch`, of which rank 1 is killed as it writes its tenth result, at the first start.

What test_machines.py runs on every rank with --max-restarts. Arguments: those of the command.
"""

import os
import signal
import sys
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


if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    Results.append = append_and_die  # type: ignore[assignment,method-assign]
sys.exit(main(["batch", *sys.argv[1:]]))
