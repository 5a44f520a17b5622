"""Several machines: two torchrun agents on loopback, and what is said of groups and interfaces."""

from pathlib import Path
from typing import Any

import pytest

from helpers.machines import two_machines
from helpers.prompts import prompts_of
from llama import Llama
from llama.parallel import machines

PROMPTS = prompts_of([3, 17, 9, 30], seed=20)
GREEDY: dict[str, Any] = {"max_gen_len": 8, "temperature": 0.0}


def jobs(folder: Path, size: int | None) -> list[dict]:
    return [
        {"do": "place", "folder": str(folder), "size": size},
        {"do": "generate", "folder": str(folder), "prompts": PROMPTS, "size": size, **GREEDY},
    ]


@pytest.mark.slow
@pytest.mark.parametrize("static", [True, False], ids=["static", "c10d"])
def test_two_machines_answer_as_one_process(static, make_checkpoint, tmp_path):
    """Two agents of one rank: the group spans them, which rank 0 says once. Two agents of two
    ranks, and groups of two: each stays inside its machine, and nothing is said."""
    folder = make_checkpoint(seed=5)[0]
    wanted = Llama.build(str(folder), None, 128, 4, dtype="fp32", device="cpu").generate(
        PROMPTS, **GREEDY
    )[0]
    ranks, size = (1, None) if static else (2, 2)
    results, errors = two_machines(ranks, jobs(folder, size), tmp_path / "out", static=static)
    assert [rank[1]["result"][0] for rank in results] == [wanted] * 2 * ranks
    if static:
        assert [rank[0]["result"] for rank in results] == [[0, 2, 0, 1], [1, 2, 0, 1]]
        assert errors.count("a model-parallel group of 2 ranks spans machines of 1 rank each") == 1
    else:
        assert [rank[0]["result"][:3] for rank in results] == [
            [0, 2, 0], [1, 2, 0], [0, 2, 1], [1, 2, 1],
        ]  # fmt: skip
        assert "spans machines" not in errors


@pytest.mark.parametrize(
    ("size", "local", "told"),
    [
        (16, "8", "if the weights fit on 8 ranks, model_parallel_size=8 saves that"),
        (3, "2", "a larger machine for the weights would save that"),
        (8, "8", ""),
        (2, "8", ""),
        (16, "16", ""),
        (16, "", ""),
    ],
)
def test_groups_that_span_machines_are_told_once_with_the_remedy(
    size, local, told, monkeypatch, capfd
):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    machines.warn_if_groups_span.cache_clear()
    for _ in range(2):
        machines.warn_if_groups_span(size, 16)
    err = capfd.readouterr().err
    assert told in err and err.count("\n") == (1 if told else 0)
    monkeypatch.setenv("RANK", "1")
    machines.warn_if_groups_span.cache_clear()
    machines.warn_if_groups_span(size, 16)
    assert not capfd.readouterr().err


def test_an_interface_that_is_not_there(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth77")
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME=lo,eth77 names no interface .* lo"):
        machines.check_interfaces()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    machines.check_interfaces()
