"""The self-check and its stamp, with real children: some pass, some are wrong, hang or die."""

import json
import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton's kernels need Triton")

from llama.ops.cpu import native
from llama.ops.triton import children, kernels, stamp
from llama.ops.triton.cases import Sizes
from llama.ops.triton.check import Job

CPU = torch.device("cpu")
PROGRAMS = Path(__file__).resolve().parents[2] / "programs"
SIZES = Sizes(32, 4, 2, 8, 64, 300, 300, 16, 1e-5, lengths=(1, 15, 16, 17, 40))

# A child that finds that all is well, or what its own list says, and counts how often it was run.
QUICK_CHILD = """
import json, sys, time
with open({log!r}, "a") as log:
    log.write("x")
time.sleep({pause})
print(json.dumps({{"started": True}}), flush=True)
for name in json.loads(sys.argv[1])["names"]:
    tiles = {{"tiles": [[64, 32, 1, [16, 32]]]}} if name == "linear" else {{}}
    reason = {reasons!r}.get(name)
    is_final = reason != "out of memory"
    record = {{"kernel": name, "reason": reason, "is_final": is_final, **tiles}}
    print(json.dumps(record), flush=True)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "llama"


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """quick(pause=0, reasons={}): children are that program from now on -> how many have run."""
    log = tmp_path / "log"

    def install(pause: float = 0, reasons: dict[str, str] | None = None):
        program = tmp_path / "child.py"
        program.write_text(QUICK_CHILD.format(log=str(log), pause=pause, reasons=reasons or {}))
        monkeypatch.setattr(children, "CHILD", (str(program),))
        return lambda: len(log.read_text()) if log.exists() else 0

    return install


def job(*names: str) -> Job:
    return Job("cpu", "fp16", SIZES, names or ("attention", "sample", "linear"))


def test_a_job_is_the_same_after_its_way_to_a_child():
    assert Job.from_json(job().to_json()) == job()


def test_the_sampling_kernel_passes_and_a_name_without_cases_does_not(monkeypatch):
    """The program itself, in Triton's interpreter. No g++: the CPU kernels are not for this."""
    monkeypatch.setenv("PATH", "")
    verdict = children.measure(job("sample", "made_up"))
    assert verdict.reasons == {"sample": None, "made_up": "there is no check for it"}


def test_what_is_wrong_dies_or_hangs_is_out_and_the_rest_in(monkeypatch):
    monkeypatch.setattr(children, "CHILD", (str(PROGRAMS / "kernel_checks.py"),))
    monkeypatch.setattr(children, "LIMIT_S", 3.0)
    names = ("attention", "add_norm", "rope_and_store", "silu_mul", "sample")
    verdict = stamp.settle(job(*names))
    assert verdict.passed == ["attention"]
    reasons = verdict.dropped
    assert reasons["add_norm"].startswith("three rows: result 0 is off by 0.")
    assert reasons["rope_and_store"] == "the check was ended by SIGKILL"
    assert reasons["silu_mul"] == "the check of it did not end within 3 s"
    assert reasons["sample"].startswith("three rows: result 0 is off by nan")
    assert stamp.kernel_set(torch.float16, verdict, kernels.NAMES).names == {"attention"}


def test_a_child_that_cannot_run_is_not_run_again_for_each_kernel(tmp_path, monkeypatch):
    program = tmp_path / "child.py"
    log = tmp_path / "log"
    program.write_text(f"import sys; open({str(log)!r}, 'a').write('x'); sys.exit('no torch')")
    monkeypatch.setattr(children, "CHILD", (str(program),))
    reasons = stamp.settle(job()).reasons
    assert set(reasons.values()) == {"the check ended with exit code 1: no torch"}
    assert log.read_text() == "x"
    stamp.settle(job())  # the remedy is not the kernels': nothing was kept
    assert log.read_text() == "xx"


def test_children_that_always_die_come_to_an_end(tmp_path, monkeypatch):
    program = tmp_path / "child.py"
    program.write_text("import os; print('{\"started\": true}', flush=True); os.abort()")
    monkeypatch.setattr(children, "CHILD", (str(program),))
    monkeypatch.setattr(children, "MAX_CHILDREN", 2)
    reasons = children.measure(job()).reasons
    assert list(reasons.values()) == [
        "the check was ended by SIGABRT",
        "the check was ended by SIGABRT",
        "not checked: 2 checks have ended before it",
    ]


