"""Products of activations in 8 bits with weights whose elements are whole numbers.

In: rows of activations, and the elements, scales and offsets of a weight. Out: products in float32.
This is the definition: the CPU kernels (cpu/quads.h) return the same bits, on every instruction
set, for one row and in any batch, and on any number of threads. It also runs where there are no
kernels. How weights are stored must not be known here.

Integer sums are exact. The floating-point operations after them have one order, in which every
fused multiply-add is written as such:

    code = x * (127 / max|x|), rounded to the nearest integer, ties to even; -127 to 127
    x_scale = max|x| / 127
    sum = the products of code and element, over a piece of neighbouring columns
    term = float(sum) * scale, then fma(offset, the sum of the codes, term) if there are offsets
    total = fma(term, x_scale, total), over the pieces from the first to the last

A piece has `PIECE` columns, or as many as a group of the weight if these are fewer. A weight with
one scale per row multiplies the total by it at the end.

The products of lm_head are logits, of which the largest decide almost all of the next token's
distribution. So the blocks of neighbouring outputs that have the largest products of a row,
`top_blocks`, are computed again with the row as it is:

    w = element * scale, or fma(element, scale, offset)
    even = fma(w, x, even) over the even columns from the first to the last; odd likewise
    product = even + odd

Shapes: M rows, N outputs, K inputs; P pieces of K / P columns; G groups of K / G columns, which
share a scale of the weight.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PIECE = 32  # columns whose products are summed as integers
MAX_CODE = 127
BLOCK = 32  # neighbouring outputs that are computed again together
TOP_BLOCKS = 16  # blocks of a row that are computed again
_MIN_MAGNITUDE = 2.0**-100  # the quotient 127 / max|x| of smaller magnitudes may be infinite


class IntegerWeight(NamedTuple):
    """A weight whose elements are whole numbers from -128 to 127.

    Attributes:
        elements: (N, K) float32, or (M, N, K) where each row of activations has other outputs.
        scales: (N, G) or (M, N, G) float32.
        offsets: The same shape, float32, which are added to element * scale; None without offsets.
    """

    elements: Tensor
    scales: Tensor
    offsets: Tensor | None = None


class RoundedRows(NamedTuple):
    """Rows of activations in 8 bits.

    Attributes:
        codes: (M, K) float32, whole numbers from -127 to 127.
        scales: (M, K / group) float32. An activation is its code times its scale.
    """

    codes: Tensor
    scales: Tensor


def can_multiply(k: int, weight_group: int) -> bool:
    """Return whether rows of k columns can be multiplied in pieces.

    Args:
        k: The number of columns.
        weight_group: The number of columns that share a scale of the weight.
    """
    has_pieces = weight_group == PIECE // 2 or weight_group % PIECE == 0
    return k % PIECE == 0 and has_pieces


def round_rows(x: Tensor, group: int) -> RoundedRows:
    """Return rows rounded to 8 bits.

    Infinity and NaN make the scale of their group infinite or NaN, and with it the row's products.

    Args:
        x: The rows (M, K), of any floating-point type.
        group: The number of neighbouring columns that share a scale; K rounds per token.
    """
    groups = torch.unflatten(x.float(), -1, (-1, group))
    largest = groups.abs().amax(-1, keepdim=True)
    is_tiny = largest < _MIN_MAGNITUDE
    # Dividing a number by a tensor would multiply by the reciprocal, which rounds twice.
    inverse = torch.full_like(largest, MAX_CODE) / largest
    inverse = inverse.masked_fill(is_tiny, 0)
    scales = largest / MAX_CODE
    scales = scales.masked_fill(is_tiny, 0)
    codes = (groups * inverse).round()
    codes = codes.nan_to_num(nan=0.0)  # such a group has no finite scale
    return RoundedRows(codes.flatten(-2), scales.squeeze(-1))


def multiply(x: RoundedRows, weight: IntegerWeight) -> Tensor:
    """Return the products (M, N) of rounded rows and a weight, in float32.

    Args:
        x: The rows, with groups of a multiple of `PIECE` columns.
        weight: The weight, with groups that `can_multiply` accepts.
    """
    n, k = weight.elements.shape
    weight_group = k // weight.scales.shape[1]
    has_row_scale = weight_group == k and weight.offsets is None
    if has_row_scale and x.scales.shape[1] == 1:
        sums = x.codes.double() @ weight.elements.double().t()
        return sums.float() * x.scales * weight.scales.t()
    x_group = k // x.scales.shape[1]
    piece = min(weight_group, PIECE)
    total = x.codes.new_zeros(len(x.codes), n)
    for begin in range(0, k, piece):
        codes = x.codes[:, begin : begin + piece]
        elements = weight.elements[:, begin : begin + piece]
        term = codes @ elements.t()  # exact: below 2**24
        if not has_row_scale:
            group = begin // weight_group
            term = term * weight.scales[:, group]
            if weight.offsets is not None:
                code_sums = codes.sum(-1, keepdim=True)
                term = fused_multiply_add(weight.offsets[:, group], code_sums, term)
        x_scale = x.scales[:, begin // x_group, None]
        total = fused_multiply_add(term, x_scale, total)
    return total * weight.scales.t() if has_row_scale else total


def top_blocks(products: Tensor) -> Tensor:
    """Return the indices (M, T) of the blocks of each row that have its largest products.

    The block with the largest product comes first; of equal ones, the first of the row. NaN counts
    as the smallest product.

    Args:
        products: The products (M, N), float32. The last of N / `BLOCK` blocks may be shorter.
    """
    infinity = torch.inf
    ordered = products.nan_to_num(nan=-infinity, posinf=infinity, neginf=-infinity)
    padded = F.pad(ordered, (0, -products.shape[1] % BLOCK), value=-infinity)
    largest = padded.unflatten(1, (-1, BLOCK)).amax(-1)
    blocks: Tensor = largest.sort(dim=1, descending=True, stable=True).indices
    return blocks[:, :TOP_BLOCKS]


def multiply_exactly(x: Tensor, weight: IntegerWeight) -> Tensor:
    """Return the products (M, N) of rows that are not rounded and a weight, in float32.

    Args:
        x: The rows (M, K), of any floating-point type.
        weight: The weight. Each row of activations may have outputs of its own.
    """
    groups = weight.scales.shape[-1]
    elements = weight.elements.unflatten(-1, (groups, -1))
    weights = elements * weight.scales[..., None]
    if weight.offsets is not None:
        scales, offsets = weight.scales[..., None], weight.offsets[..., None]
        weights = fused_multiply_add(elements, scales, offsets)
    weight_pairs = weights.flatten(-2).unflatten(-1, (-1, 2))
    x_pairs = x.float().unflatten(-1, (-1, 2))
    totals: Tensor = x_pairs.new_zeros(1)
    for i in range(x_pairs.shape[1]):
        totals = fused_multiply_add(weight_pairs[..., i, :], x_pairs[:, None, i], totals)
    return totals.sum(-1)


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c with one rounding, of float32 tensors that broadcast.

    The product is exact in float64. The sum in float64 is rounded to odd (Boldo and Melquiond,
    "Emulation of FMA and correctly rounded sums", IEEE Transactions on Computers, 2008), so that
    the final rounding to float32 is the only one.
    """
    product = a.double() * b.double()
    addend = c.double()
    total = product + addend
    # Knuth's two-sum: the error of the sum, exactly.
    back = total - product
    error = (product - (total - back)) + (addend - back)
    is_even = total.view(torch.int64) % 2 == 0
    is_inexact = error.isfinite() & (error != 0)
    towards = torch.copysign(torch.full_like(error, torch.inf), error)
    odd = torch.nextafter(total, towards)
    return torch.where(is_inexact & is_even, odd, total).float()
