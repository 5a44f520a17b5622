"""python scripts/demo_model --out FOLDER --steps 2000: make the demo model again from nothing."""

import sys
from pathlib import Path

# Python puts this folder first on the path; the package `demo_model` lies beside it.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

import fire  # noqa: E402

from demo_model.train import train  # noqa: E402

fire.Fire(train)
