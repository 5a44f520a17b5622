"""Pipeline stages: real processes under torchrun give the bits of ranks without stages.

The requests are those of helpers/drafts.py: greedy and sampled, with penalties, constraints, stop
texts, log-probabilities, and several answers each; and embeddings and hidden states. The model has
five layers, so that no number of stages divides them evenly.
"""

import functools
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from helpers import drafts
from helpers.absent_device import absent_gpu
from helpers.checkpoints import random_state, write_byte_tokenizer, write_meta
from helpers.kernels import HAS_KERNELS
from helpers.launch import torchrun
from llama import Llama, ModelArgs
from llama.build_args import BuildArgs
from llama.checkpoint.write.convert import pack
from llama.common.checks import FieldError
from llama.engine.step import Step
from llama.loading.draft import check_drafter
from llama.loading.files import find_files
from llama.model.cost import Storage
from llama.model.shares import RankShare
from llama.model.stage_layers import stage_layers
from llama.options.stages import Pipeline
from llama.ranks.meeting import _mismatch
from llama.ranks.parallel import RankError
from llama.ranks.peers import PeerInfo
from llama.ranks.placement import Placement
from llama.ranks.stage_link import StageGroups, StageLink

needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="needs x86-64 with AVX2, and g++")
PARAMS = {
    "dim": 128, "n_layers": 5, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 512,
    "multiple_of": 32, "ffn_dim_multiplier": 1.3, "norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip
KV_BYTES = 16 * 5 * 2 * 2 * 32 * 2 * 24  # 24 pages of all layers: sequences are preempted


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """One model; one whose ends are tied; one of wider heads; and the second one packed."""
    found = {}
    changes: dict[str, dict[str, Any]] = {
        "untied": {},
        "tied": {"tied_output": True},
        "of 64": {"head_size": 64},
    }
    for name, change in changes.items():
        folder = tmp_path_factory.mktemp(name)
        params: dict[str, Any] = PARAMS | change
        state = random_state(params, seed=5)
        if name == "tied":
            del state["output.weight"]
        write_meta(folder, params, state)
        write_byte_tokenizer(folder)
        found[name] = str(folder)
    found["packed"] = str(tmp_path_factory.mktemp("packed") / "model")
    pack(found["tied"], found["packed"], quantize="int8")
    return found


def staged(
    folder: str, stages: int, *, leads: bool = False, graphs: bool = False, **options: Any
) -> dict[str, Any]:
    return {
        "do": "staged", "folder": folder, "stages": stages, "leads": leads, "has_graphs": graphs,
        "options": options,
    }  # fmt: skip


def alone(folder: str, **options: Any) -> list[str]:
    """Return the answers of one process, as the job "staged" does."""
    llama = Llama.build(folder, None, 128, 8, dtype="bf16", device="cpu", **options)
    return [*map(repr, drafts.answers_of(llama)), *drafts.vectors_of(llama)]


def expect_answers(ranks: list[list[dict]], index: int, wanted: list[str]) -> None:
    """Compare the answers of all ranks that have some: of rank 0 alone where it led."""
    answers = [rank[index]["result"][0] for rank in ranks]
    assert [found for found in answers if found] == [wanted] * (len(ranks) if answers[-1] else 1)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("untied", {}),
    "tied int8, led": ("tied", {"leads": True, "quantize": "int8"}),
    "heads of 64, int8, led": ("of 64", {"leads": True, "quantize": "int8"}),
    "packed, cut elsewhere": ("packed", {"pipeline_layers": "1,4"}),
    "int8 KV, preempted, led": (
        "untied",
        {"leads": True, "kv_cache_dtype": "int8", "kv_cache_memory_bytes": KV_BYTES},
    ),
    "tied int4, int8 KV, in graphs, led": (
        "tied",
        {"leads": True, "graphs": True, "quantize": "int4", "kv_cache_dtype": "int8"},
    ),
}


@pytest.fixture(scope="module")
def two_stages(folders, tmp_path_factory) -> list[list[dict]]:
    """The results of two ranks, each of which is a stage."""
    jobs = [staged(folders[name], 2, **options) for name, options in VARIANTS.values()]
    drafted = {"do": "drafted", "folder": folders["untied"], "quantize": None, "kinds": ["some"]}
    lookup = staged(folders["untied"], 2, leads=True, graphs=True, speculate="lookup")
    left = {"do": "left_in_flight", "folder": folders["untied"], "stages": 2}
    jobs += [left, drafted | {"stages": 2}, lookup]
    return torchrun(2, jobs, tmp_path_factory.mktemp("two"), 0)


@needs_kernels
@pytest.mark.parametrize("name", VARIANTS)
def test_two_stages_give_the_bits_of_one_process(name, folders, two_stages):
    folder, options = VARIANTS[name]
    index = [*VARIANTS].index(name)
    of_stages = ("leads", "graphs", "pipeline_layers")
    own = {key: value for key, value in options.items() if key not in of_stages}
    expect_answers(two_stages, index, alone(folders[folder], **own))
    replays = [rank[index]["result"][-1][-2] for rank in two_stages]
    assert min(replays) > 40 if "graphs" in options else replays == [0, 0]


