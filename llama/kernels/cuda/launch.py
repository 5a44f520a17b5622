"""Tiles, quantized weights and typed errors, which the launchers of all Triton kernels share.

In: what a launcher raises. Out: a `KernelError`, where PyTorch can go on in the kernel's place.

Nothing here imports Triton, which takes a second and is not installed everywhere.
"""

import functools
import sys
from collections.abc import Callable
from subprocess import SubprocessError
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from llama.ops.kernels import KernelError
from llama.ops.kv_cache import SCALED_DTYPE

Sizes = tuple[int, int, int, int]  # the weight's `ElementFormat`, N, K and M of a product
_MAX_DECODE_ROWS = 64  # rows of the largest tile of decode attention
_MAX_DECODE_QUERIES = 16  # queries of a sequence in such a tile

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def launcher(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a function that launches kernels, so that each of their failures is a `KernelError`.

    The passes of Triton's compiler and its calls of the driver raise plain RuntimeErrors, its cache
    on disk OSErrors, and the C compiler that builds a launcher SubprocessErrors. Subclasses of
    RuntimeError, such as torch's OutOfMemoryError, say something else and pass unchanged.
    """

    @functools.wraps(function)
    def launch(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if type(error) is RuntimeError or isinstance(error, (OSError, SubprocessError)):
                raise KernelError(str(error)) from error
            if _is_of_triton(error):
                raise KernelError(str(error)) from error
            raise

    return launch


def _is_of_triton(error: Exception) -> bool:
    """Return whether Triton itself raised an error: a kernel does not compile, or does not fit."""
    if "triton" not in sys.modules:
        return False
    from triton.errors import TritonError

    return isinstance(error, TritonError)


def does_not_fit(error: KernelError) -> bool:
    """Return whether a kernel needs more shared memory or registers than the GPU has."""
    from triton.runtime.errors import OutOfResources

    return isinstance(error.__cause__, OutOfResources)


class Tile(NamedTuple):
    """The part of a product or of attention that one program computes, and its compiler options.

    It holds plain numbers, so that it can be written to a file as JSON and made again from there.
    """

    rows: int  # rows of the weight per program; in attention queries times G, at least 16
    columns: int  # columns of the weight per iteration, which divide K; in attention keys
    warps: int
    stages: int
    uses_dot: bool = True  # whether matrix units multiply; if not, x has one row
    splits: int = 1  # parts of K, each of which a program of its own multiplies


def most_queries(group: int) -> int:
    """Return how many queries of a sequence decode attention has in one tile at most.

    Args:
        group: G, the query heads that share a KV head, each of which is a row of the tile.
    """
    return max(1, min(_MAX_DECODE_QUERIES, _MAX_DECODE_ROWS // group))


class Blocks(NamedTuple):
    """A quantized weight (N, K) as the kernels read it, see `llama.weights.groups`."""

    values: Tensor  # in fragment order, see `llama.weights.fragments`
    scales: Tensor
    shape: tuple[int, int]  # N, K
    kind: int  # the format of its elements, an `ElementFormat`
    first: int  # the value of code 0, if elements have four bits
    group: int  # neighbouring columns that share a scale
    per_group: int  # 1: a scale; 2: a scale and an offset


def views_of(kv_cache: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return what the kernels read of a KV cache: itself, and its scales where it is in 8 bits.

    The scales are a view of the whole cache as int16, in which kernels find them by index.
    """
    has_scales = kv_cache.dtype is SCALED_DTYPE
    return kv_cache, kv_cache.view(torch.int16) if has_scales else None
