"""A batch job of two replicas, killed at random until it is done with every custom_id once.

    PYTHONPATH=.:tests python tests/programs/killed_batch.py --kills 200

Each start is torchrun with two ranks. At a random moment SIGKILL ends a rank, or torchrun; the next
start resumes. When a job is done before all kills were made, another one begins. The last line is
JSON. A start that does not end in time, a doubled or missing record, and an answer that differs
from an undisturbed job's are errors.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from helpers.checkpoints import random_state, write_byte_tokenizer, write_meta
from helpers.launch import environment
from helpers.waiting import num_lines, wait_until

PARAMS = {
    "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 512,
    "multiple_of": 32, "norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip
LIMIT_S = 120.0  # generous: distinguishes a hang from a slow end
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


class Kill(NamedTuple):
    """Whom to kill, a rank or torchrun, and when."""

    whom: int | None  # a rank; None: torchrun
    num_lines: int  # the number of results that are in the file by then
    delay_s: float  # later than that


def children_of(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(word) for word in text.split()]
    return []


def start(words: list[str], out: Path, kill: Kill | None) -> dict[str, Any]:
    """Start once, make the kill unless the job ends before, and wait until all is gone."""
    command = [sys.executable, *TORCHRUN, "-m", "llama", "batch", *words]
    killed = 0.0
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as torchrun:
        if kill is not None and (pid := pid_at(kill, torchrun, out)):
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
        try:
            # The pipe ends when the last process that could write to it is gone.
            _, said = torchrun.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            torchrun.kill()
            raise SystemExit(f"{kill}: still there after {LIMIT_S:g} s") from None
    seconds = time.monotonic() - killed if killed else 0.0
    return {
        "status": torchrun.returncode, "said": said, "killed": bool(killed), "seconds": seconds
    }  # fmt: skip


def pid_at(kill: Kill, torchrun: subprocess.Popen, out: Path) -> int:
    """Wait for the moment of the kill, and return the process; 0: the job has ended before."""
    ranks: list[int] = []

    def is_time() -> bool:
        ranks[:] = children_of(torchrun.pid)
        is_working = len(ranks) == 2 and num_lines(out) >= kill.num_lines
        return is_working or torchrun.poll() is not None

    wait_until(is_time)
    time.sleep(kill.delay_s)
    if torchrun.poll() is not None or children_of(torchrun.pid) != ranks:
        return 0
    return torchrun.pid if kill.whom is None else ranks[kill.whom]


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
    source, whole_path = str(folder / "in"), folder / "whole"
    ended = start([source, str(whole_path), *flags], whole_path, None)
    if ended["status"] != 0:
        raise SystemExit(ended["said"])
    whole = records(whole_path)
    assert len(whole) == lines
    done: dict[str, Any] = {"kills": 0, "agents": 0, "starts": 0, "jobs": 0, "slowest_s": 0.0}
    is_whole = False
    while done["kills"] < kills or not is_whole:
        out, is_whole = folder / f"out-{done['jobs']}", False
        kill = random_kill(num_lines(out), lines, rng) if done["kills"] < kills else None
        ended = start([source, str(out), *flags, "--resume"], out, kill)
        done["starts"] += 1
        if done["starts"] % 20 == 0:
            print(json.dumps(done), file=sys.stderr, flush=True)
        done["kills"] += ended["killed"]
        done["agents"] += ended["killed"] and kill is not None and kill.whom is None
        done["slowest_s"] = round(max(done["slowest_s"], ended["seconds"]), 2)
        if ended["status"] == 0 and not ended["killed"]:
            found = records(out)
            assert found == whole, f"{len(found)} records of {lines}, or other answers"
            is_whole = True
            done["jobs"] += 1
    return done


def random_kill(num_done: int, lines: int, rng: random.Random) -> Kill:
    """Return a kill before the ranks have met, or after some more results."""
    whom = rng.choice([0, 1, 0, 1, None])
    if rng.random() < 0.25:
        return Kill(whom, 0, rng.uniform(0.0, 5.0))
    return Kill(whom, rng.randint(num_done, lines), rng.uniform(0.0, 0.1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill a batch job at random until it is done.")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--lines", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        done = run(options.kills, options.lines, Path(folder), random.Random(options.seed))
    print(json.dumps(vars(options) | done))


if __name__ == "__main__":
    main()
