"""From the C++ files beside it to functions that can be called: compiled on first use.

`kernels()` gives the loaded library, or None, and the ops then run their torch body; `call` runs
one of its functions. Each CPU has its own, kept in ~/.cache/llama (or $XDG_CACHE_HOME/llama),
readable and writable by its owner alone, under a name made from all that it depends on. Needs g++
and an x86-64 CPU with AVX2. It knows nothing of what the kernels compute.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path(__file__).parent  # of the sources, *.cpp and *.h
# One rounding for a multiply and its add, everywhere: a row's bytes may not hang on its batch.
_COMPILE = "-O3 -march=native -std=c++17 -ffp-contract=fast -fno-exceptions -fPIC -fopenmp".split()
# No -fopenmp here: a second OpenMP runtime beside torch's would bring threads of its own, which
# fight with torch's for the cores. The names are found in the runtime that torch has loaded.
_LINK = "-shared -nodefaultlibs -lc".split()
_SUFFIXES = (".cpp", ".h")


@functools.cache
def cpu_flags() -> frozenset[str]:
    """What the CPU can do, in Linux's words; empty on other systems."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return frozenset()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return frozenset(next((x for x in lines if x.startswith("flags")), "").split())


@functools.cache
def kernels() -> ctypes.CDLL | None:
    """The compiled kernels; None on a CPU that they are not for, or after a warning."""
    if not cpu_flags() >= {"avx2", "fma"}:
        return None
    try:
        return load(cache_folder())
    except (OSError, subprocess.SubprocessError) as e:
        detail = str(getattr(e, "stderr", None) or e)[:500]
        warnings.warn(
            f"the CPU kernels could not be built, and torch's slower ones are used: {detail}",
            stacklevel=2,
        )
        return None


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "llama"


def load(folder: Path) -> ctypes.CDLL:
    """The library from `folder`, built if it is not there whole. OSError or SubprocessError."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler: install g++")
    name = f"{_fingerprint(compiler)}.so"
    try:
        _make_private(folder)
    except OSError:  # no home, or one that cannot be written: build for this process alone
        with tempfile.TemporaryDirectory() as own:
            return ctypes.CDLL(str(_build(compiler, Path(own) / name)))
    path = folder / name
    return ctypes.CDLL(str(path if _is_whole(path) else _build(compiler, path)))


def _fingerprint(compiler: str) -> str:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, timeout=60, check=True
    ).stdout
    sources = [path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.suffix in _SUFFIXES]
    parts = (*sources, version, *_COMPILE, *_LINK, *sorted(cpu_flags()))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _make_private(folder: Path) -> None:
    """What lies here is run: OSError unless it is ours to write, and nobody else's."""
    if not folder.is_absolute():
        raise FileNotFoundError(f"{folder}: this user has no home")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022 or not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} is not this user's alone")


def _build(compiler: str, path: Path) -> Path:
    """Compile to `path`, which appears whole or not at all: several ranks may come here at once."""
    with tempfile.TemporaryDirectory(dir=path.parent) as own:
        library = Path(own) / "kernels.so"
        objects = {str(source): f"{own}/{source.stem}.o" for source in FOLDER.glob("*.cpp")}
        with ThreadPoolExecutor() as pool:
            commands = [[*_COMPILE, "-c", source, "-o", made] for source, made in objects.items()]
            list(pool.map(functools.partial(_run, compiler), commands))
        _run(compiler, [*objects.values(), *_LINK, "-o", str(library)])
        content = library.read_bytes()
        # A loader does not mind bytes behind the end; these show that nothing was cut off.
        library.write_bytes(content + hashlib.sha256(content).digest())
        os.replace(library, path)
    return path


def _is_whole(path: Path) -> bool:
    """Loading half a file would end the process with SIGBUS."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _run(compiler: str, arguments: list[str]) -> None:
    subprocess.run([compiler, *arguments], capture_output=True, text=True, timeout=300, check=True)


def has_kernel(*tensors: Tensor) -> bool:
    """Whether kernels take them: bf16 on the CPU, with rows of a multiple of 32 numbers."""
    for x in tensors:
        if x.dtype is not torch.bfloat16 or x.device.type != "cpu" or x.shape[-1] % 32:
            return False
    return kernels() is not None


_BF16, _F32, _I64, _U8 = torch.bfloat16, torch.float32, torch.int64, torch.uint8
# The C functions: what each returns, and its arguments, a dtype for a tensor that holds it. Every
# tensor is contiguous and on the CPU. Functions that return None take the number of threads too.
SIGNATURES: dict[str, tuple[type | None, tuple[torch.dtype | type, ...]]] = {
    "attention_workspace": (int, (_I64, _I64, int, int, int, int)),
    "paged_attention_bf16": (
        None,
        (_BF16, _BF16, _I64, _I64, _I64, _BF16, _U8, int, int, int, int, int, int, int, float),
    ),
    "rms_norm_bf16": (None, (_BF16, _BF16, _BF16, int, int, float)),
    "silu_mul_bf16": (None, (_BF16, _BF16, int, int)),
    "rope_and_store_bf16": (
        None,
        (_BF16, torch.complex64, _BF16, _I64, _BF16, int, int, int, int, int),
    ),
    "pack_bf16": (None, (_BF16, _U8, int, int)),
    "pack_int8": (None, (_BF16, torch.int8, _F32, _U8, int, int)),
    "linear_bf16": (None, (_BF16, _BF16, Tensor, _F32, int, int, int, int)),
    "linear_int8": (None, (_BF16, torch.int8, _F32, Tensor, _F32, int, int, int, int)),
    "draw": (None, (_F32, _I64, _I64, _I64, int, int)),
}
_C_TYPES = {int: ctypes.c_long, float: ctypes.c_float, bool: ctypes.c_bool}


def call(name: str, *args: Tensor | int | float) -> int:
    """Run one of `kernels()` and return its result, 0 if it has none.

    TypeError if the arguments are not those of SIGNATURES. Checked at each call, as a wrong pointer
    or a missing argument would write anywhere. A function that computes runs on torch's threads.
    """
    returns, kinds = SIGNATURES[name]
    if len(args) != len(kinds) or not all(map(_is_of_kind, args, kinds)):
        raise TypeError(f"{name} takes {kinds}, got {[_describe(x) for x in args]}")
    function = getattr(kernels(), name)
    if function.argtypes is None:
        threads = (ctypes.c_int,) if returns is None else ()
        function.argtypes = [*(_C_TYPES.get(kind, ctypes.c_void_p) for kind in kinds), *threads]
        function.restype = returns and _C_TYPES[returns]
    values = [x.data_ptr() if isinstance(x, Tensor) else x for x in args]
    if returns is None:
        values.append(torch.get_num_threads())
    return function(*values) or 0


def _is_of_kind(value: Tensor | int | float, kind: torch.dtype | type) -> bool:
    if not isinstance(value, Tensor):
        return type(value) is kind
    kinds = (value.dtype, Tensor)
    return kind in kinds and value.device.type == "cpu" and value.is_contiguous()


def _describe(value: Tensor | int | float) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    layout = "contiguous" if value.is_contiguous() else "strided"
    return f"{layout} {value.dtype} on {value.device}"
