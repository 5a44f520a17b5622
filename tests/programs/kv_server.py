"""Runs `llama serve`, which writes and reads the KV pages of every prompt, however short.

`SLOW_READS_S` and `SLOW_WRITES_S` in the environment are the times that each read or write takes
longer, as on a slow disk.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from helpers.kv_pages import always
from llama.cli import main
from llama.options.page_store import POLICY, DiskPolicy
from llama.storage import kv_writer


def slow_down(name: str, seconds: float) -> None:
    """Let each call of a function of `os` take longer."""
    call = getattr(os, name)

    def slow(*arguments):
        time.sleep(seconds)
        return call(*arguments)

    setattr(os, name, slow)


if __name__ == "__main__":
    always()
    kv_writer._DAY_LIMITS = 1000
    if seconds := float(os.environ.get("SLOW_READS_S", "0")):
        POLICY.min_gain = DiskPolicy.min_gain
        slow_down("preadv", seconds)
    slow_down("pwrite", float(os.environ.get("SLOW_WRITES_S", "0")))
    sys.exit(main())
