"""The shares of ranks: as arguments, as measured, and what they make of memory and cores."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llama.build_args import BuildArgs, read_shares
from llama.checkpoint.column_blocks import columns_per_block
from llama.checkpoint.find import Checkpoint
from llama.checkpoint.table import num_elements, rank_shapes
from llama.common.checks import FieldError
from llama.common.device import available_cores, free_bytes, part_of_machine
from llama.loading.files import Files
from llama.loading.memory import estimate_memory, with_ffn_shares
from llama.loading.shares import (
    ColumnSpace,
    check_shares,
    column_step,
    fill_columns,
    resolve_shares,
    tightest_memory,
)
from llama.loading.sizes import Memory
from llama.model.args import ModelArgs
from llama.model.plan import LayerPlan
from llama.model.shares import RankShare
from llama.ops.kv_cache import AS_COMPUTED
from llama.ranks.parallel import Parallel
from llama.ranks.placement import Placement

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


class Ranks(Parallel):
    """One of many ranks; `others` has what all of them send."""

    def __init__(self, placement: Placement, others: list[list[int]]) -> None:
        super().__init__(placement)
        self.__dict__["others"] = others

    def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        return self.__dict__["others"]


@pytest.mark.parametrize(
    ("given", "shares"),
    [
        (None, None),
        ("3,2,2", (3, 2, 2)),
        (" 3, 2", (3, 2)),
        ([np.int64(3), 1], (3, 1)),
        ((7,), (7,)),
        ("memory", "memory"),
        ("speed", "speed"),
    ],
)
def test_shares_are_numbers_or_what_is_measured(given, shares):
    assert BuildArgs("folder", shares=given).checked().shares == shares


@pytest.mark.parametrize(
    "given", ["", "3,,2", "3,0", "3,-1", "2.5,1", "fast", [], [True, 1], 3, [1e3], "1," * 9 + "x"]
)
def test_other_shares_are_refused(given):
    with pytest.raises(FieldError, match=r"shares=.*such as 3,2,2, or one of memory, speed"):
        read_shares(given)


def test_each_rank_needs_a_share():
    check_shares((3, 1), 2)
    check_shares("memory", 2)
    with pytest.raises(FieldError, match=r"shares=3,1 has 2 numbers, .* among 3 ranks"):
        check_shares((3, 1), 3)


def test_measured_shares_are_those_of_the_slowest_copy_of_each_rank(monkeypatch):
    """Two groups of two ranks: the values of a rank's copies are 90 and 80, and 31 and 40."""
    monkeypatch.setattr("llama.loading.shares.free_bytes", lambda _: 1)
    parallel = Ranks(Placement(size=2), [[90], [31], [80], [40]])
    assert resolve_shares("memory", parallel, CPU) == (16, 6)
    assert resolve_shares("memory", Ranks(Placement(size=2), [[90], [89]]), CPU) == ()
    assert resolve_shares((2, 2), parallel, CPU) == ()
    assert resolve_shares((2, 1), parallel, CPU) == (2, 1)
    assert resolve_shares("speed", Parallel(), CPU) == ()


def test_the_speed_of_a_device_is_measured():
    sent: list[Sequence[int]] = []

    class Measured(Ranks):
        def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
            sent.append(values)
            return super().gather_integers(values)

    assert resolve_shares("speed", Measured(Placement(size=2), [[200], [100]]), CPU) == (16, 8)
    assert sent[0][0] > 1 << 20, "bytes per second"


LLAMA_70B = ModelArgs(
    dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, vocab_size=128256, multiple_of=4096,
    ffn_dim_multiplier=1.3,
)  # fmt: skip


