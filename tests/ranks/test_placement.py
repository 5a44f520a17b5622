"""The parts that a rank holds: ranges of heads, columns, rows and layers, equal and uneven.

The expected ranges of equal ranks are computed by the plain formulas of Megatron-LM.
"""

from itertools import chain

import pytest

from llama import ModelArgs, Transformer
from llama.checkpoint.table import rank_shapes, whole_shapes
from llama.model.plan import LayerPlan
from llama.model.shares import RankShare
from llama.ranks.collectives import ModelParallel
from llama.ranks.placement import Placement

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
    with pytest.raises(ValueError, match="a dimension of 48 cannot be divided in steps of 32"):
        Placement(size=2).span(48, 32)
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
        model = Transformer(params, parallel=ModelParallel(placement), device="meta")
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
