"""Runs of tests over several ranks, their records, and the comparison of two runs.

programs/over_ranks.py describes them; helpers/over_ranks.py, the plugin of each rank, writes the
records.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from helpers.launch import REPO, environment, run_program
from helpers.ports import reserved_port

PORT = "OVER_RANKS_PORT"  # variable: the port of the store where ranks wait after each test
TOLERANCE = 1e-4  # of log-probabilities in float32
_TIMEOUT_S = 3600.0  # of one run
# Tests whose results depend on how many steps have run: which requests end, and which are aborted.
_COUNTS_STEPS = "a_thousand_aborts"


@dataclass(frozen=True)
class Run:
    """Tests over `stages` x `size` ranks, of checkpoints with so many more layers."""

    stages: int
    size: int
    layers: int = 0
    is_bf16: bool = False

    @property
    def name(self) -> str:
        """What the report calls it."""
        ranks = f"{self.stages}x{self.size}" if self.stages > 1 else f"{self.size}"
        more = f", {self.layers} more layers" if self.layers else ""
        return f"{ranks} in {'bf16' if self.is_bf16 else 'float32'}{more}"

    @property
    def compared_with(self) -> "Run":
        """The run that has the same results: the same bits in bf16."""
        return Run(1, self.size if self.is_bf16 else 1, self.layers, self.is_bf16)

    def records(self, folder: Path, arguments: list[str]) -> "Records":
        """Run the tests, unless their records are there already, and return the records."""
        own = folder / re.sub(r"\W+", "-", self.name)
        records = [own / f"rank{rank}.jsonl" for rank in range(self.stages * self.size)]
        if not all(path.exists() and '{"finished": true}' in path.read_text() for path in records):
            own.mkdir(parents=True, exist_ok=True)
            self._run(own, arguments)
        return Records([[json.loads(line) for line in path.open()] for path in records])

    def _run(self, own: Path, arguments: list[str]) -> None:
        command = [
            "-m", "pytest", "-p", "helpers.over_ranks", "-p", "no:cacheprovider", "-n", "0",
            "--capture", "sys", "--timeout", "600", "--record", str(own),
            "--stages", str(self.stages), "--layers", str(self.layers),
            *["--bf16"] * self.is_bf16, *arguments,
        ]  # fmt: skip
        if (world := self.stages * self.size) > 1:
            agent = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
            command = [*agent, *command]
        with reserved_port() as port:
            path = f"{REPO}:{REPO / 'tests'}"
            env = environment(**{PORT: str(port)}) | {"PYTHONPATH": path}
            done = run_program([sys.executable, *command], env=env, timeout=_TIMEOUT_S)
        (own / "log").write_text(done.stdout + done.stderr)


@dataclass
class Records:
    """The records of the ranks of one run."""

    lines: list[list[dict[str, Any]]]

    @cached_property
    def ranks(self) -> list[dict[str, dict[str, Any]]]:
        """For each rank, its record of each test."""
        return [{x["test"]: x for x in rank if "test" in x} for rank in self.lines]

    @property
    def deselected(self) -> dict[str, list[str]]:
        """The tests that were not run, by their reason."""
        found: dict[str, list[str]] = self.lines[0][0]["deselected"]
        return found


@dataclass
class Comparison:
    """What a run has in common with another one, and what not."""

    num_passed: int = 0
    num_equal: int = 0
    num_not_compared: int = 0
    differences: list[str] = field(default_factory=list)

    def compare(self, found: Records, wanted: Records, tolerance: float) -> None:
        """Compare the ranks with one another, and the first one with that of another run."""
        if not all(rank[-1].get("finished") for rank in found.lines + wanted.lines):
            self.differences.append("a run has not ended: see its log")
        first, *others = found.ranks
        for test, record in first.items():
            if any(rank.get(test) != record for rank in others):
                self.differences.append(f"{test}: ranks differ")
            if record["outcome"] == "failed":
                self.differences.append(f"{test}: {record['why'][:200]}")
            self.num_passed += record["outcome"] == "passed"
            other = wanted.ranks[0].get(test)
            if other is None or other["outcome"] != record["outcome"]:
                self.differences.append(f"{test}: {record['outcome']}, and not in the other run")
            elif _COUNTS_STEPS in test:
                self.num_not_compared += len(record["results"])
            else:
                self._compare_results(test, record["results"], other["results"], tolerance)

    def _compare_results(
        self, test: str, found: list[Any], wanted: list[Any], tolerance: float
    ) -> None:
        """Compare the results of a test, in any order: requests may end in another one."""
        if tolerance:
            num_results = len(found)
            found = [x for x in found if x[1] == "torch.float32  torch.float32"]
            wanted = [x for x in wanted if x[1] == "torch.float32  torch.float32"]
            self.num_not_compared += num_results - len(found)
        ours, theirs = (sorted(x, key=_without_floats) for x in (found, wanted))
        if len(ours) != len(theirs):
            self.differences.append(f"{test}: {len(ours)} results for {len(theirs)}")
            return
        if not tolerance:
            left = Counter(map(json.dumps, ours)) - Counter(map(json.dumps, theirs))
            self.num_equal += len(ours) - left.total()
            self.differences += [f"{test}: {result[:300]}" for result in left]
            return
        for our, their in zip(ours, theirs, strict=True):
            different = list(_differences(our, their, tolerance))
            self.num_equal += not different
            self.differences += [f"{test}: {each}" for each in different[:1]]


def _without_floats(result: Any) -> str:
    """Return the text of a result in which all floats are equal."""
    return json.dumps(json.loads(json.dumps(result), parse_float=lambda _: 0.0))


def _differences(found: Any, wanted: Any, tolerance: float, path: str = "") -> Iterator[str]:
    """Yield where two results differ."""
    if isinstance(found, float) and isinstance(wanted, float):
        if abs(found - wanted) > tolerance + 1e-6 * abs(wanted):
            yield f"{path}: {found} for {wanted}"
    elif isinstance(found, dict) and isinstance(wanted, dict) and found.keys() == wanted.keys():
        for name, value in found.items():
            yield from _differences(value, wanted[name], tolerance, f"{path}.{name}")
    elif isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        for i, value in enumerate(found):
            yield from _differences(value, wanted[i], tolerance, f"{path}[{i}]")
    elif found != wanted:
        yield f"{path}: {found} for {wanted}"
