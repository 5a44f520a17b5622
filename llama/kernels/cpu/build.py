"""Compiles the C++ files alongside it to one library per instruction set.

In: an instruction set and a path. Out: a library there. native.py compiles at first use and
scripts/wheel.py for a wheel, with the same flags, so that both give the same bits. This file
imports neither torch nor the package: a wheel is built where torch is not installed. Run as a
program, it is the parent of one compiler. It must not know where libraries are stored, or what the
kernels compute.
"""

import functools
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent  # the folder of the sources
_HASH_BYTES = 32
_LIMIT_S = 600.0  # the time that the compiler may take for one source
# Fused multiply-add everywhere: a row's result must not depend on the batch that it is in.
_COMPILE = "-O3 -std=c++17 -ffp-contract=fast -fno-exceptions -fPIC -fopenmp".split()
# No -fopenmp here: a second OpenMP runtime would bring threads of its own, which would compete with
# torch's for the cores. The symbols are found in the runtime that torch has loaded.
_LINK = "-shared -s -nodefaultlibs -lc".split()


class InstructionSet(NamedTuple):
    """A set of CPU instructions for which the kernels are compiled.

    Attributes:
        name: The value of LLAMA_CPU_KERNELS that selects it.
        flags: The compiler's flags.
        needs: The flags of /proc/cpuinfo that a CPU must have.
        slow_on: The flags of CPUs on which the other sets are faster.
        base: A smaller set, for which all sources but `sources` are compiled; None for all.
        sources: The stems of the sources that use what this set adds to `base`. The object code of
            the others is the same with the flags of either set. A source that is missing here
            is correct, but uses slower instructions.
        machine: The machines that have it, as `platform.machine` names them.
    """

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]
    slow_on: frozenset[str] = frozenset()
    base: "InstructionSet | None" = None
    sources: frozenset[str] = frozenset()
    machine: str = "x86_64"

    def flags_of(self, stem: str) -> tuple[str, ...]:
        """Return the compiler's flags for the source of that stem."""
        if self.base is None or stem in self.sources:
            return self.flags
        return self.base.flags_of(stem)


# The sources that use VNNI, and those that use pairs of bf16 or their tiles.
_INTEGER_PRODUCTS = frozenset({"integer_product", "linear"})
_PAIR_PRODUCTS = frozenset({"attention", "linear"})