def test_the_stamp_is_read_the_second_time(quick, cache, capfd):
    count = quick(reasons={"sample": "ids differ"})
    first = stamp.settle(job())
    assert first.reasons == {"attention": None, "sample": "ids differ", "linear": None}
    assert "checking the kernels" in capfd.readouterr().err
    again = stamp.settle(job())
    assert again.reasons == first.reasons and again.tiles == [(64, 32, 1, (16, 32))]
    assert count() == 1 and capfd.readouterr().err == ""
    (path,) = cache.glob("gpu-*.json")
    assert not list(cache.glob("stamp-*"))
    ((key, shown),) = stamp.stamps()
    assert shown.reasons == first.reasons and key["gpu"] == "cpu"
    assert stamp.is_current(key, CPU) and str(path).startswith(str(native.cache_folder()))


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"{", b"[]", b"null",
        b'{"key": {}, "reasons": {}, "tiles": []}',
    ],
)  # fmt: skip
def test_a_damaged_stamp_is_measured_again(quick, cache, damage):
    count = quick()
    stamp.settle(job())
    (path,) = cache.glob("gpu-*.json")
    path.write_bytes(damage)
    assert stamp.stamps() == []
    assert stamp.settle(job()).passed == ["attention", "sample", "linear"]
    assert count() == 2
    assert json.loads(path.read_bytes())["reasons"]["linear"] is None


@pytest.mark.parametrize(
    "change",
    [
        {"reasons": {"attention": None, "linear": None}},
        {"reasons": {"attention": None, "linear": None, "sample": 1}},
        {"reasons": {"attention": None, "linear": None, "sample": None, "other": None}},
        {"tiles": [[1, 2]]},
    ],
)
def test_a_stamp_with_other_contents_is_measured_again(quick, cache, change):
    count = quick()
    stamp.settle(job())
    (path,) = cache.glob("gpu-*.json")
    path.write_text(json.dumps(json.loads(path.read_bytes()) | change))
    stamp.settle(job())
    assert count() == 2


def test_changed_sources_or_sizes_are_measured_again(quick, tmp_path, monkeypatch):
    count = quick()
    sources = tmp_path / "ops" / "gpu"
    sources.mkdir(parents=True)
    (sources / "sample.py").write_text("x = 1")
    monkeypatch.setattr(stamp, "_SOURCES", sources)
    stamp.settle(job())
    (sources / "sample.py").write_text("x = 2")
    stamp.settle(job())
    (sources.parent / "sample.py").write_text("the definition")
    stamp.settle(job())
    stamp.settle(Job("cpu", "bf16", SIZES, job().names))
    assert count() == 4
    assert sum(stamp.is_current(key, CPU) for key, _ in stamp.stamps()) == 2


def test_processes_that_want_it_at_once_measure_it_once(quick):
    count = quick(pause=0.5)
    threads = [threading.Thread(target=stamp.settle, args=(job(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert count() == 1


def test_short_memory_is_not_kept_as_a_fault_of_the_kernel(quick):
    count = quick(reasons={"sample": "out of memory"})
    assert stamp.settle(job()).dropped == stamp.settle(job()).dropped == {"sample": "out of memory"}
    assert count() == 2


def test_a_folder_that_cannot_keep_it_is_one_warning(quick, cache):
    count = quick()
    cache.mkdir(parents=True, mode=0o700)
    cache.chmod(0o777)
    with pytest.warns(UserWarning, match="checked again in every process") as warned:
        assert stamp.settle(job()).passed
    assert len(warned) == 1 and count() == 1


def test_python_finds_this_package_whatever_the_folder(tmp_path, monkeypatch):
    """A folder named llama, as in Meta's clone, is not what the child runs."""
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "__init__.py").write_text("raise SystemExit('the wrong package')")
    monkeypatch.chdir(tmp_path)
    assert children.measure(job("made_up")).reasons == {"made_up": "there is no check for it"}
