"""The rule of tiles: near the fastest of an H100's times, and tiles that fit their products."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the candidates are alongside Triton's kernels")

from helpers.launch import REPO
from llama.kernels.cuda.launch import Tile
from llama.kernels.cuda.tiles import all_tiles, buckets, compiled_rows, tiles_for

_TIMES = Path("scripts/bench/results/2026-11-27-gpu-h100-quantized.txt")
_SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # wqkv, wo, w13 and w2
_FORMATS = {  # the kind of elements, and whether a row has several scales
    "bf16": (0, False), "int8": (1, False), "fp8": (2, False),
    "int4": (3, True), "W4A16": (3, True), "Q6_K": (1, True),
}  # fmt: skip
_LINE = re.compile(r"(\w+) +(\d+)  (\S.*?)  +" + r" +".join([r"([\d.]+)"] * 5))


def named(tile: Tile) -> str:
    """Return the name of a tile in the table of times."""
    splits = f" / {tile.splits}" if tile.splits > 1 else ""
    kind = "" if tile.uses_dot else " FMA"
    return f"{tile.rows}x{tile.columns} {tile.warps}w {tile.stages}s{kind}{splits}"


def test_the_rule_is_near_the_fastest_tile_of_each_matrix():
    """Over a layer of the 8B, the tiles take at most 6 % more than the fastest that were timed."""
    times: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(dict)
    for line in (REPO / _TIMES).read_text().splitlines():
        if found := _LINE.fullmatch(line):
            name, m, how, *us = found.groups()
            times[name, int(m)][how] = [float(x) for x in us[:-1]]
    assert len(times) == 24
    for (name, m), timed_us in times.items():
        kind, is_grouped = _FORMATS[name]
        library = "dequantized" if kind else "cuBLAS"
        chosen = best = 0.0
        for i, (n, k) in enumerate(_SHAPES):
            tiles = tiles_for(kind, n, k, m, is_grouped=is_grouped)
            how = named(tiles[0]) if tiles else library
            if how not in timed_us:
                continue  # this tile was not timed for this format
            chosen += timed_us[how][i]
            timed = {library, *map(named, all_tiles(kind, n, k, m))} & timed_us.keys()
            best += min(timed_us[x][i] for x in timed)
        assert 0 < chosen <= 1.06 * best, (name, m, chosen, best)


@pytest.mark.parametrize("kind", [0, 1, 2, 3])
def test_each_product_has_its_tile_and_the_others_in_reserve(kind):
    """The tiles of a product fit its sizes; where the library is faster there is none."""
    for n, k, m in ((96, 512, 1), (28672, 4096, 4), (1024, 8192, 16), (96, 100, 1)):
        found = tiles_for(kind, n, k, m)
        every = all_tiles(kind, n, k, m)
        assert sorted(found) == sorted(every) or not found
        assert bool(found) == (k % 256 == 0 and not (kind == 0 and n == 28672))
    assert not tiles_for(3, 4096, 4096, 256) and tiles_for(1, 28672, 4096, 256)
    assert {compiled_rows(kind, m) for m in buckets(kind)} == (
        {8, 16, 32, 64, 128} if kind else {1, 2}
    )