def kv_tokens(shares: tuple[int, ...], size: int) -> int:
    """Return the tokens of KV cache of 70B in 4.6 bits on cards with 20.8 GB for both."""
    found = []
    for rank in Placement(size=size, column_step=256, ffn_shares=shares).peers():
        num_bytes = num_elements(rank_shapes(LLAMA_70B, rank)) * 4.6 / 8
        per_token = LayerPlan.of(LLAMA_70B, rank).kv_bytes_per_token(torch.bfloat16)
        found.append((20.8e9 - num_bytes) / per_token)
    return int(min(found) / 1000)


def space(num_bytes: int, per_block: int, per_token: int) -> ColumnSpace:
    """Return the space of a rank whose steps need nothing."""
    return ColumnSpace(per_token, num_bytes, per_block, num_bytes, per_block)


@pytest.mark.parametrize(
    ("size", "balanced", "filled", "largest"),
    [(3, 55, 65, 1.23), (5, 148, 191, 1.83), (6, 163, 226, 1.50), (7, 174, 227, 1.19)],
)
def test_ranks_with_more_heads_have_fewer_columns(size, balanced, filled, largest):
    """Ranks with more heads have fewer columns, so that thousands of tokens more fit.

    The largest share of the columns grows, against an equal one.
    """
    num_blocks = LLAMA_70B.ffn_dim // 256
    per_block = 3 * 8192 * 256 * 80 * 4.6 / 8
    ranks = []
    for rank in Placement(size=size, column_step=256).peers():
        other = num_elements(rank_shapes(LLAMA_70B, rank)) * 4.6 / 8
        other -= len(RankShare.of(LLAMA_70B, rank).ffn) / 256 * per_block
        per_token = LayerPlan.of(LLAMA_70B, rank).kv_bytes_per_token(torch.bfloat16)
        ranks.append([space(int(20.8e9 - other), int(per_block), per_token)])
    blocks = fill_columns(ranks, num_blocks, 10**7)
    assert (kv_tokens((), size), kv_tokens(blocks, size)) == (balanced, filled)
    assert max(blocks) * size / num_blocks == pytest.approx(largest, abs=5e-3)
    assert sum(blocks) == num_blocks


def test_columns_are_even_where_memory_allows_it():
    """Columns are as even as the tokens that are wanted allow; the tightest copy decides."""
    ranks = [[space(1000, 10, 1)], [space(900, 10, 2), space(10**6, 10, 2)]]
    assert fill_columns(ranks, 60, 16 * 9) == (30, 30)
    assert fill_columns(ranks, 60, 16 * 20) == (34, 26)
    assert fill_columns(ranks, 60, 10**6) == (54, 6), "416 tokens, alongside which 58 and 6 fit"
    assert fill_columns(ranks, 200, 10**6) == (), "not even without a KV cache"


def test_ranks_measure_how_many_columns_they_hold(monkeypatch):
    """Three ranks with 3, 3 and 2 key-value heads send what they have space for, and then agree.

    With the columns that follow, the tightest of them has more tokens than with equal columns.
    """
    params = ModelArgs(
        dim=512, n_layers=2, n_heads=8, n_kv_heads=8, vocab_size=512, multiple_of=32,
        ffn_dim_multiplier=4,
    )  # fmt: skip
    monkeypatch.setattr("llama.loading.memory.free_bytes", lambda *_: 60 << 20)
    checkpoint = replace(_checkpoint(), params=params)
    args = BuildArgs("model", None, 4096, 256, shares="memory")
    placements = Placement(size=3).peers()

    def files_of(placement: Placement) -> Files:
        return Files(checkpoint, torch.bfloat16, None, placement, CPU)

    sent: list[list[int]] = []

    class Sending(Ranks):
        def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
            sent.append(list(values))
            return [list(values)] * 3

    for placement in placements:
        with_ffn_shares(args, [files_of(placement)], Sending(placement, []), AS_COMPUTED)
    chosen = []
    for placement in placements:
        parallel = Ranks(placement, sent)
        (found,) = with_ffn_shares(args, [files_of(placement)], parallel, AS_COMPUTED)
        chosen.append(found.placement)
    assert len({placement.ffn_shares for placement in chosen}) == 1
    columns = [len(RankShare.of(params, placement).ffn) for placement in chosen]
    assert max(columns[:2]) < columns[2] and sum(columns) == params.ffn_dim

    def tokens(ranks: list[Placement]) -> int:
        needs = [estimate_memory(files_of(rank), 60 << 20, 256) for rank in ranks]
        return min(memory.kv_tokens for memory in needs)

    assert tokens(chosen) > 1.1 * tokens(placements)
    small = replace(args, max_seq_len=16, max_batch_size=8)
    (found,) = with_ffn_shares(small, [files_of(placements[0])], parallel, AS_COMPUTED)
    assert found.placement.ffn_shares == (), "the memory allows equal columns"
    given = replace(args, ffn_shares=[1, 2, 1])
    (found,) = with_ffn_shares(given, [files_of(placements[0])], parallel, AS_COMPUTED)
    assert found.placement.ffn_shares == (1, 2, 1), "the user's own"


