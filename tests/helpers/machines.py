"""Simulated machines: torchrun agents on loopback, each acting as one machine; and namespaces.

A job is {"do": name, ...}, a function of programs/ranks.py, as in launch.py.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from helpers.launch import WORKER, environment
from helpers.ports import reserved_port


def agent(
    machine: int, of: int, ranks: int, address: str, port: int, program: Sequence[str],
    *, static: bool = False, within: Sequence[str] = (), **variables: str,
) -> subprocess.Popen[str]:  # fmt: skip
    """Start one torchrun agent, which acts as one machine of `of`.

    `within` is a command that runs another, such as `ip netns exec`.
    """
    if static:
        where = [f"--master_addr={address}", f"--master_port={port}", f"--node_rank={machine}"]
    else:
        # Without is_host both agents on loopback would take themselves for the host of the store.
        where = [
            "--rdzv-backend=c10d", f"--rdzv-endpoint={address}:{port}", "--rdzv-id=test",
            f"--rdzv-conf=is_host={int(machine == 0)}", f"--local-addr={address}",
        ]  # fmt: skip
    return subprocess.Popen(
        [*within, sys.executable, "-m", "torch.distributed.run", f"--nnodes={of}",
         f"--nproc_per_node={ranks}", *where, *program],
        env=environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def two_machines(
    ranks: list[int], jobs: list[dict], folder: Path, *, static: bool = False
) -> tuple[list[list[dict]], str]:
    """Run the jobs on two agents on loopback, with this many ranks each.

    Returns the results, one list for each rank, and the whole of stderr.
    """
    folder.mkdir(exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    program = [WORKER, str(folder / "jobs.json"), str(folder)]
    with reserved_port() as port:
        agents = [
            agent(machine, 2, ranks[machine], "127.0.0.1", port, program, static=static)
            for machine in range(2)
        ]
        try:
            errors = [machine.communicate(timeout=120)[1] for machine in agents]
        finally:
            for machine in agents:
                machine.kill()
    assert [machine.returncode for machine in agents] == [0, 0], errors
    results = [json.loads((folder / f"rank{r}.json").read_text()) for r in range(sum(ranks))]
    return results, "".join(errors)
