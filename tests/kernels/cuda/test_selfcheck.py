"""The self-check and its cache, with real children: some pass, some are wrong, hang or die."""

import ast
import ctypes
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton's kernels need Triton")

from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from helpers import warm
from helpers.kernels import KERNELS_RUN
from helpers.launch import PROGRAMS, environment
from llama.gpu import cases, selfcheck
from llama.gpu import selfcheck_cache as cached
from llama.gpu.cases import Case, Cases, LargeCache
from llama.gpu.job import JOB, Job
from llama.gpu.program import PARENT, run
from llama.gpu.selfcheck import check_kernel
from llama.kernels.cpu import native
from llama.kernels.cuda import attention, quantized
from llama.kernels.cuda import linear as products
from llama.kernels.cuda.launch import Tile, launcher
from llama.kernels.cuda.table import NAMES, table
from llama.ops import scaled
from llama.ops.kernels import NO_KERNELS, Kernels
from llama.ops.sample import choose_ids
from llama.weights import choice
from llama.weights.groups import GroupedWeight, QuantKey
from llama.weights.plain import PlainWeight
from llama.weights.weight import Weight

CPU = torch.device("cpu")
TILE = [16, 32, 4, 3, True]

# A child that finds that all is well, or reports its own list of faults, and counts its runs.
QUICK_CHILD = """
import json, sys, time
with open({log!r}, "a") as log:
    log.write("x")
time.sleep({pause})
for name in json.loads(sys.argv[1])["names"]:
    reason = {reasons!r}.get(name)
    tiles = [[[0, 64, 32, 1], {tile}]] if name == "linear" else []
    is_final = reason != "out of memory"
    print(json.dumps({{"reasons": {{name: reason}}, "tiles": tiles, "is_final": is_final}}))
    if reason:
        break
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """A separate cache; the CPU kernels are loaded first, so that no test compiles them there."""
    native.kernels()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "llama"


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """A function quick(pause=0, reasons={}) that installs a program as the check.

    It returns a function that counts how many children have run.
    """
    log, program = tmp_path / "log", tmp_path / "child.py"

    def install(pause: float = 0, reasons: dict[str, str] | None = None):
        values = {"log": str(log), "pause": pause, "reasons": reasons or {}, "tile": TILE}
        program.write_text(QUICK_CHILD.format(**values))
        return lambda: len(log.read_text()) if log.exists() else 0

    monkeypatch.setattr(cached, "load_or_check", partial(LOAD_OR_CHECK, program=[str(program)]))
    return install


LOAD_OR_CHECK = cached.load_or_check


def job(*names: str) -> Job:
    return Job(
        "cpu", "fp16", names or ("attention", "sample", "linear"), dim=32, n_heads=4, n_kv_heads=2,
        head_dim=16, ffn_dim=64, vocab_size=60, vocab_rows=60, page_size=16,
        lengths=(1, 17),
    )  # fmt: skip


def test_a_job_is_the_same_after_its_way_to_a_child():
    assert JOB.validate_json(JOB.dump_json(job())) == job()


def test_the_program_runs_whatever_the_folder(tmp_path, monkeypatch):
    """The check's program runs from any folder, in Triton's interpreter.

    A folder named llama, as in Meta's clone, is not imported; and there is no g++, since the check
    does not need the CPU kernels.
    """
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "__init__.py").write_text("raise SystemExit('the wrong package')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert cached.load_or_check(job("silu_mul")).reasons == {"silu_mul": None}


KERNELS = {  # the kernels that each self-check must launch
    "attention": {"decode_kernel", "merge_kernel", "prefill_kernel"},
    "add_norm": {"norm_kernel"},
    "rope_and_store": {"rope_kernel"},
    "silu_mul": {"silu_mul_kernel"},
    "linear": {"product_kernel"},
    "round_rows": {"round_rows_kernel"},
}


@pytest.mark.parametrize(
    "name, kv_format",
    [*((name, None) for name in KERNELS), ("attention", "int8"), ("rope_and_store", "int8")],
)
def test_each_kernel_runs_in_its_check_and_passes(launches, monkeypatch, name, kv_format):
    """Each kernel runs in its own check and passes.

    In the interpreter the tiles of a product are far larger than these sizes, so two small ones are
    used.
    """
    tiles = [Tile(16, 32, 4, 3, True), Tile(8, 32, 4, 2, False)]
    monkeypatch.setattr(products, "candidates", lambda n, k, m: tiles[: 2 if m == 1 else 1])
    monkeypatch.setattr(attention, "_PROGRAMS", 8)
    assert check_kernel(replace(job(name), kv_format=kv_format), name) == []
    assert set(launches) == KERNELS[name]


def test_the_head_is_checked_with_the_type_that_it_gives(monkeypatch):
    """lm_head is checked with its output dtype.

    Its logits are float32, which is another kernel to a compiler than one with bf16 output.
    """
    asked = set()

    def run(x: Tensor, weight: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
        asked.add((len(weight), dtype))
        return (x @ weight.T).to(dtype)

    monkeypatch.setattr(products, "run", run)
    monkeypatch.setattr(products, "candidates", lambda n, k, m: [Tile(16, 32, 4, 3, True)])
    check_kernel(job("linear"), "linear")
    assert (60, torch.float32) in asked and {d for n, d in asked if n != 60} == {torch.float16}


@pytest.mark.skipif(not KERNELS_RUN, reason="the CPU's kernels pack the weights")
@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("format", ["int4", QuantKey(3, -8, 64, 1, 1)], ids=["int4", "of a file"])
def test_quantized_products_are_checked(launches, monkeypatch, fault, format):
    """Quantized products are checked, by tiles and by dequantization.

    The interpreter has no bf16, so the model is fp16.
    """

    def packed(plain: Tensor, name: str, device: torch.device) -> Weight:
        return choice.on_gpu(plain.bfloat16(), name, device)

    monkeypatch.setattr(cases, "packed", packed)
    monkeypatch.setattr(quantized, "BUCKETS", (2, 32))
    monkeypatch.setattr(quantized, "candidates", lambda *_: [Tile(32, 128, 4, 2, True)])
    sizes: dict[str, Any] = {
        "dim": 128,
        "head_dim": 32,
        "ffn_dim": 128,
        "vocab_rows": 32,
        "vocab_size": 32,
    }
    asked = replace(job("linear"), formats=(format,), **sizes)
    assert JOB.validate_json(JOB.dump_json(asked)) == asked
    if fault:
        monkeypatch.setattr(quantized, "plain", lambda w, i, n, x: torch.ones(n - i, 128).to(x))
        with pytest.raises(ArithmeticError, match="2 rows times 32 x 128 of kind 3 with None"):
            check_kernel(asked, "linear")
    else:
        assert check_kernel(asked, "linear") == []
        assert set(launches) == {"few_rows_kernel", "many_rows_kernel", "plain_kernel"}


@pytest.mark.parametrize("fault", [False, True])
def test_products_of_rows_in_e4m3_are_checked(launches, monkeypatch, fault):
    """Where activations are rounded to e4m3, products of many rows are compared as well."""
    monkeypatch.setattr(cases, "packed", lambda x, name, on: choice.on_gpu(x.bfloat16(), name, on))
    monkeypatch.setattr(Cases, "products", lambda self: iter([]))
    sizes: dict[str, Any] = {
        "dim": 128,
        "head_dim": 32,
        "ffn_dim": 128,
        "vocab_rows": 32,
        "vocab_size": 32,
    }
    asked = replace(job("linear"), activations="fp8", **sizes)
    if fault:
        multiply = scaled.multiply
        monkeypatch.setattr(scaled, "multiply", lambda x, w, t: multiply(x, w, t) * 1.05)
        with pytest.raises(ArithmeticError, match="300 rows in e4m3 times 32 x 128: result 0 is"):
            check_kernel(asked, "linear")
    else:
        assert check_kernel(asked, "linear") == []
        assert set(launches) == {"codes_kernel"}


def test_decode_is_checked_with_each_number_of_parts(launches, monkeypatch):
    """Decode is checked with each number of splits.

    Triton caches the compiled variants, so that no step waits for a compiler.
    """
    numbers, num_splits = [], attention.num_splits

    def noted(*sizes: int) -> int:
        numbers.append(num_splits(*sizes))
        return numbers[-1]

    monkeypatch.setattr(attention, "_PROGRAMS", 8)
    monkeypatch.setattr(attention, "num_splits", noted)
    check_kernel(job("attention"), "attention")
    assert {num_splits(n, 2) for n in range(1, 65)} == set(numbers) == {4, 2, 1}


def test_sampling_is_checked_for_many_rows_at_once(monkeypatch):
    """Sampling is checked for many rows at once.

    The interpreted kernels are slow and tested elsewhere, so PyTorch replaces them here.
    """
    asked = []

    def choose(logits, rows, *seeds, kernels):
        asked.append((len(rows), len(set(rows)), kernels.names))
        return choose_ids(logits, rows, *seeds)

    monkeypatch.setattr(cases, "choose_ids", choose)
    check_kernel(job("sample"), "sample")
    assert (16, 14, {"sample"}) in asked and (16, 14, frozenset()) in asked
    monkeypatch.setattr(
        cases,
        "choose_ids",
        lambda *x, kernels: choose(*x, kernels=kernels) + len(kernels.names),
    )
    with pytest.raises(ArithmeticError, match="1 rows: 1 of 1 ids differ"):
        check_kernel(job("sample"), "sample")


def test_a_rank_s_share_of_the_vocabulary_is_sampled_in_the_check(monkeypatch):
    """The top tokens of a rank's share are checked: its blocks are another kernel to a compiler."""
    asked = set()

    def top_tokens(logits: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor]:
        asked.add((logits.shape[1], bool(kernels.names)))
        return op_top_tokens(logits)

    op_top_tokens = cases.top_tokens
    monkeypatch.setattr(cases, "choose_ids", lambda *x, kernels: choose_ids(*x))
    monkeypatch.setattr(cases, "top_tokens", top_tokens)
    check_kernel(job("sample"), "sample")
    assert not asked
    check_kernel(replace(job("sample"), vocab_rows=20), "sample")
    assert asked == {(20, True), (20, False)}


