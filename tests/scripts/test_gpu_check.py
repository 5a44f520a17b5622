"""`scripts/gpu_check.py` without a GPU: all of it runs, so that it works on a GPU."""

import contextlib
import functools
import json
import shutil
import struct
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="its kernels need Triton")

import gpu_check

from bench import (
    gpu_drafts,
    gpu_mixed,
    gpu_probes,
    gpu_ranks,
    gpu_scaled,
    gpu_sections,
    gpu_steps,
    quantized,
    slim_nccl,
)
from bench.gpu_run import BARS, H200, MODES, Section, read_results
from bench.gpu_sections import LIMITS, LIMITS_ALONE, kernel_times
from helpers.launch import REPO, environment, run_program
from llama.kernels.cpu import native


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory) -> tuple[list[str], Path, subprocess.CompletedProcess]:
    """A dry run: its command, its folder and its result.

    Its cache is separate; it gets a copy of the CPU kernels.
    """
    out: Path = tmp_path_factory.mktemp("gpu_check")
    if (library := native.kernels()) is not None:
        cache = out / "cache" / "llama"
        native.make_private(cache)
        shutil.copy(library._name, cache)
    command = [sys.executable, str(REPO / "scripts" / "gpu_check.py"), "--dry", "--minutes", "9"]
    sections = [*LIMITS, "ranks", "tests", "formats", *gpu_mixed.LIMITS, *gpu_drafts.LIMITS]
    sections += [*gpu_scaled.LIMITS, "probes"]
    command += ["--out", str(out), "--only", ",".join(sections)]
    env = environment(**{gpu_ranks.ASKED: "1 x 2"})  # the others start 10 processes
    return command, out, run_program(command, env=env, timeout=400)


@pytest.mark.slow
def test_all_sections_run_dry_and_only_once(dry_run, monkeypatch, capsys):
    """All sections run dry and only once.

    Every figure that has a target is there in its last mode, and those of decode in each mode; a
    second run finds nothing left to do.
    """
    command, out, done = dry_run
    logs = (out / "log.txt").read_text()[-5000:]
    assert done.returncode == 0, done.stdout + done.stderr + logs
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert {row["section"]: row["ended"] for row in rows if "ended" in row} == dict.fromkeys(
        LIMITS | LIMITS_ALONE, "ok"
    )
    found = {(row["what"], row.get("mode")) for row in rows if "what" in row}
    for what in BARS:
        assert {(what, None), (what, MODES[0])} & found, f"{what} was not measured"
    assert {("8b batch 1", mode) for mode in MODES} <= found
    assert ("8b graphs", None) in found
    checked = {row["what"]: row["value"] for row in rows if "what" in row}
    assert checked["8b graphs"] == checked["8b sample"] == "passed"
    assert "8b batch 1" in (out / "summary.txt").read_text()
    assert ("8b batch 1, T 0.8, top_p 0.95", MODES[0]) in found
    assert {checked[name] for name in gpu_probes.LIMITS} == {
        "ok", "needs a GPU", "needs a GPU and CUDA's compute-sanitizer",
    }  # fmt: skip
    for way in ("eager", "graphs", "graphs, unequal shares"):
        assert checked[f"1 x 2 random fp32, {way}"] == "same ids"
    for temperature in ("0.0", "0.8"):
        assert checked[f"1b for 1b, 2 rows, T {temperature}: drafts that differ"] == 0
    assert 0 < checked["killed in a captured sum"] < gpu_ranks._KILLED_S
    assert checked["tests: errors"] == checked["tests: failures"] == 0 < checked["tests: skipped"]
    assert {x.name for x in out.iterdir()} == {"results.jsonl", "summary.txt", "log.txt", "cache"}
    monkeypatch.setattr(sys, "argv", command[1:])
    assert gpu_check.main() == 0
    assert capsys.readouterr().out.count("done before") == len(LIMITS | LIMITS_ALONE)


