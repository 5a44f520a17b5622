"""scripts/ray_batch.py on a cluster of two nodes of this machine, with Ray itself.

Skipped where Ray is not installed: pip install -e '.[ray]', or an environment of its own with
    python3 -m venv ray-env && ray-env/bin/pip install 'ray>=2.9'
    realpath .venv/lib/python3*/site-packages > ray-env/lib/python3.11/site-packages/llama.pth
    PYTHONPATH=. ray-env/bin/python -m pytest tests/scripts/test_ray_batch.py
"""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.launch import REPO, environment
from helpers.waiting import num_lines, wait_until
from llama import Llama
from llama.cli.batch.job import run_batch
from llama.cli.model import sampling_params

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install ray"
    ),
]
NUM_LINES = 400
LIMIT_S = 60.0


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two nodes of two cores each, as far as Ray knows."""
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    found.add_node(num_cpus=2)
    try:
        yield found
    finally:
        found.shutdown()


def replicas(session: str) -> list[int]:
    """Return the processes of a cluster's actors, by Ray's names and the folder of their logs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended
            is_actor = path.read_bytes().startswith(b"ray::Replica")
            if is_actor and any(
                os.readlink(file).startswith(session) for file in path.with_name("fd").iterdir()
            ):
                found.append(int(path.parent.name))
    return found


def records(path: Path) -> dict[str, Any]:
    """Return custom_id -> record; each id occurs once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {x["custom_id"]: x["response"] and x["response"]["body"]["choices"] for x in lines}
    assert len(found) == len(lines), "a custom_id was answered twice"
    return found


def test_a_killed_actor_and_a_lost_node_lose_nothing(cluster, checkpoint_dir, tmp_path):
    """A killed actor and a lost node lose nothing.

    Every custom_id occurs once, with the answer of one process; then --resume has nothing to do.
    """
    lines: list[dict[str, Any]] = [
        {"custom_id": f"id-{i}", "method": "POST", "url": "/v1/completions",
         "body": {"prompt": "x" * (1 + i % 9), "max_tokens": 40, "temperature": 1}}
        for i in range(NUM_LINES)
    ]  # fmt: skip
    lines[7]["body"]["max_tokens"] = "many"
    (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out"
    command = [
        sys.executable, str(REPO / "scripts" / "ray_batch.py"), str(tmp_path / "in"), str(out),
        "--ckpt_dir", str(checkpoint_dir[0]), "--address", cluster.address, "--replicas", "2",
        "--max_seq_len", "128", "--max_batch_size", "4", "--device", "cpu", "--dtype", "fp32",
    ]  # fmt: skip
    job = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: num_lines(out) >= 32 or job.poll() is not None, "no result")
        os.kill(replicas(cluster.head_node.get_session_dir_path())[0], signal.SIGKILL)
        before = num_lines(out)
        wait_until(lambda: num_lines(out) > before or job.poll() is not None, "no result")
        assert num_lines(out) < NUM_LINES, "the job was done before its node was lost"
        cluster.remove_node(cluster.list_all_nodes()[1], allow_graceful=False)
        _, errors = job.communicate(timeout=LIMIT_S)
    finally:
        job.kill()
    assert job.returncode == 0, errors
    assert f"{NUM_LINES} results added, 1 errors in the file" in errors
    llama = Llama.build(str(checkpoint_dir[0]), None, 128, 4, device="cpu", dtype="fp32")
    run_batch(llama, str(tmp_path / "in"), str(tmp_path / "alone"), sampling_params())
    assert records(out) == records(tmp_path / "alone")
    report = run_batch(llama, str(tmp_path / "in"), str(out), sampling_params(), resume=True)
    assert (report.written, report.failed) == (0, 1), "llama batch goes on with the same file"
