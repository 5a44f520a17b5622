"""The benchmark: every command ends in JSON, peers are met or skipped, the floors are right.

No figure is asserted: how fast a machine is on a given day is no test.
"""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import torch

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "scripts"))

import bench as cli  # noqa: E402
import bench_model  # noqa: E402
import bench_report  # noqa: E402
import bench_run  # noqa: E402
import bench_worker  # noqa: E402

from llama import ModelArgs  # noqa: E402

SMALL: dict[str, Any] = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 512,
         "multiple_of": 32}  # fmt: skip
JOB = {
    "params": SMALL, "dtype": "fp32", "device": "cpu", "seed": 0, "folder": None, "batch": 2,
    "longest": 64, "context": 8, "warmup": 1, "steps": 3, "repeats": 2,
    "lengths": [[5, 4], [9, 2], [3, 6]],
}  # fmt: skip


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def bench(monkeypatch, capsys):
    """bench(*args) -> (printed, JSON): the command in this process, its engines in their own.

    The machine's limits, seconds to measure, are made up.
    """
    monkeypatch.setattr(bench_run, "read_bandwidth", lambda device: 1e10)
    monkeypatch.setattr(bench_run, "matrix_rate", lambda device, dtype: 1e11)

    def run(*args: object) -> tuple[str, dict]:
        monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, args)])
        cli.main()
        printed = capsys.readouterr().out
        return printed, json.loads(printed.splitlines()[-1])

    return run


def test_latency_beside_the_peers(tmp_path):
    """Float32 and the same weights: all three engines must say the same tokens."""
    plot, out = tmp_path / "latency.svg", tmp_path / "latency.txt"
    flags = (
        "latency --model demo --dtype fp32 --batches 1 --context 16 --steps 6 --warmup 1 "
        f"--vs transformers,llama_models --plot {plot} --out {out}"
    )
    done = subprocess.run(
        [sys.executable, str(REPO / "scripts" / "bench.py"), *flags.split()],
        env=ENVIRONMENT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    rows = {row["engine"]: row for row in told["rows"]}
    assert list(rows) == ["ours", "transformers", "llama_models"]
    for row in rows.values():
        assert len(row["steps"]) == 6 and row["tokens_per_s"] > 0 and row["share"] > 0
        assert row["ids"] == rows["ours"]["ids"] and len(row["ids"]) == 8
    assert rows["ours"]["outside_ms"] > 0 and rows["transformers"]["outside_ms"] is None
    assert told["model"]["dim"] == 256 and len(told["limits"]["read_bytes_per_s"]) == 2
    assert {"command", "date", "machine", "skipped", "failed"} <= told.keys()
    assert out.read_text() == done.stdout
    assert plot.read_text().count("<polyline") == 3


def test_peers_that_are_missing_or_fail_are_said(bench, tmp_path, monkeypatch, capsys):
    """One that is not installed is skipped; one that fails ends in 1, and no row is lost."""
    venv.create(tmp_path / "empty", symlinks=True)
    missing = f"transformers:{tmp_path / 'empty'}"
    _, told = bench("startup", "--vs", missing)  # the return code is 0: it did not exit
    assert told["rows"][0]["seconds"] > 0

    monkeypatch.setattr(bench_run, "layouts", lambda found, work: {"meta": str(tmp_path)})
    with pytest.raises(SystemExit) as ended:
        bench("prefill", "--tokens", 8, "--repeats", 1, "--vs", f"{missing},llama_models")
    printed = capsys.readouterr().out
    told = json.loads(printed.splitlines()[-1])
    assert ended.value.code == 1
    assert [row["engine"] for row in told["rows"]] == ["ours"]
    assert told["rows"][0]["tokens_per_s"] > 0
    assert "not installed" in told["skipped"]["transformers"]
    assert "Error" in told["failed"]["llama_models"]
    assert f"transformers: skipped, {told['skipped']['transformers']}" in printed
    assert f"llama_models: failed, {told['failed']['llama_models']}" in printed


def test_offline_with_mixed_lengths(bench):
    flags = "--requests 3 --shortest 2 --longest 5 --seed 4 --dtype fp32 --vs llama_models"
    _, told = bench("offline", *flags.split())
    assert [row["engine"] for row in told["rows"]] == ["ours", "llama_models"]
    for row in told["rows"]:
        assert row["requests"] == 3 and row["seconds"] > 0
        assert 6 <= row["tokens_in"] <= 15 and 6 <= row["tokens_out"] <= 15


def test_transformers_answers_mixed_lengths(tmp_path):
    """In this process, for speed: unlike Meta's model, it changes nothing of torch's."""
    folder = bench_model.write_checkpoint(tmp_path / "meta", SMALL, torch.float32)
    folders = bench_model.layouts(bench_model.find(folder), tmp_path)
    job = JOB | folders | {"batch": 3, "measure": "offline"}
    assert bench_worker.measure("transformers", job)["seconds"] > 0


def test_load_reads_files_that_are_kept(bench, tmp_path):
    _, told = bench("load", "--work_dir", tmp_path)
    (row,) = told["rows"]
    assert row["load"] > 0 and row["resident_gb"] > row["private_gb"] > 0
    assert (tmp_path / "demo-bf16" / "meta" / "consolidated.00.pth").exists()


def test_help_tells_every_flag(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.py", "latency", "--help"])
    cli.main()
    told = capsys.readouterr().out
    assert all(flag in told for flag in ("batches", "repeats", "work_dir", "threads", "plot"))


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["latency", "--model", "7b"], "model='7b'"),
        (["latency", "--batches", "0"], "batches=0"),
        (["latency", "--batches", "1,2", "--context", "8,8,8"], "context=(8, 8, 8)"),
        (["latency", "--context", "9000"], "8192"),
        (["latency", "--steps", "many"], "steps='many'"),
        (["latency", "--stepz", "4"], "stepz"),
        (["prefill", "--vs", "exllama"], "vs='exllama'"),
        (["prefill", "--vs", "transformers:/nowhere"], "/nowhere"),
        (["offline", "--dtype", "int4"], "dtype='int4'"),
        (["offline", "--shortest", "9", "--longest", "8"], "longest=8"),
    ],
)
def test_bad_arguments_are_named(args, named, bench, capsys):
    with pytest.raises(SystemExit) as ended:
        bench(*args)
    assert ended.value.code == 1
    assert named in capsys.readouterr().err