def test_a_section_that_hangs_or_fails_costs_its_own_time_alone(tmp_path):
    assert gpu_check._run_child("decode", tmp_path, 0.5, dry=True).startswith(
        "stopped at its limit"
    )
    assert gpu_check._run_child("nowhere", tmp_path, 60, dry=True).startswith("failed (exit code 1")
    assert "KeyError: 'nowhere'" in (tmp_path / "log.txt").read_text()


def test_a_section_ends_with_the_run_that_asked_for_it(tmp_path):
    """A section ends with the run that started it.

    A past fault: when the run was killed with its group, the section stayed on the GPU.
    """
    command = [sys.executable, str(REPO / "scripts" / "gpu_check.py"), "--out", str(tmp_path)]
    orphan = environment(**{gpu_check._PARENT: "1"})
    done = run_program([*command, "--dry", "--section", "facts"], env=orphan, timeout=60)
    assert done.returncode == 1 and "that asked for this check has ended" in done.stderr
    assert not (tmp_path / "results.jsonl").exists()


def test_peers_are_left_out_where_they_are_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_sections, "find_spec", lambda name: None)
    gpu_sections.run("peers", tmp_path, dry=True)
    (said,) = read_results(tmp_path)
    assert said["value"] == "transformers is not installed"


def test_what_is_timed_in_turn_is_all_captured(monkeypatch):
    """Everything that is timed in turn is captured.

    A single KV cache that is read again and again would stay in the GPU's own cache.
    """
    captured: list[int] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(gpu_sections.machine, "best_seconds", lambda *_: 42.0)
    at: Any = SimpleNamespace(dry=False, device=None)
    calls = [functools.partial(captured.append, i) for i in range(21)]
    assert gpu_steps.device_seconds(at, calls) == 2.0
    assert captured == [0, *range(21)]


def test_pytorch_multiplies_4_bit_weights_of_the_same_sizes():
    """Codes are random, and scales and offsets from 0 to 1, so that no product is 0."""
    weights = [quantized.FORMATS["W4A16"].blocks(64, 512, torch.device("cpu")) for _ in range(2)]
    x = torch.ones(3, 512, dtype=torch.bfloat16)
    call: Any = quantized._library_int4(weights, x)
    products = [call(i) for i in range(2)]
    assert [product.shape for product in products] == [(3, 64)] * 2
    assert products[0].count_nonzero() == 3 * 64 and not products[0].equal(products[1])


def test_without_a_gpu_it_says_so(tmp_path, capsys, monkeypatch):
    for arguments, said in (
        (["--out", str(tmp_path)], "torch finds no CUDA GPU here: --dry runs all of this"),
        (["--out", str(tmp_path), "--dry", "--only", "decod"], "--only decod: there are facts,"),
    ):
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", *arguments])
        monkeypatch.setattr("bench.gpu_sections.has_gpu", lambda: False)
        with pytest.raises(SystemExit):
            gpu_check.main()
        assert said in capsys.readouterr().err


def test_the_sections_fit_into_the_time_of_a_run_the_most_telling_first():
    assert list(LIMITS)[:5] == ["facts", "checks", "decode", "profile", "throughput"]
    assert sum(LIMITS.values()) <= 9.5 * 60 - gpu_check._GRACE_S
    # pytest takes minutes, and a run that is stopped has no counts: it has a run of its own.
    assert 300 < LIMITS_ALONE["tests"] <= 9.5 * 60 - gpu_check._GRACE_S
    assert LIMITS.keys().isdisjoint(LIMITS_ALONE)


