"""The set of kernels that a model may run, and the errors of those that fail."""

import subprocess

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from llama.kernels.cuda.launch import launcher
from llama.ops.kernels import KernelError


@pytest.mark.parametrize(
    "error",
    [
        CompilationError("src", None, "no such function"),
        OutOfResources(300_000, 232_448, "shared memory"),
        PTXASError("ptxas failed"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("PassManager::run failed"),
        PermissionError("/home/user/.triton/cache"),
        subprocess.CalledProcessError(1, "gcc"),
    ],
    ids=repr,
)
def test_failures_of_a_kernel_are_caught_by_type(error):
    with pytest.raises(KernelError, match=str(error).partition("\n")[0][:10]):
        raising(error)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), AssertionError("shape"), TypeError("x")],
    ids=repr,
)
def test_other_errors_are_not_taken_for_a_kernels(error):
    """Other errors are not attributed to a kernel; PyTorch's operators do not help if memory is
    short.
    """
    with pytest.raises(type(error)) as raised:
        raising(error)
    assert raised.value is error and not isinstance(error, KernelError)


@launcher
def raising(error: Exception) -> None:
    """Raise an error as a kernel's launch would."""
    raise error


def test_a_launch_in_a_launch_is_wrapped_once():
    outer = launcher(raising)
    with pytest.raises(KernelError) as raised:
        outer(RuntimeError("PassManager::run failed"))
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert not isinstance(raised.value.__cause__, KernelError)