def files_of_ranks(ffn: int, size: int, *, head_dim: int = 32, **options: Any) -> list[Files]:
    """Return the files of each rank of a model with so many columns, as a build divides it."""
    params = ModelArgs(
        dim=8 * head_dim, n_layers=2, n_heads=8, n_kv_heads=8, vocab_size=512, multiple_of=ffn,
        ffn_dim_multiplier=0.01,
    )  # fmt: skip
    assert params.ffn_dim == ffn
    checkpoint = replace(_checkpoint(), params=params)
    args = BuildArgs("model", None, 4096, 256)
    found = []
    for placement in Placement(size=size).peers():
        given = Files(checkpoint, torch.bfloat16, options["quantize"], placement, CPU)
        given = replace(given, activations=options["activations"])
        found += with_ffn_shares(args, [given], Parallel(placement), AS_COMPUTED)
    return found


@pytest.mark.parametrize("activations", ["int8", "int8_token", "int8_lm_head"])
@pytest.mark.parametrize(
    ("ffn", "size", "columns"),
    [
        (480, 2, [256, 224]),
        (1120, 4, [288, 288, 288, 256]),
        (512, 4, [128] * 4),
        (512, 3, [192, 160, 160]),
        (96, 4, [24] * 4),
    ],
)
def test_columns_fill_the_pieces_of_rounded_activations(ffn, size, columns, activations):
    ranks = files_of_ranks(ffn, size, quantize="int8", activations=activations)
    shares = [RankShare.of(files.checkpoint.params, files.placement) for files in ranks]
    assert [len(share.ffn) for share in shares] == columns
    assert [share.ffn.start for share in shares] == list(accumulate(columns[:-1], initial=0))
    for files in ranks:
        if min(columns) >= 32:
            files.check_pieces()
            continue
        with pytest.raises(
            FieldError, match=r"w2 has 24 columns on a rank.* give activations='bf16"
        ):
            files.check_pieces()


def test_columns_are_equal_where_no_activations_are_rounded_on_a_cpu():
    for activations in (None, "fp8"):
        ranks = files_of_ranks(480, 2, quantize="int8", activations=activations)
        assert [files.placement.ffn_shares for files in ranks] == [(), ()]


@pytest.mark.parametrize(
    ("size", "head_dim", "ffn", "matrix"),
    [
        (4, 24, 512, "wo has 48 columns"),
        (8, 80, 512, "wo has 80 columns"),
        (1, 10, 512, "wqkv has 80 columns"),
        (1, 32, 1000, "w2 has 1000 columns"),
    ],
)
def test_columns_that_fill_no_pieces_are_an_error_on_every_rank(size, head_dim, ffn, matrix):
    """The error comes before weights are read; matrices in codes are seen when they are."""
    ranks = files_of_ranks(ffn, size, head_dim=head_dim, quantize="int4", activations="int8")
    errors = set()
    for files in ranks:
        try:
            files.check_pieces()
        except FieldError as e:
            errors.add(str(e))
    (error,) = errors
    assert re.search(
        rf"activations='int8': .*{matrix} on a rank, which is no multiple of 32", error
    )
    for files in ranks:
        replace(files, quantize=None).check_pieces()


