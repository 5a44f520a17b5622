"""The CPU kernels as functions to call: a library from the package, or compiled at first use.

`kernels()` gives the loaded library, or None, and the ops then run their torch body; `call` runs
one of its functions. A wheel holds a library per instruction set. A checkout compiles the one for
this CPU, which needs g++, and keeps it in ~/.cache/llama (or $XDG_CACHE_HOME/llama), where this
user alone can write. LLAMA_CPU_KERNELS names one body of them, or none.
"""

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from llama.ops.cpu import build, constants
from llama.ops.cpu.build import INSTRUCTION_SETS, InstructionSet

VARIABLE = "LLAMA_CPU_KERNELS"
_COMPILE_S = 1200.0  # that a process waits for another to compile


@functools.cache
def cpu_flags() -> frozenset[str]:
    """What the CPU can do, in Linux's words; empty on other systems."""
    if not build.is_supported_system():
        return frozenset()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return frozenset(next((x for x in lines if x.startswith("flags")), "").split())


@functools.cache
def kernels() -> ctypes.CDLL | None:
    """The kernels for this CPU; None on a CPU that they are not for, or after a warning."""
    supported = asked_for()
    shipped = [build.FOLDER / build.library_name(x) for x in supported]
    if path := next((path for path in shipped if path.exists()), None):
        return checked(ctypes.CDLL(str(path)))
    try:
        return checked(_compiled(supported)) if supported else None
    except (OSError, subprocess.SubprocessError) as e:
        detail = str(getattr(e, "stderr", None) or e)[:500]
        warnings.warn(
            f"the CPU kernels could not be built, and torch's slower ones are used: {detail}",
            stacklevel=2,
        )
        return None


def checked(library: ctypes.CDLL) -> ctypes.CDLL:
    """Return the library; RuntimeError where its constants are not those of constants.py.

    It takes 20 microseconds. A library of other sources would read one format as another.
    """
    value_of = library.constant_value
    value_of.argtypes = [ctypes.c_char_p]
    value_of.restype = ctypes.c_long
    for name, value in constants.ALL.items():
        if (compiled := value_of(name.encode())) != value:
            raise RuntimeError(
                f"{library._name}: the CPU kernels were compiled with {name}={compiled}, and this "
                f"package has {value}: install the package again"
            )
    return library


def asked_for() -> list[InstructionSet]:
    """The bodies that may run, the fastest first: all that this CPU can, or what the variable
    names. ValueError if that is not one of them."""
    supported = [x for x in INSTRUCTION_SETS if cpu_flags() >= x.needs]
    supported.sort(key=lambda x: bool(x.slow_on) and cpu_flags() >= x.slow_on)
    name = os.environ.get(VARIABLE, "")
    named = [x for x in supported if x.name == name]
    if name not in ("", "none") and not named:
        names = ", ".join(["none", *(x.name for x in supported)])
        raise ValueError(f"{VARIABLE}={name!r}: on this CPU give one of {names}")
    return named if name else supported


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "llama"


def _compiled(supported: list[InstructionSet]) -> ctypes.CDLL:
    compiler = _compiler()
    known = (x for x in supported if build.accepts(compiler, x))
    return load(cache_folder(), next(known, supported[-1]))


def _compiler() -> str:
    compiler = build.find_compiler()
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler: install g++")
    return compiler


def load(folder: Path, instruction_set: InstructionSet) -> ctypes.CDLL:
    """The library from `folder`, built there if it is missing or damaged.

    Processes that need it at once build it once: the others wait. Raises OSError, or
    subprocess.SubprocessError with the compiler's words.
    """
    compiler = _compiler()
    name = f"{build.fingerprint(compiler, instruction_set)}.so"

    def made_in(folder: Path) -> ctypes.CDLL:
        if not build.is_whole(folder / name):
            what = f"the CPU kernels ({instruction_set.name}), once on this machine"
            print(f"llama: compiling {what} ...", file=sys.stderr)
            build.build(compiler, instruction_set, folder / name)
        return ctypes.CDLL(str(folder / name))

    try:
        make_private(folder)
    except OSError as e:
        warnings.warn(
            f"the CPU kernels are compiled again in every process, as they cannot be kept: {e}. "
            "Set XDG_CACHE_HOME to a folder that only you can write.",
            stacklevel=2,
        )
        with tempfile.TemporaryDirectory() as temporary:
            return made_in(Path(temporary))
    if build.is_whole(folder / name):
        return made_in(folder)
    with locked(folder / "lock", _COMPILE_S):
        for left in folder.glob("build-*"):  # by builds that were killed; none can be running
            shutil.rmtree(left, ignore_errors=True)
        return made_in(folder)


def make_private(folder: Path) -> None:
    """Libraries in this folder are run: OSError unless this user owns it and alone can write."""
    if not folder.is_absolute():
        raise FileNotFoundError(f"{folder}: this user has no home")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    if status.st_mode & 0o022:
        raise PermissionError(f"other users can write to {folder} (chmod 700 mends that)")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} cannot be written")


