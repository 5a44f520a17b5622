"""The interface of every weight format: one matrix of the model, or this rank's share of it.

In: a plain matrix (N, K). Out: products and rows of it. A format is a class in a file of its own
and alone knows how its elements lie in memory; nothing else in the package must know that.

Shapes: M rows of x, in any leading dimensions; N outputs, K inputs.
"""

from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from llama.ops.adapters import ProductUpdates
from llama.ops.batch import DEFAULT_CONTEXT, ForwardContext
from llama.ops.formats import ElementFormat
from llama.ops.norm import add_norm, rms_norm
from llama.ops.swiglu import silu_mul

# Rows as a weight multiplies them: as they are, or codes and scales as `llama.ops.scaled` has them.
Rows = Tensor | tuple[Tensor, Tensor]


class Weight(nn.Module):
    """A matrix (N, K) in one format. A model's state dict shows it as a plain tensor.

    Attributes:
        dtypes: The types of the plain matrices that it can be made from.
        kind: The `ElementFormat` by which kernels know the format.
        shape: (N, K), whatever the shape of the tensors is.
        values: The stored elements. A format may have other tensors besides them.
        is_finite: Whether no NaN and no infinity was found when the matrix was packed.
        has_empty_row: Whether a row of zeros was found then.
        rounds_to_e4m3: Whether the rows of x are rounded to e4m3, see `llama.ops.scaled`.
    """

    dtypes: ClassVar[tuple[torch.dtype, ...]] = ()
    kind: ClassVar[int] = ElementFormat.BF16.value
    values: nn.Parameter
    is_finite: bool = True
    has_empty_row: bool = False
    rounds_to_e4m3: bool = False

    def __init__(self, shape: tuple[int, int], values: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.values = nn.Parameter(values, requires_grad=False)

    @classmethod
    def of_tensors(cls, shape: tuple[int, int], tensors: dict[str, Tensor]) -> Self:
        """Return the weight whose `tensors` these are; TypeError where there are others."""
        return cls(shape, **tensors)

    @classmethod
    def fits(cls, plain: Tensor) -> bool:
        """Return whether a matrix can be put into this format on this machine."""
        raise NotImplementedError

    @classmethod
    def pack(cls, plain: Tensor) -> Self:
        """Return a matrix (N, K) that `fits` in this format.

        The weight may use the memory of `plain`, which must not be used afterwards.
        """
        raise NotImplementedError

    def linear(
        self,
        x: Tensor,
        dtype: torch.dtype | None = None,
        context: ForwardContext = DEFAULT_CONTEXT,
        updates: ProductUpdates | None = None,
    ) -> Tensor:
        """Return the product of rows and this weight, (M, N).

        Args:
            x: The rows (M, K).
            dtype: The type of the result, by default that of x. float32 returns the sums before
                they are rounded.
            context: What is known of the rows, such as the `Batch` of the step.
            updates: What the adapters of some rows add to their products. Other rows get the bytes
                that they get without it.
        """
        raise NotImplementedError

    def normed(
        self,
        x: Tensor,
        delta: Tensor | None,
        norm: Tensor,
        eps: float,
        context: ForwardContext = DEFAULT_CONTEXT,
    ) -> tuple[Tensor, Rows]:
        """Return x + delta, and its RMSNorm as this weight multiplies it.

        Args:
            x: The rows (M, K).
            delta: What is added to them, (M, K), if anything is.
            norm: The weight (K) of the norm.
            eps: What is added to the mean of squares.
            context: What is known of the rows.
        """
        if delta is None:
            return x, rms_norm(x, norm, eps, context.kernels)
        return add_norm(x, delta, norm, eps, context.kernels)

    def gated(self, x: Tensor, context: ForwardContext = DEFAULT_CONTEXT) -> Rows:
        """Return silu(gate) * up of rows (M, 2K) as this weight multiplies it."""
        return silu_mul(x, context.kernels)

    def product(
        self,
        rows: Rows,
        dtype: torch.dtype,
        context: ForwardContext = DEFAULT_CONTEXT,
        updates: ProductUpdates | None = None,
    ) -> Tensor:
        """Return `linear` of rows that `normed` or `gated` returned, or of plain ones."""
        assert isinstance(rows, Tensor), "only a weight that rounds rows takes rounded ones"
        return self.linear(rows, dtype, context, updates)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows (..., K) of ids (...), for an embedding that may be tied to lm_head."""
        raise NotImplementedError

    def plain(self) -> Tensor:
        """Return the matrix (N, K): the stored tensor itself where that is plain, else a copy."""
        raise NotImplementedError

    def refilled(self, plain: Tensor) -> "Weight":
        """Return other elements, (N, K) of any float type, in this format."""
        copy = torch.empty(plain.shape, dtype=self.dtypes[0])
        copy.copy_(plain)
        return self.pack(copy)

    def has_integers(self) -> bool:
        """Return whether all elements, before they are scaled, are whole numbers in 8 bits."""
        return False

    def round_activations(self, per_token: bool = False, exact_top: bool = False) -> bool:
        """Round the rows of x to 8 bits in every product from now on; see `llama.ops.rounded`.

        Args:
            per_token: Whether a row has one scale. Otherwise each group of columns has one.
            exact_top: Whether the largest products of a row are computed again with x as it is.
                That applies to products in float32.

        Returns:
            Whether it does; False where the elements are not whole numbers.
        """
        return False

    def round_to_e4m3(self) -> bool:
        """Round the rows of x to e4m3 in every product from now on; see `llama.ops.scaled`.

        Returns:
            Whether it does; False where the elements are not in e4m3 with one scale per row.
        """
        return False

    def part(self, rows: list[slice], columns: slice) -> "Weight | None":
        """Return a part of the matrix in the same memory; None where the format cannot be cut so.

        Args:
            rows: The rows, in ascending order.
            columns: The columns.
        """
        return None

    def native_matrix(self) -> list[int] | None:
        """Return the fields of `Matrix` in kernels.h; None where the CPU kernels cannot read it.

        The addresses are those of tensors that live as long as this weight.
        """
        return None

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that this weight stores, by their names in files."""
        return {"values": self.values.data}

    def is_whole(self) -> bool:
        """Return whether the tensors are those of such a matrix: a file may have others."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors of this weight."""
        tensors = [*self.parameters(), *self.buffers()]
        return sum(x.nbytes for x in tensors)

    def _save_to_state_dict(self, *_: object) -> None:
        """Add nothing: the layer that owns the weight adds it under Meta's name."""

    def _load_from_state_dict(self, *_: object) -> None:
        """Load nothing: the layer that owns the weight loads it."""