def test_a_large_cache_is_read_and_written_where_it_should_be(monkeypatch):
    """A large cache is read and written at the right addresses.

    The check on a GPU uses offsets around 2**31: the same rows of a small cache and far inside a
    large one.
    """

    def large_caches(self, small):
        large = small.new_full((2, 40, *small.shape[2:]), float("nan"))
        large[:, -small.shape[1] :] = small
        yield LargeCache("large", large, 40 - small.shape[1])

    monkeypatch.setattr(Cases, "_large_caches", large_caches)
    monkeypatch.setattr(attention, "_PROGRAMS", 2)
    for name in ("attention", "rope_and_store"):
        assert any(case.small for case in getattr(Cases(job(name)), name)())
        check_kernel(job(name), name)
    found = cases.rope_and_store

    def elsewhere(qkv, freqs, cache, slots, kernels):
        return found(qkv, freqs, cache, slots - 16 * (cache.shape[1] == 40), kernels)

    monkeypatch.setattr(cases, "rope_and_store", elsewhere)
    with pytest.raises(ArithmeticError, match="large: result 1 is off by"):
        check_kernel(job("rope_and_store"), "rope_and_store")


def test_the_fastest_tile_is_taken_where_it_beats_the_library(monkeypatch):
    tiles = [Tile(16, 32, 4, 3, True), Tile(32, 32, 4, 3, True)]
    times = iter([1.0, 0.9, 0.8, 1.0, 0.98, 0.99, 1.0, 0.5, 0.9])  # the library is first each time

    monkeypatch.setattr(selfcheck, "_COLD_BYTES", 0)
    monkeypatch.setattr("triton.testing.do_bench_cudagraph", lambda *_, **__: next(times))
    cases = Cases(job("linear"))
    weight = PlainWeight.pack(cases.normal(64, 32))
    found = [selfcheck.fastest_tile(cases, weight, (0, 64, 32, 2), tiles) for _ in range(3)]
    assert found == [tiles[1], None, tiles[0]]


