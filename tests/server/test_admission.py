"""Which requests a model takes: as many as there is capacity for, by what has not ended."""

import random
from dataclasses import dataclass

import pytest

from llama.server.admission import Admission
from llama.server.errors import ApiError


@dataclass(eq=False)
class Asked:
    """A request, which notes how often its sequences are counted."""

    num_left: int
    sender: bytes = b""
    has_waiting: bool = False  # so that it gives way to no other
    num_counts: int = 0

    @property
    def num_unfinished(self) -> int:
        self.num_counts += 1
        return self.num_left


@pytest.mark.parametrize("seed", range(5))
def test_a_request_is_refused_exactly_when_there_is_no_capacity(seed):
    draw = random.Random(seed)
    admission: Admission[Asked] = Admission(10)
    active: list[Asked] = []
    num_refused = 0
    for _ in range(400):
        for asked in draw.sample(active, len(active) // 3):
            asked.num_left -= draw.randint(0, asked.num_left)
            if asked.num_left == 0:
                admission.remove(asked)
                active.remove(asked)
        new = Asked(draw.randint(1, 4))
        fits = sum(asked.num_left for asked in active) + new.num_left <= 4 + 10
        try:
            assert admission.giving_way(new.num_left, b"", 4) == []
        except ApiError:
            num_refused += 1
            assert not fits
        else:
            assert fits
            admission.add(new)
            active.append(new)
    assert num_refused > 20


def test_with_capacity_left_a_new_request_counts_no_other():
    """Each of a burst of requests would take as long as there are others."""
    admission: Admission[Asked] = Admission(1000)
    active = [Asked(1) for _ in range(100)]
    for asked in active:
        assert admission.giving_way(1, b"", 8) == []
        admission.add(asked)
    assert {asked.num_counts for asked in active} == {1}
