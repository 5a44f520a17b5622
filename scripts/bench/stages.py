"""Tokens per second of two machines: pipeline stages, tensor parallelism, and one machine alone.

In: a model and a link. Out: a line of JSON for each turn of a layout with a number of sequences,
and a last line that compares the layouts with one machine. Machines are network namespaces with a
core each (see network.py). All layouts stay loaded and take turns, as other work on the host
changes its speed within seconds. `busy_ms` is the processor time of each rank for a token: a
pipeline can be no faster than its busiest rank.

Two layouts are controls, in which each machine runs a model of its own, both at the same time. In
"both" each has all sequences: more than that, two cores of this host cannot do, as they share its
memory. In "halves" each has half of them, as a step of two stages has: this is the limit of two
stages that are equal and never wait. Where the weights are read for longer than they are
multiplied, a step of half the sequences takes as long, and the limit is the speed of one machine.

    PYTHONPATH=.:scripts python -m bench.stages --model demo --delay_ms 0.1
"""

import argparse
import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.network import ADDRESSES, INTERFACE, link

_PROMPT = 8  # tokens
_FIRST_PORT = 29500
_LOAD_S, _TURN_S = 300.0, 120.0
_READY = "ready"
Record = dict[str, Any]


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
    """What one rank runs.

    Attributes:
        folder: The model.
        layout: A key of `_LAYOUTS`.
        max_sequences: The largest number of sequences.
        num_tokens: The tokens of each answer.
        quantize: The format of the weights; empty: as the files have them.
        layers: The layers of each stage, such as "10,6"; empty: the default.
    """

    folder: str
    layout: str
    max_sequences: int
    num_tokens: int
    quantize: str
    layers: str


def serve(case: Case) -> None:
    """Load a rank's part; for each number of sequences that stdin gives, run them once.

    The leader prints a record of each run.
    """
    from llama import Llama, SamplingParams

    layout = _LAYOUTS[case.layout]
    llama = Llama.build(
        case.folder, None, _PROMPT + case.num_tokens, case.max_sequences, layout.size,
        device="cpu", dtype="bf16", quantize=case.quantize or None, verbose=False,
        pipeline_parallel_size=layout.stages,
        pipeline_layers=(case.layers or None) if layout.stages > 1 else None,
    )  # fmt: skip
    params = SamplingParams(max_tokens=case.num_tokens, temperature=0.0, ignore_eos=True)
    parallel = llama.model.parallel
    print(_READY, flush=True)
    for line in sys.stdin:
        count = int(line)
        num_own = -(-count // layout.copies) if layout.divides else count
        prompts = [[256 + i, *range(_PROMPT - 1)] for i in range(num_own)]
        requests = [llama.llm_engine.prepare("", ids, params) for ids in prompts]
        began = time.perf_counter()
        used = time.process_time()
        llama.llm_engine.run(requests)
        total = num_own * case.num_tokens
        speed = total / (time.perf_counter() - began)
        own_ms = (time.process_time() - used) * 1e3 / total
        busy_ms = [round(row[0], 4) for row in _of_all_ranks(parallel, own_ms)]
        if parallel.is_leader:
            print(json.dumps({"tokens_per_s": round(speed, 1), "busy_ms": busy_ms}), flush=True)


def _of_all_ranks(parallel, own: float) -> list[list[float]]:
    """Return a number of each rank on every rank."""
    import torch
    import torch.distributed as dist

    if parallel.world_size == 1:
        return [[own]]
    x = torch.tensor([own], dtype=torch.float64)
    rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, x, group=parallel.world)
    return [row.tolist() for row in rows]