def test_a_small_weight_is_timed_with_few_copies(monkeypatch):
    """A weight of 4 KiB is timed with 65 copies, not with the 65,536 that fill a GPU's cache."""
    launched: list[int] = []

    def seconds(call: Callable[[], None], **_: Any) -> float:
        launched.clear()
        call()
        return 1.0

    class Counted(PlainWeight):
        def linear(self, x: Tensor, *_: Any) -> Tensor:
            launched.append(1)
            return x

    monkeypatch.setattr("triton.testing.do_bench_cudagraph", seconds)
    cases = Cases(job("linear"))
    weight = Counted.pack(cases.normal(64, 32))
    assert selfcheck.fastest_tile(cases, weight, (0, 64, 32, 2), [Tile(16, 32, 4, 3)]) is None
    assert len(launched) == 65


@pytest.mark.skipif(not KERNELS_RUN, reason="the CPU's kernels pack the weights")
@pytest.mark.parametrize("format", ["int8", "fp8", "int4", QuantKey(1, 0, 32, 1, 1)])
def test_few_rows_of_a_quantized_weight_are_packed(monkeypatch, format):
    """Few rows are packed on the CPU and repeated; all of the 8B's would take it minutes."""
    packed_rows = set()

    def counted(matrix: Any, *args: Any, **options: Any) -> Weight:
        packed_rows.add(matrix.shape[0])
        return packed(matrix, *args, **options)

    packed = choice.packed
    monkeypatch.setattr(cases, "_PACKED_ROWS", 96)
    monkeypatch.setattr(cases, "packed", counted)
    monkeypatch.setattr(choice, "packed", counted)
    asked = Cases(replace(job("linear"), dtype="bf16"))
    weight = asked._weight(format, 32 * 7, 256)
    part = asked._weight(format, 100, 256)
    assert isinstance(part, GroupedWeight) and part.shape == (100, 256) and part.is_whole()
    assert weight.shape == (224, 256) and isinstance(weight, GroupedWeight)
    assert packed_rows == {96} and weight.is_whole()
    rows = weight.exact()
    assert torch.equal(rows[96:192], rows[:96]) and torch.equal(rows[192:], rows[:32])
    assert not torch.equal(rows[32:64], rows[:32])


