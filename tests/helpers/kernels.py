"""Whether the CPU kernels can be compiled and run here, and which bodies of them there are; and the
GPU's, for Triton's interpreter."""

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
KERNELS_RUN = HAS_KERNELS and os.environ.get(native.VARIABLE) != "none"  # nobody turned them off

_HEADER = Path(__file__).resolve().parent / "amx_emulated.h"  # in place of AMX's tiles
# g++ looks for it here. Its path among the flags would be part of the name that the cache goes by,
# and every checkout would compile for half a minute.
_USERS = [os.environ["CPATH"]] if os.environ.get("CPATH") else []
os.environ["CPATH"] = os.pathsep.join([str(_HEADER.parent), *_USERS])
_AVX512_BF16 = next(x for x in INSTRUCTION_SETS if x.name == "avx512_bf16")
EMULATED_AMX = InstructionSet(  # no variable of it is shared between libraries
    "amx_emulated",
    (*_AVX512_BF16.flags, "-D__AMX_TILE__", "-D__AMX_BF16__", "-fno-gnu-unique",
     "-include", _HEADER.name),
    _AVX512_BF16.needs,
)  # fmt: skip
BODIES = {x.name: x for x in (*INSTRUCTION_SETS, EMULATED_AMX)}


def folder_of(body: InstructionSet) -> Path:
    """The user's cache. Where a header stands for AMX's tiles, a folder of that header's contents,
    which are not in the name that the cache goes by."""
    if body is not EMULATED_AMX:
        return native.cache_folder()
    return (
        native.cache_folder() / f"emulated-{hashlib.sha256(_HEADER.read_bytes()).hexdigest()[:16]}"
    )


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """A body, compiled once."""
    return native.load(folder_of(BODIES[name]), BODIES[name])
