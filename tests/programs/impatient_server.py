"""The program of server/test_split.py: `llama serve`, which gives up silent processes soon.

With NO_API_PROCESS in the environment, another program runs in their place, which ends at once.
"""

import os
import sys
from types import SimpleNamespace

from llama.cli import main
from llama.server import api_processes, engine_host
from llama.server.engine_host import EngineHost

if __name__ == "__main__":
    EngineHost.silence_s = 1.0
    if "NO_API_PROCESS" in os.environ:
        engine_host._MAX_BACKOFF_S = 0.01
        api_processes.sys = SimpleNamespace(executable="false")  # type: ignore[assignment]
    sys.exit(main())
