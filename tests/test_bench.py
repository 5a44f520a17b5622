"""The benchmark: rooflines computed by hand, a complete run, worker measurements, and the soak
test.

No figure is asserted, since the speed of a machine on a given day is not a test. Installed engines
must give the same tokens as ours; the benchmark skips the others with a message.
"""

import functools
import importlib.util
import io
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bench import commands, expected, machine, report, run, shapes, soak, stages, worker
from bench.engines import ENGINES
from bench.engines.vllm import vllm_environment
from bench.linear import kernels
from bench.machine import best_seconds
from bench.quality import compare
from helpers.checkpoints import write_byte_tokenizer
from helpers.gguf_files import MIXED, PARAMS, write_gguf
from helpers.kernels import KERNELS_RUN, without_amx
from helpers.launch import REPO, environment, run_program
from helpers.waiting import wait_until
from llama import ModelArgs
from llama.checkpoint.find import find
from llama.checkpoint.write.convert import convert
from llama.engine.pages import PagePool
from llama.model import cost
from llama.model.args import VisionArgs

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 512,
         "multiple_of": 32}  # fmt: skip
JOB = {
    "params": SMALL, "dtype": "fp32", "torch_dtype": "float32", "device": "cpu", "seed": 0,
    "folder": None, "batch": 2, "longest": 64, "context": 8, "warmup": 1, "steps": 3, "repeats": 2,
    "lengths": [[5, 4], [9, 2], [3, 6]],
}  # fmt: skip


@pytest.fixture
def bench(monkeypatch, capsys):
    """A function bench("prefill --model demo") that runs the command here and returns its JSON.

    The machine's limits, which take seconds to measure, are invented.
    """
    monkeypatch.setattr(run, "read_bandwidth", lambda device: 1e10)
    monkeypatch.setattr(run, "matrix_flops", lambda device, dtype: 1e11)

    def command(line: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["bench", *line.split()])
        if code := commands.main():
            raise SystemExit(code)
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return command


def test_the_limits_of_this_machine_are_measured(monkeypatch):
    """The limits of this machine are measured, one run each, with a simulated clock of 0.1 s."""

    def time_once(work: Callable[[], object], device: torch.device) -> float:
        work()
        return 0.1

    assert machine._ELEMENTS_CPU * 4 == 2**30, "no cache holds as much"
    monkeypatch.setattr(machine, "_ELEMENTS_CPU", 2**16)
    monkeypatch.setattr(machine, "best_seconds", time_once)
    assert machine.read_bandwidth(CPU) == pytest.approx(2**18 / 0.1)
    assert machine.matrix_flops(CPU, torch.float32) == pytest.approx(2 * 512**3 / 0.1)
    assert 0 < best_seconds(lambda: torch.ones(9), CPU) < 1


def test_the_program_is_run_by_its_folder():
    program = [sys.executable, str(REPO / "scripts" / "bench"), "nothing"]
    done = run_program(program)
    assert done.returncode == 2 and done.stderr.startswith("error: ")


def test_latency_beside_a_peer(bench, tmp_path):
    """Latency is measured alongside a peer.

    In float32, ours and Meta's model give the same tokens, and a peer whose environment lacks its
    package is skipped.
    """
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.symlink_to(Path(sys.base_prefix, "bin", "python3"))  # an interpreter without packages
    plot, out = tmp_path / "latency.svg", tmp_path / "latency.txt"
    command = (
        "latency --model demo --dtype fp32 --batches 1 --context 16 --steps 6 --warmup 1 "
        f"--rounds 2 --vs llama_models,vllm:{tmp_path} --plot {plot} --out {out}"
    )
    document = bench(command)
    ours, peer = document["rows"]
    assert (ours["engine"], peer["engine"]) == ("ours", "llama_models")
    assert ours["ids"] == peer["ids"] and len(ours["ids"]) == 8
    assert len(ours["steps"]) == 12 and ours["roofline_fraction"] == pytest.approx(
        ours["roofline_ms"] / ours["step_ms"]
    )
    rounds = [peer["rounds"][i] / ours["rounds"][i] for i in range(2)]
    assert rounds[1] == statistics.median(peer["steps"][6:]) / statistics.median(ours["steps"][6:])
    assert peer["to_ours"] == sum(rounds) / 2 and ours["host_ms"] > 0
    assert json.loads(out.read_text().splitlines()[-1]) == document
    assert plot.read_text().count("<polyline") == 2
    (why,) = document["skipped"].values()
    assert "not installed" in why and why in out.read_text().split("\n{")[0]


