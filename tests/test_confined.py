"""The child process with limits: what ends it, and that nothing of it is left."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.waiting import wait_until
from llama.common.confined import Confined, ConfinedError, ConfinedPool, LimitError

CHILD = """
import os, re, signal, sys, time
from llama.common.confined import answer_requests

def answer(request):
    if request == "spin":
        while True:
            pass
    if request == "regex":
        re.match("(a+)+b", "a" * 40)
    if request == "memory":
        return len(bytearray(10**9))
    if request == "sleep":
        time.sleep(99)
    if request == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if request == "large":
        return "x" * 70_000_000
    if request == "raise":
        raise ValueError("no")
    if request == "print":
        print("noise", flush=True)
    if request == "exit":
        os._exit(3)
    return request

answer_requests(answer)
"""


@pytest.fixture
def process(tmp_path, monkeypatch) -> Iterator[Confined]:
    (tmp_path / "confined_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    made = Confined("confined_child", cpu_s=1, memory_mb=250, wait_s=60)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ("spin", "more than 1 s of processor time"),
        ("regex", "more than 1 s of processor time"),
        ("memory", "more than 250 MiB of memory"),
        ("sleep", "more than 2 s"),
        ("stop", "more than 2 s"),
        ("large", "more than (64|250) MiB"),
        ("exit", "ended with code 3"),
    ],
)
def test_a_limit_ends_a_request_and_the_next_one_is_answered(process, request_, message):
    assert process.call({"a": [1, "é\ud800", None]}) == {"a": [1, "é\ud800", None]}
    if "more than 2 s" in message:
        process._wait_s = 2
    with pytest.raises(LimitError, match=message):
        process.call(request_)
    process._wait_s = 60
    assert process.call("next") == "next"


def test_an_error_and_output_do_not_end_the_process(process):
    pid = process.call("first") and process._process.pid
    with pytest.raises(ConfinedError, match=r"^no$"):
        process.call("raise")
    assert process.call("print") == "print"
    assert process.call("x" * 1_000_000) == "x" * 1_000_000
    assert process._process.pid == pid


def test_the_working_directory_is_not_imported_from(process, tmp_path, monkeypatch):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "json.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(folder)
    assert process.call("a") == "a"


def test_requests_of_several_threads_take_turns(process):
    answers: dict[int, object] = {}
    threads = [
        threading.Thread(target=lambda i=i: answers.update({i: process.call(i)})) for i in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: i for i in range(20)}


def test_a_slow_request_holds_up_no_other_process(process):
    pool = ConfinedPool("confined_child", 3, cpu_s=1, memory_mb=250, wait_s=60)

    def be_slow() -> None:
        with contextlib.suppress(LimitError):  # it is killed in the end
            pool.call("sleep")

    slow = [threading.Thread(target=be_slow) for _ in range(2)]
    for thread in slow:
        thread.start()
    wait_until(lambda: len(pool._idle) == 1)
    for i in range(5):
        assert pool.call(i) == i
    assert all(thread.is_alive() for thread in slow) and pool._processes[2]._process is not None
    for each in pool._processes[:2]:
        assert each._process is not None
        each._process.kill()
    for thread in slow:
        thread.join(30)
    pool.close()


def test_a_fork_has_a_process_of_its_own(process):
    own = process.call("a") and process._process.pid
    pid = os.fork()
    if not pid:
        is_new = process.call("b") == "b" and process._process.pid != own
        process.close()
        os._exit(0 if is_new else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert process.call("c") == "c" and process._process.pid == own


PARENT = """
import sys
from llama.common.confined import Confined
process = Confined("confined_child", cpu_s=9, memory_mb=250, wait_s=60)
process.call("a")
print(process._process.pid, flush=True)
if sys.argv[1] == "kill":
    sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_no_process_outlives_its_parent(process, tmp_path, end):
    program = tmp_path / "parent.py"
    program.write_text(textwrap.dedent(PARENT))
    parent = subprocess.Popen(
        [sys.executable, program, end], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    if end == "kill":
        parent.send_signal(signal.SIGKILL)
    with parent:
        parent.wait(30)
    wait_until(lambda: not Path(f"/proc/{child}/cmdline").exists() or not _is_alive(child))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
