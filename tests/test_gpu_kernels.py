"""The kernels that a build uses on a simulated GPU: the allowed ones that passed on all ranks."""

import contextlib
import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.kernels import KERNELS_RUN
from helpers.launch import DEMO
from llama import loading
from llama.build_args import BuildArgs
from llama.checkpoint import memory
from llama.checkpoint.find import find
from llama.checkpoint.packing import pack_model
from llama.checkpoint.write.convert import convert
from llama.cli import doctor
from llama.gpu import selection
from llama.gpu.cases import Computed
from llama.gpu.check import Checked
from llama.gpu.selection import VARIABLE, allowed_kernels, describe, kernels_for, recorder_for
from llama.kernels.cuda.table import NAMES, SCALED_NAMES, table
from llama.kernels.host import host_kernels
from llama.loading.files import Files
from llama.loading.kernels import choose_kernels
from llama.model.args import ModelArgs
from llama.model.plan import LayerPlan
from llama.model.transformer import Transformer
from llama.ops.kernels import Kernels
from llama.options.graphs import trial
from llama.ranks.parallel import Parallel
from llama.ranks.placement import Placement
from llama.weights.choice import QUANTIZED
from llama.weights.groups import QuantKey

GPU = torch.device("cuda", 7)
PARAMS = ModelArgs(dim=128, n_heads=8, n_kv_heads=2, vocab_size=300)
ALL = frozenset(NAMES)


class Rank(Parallel):
    """A rank alongside others that have excluded some kernels, given by their indices in NAMES."""

    def __init__(self, *others_drop: int) -> None:
        super().__init__()
        self.places = itertools.count()  # then the index of graphs
        self.others_drop = others_drop

    def all_reduce_min(self, value: int) -> int:
        return min(value, next(self.places) not in self.others_drop)


@pytest.fixture
def gpu(monkeypatch):
    """A function gpu(reasons) that fakes the comparison of kernels and returns its inputs."""
    asked: list[tuple[Computed, tuple[str, ...]]] = []

    def install(reasons: dict[str, str]) -> list[tuple[Computed, tuple[str, ...]]]:
        def check_kernels(computed: Computed, names: Sequence[str]) -> Checked:
            asked.append((computed, tuple(names)))
            return Checked({name: reasons.get(name) for name in names}, {})

        monkeypatch.setattr(selection, "check_kernels", check_kernels)
        return asked

    monkeypatch.setattr(selection, "Cases", lambda computed: computed)
    monkeypatch.setattr(selection, "unsupported_reason", lambda device: None)
    return install


def kernels_of(
    parallel: Parallel, dtype: torch.dtype = torch.bfloat16, allowed=ALL, **settings: Any
) -> Kernels:
    plan = LayerPlan.of(PARAMS)
    computed = Computed(plan, PARAMS.vocab_size, GPU, dtype, **settings)
    return kernels_for(computed, parallel, allowed)


def use(parallel: Parallel, dtype: torch.dtype = torch.bfloat16, allowed=ALL) -> frozenset:
    return kernels_of(parallel, dtype, allowed).names


def model_with(names, parallel: Parallel | None = None, device: torch.device = GPU) -> Any:
    weight = SimpleNamespace(device=device, dtype=torch.bfloat16)
    return SimpleNamespace(
        norm=SimpleNamespace(weight=weight), params=PARAMS, plan=LayerPlan.of(PARAMS),
        parallel=parallel, kernels=table(frozenset(names)), modules=list,
    )  # fmt: skip


def test_what_fails_is_dropped_with_one_warning(gpu):
    asked = gpu({"linear": "off by 1", "sample": "no memory"})
    with pytest.warns(UserWarning, match="linear: off by 1; sample: no memory") as warned:
        found = use(Rank())
    assert len(warned) == 1
    assert found == ALL - {"linear", "sample"}
    names = "attention+add_norm+rope_and_store+silu_mul+adapters"
    assert describe(model_with(found)) == f", kernels {names}"
    assert [names for _, names in asked] == [NAMES]


@pytest.mark.parametrize("activations", [None, "fp8"])
def test_the_kernel_that_rounds_is_checked_where_it_is_used(gpu, activations):
    """Rounding to e4m3 is checked for `activations="fp8"` alone; PyTorch rounds where it fails."""
    asked = gpu({"round_rows": "3 of 9 ids differ"})
    allowed = ALL | {*SCALED_NAMES}
    rounds = activations == "fp8"
    with warnings.catch_warnings(record=True) as warned:
        found = kernels_of(Rank(), allowed=allowed, activations=activations).names
    assert found == (ALL | {*SCALED_NAMES} - {"round_rows"} if rounds else ALL)
    assert len(warned) == rounds
    assert ({*SCALED_NAMES} <= {*asked[0][1]}) == rounds