def test_a_gguf_file_is_run_as_it_is(tmp_path):
    """A GGUF file is run as it is, by our engine and llama.cpp; a step reads the file's bytes."""
    path = tmp_path / "model.gguf"
    write_gguf(path, PARAMS, MIXED)
    asked = run.Bench(model=str(path), vs="ours_bf16")
    with asked.folders("latency") as folders:
        assert folders == {"folder": str(path), "gguf": str(path)}
    names = ("ours", "llama_cpp", "ik_llama_cpp", "ours_bf16")
    assert [asked._dtypes(name)["dtype"] for name in names] == ["auto"] * 3 + ["bf16"]
    assert [asked._dtypes(name)["activations"] for name in names] == [None] * 4
    for name, activations in {
        "ours_rounded": "int8",
        "ours_rounded_lm_head": "int8_lm_head",
    }.items():
        own = asked._dtypes(name)
        assert (own["dtype"], own["activations"]) == ("auto", activations)
    cache = 20 * 2 * PARAMS["n_layers"] * 2 * 32 * 2  # keys and values of two heads, for 20 tokens
    read = cost.decode_bytes(asked.args, contexts=[10, 10], **asked.storage({"dtype": "auto"}))
    assert read == path.stat().st_size + cache
    with pytest.raises(ValueError, match="only ik_llama_cpp, llama_cpp, ours_bf16, ours_"):
        run.Bench(model=str(path), vs="transformers")


def test_a_quantized_folder_is_run_as_it_is(tmp_path):
    """A W8A8 folder is run by our engine, transformers and vLLM, and its bytes are read."""
    meta = shapes.write_checkpoint(tmp_path / "meta", SMALL, torch.bfloat16)
    path = tmp_path / "w8a8"
    convert(meta, path, quantize="int8", activations="int8_token")
    asked = run.Bench(model=str(path), vs="vllm")
    with asked.folders("latency") as folders:
        assert folders == {"folder": str(path), "hf": str(path)}
    assert asked._dtypes("ours") == {
        "dtype": "auto", "torch_dtype": "bfloat16", "activations": None,
    }  # fmt: skip
    size = (path / "model.safetensors").stat().st_size
    assert asked.storage({"dtype": "auto"}) == {"itemsize": 2, "file_bytes": size}
    readers = "ours_bf16, ours_rounded, ours_rounded_lm_head, transformers, vllm"
    with pytest.raises(ValueError, match=f"only {readers} run"):
        run.Bench(model=str(path), vs="llama_cpp")


def test_latency_beside_busy_processes(bench):
    """Latency is measured alongside busy processes: each case runs quiet, then with them."""
    line = (
        "latency --model demo --batches 1,2 --context 8 --steps 2 --warmup 1 --busy 1 --threads 1"
    )
    rows = bench(line)["rows"]
    assert [(row["batch"], row["busy"]) for row in rows] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    for quiet, beside in zip(rows[::2], rows[1::2], strict=True):
        assert beside["to_quiet"] == beside["step_ms"] / quiet["step_ms"]
        assert "to_quiet" not in quiet and beside["ids"] == quiet["ids"]
        assert "busy_s" not in quiet and beside["busy_s"] > 0


