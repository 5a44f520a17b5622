"""The Triton kernels on a CPU, through Triton's interpreter, which tests/conftest.py selects.

The tests use float16 and float32 only: the interpreter multiplies the raw bits of bfloat16 (triton
#11584).
"""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

_LOOPS_OVER_LOADED_NUMBERS = ["test_attention.py", "test_layers.py"]

try:
    import triton
except ImportError:
    collect_ignore_glob = ["test_*.py"]
else:
    if "TRITON_INTERPRET" not in os.environ:
        collect_ignore_glob = ["test_*.py"]
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    # The interpreter of 3.6 fails there with NumPy 2.4: it converts an array to a Python int.
    collect_ignore = _LOOPS_OVER_LOADED_NUMBERS if version < (3, 7) else []


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> None:
    """Speed up Triton's interpreter.

    At each call of a kernel, and of each function in it, it looks up all names of triton.language
    that it replaces, which is a third of its time. They stay the same.
    """
    from triton import language
    from triton.runtime import interpreter

    @functools.cache
    def builtins_of(place: Any) -> list[tuple[str, Any]]:
        members = inspect.getmembers(place)
        return [(name, x) for name, x in members if language.core.is_builtin(x)]

    def patch_builtin(place: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins_of(place):
            if getattr(place, name) is member:  # not replaced yet
                interpreter._patch_attr(place, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


@pytest.fixture(scope="session", autouse=True)
def _right_conversions() -> None:
    """Let PyTorch convert bfloat16 to float32, and float32 to e4m3, in Triton's interpreter.

    The interpreter of 3.6 and 3.7 rounds ties to e4m3 upwards, loses the carry into the exponent,
    and reads subnormal numbers of bfloat16 as others.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(data: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        if (source, target) == (tl.float32, tl.float8e4nv):
            floats = torch.from_numpy(data.view(np.float32).copy())
            return floats.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if (source, target) == (tl.bfloat16, tl.float32):
            halves = torch.from_numpy(data.view(np.int16).copy())
            return halves.view(torch.bfloat16).float().numpy()
        return convert(data, source, target, mode)

    interpreter._convert_float = converted


@pytest.fixture(params=[torch.float16, torch.float32], ids=["fp16", "fp32"])
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture
def poisoned(monkeypatch) -> Callable[[], AbstractContextManager[None]]:
    """A context poisoned() in which new memory is full of NaN, which exposes missing writes."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **options: Any) -> Tensor:
            out = make(*args, **options)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        return made

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", filled(torch.empty))
            patch.setattr(torch, "empty_like", filled(torch.empty_like))
            patch.setattr(Tensor, "new_empty", filled(Tensor.new_empty))
            yield

    return context


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    """A list of the launched kernels, in order."""
    from llama.kernels.cuda import adapters, attention, elementwise, linear, quantized, scaled

    names: list[str] = []

    class Noted:
        def __init__(self, module: Any, name: str) -> None:
            self.name, self.kernel = name, getattr(module, name)

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            names.append(self.name)
            return self.kernel[grid]

    for module in (adapters, attention, elementwise, linear, quantized, scaled):
        for name in [x for x in vars(module) if x.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Noted(module, name))
    return names
