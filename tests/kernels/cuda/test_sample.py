"""The sampling kernels in Triton's interpreter give exactly the ids of PyTorch.

A row's weights are integers, so that everything computed from them is exact.
"""

import math
import random
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton's kernels need Triton")

from helpers.sequences import state_of
from llama.engine.sampler import sample as sample_sequences
from llama.engine.sampler import top_of_share
from llama.kernels.cuda import sample as gpu
from llama.kernels.cuda.table import table
from llama.ops import sample as op
from llama.ops.sample import SamplingRow

SAMPLING = table(frozenset({"sample"}))
INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True)
def torch_body(no_kernels, monkeypatch) -> None:
    """Run the ops in PyTorch, with the interpreter's exp2: torch's may differ in a bit."""

    def probs(logits: Tensor, row_max: Tensor, rows: Seq[SamplingRow]) -> Tensor:
        rates = torch.tensor([math.log2(math.e) / row.temperature for row in rows])
        return torch.from_numpy(np.exp2(((logits - row_max[:, None]) * rates[:, None]).numpy()))

    monkeypatch.setattr(op, "relative_probs", probs)


def random_rows(rng: random.Random, vocab: int, count: int) -> list[SamplingRow | None]:
    rows: list[SamplingRow | None] = [None, SamplingRow()]
    while len(rows) < count:
        row = SamplingRow(
            temperature=rng.choice([1.0, 0.6, rng.uniform(0.01, 3)]),
            min_p=rng.choice([0.0, 0.0, rng.random() ** 4, 1.0]),
            top_k=rng.choice([0, 0, -1, 1, 20, rng.randint(1, vocab + 3)]),
            top_p=rng.choice([1.0, 0.9, 0.0, rng.random(), 1 - 2**-40]),
        )
        rows.append(row)
    return rng.sample(rows, count)


def both(logits: Tensor, rows: Seq[SamplingRow | None], rng: random.Random) -> tuple[list, list]:
    """Return the ids of PyTorch and of the kernels, which make the uniforms themselves."""
    seeds = [rng.getrandbits(rng.choice([8, 62])) for _ in rows]
    positions = [rng.getrandbits(rng.choice([4, 31])) for _ in rows]
    wanted = op.choose_ids(logits, rows, seeds, positions)
    params = torch.from_numpy(op.pack_params(rows, list(zip(seeds, positions, strict=True))))
    is_filtered = any(row is not None and row.is_filtered for row in rows)
    found = gpu.choose(logits, params, is_filtered=is_filtered)
    return wanted.tolist(), found.tolist()


@pytest.mark.parametrize(
    ("vocab", "spread"),
    [(1, 0.3), (40, 0.0), (40, 6.0), (1024, 0.0), (1024, 0.3), (1500, 0.0), (1500, 0.3), (1500, 6)],
)
def test_ids_are_those_of_the_torch_body(vocab, spread):
    """Ids equal PyTorch's for greedy, plain and filtered rows of one batch.

    Rows have ties, in one block and in two.
    """
    rng = random.Random(vocab)
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    rows = random_rows(rng, vocab, 6)
    wanted, found = both(logits.bfloat16().float(), rows, rng)
    assert found == wanted