def test_a_profile_counts_the_device_alone_and_tells_products_apart():
    """A profile counts kernels by name and grid; waits of the host and parents are no kernels.

    A past fault: a wait for an event was the longest "kernel", and all products were one row.
    """

    def event(name: str, us: float, grid: list[int] | None, cat: str = "kernel") -> dict:
        return {"name": name, "cat": cat, "dur": us, "args": {"grid": grid} if grid else {}}

    trace = {"traceEvents": [
        event("product_kernel", 5.0, [128, 1, 1]), event("product_kernel", 9.0, [448, 1, 1]),
        event("product_kernel", 6.0, [128, 1, 1]), event("cudaEventSynchronize", 99.0, None,
        "cuda_runtime"), event("aten::mm", 50.0, None, "cpu_op"),
        event("Memcpy HtoD", 1.0, None, "gpu_memcpy"), {"name": "no time", "cat": "kernel"},
    ]}  # fmt: skip
    found = kernel_times(trace, gpu_sections._GPU_EVENTS)
    assert [(x.name, x.grid, x.us, x.launches) for x in found] == [
        ("product_kernel", "128x1x1", 11.0, 2),
        ("product_kernel", "448x1x1", 9.0, 1),
        ("Memcpy HtoD", "", 1.0, 1),
    ]


@pytest.mark.parametrize("fault", [0, 1])
def test_wrong_elements_of_sums_are_counted(fault):
    """Each of 40 sums has other values; a peer whose values are those before is found."""
    count = 0

    def sum_up(x: torch.Tensor) -> None:
        nonlocal count
        peer = (torch.arange(64) + count - fault) % 13 + 1
        x.add_(peer)
        count += 1

    x = torch.empty(64, dtype=torch.bfloat16)
    assert gpu_probes.num_wrong_sums(sum_up, x, 0, 40) == 64 * 40 * fault


def test_slim_nccl_keeps_the_code_of_one_architecture_where_it_is():
    """All else is zeros: code of other GPUs, and PTX; the magic number may also occur by chance."""

    def entry(kind: int, arch: int, code: bytes) -> bytes:
        fields = (kind, 0, 64, len(code), 0, 0, 0, 0, arch)
        return struct.pack("<HHIQIIHHI", *fields).ljust(64, b"\7") + code

    def library(*codes: bytes) -> bytearray:
        entries = [entry(*key, code) for key, code in zip(kinds, codes, strict=True)]
        size = sum(map(len, entries))
        magic = struct.pack("<I", 0xBA55ED50)
        header = magic + struct.pack("<HHQ", 1, 16, size)
        return bytearray(b"elf" + magic + bytes(20) + header + b"".join(entries) + b"end")

    kinds = ((2, 80), (2, 90), (1, 90))
    data = library(b"a" * 24, b"b" * 40, b"c" * 8)
    assert slim_nccl.slim(data, 90) == {(2, 80): 24, (2, 90): 40, (1, 90): 8}
    assert data == library(bytes(24), b"b" * 40, bytes(8))


def test_one_section_that_fails_is_not_all(tmp_path, monkeypatch):
    """One failing section does not end the others, which in a dry run share its process."""
    monkeypatch.setattr(gpu_check, "end_with_parent", lambda: None)
    given = ["gpu_check.py", "--dry", "--out", str(tmp_path), "--section", "nowhere,facts"]
    monkeypatch.setattr(sys, "argv", given)
    assert gpu_check.main() == 1
    assert gpu_check._ended(read_results(tmp_path)) == {
        "nowhere": "failed (see log.txt)",
        "facts": "ok",
    }


def test_no_two_caches_of_keys_and_values_are_alive(tmp_path):
    at = Section("decode", tmp_path, dry=True)
    model = at.model("8b", 64, 1)
    with at.engine(model, MODES[0], 64) as engine:
        cache = weakref.ref(engine.core.runner.kv_cache)
    assert cache() is None


def test_the_bars_go_by_what_the_gpu_can_do(tmp_path):
    at = Section("decode", tmp_path, dry=True)
    at.say("read bandwidth", 0.7 * H200["read bandwidth"])
    for mode in (MODES[0], MODES[-1]):
        at.say("8b batch 1", 100.0, mode=mode)
    at.say("8b load", 1.0)
    bars = [row.get("bar") for row in read_results(tmp_path)]
    assert bars == [None, pytest.approx(0.7 * BARS["8b batch 1"][0]), None, BARS["8b load"][0]]