@pytest.mark.skipif(not KERNELS_RUN, reason="the CPU's kernels pack the weights")
def test_a_gpu_that_refuses_products_in_e4m3_keeps_its_quantized_weights(gpu):
    """Activations are then not rounded, which a warning says.

    A past fault: the product was part of `linear`, so that all quantized weights became bf16.
    """
    gpu({"scaled": "RuntimeError: row-wise scaling is not supported"})
    files = Files(find(DEMO), torch.bfloat16, "fp8", Placement(), GPU, activations="fp8")
    with (
        pytest.warns(UserWarning, match="scaled: RuntimeError: row-wise scaling"),
        pytest.warns(UserWarning, match="activations stay in bf16: those in fp8 need"),
    ):
        found = choose_kernels(files, Parallel(), ALL | {*SCALED_NAMES})
    assert found == replace(files, activations=None, kernels=found.kernels)
    assert found.quantize == "fp8" and "linear" in found.kernels.names


def test_ranks_use_the_same_kernels(gpu):
    gpu({})
    with pytest.warns(UserWarning, match="add_norm: another rank dropped it"):
        assert use(Rank(1)) == ALL - {"add_norm"}


@pytest.mark.skipif(not KERNELS_RUN, reason="the CPU's kernels pack the weights")
def test_without_a_kernel_for_quantized_weights_they_are_held_plain(gpu, tmp_path):
    """Without a kernel for quantized weights they are stored dequantized.

    PyTorch would dequantize them in every step, which one line reports. For a file, its own formats
    are compared: Q8_0 of lm_head, and Q4_0.
    """
    convert(DEMO, tmp_path / "model.gguf", quantize="q4_0")
    asked, keys = (
        (Parallel(), ALL | {"graph"}),
        (QuantKey(1, 0, 32, 1, 1), QuantKey(3, -8, 32, 1, 1)),
    )
    as_it_is = replace(find(tmp_path / "model.gguf"), in_codes=True)
    for files, held in (
        (Files(find(DEMO), torch.bfloat16, "int8", Placement(), GPU), ("int8",)),
        (Files(as_it_is, torch.bfloat16, None, Placement(), GPU), (None, *keys)),
    ):
        demo = replace(files.checkpoint, in_codes=False)
        compared = gpu({})
        compared.clear()
        found = choose_kernels(files, *asked)
        assert found == replace(files, kernels=found.kernels) and "linear" in found.kernels.names
        gpu({"linear": "off by 1"})
        with (
            pytest.warns(UserWarning, match="linear: off by 1"),
            pytest.warns(UserWarning, match="the weights are held in bf16"),
        ):
            plain = choose_kernels(files, *asked)
        assert plain == Files(demo, torch.bfloat16, None, Placement(), GPU, plain.kernels)
        assert plain.kernels.names == found.kernels.names - {"linear"}
        assert [x.formats for x, _ in compared] == [held, held]
        assert {(x.plan.dim, x.vocab_size) for x, _ in compared} == {
            (demo.params.dim, demo.params.vocab_size)
        }
        on_cpu = replace(files, device=torch.device("cpu"))
        assert choose_kernels(on_cpu, *asked) == replace(on_cpu, kernels=host_kernels())
        on_mac = replace(files, device=torch.device("mps"))
        assert choose_kernels(on_mac, *asked) is on_mac and len(compared) == 2


def test_a_file_that_one_rank_cannot_read_ends_all(gpu, monkeypatch):
    """A file that one rank cannot read ends all ranks.

    Its rows are read before kernels are chosen, where the ranks would wait for one another.
    """
    told: list[str] = []

    class Telling(Parallel):
        @contextlib.contextmanager
        def agree(
            self, what: str, *, world: bool = False, remedy: str = ""
        ) -> Iterator[list[object]]:
            try:
                yield []
            except ValueError as e:
                told.append(str(e))
                raise

    def cut_short(*_: object) -> None:
        raise ValueError("model.gguf is cut short")

    asked = gpu({})
    monkeypatch.setattr(memory, "gpu_formats", cut_short)
    files = Files(replace(find(DEMO), in_codes=True), torch.bfloat16, None, Placement(), GPU)
    with pytest.raises(ValueError, match=r"model\.gguf is cut short"):
        choose_kernels(files, Telling(), ALL)
    assert told == ["model.gguf is cut short"] and not asked


