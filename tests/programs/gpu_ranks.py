"""Two ranks that share GPU 0, for test_gpu.py: gloo carries their tensors, as nccl refuses that.

    torchrun --nproc_per_node 2 tests/programs/gpu_ranks.py FOLDER OUT [STAGES]

Each rank writes the ids of its greedy answers and the number of graphs that it replayed to
OUT/rankN.json.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llama import Llama

PROMPTS = [[256, 65, 66, 67], [256, 72], [256, *range(97, 117)]]


def count_replays() -> list[int]:
    """Return a list of one number, the graphs that this process replays from now on."""
    count = [0]
    replay: Any = torch.cuda.CUDAGraph.replay
    graph_class: Any = torch.cuda.CUDAGraph

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        count[0] += 1
        replay(graph)

    graph_class.replay = counted
    return count


if __name__ == "__main__":
    num_replays = count_replays()
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # set so by a scheduler that gives each task one GPU
    dist.init_process_group("gloo")
    stages = int(sys.argv[3]) if sys.argv[3:] else 1
    llama = Llama.build(
        sys.argv[1], None, 128, 4, device="cuda", dtype="fp32", pipeline_parallel_size=stages
    )
    ids = llama.generate(PROMPTS, 12, 0.0)[0]
    result = {"ids": ids, "num_replays": num_replays[0]}
    Path(sys.argv[2], f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))