@contextlib.contextmanager
def locked(path: Path, limit_s: float) -> Iterator[None]:
    """Hold a lock, which ends with its holder; who has waited for too long goes on without, as
    does who is on a file system that has none, or is full."""
    import fcntl  # Linux has it; this module is imported everywhere

    deadline = time.monotonic() + limit_s
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            file = held.enter_context(open(path, "w"))
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.1)
        yield


def has_kernel(*tensors: Tensor) -> bool:
    """Whether kernels take them: bf16 on the CPU, with rows of a multiple of 32 numbers."""
    for x in tensors:
        if x.dtype is not torch.bfloat16 or x.device.type != "cpu" or x.shape[-1] % 32:
            return False
    return kernels() is not None


Argument = Tensor | int | float | str
_BF16, _F32, _I64, _U8 = torch.bfloat16, torch.float32, torch.int64, torch.uint8
# The C functions: what each returns, and its arguments, a dtype for a tensor that holds it. Every
# tensor is contiguous and on the CPU. Functions that return None take the number of threads too.
SIGNATURES: dict[str, tuple[type | None, tuple[torch.dtype | type, ...]]] = {
    "attention_workspace": (int, (_I64, _I64, int, int, int, int)),
    "paged_attention_bf16": (None, (_BF16, Tensor, *[_I64] * 3, _BF16, _U8, *[int] * 8, float)),
    "rms_norm_bf16": (None, (_BF16, _BF16, _BF16, int, int, float)),
    "silu_mul_bf16": (None, (_BF16, _BF16, int, int)),
    "rope_and_store_bf16": (None, (_BF16, torch.complex64, Tensor, _I64, _BF16, *[int] * 7)),
    "pack_workspace": (int, (int, int)),
    "pack_bf16": (int, (_BF16, _U8, int, int, int)),
    "pack_rows": (None, (_BF16, Tensor, _F32, _U8, int, int)),
    "pack_nibbles": (None, (_U8, torch.int32, int, int)),
    "pack_six_bits": (None, (_U8, torch.int32, int, int)),
    "pack_bytes": (None, (_U8, _U8, int, int)),
    "pack_scales": (None, (_F32, _U8, _I64, int, int, int)),
    "pack_int4": (int, (_BF16, torch.int32, Tensor, int, int, int)),
    "constant_value": (int, (str,)),
    "gguf_type": (int, (str,)),
    "unpack_gguf": (None, (_U8, _U8, _F32, _F32, int, int)),
    "pack_gguf": (None, (Tensor, Tensor, _F32, _I64, *[int] * 11)),
    "linear_workspace": (int, (int, int, int)),
    "linear_packed": (None, (_BF16, _I64, Tensor, _U8, int, int, int, bool)),
    "weight_rows": (int, (_I64, _I64, _BF16, int, int, int, int)),
    "layers_workspace": (int, (_I64, _I64, *[int] * 8)),
    "layers_bf16": (
        None,
        (_I64, _BF16, _BF16, torch.complex64, Tensor, _I64, _I64, _I64, _I64, _U8)
        + (*[int] * 13, float, float),
    ),
    "top_tokens": (None, (_F32, _F32, _I64, int, int)),
    "sample_workspace": (int, (int, int, int)),
    "sample_ids": (None, (_F32, _I64, _I64, _U8, int, int)),
    "shared_channel_bytes": (int, (int, int)),
    "shared_ring_bytes": (int, (int, int)),
    "shared_all_reduce": (int, (_I64, Tensor, int, int, int)),
    "shared_all_gather": (int, (_I64, Tensor, Tensor, int, int, int)),
    "shared_broadcast": (int, (_I64, Tensor, int, int)),
    "shared_send": (int, (_I64, _U8, int, int)),
    "shared_receive": (int, (_I64, _U8)),
    "shared_is_behind": (int, (_I64, int)),
}
_C_TYPES: dict[object, type] = {
    int: ctypes.c_long,
    float: ctypes.c_float,
    bool: ctypes.c_bool,
    str: ctypes.c_char_p,
}


def call(name: str, *args: Argument) -> int:
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
    values = [_c_value(x) for x in args]
    if returns is None:
        values.append(torch.get_num_threads())
    return function(*values) or 0


def _c_value(value: Argument) -> int | float | bytes:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return value.encode() if isinstance(value, str) else value


def _is_of_kind(value: Argument, kind: torch.dtype | type) -> bool:
    if not isinstance(value, Tensor):
        return type(value) is kind
    kinds = (value.dtype, Tensor)
    return kind in kinds and value.device.type == "cpu" and value.is_contiguous()


def _describe(value: Argument) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    layout = "contiguous" if value.is_contiguous() else "strided"
    return f"{layout} {value.dtype} on {value.device}"
