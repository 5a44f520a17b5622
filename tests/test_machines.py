"""Several machines: two torchrun agents on loopback, with groups and interfaces in messages.

torchrun's restarts, where the ranks of the first start are gone, are tested too.
"""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.network import link, on_both
from helpers.launch import PROGRAMS, REPO, WORKER, run_program
from helpers.machines import two_machines
from helpers.prompts import prompts_of
from llama import Llama
from llama.ranks.world import check_interfaces

PROMPTS = prompts_of([3, 17, 9, 30], seed=20)
GREEDY: dict[str, Any] = {"max_gen_len": 8, "temperature": 0.0}


def jobs(folder: Path, size: int | None) -> list[dict]:
    return [
        {"do": "place", "folder": str(folder), "size": size},
        {"do": "forget"},
        {"do": "generate", "folder": str(folder), "prompts": PROMPTS, "size": size, **GREEDY},
    ]


@pytest.mark.slow
@pytest.mark.parametrize("static", [True, False], ids=["static", "c10d"])
def test_two_machines_answer_as_one_process(static, make_checkpoint, tmp_path):
    """Two machines answer as one process.

    With two agents of one rank, the group spans them. With two agents of two ranks, and groups of
    two, each group stays inside its machine.
    """
    folder = make_checkpoint(seed=5)[0]
    wanted = Llama.build(str(folder), None, 128, 4, dtype="fp32", device="cpu").generate(
        PROMPTS, **GREEDY
    )[0]
    ranks, size = (1, None) if static else (2, 2)
    results, _ = two_machines([ranks] * 2, jobs(folder, size), tmp_path / "out", static=static)
    assert [rank[2]["result"][0] for rank in results] == [wanted] * 2 * ranks
    if static:
        assert [rank[0]["result"] for rank in results] == [[0, 2, 0, 1], [1, 2, 0, 1]]
    else:
        assert [rank[0]["result"][:3] for rank in results] == [
            [0, 2, 0], [1, 2, 0], [0, 2, 1], [1, 2, 1],
        ]  # fmt: skip


@pytest.mark.slow
def test_a_group_that_spans_machines_talks_through_gloo_alone(make_checkpoint, tmp_path):
    """A group that spans machines communicates through gloo alone.

    It has the answers of one process: greedy, sampled, with log probabilities, and where rank 0
    leads. On machines of two ranks each, no rank shares memory with its neighbour.
    """
    folder = make_checkpoint(seed=5)[0]
    ask = {"folder": str(folder), "prompts": PROMPTS}
    ways: list[dict[str, Any]] = [
        GREEDY, {"max_gen_len": 8, "temperature": 1.0, "seed": 3}, {**GREEDY, "logprobs": True},
    ]  # fmt: skip
    work = [
        *({"do": "generate", **ask, **way} for way in ways),
        {"do": "spans_machines", "folder": str(folder)},
        {"do": "led", **ask},
    ]
    results, _ = two_machines([2, 2], work, tmp_path / "out", static=True)
    llama = Llama.build(str(folder), None, 128, 4, dtype="fp32", device="cpu")
    for number, way in enumerate(ways):
        tokens, logprobs = llama.generate(PROMPTS, **way)
        for rank in results:
            assert rank[number]["result"] == results[0][number]["result"], "the same bits"
        found = results[0][number]["result"]
        assert found[0] == tokens
        for ours, wanted in zip(found[1] or [], logprobs or [], strict=True):
            assert ours == pytest.approx(wanted, abs=1e-4)
    assert [rank[3]["result"] for rank in results] == [[4, False]] * 4
    alone = [llama.generate([p], 8, 1.0, 1.0, seed=4)[0][0] for p in PROMPTS]
    assert results[0][4]["result"][0][0] == alone
    assert len({str(rank[4]["result"][1]) for rank in results}) == 1


@pytest.mark.slow
def test_two_namespaces_answer_as_one_process(make_checkpoint, tmp_path, monkeypatch):
    """Two namespaces answer as one process.

    Each agent is in a network namespace of its own, with a link of 1 ms between them.
    """
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    folder, delay_s = make_checkpoint(seed=5)[0], 1e-3
    work = [*jobs(folder, None), {"do": "half_round_trip", "folder": str(folder)}]
    (tmp_path / "jobs.json").write_text(json.dumps(work))
    with contextlib.ExitStack() as stack:
        try:
            prefixes = stack.enter_context(link(delay_s, 1e9))
        except (OSError, subprocess.SubprocessError) as e:
            pytest.skip(f"network namespaces cannot be made here: {e}")
        on_both(prefixes, [WORKER, str(tmp_path / "jobs.json"), str(tmp_path)], timeout_s=100)
    results = [json.loads((tmp_path / f"rank{r}.json").read_text()) for r in range(2)]
    wanted = Llama.build(str(folder), None, 128, 4, dtype="fp32", device="cpu").generate(
        PROMPTS, **GREEDY
    )[0]
    assert [rank[2]["result"][0] for rank in results] == [wanted] * 2
    assert results[0][3]["result"] >= delay_s, "they did not talk across the link"


def test_an_interface_that_is_not_there():
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME=lo,eth77 names no interface .* lo"):
        check_interfaces("lo,eth77")
    check_interfaces("lo")


@pytest.mark.slow
def test_a_restarted_batch_job_does_the_rest(make_checkpoint, tmp_path):
    """A restarted batch job does the rest.

    One of two replicas is killed. torchrun --max-restarts starts both again, and they complete the
    job. A past fault: it ended with "Gloo connectFullMesh failed", as torchrun's store still had
    the addresses of the first start.
    """
    (tmp_path / "in").write_text(
        "".join(json.dumps({"prompt": "x" * i, "max_tokens": 4}) + "\n" for i in range(1, 81))
    )
    done = run_program(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         "--max-restarts=1", str(PROGRAMS / "restarted_batch.py"), str(tmp_path / "in"),
         str(tmp_path / "out"), "--ckpt_dir", str(make_checkpoint()[0]),
         "--model_parallel_size", "1", "--device", "cpu", "--dtype", "fp32",
         "--max_seq_len", "128", "--max_batch_size", "4"],
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ids = [json.loads(line)["custom_id"] for line in (tmp_path / "out").read_text().splitlines()]
    assert sorted(ids) == sorted(f"line-{i}" for i in range(1, 81))
    added = int(done.stderr.partition(" results added")[0].rpartition(" ")[2])
    assert 0 < added <= 70, "the first start has written some, and this one the rest"
