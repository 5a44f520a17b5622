"""The self-check with kernels that do nothing much, some of them faulty.

In: a job, as for llama.ops.triton.check. Each of its kernels has a case here; those named in FAULTS
give a wrong result, leave memory unwritten, raise, never end, or end the process.
"""

import os
import signal
import sys
import time
from functools import partial

import torch
from torch import Tensor

from llama.ops.triton import cases, check, kernels
from llama.ops.triton.cases import Case
from llama.ops.triton.kernels import NAMES, KernelSet

FAULTS = {
    "add_norm": "wrong",
    "rope_and_store": "killed",
    "silu_mul": "hangs",
    "linear": "none here",
    "sample": "unwritten",
}


def double(name: str, x: Tensor, kernels: KernelSet) -> Tensor:
    """An op that doubles numbers, with its kernel or without."""
    if not kernels.has(name, x):
        return 2 * x
    fault = FAULTS.get(name)
    out = torch.empty_like(x)
    out[: -1 if fault == "unwritten" else None] = 2 * x[: -1 if fault == "unwritten" else None]
    if fault == "wrong":
        out[0, 0] += 1
    if fault == "hangs":
        time.sleep(600)
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return out


def case_of(name, sizes, place):
    yield Case("three rows", partial(double, name), (place.normal(3, sizes.dim),))


if __name__ == "__main__":
    cases.CASES.update({name: partial(case_of, name) for name in NAMES if name != "linear"})
    kernels._LOGITS = torch.float16
    sys.exit(check.main(sys.argv[1:]))
