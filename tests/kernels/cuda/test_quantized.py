"""Products with quantized weights: the interpreted Triton kernels against the CPU's formats."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers.gpu_weights import FILES, coded_bound
from helpers.kernels import INTERPRETED, KERNELS_RUN, interpreted
from llama.kernels.cuda import quantized as gpu
from llama.kernels.cuda.launch import Tile
from llama.loading.weights import warn_of_plain
from llama.model.layers import Linear
from llama.ops.batch import ForwardContext
from llama.weights.choice import on_gpu, random_weight
from llama.weights.coded import Coded
from llama.weights.groups import GroupedWeight
from llama.weights.plain import PlainWeight

pytestmark = pytest.mark.skipif(not KERNELS_RUN, reason="the CPU's kernels pack the weights")
CPU = torch.device("cpu")
TILES = {1: Tile(16, 256, 4, 2), 3: Tile(32, 128, 4, 2), 40: Tile(64, 128, 4, 2, splits=2)}


def rows(m: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)


def held(name: str) -> GroupedWeight:
    found = on_gpu(FILES[name], None, CPU)
    assert isinstance(found, GroupedWeight)
    return found


@pytest.mark.parametrize("name", FILES)
def test_products_are_those_of_the_numbers_in_the_file(poisoned, dtype, name):
    """Products use the values of the file; for many rows, rounded to the type of x.

    The bound follows from float32 and the number of columns.
    """
    weight, numbers = held(name).blocks(), FILES[name].plain()
    assert weight is not None
    for m, tile in TILES.items():
        x = rows(m, weight.shape[1], dtype)
        with poisoned():
            got = gpu.run(x, weight, tile, torch.float32)
        is_exact = m <= gpu.MAX_FEW_ROWS or weight.group == weight.shape[1]
        exact = x.double() @ (numbers if is_exact else numbers.to(dtype)).double().T
        bound = coded_bound(x, FILES[name], few_rows=m <= gpu.MAX_FEW_ROWS)
        assert ((got - exact).abs() <= bound).all()


@pytest.mark.parametrize("name", FILES)
def test_fragments_are_multiplied_at_once_on_a_b200(poisoned, monkeypatch, name):
    """The sum is the same, in which only the order of additions may differ."""
    weight = held(name).blocks()
    assert weight is not None and gpu.fragments_at_once(4, (10, 0)) == 4
    assert gpu.fragments_at_once(4, (9, 0)) == gpu.fragments_at_once(4, (8, 0)) == 1
    x = rows(40, weight.shape[1], torch.float32)
    expected = gpu.run(x, weight, TILES[40], torch.float32)
    monkeypatch.setattr(gpu, "_capability", lambda device: (10, 0))
    with poisoned():
        found = gpu.run(x, weight, TILES[40], torch.float32)
    bound = coded_bound(x, FILES[name], few_rows=False)
    assert ((found - expected).abs() <= 2 * bound).all()


@pytest.mark.parametrize("name", ["a byte", "four bits", "e4m3"])
def test_a_thread_s_words_have_its_rows_and_columns(name):
    """The order of elements is that of the module's description, written as loops."""
    weight, codes = held(name), FILES[name].codes
    first = FILES[name].table[0] if name == "a byte" else 0
    words = weight.values.flatten().view(torch.int32).view(-1, 128).tolist()
    per_unit = 64 if name == "four bits" else 32
    units = weight.shape[1] // per_unit
    for thread in (0, 5, 31):
        for block, half, unit, word in ((1, 0, 1, 3), (0, 1, units - 1, 1)):
            bits = words[(block * 2 + half) * units + unit][4 * thread + word] % 2**32
            for r in range(2):
                row = codes[32 * block + 16 * half + thread // 4 + 8 * r]
                start = per_unit * unit + 2 * (thread % 4)
                if name == "four bits":
                    columns = [start + 16 * word + 8 * h + j for h in range(2) for j in range(2)]
                    found = [bits >> 4 * (4 * (i % 2) + 2 * (i // 2) + r) & 15 for i in range(4)]
                else:
                    first_column = start + 16 * (word // 2) + 8 * (word % 2)
                    columns = [first_column, first_column + 1]
                    found = [bits >> 8 * (2 * i + r) & 255 for i in range(2)]
                assert found == [int(x + first) % 256 for x in row[columns].tolist()]


@pytest.mark.parametrize("name", FILES)
def test_rows_are_read_from_fragments(name):
    weight, exact = held(name), FILES[name].plain()
    ids = torch.tensor([[0, 63], [17, 40]])
    assert weight.is_fragmented and weight.part([slice(0, 32)], slice(0, 512)) is None
    assert torch.equal(weight.exact(), exact)
    assert torch.equal(weight.rows(ids), exact[ids].bfloat16())


@pytest.mark.parametrize("name", ["a byte", "Q4_K"])
def test_rows_that_do_not_fill_a_block(poisoned, name, monkeypatch):
    """The rows are multiplied by tiles and by the library, and the padding has no columns."""
    monkeypatch.setattr("llama.kernels.cuda.table._CHUNK_ELEMENTS", 32 * 512)
    file = FILES[name]
    offset = None if file.offset is None else file.offset[:50]
    part = replace(file, codes=file.codes[:50], scale=file.scale[:50], offset=offset)
    weight = on_gpu(part, None, CPU)
    assert isinstance(weight, GroupedWeight) and weight.blocks() is not None
    n, k = weight.shape
    many = Tile(64, 128, 4, 2)  # the third and the fourth tile of 16 rows are behind the last block
    for m, tiles in (
        (3, {(weight.kind, n, k, 4): many}),
        (17, {(weight.kind, n, k, 32): many}),
        (7, {}),
    ):
        context = ForwardContext(kernels=interpreted(tiles))
        x = rows(m, k, torch.float32)
        with poisoned():
            got = weight.linear(x, context=context)
        exact = x.double() @ part.plain().double().T
        assert got.shape == (m, 50)
        assert ((got - exact).abs() <= coded_bound(x, part, few_rows=m <= gpu.MAX_FEW_ROWS)).all()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("type_", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_plain_numbers_are_those_of_the_file(poisoned, type_, name):
    """Dequantized values are those of the file.

    They are equal bit for bit, but the interpreter truncates to bf16, where a GPU rounds.
    """
    weight, exact = held(name).blocks(), FILES[name].plain()[32:]
    assert weight is not None
    with poisoned():
        got = gpu.plain(weight, 32, 64, type_)
    if type_ is torch.bfloat16:
        exact = (exact.view(torch.int32) & -0x10000).view(torch.float32)
    assert torch.equal(got, exact.to(type_))


def test_what_runs_for_how_many_rows(launches, monkeypatch):
    """The number of rows decides what runs.

    It is the tile for the kind and sizes; otherwise the weight is dequantized in parts.
    """
    monkeypatch.setattr("llama.kernels.cuda.table._CHUNK_ELEMENTS", 32 * 512)
    weight = held("four bits")
    n, k = weight.shape
    tiles = {(3, n, k, 4): TILES[3], (1, n, k, 8): TILES[3]}
    for m, expected in ((3, ["few_rows_kernel"]), (7, ["plain_kernel"] * 2)):
        launches.clear()
        x = rows(m, k, torch.float32)
        got = weight.linear(x, context=ForwardContext(kernels=interpreted(tiles)))
        exact = x.double() @ weight.exact().double().T
        few_rows = m <= gpu.MAX_FEW_ROWS and launches == ["few_rows_kernel"]
        assert ((got - exact).abs() <= coded_bound(x, FILES["four bits"], few_rows=few_rows)).all()
        assert launches == expected
        assert torch.equal(weight.linear(x), x @ weight.exact().T)  # the PyTorch implementation
    monkeypatch.setattr("llama.kernels.cuda.table._CHUNK_ELEMENTS", n * k)
    monkeypatch.setattr(torch, "cat", None)  # the product of a single part is not copied
    weight.linear(x, context=ForwardContext(kernels=INTERPRETED))
    assert launches == ["plain_kernel"] * 3


@pytest.mark.parametrize("name", FILES)
def test_a_check_draws_weights_in_the_form_of_a_file(name):
    """A check draws weights in the format of a file.

    The variant of the kernel that is compiled is the same, at other sizes.
    """
    asked = held(name)
    found = random_weight(asked.quant_key, 96, 1024, CPU)
    assert isinstance(found, GroupedWeight) and found.quant_key == asked.quant_key
    ours, theirs = found.blocks(), asked.blocks()
    assert ours is not None and theirs is not None and ours.scales.dtype is theirs.scales.dtype
    exact = found.exact()
    assert exact.isfinite().all() and len(exact.unique()) > 500


@pytest.mark.parametrize(
    "changes", [{"k": 576}, {"group": 192, "k": 768}, {"table": torch.linspace(0, 1, 16)}], ids=str
)
def test_what_the_kernels_do_not_take_becomes_bf16(changes):
    asked = {"k": 512, "group": 32, "table": torch.arange(16.0)} | changes
    codes = torch.ones(64, asked["k"], dtype=torch.uint8)
    file = Coded(codes, asked["table"], torch.ones(64, asked["k"] // asked["group"]))
    found, taken = on_gpu(file, None, CPU), Linear(512, 64)
    taken.weight = held("Q4_K")
    assert type(found) is PlainWeight and torch.equal(found.plain(), file.plain(torch.bfloat16))
    matrix = Linear(asked["k"], 64)
    matrix.weight, matrix.names = found, ("layers.0.attention.wo.weight",)
    with pytest.warns(UserWarning, match=r"^1 of 2 matrices of IQ4_NL are .* bf16.*\.0\.att.*wo"):
        warn_of_plain([matrix, taken], "IQ4_NL")
    with warnings.catch_warnings(action="error"):
        warn_of_plain([taken], "IQ4_NL")


def test_quantized_weights_have_tiles_for_up_to_256_rows():
    """Whatever K a rank of 8 has, there are tiles, of whole steps of K."""
    for kind in (1, 2, 3):
        for k in (1024, 1792, 2048, 3584, 4096, 8192, 14336):
            for m in gpu.BUCKETS:
                tiles = gpu.candidates(kind, 4096, k, m)
                assert tiles and all(k % (tile.columns * tile.splits) == 0 for tile in tiles)
        assert gpu.candidates(kind, 4096, 4096, 257) == []
