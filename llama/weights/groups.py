"""The base of all formats of codes: groups of neighbouring columns share a scale.

In: a `Coded`. Out: a weight in which each group of neighbouring columns has a scale, or a scale and
an offset, and stands for element * scale + offset; the elements are those of the subclass. Nothing
is rounded, with one exception: a CPU with AMX multiplies weights with several groups per row in
bf16. Adapters are not merged. packed_weight.h describes the layouts. Files must not be known here.

The file has over 400 lines because one class has all products of such a matrix: on a CPU, on a GPU,
and of activations that are rounded.

Shapes: N outputs, K inputs, G groups of K / G columns, R the rank of an adapter.
"""

import copy
from typing import ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama.common.allocation import use_huge_pages
from llama.kernels.cpu import native
from llama.kernels.cpu.constants import MAX_RANK, MIN_GROUP
from llama.kernels.cuda.launch import Blocks
from llama.ops import rounded
from llama.ops.adapters import ProductUpdates
from llama.ops.batch import DEFAULT_CONTEXT, ForwardContext
from llama.ops.formats import N_BLOCK, ElementFormat, num_blocks
from llama.ops.linear import linear
from llama.weights.blocks import BlockedWeight, can_pack, in_blocks, in_whole_blocks
from llama.weights.coded import Coded, CodedRows, hadamard
from llama.weights.scales import SCALE_FORMATS, in_smallest_format, pack_scales, unpack_scales
from llama.weights.weight import Weight

_GPU_COLUMNS = 128  # columns that a kernel of a GPU may read at once
_TABLE_FORMATS = (ElementFormat.NIBBLES, ElementFormat.SIX_BITS)  # codes are looked up in a table
_FILE_ADAPTER = "adaptor"  # the adapter's name in files of packed weights


class QuantKey(NamedTuple):
    """The key of a quantization: the kernels of a GPU are compiled for it and for K.

    Attributes:
        kind: The format of the elements, an `ElementFormat`.
        first: The value of code 0.
        group: The number of columns per group; 0 where a group is a whole row.
        per_group: 1 for a scale, 2 for a scale and an offset.
        scale_type: The format of the scales, a `ScaleFormat`.
    """

    kind: int
    first: int
    group: int
    per_group: int
    scale_type: int


