"""A virtual environment without the extra `test`, as a user's installation has it.

Input: a folder, and the extras to install. Output: an environment there. Its packages are links to
those of the environment that runs the tests, so that nothing is downloaded.
"""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers.launch import REPO

_OWN = "llama-runtime"


def _requirements(wanted: Requirement) -> list[Requirement]:
    """Return what a distribution with these extras requires on this machine."""
    if wanted.name == _OWN:  # The installed metadata may be older than this checkout.
        project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
        texts = [*project["dependencies"]]
        for extra in wanted.extras:
            texts += project["optional-dependencies"][extra]
        needed = [Requirement(text) for text in texts]
        return [x for x in needed if x.marker is None or x.marker.evaluate()]
    needed = [Requirement(text) for text in distribution(wanted.name).requires or []]
    extras = [{"extra": name} for name in ("", *wanted.extras)]
    return [x for x in needed if x.marker is None or any(map(x.marker.evaluate, extras))]


def _closure(extras: str) -> list[Distribution]:
    """Return the distributions that this project with these extras requires, without itself."""
    todo = [Requirement(f"{_OWN}[{extras}]" if extras else _OWN)]
    seen: set[str] = set()
    found: dict[str, Distribution] = {}
    while todo:
        wanted = todo.pop()
        if str(wanted) in seen:
            continue
        seen.add(str(wanted))
        try:
            todo += _requirements(wanted)
        except PackageNotFoundError:  # an optional wheel of another platform
            continue
        if wanted.name != _OWN:
            found[canonicalize_name(wanted.name)] = distribution(wanted.name)
    return list(found.values())


def lean_environment(folder: Path, extras: str = "") -> None:
    """Make an environment in `folder` that has the package of this checkout with `extras`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for package in _closure(extras):
        for file in package.files or ():
            top = file.parts[0]
            source = Path(str(package.locate_file(top)))
            if top not in ("..", "__pycache__") and not (site / top).exists():
                os.symlink(source, site / top, target_is_directory=source.is_dir())
    (site / "checkout.pth").write_text(f"{REPO}\n")
    command = folder / "bin" / "llama"
    command.write_text(
        f"#!{folder / 'bin' / 'python'}\nimport sys\nfrom llama.__main__ import main\n"
        "sys.exit(main())\n"
    )
    command.chmod(0o755)