def test_a_tile_that_does_not_fit_the_gpu_is_left_out(monkeypatch):
    """A tile that does not fit the GPU is left out, and the kernel is used with the others."""
    tiles = [Tile(16, 32, 4, 3, True), Tile(32, 32, 4, 9, True)]

    def run(x: Tensor, weight: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
        if tile == tiles[1]:
            raise OutOfResources(73_728, 65_536, "shared memory")
        return (x @ weight.T).to(dtype)

    monkeypatch.setattr(products, "run", launcher(run))
    monkeypatch.setattr(products, "candidates", lambda n, k, m: tiles)
    assert check_kernel(job("linear"), "linear") == []
    monkeypatch.setattr(selfcheck, "_COLD_BYTES", 0)

    def seconds(call: Callable[[], None], **_: Any) -> float:
        call()
        return next(times)

    times = iter([1.0, 0.8])  # the library, and the first tile
    monkeypatch.setattr("triton.testing.do_bench_cudagraph", seconds)
    cases = Cases(job("linear"))
    weight = PlainWeight.pack(cases.normal(64, 32))
    assert selfcheck.fastest_tile(cases, weight, (0, 64, 32, 2), tiles) == tiles[0]


@pytest.mark.parametrize("hip", [None, "7.0"])
def test_amd_s_gpus_are_not_taken_for_hopper(monkeypatch, hip):
    """AMD's GPUs have capabilities 9 and 10 as well, and too little memory for Hopper's tiles."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4 if hip else 0))
    monkeypatch.setattr(torch.version, "hip", hip)
    attention.has_wide_tiles.cache_clear()
    assert attention.has_wide_tiles(torch.device("cuda", 0)) == (hip is None)
    attention.has_wide_tiles.cache_clear()


@pytest.mark.parametrize("fault", [None, "wrong", "unwritten", "raises"])
def test_a_wrong_kernel_is_told_from_a_right_one(fault):
    """The check tells a wrong kernel from a right one.

    A kernel doubles its values, in one case wrongly; or it leaves out a row, or raises an error.
    """

    def double(x: Tensor, kernels: Kernels = NO_KERNELS) -> Tensor:
        if not kernels.names:
            return 2 * x
        if fault == "raises":
            raise RuntimeError("an illegal access")
        out, rows = torch.empty_like(x), len(x) - (fault == "unwritten")
        out[:rows] = 2 * x[:rows]
        out[0, 0] += fault == "wrong"
        return out

    case = Case("three rows", double, (torch.randn(3, 8, dtype=torch.float16),))
    found = partial(selfcheck._check_case, case, table(frozenset({"silu_mul"})), torch.float16)
    if fault is None:
        return found()
    said = {"wrong": "result 0 is off by 0.", "unwritten": "result 0 is off by nan"}
    with pytest.raises((ArithmeticError, RuntimeError), match=said.get(fault, "an illegal access")):
        found()


def test_the_program_says_what_failed_and_where(monkeypatch, capsys):
    def cases(self):
        yield Case("three rows", lambda x, kernels: x if kernels.names else 2 * x, (torch.ones(2),))

    monkeypatch.setattr(Cases, "silu_mul", cases)
    asked = job("sample", "silu_mul")
    monkeypatch.setattr(Cases, "sample", lambda self: iter([]))
    assert run(JOB.dump_json(asked).decode(), check_kernel) == 0
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"reasons": {"sample": None}, "tiles": [], "is_final": True}
    assert last["reasons"]["silu_mul"].startswith("three rows: result 0 is off by 0.5 where")


def failing(error: Exception) -> Callable[[Job, str], list]:
    def check(job: Job, name: str) -> list:
        raise error

    return check


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (ArithmeticError("off by 1"), True),
        (CompilationError("x = 1", ast.parse("x = 1").body[0], "not for this GPU"), True),
        (OutOfResources(99, 64, "shared memory"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), False),
        (PTXASError("no space left on device"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_what_is_a_kernel_s_fault_is_final(capsys, error, is_final):
    """Only faults of the kernel are final; those of the machine may have gone next time."""
    assert run(JOB.dump_json(job("sample", "linear")).decode(), failing(error)) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert line["is_final"] == is_final and [*line["reasons"]] == ["sample"]


def test_a_machine_that_cannot_compile_is_checked_again(tmp_path, cache, monkeypatch):
    """Without Python.h one child says so for all kernels, and nothing is stored.

    A past fault: each kernel failed in a child of its own, "CalledProcessError" was stored as final
    for each, and installing Python.h did not cure it.
    """
    log, program = tmp_path / "log", tmp_path / "child.py"
    program.write_text(f"""
import subprocess, sys
from llama.gpu import program
def check(job, name):
    open({str(log)!r}, "a").write("x")
    print("main.c:2:10: fatal error: Python.h: No such file", file=sys.stderr, flush=True)
    print("compilation terminated.", file=sys.stderr, flush=True)
    raise subprocess.CalledProcessError(1, ["gcc", "main.c"])
sys.exit(program.run(sys.argv[1], check))
""")
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)
    wanted = "Triton's C compiler failed: main.c:2:10: fatal error: Python.h: No such file"
    for _ in range(2):
        result = cached.load_or_check(job(), [str(program)])
        assert result.reasons == dict.fromkeys(job().names, wanted) and not result.is_final
    assert log.read_text() == "xx" and not list(cache.glob("gpu-*.json"))


def test_a_full_disk_is_the_fault_of_the_machine(capsys):
    @launcher
    def launch() -> None:
        raise OSError("No space left on device")

    def check(job: Job, name: str) -> list:
        launch()
        return []

    run(JOB.dump_json(job("sample", "linear")).decode(), check)
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert not line["is_final"] and [*line["reasons"]] == ["sample", "linear"]


ORPHAN = """
import os, time
from llama.gpu import program
end, written = os.pipe()
if not os.fork():  # what asked for the check
    os.environ[program.PARENT] = str(os.getpid())
    is_ready, ready = os.pipe()
    if not os.fork():  # the check, which hangs
        while {early} and os.getppid() == int(os.environ[program.PARENT]):
            time.sleep(0.01)
        program.end_with_parent()
        os.write(ready, b"x")
        time.sleep(50)
    if not {early}:
        os.read(is_ready, 1)
    os._exit(0)
os.close(written)
os.read(end, 1)  # until the last process that could write has ended
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl(2)")
@pytest.mark.parametrize("early", [False, True])
def test_a_check_ends_with_the_process_that_asked_for_it(tmp_path, early):
    """A check ends with the process that started it; one that hangs would keep the GPU."""
    program = tmp_path / "program.py"
    program.write_text(ORPHAN.format(early=early))
    assert warm.run([sys.executable, str(program)], timeout=30).returncode == 0


def test_a_child_knows_who_asked_for_it(tmp_path):
    program = tmp_path / "child.py"
    code = f"import os, sys; sys.exit(os.environ[{PARENT!r}] + f' {{os.getppid()}}')"
    program.write_text(code)
    (said,) = {*cached.load_or_check(job(), [str(program)]).reasons.values()}
    assert said == f"the check ended with exit code 1: {os.getpid()} {os.getpid()}"


def test_graphs_are_checked_where_there_is_no_triton(monkeypatch, tmp_path):
    monkeypatch.setattr(cached, "_triton", lambda: None)
    assert cached.unsupported_reason(CPU) == "Triton is not installed"
    program = tmp_path / "child.py"
    program.write_text("""print('{"reasons": {"graph": null}}')""")
    assert cached.load_or_check(job("graph"), [str(program)]).passed == ["graph"]


def test_the_interpreter_is_never_taken_for_a_gpu(monkeypatch):
    """The interpreter is never taken for a GPU.

    It would pass for kernels, copies to the host inside a graph, and would be cached as the GPU's
    result.
    """
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "TRITON_INTERPRET" in str(cached.unsupported_reason(torch.device("cuda", 0)))
    assert cached.unsupported_reason(CPU) is None
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert cached.unsupported_reason(torch.device("cuda", 0)) is None


DYING_CHILD = """
import json, os, sys, time
first, *others = json.loads(sys.argv[1])["names"]
for name in (first, *others):
    if name == "rope_and_store":
        os.abort()
    if name == "silu_mul":
        print('{"reasons', flush=True)
        time.sleep(600)
    is_wrong = name == "add_norm" or name == "sample" != first  # another has broken that
    reasons = {name: "off by 1" if is_wrong else None}
    print(json.dumps({"reasons": reasons, "tiles": [], "is_final": True}), flush=True)
    if is_wrong:
        break
"""


def test_what_is_wrong_dies_or_hangs_is_out_and_the_rest_in(tmp_path, monkeypatch):
    """A kernel that is wrong, dies or hangs is excluded, and the rest are used.

    A kernel that kills a child affects no other: a new child checks the remaining ones, and checks
    again a kernel that failed after others had run in its process.
    """
    monkeypatch.setattr(cached, "CHILD_S", 4.0)
    program = tmp_path / "child.py"
    program.write_text(DYING_CHILD)
    names = ("attention", "add_norm", "rope_and_store", "linear", "silu_mul", "sample")
    result = cached.load_or_check(job(*names), [str(program)])
    assert result.passed == ["attention", "linear", "sample"] and result.is_final
    assert result.failed == {
        "add_norm": "off by 1",
        "rope_and_store": "the check was ended by SIGABRT",
        "silu_mul": "the check did not end within 4 s",
    }
    kernels = result.kernels("fp16", names)
    assert kernels.names == {"attention", "linear", "sample"}
    assert kernels.functions.keys() == table(kernels.names).functions.keys()


def test_a_check_ends_before_those_who_wait_for_it_give_up(tmp_path, cache, monkeypatch):
    """A check ends before the processes that wait for it give up.

    Whatever hangs, kernels that it has no time for are left to PyTorch and checked again later.
    """
    assert cached.LIMIT_S + 10 < 600 and cached.CHILD_S < cached.LIMIT_S
    monkeypatch.setattr(cached, "CHILD_S", 3.0)
    monkeypatch.setattr(cached, "LIMIT_S", 5.5)
    program = tmp_path / "child.py"
    program.write_text("import time; time.sleep(600)")
    began = time.monotonic()
    result = cached.load_or_check(job(), [str(program)])
    assert time.monotonic() - began < 60
    first, second, third = result.failed.values()
    assert first == "the check did not end within 3 s"
    assert re.search(r"did not end within [0-2](\.\d+)? s", second)
    assert third == "there was no time left to check it"
    assert not result.is_final and not list(cache.glob("gpu-*.json"))


def test_a_child_that_cannot_run_is_not_run_again_for_each_kernel(tmp_path):
    program, log = tmp_path / "child.py", tmp_path / "log"
    program.write_text(f"import sys; open({str(log)!r}, 'a').write('x'); sys.exit('no torch')")
    reasons = cached.load_or_check(job(), [str(program)]).reasons
    assert set(reasons.values()) == {"the check ended with exit code 1: no torch"}
    assert log.read_text() == "x"
    # the error is not the kernels' fault, so nothing was cached
    cached.load_or_check(job(), [str(program)])
    assert log.read_text() == "xx"


def test_the_result_is_read_the_second_time(quick, cache, caplog):
    count = quick(reasons={"sample": "ids differ"})
    first = cached.load_or_check(job())
    assert first.reasons == {"attention": None, "sample": "ids differ", "linear": None}
    assert "checking the kernels" in caplog.text
    caplog.clear()
    children = count()
    again = cached.load_or_check(job())
    assert again == first and again.tiles == [((0, 64, 32, 1), Tile(16, 32, 4, 3, True))]
    assert count() == children and not caplog.records
    (path,) = cache.glob("gpu-*.json")
    assert not list(cache.glob("result-*"))
    ((key, shown, is_current),) = cached.results_for(CPU)
    assert shown.reasons == first.reasons and key["gpu"] == "cpu"
    assert is_current and str(path).startswith(str(native.cache_folder()))
    assert cached.results_for(torch.device("meta")) == []  # the results of another device


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"{", b"[]", b"null",
        b'{"key": {}, "result": {}}',
    ],
)  # fmt: skip
def test_a_damaged_result_is_measured_again(quick, cache, damage):
    count = quick()
    cached.load_or_check(job())
    (path,) = cache.glob("gpu-*.json")
    path.write_bytes(damage)
    assert cached.results_for(CPU) == []
    assert cached.load_or_check(job()).passed == ["attention", "sample", "linear"]
    assert count() == 2
    assert json.loads(path.read_bytes())["result"]["reasons"]["linear"] is None


