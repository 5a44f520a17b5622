"""The program that test_parallel.py runs in one process: its groups, as older scripts use them.

Output: a line of JSON with the coordinates of this rank, the results of three collectives, and the
sockets and threads that the groups have created.
"""

import json
import os

import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize as fs

from llama.ranks.groups import connect

before = len(os.listdir("/proc/self/task"))
connect(None, torch.device("cpu"), 60.0)
files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
sockets = [path for path in files if "socket:" in path]
threads = len(os.listdir("/proc/self/task")) - before
x = torch.tensor([3.0])
group = fs.get_model_parallel_group()
dist.all_reduce(x, group=group)
parts = [torch.zeros(1)]
dist.all_gather(parts, x)
named = [None]
dist.all_gather_object(named, {"a": 1})
dist.barrier()
places = [
    dist.get_rank(), dist.get_world_size(), fs.get_model_parallel_rank(),
    fs.get_model_parallel_world_size(), fs.get_data_parallel_world_size(),
]  # fmt: skip
print(json.dumps([places, x.item(), parts[0].item(), named, sockets, threads]))
