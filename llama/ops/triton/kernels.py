"""Which Triton kernels the ops of one model may run: those that the self-check found right for it.

In: names of kernels, types, and tiles of products. Out: for an op, whether it may use its kernel on
some tensors; where it may not, it runs its torch body, which is the definition. The model holds its
`KernelSet` and hands it to each op. Nothing here imports Triton: an op imports its kernel's module
only after it has asked here. Tests make one for the CPU, under TRITON_INTERPRET=1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

NAMES = ("attention", "add_norm", "rope_and_store", "silu_mul", "linear", "sample")
GRAPH = "graph"  # named beside them where decode steps may be CUDA graphs
Sizes = tuple[int, int, int, int]  # of a product: the kind of the weight's numbers, N, K and M
_LOGITS = torch.float32  # what "sample" takes, whatever the model's type


class Tile(NamedTuple):
    """How much one program takes at a time, and how it is compiled: of a product, or of attention.

    It holds plain numbers, so that it can be written to a file and made again from there.
    """

    rows: int  # of the weight, per program; or queries times G, at least 16
    columns: int  # of the weight, per turn, K is a multiple of it; or keys
    warps: int
    stages: int
    uses_dot: bool = True  # matrix units; without them one row of x only


class Blocks(NamedTuple):
    """A quantized weight, as `llama.weights.groups` has it."""

    values: Tensor
    scales: Tensor
    shape: tuple[int, int]  # N, K
    kind: int  # Matrix::Numbers in kernels.h
    first: int  # what is added to the numbers of four bits
    group: int
    per_group: int  # a scale, or a scale and an offset


@dataclass(frozen=True)
class KernelSet:
    """dtypes: of a model's tensors; float32 is for tests, as a GPU would round products to TF32.

    tiles: the one that was fastest for M rows times a weight (N, K), with M a power of 2 up to 64,
    to which the rows are filled up; where there is none, torch's library is faster.
    """

    names: frozenset[str] = frozenset()
    dtypes: frozenset[torch.dtype] = frozenset({torch.bfloat16, torch.float16})
    tiles: Mapping[Sizes, Tile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := self.names - {*NAMES, GRAPH}:
            raise ValueError(f"unknown kernels {sorted(unknown)}: there are {', '.join(NAMES)}")

    def has(self, name: str, *tensors: Tensor) -> bool:
        """Whether the op `name` runs its kernel on these tensors, of one device and one type."""
        if name not in self.names:
            return False
        device, dtype = tensors[0].device, tensors[0].dtype
        return (dtype is _LOGITS if name == "sample" else dtype in self.dtypes) and all(
            x.device == device and x.dtype is dtype for x in tensors[1:]
        )

    def tile_for(self, kind: int, n: int, k: int, m: int) -> Tile | None:
        """The tile for M rows times a weight (N, K); None where torch's library does it."""
        return self.tiles.get((kind, n, k, 1 << (m - 1).bit_length())) if m else None


TORCH_ONLY = KernelSet()  # every op runs its torch body
