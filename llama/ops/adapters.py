"""Low-rank updates of some rows of a product: many LoRA adapters in one batch.

In: the adapters of the rows of a step. Out: the updates of one product, scale * up * down * x (Hu
et al., 2021), which are added to the rows of their adapter and to no others. The rows of an adapter
lie together, as in Punica (Chen et al., 2023), and are a segment. A kernel on a GPU finds the
adapter of a row by its number, which is on the device, so that a recorded step can be replayed with
other adapters. Files, ranks and modules must not be known here.

Shapes: M rows; N outputs and K inputs of a product, R the rank; A adapters, P products of a model.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llama.ops.kernels import NO_KERNELS, Kernels

MAX_PARTS = 3  # matrices that are stored as one: queries, keys and values
FIELDS = 6  # fields of a part in `AdapterTable`
RANK_STEP = 16  # the ranks of adapters in an `AdapterTable` are multiples of it


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


class NumberedUpdates(NamedTuple):
    """The updates of one product as a kernel reads them.

    Attributes:
        numbers: (M) int64, the number of each row's adapter; -1 for none.
        table: (A, P, MAX_PARTS, FIELDS) int64, see `AdapterTable`.
        product: The index of the product.
        max_rank: The largest rank of an adapter, a multiple of RANK_STEP.
    """

    numbers: Tensor
    table: Tensor
    product: int
    max_rank: int


class Reach(NamedTuple):
    """The products that any adapter of a table changes, on which a recorded step depends.

    Attributes:
        products: The products that are changed.
        max_rank: The largest rank, a power of 2 and a multiple of RANK_STEP; 0 without adapters.
    """

    products: frozenset[str] = frozenset()
    max_rank: int = 0


class AdapterTable:
    """The adapters of a model by number, as a kernel finds them on the device.

    Attributes:
        fields: (A, P, MAX_PARTS, FIELDS) int64: for each part of a product the addresses of `down`
            and `up`, the first output, N, R, and the bits of the scale in float32. R is 0 where
            nothing is changed.
        reach: What any adapter has changed so far.
    """

    def __init__(self, products: Sequence[str], num_adapters: int, device: torch.device) -> None:
        """Make a table without adapters.

        Args:
            products: The names of the first matrices of all products.
            num_adapters: A.
            device: The device of the model.
        """
        self.products = {name: index for index, name in enumerate(products)}
        shape = (num_adapters, len(products), MAX_PARTS, FIELDS)
        self.fields = torch.zeros(shape, dtype=torch.int64, device=device)
        self.reach = Reach()

    def put(self, number: int, adapter: AdapterWeights) -> None:
        """Store an adapter, whose matrices must stay where they are while rows have its number."""
        entries = torch.zeros(self.fields.shape[1:], dtype=torch.int64)
        max_rank = max(self.reach.max_rank, RANK_STEP)
        for name, delta in adapter.deltas.items():
            for i, part in enumerate(delta.parts):
                rank = len(part.down)
                assert rank % RANK_STEP == 0 and part.up.is_contiguous(), (name, part.up.shape)
                (scale_bits,) = struct.unpack("i", struct.pack("f", part.scale))
                addresses = [part.down.data_ptr(), part.up.data_ptr()]
                numbers = [part.first, len(part.up), rank, scale_bits]
                entries[self.products[name], i] = torch.tensor(addresses + numbers)
                while max_rank < rank:
                    max_rank *= 2
        self.fields[number].copy_(entries)
        self.reach = Reach(self.reach.products.union(adapter.deltas), max_rank)


class ProductUpdates:
    """The updates of one product: those of each segment of rows that has one.

    Attributes:
        segments: The first row, the number of rows and the update of each.
        numbered: The same for a kernel, where there is one.
    """

    def __init__(
        self,
        segments: Sequence[tuple[int, int, Delta]],
        numbered: NumberedUpdates | None = None,
        kernels: Kernels = NO_KERNELS,
    ) -> None:
        self.segments = segments
        self.numbered = numbered
        self._kernels = kernels

    def add_to(self, out: Tensor, x: Tensor) -> Tensor:
        """Add the updates to products in place, and return them.

        Args:
            out: (..., N) products of all rows of a step.
            x: (..., K) these rows.
        """
        products = out.view(-1, out.shape[-1])
        rows = x.reshape(-1, x.shape[-1])
        if self.numbered is not None:
            updated = self._kernels.run("add_updates", products, rows, self.numbered)
            if updated is not None:
                return out
            if not self.segments:
                raise RuntimeError("the kernel of adapters failed while a step was recorded")
        for first, count, delta in self.segments:
            some = slice(first, first + count)
            delta.add_to(products[some], rows[some])
        return out


class AdapterRows:
    """The rows of a step that have adapters, as segments in ascending order.

    Attributes:
        segments: The first row, the number of rows and the adapter of each. A recorded step has
            none, as a kernel reads its numbers alone.
        numbers: (M) int64 on the device, the number of each row's adapter in the table; -1 for
            none.
        table: The table; None where no kernel reads it.
    """

    def __init__(
        self,
        segments: Sequence[tuple[int, int, AdapterWeights]],
        numbers: Tensor | None = None,
        table: AdapterTable | None = None,
    ) -> None:
        self.segments = segments
        self.numbers = numbers
        self.table = table

    def of(self, product: str, kernels: Kernels = NO_KERNELS) -> ProductUpdates | None:
        """Return the updates of a product by its name; None if no row has one.

        Args:
            product: The name of the product's first matrix.
            kernels: The kernels that may compute them.
        """
        found = []
        for first, count, adapter in self.segments:
            delta = adapter.deltas.get(product)
            if delta is not None:
                found.append((first, count, delta))
        numbered = None
        if self.table is not None and self.numbers is not None:
            reach = self.table.reach
            if product in reach.products and (found or not self.segments):
                index = self.table.products[product]
                numbered = NumberedUpdates(self.numbers, self.table.fields, index, reach.max_rank)
        if not found and numbered is None:
            return None
        return ProductUpdates(found, numbered, kernels)