FLAT = {
    "normal": torch.randn(2500, generator=torch.Generator().manual_seed(3)).bfloat16().float(),
    "ties everywhere": torch.zeros(2500),
}


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Return the sequence of pick's operations: weighing all tokens before one, racing a block
    again.
    """
    found: list[str] = []
    for name in ("_kth", "_sums", "_race"):
        real = getattr(gpu, name)

        def noted(*args: Any, real: Any = real, name: str = name) -> Any:
            found.append(name)
            return real(*args)

        monkeypatch.setattr(gpu, name, noted)
    return found


@pytest.mark.parametrize(
    ("name", "row", "most"),
    [
        ("normal", SamplingRow(top_p=0.95), 1.5),
        ("normal", SamplingRow(top_k=300, top_p=0.5), 4),
        ("normal", SamplingRow(min_p=0.2, top_p=0.9), 1.5),
        ("ties everywhere", SamplingRow(top_p=0.1), 5),
        ("ties everywhere", SamplingRow(top_k=2000), 1.5),
    ],
)
def test_where_all_tokens_are_likely_few_are_weighed(monkeypatch, calls, name, row, most):
    """Few tokens are weighed where all are likely.

    There are 6 draws in three blocks and chunks; the mass that is kept of the racing tokens
    decides.
    """
    monkeypatch.setattr(gpu, "_CHUNK", 1024)
    wanted, found = both(FLAT[name].repeat(6, 1), [row] * 6, random.Random(4))
    assert found == wanted
    assert 6 <= calls.count("_sums") <= 6 * most
    assert calls.count("_race") <= 6 * (3 + 2 * most)
    assert calls.count("_kth") == (6 if row.top_k else 0)


def test_the_token_just_behind_the_kth_is_not_kept():
    """The token just after the k-th is not kept.

    It takes part in the race, and all before it weigh as much as everything that is kept.
    """
    logits = torch.tensor([1.0, 0.97, 0.96]).log().repeat(12, 1)
    wanted, found = both(logits, [SamplingRow(top_k=2)] * 12, random.Random(5))
    assert found == wanted and 2 not in found


def test_blocks_without_likely_tokens_are_not_read_again(monkeypatch, calls):
    monkeypatch.setattr(gpu, "_CHUNK", 1024)
    logits = torch.full((1, 4000), -9.0)
    logits[0, 1200:1300] = torch.randn(100, generator=torch.Generator().manual_seed(1))
    read: list[int] = []

    def chunk(*given: Any, real: Any = gpu._chunk) -> Any:
        read.append(given[1])
        return real(*given)

    monkeypatch.setattr(gpu, "_chunk", chunk)
    for row in (SamplingRow(top_p=0.9), SamplingRow(top_k=20)):
        wanted, found = both(logits, [row], random.Random(2))
        assert found == wanted
    assert calls.count("_race") == 2 and len(read) == 2 + 1 + (3 + 1)


def test_the_real_vocabulary(monkeypatch):
    """The real vocabulary gives the same ids.

    There are four blocks instead of 126, as the interpreter is slow; a few tokens have most of the
    mass.
    """
    monkeypatch.setattr(gpu, "_MIN_BLOCK", 2**15)
    order = torch.randperm(128_256, generator=torch.Generator().manual_seed(5))
    logits = (-2.5 * torch.arange(1.0, 128_257).log())[order].repeat(3, 1)
    rows = [SamplingRow(), SamplingRow(top_p=0.9), SamplingRow(top_k=4, top_p=0.95)]
    wanted, found = both(logits, rows, random.Random(6))
    assert found == wanted


def test_a_row_without_a_finite_maximum_has_no_id():
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(7))
    logits[0, 3], logits[1, 29], logits[2] = NAN, INF, -INF
    logits[3, 1:] = -INF  # one token is allowed
    for row in (None, SamplingRow(), SamplingRow(top_p=0.5), SamplingRow(min_p=0.1, top_k=3)):
        wanted, found = both(logits, [row] * 5, random.Random(8))
        assert found == wanted
        assert found[:4] == [-1, -1, -1, 0] and found[4] >= 0


def test_top_tokens_are_the_first_of_the_largest():
    logits = torch.randn(7, 2100, generator=torch.Generator().manual_seed(9)).round()
    logits[1], logits[2] = 0.0, -INF
    logits[3, 1500], logits[4, [1024, 2099]] = INF, 9.0
    logits[5, 1023] = NAN
    for rows in (logits, logits[:, ::2], logits[:, 1000:]):  # in any memory layout
        row_max, ids = op.top_tokens(rows)
        found_max, found = gpu.top_tokens(rows)
        torch.testing.assert_close(found_max, row_max, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found, ids)


def test_the_sampler_runs_the_kernels_that_are_in_use(monkeypatch):
    """The sampler runs the kernels in use, for a whole row and for ranks' shares."""
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(10))
    params: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_p": 0.8, "temperature": 0.7}]
    sequences = [state_of([1], 9, 2**61 + i, **p) for i, p in enumerate(params)]
    wanted = [sample_sequences(logits, sequences).ids, top_of_share(logits, 100)]
    launched = []
    for name in ("choose", "top_tokens"):
        real = getattr(gpu, name)

        def noted(*args, real=real, name=name, **options):
            launched.append(name)
            return real(*args, **options)

        monkeypatch.setattr(gpu, name, noted)
    found = [
        sample_sequences(logits, sequences, kernels=SAMPLING).ids,
        top_of_share(logits, 100, SAMPLING),
    ]
    assert launched == ["choose", "top_tokens", "top_tokens"]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_vocabulary_too_large_for_the_kernels_is_sampled_by_torch(monkeypatch):
    monkeypatch.setattr("llama.kernels.cuda.table.MAX_VOCAB", 20)
    monkeypatch.setattr(gpu, "choose", None)
    logits = torch.arange(21.0)[None]
    assert op.choose_ids(logits, [None], [0], [0], SAMPLING).tolist() == [20]
