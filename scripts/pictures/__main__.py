"""python scripts/pictures: make the pictures of the first page again, from real runs.

In: the demo model, and the newest files of scripts/bench/results. Out: .github/images. `--only`
names some of them: terminal, page, bars. The page needs playwright (in the extra `test`) and a
Chromium, as the tests of the page do. Make the terminal's on a machine with nothing else to do: its
figures are shown.
"""

import sys
from collections.abc import Callable
from pathlib import Path

# Python puts this folder first on the path; the packages `pictures` and `llama` lie above it.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from llama.cli import run_script  # noqa: E402
from llama.cli.flags import Flag  # noqa: E402
from pictures import bars, page, terminal  # noqa: E402

_REPO = Path(__file__).resolve().parent.parent.parent
_MAKERS: dict[str, Callable[[Path], None]] = {
    "terminal": terminal.make,
    "page": page.make,
    "bars": bars.make,
}
_FLAGS = {
    "only": Flag(str, "A,B", f"of {', '.join(_MAKERS)}, these alone", "all"),
    "out": Flag(str, "DIR", "Folder to write", ".github/images"),
}


def main(only: str | None = None, out: str | None = None) -> None:
    """Make the pictures of the first page from real runs."""
    folder = Path(out) if out else _REPO / ".github/images"
    names = only.split(",") if only else list(_MAKERS)
    for name in names:
        if name not in _MAKERS:
            raise ValueError(f"there is no picture {name}: there are {', '.join(_MAKERS)}")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        _MAKERS[name](folder)


if __name__ == "__main__":
    run_script(main, _FLAGS)
