"""The variants of the CPU kernels that can be compiled and run here, and the GPU kernels.

The GPU kernels run in Triton's interpreter.
"""

import ctypes
import functools
import hashlib
import os
from pathlib import Path

import torch

from llama.ops.cpu import build, native
from llama.ops.cpu.build import INSTRUCTION_SETS, InstructionSet
from llama.ops.triton.kernels import NAMES, KernelSet

SUPPORTED = [x for x in build.INSTRUCTION_SETS if native.cpu_flags() >= x.needs]
INTERPRETED = KernelSet(frozenset(NAMES), frozenset({torch.float16, torch.float32}))

HAS_KERNELS = bool(SUPPORTED) and build.find_compiler() is not None
# the environment does not disable them
KERNELS_RUN = HAS_KERNELS and os.environ.get(native.VARIABLE) != "none"

_HEADER = Path(__file__).resolve().parent / "amx_emulated.h"  # a replacement for AMX's tiles
_VNNI_HEADER = _HEADER.parent / "avx_vnni_emulated.h"
# g++ searches this path for the header. As a compiler flag, the path would be part of the cache's
# key, and every checkout would compile for half a minute.
_USERS = [os.environ["CPATH"]] if os.environ.get("CPATH") else []
os.environ["CPATH"] = os.pathsep.join([str(_HEADER.parent), *_USERS])
_AVX512_BF16 = next(x for x in INSTRUCTION_SETS if x.name == "avx512_bf16")
EMULATED_AMX = InstructionSet(  # a copy, so that libraries share no variable of it
    "amx_emulated",
    (*_AVX512_BF16.flags, "-fno-gnu-unique", "-include", _HEADER.name),
    _AVX512_BF16.needs,
)  # fmt: skip
_AVX2 = INSTRUCTION_SETS[-1]
# AVX_VNNI by the same instruction of AVX-512, in 256 bits
EMULATED_AVX_VNNI = InstructionSet(
    "avx_vnni_emulated",
    (*_AVX2.flags, "-D__AVXVNNI__", "-include", _VNNI_HEADER.name),
    _AVX2.needs | {"avx512vl", "avx512_vnni"},
)
_EMULATED = {EMULATED_AMX.name: _HEADER, EMULATED_AVX_VNNI.name: _VNNI_HEADER}
# They differ from others in the products of activations in int8 alone.
_VNNI = ("avx512_vnni", "avx_vnni", EMULATED_AVX_VNNI.name)
INTEGER_BODIES = {x.name: x for x in (*INSTRUCTION_SETS, EMULATED_AMX, EMULATED_AVX_VNNI)}
BODIES = {name: x for name, x in INTEGER_BODIES.items() if name not in _VNNI}


def folder_of(body: InstructionSet) -> Path:
    """Return the folder of the compiled library: normally the user's cache.

    Where a header replaces instructions, it is a folder named after the contents of that header,
    because the contents are not part of the cache's key.
    """
    header = _EMULATED.get(body.name)
    if header is None:
        return native.cache_folder()
    return (
        native.cache_folder() / f"emulated-{hashlib.sha256(header.read_bytes()).hexdigest()[:16]}"
    )


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """Return the library of an instruction set, compiled once."""
    return native.load(folder_of(INTEGER_BODIES[name]), INTEGER_BODIES[name])