class Ranks:
    """The loaded ranks of a layout, each in a namespace and on a core of its own."""

    def __init__(self, prefixes: list[list[str]], case: Case, port: int) -> None:
        self.case = case
        self.layout = _LAYOUTS[case.layout]
        num_ranks = self.layout.stages * self.layout.size
        env = os.environ | {
            "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }  # fmt: skip
        cores = sorted(os.sched_getaffinity(0))
        self.processes: list[subprocess.Popen[str]] = []
        for rank in range(num_ranks * self.layout.copies):
            variables = {
                "RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank), "MASTER_ADDR": ADDRESSES[0],
                "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False",
            }  # fmt: skip
            pinned = ["taskset", "-c", str(cores[rank % len(cores)])]
            program = [sys.executable, __file__, "serve", json.dumps(asdict(case))]
            self.processes.append(
                subprocess.Popen(
                    [*prefixes[rank], *pinned, *program],
                    env=env | variables if num_ranks > 1 else env,
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )

    @property
    def leaders(self) -> list[subprocess.Popen[str]]:
        """Return the ranks that print: the first one of each copy of the model."""
        return self.processes[: self.layout.copies]

    def wait_until_loaded(self) -> None:
        """Wait until each copy of the model is loaded."""
        for process in self.leaders:
            self._read(process, _LOAD_S)

    def run(self, count: int) -> Record:
        """Run `count` sequences once; return the record of all copies of the model together."""
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the rank has ended, as _read() says
                process.stdin.write(f"{count}\n")
                process.stdin.flush()
        copies = [json.loads(self._read(process, _TURN_S)) for process in self.leaders]
        return {"layout": self.case.layout, "sequences": count} | _added(copies)

    def end(self) -> None:
        """Kill the ranks."""
        for process in self.processes:
            process.kill()
            process.wait()

    def _read(self, process: subprocess.Popen[str], timeout_s: float) -> str:
        """Return the next line of a rank.

        Raises:
            RuntimeError: The rank has ended, or says nothing in time.
        """
        assert process.stdout is not None
        is_ready = select.select([process.stdout], [], [], timeout_s)[0]
        line = process.stdout.readline() if is_ready else ""
        if not line:
            how = f"ended with {process.wait(5)}" if is_ready else f"said nothing in {timeout_s} s"
            raise RuntimeError(f"a rank of {self.case.layout} {how}")
        return line


def _added(copies: Sequence[Record]) -> Record:
    """Return the record of all copies of a model together."""
    return {
        "tokens_per_s": round(sum(copy["tokens_per_s"] for copy in copies), 1),
        "busy_ms": [x for copy in copies for x in copy["busy_ms"]],
    }


def compared(records: list[Record]) -> dict[str, dict[str, Record]]:
    """Return the speed of each layout against one machine, by layout and number of sequences.

    "wall" is the median of the turns' own ratios, and "range" has their extremes. "processor" is
    what is possible if the busiest rank never waits, from the least processor time of all turns.
    """
    found: dict[str, dict[str, Record]] = {}
    layouts = dict.fromkeys(x["layout"] for x in records if x["layout"] != "one")
    for count in dict.fromkeys(x["sequences"] for x in records):
        one = [x for x in records if (x["layout"], x["sequences"]) == ("one", count)]
        if not one:
            continue
        for layout in layouts:
            own = [x for x in records if (x["layout"], x["sequences"]) == (layout, count)]
            pairs = zip(own, one, strict=True)
            ratios = sorted(x["tokens_per_s"] / y["tokens_per_s"] for x, y in pairs)
            busy = min(max(x["busy_ms"]) for x in own) / _LAYOUTS[layout].copies
            found.setdefault(layout, {})[str(count)] = {
                "wall": round(statistics.median(ratios), 2),
                "range": [round(ratios[0], 2), round(ratios[-1], 2)],
                "processor": round(min(max(x["busy_ms"]) for x in one) / busy, 2),
            }
    return found


@contextlib.contextmanager
def loaded(prefixes: list[list[str]], cases: list[Case]) -> Iterator[list[Ranks]]:
    """Load the layouts, one after another; yield their ranks, which end with the block."""
    with contextlib.ExitStack() as stack:
        layouts = []
        for i, case in enumerate(cases):
            ranks = Ranks(prefixes, case, _FIRST_PORT + i)
            stack.callback(ranks.end)
            ranks.wait_until_loaded()
            layouts.append(ranks)
        yield layouts


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per second of two machines, by layout.")
    parser.add_argument("--model", default="demo", help="demo, or a shape of bench/shapes.py")
    parser.add_argument("--quantize", default="", help="int8, fp8 or int4")
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 1])
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--layouts", nargs="+", default=list(_LAYOUTS), choices=list(_LAYOUTS))
    parser.add_argument("--pipeline_layers", default="", help="of each stage, such as 9,7")
    parser.add_argument("--delay_ms", type=float, default=0.1, help="one way")
    parser.add_argument("--mbits", type=float, default=10_000, help="megabits per second")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the namespaces are removed then too
    import torch

    from bench.shapes import params_of, write_checkpoint

    with tempfile.TemporaryDirectory() as temporary:
        params = params_of(options.model)
        folder = write_checkpoint(Path(temporary) / "model", params, torch.bfloat16)
        cases = [
            Case(
                str(folder), layout, max(options.sequences), options.tokens, options.quantize,
                options.pipeline_layers,
            )
            for layout in options.layouts
        ]  # fmt: skip
        records: list[Record] = []
        with (
            link(options.delay_ms / 1e3, options.mbits * 1e6 / 8) as prefixes,
            loaded(prefixes, cases) as layouts,
        ):
            for count in options.sequences:
                for ranks in layouts:
                    ranks.run(count)  # warm-up
                for _ in range(options.turns):
                    for ranks in layouts:
                        records.append(ranks.run(count))
                        print(json.dumps(records[-1]), flush=True)
        print(json.dumps({"against one": compared(records)}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(Case(**json.loads(sys.argv[2])))
    else:
        main()
