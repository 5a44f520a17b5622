"""Tokens per second of two machines: pipeline stages, tensor parallelism, and one machine alone.

In: a model and a link. Out: a line of JSON for each layout and number of sequences. Machines are
network namespaces with a core each (see network.py). The layouts take turns, as other work on the
host changes. `busy_ms` is the processor time of each rank for a token: it hardly depends on other
work, and a pipeline can be no faster than its busiest rank.

Two layouts are controls, in which each machine runs a model of its own, both at the same time. In
"both" each has all sequences: more than that, two cores of this host cannot do, as they share its
memory. In "halves" each has half of them, as a step of two stages has: this is the limit of two
stages that are equal and never wait. Where the weights are read for longer than they are
multiplied, a step of half the sequences takes as long, and the limit is the speed of one machine.
A last line has the speed of each layout against one machine, by wall and by processor time.

    PYTHONPATH=.:scripts python -m bench.stages --model demo --delay_ms 0.1
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.network import ADDRESSES, INTERFACE, link

_PROMPT = 8  # tokens
_REPEATS = 3
_MEET_S = 120.0


class Layout(NamedTuple):
    """How machines divide the work.

    Attributes:
        stages: Pipeline stages.
        size: The ranks of each.
        copies: Copies of the model.
        divides: Whether the copies have a part of the sequences each, and not all of them.
    """

    stages: int = 1
    size: int = 1
    copies: int = 1
    divides: bool = False


_LAYOUTS = {
    "one": Layout(),
    "both": Layout(copies=2),
    "halves": Layout(copies=2, divides=True),
    "PP2": Layout(stages=2),
    "TP2": Layout(size=2),
}


@dataclass(frozen=True)
class Case:
    """What one rank measures.

    Attributes:
        folder: The model.
        layout: A key of `_LAYOUTS`.
        sequences: The numbers of sequences.
        num_tokens: The tokens of each answer.
        layers: The layers of each stage, such as "10,6"; empty: the default.
        meeting: An empty folder in which copies of the model meet before each run.
    """

    folder: str
    layout: str
    sequences: list[int]
    num_tokens: int
    layers: str
    meeting: str


def measure(case: Case) -> None:
    """Print the tokens per second of each number of sequences, as rank 0 measures them."""
    from llama import Llama, SamplingParams

    layout = _LAYOUTS[case.layout]
    llama = Llama.build(
        case.folder, None, _PROMPT + case.num_tokens, max(case.sequences), layout.size,
        device="cpu", dtype="bf16", pipeline_parallel_size=layout.stages, verbose=False,
        pipeline_layers=(case.layers or None) if layout.stages > 1 else None,
    )  # fmt: skip
    params = SamplingParams(max_tokens=case.num_tokens, temperature=0.0, ignore_eos=True)
    parallel = llama.model.parallel
    for count in case.sequences:
        num_own = -(-count // layout.copies) if layout.divides else count
        prompts = [[256 + i, *range(_PROMPT - 1)] for i in range(num_own)]
        speeds = []
        busy = []
        for turn in range(1 + _REPEATS):
            requests = [llama.llm_engine.prepare("", ids, params) for ids in prompts]
            if layout.copies > 1:
                _meet(Path(case.meeting), f"{count}-{turn}", layout.copies)
            began = time.perf_counter()
            used = time.process_time()
            llama.llm_engine.run(requests)
            total = num_own * case.num_tokens
            speeds.append(total / (time.perf_counter() - began))
            own = (time.process_time() - used) * 1e3 / total
            busy.append([row[0] for row in _of_all_ranks(parallel, own)])
        record = {
            "layout": case.layout,
            "sequences": count,
            "tokens_per_s": round(statistics.median(speeds[1:]), 1),
            "max_tokens_per_s": round(max(speeds[1:]), 1),
            "busy_ms": [round(min(x), 4) for x in zip(*busy[1:], strict=True)],
        }
        if parallel.is_leader:
            print(json.dumps(record), flush=True)


def _meet(folder: Path, name: str, copies: int) -> None:
    """Wait until all copies have come to the same run."""
    (folder / f"{name}-{os.getpid()}").touch()
    limit = time.monotonic() + _MEET_S
    while len(list(folder.glob(f"{name}-*"))) < copies:
        if time.monotonic() > limit:
            raise TimeoutError(f"the other copy of the model did not begin within {_MEET_S} s")
        time.sleep(0.0005)


def _of_all_ranks(parallel, own: float) -> list[list[float]]:
    """Return a number of each rank on every rank."""
    import torch
    import torch.distributed as dist

    if parallel.world is None:
        return [[own]]
    x = torch.tensor([own], dtype=torch.float64)
    rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, x, group=parallel.world)
    return [row.tolist() for row in rows]


def run(prefixes: list[list[str]], case: Case, timeout_s: float) -> list[dict[str, Any]]:
    """Run a layout, a rank in each namespace and on a core of its own; return its records."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
    layout = _LAYOUTS[case.layout]
    num_ranks = layout.stages * layout.size
    cores = sorted(os.sched_getaffinity(0))
    ranks = []
    for rank in range(num_ranks * layout.copies):
        variables = {
            "RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank), "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "False",
        }  # fmt: skip
        pinned = ["taskset", "-c", str(cores[rank % len(cores)])]
        program = [sys.executable, __file__, "measure", json.dumps(asdict(case))]
        ranks.append(
            subprocess.Popen(
                [*prefixes[rank], *pinned, *program],
                env=env | variables if num_ranks > 1 else env,
                text=True,
                stdout=subprocess.PIPE,
            )
        )
    try:
        outputs = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
    codes = [process.returncode for process in ranks]
    if any(codes):
        raise RuntimeError(f"the ranks of {case.layout} ended with {codes}")
    leaders = outputs[: layout.copies]
    of_copies = [[json.loads(line) for line in output.splitlines()] for output in leaders]
    return [_added(records) for records in zip(*of_copies, strict=True)]