@pytest.mark.parametrize(
    "change",
    [
        {"reasons": {"attention": None, "linear": None}},
        {"reasons": {"attention": None, "linear": None, "sample": 1}},
        {"reasons": {"attention": None, "linear": None, "sample": None, "other": None}},
        {"tiles": [[1, 2]]},
    ],
)
def test_a_result_with_other_contents_is_measured_again(quick, cache, change):
    count = quick()
    cached.load_or_check(job())
    (path,) = cache.glob("gpu-*.json")
    kept = json.loads(path.read_bytes())
    path.write_text(json.dumps(kept | {"result": kept["result"] | change}))
    cached.load_or_check(job())
    assert count() == 2


def test_changed_sources_or_sizes_are_measured_again(quick, tmp_path, monkeypatch):
    """Changed sources or sizes are measured again.

    The sources are those of kernels, of the ops that define them, and of steps that run as graphs.
    """
    count = quick()
    monkeypatch.setattr(cached, "_PACKAGE", tmp_path)
    for name in (
        "common/device.py",
        "kernels/cuda/sample.py",
        "ops/sample.py",
        "options/graphs/decode_graphs.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1")
        cached.load_or_check(job())
    cached.load_or_check(job())
    assert count() == 4
    cached.load_or_check(replace(job(), dtype="bf16"))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    cached.load_or_check(job())
    assert count() == 6
    assert sum(is_current for _, _, is_current in cached.results_for(CPU)) == 1


