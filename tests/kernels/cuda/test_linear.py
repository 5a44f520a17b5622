"""Products of a few rows and a weight: the interpreted Triton kernels, and when each is chosen."""

import json

import pytest
import torch
from torch import Tensor

from helpers.kernels import INTERPRETED, interpreted
from helpers.rounding import product_bound
from llama.kernels.cuda import linear as gpu
from llama.kernels.cuda.launch import Tile
from llama.kernels.cuda.table import table
from llama.ops.linear import linear


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("tile", [Tile(16, 32, 4, 3, True), Tile(8, 64, 4, 2, False)])
@pytest.mark.parametrize("n", [5, 16, 50])
def test_products(poisoned, dtype, tile, n):
    """Any number of outputs works, and memory past the rows of x is not read."""
    for m in (1, 2, 15, 16) if tile.uses_dot else (1,):
        x, weight = numbers(m, 128, dtype=dtype), numbers(n, 128, dtype=dtype, seed=1)
        exact = x.double() @ weight.double().T
        for wanted in (None, torch.float32):
            with poisoned():
                got = gpu.run(x, weight, tile, wanted)
            assert got.shape == (m, n) and got.dtype is (wanted or dtype)
            assert ((got - exact).abs() <= product_bound(x, weight, got.dtype)).all()


def test_leading_dimensions_and_rows_apart(poisoned):
    x, weight = numbers(2, 3, 2, 64, dtype=torch.float32), numbers(7, 64, dtype=torch.float32)
    tile = Tile(16, 32, 4, 3, True)
    for rows in (x[:, :, 0], x[0, 0]):
        with poisoned():
            got = gpu.run(rows, weight, tile)
        exact = rows.double() @ weight.double().T
        assert ((got - exact).abs() <= product_bound(rows, weight)).all()


def test_the_op_runs_what_was_chosen_for_its_sizes(monkeypatch):
    ran: list[tuple[int, Tile]] = []
    run = gpu.run

    def noted(x: Tensor, weight: Tensor, tile: Tile, dtype: torch.dtype | None) -> Tensor:
        ran.append((len(x), tile))
        return run(x, weight, tile, dtype)

    monkeypatch.setattr(gpu, "run", noted)
    weight = numbers(40, 256, dtype=torch.float32)
    tile = gpu.candidates(40, 256, 3)[0]
    kernels = interpreted({(0, 40, 256, 4): tile, (0, 40, 256, 16): tile})
    for m in (0, 1, 2, 3, 4, 5, 8, 9, 16, 17):
        x = numbers(m, 256, dtype=torch.float32)
        exact = x.double() @ weight.T.double()
        error = (linear(x, weight, kernels=kernels) - exact).abs()
        assert (error <= product_bound(x, weight)).all()
    linear(numbers(3, 256, dtype=torch.bfloat16), weight.bfloat16(), kernels=kernels)
    linear(numbers(3, 256, dtype=torch.float32), weight[:39], kernels=kernels)
    assert ran == [(3, tile), (4, tile), (9, tile), (16, tile)]
    without = table({"attention"}, {torch.float32})
    for other in (without, INTERPRETED):
        linear(numbers(3, 256, dtype=torch.float32), weight, kernels=other)
    assert len(ran) == 4
    x = numbers(9, 256, dtype=torch.float16)
    wide = linear(x, weight.half(), dtype=torch.float32, kernels=kernels)
    assert wide.dtype is torch.float32 and len(ran) == 5


def test_candidates_fit_their_sizes():
    """The candidate tiles fit their sizes: whole K steps, and one row of x without matrix units."""
    assert gpu.candidates(64, 4096, 17) == gpu.candidates(64, 4096, 0) == []
    assert gpu.candidates(64, 100, 1) == []
    for m in (1, 2, 4, 8, 16):
        for k in (1024, 2048, 3584, 4096, 8192, 14336):
            tiles = gpu.candidates(4096, k, m)
            assert len(tiles) >= 3 and all(k % tile.columns == 0 for tile in tiles)
            assert any(not tile.uses_dot for tile in tiles) == (m == 1)
            assert [Tile(*json.loads(json.dumps(tile))) for tile in tiles] == tiles