def test_the_rank_with_the_smallest_cache_decides_for_all():
    """Ranks with fewer free bytes, or with more keys and values of a token, have fewer tokens."""
    memory = Memory(free=1 << 30, weights=1 << 28, reserve=1 << 26, per_token=1 << 10)
    more_heads = replace(memory, per_token=3 << 9)
    ranks = [x.as_integers() for x in (memory, more_heads, replace(memory, max_tokens=10**9))]
    chosen = tightest_memory(memory, Ranks(Placement(size=3), ranks), None)
    assert chosen == replace(more_heads, rank=1)
    less = replace(memory, free=1 << 29)
    chosen = tightest_memory(memory, Ranks(Placement(size=2), [less.as_integers()] * 2), None)
    assert chosen == less, "no rank is named where all hold as much"
    full = replace(memory, weights=1 << 29, per_token=1 << 9)
    ranks = [x.as_integers() for x in (more_heads, full)]
    chosen = tightest_memory(memory, Ranks(Placement(size=2), ranks), 1 << 29)
    assert chosen.rank == 1, "so many bytes are not free on it, though its tokens are smaller"


@pytest.mark.parametrize(
    ("rank", "local_rank", "cores"), [(0, 0, 6), (1, 1, 2), (2, 0, 6), (3, 1, 2)]
)
def test_ranks_of_a_machine_divide_it_by_their_shares(monkeypatch, rank, local_rank, cores):
    """Four ranks on two machines of eight cores, in groups of two with shares of 3 and 1."""
    monkeypatch.setattr("llama.common.device.machine_cores", lambda: 8)
    monkeypatch.setattr("llama.common.device._available_memory", lambda: 800)
    monkeypatch.setattr("llama.common.device._cgroup_headroom", lambda: 1 << 60)
    variables = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    assert available_cores((3, 1)) == cores and available_cores() == 4
    assert free_bytes(CPU, (3, 1)) == 100 * cores and free_bytes(CPU) == 400
    assert part_of_machine((3, 1)) * 8 == cores


def _checkpoint(**changes: Any) -> Checkpoint:
    return Checkpoint(Path("model"), ModelArgs(), [], **{"layout": "hf", **changes})


@pytest.mark.parametrize(
    ("quantization", "columns"),
    [
        (None, 1),
        ({"quant_method": "awq", "group_size": 128}, 128),
        ({"quant_method": "gptq", "group_size": -1}, 1),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 64),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 1),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"group_size": 64}}},
            },
            64,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"block_structure": [128, 128]}}},
            },
            128,
        ),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, 128),
        ({"quant_method": "fp8", "weight_block_size": None}, 1),
        ({"quant_method": "auto-round", "extra_config": {"lm_head": {"group_size": 64}}}, 64),
    ],
)
def test_columns_of_a_group_stay_together(quantization, columns):
    """The steps suit the groups of a file whose codes are kept, and a GPU's products."""
    found = _checkpoint(quantization=quantization)
    assert columns_per_block(found) == columns
    assert column_step(replace(found, in_codes=True), CPU) == max(columns, 32)
    assert column_step(replace(found, in_codes=True), GPU) == 128
    assert column_step(found, CPU) == 32, "dequantized"


@pytest.mark.parametrize(("quantize", "columns"), [("", 1), ("int4", 1), ("Q4_K_M", 256)])
def test_columns_of_packed_weights_stay_together(quantize, columns):
    packed = {"quantize": quantize, "is_guard": "False", "source": "model"}
    assert columns_per_block(_checkpoint(layout="packed", packed=packed)) == columns
