"""Run the tests of generation themselves over several ranks, and compare all that they generate.

    python tests/programs/over_ranks.py                          # all layouts
    python tests/programs/over_ranks.py 3 2x1 -k "beam or seed"  # these, and these tests
    python tests/programs/over_ranks.py --records FOLDER 7       # keep the records, see below

A layout is a number of ranks, or STAGESxRANKS. Every rank runs pytest on the same files with the
plugin helpers/over_ranks.py, and so the same tests in the same order. For each layout these are
compared: the outcome of each test, all that every rank got, and what one process got.

- 3, 5, 6 and 7 ranks, whose shares are unequal, run in float32: the same ids, log-probabilities
  within 1e-4. Results of models in other types are counted and not compared with one process, as
  the sums of other shares are rounded differently.
- 2x1, 3x1 and 2x2 run in float32 too, and once more in bf16, where the CPU kernels compute: the
  same bits as one process, or as two ranks. 3x1 has unequal stages. In bf16, what a test compares
  with the float32 of transformers, Meta's model or a reference is not compared.

tests/test_sampling.py and tests/engine/test_scheduler.py, which run no model, are not among them.

With --records, the records of each run stay in a folder, and a run whose records are there is not
repeated: delete them after a change. All layouts take about an hour of a machine of two cores.
Arguments that are neither layouts nor --records go to pytest, files of tests among them. The exit
code is 1 if anything differs.
"""

import re
import sys
import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from helpers.recorded_runs import TOLERANCE, Comparison, Run

_LAYOUTS = ("3", "5", "6", "7", "2x1", "3x1", "2x2")
_FILES = (
    "tests/test_generation.py", "tests/test_speculation.py", "tests/requests/test_requests.py",
    "tests/requests/test_calls.py", "tests/requests/test_structured_output.py",
    "tests/requests/test_thinking.py", "tests/requests/test_reasoning_text.py",
)  # fmt: skip
_LAYERS = 2  # more layers than the checkpoints of tests have, for stages


def runs_of(layout: str) -> list[Run]:
    """Return the runs of a layout, such as "3" or "2x2"."""
    stages, size = [int(x) for x in (layout if "x" in layout else f"1x{layout}").split("x")]
    if stages == 1:
        return [Run(1, size)]
    return [Run(stages, size, _LAYERS, is_bf16) for is_bf16 in (False, True)]


def main(arguments: list[str]) -> int:
    """Compare the layouts, and return the exit code."""
    records = None
    if "--records" in arguments:
        at = arguments.index("--records")
        records = arguments[at + 1]
        del arguments[at : at + 2]
    layouts = [x for x in arguments if re.fullmatch(r"\d+(x\d+)?", x)] or list(_LAYOUTS)
    tests = [x for x in arguments if not re.fullmatch(r"\d+(x\d+)?", x)]
    if not any(x.startswith("tests/") for x in tests):
        tests += _FILES
    reasons: dict[str, set[str]] = {}
    code = 0
    with tempfile.TemporaryDirectory() if records is None else nullcontext(records) as folder:
        for run in [run for layout in layouts for run in runs_of(layout)]:
            other = run.compared_with
            wanted, found = (x.records(Path(folder), tests) for x in (other, run))
            compared = Comparison()
            compared.compare(found, wanted, 0 if run.is_bf16 else TOLERANCE)
            num_deselected = sum(map(len, found.deselected.values()))
            for reason, tests_of_it in found.deselected.items():
                reasons.setdefault(reason, set()).update(tests_of_it)
            code |= bool(compared.differences)
            print(
                f"{run.name}: {compared.num_passed} tests passed, {num_deselected} not run; "
                f"{compared.num_equal} results equal those of {other.name}, "
                f"{compared.num_not_compared} not compared; "
                f"{len(compared.differences)} differences",
                *compared.differences[:20], sep="\n    ", flush=True,
            )  # fmt: skip
    print("Not run:")
    for reason, names in reasons.items():
        functions = Counter(re.sub(r"\[.*", "", name.rpartition("::test_")[2]) for name in names)
        listed = ", ".join(f"{name} ({n})" if n > 1 else name for name, n in functions.items())
        print(f"    {len(names)} because the test {reason}: {listed}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
