"""The CPU kernels as functions to call: a library from the package, or compiled at first use.

`kernels()` returns the loaded library, or None, and the ops then run their torch body. `call` runs
one of its functions. A wheel has a library per instruction set. A checkout compiles the library for
this CPU, which needs g++, and stores it in ~/.cache/llama (or $XDG_CACHE_HOME/llama), where this
user alone can write. LLAMA_CPU_KERNELS names one instruction set, or none.
"""

import contextlib
import ctypes
import functools
import logging
import os
import shutil
import stat
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from llama.common.openmp import share_runtime
from llama.kernels.cpu import build, constants
from llama.kernels.cpu.build import INSTRUCTION_SETS, InstructionSet

VARIABLE = "LLAMA_CPU_KERNELS"
_LOGGER = logging.getLogger(__name__)
_COMPILE_S = 1200.0  # the time that a process waits for another to compile
_LOCK_POLL_S = 0.1
_MAX_MESSAGE = 500  # characters of the compiler's output in a warning


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return what the CPU can do, as Linux names it; nothing on other systems."""
    if not build.is_supported_system():
        return frozenset()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((x for x in lines if x.startswith(("flags", "Features"))), "")
    return frozenset(flags.split())


@functools.cache
def kernels() -> ctypes.CDLL | None:
    """Return the kernels for this CPU.

    None if there are none for it, if LLAMA_CPU_KERNELS says so, or, after a warning, if they cannot
    be compiled.
    """
    allowed = allowed_instruction_sets()
    if not allowed:
        return None
    share_runtime()
    shipped = [build.FOLDER / build.library_name(x) for x in allowed]
    path = next((path for path in shipped if path.exists()), None)
    if path is not None:
        return checked(ctypes.CDLL(str(path)))
    try:
        return checked(_compiled(allowed))
    except (OSError, subprocess.SubprocessError) as e:
        detail = str(getattr(e, "stderr", None) or e)[:_MAX_MESSAGE]
        warnings.warn(
            f"the CPU kernels could not be compiled, so PyTorch's slower operators run: {detail}",
            stacklevel=2,
        )
        return None


def checked(library: ctypes.CDLL) -> ctypes.CDLL:
    """Return the library; RuntimeError where its constants are not those of constants.py.

    A library of other sources would read one format as another. It takes 20 microseconds.
    """
    value_of = library.constant_value
    value_of.argtypes = [_CString]
    value_of.restype = ctypes.c_long
    for name, value in constants.ALL.items():
        compiled = value_of(name)
        if compiled != value:
            raise RuntimeError(
                f"{library._name}: the CPU kernels were compiled with {name}={compiled}, and this "
                f"package has {value}: install the package again"
            )
    return library


def allowed_instruction_sets() -> list[InstructionSet]:
    """Return the instruction sets that may be used, the fastest first.

    They are all that this CPU has, or the one that LLAMA_CPU_KERNELS names. ValueError if the CPU
    does not have that one.
    """
    supported = [x for x in INSTRUCTION_SETS if cpu_flags() >= x.needs]
    supported.sort(key=lambda x: bool(x.slow_on) and cpu_flags() >= x.slow_on)
    name = os.environ.get(VARIABLE, "")
    if not name:
        return supported
    named = [x for x in supported if x.name == name]
    if name != "none" and not named:
        names = ", ".join(["none", *(x.name for x in supported)])
        raise ValueError(f"{VARIABLE}={name!r}: on this CPU give one of {names}")
    return named


def cache_folder() -> Path:
    """Return the folder where compiled kernels and results of checks are stored."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "llama"


def _compiled(allowed: list[InstructionSet]) -> ctypes.CDLL:
    """Return the library for the fastest instruction set that the compiler knows."""
    compiler = _compiler()
    known = (x for x in allowed if build.accepts(compiler, x))
    return load(cache_folder(), next(known, allowed[-1]))


def _compiler() -> str:
    compiler = build.find_compiler()
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler: install g++")
    return compiler


