"""The updates of a tensor by adapters, computed on some rows and columns of it.

In: rows of a weight in a wide type, and the `Update` of each adapter in order. Out: the rows that
the merged model has, W + scale * B A, and for DoRA (Liu et al., 2024) each row or column with its
magnitude. Which file a tensor comes from, and who reads the rows, is not known here.

Sums are computed in float64 where the device has it, so that a merged weight has the same bits on
any number of ranks, and is rounded once.

Shapes: N rows and K columns of the whole weight, R the rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

Order = Callable[[Tensor], Tensor]  # brings rows of Hugging Face's layout to the wanted order


class LowRank(NamedTuple):
    """A product that is added to a weight.

    Attributes:
        up: (N, R), B of a linear layer.
        down: (R, K), A of a linear layer.
        scale: The factor of the product.
        magnitude: For DoRA, the norm that each row has afterwards, (N,), or each column, (K,).
        is_by_column: Whether the magnitude is that of columns, as for an embedding.
    """

    up: Tensor
    down: Tensor
    scale: float
    magnitude: Tensor | None = None
    is_by_column: bool = False


class TokenRows(NamedTuple):
    """Rows of an embedding or lm_head that were trained alone.

    Attributes:
        ids: The tokens, ascending, (T).
        values: Their rows, (T, K).
    """

    ids: Tensor
    values: Tensor

    def put_into(self, work: Tensor, rows: slice, columns: slice) -> None:
        """Replace those of some rows of the matrix that are rows of these tokens.

        Args:
            work: The rows of the matrix.
            rows: Which rows they are.
            columns: Which columns they have.
        """
        first, last = torch.searchsorted(self.ids, torch.tensor([rows.start, rows.stop])).tolist()
        at = (self.ids[first:last] - rows.start).to(work.device)
        work[at] = self.values[first:last, columns].to(work)


class Update(NamedTuple):
    """The changes of one adapter to a tensor, in the row order of Hugging Face's layout.

    Attributes:
        replacement: The tensor, (N, K) or (N,), that takes the place of the base model's.
        low_rank: What is added afterwards.
        tokens: The rows that are replaced afterwards.
    """

    replacement: Tensor | None = None
    low_rank: LowRank | None = None
    tokens: TokenRows | None = None


def work_dtype(device: torch.device) -> torch.dtype:
    """Return the type in which a device merges: float64, which Metal lacks."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass
class Merge:
    """The updates of one tensor, in order, for rows that lie on one device in one order.

    Attributes:
        updates: The updates. Those before the last replacement have no effect.
        order: Brings some whole heads of rows to the wanted order.
        column_norms: The norms of all columns before an update with magnitudes of columns scales
            them, by the index of the update.
    """

    updates: Sequence[Update]
    order: Order
    column_norms: dict[int, Tensor] = field(default_factory=dict)

    @property
    def first(self) -> int:
        """The index of the first update that has an effect."""
        replaced = [i for i, update in enumerate(self.updates) if update.replacement is not None]
        return replaced[-1] if replaced else 0

    @property
    def needs_base(self) -> bool:
        """Whether the result depends on the weight of the base model."""
        return self.updates[self.first].replacement is None

    @property
    def needs_whole_rows(self) -> bool:
        """Whether some columns cannot be merged without the others."""
        return any(
            low_rank.magnitude is not None and not low_rank.is_by_column
            for _, low_rank, _ in self.updates[self.first :]
            if low_rank is not None
        )

    def indices_with_column_norms(self) -> list[int]:
        """Return the indices of the updates for which `column_norms` must be known, in order."""
        indices = []
        for i, (_, low_rank, _) in enumerate(self.updates):
            if i < self.first or low_rank is None:
                continue
            if low_rank.magnitude is not None and low_rank.is_by_column:
                indices.append(i)
        return indices

    def apply(
        self, work: Tensor, rows: slice, columns: slice, unscaled: int | None = None
    ) -> Tensor:
        """Update rows of the base model in place, and return them.

        Args:
            work: The rows in `work_dtype`; any values if the base model is not needed.
            rows: Which rows they are, some whole heads.
            columns: Which columns they have.
            unscaled: The index of an update after whose product this ends, before its magnitude.
        """
        for i, (replacement, low_rank, tokens) in enumerate(self.updates):
            if i < self.first:
                continue
            if replacement is not None:
                work.copy_(self.order(replacement[rows])[:, columns])
            if tokens is not None:
                tokens.put_into(work, rows, columns)
            if low_rank is None:
                continue
            up = self.order(low_rank.up[rows]).to(work)
            work.addmm_(up, low_rank.down[:, columns].to(work), alpha=low_rank.scale)
            if i == unscaled:
                return work
            if low_rank.magnitude is None:
                continue
            if low_rank.is_by_column:
                factors = _ratio(low_rank.magnitude.to(work), self.column_norms[i])
                work *= factors[columns]
            else:
                magnitude = self.order(low_rank.magnitude[rows]).to(work)
                work *= _ratio(magnitude, torch.linalg.vector_norm(work, dim=1))[:, None]
        return work


def _ratio(magnitude: Tensor, norm: Tensor) -> Tensor:
    """Return magnitude / norm; rows or columns of zeros, as of tokens that are padding, stay 0."""
    return torch.where(norm == 0, torch.ones_like(norm), magnitude / norm)
