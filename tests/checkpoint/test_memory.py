"""Loading and converting need little memory alongside the weights, measured in a fresh process."""

import sys
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import write_meta
from helpers.launch import environment, run_program
from helpers.weights import PARAMS, shapes_of
from llama.checkpoint.write import convert

MEASURE = """
import os, sys, threading, time
import torch
from llama.checkpoint.loader import load
from llama.checkpoint.find import find
from llama.checkpoint.write.convert import convert, reshard
from llama.model import Transformer
from llama.ranks.parallel import Parallel
from llama.ranks.placement import Placement

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) << 10

def sample():
    while not done:
        peaks.append(anonymous())
        time.sleep(0.0005)

def measure(what, layout):
    global done
    folder, out, own = f"{source}/{layout}", f"{target}/{what}", 0
    found, before = find(folder), anonymous()
    thread = threading.Thread(target=sample)
    thread.start()
    if what == "load":
        parallel = Parallel(Placement(rank=1, size=2))
        model = Transformer(found.params, parallel=parallel, dtype=torch.float32)
        load(found, model)
        own = sum(shard.nbytes for shard in model.named_shards().values())
        assert all(bool(shard.count_nonzero()) for shard in model.named_shards().values())
    else:
        reshard(folder, out, 2) if what == "reshard" else convert(folder, out)
    done = True
    thread.join()
    print(what, layout, own, max(peaks) - before, flush=True)

source, target = sys.argv[1:]
done, peaks = False, []
for what, layout in (("load", "meta"), ("load", "hf"), ("reshard", "meta"), ("convert", "meta")):
    child = os.fork()  # each measured in a process of its own, which imports nothing again
    if child == 0:
        measure(what, layout)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, (what, layout)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A model of 185 MB in one float32 shard, in Meta's layout, and the same in Hugging Face's
    layout.
    """
    params = PARAMS | {
        "dim": 1024, "n_heads": 8, "vocab_size": 8192, "multiple_of": 4096,
        "ffn_dim_multiplier": None,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("large")
    shapes = shapes_of(params)
    write_meta(folder / "meta", params, {name: torch.ones(s) for name, s in shapes.items()})
    convert.convert(folder / "meta", folder / "hf")
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is Linux's")
def test_private_memory_is_the_rank_s_own_weights_and_one_tensor(large, tmp_path):
    """Private memory is bounded by the rank's own weights and one tensor.

    torch.load without mmap takes the size of the file on every rank: 8 x 141 GB for a 70B model.
    """
    (tmp_path / "measure.py").write_text(MEASURE)
    program = [sys.executable, str(tmp_path / "measure.py"), str(large), str(tmp_path)]
    run = run_program(program, env=environment(OMP_NUM_THREADS="1"))
    assert run.returncode == 0, run.stderr
    largest, slack = 8192 * 1024 * 4, 8 << 20
    lines = run.stdout.splitlines()
    assert len(lines) == 4, run.stdout
    for line in lines:
        own, peak = map(int, line.split()[2:])
        assert 0 < peak <= own + largest + slack, line
