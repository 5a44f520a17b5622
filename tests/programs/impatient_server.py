"""The program of server/test_split.py: `llama serve`, which gives up silent processes soon."""

import sys

from llama.cli import main
from llama.server.engine_host import EngineHost

if __name__ == "__main__":
    EngineHost.silence_s = 1.0
    sys.exit(main())
