"""A step's batch against plain Python: rows, slots and tables, in one buffer."""

import random
from array import array

import pytest
import torch

from llama.ops.batch import Batch

CPU = torch.device("cpu")


def test_the_example_of_the_docstring():
    tokens, batch = Batch.pack(
        [7, 8, 9, 10], [4, 6, 0], [1, 1, 2], [[3, 0], [5, 1], [2]], 4, [0, 1, 3], CPU
    )
    assert tokens.tolist() == [7, 8, 9, 10]
    assert batch.positions.tolist() == [4, 6, 0, 1]
    assert batch.slots.tolist() == [0, 6, 8, 9]
    assert batch.page_table.tolist() == [[3, 0], [5, 1], [2, 0]]
    assert batch.query_starts.tolist() == [0, 1, 2, 4]
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu == [5, 7, 2]
    assert batch.logit_rows.tolist() == [0, 1, 3]
    assert batch.query_lens_cpu == [1, 1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_every_token_has_its_position_and_its_slot(seed, device):
    rng = random.Random(seed)
    size = rng.choice([1, 4, 16])
    lens = sorted(rng.choice([1, 1, 2, 40]) for _ in range(rng.randint(1, 9)))
    starts = [rng.choice([0, 1, 15, 100]) for _ in lens]
    free = rng.sample(range(5000), 3000)
    held = [-(-(s + n) // size) + rng.randint(0, 2) for s, n in zip(starts, lens, strict=True)]
    pages = [[free.pop() for _ in range(n)] for n in held]
    pages_given = [array("q", p) if rng.random() < 0.5 else p for p in pages]
    tokens, batch = Batch.pack([], starts, lens, pages_given, size, [], device)
    positions = [p for s, n in zip(starts, lens, strict=True) for p in range(s, s + n)]
    owners = [row for row, n in enumerate(lens) for _ in range(n)]
    slots = [
        pages[row][p // size] * size + p % size for row, p in zip(owners, positions, strict=True)
    ]
    assert batch.positions.tolist() == positions
    assert batch.slots.tolist() == slots
    for row, (start, count) in enumerate(zip(starts, lens, strict=True)):
        used = -(-(start + count) // size)
        table = batch.page_table[row].tolist()
        assert table[:used] == pages[row][:used] and not any(table[used:])
    parts = (tokens, batch.positions, batch.slots, batch.page_table, batch.query_starts,
             batch.seq_lens, batch.logit_rows)  # fmt: skip
    assert {x.dtype for x in parts} == {torch.int64} and {x.device.type for x in parts} == {
        device.type
    }
    assert len({x.untyped_storage().data_ptr() for x in parts}) == 1, "more than one copy"


def test_a_single_token_after_a_prompt_is_refused():
    with pytest.raises(AssertionError, match="come first"):
        Batch.pack([1, 2, 3], [0, 0], [2, 1], [[0], [1]], 4, [], CPU)