def _added(copies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the record of all copies of a model together."""
    record = dict(copies[0])
    for name in ("tokens_per_s", "max_tokens_per_s"):
        record[name] = round(sum(copy[name] for copy in copies), 1)
    record["busy_ms"] = [x for copy in copies for x in copy["busy_ms"]]
    return record


def compared(records: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Return the speed of each layout against one machine, by layout and number of sequences.

    The first number is by wall time, from the medians of all turns. The second is by processor
    time: what is possible if the busiest rank never waits.
    """
    speeds: dict[tuple[str, int], tuple[float, float]] = {}
    for layout, count in {(x["layout"], x["sequences"]) for x in records}:
        chosen = [x for x in records if (x["layout"], x["sequences"]) == (layout, count)]
        copies = _LAYOUTS[layout].copies
        wall = statistics.median(x["tokens_per_s"] for x in chosen)
        busy = min(max(x["busy_ms"]) for x in chosen) / copies
        speeds[layout, count] = wall, 1 / busy
    found: dict[str, dict[str, list[float]]] = {}
    for (layout, count), own in sorted(speeds.items()):
        if layout != "one" and ("one", count) in speeds:
            one = speeds["one", count]
            ratios = [round(x / y, 2) for x, y in zip(own, one, strict=True)]
            found.setdefault(layout, {})[str(count)] = ratios
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per second of two machines, by layout.")
    parser.add_argument("--model", default="demo", help="demo, or a shape of bench/shapes.py")
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 1])
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--layouts", nargs="+", default=list(_LAYOUTS), choices=list(_LAYOUTS))
    parser.add_argument("--pipeline_layers", default="", help="of each stage, such as 9,7")
    parser.add_argument("--delay_ms", type=float, default=0.1, help="one way")
    parser.add_argument("--mbits", type=float, default=10_000, help="megabits per second")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the namespaces are removed then too
    import torch

    from bench.shapes import params_of, write_checkpoint

    with tempfile.TemporaryDirectory() as temporary:
        folder = write_checkpoint(
            Path(temporary) / "model", params_of(options.model), torch.bfloat16
        )
        records: list[dict[str, Any]] = []
        with link(options.delay_ms / 1e3, options.mbits * 1e6 / 8) as prefixes:
            for turn in range(options.turns):
                for layout in options.layouts:
                    meeting = Path(temporary) / f"{layout}-{turn}"
                    meeting.mkdir()
                    case = Case(
                        str(folder), layout, options.sequences, options.tokens,
                        options.pipeline_layers, str(meeting),
                    )  # fmt: skip
                    for record in run(prefixes, case, timeout_s=300.0):
                        records.append(record)
                        print(json.dumps(record), flush=True)
        print(json.dumps({"against one: wall, processor": compared(records)}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(Case(**json.loads(sys.argv[2])))
    else:
        main()
