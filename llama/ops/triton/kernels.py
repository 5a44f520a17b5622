"""The Triton kernels that the ops of one model may run, and the errors of a kernel that fails.

In: names of kernels, dtypes, and tiles of matrix products, as the self-check found them. Out: for
an op, whether it may run its kernel on some tensors. Where it may not, it runs its torch body,
which is its definition. The model holds its `KernelSet` and hands it to each op.

Nothing here imports Triton, which takes a second and is not installed everywhere: an op imports the
module of its kernel only after it has asked here. Tests make a set for the CPU, where
TRITON_INTERPRET=1 runs the kernels in Triton's interpreter.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from subprocess import SubprocessError
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

NAMES = ("attention", "add_norm", "rope_and_store", "silu_mul", "linear", "sample")
ROUND_ROWS = "round_rows"  # listed beside NAMES where activations are rounded to e4m3
GRAPH = "graph"  # listed beside the kernels where decode steps may be CUDA graphs
Sizes = tuple[int, int, int, int]  # the weight's `ElementFormat`, N, K and M of a product
_LOGITS_DTYPE = torch.float32  # what "sample" takes, whatever the model's dtype

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class KernelError(RuntimeError):
    """An untyped error of the compiler or the GPU's driver while a kernel was launched."""


def launcher(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a function that launches kernels, so that their failures have a type.

    The passes of Triton's compiler and its calls of the driver raise plain RuntimeErrors, and its
    cache on disk OSErrors: they become a `KernelError`. Subclasses of RuntimeError, such as torch's
    OutOfMemoryError, say something else and pass unchanged.
    """

    @functools.wraps(function)
    def launch(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except (RuntimeError, OSError) as error:
            if isinstance(error, RuntimeError) and type(error) is not RuntimeError:
                raise
            raise KernelError(str(error)) from error

    return launch


def kernel_errors() -> tuple[type[Exception], ...]:
    """Return the types of the errors of a kernel that does not compile, or does not fit the GPU.

    A caller that catches them can go on with `TORCH_ONLY`. They are `KernelError`, SubprocessError
    of the C compiler that builds a kernel's launcher, and all of Triton's own, once it is imported.
    """
    if "triton" not in sys.modules:
        return (KernelError, SubprocessError)
    from triton.errors import TritonError

    return (KernelError, SubprocessError, TritonError)


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


class Blocks(NamedTuple):
    """A quantized weight (N, K) as the kernels read it, see `llama.weights.groups`."""

    values: Tensor  # in fragment order, see `llama.weights.fragments`
    scales: Tensor
    shape: tuple[int, int]  # N, K
    kind: int  # the format of its elements, an `ElementFormat`
    first: int  # the value of code 0, if elements have four bits
    group: int  # neighbouring columns that share a scale
    per_group: int  # 1: a scale; 2: a scale and an offset


@dataclass(frozen=True)
class KernelSet:
    """The kernels of one model that passed their check.

    Attributes:
        names: Some of NAMES, ROUND_ROWS, and GRAPH where decode steps may be CUDA graphs.
        dtypes: The dtypes of a model's tensors that they take. float32 is for tests: a GPU would
            round products to TF32.
        tiles: The fastest tile for M rows times a weight (N, K). M is a power of 2 up to 256, to
            which the rows are filled up. Where there is no tile, torch's library is faster.
    """

    names: frozenset[str] = frozenset()
    dtypes: frozenset[torch.dtype] = frozenset({torch.bfloat16, torch.float16})
    tiles: Mapping[Sizes, Tile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := self.names - {*NAMES, ROUND_ROWS, GRAPH}:
            raise ValueError(f"unknown kernels {sorted(unknown)}: there are {', '.join(NAMES)}")

    def has(self, name: str, *tensors: Tensor) -> bool:
        """Return whether the op `name` may run its kernel on these tensors.

        They must be on one device and of one dtype.
        """
        if name not in self.names:
            return False
        first = tensors[0]
        takes = first.dtype is _LOGITS_DTYPE if name == "sample" else first.dtype in self.dtypes
        return takes and all(
            x.device == first.device and x.dtype is first.dtype for x in tensors[1:]
        )

    def tile_for(self, kind: int, n: int, k: int, m: int) -> Tile | None:
        """Return the tile for M rows times a weight (N, K), or None where torch multiplies."""
        if m == 0:
            return None
        padded = 1 << (m - 1).bit_length()
        return self.tiles.get((kind, n, k, padded))


TORCH_ONLY = KernelSet()  # every op runs its torch body