class GroupedWeight(BlockedWeight):
    """A matrix of codes or integers with scales for groups of columns.

    Attributes:
        pack_codes: The C++ function that puts codes into the layout of the subclass.
        scales: (N/32, G, 1 or 2, 32) float32 or float16, or the same in (N/32, G/8, 1 or 2 times
            EIGHT) bytes.
        table: 16 float32, the elements of four-bit codes; for six bits the first is used.
        adapter: down (R, K), then up (N, R), bf16 in blocks, the last of them padded.
        rotated: A tensor that is there if x must be rotated.
        groups: The number of groups per row.
        group: The number of columns per group.
        per_group: 1 for a scale, 2 for a scale and an offset.
        rank: The rank of the adapter, 0 without one.
        is_extended: Whether there is an adapter, or x must be rotated.
        first: The element of code 0, where elements are consecutive integers.
        activations: The number of columns of x that share a scale, where x is rounded to 8 bits; 0
            where x is multiplied as it is.
        exact_top: Whether the largest of the products in float32 are computed again with x as it
            is, where x is rounded. A weight with an adapter or a rotation of its own does not.
        is_fragmented: Whether the values are for the kernels of a GPU: in fragment order, see
            `llama.weights.fragments`, or rows of e4m3.
    """

    pack_codes: ClassVar[str]
    scales: Tensor
    adapter: Tensor | None
    rotated: Tensor | None
    activations: int = 0
    exact_top: bool = False
    is_fragmented: bool = False

    def __init__(
        self,
        shape: tuple[int, int],
        values: Tensor,
        scales: Tensor,
        table: Tensor | None = None,
        adapter: Tensor | None = None,
        rotated: Tensor | None = None,
    ) -> None:
        super().__init__(shape, values)
        buffers = {"scales": scales, "adapter": adapter, "rotated": rotated}
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor, persistent=False)
        first_block = unpack_scales(scales[:1])
        _, self.groups, self.per_group, _ = first_block.shape
        self.group = shape[1] // self.groups
        self.rank = 0
        if adapter is not None:
            self.rank = adapter.numel() // (self.num_stored_rows + shape[1])
        self.is_extended = adapter is not None or rotated is not None
        self.table = torch.zeros(16)
        self.first = None if self.kind in _TABLE_FORMATS else 0
        if table is not None:
            self.table[: len(table)] = table.bfloat16()
            first = int(table[0])
            consecutive = first + torch.arange(len(table))
            if self.kind == ElementFormat.NIBBLES and torch.equal(table, consecutive):
                self.first = first

    @classmethod
    def of_tensors(cls, shape: tuple[int, int], tensors: dict[str, Tensor]) -> Self:
        """Return the weight whose `tensors` these are; TypeError where there are others."""
        arguments = dict(tensors)
        adapter = arguments.pop(_FILE_ADAPTER, None)
        return cls(shape, adapter=adapter, **arguments)

    @classmethod
    def can_hold(cls, table: Tensor) -> bool:
        """Return whether the format has codes for the elements of a table."""
        raise NotImplementedError

    @classmethod
    def stored_table(cls, coded: Coded) -> Tensor | None:
        """Return the part of a table that the weight stores, if it stores any."""
        return coded.table[:16]

    @classmethod
    def empty(cls, n: int, k: int) -> Tensor:
        """Return memory for the values of a matrix (N, K)."""
        dtype, columns, tail = cls.layout
        num_steps = k // columns
        values = torch.empty(num_blocks(n), num_steps, *tail, dtype=dtype)
        return use_huge_pages(values)

    @classmethod
    def of(cls, coded: Coded) -> Self:
        """Return codes that it `takes` in this format."""
        values = cls.empty(*coded.shape)
        codes = coded.codes.contiguous()
        native.call(cls.pack_codes, codes, values, *coded.shape)
        return cls(
            coded.shape,
            values,
            pack_scales(coded),
            cls.stored_table(coded),
            **pack_extras(coded),
        )

    @classmethod
    def of_rows(cls, matrix: CodedRows) -> Self:
        """Return all rows of a matrix of a file in this format, as `of` does."""
        first = cls.of(matrix.first)
        k = matrix.first.shape[1]
        values = cls.empty(matrix.n, k)
        block_shape = first.scales.shape[1:]
        scales = first.scales.new_empty(num_blocks(matrix.n), *block_shape)
        scales = use_huge_pages(scales)
        if not matrix.pack(matrix.first, cls.kind, values, scales):
            return cls.of(matrix.read())
        table = cls.stored_table(matrix.first)
        extras = pack_extras(matrix.first)
        weight = cls((matrix.n, k), values, scales, table, **extras)
        weight.is_finite = first.is_finite
        weight.has_empty_row = first.has_empty_row
        return weight

    def repeated(self, n: int) -> Self:
        """Return a weight (n, K) that has the blocks of rows of this one again and again.

        The weight has no adapter and no padding.
        """
        assert not self.is_extended and self.shape[0] % N_BLOCK == 0, self.shape
        values = self.values.data
        blocks = torch.arange(num_blocks(n), device=values.device) % len(values)
        shape = (n, self.shape[1])
        weight = type(self)(shape, values[blocks], self.scales[blocks], self.table)
        weight.is_fragmented = self.is_fragmented
        return weight

    @property
    def quant_key(self) -> QuantKey:
        """Return the key of this quantization."""
        return QuantKey(
            kind=self.kind,
            first=self.first or 0,
            group=self.group if self.groups > 1 else 0,
            per_group=self.per_group,
            scale_type=SCALE_FORMATS[self.scales.dtype],
        )

    @classmethod
    def takes(cls, coded: Coded) -> bool:
        """Return whether the format can store these very values, and the CPU kernels read them."""
        k = coded.shape[1]
        if k % 8 or coded.group % MIN_GROUP:
            return False
        for factor in (coded.down, coded.up):
            if factor is not None and not torch.equal(factor.bfloat16().float(), factor):
                return False
        if coded.down is not None and len(coded.down) > MAX_RANK:
            return False
        if coded.codes.device.type != "cpu":
            return False
        if native.kernels() is None:
            return False
        return cls.can_hold(coded.table)

    @classmethod
    def fits(cls, plain: Tensor) -> bool:
        """Return whether a matrix can be cut into blocks."""
        return can_pack(plain)

    def elements(self, ids: Tensor) -> Tensor:
        """Return rows (..., K) of elements in float32, before they are scaled.

        Args:
            ids: The indices (...) of the rows in the values, as `stored_ids` gives them.
        """
        raise NotImplementedError

    def exact_rows(self, ids: Tensor) -> Tensor:
        """Return the rows (..., K) of ids (...) in float32: products are rounded, then sums."""
        ids = self.stored_ids(ids)
        scales = unpack_scales(self.scales, ids)
        groups = scales.shape[-2]
        rows = self.elements(ids)
        rows = torch.unflatten(rows, -1, (groups, -1))
        rows = rows * scales[..., :1]
        if scales.shape[-1] > 1:
            rows = rows + scales[..., 1:]
        rows = rows.flatten(-2)
        if self.adapter is not None:
            down, up = self._adapter_factors(self.adapter)
            rows += up[ids].float() @ down.float()
        return rows if self.rotated is None else hadamard(rows)

    def _adapter_factors(self, adapter: Tensor) -> tuple[Tensor, Tensor]:
        """Return down (R, K) and up (N, R) in bf16."""
        n, k = self.shape
        r = self.rank
        down, up = adapter.split_with_sizes([r * k, r * self.num_stored_rows])
        down_blocks = down.view(-1, k // 2, N_BLOCK, 2)
        up_blocks = up.view(-1, r // 2, N_BLOCK, 2)
        down_weight = BlockedWeight((r, k), down_blocks)
        up_weight = BlockedWeight((n, r), up_blocks)
        return down_weight.plain(), up_weight.plain()

    @classmethod
    def reordered(cls, values: Tensor) -> Tensor:
        """Return values in fragment order, in the same shape."""
        raise NotImplementedError

    def fits_gpu(self) -> bool:
        """Return whether the kernels of a GPU take this weight."""
        group = self.group
        if self.is_extended or self.first is None:
            return False
        if self.shape[1] % _GPU_COLUMNS:
            return False
        return _GPU_COLUMNS % group == 0 or group % _GPU_COLUMNS == 0

    def in_fragments(self) -> Self:
        """Return a weight that `fits_gpu` in fragment order, with the same scales.

        Only the kernels of a GPU can multiply by it, and it cannot be cut into parts.
        """
        assert self.fits_gpu() and not self.is_fragmented, self.shape
        weight = copy.copy(self)
        weight._parameters = dict(self._parameters)
        values = self.reordered(self.values.data)
        weight.values = nn.Parameter(values, requires_grad=False)
        weight.is_fragmented = True
        return weight

    def blocks(self) -> Blocks | None:
        """Return what the kernels of a GPU read; None where they do not take this weight."""
        if not self.is_fragmented or self.first is None:
            return None
        group = self.group
        return Blocks(
            values=self.values.data,
            scales=self.scales,
            shape=self.shape,
            kind=self.kind,
            first=self.first,
            group=group,
            per_group=self.per_group,
        )

    def linear(
        self,
        x: Tensor,
        dtype: torch.dtype | None = None,
        context: ForwardContext = DEFAULT_CONTEXT,
        updates: ProductUpdates | None = None,
    ) -> Tensor:
        """Return the product of rows and this weight; see `Weight.linear`.

        On a GPU, the kernels apply scales to sums for few rows, and round elements to the type of x
        for many rows.
        """
        if x.dtype is torch.bfloat16 and not x.is_cuda:
            is_rounded = bool(self.activations) and native.kernels() is None
            if not (is_rounded or self.is_fragmented):
                product = super().linear(x, dtype, context, updates)
                if self.exact_top and dtype is torch.float32:
                    assert updates is None, "requests choose adapters of the layers only"
                    self._compute_top_again(x, product)
                return product
        product = self._linear(x, dtype, context)
        return product if updates is None else updates.add_to(product, x)

    def _linear(self, x: Tensor, dtype: torch.dtype | None, context: ForwardContext) -> Tensor:
        """Return the product of rows and this weight where the CPU kernels do not compute it."""
        if self.activations and native.kernels() is None:
            return self._linear_of_rounded(x, dtype or x.dtype)
        blocks = self.blocks()
        if blocks is not None:
            product: Tensor | None = context.kernels.run("grouped_linear", x, blocks, dtype)
            if product is not None:
                return product
        plain = self.exact().to(x.dtype)
        return linear(x, plain, dtype=dtype)

    def has_integers(self) -> bool:
        """Return whether all elements are whole numbers from -128 to 127."""
        is_whole = self.table.round() == self.table
        return bool(is_whole.all() and self.table.min() >= -128 and self.table.max() <= 127)

    def round_activations(self, per_token: bool = False, exact_top: bool = False) -> bool:
        """Round the rows of x to 8 bits in every product from now on."""
        k = self.shape[1]
        if not self.has_integers() or not rounded.can_multiply(k, self.group):
            return False
        self.activations = k if per_token else rounded.PIECE
        self.exact_top = exact_top and not self.is_extended
        return True

    def refilled(self, plain: Tensor) -> Weight:
        """Return other elements, (N, K) of any float type, in this format."""
        weight = super().refilled(plain)
        if self.activations:
            weight.round_activations(self.activations == self.shape[1], self.exact_top)
        return weight

    def _linear_of_rounded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the product of rounded rows and this weight, computed by PyTorch."""
        n, k = self.shape
        leading = x.shape[:-1]
        x = x.reshape(-1, k) if self.rotated is None else hadamard(x.float().reshape(-1, k))
        x = x.bfloat16()
        ids = self.stored_ids(torch.arange(n))
        scales = unpack_scales(self.scales, ids).unbind(-1)
        weight = rounded.IntegerWeight(self.elements(ids), *scales)
        out = rounded.multiply(rounded.round_rows(x, self.activations), weight)
        if self.adapter is not None:
            down, up = self._adapter_factors(self.adapter)
            out += x.float() @ down.float().t() @ up.float().t()
        if self.exact_top and dtype is torch.float32:
            blocks = rounded.top_blocks(out)
            outputs = blocks[..., None] * rounded.BLOCK + torch.arange(rounded.BLOCK)
            outputs = outputs.flatten(1).clamp(max=n - 1)  # the last block may be shorter
            ids = self.stored_ids(outputs)
            scales = unpack_scales(self.scales, ids).unbind(-1)
            weight = rounded.IntegerWeight(self.elements(ids), *scales)
            out.scatter_(1, outputs, rounded.multiply_exactly(x, weight))
        return out.to(dtype).view(*leading, n)

    def _compute_top_again(self, x: Tensor, products: Tensor) -> None:
        """Replace the largest products of rounded rows by those of the rows as they are.

        Args:
            x: The rows (..., K), bf16.
            products: The products (..., N) of the rounded rows, float32.
        """
        n, k = self.shape
        m = products.numel() // n
        count = min(rounded.TOP_BLOCKS, num_blocks(n))
        rows = x.float().contiguous()
        matrix = torch.tensor(self.native_matrix())
        chosen = torch.empty(m, count, dtype=torch.int64)
        largest = torch.empty(m, count)
        native.call("exact_top", rows, matrix, products, chosen, largest, m, n, k, count)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows (..., K) of ids (...) in bf16; IndexError where there is no such row."""
        if native.kernels() is None or self.is_fragmented or self.is_extended:
            return self.exact_rows(ids).bfloat16()
        return super().rows(ids)

    def exact(self) -> Tensor:
        """Return the matrix (N, K) that it stands for, in float32."""
        n, _ = self.shape
        ids = torch.arange(n, device=self.values.device)
        return self.exact_rows(ids)

    def plain(self) -> Tensor:
        """Return the matrix (N, K), rounded to bf16."""
        return self.exact().bfloat16()

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that this weight stores, by their names in files."""
        tensors = super().tensors()
        tensors["table"] = self.table
        for name, buffer in self.named_buffers():
            file_name = _FILE_ADAPTER if name == "adapter" else name
            tensors[file_name] = buffer
        return tensors

    def is_whole(self) -> bool:
        """Return whether the tensors have the shapes and types of such a matrix."""
        n, k = self.shape
        block_rows = unpack_scales(self.scales[:1]).shape[-1]
        if len(self.scales) != num_blocks(n) or block_rows != N_BLOCK:
            return False
        if self.per_group not in (1, 2):
            return False
        if self.scales.dtype not in SCALE_FORMATS:
            return False
        if k % (self.groups * MIN_GROUP):
            return False
        if self.adapter is not None:
            if self.rank not in range(N_BLOCK, MAX_RANK + 1, N_BLOCK):
                return False
            if self.adapter.dtype is not torch.bfloat16:
                return False
            if self.adapter.shape != (self.rank * (self.num_stored_rows + k),):
                return False
        if self.rotated is not None:
            is_power_of_two = k & (k - 1) == 0
            if not is_power_of_two or k % N_BLOCK:
                return False
        return super().is_whole()

    def part(self, rows: list[slice], columns: slice) -> Weight | None:
        """Return a part of the matrix in the same memory; None where it would cut a group.

        Parts of rows have copies of their scales.
        """
        if self.is_extended or self.is_fragmented:
            return None
        k = self.shape[1]
        first_block = rows[0].start // N_BLOCK
        end_block = num_blocks(rows[-1].stop)
        scales = self.scales[first_block:end_block]
        if columns != slice(0, k) and self.groups > 1:
            group = self.group
            if columns.start % group or columns.stop % group:
                return None
            first_group = columns.start // group
            end_group = columns.stop // group
            unpacked = unpack_scales(scales)
            scales_of_part = unpacked[:, first_group:end_group]
            scales = in_smallest_format(scales_of_part.contiguous())
        return self._part_of_blocks(
            rows,
            columns,
            scales=scales,
            table=self.table,
        )

    def native_matrix(self) -> list[int] | None:
        """Return the fields of `Matrix` in kernels.h; None in fragment order."""
        if self.is_fragmented:
            return None
        blocked = super().native_matrix()
        assert blocked is not None
        strides_and_gaps = blocked[11:]
        return [
            self.values.data_ptr(),
            self.scales.data_ptr(),
            self.table.data_ptr(),
            self.kind,
            SCALE_FORMATS[self.scales.dtype],
            self.per_group,
            self.group,
            self.rotated is not None,
            self.activations,
            0 if self.adapter is None else self.adapter.data_ptr(),
            self.rank,
            *strides_and_gaps,
        ]


def pack_extras(coded: Coded) -> dict[str, Tensor]:
    """Return the constructor's arguments for what a matrix may have besides codes and scales."""
    extras: dict[str, Tensor] = {}
    if coded.is_rotated:
        extras["rotated"] = torch.ones(1, dtype=torch.uint8)
    if coded.down is not None and coded.up is not None:
        padding = -len(coded.down) % N_BLOCK  # the rank becomes a multiple of 32
        down = F.pad(coded.down, (0, 0, 0, padding))
        up = F.pad(in_whole_blocks(coded.up), (0, padding))
        down_blocks = in_blocks(down.bfloat16())
        up_blocks = in_blocks(up.bfloat16())
        extras["adapter"] = torch.cat([down_blocks.flatten(), up_blocks.flatten()])
    return extras