@needs_kernels
def test_no_draft_changes_a_bit_in_stages(two_stages):
    """No draft changes a bit in stages, where every rank makes the calls and where rank 0 leads."""
    (changed, drafted), other = (rank[-2]["result"] for rank in two_stages)
    assert changed == [] == other[0] and drafted == other[1] > 500
    assert two_stages[0][-1]["result"][-1][-1] > 20, "look-up has drafted"
    assert min(rank[-1]["result"][-1][-2] for rank in two_stages) > 20, "drafts ran in graphs"


@needs_kernels
def test_a_step_that_nobody_waits_for_disturbs_no_other(folders, two_stages):
    llama = Llama.build(folders["untied"], None, 128, 8, dtype="bf16", device="cpu")
    wanted = llama.generate([[256, 65, 66]], 5, 0.0)[0]
    assert [rank[-3]["result"] for rank in two_stages] == [[True, wanted, wanted, 0]] * 2


def test_each_stage_holds_its_own_layers_and_their_cache(two_stages):
    """Each stage holds its own layers and their KV cache, and fairscale's getters know the groups.

    Rank 0 holds the end of the model.
    """
    (last, first) = (rank[0]["result"][1:-1] for rank in two_stages)
    assert last == [[1, 0, 0, 1], [3, 4], 2, [[0], [0, 1], [0, 1], [0]]]
    assert first == [[0, 0, 1, 1], [0, 1, 2], 3, [[1], [0, 1], [0, 1], [1]]]


@needs_kernels
def test_three_uneven_stages_give_the_bits_of_one_process(folders, tmp_path):
    jobs = [staged(folders["untied"], 3, graphs=graphs) for graphs in (False, True)]
    ranks = torchrun(3, jobs, tmp_path, 0)
    wanted = alone(folders["untied"])
    for index in range(len(jobs)):
        expect_answers(ranks, index, wanted)
    assert min(rank[1]["result"][-1][-2] for rank in ranks) > 40, "graphs ran on each stage"
    assert [rank[0]["result"][2] for rank in ranks] == [[4], [2, 3], [0, 1]]


@needs_kernels
def test_two_stages_of_two_ranks_give_the_bits_of_two_ranks(folders, tmp_path):
    """Two stages of two ranks give the bits of two ranks.

    Pipeline groups have the ranks of the same index, as fairscale lays them out. Steps of single
    tokens run by a recorder, whose shapes have the sums of a group in them.
    """
    (tmp_path / "two").mkdir()
    wanted = torchrun(2, [staged(folders["untied"], 1)], tmp_path / "two", 0)
    ranks = torchrun(4, [staged(folders["untied"], 2, leads=True, graphs=True)], tmp_path, 0)
    expect_answers(ranks, 0, wanted[0][0]["result"][0])
    (replays,) = {rank[0]["result"][-1][-2] for rank in ranks}
    assert replays > 40, "graphs ran on each rank alike"
    assert [rank[0]["result"][4][:2] for rank in ranks] == [
        [[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]],
    ]  # fmt: skip


@pytest.mark.parametrize("stages", range(3, 7))
def test_neighbours_have_groups_of_two(monkeypatch, stages):
    """Each pair of neighbours has a group, which both make at the same time, as nccl must.

    All ranks make a group each time, since nccl divides the communicator of all of them.
    """
    ranks = [10 * i for i in range(stages)]
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda group: ranks[::-1])
    pipeline: Any = None
    made: list[list[tuple[int, ...]]] = [[] for _ in ranks]

    def new_group(own: list[tuple[int, ...]], pair: list[int]) -> Any:
        own.append(tuple(pair))
        return own[-1]

    found = []
    for i, own in enumerate(made):
        found.append(StageGroups.of_pairs(pipeline, i, functools.partial(new_group, own)))
    for i in range(stages - 1):
        assert found[i].next == found[i + 1].previous == (ranks[i], ranks[i + 1])
    for groups in zip(*made, strict=True):
        assert sorted(rank for group in set(groups) for rank in group) == ranks
        assert all(rank in group for rank, group in zip(ranks, groups, strict=True))


def test_hidden_states_stay_on_the_gpu_with_nccl(monkeypatch):
    """With nccl hidden states stay on the GPU, and no host waits for them; gloo gets a copy."""
    work = SimpleNamespace(wait=lambda: None)
    messages: list[tuple[torch.Tensor, int, str]] = []

    def message(x: torch.Tensor, rank: int, group: str, tag: int) -> Any:
        messages.append((x, rank, group))
        return work

    names: list[Any] = ["all", "previous", "next"]
    control: Any = None
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda group: [4, 2, 0])
    monkeypatch.setattr("torch.distributed.irecv", message)
    monkeypatch.setattr("torch.distributed.isend", message)
    for backend, device in (("nccl", "cuda"), ("gloo", "cpu")):
        monkeypatch.setattr("torch.distributed.get_backend", lambda group, name=backend: name)
        messages.clear()
        with absent_gpu((9, 0)) as gpu:
            step = StageLink(StageGroups(*names), control, 1, 2).new_step()
            x = step.expect_hidden((3, 8), torch.zeros(1, device="cuda:0"))()
            step.send_hidden(x)
        assert x.device.type == "cuda"
        assert [(x.device.type, rank, group) for x, rank, group in messages] == [
            (device, 0, "previous"), (device, 4, "next")
        ]  # fmt: skip
        assert (gpu.waits == []) == (backend == "nccl")


