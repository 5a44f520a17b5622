"""The parts that a rank holds: ranges of heads, columns, rows and layers, equal and uneven.

The expected ranges of equal ranks are computed by the plain formulas of Megatron-LM.
"""

import math
import random
from itertools import chain

import pytest

from llama import ModelArgs, Transformer
from llama.checkpoint.table import rank_shapes, whole_shapes
from llama.model.cost import weight_shapes
from llama.model.plan import LayerPlan
from llama.model.shares import RankShare, vocab_widths
from llama.ranks.parallel import Parallel
from llama.ranks.placement import WHOLE, Placement

PARAMS = ModelArgs(
    dim=64, n_layers=5, n_heads=8, n_kv_heads=4, vocab_size=128, multiple_of=32, max_seq_len=16
)


def spans(count: int, size: int, unit: int = 1, shares: tuple[int, ...] = ()) -> list[range]:
    """Return the span of each rank."""
    ranks = (Placement(rank=rank, size=size, shares=shares) for rank in range(size))
    return [placement.span(count, unit) for placement in ranks]


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_equal_ranks_hold_equal_parts(size):
    each = 128 // size
    assert spans(128, size) == [range(rank * each, (rank + 1) * each) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(32, 8), (16, 16), (16, 2), (16, 1)])
def test_heads_are_held_with_the_key_value_head_that_they_read(size, n_heads, n_kv_heads):
    each = n_heads // size
    for rank in range(size):
        heads, kv_heads = Placement(rank=rank, size=size).heads(n_heads, n_kv_heads)
        assert heads == range(rank * each, (rank + 1) * each)
        first = rank * n_kv_heads // size
        assert kv_heads == range(first, first + max(1, n_kv_heads // size))


@pytest.mark.parametrize(
    ("count", "unit", "shares", "sizes"),
    [
        (8, 1, (), [3, 3, 2]),
        (704, 32, (), [256, 224, 224]),
        (4, 1, (5, 2, 1), [2, 1, 1]),
        (22 * 32, 32, (3, 1), [17 * 32, 5 * 32]),
        (3, 1, (1, 1, 100), [1, 1, 1]),
        (10, 1, (1, 1, 100), [1, 1, 8]),
    ],
)
def test_uneven_shares_are_rounded_by_the_largest_remainder(count, unit, shares, sizes):
    found = spans(count, len(sizes), unit, shares)
    assert [len(span) for span in found] == sizes
    assert list(chain.from_iterable(found)) == list(range(count))


def test_any_ranks_hold_every_part_once():
    """Heads, columns and rows of any number of ranks tile the model, close to the exact shares.

    Columns and rows begin at multiples of 32 wherever there are enough of them.
    """
    rng = random.Random(3)
    for _ in range(300):
        n_kv_heads = rng.choice([1, 2, 3, 4, 8])
        n_heads = n_kv_heads * rng.choice([1, 2, 3, 4, 8])
        params = ModelArgs(
            dim=n_heads * 8,
            n_layers=1,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            vocab_size=rng.choice([512, 1000, 32003, 128256]),
            multiple_of=rng.choice([32, 256]),
            ffn_dim_multiplier=4,
        )
        size = rng.randint(1, min(n_heads, 16))
        shares = rng.choice([(), tuple(rng.randint(1, 9) for _ in range(size))])
        ranks = [RankShare.of(params, x) for x in Placement(size=size, shares=shares).peers()]
        for name, count in (("heads", n_heads), ("ffn", params.ffn_dim)):
            parts = [getattr(rank, name) for rank in ranks]
            assert list(chain.from_iterable(parts)) == list(range(count)), (name, params, shares)
        rows = [rank.vocab for rank in ranks]
        assert [part.start for part in rows[1:]] == [part.stop for part in rows[:-1]]
        assert (rows[0].start, rows[-1].stop) == (0, params.vocab_size) and all(rows)
        is_even = not shares or len(set(shares)) == 1
        if not is_even and params.ffn_dim >= 32 * size:
            assert not any(rank.ffn.start % 32 for rank in ranks)
        weights = shares or (1,) * size
        for rank, weight in zip(ranks, weights, strict=True):
            exact = params.vocab_size * weight / sum(weights)
            assert abs(len(rank.vocab) - exact) <= 32 * size


def test_columns_that_a_file_stores_together_stay_on_one_rank():
    """8B on three ranks in K-quants: 56 superblocks of columns, and in 32s without them."""
    params = ModelArgs(
        dim=4096, n_heads=32, n_kv_heads=8, vocab_size=128256, multiple_of=1024,
        ffn_dim_multiplier=1.3,
    )  # fmt: skip
    for step, columns in ((256, [4864, 4864, 4608]), (32, [4800, 4768, 4768])):
        ranks = Placement(size=3, column_step=step).peers()
        assert [len(RankShare.of(params, rank).ffn) for rank in ranks] == columns
    assert [len(RankShare.of(params, rank).kv_heads) for rank in ranks] == [3, 3, 2]
    assert vocab_widths(params, ranks[0]) == [42752, 42752, 42752]


@pytest.mark.parametrize(
    ("sizes", "bounds"),
    [
        ((4096, 32, 1024, 1.3, 32), {3: 1.026, 5: 1.048, 6: 1.093, 7: 1.134}),  # 8B
        ((8192, 64, 4096, 1.3, 80), {3: 1.023, 5: 1.047, 6: 1.091, 7: 1.130}),  # 70B
        ((3072, 24, 256, 1.0, 28), {3: 1.033, 5: 1.065, 6: 1.115, 7: 1.172}),  # 3B
    ],
)
def test_the_largest_share_of_a_step_is_close_to_an_equal_one(sizes, bounds):
    """The weights that the busiest rank multiplies by, against an equal part of them.

    The embedding is not multiplied. A step takes as long as the busiest rank.
    """
    dim, n_heads, multiple_of, multiplier, n_layers = sizes
    params = ModelArgs(
        dim=dim, n_layers=n_layers, n_heads=n_heads, n_kv_heads=8, vocab_size=128256,
        multiple_of=multiple_of, ffn_dim_multiplier=multiplier,
    )  # fmt: skip
    for size, bound in bounds.items():
        parts = [_multiplied(params, rank) for rank in Placement(size=size).peers()]
        assert max(parts) * size / _multiplied(params, WHOLE) == pytest.approx(bound, abs=2e-3)


def _multiplied(params: ModelArgs, placement: Placement) -> int:
    shapes = weight_shapes(params, placement)
    layer = sum(n * k for name, (n, k) in shapes.items() if name != "output")
    return params.n_layers * layer + math.prod(shapes["output"])


@pytest.mark.parametrize("shares", [(), (3, 2, 1, 1, 1), (1, 1, 1, 1, 9)])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4, 8])
def test_every_query_head_is_held_once_and_with_its_key_value_head(n_kv_heads, shares):
    n_heads = 48
    found = [Placement(rank=i, size=5, shares=shares).heads(n_heads, n_kv_heads) for i in range(5)]
    assert list(chain.from_iterable(heads for heads, _ in found)) == list(range(n_heads))
    for heads, kv_heads in found:
        read = {head // (n_heads // n_kv_heads) for head in heads}
        assert read == set(kv_heads)
        assert len(heads) % len(kv_heads) == 0


def test_what_cannot_be_divided_is_refused():
    with pytest.raises(ValueError, match="3 units cannot be divided among 4 parts"):
        Placement(size=4).span(3)
    with pytest.raises(ValueError, match=r"shares=\(1, 0\) must be 2 positive numbers"):
        Placement(size=2, shares=(1, 0))
    with pytest.raises(ValueError, match="stage 2 of 2 and rank 0 of 1 do not exist"):
        Placement(stage=2, stages=2)


@pytest.mark.parametrize("tied", [False, True])
def test_the_stages_of_a_pipeline_hold_every_layer_once(tied):
    """The stages of a pipeline hold every layer once.

    Modules and shapes agree; the embedding and lm_head are on the first and last stage, tied ones
    on both.
    """
    params = ModelArgs(**{**vars(PARAMS), "tied_output": tied})
    stages = [Placement(stage=stage, stages=2, rank=1, size=2) for stage in range(2)]
    assert [stage.layers(5) for stage in stages] == [range(3), range(3, 5)]
    names = [set(rank_shapes(params, stage)) for stage in stages]
    assert names[0] | names[1] == set(whole_shapes(params))
    assert names[0] & names[1] == {"norm.weight"} | ({"tok_embeddings.weight"} if tied else set())
    for placement in stages:
        model = Transformer(params, parallel=Parallel(placement), device="meta")
        shapes = {name: shard.shape for name, shard in model.named_shards().items()}
        assert shapes == rank_shapes(params, placement)
        cache, _ = model.plan.kv_cache(1, 1, model.norm.weight.dtype)
        assert cache[0] == len(placement.layers(5)) == len(model.blocks())


def test_the_plan_and_the_table_read_the_same_share():
    placement = Placement(rank=5, size=8)
    plan, share = LayerPlan.of(PARAMS, placement), RankShare.of(PARAMS, placement)
    assert (plan.n_heads, plan.n_kv_heads, plan.ffn_dim) == (1, 1, PARAMS.ffn_dim // 8)
    assert share.rows("K") == range(2 * 8, 3 * 8)
    assert share.rows("Q") == range(5 * 8, 6 * 8)
    assert share.rows("E") == range(64)