def test_what_a_worker_measures():
    def row_of(measure: str) -> dict:
        return bench_worker.measure("ours", JOB | {"measure": measure})

    told = row_of("latency")
    assert len(told["steps"]) == 3 and len(told["ids"]) == 5 and told["outside"] > 0
    assert len(row_of("prefill")["prefills"]) == 2
    assert row_of("offline")["seconds"] > 0


def test_floors_by_hand():
    """dim 64, 4 heads of 16, 2 of them key-value heads; ffn: 2/3 of 256 is 170, rounded to 192."""
    args = ModelArgs(**SMALL)
    block = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 192  # wq, wk and wv, wo, w1 to w3
    assert bench_model.block_matrix_size(args) == block == 49152
    weights = 2 * (block + 2 * 64) + 64 + 512 * 64  # layers with their norms, last norm, output
    keys_values = 2 * 2 * 2 * 16  # numbers a token: layers, keys and values, heads, head size
    by_hand = 2 * (weights + 3 * 64 + (10 + 20 + 30) * keys_values)  # bf16; 3 embedding rows
    assert bench_model.decode_bytes(args, 2, [10, 20, 30]) == by_hand == 278528
    assert bench_model.prefill_operations(args, 10) == 2 * 10 * 2 * block + 2 * 512 * 64
    seconds = bench_model.offline_floor(args, 2, [(10, 3), (5, 1)], read=1e9, rate=1e9)
    operations = bench_model.prefill_operations(args, 15, 2)
    steps = [bench_model.decode_bytes(args, 2, [11]), bench_model.decode_bytes(args, 2, [12])]
    assert seconds == pytest.approx((operations + sum(steps)) / 1e9)


def test_the_1b_reads_what_the_real_one_reads():
    args = ModelArgs(**bench_model.SHAPES["1b"])
    assert round(bench_model.decode_bytes(args, 2, []) / 1e9, 2) == 2.47


def test_random_weights_repeat_no_row_and_are_the_same_in_files(tmp_path):
    model = bench_model.random_model(SMALL, torch.bfloat16, "cpu")
    folder = bench_model.write_checkpoint(tmp_path / "meta", SMALL, torch.bfloat16)
    state = torch.load(folder / "consolidated.00.pth", weights_only=True)
    slots = model.weight_slots()
    assert slots.keys() == state.keys()
    assert all(torch.equal(slots[name], state[name]) for name in slots)
    assert len(slots["output.weight"].unique(dim=0)) == 512
    with pytest.raises(ValueError, match="another shape"):
        bench_model.write_checkpoint(folder, SMALL | {"dim": 32}, torch.bfloat16)


def test_table_is_aligned():
    columns = [("engine", "engine", ""), ("ms", "ms", ".1f")]
    rows: list[dict] = [{"engine": "ours", "ms": 1234.56}, {"engine": "x", "ms": None}]
    assert bench_report.table(columns, rows).splitlines() == [
        "engine      ms", "ours    1234.6", "x            -",
    ]  # fmt: skip
