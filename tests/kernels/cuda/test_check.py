"""The comparison of kernels with their ops, in Triton's interpreter: right and wrong kernels."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton's kernels need Triton")

from triton.runtime.errors import OutOfResources

from helpers.kernels import KERNELS_RUN
from helpers.launch import DEMO, PROGRAMS, REPO
from llama.checkpoint.find import find
from llama.cli import doctor
from llama.gpu import cases, check, selection
from llama.gpu.cases import Case, Cases, Computed
from llama.gpu.check import check_kernel, check_kernels, unsupported_reason
from llama.kernels.cuda import attention, quantized
from llama.kernels.cuda import linear as products
from llama.kernels.cuda import scaled as scaled_kernels
from llama.kernels.cuda.launch import Tile, launcher
from llama.kernels.cuda.table import NAMES
from llama.model.args import ModelArgs
from llama.model.plan import LayerPlan
from llama.ops import scaled
from llama.ops.kernels import NO_KERNELS, Kernels
from llama.ops.kv_cache import FORMATS
from llama.ops.sample import choose_ids
from llama.ranks.parallel import Parallel
from llama.ranks.placement import Placement
from llama.weights import choice
from llama.weights.groups import GroupedWeight, QuantKey
from llama.weights.weight import Weight

CPU = torch.device("cpu")
SMALL = Tile(16, 32, 4, 3)
WIDE: dict[str, Any] = {"dim": 128, "vocab_size": 32, "ffn_dim_multiplier": 0.3}


def computed(
    kv_format: str | None = None,
    size: int = 1,
    formats: Any = (None,),
    activations: str | None = None,
    dtype: torch.dtype = torch.float16,
    **sizes: Any,
) -> Computed:
    """Return what one of `size` ranks computes of a small model."""
    given = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 60, "multiple_of": 32} | sizes
    args = ModelArgs(**given)
    plan = LayerPlan.of(args, Placement(size=size), FORMATS[kv_format])
    return Computed(plan, args.vocab_size, CPU, dtype, formats, activations)


def small(each: Computed | None = None, *, every: bool = False) -> Cases:
    return Cases(each or computed(), every=every, lengths=(1, 70))


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(attention, "_PROGRAMS", 8)


KERNELS = {  # the kernels that each comparison must launch
    "attention": {"decode_kernel", "merge_kernel", "prefill_kernel"},
    "add_norm": {"norm_kernel"},
    "rope_and_store": {"rope_kernel"},
    "adapters": {"shrink_kernel", "expand_kernel"},
    "silu_mul": {"silu_mul_kernel"},
    "linear": {"product_kernel"},
    "round_rows": {"round_rows_kernel"},
}


@pytest.mark.parametrize(
    "name, kv_format",
    [*((name, None) for name in KERNELS), ("attention", "int8"), ("rope_and_store", "int8")],
)
def test_each_kernel_runs_in_its_cases_and_agrees(launches, monkeypatch, name, kv_format):
    """Each kernel runs in the cases of a build and in all cases, and agrees with its op.

    In the interpreter the tiles of a product are far larger than these sizes, so two small ones are
    used.
    """
    found = [Tile(8, 32, 4, 2, False), SMALL]
    monkeypatch.setattr(products, "candidates", lambda n, k, m: found[m > 1 :])
    for every in (False, True):
        launches.clear()
        checked = check_kernels(small(computed(kv_format), every=every), [name])
        assert checked.reasons == {name: None}
        assert set(launches) == KERNELS[name]


def test_a_build_compares_one_product_for_each_variant_and_serves_all_sizes(monkeypatch):
    """A build compares one product for each variant of a kernel, with a few rows of the weight.

    Its tiles serve all numbers of rows and outputs that the model has; lm_head gives float32, which
    is another variant than one with an output in the model's dtype.
    """
    asked = []

    def run(x: Tensor, weight: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
        asked.append((len(x), *weight.shape, dtype))
        return (x @ weight.T).to(dtype)

    monkeypatch.setattr(products, "run", run)
    monkeypatch.setattr(products, "candidates", lambda n, k, m: [SMALL])
    each = computed(vocab_size=70_000, dim=2048)
    chosen = check_kernel(small(each), "linear")
    assert len(asked) == len({*asked}) and max(n for _, n, _, _ in asked) == 1056
    assert {(rows, dtype) for rows, _, k, dtype in asked if k == 2048} == {
        (rows, dtype) for rows in (1, 15) for dtype in (torch.float16, torch.float32)
    }
    assert set(chosen.values()) == {SMALL}
    assert {(n, k) for _, n, k, _ in chosen} == {*each.weight_shapes}
    assert {m for _, n, _, m in chosen if n == 70_000} == set(products.BUCKETS)


@pytest.fixture
def on_gpu(monkeypatch):
    """Put weights into the order of a GPU, and leave one small tile for them."""

    def packed(plain: Tensor, name: str, device: torch.device) -> Weight:
        return choice.on_gpu(plain.bfloat16(), name, device)

    monkeypatch.setattr(cases, "packed", packed)
    monkeypatch.setattr(quantized, "BUCKETS", (2, 32))
    monkeypatch.setattr(quantized, "candidates", lambda *_: [Tile(32, 128, 4, 2, True)])


@pytest.mark.skipif(not KERNELS_RUN, reason="the CPU's kernels pack the weights")
@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("format", ["int4", QuantKey(3, -8, 64, 1, 1)], ids=["int4", "of a file"])
def test_quantized_products_are_compared(launches, on_gpu, monkeypatch, fault, format):
    """Quantized products are compared by tiles, and weights that are made plain.

    The interpreter has no bf16, so the model is fp16.
    """
    asked = small(computed(formats=(format,), **WIDE))
    if fault:
        monkeypatch.setattr(quantized, "plain", lambda w, i, n, x: torch.ones(n - i, 128).to(x))
        with pytest.raises(ArithmeticError, match="x 128 of kind 3 made plain: result 0 is off"):
            check_kernel(asked, "linear")
    else:
        assert check_kernel(asked, "linear")
        assert set(launches) == {"few_rows_kernel", "many_rows_kernel", "plain_kernel"}


@pytest.mark.parametrize("fault", [False, True])
def test_products_of_rows_in_e4m3_are_compared(launches, on_gpu, monkeypatch, fault):
    """Products of rows in e4m3 are compared as a kernel of their own, alongside `linear`."""
    wide = WIDE | {"dim": 256}
    asked = small(computed(activations="fp8", dtype=torch.bfloat16, **wide))
    error = 1.05 if fault else 1.0

    def library(x: scaled.ScaledRows, weight: scaled.ScaledRows) -> Tensor:
        return error * scaled.linear(x, weight, torch.bfloat16)

    monkeypatch.setattr(scaled_kernels, "library", library)
    if fault:
        with pytest.raises(ArithmeticError, match=r"300 rows in e4m3 times .*: result 0 is"):
            check_kernel(asked, "scaled")
        monkeypatch.setattr(scaled_kernels, "few_rows", lambda x, w, tile, dtype: library(x, w))
        with pytest.raises(ArithmeticError, match=r"1 rows in e4m3 times .*: result 0 is"):
            check_kernel(asked, "scaled_few_rows")
    else:
        assert check_kernel(asked, "scaled") == {} and not launches
        assert check_kernel(asked, "scaled_few_rows") == {}
        assert set(launches) == {"few_scaled_rows_kernel"}


@pytest.mark.parametrize("fault", [False, True])
def test_norms_and_swiglu_in_e4m3_are_compared(launches, on_gpu, monkeypatch, fault):
    asked = small(computed(activations="fp8", **WIDE))
    if fault:
        silu_mul = scaled_kernels.round_silu_mul
        monkeypatch.setattr(scaled_kernels, "round_silu_mul", lambda x: silu_mul(1.1 * x))
        with pytest.raises(ArithmeticError, match=r"SwiGLU in e4m3: result 0 is"):
            check_kernel(asked, "round_fused")
    else:
        assert check_kernel(asked, "round_fused") == {}
        assert set(launches) == {"round_norm_kernel", "round_silu_mul_kernel"}


def test_decode_is_compared_with_each_tile(monkeypatch):
    """Decode is compared with each tile: a kernel is compiled for each of them.

    The longest sequence has several parts.
    """
    rows, decode_tile = [], attention.decode_tile

    def noted(*sizes: int) -> Tile:
        tile = decode_tile(*sizes)
        rows.append(tile.rows)
        return tile

    monkeypatch.setattr(attention, "decode_tile", noted)
    check_kernel(small(), "attention")
    assert {*rows} == {16, 32}


def test_sampling_is_compared_for_rows_of_every_kind(monkeypatch):
    """Sampling is compared for rows of every kind, and the share of a rank for its top tokens.

    The interpreted kernels are slow and tested elsewhere, so PyTorch replaces them here.
    """
    asked = []

    def choose(logits, rows, *seeds, kernels):
        asked.append((len(rows), len(set(rows)), kernels.names))
        return choose_ids(logits, rows, *seeds)

    shares = set()
    op_top_tokens = cases.top_tokens

    def top_tokens(logits: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor]:
        shares.add(logits.shape[1])
        return op_top_tokens(logits)

    monkeypatch.setattr(cases, "choose_ids", choose)
    monkeypatch.setattr(cases, "top_tokens", top_tokens)
    check_kernel(small(), "sample")
    assert {(16, 14, names) for names in (frozenset({"sample"}), frozenset())} <= {*asked}
    assert not shares
    check_kernel(small(computed(size=2)), "sample")
    assert shares == {30}


@pytest.mark.skipif(not KERNELS_RUN, reason="the CPU's kernels pack the weights")
@pytest.mark.parametrize("format", ["int8", "fp8", "int4", QuantKey(1, 0, 32, 1, 1)])
def test_few_rows_of_a_quantized_weight_are_packed(monkeypatch, format):
    """Few rows are packed on the CPU and repeated; all of the 8B's would take it minutes."""
    packed_rows = set()

    def counted(matrix: Any, *args: Any, **options: Any) -> Weight:
        packed_rows.add(matrix.shape[0])
        return packed(matrix, *args, **options)

    packed = choice.packed
    monkeypatch.setattr(cases, "_FEW_ROWS", 96)
    monkeypatch.setattr(cases, "packed", counted)
    monkeypatch.setattr(choice, "packed", counted)
    asked = Cases(computed(dtype=torch.bfloat16))
    weight = asked._weight(format, 32 * 7, 256)
    part = asked._weight(format, 100, 256)
    assert isinstance(part, GroupedWeight) and part.shape == (100, 256) and part.is_whole()
    assert weight.shape == (224, 256) and isinstance(weight, GroupedWeight)
    assert packed_rows == {96, 100} and weight.is_whole()
    rows = weight.exact()
    assert torch.equal(rows[96:192], rows[:96]) and torch.equal(rows[192:], rows[:32])
    assert not torch.equal(rows[32:64], rows[:32])


