"""A batch job of two replicas, killed at random until it is done with every custom_id once.

    PYTHONPATH=.:tests python tests/programs/killed_batch.py --kills 200

Each start is torchrun's own agent, forked from this process, which imports torch once, and two
ranks forked from the agent. After a random time SIGKILL ends a rank, or the agent; the next start
resumes. When a job is done before all kills were made, another one begins. The last line is JSON. A
start that does not end within 60 seconds, a doubled or missing record, and an answer that differs
from an undisturbed job's are errors.
"""

import argparse
import contextlib
import ctypes
import json
import mmap
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from helpers.checkpoints import random_state, write_byte_tokenizer, write_meta
from llama.cli import main as command
from llama.cli.batch.job import run_batch  # noqa: F401  imported once, for all forks
from llama.generation import Llama  # noqa: F401

PARAMS = {
    "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 512,
    "multiple_of": 32, "norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip
LIMIT_S = 60.0  # generous: distinguishes a hang from a slow end
_PR_SET_CHILD_SUBREAPER = 36


def rank(words: list[str]) -> None:
    """Run one rank in a process of its own: the command, as torchrun would start it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork inherits the handler of torchrun's agent
    Path(words[0]).with_name(f"began-{os.environ['RANK']}").touch()
    torch.set_num_threads(1)
    sys.exit(command(["batch", *words]))


class SharedFlag:
    """A replacement for multiprocessing's Event, whose `set` waits forever for a killed waiter.

    torchrun's agent uses it only for ranks that it forks, not for those that it starts by itself.
    """

    def __init__(self, *_: Any) -> None:
        self._byte = mmap.mmap(-1, 1)

    def set(self) -> None:
        self._byte[0] = 1

    def wait(self) -> None:
        while not self._byte[0]:
            time.sleep(0.01)


def agent(words: list[str], folder: Path) -> None:
    """Run torchrun's agent; it does not return."""
    for number, name in ((1, "out.log"), (2, "err.log")):
        os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    fork: Any = type(multiprocessing.get_context("fork"))
    fork.Event = SharedFlag
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, start_method="fork", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1, run_id="kills",
    )  # fmt: skip
    code = 1
    with contextlib.suppress(Exception):
        codes = elastic_launch(config, rank)(words)
        code = max(int(code or 0) for code in codes.values())
    os._exit(code)


def children_of(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(word) for word in text.split()]
    return []


def start_and_kill(words: list[str], folder: Path, after_s: float, whom: str) -> dict[str, Any]:
    """Start once and kill `whom` after a delay, unless it ended before; wait until all is gone."""
    # before that, a rank runs only torchrun's own code
    marks = [folder / f"began-{i}" for i in range(2)]
    for mark in marks:
        mark.unlink(missing_ok=True)
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        agent(words, folder)
    status, killed = None, 0.0
    while time.monotonic() - began < LIMIT_S:
        is_time = time.monotonic() - began >= after_s
        if not killed and is_time and all(mark.exists() for mark in marks):
            ranks = children_of(pid)
            victim = pid if whom == "agent" else (ranks[int(whom)] if len(ranks) == 2 else 0)
            if victim and status is None:
                os.kill(victim, signal.SIGKILL)
                killed = time.monotonic()
        try:
            ended, its_status = os.waitpid(-1, os.WNOHANG)  # includes orphans
        except ChildProcessError:
            break  # no process is left
        if ended == pid:
            status = its_status
        if not ended:
            time.sleep(0.01)
    else:
        raise SystemExit(f"killed {whom} after {after_s:.2f} s: still there after {LIMIT_S:g} s")
    seconds = time.monotonic() - killed if killed else 0.0
    return {"status": status, "killed": bool(killed), "seconds": seconds}


def records(path: Path) -> dict[str, Any]:
    """Return the record of each custom_id; raise an error if one occurs twice."""
    found: dict[str, Any] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        assert record["custom_id"] not in found, f"{record['custom_id']} is there twice"
        found[record["custom_id"]] = record["response"]["body"]["choices"]
    return found


def run(kills: int, lines: int, folder: Path, rng: random.Random) -> dict[str, Any]:
    """Run jobs until enough kills were made; return counts, and seconds from a kill to the end."""
    model = folder / "model"
    write_meta(model, PARAMS, random_state(PARAMS, 0), 1)
    write_byte_tokenizer(model)
    (folder / "in").write_text("".join(
        json.dumps({"custom_id": f"r{i}", "prompt": "x" * (i % 9 + 1), "max_tokens": 4 + i % 12})
        + "\n" for i in range(lines)
    ))  # fmt: skip
    flags = [
        "--ckpt_dir", str(model), "--max_seq_len", "128", "--max_batch_size", "4", "--dtype",
        "fp32", "--device", "cpu", "--model_parallel_size", "1", "--temperature", "1",
    ]  # fmt: skip
    paths, whole_path = [str(folder / "in")], folder / "whole"
    began = time.monotonic()
    start = start_and_kill([*paths, str(whole_path), *flags], folder, LIMIT_S, "0")
    if start["status"] != 0:
        raise SystemExit((folder / "err.log").read_text())
    length_s, whole = time.monotonic() - began, records(whole_path)
    assert len(whole) == lines
    done: dict[str, Any] = {"kills": 0, "agents": 0, "starts": 0, "jobs": 0, "slowest_s": 0.0}
    is_whole = False
    while done["kills"] < kills or not is_whole:
        out, is_whole = folder / f"out-{done['jobs']}", False
        whom = rng.choice(["0", "1", "0", "1", "agent"])
        after_s = rng.uniform(0.0, length_s) if done["kills"] < kills else LIMIT_S
        start = start_and_kill([*paths, str(out), *flags, "--resume"], folder, after_s, whom)
        done["starts"] += 1
        if done["starts"] % 20 == 0:
            print(json.dumps(done), file=sys.stderr, flush=True)
        done["kills"] += start["killed"]
        done["agents"] += start["killed"] and whom == "agent"
        done["slowest_s"] = round(max(done["slowest_s"], start["seconds"]), 2)
        if start["status"] == 0 and not start["killed"]:
            found = records(out)
            assert found == whole, f"{len(found)} records of {lines}, or other answers"
            is_whole = True
            done["jobs"] += 1
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill a batch job at random until it is done.")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--lines", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1):
        raise SystemExit("orphans cannot be waited for here")
    with tempfile.TemporaryDirectory() as folder:
        done = run(options.kills, options.lines, Path(folder), random.Random(options.seed))
    print(json.dumps(vars(options) | done))


if __name__ == "__main__":
    main()