_AVX2 = InstructionSet(
    "avx2",
    ("-march=haswell",),
    frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"}),
)
_AVX_VNNI = InstructionSet(
    "avx_vnni",
    (*_AVX2.flags, "-mavxvnni"),
    _AVX2.needs | {"avx_vnni"},
    base=_AVX2,
    sources=_INTEGER_PRODUCTS,
)
_AVX512 = InstructionSet(
    "avx512",
    ("-march=skylake-avx512",),
    _AVX2.needs | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
)
_AVX512_VNNI = InstructionSet(
    "avx512_vnni",
    (*_AVX512.flags, "-mavx512vnni"),
    _AVX512.needs | {"avx512_vnni"},
    base=_AVX512,
    sources=_INTEGER_PRODUCTS,
)
_AVX512_BF16 = InstructionSet(
    "avx512_bf16",
    (*_AVX512_VNNI.flags, "-mavx512bf16"),
    _AVX512_VNNI.needs | {"avx512_bf16"},
    # Sapphire Rapids and later Intels, where a virtual machine hides their tiles: a product of bf16
    # pairs takes as long as four of floats. (AMD's CPUs have no arch_capabilities.)
    frozenset({"avx512_fp16", "arch_capabilities"}),
    base=_AVX512_VNNI,
    sources=_PAIR_PRODUCTS,
)
_AMX = InstructionSet(
    "amx",
    (*_AVX512_BF16.flags, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    _AVX512_BF16.needs | {"amx_tile", "amx_bf16", "amx_int8"},
    base=_AVX512_BF16,
    sources=_PAIR_PRODUCTS,
)
# Every aarch64 CPU has NEON. A library cannot call the functions of libgcc that choose between two
# forms of an atomic operation, see _LINK.
_NEON = InstructionSet(
    "neon", ("-march=armv8-a", "-mno-outline-atomics"), frozenset({"asimd"}), machine="aarch64"
)
_NEON_DOTPROD = InstructionSet(
    "neon_dotprod",
    ("-march=armv8.2-a+dotprod",),
    _NEON.needs | {"atomics", "asimdrdm", "asimddp"},
    machine="aarch64",
)
_NEON_BF16 = InstructionSet(
    "neon_bf16",
    ("-march=armv8.2-a+dotprod+bf16+i8mm",),
    _NEON_DOTPROD.needs | {"bf16", "i8mm"},
    base=_NEON_DOTPROD,
    sources=_INTEGER_PRODUCTS | _PAIR_PRODUCTS,
    machine="aarch64",
)
INSTRUCTION_SETS = (  # the fastest first, for each machine
    _AMX,
    _AVX512_BF16,
    _AVX512_VNNI,
    _AVX512,
    _AVX_VNNI,
    _AVX2,
    _NEON_BF16,
    _NEON_DOTPROD,
    _NEON,
)


def is_supported_system() -> bool:
    """Return whether the kernels are for this system: Linux, where a long has 64 bits."""
    machines = {instruction_set.machine for instruction_set in INSTRUCTION_SETS}
    return sys.platform == "linux" and platform.machine() in machines


def find_compiler() -> str | None:
    """Return the path of the C++ compiler, or None."""
    return shutil.which("g++") or shutil.which("c++")


def library_name(instruction_set: InstructionSet) -> str:
    """Return the file name of a library that a wheel has alongside the sources."""
    return f"kernels.{instruction_set.name}.so"


def accepts(compiler: str, instruction_set: InstructionSet) -> bool:
    """Return whether the compiler knows the instruction set.

    avx512_bf16 needs g++ 10, avx_vnni and AMX g++ 11.
    """
    command = [compiler, *instruction_set.flags, "-x", "c++", "-E", os.devnull]
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def fingerprint(compiler: str, instruction_set: InstructionSet) -> str:
    """Return a name that is made of all that a library depends on."""
    flags = [(path.name, instruction_set.flags_of(path.stem)) for path in _sources()]
    sources = [path.read_bytes() for path in (*_sources(), *_headers())]
    digest = _digest(*sources, _version(compiler), *_COMPILE, *_LINK, *flags)
    return f"{instruction_set.name}-{digest}"


def build(
    compiler: str, instruction_set: InstructionSet, path: Path, objects: Path | None = None
) -> None:
    """Compile and link to `path`, which appears whole or not at all.

    The library ends in its SHA-256, see `is_whole`. Temporary files are alongside `path`, in a
    folder named build-*.

    Args:
        compiler: The C++ compiler.
        instruction_set: The instruction set of the library.
        path: The file to write.
        objects: A folder that keeps object files, so that libraries of several instruction sets
            share those that would be the same; by default each source is compiled.

    Raises:
        OSError: The compiler or the folder cannot be used.
        subprocess.SubprocessError: The compiler failed; `stderr` has its message.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as temporary:
        library = Path(temporary) / path.name
        compile_one = functools.partial(
            _object_of, compiler, instruction_set, temporary=Path(temporary), objects=objects
        )
        with ThreadPoolExecutor() as pool:
            made = list(pool.map(compile_one, _sources()))
        _run(compiler, *map(str, made), *_LINK, "-o", str(library))
        content = library.read_bytes()
        library.write_bytes(content + hashlib.sha256(content).digest())  # the loader ignores it
        os.replace(library, path)


def _object_of(
    compiler: str,
    instruction_set: InstructionSet,
    source: Path,
    *,
    temporary: Path,
    objects: Path | None,
) -> Path:
    """Return the object file of a source, from `objects` or compiled."""
    flags = instruction_set.flags_of(source.stem)
    made = temporary / f"{source.stem}.o"
    if objects is not None:
        contents = [path.read_bytes() for path in _read_by(source)]
        key = _digest(*contents, _version(compiler), *_COMPILE, *flags)
        kept = objects / f"{source.stem}-{key}.o"
        if kept.exists():
            return kept
    _run(compiler, *_COMPILE, *flags, "-c", str(source), "-o", str(made))
    if objects is not None:
        os.replace(made, kept)
        return kept
    return made


def _sources() -> list[Path]:
    return sorted(FOLDER.glob("*.cpp"))


def _headers() -> list[Path]:
    return sorted(FOLDER.glob("*.h"))


def _read_by(source: Path) -> list[Path]:
    """Return a source and the headers of its folder that it includes, directly or not."""
    found = [source]
    for path in found:  # grows while it is read
        names = re.findall(r'^ *# *include "(.+)"', path.read_text(), re.MULTILINE)
        headers = [FOLDER / name for name in names]
        found += [header for header in headers if header not in found]
    return found


def _version(compiler: str) -> bytes:
    command = [compiler, "--version"]
    return subprocess.run(command, capture_output=True, timeout=60, check=True).stdout


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def is_whole(path: Path) -> bool:
    """Return whether a library is there and complete.

    Half a library loads, and ends the process when the missing half is used (SIGBUS).
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return ends_in_digest(content)


def ends_in_digest(content: bytes) -> bool:
    """Return whether the content of a library is followed by its SHA-256, as `build` writes it."""
    return hashlib.sha256(content[:-_HASH_BYTES]).digest() == content[-_HASH_BYTES:]


def _run(compiler: str, *arguments: str) -> None:
    """Run the compiler, with all processes that it starts, until it ends or this process does."""
    command = [sys.executable, "-SE", __file__, compiler, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        assert process.stderr is not None
        message = process.stderr.read()
        code = process.wait()
    if code:
        raise subprocess.CalledProcessError(code, [compiler, *arguments], stderr=message)


def _run_while_parent_lives() -> int:
    """Run the command of `sys.argv` in this process group, which the parent's end kills.

    The parent holds the other end of standard input. A signal to the compiler alone would leave the
    processes that it has started.
    """
    threading.Thread(target=_end_at_eof, daemon=True).start()
    try:
        return subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL, timeout=_LIMIT_S).returncode
    except subprocess.TimeoutExpired as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os.killpg(0, signal.SIGKILL)
        return 1


def _end_at_eof() -> None:
    os.read(0, 1)  # the parent writes nothing
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(_run_while_parent_lives())
