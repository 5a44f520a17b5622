"""Runs `llama serve`, which writes and reads the KV pages of every prompt, however short.

`SLOW_READS_S` in the environment is the time that each read takes longer, as on a slow disk.
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

if __name__ == "__main__":
    always()
    kv_writer._DAY_LIMITS = 1000
    if seconds := float(os.environ.get("SLOW_READS_S", "0")):
        POLICY.min_gain = DiskPolicy.min_gain
        read = os.preadv

        def slow_read(*arguments):
            time.sleep(seconds)
            return read(*arguments)

        os.preadv = slow_read
    sys.exit(main())