def test_busy_processes_compute_and_end():
    """Busy processes compute and end.

    Each takes CPU time, on all the given cores, and none is left, even if the parent was killed.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with worker.busy_processes(2, cores) as started:
            assert [os.sched_getaffinity(process.pid) for process in started] == [cores] * 2
            while not all(cpu_ticks(process.pid) > 3 for process in started):
                time.sleep(0.01)
    finally:
        os.sched_setaffinity(0, cores)
    assert all(process.returncode is not None for process in started)
    parent = subprocess.Popen(
        [sys.executable, "-c",
         "import os, signal; from bench.worker import busy_processes\n"
         "with busy_processes(1, set()) as started:\n"
         "    print(started[0].pid, flush=True)\n"
         "    os.kill(os.getpid(), signal.SIGKILL)\n"],
        env=environment(PYTHONPATH=str(REPO / "scripts")), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    left = int(parent.communicate()[0])
    wait_until(lambda: not Path(f"/proc/{left}").exists() or is_zombie(left))


def process_status(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on (proc_pid_stat(5))."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def cpu_ticks(pid: int) -> int:
    return int(process_status(pid)[11])


def is_zombie(pid: int) -> bool:
    return process_status(pid)[0] == "Z"


@pytest.mark.parametrize("name", ["transformers", "llama_cpp", "ik_llama_cpp", "vllm"])
def test_peers_say_the_same_tokens(name, tmp_path, monkeypatch):
    """Peers give the same tokens, in float32 with the same weights, if they are installed."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    meta = shapes.write_checkpoint(tmp_path / "meta", SMALL, torch.float32)
    job = JOB | shapes.layouts(find(meta), tmp_path) | {"measure": "latency", "threads": 1}
    if name.endswith("llama_cpp"):
        from bench.gguf_file import write_gguf

        write_gguf(find(meta), tmp_path / "model.gguf", torch.float32)
        job["gguf"] = str(tmp_path / "model.gguf")
    for key, value in ENGINES[name].environment(Path(sys.prefix)).items():
        monkeypatch.setenv(key, value)
    (row,), (ours,) = worker.measure(name, job), worker.measure("ours", job)
    assert row["ids"] == ours["ids"] and len(row["ids"]) == 5
    (row,) = worker.measure(name, job | {"measure": "offline", "batch": 3})
    assert row["seconds"] > 0


def test_a_gguf_file_without_a_vocabulary_runs(tmp_path):
    """A GGUF file without a vocabulary runs, as those that llama.cpp quantizes for a measurement.

    The file is written by llama.cpp's package, and its ids are those of the folder that it is from.
    """
    pytest.importorskip("gguf", reason="gguf is not installed")
    from bench.gguf_file import write_gguf

    meta = shapes.write_checkpoint(tmp_path / "meta", SMALL, torch.float32)
    path = tmp_path / "model.gguf"
    write_gguf(find(meta), path, torch.float32)
    job = JOB | {"measure": "latency", "threads": 1}
    (row,) = worker.measure("ours", job | {"folder": str(path)})
    (wanted,) = worker.measure("ours", job | {"folder": str(meta)})
    assert row["ids"] == wanted["ids"] and len(row["ids"]) == 5


def test_load_reads_files_that_are_kept_and_failures_are_reported(bench, tmp_path, capsys):
    """`load` reads stored results and reports failures.

    A peer that never answers is killed: the exit code is 1, and no row of another is lost.
    """
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    fails = run.Bench(vs=f"transformers:{tmp_path}", limit_s=1)
    del fails.pythons["ours"]
    assert fails._in_turn([JOB | {"measure": "prefill"}]) == []
    assert fails.failed == {"transformers": "no answer in 1 s"}
    with pytest.raises(SystemExit):
        fails.report([("engine", "engine", "")], [], None)
    capsys.readouterr()
    packed = ["ours_packed"] * KERNELS_RUN
    rows = bench(f"load --work_dir {tmp_path} --vs ,{','.join(packed)}")["rows"]
    assert [row["engine"] for row in rows] == ["ours", *packed]
    assert all(row["load"] > 0 and row["resident_gb"] > row["private_gb"] > 0 for row in rows)
    assert (tmp_path / "demo-bf16" / "meta" / "consolidated.00.pth").exists()


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("latncy", "there is no command latncy: did you mean latency?"),
        ("latency 1b", "unexpected extra argument (1b)"),
        ("latency --batches 1,two", "--batches: '1,two' is not a list of integers"),
        ("latency --model 7b", "model='7b'"),
        ("latency --batches 0", "batches=0"),
        ("latency --busy -1", "busy=-1"),
        ("latency --batches 1,2 --context 8,8,8", "context=(8, 8, 8)"),
        ("latency --context 9000", "8192"),
        ("latency --stepz 4", "no such option '--stepz'"),
        ("prefill --vs exllama", "vs='exllama'"),
        ("prefill --vs transformers:/nowhere", "/nowhere"),
        ("offline --dtype int3", "dtype='int3'"),
        ("offline --shortest 9 --longest 8", "longest=8"),
        ("soak --minutes 0", "minutes=0"),
        ("linear --vs transformers", "leave out vs"),
    ],
)
def test_bad_arguments_are_named(line, named, bench, capsys):
    with pytest.raises(SystemExit) as ended:
        bench(line)
    assert ended.value.code == (
        2 if "there is no" in named or named.startswith(("unexpected", "no such", "--")) else 1
    )
    err = capsys.readouterr().err
    assert err.startswith("error: ") and named in err and err.count("\n") == 1


