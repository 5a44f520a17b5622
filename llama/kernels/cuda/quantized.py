"""Products of rows and a quantized weight on a GPU, which read every weight once as it is stored.

In: x (..., K) of at most 256 rows, and a weight (N, K) in fragment order, see
`llama.weights.fragments`. Out: (..., N). A thread loads the 16 bytes that it multiplies, so that
nothing moves between threads. Two elements are converted at a time by the bits of a float: the code
c becomes the low bits of the float 128 + c of bfloat16, or 1024 + c of float16, which is exact.
Scales and offsets, and what the constants 128 and 1024 add, are applied to sums, not to elements.

- `few_rows_kernel` multiplies up to 16 rows. Each warp multiplies other columns of the same rows of
  the weight, and the program adds the sums of its warps in the end.
- `many_rows_kernel` multiplies 17 to 256 rows, in blocks of up to 128. It rounds each element to
  the type of x. Where N alone has too few programs for a GPU, K is divided among several, and
  `add_parts_kernel` adds their sums in a fixed order.
- `plain_kernel` writes the weight as plain elements, for PyTorch's library.

The methods are those of Kim et al., "Who Says Elephants Can't Run" (2022), and of Frantar et al.,
"MARLIN" (2024): conversion by the bits of a float, and weights in the order of the matrix units.

The file has over 400 lines because all kernels share the conversion, and as Triton passes each
pointer and size as an argument of its own.

Shapes: M rows, in any leading dimensions; N outputs, K inputs; G groups of K / G inputs. In kernels
ROWS rows of the weight per program, and BATCH rows of x, those beyond M as zeros.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama.kernels.cuda.launch import Blocks, Tile, launcher
from llama.kernels.cuda.pdl import launch_dependents, pdl_options, prefetch, wait_for_dependency
from llama.ops.formats import N_BLOCK, ElementFormat, num_blocks

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # numbers of rows M, each with a tile of its own
MAX_FEW_ROWS = 16  # the largest M of `few_rows_kernel`
_INT8 = tl.constexpr(ElementFormat.INT8.value)
_FP8 = tl.constexpr(ElementFormat.FP8.value)
_NIBBLES = tl.constexpr(ElementFormat.NIBBLES.value)
_TILE_ROWS = 16  # rows of a fragment
_MIN_BATCH = 8  # the fewest rows of x that a matrix unit multiplies at once
_MAX_BATCH = 128  # rows of x per program of `many_rows_kernel`
_PLAIN_COLUMNS = 128  # columns per program of `plain_kernel`
_ADDED = 1024  # sums per program of `add_parts_kernel`
_PREFETCHED_PARTS = tl.constexpr(2)  # iterations whose weights are prefetched
_LINE = tl.constexpr(32)  # words in a line of the L2 cache
# Bits of the float 128 of bfloat16, or 1024 of float16, twice. It is an argument of the kernels and
# not a constant in them: a machine instruction has one immediate operand, so that AND with one
# constant and OR with another take two instructions, but with a register only one.
_MAGIC = {torch.bfloat16: 0x43004300}
_MAGIC_OF_FLOAT16 = 0x64006400
_FEW_ROWS_TILES = (
    Tile(16, 512, 4, 4),
    Tile(16, 512, 4, 6),
    Tile(32, 512, 4, 4),
    Tile(32, 256, 4, 4),
    Tile(16, 1024, 8, 3),
)
_MANY_ROWS_TILES = (
    Tile(64, 64, 4, 4),  # it fits 99 KB of shared memory with each format and number of rows
    Tile(64, 128, 4, 3),
    Tile(64, 128, 4, 3, splits=4),
    Tile(128, 64, 8, 4, splits=4),
)


def candidates(kind: int, n: int, k: int, m: int) -> list[Tile]:
    """Return the tiles for M rows times a quantized weight (N, K); none where M is too large.

    Args:
        kind: The weight's `ElementFormat`.
        n: The number of outputs.
        k: The number of inputs.
        m: The number of rows.
    """
    if not 1 <= m <= BUCKETS[-1] or n < 1:
        return []
    tiles = _FEW_ROWS_TILES if m <= MAX_FEW_ROWS else _MANY_ROWS_TILES
    return [x for x in tiles if k % (x.columns * x.splits) == 0]


@launcher
def run(x: Tensor, weight: Blocks, tile: Tile, dtype: torch.dtype | None = None) -> Tensor:
    """Multiply x (..., K) by a quantized weight (N, K).

    Args:
        x: At most 256 rows.
        weight: The weight, in fragment order.
        tile: One of `candidates` for these sizes.
        dtype: That of the result, by default that of x. float32 gives the sums before rounding.

    Returns:
        (..., N).
    """
    n, k = weight.shape
    x = x.contiguous()
    m = x.numel() // k
    assert x.shape[-1] == k, (x.shape, weight.shape)
    assert 1 <= m <= BUCKETS[-1] and k % (tile.columns * tile.splits) == 0, (m, k, tile)
    out = torch.empty(*x.shape[:-1], n, dtype=dtype or x.dtype, device=x.device)
    magic = _MAGIC.get(x.dtype, _MAGIC_OF_FLOAT16)
    constants = {
        "K": k,
        "TILES": tile.rows // _TILE_ROWS,
        "FRAGMENTS": tile.columns // fragment_columns(weight.kind),
        "STAGES": tile.stages,
        "num_warps": tile.warps,
        **pdl_options(x.device),
    }
    weight_arguments = arguments(weight)
    programs = -(-n // tile.rows)
    batch = max(_MIN_BATCH, triton.next_power_of_2(m))
    if m <= MAX_FEW_ROWS:
        few_rows_kernel[(programs,)](
            x, out, m, n, magic, *weight_arguments, BATCH=batch, **constants
        )
        return out
    batch = min(batch, _MAX_BATCH)
    parts = out
    if tile.splits > 1:
        parts = torch.empty(tile.splits, m, n, dtype=torch.float32, device=x.device)
    many_rows_kernel[-(-m // batch), programs, tile.splits](
        x,
        parts,
        m,
        n,
        magic,
        *weight_arguments,
        BATCH=batch,
        SPLITS=tile.splits,
        AT_ONCE=fragments_at_once(constants["FRAGMENTS"], _capability(x.device)),
        **constants,
    )
    if tile.splits > 1:
        count = out.numel()
        add_parts_kernel[(-(-count // _ADDED),)](
            parts, out, count, SPLITS=tile.splits, BLOCK=_ADDED, **pdl_options(x.device)
        )
    return out


@launcher
def plain(weight: Blocks, first: int, end: int, dtype: torch.dtype) -> Tensor:
    """Return rows [first, end) of a quantized weight as plain elements (end - first, K).

    The bounds are multiples of 32, or the end is that of the weight.
    """
    k = weight.shape[1]
    blocks = num_blocks(end - first)
    out = torch.empty(blocks * N_BLOCK, k, dtype=dtype, device=weight.values.device)
    plain_kernel[blocks, k // _PLAIN_COLUMNS](
        out,
        first // N_BLOCK,
        _MAGIC_OF_FLOAT16,
        *arguments(weight),
        K=k,
        FRAGMENTS=_PLAIN_COLUMNS // fragment_columns(weight.kind),
    )
    return out[: end - first]


def fragments_at_once(fragments: int, capability: tuple[int, int]) -> int:
    """Return how many of some fragments `many_rows_kernel` multiplies at once.

    Matrix units take elements from registers in the order of one fragment. Of several, Triton would
    give a warp other rows, and move the elements through shared memory. Those of the B200 read
    their own memory, where each product costs a wait: they multiply all at once.
    """
    return fragments if capability[0] == 10 else 1


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU; (0, 0) for a CPU, which interprets the kernels."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def fragment_columns(kind: int) -> int:
    """Return the columns of a fragment; it has 16 rows and 512 bytes, 16 for each thread."""
    return 64 if kind == ElementFormat.NIBBLES else 32


def arguments(weight: Blocks) -> list[Any]:
    """Return `weight`, `scales`, `outer_scales`, KIND, FIRST, GROUP and PARTS of a kernel."""
    packed = weight.values.flatten().view(torch.int32)
    outer_scales = None
    if weight.scales.dtype is torch.uint8:  # the same memory holds float16 and bytes
        outer_scales = weight.scales.view(torch.float16)
    constants = [weight.kind, weight.first, weight.group, weight.per_group]
    return [packed, weight.scales, outer_scales, *constants]


@triton.jit
def _load_packed(
    weight: tl.tensor,
    first_tile: tl.tensor,
    n: tl.tensor,
    begin: tl.tensor,
    K: tl.constexpr,
    TILES: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Load some fragments of each of some tiles of 16 rows: (TILES, FRAGMENTS * 128) int32.

    Tiles after the last one are loaded as the last one.

    begin: The first fragment.
    """
    last_tile = (n + 31) // 32 * 2 - 1
    tile = tl.minimum(first_tile + tl.arange(0, TILES), last_tile).to(tl.int64)
    word = begin * 128 + tl.arange(0, FRAGMENTS * 128)
    # No other program reads this part of the weight: the cache is for x.
    return tl.load(
        weight + tile[:, None] * (K // WIDTH * 128) + word[None, :], eviction_policy="evict_first"
    )


@triton.jit
def _prefetch(
    weight: tl.tensor,
    first_tile: tl.tensor,
    n: tl.tensor,
    begin: tl.tensor,
    K: tl.constexpr,
    TILES: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Prefetch the words of the first iterations, as `_load_packed` loads them."""
    LINES: tl.constexpr = FRAGMENTS * 128 // _LINE
    last_tile = (n + 31) // 32 * 2 - 1
    tile = tl.minimum(first_tile + tl.arange(0, TILES), last_tile).to(tl.int64)
    line = tl.arange(0, LINES)
    for part in tl.static_range(_PREFETCHED_PARTS):
        first = tl.minimum(begin + part * FRAGMENTS, K // WIDTH - FRAGMENTS)
        at = tile[:, None] * (K // WIDTH * 128) + (first * 128 + line * _LINE)[None, :]
        prefetch(weight + at)


@triton.jit
def _load_scales(
    scales: tl.tensor,
    outer_scales: tl.tensor,
    row: tl.tensor,
    group: tl.tensor,
    part: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """Load the scales of some rows and groups, whose tensors are broadcast: float32.

    part: 0 for scales, 1 for offsets.
    """
    block = row // 32
    row_at = part * 32 + row % 32
    if outer_scales is None:
        loaded = tl.load(scales + (block * GROUPS + group) * (PARTS * 32) + row_at)
        loaded = loaded.to(tl.float32)
    else:
        # Eight groups share 320 bytes per part: a float16 per row, then a signed byte per group.
        eight_at = (block * (GROUPS // 8) + group // 8) * (PARTS * 320)
        byte_at = eight_at + PARTS * 64 + group % 8 * (PARTS * 32) + row_at
        outer = tl.load(outer_scales + eight_at // 2 + row_at).to(tl.float32)
        inner = tl.load(scales + byte_at) ^ 128
        loaded = (inner.to(tl.float32) - 128) * outer
    return loaded


@triton.jit
def _halves(packed: tl.tensor, HALF: tl.constexpr) -> tl.tensor:
    """Return the halves of each word as floats of 16 bits, in a new dimension."""
    low = (packed & 0xFFFF).to(tl.uint16).to(HALF, bitcast=True)
    high = (packed >> 16 & 0xFFFF).to(tl.uint16).to(HALF, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _in_order(
    joined: tl.tensor,
    KIND: tl.constexpr,
    TILES: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    SPLIT: tl.constexpr,
) -> tl.tensor:
    """Return elements of (TILES, FRAGMENTS * 128) words in the order of a matrix.

    `llama.weights.fragments` describes the order of words and of elements in them.

    SPLIT: 0 for (ROWS, FRAGMENTS * width). With 1, fragments are a dimension of their own, in
        front: (FRAGMENTS, ROWS, width). With 2, so are the halves of a fragment: (2 * FRAGMENTS,
        ROWS, width / 2), all first halves in front. With 1 and 2 the four columns of a quad are
        neighbours.
    """
    ROWS: tl.constexpr = TILES * 16
    if KIND == _NIBBLES:
        # tile, fragment, row % 8, quad, half, 16 columns, low, row // 8, high column of a quad
        split = tl.reshape(joined, (TILES, FRAGMENTS, 8, 4, 2, 2, 2, 2, 2))
        if SPLIT == 0:
            ordered = tl.permute(split, (0, 7, 2, 1, 4, 5, 8, 3, 6))
            elements = tl.reshape(ordered, (ROWS, FRAGMENTS * 64))
        elif SPLIT == 1:
            ordered = tl.permute(split, (1, 0, 7, 2, 4, 5, 3, 8, 6))
            elements = tl.reshape(ordered, (FRAGMENTS, ROWS, 64))
        else:
            ordered = tl.permute(split, (4, 1, 0, 7, 2, 5, 3, 8, 6))
            elements = tl.reshape(ordered, (FRAGMENTS * 2, ROWS, 32))
    else:
        # tile, fragment, row % 8, quad, 16 columns, high and low column of a quad, row // 8
        split = tl.reshape(joined, (TILES, FRAGMENTS, 8, 4, 2, 2, 2, 2))
        if SPLIT == 0:
            ordered = tl.permute(split, (0, 7, 2, 1, 4, 5, 3, 6))
            elements = tl.reshape(ordered, (ROWS, FRAGMENTS * 32))
        else:
            ordered = tl.permute(split, (1, 0, 7, 2, 4, 3, 5, 6))
            elements = tl.reshape(ordered, (FRAGMENTS, ROWS, 32))
    return elements


@triton.jit
def _masked_bytes(
    packed: tl.tensor, mask: tl.constexpr, magic: tl.tensor, HALF: tl.constexpr
) -> tl.tensor:
    """Return the floats whose low bits are the masked bits of each byte."""
    even = _halves((packed & mask) | magic, HALF)
    odd = _halves((packed >> 8 & mask) | magic, HALF)
    return tl.join(even, odd)


@triton.jit
def _e4m3_pair(packed: tl.tensor, HALF: tl.constexpr) -> tl.tensor:
    """Return the upper byte of each half, a float of e4m3, as 2**-8 times its value."""
    if tl.bfloat16 == HALF:
        # With a bias of 127 in place of 7, its exponent and mantissa are 2**-120 times the number.
        bits = (packed >> 4 & 0x07F007F0) | (packed & -0x7FFF8000)
        values = _halves(bits, HALF) * 5.192296858534828e33  # 2**112
    else:
        bits = (packed >> 1 & 0x3F803F80) | (packed & -0x7FFF8000)
        values = _halves(bits, HALF)
    return values


@triton.jit
def _unpack(
    packed: tl.tensor,
    magic: tl.tensor,
    KIND: tl.constexpr,
    HALF: tl.constexpr,
    TILES: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    SPLIT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return elements in 16 bits: of four bits and e4m3 in the first result, whole bytes in both.

    Elements of four bits are BIAS + code, where BIAS is 128 or 1024. Those of bytes are the
    difference of the results, which are BIAS + the seven lower bits, and BIAS + the sign bit.
    """
    if KIND == _NIBBLES:
        first = _halves((packed & 0x000F000F) | magic, HALF)
        second = _halves((packed >> 4 & 0x000F000F) | magic, HALF)
        third = _halves((packed >> 8 & 0x000F000F) | magic, HALF)
        fourth = _halves((packed >> 12 & 0x000F000F) | magic, HALF)
        joined = tl.join(tl.join(first, second), tl.join(third, fourth))
        elements = _in_order(joined, KIND, TILES, FRAGMENTS, SPLIT)
        signs = elements
    elif KIND == _FP8:
        joined = tl.join(_e4m3_pair(packed << 8, HALF), _e4m3_pair(packed, HALF))
        elements = _in_order(joined, KIND, TILES, FRAGMENTS, SPLIT)
        signs = elements
    else:
        joined = _masked_bytes(packed, 0x007F007F, magic, HALF)
        elements = _in_order(joined, KIND, TILES, FRAGMENTS, SPLIT)
        joined_signs = _masked_bytes(packed, 0x00800080, magic, HALF)
        signs = _in_order(joined_signs, KIND, TILES, FRAGMENTS, SPLIT)
    return elements, signs


@triton.jit
def _load_elements(
    weight: tl.tensor,
    scales: tl.tensor,
    outer_scales: tl.tensor,
    first_tile: tl.tensor,
    n: tl.tensor,
    begin: tl.tensor,
    magic: tl.tensor,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    TILES: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    HALF: tl.constexpr,
    IS_SCALED: tl.constexpr,
) -> tl.tensor:
    """Load elements (ROWS, FRAGMENTS * WIDTH), in float32 where IS_SCALED, else in HALF."""
    WIDTH: tl.constexpr = 64 if KIND == _NIBBLES else 32
    BIAS: tl.constexpr = 128 if tl.bfloat16 == HALF else 1024
    ROWS: tl.constexpr = TILES * 16
    COLUMNS: tl.constexpr = FRAGMENTS * WIDTH
    RUN: tl.constexpr = min(GROUP, COLUMNS)  # columns that share a scale
    packed = _load_packed(weight, first_tile, n, begin, K, TILES, FRAGMENTS, WIDTH)
    elements, signs = _unpack(packed, magic, KIND, HALF, TILES, FRAGMENTS, 0)
    if KIND == _INT8:
        elements -= signs
    elif KIND == _NIBBLES:
        elements += FIRST - BIAS
    if IS_SCALED:
        row = tl.minimum(first_tile * 16 + tl.arange(0, ROWS), n - 1)[:, None]
        group = (begin * WIDTH // GROUP + tl.arange(0, COLUMNS // RUN))[None, :]
        scale = _load_scales(scales, outer_scales, row, group, 0, K // GROUP, PARTS)
        in_runs = tl.reshape(elements.to(tl.float32), (ROWS, COLUMNS // RUN, RUN))
        in_runs = in_runs * scale[:, :, None]
        if PARTS == 2:
            offset = _load_scales(scales, outer_scales, row, group, 1, K // GROUP, PARTS)
            in_runs += offset[:, :, None]
        elements = tl.reshape(in_runs, (ROWS, COLUMNS))
    return elements


@triton.jit(do_not_specialize=["m", "magic"])
def few_rows_kernel(
    x: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    magic: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    outer_scales: tl.tensor,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    BATCH: tl.constexpr,
    TILES: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Compute ROWS columns of out (M, N) for at most BATCH rows of x.

    A matrix unit multiplies DEPTH columns at a time, all of a group or of a part of one. Where
    groups have 16 columns it multiplies them twice, with zeros in place of the other half of x.
    """
    HALF: tl.constexpr = tl.bfloat16 if x.dtype.element_ty == tl.bfloat16 else tl.float16
    BIAS: tl.constexpr = 128 if tl.bfloat16 == HALF else 1024
    WIDTH: tl.constexpr = 64 if KIND == _NIBBLES else 32
    SPLIT: tl.constexpr = 2 if KIND == _NIBBLES and GROUP <= 32 else 1
    DEPTH: tl.constexpr = WIDTH // SPLIT
    PRODUCTS: tl.constexpr = FRAGMENTS * SPLIT
    PIECES: tl.constexpr = 1 if GROUP >= DEPTH else DEPTH // GROUP
    HAS_OFFSET: tl.constexpr = KIND == _NIBBLES or PARTS == 2
    ROWS: tl.constexpr = TILES * 16
    GROUPS: tl.constexpr = K // GROUP
    ITERATION: tl.constexpr = FRAGMENTS * WIDTH  # columns per iteration
    dtype = x.dtype.element_ty
    first_tile = tl.program_id(0) * TILES
    if PDL:
        launch_dependents()
        _prefetch(weight, first_tile, n, 0, K, TILES, FRAGMENTS, WIDTH)
        wait_for_dependency()
    rows = first_tile * 16 + tl.arange(0, ROWS)
    scale_rows = tl.minimum(rows, n - 1)[None, :]
    x_rows = tl.arange(0, BATCH)
    depth = tl.arange(0, DEPTH)
    product = tl.arange(0, PRODUCTS)
    # The column at which each product begins: those of first halves come first.
    product_at = product % FRAGMENTS * WIDTH + product // FRAGMENTS * DEPTH
    columns = product_at[:, None] + depth[None, :]
    x_at = x + x_rows[None, None, :] * K + columns[:, :, None]
    is_x_row = (x_rows < m)[None, None, :]
    # Made like elements, as a join that no pass folds, so that x has one layout in all products.
    half_ones = tl.zeros([PRODUCTS, ROWS, DEPTH // 2], dtype) + tl.where(m > 0, 1, 0).to(dtype)
    ones = tl.reshape(tl.join(half_ones, half_ones), (PRODUCTS, ROWS, DEPTH))
    sums = tl.zeros([PRODUCTS, ROWS, BATCH], tl.float32)
    sign_sums = tl.zeros([PRODUCTS, ROWS, BATCH], tl.float32)
    x_sums = tl.zeros([PRODUCTS, ROWS, BATCH], tl.float32)
    if GROUP < K:
        group = (product_at // GROUP)[:, None]
        scale = _load_scales(scales, outer_scales, scale_rows, group, 0, GROUPS, PARTS)
        next_scale = scale
        if PIECES == 2:
            scale_2 = _load_scales(scales, outer_scales, scale_rows, group + 1, 0, GROUPS, PARTS)
            next_scale_2 = scale_2
        if PARTS == 2:
            offset = _load_scales(scales, outer_scales, scale_rows, group, 1, GROUPS, PARTS)
            next_offset = offset
            if PIECES == 2:
                offset_2 = _load_scales(
                    scales, outer_scales, scale_rows, group + 1, 1, GROUPS, PARTS
                )
                next_offset_2 = offset_2
    for begin in tl.range(0, K, ITERATION, num_stages=STAGES):
        packed = _load_packed(weight, first_tile, n, begin // WIDTH, K, TILES, FRAGMENTS, WIDTH)
        x_part = tl.load(x_at + begin, mask=is_x_row, other=0.0)
        # From 16 columns, high, quad and low to quads of neighbours, as the elements have them.
        x_split = tl.reshape(x_part, (PRODUCTS, DEPTH // 16, 2, 4, 2, BATCH))
        x_part = tl.reshape(tl.permute(x_split, (0, 1, 3, 2, 4, 5)), (PRODUCTS, DEPTH, BATCH))
        elements, signs = _unpack(packed, magic, KIND, HALF, TILES, FRAGMENTS, SPLIT)
        elements = elements.to(dtype)
        signs = signs.to(dtype)
        if GROUP == K:
            sums = tl.dot(elements, x_part, sums)
            if KIND == _INT8:
                sign_sums = tl.dot(signs, x_part, sign_sums)
            if HAS_OFFSET:
                x_sums = tl.dot(ones, x_part, x_sums)
        else:
            # The scales of the next iteration are loaded while this one multiplies.
            next_at = tl.minimum(begin + ITERATION, K - ITERATION)
            group = ((next_at + product_at) // GROUP)[:, None]
            next_scale = _load_scales(scales, outer_scales, scale_rows, group, 0, GROUPS, PARTS)
            if PIECES == 2:
                next_scale_2 = _load_scales(
                    scales, outer_scales, scale_rows, group + 1, 0, GROUPS, PARTS
                )
            if PARTS == 2:
                next_offset = _load_scales(
                    scales, outer_scales, scale_rows, group, 1, GROUPS, PARTS
                )
                if PIECES == 2:
                    next_offset_2 = _load_scales(
                        scales, outer_scales, scale_rows, group + 1, 1, GROUPS, PARTS
                    )
            for piece in tl.static_range(PIECES):
                piece_elements = elements
                piece_signs = signs
                piece_ones = ones
                piece_scale = scale
                if PIECES == 2:
                    is_piece = (depth // GROUP == piece)[None, None, :]
                    piece_elements = tl.where(is_piece, elements, 0.0)
                    piece_signs = tl.where(is_piece, signs, 0.0)
                    piece_ones = tl.where(is_piece, ones, 0.0)
                    if piece == 1:
                        piece_scale = scale_2
                piece_sums = tl.dot(piece_elements, x_part)
                if KIND == _INT8:
                    piece_sums -= tl.dot(piece_signs, x_part)
                sums += piece_sums * piece_scale[:, :, None]
                if HAS_OFFSET:
                    piece_offset = piece_scale * (FIRST - BIAS if KIND == _NIBBLES else 0)
                    if PARTS == 2:
                        if piece == 1:
                            piece_offset += offset_2
                        else:
                            piece_offset += offset
                    sums += tl.dot(piece_ones, x_part) * piece_offset[:, :, None]
            scale = next_scale
            if PIECES == 2:
                scale_2 = next_scale_2
            if PARTS == 2:
                offset = next_offset
                if PIECES == 2:
                    offset_2 = next_offset_2
    if GROUP == K:
        if KIND == _INT8:
            sums -= sign_sums
        row_sums = tl.sum(sums, 0)
        scale_row = tl.minimum(rows, n - 1)
        row_scale = _load_scales(scales, outer_scales, scale_row, 0, 0, GROUPS, PARTS)
        total = row_sums * row_scale[:, None]
        if HAS_OFFSET:
            row_offset = row_scale * (FIRST - BIAS if KIND == _NIBBLES else 0)
            if PARTS == 2:
                row_offset += _load_scales(scales, outer_scales, scale_row, 0, 1, GROUPS, PARTS)
            total += tl.sum(x_sums, 0) * row_offset[:, None]
    else:
        total = tl.sum(sums, 0)
    out_at = x_rows[None, :] * n + rows[:, None]
    is_out = (x_rows < m)[None, :] & (rows < n)[:, None]
    tl.store(out + out_at, total.to(out.dtype.element_ty), mask=is_out)


@triton.jit(do_not_specialize=["m", "magic"])
def many_rows_kernel(
    x: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    magic: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    outer_scales: tl.tensor,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    BATCH: tl.constexpr,
    TILES: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Compute BATCH rows and ROWS columns of out (SPLITS, M, N), of a part of the columns of K."""
    HALF: tl.constexpr = tl.bfloat16 if x.dtype.element_ty == tl.bfloat16 else tl.float16
    WIDTH: tl.constexpr = 64 if KIND == _NIBBLES else 32
    IS_SCALED: tl.constexpr = GROUP < K or PARTS == 2
    COLUMNS: tl.constexpr = FRAGMENTS * WIDTH
    ROWS: tl.constexpr = TILES * 16
    PART: tl.constexpr = K // SPLITS
    dtype = x.dtype.element_ty
    first_tile = tl.program_id(1) * TILES
    part = tl.program_id(2)
    if PDL:
        launch_dependents()
        _prefetch(weight, first_tile, n, part * PART // WIDTH, K, TILES, FRAGMENTS, WIDTH)
        wait_for_dependency()
    rows = first_tile * 16 + tl.arange(0, ROWS)
    x_rows = tl.program_id(0) * BATCH + tl.arange(0, BATCH)
    columns = tl.arange(0, AT_ONCE * WIDTH)
    is_x_row = x_rows < m
    x_at = x + x_rows[:, None] * K + (part * PART + columns)[None, :]
    sums = tl.zeros([ROWS, BATCH], tl.float32)
    for begin in tl.range(0, PART, COLUMNS, num_stages=STAGES):
        for fragment in tl.static_range(0, FRAGMENTS, AT_ONCE):
            elements = _load_elements(
                weight,
                scales,
                outer_scales,
                first_tile,
                n,
                (part * PART + begin) // WIDTH + fragment,
                magic,
                KIND,
                FIRST,
                GROUP,
                PARTS,
                K,
                TILES,
                AT_ONCE,
                HALF,
                IS_SCALED,
            )
            x_fragment = x_at + begin + fragment * WIDTH
            x_part = tl.load(x_fragment, mask=is_x_row[:, None], other=0.0)
            sums = tl.dot(elements.to(dtype), tl.trans(x_part), sums)
    if not IS_SCALED:
        scale_row = tl.minimum(rows, n - 1)
        sums *= _load_scales(scales, outer_scales, scale_row, 0, 0, 1, PARTS)[:, None]
    out_at = (part * m + x_rows)[None, :].to(tl.int64) * n + rows[:, None]
    is_out = is_x_row[None, :] & (rows < n)[:, None]
    tl.store(out + out_at, sums.to(out.dtype.element_ty), mask=is_out)


@triton.jit(do_not_specialize=["count"])
def add_parts_kernel(
    parts: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
) -> None:
    """Write the sums of parts (SPLITS, count) to BLOCK elements of out."""
    if PDL:
        launch_dependents()
        wait_for_dependency()
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_valid = index < count
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLITS):
        start = parts + tl.cast(count, tl.int64) * part
        total += tl.load(start + index, mask=is_valid, other=0.0)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=is_valid)


@triton.jit(do_not_specialize=["first", "magic"])
def plain_kernel(
    out: tl.tensor,
    first: tl.tensor,
    magic: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    outer_scales: tl.tensor,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    FRAGMENTS: tl.constexpr,
) -> None:
    """Write some columns of a block of 32 rows to out (..., K).

    first: The block whose rows are the first of out.
    """
    WIDTH: tl.constexpr = 64 if KIND == _NIBBLES else 32
    block = tl.program_id(0)
    begin = tl.program_id(1) * FRAGMENTS
    elements = _load_elements(
        weight,
        scales,
        outer_scales,
        (first + block) * 2,
        (first + block + 1) * 32,
        begin,
        magic,
        KIND,
        FIRST,
        GROUP,
        PARTS,
        K,
        2,
        FRAGMENTS,
        tl.float16,
        True,
    )
    rows = block.to(tl.int64) * 32 + tl.arange(0, 32)
    columns = begin * WIDTH + tl.arange(0, FRAGMENTS * WIDTH)
    out_at = out + rows[:, None] * K + columns[None, :]
    tl.store(out_at, elements.to(out.dtype.element_ty))
