"""The Triton kernels on a CPU, through Triton's interpreter, which must be chosen before it loads.

float16 and float32 only: the interpreter multiplies the raw bits of bfloat16 (triton #11584).
"""

import os
from collections.abc import Iterator

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton's kernels need Triton")

from llama.ops.gpu import kernels

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def gpu_kernels() -> Iterator[None]:
    """The ops run their Triton kernels on tensors of the CPU."""
    kernels.use(CPU, kernels.NAMES, (torch.float16, torch.float32))
    yield
    kernels.use(CPU, ())


@pytest.fixture(params=[torch.float16, torch.float32], ids=["fp16", "fp32"])
def dtype(request) -> torch.dtype:
    return request.param