def test_demo_model_takes_no_unknown_flag(tmp_path):
    """demo_model refuses unknown flags.

    A past fault: a misspelled flag began 25 minutes of training, into the folder of the demo model.
    """
    done = subprocess.run(
        [sys.executable, str(REPO / "scripts" / "demo_model"), "--out", "made", "--stepz", "1"],
        env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: no such option '--stepz'\. .*'--steps'.*\n", done.stderr)
    assert not [*tmp_path.iterdir()]


def test_what_a_worker_measures():
    def row_of(measure: str, **changes: Any) -> dict:
        (row,) = worker.measure("ours", JOB | {"measure": measure} | changes)
        return row

    row = row_of("latency", dtype="int8")
    assert len(row["steps"]) == 3 and len(row["ids"]) == 5 and row["host"] > 0
    assert len(row_of("prefill")["prefills"]) == 2
    assert row_of("offline")["seconds"] > 0
    row = row_of("startup", dtype="bf16", folder=str(REPO / "checkpoints" / "demo"), batch=1)
    assert row["load"] > row["tokenizer"] > 0 and row["load"] > row["read"] > 0 < row["first"]
    assert row["imports"] == sum(row["import_of"].values()) and "torch" in row["import_of"]
    assert row["pack"] > 0


def test_rooflines_by_hand():
    """Rooflines equal those by hand.

    dim is 64, with 4 heads of 16, 2 of them key-value heads; the ffn is 2/3 of 256 = 170, rounded
    to 192.
    """
    args = ModelArgs(**SMALL)
    block = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 192  # wq, wk and wv, wo, w1 to w3
    assert cost.block_matrix_size(args) == block == 49152
    weights = 2 * (block + 2 * 64) + 64 + 512 * 64  # layers with their norms, last norm, lm_head
    cached = 2 * 2 * 2 * 16  # elements per token: layers, keys and values, heads, head size
    by_hand = 2 * (weights + 3 * 64 + (10 + 20 + 30) * cached)  # bf16; 3 embedding rows
    assert cost.decode_bytes(args, 2, [10, 20, 30]) == by_hand == 278528
    assert cost.prefill_flop(args, 10) == 2 * 10 * 2 * block + 2 * 512 * 64
    seen = 1 + 2 + 3  # keys visible to the tokens of a prompt of 3; as many values
    assert cost.attention_flop(args, 3) == 2 * 2 * 2 * 64 * seen  # multiply and add, layers, dim
    # one per row of each matrix, and of lm_head
    scales = 2 * (64 + 2 * 32 + 64 + 2 * 192 + 64) + 512
    matrices = 2 * block + 512 * 64
    smaller = by_hand - matrices + 4 * scales  # one byte per element instead of two
    assert cost.decode_bytes(args, 2, [10, 20, 30], quantize="int8") == smaller == 154624
    few, many = [10, 20, 30], [10] * 50  # reading takes 279 us, multiplying 13 ms
    assert cost.step_roofline(args, 2, few, 1e9, 1e12) == pytest.approx(278528e-9)
    seconds = 2 * 50 * (2 * block + 512 * 64) / 1e9
    assert cost.step_roofline(args, 2, many, 1e12, 1e9) == pytest.approx(seconds)
    flop = cost.prefill_flop(args, 15, 2)
    steps = [cost.decode_bytes(args, 2, [11]), cost.decode_bytes(args, 2, [12])]
    seconds = (flop + sum(steps)) / 1e9
    assert cost.offline_roofline(args, 2, [(10, 3), (5, 1)], 1e9, 1e9) == pytest.approx(seconds)
    # Meta's Llama 3.2 1B: 1.24 billion parameters in bf16.
    real = ModelArgs(**shapes.SHAPES["1b"])
    assert round(cost.decode_bytes(real, 2, []) / 1e9, 2) == 2.47


def test_random_weights_repeat_no_row_and_are_the_same_in_files(tmp_path):
    weights = shapes.random_model(SMALL, torch.bfloat16, "cpu").named_shards()
    folder = shapes.write_checkpoint(tmp_path / "meta", SMALL, torch.bfloat16)
    state = torch.load(folder / "consolidated.00.pth", weights_only=True)
    assert weights.keys() == state.keys()
    assert all(torch.equal(weights[name], state[name]) for name in weights)
    assert len(weights["output.weight"].unique(dim=0)) == 512
    with pytest.raises(ValueError, match="another shape"):
        shapes.write_checkpoint(folder, SMALL | {"dim": 32}, torch.bfloat16)


def test_table_is_aligned():
    columns = [("engine", "engine", ""), ("ms", "ms", ".1f")]
    rows: list[dict] = [{"engine": "ours", "ms": 1234.56}, {"engine": "x", "ms": None}]
    assert report.table(columns, rows).splitlines() == [
        "engine      ms", "ours    1234.6", "x            -",
    ]  # fmt: skip


def test_ranks_times_a_step_of_one_process_too(bench):
    """ranks also times a step of one process, without collectives, as the reference."""
    document = bench("ranks --model demo --batches 1,3 --tokens 5 --steps 2 --threads 1")
    assert [(row["path"], row["ranks"], row["batch"]) for row in document["rows"]] == [
        ("alone", 1, 1), ("alone", 1, 3),
    ]  # fmt: skip
    assert all(0 < row["collectives_ms"] < row["step_ms"] for row in document["rows"])


def test_layouts_of_two_machines_are_compared_with_one():
    """Each turn is compared with its own; of processor times, the least of the busiest counts."""

    def record(layout: str, speed: float, *busy_ms: float) -> dict[str, Any]:
        return {"layout": layout, "sequences": 16, "tokens_per_s": speed, "busy_ms": busy_ms}

    records = [record("one", 100, 10.0), record("PP2", 150, 6.0, 6.25)]
    records += [record("one", 80, 12.5), record("PP2", 160, 6.1, 6.5)]
    records += [record("one", 100, 10.5), record("PP2", 140, 7.0, 7.0)]
    wanted = {"wall": 1.5, "range": [1.4, 2.0], "processor": 1.6}
    assert stages.compared(records) == {"PP2": {"16": wanted}}
    halves = [record("one", 100, 10.0), record("halves", 160, 12.0, 12.5)]
    wanted = {"wall": 1.6, "range": [1.6, 1.6], "processor": 1.6}
    assert stages.compared(halves) == {"halves": {"16": wanted}}


def test_a_layout_stays_loaded_between_its_turns(tmp_path):
    """The ranks of a layout run each turn that they are asked for, and their end is reported."""
    folder = shapes.write_checkpoint(tmp_path / "model", SMALL, torch.bfloat16)
    case = stages.Case(str(folder), "one", max_sequences=2, num_tokens=3, quantize="", layers="")
    with stages.loaded([[]], [case]) as (ranks,):
        for count in (2, 1):
            record = ranks.run(count)
            assert (record["layout"], record["sequences"]) == ("one", count)
            assert record["tokens_per_s"] > 0 < min(record["busy_ms"])
        ranks.processes[0].kill()
        with pytest.raises(RuntimeError, match="a rank of one ended with -9"):
            ranks.run(1)


@pytest.mark.parametrize("has_bf16", [True, False])
def test_linear_compares_every_kernel(bench, monkeypatch, has_bf16):
    """linear compares every kernel of the machine for the same M, N and K.

    Times are not asserted. On CPUs with AVX2 alone oneDNN has no products in bf16.
    """
    if has_bf16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN takes no bf16 on this CPU: its product would be compared with ours")
    monkeypatch.setattr("bench.linear._has_onednn_bf16", lambda: has_bf16)
    monkeypatch.setattr("bench.linear._COLD_BYTES", 1)
    document = bench("linear --model demo --rows 1,3 --repeats 1 --threads 1")
    rows = [row for row in document["rows"] if row["weight"] == "w2"]
    assert [(row["kernel"], row["m"]) for row in rows] == [
        (k, m) for m in (1, 3) for k in kernels()
    ]
    assert {(row["n"], row["k"]) for row in rows} == {(256, 704)}
    x = torch.randn(3, 64).bfloat16()
    assert {make(3, 96, 64)(x).shape for make in kernels().values()} == {(3, 96)}
    assert ("oneDNN packed bf16" in kernels()) == has_bf16


def test_images_times_the_encoder_and_the_first_token(bench, monkeypatch):
    """The encoder here is a small one; the times are not asserted. A row is printed when made."""
    small: dict[str, Any] = {
        "chunk_size": 28, "width": 32, "n_heads": 4, "ffn_dim": 64, "n_layers": 2,
        "n_global_layers": 1, "features": (0,),
    }  # fmt: skip
    monkeypatch.setattr("bench.images.VisionArgs", functools.partial(VisionArgs, **small))
    progress = io.StringIO()
    monkeypatch.setattr(sys, "stderr", progress)
    document = bench("images --model demo --tiles 1,4 --layers 2 --threads 1")
    rows = document["rows"]
    assert [(row["engine"], row["tiles"], row["to_ours"]) for row in rows] == [
        ("ours", 1, 1.0), ("ours", 4, 1.0),
    ]  # fmt: skip
    assert re.findall("tiles (.): encode", progress.getvalue()) == ["1", "4"]
    assert all(0 < row["encode_s"] < row["first_s"] for row in rows)


def test_quality_compares_distributions():
    """quality agrees with torch's loss and divergence, and with zero for equal models."""
    random = torch.Generator().manual_seed(1)
    expected, found = (torch.randn(2, 5, 7, generator=random).log_softmax(-1) for _ in range(2))
    ids = torch.randint(7, (2, 5), generator=random)
    row = compare(ids, expected, found)
    told = F.cross_entropy(found[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert row["perplexity"] == pytest.approx(told.exp().item())
    divergence = F.kl_div(found, expected, log_target=True, reduction="sum")
    assert row["kl"] == pytest.approx(divergence.item() / 10)
    before = F.cross_entropy(expected[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert row["to_first"] == pytest.approx((told - before).exp().item() - 1, abs=1e-6)
    assert compare(ids, found, found) | {"perplexity": 0} == {
        "perplexity": 0, "to_first": 0, "to_first_error": 0, "kl": 0, "kl_error": 0, "same_top": 1,
    }  # fmt: skip


@pytest.mark.skipif(not KERNELS_RUN, reason="needs x86-64 with AVX2, and g++")
def test_quality_of_a_trained_model(bench):
    """The quality of a trained model stays within bounds.

    Eight and four bits may cost the demo model what was measured, 0.0005, 0.004 and 0.02; an 8-bit
    cache 0.0003.
    """
    folder = Path(run.__file__).parents[2] / "checkpoints" / "demo"
    document = bench(f"quality --model {folder} --window 65 --windows 2 --threads 1")
    rows = {row["weights"]: row for row in document["rows"]}
    assert list(rows) == ["bf16", "int8", "fp8", "int4", "kv_int8"] and rows["bf16"]["kl"] == 0
    sizes = {"int8": 4573696, "fp8": 4573696, "int4": 3324416, "kv_int8": 8000000}
    for (name, size), most in zip(sizes.items(), (0.001, 0.008, 0.04, 0.0008), strict=True):
        assert most / 8 < rows[name]["kl"] < most and rows[name]["gb"] == size / 1e9


@pytest.mark.skipif(not KERNELS_RUN, reason="needs x86-64 with AVX2, and g++")
def test_quality_measures_activations(bench):
    """With the same weights, activations in int8 cost the demo model little, per token more."""
    folder = Path(run.__file__).parents[2] / "checkpoints" / "demo"
    command = f"quality --model {folder} --window 65 --windows 2 --threads 1"
    with without_amx():
        weights, groups, token = bench(
            f"{command} --reference int8 --formats int8+int8,int8+int8_token"
        )["rows"]
    assert weights["weights"] == "int8" and weights["kl"] == 0 < groups["kl"] < token["kl"] < 0.004
    assert groups["kl"] < 0.002 and groups["gb"] == weights["gb"]


@pytest.mark.skipif(not KERNELS_RUN, reason="needs x86-64 with AVX2, and g++")
def test_quality_of_a_gguf_file_is_of_its_activations(bench, tmp_path):
    """The file's default, rounded activations, is not what "auto" measures."""
    path = tmp_path / "model.gguf"
    write_byte_tokenizer(tmp_path)
    write_gguf(path, PARAMS, "Q8_0", tokenizer=tmp_path / "tokenizer.model")
    with without_amx():
        auto, rounded = bench(
            f"quality --model {path} --window 65 --windows 2 --threads 1 --reference auto "
            "--formats auto+int8_lm_head"
        )["rows"]
    assert auto["weights"] == "auto" and auto["kl"] == 0 < rounded["kl"] < 0.01


@pytest.mark.skipif(not KERNELS_RUN, reason="needs x86-64 with AVX2, and g++")
def test_speculate_compares_runs_with_and_without_guesses(bench):
    folder = Path(run.__file__).parents[2] / "checkpoints" / "demo"
    document = bench(f"speculate --model {folder} --batches 2 --steps 24 --repeats 1 --threads 1")
    rows = {row["kind"]: row for row in document["rows"]}
    assert list(rows) == ["edit", "quote", "chat", "json", "random"]
    assert all(row["tokens"] <= 48 and row["gain"] > 0 for row in rows.values())
    assert rows["json"]["steps"] < rows["json"]["plain_steps"] == 24 == rows["chat"]["plain_steps"]
    assert all(row["accepted"] <= row["drafted"] for row in rows.values())
    document = bench("speculate --model demo --texts random --batches 1,2 --steps 8 --repeats 1")
    assert [(row["kind"], row["tokens"]) for row in document["rows"]] == [
        ("random", 8), ("random", 16),
    ]  # fmt: skip


def test_vllm_preloads_what_its_environment_has(tmp_path):
    assert "LD_PRELOAD" not in vllm_environment(tmp_path)
    (tmp_path / "lib").mkdir()
    for name in ("libiomp5.so", "libtcmalloc_minimal.so.4"):
        (tmp_path / "lib" / name).touch()
    preloaded = vllm_environment(tmp_path)["LD_PRELOAD"]
    assert preloaded == f"{tmp_path}/lib/libtcmalloc_minimal.so.4:{tmp_path}/lib/libiomp5.so"


def test_gguf_is_read_by_others(tmp_path):
    """Other libraries read our GGUF.

    transformers, which undoes GGUF's order of wq and wk, finds the weights of our converter.
    """
    pytest.importorskip("gguf", reason="gguf is not installed")
    from transformers import LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from bench.gguf_file import write_gguf

    meta = shapes.write_checkpoint(tmp_path / "meta", SMALL, torch.float32)
    folders = shapes.layouts(find(meta), tmp_path)
    write_gguf(find(meta), tmp_path / "model.gguf", torch.float32)
    model = LlamaForCausalLM.from_pretrained(folders["hf"], dtype="float32")
    found = load_gguf_checkpoint(
        str(tmp_path / "model.gguf"), return_tensors=True, model_to_load=model
    )
    wanted = model.state_dict()
    assert found["tensors"].keys() == wanted.keys()
    assert all(torch.equal(found["tensors"][name], wanted[name]) for name in wanted)
    assert found["config"]["num_key_value_heads"] == 2 and found["config"]["vocab_size"] == 512
    assert found["config"]["intermediate_size"] == 192 and found["config"]["hidden_size"] == 64


def test_gguf_of_a_tied_model_with_scaled_rope(tmp_path):
    """The GGUF of a tied model with scaled RoPE is right for llama.cpp's own reader.

    It has no output matrix, since that is the embedding, and has RoPE's divisors.
    """
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    from bench.gguf_file import write_gguf

    params = SMALL | {"use_scaled_rope": True, "tied_output": True, "rope_theta": 10000.0}
    meta = shapes.write_checkpoint(tmp_path / "meta", params, torch.bfloat16)
    write_gguf(find(meta), tmp_path / "model.gguf", torch.bfloat16)
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    state = torch.load(meta / "consolidated.00.pth", weights_only=True)
    assert len(tensors) == len(state) and "output.weight" not in tensors
    wk, norm = tensors["blk.1.attn_k.weight"], tensors["blk.0.ffn_norm.weight"]
    assert (wk.tensor_type.name, norm.tensor_type.name) == ("BF16", "F32")
    packed = state["layers.1.attention.wk.weight"].view(torch.uint8)
    assert torch.equal(torch.from_numpy(wk.data.copy()), packed)
    # Of 8 frequencies, fast ones (wavelength under 2048) stay, and slow ones are divided by 8.
    divisors = tensors["rope_freqs.weight"].data
    assert divisors.shape == (8,) and divisors[0] == 1 and divisors[-1] == pytest.approx(8)


def test_serve_asks_servers_and_the_engine(bench):
    """serve sends requests to servers and to the engine.

    Each request is answered completely, by clients that wait for one another and by random
    arrivals; a running server can be measured as well.
    """
    pytest.importorskip("fastapi")
    line = "serve --model demo --dtype fp32 --requests 5 --steps 6 --context 9 --clients 2"
    rows = bench(f"{line} --rates 50 --threads 1")["rows"]
    assert [(r["engine"], r.get("clients"), r.get("rate")) for r in rows] == [
        ("in process", 2, None), ("ours", 2, None), ("ours", None, 50.0)
    ]  # fmt: skip
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(30 / row["seconds"])
        if row["engine"] == "ours":
            assert 0 < row["first_p50"] <= row["first_p99"]
            assert 0 <= row["between_p50"] <= row["between_p99"]
    assert rows[1]["over_engine"] == pytest.approx(rows[1]["seconds"] / rows[0]["seconds"] - 1)


def test_streams_measures_the_server(bench):
    pytest.importorskip("fastapi")
    pytest.importorskip("triton")
    words = "streams --clients 2 --steps 3 --rounds 1 --step_ms 5 --api_processes 0,1"
    row, split = bench(words)["rows"]
    assert row["tree"] == "this" and row["to_this"] == 1 and split["tree"] == "this +1"
    assert 0 < row["engine"] < row["us"] and 0 < row["loop"] < row["us"] and row["api"] == 0
    assert 0 < row["first_p50"] <= row["first_p99"] and row["between_p50"] > 0
    assert 0 < split["engine"] < split["us"] and 0 < split["api"] < split["us"]


SOAK = "soak --minutes 0.01 --sample_s 0.3 --threads 1"


def test_soak_passes(bench):
    document = bench(f"{SOAK} --max_batch_size 8 --growth_mb 64")
    last = document["rows"][-1]
    assert last["requests"] > last["aborted"] and last["tokens"] > 0 and not document["failed"]
    assert last["pages"] == 0 and last["private_mb"] > 1


def test_soak_sees_leaks(bench, monkeypatch, capsys):
    """soak detects leaks: each sample leaves 128 MB behind, and the first one loses pages."""
    kept: list[bytes] = []
    sample, release = soak.Traffic.sample, PagePool.release

    def keep(self: soak.Traffic, until: float) -> dict[str, Any]:
        kept.append(b"x" * 2**27)
        return sample(self, until)

    def lose(self: PagePool, pages: list[int]) -> None:
        release(self, pages if len(kept) > 1 else pages[1:])

    monkeypatch.setattr(soak.Traffic, "sample", keep)
    monkeypatch.setattr(PagePool, "release", lose)
    with pytest.raises(SystemExit) as ended:
        bench(SOAK)
    assert ended.value.code == 1
    failed = json.loads(capsys.readouterr().out.splitlines()[-1])["failed"]
    assert failed.keys() == {"memory", "pages"}


def test_the_page_of_the_kernels_has_what_a_step_should_take():
    """The page of the kernels has the expected time of a step.

    Launches are counted: one more kernel in a layer is 32 more launches.
    """
    pytest.importorskip("triton")
    page = (REPO / "llama/kernels/cuda/README.md").read_text()
    assert "\n".join(expected.table()) in page
