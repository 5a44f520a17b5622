"""The updates of adapters by the interpreted Triton kernels, against products in float64."""

import pytest
import torch
from torch import Tensor

from helpers.kernels import INTERPRETED
from helpers.rounding import HALF, SINGLE, sum_bound
from llama.kernels.cuda import adapters as kernels
from llama.ops.adapters import AdapterRows, AdapterTable, AdapterWeights, Delta, DeltaPart
from llama.ops.kernels import NO_KERNELS

CPU = torch.device("cpu")
NAMES = ["wq", "wo", "w1"]
OUTPUTS = [40, 24, 7]  # of three matrices that are stored as one
NUMBERS = [-1] * 17 + [0, 1, -1, 2, 2, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def adapter_of(rank: int, k: int, parts: list[int], dtype: torch.dtype) -> AdapterWeights:
    """Return an adapter of the product "wo" that updates some of its three matrices."""
    made = []
    for i in parts:
        up, down = draw(OUTPUTS[i], rank, dtype=dtype), draw(rank, k, dtype=dtype)
        made.append(DeltaPart(sum(OUTPUTS[:i]), up, down, 0.3 + rank))
    return AdapterWeights({"wo": Delta(made)})


def exact(
    out: Tensor, x: Tensor, adapters: list[AdapterWeights], numbers: list[int]
) -> tuple[Tensor, Tensor]:
    """Return products with updates in float64, and the bound of their error.

    Two sums are rounded, in float16 the first one's result, and the product.
    """
    right, sizes, terms = out.double(), torch.zeros_like(out, dtype=torch.float64), 0
    for row, number in enumerate(numbers):
        for part in adapters[number].deltas["wo"].parts if number >= 0 else ():
            some = slice(part.first, part.first + len(part.up))
            up, down = part.up.double(), part.down.double()
            right[row, some] += part.scale * (up @ (down @ x[row].double()))
            size = up.abs() @ (down.abs() @ x[row].double().abs())
            sizes[row, some] += part.scale * size
            terms = max(terms, x.shape[1] + up.shape[1])
    bound = sum_bound(sizes, terms) + 4 * SINGLE * (sizes + right.abs())
    if out.dtype is torch.float16:
        bound += HALF * (2 * sizes + right.abs())
    return right, bound


@pytest.mark.parametrize("k, columns", [(48, 128), (200, 32)])
def test_each_row_gets_the_update_of_its_adapter(
    monkeypatch, poisoned, launches, dtype, k, columns
):
    """Tiles have rows of one adapter, of several and of none; adapters have other ranks and parts.

    The columns are in one part or in several. Rows without an adapter keep their bits.
    """
    monkeypatch.setattr(kernels, "COLUMNS", columns)
    monkeypatch.setattr(kernels, "OUTPUTS", 32)
    parts = {16: [0, 1, 2], 48: [0, 2], 32: [1]}
    adapters = [adapter_of(rank, k, some, dtype) for rank, some in parts.items()]
    table = AdapterTable(NAMES, 5, CPU)
    for number, adapter in enumerate(adapters):
        table.put(number, adapter)
    assert table.reach == (frozenset({"wo"}), 64)
    x = draw(len(NUMBERS), k, dtype=dtype)
    out = draw(len(NUMBERS), sum(OUTPUTS), dtype=dtype)
    rows = AdapterRows((), torch.tensor(NUMBERS), table)
    assert rows.of("w1", INTERPRETED) is None
    updates = rows.of("wo", INTERPRETED)
    assert updates is not None
    with poisoned():
        found = updates.add_to(out.clone(), x)
    assert launches == ["shrink_kernel", "expand_kernel"]
    right, bound = exact(out, x, adapters, NUMBERS)
    assert ((found.double() - right).abs() <= bound).all()
    is_base = torch.tensor(NUMBERS) < 0
    assert torch.equal(found[is_base], out[is_base])


def test_the_definition_agrees(launches, dtype):
    """Without the kernel, PyTorch computes the segments of the same rows."""
    adapters = [adapter_of(16, 48, [0, 1], dtype), adapter_of(32, 48, [2], dtype)]
    numbers = [0, 0, -1, 1]
    segments = [(0, 2, adapters[0]), (3, 1, adapters[1])]
    x, out = draw(4, 48, dtype=dtype), draw(4, sum(OUTPUTS), dtype=dtype)
    updates = AdapterRows(segments).of("wo", NO_KERNELS)
    assert updates is not None
    right, bound = exact(out, x, adapters, numbers)
    assert ((updates.add_to(out.clone(), x).double() - right).abs() <= bound).all()
    assert not launches


def test_a_number_is_used_again():
    """An adapter that takes the number of another one replaces all of it."""
    dtype, k = torch.float32, 48
    table = AdapterTable(NAMES, 1, CPU)
    table.put(0, adapter_of(48, k, [0, 1, 2], dtype))
    second = adapter_of(16, k, [1], dtype)
    table.put(0, second)
    x, out = draw(2, k, dtype=dtype), draw(2, sum(OUTPUTS), dtype=dtype)
    updates = AdapterRows((), torch.tensor([0, 0]), table).of("wo", INTERPRETED)
    assert updates is not None
    right, bound = exact(out, x, [second], [0, 0])
    assert ((updates.add_to(out.clone(), x).double() - right).abs() <= bound).all()
