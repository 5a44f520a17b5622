"""Packed products against float64, alone and in a batch, with each variant and without kernels."""

import ctypes
import random
import shutil
import subprocess

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.kernels import HAS_KERNELS, library
from helpers.rounding import product_bound
from llama.checkpoint.packing import pack_matrix
from llama.kernels.cpu import build, native
from llama.model.layers import Linear
from llama.ops.linear import linear
from llama.weights.blocks import BlockedWeight, can_pack
from llama.weights.bytes import BytesWeight
from llama.weights.choice import packed
from llama.weights.plain import PlainWeight
from llama.weights.weight import Weight

_rng = random.Random(5)
SHAPES = [  # (M, N, K): around blocks of 14 and 6 rows, K blocks of 1,024 and M blocks of 256
    (1, 32, 2), (1, 64, 4096), (6, 96, 512), (7, 32, 514), (14, 32, 1024), (15, 160, 1026),
    (29, 64, 66), (113, 32, 514), (256, 32, 34), (257, 64, 1030), (600, 32, 64),
    # Tiles of 16 rows and 32 k, in row blocks of one and two.
    (16, 64, 2048), (17, 32, 32), (33, 96, 2080), (257, 32, 1056),
    # Rows of a weight that do not fill the last block.
    (1, 33, 1030), (5, 4, 64), (40, 50, 1056), (257, 66, 514),
] + [
    (_rng.randint(1, 70), 32 * _rng.randint(1, 5), 2 * _rng.randint(1, 400)) for _ in range(3)
]  # fmt: skip


