"""From the C++ files beside it to one library per instruction set: the flags, and the compiler.

The same flags are used at first use (native.py) and for the libraries in a wheel
(scripts/wheel.py), so that both give the same bits. This file imports neither torch nor the
package: a wheel is built where torch is not installed. It knows nothing of caches, or of what the
kernels compute.
"""

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent  # of the sources, *.cpp and *.h
_SUFFIXES = (".cpp", ".h")
# Fused multiply-add everywhere: a row's result must not depend on the batch that it is in.
_COMPILE = "-O3 -std=c++17 -ffp-contract=fast -fno-exceptions -fPIC -fopenmp".split()
# No -fopenmp here: a second OpenMP runtime beside torch's would bring threads of its own, which
# fight with torch's for the cores. The names are found in the runtime that torch has loaded.
_LINK = "-shared -s -nodefaultlibs -lc".split()


class InstructionSet(NamedTuple):
    """One body of the kernels: how it is compiled, and the /proc/cpuinfo flags that it needs; and
    flags of CPUs on which others are faster."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]
    slow_on: frozenset[str] = frozenset()


_AVX2 = InstructionSet(
    "avx2",
    ("-march=haswell",),
    frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"}),
)
_AVX512 = InstructionSet(
    "avx512",
    ("-march=skylake-avx512",),
    _AVX2.needs | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
)
_AVX512_BF16 = InstructionSet(
    "avx512_bf16",
    (*_AVX512.flags, "-mavx512bf16"),
    _AVX512.needs | {"avx512_bf16"},
    # Sapphire Rapids and later Intels, where a virtual machine hides their tiles: a product of bf16
    # pairs takes as long as four of floats. (AMD's CPUs have no arch_capabilities.)
    frozenset({"avx512_fp16", "arch_capabilities"}),
)
_AMX = InstructionSet(
    "amx",
    (*_AVX512_BF16.flags, "-mamx-tile", "-mamx-bf16"),
    _AVX512_BF16.needs | {"amx_tile", "amx_bf16"},
)
INSTRUCTION_SETS = (_AMX, _AVX512_BF16, _AVX512, _AVX2)  # the fastest first


def is_supported_system() -> bool:
    """Whether the kernels are for this system: Linux on x86-64, where a C long has 64 bits."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def find_compiler() -> str | None:
    return shutil.which("g++") or shutil.which("c++")


def library_name(instruction_set: InstructionSet) -> str:
    """The file name of a library that lies beside the sources, in a package built for users."""
    return f"kernels.{instruction_set.name}.so"


def accepts(compiler: str, instruction_set: InstructionSet) -> bool:
    """Whether the compiler knows the instruction set: g++ 10 knows avx512_bf16, g++ 11 AMX."""
    command = [compiler, *instruction_set.flags, "-x", "c++", "-E", os.devnull]
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def fingerprint(compiler: str, instruction_set: InstructionSet) -> str:
    """A name made of all that a library depends on."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, timeout=60, check=True
    ).stdout
    sources = [path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.suffix in _SUFFIXES]
    parts = (*sources, version, *_COMPILE, *_LINK, *instruction_set.flags)
    return f"{instruction_set.name}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"


def build(compiler: str, instruction_set: InstructionSet, path: Path) -> None:
    """Compile and link to `path`, which appears whole or not at all.

    The library ends in its SHA-256, see `is_whole`. Raises OSError, or subprocess.SubprocessError
    with the compiler's words. Temporary files lie beside `path`, in a folder named build-*.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as temporary:
        library = Path(temporary) / path.name
        objects = {str(source): f"{temporary}/{source.stem}.o" for source in FOLDER.glob("*.cpp")}
        compile_one = functools.partial(_run, compiler, *_COMPILE, *instruction_set.flags)
        with ThreadPoolExecutor() as pool:
            commands = [("-c", source, "-o", made) for source, made in objects.items()]
            list(pool.map(lambda arguments: compile_one(*arguments), commands))
        _run(compiler, *objects.values(), *_LINK, "-o", str(library))
        content = library.read_bytes()
        library.write_bytes(content + hashlib.sha256(content).digest())  # the loader ignores it
        os.replace(library, path)


def is_whole(path: Path) -> bool:
    """Whether the library is there and complete: to run half a file ends the process (SIGBUS)."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _run(compiler: str, *arguments: str) -> None:
    subprocess.run([compiler, *arguments], capture_output=True, text=True, timeout=600, check=True)
