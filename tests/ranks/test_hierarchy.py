"""A group that spans machines: shared memory inside each and gloo between them, against gloo alone.
What the ranks run is in programs/hierarchical.py; test_machines.py has the same under torchrun."""

import os

import pytest

from helpers.forked import Ranks
from helpers.kernels import HAS_KERNELS
from programs import hierarchical

pytestmark = pytest.mark.skipif(
    not HAS_KERNELS or not hasattr(os, "pidfd_open"), reason="needs the kernels, and Linux 5.3"
)


@pytest.mark.parametrize(
    "machines",
    [[[0, 1], [2, 3]], [[0, 1, 2], [3]], [[0], [1, 2, 3]], [[0, 2], [1], [3]], [[0], [1]]],
    ids=str,
)
def test_random_operations_are_gloo_s(machines, tmp_path):
    """Even, ragged, and ranks of one machine that are no neighbours; 0 bytes to over 1 MB."""
    size = sum(map(len, machines))
    with Ranks(hierarchical.main, tmp_path, size, "operations", machines, 31, 42) as ranks:
        found = ranks.results()
    assert len(set(found)) == 1 and len(found[0]) == 64, found
