"""Ranks that meet while one of them, or their launcher, stops or ends: real processes, no torch."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from helpers.launch import environment, run_program
from helpers.waiting import wait_until
from llama.ranks.processes import has_ended

pytestmark = pytest.mark.dist

LIMIT_S = 60  # distinguishes a hang from a slow end
HOST = socket.gethostname()
RANK = """
import os, signal, sys, time
from llama.ranks.peers import Peers
from llama.ranks.rendezvous import Rendezvous
from llama.ranks.watch import Watch
fault, rank = sys.argv[1], int(os.environ["RANK"])
if fault != "launcher":
    os.write(1, b"%d\\n" % os.getpid())
if fault == "stop 0" and rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
if fault == "end" and rank == 1:
    os._exit(0)
if fault == "end late" and rank == 1:
    time.sleep(3)
    os._exit(0)
if fault == "kill" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if fault == "slow" and rank == 0:  # it still imports its libraries when the fault is noticed
    time.sleep(100)
if fault in ("slow", "stop 2") and rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
if fault == "exit" and rank == 1:
    sys.exit("an import fails")
def store(rendezvous):  # it never opens
    if fault == "launcher":  # this rank has looked at it
        os.write(1, b"%d\\n" % os.getpid())
    time.sleep(120)
peers = Peers(rank, 3)
Watch(peers, range(3), Rendezvous(peers, 3, store, "a:1", 120, 60)).meet()
"""
LAUNCH = """
import sys
from llama.ranks.launch import launch
sys.exit(launch(["-c", *sys.argv[1:]], 3))
"""
# As torchrun starts its ranks, which know no other process id of it.
TORCHRUN = """
import os, subprocess, sys, time
variables = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
ranks = []
for rank in map(str, range(3)):
    own = {**os.environ, **variables, "RANK": rank, "LOCAL_RANK": rank}
    ranks.append(subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], env=own))
while not any(process.poll() for process in ranks):
    time.sleep(0.1)
for process in ranks:
    process.terminate()
for process in ranks:
    process.wait()
sys.exit(1)
"""
COMPILING = """
import os, sys
from pathlib import Path
rank = int(os.environ["RANK"])
os.environ["XDG_CACHE_HOME"] = str(Path(sys.argv[1], "own" if rank == 0 else "shared"))
if rank == 0:
    os.environ["LLAMA_CPU_KERNELS"] = "none"
import torch
from llama.ranks.groups import connect
connect(None, torch.device("cpu"), timeout_s=4)
"""
STOPPED = "was stopped (by SIGSTOP or Ctrl-Z) for"
KILLED = "was killed by SIGKILL (if nobody sent it, memory ran out: check `dmesg`)"
ENDED = "ended before all ranks had met: it did not arrive"
CASES = {  # (launcher, fault) -> the message
    (LAUNCH, "stop 0"): f"error: rank 0 on {HOST} {STOPPED} 6 s",
    (LAUNCH, "stop 2"): f"error: rank 2 on {HOST} {STOPPED} 6 s",
    (LAUNCH, "slow"): f"error: rank 2 on {HOST} {STOPPED} 6 s",
    (LAUNCH, "kill"): f"error: rank 1 on {HOST} {KILLED}; others had not ended 6 s later",
    (LAUNCH, "launcher"): "NotMetError: llama --ranks (process ",
    (TORCHRUN, "stop 0"): f"NotMetError: rank 0 on {HOST} {STOPPED} 3 s, before all ranks had met",
    (TORCHRUN, "stop 2"): f"NotMetError: rank 2 on {HOST} {STOPPED} 3 s, before all ranks had met",
    (TORCHRUN, "end"): f"NotMetError: rank 1 on {HOST} {ENDED}",
    (TORCHRUN, "end late"): f"NotMetError: rank 1 on {HOST} ",
    (TORCHRUN, "launcher"): "NotMetError: torchrun (process ",
}


@pytest.mark.parametrize(("launcher", "fault"), CASES, ids=lambda x: x if len(x) < 20 else "")
def test_ranks_that_meet_end_with_one_message(launcher, fault):
    """Ranks that meet end together with one message, though they have no store, and none is left.

    A rank is stopped, is killed, or ends as if it had nothing to do, before it arrives; or their
    launcher is killed. `llama --ranks` observes its ranks itself; torchrun's observe each other.
    """
    command = [sys.executable, "-c", launcher, RANK, fault]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(), text=True, **pipes) as process:  # type: ignore[call-overload]
        pids = [int(process.stdout.readline()) for _ in range(3)]
        if fault == "launcher":
            process.kill()
        # The pipes end when the last process that could write to them is gone.
        _, said = process.communicate(timeout=LIMIT_S)
    wait_until(lambda: all(map(has_ended, pids)))  # a process closes its files before it ends
    lines = [x for x in said.splitlines() if x.startswith("error: ") or "NotMetError: " in x]
    assert len(lines) == 1 and CASES[launcher, fault] in lines[0], said
    code = {"launcher": -signal.SIGKILL, "kill": 128 + signal.SIGKILL}.get(fault, 1)
    assert process.returncode == code


def test_an_import_that_fails_says_so_itself():
    """The launcher ends the other ranks after the rank that failed has said why."""
    command = [sys.executable, "-c", TORCHRUN, RANK, "exit"]
    done = subprocess.run(
        command, env=environment(), text=True, capture_output=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 1 and done.stderr == "an import fails\n"


def test_a_rank_that_compiles_has_not_arrived(tmp_path):
    """The CPU kernels are compiled before the ranks meet, so that the rank that compiles is named.

    The compiler of rank 2 takes longer than the limit; rank 1 waits for it, as both share a cache,
    and rank 0 has its own.
    """
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\nsleep 30; exit 1\n")
    compiler.chmod(0o700)
    script = tmp_path / "script.py"
    script.write_text(COMPILING)
    done = run_program(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3",
         str(script), str(tmp_path)],
        env=environment(PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}"),
    )  # fmt: skip
    assert done.returncode == 1
    assert f"rank 1, 2 on {HOST} of 3 did not arrive at" in done.stderr, done.stderr