KINDS: list[type[Weight]] = [BytesWeight, BlockedWeight]
FEW_ROWS = 4  # vector instructions compute these, as in amx_few_rows.h, where weights are quantized


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def check_product(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Check that the error is at most one rounding to bf16 and the loss of K float32 additions."""
    x, weight = x.double(), weight.double()
    exact, size = x @ weight.T, x.abs() @ weight.abs().T
    assert out.dtype is torch.bfloat16
    assert ((out.double() - exact).abs() <= exact.abs() / 256 + size * x.shape[1] / 2**23).all()


def same(a: Tensor, b: Tensor) -> bool:
    """Check that results are equal bit for bit.

    Our kernels add the products of a row in one order, and packing adds nothing.
    """
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("m, n, k", SHAPES)
def test_a_packed_product_is_the_product(kernels, m, n, k):
    x, weight = numbers(m, k), numbers(n, k, seed=1)
    check_product(x, weight, BlockedWeight.pack(weight.clone()).linear(x))


@pytest.mark.parametrize("m, n, k", SHAPES[::4])
def test_torch_body(no_kernels, m, n, k):
    x, weight = numbers(m, k), numbers(n, k, seed=1)
    check_product(x, weight, BlockedWeight.pack(weight.clone()).linear(x))
    check_product(x, weight, linear(x, weight))


@pytest.mark.parametrize("k", [1030, 1056])
def test_a_row_gives_the_same_bytes_alone_and_in_any_batch(kernels, k):
    x, weight = numbers(130, k), numbers(96, k, seed=1)
    x[::9] *= 2.0**-124  # its products are subnormal, which tiles flush to zero
    for kind in KINDS:
        product = kind.pack(weight.clone()).linear
        whole = product(x)
        for m in [*range(1, 71), 112, 113, 129]:
            assert same(product(x[:m]), whole[:m]), m
        for row in range(0, 130, 9):
            assert same(product(x[row : row + 1]), whole[row : row + 1]), row


@pytest.mark.parametrize("k", [258, 256])
def test_any_number_of_threads_gives_the_same_bytes(kernels, k):
    product = BlockedWeight.pack(numbers(320, k, seed=1)).linear
    for m in (1, 9, 120):
        x = numbers(m, k)
        alone = product(x)
        for threads in (2, 3):
            torch.set_num_threads(threads)  # conftest restores the number
            assert same(product(x), alone)
        torch.set_num_threads(1)


def test_packing_reorders_the_same_memory_and_unpack_gives_it_back():
    """Packing reorders memory in place, and `unpack` restores it bit for bit."""
    bits = torch.randint(-(2**15), 2**15, (4128, 6), dtype=torch.int16)  # any bytes, including NaN
    weight = bits.view(torch.bfloat16).clone()
    blocked = BlockedWeight.pack(weight)
    assert blocked.values.shape == (129, 3, 32, 2) and blocked.shape == (4128, 6)
    assert blocked.values.data_ptr() == weight.data_ptr()
    assert torch.equal(blocked.plain().view(torch.int16), bits)
    ids = torch.tensor([0, 31, 32, 4127, 4127])
    assert torch.equal(blocked.rows(ids).view(torch.int16), bits[ids])


@pytest.mark.parametrize("has_kernels", [True, False])
def test_a_block_that_is_not_full_is_padded_in_place(has_kernels, monkeypatch):
    """The memory has whole blocks; what lies after the rows is not read, and no id reaches it."""
    if not has_kernels:
        monkeypatch.setattr(native, "kernels", lambda: None)
    weight = numbers(50, 6)
    plain = PlainWeight.empty(50, 6, "cpu", torch.bfloat16)
    plain.values.data.fill_(torch.nan)
    assert plain.refilled(weight) is plain and same(plain.plain(), weight)
    assert same(plain.tensors()["values"], weight)
    memory = plain.values.data
    blocked = BlockedWeight.pack_memory(memory, 50)
    assert blocked.values.shape == (2, 3, 32, 2) and blocked.shape == (50, 6)
    assert blocked.values.data_ptr() == memory.data_ptr() and blocked.is_whole()
    assert same(blocked.plain(), weight) and same(blocked.rows(torch.tensor([49])), weight[49:])
    assert not blocked.values.isnan().any() and blocked.is_finite and not blocked.has_empty_row
    given = weight.clone()
    other = BlockedWeight.pack(given)  # a copy, as the memory of others may follow the rows
    assert same(other.values, blocked.values) and same(given, weight)
    whole = blocked.part([slice(32, 50)], slice(0, 6))
    assert whole is not None and same(whole.plain(), weight[32:])
    assert blocked.part([slice(0, 40)], slice(0, 6)) is None
    if has_kernels:
        for outside in (50, 63):
            with pytest.raises(IndexError):
                blocked.rows(torch.tensor([outside]))


def test_the_layout_that_the_kernels_file_describes():
    weight = torch.arange(64 * 4).view(64, 4).bfloat16()
    flat = BlockedWeight.pack(weight.clone()).values.flatten()
    assert flat[:4].tolist() == [*weight[0, :2].tolist(), *weight[1, :2].tolist()]
    assert flat[64:68].tolist() == [*weight[0, 2:].tolist(), *weight[1, 2:].tolist()]
    assert flat[128:130].tolist() == weight[32, :2].tolist()


def test_rows_of_int8_are_what_they_stand_for():
    small = BytesWeight.pack(numbers(96, 14))
    ids = torch.tensor([95, 0, 33, 33])  # exact: one product of two values each
    assert torch.equal(small.rows(ids), small.exact()[ids].bfloat16())


def test_rows_of_an_unpacked_weight_are_an_embedding():
    weight = numbers(5, 3)
    assert torch.equal(PlainWeight.pack(weight).rows(torch.tensor([4, 0])), weight[[4, 0]])


@pytest.mark.parametrize("k", [2, 32])
def test_rounding_is_to_the_nearest_and_to_even_at_ties(kernels, k):
    """Rounding is to the nearest number, and to even at ties.

    Each row has a single weight of 1, so that the sums are exactly the given ones.
    """
    weight = torch.zeros(32, k).bfloat16()
    weight[:, 0] = 1
    weight[1, 1], weight[2, 1], weight[3, 1] = 1, 1.5, -1
    x = torch.tensor([[256.0, 1.0], [258.0, 1.0], [-258.0, 1.0]]).bfloat16()  # bf16 steps by 2 here
    out = BlockedWeight.pack(weight).linear(F.pad(x, (0, k - 2)))
    assert out[:, :4].tolist() == [
        [256, 256, 258, 255],
        [258, 260, 260, 256],
        [-258, -256, -256, -260],
    ]


@pytest.mark.parametrize("k", [4, 32])
def test_infinities_and_nans_pass_through(kernels, k):
    inf, nan = float("inf"), float("nan")
    weight = torch.zeros(32, k).bfloat16()
    weight[0], weight[1, :4] = 1, torch.tensor([1.0, 1.0, 1.0, -1.0])
    product = BlockedWeight.pack(weight.clone()).linear
    x = torch.tensor([[inf, 0, 0, 0], [inf, 0, 0, inf], [nan, 0, 0, 0], [3e38, 3e38, 0, 0]])
    x = F.pad(x, (0, k - 4)).bfloat16()
    x.view(torch.int16)[2, 0] = 0x7FFF  # a NaN of all ones: rounding must not carry into its sign
    assert repr(product(x)[:, :2].tolist()) == repr(
        [[inf, inf], [inf, nan], [nan, nan], [inf, inf]]
    )
    assert product(x)[:, 2].isnan().tolist() == [True, True, True, False]  # inf x 0


def test_rows_that_are_not_contiguous(kernels):
    weight = numbers(64, 20, seed=1)
    wide = numbers(9, 50)
    for kind in KINDS:
        product = kind.pack(weight.clone()).linear
        for x in (wide[:, 3:23], wide[::2, 10:30], numbers(20, 9).T):
            assert same(product(x), product(x.contiguous()))


@pytest.mark.parametrize("k", [8, 32])
def test_no_rows(kernels, k):
    assert BlockedWeight.pack(numbers(64, k)).linear(numbers(0, k)).shape == (0, 64)


@pytest.mark.parametrize(
    "weight",
    [
        numbers(32, 7),
        numbers(32, 8).float(),
        numbers(32, 8).half(),
        numbers(8, 32).T,
        numbers(0, 8),
        numbers(257)[1:].view(32, 8),
        torch.empty(32, 8, device="meta", dtype=torch.bfloat16),
    ],
    ids=["odd", "float32", "float16", "transposed", "empty", "offset", "meta"],
)
def test_what_does_not_fit_stays_as_it_is(weight):
    assert not can_pack(weight)
    for quantize in (None, "int8"):
        kept = packed(weight, quantize)
        assert type(kept) is PlainWeight and kept.plain().data_ptr() == weight.data_ptr()
    if weight.device.type == "cpu":
        x = torch.ones(2, weight.shape[1], dtype=weight.dtype)
        assert torch.equal(kept.linear(x), F.linear(x, weight))  # both sides are the same call


@pytest.mark.parametrize("kernels", ["avx2"], indirect=True)
def test_weights_are_packed_once_where_there_are_kernels(kernels):
    layer = Linear(8, 64)
    layer.weight = PlainWeight.pack(numbers(64, 8))
    pack_matrix(layer)
    blocked = layer.weight
    assert type(blocked) is BlockedWeight
    pack_matrix(layer)
    assert layer.weight is blocked


def test_without_kernels_nothing_is_packed(no_kernels):
    assert type(packed(numbers(64, 8))) is PlainWeight


def test_int8_is_off_by_half_a_scale_at_most():
    weight = numbers(2080, 30) * torch.logspace(-6, 6, 2080)[:, None].bfloat16()
    weight[7] = 0
    small = BytesWeight.pack(weight)
    assert small.values.dtype is torch.int8 and small.values.shape == (65, 15, 32, 2)
    restored, scales = small.exact(), small.scales.flatten()
    assert (restored[7] == 0).all()
    off = (restored.double() - weight.double()).abs()
    assert (off <= scales[:, None].double() * 0.5001).all()
    assert torch.allclose(scales, weight.float().abs().amax(1) / 127)


@pytest.mark.parametrize("m, n, k", SHAPES[::2])
def test_an_int8_product_is_the_product_with_what_is_packed(kernels, m, n, k):
    x, small = numbers(m, k), BytesWeight.pack(numbers(n, k, seed=1))
    check_product(x, small.exact(), small.linear(x))


@pytest.mark.parametrize("n, k", [(32, 2), (64, 514), (96, 4096), (4128, 66), (50, 514)])
def test_the_kernels_pack_as_torch_does(kernels, n, k):
    """The kernels pack as PyTorch does, bit for bit: one division and one rounding per value."""
    weight = numbers(n, k) * torch.logspace(-20, 20, n)[:, None].bfloat16()
    weight[5] = 0
    blocked, small = BlockedWeight.pack(weight.clone()), BytesWeight.pack(weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "kernels", lambda: None)
        expected, expected_small = BlockedWeight.pack(weight.clone()), BytesWeight.pack(weight)
    assert same(blocked.values, expected.values)
    assert torch.equal(small.values, expected_small.values)
    assert torch.equal(small.scales, expected_small.scales)


def test_int8_torch_body(no_kernels):
    x, small = numbers(9, 66), BytesWeight.pack(numbers(96, 66, seed=1))
    check_product(x, small.exact(), small.linear(x))


@pytest.mark.parametrize("m", [1, 9, 40])
def test_float32_results_are_the_sums_before_they_are_rounded(kernels, m):
    x, weight = numbers(m, 514), numbers(96, 514, seed=1)
    for kind in KINDS:
        held = kind.pack(weight.clone())
        wide = held.linear(x, torch.float32)
        assert wide.dtype is torch.float32
        assert same(wide.bfloat16(), held.linear(x))
        stands_for = held.exact() if isinstance(held, BytesWeight) else held.plain()
        exact = x.double() @ stands_for.double().T
        assert ((wide - exact).abs() <= product_bound(x, stands_for)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torch_bodies_give_the_type_that_is_asked_for(no_kernels, dtype):
    x, weight = numbers(3, 66), numbers(96, 66, seed=1)
    kinds: list[type[Weight]] = [PlainWeight, *KINDS]
    for kind in kinds:
        held = kind.pack(weight.clone())
        assert held.linear(x, dtype).dtype is dtype
        assert held.linear(x).dtype is torch.bfloat16


def test_wrong_rows_are_refused(kernels):
    blocked = BlockedWeight.pack(numbers(32, 8))
    for x in (numbers(2, 6), numbers(2, 8).float()):
        with pytest.raises(AssertionError):
            blocked.linear(x)


def loaded() -> ctypes.CDLL:
    kernels = native.kernels()
    assert kernels is not None
    return kernels


def products_of_tiles() -> int:
    """Return how many tile products the emulation has made so far."""
    return ctypes.c_long.in_dll(loaded(), "amx_products").value


@pytest.mark.parametrize("kernels", ["amx_emulated"], indirect=True)
def test_tiles_do_all_products_of_whole_steps_and_no_others(kernels):
    torch.set_num_threads(1)  # two threads may compute the same piece
    BlockedWeight.pack(numbers(32, 32)).linear(numbers(1, 32))  # after the kernels' own check
    for m, n, k in [(1, 32, 32), (16, 96, 1056), (17, 64, 64), (100, 32, 2080), (300, 32, 64)]:
        for kind in KINDS:
            before = products_of_tiles()
            kind.pack(numbers(n, k)).linear(numbers(m, k))
            tiles = 0 if kind is BytesWeight and m <= FEW_ROWS else -(-m // 16)
            assert products_of_tiles() - before == tiles * n // 16 * k // 32
    for m, n, k in [(5, 32, 32), (17, 96, 1056), (300, 32, 64)]:
        before = products_of_tiles()
        rounding = BytesWeight.pack(numbers(n, k))
        assert rounding.round_activations(per_token=True)
        rounding.linear(numbers(m, k))
        assert products_of_tiles() - before == -(-m // 16) * n // 16 * -(-k // 64)
    before = products_of_tiles()
    for m, n, k in [(1, 32, 30), (16, 64, 1072), (40, 32, 34)]:
        BlockedWeight.pack(numbers(n, k)).linear(numbers(m, k))
    assert products_of_tiles() == before


@pytest.mark.parametrize("kernels", ["amx_emulated"], indirect=True)
@pytest.mark.parametrize("fault, checked", [("amx_refused", 0), ("amx_wrong", 8)])
def test_tiles_that_do_not_work_are_not_used(kernels, monkeypatch, tmp_path, fault, checked):
    torch.set_num_threads(1)  # two threads may compute the same piece
    # a copy of the library that has used no tiles yet
    copy = ctypes.CDLL(shutil.copy(loaded()._name, tmp_path))
    ctypes.c_int.in_dll(copy, fault).value = 1
    monkeypatch.setattr(native, "kernels", lambda: copy)
    for m in (1, 33):
        x, weight = numbers(m, 64), numbers(32, 64, seed=1)
        check_product(x, weight, BlockedWeight.pack(weight.clone()).linear(x))
        assert products_of_tiles() == checked


@pytest.mark.skipif("amx_bf16" not in native.cpu_flags(), reason="this CPU has no tiles")
def test_the_tiles_of_the_cpu_give_the_bytes_of_the_emulation(monkeypatch):
    """The tiles of the CPU give the bytes of the emulation.

    The emulation adds in the tiles' order. Vector instructions give other bytes, so equality shows
    that tiles are used.
    """
    for m, n, k in [(4, 64, 2048), (16, 32, 32), (33, 64, 1056), (300, 96, 512), (520, 288, 544)]:
        x, weight = numbers(m, k), numbers(n, k, seed=1)
        results = {}
        for body in ("amx", "amx_emulated", "avx512"):
            with monkeypatch.context() as patch:
                patch.setattr(native, "kernels", lambda body=body: library(body))
                for kind in KINDS:
                    out = kind.pack(weight.clone()).linear(x, torch.float32)
                    results[body, kind] = out.view(torch.int32)
        for kind in KINDS:
            assert torch.equal(results["amx", kind], results["amx_emulated", kind]), (m, n, k)
            if k > 32:
                assert not torch.equal(results["amx", kind], results["avx512", kind])


@pytest.mark.skipif(not HAS_KERNELS, reason="needs x86-64 with AVX2, and g++")
def test_tiles_compile_for_the_cpus_that_have_them(tmp_path):
    def compile_for_amx(source: str, *options: str) -> subprocess.CompletedProcess:
        amx = build.INSTRUCTION_SETS[0]
        # The instructions are inline assembly: they are present without optimization, which takes a
        # tenth of the time.
        command = ["g++", *build._COMPILE, "-O0", *amx.flags, *options, source, "-o", "made.s"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    if compile_for_amx("/dev/null", "-x", "c++", "-S").returncode != 0:
        pytest.skip("this g++ does not know AMX")
    done = compile_for_amx(str(build.FOLDER / "linear.cpp"), "-S")
    assert done.returncode == 0, done.stderr
    made = (tmp_path / "made.s").read_text()
    for instruction in (
        "ldtilecfg",
        "tileloadd",
        "tdpbf16ps",
        "tdpbsud",
        "tilestored",
        "tilerelease",
    ):
        assert f"\t{instruction}\t" in made or f"\t{instruction}\n" in made
