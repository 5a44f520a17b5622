"""The command `python scripts/bench`; with --help it shows its commands and all their flags."""

import sys
from pathlib import Path

# Python puts this folder first on the path; the package `bench` and the runtime lie above it.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.commands import main  # noqa: E402

sys.exit(main())
