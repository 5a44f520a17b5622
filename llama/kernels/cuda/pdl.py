"""Programmatic dependent launch: a kernel starts while the previous kernel on its stream ends.

In: the device of a launch. Out: the options of the launch, and what the kernel does at its start.
The launch of a kernel, and the loads of its first weights, overlap with the end of its predecessor
(CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization").

A kernel that is launched with these options starts with

    if PDL:
        launch_dependents()
        wait_for_dependency()

in every program, before it reads or writes anything that another kernel writes or reads. Weights,
which no kernel writes, may be loaded before. Each kernel waits until its predecessor has ended,
which had waited for its own predecessor, so that the order of the stream is kept.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

_MIN_CAPABILITY = (9, 0)  # Hopper


@functools.cache
def pdl_options(device: torch.device) -> dict[str, Any]:
    """Return the options of a kernel's launch; none where the device cannot launch so."""
    if device.type != "cuda" or torch.version.hip is not None:
        return {}
    if torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return {}
    return {"launch_pdl": True, "PDL": True}


@triton.jit
def launch_dependents() -> None:
    """Allow the next kernel to start once all programs of this one have called this or ended."""
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_dependency() -> None:
    """Wait until the previous kernel has ended, so that what it wrote can be read."""
    tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(pointers: tl.tensor) -> None:
    """Read the lines of 128 bytes at these addresses into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