def test_the_sources_of_all_that_checks_run_count():
    """All sources that the checks run are part of the key: everything that both programs import."""
    code = (
        "import sys, llama.gpu.graph_check\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('llama.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    files = {Path(x) for x in done.stdout.split()}
    assert cached._PACKAGE / "options" / "graphs" / "decode_graphs.py" in files
    assert files <= {path for place in cached._SOURCES for path in cached._PACKAGE.glob(place)}


def test_processes_that_want_it_at_once_measure_it_once(quick):
    count = quick(pause=0.5)
    threads = [threading.Thread(target=cached.load_or_check, args=(job(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert count() == 1


def test_short_memory_is_not_kept_as_a_fault_of_the_kernel(quick):
    count = quick(reasons={"sample": "out of memory"})
    assert (
        cached.load_or_check(job()).failed
        == cached.load_or_check(job()).failed
        == {"sample": "out of memory"}
    )
    assert count() == 6  # its kernel is tried again alone, and the next one in a new child


def test_a_folder_that_cannot_keep_it_is_one_warning(quick, cache):
    count = quick()
    cache.mkdir(parents=True, mode=0o700)
    cache.chmod(0o777)
    with pytest.warns(UserWarning, match="checked again in every process") as warned:
        assert cached.load_or_check(job()).passed
    assert len(warned) == 1 and count() == 1


def test_a_check_compiles_before_it_launches(tmp_path):
    """A check compiles before it launches.

    Threads compile for an absent GPU everything that a check launches, once each.
    """
    counted = compiled_ahead(replace(job("silu_mul"), dtype="bf16"), 2, tmp_path)
    assert (counted["kernels"], counted["launches"], counted["late"]) == (1, 2, [])


def test_triton_takes_the_arguments_of_every_launch(tmp_path):
    """Triton accepts the arguments of every launch.

    Outside its interpreter it makes a Python function of each kernel, with names of its own. A past
    fault: one of our argument names was among them, and no GPU could have sampled.
    """
    assert compiled_ahead(replace(job(*NAMES), vocab_size=2000, dtype="bf16"), 0, tmp_path)[
        "launches"
    ]


def compiled_ahead(job: Job, threads: int, folder: Path) -> dict:
    """Return the counts that the program prints.

    It does not need the CPU kernels, which g++ would compile again into this test's cache.
    """
    clean = environment(TRITON_CACHE_DIR=str(folder)) | {native.VARIABLE: "none"}
    clean.pop("TRITON_INTERPRET", None)
    program = PROGRAMS / "compile_ahead.py"
    command = [sys.executable, str(program), JOB.dump_json(job).decode(), str(threads)]
    done = warm.run(command, env=clean, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_gpu_that_takes_no_second_process_is_named():
    with pytest.raises(SystemExit, match=r"EXCLUSIVE_PROCESS\? nvidia-smi -c DEFAULT"):
        run(JOB.dump_json(replace(job("silu_mul"), device="cuda:0")).decode(), check_kernel)


class FakeDriver:
    """libcuda.so.1 of a machine with one GPU."""

    def __init__(self, mode: int, *, is_open: bool) -> None:
        self.values = {"mode": mode, "is_open": int(is_open)}

    def cuInit(self, flags: int) -> None:
        pass

    def cuDeviceGet(self, gpu: Any, index: int) -> None:
        assert index == 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, gpu: Any) -> None:
        assert attribute == 20
        value._obj.value = self.values["mode"]

    def cuDevicePrimaryCtxGetState(self, gpu: Any, flags: Any, active: Any) -> None:
        active._obj.value = self.values["is_open"]


@pytest.mark.parametrize(
    ("mode", "is_open", "is_closed"), [(3, True, True), (3, False, False), (0, True, False)]
)
def test_a_gpu_that_this_process_keeps_for_itself_is_named_at_once(
    quick, monkeypatch, mode, is_open, is_closed
):
    """A child that could not open the GPU is not started, and the reason names the remedy.

    It is so with several ranks, where nccl opens the GPU before the check. Stored results are used.
    """
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver(mode, is_open=is_open))
    asked = replace(job(), device="cuda:0")
    count = quick()
    result = cached.load_or_check(asked)
    if is_closed:
        assert count() == 0 and not result.is_final and {*result.failed} == {*asked.names}
        assert all("`nvidia-smi -c DEFAULT`" in reason for reason in result.failed.values())
        monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver(3, is_open=False))
        cached.load_or_check(asked)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver(3, is_open=True))
    assert not cached.load_or_check(asked).failed and count() == 1
