"""Ranks that load while their launcher ends or one of them stops: real processes without torch."""

import signal
import socket
import subprocess
import sys

import pytest

from helpers.launch import environment
from helpers.waiting import wait_until
from llama.ranks.processes import has_ended

pytestmark = pytest.mark.dist

LIMIT_S = 60  # distinguishes a hang from a slow end
HOST = socket.gethostname()
RANK = """
import os, signal, sys, time
from llama.ranks.peers import Peers
from llama.ranks.rendezvous import Rendezvous
from llama.ranks.siblings import watched_start
from llama.ranks.watch import Watch
fault, rank = sys.argv[1], int(os.environ["RANK"])
with watched_start():
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(1.5)  # each rank has looked at the others
    if fault == "stop" and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "end" and rank == 1:
        os._exit(0)
    if fault == "pass":
        sys.exit(rank > 0)
    if fault != "stop in the meeting":
        time.sleep(120)
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
store = lambda rendezvous: time.sleep(120)
peers = Peers(rank, 3)
Watch(peers, range(3), Rendezvous(peers, 3, store, "a:1", 120)).meet()
"""
LAUNCH = """
import sys
from llama.ranks.launch import launch
sys.exit(launch(["-c", *sys.argv[1:]], 3))
"""
# As torchrun starts its ranks: it has the store, and the ranks know no other process id of it.
TORCHRUN = """
import os, socket, subprocess, sys, time
variables = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1"}
store = socket.create_server(("127.0.0.1", 0))
variables["MASTER_PORT"] = str(store.getsockname()[1])
if sys.argv[2] == "late":  # the ranks look for it when it has ended
    store.close()
ranks = []
for rank in map(str, range(3)):
    own = {**os.environ, **variables, "RANK": rank, "LOCAL_RANK": rank}
    ranks.append(subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], env=own))
while not any(process.poll() for process in ranks):
    time.sleep(0.1)
for process in ranks:
    process.terminate()
sys.exit(1)
"""


@pytest.mark.parametrize("launcher", [LAUNCH, TORCHRUN], ids=["ranks", "torchrun"])
@pytest.mark.parametrize("fault", ["kill", "stop", "stop in the meeting", "end", "late", "pass"])
def test_ranks_that_load_end_with_one_message(launcher, fault):
    """Ranks that load end together, with one message, and none is left.

    Their launcher is killed, also before a rank has looked at it; a rank is stopped, or ends as if
    it had nothing to do. An import that fails says so itself.
    """
    if fault == "late" and launcher == LAUNCH:
        pytest.skip("a rank knows the process id of this launcher")
    command = [sys.executable, "-c", launcher, RANK, fault]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(), text=True, **pipes) as process:  # type: ignore[call-overload]
        pids = [int(process.stdout.readline()) for _ in range(3)]
        if fault == "kill":
            process.kill()
        # The pipes end when the last process that could write to them is gone.
        _, said = process.communicate(timeout=LIMIT_S)
    wait_until(lambda: all(map(has_ended, pids)))  # a process closes its files before it ends
    prefix = "NotMetError: " if fault == "stop in the meeting" else "error: "
    assert said.count(prefix) == (fault != "pass"), said
    if fault == "pass":
        assert process.returncode == 1
    elif fault in ("kill", "late"):
        name = "torchrun" if launcher == TORCHRUN else "llama --ranks"
        assert f"error: {name} (process " in said and "which started these ranks, exited" in said
        assert process.returncode == (-signal.SIGKILL if fault == "kill" else 1)
    elif fault.startswith("stop"):
        assert (
            f"{prefix}rank 1 on {HOST} was stopped (by SIGSTOP or Ctrl-Z) for 3 s, before" in said
        )
        assert process.returncode in (1, 137), "that of the rank that ends first"
    elif launcher == LAUNCH:
        assert f"rank 1 on {HOST} ended before all ranks had met: it did not arrive" in said
