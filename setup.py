"""Adds to the package what only a built one has: compiled CPU kernels, and the demo model.

pyproject.toml has everything else. On Linux x86-64 with g++ the wheel holds one library per
instruction set, so that users need no compiler; elsewhere it holds none. An editable install gets
neither: a checkout compiles the kernels at first use, and has the demo in checkpoints/.
"""

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def kernel_build() -> ModuleType:
    """llama.ops.cpu.build by its path: to import the package needs torch, which may be missing."""
    path = ROOT / "llama" / "ops" / "cpu" / "build.py"
    spec = importlib.util.spec_from_file_location("kernel_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILD = kernel_build()
COMPILER = BUILD.find_compiler() if BUILD.is_supported_system() else None


class BuildWithData(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "llama"
        demo = ROOT / "checkpoints" / "demo"
        if demo.is_dir():
            shutil.copytree(demo, package / "data" / "demo", dirs_exist_ok=True)
        for instruction_set in BUILD.INSTRUCTION_SETS if COMPILER else ():
            if BUILD.accepts(COMPILER, instruction_set):
                path = package / "ops" / "cpu" / BUILD.library_name(instruction_set)
                BUILD.build(COMPILER, instruction_set, path)


class PlatformWheel(bdist_wheel):
    """Any Python 3 on this platform: the libraries know nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        """Whether the package belongs to a platform: setuptools does not know of our libraries."""
        return COMPILER is not None


setup(
    distclass=PlatformDistribution,
    cmdclass={"build_py": BuildWithData, "bdist_wheel": PlatformWheel},
)