def load(folder: Path, instruction_set: InstructionSet) -> ctypes.CDLL:
    """Load the library from `folder`; compile it there first if it is missing or damaged.

    Of processes that need it at once, one compiles and the others wait.

    Raises:
        OSError: The compiler or the folder cannot be used.
        subprocess.SubprocessError: The compiler failed; `stderr` has its message.
    """
    compiler = _compiler()
    try:
        make_private(folder)
    except OSError as e:
        warnings.warn(
            "the CPU kernels are compiled again in every process, as they cannot be stored: "
            f"{e}. Set XDG_CACHE_HOME to a folder that only you can write.",
            stacklevel=2,
        )
        with tempfile.TemporaryDirectory() as temporary:
            return _load_or_build(Path(temporary), compiler, instruction_set)
    library = _load_stored(folder / _file_name(compiler, instruction_set))
    if library is not None:
        return library
    with locked(folder / "lock", _COMPILE_S):
        # Under the lock no build is running: folders of builds are those of killed processes.
        for abandoned in folder.glob("build-*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        return _load_or_build(folder, compiler, instruction_set)


def _file_name(compiler: str, instruction_set: InstructionSet) -> str:
    return f"{build.fingerprint(compiler, instruction_set)}.so"


def _load_or_build(folder: Path, compiler: str, instruction_set: InstructionSet) -> ctypes.CDLL:
    path = folder / _file_name(compiler, instruction_set)
    library = _load_stored(path)
    if library is not None:
        return library
    _LOGGER.warning(
        "llama: compiling the CPU kernels (%s), once on this machine ...", instruction_set.name
    )
    build.build(compiler, instruction_set, path)
    path.chmod(0o600)  # the umask may let the group write
    return ctypes.CDLL(str(path))


def _load_stored(path: Path) -> ctypes.CDLL | None:
    """Load a library of this user that is complete; None where there is none to be trusted.

    What is loaded is the file that was checked, whatever its name means by then.
    """
    try:
        file = open_private(path)
    except FileNotFoundError:
        return None
    except OSError as e:
        warnings.warn(f"stored CPU kernels are not used, but compiled again: {e}", stacklevel=2)
        return None
    with file:
        if not build.ends_in_digest(file.read()):
            return None
        # The linker takes files of one name for one library, so this descriptor is never closed.
        library = ctypes.CDLL(f"/proc/self/fd/{os.dup(file.fileno())}")
    library._name = str(path)  # the name that messages show
    return library


def open_private(path: Path) -> BinaryIO:
    """Open a file that is run or believed, in a folder of `make_private`.

    Raises:
        FileNotFoundError: There is none.
        PermissionError: It is no regular file, or this user does not own it or can not alone write
            it.
        OSError: It is a symbolic link, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would block
    file = os.fdopen(descriptor, "rb")
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{path} is not a regular file")
        _check_owner(path, status)
    except PermissionError:
        file.close()
        raise
    return file


def _check_owner(path: Path, status: os.stat_result) -> None:
    """Raise PermissionError unless this user owns a path and alone can write it."""
    if status.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    if status.st_mode & 0o022:
        raise PermissionError(f"other users can write to {path} (chmod go-w {path} mends that)")


def make_private(folder: Path) -> None:
    """Make a folder whose files are run; OSError unless this user owns it and alone can write."""
    if not folder.is_absolute():
        raise FileNotFoundError(f"{folder}: this user has no home")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder, folder.stat())
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} cannot be written")


@contextlib.contextmanager
def locked(path: Path, limit_s: float) -> Iterator[None]:
    """Hold a lock on a file; it ends with this process at the latest.

    Who has waited for `limit_s` goes on without the lock, and so does who is on a file system that
    is full or has no locks: a computation that is made twice does no harm.
    """
    import fcntl  # Linux has it; this module is imported everywhere

    deadline = time.monotonic() + limit_s
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(path, "w"))
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_LOCK_POLL_S)
        yield


def has_kernel(*tensors: Tensor) -> bool:
    """Return whether kernels take these tensors.

    They take bf16 on the CPU, with rows of a multiple of 32 elements.
    """
    for x in tensors:
        if x.dtype is not torch.bfloat16 or x.device.type != "cpu" or x.shape[-1] % 32:
            return False
    return kernels() is not None


Argument = Tensor | int | float | str
_Kind = torch.dtype | type  # a dtype for a tensor that holds it, or a type
_BF16 = torch.bfloat16
_F32 = torch.float32
_I32 = torch.int32
_I64 = torch.int64
_U8 = torch.uint8
_C64 = torch.complex64
# The tensors of layers_bf16.
_OF_LAYERS: tuple[_Kind, ...] = (
    _I64,
    _BF16,
    _BF16,
    _C64,
    Tensor,
    *[_I64] * 4,
    _U8,
    _I64,
    _BF16,
    _F32,
)
# The C functions: what each returns, and the kinds of its arguments. Every tensor is contiguous and
# on the CPU. Functions that return None also take the number of threads.
SIGNATURES: dict[str, tuple[type | None, tuple[_Kind, ...]]] = {
    "constant_value": (int, (str,)),
    "attention_workspace": (int, (_I64, _I64, int, int, int, int)),
    "paged_attention_bf16": (None, (_BF16, Tensor, *[_I64] * 3, _BF16, _U8, *[int] * 9, float)),
    "rms_norm_bf16": (None, (_BF16, _BF16, _BF16, int, int, float)),
    "silu_mul_bf16": (None, (_BF16, _BF16, int, int)),
    "rope_and_store_bf16": (None, (_BF16, _C64, Tensor, _I64, _BF16, *[int] * 7)),
    "pack_workspace": (int, (int, int)),
    "pack_bf16": (int, (_BF16, _U8, int, int, int)),
    "pack_rows": (None, (_BF16, Tensor, _F32, _U8, int, int)),
    "pack_nibbles": (None, (_U8, _I32, int, int)),
    "pack_six_bits": (None, (_U8, _I32, int, int)),
    "pack_bytes": (None, (_U8, _U8, int, int)),
    "pack_scales": (None, (_F32, _U8, _I64, int, int, int)),
    "pack_int4": (int, (_BF16, _I32, Tensor, int, int, int)),
    "gguf_type": (int, (str,)),
    "unpack_gguf": (None, (_U8, _U8, _F32, _F32, int, int)),
    "pack_gguf": (None, (Tensor, Tensor, _F32, _I64, *[int] * 11)),
    "linear_workspace": (int, (int, int, int)),
    "linear_packed": (None, (_BF16, _I64, Tensor, _U8, _I64, _F32, *[int] * 4, bool)),
    "exact_top": (None, (_F32, _I64, _F32, _I64, _F32, *[int] * 4)),
    "weight_rows": (int, (_I64, _I64, _BF16, int, int, int, int)),
    "layers_workspace": (int, (_I64, _I64, *[int] * 8)),
    "layers_bf16": (None, (*_OF_LAYERS, *[int] * 14, float, float)),
    "top_tokens": (None, (_F32, _F32, _I64, int, int)),
    "sample_workspace": (int, (int, int, int)),
    "sample_ids": (None, (_F32, _I64, _I64, _U8, int, int)),
    "shared_channel_bytes": (int, (int, int)),
    "shared_ring_bytes": (int, (int, int)),
    "shared_all_reduce": (int, (_I64, Tensor, int, int, int)),
    "shared_all_gather": (int, (_I64, Tensor, Tensor, int, _I64, int)),
    "shared_broadcast": (int, (_I64, Tensor, int, int)),
    "shared_send": (int, (_I64, _U8, int, int)),
    "shared_receive": (int, (_I64, _U8)),
    "shared_is_behind": (int, (_I64, int)),
}


class _CString(ctypes.c_char_p):
    """The C type of a `str` argument, which ctypes converts when it calls a function."""

    @classmethod
    def from_param(cls, value: str) -> Any:
        """Return the text as ctypes passes it: UTF-8 that ends with a zero byte."""
        return ctypes.c_char_p.from_param(value.encode())


_C_TYPES: dict[object, type] = {
    int: ctypes.c_long,
    float: ctypes.c_float,
    bool: ctypes.c_bool,
    str: _CString,
}


def call(name: str, *args: Argument) -> int:
    """Run one of the functions of `kernels()` and return its result, 0 if it has none.

    A function that returns None computes on as many threads as torch does. The arguments are
    checked at each call, as a wrong pointer or a missing argument would write anywhere.

    Raises:
        TypeError: The arguments are not those of SIGNATURES.
    """
    returns, kinds = SIGNATURES[name]
    values = _c_values(args, kinds)
    if values is None:
        raise TypeError(f"{name} takes {kinds}, got {[_describe(x) for x in args]}")
    function = getattr(kernels(), name)
    if function.argtypes is None:
        threads = (ctypes.c_int,) if returns is None else ()
        function.argtypes = [*(_C_TYPES.get(kind, ctypes.c_void_p) for kind in kinds), *threads]
        function.restype = returns and _C_TYPES[returns]
    if returns is None:
        values.append(torch.get_num_threads())
    return function(*values) or 0


def _c_values(args: Sequence[Argument], kinds: Sequence[_Kind]) -> list[int | float | str] | None:
    """Return what C gets for the arguments; None if they are not of these kinds.

    One loop checks and converts: a step passes some sixty arguments, and a function call for each
    of them takes several percent of the step of a small model.
    """
    if len(args) != len(kinds):
        return None
    values: list[int | float | str] = []
    for value, kind in zip(args, kinds, strict=True):
        if isinstance(value, Tensor):
            has_kind = kind is Tensor or kind is value.dtype
            if not (has_kind and value.is_cpu and value.is_contiguous()):
                return None
            values.append(value.data_ptr())
        elif type(value) is kind:
            values.append(value)
        else:
            return None
    return values


def _describe(value: Argument) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    layout = "contiguous" if value.is_contiguous() else "strided"
    return f"{layout} {value.dtype} on {value.device}"
