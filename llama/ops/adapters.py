"""Low-rank updates of some rows of a product: many LoRA adapters in one batch.

In: the adapters of the rows of a step. Out: the updates of one product, scale * up * down * x (Hu
et al., 2021), which are added to the rows of their adapter and to no others. The rows of an adapter
lie together, as in Punica (Chen et al., 2023), and are a segment. Files, ranks, modules and kernels
must not be known here.

Shapes: M rows; N outputs and K inputs of a product, R the rank.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class DeltaPart(NamedTuple):
    """The update of some neighbouring outputs of a product.

    Attributes:
        first: The first of these outputs.
        up: (N, R), B of the adapter.
        down: (R, K), A of the adapter.
        scale: The factor of their product.
    """

    first: int
    up: Tensor
    down: Tensor
    scale: float


class Delta:
    """The update of one product by one adapter.

    Attributes:
        parts: The parts of the outputs that it changes, at most three.
    """

    parts: Sequence[DeltaPart]

    def __init__(self, parts: Sequence[DeltaPart]) -> None:
        self.parts = parts

    @property
    def nbytes(self) -> int:
        """Return the bytes of its matrices."""
        return sum(part.up.nbytes + part.down.nbytes for part in self.parts)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add the update to products in place.

        Args:
            out: (M, N), of any float type.
            x: (M, K).
        """
        for part in self.parts:
            n = len(part.up)
            target = out[:, part.first : part.first + n]
            if x.is_cuda and x.dtype.itemsize == 2:
                middle = torch.mm(x, part.down.t())
                delta = torch.mm(middle, part.up.t(), out_dtype=torch.float32)
            else:
                middle = x.float() @ part.down.float().t()
                delta = middle @ part.up.float().t()
            target.copy_(target.float() + part.scale * delta)


class AdapterWeights:
    """The updates of all products of a model by one adapter, on one rank.

    Attributes:
        deltas: The updates, by the name of the product's first matrix.
    """

    def __init__(self, deltas: Mapping[str, Delta]) -> None:
        self.deltas = deltas

    @property
    def nbytes(self) -> int:
        """Return the bytes of all updates."""
        return sum(delta.nbytes for delta in self.deltas.values())


class ProductUpdates:
    """The updates of one product: those of each segment of rows that has one.

    Attributes:
        segments: The first row, the number of rows and the update of each.
    """

    def __init__(self, segments: Sequence[tuple[int, int, Delta]]) -> None:
        self.segments = segments

    def add_to(self, out: Tensor, x: Tensor) -> Tensor:
        """Add the updates to products in place, and return them.

        Args:
            out: (..., N) products of all rows of a step.
            x: (..., K) these rows.
        """
        products = out.view(-1, out.shape[-1])
        rows = x.reshape(-1, x.shape[-1])
        for first, count, delta in self.segments:
            some = slice(first, first + count)
            delta.add_to(products[some], rows[some])
        return out


class AdapterRows:
    """The rows of a step that have adapters, as segments in ascending order.

    Attributes:
        segments: The first row, the number of rows and the adapter of each.
    """

    def __init__(self, segments: Sequence[tuple[int, int, AdapterWeights]]) -> None:
        self.segments = segments

    def of(self, product: str) -> ProductUpdates | None:
        """Return the updates of a product by its name; None if no row has one."""
        found = []
        for first, count, adapter in self.segments:
            delta = adapter.deltas.get(product)
            if delta is not None:
                found.append((first, count, delta))
        return ProductUpdates(found) if found else None
