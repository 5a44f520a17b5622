"""Tokens per second of two machines: pipeline stages, tensor parallelism, and one machine alone.

In: a model and a link. Out: a line of JSON for each layout and number of sequences. Machines are
network namespaces with a core each (see network.py). The layouts take turns, as other work on the
host changes. `busy_ms` is the processor time of each rank for a token: it hardly depends on other
work, and a pipeline can be no faster than its busiest rank.

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
from pathlib import Path

from bench.network import ADDRESSES, INTERFACE, link

_LAYOUTS = {"one": (1, 1), "PP2": (2, 1), "TP2": (1, 2)}  # stages, and ranks of each
_PROMPT = 8  # tokens
_REPEATS = 3


def measure(folder: str, layout: str, sequences: list[int], num_tokens: int) -> None:
    """Print the tokens per second of each number of sequences, as rank 0 measures them."""
    from llama import Llama, SamplingParams

    stages, size = _LAYOUTS[layout]
    llama = Llama.build(
        folder, None, _PROMPT + num_tokens, max(sequences), size, device="cpu", dtype="bf16",
        pipeline_parallel_size=stages, verbose=False,
    )  # fmt: skip
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    parallel = llama.model.parallel
    for count in sequences:
        prompts = [[256 + i, *range(_PROMPT - 1)] for i in range(count)]
        speeds = []
        busy = []
        for _ in range(1 + _REPEATS):
            requests = [llama.llm_engine.prepare("", ids, params) for ids in prompts]
            began = time.perf_counter()
            used = time.process_time()
            llama.llm_engine.run(requests)
            total = count * num_tokens
            speeds.append(total / (time.perf_counter() - began))
            own = (time.process_time() - used) * 1e3 / total
            busy.append([row[0] for row in _of_all_ranks(parallel, own)])
        record = {
            "layout": layout,
            "sequences": count,
            "tokens_per_s": round(statistics.median(speeds[1:]), 1),
            "max_tokens_per_s": round(max(speeds[1:]), 1),
            "busy_ms": [round(min(x), 4) for x in zip(*busy[1:], strict=True)],
        }
        if parallel.is_leader:
            print(json.dumps(record), flush=True)


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


def run(prefixes: list[list[str]], layout: str, program: list[str], timeout_s: float) -> str:
    """Run a layout, a rank in each namespace and on a core of its own; return its output."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
    stages, size = _LAYOUTS[layout]
    cores = sorted(os.sched_getaffinity(0))
    ranks = []
    for rank in range(stages * size):
        variables = {
            "RANK": str(rank), "WORLD_SIZE": str(stages * size), "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank), "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "False",
        }  # fmt: skip
        pinned = ["taskset", "-c", str(cores[rank % len(cores)])]
        command = [*prefixes[rank], *pinned, sys.executable, *program]
        ranks.append(
            subprocess.Popen(
                command,
                env=env | variables if stages * size > 1 else env,
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
        raise RuntimeError(f"the ranks of {layout} ended with {codes}")
    return outputs[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per second of two machines, by layout.")
    parser.add_argument("--model", default="demo", help="demo, or a shape of bench/shapes.py")
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 1])
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--layouts", nargs="+", default=list(_LAYOUTS), choices=list(_LAYOUTS))
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
        asked = [str(folder), str(options.tokens), *map(str, options.sequences)]
        with link(options.delay_ms / 1e3, options.mbits * 1e6 / 8) as prefixes:
            for _ in range(options.turns):
                for layout in options.layouts:
                    program = [__file__, "measure", layout, *asked]
                    print(run(prefixes, layout, program, timeout_s=300.0), end="", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        folder, tokens, *counts = sys.argv[3:]
        measure(folder, sys.argv[2], [int(x) for x in counts], int(tokens))
    else:
        main()
