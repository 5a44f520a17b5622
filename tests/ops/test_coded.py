"""The common format of all quantized files, against its formula element by element."""

import pytest
import torch

from llama.weights.coded import Coded, joined


@pytest.mark.parametrize("has_offset", [False, True], ids=["symmetric", "with an offset"])
@pytest.mark.parametrize("groups", [1, 3], ids=["a scale a row", "a scale a group"])
def test_each_number_is_a_scale_times_the_table_plus_an_offset(groups, has_offset):
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (4, 12), dtype=torch.uint8, generator=draw)
    table, scale, offset = (
        torch.randn(shape, generator=draw) for shape in (16, (4, groups), (4, groups))
    )
    coded = Coded(codes, table, scale, offset if has_offset else None)
    assert coded.shape == (4, 12) and coded.group == 12 // groups
    numbers = coded.plain()
    for n in range(4):
        for k in range(12):
            g = k // (12 // groups)
            expected = scale[n, g] * table[int(codes[n, k])] + has_offset * offset[n, g]
            assert numbers[n, k] == expected
    assert torch.equal(coded.plain(torch.bfloat16), numbers.bfloat16())


def random_coded(n: int, groups: int, table: torch.Tensor, has_offset: bool) -> Coded:
    codes = torch.randint(len(table), (n, 48)).byte()
    offset = torch.randn(n, groups) if has_offset else None
    return Coded(codes, table, torch.randn(n, groups), offset)


@pytest.mark.parametrize("ends", [(0, 48), (12, 24), (8, 20), (5, 6)])
def test_columns_keep_their_numbers_where_a_group_is_cut(ends):
    coded = random_coded(3, 4, torch.randn(7), has_offset=True)
    assert torch.equal(coded.columns(*ends).plain(), coded.plain()[:, slice(*ends)])


def test_rows_of_several_keep_their_numbers_whatever_their_tables_and_groups():
    a = random_coded(2, 4, torch.arange(16.0), has_offset=True)
    b = random_coded(3, 6, torch.arange(-32.0, 32), has_offset=False)
    both = joined([a, b])
    assert both is not None and both.group == 4
    assert torch.equal(both.plain(), torch.cat([a.plain(), b.plain()]))
    c = random_coded(4, 6, torch.randn(16), has_offset=False)
    assert joined([a, c]) is None
    same = joined([c, c])
    assert same is not None and torch.equal(same.plain(), torch.cat([c.plain(), c.plain()]))
