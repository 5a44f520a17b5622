"""Low-rank updates of the rows of a step by their adapters, in two kernels: shrink and expand.

In: products of all rows, the rows that were multiplied, and the number of each row's adapter on the
device. Out: the products with the updates added, as `llama.ops.adapters` defines them. As in Punica
(Chen et al., 2023), adapters of any ranks are in one batch. A program has 16 neighbouring rows, and
multiplies them by the adapter of each in turn: rows of one adapter take one pass, and need not be
sorted. Matrices stay where they are, and a table has their addresses, so that a CUDA graph replays
steps with other adapters.

Shapes: M rows; N outputs and K inputs of a product; R the rank of an adapter, a multiple of 16;
A adapters, P products of a model, C parts of the columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama.kernels.cuda.launch import launcher
from llama.kernels.cuda.pdl import launch_dependents, pdl_options, wait_for_dependency
from llama.ops.adapters import FIELDS, MAX_PARTS, RANK_STEP, NumberedUpdates

ROWS = 16
COLUMNS = 128  # columns of x and down per iteration
OUTPUTS = 128  # outputs per program
MAX_SPLITS = 16  # maximum number of parts of K
_PROGRAMS = 256  # approximate programs for one part of the outputs, if its rank is 16


@launcher
def add_updates(out: Tensor, x: Tensor, updates: NumberedUpdates) -> Tensor:
    """Add the updates of a product in place.

    Args:
        out: (M, N) products.
        x: (M, K) the rows that were multiplied.
        updates: The adapter of each row, and the table of all adapters.

    Returns:
        `out`.
    """
    m, n = out.shape
    k = x.shape[1]
    x = x.contiguous()
    table = updates.table
    assert out.is_contiguous() and table.is_contiguous() and updates.numbers.is_contiguous()
    tiles = triton.cdiv(m, ROWS)
    wanted = max(1, min(MAX_SPLITS, _PROGRAMS // tiles))
    part = triton.cdiv(triton.cdiv(k, COLUMNS), wanted) * COLUMNS
    splits = triton.cdiv(k, part)
    ranks = updates.max_rank
    middle = torch.empty(splits * MAX_PARTS * m * ranks, dtype=torch.float32, device=out.device)
    sizes = {"ROWS": ROWS, "RANKS": RANK_STEP, "PARTS": MAX_PARTS, "FIELDS": FIELDS}
    shrink_kernel[tiles, MAX_PARTS * (ranks // RANK_STEP), splits](
        x,
        updates.numbers,
        table,
        middle,
        m,
        k,
        part,
        ranks,
        updates.product,
        table.shape[1],
        COLUMNS=COLUMNS,
        **sizes,
        **pdl_options(out.device),
    )
    expand_kernel[tiles, triton.cdiv(n, OUTPUTS)](
        out,
        middle,
        updates.numbers,
        table,
        m,
        n,
        splits,
        ranks,
        updates.product,
        table.shape[1],
        SPLITS=MAX_SPLITS,
        OUTPUTS=OUTPUTS,
        **sizes,
        **pdl_options(out.device),
    )
    return out


@triton.jit(
    do_not_specialize=["m", "product", "num_products"],
    do_not_specialize_on_alignment=["numbers"],
)
def shrink_kernel(
    x: tl.tensor,
    numbers: tl.tensor,
    table: tl.tensor,
    middle: tl.tensor,
    m: tl.tensor,
    k: tl.tensor,
    part_columns: tl.tensor,
    ranks: tl.tensor,
    product: tl.tensor,
    num_products: tl.tensor,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    FIELDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Write down * x of ROWS rows, RANKS ranks and a part of the columns to middle.

    middle is (C, PARTS, M, ranks). Rows without an adapter get zeros, and a tile that has only such
    rows nothing.
    """
    if PDL:
        launch_dependents()
        wait_for_dependency()
    blocks = ranks // RANKS
    part = tl.program_id(1) // blocks
    rank = tl.program_id(1) % blocks * RANKS + tl.arange(0, RANKS)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    left = tl.load(numbers + rows, mask=rows < m, other=-1).to(tl.int32)
    number = tl.max(left, 0)
    if number < 0:
        return
    begin = tl.program_id(2) * part_columns
    end = tl.minimum(begin + part_columns, k)
    result = tl.zeros([ROWS, RANKS], tl.float32)
    while number >= 0:
        is_own = left == number
        entry = table + ((number.to(tl.int64) * num_products + product) * PARTS + part) * FIELDS
        down = tl.load(entry).to(tl.pointer_type(x.dtype.element_ty))
        down = tl.multiple_of(down, 16)
        is_rank = rank < tl.load(entry + 4).to(tl.int32)
        sums = tl.zeros([ROWS, RANKS], tl.float32)
        for first in range(begin, end, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            is_column = column < end
            x_at = rows.to(tl.int64)[:, None] * k + column[None, :]
            some = tl.load(x + x_at, mask=is_own[:, None] & is_column[None, :], other=0.0)
            down_at = rank[:, None] * k + column[None, :]
            matrix = tl.load(down + down_at, mask=is_rank[:, None] & is_column[None, :], other=0.0)
            sums += tl.dot(some, tl.trans(matrix))
        result = tl.where(is_own[:, None], sums, result)
        left = tl.where(is_own, -1, left)
        number = tl.max(left, 0)
    row_at = (tl.program_id(2) * PARTS + part) * m + rows
    at = row_at.to(tl.int64)[:, None] * ranks + rank[None, :]
    tl.store(middle + at, result, mask=(rows < m)[:, None])


@triton.jit(
    do_not_specialize=["m", "splits", "product", "num_products"],
    do_not_specialize_on_alignment=["numbers"],
)
def expand_kernel(
    out: tl.tensor,
    middle: tl.tensor,
    numbers: tl.tensor,
    table: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    splits: tl.tensor,
    ranks: tl.tensor,
    product: tl.tensor,
    num_products: tl.tensor,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    FIELDS: tl.constexpr,
    SPLITS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Add scale * up * middle to ROWS rows and OUTPUTS columns of out (M, N).

    middle is as `shrink_kernel` writes it. Its parts are added in order, and their sum is rounded
    to the type of out, as a product's result would be.
    """
    if PDL:
        launch_dependents()
        wait_for_dependency()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    left = tl.load(numbers + rows, mask=rows < m, other=-1).to(tl.int32)
    number = tl.max(left, 0)
    if number < 0:
        return
    is_changed = left >= 0
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    delta = tl.zeros([ROWS, OUTPUTS], tl.float32)
    split = tl.arange(0, SPLITS)
    while number >= 0:
        is_own = left == number
        for part in range(PARTS):
            entry = table + ((number.to(tl.int64) * num_products + product) * PARTS + part) * FIELDS
            up = tl.load(entry + 1).to(tl.pointer_type(out.dtype.element_ty))
            up = tl.multiple_of(up, 16)
            output = outputs - tl.load(entry + 2).to(tl.int32)
            num_outputs = tl.load(entry + 3).to(tl.int32)
            num_ranks = tl.multiple_of(tl.load(entry + 4).to(tl.int32), 16)
            scale = tl.load(entry + 5).to(tl.int32).to(tl.float32, bitcast=True)
            is_output = (output >= 0) & (output < num_outputs)
            end = tl.where(tl.max(is_output.to(tl.int32), 0) > 0, num_ranks, 0)
            sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
            for first in range(0, end, RANKS):
                rank = first + tl.arange(0, RANKS)
                row_at = (split[:, None] * PARTS + part) * m + rows[None, :]
                at = row_at.to(tl.int64)[:, :, None] * ranks + rank[None, None, :]
                is_there = (split < splits)[:, None] & (is_own & (rows < m))[None, :]
                parts = tl.load(middle + at, mask=is_there[:, :, None], other=0.0)
                shrunk = tl.sum(parts, 0).to(out.dtype.element_ty)
                matrix = tl.load(
                    up + output[:, None] * num_ranks + rank[None, :],
                    mask=is_output[:, None],
                    other=0.0,
                )
                sums += tl.dot(shrunk, tl.trans(matrix))
            delta += tl.where(is_own[:, None], sums * scale, 0.0)
        left = tl.where(is_own, -1, left)
        number = tl.max(left, 0)
    at = out + rows.to(tl.int64)[:, None] * n + outputs[None, :]
    mask = is_changed[:, None] & (outputs < n)[None, :]
    before = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (before + delta).to(out.dtype.element_ty), mask=mask)
