"""One byte per weight: int8 or e4m3, in blocks as bf16 has them.

In: a `Coded` of such elements, or bf16 that is rounded at load with one scale per row. Out: a
weight. The largest magnitude of a rounded row becomes 127, or 448 in e4m3; an int8 element is off
by at most half of the row's scale. Files must not be known here.
"""

from typing import Self

import torch
from torch import Tensor, nn

from llama.kernels.cpu import native
from llama.kernels.cuda.launch import Blocks
from llama.ops import scaled
from llama.ops.adapters import ProductUpdates
from llama.ops.batch import DEFAULT_CONTEXT, ForwardContext
from llama.ops.formats import N_BLOCK, ElementFormat, num_blocks
from llama.ops.scaled import ScaledRows
from llama.weights.blocks import Layout, in_blocks, in_whole_blocks, workspace
from llama.weights.coded import Coded
from llama.weights.fragments import bytes_in_fragments, rows_of_bytes
from llama.weights.groups import GroupedWeight, pack_extras
from llama.weights.scales import pack_scales, unpack_scales
from llama.weights.weight import Rows, Weight

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
_MAX_INT8 = 127
_MAX_E4M3 = 448
_CHUNK_ROWS = 4096  # rows quantized per chunk
_SCALED_STEP = 16  # N and K must be multiples of it for a GPU's product of e4m3 by e4m3


class BytesWeight(GroupedWeight):
    """A matrix of int8 elements whose `values` are (N/32, K/2, 32, 2).

    Attributes:
        in_files: The type and the bits of an element, as checkpoints name them.
        element_factor: What the kernels multiply an element by. Scales are divided by it.
    """

    kind = ElementFormat.INT8.value
    layout = Layout(
        dtype=torch.int8,
        columns=2,
        tail=(N_BLOCK, 2),
    )
    in_files = ("int", 8)
    element_factor = 1.0

    @classmethod
    def num_bytes(cls, n: int, k: int) -> int:
        """Return the bytes of a matrix (N, K) that was rounded at load."""
        return num_blocks(n) * N_BLOCK * (k + 4)

    @classmethod
    def can_hold(cls, table: Tensor) -> bool:
        """Return whether a table has consecutive integers from -128 to 127."""
        first = float(table[0])
        count = len(table)
        if not first.is_integer():
            return False
        if first < -128 or first + count > 128:
            return False
        return torch.equal(table, first + torch.arange(count))

    @classmethod
    def stored_table(cls, coded: Coded) -> Tensor | None:
        """Return None: the elements are their own values."""
        return None

    @classmethod
    def of(cls, coded: Coded) -> Self:
        """Return codes in this format."""
        codes = coded.codes.contiguous()
        values = cls.empty(*coded.shape)
        octets = values.view(torch.uint8)
        if native.kernels() is None or codes.shape[1] % 8:
            octets.copy_(in_blocks(in_whole_blocks(codes)))
        else:
            native.call("pack_bytes", codes, octets, *codes.shape)
        first = int(coded.table[0])
        octets.add_(first % 256)
        scales = pack_scales(coded, cls.element_factor)
        weight = cls(coded.shape, values, scales, **pack_extras(coded))
        weight.set_flags_of_scales(coded.scale)
        return weight

    def set_flags_of_scales(self, scale: Tensor) -> None:
        """Set `is_finite` and `has_empty_row` by the scales of the rows."""
        self.is_finite = bool(scale.isfinite().all())
        self.has_empty_row = not scale.all()

    @classmethod
    def rounded(cls, plain: Tensor) -> Coded:
        """Return the codes and scales of the same elements as `pack` computes."""
        scale, divisor = _row_scales(plain, _MAX_INT8)
        integers = (plain.float() / divisor).round()
        codes = integers + 128
        return Coded(
            codes=codes.byte(),
            table=torch.arange(-128.0, 128),
            scale=scale,
        )

    @classmethod
    def pack(cls, plain: Tensor) -> Self:
        """Return a bf16 matrix, rounded to this format."""
        n, k = plain.shape
        if native.kernels() is None or cls is Fp8Weight:  # torch rounds to e4m3
            return cls.of(cls.rounded(plain))
        values = cls.empty(n, k)
        scales = torch.empty(num_blocks(n), 1, 1, N_BLOCK)
        scratch = workspace("pack_workspace", k, torch.get_num_threads())
        native.call("pack_rows", plain, values, scales, scratch, n, k)
        weight = cls((n, k), values, scales)
        weight.set_flags_of_scales(scales)
        return weight

    @classmethod
    def reordered(cls, values: Tensor) -> Tensor:
        """Return values in fragment order, in the same shape."""
        return bytes_in_fragments(values)

    def elements(self, ids: Tensor) -> Tensor:
        """Return rows (..., K) of elements in float32, before they are scaled."""
        if self.is_fragmented:
            return rows_of_bytes(self.values, ids).float()
        return self.stored_rows(ids).float()