@pytest.mark.skipif(not KERNELS_RUN, reason="the CPU's kernels pack the weights")
@pytest.mark.parametrize("quantize", ["int8", "fp8", "int4"])
def test_the_output_is_rounded_to_int8(quantize):
    """lm_head is rounded to int8, the most accurate of the 8-bit formats."""
    params = ModelArgs(dim=128, n_layers=1, n_heads=4, n_kv_heads=2, vocab_size=256)
    model = Transformer(params, dtype=torch.bfloat16)
    for weight in model.parameters():
        weight.data.normal_()
    pack_model(model, quantize=quantize)
    assert type(model.output.weight) is QUANTIZED["int8"]
    assert type(model.blocks()[0].attention.wo.weight) is QUANTIZED[quantize]


def test_float32_has_the_sampling_kernel_only(gpu):
    asked = gpu({})
    assert use(Rank(), torch.float32) == {"sample"}
    assert [names for _, names in asked] == [("sample",)]


def test_the_variable_turns_kernels_off(gpu, monkeypatch):
    asked = gpu({"linear": "off by 1"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a kernel that nobody uses is not compared
        allowed = frozenset({"attention", "sample"})
        assert use(Rank(), allowed=allowed) == allowed
    assert use(Rank(), allowed=frozenset()) == frozenset()
    assert [names for _, names in asked] == [("attention", "sample")]
    assert describe(model_with([])) == ", torch's kernels"
    for text, names in {
        "": ALL | {"graph", *SCALED_NAMES, "one_shot"},
        "none": set(),
        "linear, sample": {"linear", "sample"},
    }.items():
        monkeypatch.setenv(VARIABLE, text)
        assert allowed_kernels() == names
    monkeypatch.setenv(VARIABLE, "atention")
    with pytest.raises(ValueError, match=r"LLAMA_GPU_KERNELS names \['atention'\]: give 'none'"):
        allowed_kernels()


def test_nothing_is_compared_on_an_old_gpu(gpu, monkeypatch):
    asked = gpu({})
    assert describe(model_with(ALL, device=torch.device("cpu"))) == ""
    monkeypatch.setattr(selection, "unsupported_reason", lambda device: "it is too old")
    assert use(Rank()) == frozenset() and not asked


def test_doctor_says_whether_kernels_can_run(monkeypatch):
    for reason, said in ((None, "`llama doctor --gpu` does so in all cases"), ("old", "run: old")):
        monkeypatch.setattr(doctor, "unsupported_reason", lambda device, reason=reason: reason)
        assert said in doctor._gpu_kernels(GPU).text and not doctor._gpu_kernels(GPU).problem


class Recorder:
    """A replacement for a recorder that needs a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device


def recorder(monkeypatch, parallel: Parallel) -> Recorder | None:
    monkeypatch.setattr("llama.gpu.selection.CudaRecorder", Recorder)
    names = use(parallel, allowed=allowed_kernels())
    return recorder_for(model_with(names, parallel))  # type: ignore[return-value]


def test_models_of_one_gpu_have_kernels_of_their_own(gpu):
    """Models of one GPU have separate kernels.

    A kernel that fails for the second is right for the first, and stays in use there.
    """
    first = Transformer(PARAMS, device="meta")
    gpu({})
    first.use_kernels(kernels_of(Rank()))
    second = Transformer(PARAMS, device="meta")
    gpu({"add_norm": "off by 1"})
    with pytest.warns(UserWarning, match="add_norm: off by 1"):
        second.use_kernels(kernels_of(Rank()))
    for model, names in ((first, ALL), (second, ALL - {"add_norm"})):
        assert model.kernels.names == names


def test_graphs_are_recorded_where_all_ranks_allow_them(gpu, monkeypatch):
    gpu({})
    made = recorder(monkeypatch, Rank())
    assert made is not None and made.device == GPU
    with pytest.warns(UserWarning, match="graph: another rank dropped it"):
        assert recorder(monkeypatch, Rank(len(NAMES))) is None


@pytest.mark.parametrize(("is_on_nccl", "sums"), [(True, None), (True, "wrong"), (False, None)])
def test_graphs_of_ranks_need_sums_that_can_be_captured(gpu, monkeypatch, is_on_nccl, sums):
    gpu({})
    monkeypatch.setattr(Rank, "is_on_nccl", is_on_nccl, raising=False)
    monkeypatch.setattr("llama.gpu.selection.try_collectives", lambda model: sums)
    rank = Rank()
    object.__setattr__(rank, "placement", Placement(size=2))
    if is_on_nccl and not sums:
        assert recorder(monkeypatch, rank) is not None
    else:
        with pytest.warns(UserWarning, match=sums or "graph: the ranks are not on nccl"):
            assert recorder(monkeypatch, rank) is None


@pytest.mark.parametrize(
    ("spans_machines", "version", "is_captured"),
    [(True, (2, 30, 3), False), (True, (2, 30, 4), True), (False, (2, 28, 9), True)],
)
def test_sums_between_machines_are_captured_by_a_newer_nccl(
    gpu, monkeypatch, spans_machines, version, is_captured
):
    """Before NCCL 2.30.4 graphs of a group that spans machines hang, so that there are none."""
    gpu({})
    monkeypatch.setattr(Rank, "is_on_nccl", True, raising=False)
    monkeypatch.setattr(selection, "nccl_version", lambda: version)
    rank = Rank()
    object.__setattr__(rank, "placement", Placement(size=2))
    object.__setattr__(rank, "spans_machines", spans_machines)
    with warnings.catch_warnings(record=True) as warned:
        names = use(rank, allowed=ALL | {"graph"})
    assert ("graph" in names) == is_captured
    assert [str(x.message).partition("graph: ")[2] for x in warned] == [
        "sums between machines hang in graphs before NCCL 2.30.4, and this is 2.30.3"
    ] * (not is_captured)


@pytest.mark.parametrize(
    ("text", "allows"),
    [("", True), ("none", False), ("attention,one_shot", True), ("nosuch", False)],
)
def test_the_variable_turns_one_shot_sums_off(monkeypatch, text, allows):
    """A wrong name is not reported here: `load_model` reports it on all ranks."""
    seen = []
    monkeypatch.setenv(VARIABLE, text)
    monkeypatch.setattr(
        loading, "connect", lambda *_, allows_one_shot: seen.append(allows_one_shot)
    )
    loading._connect(BuildArgs(str(DEMO)), GPU)
    assert seen == [allows]


class Pair(Parallel):
    """One of two ranks; `others` has the other's answer each time that they agree on something."""

    def __init__(self, others: list[int]) -> None:
        super().__init__(Placement(size=2))
        self.__dict__.update(others=others, said=[])

    def all_reduce_min(self, value: int) -> int:
        self.__dict__["said"].append(value)
        return min(value, self.__dict__["others"].pop(0))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)

    def all_gather(self, x: torch.Tensor, widths: Sequence[int] = ()) -> torch.Tensor:
        return torch.cat((x, x), -1)


@pytest.mark.parametrize(
    ("fault", "others", "said", "replays", "reason"),
    [
        (None, [1, 1], [1, 1], 2, None),
        (None, [0], [1], 0, None),  # the other could not capture: nobody waits for it in a sum
        (None, [1, 0], [1, 1], 1, None),
        ("capture", [1], [0], 0, "sums over the ranks cannot be captured: not here"),
        ("sum", [1, 1], [1, 0], 1, "a captured sum over the ranks is wrong"),
        ("large", [1, 1], [1, 0], 1, "a captured sum over the ranks is wrong"),
        ("gather", [1, 1], [1, 0], 1, "a captured sum over the ranks is wrong"),
    ],
)
def test_ranks_take_each_step_of_a_captured_sum_together(
    monkeypatch, fault, others, said, replays, reason
):
    count, on_it = 0, []

    @contextlib.contextmanager
    def current(device: torch.device) -> Iterator[None]:
        on_it.append(device)
        yield
        on_it.pop()

    class Sums(Recorder):
        def record(self, function, inputs):
            assert on_it == [torch.device("cpu")]  # otherwise it would open GPU 0
            if fault == "capture":
                raise RuntimeError("not here\nand more")
            outputs = function()

            def replay() -> None:
                nonlocal count
                count += 1
                for out in outputs:
                    kind = "large" if out.numel() > 2000 else "gather" if out.shape[-1] > 64 else ""
                    is_wrong = fault in ("sum", kind)
                    out.fill_(inputs[0][0, 0] * (3 if is_wrong else 2))

            return outputs, replay

        def close(self) -> None:
            pass

    monkeypatch.setattr(trial, "CudaRecorder", Sums)
    monkeypatch.setattr(trial, "current", current)
    parallel: Any = Pair(others)
    model = model_with((), parallel, torch.device("cpu"))
    model.norm.weight = torch.ones(1, dtype=torch.bfloat16)
    assert trial.try_collectives(model) == reason
    assert (parallel.said, count) == (said, replays)


def test_no_rank_tries_sums_where_another_has_dropped_graphs(gpu, monkeypatch):
    gpu({})
    monkeypatch.setattr(Rank, "is_on_nccl", True, raising=False)
    monkeypatch.setattr(selection, "try_collectives", None)
    rank = Rank(len(NAMES))
    object.__setattr__(rank, "placement", Placement(size=2))
    with pytest.warns(UserWarning, match="graph: another rank dropped it"):
        assert recorder(monkeypatch, rank) is None


def test_graphs_can_be_turned_off(gpu, monkeypatch):
    gpu({})
    monkeypatch.setenv(VARIABLE, "attention,sample")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert recorder(monkeypatch, Rank()) is None
