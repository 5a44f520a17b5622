"""OpenMP's threads sleep soon while cores are wanted, and spin while nobody else wants them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import llama.common.openmp
from helpers.launch import environment
from llama.common.openmp import ShortSpin, SpinController, idle_team_size, pressure_file

# CPU milliseconds of regions with a pause after each, in which spinning threads take the most:
# before, with brief waits, and after them; and the results of a product each time.
PROGRAM = """
import json, os, time, torch
from llama.common.openmp import ShortSpin, SpinController
torch.set_num_threads(2)
x = torch.arange(1 << 20) * 0.37

def cpu_ms():
    began = time.process_time()
    for _ in range(20):
        x.sum()
        time.sleep(0.03)
    return (time.process_time() - began) * 1e3

spin, sums = ShortSpin(), [float(x.sum())]
before, threads = cpu_ms(), len(os.listdir("/proc/self/task"))
spin.turn_on()
spin.turn_on()
started = len(os.listdir("/proc/self/task")) - threads
brief = cpu_ms()
sums.append(float(x.sum()))
spin.turn_off()
after = cpu_ms()
print(json.dumps({
    "before": before, "brief": brief, "after": after, "started": started, "sums": sums,
    "left": len(os.listdir("/proc/self/task")) - threads,
    "adapts": SpinController.for_this_process() is not None,
}))
"""


def run() -> dict:
    clean = {k: v for k, v in environment().items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=clean, capture_output=True, text=True, timeout=120,
        check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP, as torch for Linux brings it")
def test_threads_that_wait_sleep_soon_until_that_is_turned_off():
    """Waiting threads sleep soon until that is disabled.

    Waiting takes a small part of its former CPU time, with one idle team; then it is as before, and
    the team is gone.
    """
    said = run()
    assert said["started"] == idle_team_size(2, len(os.sched_getaffinity(0)))
    assert said["brief"] < said["before"] / 2 and said["brief"] < said["after"] / 2, said
    assert said["left"] == 0 and len(set(said["sums"])) == 1
    assert said["adapts"] == (pressure_file() is not None)


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP, as torch for Linux brings it")
def test_what_the_user_set_is_obeyed(monkeypatch):
    monkeypatch.setattr("llama.common.openmp.pressure_file", lambda: Path("/proc/uptime"))
    monkeypatch.setattr(SpinController, "_read", lambda controller: 0)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert SpinController.for_this_process() is not None
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert SpinController.for_this_process() is None


def test_waits_are_brief_while_tasks_wait_for_cores(tmp_path, monkeypatch):
    """Waits are brief while tasks wait for cores.

    They are enabled from a share of 0.3 of the time, disabled below 0.1, and unchanged in between;
    one check is made per 0.25 s; a file that cannot be read counts as idle.
    """
    file, now, total = tmp_path / "cpu.pressure", 100.0, 0.0
    monkeypatch.setattr(llama.common.openmp.time, "monotonic", lambda: now)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)

    class Recorded(ShortSpin):
        on = False

        def turn_on(self) -> None:
            self.on = True

        def turn_off(self) -> None:
            self.on = False

    def pass_time(seconds: float, share: float) -> bool:
        nonlocal now, total
        now, total = now + seconds, total + seconds * share * 1e6
        write(file, total)
        controller.poll()
        return spin.on

    write(file, total)
    spin = Recorded()
    controller = SpinController(file, spin)
    shares = [(0.3, 0.0), (0.3, 0.2), (0.3, 0.5), (0.3, 0.2), (0.3, 0.05), (0.2, 1.0), (0.1, 1.0)]
    assert [pass_time(*share) for share in shares] == [0, 0, 1, 1, 0, 0, 1]
    file.unlink()
    now += 1
    controller.poll()
    assert not spin.on


def write(file: Path, total_us: float) -> None:
    file.write_text(
        f"some avg10=0.00 avg60=0.00 avg300=0.00 total={int(total_us)}\n"
        "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    )


@pytest.mark.parametrize(
    ("threads", "cpus", "size"), [(2, 2, 2), (1, 2, 3), (4, 2, 2), (8, 16, 10)]
)
def test_the_team_is_no_larger_than_it_must_be(threads, cpus, size):
    assert idle_team_size(threads, cpus) == size
    assert threads + size - 1 > cpus and (size == 2 or threads + size - 2 <= cpus)
