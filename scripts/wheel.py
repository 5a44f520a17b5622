"""Build a wheel: add compiled CPU kernels and the demo model to the package.

In: setuptools' commands, which pyproject.toml points here. Out: on Linux with g++, one library per
instruction set of the table in llama/kernels/cpu/build.py that the compiler knows, so that users
need no compiler; elsewhere none. An editable install gets neither: a checkout compiles the kernels
at first use, and has the demo in checkpoints/.
"""

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent.parent


def kernel_build() -> ModuleType:
    """Load llama.kernels.cpu.build by its path, since importing the package needs torch."""
    path = ROOT / "llama" / "kernels" / "cpu" / "build.py"
    spec = importlib.util.spec_from_file_location("kernel_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILD = kernel_build()
COMPILER = BUILD.find_compiler() if BUILD.is_supported_system() else None


def put_library(instruction_set: Any, path: Path, objects: Path) -> None:
    """Compile a library to `path`, or copy it from the folder LLAMA_BUILT_KERNELS.

    The folder `objects` keeps object files, which several libraries share.

    That folder is a cache as native.py has it: a name contains a hash of all that the library
    depends on.
    """
    folder = os.environ.get("LLAMA_BUILT_KERNELS")
    kept = Path(folder or "", f"{BUILD.fingerprint(COMPILER, instruction_set)}.so")
    if folder and BUILD.is_whole(kept):
        shutil.copyfile(kept, path)
    else:
        BUILD.build(COMPILER, instruction_set, path, objects)


class BuildWithData(build_py):
    """Add the demo model and the compiled kernels to the package."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "llama"
        shutil.copytree(
            ROOT / "checkpoints" / "demo", package / "data" / "demo", dirs_exist_ok=True
        )
        with tempfile.TemporaryDirectory(dir=self.build_lib, prefix="objects-") as objects:
            for instruction_set in BUILD.INSTRUCTION_SETS if COMPILER else ():
                if BUILD.accepts(COMPILER, instruction_set):
                    path = package / "kernels" / "cpu" / BUILD.library_name(instruction_set)
                    put_library(instruction_set, path, Path(objects))


class PlatformWheel(bdist_wheel):
    """A wheel for any Python 3 on this platform: the libraries do not depend on Python."""

    def finalize_options(self) -> None:
        # setuptools does not know of our libraries: say that the package belongs to a platform.
        setattr(self.distribution, "has_ext_modules", lambda: COMPILER is not None)  # noqa: B010
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


class VisibleEditable(editable_wheel):
    """An editable install that type checkers and editors see: the checkout is a search path.

    By default, setuptools installs an import hook, which mypy and most editors do not run.
    """

    def initialize_options(self) -> None:
        super().initialize_options()
        self.mode = "compat"
