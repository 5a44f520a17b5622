"""The variants of the CPU kernels that can be compiled and run here, and the GPU kernels.

The GPU kernels run in Triton's interpreter.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from llama.kernels.cpu import build, native
from llama.kernels.cpu.build import INSTRUCTION_SETS, InstructionSet
from llama.kernels.cuda.launch import Sizes, Tile
from llama.kernels.cuda.table import NAMES, SCALED_NAMES, table
from llama.ops.kernels import Kernels

SUPPORTED = [x for x in build.INSTRUCTION_SETS if native.cpu_flags() >= x.needs]


def interpreted(
    tiles: Mapping[Sizes, Tile] | None = None,
    dtypes: Iterable[torch.dtype] = (torch.float16, torch.float32),
) -> Kernels:
    """Return all kernels of a GPU, which Triton's interpreter runs on the CPU."""
    return table({*NAMES, *SCALED_NAMES}, dtypes, tiles or {})


INTERPRETED = interpreted()

HAS_KERNELS = bool(SUPPORTED) and build.find_compiler() is not None
# the environment does not disable them
KERNELS_RUN = HAS_KERNELS and os.environ.get(native.VARIABLE) != "none"

_COMPILE_S = 600.0  # the time that a process waits for another to compile
_FOLDER = Path(__file__).resolve().parent
# g++ searches this path for the headers that replace instructions. As a compiler flag, the path
# would be part of the cache's key, and every checkout would compile for half a minute.
_USERS = [os.environ["CPATH"]] if os.environ.get("CPATH") else []
os.environ["CPATH"] = os.pathsep.join([str(_FOLDER), *_USERS])


def _emulated(like: InstructionSet, name: str, *flags: str, **changes: Any) -> InstructionSet:
    """Return an instruction set whose instructions a header of this folder replaces.

    A macro that nothing reads makes the header's contents part of the cache's key.
    """
    header = f"{name}.h"
    digest = hashlib.sha256((_FOLDER / header).read_bytes()).hexdigest()[:16]
    own = (*flags, "-include", header, f"-DHEADER_{digest}")
    return like._replace(name=name, flags=(*like.flags, *own), **changes)


_X86 = [x for x in INSTRUCTION_SETS if x.machine == "x86_64"]
_AMX, _AVX512_BF16, _, _, _AVX_VNNI, _AVX2 = _X86
EMULATED_AMX = _emulated(  # a copy, so that libraries share no variable of it
    _AVX512_BF16, "amx_emulated", "-fno-gnu-unique", base=_AVX512_BF16, sources=_AMX.sources
)
# AVX_VNNI by the same instruction of AVX-512, in 256 bits
EMULATED_AVX_VNNI = _emulated(
    _AVX2, "avx_vnni_emulated", "-D__AVXVNNI__",
    needs=_AVX2.needs | {"avx512vl", "avx512_vnni"}, base=_AVX2, sources=_AVX_VNNI.sources,
)  # fmt: skip
# They differ from others in the products of activations in int8 alone.
_VNNI = ("avx512_vnni", "avx_vnni", EMULATED_AVX_VNNI.name)
INTEGER_BODIES = {x.name: x for x in (*_X86, EMULATED_AMX, EMULATED_AVX_VNNI)}
BODIES = {name: x for name, x in INTEGER_BODIES.items() if name not in _VNNI}


@contextlib.contextmanager
def without_amx() -> Iterator[None]:
    """Run the kernels for AVX-512 on a CPU with AMX, where groups of activations are refused."""
    if [x.name for x in native.allowed_instruction_sets()[:1]] != [_AMX.name]:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.VARIABLE, _AVX512_BF16.name)
        native.kernels.cache_clear()
        yield
    native.kernels.cache_clear()


def can_run(body: InstructionSet) -> bool:
    """Return whether this CPU has the instructions, and the compiler knows them."""
    compiler = build.find_compiler()
    has_instructions = native.cpu_flags() >= body.needs
    return has_instructions and compiler is not None and build.accepts(compiler, body)


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """Return the library of an instruction set, compiled once.

    The libraries of the tests share object files, which are stored alongside them.
    """
    body = INTEGER_BODIES[name]
    path = path_of(body)
    if not build.is_whole(path):
        compiler = build.find_compiler()
        assert compiler is not None
        objects = objects_folder()
        with native.locked(path.parent / "lock", _COMPILE_S):  # as native.load does
            if not build.is_whole(path):
                build.build(compiler, body, path, objects)
                path.chmod(0o600)
    return native.load(path.parent, body)


def path_of(body: InstructionSet) -> Path:
    """Return the path of a compiled library in the user's cache."""
    compiler = build.find_compiler()
    assert compiler is not None
    return native.cache_folder() / f"{build.fingerprint(compiler, body)}.so"


def objects_folder() -> Path:
    """Return the folder of the object files that the libraries of the tests share."""
    for folder in (native.cache_folder(), native.cache_folder() / "objects"):
        native.make_private(folder)
    return folder
