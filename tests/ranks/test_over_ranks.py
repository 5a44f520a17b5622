"""A few tests of generation over two stages, as programs/over_ranks.py runs them all."""

import pytest

from helpers.kernels import HAS_KERNELS
from helpers.recorded_runs import Comparison, Run

# A cache that is too small, a row of NaN, seeds, and a format that fails while it runs, which the
# last stage alone would notice.
SELECTION = [
    "tests/test_generation.py",
    "tests/requests/test_structured_output.py",
    "-k",
    "preemption or a_row_of_nan or given_seed or too_large_says_so",
]


@pytest.mark.dist
@pytest.mark.skipif(not HAS_KERNELS, reason="needs x86-64 with AVX2, and g++")
def test_tests_of_generation_give_the_bits_of_one_process_in_two_stages(tmp_path):
    run = Run(2, 1, layers=2, is_bf16=True)
    found, wanted = (x.records(tmp_path, SELECTION) for x in (run, run.compared_with))
    compared = Comparison()
    compared.compare(found, wanted, tolerance=0)
    assert not compared.differences
    assert compared.num_passed == 4 and compared.num_equal > 10