def test_a_tile_that_does_not_fit_the_gpu_is_replaced_by_the_next(monkeypatch):
    """The next tile is compared and used if the fastest one does not fit the GPU."""
    both = [Tile(32, 32, 4, 9), SMALL]

    def run(x: Tensor, weight: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
        if tile == both[0]:
            raise OutOfResources(73_728, 65_536, "shared memory")
        return (x @ weight.T).to(dtype)

    monkeypatch.setattr(products, "run", launcher(run))
    monkeypatch.setattr(products, "candidates", lambda n, k, m: both)
    assert {*check_kernel(small(), "linear").values()} == {SMALL}


@pytest.mark.parametrize("hip", [None, "7.0"])
def test_amd_s_gpus_are_not_taken_for_hopper(monkeypatch, hip):
    """AMD's GPUs have capabilities 9 and 10 as well, and too little memory for Hopper's tiles."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4 if hip else 0))
    monkeypatch.setattr(torch.version, "hip", hip)
    attention.has_wide_tiles.cache_clear()
    assert attention.has_wide_tiles(torch.device("cuda", 0)) == (hip is None)
    attention.has_wide_tiles.cache_clear()


class Doubled:
    """An op whose kernel doubles its values; with a fault, wrongly, or not all of them."""

    def __init__(self, fault: str | None) -> None:
        self.fault = fault

    def __call__(self, x: Tensor, kernels: Kernels = NO_KERNELS) -> Tensor:
        if not kernels.names:
            return 2 * x
        if self.fault == "raises":
            raise RuntimeError("no shared memory")
        out, rows = torch.empty_like(x), len(x) - (self.fault == "unwritten")
        out[:rows] = 2 * x[:rows]
        out[0, 0] += self.fault == "wrong"
        return out


def doubling(monkeypatch, fault: str | None) -> None:
    """Let the cases of silu_mul be one of `Doubled`."""
    x = torch.ones(3, 8, dtype=torch.float16)
    monkeypatch.setattr(Cases, "silu_mul", lambda self: iter([Case("a row", Doubled(fault), (x,))]))


FAULTS = {
    None: None,
    "wrong": "a row: result 0 is off by 0.18 where 0.0039 may be",
    "unwritten": "a row: result 0 is off by nan where 0.0039 may be",
    "raises": "RuntimeError: a row: no shared memory",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_told_from_a_right_one(monkeypatch, fault):
    """A kernel that is wrong, leaves out a row or raises is reported; the others are compared."""
    doubling(monkeypatch, fault)
    checked = check_kernels(small(), ["silu_mul", "add_norm"])
    assert checked.reasons == {"silu_mul": FAULTS[fault], "add_norm": None}
    assert torch.isfinite(torch.empty(10_000)).any(), "new memory is poisoned outside of a check"


class OneOfTwo(Parallel):
    """One of two ranks, each of which learns whether both may use a kernel."""

    def __init__(self, rank: int, votes: dict[int, list[int]]) -> None:
        super().__init__(Placement(size=2, rank=rank))
        self.__dict__.update(votes=votes)

    @property
    def is_on_nccl(self) -> bool:
        return True

    def all_reduce_min(self, value: int) -> int:
        votes: dict[int, list[int]] = self.__dict__["votes"]
        votes[self.rank].append(value)
        others = votes[1 - self.rank]
        index = len(votes[self.rank]) - 1
        return min(value, others[index]) if index < len(others) else value


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_a_wrong_kernel_is_dropped_on_all_ranks_with_a_warning(monkeypatch, fault):
    """No rank uses a kernel that fails on one; rank 0 warns with its name and the reason."""
    allowed = frozenset({"silu_mul", "add_norm"})
    votes: dict[int, list[int]] = {0: [], 1: []}
    found = {}
    for rank, fails in ((1, None), (0, fault), (1, None)):  # rank 1 again, with rank 0's answers
        votes[rank].clear()
        doubling(monkeypatch, fails)
        expected = pytest.warns(UserWarning, match=f"on the GPU: silu_mul: .*{FAULTS[fault]}")
        with expected if fails else nullcontext():
            found[rank] = selection.kernels_for(computed(), OneOfTwo(rank, votes), allowed).names
    assert found[0] == found[1] == {"add_norm"}
    assert votes[1][NAMES.index("silu_mul")] == 1, "the kernel is right on rank 1"


def test_doctor_reports_a_wrong_kernel(monkeypatch):
    """`llama doctor --gpu` compares each kernel in all cases, and reports a wrong one."""
    doubling(monkeypatch, "wrong")
    monkeypatch.setattr(Computed, "names", ("add_norm", "silu_mul"))
    facts = list(doctor.compared(small(every=True)))
    assert [(fact.text, fact.problem) for fact in facts] == [
        ("add_norm agrees with PyTorch's operator", False),
        (f"a build does without silu_mul: {FAULTS['wrong']}", True),
    ]
    (fact,) = doctor.compared_kernels(CPU, None, Placement())
    assert fact.problem and "the device is cpu" in fact.text
    asked: list[Computed] = []

    def of_small_sizes(found: Computed, *, every: bool) -> Cases:
        asked.append(found)
        return small(every=every)

    monkeypatch.setattr(doctor, "unsupported_reason", lambda device: None)
    monkeypatch.setattr(doctor, "Cases", of_small_sizes)
    gpu = torch.device("cuda", 0)
    for folder in (None, str(DEMO)):
        assert list(doctor.compared_kernels(gpu, folder, Placement())) == facts
    assert [(each.plan.dim, each.formats) for each in asked] == [
        (4096, (None, "int8", "fp8", "int4")),
        (find(DEMO).params.dim, (None,)),
    ]


@pytest.mark.parametrize(
    ("query", "reason"),
    [(lambda: False, "did not end within 0.01 s"), (None, "an illegal memory access")],
    ids=["hangs", "illegal access"],
)
def test_a_kernel_that_ends_cuda_is_an_error_with_a_remedy(monkeypatch, query, reason):
    """A kernel that hangs, or accesses an illegal address, is an error that names the switch."""

    def failed() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    event = SimpleNamespace(record=lambda: None, query=query or failed)
    monkeypatch.setattr(check, "_LAUNCH_S", 0.01)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(check, "current", lambda device: nullcontext())
    monkeypatch.setattr(check, "_compile", lambda *_: None)
    doubling(monkeypatch, None)
    asked = small()
    asked.device = torch.device("cuda", 0)
    wait = check._wait
    monkeypatch.setattr(check, "_wait", lambda device: wait(asked.device))
    with pytest.raises(RuntimeError, match=f"silu_mul has ended CUDA .*{reason}.*KERNELS=none"):
        check_kernels(asked, ["silu_mul"])


def test_each_variant_is_compiled_in_threads_before_it_is_compared(monkeypatch):
    """On a GPU each case is launched once from threads, without the tiles that are in reserve."""
    launched = []

    def run(x: Tensor, weight: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
        launched.append(tile)
        raise RuntimeError("this is reported by the comparison")

    both = [SMALL, Tile(32, 32, 4, 3)]
    monkeypatch.setattr(products, "run", launcher(run))
    monkeypatch.setattr(products, "candidates", lambda n, k, m: both)
    check._compile(small(), "linear")
    assert launched and {*launched} == {SMALL}


def test_the_interpreter_is_never_taken_for_a_gpu(monkeypatch):
    """The interpreter is never taken for a GPU: it would pass for kernels."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "TRITON_INTERPRET" in str(unsupported_reason(torch.device("cuda", 0)))
    assert unsupported_reason(CPU) is None
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert unsupported_reason(torch.device("cuda", 0)) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 8.0" in str(unsupported_reason(torch.device("cuda", 0)))


@pytest.mark.parametrize(
    ("formats", "most_launches", "most_variants"), [(["bf16"], 40, 32), (["int8"], 64, 52)]
)
def test_the_check_of_an_8b_is_small(formats, most_launches, most_variants):
    """The check of an 8B has few launches, and compiles what the model runs.

    Triton accepts the arguments of every launch. Outside its interpreter it makes a Python function
    of each kernel, with names of its own. A past fault: one of our argument names was among them,
    and no GPU could have sampled.
    """
    clean = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(PROGRAMS / "count_checks.py"), *formats]
    done = subprocess.run(
        command, env={**clean, "PYTHONPATH": str(REPO)}, capture_output=True, text=True, check=True
    )
    counts = json.loads(done.stdout)
    assert sum(counts["launches"].values()) <= most_launches
    assert sum(counts["variants"].values()) <= most_variants
    assert counts["cases"].keys() == {*NAMES}
