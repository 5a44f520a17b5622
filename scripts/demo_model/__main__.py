"""python scripts/demo_model --out FOLDER --steps 2000: make the demo model again from nothing.

Flags in, the three files of a checkpoint out. What trains is imported once the flags are right.
"""

import sys
from pathlib import Path

# Python puts this folder first on the path; the packages `demo_model` and `llama` lie above it.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from llama.cli import run_script  # noqa: E402
from llama.cli.flags import Flag  # noqa: E402

_FLAGS = {
    "out": Flag(str, "DIR", "Folder to write; files of these names in it are replaced"),
    "start": Flag(str, "DIR", "Folder of a model to train further", "a new model"),
    "minutes": Flag(float, "X", "Duration of the training if steps is 0"),
    "steps": Flag(int, "N", "Optimizer steps; 0 trains by the clock"),
    "seed": Flag(int, "N", "Seed of the corpus and of the training"),
}


def main(
    out: str, start: str | None = None, minutes: float = 25.0, steps: int = 0, seed: int = 1
) -> None:
    """Make the demo checkpoint: corpus, tokenizer, training, Meta's files."""
    try:
        from demo_model.train import train
    except ModuleNotFoundError as e:
        raise ValueError(f"{e}: install the extra, pip install -e '.[train]'") from e
    train(out, start=start, minutes=minutes, steps=steps, seed=seed)


if __name__ == "__main__":
    run_script(main, _FLAGS)