class Fp8Weight(BytesWeight):
    """A matrix of e4m3 elements whose `values` are (N/32, K/2, 32, 2).

    The kernels convert an element to 2^-8 times its value, so the stored scales are 2^8 times as
    large. On a GPU, the values of a weight that `rounds_to_e4m3` are rows (N, K) of codes, which
    PyTorch's library reads.

    Attributes:
        row_scales: The scales (N, 1) of these rows in float32; None where there are none.
    """

    kind = ElementFormat.FP8.value
    layout = Layout(
        dtype=E4M3.dtype,
        columns=2,
        tail=(N_BLOCK, 2),
    )
    in_files = ("float", 8)
    element_factor = 2**-8
    row_scales: Tensor | None = None

    @classmethod
    def can_hold(cls, table: Tensor) -> bool:
        """Return whether a table has the values of e4m3 in order."""
        e4m3 = E4M3.float().nan_to_num()
        return torch.equal(table.nan_to_num(), e4m3)

    @classmethod
    def rounded(cls, plain: Tensor) -> Coded:
        """Return the codes and scales of a bf16 matrix."""
        scale, divisor = _row_scales(plain, _MAX_E4M3)
        row_chunks = torch.split(plain, _CHUNK_ROWS)
        divisor_chunks = torch.split(divisor, _CHUNK_ROWS)
        chunks = []
        for rows, divisors in zip(row_chunks, divisor_chunks, strict=True):
            quotients = rows / divisors
            chunks.append(quotients.to(E4M3.dtype))
        codes = torch.cat(chunks)
        return Coded(
            codes=codes.view(torch.uint8),
            table=E4M3.float(),
            scale=scale,
        )

    def round_to_e4m3(self) -> bool:
        """Round the rows of x to e4m3 in every product from now on."""
        n, k = self.shape
        if self.groups > 1 or self.per_group > 1 or self.is_extended:
            return False
        if n % _SCALED_STEP or k % _SCALED_STEP:
            return False
        self.rounds_to_e4m3 = True
        if self.is_fragmented and self.row_scales is None:
            scales = unpack_scales(self.scales).view(-1, 1)[:n]
            self.row_scales = scales * self.element_factor
            codes = rows_of_bytes(self.values.data, torch.arange(n, device=self.values.device))
            self.values = nn.Parameter(codes, requires_grad=False)
        return True

    def refilled(self, plain: Tensor) -> Weight:
        """Return other elements, (N, K) of any float type, in this format."""
        weight = super().refilled(plain)
        if self.rounds_to_e4m3:
            weight.round_to_e4m3()
        return weight

    def linear(
        self,
        x: Tensor,
        dtype: torch.dtype | None = None,
        context: ForwardContext = DEFAULT_CONTEXT,
        updates: ProductUpdates | None = None,
    ) -> Tensor:
        """Return the product of rows and this weight; see `Weight.linear`."""
        if not self.rounds_to_e4m3:
            return super().linear(x, dtype, context, updates)
        n, k = self.shape
        rows = scaled.round_rows(x.reshape(-1, k), context.kernels)
        product = self._product_of_rounded(rows, dtype or x.dtype, context)
        product = product.view(*x.shape[:-1], n)
        return product if updates is None else updates.add_to(product, x)

    def normed(
        self,
        x: Tensor,
        delta: Tensor | None,
        norm: Tensor,
        eps: float,
        context: ForwardContext = DEFAULT_CONTEXT,
    ) -> tuple[Tensor, Rows]:
        """Return x + delta, and its RMSNorm as this weight multiplies it.

        Adapters multiply rows that are not rounded.
        """
        if self.rounds_to_e4m3 and context.adapters is None:
            return scaled.round_norm(x, delta, norm, eps, context.kernels)
        return super().normed(x, delta, norm, eps, context)

    def gated(self, x: Tensor, context: ForwardContext = DEFAULT_CONTEXT) -> Rows:
        """Return silu(gate) * up of rows (M, 2K) as this weight multiplies it."""
        if self.rounds_to_e4m3 and context.adapters is None:
            return scaled.round_silu_mul(x, context.kernels)
        return super().gated(x, context)

    def product(
        self,
        rows: Rows,
        dtype: torch.dtype,
        context: ForwardContext = DEFAULT_CONTEXT,
        updates: ProductUpdates | None = None,
    ) -> Tensor:
        """Return `linear` of rows that `normed` or `gated` returned, or of plain ones."""
        if isinstance(rows, Tensor):
            return self.linear(rows, dtype, context, updates)
        assert updates is None, "adapters multiply rows that are not rounded"
        return self._product_of_rounded(ScaledRows(*rows), dtype, context)

    def _product_of_rounded(
        self, x: ScaledRows, dtype: torch.dtype, context: ForwardContext
    ) -> Tensor:
        """Return the product (M, N) of rows in e4m3."""
        if self.row_scales is not None:
            weight = ScaledRows(self.values.data, self.row_scales)
            return scaled.linear(x, weight, dtype, context.kernels)
        # All numbers of e4m3 are numbers of bf16, which the CPU kernels multiply.
        sums = super().linear(x.codes.bfloat16(), torch.float32, context)
        return (sums * x.scales).to(dtype)

    def blocks(self) -> Blocks | None:
        """Return what the kernels of a GPU read; None for rows."""
        return None if self.row_scales is not None else super().blocks()

    def has_integers(self) -> bool:
        """Return False: elements of e4m3 may be fractions."""
        return False

    def elements(self, ids: Tensor) -> Tensor:
        """Return rows (..., K) of elements in float32, as the kernels convert them."""
        if self.row_scales is not None:
            return self.values[ids].float() * self.element_factor
        return super().elements(ids) * self.element_factor


def _row_scales(plain: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Return the scale of each row, by which its largest magnitude becomes `largest`.

    Args:
        plain: The matrix (N, K).
        largest: The largest element of the format.

    Returns:
        The scales (N, 1); and the divisors (N, 1) of the elements, which are 1 where a scale is 0.
    """
    magnitudes = plain.abs().amax(1, keepdim=True)
    scale = magnitudes.float() / largest
    divisor = scale.masked_fill(scale == 0, 1)
    return scale, divisor
