"""The tile of each product on a GPU: which one a model uses, and what replaces it on a small GPU.

In: the format and sizes of a weight, and a number of rows. Out: its tiles, the fastest first; none
where PyTorch's library is faster. The choice is a rule, the same on every GPU and at every build.
It was read off the times of an H100 at the matrices of the 8B (`scripts/bench/results`, the files
of 2026-11-27); over a layer it costs at most 6 % more than each matrix's fastest tile. To measure
another GPU, run `scripts/bench/quantized.py`.

Shapes: M rows, N outputs and K inputs of a product.
"""

from llama.kernels.cuda import linear, quantized
from llama.kernels.cuda.launch import Tile
from llama.ops.formats import ElementFormat

_SMALL_N = 4096  # 256 tiles of 16 rows, at most two for each multiprocessor of an H100
_LARGE_N = 16_384  # enough programs without splitting K
_VOCAB_N = 65_536  # the outputs of an lm_head, or more
_LARGE_K = 8192


def buckets(kind: int) -> tuple[int, ...]:
    """Return the numbers of rows M, each with a tile of its own, for a format of weights."""
    return quantized.BUCKETS if kind else linear.BUCKETS


def tiles_for(kind: int, n: int, k: int, m: int, *, is_grouped: bool = False) -> list[Tile]:
    """Return the tiles for M rows times a weight (N, K), the fastest first.

    The later ones are for GPUs that have too little shared memory for the first one.

    Args:
        kind: The weight's `ElementFormat`.
        n: N.
        k: K.
        m: M, a power of two.
        is_grouped: Whether a row of the weight has several scales.
    """
    if not kind:
        fastest = _plain_tile(n, m)
    elif m <= quantized.MAX_FEW_ROWS:
        fastest = _few_rows_tile(kind, n, k, m, is_grouped)
    else:
        fastest = _many_rows_tile(kind, n, k, m, is_grouped)
    if fastest is None:
        return []
    return sorted(all_tiles(kind, n, k, m), key=lambda tile: tile != fastest)


def all_tiles(kind: int, n: int, k: int, m: int) -> list[Tile]:
    """Return all tiles that are compiled for M rows times a weight (N, K), in no order."""
    return quantized.candidates(kind, n, k, m) if kind else linear.candidates(n, k, m)


def compiled_rows(kind: int, m: int) -> int:
    """Return a number that is the same for all M whose products one variant computes."""
    if not kind:
        return min(m, 2)
    return min(max(m, 8), 128)


def _plain_tile(n: int, m: int) -> Tile | None:
    """Return the fastest tile for a plain weight; for several rows it is rarely faster."""
    if m == 1:
        return Tile(4, 512, 4, 6, uses_dot=False)
    if n <= _SMALL_N:
        return Tile(32, 256, 4, 4)
    return Tile(64, 128, 4, 4) if n >= _VOCAB_N else None


def _few_rows_tile(kind: int, n: int, k: int, m: int, is_grouped: bool) -> Tile:
    """Return the fastest tile of `few_rows_kernel`, which multiplies 8 or 16 rows at once."""
    is_full = m > 8
    if kind == ElementFormat.NIBBLES or is_grouped:
        if n >= _LARGE_N:
            return Tile(32, 256, 4, 4)
        if kind != ElementFormat.NIBBLES or is_full:
            return Tile(16, 512, 4, 4)
        return Tile(16, 1024, 8, 3) if n <= _SMALL_N else Tile(16, 512, 4, 6)
    if is_full:
        return Tile(32, 256, 4, 4) if max(n // 2, k) >= _LARGE_K else Tile(32, 512, 4, 4)
    has_more_stages = kind == ElementFormat.INT8 and n <= _SMALL_N
    return Tile(16, 512, 4, 6 if has_more_stages else 4)


def _many_rows_tile(kind: int, n: int, k: int, m: int, is_grouped: bool) -> Tile | None:
    """Return the fastest tile of `many_rows_kernel`, which unpacks a weight per 128 rows.

    None: to make the weight plain and call the library takes less time.
    """
    is_wide = n >= _LARGE_N
    if m > 64 and (is_grouped or kind == ElementFormat.NIBBLES):
        if m > 128 or not (is_wide or (k >= _LARGE_K and kind == ElementFormat.NIBBLES)):
            return None
        if is_wide and kind == ElementFormat.NIBBLES:
            return Tile(64, 128, 4, 3)
    if m > 128 and not is_wide and k < _LARGE_K:
        return None
    if is_wide:
        return Tile(64, 64, 4, 4)
    if kind == ElementFormat.INT8 and not is_grouped:
        return Tile(128, 64, 8, 4, splits=4)
    return Tile(64, 128, 4, 3, splits=4)