def test_no_step_follows_one_that_broke_off():
    """No step follows one that broke off.

    Messages of other stages may be on their way, so that a later step would wait for its own in
    vain.
    """
    parallel = SimpleNamespace(placement=Placement(stage=0, stages=2))
    runner: Any = SimpleNamespace(
        model=SimpleNamespace(parallel=parallel),
        kv_cache=torch.zeros(1),
        hooks=[],
        start_stage=Mock(),
    )
    pipeline = Pipeline(runner)
    pipeline.start(Step([], {}))
    pipeline.break_off()
    assert not pipeline
    with pytest.raises(RankError, match="a step of the pipeline was interrupted"):
        pipeline.start(Step([], {}))


SMALL = ModelArgs(
    dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, vocab_size=128256, multiple_of=256,
    ffn_dim_multiplier=1.5,
)  # fmt: skip
LARGE = ModelArgs(
    dim=16384, n_layers=126, n_heads=128, n_kv_heads=8, vocab_size=128256, multiple_of=4096,
    ffn_dim_multiplier=1.2,
)  # fmt: skip


def test_layers_are_divided_by_their_work_and_that_of_lm_head():
    """Layers are divided by their work, and the last stage has fewer where its lm_head is large."""
    counts = [len(Placement(stage=i, stages=3).layers(16, Fraction(4))) for i in range(3)]
    assert counts == [7, 7, 2]
    for args, layers in ((SMALL, [10, 6]), (LARGE, [63, 63])):
        shares = [RankShare.of(args, Placement(stage=i, stages=2)) for i in range(2)]
        assert [len(share.layers) for share in shares] == layers


@pytest.mark.parametrize(
    ("quantize", "rows", "is_gpu", "layers"),
    [
        (None, 8, False, (10, 6)),
        ("int4", 16, False, (10, 6)),  # the products of a step take longer than its bytes
        ("int4", 1, False, (12, 4)),  # the lm_head is int8, so that it has more bytes
        ("int4", 64, True, (12, 4)),
        ("int4", 2048, True, (10, 6)),
    ],
)
def test_a_step_is_bound_by_products_or_by_memory(quantize, rows, is_gpu, layers):
    storage = Storage.of(SMALL, 2, quantize, kv_width=2)
    assert stage_layers(SMALL, storage, 2, rows, is_gpu=is_gpu) == layers


def test_what_stages_cannot_do_is_refused(folders):
    with pytest.raises(FieldError, match="pipeline_parallel_size=2 does not divide the 1 proc"):
        Llama.build(folders["untied"], device="cpu", pipeline_parallel_size=2)
    args = BuildArgs("m", pipeline_parallel_size=2, speculate="smaller")
    with pytest.raises(FieldError, match="speculate='smaller' is a draft model, which needs"):
        check_drafter(args)
    model_args = BuildArgs(folders["untied"])
    with pytest.raises(FieldError, match="pipeline_parallel_size=6 is more than the 5 layers"):
        find_files(model_args, Placement(stages=6), torch.device("cpu"))


@pytest.mark.parametrize(
    ("given", "stages", "counts"),
    [("1,4", 2, (1, 4)), ([2, 1, 2], 3, (2, 1, 2)), (None, 2, (3, 2)), ((5,), 1, ())],
)
def test_the_user_may_choose_the_layers_of_each_stage(given, stages, counts, folders):
    args = BuildArgs(folders["untied"], pipeline_layers=given).checked()
    files = find_files(args, Placement(stages=stages), torch.device("cpu"))
    assert files.placement.layer_counts == counts
    if counts:
        held = [replace(files.placement, stage=i).layers(5) for i in range(stages)]
        assert [x for layers in held for x in layers] == [*range(5)]


@pytest.mark.parametrize("given", ["", "3,,2", "5,0", "a", 5, [2.5, 2.5], "2,2", "3,1,1"])
def test_other_layers_of_stages_are_refused(given, folders):
    with pytest.raises(FieldError, match=r"pipeline_layers=.*(such as 10,6|5 layers in all)"):
        args = BuildArgs(folders["untied"], pipeline_layers=given).checked()
        find_files(args, Placement(stages=2), torch.device("cpu"))


def test_unlike_numbers_of_stages_are_an_error():
    """Ranks that ask for unlike numbers of stages are an error that names both."""
    peers = [PeerInfo(0, "a", 1, "a", 2), PeerInfo(1, "a", 2, "a", 1, stages=2)]
    assert _mismatch(peers, 1) == (
        "pipeline_parallel_size differs: it is 1 on rank 0, and 2 on rank 1 (this is rank 1). "
        "Give every rank the same"
    )
    assert [peer.name for peer in peers] == ["rank 0 on a", "rank 1 (stage 0 of 2) on a"]
